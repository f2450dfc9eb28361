//! What a job may ask for besides moving every token: nothing, some layers, other slabs, and what is refused.
#![allow(
    missing_docs,
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "a test, of small numbers"
)]

mod common;

use std::sync::Arc;

use common::{Cache, Memory, Random, check, mover, request, same};
use maru_fallback::{FallbackError, HostMover, Store, Tuning};
use maru_layout::{CopyJob, CopyPlan, DType, Direction, SlabLayout, SlotMapping};

fn nhd() -> Cache {
    Cache::new("nhd", "block,kv,token,head,dim", &[6, 2, 4, 2, 64], None, DType::Bf16, 3)
}

fn fused() -> Cache {
    Cache::new(
        "LBNHC",
        "block,head,token,kv_dim",
        &[6, 3, 4, 256],
        Some(&[3072, 256, 768, 1]),
        DType::Bf16,
        3,
    )
}

/// A mover as users get it.
fn default_mover() -> HostMover {
    HostMover::new(1).expect("mover")
}

/// Both memories of `cache` and a slab geometry, as they are before anything moves.
fn memories(cache: &Cache, slab: &SlabLayout) -> (Memory, Memory) {
    (Memory::new(cache.bytes as usize, 0, 77), Memory::new(slab.bytes() as usize, 0, 99))
}

/// Moves `layers` through a slab of any geometry, and byte by byte through the oracle's addresses.
fn check_slab(cache: &Cache, slab: &SlabLayout, layers: Option<(u32, u32)>, slots: &[i64]) {
    for direction in [Direction::Gather, Direction::Scatter] {
        for store in Store::available() {
            let (mut paged, mut packed) = memories(cache, slab);
            let (mut paged_twin, mut packed_twin) = (paged.twin(), packed.twin());
            let reference = cache.reference();
            let (first, count) = layers.map_or((0, cache.layers), |l| (l.0.into(), l.1.into()));
            let [kv_stride, layer_stride, token_stride] = slab.strides();
            for kv in 0..cache.planes {
                for l in first..first + count {
                    for (t, &slot) in slots.iter().enumerate().filter(|s| *s.1 >= 0) {
                        for byte in 0..slab.row_bytes() {
                            let at = reference.paged_offset(kv, l, slot as u64, byte) as usize;
                            let to = kv * kv_stride + l * layer_stride + t as u64 * token_stride + byte;
                            let to = to as usize;
                            match direction {
                                Direction::Gather => packed_twin.used()[to] = paged_twin.used()[at],
                                Direction::Scatter => paged_twin.used()[at] = packed_twin.used()[to],
                            }
                        }
                    }
                }
            }
            let mut wanted = request(direction, packed.addr(), slab.bytes(), slots);
            wanted.layers = layers;
            let job = CopyJob::new(cache.plan(paged.addr(), slab), wanted).expect("job");
            // SAFETY: both memories are alive and only used here.
            unsafe { mover(2, store).copy(&job) }.expect("copy");
            same(paged.all(), paged_twin.all(), &format!("{direction:?} {store:?}: cache"));
            same(packed.all(), packed_twin.all(), &format!("{direction:?} {store:?}: slab"));
        }
    }
}

#[test]
fn some_layers_of_a_chunk_slab() {
    for cache in [nhd(), fused()] {
        for layers in [(0, 1), (1, 2), (2, 1)] {
            check_slab(&cache, &cache.slab(10), Some(layers), &[3, 4, 5, 6, -1, 20, 21, 0, 1, 2]);
        }
    }
}

#[test]
fn one_layer_as_its_own_object() {
    for cache in [nhd(), fused()] {
        let row = cache.layout().num_heads() * cache.layout().head_size();
        let slab = SlabLayout::layer_object(2, 8, row, DType::Bf16).expect("slab");
        for layer in 0..3 {
            check_slab(&cache, &slab, Some((layer, 1)), &[8, 9, 10, 11, 3, 2, 1, 0]);
        }
    }
}

