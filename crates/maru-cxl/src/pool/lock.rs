//! One writer per pool on one host: an open-file-description lock on the pool's bytes.
//!
//! It goes away with the process whatever way that ends, and conflicts between two opens of one process as well.
//! Across hosts it does nothing; there the operator gives each pool one writer.

use std::fs::File;
use std::os::fd::AsRawFd as _;

use rustix::fs::{Mode, OFlags};

use super::process;
use crate::directory::SlabDirectory;
use crate::error::{CxlError, io_error};
use crate::mapping::Mapping;
use crate::region::Region;

/// Held as long as something of this process may write to the pool.
#[derive(Debug)]
pub(crate) struct WriterLock {
    region: Region,
    /// Closing it releases the lock. `None` for memory that is not a file's.
    _file: Option<File>,
}

impl WriterLock {
    pub(crate) fn acquire(region: &Region) -> Result<Self, CxlError> {
        let taken = || CxlError::PoolLocked { backing: region.backing().to_owned(), holder: holder(region) };
        let file = match region.mapping() {
            None => {
                if !region.claim_writer() {
                    return Err(taken());
                }
                None
            }
            Some(mapping) => {
                let file = reopen(mapping)?;
                if !lock(&file, mapping)? {
                    return Err(taken());
                }
                Some(file)
            }
        };
        Ok(Self { region: region.clone(), _file: file })
    }
}

impl Drop for WriterLock {
    fn drop(&mut self) {
        if self.region.mapping().is_none() {
            self.region.release_writer();
        }
    }
}

/// The process that holds the lock, by its own record, if it is of this machine and alive.
fn holder(region: &Region) -> Option<u32> {
    let writer = SlabDirectory::writer(region)?;
    (process::liveness(&writer) == process::Liveness::Alive).then_some(writer.pid)
}

/// An open file description of our own: locks belong to it, and the device's is shared.
fn reopen(mapping: &Mapping) -> Result<File, CxlError> {
    let device = mapping.device();
    let link = format!("/proc/self/fd/{}", device.file().as_raw_fd());
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(link.as_str(), flags, Mode::empty())
        .map(File::from)
        .map_err(|errno| io_error("open through /proc/self/fd", device.path(), errno))
}

/// Whether the lock was free.
fn lock(file: &File, mapping: &Mapping) -> Result<bool, CxlError> {
    let range = |value: u64| libc::off_t::try_from(value).unwrap_or(libc::off_t::MAX);
    let request = request(range(mapping.offset()), range(mapping.len()));
    // SAFETY: F_OFD_SETLK reads one flock structure, which outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) };
    if result == 0 {
        return Ok(true);
    }
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(io_error("fcntl(F_OFD_SETLK)", mapping.device().path(), error)),
    }
}

/// Whether any process has a pool of the file open for writing.
pub(crate) fn is_locked(file: &File) -> bool {
    // Length 0 means to the end, however far that is.
    let mut request = request(0, 0);
    // SAFETY: F_OFD_GETLK reads and writes one flock structure, which outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut request) };
    result == 0 && i32::from(request.l_type) != libc::F_UNLCK
}

fn request(start: libc::off_t, len: libc::off_t) -> libc::flock {
    #[allow(clippy::cast_possible_truncation, reason = "both constants are 0 or 1")]
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        // Must be zero for locks of open file descriptions.
        l_pid: 0,
    }
}
