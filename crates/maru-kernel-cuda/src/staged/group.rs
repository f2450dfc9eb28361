//! What passes through one buffer of the ring, and the copy between slab and buffer.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUmemorytype, CUstream};
use maru_driver::check;
use maru_layout::{CopyJob, Direction, Piece, Pieces};

use super::StagedStep;
use crate::KernelError;

/// Most bytes from row to row that the driver's two-dimensional copies take, on every device so far
/// (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const MAX_PITCH: u64 = i32::MAX as u64;

/// Pieces that share a buffer: small slabs of one direction travel together, so that neither the copy engine nor
/// the kernel waits between them.
pub(super) struct Group<'a> {
    pub(super) direction: Direction,
    /// The step they belong to; a buffer never holds pieces of two.
    pub(super) step: usize,
    /// Each with its offset in the buffer.
    members: Vec<(&'a Pieces, &'a Piece, u64)>,
}

/// Cuts steps into groups for buffers of `room` bytes.
pub(super) fn groups<'a>(steps: &[StagedStep<'a>], room: u64) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::with_capacity(1);
    for (index, step) in steps.iter().enumerate() {
        for pieces in step.jobs {
            let direction = pieces.job().direction();
            for piece in pieces.list() {
                match groups.last_mut() {
                    Some(group) if group.takes(index, direction, piece, room) => group.add(pieces, piece),
                    _ => {
                        let members = vec![(pieces, piece, 0)];
                        groups.push(Group { direction, step: index, members });
                    }
                }
            }
        }
    }
    groups
}

impl<'a> Group<'a> {
    /// Where the next piece would begin: on a border that suits every access.
    fn end(&self) -> u64 {
        self.members.last().map_or(0, |(_, piece, at)| (at + piece.room()).next_multiple_of(256))
    }

    fn takes(&self, step: usize, direction: Direction, piece: &Piece, room: u64) -> bool {
        self.step == step && self.direction == direction && self.end() + piece.room() <= room
    }

    fn add(&mut self, pieces: &'a Pieces, piece: &'a Piece) {
        self.members.push((pieces, piece, self.end()));
    }

    /// The jobs between buffer and pages.
    pub(super) fn jobs(&self, buffer: u64) -> Vec<CopyJob> {
        self.members.iter().map(|(pieces, piece, at)| pieces.staged(piece, None, Some(buffer + at))).collect()
    }

    /// Copies everything between slabs and buffer by the copy engine.
    ///
    /// # Safety
    /// The slabs are host memory that stays, and the pieces lie in them; the buffer has room for the group.
    pub(super) unsafe fn copy(&self, buffer: u64, stream: CUstream) -> Result<(), KernelError> {
        let into = self.direction == Direction::Scatter;
        let mut pending: Option<Spans> = None;
        for (pieces, piece, at) in &self.members {
            let slab = pieces.job().slab().host.ok_or(KernelError::SlabNotAddressable)?;
            for spans in spans(piece, slab.wrapping_add_signed(piece.offset), buffer + at) {
                // Slabs that lie side by side are one copy: between two the engine rests.
                pending = match pending {
                    Some(last) => match last.joined(&spans) {
                        Some(both) => Some(both),
                        None => {
                            // SAFETY: the caller's promise.
                            unsafe { last.copy(into, stream) }?;
                            Some(spans)
                        }
                    },
                    None => Some(spans),
                };
            }
        }
        // SAFETY: the caller's promise.
        pending.map_or(Ok(()), |last| unsafe { last.copy(into, stream) })
    }
}

/// The copies of a piece: one, unless prefixes are left out in several runs.
fn spans(piece: &Piece, host: u64, buffer: u64) -> impl Iterator<Item = Spans> {
    let (host_pitch, device_pitch) = (piece.run_stride, piece.height * piece.pitch);
    let whole = piece.has_whole_runs();
    let spans = match whole {
        true => Spans {
            host,
            device: buffer + piece.lead,
            width: piece.width * piece.height,
            height: piece.runs,
            host_pitch,
            device_pitch,
        },
        false => Spans {
            host,
            device: buffer + piece.lead,
            width: piece.width,
            height: piece.height,
            host_pitch: piece.pitch,
            device_pitch: piece.pitch,
        },
    };
    let copies = if whole { 1 } else { piece.runs };
    (0..copies).map(move |run| Spans {
        host: spans.host + run * host_pitch,
        device: spans.device + run * device_pitch,
        ..spans
    })
}

