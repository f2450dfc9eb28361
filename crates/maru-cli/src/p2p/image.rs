//! Filling a cache with what it should hold, and finding the first byte that is not so.

use serde::{Deserialize, Serialize};

use crate::error::CliError;
use crate::p2p::cache::Cache;
use crate::p2p::content::{self, Prompt};
use crate::p2p::shape::Shape;

/// The place of a byte that is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Difference {
    pub(crate) layer: u64,
    pub(crate) kv: u64,
    pub(crate) token: u64,
    pub(crate) head: u64,
    pub(crate) byte: u64,
}

/// What a cache should hold: the prompt's tokens in their blocks, canary everywhere else.
#[derive(Debug)]
pub(crate) struct Image<'a> {
    shape: &'a Shape,
    prompt: &'a Prompt,
    /// The block of each group of `block_size` tokens, in prompt order.
    blocks: &'a [u64],
    /// For each block of the cache, which group of tokens it holds.
    groups: Vec<Option<u64>>,
    canary: u64,
}

/// Bytes outside of the prompt's slots that were changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stray {
    pub(crate) layer: u64,
    /// Offset in the layer.
    pub(crate) byte: u64,
}

impl<'a> Image<'a> {
    pub(crate) fn new(shape: &'a Shape, prompt: &'a Prompt, blocks: &'a [u64], canary: u64) -> Self {
        let mut groups = vec![None; usize::try_from(shape.num_blocks).unwrap_or(0)];
        for (group, block) in (0..).zip(blocks) {
            if let Some(place) = usize::try_from(*block).ok().and_then(|i| groups.get_mut(i)) {
                *place = Some(group);
            }
        }
        Image { shape, prompt, blocks, groups, canary }
    }

    /// Writes one layer; with the tokens or, before a load, canary only.
    pub(crate) fn write(&self, cache: &mut Cache, layer: u64, tokens: bool) -> Result<(), CliError> {
        let mut buffer = self.buffer();
        for block in 0..self.shape.num_blocks {
            self.block(layer, block, tokens, &mut buffer);
            cache.write(self.shape.block_offset(layer, block), &buffer)?;
        }
        let (offset, mut gap) = self.gap(layer);
        content::canary(self.canary, offset, &mut gap);
        cache.write(offset, &gap)
    }

    /// Compares every byte of one layer.
    pub(crate) fn check(
        &self,
        cache: &Cache,
        layer: u64,
    ) -> Result<(Option<Difference>, Option<Stray>), CliError> {
        let (mut found, mut wanted) = (self.buffer(), self.buffer());
        let (mut first, mut stray) = (None, None);
        for block in 0..self.shape.num_blocks {
            let offset = self.shape.block_offset(layer, block);
            cache.read(offset, &mut found)?;
            self.block(layer, block, true, &mut wanted);
            if found == wanted {
                continue;
            }
            let in_tokens = self.difference(layer, block, &found, &wanted);
            first = [first, in_tokens].into_iter().flatten().min();
            if in_tokens.is_none() {
                let at = found.iter().zip(&wanted).position(|(a, b)| a != b).unwrap_or(0) as u64;
                stray = stray.or(Some(Stray { layer, byte: block * self.shape.block_bytes + at }));
            }
        }
        let (offset, mut gap) = self.gap(layer);
        let mut wanted = gap.clone();
        cache.read(offset, &mut gap)?;
        content::canary(self.canary, offset, &mut wanted);
        if let Some(at) = gap.iter().zip(&wanted).position(|(a, b)| a != b) {
            let byte = self.shape.num_blocks * self.shape.block_bytes + at as u64;
            stray = stray.or(Some(Stray { layer, byte }));
        }
        Ok((first, stray))
    }

    fn buffer(&self) -> Vec<u8> {
        vec![0; usize::try_from(self.shape.block_bytes).unwrap_or(0)]
    }

    /// The bytes between the last block of a layer and the next layer.
    fn gap(&self, layer: u64) -> (u64, Vec<u8>) {
        let blocks = self.shape.num_blocks * self.shape.block_bytes;
        let len = usize::try_from(self.shape.layer_stride - blocks).unwrap_or(0);
        (layer * self.shape.layer_stride + blocks, vec![0; len])
    }

    /// Tokens in a block: those of its group that the prompt has.
    fn tokens_of(&self, block: u64) -> std::ops::Range<u64> {
        let group = usize::try_from(block).ok().and_then(|i| self.groups.get(i)).copied().flatten();
        let all = self.prompt.tokens().len() as u64;
        match group {
            Some(group) => group * self.shape.block_size..((group + 1) * self.shape.block_size).min(all),
            None => 0..0,
        }
    }

    /// What a block should hold.
    fn block(&self, layer: u64, block: u64, with_tokens: bool, bytes: &mut [u8]) {
        let tokens = if with_tokens { self.tokens_of(block) } else { 0..0 };
        if tokens.end - tokens.start < self.shape.block_size {
            content::canary(self.canary, self.shape.block_offset(layer, block), bytes);
        }
        for (offset, token) in (0..).zip(tokens) {
            let seed = self.prompt.token_seed(token);
            self.rows(offset, |kv, head, range| {
                if let Some(row) = bytes.get_mut(range) {
                    content::head_row(seed, layer, kv, head, row);
                }
            });
        }
    }

    /// Calls back with every row of the token at `offset` of a block.
    fn rows(&self, offset: u64, mut row: impl FnMut(u64, u64, std::ops::Range<usize>)) {
        let len = usize::try_from(self.shape.head_bytes).unwrap_or(0);
        for kv in 0..self.shape.planes {
            for head in 0..self.shape.heads {
                let start = usize::try_from(self.shape.row_offset(kv, offset, head)).unwrap_or(0);
                row(kv, head, start..start + len);
            }
        }
    }

    /// The first wrong byte of the tokens in a block, in the order layer, K/V, token, head, byte.
    fn difference(&self, layer: u64, block: u64, found: &[u8], wanted: &[u8]) -> Option<Difference> {
        let mut first = None;
        for (offset, token) in (0..).zip(self.tokens_of(block)) {
            self.rows(offset, |kv, head, range| {
                let (Some(a), Some(b)) = (found.get(range.clone()), wanted.get(range)) else { return };
                if let Some(byte) = a.iter().zip(b).position(|(a, b)| a != b) {
                    let here = Difference { layer, kv, token, head, byte: byte as u64 };
                    first = [first, Some(here)].into_iter().flatten().min();
                }
            });
        }
        first
    }

    /// Where a token was put, for messages.
    pub(crate) fn block_of(&self, token: u64) -> Option<u64> {
        usize::try_from(token / self.shape.block_size).ok().and_then(|i| self.blocks.get(i)).copied()
    }
}
