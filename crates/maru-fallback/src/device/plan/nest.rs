//! Loops around contiguous runs, and which of them becomes the rows of a two-dimensional copy.

use std::cmp::Reverse;

use super::Command;
use super::cost::Limits;

/// How often, and how far each side advances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Loop {
    pub(super) n: u64,
    pub(super) paged: u64,
    pub(super) slab: u64,
}

/// Most loops there can be: rows of a token, tokens, pieces, K/V, layers.
const MOST: usize = 5;

/// One command, repeated in up to five loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nest {
    width: u64,
    /// The rows of a command; `n` is 1 for a one-dimensional copy.
    rows: Loop,
    /// Outermost first; those behind `depth` are nothing.
    loops: [Loop; MOST],
    depth: usize,
}

impl Nest {
    /// The cheapest way to move `loops` around runs of `width` bytes.
    pub(super) fn best(width: u64, loops: Vec<Loop>, limits: Limits) -> Nest {
        let (width, mut loops) = fold(width, loops);
        // Following the slab keeps what the host side sees in order.
        loops.sort_unstable_by_key(|l| Reverse(l.slab));
        loops.truncate(MOST);
        let flat = Nest::new(width, Loop { n: 1, ..Loop::default() }, &loops);
        let mut best = flat;
        for (i, &rows) in loops.iter().enumerate() {
            let fits = |pitch| (width..=limits.max_pitch).contains(&pitch);
            if !fits(rows.paged) || !fits(rows.slab) {
                continue;
            }
            let mut others = loops.clone();
            others.remove(i);
            let nest = Nest::new(width, rows, &others);
            if nest.cost(limits) < best.cost(limits) {
                best = nest;
            }
        }
        best
    }

    fn new(width: u64, rows: Loop, others: &[Loop]) -> Nest {
        let mut loops = [Loop::default(); MOST];
        for (to, from) in loops.iter_mut().zip(others) {
            *to = *from;
        }
        Nest { width, rows, loops, depth: others.len().min(MOST) }
    }

    /// Expected nanoseconds for all of its commands.
    pub(super) fn cost(&self, limits: Limits) -> u64 {
        let times: u64 = self.loops[..self.depth].iter().map(|l| l.n).product();
        let Loop { n, paged, slab } = self.rows;
        limits.command(self.width, n, paged.max(slab)).saturating_mul(times)
    }

    /// Its commands, starting at these addresses; ends with the first error of `emit`.
    pub(super) fn emit<E>(
        &self,
        paged: u64,
        slab: u64,
        emit: &mut impl FnMut(Command) -> Result<(), E>,
    ) -> Result<(), E> {
        let Loop { n: rows, paged: paged_pitch, slab: slab_pitch } = self.rows;
        walk(&self.loops[..self.depth], paged, slab, &mut |paged, slab| {
            emit(Command { paged, slab, width: self.width, rows, paged_pitch, slab_pitch })
        })
    }
}

fn walk<E>(
    loops: &[Loop],
    paged: u64,
    slab: u64,
    visit: &mut impl FnMut(u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    match loops.split_first() {
        None => visit(paged, slab),
        Some((outer, inner)) => {
            (0..outer.n).try_for_each(|i| walk(inner, paged + i * outer.paged, slab + i * outer.slab, visit))
        }
    }
}

/// The fewest loops around the longest runs that visit the same bytes.
fn fold(mut width: u64, mut loops: Vec<Loop>) -> (u64, Vec<Loop>) {
    loops.retain(|l| l.n != 1);
    loop {
        if let Some(i) = loops.iter().position(|l| l.paged == width && l.slab == width) {
            width *= loops.swap_remove(i).n;
        } else if let Some((inner, outer)) = chained(&loops) {
            loops[inner].n *= loops[outer].n;
            loops.swap_remove(outer);
        } else {
            return (width, loops);
        }
    }
}

/// Two loops that are one: the second goes on where the first ends, on both sides.
fn chained(loops: &[Loop]) -> Option<(usize, usize)> {
    let goes_on = |a: &Loop, b: &Loop| {
        a.paged.checked_mul(a.n) == Some(b.paged) && a.slab.checked_mul(a.n) == Some(b.slab)
    };
    (0..loops.len())
        .flat_map(|a| (0..loops.len()).map(move |b| (a, b)))
        .find(|&(a, b)| a != b && goes_on(&loops[a], &loops[b]))
}
