//! Questions to a stream that somebody else owns, and streams of our own.

use cudarc::driver::sys::{self, CUstream, CUstreamCaptureStatus};

use crate::{Context, DriverError, check};

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

/// Makes what is queued on a stream from now on wait for an event, as it was last recorded. The context is current.
///
/// # Errors
/// [`DriverError`].
///
/// # Safety
/// Both are live.
pub unsafe fn wait_for(event: sys::CUevent, stream: CUstream) -> Result<(), DriverError> {
    // SAFETY: the caller's promise.
    check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
}

/// Waiting on the device for a word that a kernel writes: finer than events, which mark the end of launches. Not every
/// driver and device can.
#[derive(Clone, Copy, Debug)]
pub struct WordWaits(WaitValue);

type WaitValue = unsafe extern "C" fn(CUstream, sys::CUdeviceptr, u64, u32) -> sys::CUresult;

impl WordWaits {
    /// `None` where driver or device cannot.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn of(context: &Context) -> Result<Option<Self>, DriverError> {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
        let mut can = 0;
        // SAFETY: the out pointer is valid; the device belongs to a live context.
        let found = unsafe { sys::cuDeviceGetAttribute(&raw mut can, attribute, context.get().cu_device()) };
        match found {
            // A driver of before the attribute.
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(None),
            found => check("cuDeviceGetAttribute", found)?,
        }
        // SAFETY: the function has this type in every driver that has it.
        let function = unsafe { crate::library::symbol("cuStreamWaitValue64_v2") };
        Ok(function.filter(|_| can != 0).map(WordWaits))
    }

    /// Makes what is queued on a stream from now on wait until a 64-bit word in device memory is at least `value`. The
    /// context is current.
    ///
    /// # Errors
    /// [`DriverError`].
    ///
    /// # Safety
    /// The stream is live, and not being captured; the word is 8 bytes aligned and lives until the wait is over, and what
    /// writes it was queued before.
    pub unsafe fn at_least(self, addr: u64, value: u64, stream: CUstream) -> Result<(), DriverError> {
        let flags = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the caller's promise.
        check("cuStreamWaitValue64", unsafe { (self.0)(stream, addr, value, flags) })
    }
}

/// A stream of our own, which does not synchronise with the legacy default stream.
#[derive(Debug)]
pub struct OwnStream {
    stream: CUstream,
    context: Context,
}

// SAFETY: stream handles may be used from any thread with the context current.
unsafe impl Send for OwnStream {}
// SAFETY: as above.
unsafe impl Sync for OwnStream {}

impl OwnStream {
    /// One of ordinary priority.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(context: &Context) -> Result<Self, DriverError> {
        let _current = context.enter()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the out pointer is valid; the context is current.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, NON_BLOCKING) })?;
        Ok(OwnStream { stream, context: context.clone() })
    }

    /// One whose kernels go before those of every other stream.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn urgent(context: &Context) -> Result<Self, DriverError> {
        let _current = context.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the out pointers are valid; the context is current.
        let range = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", range)?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: as above.
        let made = unsafe { sys::cuStreamCreateWithPriority(&raw mut stream, NON_BLOCKING, greatest) };
        check("cuStreamCreateWithPriority", made)?;
        Ok(OwnStream { stream, context: context.clone() })
    }

    /// Its handle.
    pub fn get(&self) -> CUstream {
        self.stream
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        self.context.give_back("a stream", || {
            // SAFETY: made by `new` or `urgent`, destroyed once; the driver lets what is queued run.
            check("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.stream) })
        });
    }
}

const NON_BLOCKING: u32 = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
