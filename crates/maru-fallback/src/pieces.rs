//! Cuts a job into pieces that are evenly strided on both sides. Pure arithmetic.
//!
//! Nothing here can overflow: a [`CopyJob`] exists only if every address it names fits 63 bits.

use std::cmp::Reverse;

use maru_layout::{CopyJob, Direction, Geometry, Run};

use crate::nest::{Dim, Nest};

/// K and V closer than this are moved together, so that a line or page they share is visited once.
const NEAR: u64 = 64 << 10;

/// Consecutive tokens that are evenly spaced in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Bytes from a plane's base to the first token.
    pub(crate) paged: u64,
    /// Bytes from the start of a plane's part of the slab to the first token.
    pub(crate) slab: u64,
    /// Tokens.
    pub(crate) tokens: u64,
}

/// The pieces of every plane of a job, each of about `limit` bytes of a plane at most.
pub(crate) fn cut(g: &Geometry, runs: &[Run], limit: u64) -> Vec<Piece> {
    let most = (limit / g.token_bytes().max(1)).max(1);
    let mut pieces = Vec::with_capacity(runs.len());
    for run in runs {
        let (mut slot, mut token, mut left) = (run.slot, run.token, run.len);
        while left > 0 {
            let (block, offset) = match g.linear_slots {
                true => (0, slot),
                false => (slot / g.block_size, slot % g.block_size),
            };
            let whole = if g.linear_slots { left } else { g.block_size - offset };
            let n = left.min(whole).min(most);
            pieces.push(Piece {
                paged: block * g.block_stride + offset * g.slot_stride(),
                slab: token * g.slab_token_stride,
                tokens: n,
            });
            (slot, token, left) = (slot + n, token + n, left - n);
        }
    }
    pieces
}

/// Planes that are moved in one go: a layer's K, or its V, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Planes {
    /// Address of the first in the cache.
    pub(crate) paged: u64,
    /// Address of the first in the slab.
    pub(crate) slab: u64,
    /// The loop over them, as (count, cache distance, slab distance).
    kv: (u64, i64, i64),
}

/// Everything a job moves, in the order in which it is best moved.
pub(crate) fn planes(job: &CopyJob, slab: u64) -> Vec<Planes> {
    let g = job.plan().geometry();
    let layers = u64::from(job.layer_count());
    let mut out = Vec::with_capacity(2 * job.layer_count() as usize);
    for l in 0..layers {
        let at = slab + l * g.slab_layer_stride;
        let (k, v) = (job.base(0, l), job.base(1, l));
        if g.kv_planes == 2 && k.abs_diff(v) <= NEAR {
            // From the lower address to the higher, whichever of K and V that is.
            let apart = k.abs_diff(v).cast_signed();
            let slab_apart = g.slab_kv_stride.cast_signed();
            out.push(match k <= v {
                true => Planes { paged: k, slab: at, kv: (2, apart, slab_apart) },
                false => Planes { paged: v, slab: at + g.slab_kv_stride, kv: (2, apart, -slab_apart) },
            });
            continue;
        }
        for kv in 0..g.kv_planes {
            let slab = at + kv * g.slab_kv_stride;
            out.push(Planes { paged: job.base(kv, l), slab, kv: (1, 0, 0) });
        }
    }
    out
}

/// How a piece of some number of tokens is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) nest: Nest,
    /// Bytes from the first to behind the last byte read, of one plane where planes are far apart.
    pub(crate) span: u64,
    /// Bytes read in that span.
    pub(crate) bytes: u64,
}

impl Planes {
    /// The loops of a piece of `tokens` tokens of these planes.
    ///
    /// Reading in the order of addresses matters more than writing so: the hardware reads ahead in sequence,
    /// while whole lines can be written in any order. A gather follows the cache. A scatter follows the slab,
    /// except that K and V, two far streams there, take turns: in the cache they are neighbours.
    pub(crate) fn way(&self, g: &Geometry, direction: Direction, tokens: u64) -> Way {
        let signed = u64::cast_signed;
        let token = (tokens, signed(g.slot_stride()), signed(g.slab_token_stride));
        let row = (g.rows, signed(g.row_stride), signed(g.row_bytes));
        let (loops, read) = match direction {
            Direction::Gather => {
                let mut loops = [self.kv, token, row];
                loops.sort_by_key(|l| Reverse(l.1));
                (loops, loops.map(|l| (l.0, l.1)))
            }
            Direction::Scatter => ([token, row, self.kv], [token, row, (1, 0, 0)].map(|l| (l.0, l.2))),
        };
        let dims = loops.map(|(n, paged, slab)| {
            let (dst, src) = match direction {
                Direction::Gather => (slab, paged),
                Direction::Scatter => (paged, slab),
            };
            Dim { n: size(n), dst: distance(dst), src: distance(src) }
        });
        let reach = |(n, stride): (u64, i64)| (n - 1) * stride.unsigned_abs();
        Way {
            nest: Nest::folded(size(g.row_bytes), dims),
            span: read.into_iter().map(reach).sum::<u64>() + g.row_bytes,
            bytes: read.into_iter().map(|l| l.0).product::<u64>() * g.row_bytes,
        }
    }
}

