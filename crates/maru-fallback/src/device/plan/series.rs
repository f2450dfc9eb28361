//! Cuts the tokens of a job into pieces that are evenly spaced on both sides, and groups equal pieces at
//! equal distances.

use maru_layout::{Geometry, Run};

/// `count` pieces of `tokens` tokens each, the same distances apart on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Series {
    /// Bytes from a plane's base to the first token of the first piece.
    pub(super) paged: u64,
    /// First token of the first piece.
    pub(super) token: u64,
    /// Tokens of a piece.
    pub(super) tokens: u64,
    /// Pieces.
    pub(super) count: u64,
    /// Bytes from piece to piece in the cache; 0 for one piece.
    pub(super) paged_step: u64,
    /// Tokens from piece to piece; 0 for one piece.
    pub(super) token_step: u64,
}

impl Series {
    /// Whether the same commands do for both, from another start.
    pub(super) fn same_shape(&self, other: &Series) -> bool {
        let shape = |s: &Series| (s.tokens, s.count, s.paged_step, s.token_step);
        shape(self) == shape(other)
    }
}

#[derive(Clone, Copy)]
struct Piece {
    paged: u64,
    token: u64,
    tokens: u64,
}

/// The series that cover `runs`, in token order.
pub(super) fn of(g: &Geometry, runs: &[Run]) -> Vec<Series> {
    let pieces = cut(g, runs);
    let mut all = Vec::new();
    let mut at = 0;
    while let Some(first) = pieces.get(at) {
        let (paged_step, token_step, count) = even(&pieces[at..]);
        // Two pieces are always evenly spaced: only consecutive blocks are worth it, lest the second is taken
        // from a longer series that follows.
        let count = if count > 2 || (count == 2 && paged_step == g.block_stride) { count } else { 1 };
        let step = |step| if count == 1 { 0 } else { step };
        all.push(Series {
            paged: first.paged,
            token: first.token,
            tokens: first.tokens,
            count: count as u64,
            paged_step: step(paged_step),
            token_step: step(token_step),
        });
        at += count;
    }
    all
}

/// How many pieces from the first on are equal and evenly spaced, ascending on both sides.
fn even(pieces: &[Piece]) -> (u64, u64, usize) {
    let step = |i: usize| {
        let (a, b) = (pieces.get(i)?, pieces.get(i + 1)?);
        let paged = b.paged.checked_sub(a.paged).filter(|d| *d > 0)?;
        (a.tokens == b.tokens).then_some((paged, b.token - a.token))
    };
    let Some((paged, token)) = step(0) else { return (0, 0, 1) };
    let more = (1..).take_while(|i| step(*i) == Some((paged, token))).count();
    (paged, token, 2 + more)
}

/// The runs, cut at block borders where slots are not evenly spaced across them.
fn cut(g: &Geometry, runs: &[Run]) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(runs.len());
    for run in runs {
        let (mut slot, mut token, mut left) = (run.slot, run.token, run.len);
        while left > 0 {
            let (block, offset) = match g.linear_slots {
                true => (0, slot),
                false => (slot / g.block_size, slot % g.block_size),
            };
            let tokens = if g.linear_slots { left } else { left.min(g.block_size - offset) };
            let paged = block * g.block_stride + offset * g.slot_stride();
            pieces.push(Piece { paged, token, tokens });
            (slot, token, left) = (slot + tokens, token + tokens, left - tokens);
        }
    }
    pieces
}
