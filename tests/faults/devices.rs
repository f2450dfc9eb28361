//! Kind: device nodes that are not what they seem, and windows that do not fit (C14, C22). The open call's own
//! errors (ENXIO, EBUSY, EACCES) are tested beside their translation, in `maru-cxl/src/device/sysfs.rs`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use maru::Config;
use maru::cxl::{
    CreateOptions, CxlError, DaxDevice, MapOptions, Mapping, PoolExtent, PoolOptions, Region, SlabPool,
    check_pool_overlaps,
};

use crate::harness::Test;

pub(crate) fn tests() -> Vec<Test> {
    tests![
        plain:
            c14_windows_off_the_alignment_or_the_device,
            c14_a_length_is_rounded_up_inside_the_device,
            c14_a_map_is_shared,
            c14_overlapping_pools_are_refused,
            c14_other_windows,
            c22_a_device_in_another_mode_comes_with_the_remedy,
            c22_a_bad_size_is_an_error,
            c22_other_texts_in_sysfs,
            c22_what_is_no_device;
    ]
}

const MIB: u64 = 1 << 20;

/// A sysfs that says `/dev/zero` (1:5) is `dax0.0`.
struct Sysfs(tempfile::TempDir);

impl Sysfs {
    fn new(size: &str, align: &str) -> Sysfs {
        let sysfs = Sysfs(tempfile::tempdir().unwrap());
        let device = sysfs.device();
        for dir in [&device, &sysfs.path().join("dev/char")] {
            fs::create_dir_all(dir).unwrap();
        }
        for (file, text) in [("size", size), ("align", align), ("numa_node", "0"), ("target_node", "1")] {
            fs::write(device.join(file), text).unwrap();
        }
        symlink("../../bus/dax", device.join("subsystem")).unwrap();
        symlink(&device, sysfs.path().join("dev/char/1:5")).unwrap();
        sysfs.bind(Some("device_dax"));
        sysfs
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn device(&self) -> PathBuf {
        self.path().join("devices/dax0.0")
    }

    fn bind(&self, driver: Option<&str>) {
        let link = self.device().join("driver");
        let _ = fs::remove_file(&link);
        if let Some(driver) = driver {
            symlink(format!("../../bus/dax/drivers/{driver}"), link).unwrap();
        }
    }

    fn open(&self) -> Result<DaxDevice, CxlError> {
        DaxDevice::open_with_sysfs("/dev/zero", self.path())
    }
}

fn map(device: &DaxDevice, offset: u64, len: u64) -> Result<Mapping, CxlError> {
    Mapping::map(device, &MapOptions { offset, len, prefault: false, ..MapOptions::default() })
}

fn c14_windows_off_the_alignment_or_the_device() {
    let device = Sysfs::new("67108864\n", "2097152\n").open().unwrap();
    for offset in [4096, 1, 2 * MIB - 1, 3 * MIB, u64::MAX] {
        let text = map(&device, offset, 2 * MIB).unwrap_err().to_string();
        assert!(text.contains(&offset.to_string()) && text.contains("alignment 2097152"), "{text}");
    }
    for (offset, len) in
        [(62 * MIB, 4 * MIB), (u64::MAX - 2 * MIB + 1, 4 * MIB), (64 * MIB, 2 * MIB), (0, 66 * MIB)]
    {
        let text = map(&device, offset, len).unwrap_err().to_string();
        assert!(text.contains("67108864") && !text.contains("os error"), "{text}");
    }
}

fn c14_a_length_is_rounded_up_inside_the_device() {
    let device = Sysfs::new("67108864\n", "2097152\n").open().unwrap();
    for (offset, len, mapped) in [(0, 3, 4), (0, 64, 64), (62, 1, 2), (2, 0, 62)] {
        assert_eq!(map(&device, offset * MIB, len * MIB).unwrap().len(), mapped * MIB);
    }
    assert_eq!(map(&device, 0, 1).unwrap().len(), 2 * MIB);
}

/// There is no private map: what one mapping writes the other sees.
fn c14_a_map_is_shared() {
    let dir = tempfile::tempdir().unwrap();
    let device = DaxDevice::create_file(dir.path().join("pool"), MIB, CreateOptions::default()).unwrap();
    let regions = [0, 1].map(|_| Region::new(map(&device, 0, 0).unwrap()));
    let slabs = regions.each_ref().map(|r| r.slab(4096, 16).unwrap());
    slabs[0].write_at(0, b"seen by everyone").unwrap();
    let mut found = [0; 16];
    slabs[1].read_at(0, &mut found).unwrap();
    assert_eq!(&found, b"seen by everyone");
    assert_eq!(fs::read(dir.path().join("pool")).unwrap()[4096..4112], found);
}

fn c14_overlapping_pools_are_refused() {
    let pools = |second: &str, size: &str| {
        format!(
            "[[cxl.pool]]\npath = \"/dev/dax0.0\"\nsize = \"8MiB\"\n\
             [[cxl.pool]]\npath = \"/dev/dax0.0\"\noffset = \"{second}\"\nsize = \"{size}\""
        )
    };
    for (second, size) in [("4MiB", "8MiB"), ("0", "2MiB"), ("6MiB", "0"), ("0", "0")] {
        let error = Config::from_toml_str(&pools(second, size), "maru.toml").unwrap_err();
        assert!(error.to_string().contains("overlap"), "{second} {size}: {error}");
    }
    for (second, size) in [("8MiB", "8MiB"), ("8MiB", "0")] {
        Config::from_toml_str(&pools(second, size), "maru.toml").unwrap();
    }
    // By another name of the same file, as the devices themselves tell.
    let dir = tempfile::tempdir().unwrap();
    let (path, link) = (dir.path().join("pool"), dir.path().join("again"));
    drop(DaxDevice::create_file(&path, 16 * MIB, CreateOptions::default()).unwrap());
    fs::hard_link(&path, &link).unwrap();
    let extent = |path: &Path, offset, len| {
        let id = DaxDevice::open(path).unwrap().id();
        PoolExtent { id, path: path.to_owned(), offset, len }
    };
    let clash = [extent(&path, 0, 8 * MIB), extent(&link, 4 * MIB, 8 * MIB)];
    assert!(check_pool_overlaps(&clash).unwrap_err().to_string().contains("overlap"));
    check_pool_overlaps(&[extent(&path, 0, 8 * MIB), extent(&link, 8 * MIB, 8 * MIB)]).unwrap();
}

/// Files, whose alignment is a page, and pools in windows that hold nothing.
fn c14_other_windows() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pool");
    let device = DaxDevice::create_file(&path, MIB, CreateOptions::default()).unwrap();
    for (offset, len) in
        [(MIB, 0), (MIB - 4096, 8192), (0, u64::MAX), (u64::MAX - 4095, 1), (1 << 63, 1 << 63)]
    {
        let error = map(&device, offset, len).unwrap_err();
        assert!(matches!(error, CxlError::OutOfBounds { .. }), "{error}");
    }
    assert!(matches!(map(&device, 512, 512), Err(CxlError::Misaligned { align: 4096, .. })));
    let region = Region::new(map(&device, 0, 0).unwrap());
    for (offset, len) in [(MIB, 1), (0, MIB + 1), (u64::MAX, 1), (1, u64::MAX), (MIB - 1, 2)] {
        assert!(matches!(region.slab(offset, len), Err(CxlError::OutOfBounds { .. })));
    }
    assert!(region.slab(MIB, 0).unwrap().is_empty());
    for slab_bytes in [0, MIB, u64::MAX, u64::MAX - 4095, 1 << 63] {
        let options = PoolOptions { slab_bytes, ..PoolOptions::default() };
        let error = SlabPool::create(region.clone(), options).unwrap_err();
        assert_eq!(error.kind(), "invalid_argument", "{error}");
    }
    for entries in [u64::MAX, 1 << 57, (1 << 57) + 1, 1 << 63] {
        let options = PoolOptions { slab_bytes: 4096, entries, ..PoolOptions::default() };
        assert!(SlabPool::create(region.clone(), options).is_err());
    }
    // A file that shrinks behind the device's back.
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let error = region.slab(8192, 4096).unwrap().probe().unwrap_err();
    assert!(matches!(error, CxlError::MemoryFault { .. }), "{error}");
}