/// A size of a job as the machine's; the crate does not compile where they differ.
pub(crate) fn size(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn distance(n: i64) -> isize {
    isize::try_from(n).unwrap_or(isize::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use maru_layout::{
        CacheSpec, CopyPlan, DType, JobRequest, PagedLayout, SlabLayout, SlabSpan, SlotMapping, TensorDesc,
    };

    use super::*;

    /// A job over 6 blocks of 4 tokens, 2 heads of 64 bytes, with the strides given (in bytes).
    fn job(shape: &[i64], strides: &[i64], slots: &[i64], bases: &[u64]) -> CopyJob {
        let tensor = TensorDesc::strided(shape, strides, DType::U8).unwrap();
        let axes = Some(maru_layout::Axis::parse_list("block,token,head,dim").unwrap());
        let spec = CacheSpec { axes, split_kv: true, ..CacheSpec::default() };
        let layout = PagedLayout::detect(&tensor, &spec).unwrap();
        let slab = SlabLayout::of_cache(&layout, 2, 1, 32).unwrap();
        let plan = Arc::new(CopyPlan::new(&layout, &slab, bases).unwrap());
        let request = JobRequest {
            direction: Direction::Gather,
            slab: SlabSpan { host: Some(1 << 40), device: None, len: slab.bytes() },
            slots: SlotMapping::from_slots(slots),
            skip_tokens: 0,
            partial: true,
            layers: None,
        };
        CopyJob::new(plan, request).unwrap()
    }

    fn cut_job(job: &CopyJob, limit: u64) -> Vec<(u64, u64, u64)> {
        let maru_layout::JobSlots::Host { runs, .. } = job.slots() else { panic!("host slots") };
        let pieces = cut(job.plan().geometry(), runs, limit);
        pieces.into_iter().map(|p| (p.paged, p.slab, p.tokens)).collect()
    }

    const SLOTS: [i64; 9] = [2, 3, 4, 5, 6, -1, 7, 20, 21];
    const FAR: [u64; 2] = [4096, 1 << 30];

    #[test]
    fn dense_blocks_are_not_cut_at_their_borders() {
        let dense = job(&[6, 4, 2, 64], &[512, 128, 64, 1], &SLOTS, &FAR);
        assert_eq!(
            cut_job(&dense, 1 << 20),
            [(2 * 128, 0, 5), (7 * 128, 6 * 128, 1), (20 * 128, 7 * 128, 2)]
        );
    }

    #[test]
    fn padded_blocks_are_cut_at_their_borders() {
        let padded = job(&[6, 4, 2, 64], &[600, 128, 64, 1], &SLOTS, &FAR);
        assert_eq!(
            cut_job(&padded, 1 << 20),
            [(2 * 128, 0, 2), (600, 2 * 128, 3), (600 + 3 * 128, 6 * 128, 1), (5 * 600, 7 * 128, 2)]
        );
    }

    #[test]
    fn no_piece_is_longer_than_asked() {
        let dense = job(&[6, 4, 2, 64], &[512, 128, 64, 1], &(0..24).collect::<Vec<i64>>(), &FAR);
        assert_eq!(cut_job(&dense, 1300), [(0, 0, 10), (1280, 1280, 10), (2560, 2560, 4)]);
        // At least a token, however short the limit.
        assert_eq!(cut_job(&dense, 1).len(), 24);
    }

    #[test]
    fn near_planes_go_together_and_far_ones_apart() {
        let shape = ([6, 4, 2, 64], [512, 128, 64, 1]);
        let far = planes(&job(&shape.0, &shape.1, &SLOTS, &FAR), 1 << 40);
        let strip = 32 * 128;
        assert_eq!(far.len(), 2);
        assert_eq!((far[1].paged, far[1].slab, far[1].kv), (1 << 30, (1 << 40) + strip, (1, 0, 0)));
        let near = planes(&job(&shape.0, &shape.1, &SLOTS, &[8192, 4096]), 1 << 40);
        assert_eq!(near.len(), 1);
        // From V, the lower, to K.
        assert_eq!((near[0].paged, near[0].slab), (4096, (1 << 40) + strip));
        assert_eq!(near[0].kv, (2, 4096, -strip.cast_signed()));
    }

    #[test]
    fn ways_read_in_address_order() {
        // Heads outside tokens in the cache.
        let job = job(&[6, 4, 2, 64], &[512, 64, 256, 1], &SLOTS, &FAR);
        let planes = planes(&job, 1 << 40);
        let g = job.plan().geometry();
        let gather = planes[0].way(g, Direction::Gather, 4);
        assert_eq!((gather.nest.dims[1].src, gather.nest.dims[2].src), (256, 64));
        assert_eq!((gather.span, gather.bytes), (512, 512));
        let scatter = planes[0].way(g, Direction::Scatter, 4);
        assert_eq!((scatter.nest.dims[1].src, scatter.nest.dims[2].src), (128, 64));
        assert_eq!((scatter.span, scatter.bytes), (512, 512));
        // Half a block: a gather's source has holes.
        let half = planes[0].way(g, Direction::Gather, 2);
        assert_eq!((half.span, half.bytes), (384, 256));
    }
}
