//! Device nodes as sysfs describes them, with a made-up sysfs. `/dev/zero` plays the device: it can be mapped
//! shared, and like a dax device its `stat` size is 0.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use maru_cxl::{
    CxlError, DaxDevice, DeviceKind, HeaderState, MapOptions, Mapping, Mode, PhysicalRange, Region,
};

const MIB: u64 = 1 << 20;

/// A sysfs that says `/dev/zero` (1:5) is the dax device `dax0.0`.
struct Sysfs {
    root: tempfile::TempDir,
}

impl Sysfs {
    fn new(size: &str, align: &str) -> Self {
        let sysfs = Self { root: common::scratch() };
        sysfs.add("dax0.0", "1:5", size, align, Some("device_dax"));
        sysfs
    }

    fn path(&self) -> &Path {
        self.root.path()
    }

    fn device(&self, name: &str) -> PathBuf {
        self.path().join("devices").join(name)
    }

    fn add(&self, name: &str, number: &str, size: &str, align: &str, driver: Option<&str>) {
        let dir = self.device(name);
        for dir in [&dir, &self.path().join("dev/char"), &self.path().join("bus/dax/devices")] {
            fs::create_dir_all(dir).expect("a directory");
        }
        for (file, text) in [("size", size), ("align", align), ("numa_node", "-1"), ("target_node", "2")] {
            fs::write(dir.join(file), format!("{text}\n")).expect("a file");
        }
        symlink("../../bus/dax", dir.join("subsystem")).expect("a link");
        self.bind(name, driver);
        symlink(&dir, self.path().join("dev/char").join(number)).expect("a link");
        symlink(&dir, self.path().join("bus/dax/devices").join(name)).expect("a link");
    }

    fn bind(&self, name: &str, driver: Option<&str>) {
        let link = self.device(name).join("driver");
        let _ = fs::remove_file(&link);
        if let Some(driver) = driver {
            symlink(format!("../../bus/dax/drivers/{driver}"), link).expect("a link");
        }
    }

    fn open(&self) -> Result<DaxDevice, CxlError> {
        DaxDevice::open_with_sysfs("/dev/zero", self.path())
    }
}

fn map(device: &DaxDevice, offset: u64, len: u64) -> Result<Mapping, CxlError> {
    Mapping::map(device, &MapOptions { offset, len, prefault: false, ..MapOptions::default() })
}

#[test]
fn everything_about_a_device_comes_from_sysfs() {
    let sysfs = Sysfs::new("67108864", "2097152");
    let device = sysfs.open().unwrap();
    assert_eq!(device.kind(), DeviceKind::Device);
    assert_eq!((device.len(), device.align()), (64 * MIB, 2 * MIB));
    assert_eq!((device.numa_node(), device.target_node()), (None, Some(2)));
}

#[test]
fn without_sysfs_a_character_device_is_no_dax_device() {
    let empty = common::scratch();
    let error = DaxDevice::open_with_sysfs("/dev/zero", empty.path()).unwrap_err();
    assert!(matches!(error, CxlError::WrongFileType { .. }), "{error}");
}

#[test]
fn a_device_of_another_subsystem_is_refused() {
    let sysfs = Sysfs::new("67108864", "2097152");
    let link = sysfs.device("dax0.0").join("subsystem");
    fs::remove_file(&link).unwrap();
    symlink("../../class/mem", link).unwrap();
    assert!(matches!(sysfs.open(), Err(CxlError::WrongFileType { .. })));
}

#[test]
fn a_link_to_a_dax_device_is_accepted() {
    let sysfs = Sysfs::new("67108864", "2097152");
    let link = sysfs.path().join("pool");
    symlink("/dev/zero", &link).unwrap();
    DaxDevice::open_with_sysfs(&link, sysfs.path()).unwrap();
}

/// Case C14, with its numbers: align 2 MiB, device 64 MiB.
#[test]
fn c14_misaligned_and_outside_ranges_state_alignment_or_size() {
    let sysfs = Sysfs::new("67108864", "2097152");
    let device = sysfs.open().unwrap();
    let text = map(&device, 4096, 2 * MIB).unwrap_err().to_string();
    assert!(text.contains("4096") && text.contains("2097152"), "{text}");
    for (offset, len) in
        [(62 * MIB, 4 * MIB), (u64::MAX - 2 * MIB + 1, 4 * MIB), (64 * MIB, 0), (0, 65 * MIB)]
    {
        let error = map(&device, offset, len).unwrap_err();
        assert!(matches!(error, CxlError::OutOfBounds { .. }), "{error}");
        assert!(error.to_string().contains("67108864"), "{error}");
    }
}

/// Case C14: a length that is no multiple is rounded up inside the device, and the true size reported.
#[test]
fn c14_a_length_is_rounded_up_inside_the_device() {
    let sysfs = Sysfs::new("67108864", "2097152");
    let device = sysfs.open().unwrap();
    assert_eq!(map(&device, 0, 3 * MIB).unwrap().len(), 4 * MIB);
    assert_eq!(map(&device, 62 * MIB, 1).unwrap().len(), 2 * MIB);
    assert_eq!(map(&device, 2 * MIB, 0).unwrap().len(), 62 * MIB);
}

#[test]
fn a_size_that_is_no_multiple_of_the_alignment_is_rounded_down() {
    let sysfs = Sysfs::new("5242880", "2097152");
    assert_eq!(sysfs.open().unwrap().len(), 4 * MIB);
}