#[test]
fn one_layer_with_tokens_outermost() {
    for cache in [nhd(), fused()] {
        let row = cache.layout().num_heads() * cache.layout().head_size();
        let slab = SlabLayout::token_major(2, 8, row, DType::Bf16).expect("slab");
        for layer in 0..3 {
            check_slab(&cache, &slab, Some((layer, 1)), &[8, 9, 10, 11, 3, 2, -1, 0]);
        }
    }
}

#[test]
fn a_slab_with_padding_everywhere() {
    let cache = nhd();
    let row = cache.layout().token_bytes();
    let token = row + 16;
    let layer = token * 8 + 6;
    let kv = layer * 3 + 64;
    let slab = SlabLayout::strided([2, 3, 8], row, [kv, layer, token], DType::Bf16).expect("slab");
    check_slab(&cache, &slab, None, &[8, 9, 10, 11, 3, 2, -1, 0]);
}

#[test]
fn a_gather_may_name_a_slot_twice() {
    for cache in [nhd(), fused()] {
        let slab = cache.slab(6);
        let (mut paged, mut packed) = memories(&cache, &slab);
        let slots = [5, 5, 6, 7, 5, 6];
        let (mut paged_twin, mut packed_twin) = (paged.twin(), packed.twin());
        cache.reference().copy(Direction::Gather, paged_twin.used(), packed_twin.used(), 6, &slots, 0);
        let wanted = request(Direction::Gather, packed.addr(), slab.bytes(), &slots);
        let job = CopyJob::new(cache.plan(paged.addr(), &slab), wanted).expect("job");
        // SAFETY: both memories are alive and only used here.
        unsafe { mover(3, Store::best()).copy(&job) }.expect("copy");
        same(packed.all(), packed_twin.all(), "slab");
        same(paged.all(), paged_twin.all(), "cache");
    }
}

/// Nothing to move: no slots, all skipped, all −1.
#[test]
fn empty_jobs_touch_nothing() {
    let cache = nhd();
    let slab = cache.slab(6);
    for direction in [Direction::Gather, Direction::Scatter] {
        for (slots, skip) in [(vec![], 0), (vec![1, 2, 3], 3), (vec![-1, -1], 0), (vec![4, -1, -1], 1)] {
            let (mut paged, mut packed) = memories(&cache, &slab);
            let (paged_before, packed_before) = (paged.twin(), packed.twin());
            let mut wanted = request(direction, packed.addr(), slab.bytes(), &slots);
            wanted.skip_tokens = skip;
            let job = CopyJob::new(cache.plan(paged.addr(), &slab), wanted).expect("job");
            assert!(job.is_empty());
            // SAFETY: both memories are alive and only used here.
            unsafe { mover(2, Store::best()).copy(&job) }.expect("copy");
            same(paged.all(), paged_before.all(), "cache");
            same(packed.all(), packed_before.all(), "slab");
        }
    }
}

#[test]
fn a_slab_without_host_address_is_refused() {
    let cache = nhd();
    let slab = cache.slab(2);
    let (mut paged, mut packed) = memories(&cache, &slab);
    let before = paged.twin();
    let mut wanted = request(Direction::Scatter, packed.addr(), slab.bytes(), &[1, 2]);
    wanted.slab.device = wanted.slab.host.take();
    let job = CopyJob::new(cache.plan(paged.addr(), &slab), wanted).expect("job");
    // SAFETY: both memories are alive and only used here.
    let error = unsafe { default_mover().copy(&job) }.expect_err("no host address");
    assert!(matches!(error, FallbackError::NoHostAddress { len } if len == slab.bytes()), "{error}");
    assert_eq!(error.kind(), "invalid_argument");
    same(paged.all(), before.all(), "cache");
}

