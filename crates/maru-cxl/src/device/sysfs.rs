//! What the kernel says of a dax device under `/sys`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::CxlError;

/// How a dax device is bound.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Bound to `device_dax`: can be mapped.
    DevDax,
    /// Bound to `kmem`: the kernel uses it as ordinary memory.
    SystemRam,
    /// Bound to a file-system driver whose devices have no mmap.
    FsDax,
    /// No driver bound.
    Unbound,
    /// Bound to a driver of another name.
    Other(String),
}

impl Mode {
    /// The state in words, to finish the sentence "the device is ...".
    pub fn describe(&self) -> String {
        match self {
            Self::DevDax => "in devdax mode".to_owned(),
            Self::SystemRam => "in system-ram mode (the kernel uses it as ordinary memory)".to_owned(),
            Self::FsDax => "bound to a file-system driver (fsdev), which offers no mmap".to_owned(),
            Self::Unbound => "not bound to any driver".to_owned(),
            Self::Other(driver) => format!("bound to the driver {driver:?}"),
        }
    }
}

/// A physical address range of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhysicalRange {
    /// First address.
    pub start: u64,
    /// Last address.
    pub end: u64,
}

/// Attributes of one dax device, read once.
#[derive(Debug, Clone)]
pub(crate) struct Attributes {
    pub(crate) mode: Mode,
    pub(crate) size: u64,
    pub(crate) align: u64,
    pub(crate) numa_node: Option<i32>,
    pub(crate) target_node: Option<i32>,
}

/// The directory of the character device `major:minor`, if it is a dax device.
pub(crate) fn dax_dir(sysfs: &Path, major: u32, minor: u32) -> Option<PathBuf> {
    let dir = sysfs.join(format!("dev/char/{major}:{minor}"));
    is_dax(&dir).then(|| fs::canonicalize(&dir).unwrap_or(dir))
}

/// Whether the device directory belongs to the dax bus. Never judged by its name.
fn is_dax(dir: &Path) -> bool {
    let Ok(subsystem) = fs::read_link(dir.join("subsystem")) else { return false };
    subsystem.ends_with("bus/dax")
}

/// How the device is bound.
pub(crate) fn mode(dir: &Path) -> Mode {
    let Ok(driver) = fs::read_link(dir.join("driver")) else { return Mode::Unbound };
    match driver.file_name().and_then(|name| name.to_str()) {
        Some("device_dax") => Mode::DevDax,
        Some("kmem") => Mode::SystemRam,
        Some("fsdev" | "fsdev_dax" | "famfs") => Mode::FsDax,
        Some(other) => Mode::Other(other.to_owned()),
        None => Mode::Unbound,
    }
}

