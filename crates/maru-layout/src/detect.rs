//! Which axis is which? The only place that reads a tensor's shape.
//!
//! Every reading that some engine really produces is a candidate. The caller's facts and the strides rule
//! candidates out; one must be left, or all that are left must move the same bytes. Anything else is an
//! error that lists the readings and says what decides. A new engine layout is one more row of
//! [`patterns`] and one row of the table test.

mod reading;

use crate::Axis::{self, Block, Dim, Head, HeadsDim, Kv, KvDim, Layer, Slot, Token};
use crate::{LayoutError, PagedLayout, TensorDesc};
use reading::{KernelBlocks, Reading, Refusal};

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
            let named = Reading { tensor, spec, axes, named: true, kernel_blocks: KernelBlocks::AnyOrder };
            return named.layout().map_err(|e| e.into_error(tensor, axes));
        }
        let all = patterns(tensor.rank(), spec.split_kv);
        if all.is_empty() {
            return Err(no_pattern(tensor, spec));
        }
        // The kernel-block rule is for tensors of which no axis can be the stated block.
        let exact = all.iter().any(|axes| {
            let may_be_tokens = |(i, a): (usize, &Axis)| {
                matches!(a, Token | Head) && Some(tensor.shape()[i]) == spec.block_size
            };
            axes.iter().enumerate().any(may_be_tokens)
        });
        let kernel_blocks = if exact { KernelBlocks::Never } else { KernelBlocks::TokensFirst };
        let read = |axes, kernel_blocks| Reading { tensor, spec, axes, named: false, kernel_blocks }.layout();
        let mut survivors: Vec<PagedLayout> = Vec::new();
        let mut reasons = Vec::new();
        for axes in all {
            match read(axes, kernel_blocks) {
                Ok(layout) => survivors.push(layout),
                Err(Refusal::Reason(reason)) => reasons.push(format!("not {}: {reason}", Axis::join(axes))),
                Err(Refusal::Error(e)) => return Err(e),
            }
        }
        // A stated block that is found, be it on a merged slot axis, beats one that is only a multiple.
        match spec.block_size {
            Some(size) if survivors.iter().any(|s| s.block_size() == size) => {
                survivors.retain(|s| s.block_size() == size);
            }
            // Heads may come before tokens in kernel blocks, too (rank 5 is token-major by rule): that reading
            // is not believed unless named, but it must not be overlooked either.
            Some(_) if !exact && !survivors.is_empty() && tensor.rank() != 5 => {
                let others = all.iter().filter_map(|axes| read(axes, KernelBlocks::AnyOrder).ok());
                let new: Vec<_> = others.filter(|o| !survivors.contains(o)).collect();
                survivors.extend(new);
            }
            _ => {}
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
    if !agree(&survivors) && survivors.iter().any(|s| has_backend_width(s, spec)) {
        survivors.retain(|s| has_backend_width(s, spec));
    }
    if !agree(&survivors) {
        return Err(LayoutError::Ambiguous {
            shape: tensor.shape().to_vec(),
            readings: survivors.iter().map(describe).collect(),
            decide: what_decides(&survivors, spec),
        });
    }
    match survivors.into_iter().next() {
        Some(layout) => Ok(layout),
        None => Err(LayoutError::Mismatch { shape: tensor.shape().to_vec(), reasons }),
    }
}

fn agree(readings: &[PagedLayout]) -> bool {
    readings.windows(2).all(|w| w[0].moves_same_bytes(&w[1]))
}

/// Whether a reading has the head width that the engine's backend reports. A flattened row of which neither
/// heads nor width is known may have any width that divides it.
fn has_backend_width(layout: &PagedLayout, spec: &CacheSpec) -> bool {
    let Some(width) = spec.backend_head_size else { return false };
    let open = layout.axes().contains(&HeadsDim) && spec.num_kv_heads.is_none() && spec.head_size.is_none();
    layout.head_size() == width || (open && width > 0 && layout.head_size().is_multiple_of(width))
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
