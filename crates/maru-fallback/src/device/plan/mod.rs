//! Turns a job into copy commands. Pure arithmetic: no driver call, no memory access.
//!
//! Everything a job moves is a nest of loops around a run that is contiguous on both sides: tokens of a piece,
//! pieces at even distances (consecutive blocks), heads, K and V, layers. `fold` merges what can be merged,
//! [`cost`] decides which loops become the rows and the slices of the driver's two- and three-dimensional copies,
//! if any, and whether layers at even distances are moved together or one after the other.
//!
//! With blocks anywhere and layers at even distances that comes to, per block:
//!
//! * tokens of K (or V) in one piece: layers as rows, a command for each of K and V;
//! * K and V by turns within a token (fused heads): heads and tokens as rows, layers as slices;
//! * heads outside of tokens (HND): tokens as rows, layers as slices, a command per head, and K and V.
//!
//! Where layers are at uneven distances, two of them still make slices, and so do consecutive blocks, or K and
//! V, where the distances are multiples of each other.
//!
//! Nothing here can overflow: a [`maru_layout::CopyJob`] exists only if every address it names fits 63 bits.

pub(crate) mod cost;
mod nest;
mod series;
#[cfg(test)]
mod shapes;
#[cfg(test)]
mod tests;

use maru_layout::{CopyJob, Geometry, Run};

use cost::Limits;
use nest::{Loop, Nest};
use series::Series;

/// `slices` slices of `rows` rows of `width` bytes. Rows are a pitch apart on each side, slices as many pitches
/// as a height says. One slice has no height (0), one row of one slice no pitch either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Command {
    /// Address in the cache.
    pub(crate) paged: u64,
    /// Address in the slab.
    pub(crate) slab: u64,
    /// Contiguous bytes.
    pub(crate) width: u64,
    /// How many of them in a slice.
    pub(crate) rows: u64,
    /// How many slices.
    pub(crate) slices: u64,
    /// From row to row in the cache, bytes.
    pub(crate) paged_pitch: u64,
    /// From row to row in the slab, bytes.
    pub(crate) slab_pitch: u64,
    /// From slice to slice in the cache, pitches.
    pub(crate) paged_height: u64,
    /// From slice to slice in the slab, pitches.
    pub(crate) slab_height: u64,
}

impl Command {
    /// One run of no bytes, to start from.
    pub(crate) const NOTHING: Command = Command {
        paged: 0,
        slab: 0,
        width: 0,
        rows: 1,
        slices: 1,
        paged_pitch: 0,
        slab_pitch: 0,
        paged_height: 0,
        slab_height: 0,
    };

    /// Bytes from slice to slice: in the cache, in the slab.
    pub(crate) fn slice_steps(&self) -> (u64, u64) {
        (self.paged_height.saturating_mul(self.paged_pitch), self.slab_height.saturating_mul(self.slab_pitch))
    }

    /// Its slices, each a command.
    pub(crate) fn each_slice(self) -> impl Iterator<Item = Command> {
        let (paged, slab) = self.slice_steps();
        let slice = Command { slices: 1, paged_height: 0, slab_height: 0, ..self };
        let slice = match self.rows {
            1 => Command { paged_pitch: 0, slab_pitch: 0, ..slice },
            _ => slice,
        };
        (0..self.slices).map(move |i| Command {
            paged: self.paged + i * paged,
            slab: self.slab + i * slab,
            ..slice
        })
    }

    /// The rows of one slice, each a command.
    pub(crate) fn each_row(self) -> impl Iterator<Item = Command> {
        (0..self.rows).map(move |i| Command {
            paged: self.paged + i * self.paged_pitch,
            slab: self.slab + i * self.slab_pitch,
            width: self.width,
            ..Command::NOTHING
        })
    }
}

#[cfg(test)]
impl Command {
    /// Bytes it moves.
    pub(crate) fn bytes(&self) -> u64 {
        self.width * self.rows * self.slices
    }

