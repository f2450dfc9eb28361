//! Loops around contiguous runs, and which of them become the rows and the slices of a command.

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

/// Most rows per slice that are tried for slices further apart than a pitch can be.
const MOST_SPLIT: u64 = 64;

/// One command, repeated in up to five loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nest {
    /// The command, at address 0 on both sides.
    shape: Command,
    /// Outermost first; those behind `depth` are nothing.
    loops: [Loop; MOST],
    depth: usize,
    cost: u64,
}

impl Nest {
    /// The cheapest way to move `loops` around runs of `width` bytes.
    pub(super) fn best(width: u64, loops: Vec<Loop>, limits: Limits) -> Nest {
        let (width, mut loops) = fold(width, loops);
        // Following the slab keeps what the host side sees in order.
        loops.sort_unstable_by_key(|l| Reverse(l.slab));
        loops.truncate(MOST);
        let all = loops.iter().fold(1u64, |all, l| all.saturating_mul(l.n));
        let cost = |c: &Command| limits.cost(c).saturating_mul(all / (c.rows * c.slices));
        let run = Command { width, ..Command::NOTHING };
        let mut best = (cost(&run), run, Vec::new());
        let mut consider = |shape: Command, used: &[usize]| {
            let cost = cost(&shape);
            if cost < best.0 {
                best = (cost, shape, used.to_vec());
            }
        };
        for (i, l) in loops.iter().enumerate() {
            let Some(rows) = of_rows(run, l, limits) else {
                if let Some(slices) = of_far_rows(run, l, limits) {
                    consider(slices, &[i]);
                }
                continue;
            };
            consider(rows, &[i]);
            for (j, l) in loops.iter().enumerate().filter(|(j, _)| *j != i) {
                if let Some(slices) = of_slices(rows, l, limits) {
                    consider(slices, &[i, j]);
                }
            }
        }
        let (cost, shape, used) = best;
        let mut nest = Nest { shape, loops: [Loop::default(); MOST], depth: 0, cost };
        for (_, l) in loops.iter().enumerate().filter(|(i, _)| !used.contains(i)) {
            nest.loops[nest.depth] = *l;
            nest.depth += 1;
        }
        nest
    }

    /// Expected nanoseconds for all of its commands.
    pub(super) fn cost(&self) -> u64 {
        self.cost
    }

    /// Its commands, starting at these addresses; ends with the first error of `emit`.
    pub(super) fn emit<E>(
        &self,
        paged: u64,
        slab: u64,
        emit: &mut impl FnMut(Command) -> Result<(), E>,
    ) -> Result<(), E> {
        walk(&self.loops[..self.depth], paged, slab, &mut |paged, slab| {
            emit(Command { paged, slab, ..self.shape })
        })
    }
}

/// A loop around a run as rows, if both pitches are what the driver takes.
fn of_rows(run: Command, l: &Loop, limits: Limits) -> Option<Command> {
    let fits = |pitch| (run.width..=limits.max_pitch).contains(&pitch);
    let rows = Command { rows: l.n, paged_pitch: l.paged, slab_pitch: l.slab, ..run };
    (fits(l.paged) && fits(l.slab)).then_some(rows)
}

/// A loop around rows as slices. The driver counts from slice to slice in rows, so the distance has to be a
/// multiple of the pitch on both sides, and slices do not interleave.
fn of_slices(rows: Command, l: &Loop, limits: Limits) -> Option<Command> {
    let height = |distance: u64, pitch: u64| {
        let height = distance.checked_div(pitch)?;
        (distance.is_multiple_of(pitch) && height >= rows.rows).then_some(height)
    };
    let paged_height = height(l.paged, rows.paged_pitch)?;
    let slab_height = height(l.slab, rows.slab_pitch)?;
    limits.slices.then_some(Command { slices: l.n, paged_height, slab_height, ..rows })
}