fn c22_a_device_in_another_mode_comes_with_the_remedy() {
    let sysfs = Sysfs::new("67108864\n", "2097152\n");
    for (driver, part) in [
        (Some("kmem"), "system-ram"),
        (None, "not bound"),
        (Some("fsdev"), "mmap"),
        (Some("some_later_driver"), "some_later_driver"),
    ] {
        sysfs.bind(driver);
        let error = sysfs.open().unwrap_err();
        assert_eq!(error.kind(), "not_available");
        let text = error.to_string();
        assert!(text.contains(part) && text.contains("daxctl reconfigure-device --mode=devdax"), "{text}");
    }
}

fn c22_a_bad_size_is_an_error() {
    for size in ["0", "-1", "abc"] {
        let text = Sysfs::new(size, "2097152").open().unwrap_err().to_string();
        assert!(
            text.contains(&format!("size is {size:?}")) && !text.contains("18446744073709551615"),
            "{text}"
        );
    }
}

fn c22_other_texts_in_sysfs() {
    let long = "1".repeat(5000);
    for (size, align, what) in [
        ("", "2097152", "size"),
        (" ", "2097152", "size"),
        ("67108864 67108864", "2097152", "size"),
        ("6.7e7", "2097152", "size"),
        ("18446744073709551615", "2097152", "size"),
        ("18446744073709551616", "2097152", "size"),
        ("9223372036854775808", "2097152", "size"),
        (&long, "2097152", "size"),
        // Smaller than one unit.
        ("4096", "2097152", "size"),
        ("67108864", "0", "align"),
        ("67108864", "-1", "align"),
        ("67108864", "3", "align"),
        ("67108864", "1", "align"),
        ("67108864", "2097153", "align"),
        ("67108864", "9223372036854775808", "align"),
        ("67108864", "", "align"),
        ("67108864", "2M", "align"),
    ] {
        let error = Sysfs::new(size, align).open().unwrap_err();
        assert_eq!(error.kind(), "bad_device", "{size:?} {align:?}: {error}");
        assert!(error.to_string().contains(what), "{error}");
        assert!(error.to_string().len() < 1000, "{} bytes of message", error.to_string().len());
    }
    // What the kernel writes, and what it might.
    for (size, align) in [("67108864\n", "2097152\n"), ("0x4000000\n", "0x200000\n")] {
        let opened = Sysfs::new(size, align).open();
        match opened {
            Ok(device) => assert_eq!((device.len(), device.align()), (64 * MIB, 2 * MIB)),
            Err(error) => assert_eq!(error.kind(), "bad_device"),
        }
    }
}

