//! What the driver of a context can do beyond what every driver can.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUdevice_attribute, CUdeviceptr, CUresult, CUstream};
use maru_driver::{DriverError, check, symbol};

/// CUDA 12.8: with a place for the index of the entry that failed.
pub(super) type BatchOf12 = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> CUresult;

/// CUDA 13.0.
pub(super) type BatchOf13 = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    CUstream,
) -> CUresult;

/// A copy of slices of rows.
pub(super) type Slices = unsafe extern "C" fn(*const sys::CUDA_MEMCPY3D, CUstream) -> CUresult;

/// The batched copy of this driver, whichever generation it has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Batch {
    Of12(BatchOf12),
    Of13(BatchOf13),
}

impl Batch {
    /// Looks for both, the newer first. Neither is an error: drivers before 12.8 have none.
    fn look_up() -> Option<Batch> {
        // SAFETY: the type is that of the function in the headers of CUDA 13.
        if let Some(found) = unsafe { symbol::<BatchOf13>("cuMemcpyBatchAsync_v2") } {
            return Some(Batch::Of13(found));
        }
        // SAFETY: the type is that of the function in the headers of CUDA 12.8.
        unsafe { symbol::<BatchOf12>("cuMemcpyBatchAsync") }.map(Batch::Of12)
    }

    /// Which one it is, for the log.
    pub(super) fn name(self) -> &'static str {
        match self {
            Batch::Of12(_) => "cuMemcpyBatchAsync",
            Batch::Of13(_) => "cuMemcpyBatchAsync_v2",
        }
    }
}

/// What the driver of a context can do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Abilities {
    pub(super) batch: Option<Batch>,
    pub(super) slices: Option<Slices>,
    pub(super) max_pitch: u64,
    /// Rows of a copy may lie in several allocations.
    pub(super) rows_anywhere: bool,
}

impl Abilities {
    pub(super) fn of(context: &Arc<CudaContext>, batched: bool) -> Result<Self, DriverError> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH;
        let mut pitch = 0;
        // SAFETY: the out pointer is valid; the device is the context's.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut pitch, attribute, context.cu_device()) };
        check("cuDeviceGetAttribute", result)?;
        // A driver that does not say is taken at the value that all have had so far.
        let max_pitch = u64::try_from(pitch).ok().filter(|p| *p > 0).unwrap_or(i32::MAX as u64);
        let batch = batched.then(Batch::look_up).flatten();
        // SAFETY: the type is that of the function in the headers.
        let slices = unsafe { symbol::<Slices>("cuMemcpy3DAsync_v2") };
        Ok(Abilities { batch, slices, max_pitch, rows_anywhere: true })
    }

    /// Without what the driver has refused.
    pub(super) fn but(self, refused: Refused) -> Self {
        Abilities {
            slices: self.slices.filter(|_| !refused.slices),
            rows_anywhere: self.rows_anywhere && !refused.rows,
            ..self
        }
    }
}

/// Copies that the driver turned out not to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Refused {
    /// Of rows: those of several layers are no longer tried.
    pub(super) rows: bool,
    /// Of slices: none are tried any more.
    pub(super) slices: bool,
}

/// What was refused so far, so that the next plan does without.
#[derive(Debug, Default)]
pub(super) struct Memory {
    rows: AtomicBool,
    slices: AtomicBool,
}

impl Memory {
    pub(super) fn refused(&self) -> Refused {
        Refused { rows: self.rows.load(Ordering::Relaxed), slices: self.slices.load(Ordering::Relaxed) }
    }

    /// Adds what a queue has learned on `device`.
    pub(super) fn learn(&self, refused: Refused, device: usize) {
        if refused.slices && !self.slices.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                device,
                "the driver refused a copy of slices of rows; rows are copied slice by slice"
            );
        }
        if refused.rows && !self.rows.swap(true, Ordering::Relaxed) {
            tracing::warn!(device, "the driver refused a copy of rows; layers are no longer moved together");
        }
    }
}
