//! What passes through one buffer of the ring, and the copy between slab and buffer.

use cudarc::driver::sys::{self, CUstream};
use maru_driver::check;
use maru_layout::{Direction, Piece, Pieces, SlabSpan};

use crate::KernelError;

/// Pieces that share a buffer: small slabs of one direction travel together, so that neither the copy engine nor
/// the kernel waits between them.
#[derive(Default)]
pub(super) struct Group<'a> {
    /// Each with its offset in the buffer.
    members: Vec<(&'a Pieces, &'a Piece, u64)>,
}

impl<'a> Group<'a> {
    /// Where the next piece would begin: on a border that suits every access.
    fn end(&self) -> u64 {
        self.members
            .last()
            .map_or(0, |(_, piece, at)| (at + piece.pitch * piece.height).next_multiple_of(256))
    }

    /// Which way the members go; `None` if there are none.
    pub(super) fn direction(&self) -> Option<Direction> {
        self.members.first().map(|(pieces, ..)| pieces.job().direction())
    }

    /// Jobs, pieces and where they lie in the buffer.
    pub(super) fn members(&self) -> impl Iterator<Item = (&'a Pieces, &'a Piece, u64)> {
        self.members.iter().copied()
    }

    pub(super) fn clear(&mut self) {
        self.members.clear();
    }

    /// Whether a piece may join, in a buffer of `room` bytes.
    pub(super) fn takes(&self, direction: Direction, piece: &Piece, room: u64) -> bool {
        let same = self.direction().is_none_or(|ours| ours == direction);
        same && self.end() + piece.pitch * piece.height <= room
    }

    pub(super) fn add(&mut self, pieces: &'a Pieces, piece: &'a Piece) {
        self.members.push((pieces, piece, self.end()));
    }
}

/// One piece between slab and buffer by the copy engine.
///
/// # Safety
/// The slab is host memory that stays, and the piece lies in it; the buffer has room for the piece.
pub(super) unsafe fn copy(
    piece: &Piece,
    slab: SlabSpan,
    buffer: u64,
    into: bool,
    stream: CUstream,
) -> Result<(), KernelError> {
    let host = slab.host.ok_or(KernelError::SlabNotAddressable)?.wrapping_add_signed(piece.offset);
    let device = buffer + piece.lead;
    let narrow = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let pointer = std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(narrow(host));
    if piece.is_contiguous() {
        let bytes = narrow(piece.bytes());
        match into {
            // SAFETY: `bytes` bytes at either place, by the caller's promise.
            true => check("cuMemcpyHtoDAsync", unsafe {
                sys::cuMemcpyHtoDAsync_v2(device, pointer, bytes, stream)
            })?,
            // SAFETY: as above.
            false => check("cuMemcpyDtoHAsync", unsafe {
                sys::cuMemcpyDtoHAsync_v2(pointer, device, bytes, stream)
            })?,
        }
        return Ok(());
    }
    let (host_type, device_type) =
        (sys::CUmemorytype::CU_MEMORYTYPE_HOST, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE);
    let pitch = narrow(piece.pitch);
    let spans = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: if into { host_type } else { device_type },
        srcHost: pointer,
        srcDevice: device,
        srcArray: std::ptr::null_mut(),
        srcPitch: pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: if into { device_type } else { host_type },
        dstHost: pointer,
        dstDevice: device,
        dstArray: std::ptr::null_mut(),
        dstPitch: pitch,
        WidthInBytes: narrow(piece.width),
        Height: narrow(piece.height),
    };
    // SAFETY: the spans lie in slab and buffer by the caller's promise; the driver copies the description.
    Ok(check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const spans, stream) })?)
}
