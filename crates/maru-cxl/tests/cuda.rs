//! Host registration with the real driver. Ignored without a GPU; `MARU_REQUIRE_GPU=1` makes that a failure.

#![allow(clippy::unwrap_used, reason = "a test program, where a failure is a panic")]

mod common;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use common::{map_read_only, new_file_region, options, scratch};
use cudarc::driver::{CudaContext, result, sys};
use libtest_mimic::{Arguments, Trial};
use maru_cxl::{
    CreateOptions, CudaRegistrar, CxlError, DaxDevice, HostRegistrar, MapOptions, Mapping, Region,
    RegisterOptions, SlabPool,
};

const MIB: u64 = 1 << 20;

/// One case: a name and what to run.
type Case = (&'static str, fn(Arc<CudaRegistrar>));

const CASES: &[Case] = &[
    ("cuda::c07_every_slab_of_a_pool_in_pieces_can_be_copied", pieces),
    ("cuda::c15_the_device_writes_through_the_address_it_was_given", device_address),
    ("cuda::c20_a_range_registered_already_is_refused_and_nothing_lingers", registered_twice),
    ("cuda::c20_a_read_only_mapping_is_registered_or_explained", read_only),
    ("cuda::c20_a_file_on_a_disk_is_refused_with_the_remedy", disk),
    ("cuda::the_callers_context_stays_current", context),
    ("cuda::after_teardown_the_range_can_be_registered_again", again),
];

/// The cases look at what is current on the thread and at errors that linger, so they take turns.
static TURN: Mutex<()> = Mutex::new(());

fn main() -> ExitCode {
    let args = Arguments::from_args();
    let required = std::env::var_os("MARU_REQUIRE_GPU").is_some_and(|value| value == "1");
    let registrar = CudaRegistrar::open(0).map(Arc::new);
    if let Err(error) = &registrar
        && required
        && !args.list
    {
        eprintln!("MARU_REQUIRE_GPU=1, but {error}");
        return ExitCode::FAILURE;
    }
    let trials = CASES.iter().map(|&(name, run)| {
        let registrar = registrar.as_ref().ok().cloned();
        let ignored = registrar.is_none();
        let trial = Trial::test(name, move || {
            let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            run(registrar.ok_or("no GPU")?);
            Ok(())
        });
        trial.with_ignored_flag(ignored)
    });
    libtest_mimic::run(&args, trials.collect()).exit_code()
}

fn required() -> RegisterOptions {
    RegisterOptions { required: true, ..RegisterOptions::default() }
}

/// Copies a slab to the device and back, and compares.
fn round_trip(registrar: &CudaRegistrar, slab: &maru_cxl::Slab, mark: u8) {
    let context = registrar.context();
    context.bind_to_thread().unwrap();
    let len = usize::try_from(slab.len()).unwrap();
    slab.write_at(0, &vec![mark; len]).unwrap();
    // SAFETY: a device buffer of `len` bytes, freed below.
    let device = unsafe { result::malloc_sync(len) }.unwrap();
    // SAFETY: both sides have `len` bytes.
    unsafe { sys::cuMemcpyHtoD_v2(device, slab.addr().as_ptr().cast(), len) }.result().unwrap();
    slab.write_at(0, &vec![!mark; len]).unwrap();
    // SAFETY: both sides have `len` bytes.
    unsafe { sys::cuMemcpyDtoH_v2(slab.addr().as_ptr().cast(), device, len) }.result().unwrap();
    // SAFETY: allocated above, used no more.
    unsafe { result::free_sync(device) }.unwrap();
    let mut bytes = vec![0; len];
    slab.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == mark));
}

/// A kernel of the driver's own writes the slab through its device address.
fn device_fill(registrar: &CudaRegistrar, slab: &maru_cxl::Slab, mark: u8) {
    registrar.context().bind_to_thread().unwrap();
    let len = usize::try_from(slab.len()).unwrap();
    // SAFETY: the slab is registered and has `len` bytes at that address.
    unsafe { result::memset_d8_sync(slab.device_addr().unwrap(), mark, len) }.unwrap();
    registrar.quiesce().unwrap();
    let mut bytes = vec![0; len];
    slab.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == mark));
}

