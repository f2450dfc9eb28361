//! What the movers of this crate refuse, with the numbers.

use thiserror::Error;

use crate::Store;

/// Why a mover could not be made or a job not be carried out. Nothing was moved.
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
}

impl FallbackError {
    /// The stable snake_case kind that the command line and Python report.
    pub fn kind(&self) -> &'static str {
        match self {
            FallbackError::Threads { .. } | FallbackError::StoreNotAvailable { .. } => "not_available",
            _ => "invalid_argument",
        }
    }
}
