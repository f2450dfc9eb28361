//! Movers without any kernel of ours: per-layer copies in plain Rust where the cache is in host memory.
//!
//! [`HostMover::copy`] carries out a [`maru_layout::CopyJob`] with the calling thread and, for large jobs, a
//! few workers. It is the embedded default where there is no GPU and moves the same bytes as every other
//! mover, always.
//!
//! The way of a job through the files: `pieces` cuts its tokens where the cache is not evenly strided, `nest`
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

pub use error::FallbackError;
pub use host::HostMover;
#[doc(hidden)]
pub use host::Tuning;
pub use store::Store;
