//! Pieces that pass through a staging buffer, put together, are the whole transfer.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::unwrap_used,
    clippy::panic,
    reason = "small tests"
)]

mod common;

use std::sync::Arc;

use common::bf16;
use maru_layout::oracle::Reference;
use maru_layout::{
    Axis, CacheSpec, CopyJob, CopyPlan, Direction, JobRequest, JobSlots, LayoutError, PagedLayout, Piece,
    SlabLayout, SlabSpan, SlotMapping,
};
use proptest::prelude::*;

const LAYERS: u64 = 3;
const TOKENS: u64 = 12;

struct World {
    plan: Arc<CopyPlan>,
    reference: Reference,
    cache_bytes: usize,
    slab_bytes: usize,
}

fn world() -> World {
    let tensor = bf16(&[5, 2, 4, 3, 8]);
    let spec = CacheSpec { block_size: Some(4), ..CacheSpec::default() };
    let layout = PagedLayout::detect(&tensor, &spec).unwrap();
    let each = tensor.span_bytes();
    let bases: Vec<u64> = (0..2u64)
        .flat_map(|kv| (0..LAYERS).map(move |l| (kv, l)))
        .map(|(kv, l)| l * each + layout.plane_offset(kv, 0).unwrap())
        .collect();
    let slab = SlabLayout::of_cache(&layout, 2, LAYERS, TOKENS).unwrap();
    let reference = Reference {
        tensor,
        axes: Axis::parse_list("block,kv,token,head,dim").unwrap(),
        block_size: 4,
        planes: 2,
        layers: LAYERS,
        tensors: (0..LAYERS).map(|l| l * each).collect(),
    };
    let slab_bytes = slab.bytes() as usize;
    World {
        plan: Arc::new(CopyPlan::new(&layout, &slab, bases).unwrap()),
        reference,
        cache_bytes: (LAYERS * each) as usize,
        slab_bytes,
    }
}

fn job(w: &World, direction: Direction, slots: &[i64], skip: u64, layers: Option<(u32, u32)>) -> CopyJob {
    let request = JobRequest {
        direction,
        slab: SlabSpan { host: Some(0), device: Some(0), len: w.slab_bytes as u64 },
        slots: SlotMapping::from_slots(slots),
        skip_tokens: skip,
        partial: true,
        layers,
    };
    CopyJob::new(Arc::clone(&w.plan), request).unwrap()
}

/// Follows the documented formula of `Geometry`.
fn carry_out(job: &CopyJob, cache: &mut [u8], slab: &mut [u8]) {
    let g = *job.plan().geometry();
    let JobSlots::Host { slots, .. } = job.slots() else { panic!("host slots") };
    for kv in 0..g.kv_planes {
        for l in 0..u64::from(job.layer_count()) {
            for (t, &s) in slots.iter().enumerate().skip(job.skip() as usize).filter(|(_, s)| **s >= 0) {
                for r in 0..g.rows {
                    let s = s as u64;
                    let paged = job.base(kv, l)
                        + (s / g.block_size) * g.block_stride
                        + (s % g.block_size) * g.token_stride
                        + r * g.row_stride;
                    let packed = job.slab().host.unwrap()
                        + kv * g.slab_kv_stride
                        + l * g.slab_layer_stride
                        + t as u64 * g.slab_token_stride
                        + r * g.row_bytes;
                    for b in 0..g.row_bytes {
                        let (p, q) = ((paged + b) as usize, (packed + b) as usize);
                        match job.direction() {
                            Direction::Gather => slab[q] = cache[p],
                            Direction::Scatter => cache[p] = slab[q],
                        }
                    }
                }
            }
        }
    }
}

fn copy_spans(piece: &Piece, slab_at: u64, slab: &mut [u8], ring: &mut [u8], to_ring: bool) {
    for (run, i) in (0..piece.runs).flat_map(|run| (0..piece.height).map(move |i| (run, i))) {
        let at = slab_at + run * piece.run_stride + i * piece.pitch;
        let s = usize::try_from(i64::try_from(at).unwrap() + piece.offset).unwrap();
        let r = (piece.lead + (run * piece.height + i) * piece.pitch) as usize;
        let n = piece.width as usize;
        match to_ring {
            true => ring[r..r + n].copy_from_slice(&slab[s..s + n]),
            false => slab[s..s + n].copy_from_slice(&ring[r..r + n]),
        }
    }
}

fn bytes(n: usize, seed: u8) -> Vec<u8> {
    (0..n).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[1] ^ seed).collect()
}

