//! Development only: a simulated CUDA driver, `libcuda.so`, for tests on machines without a GPU.
//!
//! Everything that calls the driver runs unchanged: [`install`] loads the library before anybody asks for the
//! real one. Devices, contexts, streams, events, graphs, registered memory and copies behave as the driver
//! documents them, kernels are the native kernel's own source compiled for the host, and work is done by
//! threads of the streams, later than the call that queued it. Every function can be told to fail, or to be
//! missing.
//!
//! Where the driver is lenient the simulator is strict, so that mistakes show:
//!
//! * Device memory cannot be touched by the host, and every byte behind an allocation is an illegal address.
//! * Fresh memory is filled with 0xa5 (its first 64 MiB).
//! * `cuMemHostUnregister` does not wait for work in flight; that work then fails.
//! * A batched copy whose source may be read at any time reads it before the work queued ahead of it.
//! * A kernel whose host memory is not registered fails, misaligned accesses fail, other devices' memory fails.
//!
//! ```no_run
//! let session = maru_sim_driver::session()?;
//! session.fail("cuMemAlloc", 3, 2); // the third allocation from now on runs out of memory
//! # Ok::<(), maru_sim_driver::SimError>(())
//! ```
//!
//! Other processes are scripted by the environment variable `MARU_SIM_CUDA`, see [`VARIABLE`]. Any program runs
//! beside simulated GPUs with the example `simulated`, the device tests of this workspace among them:
//!
//! ```text
//! export MARU_REQUIRE_GPU=1
//! cargo run -p maru-sim-driver --example simulated -- cargo test --test conformance
//! cargo run -p maru-sim-driver --example simulated -- cargo test -p maru-kernel-cuda -p maru-cxl
//! cargo run -p maru-sim-driver --example simulated -- maru p2p --device cuda:0
//! ```
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod control;
mod error;
mod library;
mod session;

pub use control::{Census, CopyKind, Record, Simulator};
pub use error::SimError;
pub use library::{VARIABLE, install, library, write_library};
pub use session::{Hold, Session, session};