#[test]
fn slots_in_device_memory_are_refused() {
    let cache = nhd();
    let slab = cache.slab(2);
    let (mut paged, mut packed) = memories(&cache, &slab);
    let before = packed.twin();
    let mut wanted = request(Direction::Gather, packed.addr(), slab.bytes(), &[]);
    wanted.slots = SlotMapping::Device { addr: 0x7000, len: 2 };
    let job = CopyJob::new(cache.plan(paged.addr(), &slab), wanted).expect("job");
    // SAFETY: both memories are alive and only used here.
    let error = unsafe { default_mover().copy(&job) }.expect_err("device slots");
    assert!(matches!(error, FallbackError::DeviceSlots { addr: 0x7000, len: 2 }), "{error}");
    assert_eq!(error.kind(), "invalid_argument");
    same(packed.all(), before.all(), "slab");
}

#[test]
fn thread_counts() {
    assert_eq!(HostMover::new(1).expect("1").threads(), 1);
    assert_eq!(HostMover::new(3).expect("3").threads(), 3);
    let auto = HostMover::new(0).expect("0").threads();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    assert!((1..=cores).contains(&auto), "{auto} of {cores}");
    let error = HostMover::new(1025).expect_err("1025");
    assert!(matches!(error, FallbackError::TooManyThreads { found: 1025, max: 1024 }), "{error}");
    assert_eq!(error.kind(), "invalid_argument");
}

#[test]
fn a_store_kind_that_is_missing_is_refused() {
    for store in [Store::Plain, Store::Sse2, Store::Avx2, Store::Avx512] {
        let made = HostMover::tuned(1, Tuning { store: Some(store), ..Tuning::default() });
        match store.is_available() {
            true => assert!(made.is_ok(), "{store:?}"),
            false => assert_eq!(made.expect_err("missing").kind(), "not_available", "{store:?}"),
        }
    }
    assert!(Store::Plain.is_available());
    assert!(Store::available().contains(&Store::best()));
}

/// Thresholds as users have them: jobs below and above each, one and several threads.
#[test]
fn default_thresholds_around_each() {
    let blocks = 320;
    let cache = Cache::new(
        "LBNHC large",
        "block,head,token,kv_dim",
        &[blocks, 4, 16, 128],
        Some(&[8192, 128, 512, 1]),
        DType::Bf16,
        2,
    );
    // 2 layers x 1 KiB a token: 0.5 MiB plain, 1.25 MiB streaming, 10 MiB threads.
    for (tokens, threads) in [(256, 1), (640, 1), (640, 3), (5120, 1), (5120, 3)] {
        let mut random = Random(tokens);
        let slots = random.slots(tokens, blocks as u64 * 16, false);
        check(&cache, &HostMover::new(threads).expect("mover"), tokens, &slots, 5, (0, 0), 3);
    }
}

/// One mover used by several threads at once, each with its own slab in one memory, next to another mover.
#[test]
fn neighbouring_slabs_are_written_at_the_same_time() {
    let cache = fused();
    let slab = cache.slab(5);
    let slots: Vec<Vec<i64>> =
        vec![vec![0, 1, 2, 3, 4], vec![9, 8, 7, 6, 5], vec![10, 11, 12, -1, 13], vec![20, 21, 22, 23, 14]];
    let len = slab.bytes();
    let mut paged = Memory::new(cache.bytes as usize, 0, 5);
    // Slabs right behind each other and off every line border.
    let mut packed = Memory::new(len as usize * slots.len(), 3, 6);
    let mut packed_twin = packed.twin();
    let mut paged_twin = paged.twin();
    for (i, slots) in slots.iter().enumerate() {
        let part = &mut packed_twin.used()[i * len as usize..(i + 1) * len as usize];
        cache.reference().copy(Direction::Gather, paged_twin.used(), part, 5, slots, 0);
    }
    let plan = cache.plan(paged.addr(), &slab);
    let start = packed.addr();
    let jobs: Vec<CopyJob> = (0..slots.len())
        .map(|i| {
            let wanted = request(Direction::Gather, start + i as u64 * len, len, &slots[i]);
            CopyJob::new(plan.clone(), wanted).expect("job")
        })
        .collect();
    for store in Store::available() {
        let movers = [mover(1, store), mover(3, store)];
        for _ in 0..50 {
            std::thread::scope(|scope| {
                for (i, job) in jobs.iter().enumerate() {
                    let mover = &movers[i % 2];
                    // SAFETY: both memories outlive the scope; the jobs write disjoint slabs.
                    scope.spawn(move || unsafe { mover.copy(job) }.expect("copy"));
                }
            });
        }
        same(packed.all(), packed_twin.all(), &format!("{store:?}"));
    }
}