/// Case C22: a node whose driver is not `device_dax`.
#[test]
fn c22_system_ram_and_unbound_devices_come_with_the_remedy() {
    let sysfs = Sysfs::new("67108864", "2097152");
    sysfs.bind("dax0.0", Some("kmem"));
    let error = sysfs.open().unwrap_err();
    assert_eq!(error.kind(), "not_available");
    let text = error.to_string();
    assert!(
        text.contains("system-ram") && text.contains("daxctl reconfigure-device --mode=devdax dax0.0"),
        "{text}"
    );
    sysfs.bind("dax0.0", None);
    assert!(sysfs.open().unwrap_err().to_string().contains("not bound"));
    sysfs.bind("dax0.0", Some("fsdev"));
    assert!(sysfs.open().unwrap_err().to_string().contains("no mmap"));
}

/// Case C22: the size printed as -1 by some kernels.
#[test]
fn c22_a_bad_size_is_an_error_not_two_to_the_64() {
    for size in ["0", "-1", "abc"] {
        let error = Sysfs::new(size, "2097152").open().unwrap_err();
        assert!(matches!(error, CxlError::BadAttribute { what: "size", .. }), "{error}");
        assert!(!error.to_string().contains("18446744073709551615"), "{error}");
    }
}

/// Pools lie behind it (`tests/pool.rs`, and `tests/dax_device.rs` on a real node).
#[test]
fn the_header_unit_of_a_device_is_one_alignment() {
    let sysfs = Sysfs::new("67108864", "2097152");
    let device = sysfs.open().unwrap();
    assert_eq!(Region::new(map(&device, 0, 0).unwrap()).header_unit(), 2 * MIB);
    let second = Region::new(map(&device, 2 * MIB, 0).unwrap());
    assert_eq!((second.header_unit(), second.device_offset()), (0, 2 * MIB));
}

#[test]
fn scanning_lists_every_device_with_what_is_wrong_with_it() {
    let sysfs = Sysfs::new("67108864", "2097152");
    sysfs.add("dax10.0", "1:50", "67108864", "2097152", Some("kmem"));
    sysfs.add("dax2.0", "1:51", "-1", "2097152", Some("device_dax"));
    sysfs.add("dax3.0", "1:52", "67108864", "2097152", Some("device_dax"));
    let mapping = sysfs.device("dax0.0").join("mapping0");
    fs::create_dir(&mapping).unwrap();
    fs::write(mapping.join("start"), "0x100000000\n").unwrap();
    fs::write(mapping.join("end"), "0x103ffffff\n").unwrap();
    let dev = common::scratch();
    symlink("/dev/zero", dev.path().join("dax0.0")).unwrap();
    let found = DaxDevice::scan_with_roots(sysfs.path(), dev.path()).unwrap();
    let names: Vec<_> = found.iter().map(|info| info.name.as_str()).collect();
    assert_eq!(names, ["dax0.0", "dax2.0", "dax3.0", "dax10.0"]);
    assert_eq!((found[0].size, found[0].align), (Some(64 * MIB), Some(2 * MIB)));
    assert_eq!(found[0].problems, Vec::<String>::new());
    assert_eq!(found[0].header, Some(HeaderState::Blank));
    assert_eq!(found[0].ranges, [PhysicalRange { start: 0x1_0000_0000, end: 0x1_03ff_ffff }]);
    assert!(found[1].ranges.is_empty());
    assert_eq!(found[0].path, dev.path().join("dax0.0"));
    assert!(found[1].problems[0].contains("\"-1\""), "{:?}", found[1].problems);
    assert_eq!(found[1].size, None);
    assert!(found[2].problems[0].contains("no such file"), "{:?}", found[2].problems);
    assert_eq!(found[3].mode, Mode::SystemRam);
    assert!(found[3].problems[0].contains("devdax"), "{:?}", found[3].problems);
}

#[test]
fn a_machine_without_dax_has_no_devices() {
    let empty = common::scratch();
    assert!(DaxDevice::scan_with_roots(empty.path(), empty.path()).unwrap().is_empty());
}

/// The whole list of this machine, whatever it has: scanning must not fail.
#[test]
fn this_machine_can_be_scanned() {
    DaxDevice::scan().unwrap();
}

/// Runs alone in a process of its own, since the setting is the whole process's.
#[test]
fn disabled_huge_pages_are_refused_where_they_would_be_a_signal() {
    const CHILD: &str = "MARU_CXL_TEST_THP_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let me = std::env::current_exe().unwrap();
        let name = "disabled_huge_pages_are_refused_where_they_would_be_a_signal";
        let child = std::process::Command::new(me).args(["--exact", name]).env(CHILD, "1").output().unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
        return;
    }
    let (set, unused): (libc::c_ulong, libc::c_ulong) = (1, 0);
    // SAFETY: sets a flag of this process, which runs this test only.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, set, unused, unused, unused) }, 0);
    let huge = Sysfs::new("67108864", "2097152").open().unwrap();
    assert!(matches!(map(&huge, 0, 0), Err(CxlError::HugePagesDisabled { align: 2_097_152, .. })));
    let small = Sysfs::new("67108864", "4096").open().unwrap();
    map(&small, 0, 0).unwrap();
}
