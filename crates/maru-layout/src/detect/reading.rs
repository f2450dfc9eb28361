//! One way to read a tensor: does it fit the caller's facts and the strides, and what does it give?

use super::CacheSpec;
use crate::Axis::{self, Block, Content, Dim, Head, HeadsDim, Kv, KvDim, Layer, Slot, Token};
use crate::paged::{PagedLayout, RowKind, StridedSpec};
use crate::{LayoutError, TensorDesc};

/// Why a reading is none: a contradiction, or an error of the numbers themselves.
pub(super) enum Refusal {
    Reason(String),
    Error(LayoutError),
}

impl Refusal {
    pub(super) fn into_error(self, tensor: &TensorDesc, axes: &[Axis]) -> LayoutError {
        match self {
            Refusal::Error(e) => e,
            Refusal::Reason(reason) => LayoutError::Mismatch {
                shape: tensor.shape().to_vec(),
                reasons: vec![format!("not {} as stated: {reason}", Axis::join(axes))],
            },
        }
    }
}

impl From<LayoutError> for Refusal {
    fn from(e: LayoutError) -> Self {
        Refusal::Error(e)
    }
}

fn refuse<T>(reason: String) -> Result<T, Refusal> {
    Err(Refusal::Reason(reason))
}

/// When the stated block may be a multiple of the tensor's own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum KernelBlocks {
    Never,
    TokensFirst,
    AnyOrder,
}

/// One way to read a tensor.
pub(super) struct Reading<'a> {
    pub(super) tensor: &'a TensorDesc,
    pub(super) spec: &'a CacheSpec,
    pub(super) axes: &'a [Axis],
    /// The caller stated this order; what only engines' habits rule out is then allowed.
    pub(super) named: bool,
    pub(super) kernel_blocks: KernelBlocks,
}