/// K and V as two allocations of which V comes first, closer together than a page.
#[test]
fn v_below_k() {
    let cache = nhd();
    let layout = cache.layout();
    let slab = cache.slab(8);
    let slots = [8, 9, 10, 11, 3, 2, -1, 0];
    for direction in [Direction::Gather, Direction::Scatter] {
        let (mut paged, mut packed) = memories(&cache, &slab);
        let (mut paged_twin, mut packed_twin) = (paged.twin(), packed.twin());
        let row = layout.token_bytes() as usize;
        let reference = cache.reference();
        for (kv, l) in (0..2).flat_map(|kv| (0..3).map(move |l| (kv, l))) {
            for (t, &slot) in slots.iter().enumerate().filter(|s| *s.1 >= 0) {
                let at = reference.paged_offset(1 - kv, l, slot as u64, 0) as usize;
                let to = ((kv * 3 + l) as usize * 8 + t) * row;
                let (a, b) = (at..at + row, to..to + row);
                match direction {
                    Direction::Gather => packed_twin.used()[b].copy_from_slice(&paged_twin.used()[a]),
                    Direction::Scatter => paged_twin.used()[a].copy_from_slice(&packed_twin.used()[b]),
                }
            }
        }
        let mut bases = cache.bases(paged.addr());
        bases.rotate_left(3);
        let plan = Arc::new(CopyPlan::new(&layout, &slab, bases).expect("plan"));
        let wanted = request(direction, packed.addr(), slab.bytes(), &slots);
        let job = CopyJob::new(plan, wanted).expect("job");
        // SAFETY: both memories are alive and only used here.
        unsafe { mover(2, Store::best()).copy(&job) }.expect("copy");
        same(paged.all(), paged_twin.all(), "cache");
        same(packed.all(), packed_twin.all(), "slab");
    }
}

#[test]
fn gather_then_scatter_into_other_blocks_is_the_identity() {
    let cache = nhd();
    let slab = cache.slab(8);
    let mover = mover(2, Store::best());
    let (mut paged, mut packed) = memories(&cache, &slab);
    let (from, to) = ([0, 1, 2, 3, 8, 9, 10, 11], [20, 21, 22, 23, 13, 12, 15, 14]);
    let plan = cache.plan(paged.addr(), &slab);
    for (direction, slots) in [(Direction::Gather, from), (Direction::Scatter, to)] {
        let wanted = request(direction, packed.addr(), slab.bytes(), &slots);
        let job = CopyJob::new(plan.clone(), wanted).expect("job");
        // SAFETY: both memories are alive and only used here.
        unsafe { mover.copy(&job) }.expect("copy");
    }
    let (reference, row) = (cache.reference(), cache.layout().token_bytes());
    for (kv, l) in (0..2).flat_map(|kv| (0..3).map(move |l| (kv, l))) {
        for (a, b) in from.into_iter().zip(to) {
            for byte in 0..row {
                let a = reference.paged_offset(kv, l, a as u64, byte) as usize;
                let b = reference.paged_offset(kv, l, b as u64, byte) as usize;
                let bytes = paged.used();
                assert_eq!(bytes[a], bytes[b]);
            }
        }
    }
}
