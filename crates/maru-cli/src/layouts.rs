//! Every layout that engines register, from its order in memory: what `maru verify` checks and `maru bench` times.

mod table;

use maru::Axis::{
    Block as B, Content as C, Head as H, HeadsDim as HD, Kv as K, KvDim as KD, Layer as L, Slot as S,
    Token as T,
};
use maru::layout::oracle::Reference;
use maru::{Axis, CacheSpec, DType, TensorDesc};

use crate::error::CliError;
pub(crate) use table::{Dims, Kind, LAYOUTS, Layout};

/// The layouts of these names, or those that `all` takes where none is named.
pub(crate) fn select(names: &[String], all: impl Fn(&Layout) -> bool) -> Result<Vec<Layout>, CliError> {
    if names.is_empty() {
        return Ok(LAYOUTS.iter().copied().filter(|layout| all(layout)).collect());
    }
    let known = || LAYOUTS.iter().map(|layout| layout.name).collect::<Vec<_>>().join(", ");
    names
        .iter()
        .map(|name| {
            let found = LAYOUTS.iter().find(|layout| layout.name == name).copied();
            found.ok_or_else(|| {
                CliError::invalid(format!("--layout: no layout {name:?}; there are {}", known()))
            })
        })
        .collect()
}

/// A layout at given sizes: its tensors' shape, their places in one memory, and what an engine knows of them.
#[derive(Clone, Debug)]
pub(crate) struct Built {
    pub(crate) tensor: TensorDesc,
    pub(crate) kind: Kind,
    pub(crate) spec: CacheSpec,
    /// The oracle's view of the same.
    pub(crate) reference: Reference,
    /// Bytes of the memory, with some behind the last tensor that nobody may touch.
    pub(crate) bytes: u64,
    pub(crate) slots: u64,
}

impl Built {
    /// Heads of a token that lie apart, as the tensor has them.
    pub(crate) fn heads(&self) -> u64 {
        let axes = self.reference.axes.iter().zip(self.tensor.shape());
        axes.filter(|(axis, _)| **axis == H).map(|(_, len)| *len).next().unwrap_or(1).max(1)
    }
}

/// Bytes behind caches and slabs that must stay as they are.
pub(crate) const TAIL: u64 = 64;

impl Layout {
    /// Whether slots are whole blocks, so that tokens do not mean anything.
    pub(crate) fn opaque_blocks(&self) -> bool {
        self.logical == [B, C]
    }

