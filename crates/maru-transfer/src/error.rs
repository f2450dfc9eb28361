//! What can go wrong between a request and its bytes.

use thiserror::Error;

use crate::config::ConfigError;
use crate::place::Place;

/// Everything the engine reports. Each message holds the numbers and, where there is one, the remedy.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// A layout, slot list or geometry is wrong.
    #[error(transparent)]
    Layout(#[from] maru_layout::LayoutError),
    /// Memory could not be had, mapped or used.
    #[error(transparent)]
    Cxl(#[from] maru_cxl::CxlError),
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The fallback could not copy.
    #[error(transparent)]
    Fallback(#[from] maru_fallback::FallbackError),
    /// The native kernel could not be launched, or reports an error.
    #[error(transparent)]
    Kernel(#[from] maru_kernel_cuda::KernelError),
    /// Something that was asked for does not exist here.
    #[error("{what} not available: {reason}")]
    NotAvailable {
        /// What was asked for.
        what: String,
        /// Why it is not there.
        reason: String,
    },
    /// A cache was described without tensors.
    #[error("a paged cache needs at least one tensor")]
    NoTensors,
    /// The engine knows another number of layers than it registered.
    #[error("{found} layer(s) were registered where the model has {expected}")]
    LayerCount {
        /// Layers of the tensors.
        found: usize,
        /// Layers stated.
        expected: usize,
    },
    /// K and V lists of different length.
    #[error("{k} K tensors were given with {v} V tensors")]
    SplitCount {
        /// K tensors.
        k: usize,
        /// V tensors.
        v: usize,
    },
    /// Layers of one cache disagree.
    #[error(
        "layer {layer} has {what} {found}, layer 0 has {first}; layers that differ are separate caches, one per group"
    )]
    LayerDiffers {
        /// The first layer that differs.
        layer: usize,
        /// In what.
        what: &'static str,
        /// What it has.
        found: String,
        /// What layer 0 has.
        first: String,
    },
    /// A tensor whose strides reach beyond its memory.
    #[error("layer {layer}: the tensor spans {needed} bytes, its memory holds {found}")]
    TensorTooSmall {
        /// The layer.
        layer: usize,
        /// Bytes of memory from its address.
        found: u64,
        /// Bytes its shape and strides address.
        needed: u64,
    },
    /// A null or wrapping address.
    #[error("layer {layer}: {found} bytes at address {addr:#x} are no memory")]
    BadAddress {
        /// The layer.
        layer: usize,
        /// The address.
        addr: u64,
        /// Bytes from there.
        found: u64,
    },
    /// Two planes are the same memory.
    #[error("{first} and {second} share memory")]
    SharedPlanes {
        /// One plane.
        first: String,
        /// The other.
        second: String,
    },
    /// Slab and cache are the same memory.
    #[error("the slab ({slab:#x}, {len} bytes) overlaps the paged cache's {plane}")]
    SlabInCache {
        /// The slab's address.
        slab: u64,
        /// Its length.
        len: u64,
        /// The plane it meets.
        plane: String,
    },
    /// Cache and engine live in different places.
    #[error("the cache is on {found}, this engine moves {expected}")]
    WrongPlace {
        /// Where the cache is.
        found: Place,
        /// What the engine serves.
        expected: Place,
    },
    /// A cache that another engine registered.
    #[error("the cache was registered with another engine")]
    ForeignCache,
    /// A slab of another geometry.
    #[error("the slab was stored with geometry {found}, this cache needs {expected}")]
    Fingerprint {
        /// The slab's fingerprint.
        found: maru_layout::Fingerprint,
        /// The cache's.
        expected: maru_layout::Fingerprint,
    },
    /// Slabs of one batch that belong to different caches.
    #[error("request {index} of the batch is for another cache; a batch moves slabs of one")]
    MixedBatch {
        /// Index of the first such request.
        index: usize,
    },
    /// Requests of one batch on different streams.
    #[error("request {index} of the batch is for another stream; a batch is ordered on one")]
    MixedStreams {
        /// Index of the first such request.
        index: usize,
    },
    /// A mover of the user's own failed.
    #[error("{mover}: {message}")]
    Mover {
        /// The mover's name.
        mover: String,
        /// What it says.
        message: String,
    },
}

impl TransferError {
    /// The stable snake_case kind that the command line and Python report.
    pub fn kind(&self) -> &'static str {
        match self {
            TransferError::Layout(e) => e.kind(),
            TransferError::Cxl(e) => e.kind(),
            TransferError::Config(e) => e.kind(),
            TransferError::Fallback(e) => e.kind(),
            TransferError::Kernel(e) => e.kind(),
            TransferError::NotAvailable { .. } => "not_available",
            TransferError::LayerDiffers { .. } | TransferError::Fingerprint { .. } => "layout_mismatch",
            TransferError::Mover { .. } => "mover",
            _ => "invalid_argument",
        }
    }

    pub(crate) fn not_available(what: impl Into<String>, reason: impl Into<String>) -> Self {
        TransferError::NotAvailable { what: what.into(), reason: reason.into() }
    }
}
