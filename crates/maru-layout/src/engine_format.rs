//! The format numbers that old Python callers pass, as planes and strides: one table, which no mover sees.
//!
//! A format's name spells the order of its tensor's axes, and so does its row here; strides and plane bases
//! follow from the order alone.

mod table;

use std::fmt;

use crate::Axis::{self, Block, Content, Head, Kv, Layer, Token};
use crate::{DType, LayoutError, PagedLayout, RowKind, StridedSpec};
use EnginePointers::{LayerMajor, One, PerLayer, PlaneMajor};
use table::{Row, Shape, TABLE, Width};

/// Most layers of a cache given by pointers; no model comes near.
const MAX_LAYERS: u64 = 1 << 20;

/// Which pointers a caller passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EnginePointers {
    /// One tensor for all layers.
    One,
    /// One tensor a layer: pointer `l`.
    PerLayer,
    /// K tensors of all layers, then V tensors: pointer `kv * L + l`.
    PlaneMajor,
    /// K and V tensor of a layer side by side: pointer `2 * l + kv`.
    LayerMajor,
}

/// Which operation a format number came with; one format means different tensors in the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineOp {
    /// Tokens by slot.
    Token,
    /// Whole blocks by id.
    Block,
}

/// A format of the old callers that this library moves.
///
/// ```
/// use maru_layout::{DType, EngineFormat, EngineGeometry, EngineOp};
///
/// let geometry = EngineGeometry {
///     num_blocks: 100,
///     block_size: 16,
///     num_heads: 8,
///     head_size: 128,
///     layers: 2,
///     dtype: DType::Bf16,
///     block_stride_elems: 0,
///     content_width: None,
/// };
/// let planes = EngineFormat::from_number(2)?.planes_of(EngineOp::Token, &geometry)?;
/// // One pointer a layer; V of a block lies behind its K.
/// let bases = planes.bases(&[0x1000_0000, 0x2000_0000])?;
/// assert_eq!(bases, [0x1000_0000, 0x2000_0000, 0x1000_8000, 0x2000_8000]);
/// # Ok::<(), maru_layout::LayoutError>(())
/// ```
#[derive(Clone, Copy)]
pub struct EngineFormat {
    row: &'static Row,
    shape: &'static Shape,
}

/// What an old caller knows of a cache besides its format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineGeometry {
    /// Blocks of a layer.
    pub num_blocks: u64,
    /// Tokens of a block. Formats whose slots are evenly spaced (3, 4, 5) may be given as blocks of 1 token.
    pub block_size: u64,
    /// KV heads of this rank; 1 for formats without heads. Where a token's heads lie side by side, a caller
    /// who does not know them may state one head as wide as the row.
    pub num_heads: u64,
    /// Elements of a head (of K alone), or of a latent row. Not used by formats of stated content.
    pub head_size: u64,
    /// Layers of the cache.
    pub layers: u64,
    /// Element type.
    pub dtype: DType,
    /// Elements from block to block where pages are padded; 0 = tight.
    pub block_stride_elems: u64,
    /// Elements of a head's content in formats 10 to 13; `None` = `2 * head_size`, for 10 and 11 only.
    pub content_width: Option<u64>,
}

/// A cache of an old format as planes and strides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnginePlanes {
    layout: PagedLayout,
    pointers: EnginePointers,
    format: &'static str,
    planes: u64,
    layers: u64,
}

impl EngineFormat {
    /// The format of a number.
    ///
    /// # Errors
    /// [`LayoutError::UnsupportedFormat`] for formats that are not moved, by name, and for unknown numbers.
    pub fn from_number(number: i64) -> Result<Self, LayoutError> {
        let row = TABLE.iter().find(|row| row.number == number);
        row.map_or(Err(unknown(number)), Self::of_row)
    }

    /// The format of a name such as `NL_X_TWO_NB_BS_NH_HS`.
    ///
    /// # Errors
    /// [`LayoutError::UnsupportedFormat`] for formats that are not moved, [`LayoutError::UnknownFormat`] for
    /// anything else.
    pub fn from_name(name: &str) -> Result<Self, LayoutError> {
        match TABLE.iter().find(|row| row.name == name) {
            Some(row) => Self::of_row(row),
            None => Err(LayoutError::UnknownFormat {
                found: name.to_owned(),
                allowed: Self::supported().map(Self::name).collect::<Vec<_>>().join(" "),
            }),
        }
    }

    /// Every format that is moved.
    pub fn supported() -> impl Iterator<Item = Self> {
        TABLE.iter().filter_map(|row| Self::of_row(row).ok())
    }

