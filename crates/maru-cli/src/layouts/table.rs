//! Names, axes and memory orders of the layouts that engines register; no addresses. The conformance suite takes the
//! same table and works the bytes out on its own.

use maru::Axis;

/// Sizes of a cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    pub(crate) layers: u64,
    pub(crate) blocks: u64,
    pub(crate) block_size: u64,
    pub(crate) heads: u64,
    pub(crate) head_size: u64,
}

/// How the tensors make a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    PerLayer,
    Split,
    CrossLayer,
}

/// One layout: `memory` is the physical order, outermost first (L layer, K kv, B block, N token, H head, C
/// content); `logical` the axes of the tensor that an engine hands over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    pub(crate) memory: &'static str,
    pub(crate) logical: &'static [Axis],
    pub(crate) kind: Kind,
    /// Whether the axis order must be stated.
    pub(crate) named: bool,
    /// One latent row per token.
    pub(crate) mla: bool,
    /// Whether `maru bench` times it unless told otherwise.
    pub(crate) usual: bool,
}

const fn layout(name: &'static str, memory: &'static str, logical: &'static [Axis]) -> Layout {
    Layout { name, memory, logical, kind: Kind::PerLayer, named: false, mla: false, usual: false }
}

impl Layout {
    const fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }
    const fn named(mut self) -> Self {
        self.named = true;
        self
    }
    const fn mla(mut self) -> Self {
        self.mla = true;
        self
    }
    const fn usual(mut self) -> Self {
        self.usual = true;
        self
    }

    /// Whether it makes sense at these sizes.
    pub(crate) fn fits(&self, d: Dims) -> bool {
        !self.mla || d.heads == 1
    }
}

use Axis::{
    Block as B, Content as C, Dim as D, Head as H, HeadsDim as HD, Kv as K, KvDim as KD, Layer as L,
    Slot as S, Token as T,
};

/// The table.
pub(crate) const LAYOUTS: &[Layout] = &[
    layout("block_first_nhd", "LBKNHC", &[B, K, T, H, D]).usual(),
    layout("block_first_hnd", "LBKHNC", &[B, K, T, H, D]).usual(),
    layout("kv_first_nhd", "LKBNHC", &[K, B, T, H, D]),
    layout("kv_first_hnd", "LKBHNC", &[K, B, T, H, D]),
    layout("flat_kv_first", "LKBNHC", &[K, B, T, HD]).named(),
    layout("flat_block_first", "LBKNHC", &[B, K, T, HD]).named(),
    layout("fused_lbhnc", "LBHNC", &[B, H, T, KD]),
    layout("fused_lbnhc", "LBNHC", &[B, H, T, KD]).usual(),
    layout("fused_lhbnc", "LHBNC", &[B, H, T, KD]),
    layout("fused_blhnc", "BLHNC", &[B, H, T, KD]).usual(),
    layout("fused_blnhc", "BLNHC", &[B, H, T, KD]),
    layout("fused_bhlnc", "BHLNC", &[B, H, T, KD]),
    layout("fused_token_major", "LBNHC", &[B, T, H, KD]).named(),
    layout("diffkv_opaque", "LBNHC", &[B, T, H, C]).named(),
    layout("heads_first_opaque", "LBHNC", &[B, H, T, C]).named(),
    layout("mla", "LBNC", &[B, T, D]).mla().usual(),
    layout("mla_one_head_axis", "LBHNC", &[B, H, T, D]).mla(),
    layout("sglang_slots", "LBNHC", &[S, H, D]).kind(Kind::Split),
    layout("sglang_blocks", "LBNHC", &[B, T, H, D]).kind(Kind::Split),
    layout("sglang_mla", "LBNHC", &[S, H, D]).mla(),
    layout("opaque_blocks", "LBC", &[B, C]).named(),
    layout("cross_layer", "BLKNHC", &[B, L, K, T, H, D]).kind(Kind::CrossLayer),
    layout("trtllm_cross_layer", "BLKHNC", &[B, L, K, H, T, D]).kind(Kind::CrossLayer).named(),
    layout("layer_first_cross", "LKBNHC", &[L, K, B, T, H, D]).kind(Kind::CrossLayer).named(),
];
