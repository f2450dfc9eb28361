//! Registration with the CUDA driver.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUresult};

use super::{Access, DriverFailure, HostRegistrar};
use crate::error::CxlError;

/// Registered memory is usable from every context, and the device gets an address for it.
const FLAGS: c_uint = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// Registers host memory through `cuMemHostRegister`, in one CUDA context.
///
/// The driver API keeps no pending error, so a failure here does not surface in somebody's next call. Every call
/// leaves the caller's current context as it was.
#[derive(Debug)]
pub struct CudaRegistrar {
    context: Arc<CudaContext>,
}

impl CudaRegistrar {
    /// Whether the CUDA driver library is on this machine. Without it every other call into the driver would
    /// panic, so this is asked first.
    pub fn is_driver_present() -> bool {
        // SAFETY: loads and unloads the driver library; its initialisers are NVIDIA's and have no preconditions.
        unsafe { sys::is_culib_present() }
    }

    /// A registrar for the context.
    ///
    /// # Errors
    /// [`CxlError::CudaUnavailable`] when there is no driver library.
    pub fn new(context: Arc<CudaContext>) -> Result<Self, CxlError> {
        if !Self::is_driver_present() {
            return Err(CxlError::CudaUnavailable {
                reason: "the driver library (libcuda.so.1) is not installed".into(),
            });
        }
        Ok(Self { context })
    }

    /// A registrar for the primary context of the `ordinal`-th device.
    ///
    /// # Errors
    /// [`CxlError::CudaUnavailable`] when there is no driver library, [`CxlError::Cuda`] when the driver has no
    /// such device or cannot make a context.
    pub fn open(ordinal: usize) -> Result<Self, CxlError> {
        if !Self::is_driver_present() {
            return Err(CxlError::CudaUnavailable {
                reason: "the driver library (libcuda.so.1) is not installed".into(),
            });
        }
        cudarc::driver::result::init()
            .map_err(|error| CxlError::Cuda { op: "cuInit", failure: failure(error.0) })?;
        let before = current_context();
        let context = CudaContext::new(ordinal);
        // Creating the handle leaves its context current.
        restore(before);
        let context = context
            .map_err(|error| CxlError::Cuda { op: "opening the device", failure: failure(error.0) })?;
        Ok(Self { context })
    }

    /// The context it registers in.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Runs driver calls with the context current, and puts the caller's back.
    fn with_context<T>(&self, calls: impl FnOnce() -> Result<T, DriverFailure>) -> Result<T, DriverFailure> {
        let before = current_context();
        // SAFETY: the context is alive as long as the handle we hold.
        let entered = unsafe { sys::cuCtxSetCurrent(self.context.cu_ctx()) };
        let result = check(entered).and_then(|()| calls());
        restore(before);
        result
    }
}

impl HostRegistrar for CudaRegistrar {
    fn register(&self, addr: NonNull<u8>, len: usize, access: Access) -> Result<(), DriverFailure> {
        let flags = match access {
            Access::ReadWrite => FLAGS,
            // The driver pins for writing otherwise, which a read-only mapping refuses.
            Access::ReadOnly => FLAGS | sys::CU_MEMHOSTREGISTER_READ_ONLY,
        };
        if access == Access::ReadOnly {
            let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
            let supported =
                self.with_context(|| self.context.attribute(attribute).map_err(|error| failure(error.0)))?;
            if supported == 0 {
                return Err(failure(CUresult::CUDA_ERROR_NOT_SUPPORTED));
            }
        }
        self.with_context(|| {
            // SAFETY: the driver checks the range itself and pins its pages; it neither reads nor writes them.
            check(unsafe { sys::cuMemHostRegister_v2(addr.as_ptr().cast(), len, flags) })
        })
    }

    fn unregister(&self, addr: NonNull<u8>) -> Result<(), DriverFailure> {
        self.with_context(|| {
            // SAFETY: the driver refuses an address that no registration begins at.
            check(unsafe { sys::cuMemHostUnregister(addr.as_ptr().cast::<c_void>()) })
        })
    }

    fn device_pointer(&self, addr: NonNull<u8>) -> Result<u64, DriverFailure> {
        self.with_context(|| {
            let mut device = 0;
            // SAFETY: writes one device pointer to a local; the driver refuses memory that is not registered.
            check(unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut device, addr.as_ptr().cast(), 0) })?;
            Ok(device)
        })
    }

    fn quiesce(&self) -> Result<(), DriverFailure> {
        self.with_context(|| {
            // SAFETY: waits for the current context's work and touches no memory of ours.
            check(unsafe { sys::cuCtxSynchronize() })
        })
    }
}

/// The thread's current context; null when it has none.
fn current_context() -> sys::CUcontext {
    let mut context = ptr::null_mut();
    // SAFETY: writes one handle to a local. A failure leaves it null, which means "none".
    let _ = unsafe { sys::cuCtxGetCurrent(&raw mut context) };
    context
}

fn restore(context: sys::CUcontext) {
    // SAFETY: the handle was this thread's current context a moment ago, or null for none.
    if let Err(failure) = check(unsafe { sys::cuCtxSetCurrent(context) }) {
        tracing::warn!(%failure, "could not make the caller's CUDA context current again");
    }
}

fn check(result: CUresult) -> Result<(), DriverFailure> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failure(result)) }
}

fn failure(result: CUresult) -> DriverFailure {
    let code = result as u32;
    let mut name: *const c_char = ptr::null();
    // SAFETY: writes a pointer to a static string, or null for a code it does not know.
    let _ = unsafe { sys::cuGetErrorName(result, &raw mut name) };
    let text = if name.is_null() {
        "unknown driver error".to_owned()
    } else {
        // SAFETY: the driver gave a NUL-terminated static string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    };
    DriverFailure { code, text }
}
