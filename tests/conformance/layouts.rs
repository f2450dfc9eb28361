//! Every layout that engines register, built small: shape and strides by hand, from the memory order.

use maru::{Axis, CacheSpec, DType, TensorDesc};

/// Sizes of a test cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    pub(crate) layers: u64,
    pub(crate) blocks: u64,
    pub(crate) block_size: u64,
    pub(crate) heads: u64,
    pub(crate) head_size: u64,
}

/// How the tensors make a cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    PerLayer,
    Split,
    CrossLayer,
}

/// One layout: `memory` is the physical order, outermost first (L layer, K kv, B block, N token, H head, C
/// content); `logical` the axes of the tensor that the engine hands over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    memory: &'static str,
    logical: &'static [Axis],
    kind: Kind,
    /// Whether the axis order must be stated.
    named: bool,
    mla: bool,
}

const fn layout(name: &'static str, memory: &'static str, logical: &'static [Axis]) -> Layout {
    Layout { name, memory, logical, kind: Kind::PerLayer, named: false, mla: false }
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
}

use Axis::{
    Block as B, Content as C, Dim as D, Head as H, HeadsDim as HD, Kv as K, KvDim as KD, Layer as L,
    Slot as S, Token as T,
};

/// The table of layouts.
pub(crate) const LAYOUTS: &[Layout] = &[
    layout("block_first_nhd", "LBKNHC", &[B, K, T, H, D]),
    layout("block_first_hnd", "LBKHNC", &[B, K, T, H, D]),
    layout("kv_first_nhd", "LKBNHC", &[K, B, T, H, D]),
    layout("kv_first_hnd", "LKBHNC", &[K, B, T, H, D]),
    layout("flat_kv_first", "LKBNHC", &[K, B, T, HD]).named(),
    layout("flat_block_first", "LBKNHC", &[B, K, T, HD]).named(),
    layout("fused_lbhnc", "LBHNC", &[B, H, T, KD]),
    layout("fused_lbnhc", "LBNHC", &[B, H, T, KD]),
    layout("fused_lhbnc", "LHBNC", &[B, H, T, KD]),
    layout("fused_blhnc", "BLHNC", &[B, H, T, KD]),
    layout("fused_blnhc", "BLNHC", &[B, H, T, KD]),
    layout("fused_bhlnc", "BHLNC", &[B, H, T, KD]),
    layout("fused_token_major", "LBNHC", &[B, T, H, KD]).named(),
    layout("diffkv_opaque", "LBNHC", &[B, T, H, C]).named(),
    layout("heads_first_opaque", "LBHNC", &[B, H, T, C]).named(),
    layout("mla", "LBNC", &[B, T, D]).mla(),
    layout("mla_one_head_axis", "LBHNC", &[B, H, T, D]).mla(),
    layout("sglang_slots", "LBNHC", &[S, H, D]).kind(Kind::Split),
    layout("sglang_blocks", "LBNHC", &[B, T, H, D]).kind(Kind::Split),
    layout("sglang_mla", "LBNHC", &[S, H, D]).mla(),
    layout("opaque_blocks", "LBC", &[B, C]).named(),
    layout("cross_layer", "BLKNHC", &[B, L, K, T, H, D]).kind(Kind::CrossLayer),
    layout("trtllm_cross_layer", "BLKHNC", &[B, L, K, H, T, D]).kind(Kind::CrossLayer).named(),
    layout("layer_first_cross", "LKBNHC", &[L, K, B, T, H, D]).kind(Kind::CrossLayer).named(),
];

/// A layout at given sizes: tensors, their places in one arena, and what the caller knows.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) tensor: TensorDesc,
    pub(crate) axes: Vec<Axis>,
    pub(crate) offsets: Vec<u64>,
    pub(crate) kind: Kind,
    pub(crate) spec: CacheSpec,
    pub(crate) planes: u64,
    pub(crate) block_size: u64,
    pub(crate) arena: u64,
    pub(crate) slots: u64,
}

impl Layout {
    /// Whether it makes sense at these sizes (one-head layouts).
    pub(crate) fn fits(&self, d: Dims) -> bool {
        !self.mla || d.heads == 1
    }

    /// Builds it; `pad` elements are added to the block stride, `shift` bytes to the first address.
    pub(crate) fn build(&self, d: Dims, dtype: DType, pad: u64, shift: u64) -> Built {
        let fused = self.logical.contains(&KD);
        let opaque = self.logical == [B, C];
        let content = match () {
            () if fused => 2 * d.head_size,
            () if opaque => 3 * d.head_size,
            () => d.head_size,
        };
        let flat = self.logical.contains(&HD);
        let len = |letter: char| match letter {
            'L' => d.layers,
            'K' => 2,
            'B' => d.blocks,
            'N' => d.block_size,
            'H' => d.heads,
            _ => content,
        };
        // Strides from the memory order, innermost first; the pad widens what one block takes.
        let mut strides = std::collections::HashMap::new();
        let mut step = 1;
        for letter in self.memory.chars().rev() {
            if letter == 'B' && !self.logical.contains(&S) {
                step += pad;
            }
            strides.insert(letter, step);
            step *= len(letter);
        }
        let letter = |axis: Axis| match axis {
            K => ('K', 2),
            B => ('B', d.blocks),
            T => ('N', d.block_size),
            H => ('H', d.heads),
            L => ('L', d.layers),
            S => ('N', d.blocks * d.block_size),
            HD => ('C', d.heads * d.head_size),
            _ => ('C', content),
        };
        let shape: Vec<i64> = self.logical.iter().map(|a| letter(*a).1 as i64).collect();
        let steps: Vec<i64> = self.logical.iter().map(|a| strides[&letter(*a).0] as i64).collect();
        let tensor = TensorDesc::strided(&shape, &steps, dtype).expect("a layout of the table is sound");
        let element = dtype.size();
        let per_layer = strides[&'L'] * element;
        let offsets: Vec<u64> = match self.kind {
            Kind::CrossLayer => vec![shift],
            Kind::PerLayer => (0..d.layers).map(|l| shift + l * per_layer).collect(),
            Kind::Split => (0..2 * d.layers).map(|i| shift + i * (per_layer + 64)).collect(),
        };
        let end = offsets.iter().max().unwrap_or(&0) + tensor.span_bytes();
        let spec = CacheSpec {
            block_size: Some(d.block_size),
            num_kv_heads: (!opaque).then_some(d.heads),
            head_size: (!opaque && !self.logical.contains(&C)).then_some(d.head_size),
            mla: self.mla,
            axes: (self.named || d.heads == d.block_size && !flat).then(|| self.logical.to_vec()),
            ..CacheSpec::default()
        };
        Built {
            tensor,
            axes: self.logical.to_vec(),
            offsets,
            kind: self.kind,
            spec,
            planes: if self.mla || self.logical.contains(&C) { 1 } else { 2 },
            block_size: if opaque { 1 } else { d.block_size },
            arena: end + 64,
            slots: if opaque { d.blocks } else { d.blocks * d.block_size },
        }
    }
}
