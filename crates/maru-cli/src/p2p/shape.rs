//! Where the bytes of a paged cache lie, reckoned here and not by the library that is being checked.
//!
//! Each layer is one tensor of `num_blocks` blocks; a block is contiguous, and inside it a row (one head of one
//! token, K or V) is at `kv * kv_stride + offset * token_stride + head * head_stride`.

use maru::layout::{CacheSpec, DType, TensorDesc};
use maru::transfer::profile::Profile;

use crate::args::CacheLayout;
use crate::error::CliError;

/// Layers start at page borders; what lies between them is watched too.
const PAGE: u64 = 4096;

/// Blocks that no token is given: they must stay as they were.
const SPARE_BLOCKS: u64 = 3;

/// The paged cache of one process.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) layers: u64,
    pub(crate) planes: u64,
    pub(crate) heads: u64,
    pub(crate) head_bytes: u64,
    pub(crate) block_size: u64,
    pub(crate) num_blocks: u64,
    pub(crate) block_bytes: u64,
    pub(crate) layer_stride: u64,
    kv_stride: u64,
    token_stride: u64,
    head_stride: u64,
    dtype: DType,
    layout: CacheLayout,
    mla: bool,
}

impl Shape {
    /// A cache that can hold `tokens` tokens, with blocks to spare.
    pub(crate) fn new(profile: &Profile, tokens: u64, layout: CacheLayout) -> Result<Self, CliError> {
        let dtype = profile.dtype;
        let planes = u64::from(profile.kv_planes());
        let heads = u64::from(profile.kv_heads);
        let block_size = u64::from(profile.block_size);
        let used = tokens.div_ceil(block_size);
        let num_blocks = used + used / 8 + SPARE_BLOCKS;
        // The parts are small (heads and widths fit 16 bits, and so do block sizes), their product fits 64.
        let head_bytes = u64::from(profile.head_size) * dtype.size();
        let token_bytes = heads * head_bytes;
        let plane_bytes = block_size * token_bytes;
        let (kv_stride, token_stride, head_stride) = match layout {
            _ if profile.mla => (0, token_bytes, token_bytes),
            CacheLayout::Nhd => (plane_bytes, token_bytes, head_bytes),
            CacheLayout::Hnd => (plane_bytes, head_bytes, block_size * head_bytes),
            CacheLayout::Fused => (head_bytes, 2 * token_bytes, 2 * head_bytes),
        };
        let block_bytes = planes * plane_bytes;
        let too_large =
            || CliError::invalid(format!("a cache of {tokens} tokens of this profile is too large"));
        let layer_stride = num_blocks
            .checked_mul(block_bytes)
            .and_then(|bytes| bytes.checked_next_multiple_of(PAGE))
            .ok_or_else(too_large)?;
        let layers = u64::from(profile.layers);
        layers.checked_mul(layer_stride).filter(|n| *n <= i64::MAX.unsigned_abs()).ok_or_else(too_large)?;
        Ok(Shape {
            layers,
            planes,
            heads,
            head_bytes,
            block_size,
            num_blocks,
            block_bytes,
            layer_stride,
            kv_stride,
            token_stride,
            head_stride,
            dtype,
            layout,
            mla: profile.mla,
        })
    }

    /// Bytes of the whole cache.
    pub(crate) fn bytes(&self) -> u64 {
        self.layers * self.layer_stride
    }

    /// First byte of a layer's block.
    pub(crate) fn block_offset(&self, layer: u64, block: u64) -> u64 {
        layer * self.layer_stride + block * self.block_bytes
    }

    /// First byte of a row inside its block.
    pub(crate) fn row_offset(&self, kv: u64, offset: u64, head: u64) -> u64 {
        kv * self.kv_stride + offset * self.token_stride + head * self.head_stride
    }

