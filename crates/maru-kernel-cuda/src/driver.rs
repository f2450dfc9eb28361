//! The little of the driver API that is used here: presence, errors, the current context, memory.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaContext, DriverError, sys};

use crate::KernelError;

/// Driver functions this crate and cudarc's context call. A function that is missing would panic when it is
/// called, so all are looked up before the first call.
const SYMBOLS: [&str; 40] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuLaunchKernel",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuStreamCreateWithPriority",
    "cuCtxGetStreamPriorityRange",
    "cuEventDestroy_v2",
    "cuThreadExchangeStreamCaptureMode",
];

/// Whether the driver library is there and has every function needed, without initialising it.
pub(crate) fn library() -> Result<(), KernelError> {
    static FOUND: AtomicBool = AtomicBool::new(false);
    if FOUND.load(Ordering::Acquire) {
        return Ok(());
    }
    // SAFETY: loads the driver library if it is there, whose constructors are safe to run.
    if !unsafe { sys::is_culib_present() } {
        return Err(KernelError::NoDriver);
    }
    // SAFETY: the library is present, as just seen.
    let library = unsafe { sys::culib() };
    for symbol in SYMBOLS {
        // SAFETY: the symbol is only looked up, never called through this type.
        if unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_err() {
            return Err(KernelError::DriverTooOld { symbol });
        }
    }
    FOUND.store(true, Ordering::Release);
    Ok(())
}

/// Turns a driver result into an error that names the call.
pub(crate) fn check(op: &'static str, result: sys::CUresult) -> Result<(), KernelError> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(failed(op, DriverError(code))),
    }
}

/// The same for what cudarc's wrappers return.
pub(crate) fn failed(op: &'static str, error: DriverError) -> KernelError {
    KernelError::Driver { op, name: name(error), code: error.0 as u32 }
}

/// The driver's name of an error.
pub(crate) fn name(error: DriverError) -> String {
    match error.error_name() {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => format!("{:?}", error.0),
    }
}

/// Makes a context current for a scope and restores what was current before.
///
/// It also says that the driver calls of the scope have nothing to do with a capture that another thread may
/// have going on: by default asking an event or allocating memory would break it (PyTorch captures that way).
#[derive(Debug)]
pub(crate) struct Current {
    pushed: bool,
    capture_mode: sys::CUstreamCaptureMode,
}

impl Current {
    pub(crate) fn enter(context: &CudaContext) -> Result<Self, KernelError> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the pointer is valid for the call; the library is initialised, as a context exists.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        let mut capture_mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid for the call; `Drop` exchanges back.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut capture_mode) };
        check("cuThreadExchangeStreamCaptureMode", exchanged)?;
        let mut entered = Current { pushed: false, capture_mode };
        if current != context.cu_ctx() {
            // SAFETY: the context is alive while `context` is borrowed; `Drop` pops it again.
            check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(context.cu_ctx()) })?;
            entered.pushed = true;
        }
        Ok(entered)
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: the pointer is valid for the call; gives the thread back the mode it had.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.capture_mode) };
        if let Err(error) = check("cuThreadExchangeStreamCaptureMode", exchanged) {
            tracing::error!(%error, "the caller's capture mode was not restored");
        }
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops what `enter` pushed on this thread (the type is not `Send` in practice: it lives
            // in one scope).
            let result = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
            if let Err(error) = check("cuCtxPopCurrent", result) {
                tracing::error!(%error, "the caller's CUDA context was not restored");
            }
        }
    }
}

/// Pinned host memory that the device can address.
#[derive(Debug)]
pub(crate) struct PinnedBuffer {
    context: Arc<CudaContext>,
    host: NonNull<u8>,
    device: u64,
}

// SAFETY: an address and its owner; the users of the memory see to exclusive access.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// `bytes` of zeroes. The context is current.
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, KernelError> {
        let mut host = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the out pointer is valid; the context is current.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut host, bytes, flags) })?;
        let Some(start) = NonNull::new(host.cast::<u8>()) else {
            let name = "null pointer".into();
            return Err(KernelError::Driver { op: "cuMemHostAlloc", name, code: 0 });
        };
        let mut buffer = PinnedBuffer { context: context.clone(), host: start, device: 0 };
        // SAFETY: `bytes` bytes were just allocated there.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        // SAFETY: the allocation was made mappable; the out pointer is valid.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut buffer.device, host, 0) };
        check("cuMemHostGetDevicePointer", result)?;
        Ok(buffer)
    }

    pub(crate) fn host(&self) -> *mut u8 {
        self.host.as_ptr()
    }

    pub(crate) fn device(&self) -> u64 {
        self.device
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let freed = Current::enter(&self.context).and_then(|_current| {
            // SAFETY: allocated by `cuMemHostAlloc` in `new` and freed once. The driver waits for work that
            // uses it.
            check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(self.host.as_ptr().cast()) })
        });
        if let Err(error) = freed {
            tracing::error!(%error, "pinned memory of the kernel leaks");
        }
    }
}

/// Device memory.
#[derive(Debug)]
pub(crate) struct DeviceBuffer {
    context: Arc<CudaContext>,
    addr: u64,
}

impl DeviceBuffer {
    /// `bytes` of device memory, not initialised. The context is current.
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, KernelError> {
        let mut addr = 0;
        // SAFETY: the out pointer is valid; the context is current.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut addr, bytes) })?;
        Ok(DeviceBuffer { context: context.clone(), addr })
    }

    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let freed = Current::enter(&self.context).and_then(|_current| {
            // SAFETY: allocated by `cuMemAlloc` in `new` and freed once. The driver waits for work that uses it.
            check("cuMemFree", unsafe { sys::cuMemFree_v2(self.addr) })
        });
        if let Err(error) = freed {
            tracing::error!(%error, "device memory of the kernel leaks");
        }
    }
}

/// Uploads bytes and waits until they are there. For set-up, not for transfers. The context is current.
pub(crate) fn upload_and_wait(addr: u64, bytes: &[u8]) -> Result<(), KernelError> {
    // A stream of its own: a plain synchronous copy of pageable memory may return before the data has
    // arrived, and on the default stream it would wait for everybody's work.
    let mut stream = std::ptr::null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: the out pointer is valid; the context is current.
    check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
    // SAFETY: `addr` is device memory of at least that length (the callers allocate it so); `bytes` outlives
    // the copy, which is waited for below.
    let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(addr, bytes.as_ptr().cast(), bytes.len(), stream) };
    let copied = check("cuMemcpyHtoDAsync", copied);
    // SAFETY: the stream was created above.
    let waited = check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) });
    // SAFETY: as above; it is not used again.
    let destroyed = check("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(stream) });
    copied.and(waited).and(destroyed)
}
