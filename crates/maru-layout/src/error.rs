//! What can be wrong with a layout or a transfer, with the numbers.

use thiserror::Error;

/// Everything this crate refuses. Messages say what was found, what is allowed and what decides.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// No axes, or more than supported.
    #[error("a tensor of {found} axes is not supported (1 to {max} are)")]
    AxisCount {
        /// Axes found.
        found: usize,
        /// Most that are supported.
        max: usize,
    },
    /// An axis of length 0 or less.
    #[error("axis {axis} has length {len}; every axis needs at least 1")]
    BadLength {
        /// Index of the axis.
        axis: usize,
        /// Its length.
        len: i64,
    },
    /// Shape and strides of different rank.
    #[error("{strides} strides were given for {axes} axes")]
    StrideCount {
        /// Axes of the shape.
        axes: usize,
        /// Strides given.
        strides: usize,
    },
    /// A stride that repeats or reverses an axis.
    #[error("axis {axis} (length {len}) has stride {stride}; zero and negative strides are not supported")]
    BadStride {
        /// Index of the axis.
        axis: usize,
        /// Its stride in elements.
        stride: i64,
        /// Its length.
        len: u64,
    },
    /// The address range does not fit 63 bits.
    #[error("a tensor of shape {shape:?} spans more than 2^63 bytes")]
    SpanTooLarge {
        /// The shape.
        shape: Vec<i64>,
    },
    /// Two positions of the tensor are the same memory.
    #[error(
        "shape {shape:?} with strides {strides:?} {} share memory between positions",
        if *proven { "would" } else { "is too irregular to show that it would not" }
    )]
    SharedBytes {
        /// The shape.
        shape: Vec<i64>,
        /// The strides in elements.
        strides: Vec<i64>,
        /// Whether an overlap was found, or only not excluded.
        proven: bool,
    },
    /// Not a dtype name.
    #[error("unknown dtype {found:?}; allowed: {allowed}")]
    UnknownDtype {
        /// The text found.
        found: String,
        /// The names allowed.
        allowed: String,
    },
    /// Not an axis word.
    #[error("unknown axis {found:?}; allowed: {allowed}")]
    UnknownAxis {
        /// The text found.
        found: String,
        /// The words allowed.
        allowed: String,
    },
    /// A number that must be in a range is not.
    #[error("{what} is {found}; allowed: {allowed}")]
    OutOfRange {
        /// What the number is.
        what: &'static str,
        /// The number.
        found: i128,
        /// What is allowed.
        allowed: String,
    },
    /// A size or offset computed from the arguments does not fit 63 bits.
    #[error("{what} does not fit 63 bits")]
    Overflow {
        /// What was computed.
        what: &'static str,
    },
    /// Several readings of the tensor would move different bytes.
    #[error("shape {shape:?} can be read as {}; {decide}", readings.join(" or "))]
    Ambiguous {
        /// The shape.
        shape: Vec<u64>,
        /// The readings that survive, as axis lists.
        readings: Vec<String>,
        /// What to pass so that one is left.
        decide: String,
    },
    /// No reading fits, or the caller's facts contradict the tensor.
    #[error("shape {shape:?} fits no known layout: {}", reasons.join("; "))]
    Mismatch {
        /// The shape.
        shape: Vec<u64>,
        /// What contradicted what, one entry a reading.
        reasons: Vec<String>,
    },
    /// Paged cache and slab disagree.
    #[error("{what}: the paged cache has {paged}, the slab has {slab}")]
    Disagree {
        /// What they disagree on.
        what: &'static str,
        /// The paged side.
        paged: u64,
        /// The slab side.
        slab: u64,
    },
    /// Element types differ and neither is declared raw.
    #[error("the paged cache holds {paged}, the slab {slab}; declare one raw to move bytes regardless")]
    DtypeMismatch {
        /// The paged side.
        paged: crate::DType,
        /// The slab side.
        slab: crate::DType,
    },
    /// The memory given is smaller than the layout.
    #[error("the slab has {found} bytes where its layout needs {needed}")]
    SlabTooSmall {
        /// Bytes there are.
        found: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// Wrong number of plane base addresses.
    #[error(
        "{found} plane addresses were given where {needed} are needed ({planes} plane(s) x {layers} layer(s))"
    )]
    PlaneCount {
        /// Addresses given.
        found: usize,
        /// Addresses needed.
        needed: u64,
        /// Planes per layer.
        planes: u64,
        /// Layers.
        layers: u64,
    },
    /// A slot outside the cache.
    #[error("slot {slot} of token {token} is outside the cache (-1 skips, else 0 to {})", num_slots.saturating_sub(1))]
    SlotOutOfRange {
        /// Index of the token.
        token: u64,
        /// Its slot.
        slot: i64,
        /// Slots of the cache.
        num_slots: u64,
    },
    /// A load that would write one slot twice.
    #[error(
        "slot {slot} is written by token {first} and token {second}; the result would depend on scheduling"
    )]
    DuplicateSlot {
        /// The slot.
        slot: u64,
        /// Token that names it first.
        first: u64,
        /// Token that names it again.
        second: u64,
    },
    /// Fewer slots than the slab has tokens, without permission, or more.
    #[error(
        "{slots} slots were given for a slab of {tokens} tokens{}",
        if slots < tokens { "; ask for a partial transfer if that is meant" } else { "" }
    )]
    SlotCount {
        /// Slots given.
        slots: u64,
        /// Tokens of the slab.
        tokens: u64,
    },
    /// More tokens to skip than there are.
    #[error("skip_tokens is {skip}, but only {tokens} tokens are moved")]
    SkipTooLarge {
        /// Tokens to skip.
        skip: u64,
        /// Tokens of the transfer.
        tokens: u64,
    },
    /// Layers outside the cache.
    #[error("layers {first}..{end} are outside the cache's {layers} layers", end = u64::from(*first) + u64::from(*count))]
    LayerRange {
        /// First layer asked for.
        first: u32,
        /// How many.
        count: u32,
        /// Layers there are.
        layers: u32,
    },
    /// Not the name of an engine format.
    #[error("unknown engine format {found:?}; supported: {allowed}")]
    UnknownFormat {
        /// The text found.
        found: String,
        /// The names supported.
        allowed: String,
    },
    /// Wrong number of tensor pointers for an engine format.
    #[error("{found} tensor pointers were given where engine format {format} needs {needed}")]
    PointerCount {
        /// Name of the format.
        format: &'static str,
        /// Pointers given.
        found: usize,
        /// Pointers needed.
        needed: u64,
    },
    /// A count that the native kernel's 32-bit fields do not hold.
    #[error("{what} is {found}; the native kernel takes at most {max}, use the fallback")]
    KernelLimit {
        /// What the number is.
        what: &'static str,
        /// The number.
        found: u64,
        /// The largest that fits.
        max: u64,
    },
    /// An engine format that this library does not move.
    #[error("engine format {number} ({name}) is not supported: {reason}")]
    UnsupportedFormat {
        /// Its number.
        number: i64,
        /// Its name, or `unknown`.
        name: &'static str,
        /// Why.
        reason: &'static str,
    },
}

impl LayoutError {
    /// The stable snake_case kind that the command line and Python report.
    pub fn kind(&self) -> &'static str {
        match self {
            LayoutError::Ambiguous { .. } => "ambiguous_layout",
            LayoutError::Mismatch { .. } | LayoutError::Disagree { .. } => "layout_mismatch",
            LayoutError::DtypeMismatch { .. } => "dtype_mismatch",
            LayoutError::SlotOutOfRange { .. } => "slot_out_of_range",
            LayoutError::DuplicateSlot { .. } => "duplicate_slot",
            LayoutError::UnsupportedFormat { .. } | LayoutError::UnknownFormat { .. } => "unsupported_format",
            LayoutError::KernelLimit { .. } => "not_available",
            _ => "invalid_argument",
        }
    }
}
