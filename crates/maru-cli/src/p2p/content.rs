//! What the paged caches hold: bytes that say where they belong.
//!
//! The byte of a KV cache at (layer, K/V, token, head, position) follows from these numbers, the prompt and the
//! token's id through a 64-bit mix, so that any row in a wrong place shows. Everything else in a cache is canary,
//! which follows from its own address and a seed of the process. Both sides compute this by themselves; nothing
//! but the prompt is passed between them.

use xxhash_rust::xxh3::xxh3_64;

/// A prompt, as far as content depends on it.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    hash: u64,
    tokens: Vec<u32>,
}

/// Token ids are below this, as those of the Llama 3 tokenizer.
const VOCABULARY: u64 = 128_256;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Prompt {
    /// `len` tokens that say `text`.
    pub(crate) fn new(text: &str, len: u64) -> Self {
        let hash = xxh3_64(text.as_bytes());
        let id = |i: u64| {
            // Below VOCABULARY, so the conversion keeps every bit.
            u32::try_from(mix(hash.wrapping_add(i.wrapping_mul(GOLDEN))) % VOCABULARY).unwrap_or(0)
        };
        Prompt { hash, tokens: (0..len).map(id).collect() }
    }

    /// Its token ids.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where the content of a token begins to differ from that of others.
    pub(crate) fn token_seed(&self, token: u64) -> u64 {
        let id = usize::try_from(token).ok().and_then(|i| self.tokens.get(i)).copied().unwrap_or(u32::MAX);
        mix(mix(token.wrapping_add(GOLDEN)) ^ self.hash ^ u64::from(id).wrapping_mul(GOLDEN))
    }
}

/// Writes one head's row of one token.
pub(crate) fn head_row(token_seed: u64, layer: u64, kv: u64, head: u64, row: &mut [u8]) {
    // Fewer than 2^16 layers and heads (profiles allow 4096), so the three do not meet.
    let place = layer << 32 | kv << 24 | head;
    let seed = mix(token_seed ^ mix(place.wrapping_add(1)));
    words(0, row, |w| mix(seed.wrapping_add((w + 1).wrapping_mul(GOLDEN))));
}

/// Writes the canary of the bytes at `offset` of a cache.
pub(crate) fn canary(seed: u64, offset: u64, bytes: &mut [u8]) {
    words(offset, bytes, |w| mix(seed ^ w.wrapping_mul(GOLDEN)));
}

/// Bytes from `offset` on of the endless sequence of little-endian words `word(0), word(1), ...`.
fn words(offset: u64, bytes: &mut [u8], word: impl Fn(u64) -> u64) {
    let mut index = offset / 8;
    let within = usize::try_from(offset % 8).unwrap_or(0);
    let mut rest = bytes;
    if within != 0 {
        let head = (8 - within).min(rest.len());
        let (first, others) = rest.split_at_mut(head);
        first.copy_from_slice(&word(index).to_le_bytes()[within..within + head]);
        index += 1;
        rest = others;
    }
    let mut chunks = rest.chunks_exact_mut(8);
    for chunk in &mut chunks {
        chunk.copy_from_slice(&word(index).to_le_bytes());
        index += 1;
    }
    let tail = chunks.into_remainder();
    let len = tail.len();
    tail.copy_from_slice(&word(index).to_le_bytes()[..len]);
}

/// The finaliser of SplitMix64: a bijection that spreads every bit over all.
pub(crate) fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Numbers that differ from run to run and process to process.
pub(crate) fn random_seed() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _};
    std::hash::RandomState::new().build_hasher().finish()
}

/// `0..n` in a random order.
pub(crate) fn shuffled(n: u64, seed: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..n).collect();
    let mut state = seed;
    for i in (1..order.len()).rev() {
        state = state.wrapping_add(GOLDEN);
        let j = usize::try_from(mix(state) % (i as u64 + 1)).unwrap_or(0);
        order.swap(i, j);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn content_differs_in_every_coordinate() {
        let (a, b) = (Prompt::new("a", 8), Prompt::new("b", 8));
        let mut rows = HashSet::new();
        for prompt in [&a, &b] {
            for token in 0..8 {
                for (layer, kv, head) in (0..3).flat_map(|l| (0..4).map(move |k| (l, k % 2, k / 2))) {
                    let mut row = [0; 16];
                    head_row(prompt.token_seed(token), layer, kv, head, &mut row);
                    assert!(rows.insert(row), "{token} {layer} {kv} {head}");
                }
            }
        }
    }

    #[test]
    fn a_shorter_row_is_the_beginning_of_a_longer_one() {
        let (mut long, mut short) = ([0; 24], [0; 13]);
        head_row(7, 1, 0, 2, &mut long);
        head_row(7, 1, 0, 2, &mut short);
        assert_eq!(long[..13], short);
    }

    #[test]
    fn canaries_do_not_depend_on_how_they_are_cut() {
        let mut whole = [0; 64];
        canary(9, 3, &mut whole);
        for cut in 0..64 {
            let (mut a, mut b) = (vec![0; cut], vec![0; 64 - cut]);
            canary(9, 3, &mut a);
            canary(9, 3 + cut as u64, &mut b);
            assert_eq!([a, b].concat(), whole, "{cut}");
        }
    }

    #[test]
    fn equal_texts_are_equal_prompts_and_prefixes() {
        assert_eq!(Prompt::new("x", 9).tokens()[..4], *Prompt::new("x", 4).tokens());
        assert_ne!(Prompt::new("x", 9).tokens(), Prompt::new("y", 9).tokens());
    }

    #[test]
    fn a_shuffle_is_a_permutation_and_depends_on_its_seed() {
        let mut order = shuffled(100, 1);
        assert_ne!(order, shuffled(100, 2));
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
        assert_eq!(shuffled(1, 3), [0]);
    }
}
