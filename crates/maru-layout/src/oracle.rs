//! The naive mover that every other one is compared with: one byte at a time, straight from the tensor's
//! shape and strides and the slab's documented formula. It shares no arithmetic with plans and jobs.

use crate::{Axis, Direction, TensorDesc};

/// A cache as the test that registered it knows it.
#[derive(Clone, Debug)]
pub struct Reference {
    /// One tensor of the cache.
    pub tensor: TensorDesc,
    /// What its axes are.
    pub axes: Vec<Axis>,
    /// Tokens of a block as slots count them, for the tests that make slots from blocks; addresses come from
    /// the tensor alone.
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
    ///
    /// # Panics
    /// If the fields contradict each other: a test that describes its cache wrongly is itself wrong.
    pub fn paged_offset(&self, kv: u64, layer: u64, slot: u64, byte: u64) -> u64 {
        let element = self.tensor.dtype().size();
        let (index, within) = (byte / element, byte % element);
        let (head, d) = (index / self.width(), index % self.width());
        let tokens = self.len(Axis::Token);
        let mut at = 0;
        for (axis, word) in self.axes.iter().enumerate() {
            let stride = self.tensor.strides()[axis];
            at += match word {
                Axis::Kv => kv * stride,
                Axis::Layer => layer * stride,
                Axis::Head => head * stride,
                Axis::Slot => slot * stride,
                Axis::Block => slot / tokens * stride,
                Axis::Token => slot % tokens * stride,
                Axis::KvDim => (kv * self.width() + d) * stride,
                Axis::Dim | Axis::HeadsDim => d * stride,
                Axis::Content => d,
            };
        }
        let one_tensor = self.axes.contains(&Axis::Layer);
        let both_planes = self.axes.contains(&Axis::Kv) || self.axes.contains(&Axis::KvDim);
        let tensor = match () {
            () if one_tensor => 0,
            () if both_planes || self.planes == 1 => layer,
            () => kv * self.layers + layer,
        };
        self.tensors[usize::try_from(tensor).unwrap_or(usize::MAX)] + at * element + within
    }

    /// Bytes of a token in one plane: all heads.
    pub fn row_bytes(&self) -> u64 {
        self.len(Axis::Head) * self.width() * self.tensor.dtype().size()
    }

    /// Length of an axis, 1 where it does not exist.
    fn len(&self, word: Axis) -> u64 {
        self.axes.iter().position(|a| *a == word).map_or(1, |axis| self.tensor.shape()[axis])
    }

    /// Elements that lie together in one plane: a head, a token's flattened heads, or an opaque block.
    fn width(&self) -> u64 {
        match self.axes[..] {
            [Axis::Block, Axis::Content] => self.tensor.shape()[1..].iter().product(),
            _ => {
                let kv_dim = if self.axes.contains(&Axis::KvDim) { self.len(Axis::KvDim) / 2 } else { 1 };
                kv_dim * self.len(Axis::Dim) * self.len(Axis::HeadsDim) * self.len(Axis::Content)
            }
        }
    }

    /// Moves tokens `skip..slots.len()` between `cache` and a packed slab of `tokens` tokens
    /// (`[planes][layers][tokens][row]`), and returns the bytes written, so that a test can assert that
    /// something was.
    ///
    /// # Panics
    /// If a slot or token lies outside the memory given.
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
