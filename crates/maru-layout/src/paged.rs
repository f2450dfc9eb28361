//! The paged side as byte strides.

use crate::overlap::{Overlap, self_overlap};
use crate::{Axis, DType, LayoutError};

/// What a token's row in one plane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RowKind {
    /// Heads of K or V elements, or a latent row.
    Plain,
    /// Opaque bytes per head and token (packed scales, K and V of unequal width); one plane unless the caller
    /// names a `kv` axis.
    OpaqueRows,
    /// Whole blocks of opaque bytes; a "slot" is a block.
    OpaqueBlocks,
}

/// Geometry of one paged cache in bytes, as plain numbers: the input of [`PagedLayout::from_strides`].
///
/// A stride of an axis of length 1 is ignored. Byte address of element `d` of head `n` of slot `s`:
/// `plane + (s div block_size) * block_stride + (s mod block_size) * token_stride + n * head_stride + d * E`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StridedSpec {
    /// Element type.
    pub dtype: DType,
    /// What a row holds.
    pub row_kind: RowKind,
    /// Planes of a layer *inside one tensor*: 2 where K and V share it, else 1.
    pub kv_planes: u64,
    /// Bytes from K's plane to V's.
    pub kv_stride: u64,
    /// Layers inside one tensor, 1 where every layer has its own.
    pub layers: u64,
    /// Bytes from one layer's planes to the next one's.
    pub layer_stride: u64,
    /// Blocks, as the tensor has them.
    pub num_blocks: u64,
    /// Tokens of a block, as the tensor has them.
    pub block_size: u64,
    /// KV heads.
    pub num_heads: u64,
    /// Elements of a head in one plane.
    pub head_size: u64,
    /// Bytes from block to block.
    pub block_stride: u64,
    /// Bytes from token to token inside a block.
    pub token_stride: u64,
    /// Bytes from head to head inside a token.
    pub head_stride: u64,
}

/// Byte strides by axis; `None` where the axis does not exist or has length 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByteStrides {
    /// K to V.
    pub kv: Option<u64>,
    /// Block to block.
    pub block: Option<u64>,
    /// Token to token inside a block.
    pub token: Option<u64>,
    /// Head to head inside a token.
    pub head: Option<u64>,
}

/// One registered tensor, read: which planes it has and the byte stride of every axis.
///
/// Made by [`PagedLayout::detect`] from a tensor, or by [`PagedLayout::from_strides`] from numbers; both
/// guarantee that all offsets fit 63 bits and no two positions share a byte.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PagedLayout {
    spec: StridedSpec,
    axes: Vec<Axis>,
    head_bytes: u64,
    plane_bytes: u64,
    span_bytes: u64,
}

impl PagedLayout {
    /// A layout from plain byte strides.
    ///
    /// # Errors
    /// [`LayoutError`] for a count of 0, more than two planes, a stride of 0 on an axis longer than 1,
    /// offsets beyond 63 bits, and positions that share memory.
    pub fn from_strides(spec: &StridedSpec) -> Result<Self, LayoutError> {
        Self::build(spec.clone(), Vec::new())
    }

