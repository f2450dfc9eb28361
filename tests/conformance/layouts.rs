//! Every layout that engines register, built small: shape and strides by hand, from the memory order of the table
//! that the command line has, too. How bytes follow from it is worked out here on its own.

#[path = "../../crates/maru-cli/src/layouts/table.rs"]
#[allow(dead_code, reason = "the command line uses the rest")]
mod table;

use maru::Axis::{
    Block as B, Content as C, Head as H, HeadsDim as HD, Kv as K, KvDim as KD, Layer as L, Slot as S,
    Token as T,
};
use maru::{Axis, CacheSpec, DType, TensorDesc};

pub(crate) use table::{Dims, Kind, LAYOUTS, Layout};

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