    /// The rows of all slices.
    pub(crate) fn all_rows(self) -> impl Iterator<Item = Command> {
        self.each_slice().flat_map(Command::each_row)
    }
}

/// A slab, or memory that stands in for a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    /// Address of plane 0, the first layer, token 0.
    pub(crate) addr: u64,
    /// Plane to plane.
    pub(crate) kv: u64,
    /// Layer to layer.
    pub(crate) layer: u64,
    /// Token to token.
    pub(crate) token: u64,
}

impl Packed {
    /// A job's slab where it is at `addr`.
    pub(crate) fn of(job: &CopyJob, addr: u64) -> Self {
        let g = job.plan().geometry();
        Packed { addr, kv: g.slab_kv_stride, layer: g.slab_layer_stride, token: g.slab_token_stride }
    }
}

/// What is planned: some layers and some tokens of a job.
#[derive(Clone, Debug)]
pub(crate) struct Work<'a> {
    /// The cache.
    pub(crate) geometry: &'a Geometry,
    /// Plane addresses, all layers of K, then of V.
    pub(crate) bases: Vec<u64>,
    /// The slab side; tokens of `runs` count from its token 0.
    pub(crate) packed: Packed,
    /// Tokens.
    pub(crate) runs: &'a [Run],
}

impl<'a> Work<'a> {
    /// Layers `first..first + count` of those a job moves.
    pub(crate) fn new(job: &'a CopyJob, packed: Packed, runs: &'a [Run], first: u64, count: u64) -> Self {
        let geometry = job.plan().geometry();
        let bases = (0..geometry.kv_planes)
            .flat_map(|kv| (first..first + count).map(move |l| job.base(kv, l)))
            .collect();
        Work { geometry, bases, packed, runs }
    }

    fn layers(&self) -> usize {
        self.bases.len() / index(self.geometry.kv_planes)
    }

    fn base(&self, kv: usize, layer: usize) -> u64 {
        self.bases[kv * self.layers() + layer]
    }

    /// V's distance from K where it is the same and positive in all layers of a range.
    fn kv_step(&self, layers: std::ops::Range<usize>) -> Option<u64> {
        if self.geometry.kv_planes != 2 {
            return None;
        }
        let step = self.base(1, layers.start).checked_sub(self.base(0, layers.start)).filter(|s| *s > 0)?;
        let same = layers.into_iter().all(|l| self.base(1, l).checked_sub(self.base(0, l)) == Some(step));
        same.then_some(step)
    }

    /// How far the planes of layer `l` are behind those of the layer before, if K and V agree and it is
    /// behind. (A descending distance is no use: the slab ascends, and a pitch has one sign.)
    fn layer_step(&self, l: usize) -> Option<u64> {
        let step = |kv| self.base(kv, l).checked_sub(self.base(kv, l - 1)).filter(|s| *s > 0);
        let first = step(0)?;
        (1..index(self.geometry.kv_planes)).all(|kv| step(kv) == Some(first)).then_some(first)
    }
}

/// Commands that are queued together: one layer, or several with layers as one of the loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// First layer, of those planned.
    pub(crate) first: usize,
    /// Layers.
    pub(crate) count: usize,
    /// Which of the plan's nests.
    nests: usize,
}

/// The commands of some work, unit by unit.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    work: Work<'a>,
    series: Vec<Series>,
    units: Vec<Unit>,
    /// Sets of one nest per series. The first is that of single layers.
    nests: Vec<Nests>,
}

#[derive(Debug)]
struct Nests {
    per_series: Vec<Nest>,
    /// Whether K and V are a loop of the nests; else they are emitted one after the other.
    kv: bool,
    cost: u64,
}

