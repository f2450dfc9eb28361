//! Questions to a stream that somebody else owns.

use cudarc::driver::sys::{self, CUstream, CUstreamCaptureStatus};

use crate::{DriverError, check};

/// Whether it is the legacy default stream, under either of its names.
pub fn is_legacy_default(stream: CUstream) -> bool {
    stream.addr() <= 1
}

/// Whether it is one of the streams every context has, which name no context of their own.
pub fn is_default(stream: CUstream) -> bool {
    stream.addr() <= 2
}

/// Whether what is queued is recorded into a graph instead of run. The stream's context is current.
///
/// # Errors
/// [`DriverError`].
///
/// # Safety
/// A live stream, or a default one.
pub unsafe fn is_capturing(stream: CUstream) -> Result<bool, DriverError> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the out pointer is valid; the stream is the caller's promise.
    check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) })?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// The context a stream belongs to; a default stream's is the current one.
///
/// # Errors
/// [`DriverError`].
///
/// # Safety
/// A live stream, or a default one.
pub unsafe fn context(stream: CUstream) -> Result<sys::CUcontext, DriverError> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the out pointer is valid; the stream is the caller's promise.
    check("cuStreamGetCtx", unsafe { sys::cuStreamGetCtx(stream, &raw mut context) })?;
    Ok(context)
}

/// Waits for everything queued on a stream.
///
/// # Errors
/// [`DriverError`], which may stem from any work of the context.
///
/// # Safety
/// A live stream, or a default one.
pub unsafe fn synchronize(stream: CUstream) -> Result<(), DriverError> {
    // SAFETY: the caller's promise.
    check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
}
