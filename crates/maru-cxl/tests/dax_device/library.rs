//! This crate on a device-dax node.

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use maru_cxl::{
    Coherence, CxlError, DaxDevice, DeviceHeader, HeaderState, MapOptions, Mapping, Mode, OpenOptions,
    PoolOptions, Region, RegisterOptions, ScriptedRegistrar, SlabPool,
};

use crate::Case;
use crate::common::{key, writable};

pub(crate) const CASES: &[Case] = &[
    ("library::size_and_alignment_are_those_of_sysfs", attributes),
    ("library::scan_lists_the_device_as_ready", scan),
    ("library::c14_ranges_are_checked_before_the_kernel_sees_them", ranges),
    ("library::the_whole_device_is_prefaulted_by_several_threads", prefault),
    ("library::first_and_last_word_of_every_unit_read_back", words),
    ("library::a_read_only_mapping_reads_and_refuses_writes", read_only),
    ("library::bytes_outlive_the_mapping", persistence),
    ("library::probing_mapped_memory_finds_no_fault", probe),
    ("library::a_pool_lies_behind_its_header_unit", pool),
    ("library::foreign_bytes_are_not_overwritten", foreign),
    ("library::a_second_writer_is_refused", second_writer),
    ("library::a_pool_at_an_offset_has_no_device_header", at_offset),
    ("library::another_process_sees_what_is_published", two_processes),
    ("library::a_killed_writer_leaves_no_lock", killed_writer),
    ("library::cache_lines_can_be_flushed_and_dropped", coherence),
    ("library::pieces_end_on_slab_borders", registration),
    ("library::removing_a_device_as_a_file_does_nothing", remove),
];

const MIB: u64 = 1 << 20;

fn map(device: &DaxDevice) -> Region {
    map_part(device, 0, 0).unwrap()
}

fn map_part(device: &DaxDevice, offset: u64, len: u64) -> Result<Region, CxlError> {
    Mapping::map(device, &MapOptions { offset, len, ..MapOptions::default() }).map(Region::new)
}

/// Clears the header and the directory, under this and other alignments, as on fresh memory.
fn wipe(device: &DaxDevice) {
    let region = map(device);
    for offset in [0, 4096, 2 * MIB, device.align()] {
        region.slab(offset, 4096).unwrap().write_at(0, &[0; 4096]).unwrap();
    }
}

fn fresh_pool(device: &DaxDevice, slab_bytes: u64) -> SlabPool {
    wipe(device);
    SlabPool::create(map(device), PoolOptions { slab_bytes, ..PoolOptions::default() }).unwrap()
}

fn attributes(device: &DaxDevice) {
    let name = device.path().file_name().unwrap().to_str().unwrap().to_owned();
    let read = |file| std::fs::read_to_string(format!("/sys/bus/dax/devices/{name}/{file}")).unwrap();
    assert_eq!(device.len().to_string(), read("size").trim());
    assert_eq!(device.align().to_string(), read("align").trim());
    assert!(device.len() >= 4 * device.align());
}

fn scan(device: &DaxDevice) {
    wipe(device);
    let find = || {
        let all = DaxDevice::scan().unwrap();
        all.into_iter().find(|info| info.path == device.path()).expect("the device is listed")
    };
    let info = find();
    assert_eq!(info.problems, Vec::<String>::new());
    assert_eq!((info.size, info.align), (Some(device.len()), Some(device.align())));
    assert_eq!((info.mode, info.header), (Mode::DevDax, Some(HeaderState::Blank)));
    let pool = fresh_pool(device, MIB);
    let Some(HeaderState::Present(header)) = find().header else { panic!("no header") };
    assert_eq!(header.uuid, pool.info().device_uuid);
}

fn ranges(device: &DaxDevice) {
    let (len, align) = (device.len(), device.align());
    if align > 4096 {
        assert!(matches!(map_part(device, 4096, align), Err(CxlError::Misaligned { .. })));
        let rounded = map_part(device, 0, align + 4096).unwrap();
        assert_eq!(rounded.len(), 2 * align);
    }
    for (offset, bytes) in
        [(len, 0), (len - align, 2 * align), (0, len + 1), (u64::MAX - align + 1, 2 * align)]
    {
        assert!(
            matches!(map_part(device, offset, bytes), Err(CxlError::OutOfBounds { size, .. }) if size == len)
        );
    }
    assert_eq!(map_part(device, len - align, 1).unwrap().len(), align);
}