impl<'a> Plan<'a> {
    /// Plans some work for a driver with these limits.
    pub(crate) fn new(work: Work<'a>, limits: Limits) -> Self {
        let series = series::of(work.geometry, work.runs);
        let layers = work.layers();
        let single = nests(&work, &series, 0..layers, None, limits);
        let mut plan = Plan { work, series, units: Vec::new(), nests: vec![single] };
        let mut at = 0;
        while at < layers {
            let (count, step) = plan.stretch(at, layers);
            let together = (count > 1 && limits.layers_together)
                .then(|| nests(&plan.work, &plan.series, at..at + count, Some((count, step)), limits))
                .filter(|n| n.cost < plan.nests[0].cost.saturating_mul(count as u64));
            match together {
                Some(nests) => {
                    plan.units.push(Unit { first: at, count, nests: plan.nests.len() });
                    plan.nests.push(nests);
                    at += count;
                }
                None => {
                    // The second layer of a pair may begin a longer stretch.
                    let count = if count == 2 { 1 } else { count };
                    plan.units.extend((at..at + count).map(|first| Unit { first, count: 1, nests: 0 }));
                    at += count;
                }
            }
        }
        plan
    }

    /// The units in the order of their layers.
    pub(crate) fn units(&self) -> &[Unit] {
        &self.units
    }

    /// What it is expected to take, in nanoseconds; for comparing plans.
    #[cfg(test)]
    pub(crate) fn cost(&self) -> u64 {
        self.units.iter().map(|u| self.nests[u.nests].cost).sum()
    }

    /// Calls `emit` with every command of a unit; ends with its first error.
    pub(crate) fn commands<E>(
        &self,
        unit: Unit,
        mut emit: impl FnMut(Command) -> Result<(), E>,
    ) -> Result<(), E> {
        let nests = &self.nests[unit.nests];
        let planes = if nests.kv { 1 } else { index(self.work.geometry.kv_planes) };
        let packed = &self.work.packed;
        for kv in 0..planes {
            let base = self.work.base(kv, unit.first);
            let slab = packed.addr + kv as u64 * packed.kv + unit.first as u64 * packed.layer;
            for (series, nest) in self.series.iter().zip(&nests.per_series) {
                nest.emit(base + series.paged, slab + series.token * packed.token, &mut emit)?;
            }
        }
        Ok(())
    }

    /// How many layers from `at` on are evenly spaced, and by how much.
    fn stretch(&self, at: usize, layers: usize) -> (usize, u64) {
        let Some(step) = (at + 1 < layers).then(|| self.work.layer_step(at + 1)).flatten() else {
            return (1, 0);
        };
        let more = (at + 2..layers).take_while(|l| self.work.layer_step(*l) == Some(step)).count();
        (2 + more, step)
    }
}

/// The best nest for each series, layers among the loops if `stretch` (count, distance) says so.
fn nests(
    work: &Work<'_>,
    series: &[Series],
    layers: std::ops::Range<usize>,
    stretch: Option<(usize, u64)>,
    limits: Limits,
) -> Nests {
    let (g, packed) = (work.geometry, &work.packed);
    let kv_step = work.kv_step(layers);
    let mut per_series: Vec<Nest> = Vec::with_capacity(series.len());
    let mut cost = 0u64;
    for (i, s) in series.iter().enumerate() {
        let nest = match i.checked_sub(1).map(|before| (&series[before], per_series[before])) {
            Some((before, nest)) if before.same_shape(s) => nest,
            _ => {
                let mut loops = vec![
                    Loop { n: g.rows, paged: g.row_stride, slab: g.row_bytes },
                    Loop { n: s.tokens, paged: g.slot_stride(), slab: packed.token },
                    Loop { n: s.count, paged: s.paged_step, slab: s.token_step * packed.token },
                ];
                loops.extend(kv_step.map(|paged| Loop { n: 2, paged, slab: packed.kv }));
                loops.extend(stretch.map(|(n, paged)| Loop { n: n as u64, paged, slab: packed.layer }));
                Nest::best(g.row_bytes, loops, limits)
            }
        };
        cost = cost.saturating_add(nest.cost());
        per_series.push(nest);
    }
    let kv = kv_step.is_some();
    let planes = if kv { 1 } else { g.kv_planes };
    Nests { per_series, kv, cost: cost.saturating_mul(planes) }
}

/// A count of planes or layers as an index; the crate does not compile where they differ.
fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
