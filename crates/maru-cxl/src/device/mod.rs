//! Devices: a device-dax node, or a regular file standing in for one.

mod file;
mod scan;
mod sysfs;

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode as FileMode, OFlags, StatFs};
use rustix::io::Errno;

pub use self::file::CreateOptions;
pub use self::scan::DaxInfo;
pub use self::sysfs::{Mode, PhysicalRange};

use crate::error::{CxlError, io_error};
use crate::num::{PAGE, overlaps};

/// What a [`DaxDevice`] is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// A regular file, for development and for hosts that share memory through tmpfs.
    File,
    /// A device-dax character device.
    Device,
}

/// Identity of a device or file: two paths with the same identity are the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceId {
    kind: DeviceKindId,
    major_dev: u64,
    inode: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum DeviceKindId {
    File,
    Device,
}

/// An open device-dax node or regular file whose size and alignment are known.
///
/// Cheap to clone; the file descriptor is shared. A mapping keeps what it needs, so the device may be dropped.
#[derive(Debug, Clone)]
pub struct DaxDevice {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    path: PathBuf,
    kind: DeviceKind,
    id: DeviceId,
    len: u64,
    align: u64,
    numa_node: Option<i32>,
    target_node: Option<i32>,
    writable: bool,
}

impl DaxDevice {
    /// Opens a device-dax node or a regular file for reading and writing (for reading only where writing is not
    /// permitted).
    ///
    /// A sparse file gets its space reserved here, so that a full file system is an error now and not a SIGBUS
    /// later.
    ///
    /// # Errors
    /// One per cause: missing, permission, a device in system-ram mode (with the remedy), busy, size unknown,
    /// size or alignment that makes no sense, neither file nor device-dax, no space.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CxlError> {
        Self::open_with_sysfs(path, "/sys")
    }

    /// [`DaxDevice::open`] with another root for what is normally `/sys`.
    pub fn open_with_sysfs(path: impl AsRef<Path>, sysfs_root: impl AsRef<Path>) -> Result<Self, CxlError> {
        let path = path.as_ref();
        let link = std::fs::symlink_metadata(path).map_err(|error| sysfs::open_error(path, error, None))?;
        // udev may name a device by a symbolic link, which is safe because sysfs identifies what is behind it.
        // A link to a regular file is refused: in /dev/shm anybody could have put it there.
        let metadata = if link.is_symlink() {
            match std::fs::metadata(path) {
                Ok(target) if target.file_type().is_char_device() => target,
                _ => return Err(CxlError::WrongFileType { path: path.to_owned(), found: "a symbolic link" }),
            }
        } else {
            link
        };
        if metadata.file_type().is_char_device() {
            Self::open_device(path, sysfs_root.as_ref(), &metadata)
        } else if metadata.is_file() {
            Self::open_file(path)
        } else {
            Err(CxlError::WrongFileType { path: path.to_owned(), found: describe_type(&metadata) })
        }
    }

    /// Creates a regular file of `len` bytes, a multiple of 4096 (on hugetlbfs of its pages), with mode 0600 and all
    /// of its space reserved, following no symbolic link, and opens it. If that fails half-way the file is removed
    /// again.
    ///
    /// # Errors
    /// [`CxlError::InvalidArgument`] for a length of which a part could not be mapped, before anything is made or
    /// replaced; [`CxlError::FileExists`] unless told to replace, [`CxlError::NoSpace`] with wanted and free bytes,
    /// [`CxlError::PoolLocked`] when the file to be replaced has a live writer, and the errors of opening.
    pub fn create_file(path: impl AsRef<Path>, len: u64, options: CreateOptions) -> Result<Self, CxlError> {
        let path = path.as_ref();
        let file = file::create(path, len, options)?;
        let ours = file.try_clone().map_err(|error| io_error("dup", path, error))?;
        Self::from_file(path, file, true).inspect_err(|_| {
            if let Err(errno) = file::remove_same(path, &ours) {
                tracing::warn!(path = %path.display(), error = %errno, "could not remove the new pool file");
            }
        })
    }

    /// Every dax device the kernel knows, with what it says of each and what is wrong with it.
    pub fn scan() -> Result<Vec<DaxInfo>, CxlError> {
        scan::scan(Path::new("/sys"), Path::new("/dev"))
    }

    /// [`DaxDevice::scan`] with other roots for what is normally `/sys` and `/dev`.
    pub fn scan_with_roots(
        sysfs_root: impl AsRef<Path>,
        dev_root: impl AsRef<Path>,
    ) -> Result<Vec<DaxInfo>, CxlError> {
        scan::scan(sysfs_root.as_ref(), dev_root.as_ref())
    }

    fn open_file(path: &Path) -> Result<Self, CxlError> {
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let (opened, writable) = open_both_ways(path, flags);
        let file = opened.map_err(|errno| match errno {
            Errno::LOOP => CxlError::WrongFileType { path: path.to_owned(), found: "a symbolic link" },
            other => sysfs::open_error(path, other.into(), None),
        })?;
        Self::from_file(path, file, writable)
    }

    fn from_file(path: &Path, file: File, writable: bool) -> Result<Self, CxlError> {
        let metadata = file.metadata().map_err(|error| io_error("fstat", path, error))?;
        if !metadata.is_file() {
            return Err(CxlError::WrongFileType { path: path.to_owned(), found: describe_type(&metadata) });
        }
        let len = metadata.len();
        let align = file_align(&file);
        if len < align || i64::try_from(len).is_err() {
            return Err(CxlError::BadAttribute {
                source_path: path.to_owned(),
                what: "file size",
                found: len.to_string(),
                expected: "at least one page is expected (4096 bytes; on hugetlbfs one huge page)",
            });
        }
        if writable {
            file::reserve_existing(&file, path, len)?;
        }
        let id = DeviceId { kind: DeviceKindId::File, major_dev: metadata.dev(), inode: metadata.ino() };
        Ok(Self {
            inner: Arc::new(Inner {
                file,
                path: path.to_owned(),
                kind: DeviceKind::File,
                id,
                len,
                align,
                numa_node: None,
                target_node: None,
                writable,
            }),
        })
    }

    fn open_device(path: &Path, sysfs_root: &Path, metadata: &Metadata) -> Result<Self, CxlError> {
        let rdev = metadata.rdev();
        let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
        let Some(dir) = sysfs::dax_dir(sysfs_root, major, minor) else {
            return Err(CxlError::WrongFileType {
                path: path.to_owned(),
                found: "a character device that is not on the dax bus",
            });
        };
        let (opened, writable) = open_both_ways(path, OFlags::CLOEXEC);
        let file = opened.map_err(|errno| sysfs::open_error(path, errno.into(), Some(&dir)))?;
        let now = file.metadata().map_err(|error| io_error("fstat", path, error))?;
        if !now.file_type().is_char_device() || now.rdev() != rdev {
            return Err(CxlError::DeviceBusy { path: path.to_owned() });
        }
        let found = sysfs::attributes(&dir, path)?;
        if found.mode != Mode::DevDax {
            return Err(sysfs::not_devdax(path, Some(&dir)));
        }
        let id = DeviceId { kind: DeviceKindId::Device, major_dev: rdev, inode: 0 };
        Ok(Self {
            inner: Arc::new(Inner {
                file,
                path: path.to_owned(),
                kind: DeviceKind::Device,
                id,
                // The size is a multiple of the alignment on real devices; a remainder could not be mapped.
                len: crate::num::round_down(found.size, found.align),
                align: found.align,
                numa_node: found.numa_node,
                target_node: found.target_node,
                writable,
            }),
        })
    }

    /// Whether this is a device node or a regular file.
    pub fn kind(&self) -> DeviceKind {
        self.inner.kind
    }

    /// Size in bytes: a file's size, or what sysfs says of a device (never `stat`, which says 0).
    #[allow(clippy::len_without_is_empty, reason = "an empty device cannot be opened")]
    pub fn len(&self) -> u64 {
        self.inner.len
    }

    /// Unit of mapping in bytes: 4096 for files (on hugetlbfs the size of its pages); 4 KiB, 2 MiB or 1 GiB for
    /// devices.
    pub fn align(&self) -> u64 {
        self.inner.align
    }

    /// NUMA node the memory is near to, where the kernel knows one. A hint.
    pub fn numa_node(&self) -> Option<i32> {
        self.inner.numa_node
    }

    /// NUMA node the memory would be if it were ordinary RAM. A hint.
    pub fn target_node(&self) -> Option<i32> {
        self.inner.target_node
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Identity of the bytes behind it, equal for two paths of the same device or file.
    pub fn id(&self) -> DeviceId {
        self.inner.id
    }

    /// Whether it could be opened for writing.
    pub fn is_writable(&self) -> bool {
        self.inner.writable
    }

    /// Removes a regular file, if the path still names the file that was opened. Mappings of it stay valid. Does
    /// nothing for a device.
    pub fn remove_file(&self) -> Result<(), CxlError> {
        match self.inner.kind {
            DeviceKind::Device => Ok(()),
            DeviceKind::File => file::remove_same(&self.inner.path, &self.inner.file)
                .map_err(|errno| io_error("unlink", &self.inner.path, errno)),
        }
    }

    pub(crate) fn file(&self) -> &File {
        &self.inner.file
    }

    /// Name of the file system of a regular file, for messages about what can be registered.
    pub(crate) fn backing(&self) -> String {
        let path = self.inner.path.display();
        match self.inner.kind {
            DeviceKind::Device => format!("device-dax {path}"),
            DeviceKind::File => match file_system(&self.inner.file) {
                Some(name) => format!("{path} (a file on {name})"),
                None => format!("{path} (a regular file)"),
            },
        }
    }
}

