//! The simulator's view of the driver's types is cudarc's.

use std::ffi::CStr;

use cudarc::driver::sys;
use maru_sim_driver::Session;

use crate::common::Test;

pub(crate) fn tests() -> Vec<Test> {
    tests![
        structures_have_the_sizes_the_simulator_asserts,
        error_names_are_those_of_the_bindings,
        functions_are_found_by_name_and_version,
        cudarc_loads_the_simulator,
    ]
}

fn structures_have_the_sizes_the_simulator_asserts(_: &Session) {
    assert_eq!(size_of::<sys::CUDA_MEMCPY2D>(), 128);
    assert_eq!(size_of::<sys::CUDA_MEMCPY3D>(), 200);
    assert_eq!(size_of::<sys::CUlaunchConfig>(), 56);
    assert_eq!(size_of::<sys::CUmemcpyAttributes>(), 24);
    assert_eq!(std::mem::offset_of!(sys::CUDA_MEMCPY2D, dstMemoryType), 72);
    assert_eq!(std::mem::offset_of!(sys::CUDA_MEMCPY3D, dstMemoryType), 120);
    assert_eq!(std::mem::offset_of!(sys::CUlaunchConfig, hStream), 32);
}

fn error_names_are_those_of_the_bindings(_: &Session) {
    use sys::CUresult::*;
    for code in [
        CUDA_SUCCESS,
        CUDA_ERROR_INVALID_VALUE,
        CUDA_ERROR_OUT_OF_MEMORY,
        CUDA_ERROR_NOT_INITIALIZED,
        CUDA_ERROR_NO_DEVICE,
        CUDA_ERROR_INVALID_DEVICE,
        CUDA_ERROR_INVALID_IMAGE,
        CUDA_ERROR_INVALID_CONTEXT,
        CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUDA_ERROR_INVALID_PTX,
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUDA_ERROR_INVALID_HANDLE,
        CUDA_ERROR_NOT_FOUND,
        CUDA_ERROR_NOT_READY,
        CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_CONTEXT_IS_DESTROYED,
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
        CUDA_ERROR_MISALIGNED_ADDRESS,
        CUDA_ERROR_LAUNCH_FAILED,
        CUDA_ERROR_NOT_PERMITTED,
        CUDA_ERROR_NOT_SUPPORTED,
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        CUDA_ERROR_CAPTURED_EVENT,
        CUDA_ERROR_UNKNOWN,
    ] {
        let mut name = std::ptr::null();
        ok!(cuGetErrorName(code, &mut name));
        // SAFETY: the simulator's names are static.
        let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap();
        assert_eq!(name, format!("{code:?}"));
    }
}

fn functions_are_found_by_name_and_version(session: &Session) {
    for function in ["cuMemAlloc_v2", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuLaunchKernel"] {
        assert!(session.has(function), "{function}");
    }
    assert!(!session.has("cuMemAlloc"), "the first version is not there any more");
    assert!(!session.has("_ZN3sim5stateEv"), "only the driver's functions are visible");
}

fn cudarc_loads_the_simulator(session: &Session) {
    let mut version = 0;
    ok!(cuDriverGetVersion(&mut version));
    assert_eq!(version, 13000);
    session.set("driver_version", 12080);
    ok!(cuDriverGetVersion(&mut version));
    assert_eq!((version, session.calls("cuDriverGetVersion")), (12080, 2));
}