    /// `(number, name)` of every format that has a number, the refused ones included.
    pub fn known() -> impl Iterator<Item = (i64, &'static str)> {
        TABLE.iter().map(|row| (row.number, row.name))
    }

    fn of_row(row: &'static Row) -> Result<Self, LayoutError> {
        match &row.shape {
            Ok(shape) => Ok(EngineFormat { row, shape }),
            Err(reason) => Err(LayoutError::UnsupportedFormat { number: row.number, name: row.name, reason }),
        }
    }

    /// Its number.
    pub fn number(self) -> i64 {
        self.row.number
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.row.name
    }

    /// The axes of a tensor of this format, outermost in memory first.
    pub fn order(self, op: EngineOp) -> &'static [Axis] {
        self.shape_for(op).order
    }

    /// Which pointers a caller passes.
    pub fn pointers(self, op: EngineOp) -> EnginePointers {
        self.shape_for(op).pointers
    }

    /// Planes of a layer in the slab: 2 (K, V) or 1.
    pub fn planes(self) -> u64 {
        self.shape.planes()
    }

    fn shape_for(self, op: EngineOp) -> &'static Shape {
        match (op, &self.row.block_shape) {
            (EngineOp::Block, Some(shape)) => shape,
            _ => self.shape,
        }
    }

    /// Planes and strides of a cache of this format.
    ///
    /// # Errors
    /// [`LayoutError`] for counts of 0 or beyond 63 bits, heads in a format without, a content width that is
    /// missing or not `2 * head_size` where it must be, and a block stride that is below a block's size or
    /// would leave open where V's plane begins.
    pub fn planes_of(self, op: EngineOp, geometry: &EngineGeometry) -> Result<EnginePlanes, LayoutError> {
        let shape = self.shape_for(op);
        let g = geometry;
        let width = shape.content(g)?;
        let has = |axis| shape.order.contains(&axis);
        if !(1..=MAX_LAYERS).contains(&g.layers) {
            return Err(out_of_range("layers", g.layers, format!("1 to {MAX_LAYERS}")));
        }
        if !has(Head) && g.num_heads != 1 {
            return Err(out_of_range("num_heads", g.num_heads, "1, as the format has no heads".into()));
        }
        let kv_planes = if has(Kv) { 2 } else { 1 };
        let layers = if has(Layer) { g.layers } else { 1 };
        let mut spec = StridedSpec {
            dtype: g.dtype,
            row_kind: if has(Content) { RowKind::OpaqueRows } else { RowKind::Plain },
            kv_planes,
            kv_stride: 0,
            layers,
            layer_stride: 0,
            num_blocks: g.num_blocks,
            block_size: g.block_size,
            num_heads: g.num_heads,
            head_size: width,
            block_stride: 0,
            token_stride: 0,
            head_stride: 0,
        };
        let mut step = mul(width, g.dtype.size())?;
        for axis in shape.order.iter().rev() {
            let (len, stride) = match axis {
                Token => (g.block_size, &mut spec.token_stride),
                Head => (g.num_heads, &mut spec.head_stride),
                Kv => (kv_planes, &mut spec.kv_stride),
                Layer => (layers, &mut spec.layer_stride),
                Block => {
                    step = shape.block_stride(g, step)?;
                    (g.num_blocks, &mut spec.block_stride)
                }
                _ => continue,
            };
            *stride = step;
            step = mul(step, len)?;
        }
        Ok(EnginePlanes {
            layout: PagedLayout::from_strides(&spec)?,
            pointers: shape.pointers,
            format: self.row.name,
            planes: shape.planes(),
            layers: g.layers,
        })
    }
}

impl Shape {
    fn planes(&self) -> u64 {
        let two_tensors = matches!(self.pointers, PlaneMajor | LayerMajor);
        if two_tensors || self.order.contains(&Kv) { 2 } else { 1 }
    }

    /// Elements of the last axis.
    fn content(&self, g: &EngineGeometry) -> Result<u64, LayoutError> {
        match (self.width, g.content_width) {
            (Width::Head, None) => Ok(g.head_size),
            (Width::Head, Some(width)) if width == g.head_size => Ok(width),
            (Width::Head, Some(width)) => {
                Err(out_of_range("content_width", width, format!("none, or the head_size {}", g.head_size)))
            }
            (Width::TwoHeads, stated) => {
                let two = mul(g.head_size, 2)?;
                match stated {
                    Some(width) if width != two => {
                        Err(out_of_range("content_width", width, format!("{two} (2 * head_size)")))
                    }
                    _ => Ok(two),
                }
            }
            (Width::Stated, Some(width)) => Ok(width),
            (Width::Stated, None) => {
                Err(out_of_range("content_width", 0, "1 or more; this format does not imply it".into()))
            }
        }
    }

