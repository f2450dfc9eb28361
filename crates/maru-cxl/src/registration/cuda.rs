//! Registration with the CUDA driver.

use std::ffi::{c_uint, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUresult};
use maru_driver::{Context, DriverError, check};

use super::{Access, DriverFailure, HostRegistrar};
use crate::error::CxlError;

/// Driver functions that are called here, or by cudarc's context. One that is missing would panic when it is
/// called, so all are looked up before.
const SYMBOLS: [&str; 16] = [
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorName",
    "cuInit",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuThreadExchangeStreamCaptureMode",
];

/// Registered memory is usable from every context, and the device gets an address for it.
const FLAGS: c_uint = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// Registers host memory through `cuMemHostRegister`, in one CUDA context.
///
/// The driver API keeps no pending error, so a failure here does not surface in somebody's next call. Every call
/// leaves the caller's current context as it was.
#[derive(Debug)]
pub struct CudaRegistrar {
    context: Context,
}

impl CudaRegistrar {
    /// Whether the CUDA driver library is on this machine.
    pub fn is_driver_present() -> bool {
        maru_driver::is_present()
    }

    /// A registrar for the context.
    ///
    /// # Errors
    /// [`CxlError::CudaUnavailable`] when there is no driver library, or one that is too old.
    pub fn new(context: Arc<CudaContext>) -> Result<Self, CxlError> {
        let context = Context::new(context);
        usable()?;
        Ok(Self { context })
    }

    /// A registrar for the primary context of the `ordinal`-th device.
    ///
    /// # Errors
    /// [`CxlError::CudaUnavailable`] when there is no driver library, or one that is too old, [`CxlError::Cuda`]
    /// when the driver has no such device or cannot make a context.
    pub fn open(ordinal: usize) -> Result<Self, CxlError> {
        usable()?;
        let context =
            Context::open(ordinal).map_err(|error| CxlError::Cuda { op: error.op, failure: error.into() })?;
        Ok(Self { context })
    }

    /// The context it registers in.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.context.get()
    }

    /// Runs driver calls with the context current, and puts the caller's back.
    fn with_context<T>(&self, calls: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DriverFailure> {
        let _current = self.context.enter()?;
        Ok(calls()?)
    }
}

/// The library must be asked for before anything is called: without it every call would panic.
fn usable() -> Result<(), CxlError> {
    maru_driver::require(&SYMBOLS).map_err(|error| CxlError::CudaUnavailable { reason: error.to_string() })
}

impl From<DriverError> for DriverFailure {
    fn from(error: DriverError) -> Self {
        DriverFailure { code: error.code, text: error.name }
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
            let supported = self.with_context(|| {
                let supported = self.context.get().attribute(attribute);
                supported.map_err(|error| DriverError::from_cudarc("cuDeviceGetAttribute", error))
            })?;
            if supported == 0 {
                return Err(DriverError::new("cuMemHostRegister", CUresult::CUDA_ERROR_NOT_SUPPORTED).into());
            }
        }
        self.with_context(|| {
            // SAFETY: the driver checks the range itself and pins its pages; it neither reads nor writes them.
            check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(addr.as_ptr().cast(), len, flags) })
        })
    }

    fn unregister(&self, addr: NonNull<u8>) -> Result<(), DriverFailure> {
        self.with_context(|| {
            // SAFETY: the driver refuses an address that no registration begins at.
            check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(addr.as_ptr().cast::<c_void>()) })
        })
    }

    fn device_pointer(&self, addr: NonNull<u8>) -> Result<u64, DriverFailure> {
        self.with_context(|| {
            let mut device = 0;
            // SAFETY: writes one device pointer to a local; the driver refuses memory that is not registered.
            let found =
                unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut device, addr.as_ptr().cast(), 0) };
            check("cuMemHostGetDevicePointer", found).map(|()| device)
        })
    }

    fn quiesce(&self) -> Result<(), DriverFailure> {
        self.with_context(|| {
            // SAFETY: waits for the current context's work and touches no memory of ours.
            check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
        })
    }
}
