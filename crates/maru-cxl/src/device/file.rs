//! Regular files that stand in for a device: creating, reserving space, removing.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{CxlError, io_error};
use crate::num::{PAGE, round_down, round_up};
use crate::pool::lock;

/// Options of [`DaxDevice::create_file`](crate::DaxDevice::create_file).
#[derive(Debug, Clone, Copy, Default)]
pub struct CreateOptions {
    /// Remove a regular file that is there already, unless a pool in it has a live writer.
    pub replace: bool,
}

/// Creates the file, mode 0600, with its space reserved; a file that could not be finished is removed again.
pub(super) fn create(path: &Path, len: u64, options: CreateOptions) -> Result<File, CxlError> {
    check_len(path, len)?;
    if options.replace {
        remove_old(path)?;
    }
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(fd) => File::from(fd),
        Err(Errno::EXIST) => return Err(CxlError::FileExists { path: path.to_owned() }),
        Err(errno) => return Err(super::sysfs::open_error(path, errno.into(), None)),
    };
    let made = check_free(&file, path, len).and_then(|()| reserve_new(&file, path, len));
    if let Err(error) = made {
        // The name was ours from O_EXCL on; the error that led here matters more than one of the removal.
        if let Err(errno) = remove_same(path, &file) {
            tracing::warn!(path = %path.display(), error = %errno, "could not remove the half-made pool file");
        }
        return Err(error);
    }
    Ok(file)
}

/// Refuses a length of which not every byte could be mapped, before anything is made or replaced.
fn check_len(path: &Path, len: u64) -> Result<(), CxlError> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Where the folder cannot be looked at, making a file in it says why.
    let align = rustix::fs::statfs(dir).map_or(PAGE, |stat| super::unit(&stat));
    let max = round_down(i64::MAX.unsigned_abs(), align);
    if len.is_multiple_of(align) && (1..=max).contains(&len) {
        return Ok(());
    }
    let next = round_up(len.clamp(1, max), align).unwrap_or(max);
    Err(CxlError::InvalidArgument {
        what: "file length",
        found: len,
        allowed: format!("multiples of {align} bytes up to {max} are allowed, {next} for instance"),
    })
}

/// Removes a previous regular file. Symbolic links and everything else stay.
fn remove_old(path: &Path) -> Result<(), CxlError> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let old = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::LOOP) => {
            return Err(CxlError::WrongFileType { path: path.to_owned(), found: "a symbolic link" });
        }
        Err(Errno::ISDIR) => {
            return Err(CxlError::WrongFileType { path: path.to_owned(), found: "a directory" });
        }
        Err(errno) => return Err(super::sysfs::open_error(path, errno.into(), None)),
    };
    let metadata = old.metadata().map_err(|error| io_error("fstat", path, error))?;
    if !metadata.is_file() {
        return Err(CxlError::WrongFileType {
            path: path.to_owned(),
            found: super::describe_type(&metadata),
        });
    }
    if lock::is_locked(&old) {
        return Err(CxlError::PoolLocked { backing: path.display().to_string(), holder: None });
    }
    remove_same(path, &old).map_err(|errno| io_error("unlink", path, errno))
}

/// Unlinks `path` if it still names the open file.
pub(super) fn remove_same(path: &Path, file: &File) -> Result<(), Errno> {
    let ours = rustix::fs::fstat(file)?;
    let there = match rustix::fs::lstat(path) {
        Ok(there) => there,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino) {
        return Ok(());
    }
    rustix::fs::unlink(path)
}

/// Refuses early what cannot fit, so that a file system is not filled to the brim only to be emptied again.
fn check_free(file: &File, path: &Path, len: u64) -> Result<(), CxlError> {
    let free = free_bytes(file);
    // Some file systems (hugetlbfs among them) report no blocks at all; only a stated shortage counts.
    if let Some(free) = free.filter(|&free| free < len) {
        return Err(CxlError::NoSpace { path: path.to_owned(), wanted: len, free });
    }
    Ok(())
}

fn free_bytes(file: &File) -> Option<u64> {
    let stat = rustix::fs::fstatvfs(file).ok()?;
    if stat.f_blocks == 0 {
        return None;
    }
    stat.f_bavail.checked_mul(stat.f_frsize)
}

fn reserve_new(file: &File, path: &Path, len: u64) -> Result<(), CxlError> {
    match allocate(file, len) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_zeros(file, path, len),
        Err(errno) => Err(space_error(file, path, len, errno.into())),
    }
}

/// Reserves the holes of a file that exists, so that touching its pages later cannot find a full file system
/// (which would be a SIGBUS). Cheap when there are no holes.
pub(super) fn reserve_existing(file: &File, path: &Path, len: u64) -> Result<(), CxlError> {
    let stat = rustix::fs::fstat(file).map_err(|errno| io_error("fstat", path, errno))?;
    // st_blocks counts units of 512 bytes whatever the block size of the file system.
    let held = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
    if held >= len {
        return Ok(());
    }
    check_free(file, path, len - held)?;
    match allocate(file, len) {
        Ok(()) => Ok(()),
        Err(errno @ (Errno::OPNOTSUPP | Errno::NOSYS)) => Err(io_error(
            "fallocate (the file has holes and its file system cannot reserve space for them)",
            path,
            errno,
        )),
        Err(errno) => Err(space_error(file, path, len - held, errno.into())),
    }
}

fn allocate(file: &File, len: u64) -> Result<(), Errno> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// The slow way, for file systems without fallocate: what is written is reserved.
fn write_zeros(file: &File, path: &Path, len: u64) -> Result<(), CxlError> {
    use std::os::unix::fs::FileExt as _;
    let zeros = vec![0_u8; 1 << 20];
    let mut at = 0;
    while at < len {
        let step = (len - at).min(1 << 20);
        let part = &zeros[..crate::num::to_usize(step)];
        file.write_all_at(part, at).map_err(|error| space_error(file, path, len, error))?;
        at += step;
    }
    Ok(())
}

fn space_error(file: &File, path: &Path, wanted: u64, error: io::Error) -> CxlError {
    match Errno::from_io_error(&error) {
        Some(Errno::NOSPC | Errno::DQUOT) => {
            CxlError::NoSpace { path: path.to_owned(), wanted, free: free_bytes(file).unwrap_or(0) }
        }
        _ => io_error("fallocate", path, error),
    }
}