/// One pool's claim on a device, for [`check_pool_overlaps`].
#[derive(Debug, Clone)]
pub struct PoolExtent {
    /// Which device or file.
    pub id: DeviceId,
    /// Its path, for the message.
    pub path: PathBuf,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Checks that no two pools of one configuration claim the same bytes, whatever paths they name them by.
///
/// # Errors
/// [`CxlError::Overlap`] naming both ranges of the first pair that overlaps.
pub fn check_pool_overlaps(extents: &[PoolExtent]) -> Result<(), CxlError> {
    for (index, first) in extents.iter().enumerate() {
        for second in &extents[index + 1..] {
            if first.id == second.id && overlaps(first.offset, first.len, second.offset, second.len) {
                return Err(CxlError::Overlap {
                    path: first.path.clone(),
                    first_offset: first.offset,
                    first_len: first.len,
                    second_offset: second.offset,
                    second_len: second.len,
                });
            }
        }
    }
    Ok(())
}

/// Opens for reading and writing, or for reading where only that is permitted.
fn open_both_ways(path: &Path, flags: OFlags) -> (Result<File, Errno>, bool) {
    match rustix::fs::open(path, flags | OFlags::RDWR, FileMode::empty()) {
        Ok(fd) => (Ok(File::from(fd)), true),
        Err(denied @ (Errno::ACCESS | Errno::ROFS)) => {
            let second = rustix::fs::open(path, flags | OFlags::RDONLY, FileMode::empty());
            (second.map(File::from).map_err(|_| denied), false)
        }
        Err(errno) => (Err(errno), true),
    }
}

fn describe_type(metadata: &Metadata) -> &'static str {
    let kind = metadata.file_type();
    if kind.is_dir() {
        "a directory"
    } else if kind.is_symlink() {
        "a symbolic link"
    } else if kind.is_block_device() {
        "a block device"
    } else if kind.is_char_device() {
        "a character device that is not on the dax bus"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a regular file"
    }
}

/// Files map in pages; those of hugetlbfs in its huge pages, whose size it gives as its block size.
fn file_align(file: &File) -> u64 {
    rustix::fs::fstatfs(file).map_or(PAGE, |stat| unit(&stat))
}

/// Unit of mapping of a file system's files.
fn unit(stat: &StatFs) -> u64 {
    match u64::try_from(stat.f_bsize) {
        Ok(size) if stat.f_type == HUGETLBFS && size.is_power_of_two() && size > PAGE => size,
        _ => PAGE,
    }
}

const HUGETLBFS: i64 = 0x9584_58f6;

/// Names of file systems by their magic number (statfs(2)), as far as they matter to host registration.
fn file_system(file: &File) -> Option<&'static str> {
    let magic = rustix::fs::fstatfs(file).ok()?.f_type;
    Some(match magic {
        0x0102_1994 => "tmpfs",
        HUGETLBFS => "hugetlbfs",
        0xef53 => "ext2/3/4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0x794c_7630 => "overlayfs",
        0x6969 => "nfs",
        _ => return None,
    })
}
