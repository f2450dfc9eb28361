//! Movers without any kernel of ours: per-layer copies in plain Rust where the cache is in host memory, by the
//! driver's copy calls where it is in device memory.
//!
//! [`HostMover::copy`] carries out a [`maru_layout::CopyJob`] with the calling thread and, for large jobs, a
//! few workers. It is the embedded default where there is no GPU and moves the same bytes as every other
//! mover, always.
//!
//! [`DeviceMover::copy_on`] does so for a cache in device memory, on the caller's stream, with slabs that are
//! registered with the driver, pageable, or in device memory. It uses no processor of the GPU.
//!
//! The way of a host job through the files: `pieces` cuts its tokens where the cache is not evenly strided, `nest`
//! turns what is left into three loops around rows, `store` knows how a row is written.
#![deny(unsafe_code)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("addresses and sizes of jobs are 64-bit");

mod device;
mod error;
mod host;
mod nest;
mod pieces;
mod store;

pub use device::{DeviceCopy, DeviceMover, DeviceOptions};
pub use error::FallbackError;
pub use host::HostMover;
#[doc(hidden)]
pub use host::Tuning;
pub use store::Store;
