//! Which axis is which? The only place that reads a tensor's shape.
//!
//! Every reading that some engine really produces is a candidate. The caller's facts and the strides rule
//! candidates out; one must be left, or all that are left must move the same bytes. Anything else is an
//! error that lists the readings and says what decides. A new engine layout is one more row of
//! [`patterns`] and one row of the table test.

use crate::Axis::{self, Block, Content, Dim, Head, HeadsDim, Kv, KvDim, Layer, Slot, Token};
use crate::paged::{PagedLayout, RowKind, StridedSpec};
use crate::{LayoutError, TensorDesc};

/// What the caller knows of a cache besides its tensors. Facts are believed and must not contradict the
/// tensor; a fact that is not known stays `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheSpec {
    /// Tokens of a block as the scheduler counts them; normally known. The tensor's own block may be smaller
    /// by a whole factor.
    pub block_size: Option<u64>,
    /// KV heads of this rank.
    pub num_kv_heads: Option<u64>,
    /// Elements of a head (of K alone), or of MLA's latent row.
    pub head_size: Option<u64>,
    /// A head width reported by the engine's backend, possibly padded: it may break ties among readings and
    /// is otherwise ignored.
    pub backend_head_size: Option<u64>,
    /// Blocks of the cache.
    pub num_blocks: Option<u64>,
    /// The cache is one latent plane per layer.
    pub mla: bool,
    /// K and V of a layer are separate tensors, of which this is one.
    pub split_kv: bool,
    /// The order of the axes, if known. Believed if shape and strides allow it.
    pub axes: Option<Vec<Axis>>,
}

/// The readings engines produce, by rank.
fn patterns(rank: usize, split_kv: bool) -> &'static [&'static [Axis]] {
    match (rank, split_kv) {
        // MLA; SGLang's MLA (one head).
        (3, false) => &[&[Block, Token, Dim], &[Slot, Head, Dim]],
        // SGLang's K or V list.
        (3, true) => &[&[Slot, Head, Dim]],
        // vLLM since 0.26; diffkv and the like; MLA since 0.26 (one head); flattened heads (legacy).
        (4, false) => &[
            &[Block, Head, Token, KvDim],
            &[Block, Token, Head, KvDim],
            &[Block, Head, Token, Dim],
            &[Kv, Block, Token, HeadsDim],
            &[Block, Kv, Token, HeadsDim],
        ],
        (4, true) => &[&[Block, Token, Head, Dim]],
        // vLLM up to 0.25; heads before tokens only on an exact block size.
        (5, false) => &[
            &[Kv, Block, Token, Head, Dim],
            &[Block, Kv, Token, Head, Dim],
            &[Kv, Block, Head, Token, Dim],
            &[Block, Kv, Head, Token, Dim],
        ],
        // Cross-layer caches; TensorRT-LLM.
        (6, false) => &[&[Block, Layer, Kv, Token, Head, Dim], &[Block, Layer, Kv, Head, Token, Dim]],
        _ => &[],
    }
}

impl PagedLayout {
    /// Reads a tensor.
    ///
    /// # Errors
    /// [`LayoutError::Ambiguous`] when readings that move different bytes survive;
    /// [`LayoutError::Mismatch`] when none does, with the reason each was dropped.
    pub fn detect(tensor: &TensorDesc, spec: &CacheSpec) -> Result<Self, LayoutError> {
        let facts = [
            ("block_size", spec.block_size),
            ("num_kv_heads", spec.num_kv_heads),
            ("head_size", spec.head_size),
            ("num_blocks", spec.num_blocks),
        ];
        for (what, fact) in facts {
            if fact == Some(0) {
                return Err(LayoutError::OutOfRange { what, found: 0, allowed: "1 or more".into() });
            }
        }
        if let Some(axes) = &spec.axes {
            let named = Reading { tensor, spec, axes, named: true, kernel_blocks: true };
            return named.layout().map_err(|e| e.into_error(tensor, axes));
        }
        let all = patterns(tensor.rank(), spec.split_kv);
        if all.is_empty() {
            return Err(no_pattern(tensor, spec));
        }
        // The kernel-block rule is for tensors of which no axis is the stated block.
        let exact = all.iter().any(|axes| {
            let token = axes.iter().position(|a| *a == Token);
            token.is_some_and(|i| Some(tensor.shape()[i]) == spec.block_size)
        });
        let mut survivors: Vec<PagedLayout> = Vec::new();
        let mut reasons = Vec::new();
        for axes in all {
            match (Reading { tensor, spec, axes, named: false, kernel_blocks: !exact }).layout() {
                Ok(layout) => survivors.push(layout),
                Err(Refusal::Reason(reason)) => reasons.push(format!("not {}: {reason}", Axis::join(axes))),
                Err(Refusal::Error(e)) => return Err(e),
            }
        }
        // A stated block that is found, be it on a merged slot axis, beats one that is only a multiple.
        if let Some(size) = spec.block_size
            && survivors.iter().any(|s| s.block_size() == size)
        {
            survivors.retain(|s| s.block_size() == size);
        }
        decide(tensor, spec, survivors, reasons)
    }
}

