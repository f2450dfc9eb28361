//! Cases that change the machine: only in one that is thrown away afterwards.

use std::fs;
use std::path::Path;
use std::process::Command;

use maru_cxl::{
    CreateOptions, CxlError, DaxDevice, MapOptions, Mapping, OpenOptions, PoolOptions, Region, SlabPool,
};

use crate::ClosedCase;

pub(crate) const CASES: &[ClosedCase] = &[
    ("throwaway::a_full_tmpfs_is_an_error_with_numbers_and_no_signal", full_tmpfs),
    ("throwaway::a_sparse_file_on_a_full_tmpfs_is_an_error_and_no_signal", sparse_on_full_tmpfs),
    ("throwaway::c22_permission_denied_is_said_as_such", permission),
    ("throwaway::c22_an_unbound_device_is_explained", unbound),
    ("throwaway::every_alignment_the_kernel_offers_works", alignments),
    ("throwaway::a_pool_made_under_another_alignment_is_found_out", realigned),
    ("throwaway::files_on_hugetlbfs_map_in_huge_pages", huge),
];

/// A tmpfs of 4 MiB, unmounted when dropped.
struct Tmpfs(&'static str);

impl Tmpfs {
    fn mount(at: &'static str) -> Self {
        fs::create_dir_all(at).unwrap();
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "tmpfs", at]).status().unwrap();
        assert!(mounted.success());
        Self(at)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        Path::new(self.0).join(name)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

const MIB: u64 = 1 << 20;

fn full_tmpfs(_: &Path) {
    let small = Tmpfs::mount("/tmp/small");
    let first = DaxDevice::create_file(small.path("first"), 3 * MIB, CreateOptions::default()).unwrap();
    match DaxDevice::create_file(small.path("second"), 2 * MIB, CreateOptions::default()).unwrap_err() {
        CxlError::NoSpace { wanted, free, .. } => assert_eq!((wanted, free), (2 * MIB, MIB)),
        other => panic!("{other}"),
    }
    assert!(!small.path("second").exists());
    // What was reserved can be used to the last byte.
    let region = Region::new(Mapping::map(&first, &MapOptions::default()).unwrap());
    region.slab(0, 3 * MIB).unwrap().write_at(0, &vec![1; 3 << 20]).unwrap();
}

fn sparse_on_full_tmpfs(_: &Path) {
    let small = Tmpfs::mount("/tmp/sparse");
    fs::write(small.path("filler"), vec![1; 3 << 20]).unwrap();
    fs::File::create(small.path("sparse")).unwrap().set_len(2 * MIB).unwrap();
    let error = DaxDevice::open(small.path("sparse")).unwrap_err();
    assert!(matches!(error, CxlError::NoSpace { wanted, .. } if wanted == 2 * MIB), "{error}");
    fs::remove_file(small.path("filler")).unwrap();
    let device = DaxDevice::open(small.path("sparse")).unwrap();
    let region =
        Region::new(Mapping::map(&device, &MapOptions { prefault: false, ..MapOptions::default() }).unwrap());
    // The file system is filled up after the space was reserved.
    fs::write(small.path("filler"), vec![1; 2 << 20]).unwrap();
    region.slab(0, 2 * MIB).unwrap().write_at(0, &vec![2; 2 << 20]).unwrap();
}

fn permission(device: &Path) {
    // Become somebody who may not: in a child, which shares nothing with the other cases.
    let me = std::env::current_exe().unwrap();
    let open = Command::new(me)
        .env("MARU_CXL_TEST_CHILD", "reader")
        .env("MARU_DAX_DEV", device)
        .as_nobody()
        .output()
        .unwrap();
    assert!(!open.status.success());
    let text = String::from_utf8_lossy(&open.stderr).into_owned();
    assert!(text.contains("PermissionDenied"), "{text}");
}

trait AsNobody {
    fn as_nobody(&mut self) -> &mut Self;
}

impl AsNobody for Command {
    fn as_nobody(&mut self) -> &mut Self {
        use std::os::unix::process::CommandExt as _;
        self.uid(65534).gid(65534)
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

/// Takes the device away from its driver. Nothing may have it open: the kernel would warn about that later.
fn unbind(name: &str) {
    fs::write("/sys/bus/dax/drivers/device_dax/unbind", name).unwrap();
}

fn unbound(path: &Path) {
    let name = name(path);
    unbind(&name);
    let error = DaxDevice::open(path).unwrap_err();
    assert_eq!(error.kind(), "not_available");
    assert!(error.to_string().contains("not bound"), "{error}");
    let info = DaxDevice::scan().unwrap().into_iter().find(|info| info.path == path).unwrap();
    assert!(info.problems[0].contains("daxctl reconfigure-device"), "{:?}", info.problems);
    rebind(&name);
    DaxDevice::open(path).unwrap();
}

fn rebind(name: &str) {
    // A bare bind is ENODEV on newer kernels, where new_id binds by itself.
    if fs::write("/sys/bus/dax/drivers/device_dax/bind", name).is_err() {
        fs::write("/sys/bus/dax/drivers/device_dax/new_id", name).unwrap();
    }
}

fn set_align(path: &Path, align: u64) {
    let name = name(path);
    unbind(&name);
    fs::write(format!("/sys/bus/dax/devices/{name}/align"), align.to_string()).unwrap();
    rebind(&name);
}

fn alignments(path: &Path) {
    let before = DaxDevice::open(path).unwrap().align();
    for align in [4096, before] {
        set_align(path, align);
        let now = DaxDevice::open(path).unwrap();
        assert_eq!(now.align(), align);
        let mapping =
            Mapping::map(&now, &MapOptions { offset: align, len: align, ..MapOptions::default() }).unwrap();
        assert_eq!((mapping.offset(), mapping.len()), (align, align));
    }
}

fn map(path: &Path) -> Region {
    Region::new(Mapping::map(&DaxDevice::open(path).unwrap(), &MapOptions::default()).unwrap())
}

fn realigned(path: &Path) {
    let before = DaxDevice::open(path).unwrap().align();
    let options = PoolOptions { slab_bytes: MIB, ..PoolOptions::default() };
    let forced = PoolOptions { force: true, ..options };
    let uuid = SlabPool::create(map(path), forced).unwrap().info().uuid;
    set_align(path, 4096);
    // The place of the directory is blank now, and yet this is no fresh memory.
    map(path).slab(4096, 4096).unwrap().write_at(0, &[0; 4096]).unwrap();
    match SlabPool::create(map(path), options).unwrap_err() {
        CxlError::PoolExists { uuid: found, .. } => assert_eq!(found, uuid.to_string()),
        other => panic!("{other}"),
    }
    let text = SlabPool::open(map(path), OpenOptions::default()).unwrap_err().to_string();
    assert!(text.contains(&format!("alignment was {before}")), "{text}");
    drop(SlabPool::create(map(path), forced).unwrap());
    set_align(path, before);
    // The old one was ended, so it does not come back.
    assert!(SlabPool::open(map(path), OpenOptions::default()).is_err());
}

fn huge(_: &Path) {
    const HUGE: u64 = 2 * MIB;
    fs::write("/proc/sys/vm/nr_hugepages", "8").unwrap();
    fs::create_dir_all("/tmp/huge").unwrap();
    let mounted = Command::new("mount").args(["-t", "hugetlbfs", "hugetlbfs", "/tmp/huge"]).status().unwrap();
    assert!(mounted.success());
    let path = Path::new("/tmp/huge/pool");
    let device = DaxDevice::create_file(path, 4 * HUGE, CreateOptions::default()).unwrap();
    assert_eq!((device.align(), device.len()), (HUGE, 4 * HUGE));
    let options = MapOptions { offset: 4096, ..MapOptions::default() };
    assert!(matches!(Mapping::map(&device, &options), Err(CxlError::Misaligned { align: HUGE, .. })));
    let options = PoolOptions { slab_bytes: MIB, ..PoolOptions::default() };
    let pool = SlabPool::create(map(path), options).unwrap();
    assert_eq!(pool.info().directory_offset, HUGE);
    pool.alloc().unwrap().unwrap().write_at(0, &vec![1; 1 << 20]).unwrap();
    drop((pool, device));
    // More than there are pages is an error, not a signal.
    let error = DaxDevice::create_file("/tmp/huge/more", 16 * HUGE, CreateOptions::default()).unwrap_err();
    assert_eq!(error.kind(), "no_space", "{error}");
    fs::remove_file(path).unwrap();
    assert!(Command::new("umount").arg("/tmp/huge").status().unwrap().success());
    fs::write("/proc/sys/vm/nr_hugepages", "0").unwrap();
}