/// A few for an interpreter, which has no files either.
const CASES: u32 = if cfg!(miri) { 2 } else { 256 };

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_make_the_whole(
        order in Just((0..20i64).collect::<Vec<_>>()).prop_shuffle(),
        n in 1usize..=12,
        skip in 0u64..4,
        most in 1u64..9,
        cut in 0u64..9,
        layers in prop_oneof![Just(None), Just(Some((1u32, 2u32))), Just(Some((0, 1))), Just(Some((2, 1)))],
        store in any::<bool>(),
    ) {
        let w = world();
        let slots = &order[..n];
        let skip = skip.min(n as u64);
        let direction = if store { Direction::Gather } else { Direction::Scatter };
        let whole = job(&w, direction, slots, skip, layers);
        let strip = 48 * TOKENS;
        let pieces = whole.pieces(most * strip).expect("a packed slab");
        let (mut cache, mut slab) = (bytes(w.cache_bytes, 1), bytes(w.slab_bytes, 2));
        let (mut cache2, mut slab2) = (cache.clone(), slab.clone());
        carry_out(&whole, &mut cache2, &mut slab2);
        let mut ring = vec![0xEE; (most * strip) as usize];
        let cut = |piece: &Piece| match piece.split(cut) {
            Some((head, rest)) => vec![head, rest],
            None => vec![*piece],
        };
        prop_assert_eq!(pieces.list().iter().flat_map(cut).map(|p| p.room()).sum::<u64>(), pieces.list().iter().map(Piece::room).sum::<u64>());
        for piece in &pieces.list().iter().flat_map(cut).collect::<Vec<_>>() {
            prop_assert!(piece.room() <= most * strip);
            let staged = pieces.staged(piece, Some(0), Some(0)).unwrap();
            prop_assert!(staged.access_bytes() >= 1);
            let at = whole.slab().host.unwrap();
            if store {
                carry_out(&staged, &mut cache, &mut ring);
                copy_spans(piece, at, &mut slab, &mut ring, false);
            } else {
                copy_spans(piece, at, &mut slab, &mut ring, true);
                carry_out(&staged, &mut cache, &mut ring);
            }
        }
        prop_assert!(cache == cache2 && slab == slab2);
        if layers.is_none() {
            let (mut c, mut s) = (bytes(w.cache_bytes, 1), bytes(w.slab_bytes, 2));
            w.reference.copy(direction, &mut c, &mut s, TOKENS, slots, skip);
            prop_assert!(cache == c && slab == s);
        }
    }
}

#[test]
fn a_piece_is_cut_between_its_spans() {
    let w = world();
    let strip = 48 * TOKENS;
    let all = job(&w, Direction::Scatter, &[3, 7], 1, None).pieces(6 * strip).expect("packed");
    let piece = all.list()[0];
    let (head, rest) = piece.split(4).expect("six spans");
    assert_eq!((head.height, rest.height, rest.lead), (4, 2, piece.lead));
    assert_eq!(rest.offset - head.offset, i64::try_from(4 * strip).unwrap());
    assert!([0, 6, 7, u64::MAX].iter().all(|spans| piece.split(*spans).is_none()));
    // K and V of a layer: two runs.
    let both = job(&w, Direction::Scatter, &[3, 7], 0, Some((1, 1))).pieces(2 * strip).expect("packed");
    assert!(both.list()[0].split(1).is_none());
}

#[test]
fn a_piece_of_something_else_is_refused() {
    let w = world();
    let strip = 48 * TOKENS;
    let pieces = job(&w, Direction::Scatter, &[3, 7], 0, None).pieces(6 * strip).expect("packed");
    let by_layer = job(&w, Direction::Scatter, &[3, 7], 0, Some((1, 1))).pieces(2 * strip).expect("packed");
    let (piece, window) = (pieces.list()[0], by_layer.list()[0]);
    let changed = |mut piece: Piece, change: &dyn Fn(&mut Piece)| {
        change(&mut piece);
        piece
    };
    let others = [
        changed(piece, &|p| p.height = 7),
        changed(piece, &|p| p.height = u64::MAX),
        changed(piece, &|p| p.pitch *= 2),
        changed(window, &|p| p.height = 1000),
        changed(window, &|p| p.runs = 3),
        changed(window, &|p| p.runs = 0),
    ];
    for other in others {
        let refused = pieces.staged(&other, Some(0), Some(0)).unwrap_err();
        assert!(matches!(refused, LayoutError::LayerRange { .. }), "{other:?}: {refused}");
    }
    assert!(
        pieces.staged(&piece, Some(0), Some(0)).is_ok() && by_layer.staged(&window, Some(0), Some(0)).is_ok()
    );
}

#[test]
fn a_store_that_leaves_tokens_out_is_not_staged() {
    let w = world();
    assert!(job(&w, Direction::Gather, &[3, -1, 5], 0, None).pieces(1 << 20).is_none());
    assert!(job(&w, Direction::Gather, &[-1, 4, 5], 1, None).pieces(1 << 20).is_some());
    assert!(job(&w, Direction::Scatter, &[3, -1, 5], 0, None).pieces(1 << 20).is_some());
}

#[test]
fn a_plane_larger_than_the_buffer_is_not_staged() {
    let w = world();
    let job = job(&w, Direction::Scatter, &[3], 0, None);
    assert!(job.pieces(48 * TOKENS - 1).is_none());
    assert_eq!(job.pieces(48 * TOKENS).expect("one plane a piece").list().len(), 6);
}

#[test]
fn k_and_v_of_a_layer_are_one_piece_if_they_fit() {
    let w = world();
    let job = job(&w, Direction::Scatter, &[3, 7], 0, Some((1, 1)));
    let strip = 48 * TOKENS;
    let together = job.pieces(2 * strip).expect("packed");
    let [piece] = together.list() else { panic!("one piece, not {}", together.list().len()) };
    assert_eq!((piece.runs, piece.height, piece.run_stride), (2, 1, LAYERS * strip));
    assert_eq!(piece.bytes(), 2 * 2 * 48);
    assert_eq!(job.pieces(strip).expect("packed").list().len(), 2);
}

#[test]
fn nothing_has_no_pieces() {
    let w = world();
    for (slots, skip) in [(&[-1i64, -1][..], 0), (&[3, 4], 2)] {
        let job = job(&w, Direction::Scatter, slots, skip, None);
        assert!(job.pieces(1 << 20).expect("packed").list().is_empty());
    }
}