impl Reading<'_> {
    fn find(&self, axis: Axis) -> Option<usize> {
        self.axes.iter().position(|a| *a == axis)
    }

    fn len(&self, axis: Axis) -> Option<u64> {
        self.find(axis).map(|i| self.tensor.shape()[i])
    }

    /// Byte stride, 0 where the axis does not exist or has length 1.
    fn stride(&self, axis: Axis) -> u64 {
        self.find(axis).map_or(0, |i| self.tensor.byte_stride(i))
    }

    pub(super) fn layout(&self) -> Result<PagedLayout, Refusal> {
        if self.named && self.axes == [Block, Content] {
            return self.opaque_blocks();
        }
        self.check_words()?;
        self.check_planes()?;
        let (num_blocks, block_size, block_stride, token_stride) = self.blocks()?;
        let (num_heads, head_size, row_kind) = self.heads()?;
        self.check_memory_order()?;
        let fused = self.find(KvDim).is_some();
        let element = self.tensor.dtype().size();
        let spec = StridedSpec {
            dtype: self.tensor.dtype(),
            row_kind,
            kv_planes: if fused { 2 } else { self.len(Kv).unwrap_or(1) },
            kv_stride: if fused { head_size * element } else { self.stride(Kv) },
            layers: self.len(Layer).unwrap_or(1),
            layer_stride: self.stride(Layer),
            num_blocks,
            block_size,
            num_heads,
            head_size,
            block_stride,
            token_stride,
            head_stride: if self.find(Head).is_some() { self.stride(Head) } else { head_size * element },
        };
        Ok(PagedLayout::build(spec, self.axes.to_vec())?)
    }

    /// The words make a cache: right number, each once, blocks of tokens (or slots) with one kind of row.
    fn check_words(&self) -> Result<(), Refusal> {
        if self.axes.len() != self.tensor.rank() {
            return refuse(format!(
                "{} axes are named, the tensor has {}",
                self.axes.len(),
                self.tensor.rank()
            ));
        }
        if let Some(twice) = (1..self.axes.len()).find(|&i| self.axes[..i].contains(&self.axes[i])) {
            return refuse(format!("{} is named twice", self.axes[twice]));
        }
        let has = |a| self.find(a).is_some();
        let (blocks_of_tokens, merged) = ((has(Block), has(Token)), has(Slot));
        if !matches!((blocks_of_tokens, merged), ((true, true), false) | ((false, false), true)) {
            return refuse("the order needs block and token, or slot in place of both".into());
        }
        let rows = [Dim, KvDim, Content, HeadsDim].into_iter().filter(|a| has(*a)).count();
        if rows != 1 {
            return refuse("the order needs exactly one of dim, kv_dim, content, heads_dim".into());
        }
        if has(HeadsDim) && has(Head) {
            return refuse("head and heads_dim exclude each other".into());
        }
        if has(KvDim) && has(Kv) {
            return refuse("kv and kv_dim exclude each other".into());
        }
        let inner = [Dim, KvDim, Content, HeadsDim].into_iter().find_map(|a| self.find(a)).unwrap_or(0);
        let step = self.tensor.strides()[inner];
        if step > 1 {
            return refuse(format!(
                "{} has stride {step}; its elements must be contiguous",
                self.axes[inner]
            ));
        }
        Ok(())
    }

    /// K/V axes have length 2, MLA has one plane, a split tensor has no K/V of its own.
    fn check_planes(&self) -> Result<(), Refusal> {
        if let Some(n) = self.len(Kv).filter(|n| *n != 2) {
            return refuse(format!("its kv axis has length {n}, K and V make 2"));
        }
        let two = self.find(Kv).is_some() || self.find(KvDim).is_some();
        if self.spec.mla && (two || self.spec.split_kv) {
            return refuse("MLA was stated, which has one plane".into());
        }
        if self.spec.split_kv && two {
            return refuse("K and V were given as separate tensors".into());
        }
        Ok(())
    }

    /// `(num_blocks, block_size, block_stride, token_stride)`.
    fn blocks(&self) -> Result<(u64, u64, u64, u64), Refusal> {
        let stated = self.spec.block_size;
        if let Some(slots) = self.len(Slot) {
            let size = stated.unwrap_or(1);
            if !slots.is_multiple_of(size) {
                return refuse(format!("{slots} slots are no whole number of blocks of {size}"));
            }
            self.check_num_blocks(slots / size, 1)?;
            let step = self.stride(Slot);
            let block_stride =
                step.checked_mul(size).ok_or(LayoutError::Overflow { what: "the block stride" })?;
            return Ok((slots / size, size, block_stride, step));
        }
        let (blocks, tokens) = (self.len(Block).unwrap_or(1), self.len(Token).unwrap_or(1));
        let factor = match stated {
            None => 1,
            Some(size) if size == tokens => 1,
            Some(size) => self.kernel_factor(size, tokens)?,
        };
        if !self.named && self.heads_first() && self.tensor.rank() == 5 {
            // Engines register rank 5 token-major and show heads first in the strides; the other shape is
            // believed on an exact block size only, and not when the head axis is that long as well.
            if stated != Some(tokens) {
                return refuse(format!(
                    "heads before tokens needs a stated block_size equal to its token axis ({tokens})"
                ));
            }
            if self.len(Head) == Some(tokens) {
                return refuse(format!(
                    "with {tokens} heads and {tokens} tokens, tokens come first unless named"
                ));
            }
        }
        self.check_num_blocks(blocks, factor)?;
        Ok((blocks, tokens, self.stride(Block), self.stride(Token)))
    }

    fn heads_first(&self) -> bool {
        matches!((self.find(Head), self.find(Token)), (Some(h), Some(t)) if h < t)
    }

    /// How many of the tensor's blocks make one of the stated size.
    fn kernel_factor(&self, stated: u64, tokens: u64) -> Result<u64, Refusal> {
        let found = format!("its token axis has length {tokens}, the stated block_size is {stated}");
        if !stated.is_multiple_of(tokens) || self.kernel_blocks == KernelBlocks::Never {
            return refuse(found);
        }
        // One head comes neither before nor after the tokens.
        let heads_first = self.heads_first() && self.len(Head) != Some(1);
        if heads_first && self.kernel_blocks == KernelBlocks::TokensFirst {
            return refuse(format!("{found}; with heads before tokens a smaller block needs the axes named"));
        }
        Ok(stated / tokens)
    }

    fn check_num_blocks(&self, found: u64, factor: u64) -> Result<(), Refusal> {
        match self.spec.num_blocks {
            Some(n) if n != found && n.checked_mul(factor) != Some(found) => {
                refuse(format!("it would have {found} blocks, {n} were stated"))
            }
            _ => Ok(()),
        }
    }

    /// `(num_heads, head_size, row kind)`, a head being K or V alone.
    fn heads(&self) -> Result<(u64, u64, RowKind), Refusal> {
        let (stated_heads, stated_size) = (self.spec.num_kv_heads, self.spec.head_size);
        if let Some(width) = self.len(HeadsDim) {
            return self.flattened_heads(width);
        }
        let heads = self.len(Head).unwrap_or(1);
        if let Some(n) = stated_heads.filter(|n| *n != heads) {
            return refuse(format!("it would have {heads} head(s), {n} were stated"));
        }
        if let Some(content) = self.len(Content) {
            return Ok((heads, content, RowKind::OpaqueRows));
        }
        if let Some(fused) = self.len(KvDim) {
            if !fused.is_multiple_of(2) {
                return refuse(format!("a last axis of {fused} cannot be halved into K and V"));
            }
            if let Some(size) = stated_size.filter(|size| size.checked_mul(2) != Some(fused)) {
                return refuse(format!(
                    "its last axis of {fused} is not K and V of the stated head_size {size}"
                ));
            }
            return Ok((heads, fused / 2, RowKind::Plain));
        }
        let dim = self.len(Dim).unwrap_or(1);
        if let Some(size) = stated_size.filter(|size| *size != dim) {
            return refuse(format!("its last axis has length {dim}, the stated head_size is {size}"));
        }
        let one_plane = self.find(Kv).is_none() && !self.spec.split_kv;
        if one_plane && heads != 1 && !self.named {
            return refuse(format!("one plane of latent rows has one head, it would have {heads}"));
        }
        Ok((heads, dim, RowKind::Plain))
    }

    fn flattened_heads(&self, width: u64) -> Result<(u64, u64, RowKind), Refusal> {
        let (stated_heads, stated_size) = (self.spec.num_kv_heads, self.spec.head_size);
        if !self.named
            && let Some(n) = stated_heads.filter(|n| *n == self.tensor.shape()[1])
        {
            return refuse(format!("with {n} heads stated and a second axis of {n}, K and V are fused"));
        }
        let heads = match (stated_heads, stated_size) {
            (Some(n), _) => n,
            (None, Some(size)) if width.is_multiple_of(size) => width / size,
            (None, Some(size)) => {
                return refuse(format!("a row of {width} is no whole number of heads of {size}"));
            }
            (None, None) => 1,
        };
        if !width.is_multiple_of(heads)
            || stated_size.is_some_and(|size| heads.checked_mul(size) != Some(width))
        {
            return refuse(format!(
                "a row of {width} is not {heads} head(s) of {}",
                stated_size.map_or("one width".into(), |s| s.to_string())
            ));
        }
        Ok((heads, width / heads, RowKind::Plain))
    }

    /// Where shapes of several layouts coincide, a memory order that no engine produces is no reading.
    fn check_memory_order(&self) -> Result<(), Refusal> {
        if self.named {
            return Ok(());
        }
        let (fused, flat) = (self.find(KvDim).is_some(), self.find(HeadsDim).is_some());
        // Layers may share an allocation anywhere in the order; of one layer's view only these are left.
        let known: &[&[Axis]] = match self.heads_first() {
            _ if flat => &[&[Kv, Block, Token], &[Block, Kv, Token]],
            true if fused => &[&[Block, Head, Token], &[Block, Token, Head], &[Head, Block, Token]],
            false if fused => &[&[Block, Token, Head]],
            true if self.tensor.rank() == 6 => &[&[Head, Token]],
            _ => return Ok(()),
        };
        let descends = |order: &&[Axis]| {
            let strides: Vec<u64> = order.iter().map(|a| self.stride(*a)).filter(|s| *s > 0).collect();
            strides.windows(2).all(|w| w[0] > w[1])
        };
        match known.iter().any(descends) {
            true => Ok(()),
            false => refuse(format!("no engine lays it out with strides {:?}", self.tensor.strides())),
        }
    }

    /// Blocks of opaque bytes: every axis behind the first belongs to the block and must be contiguous.
    fn opaque_blocks(&self) -> Result<PagedLayout, Refusal> {
        if self.tensor.rank() < 2 {
            return refuse("blocks of opaque bytes need at least 2 axes".into());
        }
        let (shape, strides) = (self.tensor.shape(), self.tensor.strides());
        let mut elements = 1u64;
        for axis in (1..shape.len()).rev() {
            if shape[axis] > 1 && strides[axis] != elements {
                return refuse(format!(
                    "axis {axis} has stride {}, a block of opaque bytes needs {elements}",
                    strides[axis]
                ));
            }
            elements =
                elements.checked_mul(shape[axis]).ok_or(LayoutError::Overflow { what: "a block's bytes" })?;
        }
        self.check_num_blocks(shape[0], 1)?;
        let spec = StridedSpec {
            dtype: self.tensor.dtype(),
            row_kind: RowKind::OpaqueBlocks,
            kv_planes: 1,
            kv_stride: 0,
            layers: 1,
            layer_stride: 0,
            num_blocks: shape[0],
            block_size: 1,
            num_heads: 1,
            head_size: elements,
            block_stride: self.tensor.byte_stride(0),
            token_stride: 0,
            head_stride: 0,
        };
        Ok(PagedLayout::build(spec, self.axes.to_vec())?)
    }
}
