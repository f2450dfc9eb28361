//! Mapping a device into this process: checked by us, shared, never a slice.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapRaw;

use crate::device::{DaxDevice, DeviceKind};
use crate::error::{CxlError, io_error};
use crate::num::{check_range, round_down, round_up, to_usize};
use crate::prefault;

/// Reports prefault progress: bytes done, bytes in total. Called from several threads.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// What part of a device to map, and how.
#[derive(Clone)]
pub struct MapOptions {
    /// First byte, a multiple of the device's alignment.
    pub offset: u64,
    /// Length in bytes, rounded up to the alignment; 0 means to the end of the device.
    pub len: u64,
    /// Make every page present now, so that a missing or bad page is an error here and not a signal later.
    pub prefault: bool,
    /// Threads for that; 0 chooses.
    pub prefault_threads: usize,
    /// Called as prefaulting goes on.
    pub progress: Option<Progress>,
    /// Map without write access.
    pub read_only: bool,
}

impl Default for MapOptions {
    fn default() -> Self {
        Self { offset: 0, len: 0, prefault: true, prefault_threads: 0, progress: None, read_only: false }
    }
}

impl fmt::Debug for MapOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MapOptions")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .field("prefault", &self.prefault)
            .field("prefault_threads", &self.prefault_threads)
            .field("progress", &self.progress.is_some())
            .field("read_only", &self.read_only)
            .finish()
    }
}

/// Part of a device mapped into this process, `MAP_SHARED`. Unmapped when dropped.
///
/// There is no way to get a slice: another process, host or device may write these bytes at any time.
#[derive(Debug)]
pub struct Mapping {
    raw: MmapRaw,
    device: DaxDevice,
    offset: u64,
    len: u64,
    read_only: bool,
}

impl Mapping {
    /// Maps `options.len` bytes (rounded up to the alignment) from `options.offset`.
    ///
    /// Offset, alignment and size are checked here, because the kernel accepts a mapping past the end of a
    /// device and answers a misaligned one with a bare `EINVAL`.
    ///
    /// # Errors
    /// [`CxlError::Misaligned`], [`CxlError::OutOfBounds`], [`CxlError::ReadOnly`] when the device could only be
    /// opened for reading, [`CxlError::HugePagesDisabled`], [`CxlError::MemoryFault`] from prefaulting.
    pub fn map(device: &DaxDevice, options: &MapOptions) -> Result<Self, CxlError> {
        let len = checked_len(device, options)?;
        if !options.read_only && !device.is_writable() {
            return Err(CxlError::ReadOnly {
                wanted: "write to it (the device could only be opened for reading)",
            });
        }
        check_huge_pages(device)?;

        let mut mmap = memmap2::MmapOptions::new();
        mmap.offset(options.offset).len(to_usize(len));
        let raw = if options.read_only {
            mmap.map_raw_read_only(device.file())
        } else {
            mmap.map_raw(device.file())
        };
        let raw = raw.map_err(|error| io_error("mmap", device.path(), error))?;

        let mapping =
            Self { raw, device: device.clone(), offset: options.offset, len, read_only: options.read_only };
        if options.prefault {
            prefault::populate(&mapping, options)?;
        }
        Ok(mapping)
    }

    /// First byte.
    pub fn base(&self) -> NonNull<u8> {
        // mmap never returns null for a mapping that succeeded.
        NonNull::new(self.raw.as_mut_ptr()).unwrap_or(NonNull::dangling())
    }

    /// Length in bytes, after rounding up to the alignment.
    #[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Offset of the first byte in the device.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether it was mapped without write access.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The device it maps.
    pub fn device(&self) -> &DaxDevice {
        &self.device
    }
}

/// The length that will be mapped.
fn checked_len(device: &DaxDevice, options: &MapOptions) -> Result<u64, CxlError> {
    let align = device.align();
    // The bytes of a file after its last whole page cannot be mapped without the zeros behind them.
    let size = round_down(device.len(), align);
    if !options.offset.is_multiple_of(align) {
        return Err(CxlError::Misaligned { what: "offset", value: options.offset, align });
    }
    let beyond =
        |len| CxlError::OutOfBounds { what: "mapping of the device", offset: options.offset, len, size };
    if options.offset >= size {
        return Err(beyond(options.len));
    }
    let wanted = if options.len == 0 { size - options.offset } else { options.len };
    let len = round_up(wanted, align).ok_or_else(|| beyond(wanted))?;
    // The message has the length that was asked for.
    check_range("mapping of the device", options.offset, len, size).map_err(|_| beyond(wanted))?;
    Ok(len)
}

/// With transparent huge pages disabled for the process, every fault on a device that maps in huge units raises
/// SIGBUS although the mapping succeeds.
fn check_huge_pages(device: &DaxDevice) -> Result<(), CxlError> {
    if device.kind() != DeviceKind::Device || device.align() <= 4096 {
        return Ok(());
    }
    const UNUSED: libc::c_ulong = 0;
    // SAFETY: PR_GET_THP_DISABLE reads a flag of this process; the unused arguments must be zero and are.
    let disabled = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, UNUSED, UNUSED, UNUSED, UNUSED) };
    if disabled > 0 {
        return Err(CxlError::HugePagesDisabled { path: device.path().to_owned(), align: device.align() });
    }
    Ok(())
}
