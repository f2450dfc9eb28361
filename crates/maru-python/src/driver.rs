//! The few questions to the CUDA driver about addresses: whose memory, how much, reachable how.

use std::ffi::c_void;

use cudarc::driver::sys;
use maru_driver::check;

use crate::errors::Fault;

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// Address by which the device reaches it.
    pub(crate) device: u64,
    /// The device whose memory it is; `None` for registered or pinned host memory.
    pub(crate) ordinal: Option<u32>,
    /// First byte of the driver's range around it.
    pub(crate) start: u64,
    /// Bytes of that range.
    pub(crate) len: u64,
    /// A number of the allocation that is not reused; 0 for ranges of the virtual memory calls.
    pub(crate) id: u64,
}

/// What the driver knows of an address, in one call; `None` for memory it has never heard of. A context is
/// current.
pub(crate) fn known(addr: u64) -> Option<Known> {
    use sys::CUpointer_attribute as A;
    const HOST: u32 = 1;
    const DEVICE: u32 = 2;
    let (mut kind, mut ordinal) = (0u32, -1i32);
    let (mut device, mut start, mut len, mut id) = (0u64, 0u64, 0usize, 0u64);
    let mut attributes = [
        A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        A::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        A::CU_POINTER_ATTRIBUTE_BUFFER_ID,
    ];
    let mut values: [*mut c_void; 6] = [
        (&raw mut kind).cast(),
        (&raw mut ordinal).cast(),
        (&raw mut device).cast(),
        (&raw mut start).cast(),
        (&raw mut len).cast(),
        (&raw mut id).cast(),
    ];
    // SAFETY: six attributes and six places of their types, which the driver fills; for an address it does not
    // know it writes zeroes.
    let result =
        unsafe { sys::cuPointerGetAttributes(6, attributes.as_mut_ptr(), values.as_mut_ptr(), addr) };
    if result != sys::CUresult::CUDA_SUCCESS {
        return None;
    }
    let ordinal = match kind {
        HOST => None,
        DEVICE => Some(u32::try_from(ordinal).ok()?),
        _ => return None,
    };
    // Host memory that the device reaches at no address of its own is of no use to a kernel.
    let device = if ordinal.is_some() { addr } else { device };
    Some(Known { device, ordinal, start, len: len as u64, id }).filter(|known| known.device != 0)
}

/// The number of the allocation around an address; `None` for memory that has none. A context is current.
pub(crate) fn buffer_id(addr: u64) -> Option<u64> {
    let mut id = 0u64;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
    // SAFETY: the place is of the attribute's type.
    let result = unsafe { sys::cuPointerGetAttribute((&raw mut id).cast(), attribute, addr) };
    (result == sys::CUresult::CUDA_SUCCESS && id != 0).then_some(id)
}

/// The device whose memory an address is, if there is a driver at all.
pub(crate) fn device_of(addr: u64) -> Option<u32> {
    maru_kernel_cuda::device_count().ok()?;
    known(addr)?.ordinal
}

/// The end of known memory from an address on, over the seams of adjacent ranges: torch's expandable segments
/// are many of them. Stops once `needed` is reached. A context is current.
pub(crate) fn known_end(addr: u64, needed: u64) -> u64 {
    let mut at = addr;
    while at < needed {
        match known(at) {
            Some(range) if range.len > 0 && range.start <= at => {
                at = range.start.saturating_add(range.len).max(at + 1);
            }
            _ => break,
        }
    }
    at
}

/// Reads 64-bit numbers from device memory, after what is queued on the stream. Blocks; a context is current.
pub(crate) fn read_words(addr: u64, count: usize, stream: usize) -> Result<Vec<i64>, Fault> {
    let stream: sys::CUstream = std::ptr::with_exposed_provenance_mut(stream);
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is the caller's, alive by the contract of the public calls; writes one local.
    check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) })?;
    if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Err(Fault::state(
            "a pointer or block list in device memory must be read once before it is used in a captured graph: \
             make the call once outside the capture, or pass the list in host memory",
        ));
    }
    let mut words = vec![0i64; count];
    // SAFETY: the destination holds `count` words; the source was checked by the caller, and the driver checks
    // it again.
    let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(words.as_mut_ptr().cast(), addr, count * 8, stream) };
    // SAFETY: as for the capture query.
    let done = unsafe { sys::cuStreamSynchronize(stream) };
    check("cuMemcpyDtoHAsync", copied)?;
    check("cuStreamSynchronize", done)?;
    Ok(words)
}