    pub(crate) fn build(mut spec: StridedSpec, axes: Vec<Axis>) -> Result<Self, LayoutError> {
        if !(1..=2).contains(&spec.kv_planes) {
            return Err(LayoutError::OutOfRange {
                what: "kv_planes",
                found: i128::from(spec.kv_planes),
                allowed: "1 or 2".into(),
            });
        }
        let counts = [
            ("layers", spec.layers),
            ("num_blocks", spec.num_blocks),
            ("block_size", spec.block_size),
            ("num_heads", spec.num_heads),
            ("head_size", spec.head_size),
        ];
        for (what, n) in counts {
            if n == 0 {
                return Err(LayoutError::OutOfRange { what, found: 0, allowed: "1 or more".into() });
            }
        }
        let head_bytes = spec
            .head_size
            .checked_mul(spec.dtype.size())
            .ok_or(LayoutError::Overflow { what: "a head's bytes" })?;
        let mut axes_bytes = [0u64; 5];
        let named = [
            ("kv stride", spec.kv_planes, &mut spec.kv_stride),
            ("layer stride", spec.layers, &mut spec.layer_stride),
            ("block stride", spec.num_blocks, &mut spec.block_stride),
            ("token stride", spec.block_size, &mut spec.token_stride),
            ("head stride", spec.num_heads, &mut spec.head_stride),
        ];
        let mut strided = Vec::with_capacity(5);
        for (i, (what, len, stride)) in named.into_iter().enumerate() {
            if len == 1 {
                *stride = 0;
            } else if *stride == 0 {
                return Err(LayoutError::OutOfRange { what, found: 0, allowed: "1 or more bytes".into() });
            }
            axes_bytes[i] = stride
                .checked_mul(len - 1)
                .ok_or(LayoutError::Overflow { what: "the cache's address span" })?;
            strided.push((len, *stride));
        }
        let sum = |part: &[u64]| {
            part.iter()
                .try_fold(head_bytes, |a, b| a.checked_add(*b))
                .filter(|s| *s <= i64::MAX.unsigned_abs())
                .ok_or(LayoutError::Overflow { what: "the cache's address span" })
        };
        let (plane_bytes, span_bytes) = (sum(&axes_bytes[2..])?, sum(&axes_bytes)?);
        let slots = spec.num_blocks.checked_mul(spec.block_size).filter(|s| *s <= i64::MAX.unsigned_abs());
        slots.ok_or(LayoutError::Overflow { what: "the number of slots" })?;
        spec.num_heads.checked_mul(head_bytes).ok_or(LayoutError::Overflow { what: "a token's row" })?;
        match self_overlap(&strided, head_bytes) {
            Overlap::Disjoint => {}
            outcome => {
                let shape = strided.iter().map(|a| i64::try_from(a.0).unwrap_or(i64::MAX)).collect();
                let strides = strided.iter().map(|a| i64::try_from(a.1).unwrap_or(i64::MAX)).collect();
                return Err(LayoutError::SharedBytes { shape, strides, proven: outcome == Overlap::Shared });
            }
        }
        Ok(PagedLayout { spec, axes, head_bytes, plane_bytes, span_bytes })
    }

