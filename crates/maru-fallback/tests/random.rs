//! Random strides, orders of axes, paddings, bases and slots, against byte-by-byte copies.
#![allow(
    missing_docs,
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "a test, of small numbers"
)]

mod common;

use std::sync::Arc;

use common::{Memory, Random, mover, request, same};
use maru_fallback::Store;
use maru_layout::{CopyJob, CopyPlan, DType, Direction, PagedLayout, RowKind, SlabLayout, StridedSpec};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Problem {
    /// kv, layers, blocks, tokens of a block, heads
    counts: [u64; 5],
    head_bytes: u64,
    /// Nesting of the five axes, innermost first, and bytes of padding behind each.
    order: Vec<usize>,
    pads: [u64; 5],
    /// The same of the slab's kv, layer, token.
    slab_order: Vec<usize>,
    slab_pads: [u64; 3],
    offs: (usize, usize),
    seed: u64,
    tokens: f64,
    skip: f64,
    layers: (f64, f64),
    holes: bool,
    /// V below K.
    swapped: bool,
    threads: usize,
    store: usize,
}

fn pad() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0u64), 1 => Just(64u64), 1 => 0u64..40]
}

fn problem() -> impl Strategy<Value = Problem> {
    let counts = (1u64..3, 1u64..4, 1u64..7, 1u64..9, 1u64..5).prop_map(|c| [c.0, c.1, c.2, c.3, c.4]);
    let head = prop_oneof![2 => 1u64..300, 3 => (1u64..6).prop_map(|n| n * 64), 1 => Just(256u64)];
    let cache =
        (counts, head, Just(vec![0usize, 1, 2, 3, 4]).prop_shuffle(), proptest::array::uniform5(pad()));
    let slab = (Just(vec![0usize, 1, 2]).prop_shuffle(), proptest::array::uniform3(pad()));
    let offs = (prop_oneof![Just(0usize), 0usize..64], prop_oneof![Just(0usize), 0usize..64]);
    let part = (0.0..1.0f64, prop_oneof![Just(0.0), 0.0..1.0f64], (0.0..1.0f64, 0.0..1.0f64));
    (cache, slab, offs, part, any::<(u64, bool, bool)>(), (1usize..4, 0usize..4)).prop_map(
        |(
            (counts, head_bytes, order, pads),
            (slab_order, slab_pads),
            offs,
            part,
            (seed, holes, swapped),
            how,
        )| {
            Problem {
                counts,
                head_bytes,
                order,
                pads,
                slab_order,
                slab_pads,
                offs,
                seed,
                tokens: part.0,
                skip: part.1,
                layers: part.2,
                holes,
                swapped,
                threads: how.0,
                store: how.1,
            }
        },
    )
}

/// Strides of axes nested in `order` (innermost first) around `inner` bytes, and the bytes of it all.
fn nested(counts: &[u64], order: &[usize], pads: &[u64], inner: u64) -> (Vec<u64>, u64) {
    let mut strides = vec![0; counts.len()];
    let mut size = inner;
    for &axis in order {
        strides[axis] = size + pads[axis];
        size = strides[axis] * counts[axis];
    }
    (strides, size)
}

fn share(part: f64, n: u64) -> u64 {
    (part * n as f64) as u64
}

fn run(p: &Problem, direction: Direction) {
    let [planes, layers, blocks, block_size, heads] = p.counts;
    let (s, bytes) = nested(&p.counts, &p.order, &p.pads, p.head_bytes);
    let spec = StridedSpec {
        dtype: DType::Raw8,
        row_kind: RowKind::Plain,
        kv_planes: planes,
        kv_stride: s[0],
        layers,
        layer_stride: s[1],
        num_blocks: blocks,
        block_size,
        num_heads: heads,
        head_size: p.head_bytes,
        block_stride: s[2],
        token_stride: s[3],
        head_stride: s[4],
    };
    let layout = PagedLayout::from_strides(&spec).unwrap();
    let mut random = Random(p.seed | 1);
    let num_slots = blocks * block_size;
    let room = num_slots + random.below(3);
    let row = heads * p.head_bytes;
    let slab_counts = [planes, layers, room];
    let (z, _) = nested(&slab_counts, &p.slab_order, &p.slab_pads, row);
    let slab = SlabLayout::strided(slab_counts, row, [z[0], z[1], z[2]], DType::Raw8).unwrap();
    let slots = random.slots(share(p.tokens, num_slots + 1), num_slots, p.holes);
    let skip = share(p.skip, slots.len() as u64 + 1);
    let first = share(p.layers.0, layers);
    let count = 1 + share(p.layers.1, layers - first);

    let mut cache = Memory::new(bytes as usize, p.offs.0, random.next());
    let mut packed = Memory::new(slab.bytes() as usize, p.offs.1, random.next());
    let (mut cache_twin, mut packed_twin) = (cache.twin(), packed.twin());
    let plane = |kv: u64| if p.swapped { planes - 1 - kv } else { kv };
    for kv in 0..planes {
        for l in first..first + count {
            for (t, &slot) in slots.iter().enumerate().skip(skip as usize).filter(|t| *t.1 >= 0) {
                for byte in 0..row {
                    let (head, d) = (byte / p.head_bytes, byte % p.head_bytes);
                    let (block, token) = (slot as u64 / block_size, slot as u64 % block_size);
                    let at = plane(kv) * s[0] + l * s[1] + block * s[2] + token * s[3] + head * s[4] + d;
                    let to = kv * z[0] + l * z[1] + t as u64 * z[2] + byte;
                    match direction {
                        Direction::Gather => packed_twin.used()[to as usize] = cache_twin.used()[at as usize],
                        Direction::Scatter => {
                            cache_twin.used()[at as usize] = packed_twin.used()[to as usize]
                        }
                    }
                }
            }
        }
    }

    let base = cache.addr();
    let planes_of = |kv: u64| (0..layers).map(|l| base + plane(kv) * s[0] + l * s[1]).collect::<Vec<u64>>();
    let bases: Vec<u64> = (0..planes).flat_map(planes_of).collect();
    let plan = Arc::new(CopyPlan::new(&layout, &slab, bases).unwrap());
    let mut wanted = request(direction, packed.addr(), slab.bytes(), &slots);
    wanted.skip_tokens = skip;
    wanted.layers = Some((first as u32, count as u32));
    let job = CopyJob::new(plan, wanted).unwrap();
    let stores = Store::available();
    let mover = mover(p.threads, stores[p.store % stores.len()]);
    // SAFETY: both memories are alive and only used here.
    unsafe { mover.copy(&job) }.unwrap();
    same(cache.all(), cache_twin.all(), &format!("{direction:?}: cache"));
    same(packed.all(), packed_twin.all(), &format!("{direction:?}: slab"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn gathers_equal_byte_copies(p in problem()) {
        run(&p, Direction::Gather);
    }

    #[test]
    fn scatters_equal_byte_copies(p in problem()) {
        run(&p, Direction::Scatter);
    }
}
