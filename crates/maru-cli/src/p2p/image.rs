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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::CacheLayout;
    use maru::Config;
    use maru::transfer::TransferEngine;
    use maru::transfer::config::DeviceChoice;
    use maru::transfer::profile::Profile;

    /// Three layers, two heads of three bf16, blocks of four; ten tokens in blocks 4, 0 and 2 of six.
    struct Setting {
        shape: Shape,
        prompt: Prompt,
        cache: Cache,
    }

    const BLOCKS: [u64; 3] = [4, 0, 2];
    const TEXT: &str = "name='s'\nmodel='m'\nlayers=3\nkv_heads=2\nhead_size=3\ndtype='bf16'\nblock_size=4";

    impl Setting {
        fn new(layout: CacheLayout) -> Self {
            let shape = Shape::new(&Profile::from_toml_str(TEXT, "test").unwrap(), 10, layout).unwrap();
            let mut config = Config::default();
            config.transfer.device = DeviceChoice::Host;
            let cache = Cache::new(TransferEngine::open(&config).unwrap(), &shape).unwrap();
            let mut setting = Setting { shape, prompt: Prompt::new("x", 10), cache };
            let image = Image::new(&setting.shape, &setting.prompt, &BLOCKS, 5);
            for layer in 0..3 {
                image.write(&mut setting.cache, layer, true).unwrap();
            }
            setting
        }

        fn image(&self) -> Image<'_> {
            Image::new(&self.shape, &self.prompt, &BLOCKS, 5)
        }

        fn flip(&mut self, offset: u64) {
            let mut byte = [0];
            self.cache.read(offset, &mut byte).unwrap();
            self.cache.write(offset, &[byte[0] ^ 1]).unwrap();
        }

        fn row(&self, layer: u64, kv: u64, token: u64, head: u64) -> u64 {
            let block = BLOCKS[usize::try_from(token / 4).unwrap()];
            self.shape.block_offset(layer, block) + self.shape.row_offset(kv, token % 4, head)
        }

        fn swap(&mut self, a: u64, b: u64) {
            let (mut x, mut y) = ([0; 6], [0; 6]);
            self.cache.read(a, &mut x).unwrap();
            self.cache.read(b, &mut y).unwrap();
            self.cache.write(a, &y).unwrap();
            self.cache.write(b, &x).unwrap();
        }
    }

    const LAYOUTS: [CacheLayout; 3] = [CacheLayout::Nhd, CacheLayout::Hnd, CacheLayout::Fused];

    #[test]
    fn what_was_written_is_found() {
        for layout in LAYOUTS {
            let setting = Setting::new(layout);
            for layer in 0..3 {
                assert_eq!(setting.image().check(&setting.cache, layer).unwrap(), (None, None));
            }
        }
    }

    #[test]
    fn every_flipped_byte_of_the_tokens_is_named() {
        for layout in LAYOUTS {
            let mut setting = Setting::new(layout);
            for token in 0..10 {
                for (kv, head, byte) in [(0, 0, 0), (1, 1, 5), (0, 1, 3), (1, 0, 2)] {
                    let at = setting.row(1, kv, token, head) + byte;
                    setting.flip(at);
                    let wanted = Difference { layer: 1, kv, token, head, byte };
                    assert_eq!(setting.image().check(&setting.cache, 1).unwrap(), (Some(wanted), None));
                    setting.flip(at);
                }
            }
        }
    }

    #[test]
    fn rows_that_changed_places_are_found() {
        for layout in LAYOUTS {
            let mut setting = Setting::new(layout);
            let here = setting.row(1, 0, 5, 0);
            for there in [
                setting.row(1, 1, 5, 0),
                setting.row(1, 0, 5, 1),
                setting.row(1, 0, 6, 0),
                setting.row(1, 0, 1, 0),
                setting.row(1, 0, 9, 1),
                setting.row(2, 0, 5, 0),
            ] {
                setting.swap(here, there);
                assert!(setting.image().check(&setting.cache, 1).unwrap().0.is_some(), "{layout:?} {there}");
                setting.swap(here, there);
                assert_eq!(setting.image().check(&setting.cache, 1).unwrap(), (None, None));
            }
        }
    }

    #[test]
    fn a_cache_that_nothing_was_loaded_into_is_wrong_everywhere() {
        let mut setting = Setting::new(CacheLayout::Nhd);
        let image = Image::new(&setting.shape, &setting.prompt, &BLOCKS, 5);
        image.write(&mut setting.cache, 0, false).unwrap();
        let first = Difference { layer: 0, kv: 0, token: 0, head: 0, byte: 0 };
        let (found, stray) = image.check(&setting.cache, 0).unwrap();
        assert_eq!((found.map(|d| Difference { byte: 0, ..d }), stray), (Some(first), None));
    }

    #[test]
    fn bytes_outside_the_slots_are_watched() {
        let mut setting = Setting::new(CacheLayout::Hnd);
        let spare = setting.shape.block_offset(1, 3) + 7;
        // Tokens 10 and 11 of the last block are not the prompt's.
        let tail = setting.shape.block_offset(1, 2) + setting.shape.row_offset(1, 3, 1);
        let gap = 2 * setting.shape.layer_stride - 1;
        for at in [spare, tail, gap] {
            setting.flip(at);
            let stray = Stray { layer: 1, byte: at - setting.shape.layer_stride };
            assert_eq!(setting.image().check(&setting.cache, 1).unwrap(), (None, Some(stray)));
            setting.flip(at);
        }
    }
}