    /// The block step in bytes, `tight` where none was stated.
    fn block_stride(&self, g: &EngineGeometry, tight: u64) -> Result<u64, LayoutError> {
        let stated = mul(g.block_stride_elems, g.dtype.size())?;
        if stated == 0 || stated == tight {
            return Ok(tight);
        }
        let tight_elems = tight / g.dtype.size();
        if self.order.first() == Some(&Kv) {
            let allowed = format!("0 or {tight_elems}: padded pages leave open where V's plane begins");
            return Err(out_of_range("block_stride_elems", g.block_stride_elems, allowed));
        }
        if stated < tight {
            let allowed = format!("0, or {tight_elems} (a block's elements) or more");
            return Err(out_of_range("block_stride_elems", g.block_stride_elems, allowed));
        }
        Ok(stated)
    }
}

impl EnginePlanes {
    /// Strides of one tensor.
    pub fn layout(&self) -> &PagedLayout {
        &self.layout
    }

    /// Planes of a layer in the slab: 2 (K, V) or 1.
    pub fn planes(&self) -> u64 {
        self.planes
    }

    /// Layers of the cache.
    pub fn layers(&self) -> u64 {
        self.layers
    }

    /// Pointers a caller must pass: one, one a layer, or two a layer.
    pub fn pointer_count(&self) -> u64 {
        match self.pointers {
            One => 1,
            PerLayer => self.layers,
            PlaneMajor | LayerMajor => 2 * self.layers,
        }
    }

    /// Plane addresses `bases[kv * layers + l]` for [`crate::CopyPlan::new`].
    ///
    /// # Errors
    /// [`LayoutError::PointerCount`] for a wrong number of pointers, [`LayoutError::Overflow`] when a plane
    /// would wrap the address space.
    pub fn bases(&self, pointers: &[u64]) -> Result<Vec<u64>, LayoutError> {
        let needed = self.pointer_count();
        if u64::try_from(pointers.len()) != Ok(needed) {
            return Err(LayoutError::PointerCount { format: self.format, found: pointers.len(), needed });
        }
        // One tensor need not have a pointer for each layer, so the list does not bound the layers.
        let count = usize::try_from(self.planes * self.layers).unwrap_or(usize::MAX);
        let mut bases = Vec::new();
        bases.try_reserve_exact(count).map_err(|_| LayoutError::Overflow { what: "the list of planes" })?;
        for kv in 0..self.planes {
            for l in 0..self.layers {
                let (index, offset) = match self.pointers {
                    One => (0, self.layout.plane_offset(kv, l)?),
                    PerLayer => (l, self.layout.plane_offset(kv, 0)?),
                    PlaneMajor => (kv * self.layers + l, 0),
                    LayerMajor => (2 * l + kv, 0),
                };
                let pointer = usize::try_from(index).ok().and_then(|i| pointers.get(i)).copied();
                let base = pointer.and_then(|p| p.checked_add(offset));
                let end = base.and_then(|b| b.checked_add(self.layout.plane_bytes()));
                match (base, end) {
                    (Some(base), Some(_)) => bases.push(base),
                    _ => return Err(LayoutError::Overflow { what: "a plane's last address" }),
                }
            }
        }
        Ok(bases)
    }
}

fn unknown(number: i64) -> LayoutError {
    LayoutError::UnsupportedFormat { number, name: "unknown", reason: "no format has this number" }
}

fn out_of_range(what: &'static str, found: u64, allowed: String) -> LayoutError {
    LayoutError::OutOfRange { what, found: i128::from(found), allowed }
}

fn mul(a: u64, b: u64) -> Result<u64, LayoutError> {
    a.checked_mul(b)
        .filter(|n| *n <= i64::MAX.unsigned_abs())
        .ok_or(LayoutError::Overflow { what: "the cache's address span" })
}

impl PartialEq for EngineFormat {
    fn eq(&self, other: &Self) -> bool {
        self.row.number == other.row.number
    }
}

impl Eq for EngineFormat {}

impl std::hash::Hash for EngineFormat {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.row.number.hash(state);
    }
}

impl fmt::Debug for EngineFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineFormat({} {})", self.row.number, self.row.name)
    }
}

impl fmt::Display for EngineFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row.name)
    }
}