    /// A layer's tensor, as an engine would register it.
    pub(crate) fn tensor(&self) -> Result<TensorDesc, CliError> {
        let number = |n: u64| i64::try_from(n).map_err(|_| CliError::invalid(format!("{n} is too large")));
        let (nb, bs) = (number(self.num_blocks)?, number(self.block_size)?);
        let (nh, hs) = (number(self.heads)?, number(self.head_bytes / self.dtype.size())?);
        let h = nh * hs;
        let (shape, strides) = match self.layout {
            _ if self.mla => (vec![nb, bs, h], vec![bs * h, h, 1]),
            CacheLayout::Nhd => (vec![nb, 2, bs, nh, hs], vec![2 * bs * h, bs * h, h, hs, 1]),
            CacheLayout::Hnd => (vec![nb, 2, bs, nh, hs], vec![2 * bs * h, bs * h, hs, bs * hs, 1]),
            CacheLayout::Fused => (vec![nb, nh, bs, 2 * hs], vec![2 * bs * h, 2 * hs, 2 * h, 1]),
        };
        Ok(TensorDesc::strided(&shape, &strides, self.dtype)?)
    }

    /// What an engine knows of it besides the tensors.
    pub(crate) fn spec(&self) -> CacheSpec {
        CacheSpec {
            block_size: Some(self.block_size),
            num_kv_heads: Some(self.heads),
            head_size: Some(self.head_bytes / self.dtype.size()),
            num_blocks: Some(self.num_blocks),
            mla: self.mla,
            ..CacheSpec::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use maru::layout::PagedLayout;
    use std::collections::HashSet;

    fn profile(text: &str) -> Profile {
        Profile::from_toml_str(text, "test").unwrap()
    }

    const SMALL: &str = "name='s'\nmodel='m'\nlayers=2\nkv_heads=2\nhead_size=3\ndtype='bf16'\nblock_size=4";

    #[test]
    fn rows_tile_their_block() {
        for layout in [CacheLayout::Nhd, CacheLayout::Hnd, CacheLayout::Fused] {
            let shape = Shape::new(&profile(SMALL), 9, layout).unwrap();
            let mut seen = HashSet::new();
            for (kv, offset, head) in (0..16).map(|i| (i / 8, i / 2 % 4, i % 2)) {
                let start = shape.row_offset(kv, offset, head);
                assert!(start + shape.head_bytes <= shape.block_bytes);
                assert!(seen.insert(start) && start.is_multiple_of(shape.head_bytes));
            }
        }
    }

    #[test]
    fn detection_reads_what_was_laid_out() {
        for layout in [CacheLayout::Nhd, CacheLayout::Hnd, CacheLayout::Fused] {
            for tokens in [1, 9, 64] {
                let shape = Shape::new(&profile(SMALL), tokens, layout).unwrap();
                let read = PagedLayout::detect(&shape.tensor().unwrap(), &shape.spec()).unwrap();
                assert_eq!(read.kv_planes(), 2);
                let s = read.spec();
                assert_eq!(
                    (s.kv_stride, s.token_stride, s.head_stride, s.block_stride),
                    (shape.kv_stride, shape.token_stride, shape.head_stride, shape.block_bytes),
                    "{layout:?}"
                );
            }
        }
    }

    #[test]
    fn mla_has_one_plane_whatever_the_layout() {
        let text =
            "name='s'\nmodel='m'\nlayers=2\nkv_heads=1\nhead_size=9\nmla=true\ndtype='bf16'\nblock_size=4";
        for layout in [CacheLayout::Nhd, CacheLayout::Fused] {
            let shape = Shape::new(&profile(text), 5, layout).unwrap();
            assert_eq!((shape.planes, shape.block_bytes), (1, 4 * 18));
            let read = PagedLayout::detect(&shape.tensor().unwrap(), &shape.spec()).unwrap();
            assert_eq!((read.kv_planes(), read.num_slots()), (1, shape.num_blocks * 4));
        }
    }
}