/// One survivor, or several that move the same bytes, or a tie that the backend's head width breaks.
fn decide(
    tensor: &TensorDesc,
    spec: &CacheSpec,
    mut survivors: Vec<PagedLayout>,
    reasons: Vec<String>,
) -> Result<PagedLayout, LayoutError> {
    if survivors.len() > 1 && survivors[1..].iter().any(|s| !s.moves_same_bytes(&survivors[0])) {
        let by_hint: Vec<usize> = (0..survivors.len())
            .filter(|&i| Some(survivors[i].head_size()) == spec.backend_head_size)
            .collect();
        match by_hint[..] {
            [one] => survivors.swap(0, one),
            _ => {
                return Err(LayoutError::Ambiguous {
                    shape: tensor.shape().to_vec(),
                    readings: survivors.iter().map(describe).collect(),
                    decide: what_decides(&survivors, spec),
                });
            }
        }
    }
    match survivors.into_iter().next() {
        Some(layout) => Ok(layout),
        None => Err(LayoutError::Mismatch { shape: tensor.shape().to_vec(), reasons }),
    }
}

fn describe(layout: &PagedLayout) -> String {
    format!(
        "{} ({} blocks of {} tokens, {} head(s) of {}, {} plane(s))",
        Axis::join(layout.axes()),
        layout.num_blocks(),
        layout.block_size(),
        layout.num_heads(),
        layout.head_size(),
        layout.kv_planes()
    )
}

fn what_decides(survivors: &[PagedLayout], spec: &CacheSpec) -> String {
    let differ = |f: fn(&PagedLayout) -> u64| survivors[1..].iter().any(|s| f(s) != f(&survivors[0]));
    let mut facts = Vec::new();
    if spec.block_size.is_none() && differ(PagedLayout::block_size) {
        facts.push("block_size");
    }
    if spec.num_kv_heads.is_none() && differ(PagedLayout::num_heads) {
        facts.push("num_kv_heads");
    }
    if spec.head_size.is_none() && differ(PagedLayout::head_size) {
        facts.push("head_size");
    }
    if !spec.mla && differ(PagedLayout::kv_planes) {
        facts.push("mla");
    }
    let axes = format!("the axis order (for example axes={})", Axis::join(survivors[0].axes()));
    match facts.is_empty() {
        true => format!("pass {axes} to decide"),
        false => format!("pass {} or {axes} to decide", facts.join(", ")),
    }
}

fn no_pattern(tensor: &TensorDesc, spec: &CacheSpec) -> LayoutError {
    let what = if spec.split_kv { "a separate K or V tensor" } else { "a cache tensor" };
    let reason = format!(
        "no engine registers {what} with {} axes; state the axis order (axes), block,content for blocks of opaque bytes",
        tensor.rank()
    );
    LayoutError::Mismatch { shape: tensor.shape().to_vec(), reasons: vec![reason] }
}

/// Why a reading is none: a contradiction, or an error of the numbers themselves.
enum Refusal {
    Reason(String),
    Error(LayoutError),
}

impl Refusal {
    fn into_error(self, tensor: &TensorDesc, axes: &[Axis]) -> LayoutError {
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

/// One way to read a tensor.
struct Reading<'a> {
    tensor: &'a TensorDesc,
    spec: &'a CacheSpec,
    axes: &'a [Axis],
    /// The caller stated this order; what only engines' habits rule out is then allowed.
    named: bool,
    /// Whether the stated block may be a multiple of the token axis.
    kernel_blocks: bool,
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

    fn layout(&self) -> Result<PagedLayout, Refusal> {
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
        if !self.named && self.heads_first() && self.tensor.rank() >= 5 {
            // Rank 5 and 6 are token-major; heads first is believed on an exact block size only, and not
            // when the head axis is that long as well.
            if stated != Some(tokens) {
                return refuse("heads before tokens needs the block size to be stated".into());
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

    fn kernel_factor(&self, stated: u64, tokens: u64) -> Result<u64, Refusal> {
        if !stated.is_multiple_of(tokens) {
            return refuse(format!("its token axis has length {tokens}, the stated block_size {stated}"));
        }
        if !self.kernel_blocks || (self.heads_first() && !self.named) {
            return refuse(format!("its token axis has length {tokens}, not the stated block_size {stated}"));
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

    /// Fused rank-4 tensors come in few memory orders; one that no engine produces is no reading.
    fn check_memory_order(&self) -> Result<(), Refusal> {
        if self.named || self.find(KvDim).is_none() {
            return Ok(());
        }
        // Layers may share an allocation anywhere in the order; of one layer's view only these are left.
        let known: &[&[Axis]] = match self.heads_first() {
            true => &[&[Block, Head, Token], &[Block, Token, Head], &[Head, Block, Token]],
            false => &[&[Block, Token, Head]],
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