/// The device's own name, e.g. `dax0.0`.
pub(crate) fn name(dir: &Path) -> String {
    dir.file_name().map_or_else(|| "dax".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Reads everything; `path` is only for messages.
pub(crate) fn attributes(dir: &Path, path: &Path) -> Result<Attributes, CxlError> {
    let size = positive(dir, "size", path)?;
    let align = positive(dir, "align", path)?;
    if !align.is_power_of_two() || align < 4096 {
        return Err(bad(dir, "align", align.to_string(), "a power of two of at least 4096 is expected"));
    }
    if size < align {
        return Err(bad(dir, "size", size.to_string(), "at least one alignment unit is expected"));
    }
    Ok(Attributes {
        mode: mode(dir),
        size,
        align,
        numa_node: node(dir, "numa_node"),
        target_node: node(dir, "target_node"),
    })
}

/// A size attribute. `0`, a negative number (the kernel once printed -1) and other text are errors, never a
/// number made of them.
fn positive(dir: &Path, attribute: &'static str, path: &Path) -> Result<u64, CxlError> {
    let file = dir.join(attribute);
    let text = fs::read_to_string(&file).map_err(|source| CxlError::SizeUnknown {
        path: path.to_owned(),
        attribute: file.clone(),
        source,
    })?;
    let text = text.trim();
    match text.parse::<u64>() {
        Ok(value) if value > 0 && i64::try_from(value).is_ok() => Ok(value),
        _ => Err(bad(dir, attribute, text.to_owned(), "a positive number of bytes below 2^63 is expected")),
    }
}

/// Of a text that is no number the beginning is enough.
fn bad(dir: &Path, what: &'static str, mut found: String, expected: &'static str) -> CxlError {
    const MOST: usize = 64;
    if let Some((end, _)) = found.char_indices().nth(MOST) {
        found.truncate(end);
        found.push('…');
    }
    CxlError::BadAttribute { source_path: dir.join(what), what, found, expected }
}

/// A node number; absent, unreadable or negative ("no node") all mean that there is no hint.
fn node(dir: &Path, attribute: &str) -> Option<i32> {
    let text = fs::read_to_string(dir.join(attribute)).ok()?;
    text.trim().parse().ok().filter(|&node: &i32| node >= 0)
}

/// The physical ranges of a device, where they may be read: `mapping0`, `mapping1`, ... For reading by people; a
/// device may have several, so nothing may be computed from the first.
pub(crate) fn ranges(dir: &Path) -> Vec<PhysicalRange> {
    let address = |index: usize, name: &str| {
        let text = fs::read_to_string(dir.join(format!("mapping{index}/{name}"))).ok()?;
        u64::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
    };
    (0..)
        .map_while(|index| {
            Some(PhysicalRange { start: address(index, "start")?, end: address(index, "end")? })
        })
        .collect()
}

/// Turns the error of `open(2)` on a device into ours.
pub(crate) fn open_error(path: &Path, error: io::Error, dir: Option<&Path>) -> CxlError {
    let code = rustix::io::Errno::from_io_error(&error);
    match code {
        Some(rustix::io::Errno::NOENT) => CxlError::NotFound { path: path.to_owned() },
        Some(rustix::io::Errno::ACCESS | rustix::io::Errno::PERM) => CxlError::PermissionDenied {
            path: path.to_owned(),
            hint: "device nodes are 0600 root by default: give a group access with a udev rule such as \
                   SUBSYSTEM==\"dax\", GROUP=\"maru\", MODE=\"0660\"; for a file check its owner and mode",
        },
        Some(rustix::io::Errno::BUSY) => CxlError::DeviceBusy { path: path.to_owned() },
        // The node of a device without the device_dax driver is there and answers ENXIO.
        Some(rustix::io::Errno::NXIO) => not_devdax(path, dir),
        _ => CxlError::Io { op: "open", path: path.to_owned(), source: error },
    }
}

/// The error for a device that is bound to something else than `device_dax`.
pub(crate) fn not_devdax(path: &Path, dir: Option<&Path>) -> CxlError {
    let state = match dir.map(mode) {
        // Without sysfs, or when it changed in between, name the usual cause.
        None | Some(Mode::DevDax) => "in system-ram mode or unbound".to_owned(),
        Some(mode) => mode.describe(),
    };
    let name = dir.map_or_else(
        || path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        name,
    );
    CxlError::NotDevDax { path: path.to_owned(), name, state }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn fake(size: &str, align: &str) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("dax0.0");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("size"), size).unwrap();
        fs::write(dir.join("align"), align).unwrap();
        symlink("../../../bus/dax", dir.join("subsystem")).unwrap();
        symlink("../../../bus/dax/drivers/device_dax", dir.join("driver")).unwrap();
        (root, dir)
    }

    #[test]
    fn good_attributes_are_read() {
        let (_root, dir) = fake("536870912\n", "2097152\n");
        fs::write(dir.join("numa_node"), "-1\n").unwrap();
        fs::write(dir.join("target_node"), "1\n").unwrap();
        let found = attributes(&dir, Path::new("/dev/dax0.0")).unwrap();
        assert_eq!((found.size, found.align), (512 << 20, 2 << 20));
        assert_eq!((found.numa_node, found.target_node), (None, Some(1)));
        assert_eq!(found.mode, Mode::DevDax);
        assert!(is_dax(&dir));
    }

    /// Case C22: a bad size text is an error that quotes it, never 2^64-1.
    #[test]
    fn c22_bad_size_texts_are_errors() {
        for text in ["0", "-1", "abc", "", "18446744073709551615", "4096x"] {
            let (_root, dir) = fake(text, "4096");
            let error = attributes(&dir, Path::new("/dev/dax0.0")).unwrap_err();
            assert_eq!(error.kind(), "bad_device", "{text:?}");
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn a_missing_size_is_size_unknown() {
        let (_root, dir) = fake("1", "4096");
        fs::remove_file(dir.join("size")).unwrap();
        let error = attributes(&dir, Path::new("/dev/dax0.0")).unwrap_err();
        assert!(matches!(error, CxlError::SizeUnknown { .. }), "{error}");
    }

    #[test]
    fn an_alignment_that_is_no_power_of_two_is_refused() {
        for align in ["3000", "6291456", "2048"] {
            let (_root, dir) = fake("67108864", align);
            assert!(matches!(
                attributes(&dir, Path::new("x")),
                Err(CxlError::BadAttribute { what: "align", .. })
            ));
        }
    }

    #[test]
    fn a_device_smaller_than_its_alignment_is_refused() {
        let (_root, dir) = fake("4096", "2097152");
        assert!(matches!(attributes(&dir, Path::new("x")), Err(CxlError::BadAttribute { what: "size", .. })));
    }

    /// Case C22: one error per cause of a failed open.
    #[test]
    fn c22_open_errors_name_their_cause() {
        let (_root, dir) = fake("1", "1");
        fs::remove_file(dir.join("driver")).unwrap();
        symlink("../../../bus/dax/drivers/kmem", dir.join("driver")).unwrap();
        let path = Path::new("/dev/dax0.0");
        let open = |errno| open_error(path, io::Error::from_raw_os_error(errno), Some(&dir));
        let text = open(6).to_string();
        assert!(text.contains("system-ram mode") && text.contains("--mode=devdax dax0.0"), "{text}");
        assert_eq!(open(6).kind(), "not_available");
        assert_eq!(open(13).kind(), "permission_denied");
        assert_eq!(open(1).kind(), "permission_denied");
        assert_eq!(open(2).kind(), "not_found");
        assert_eq!(open(16).kind(), "busy");
        assert_eq!(open(5).kind(), "io");
    }

    #[test]
    fn modes_are_told_apart() {
        let (_root, dir) = fake("1", "1");
        for (driver, expected) in [
            ("kmem", Mode::SystemRam),
            ("fsdev", Mode::FsDax),
            ("device_dax", Mode::DevDax),
            ("xyz", Mode::Other("xyz".to_owned())),
        ] {
            fs::remove_file(dir.join("driver")).unwrap();
            symlink(format!("../drivers/{driver}"), dir.join("driver")).unwrap();
            assert_eq!(mode(&dir), expected);
        }
        fs::remove_file(dir.join("driver")).unwrap();
        assert_eq!(mode(&dir), Mode::Unbound);
        assert!(not_devdax(Path::new("/dev/dax0.0"), Some(&dir)).to_string().contains("not bound"));
    }
}
