//! Small trials on a GPU: does the native kernel load, does registering memory work?

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use maru::cxl::{CudaRegistrar, Region, RegisterOptions};
use maru::kernel::{PagedCopyKernel, open_context};
use serde::Serialize;

use crate::memory::shared_file;

/// Bytes that are registered for a moment.
pub(crate) const PROBE_BYTES: u64 = 64 << 20;

/// Whether the native kernel loads.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Kernel {
    pub(crate) loads: bool,
    /// Which of the embedded images the driver took.
    pub(crate) image: Option<String>,
    pub(crate) seconds: Option<f64>,
    pub(crate) reason: Option<String>,
}

/// Whether host memory can be registered.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Registration {
    pub(crate) works: bool,
    /// What was registered.
    pub(crate) memory: &'static str,
    pub(crate) bytes: u64,
    pub(crate) seconds: Option<f64>,
    /// Whether the device reaches the memory by the host's own address.
    pub(crate) same_address: Option<bool>,
    pub(crate) reason: Option<String>,
}

pub(crate) fn kernel(device: usize) -> Kernel {
    let begun = Instant::now();
    match open_context(device).and_then(PagedCopyKernel::load) {
        Ok(kernel) => Kernel {
            loads: true,
            image: Some(kernel.image().to_string()),
            seconds: Some(begun.elapsed().as_secs_f64()),
            reason: None,
        },
        Err(error) => Kernel { loads: false, image: None, seconds: None, reason: Some(error.to_string()) },
    }
}

/// What registering calls; a function that is missing would be a panic of the bindings.
const NEEDED: &[&str] = &[
    "cuInit",
    "cuGetErrorName",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
];

/// Registers memory of `shm` and undoes it; nothing stays behind. `bytes` is a multiple of a page.
pub(crate) fn registration(device: usize, shm: &Path, bytes: u64) -> Registration {
    let failed = |memory, error: String| Registration {
        works: false,
        memory,
        bytes,
        seconds: None,
        same_address: None,
        reason: Some(error),
    };
    if let Err(error) = maru_driver::require(NEEDED) {
        return failed("nothing", error.to_string());
    }
    let (region, memory) = match shared_file(shm, bytes) {
        Ok(region) => (region, "tmpfs"),
        // What is tried then says less about pools, and the report names it.
        Err(_) => match Region::anonymous(bytes) {
            Ok(region) => (region, "anonymous memory"),
            Err(error) => return failed("anonymous memory", error.to_string()),
        },
    };
    let registered = CudaRegistrar::open(device).and_then(|registrar| {
        let begun = Instant::now();
        let options = RegisterOptions { required: true, ..RegisterOptions::default() };
        region.register(Arc::new(registrar), options)?;
        Ok(begun.elapsed().as_secs_f64())
    });
    match registered {
        Ok(seconds) => {
            let host = region.base().addr().get() as u64;
            let same_address = region.device_address(0, bytes).map(|address| address == host);
            region.unregister();
            Registration { works: true, memory, bytes, seconds: Some(seconds), same_address, reason: None }
        }
        Err(error) => failed(memory, error.to_string()),
    }
}
