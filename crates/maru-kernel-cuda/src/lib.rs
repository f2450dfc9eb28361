//! The maru-native CUDA kernel: one launch per slab, strides as plain arguments.
//!
//! One device function (`cuda/paged_copy.cu`) moves tokens between the planes of a paged cache and a slab,
//! all layers, K and V together. It knows no layouts: it gets plane addresses, byte strides and slots, all
//! from a [`CopyJob`](maru_layout::CopyJob), whose addresses are in bounds by construction. Slabs may lie in
//! pinned or registered host memory, which the kernel reads and writes over the link, or in device memory.
//!
//! The compiled kernel is embedded in this library and loaded through the driver API at run time, so nothing
//! here needs CUDA to build, and [`availability`] says why it cannot run where it cannot.
//!
//! ```no_run
//! # use maru_kernel_cuda::{KernelError, LaunchOptions, PagedCopyKernel, open_context};
//! # fn f(plan: &maru_layout::CopyPlan, job: &maru_layout::CopyJob) -> Result<(), KernelError> {
//! let kernel = PagedCopyKernel::load(open_context(0)?)?;
//! let planes = kernel.register(plan)?; // once per cache
//! // SAFETY: the job's planes and slab are live memory of this device, and nobody else touches them.
//! let launched = unsafe { kernel.launch(job, &planes, std::ptr::null_mut(), LaunchOptions::default()) }?;
//! launched.wait()?;
//! # Ok(())
//! # }
//! ```

pub mod abi;
mod batch;
mod device;
mod error;
pub mod geometry;
mod image;
mod kernel;
mod launched;
mod module;
mod planes;
mod ring;
mod session;
mod staged;
mod tickets;

pub use batch::LaunchStep;
/// Handles of the driver, as the unsafe functions here take them.
pub use cudarc::driver::sys::{CUevent, CUstream};
pub use device::{availability, device_count, open_context};
pub use error::KernelError;
pub use image::Image;
pub use kernel::{LaunchOptions, PagedCopyKernel};
pub use launched::{Launched, LaunchedRun};
pub use planes::PlaneTable;
pub use staged::{StagedLaunch, StagedMover, StagedOptions};
