//! One call of the copy engine between slabs and a buffer: as many evenly spaced spans as it takes.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUmemorytype, CUstream};
use maru_driver::check;

use crate::KernelError;

/// Most bytes from row to row that the driver's copies take, on every device so far
/// (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const MAX_PITCH: u64 = i32::MAX as u64;

/// `slices` times `rows` spans of `width` bytes on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spans {
    pub(super) host: u64,
    pub(super) device: u64,
    pub(super) width: u64,
    pub(super) rows: u64,
    pub(super) host_pitch: u64,
    pub(super) device_pitch: u64,
    pub(super) slices: u64,
    pub(super) host_step: u64,
    pub(super) device_step: u64,
}

impl Spans {
    /// No bytes, at these addresses.
    pub(super) fn at(host: u64, device: u64) -> Self {
        Spans {
            host,
            device,
            width: 0,
            rows: 1,
            host_pitch: 0,
            device_pitch: 0,
            slices: 1,
            host_step: 0,
            device_step: 0,
        }
    }

    /// The same further on.
    pub(super) fn shifted(self, host: u64, device: u64) -> Self {
        Spans { host: self.host + host, device: self.device + device, ..self }
    }

    /// Both as one call, if there is one: the next begins where this ends, or a step further that is the same
    /// for all. Between two calls the engine rests, and each costs the host two microseconds.
    pub(super) fn joined(&self, next: &Spans) -> Option<Spans> {
        let (host, device) = (next.host.checked_sub(self.host)?, next.device.checked_sub(self.device)?);
        if next.slices != 1 {
            return None;
        }
        if self.rows == 1 && next.rows == 1 && self.slices == 1 && (host, device) == (self.width, self.width)
        {
            return Some(Spans { width: self.width + next.width, ..*self });
        }
        let shape = |s: &Spans| (s.width, s.rows, s.host_pitch, s.device_pitch);
        if shape(self) != shape(next) {
            return None;
        }
        let (host_step, device_step) = match self.slices {
            1 => (host, device),
            _ => (self.host_step, self.device_step),
        };
        let evenly = (host, device) == (self.slices * host_step, self.slices * device_step);
        // A slice is a whole number of rows; single spans are rows themselves.
        let fits = |step: u64, pitch: u64| match self.rows {
            1 => (self.width..=MAX_PITCH).contains(&step),
            rows => pitch > 0 && pitch <= MAX_PITCH && step.is_multiple_of(pitch) && step / pitch >= rows,
        };
        let fits = fits(host_step, self.host_pitch) && fits(device_step, self.device_pitch);
        (evenly && fits).then_some(Spans { slices: self.slices + 1, host_step, device_step, ..*self })
    }

    /// # Safety
    /// All spans are memory that stays: page-locked on the host, the device's on the other side.
    pub(super) unsafe fn copy(self, into: bool, stream: CUstream) -> Result<(), KernelError> {
        if self.slices > 1 && self.rows > 1 {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_slices(into, stream) };
        }
        if self.slices > 1 {
            let (rows, host_pitch, device_pitch) = (self.slices, self.host_step, self.device_step);
            // SAFETY: the same spans.
            return unsafe { Spans { rows, host_pitch, device_pitch, slices: 1, ..self }.copy(into, stream) };
        }
        if self.rows > 1 && self.host_pitch.max(self.device_pitch) > MAX_PITCH {
            return (0..self.rows).try_for_each(|row| {
                let row = self.shifted(row * self.host_pitch, row * self.device_pitch);
                // SAFETY: one of the spans.
                unsafe { Spans { rows: 1, ..row }.copy(into, stream) }
            });
        }
        if self.rows > 1 {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_rows(into, stream) };
        }
        let (pointer, width) = (self.pointer(), narrow(self.width));
        match into {
            // SAFETY: `width` bytes at either place, by the caller's promise.
            true => Ok(check("cuMemcpyHtoDAsync", unsafe {
                sys::cuMemcpyHtoDAsync_v2(self.device, pointer, width, stream)
            })?),
            // SAFETY: as above.
            false => Ok(check("cuMemcpyDtoHAsync", unsafe {
                sys::cuMemcpyDtoHAsync_v2(pointer, self.device, width, stream)
            })?),
        }
    }

    /// # Safety
    /// As [`Spans::copy`].
    unsafe fn copy_rows(self, into: bool, stream: CUstream) -> Result<(), KernelError> {
        let (from, to) = sides(into, (CUmemorytype::CU_MEMORYTYPE_HOST, CUmemorytype::CU_MEMORYTYPE_DEVICE));
        let pitches = sides(into, (narrow(self.host_pitch), narrow(self.device_pitch)));
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: from,
            srcHost: self.pointer(),
            srcDevice: self.device,
            srcArray: std::ptr::null_mut(),
            srcPitch: pitches.0,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: to,
            dstHost: self.pointer(),
            dstDevice: self.device,
            dstArray: std::ptr::null_mut(),
            dstPitch: pitches.1,
            WidthInBytes: narrow(self.width),
            Height: narrow(self.rows),
        };
        // SAFETY: the spans are the caller's promise; the driver copies the description.
        Ok(check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, stream) })?)
    }

    /// # Safety
    /// As [`Spans::copy`].
    unsafe fn copy_slices(self, into: bool, stream: CUstream) -> Result<(), KernelError> {
        let (from, to) = sides(into, (CUmemorytype::CU_MEMORYTYPE_HOST, CUmemorytype::CU_MEMORYTYPE_DEVICE));
        let pitches = sides(into, (narrow(self.host_pitch), narrow(self.device_pitch)));
        let heights = sides(into, (self.host_step / self.host_pitch, self.device_step / self.device_pitch));
        let copy = sys::CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: from,
            srcHost: self.pointer(),
            srcDevice: self.device,
            srcArray: std::ptr::null_mut(),
            reserved0: std::ptr::null_mut(),
            srcPitch: pitches.0,
            srcHeight: narrow(heights.0),
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: to,
            dstHost: self.pointer(),
            dstDevice: self.device,
            dstArray: std::ptr::null_mut(),
            reserved1: std::ptr::null_mut(),
            dstPitch: pitches.1,
            dstHeight: narrow(heights.1),
            WidthInBytes: narrow(self.width),
            Height: narrow(self.rows),
            Depth: narrow(self.slices),
        };
        // SAFETY: as above.
        Ok(check("cuMemcpy3DAsync", unsafe { sys::cuMemcpy3DAsync_v2(&raw const copy, stream) })?)
    }

    fn pointer(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(narrow(self.host))
    }
}