fn prefault(device: &DaxDevice) {
    let done = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&done);
    let progress: maru_cxl::Progress = Arc::new(move |bytes, _| {
        seen.fetch_max(bytes, Ordering::Relaxed);
    });
    let options = MapOptions { prefault_threads: 3, progress: Some(progress), ..MapOptions::default() };
    let mapping = Mapping::map(device, &options).unwrap();
    assert_eq!(mapping.len(), device.len());
    assert_eq!(mapping.base().addr().get() as u64 % device.align(), 0);
    assert_eq!(done.load(Ordering::Relaxed), device.len());
}

fn words(device: &DaxDevice) {
    let (region, align) = (map(device), device.align());
    let places = (0..device.len() / align).flat_map(|unit| [unit * align, (unit + 1) * align - 8]);
    for place in places.clone() {
        region.slab(place, 8).unwrap().write_at(0, &(place ^ 0x5eed).to_le_bytes()).unwrap();
    }
    for place in places {
        let mut bytes = [0; 8];
        region.slab(place, 8).unwrap().read_at(0, &mut bytes).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), place ^ 0x5eed);
    }
}

fn read_only(device: &DaxDevice) {
    map(device).slab(100, 4).unwrap().write_at(0, b"read").unwrap();
    let options = MapOptions { read_only: true, ..MapOptions::default() };
    let slab = Region::new(Mapping::map(device, &options).unwrap()).slab(100, 4).unwrap();
    let mut bytes = [0; 4];
    slab.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"read");
    assert!(matches!(slab.write_at(0, b"x"), Err(CxlError::ReadOnly { .. })));
}

fn persistence(device: &DaxDevice) {
    let place = device.len() - 64;
    map(device).slab(place, 4).unwrap().write_at(0, b"stay").unwrap();
    let again = DaxDevice::open(device.path()).unwrap();
    let mut bytes = [0; 4];
    map(&again).slab(place, 4).unwrap().read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"stay");
}

fn probe(device: &DaxDevice) {
    let region = map(device);
    region.slab(0, region.len()).unwrap().probe().unwrap();
    region.slab(12_345, 1).unwrap().probe().unwrap();
}

fn pool(device: &DaxDevice) {
    let pool = fresh_pool(device, 3 * MIB + 7);
    let info = *pool.info();
    assert_eq!(info.directory_offset, device.align(), "header and data share no unit");
    assert_eq!(info.region_bytes, device.len());
    let slab = pool.alloc().unwrap().unwrap();
    slab.write_at(0, &vec![0xa5; 3 << 20]).unwrap();
    pool.publish(&slab, &key(1), 3 * MIB, 42, Some(43)).unwrap();
    drop((slab, pool));
    let again = SlabPool::open(map(device), writable()).unwrap();
    assert_eq!(again.info(), &info);
    let found = again.lookup(&key(1)).unwrap().unwrap();
    assert_eq!((found.len(), found.fingerprint(), found.checksum()), (3 * MIB, 42, Some(43)));
    let mut bytes = vec![0; 3 << 20];
    found.slab().read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0xa5));
    drop((found, again));
    let error =
        SlabPool::create(map(device), PoolOptions { slab_bytes: MIB, ..PoolOptions::default() }).unwrap_err();
    assert!(matches!(error, CxlError::PoolExists { .. }), "{error}");
}

fn foreign(device: &DaxDevice) {
    wipe(device);
    let region = map(device);
    region.slab(0, 8).unwrap().write_at(0, b"\x93FAMFS\x01\x02").unwrap();
    let options = PoolOptions { slab_bytes: MIB, ..PoolOptions::default() };
    assert!(matches!(SlabPool::create(region.clone(), options), Err(CxlError::ForeignHeader { .. })));
    assert!(matches!(DeviceHeader::read(&region).unwrap(), HeaderState::Foreign(_)));
    wipe(device);
}

fn second_writer(device: &DaxDevice) {
    let pool = fresh_pool(device, MIB);
    let again = DaxDevice::open(device.path()).unwrap();
    match SlabPool::open(map(&again), writable()).unwrap_err() {
        CxlError::PoolLocked { holder, .. } => assert_eq!(holder, Some(std::process::id())),
        other => panic!("{other}"),
    }
    drop(pool);
    SlabPool::open(map(&again), writable()).unwrap();
}

fn at_offset(device: &DaxDevice) {
    wipe(device);
    let half = device.len() / 2 / device.align() * device.align();
    let region = map_part(device, half, 0).unwrap();
    let options = PoolOptions { slab_bytes: MIB, force: true, ..PoolOptions::default() };
    let second = SlabPool::create(region, options).unwrap();
    assert_eq!(second.info().directory_offset, 0);
    let first = SlabPool::create(map_part(device, 0, half).unwrap(), options).unwrap();
    assert_eq!(first.info().directory_offset, device.align());
    assert_eq!(DeviceHeader::read(first.region()).is_ok(), DeviceHeader::read(second.region()).is_err());
}

