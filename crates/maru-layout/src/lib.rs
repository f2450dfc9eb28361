//! Paged KV cache and slab layouts, copy plans and jobs: pure addressing, no memory access.
//!
//! A *paged cache* is what an LLM engine registers: per layer a tensor of fixed-size blocks of tokens. A
//! *slab* is a contiguous object `[kv][layer][token][head*dim]`. This crate turns the first into byte
//! strides ([`PagedLayout::detect`], the only place that reads a tensor's shape), relates it to the second
//! ([`CopyPlan`], once per cache) and proves for each transfer that every address is in bounds
//! ([`CopyJob`], the contract every mover shares).
//!
//! ```
//! use maru_layout::{CacheSpec, DType, PagedLayout, TensorDesc};
//!
//! let tensor = TensorDesc::contiguous(&[6, 2, 16, 2, 128], DType::Bf16)?;
//! let spec = CacheSpec { block_size: Some(16), ..CacheSpec::default() };
//! let layout = PagedLayout::detect(&tensor, &spec)?;
//! assert_eq!((layout.num_blocks(), layout.block_size(), layout.num_heads()), (6, 16, 2));
//! # Ok::<(), maru_layout::LayoutError>(())
//! ```
#![forbid(unsafe_code)]

mod axis;
mod batch;
mod desc;
mod detect;
mod dtype;
mod engine_format;
mod error;
mod fingerprint;
mod job;
mod marks;
pub mod oracle;
mod overlap;
mod paged;
mod piece;
mod plan;
mod runs;
mod slab;
mod slots;

pub use axis::Axis;
pub use batch::JobBatch;
pub use desc::{MAX_AXES, TensorDesc};
pub use detect::CacheSpec;
pub use dtype::DType;
pub use engine_format::{EngineFormat, EngineGeometry, EngineOp, EnginePlanes, EnginePointers};
pub use error::LayoutError;
pub use fingerprint::Fingerprint;
pub use job::{CopyJob, Direction, JobRequest, JobSlots, SlabSpan};
pub use overlap::planes_overlap;
pub use paged::{ByteStrides, PagedLayout, RowKind, StridedSpec};
pub use piece::{Piece, Pieces};
pub use plan::{CopyPlan, Geometry};
pub use runs::{Run, Runs};
pub use slab::SlabLayout;
pub use slots::SlotMapping;