/// Of host and device: source and destination.
fn sides<T>(into: bool, (host, device): (T, T)) -> (T, T) {
    if into { (host, device) } else { (device, host) }
}

fn narrow(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{MAX_PITCH, Spans};

    fn row(host: u64, device: u64, width: u64) -> Spans {
        Spans { width, ..Spans::at(host, device) }
    }

    fn rows(host: u64, device: u64) -> Spans {
        Spans { rows: 2, host_pitch: 4096, device_pitch: 1024, ..row(host, device, 512) }
    }

    /// Every byte a call copies, as pairs of addresses.
    fn bytes(s: &Spans) -> BTreeSet<(u64, u64)> {
        let at = |slice: u64, row: u64, byte: u64| {
            let host = s.host + slice * s.host_step + row * s.host_pitch + byte;
            (host, s.device + slice * s.device_step + row * s.device_pitch + byte)
        };
        let rows = (0..s.slices).flat_map(|slice| (0..s.rows).map(move |row| (slice, row)));
        rows.flat_map(|(slice, row)| (0..s.width).map(move |byte| at(slice, row, byte))).collect()
    }

    /// Joins a list as far as it goes and checks that nothing is lost or added.
    fn join(list: &[Spans]) -> Option<Spans> {
        let mut joined = list[0];
        for next in &list[1..] {
            joined = joined.joined(next)?;
        }
        let wanted: BTreeSet<_> = list.iter().flat_map(bytes).collect();
        assert_eq!(bytes(&joined), wanted);
        Some(joined)
    }

    #[test]
    fn neighbours_are_one_copy() {
        let joined = join(&[row(1000, 5000, 200), row(1200, 5200, 100), row(1300, 5300, 7)]).map(|s| s.width);
        assert_eq!(joined, Some(307));
        assert_eq!(join(&[row(1000, 5000, 200), row(1201, 5200, 100)]), None);
    }

    #[test]
    fn evenly_spaced_spans_are_rows() {
        let joined = join(&[row(0, 9000, 100), row(300, 9128, 100), row(600, 9256, 100)]);
        assert_eq!(joined.map(|s| (s.slices, s.host_step, s.device_step)), Some((3, 300, 128)));
        assert_eq!(join(&[row(0, 9000, 100), row(300, 9128, 100), row(601, 9256, 100)]), None);
        assert_eq!(join(&[row(0, 9000, 100), row(300, 9128, 99)]), None, "another width");
        assert_eq!(join(&[row(600, 9000, 100), row(300, 9128, 100)]), None, "backwards");
        assert_eq!(join(&[row(0, 9000, 100), row(50, 9128, 100)]), None, "they overlap");
        assert_eq!(join(&[row(0, 0, 100), row(MAX_PITCH + 1, 128, 100)]), None, "too far");
    }

    #[test]
    fn evenly_spaced_rows_are_slices() {
        let joined = join(&[rows(0, 0), rows(16_384, 2048), rows(32_768, 4096)]);
        assert_eq!(joined.map(|s| (s.slices, s.host_step, s.device_step)), Some((3, 16_384, 2048)));
        assert_eq!(join(&[rows(0, 0), rows(16_385, 2048)]), None, "no whole number of rows");
        assert_eq!(join(&[rows(0, 0), rows(4096, 2048)]), None, "they overlap");
        assert_eq!(join(&[rows(0, 0), rows(16_384, 2048), rows(40_960, 4096)]), None);
        assert_eq!(rows(0, 0).joined(&joined.unwrap_or(rows(0, 0))), None);
    }
}
