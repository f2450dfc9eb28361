//! Driver results as errors that name the call.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

/// Codes after which a context is of no more use: every later call in it fails the same way.
const STICKY: [u32; 13] = [
    214, // ECC_UNCORRECTABLE
    220, // NVLINK_UNCORRECTABLE
    700, // ILLEGAL_ADDRESS
    702, // LAUNCH_TIMEOUT
    709, // CONTEXT_IS_DESTROYED
    710, // ASSERT
    714, // HARDWARE_STACK_ERROR
    715, // ILLEGAL_INSTRUCTION
    716, // MISALIGNED_ADDRESS
    717, // INVALID_ADDRESS_SPACE
    718, // INVALID_PC
    719, // LAUNCH_FAILED
    721, // CONTAINED
];

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op} failed: {name} ({code}){}", self.advice())]
#[non_exhaustive]
pub struct DriverError {
    /// The driver function, without its version suffix.
    pub op: &'static str,
    /// The driver's name of the error.
    pub name: String,
    /// The driver's error code.
    pub code: u32,
}

/// `CUDA_ERROR_INVALID_VALUE`, `CUDA_ERROR_NOT_SUPPORTED`.
const REFUSED: [u32; 2] = [1, 801];

impl DriverError {
    /// The error of a call of `op` that returned `code`.
    pub fn new(op: &'static str, code: CUresult) -> Self {
        DriverError { op, name: name(code), code: code as u32 }
    }

    /// The same for what cudarc's wrappers return.
    pub fn from_cudarc(op: &'static str, error: cudarc::driver::DriverError) -> Self {
        Self::new(op, error.0)
    }

    /// Whether the context it happened in is lost: nothing queued there will run any more.
    pub fn is_context_lost(&self) -> bool {
        STICKY.contains(&self.code)
    }

    /// Whether a call was refused for what it was asked (invalid, not supported), before anything was queued: a
    /// simpler call may do.
    pub fn is_refusal(&self) -> bool {
        REFUSED.contains(&self.code)
    }

    /// The stable snake_case kind that the command line and Python report: `context_lost`, `out_of_memory` or
    /// `driver`.
    pub fn kind(&self) -> &'static str {
        match self.code {
            _ if self.is_context_lost() => "context_lost",
            2 => "out_of_memory",
            _ => "driver",
        }
    }

    fn advice(&self) -> &'static str {
        match self.kind() {
            "context_lost" => {
                "; the CUDA context is lost, possibly through other work of this process: restart it"
            }
            _ => "",
        }
    }
}

/// Turns a driver result into an error that names the call.
///
/// # Errors
/// [`DriverError`] for every result but success.
pub fn check(op: &'static str, result: CUresult) -> Result<(), DriverError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(DriverError::new(op, code)),
    }
}

fn name(code: CUresult) -> String {
    let mut text = std::ptr::null();
    if crate::is_present() {
        // SAFETY: the out pointer is valid; the driver stores a static string there or null.
        let _ = unsafe { sys::cuGetErrorName(code, &raw mut text) };
    }
    if text.is_null() {
        return format!("{code:?}");
    }
    // SAFETY: a zero-terminated static string of the driver.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_follow_the_code() {
        let of = |code| DriverError { op: "cuMemcpyAsync", name: "X".into(), code };
        assert_eq!(of(700).kind(), "context_lost");
        assert_eq!(of(719).kind(), "context_lost");
        assert_eq!(of(2).kind(), "out_of_memory");
        assert_eq!(of(1).kind(), "driver");
        assert_eq!(of(1).to_string(), "cuMemcpyAsync failed: X (1)");
        assert!(of(700).to_string().contains("restart"));
    }
}
