//! Which devices there are and whether the kernel can run on them.

use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};

use crate::KernelError;
use crate::driver::{check, failed, library, name};

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
/// [`KernelError::NoDriver`], [`KernelError::DriverTooOld`] or [`KernelError::NoDevice`].
pub fn device_count() -> Result<usize, KernelError> {
    library()?;
    let no_device = |error| KernelError::NoDevice { reason: name(error) };
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
    let mut current = std::ptr::null_mut();
    // SAFETY: the out pointer is valid; the library is initialised.
    check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
    let context = CudaContext::new(device).map_err(|error| failed("cuDevicePrimaryCtxRetain", error));
    // SAFETY: the context was current, so it was alive a moment ago; null clears.
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(current) })?;
    let context = context?;
    // SAFETY: no slice of cudarc's was made in this context; its event tracking only serves those, and would
    // make the context synchronise when a stream is created.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

fn find(device: usize) -> Result<sys::CUdevice, KernelError> {
    let count = device_count()?;
    let ordinal = i32::try_from(device).ok().filter(|_| device < count);
    let ordinal = ordinal.ok_or(KernelError::DeviceOutOfRange { device, count })?;
    result::device::get(ordinal).map_err(|error| failed("cuDeviceGet", error))
}

pub(crate) fn check_capability(device: usize, handle: sys::CUdevice) -> Result<(), KernelError> {
    use sys::CUdevice_attribute as Attribute;
    let get = |attribute| {
        // SAFETY: the handle is a device of the initialised driver.
        let value = unsafe { result::device::get_attribute(handle, attribute) };
        value.map_err(|error: DriverError| failed("cuDeviceGetAttribute", error))
    };
    let major = get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    match major >= 7 {
        true => Ok(()),
        false => Err(KernelError::DeviceTooOld { device, major, minor }),
    }
}
