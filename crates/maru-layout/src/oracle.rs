//! The naive mover that every other one is compared with: one byte at a time, straight from the tensor's
//! shape and strides and the slab's documented formula. It shares no arithmetic with plans and jobs.

use crate::{Axis, DType, Direction, TensorDesc};

/// A cache as the test that registered it knows it.
#[derive(Clone, Debug)]
pub struct Reference {
    /// One tensor of the cache.
    pub tensor: TensorDesc,
    /// What its axes are.
    pub axes: Vec<Axis>,
    /// Tokens of a block (for the `slot` axis; otherwise the token axis's length).
    pub block_size: u64,
    /// Planes per layer: 2 also where K and V are separate tensors.
    pub planes: u64,
    /// Layers of the cache.
    pub layers: u64,
    /// Byte offset of each tensor in the memory given to [`Reference::copy`]. One tensor if it has a `layer`
    /// axis; one per layer if K and V share a tensor or there is one plane; else all K tensors, then all V.
    pub tensors: Vec<u64>,
}

impl Reference {
    /// Offset in the cache memory of byte `byte` of token-row `(kv, layer, slot)`; a row is all heads, one
    /// after the other.
    pub fn paged_offset(&self, kv: u64, layer: u64, slot: u64, byte: u64) -> u64 {
        let element = self.tensor.dtype().size();
        let (index, within) = (byte / element, byte % element);
        let find = |axis| self.axes.iter().position(|a| *a == axis);
        let len = |axis| find(axis).map_or(1, |i| self.tensor.shape()[i]);
        let mut at = within;
        let mut step = |axis: usize, i: u64| at += self.tensor.strides()[axis] * element * i;
        // The last axis holds K then V of a head (kv_dim), a head (dim), or all heads.
        let fused = find(Axis::KvDim).is_some();
        let width = match () {
            () if fused => len(Axis::KvDim) / 2,
            () if find(Axis::Dim).is_some() => len(Axis::Dim),
            () if find(Axis::HeadsDim).is_some() => len(Axis::HeadsDim),
            () if self.axes == [Axis::Block, Axis::Content] => self.tensor.shape()[1..].iter().product(),
            () => len(Axis::Content),
        };
        let (head, d) = (index / width, index % width);
        for (axis, word) in self.axes.iter().enumerate() {
            let inner_stride_axis = self.tensor.rank() - 1;
            match word {
                Axis::Kv => step(axis, kv),
                Axis::Layer => step(axis, layer),
                Axis::Head => step(axis, head),
                Axis::Slot => step(axis, slot),
                Axis::Block => step(axis, slot / len(Axis::Token).max(1)),
                Axis::Token => step(axis, slot % len(Axis::Token)),
                Axis::KvDim => step(axis, kv * width + d),
                Axis::Content if self.axes.len() == 2 => step(inner_stride_axis, d),
                Axis::Dim | Axis::HeadsDim | Axis::Content => step(axis, d),
            }
        }
        let shares = fused || find(Axis::Kv).is_some() || self.planes == 1;
        let tensor = match () {
            () if find(Axis::Layer).is_some() => 0,
            () if shares => layer,
            () => kv * self.layers + layer,
        };
        self.tensors[usize::try_from(tensor).unwrap_or(usize::MAX)] + at
    }

    /// Bytes of a token in one plane.
    pub fn row_bytes(&self) -> u64 {
        let len = |word| self.axes.iter().position(|a| *a == word).map_or(1, |i| self.tensor.shape()[i]);
        let content = match self.axes[..] {
            [Axis::Block, Axis::Content] => self.tensor.shape()[1..].iter().product(),
            _ => len(Axis::Content),
        };
        let fused = len(Axis::KvDim).max(2) / if len(Axis::KvDim) > 1 { 2 } else { 1 };
        let fused = if len(Axis::KvDim) > 1 { fused } else { 1 };
        len(Axis::Head) * len(Axis::Dim) * fused * content * len(Axis::HeadsDim) * self.tensor.dtype().size()
    }

    /// Moves tokens `skip..slots.len()` between `cache` and a packed slab of `tokens` tokens
    /// (`[planes][layers][tokens][row]`), and returns the bytes written, so that a test can assert that
    /// something was.
    pub fn copy(
        &self,
        direction: Direction,
        cache: &mut [u8],
        slab: &mut [u8],
        tokens: u64,
        slots: &[i64],
        skip: u64,
    ) -> u64 {
        let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let row = self.row_bytes();
        let mut written = 0;
        for kv in 0..self.planes {
            for layer in 0..self.layers {
                for (token, &slot) in slots.iter().enumerate().skip(at(skip)) {
                    let Ok(slot) = u64::try_from(slot) else { continue };
                    for byte in 0..row {
                        let paged = at(self.paged_offset(kv, layer, slot, byte));
                        let packed = at(((kv * self.layers + layer) * tokens + token as u64) * row + byte);
                        match direction {
                            Direction::Gather => slab[packed] = cache[paged],
                            Direction::Scatter => cache[paged] = slab[packed],
                        }
                        written += 1;
                    }
                }
            }
        }
        written
    }
}

/// Content that depends on where it belongs, so that any misplacement shows: a mixed 64-bit hash of
/// (layer, plane, token, head, byte), truncated to a byte.
pub fn pattern(layer: u64, kv: u64, token: u64, head: u64, byte: u64) -> u8 {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for part in [layer, kv, token, head, byte] {
        x = (x ^ part).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x ^= x >> 32;
    }
    x.to_le_bytes()[0]
}

/// Bytes of `n` elements, for sizing test memory.
pub fn bytes_of(n: u64, dtype: DType) -> u64 {
    n.saturating_mul(dtype.size())
}