    /// Builds it; `pad` elements are added to the block stride, `shift` bytes to the first address.
    pub(crate) fn build(&self, d: Dims, dtype: DType, pad: u64, shift: u64) -> Result<Built, CliError> {
        let too_large = || CliError::invalid(format!("a {} cache of these sizes is too large", self.name));
        let content = match () {
            () if self.logical.contains(&KD) => d.head_size.saturating_mul(2),
            () if self.opaque_blocks() => d.head_size.saturating_mul(3),
            () => d.head_size,
        };
        let len = |letter: char| match letter {
            'L' => d.layers,
            'K' => 2,
            'B' => d.blocks,
            'N' => d.block_size,
            'H' => d.heads,
            _ => content,
        };
        // Strides from the memory order, innermost first; the pad widens what one block takes.
        let mut strides: Vec<(char, u64)> = Vec::with_capacity(6);
        let mut step: u64 = 1;
        for letter in self.memory.chars().rev() {
            if letter == 'B' && !self.logical.contains(&S) {
                step = step.checked_add(pad).ok_or_else(too_large)?;
            }
            strides.push((letter, step));
            step = step.checked_mul(len(letter)).ok_or_else(too_large)?;
        }
        let stride = |wanted: char| strides.iter().find(|(l, _)| *l == wanted).map_or(0, |(_, step)| *step);
        let of = |axis: &Axis| match axis {
            K => ('K', 2),
            B => ('B', d.blocks),
            T => ('N', d.block_size),
            H => ('H', d.heads),
            L => ('L', d.layers),
            S => ('N', d.blocks.saturating_mul(d.block_size)),
            HD => ('C', d.heads.saturating_mul(d.head_size)),
            _ => ('C', content),
        };
        let signed = |n: u64| i64::try_from(n).map_err(|_| too_large());
        let shape = self.logical.iter().map(|a| signed(of(a).1)).collect::<Result<Vec<_>, _>>()?;
        let steps = self.logical.iter().map(|a| signed(stride(of(a).0))).collect::<Result<Vec<_>, _>>()?;
        let tensor = TensorDesc::strided(&shape, &steps, dtype)?;
        let per_layer = stride('L').checked_mul(dtype.size()).ok_or_else(too_large)?;
        let (count, apart) = match self.kind {
            Kind::CrossLayer => (1, 0),
            Kind::PerLayer => (d.layers, per_layer),
            Kind::Split => (d.layers.saturating_mul(2), per_layer.checked_add(TAIL).ok_or_else(too_large)?),
        };
        let offset = |i: u64| apart.checked_mul(i).and_then(|at| at.checked_add(shift)).ok_or_else(too_large);
        let tensors = (0..count).map(offset).collect::<Result<Vec<_>, _>>()?;
        let last = tensors.last().copied().unwrap_or(0);
        let bytes = last.checked_add(tensor.span_bytes()).and_then(|end| end.checked_add(TAIL));
        let opaque = self.opaque_blocks();
        let flat = self.logical.contains(&HD);
        let spec = CacheSpec {
            block_size: Some(d.block_size),
            num_kv_heads: (!opaque).then_some(d.heads),
            head_size: (!opaque && !self.logical.contains(&C)).then_some(d.head_size),
            mla: self.mla,
            axes: (self.named || d.heads == d.block_size && !flat).then(|| self.logical.to_vec()),
            ..CacheSpec::default()
        };
        Ok(Built {
            kind: self.kind,
            spec,
            reference: Reference {
                tensor: tensor.clone(),
                axes: self.logical.to_vec(),
                block_size: if opaque { 1 } else { d.block_size },
                planes: if self.mla || self.logical.contains(&C) { 1 } else { 2 },
                layers: d.layers,
                tensors,
            },
            tensor,
            bytes: bytes.ok_or_else(too_large)?,
            slots: if opaque { d.blocks } else { d.blocks.saturating_mul(d.block_size) },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const DIMS: Dims = Dims { layers: 2, blocks: 3, block_size: 4, heads: 2, head_size: 3 };

    #[test]
    fn every_layout_is_sound_and_its_rows_are_apart() {
        for layout in LAYOUTS {
            let dims = if layout.mla { Dims { heads: 1, ..DIMS } } else { DIMS };
            assert!(layout.fits(dims));
            let built = layout.build(dims, DType::Bf16, 5, 1).unwrap();
            let r = &built.reference;
            let mut seen = HashSet::new();
            for kv in 0..r.planes {
                for (l, s) in (0..r.layers).flat_map(|l| (0..built.slots).map(move |s| (l, s))) {
                    for byte in 0..r.row_bytes() {
                        let at = r.paged_offset(kv, l, s, byte);
                        assert!(at + TAIL < built.bytes && seen.insert(at), "{}: {at}", layout.name);
                    }
                }
            }
        }
    }

    #[test]
    fn names_are_unique_and_found() {
        let names: HashSet<&str> = LAYOUTS.iter().map(|l| l.name).collect();
        assert_eq!(names.len(), LAYOUTS.len());
        let found = select(&["mla".to_owned()], |_| true).unwrap();
        assert_eq!((found.len(), found[0].name), (1, "mla"));
        let message = select(&["nhd".to_owned()], |_| true).unwrap_err().to_string();
        assert!(message.contains("\"nhd\"") && message.contains("block_first_nhd"), "{message}");
        assert_eq!(select(&[], |_| true).unwrap().len(), LAYOUTS.len());
    }

    #[test]
    fn sizes_that_overflow_are_errors() {
        let dims = Dims { layers: 1 << 40, blocks: 1 << 40, ..DIMS };
        for layout in LAYOUTS {
            let dims = if layout.mla { Dims { heads: 1, ..dims } } else { dims };
            assert!(layout.build(dims, DType::F32, 0, 0).is_err(), "{}", layout.name);
        }
    }
}
