//! What the movers of this crate refuse, with the numbers.

use maru_driver::{DriverError, Unavailable};
use maru_layout::LayoutError;
use thiserror::Error;

use crate::Store;

/// Why a mover could not be made or a job not be carried out. Nothing was moved, except where a variant says
/// otherwise.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FallbackError {
    /// The slab is in device memory only.
    #[error(
        "the slab of {len} bytes has no host address; the host mover needs memory mapped into this process"
    )]
    NoHostAddress {
        /// Bytes of the slab.
        len: u64,
    },
    /// The slot list is in device memory.
    #[error(
        "the {len} slots are in device memory (at {addr:#x}), which the host mover cannot read; pass them in host memory"
    )]
    DeviceSlots {
        /// Device address of the first.
        addr: u64,
        /// How many.
        len: u64,
    },
    /// More threads than can make sense.
    #[error("{found} threads were asked for; allowed: 0 (as many as help) to {max}")]
    TooManyThreads {
        /// Threads asked for.
        found: usize,
        /// Most that are allowed.
        max: usize,
    },
    /// The worker threads could not be started.
    #[error("{threads} worker threads for host copies could not be started: {reason}; ask for fewer")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
    /// This processor lacks a kind of store that was asked for by name.
    #[error("this processor has no {store:?} stores; available: {available:?}")]
    StoreNotAvailable {
        /// What was asked for.
        store: Store,
        /// What there is.
        available: Vec<Store>,
    },
    /// No driver that the device mover can use.
    #[error(transparent)]
    NoDriver(#[from] Unavailable),
    /// A driver call failed before any copy was queued, or while completion was asked for.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver refused a copy. Some layers may have been moved, and one in part; nothing is in flight.
    #[error("after {layers_done} of {layers} layers: {source}; what was queued has been waited for")]
    CopyFailed {
        /// Layers that were moved whole.
        layers_done: u32,
        /// Layers of the job.
        layers: u32,
        /// The call that failed.
        source: DriverError,
    },
    /// Slots in device memory that the job cannot have.
    #[error(transparent)]
    Slots(#[from] LayoutError),
    /// The slab has no address at all.
    #[error("the slab of {len} bytes has neither a host nor a device address")]
    NoAddress {
        /// Bytes of the slab.
        len: u64,
    },
    /// A stream of another device or context.
    #[error(
        "the stream belongs to another CUDA context than the mover (cuda:{device}); pass a stream of that device"
    )]
    ForeignStream {
        /// The mover's device.
        device: usize,
    },
    /// Something that cannot become part of a graph.
    #[error(
        "the stream is being captured, and {what}, which a graph cannot do; register the slab, pass slots in host memory, or transfer outside the capture"
    )]
    Capturing {
        /// What cannot be captured.
        what: &'static str,
    },
}

impl FallbackError {
    /// The stable snake_case kind that the command line and Python report.
    pub fn kind(&self) -> &'static str {
        match self {
            FallbackError::Threads { .. }
            | FallbackError::StoreNotAvailable { .. }
            | FallbackError::NoDriver(_)
            | FallbackError::Capturing { .. } => "not_available",
            FallbackError::Driver(error) | FallbackError::CopyFailed { source: error, .. } => error.kind(),
            FallbackError::Slots(error) => error.kind(),
            _ => "invalid_argument",
        }
    }
}