/// What the second process does, if this is one. Its role and the device come in the environment.
pub(crate) fn child() -> Option<ExitCode> {
    let role = std::env::var("MARU_CXL_TEST_CHILD").ok()?;
    let device = DaxDevice::open(std::env::var_os("MARU_DAX_DEV")?).unwrap();
    match role.as_str() {
        "reader" => {
            let pool = SlabPool::open(map(&device), OpenOptions::default()).unwrap();
            let found = pool.lookup(&key(7)).unwrap().expect("published by the parent");
            let mut bytes = [0; 4096];
            found.slab().read_at(0, &mut bytes).unwrap();
            assert!(found.still_valid());
            assert!(bytes.iter().all(|&byte| byte == 0x77));
            // The parent reads this place after the child has ended.
            pool.region().slab(device.len() - 8, 8).unwrap().write_at(0, b"seen it!").unwrap();
        }
        "writer" => {
            let pool = SlabPool::open(map(&device), writable()).unwrap();
            let slab = pool.alloc().unwrap().unwrap();
            pool.publish(&slab, &key(8), 5, 0, None).unwrap();
            // Dies with the lock held and a slab allocated.
            std::process::abort();
        }
        // As on fresh memory, for whoever uses the device next.
        "blank" => wipe(&device),
        other => panic!("unknown role {other}"),
    }
    Some(ExitCode::SUCCESS)
}

fn run_child(device: &DaxDevice, role: &str) -> std::process::ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .env("MARU_CXL_TEST_CHILD", role)
        .env("MARU_DAX_DEV", device.path())
        .status()
        .unwrap()
}

fn two_processes(device: &DaxDevice) {
    let pool = fresh_pool(device, MIB);
    let slab = pool.alloc().unwrap().unwrap();
    slab.write_at(0, &[0x77; 4096]).unwrap();
    pool.publish(&slab, &key(7), 4096, 0, None).unwrap();
    assert!(run_child(device, "reader").success());
    let mut bytes = [0; 8];
    pool.region().slab(device.len() - 8, 8).unwrap().read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"seen it!");
}

fn killed_writer(device: &DaxDevice) {
    drop(fresh_pool(device, MIB));
    assert!(!run_child(device, "writer").success());
    let pool = SlabPool::open(map(device), writable()).unwrap();
    assert_eq!(pool.stats().published, 1, "what it published stays");
    assert_eq!(pool.stats().free, pool.slab_count() - 1, "what it only held is free");
}

fn coherence(device: &DaxDevice) {
    wipe(device);
    let options = PoolOptions { slab_bytes: MIB, coherence: Coherence::Flush, ..PoolOptions::default() };
    let pool = SlabPool::create(map(device), options).unwrap();
    let open = OpenOptions { coherence: Coherence::Flush, ..OpenOptions::default() };
    let reader = SlabPool::open(map(&DaxDevice::open(device.path()).unwrap()), open).unwrap();
    for n in 0..8_u8 {
        let slab = pool.alloc().unwrap().unwrap();
        slab.write_at(0, &vec![n; 1 << 20]).unwrap();
        pool.publish(&slab, &key(n.into()), MIB, 0, None).unwrap();
        let found = reader.lookup(&key(n.into())).unwrap().unwrap();
        let mut bytes = vec![0xff; 1 << 20];
        found.slab().read_at(0, &mut bytes).unwrap();
        assert!(found.still_valid() && bytes.iter().all(|&byte| byte == n));
    }
}

fn registration(device: &DaxDevice) {
    let pool = fresh_pool(device, 3 * MIB);
    let driver = Arc::new(ScriptedRegistrar::new());
    pool.register(driver.clone(), 10 * MIB, true).unwrap();
    assert!(driver.registered().len() > 3);
    while let Some(slab) = pool.alloc().unwrap() {
        assert!(slab.device_addr().is_some());
        pool.publish(&slab, &key(slab.index()), 1, 0, None).unwrap();
    }
    assert_eq!(pool.stats().unusable, 0);
    let refused = Arc::new(ScriptedRegistrar::new().failing_at(1));
    pool.region().unregister();
    let error =
        pool.region().register(refused, RegisterOptions { required: true, ..RegisterOptions::default() });
    assert!(error.unwrap_err().to_string().contains("device-dax"), "the backing is named");
    drop(pool);
    assert!(driver.registered().is_empty());
}

fn remove(device: &DaxDevice) {
    device.remove_file().unwrap();
    assert!(device.path().exists());
}
