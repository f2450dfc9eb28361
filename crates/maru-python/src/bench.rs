//! A yardstick for the cost of calls: bare kernel launches, timed where no interpreter is in between.

use std::ffi::c_void;
use std::sync::Mutex;
use std::time::Instant;

use cudarc::driver::sys;
use maru_driver::check;
use pyo3::prelude::*;

use crate::errors::{Fault, detached, guard};
use crate::memory::with_context;
use crate::process::{lock, process};

/// A kernel that does nothing.
const NOTHING: &std::ffi::CStr =
    c".version 6.4\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\n";

/// Nanoseconds that each of `count` bare `cuLaunchKernel` calls takes on a stream of a device, the queue
/// drained before and after.
#[pyfunction]
pub(crate) fn _launch_ns(py: Python<'_>, device: u32, stream: usize, count: u32) -> PyResult<Vec<u64>> {
    guard(py, || Ok(detached(py, || launches(device, stream, count))?))
}

/// The kernel on a device, loaded once and for good. The device's context is current.
fn nothing(device: u32) -> Result<sys::CUfunction, Fault> {
    /// Devices with the handle as a number.
    static LOADED: Mutex<Vec<(u32, usize)>> = Mutex::new(Vec::new());
    let mut loaded = lock(&LOADED);
    if let Some((_, function)) = loaded.iter().find(|(n, _)| *n == device) {
        return Ok(std::ptr::with_exposed_provenance_mut(*function));
    }
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: writes one handle; the image is text that ends with a zero.
    check("cuModuleLoadData", unsafe {
        sys::cuModuleLoadData(&raw mut module, NOTHING.as_ptr().cast::<c_void>())
    })?;
    // SAFETY: the module was just loaded; the name is a C string.
    let found = unsafe { sys::cuModuleGetFunction(&raw mut function, module, c"nothing".as_ptr()) };
    check("cuModuleGetFunction", found)?;
    loaded.push((device, function.expose_provenance()));
    Ok(function)
}

fn launches(device: u32, stream: usize, count: u32) -> Result<Vec<u64>, Fault> {
    process().context(device)?;
    with_context(maru_transfer::Place::Cuda(device), || {
        let stream: sys::CUstream = std::ptr::with_exposed_provenance_mut(stream);
        let function = nothing(device)?;
        let mut times = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
        // SAFETY: the stream is the caller's, alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })?;
        let none: *mut *mut c_void = std::ptr::null_mut();
        for _ in 0..count {
            let begun = Instant::now();
            // SAFETY: the kernel takes no arguments; function and stream belong to the current context.
            let launched = unsafe { sys::cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, none, none) };
            times.push(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
            check("cuLaunchKernel", launched)?;
        }
        // SAFETY: as above.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })?;
        Ok(times)
    })
}