fn c22_what_is_no_device() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("dax9.9");
    let error = DaxDevice::open(&missing).unwrap_err();
    assert_eq!(error.kind(), "not_found");
    assert!(error.to_string().contains("dax9.9"), "{error}");
    let link = dir.path().join("link");
    symlink("/dev/shm", &link).unwrap();
    let socket = dir.path().join("socket");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let loop_ = dir.path().join("loop");
    symlink(&loop_, &loop_).unwrap();
    for (path, part) in [
        (dir.path(), "a directory"),
        (&link, "a symbolic link"),
        (&socket, "a socket"),
        (&loop_, "a symbolic link"),
        // Character devices that are no dax device, of which one may be mapped.
        (Path::new("/dev/null"), "character device"),
        (Path::new("/dev/zero"), "character device"),
    ] {
        let error = DaxDevice::open(path).unwrap_err();
        assert!(matches!(error, CxlError::WrongFileType { .. }), "{error}");
        assert!(error.to_string().contains(part), "{part} is not in: {error}");
    }
    // Files without a whole page.
    for len in [0, 1, 4095] {
        let path = dir.path().join(format!("short{len}"));
        fs::write(&path, vec![0; len]).unwrap();
        let failed = DaxDevice::open(&path).and_then(|device| map(&device, 0, 0));
        assert!(failed.is_err(), "{len} bytes");
    }
    for len in [0, u64::MAX, 1 << 63] {
        assert!(DaxDevice::create_file(dir.path().join("new"), len, CreateOptions::default()).is_err());
        assert!(!dir.path().join("new").exists(), "a file of {len} bytes stays behind");
    }
}