/// `height` spans of `width` bytes on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spans {
    host: u64,
    device: u64,
    width: u64,
    height: u64,
    host_pitch: u64,
    device_pitch: u64,
}

impl Spans {
    /// Both as one plain copy, where the other begins where this ends on both sides.
    fn joined(&self, next: &Spans) -> Option<Spans> {
        let plain = self.height == 1 && next.height == 1;
        let adjacent = self.host + self.width == next.host && self.device + self.width == next.device;
        (plain && adjacent).then(|| Spans { width: self.width + next.width, ..*self })
    }

    /// # Safety
    /// All spans are memory that stays: page-locked on the host, the device's on the other side.
    unsafe fn copy(&self, into: bool, stream: CUstream) -> Result<(), KernelError> {
        if self.height > 1 && self.host_pitch.max(self.device_pitch) > MAX_PITCH {
            return (0..self.height).try_for_each(|row| {
                let (host, device) =
                    (self.host + row * self.host_pitch, self.device + row * self.device_pitch);
                // SAFETY: as for this function.
                unsafe { Spans { host, device, height: 1, ..*self }.copy(into, stream) }
            });
        }
        let narrow = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let pointer = std::ptr::with_exposed_provenance_mut::<c_void>(narrow(self.host));
        let width = narrow(self.width);
        if self.height == 1 {
            return match into {
                // SAFETY: `width` bytes at either place, by the caller's promise.
                true => Ok(check("cuMemcpyHtoDAsync", unsafe {
                    sys::cuMemcpyHtoDAsync_v2(self.device, pointer, width, stream)
                })?),
                // SAFETY: as above.
                false => Ok(check("cuMemcpyDtoHAsync", unsafe {
                    sys::cuMemcpyDtoHAsync_v2(pointer, self.device, width, stream)
                })?),
            };
        }
        let (host, device) = (CUmemorytype::CU_MEMORYTYPE_HOST, CUmemorytype::CU_MEMORYTYPE_DEVICE);
        let (host_pitch, device_pitch) = (narrow(self.host_pitch), narrow(self.device_pitch));
        let spans = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: if into { host } else { device },
            srcHost: pointer,
            srcDevice: self.device,
            srcArray: std::ptr::null_mut(),
            srcPitch: if into { host_pitch } else { device_pitch },
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: if into { device } else { host },
            dstHost: pointer,
            dstDevice: self.device,
            dstArray: std::ptr::null_mut(),
            dstPitch: if into { device_pitch } else { host_pitch },
            WidthInBytes: width,
            Height: narrow(self.height),
        };
        // SAFETY: the spans lie in slab and buffer by the caller's promise; the driver copies the description.
        Ok(check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const spans, stream) })?)
    }
}

#[cfg(test)]
mod tests {
    use super::Spans;

    fn spans(host: u64, device: u64, width: u64, height: u64) -> Spans {
        Spans { host, device, width, height, host_pitch: 4096, device_pitch: 4096 }
    }

    #[test]
    fn only_plain_neighbours_on_both_sides_join() {
        let first = spans(1000, 5000, 200, 1);
        let joined = first.joined(&spans(1200, 5200, 100, 1)).map(|s| (s.host, s.device, s.width));
        assert_eq!(joined, Some((1000, 5000, 300)));
        assert_eq!(first.joined(&spans(1201, 5200, 100, 1)), None);
        assert_eq!(first.joined(&spans(1200, 5256, 100, 1)), None);
        assert_eq!(first.joined(&spans(1200, 5200, 100, 2)), None);
        assert_eq!(spans(1000, 5000, 200, 2).joined(&spans(1200, 5200, 100, 1)), None);
    }
}