    /// The axes in the tensor's order; empty for a layout made from strides.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.spec.dtype
    }

    /// What a row holds.
    pub fn row_kind(&self) -> RowKind {
        self.spec.row_kind
    }

    /// Planes of a layer inside one tensor: 2 where K and V share it, else 1.
    pub fn kv_planes(&self) -> u64 {
        self.spec.kv_planes
    }

    /// Layers inside one tensor; 1 unless it has a `layer` axis.
    pub fn layers(&self) -> u64 {
        self.spec.layers
    }

    /// Blocks, as the tensor has them.
    pub fn num_blocks(&self) -> u64 {
        self.spec.num_blocks
    }

    /// Tokens of a block, as the tensor has them (1 where a slot is a whole block).
    pub fn block_size(&self) -> u64 {
        self.spec.block_size
    }

    /// KV heads of this rank; 1 where a row has no heads.
    pub fn num_heads(&self) -> u64 {
        self.spec.num_heads
    }

    /// Elements of a head in one plane.
    pub fn head_size(&self) -> u64 {
        self.spec.head_size
    }

    /// Slots: `num_blocks * block_size`.
    pub fn num_slots(&self) -> u64 {
        self.spec.num_blocks * self.spec.block_size
    }

    /// Contiguous bytes of one head in one plane.
    pub fn head_bytes(&self) -> u64 {
        self.head_bytes
    }

    /// Bytes of one token in one plane, all heads: the slab's row.
    pub fn token_bytes(&self) -> u64 {
        self.spec.num_heads * self.head_bytes
    }

    /// Bytes of one token of one layer in the slab, all planes.
    pub fn slab_token_bytes(&self) -> u64 {
        self.token_bytes() * self.spec.kv_planes
    }

    /// Bytes from a plane's base to behind its last addressed byte.
    pub fn plane_bytes(&self) -> u64 {
        self.plane_bytes
    }

    /// Bytes from the tensor's base to behind its last addressed byte, all planes and layers of it.
    pub fn span_bytes(&self) -> u64 {
        self.span_bytes
    }

    /// Offset of a plane's base from the tensor's.
    ///
    /// # Errors
    /// [`LayoutError::OutOfRange`] for a plane or layer that the tensor does not have.
    pub fn plane_offset(&self, kv: u64, layer: u64) -> Result<u64, LayoutError> {
        let check = |what, found: u64, len: u64| match found < len {
            true => Ok(found),
            false => Err(LayoutError::OutOfRange {
                what,
                found: i128::from(found),
                allowed: format!("0 to {}", len - 1),
            }),
        };
        let kv = check("plane", kv, self.spec.kv_planes)?;
        let layer = check("layer", layer, self.spec.layers)?;
        Ok(kv * self.spec.kv_stride + layer * self.spec.layer_stride)
    }

    /// Byte strides by axis, as far as the axes exist.
    pub fn byte_strides(&self) -> ByteStrides {
        let some = |len: u64, stride: u64| (len > 1).then_some(stride);
        let s = &self.spec;
        ByteStrides {
            kv: some(s.kv_planes, s.kv_stride),
            block: some(s.num_blocks, s.block_stride),
            token: some(s.block_size, s.token_stride),
            head: some(s.num_heads, s.head_stride),
        }
    }

    /// The numbers this layout is made of.
    pub fn spec(&self) -> &StridedSpec {
        &self.spec
    }

    /// `(length, byte stride)` of a plane's axes, outermost first.
    pub(crate) fn plane_axes(&self) -> [(u64, u64); 3] {
        let s = &self.spec;
        [(s.num_blocks, s.block_stride), (s.block_size, s.token_stride), (s.num_heads, s.head_stride)]
    }

    /// Whether consecutive slots are evenly spaced across blocks too, so that a slot needs no division.
    pub fn linear_slots(&self) -> bool {
        let s = &self.spec;
        s.num_blocks == 1
            || s.block_size == 1
            || Some(s.block_stride) == s.token_stride.checked_mul(s.block_size)
    }

    /// Whether a token's heads lie side by side, so that its row is one run.
    pub fn heads_adjacent(&self) -> bool {
        self.spec.num_heads == 1 || self.spec.head_stride == self.head_bytes
    }

    /// Bytes of a row that is contiguous on both sides: a whole token in one plane where its heads lie side by
    /// side, else one head.
    pub fn row_bytes(&self) -> u64 {
        if self.heads_adjacent() { self.token_bytes() } else { self.head_bytes }
    }

    /// Widest power of two (at most 16) for accesses to a tensor that starts at `base` and a packed slab.
    pub fn access_bytes(&self, base: u64) -> u64 {
        let s = &self.spec;
        let head = if self.heads_adjacent() { 0 } else { s.head_stride };
        let strides = [s.kv_stride, s.layer_stride, s.block_stride, s.token_stride, head, self.row_bytes()];
        crate::plan::access(strides.into_iter().chain([base]))
    }

    /// Whether the native kernel can take this cache: counts are 32-bit there, offsets 64-bit. Applies to
    /// block size, rows of a token, layers and planes of a tensor, and bytes of a row.
    ///
    /// # Errors
    /// [`LayoutError::KernelLimit`] with the first count above [`u32::MAX`].
    pub fn kernel_limits(&self) -> Result<(), LayoutError> {
        let rows = if self.heads_adjacent() { 1 } else { self.spec.num_heads };
        crate::plan::fit_kernel(&[
            ("block_size", self.spec.block_size),
            ("num_heads", rows),
            ("layers", self.spec.layers),
            ("row_bytes", self.row_bytes()),
            ("bytes of a token in one plane", self.token_bytes()),
        ])
    }

    /// Whether both layouts put the same bytes of the same tokens at the same addresses, however their axes
    /// are named.
    pub(crate) fn moves_same_bytes(&self, other: &PagedLayout) -> bool {
        self.canonical() == other.canonical()
    }

    fn canonical(&self) -> Vec<u64> {
        let s = &self.spec;
        let mut c =
            vec![s.kv_planes, s.kv_stride, s.layers, s.layer_stride, self.num_slots(), self.token_bytes()];
        match self.linear_slots() {
            true => c.extend([1, if s.block_size == 1 { s.block_stride } else { s.token_stride }]),
            false => c.extend([s.block_size, s.block_stride, s.token_stride]),
        }
        match self.heads_adjacent() {
            true => c.push(0),
            false => c.extend([s.num_heads, s.head_stride]),
        }
        c
    }
}