/// A loop whose distances are longer than a pitch can be (layers of large caches are gigabytes apart) as
/// slices of one row, with a pitch of which the distance is a multiple.
fn of_far_rows(run: Command, l: &Loop, limits: Limits) -> Option<Command> {
    let height = |distance: u64| {
        let least = distance.div_ceil(limits.max_pitch.max(1)).max(1);
        let fits = |h: &u64| distance.is_multiple_of(*h) && distance / h >= run.width;
        (least..least.saturating_add(MOST_SPLIT)).find(fits)
    };
    let (paged_height, slab_height) = (height(l.paged)?, height(l.slab)?);
    let (paged_pitch, slab_pitch) = (l.paged / paged_height, l.slab / slab_height);
    let slices = Command { slices: l.n, paged_pitch, slab_pitch, paged_height, slab_height, ..run };
    limits.slices.then_some(slices)
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::plan::tests::assert_allowed;

    /// All (cache, slab) address pairs of bytes, in order of the slab.
    fn bytes_of(commands: &[Command]) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        for c in commands {
            for row in c.all_rows() {
                all.extend((0..c.width).map(|i| (row.paged + i, row.slab + i)));
            }
        }
        all.sort_unstable_by_key(|p| (p.1, p.0));
        all
    }

    prop_compose! {
        /// Distances that grow, mostly as multiples of one before, in an order of its own on each side.
        fn loops()(
            parts in prop::collection::vec((1u64..5, 0u64..4, 0u64..4, any::<bool>(), 0u64..3, 0u64..3), 0..5),
            order in any::<u32>(),
            width in 1u64..5,
        ) -> (u64, Vec<Loop>) {
            let (mut paged, mut slab) = (width, width);
            let mut loops = Vec::new();
            for (n, paged_gap, slab_gap, whole, paged_times, slab_times) in parts {
                let gap = |gap: u64, unit: u64| if whole { gap * unit } else { gap };
                let (p, s) = (paged + gap(paged_gap, paged), slab + gap(slab_gap, slab));
                loops.push(Loop { n, paged: p, slab: s });
                (paged, slab) = (p * (n + paged_times), s * (n + slab_times));
            }
            // The cache's order is another one.
            if order % 3 == 0 && loops.len() > 1 {
                let (a, b) = (order as usize % loops.len(), order as usize / 7 % loops.len());
                let kept = loops[a].paged;
                loops[a].paged = loops[b].paged;
                loops[b].paged = kept;
            }
            (width, loops)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn any_nest_moves_what_its_loops_say(
            (width, loops) in loops(),
            batch in any::<bool>(),
            slices in any::<bool>(),
            inside in any::<bool>(),
            max_pitch in prop_oneof![Just(i32::MAX as u64), 1u64..200],
        ) {
            let limits = Limits { max_pitch, batch, slices, layers_together: true, inside };
            let flat = Nest { shape: Command { width, ..Command::NOTHING }, loops: [Loop::default(); MOST], depth: 0, cost: 0 };
            let mut naive = Vec::new();
            let Ok(()) = walk(&loops, 1000, 7000, &mut |paged, slab| {
                naive.push(Command { paged, slab, ..flat.shape });
                Ok::<(), std::convert::Infallible>(())
            });
            let nest = Nest::best(width, loops, limits);
            let mut commands = Vec::new();
            let Ok(()) = nest.emit(1000, 7000, &mut |c| {
                commands.push(c);
                Ok::<(), std::convert::Infallible>(())
            });
            for c in &commands {
                assert_allowed(c, limits);
            }
            let total: u64 = commands.iter().map(|c| limits.cost(c)).sum();
            prop_assert_eq!(total, nest.cost());
            prop_assert_eq!(bytes_of(&commands), bytes_of(&naive));
        }
    }

    const LIMITS: Limits = Limits {
        max_pitch: i32::MAX as u64,
        batch: true,
        slices: true,
        layers_together: true,
        inside: false,
    };

    /// The one command's (rows, slices, pitches, heights), or how many there are.
    fn only(width: u64, loops: &[Loop], limits: Limits) -> Result<(u64, u64, [u64; 2], [u64; 2]), u64> {
        let nest = Nest::best(width, loops.to_vec(), limits);
        let c = nest.shape;
        match nest.loops[..nest.depth].iter().map(|l| l.n).product() {
            1 => Ok((c.rows, c.slices, [c.paged_pitch, c.slab_pitch], [c.paged_height, c.slab_height])),
            more => Err(more),
        }
    }

    #[test]
    fn slices_are_exact_or_not_at_all() {
        let rows = Loop { n: 128, paged: 512, slab: 256 };
        let layers = |paged, slab| [rows, Loop { n: 64, paged, slab }];
        let planned = |paged, slab| only(256, &layers(paged, slab), LIMITS);
        assert_eq!(planned(1 << 20, 1 << 19), Ok((128, 64, [512, 256], [2048, 2048])));
        // Rows of the next slice begin right behind the last one's pitch, at the least.
        assert_eq!(planned(128 * 512, 128 * 256 + 256), Ok((128, 64, [512, 256], [128, 129])));
        // Not a multiple of the pitch, in the cache or in the slab.
        assert_eq!(planned((1 << 20) + 256, 1 << 19), Err(64));
        assert_eq!(planned(1 << 20, (1 << 19) + 128), Err(64));
        // Interleaved with the rows.
        assert_eq!(planned(127 * 512, 1 << 19), Err(64));
        // A driver without such copies.
        assert_eq!(only(256, &layers(1 << 20, 1 << 19), Limits { slices: false, ..LIMITS }), Err(64));
    }

    #[test]
    fn rows_further_apart_than_a_pitch_are_slices() {
        let layers = |paged| [Loop { n: 64, paged, slab: 64 << 10 }];
        assert_eq!(only(4096, &layers(1 << 31), LIMITS), Ok((1, 64, [1 << 30, 64 << 10], [2, 1])));
        let odd = 9 * ((1 << 30) + 512);
        assert_eq!(only(4096, &layers(odd), LIMITS), Ok((1, 64, [odd / 6, 64 << 10], [6, 1])));
        // No pitch does for a prime.
        assert_eq!(only(4096, &layers((1 << 33) - 9), LIMITS), Err(64));
        // As rows where the pitch is short enough.
        assert_eq!(only(4096, &layers(1 << 30), LIMITS), Ok((64, 1, [1 << 30, 64 << 10], [0, 0])));
    }
}
