//! Which devices there are and whether the kernel can run on them.

use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};
use maru_driver::{Context, DriverError};

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

/// Whether the kernel can run on a device: driver library present and new enough, device there, compute
/// capability 7.0 or later. Makes no context and no device memory.
///
/// # Errors
/// [`KernelError`] with the reason.
pub fn availability(device: usize) -> Result<(), KernelError> {
    check_capability(device, find(device)?)
}

/// Devices the driver sees.
///
/// # Errors
/// [`KernelError::NoDriver`] or [`KernelError::NoDevice`].
pub fn device_count() -> Result<usize, KernelError> {
    maru_driver::require(&SYMBOLS)?;
    let no_device = |error| KernelError::NoDevice { reason: DriverError::from_cudarc("cuInit", error).name };
    result::init().map_err(no_device)?;
    let count = result::device::get_count().map_err(no_device)?;
    match usize::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(KernelError::NoDevice { reason: "device count 0".into() }),
    }
}

/// The primary context of a device, as PyTorch and the CUDA runtime use it. The caller's current context
/// stays what it was.
///
/// # Errors
/// As [`availability`], and [`KernelError::Driver`] if the context cannot be made.
pub fn open_context(device: usize) -> Result<Arc<CudaContext>, KernelError> {
    availability(device)?;
    Ok(Arc::clone(Context::open(device)?.get()))
}

fn find(device: usize) -> Result<sys::CUdevice, KernelError> {
    let count = device_count()?;
    let ordinal = i32::try_from(device).ok().filter(|_| device < count);
    let ordinal = ordinal.ok_or(KernelError::DeviceOutOfRange { device, count })?;
    Ok(result::device::get(ordinal).map_err(|error| DriverError::from_cudarc("cuDeviceGet", error))?)
}

pub(crate) fn check_capability(device: usize, handle: sys::CUdevice) -> Result<(), KernelError> {
    use sys::CUdevice_attribute as Attribute;
    let get = |attribute| {
        // SAFETY: the handle is a device of the initialised driver.
        let value = unsafe { result::device::get_attribute(handle, attribute) };
        value.map_err(|error| DriverError::from_cudarc("cuDeviceGetAttribute", error))
    };
    let major = get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    match major >= 7 {
        true => Ok(()),
        false => Err(KernelError::DeviceTooOld { device, major, minor }),
    }
}