/// Case C07: cap 4 MiB, region 10 MiB, slab 3 MiB; one copy of each slab, and one launch.
fn pieces(registrar: Arc<CudaRegistrar>) {
    let dir = scratch();
    let (_path, region) = new_file_region(&dir, 10 * MIB);
    let pool = SlabPool::create(region, options(3 * MIB - 100)).unwrap();
    assert!(pool.register(registrar.clone(), 4 * MIB, true).unwrap().is_registered());
    let mut slabs = 0;
    while let Some(slab) = pool.alloc().unwrap() {
        round_trip(&registrar, &slab, 0x31 + slabs);
        device_fill(&registrar, &slab, 0x41 + slabs);
        slabs += 1;
        pool.publish(&slab, &common::key(slab.index()), 1, 0, None).unwrap();
    }
    assert!(slabs >= 2);
}

fn device_address(registrar: Arc<CudaRegistrar>) {
    let dir = scratch();
    let (_path, region) = new_file_region(&dir, 4 * MIB);
    region.register(registrar.clone(), required()).unwrap();
    device_fill(&registrar, &region.slab(MIB + 3, 12_345).unwrap(), 0x77);
}

fn registered_twice(registrar: Arc<CudaRegistrar>) {
    let region = Region::anonymous(4 * MIB).unwrap();
    // Behind the library's back.
    let base = region.base();
    registrar.register(base, 4 << 20, maru_cxl::Access::ReadWrite).unwrap();
    match region.register(registrar.clone(), required()).unwrap_err() {
        CxlError::Registration { failure, .. } => assert_eq!(failure.code, 712, "{failure}"),
        other => panic!("{other}"),
    }
    registrar.unregister(base).unwrap();
    assert_eq!(registrar.unregister(base).unwrap_err().code, 713);
    // The next calls on this thread succeed.
    region.register(registrar.clone(), required()).unwrap();
    device_fill(&registrar, &region.slab(0, MIB).unwrap(), 1);
}

fn read_only(registrar: Arc<CudaRegistrar>) {
    let dir = scratch();
    let (path, writable) = new_file_region(&dir, 4 * MIB);
    writable.slab(0, 4).unwrap().write_at(0, b"read").unwrap();
    let region = map_read_only(&path);
    match region.register(registrar.clone(), required()) {
        Ok(_) => println!("read-only host registration works here"),
        Err(error) => {
            let text = error.to_string();
            assert!(text.contains("read-only"), "{text}");
            println!("read-only host registration: {text}");
        }
    }
    writable.register(registrar.clone(), required()).unwrap();
    device_fill(&registrar, &writable.slab(MIB, MIB).unwrap(), 2);
}

fn disk(registrar: Arc<CudaRegistrar>) {
    let dir = tempfile::tempdir_in(std::env::current_dir().unwrap()).unwrap();
    let device = DaxDevice::create_file(dir.path().join("pool"), 4 * MIB, CreateOptions::default()).unwrap();
    let region = Region::new(Mapping::map(&device, &MapOptions::default()).unwrap());
    match region.register(registrar.clone(), required()) {
        Ok(_) => println!("{} can be registered here", region.backing()),
        Err(error) => {
            println!("{error}");
            assert!(error.to_string().contains("tmpfs"), "{error}");
        }
    }
    let other = Region::anonymous(MIB).unwrap();
    other.register(registrar.clone(), required()).unwrap();
    device_fill(&registrar, &other.slab(0, MIB).unwrap(), 3);
}

fn context(registrar: Arc<CudaRegistrar>) {
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle to a local.
        unsafe { sys::cuCtxGetCurrent(&raw mut context) }.result().unwrap();
        context
    };
    let thread = std::thread::spawn(move || {
        // A new thread has no current context, and still has none afterwards.
        assert!(current().is_null());
        let region = Region::anonymous(MIB).unwrap();
        region.register(registrar.clone(), required()).unwrap();
        assert!(current().is_null());
        drop(region);
        assert!(current().is_null());
        let _another = CudaRegistrar::open(0).unwrap();
        assert!(current().is_null());
        CudaContext::new(0).unwrap().bind_to_thread().unwrap();
        let mine = current();
        let region = Region::anonymous(MIB).unwrap();
        region.register(registrar, required()).unwrap();
        drop(region);
        assert_eq!(current(), mine);
    });
    thread.join().unwrap();
}

fn again(registrar: Arc<CudaRegistrar>) {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, 8 * MIB);
    for _ in 0..3 {
        region.register(registrar.clone(), required()).unwrap();
        assert!(region.unregister());
    }
    region.register(registrar.clone(), required()).unwrap();
    drop(region);
    let region = common::map(&path);
    region.register(registrar.clone(), required()).unwrap();
    device_fill(&registrar, &region.slab(0, MIB).unwrap(), 4);
}
