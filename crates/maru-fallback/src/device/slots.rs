//! Slots in device memory, brought to the host.
#![allow(unsafe_code)]

use cudarc::driver::sys::{self, CUstream};
use maru_driver::{DriverError, check, stream as streams};
use maru_layout::{CopyJob, JobRequest, JobSlots, SlabSpan, SlotMapping};

use super::queue::size;
use crate::FallbackError;

/// The same job with its slots in host memory, checked; `None` if it has none to read. Waits for the stream.
///
/// # Safety
/// The job's slots are device memory, and the stream is live; its context is current.
pub(super) unsafe fn read_back(job: &CopyJob, stream: CUstream) -> Result<Option<CopyJob>, FallbackError> {
    let JobSlots::Device { addr, len } = *job.slots() else { return Ok(None) };
    // What is skipped is not even looked at.
    let mut slots = vec![-1i64; size(len)];
    let tail = &mut slots[size(job.skip())..];
    // SAFETY: `tail` has room for the slots behind the skipped ones, which are the caller's promise.
    if let Err(error) = unsafe { read(tail, addr + 8 * job.skip(), stream) } {
        // The device may still write there.
        std::mem::forget(slots);
        return Err(error.into());
    }
    // The job's slab begins at its first layer, a request's at layer 0.
    let shift = u64::from(job.first_layer()) * job.plan().geometry().slab_layer_stride;
    let slab = job.slab();
    let back = |addr: Option<u64>| addr.map(|a| a - shift);
    let request = JobRequest {
        direction: job.direction(),
        slab: SlabSpan { host: back(slab.host), device: back(slab.device), len: slab.len + shift },
        slots: SlotMapping::from_slots(slots),
        skip_tokens: job.skip(),
        partial: true,
        layers: Some((job.first_layer(), job.layer_count())),
    };
    let job = CopyJob::new(job.plan().clone(), request)?;
    Ok(Some(job).filter(|job| !job.is_empty()))
}

/// # Safety
/// `addr` is device memory with as many slots; the stream is live and its context current. After an error the
/// memory of `slots` may still be written.
unsafe fn read(slots: &mut [i64], addr: u64, stream: CUstream) -> Result<(), DriverError> {
    let (to, bytes) = (slots.as_mut_ptr().cast(), size_of_val(slots));
    // SAFETY: the caller's promise; waited for below.
    check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(to, addr, bytes, stream) })?;
    // SAFETY: the caller's promise.
    unsafe { streams::synchronize(stream) }
}
