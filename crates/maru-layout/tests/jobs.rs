//! Slots, plans and jobs: what is accepted, what it means, what is refused.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::{assert_error, bf16, blocks_of, dense};
use maru_layout::{
    CopyJob, CopyPlan, DType, Direction, JobRequest, JobSlots, LayoutError, PagedLayout, Run, SlabLayout,
    SlabSpan, SlotMapping,
};

const BOTH: [Direction; 2] = [Direction::Gather, Direction::Scatter];

/// 4 blocks of 16 tokens, 2 heads of 8, 3 layers 16 KiB apart; the slab has `tokens` tokens.
fn plan(tokens: u64) -> Arc<CopyPlan> {
    let layout = PagedLayout::detect(&bf16(&[4, 2, 16, 2, 8]), &blocks_of(16)).unwrap();
    let slab = SlabLayout::of_cache(&layout, 2, 3, tokens).unwrap();
    Arc::new(CopyPlan::new(&layout, &slab, bases(&layout)).unwrap())
}

fn bases(layout: &PagedLayout) -> Vec<u64> {
    let base = |kv, l: u64| 0x10000 + l * 0x4000 + layout.plane_offset(kv, 0).unwrap();
    (0..2).flat_map(|kv| (0..3).map(move |l| (kv, l))).map(|(kv, l)| base(kv, l)).collect()
}

fn request(direction: Direction, plan: &CopyPlan, slots: &[i64]) -> JobRequest {
    JobRequest {
        direction,
        slab: SlabSpan { host: Some(0x100_0000), device: Some(0x900_0000), len: plan.slab().bytes() },
        slots: SlotMapping::from_slots(slots),
        skip_tokens: 0,
        partial: false,
        layers: None,
    }
}

fn job(direction: Direction, slots: &[i64]) -> Result<CopyJob, LayoutError> {
    let plan = plan(slots.len().try_into().unwrap());
    CopyJob::new(plan.clone(), request(direction, &plan, slots))
}

fn runs(job: &CopyJob) -> Vec<(u64, u64, u64)> {
    match job.slots() {
        JobSlots::Host { runs, .. } => runs.iter().map(|r| (r.token, r.slot, r.len)).collect(),
        other => panic!("{other:?}"),
    }
}

// Slots.

#[test]
fn blocks_become_slots() {
    let slots = SlotMapping::from_blocks(&[3, 0, 2], 4, 0..12).unwrap();
    assert_eq!(slots, SlotMapping::from_slots(vec![12, 13, 14, 15, 0, 1, 2, 3, 8, 9, 10, 11]));
    assert_eq!(slots.len(), 12);
}

#[test]
fn a_range_may_start_and_end_inside_blocks() {
    let slots = SlotMapping::from_blocks(&[3, 0, 2], 4, 3..9).unwrap();
    assert_eq!(slots, SlotMapping::from_slots(vec![15, 0, 1, 2, 3, 8]));
    let one = SlotMapping::from_blocks(&[3, 0, 2], 4, 5..6).unwrap();
    assert_eq!(one, SlotMapping::from_slots(vec![1]));
}

#[test]
fn an_empty_range_is_no_slots() {
    for tokens in [0..0, 5..5, 12..12] {
        assert!(SlotMapping::from_blocks(&[3, 0, 2], 4, tokens).unwrap().is_empty());
    }
    assert!(SlotMapping::from_blocks(&[], 4, 0..0).unwrap().is_empty());
}

#[test]
fn a_range_beyond_the_blocks_is_refused() {
    for tokens in [0..13, 12..13, 20..21, 0..u64::MAX] {
        let end = tokens.end.to_string();
        let found = SlotMapping::from_blocks(&[3, 0, 2], 4, tokens);
        assert_error(found, "invalid_argument", &[&end, "12", "3 blocks of 4"]);
    }
}

#[test]
fn a_reversed_range_is_refused() {
    let tokens = std::ops::Range { start: 6, end: 5 };
    assert_error(SlotMapping::from_blocks(&[3, 0], 4, tokens), "invalid_argument", &["5", "6 to 8"]);
}

#[test]
fn negative_blocks_are_refused_where_they_are_used() {
    assert_error(SlotMapping::from_blocks(&[3, -1], 4, 0..5), "invalid_argument", &["block id is -1"]);
    assert!(SlotMapping::from_blocks(&[3, -1], 4, 0..4).is_ok());
    let least = SlotMapping::from_blocks(&[i64::MIN], 4, 0..1);
    assert_error(least, "invalid_argument", &["-9223372036854775808"]);
}

#[test]
fn a_block_size_of_zero_is_refused() {
    assert_error(SlotMapping::from_blocks(&[3], 0, 0..0), "invalid_argument", &["block_size is 0"]);
}

#[test]
fn slots_beyond_63_bits_are_refused() {
    let found = SlotMapping::from_blocks(&[i64::MAX / 16 + 1], 16, 0..1);
    assert_error(found, "invalid_argument", &["slot", "63 bits"]);
    assert!(SlotMapping::from_blocks(&[i64::MAX / 16], 16, 0..15).is_ok());
}

#[test]
fn a_range_beyond_memory_is_an_error() {
    let found = SlotMapping::from_blocks(&[0], 1 << 62, 0..1 << 62);
    assert_error(found, "invalid_argument", &["4611686018427387904", "memory"]);
}

#[test]
fn one_token_blocks_are_slots() {
    let slots = SlotMapping::from_blocks(&[9, 4, 7], 1, 0..3).unwrap();
    assert_eq!(slots, SlotMapping::from_slots(vec![9, 4, 7]));
}

// Jobs.

#[test]
fn consecutive_slots_are_runs() {
    for direction in BOTH {
        let job = job(direction, &[5, 6, 7, -1, 8, 20, 19, 63, 0, 1]).unwrap();
        let expect = [(0, 5, 3), (4, 8, 1), (5, 20, 1), (6, 19, 1), (7, 63, 1), (8, 0, 2)];
        assert_eq!(runs(&job), expect);
        assert_eq!((job.tokens(), job.bytes()), (10, 9 * 32 * 2 * 3));
    }
}

#[test]
fn long_runs_are_found_whole() {
    // Fewer lengths for an interpreter.
    for len in (1..=64).step_by(if cfg!(miri) { 21 } else { 1 }) {
        let slots: Vec<i64> = (0..len).collect();
        let moved = u64::try_from(len).unwrap();
        assert_eq!(runs(&job(Direction::Scatter, &slots).unwrap()), [(0, 0, moved)]);
        let mut back: Vec<i64> = (64 - len..64).collect();
        back.insert(0, -1);
        let job = job(Direction::Scatter, &back).unwrap();
        assert_eq!(runs(&job), [(1, 64 - moved, moved)]);
    }
}

#[test]
fn c04_minus_one_skips() {
    for direction in BOTH {
        let job = job(direction, &[5, -1, 63]).unwrap();
        assert_eq!(runs(&job), [(0, 5, 1), (2, 63, 1)]);
    }
}

#[test]
fn c04_slots_outside_the_cache_are_refused() {
    for direction in BOTH {
        for slot in [64, -2, (1 << 40) + 17, i64::MIN, i64::MAX] {
            let parts = [&slot.to_string(), "token 0", "0 to 63"];
            assert_error(job(direction, &[slot]), "slot_out_of_range", &parts);
        }
    }
}

#[test]
fn the_first_bad_slot_is_named_wherever_it_hides() {
    // Fewer places for an interpreter, the last among them.
    for at in (0..40).step_by(if cfg!(miri) { 13 } else { 1 }) {
        for slot in [64, -2, i64::MIN, i64::MAX] {
            let mut slots: Vec<i64> = (0..40).collect();
            slots[at] = slot;
            slots[39.min(at + 1)] = if at == 39 { slot } else { 99 };
            let token = format!("token {at}");
            assert_error(job(Direction::Gather, &slots), "slot_out_of_range", &[&token, &slot.to_string()]);
        }
    }
    // A run that crosses the end of the cache.
    let slots: Vec<i64> = (50..70).collect();
    assert_error(job(Direction::Gather, &slots), "slot_out_of_range", &["slot 64 of token 14"]);
}

#[test]
fn bad_slots_in_the_skipped_prefix_are_refused_too() {
    let plan = plan(3);
    let mut request = request(Direction::Gather, &plan, &[64, 1, 2]);
    request.skip_tokens = 1;
    assert_error(CopyJob::new(plan, request), "slot_out_of_range", &["64"]);
}

#[test]
fn slots_at_the_largest_number_do_not_wrap() {
    let slots: Vec<i64> = (0..20i64).map(|i| (i64::MAX - 3).wrapping_add(i)).collect();
    assert_error(job(Direction::Gather, &slots), "slot_out_of_range", &["token 0"]);
}

#[test]
fn c05_a_skipped_prefix_does_not_shift_the_rest() {
    let plan = plan(40);
    let slots: Vec<i64> = (10..50).collect();
    for direction in BOTH {
        let with = |skip| {
            let mut request = request(direction, &plan, &slots);
            request.skip_tokens = skip;
            CopyJob::new(plan.clone(), request)
        };
        let job = with(32).unwrap();
        assert_eq!(runs(&job), [(32, 42, 8)]);
        assert_eq!((job.skip(), job.tokens(), job.bytes()), (32, 40, 8 * 32 * 6));
        assert_eq!(runs(&with(0).unwrap()), [(0, 10, 40)]);
        let all = with(40).unwrap();
        assert!(all.is_empty() && runs(&all).is_empty());
        assert_error(with(41), "invalid_argument", &["skip_tokens is 41", "40"]);
        assert_error(with(u64::MAX), "invalid_argument", &["18446744073709551615"]);
    }
}

#[test]
fn a_slot_written_twice_is_refused() {
    for (slots, parts) in [
        (&[7i64, 7][..], ["slot 7", "token 0", "token 1"]),
        (&[5, 6, 7, 8, 20, 6], ["slot 6", "token 1", "token 5"]),
        (&[20, 3, 4, 5, 2, 3], ["slot 3", "token 1", "token 5"]),
        (&[0, 1, 2, 3, 4, 5, 6, 7, 8, 40, 8, 9], ["slot 8", "token 8", "token 10"]),
    ] {
        assert_error(job(Direction::Scatter, slots), "duplicate_slot", &parts);
        assert!(job(Direction::Gather, slots).is_ok(), "reading twice is fine");
    }
}

#[test]
fn skipped_tokens_write_nothing_and_so_not_twice() {
    assert!(job(Direction::Scatter, &[-1, 3, -1, 4, -1]).is_ok());
    let plan = plan(3);
    let mut request = request(Direction::Scatter, &plan, &[7, 7, 8]);
    request.skip_tokens = 1;
    assert_eq!(runs(&CopyJob::new(plan, request).unwrap()), [(1, 7, 2)]);
}

#[test]
fn duplicates_are_found_in_caches_of_any_size() {
    // Few slots in a huge cache, and many in a small one, are looked at differently.
    for (blocks, slots) in [(1 << 50, 6), (1 << 30, 6), (4, 64), (4, 30)] {
        let layout = PagedLayout::detect(&bf16(&[blocks, 2, 16, 2, 8]), &blocks_of(16)).unwrap();
        let slab = SlabLayout::of_cache(&layout, 2, 3, slots).unwrap();
        let plan = Arc::new(CopyPlan::new(&layout, &slab, bases(&layout)).unwrap());
        let end = blocks * 16;
        // Backwards, so that no two are a run.
        let mut list: Vec<i64> = (0..i64::try_from(slots).unwrap()).map(|i| end - 1 - i).collect();
        assert!(CopyJob::new(plan.clone(), request(Direction::Scatter, &plan, &list)).is_ok());
        let last = list.len() - 1;
        list[last] = list[1];
        let found = CopyJob::new(plan.clone(), request(Direction::Scatter, &plan, &list));
        let parts = [format!("slot {}", end - 2), "token 1 ".into(), format!("token {last}")];
        assert_error(found, "duplicate_slot", &[&parts[0], &parts[1], &parts[2]]);
    }
}

#[test]
fn fewer_slots_need_permission() {
    let plan = plan(8);
    let mut request = request(Direction::Scatter, &plan, &[1, 2, 3]);
    let found = CopyJob::new(plan.clone(), request.clone());
    assert_error(found, "invalid_argument", &["3 slots", "8 tokens", "partial"]);
    request.partial = true;
    let job = CopyJob::new(plan, request).unwrap();
    assert_eq!((job.tokens(), runs(&job)), (3, vec![(0, 1, 3)]));
}

#[test]
fn more_slots_than_tokens_are_refused_with_or_without_permission() {
    let plan = plan(2);
    for partial in [false, true] {
        let mut request = request(Direction::Gather, &plan, &[1, 2, 3]);
        request.partial = partial;
        let found = CopyJob::new(plan.clone(), request);
        assert_error(found, "invalid_argument", &["3 slots", "2 tokens"]);
    }
}

#[test]
fn no_slots_are_no_work() {
    let plan = plan(2);
    for direction in BOTH {
        let mut request = request(direction, &plan, &[]);
        request.partial = true;
        let job = CopyJob::new(plan.clone(), request).unwrap();
        assert!(job.is_empty());
        assert_eq!(job.bytes(), 0);
        let skipped = CopyJob::new(plan.clone(), self::request(direction, &plan, &[-1, -1])).unwrap();
        assert!(skipped.is_empty());
    }
}

#[test]
fn a_layer_range_moves_the_slab_along() {
    let plan = plan(2);
    let layer_bytes = 2 * 32;
    let mut request = request(Direction::Gather, &plan, &[1, 2]);
    request.layers = Some((1, 2));
    let job = CopyJob::new(plan.clone(), request.clone()).unwrap();
    assert_eq!((job.first_layer(), job.layer_count()), (1, 2));
    assert_eq!(job.slab().host, Some(0x100_0000 + layer_bytes));
    assert_eq!(job.slab().device, Some(0x900_0000 + layer_bytes));
    assert_eq!(job.slab().len, plan.slab().bytes() - layer_bytes);
    assert_eq!(job.base(0, 0), 0x14000);
    assert_eq!(job.base(1, 1), 0x18000 + 512);
    assert_eq!((job.base(2, 0), job.base(0, 2)), (0, 0), "planes that are not there");
    assert_eq!(job.bytes(), 2 * 32 * 2 * 2);
    for (first, count) in [(4, 0), (3, 1), (0, 4), (2, 2), (u32::MAX, 1), (1, u32::MAX)] {
        request.layers = Some((first, count));
        let found = CopyJob::new(plan.clone(), request.clone());
        let end = u64::from(first) + u64::from(count);
        assert_error(found, "invalid_argument", &[&format!("{first}..{end}"), "3 layers"]);
    }
}

#[test]
fn no_layers_are_no_work() {
    let plan = plan(2);
    let mut request = request(Direction::Gather, &plan, &[1, 2]);
    for first in [0, 1, 3] {
        request.layers = Some((first, 0));
        let job = CopyJob::new(plan.clone(), request.clone()).unwrap();
        assert!(job.is_empty());
        assert_eq!((job.bytes(), job.layer_count(), job.single_layers().count()), (0, 0, 0));
    }
}

#[test]
fn a_layerwise_object_takes_one_layer() {
    let layout = PagedLayout::detect(&bf16(&[4, 2, 16, 2, 8]), &blocks_of(16)).unwrap();
    let slab = SlabLayout::layer_object(2, 2, 16, DType::Bf16).unwrap();
    let plan = Arc::new(CopyPlan::new(&layout, &slab, bases(&layout)).unwrap());
    let mut request = request(Direction::Scatter, &plan, &[1, 2]);
    assert_error(CopyJob::new(plan.clone(), request.clone()), "layout_mismatch", &["has 3", "has 1"]);
    request.layers = Some((0, 2));
    assert_error(CopyJob::new(plan.clone(), request.clone()), "layout_mismatch", &["has 2", "has 1"]);
    request.layers = Some((2, 1));
    let job = CopyJob::new(plan, request).unwrap();
    assert_eq!(job.slab().host, Some(0x100_0000), "the object begins with its layer");
    assert_eq!(job.base(0, 0), 0x18000);
    assert_eq!(job.bytes(), 2 * 32 * 2);
}

#[test]
fn a_slab_that_is_too_small_is_refused() {
    let plan = plan(2);
    let mut request = request(Direction::Gather, &plan, &[1, 2]);
    request.slab.len -= 1;
    let found = CopyJob::new(plan.clone(), request.clone());
    assert_error(found, "invalid_argument", &["383 bytes", "384"]);
    request.slab.len = 1 << 30;
    assert!(CopyJob::new(plan, request).is_ok(), "a larger one may be used in part");
}

#[test]
fn a_slab_that_wraps_is_refused() {
    let plan = plan(2);
    for device in [false, true] {
        let mut request = request(Direction::Gather, &plan, &[1, 2]);
        let end = Some(u64::MAX - 100);
        if device {
            request.slab.device = end
        } else {
            request.slab.host = end
        }
        assert_error(CopyJob::new(plan.clone(), request), "invalid_argument", &["slab", "address"]);
    }
}

#[test]
fn device_slots_are_bounds_for_the_kernel() {
    let plan = plan(8);
    let mut request = request(Direction::Scatter, &plan, &[]);
    request.slots = SlotMapping::Device { addr: 4096, len: 8 };
    let job = CopyJob::new(plan.clone(), request.clone()).unwrap();
    assert_eq!(job.slots(), &JobSlots::Device { addr: 4096, len: 8 });
    assert!(!job.is_empty());
    assert_eq!(job.bytes(), 8 * 32 * 6);
    request.skip_tokens = 8;
    assert!(CopyJob::new(plan.clone(), request.clone()).unwrap().is_empty());
    request.skip_tokens = 0;
    for (addr, len, part) in [
        (u64::MAX - 63, 8, "address"),
        (4100, 8, "multiple of 8"),
        (0, 8, "not 0"),
        (4096, 9, "9 slots"),
        (4096, 7, "7 slots"),
    ] {
        request.slots = SlotMapping::Device { addr, len };
        assert_error(CopyJob::new(plan.clone(), request.clone()), "invalid_argument", &[part]);
    }
}

#[test]
fn c12_access_width_counts_the_slab_too() {
    let plan = plan(2);
    for (host, device, width) in [(0, 0, 16), (2, 0, 2), (0, 8, 8), (1, 16, 1), (4, 12, 4)] {
        let mut request = request(Direction::Gather, &plan, &[1, 2]);
        request.slab.host = Some(0x100_0000 + host);
        request.slab.device = Some(0x900_0000 + device);
        assert_eq!(CopyJob::new(plan.clone(), request).unwrap().access_bytes(), width);
    }
}

#[test]
fn c16_a_huge_cache_has_64_bit_slots() {
    let layout = PagedLayout::detect(&dense(&[65537, 2, 16, 8, 128], DType::U8), &blocks_of(16)).unwrap();
    let slab = SlabLayout::of_cache(&layout, 2, 1, 2).unwrap();
    let bases = vec![4096, 4096 + layout.plane_offset(1, 0).unwrap()];
    let plan = Arc::new(CopyPlan::new(&layout, &slab, bases).unwrap());
    let job =
        CopyJob::new(plan.clone(), request(Direction::Scatter, &plan, &[65535 * 16, 65536 * 16])).unwrap();
    assert_eq!(runs(&job), [(0, 65535 * 16, 1), (1, 65536 * 16, 1)]);
    let found = CopyJob::new(plan.clone(), request(Direction::Scatter, &plan, &[0, 65537 * 16]));
    assert_error(found, "slot_out_of_range", &["1048592", "1048591"]);
}

#[test]
fn run_is_plain_data() {
    let run = Run { token: 1, slot: 2, len: 3 };
    assert_eq!(run, run.clone());
}

// Plans.

#[test]
fn c19_element_types_must_agree_unless_raw() {
    let layout = PagedLayout::detect(&bf16(&[4, 2, 16, 2, 8]), &blocks_of(16)).unwrap();
    let plan = |dtype: DType, row| {
        let slab = SlabLayout::packed(2, 3, 4, row, dtype).unwrap();
        CopyPlan::new(&layout, &slab, bases(&layout))
    };
    assert_error(plan(DType::F16, 16), "dtype_mismatch", &["bf16", "f16", "raw"]);
    assert_error(plan(DType::U8, 32), "dtype_mismatch", &["bf16", "u8"]);
    assert_error(plan(DType::F32, 8), "dtype_mismatch", &["bf16", "f32"]);
    assert_error(plan(DType::Raw16, 8), "layout_mismatch", &["32", "16"]);
    for (dtype, row) in [(DType::Raw8, 32), (DType::Raw16, 16), (DType::Raw64, 4), (DType::Bf16, 16)] {
        assert!(plan(dtype, row).is_ok(), "{dtype}");
    }
}

#[test]
fn plane_addresses_must_be_whole_layers() {
    let layout = PagedLayout::detect(&bf16(&[4, 2, 16, 2, 8]), &blocks_of(16)).unwrap();
    let slab = SlabLayout::of_cache(&layout, 2, 3, 4).unwrap();
    for n in [0, 1, 3, 5] {
        let found = CopyPlan::new(&layout, &slab, vec![4096; n]);
        assert_error(found, "invalid_argument", &[&n.to_string(), "2 plane(s)"]);
    }
    assert_error(CopyPlan::new(&layout, &slab, vec![4096; 4]), "layout_mismatch", &["layers", "2", "3"]);
    let found = CopyPlan::new(&layout, &slab, vec![u64::MAX - 100; 6]);
    assert_error(found, "invalid_argument", &["plane", "address"]);
}

#[test]
fn a_cache_of_two_planes_needs_a_slab_of_two() {
    let layout = PagedLayout::detect(&bf16(&[4, 2, 16, 2, 8]), &blocks_of(16)).unwrap();
    let slab = SlabLayout::of_cache(&layout, 1, 6, 4).unwrap();
    assert_error(CopyPlan::new(&layout, &slab, bases(&layout)), "layout_mismatch", &["planes", "2", "1"]);
}

#[test]
fn rows_fold_as_far_as_both_sides_are_contiguous() {
    let geometry = |tensor: &maru_layout::TensorDesc, planes, bases: Vec<u64>| {
        let layout = PagedLayout::detect(tensor, &blocks_of(16)).unwrap();
        let slab = SlabLayout::of_cache(&layout, planes, 1, 16).unwrap();
        *CopyPlan::new(&layout, &slab, bases).unwrap().geometry()
    };
    let nhd = geometry(&bf16(&[4, 2, 16, 2, 8]), 2, vec![0, 512]);
    assert_eq!((nhd.rows, nhd.row_bytes, nhd.tokens_adjacent, nhd.linear_slots), (1, 32, true, false));
    let kv_first = geometry(&bf16(&[2, 4, 16, 2, 8]), 2, vec![0, 2048]);
    assert!(kv_first.linear_slots && kv_first.tokens_adjacent);
    assert_eq!(kv_first.slot_stride(), 32);
    let hnd = common::strided(&[4, 2, 16, 2, 8], &[512, 256, 8, 128, 1], DType::Bf16);
    let hnd = geometry(&hnd, 2, vec![0, 512]);
    assert_eq!((hnd.rows, hnd.row_stride, hnd.row_bytes, hnd.tokens_adjacent), (2, 256, 16, false));
    assert_eq!(hnd.token_bytes(), 32);
    let mla = geometry(&bf16(&[4, 16, 24]), 1, vec![0]);
    assert_eq!((mla.rows, mla.row_bytes, mla.kv_planes, mla.access_bytes), (1, 48, 1, 16));
}

#[test]
fn kernel_limits_are_32_bit_counts() {
    let fits = PagedLayout::detect(&bf16(&[1 << 30, 2, 16, 2, 8]), &blocks_of(16)).unwrap();
    assert_eq!(fits.kernel_limits(), Ok(()));
    let spec = maru_layout::CacheSpec { axes: common::axes("block,content"), ..Default::default() };
    let wide = PagedLayout::detect(&dense(&[2, 1 << 32], DType::U8), &spec).unwrap();
    assert_error(wide.kernel_limits(), "not_available", &["row_bytes", "4294967296", "4294967295"]);
    let long = PagedLayout::detect(&dense(&[2, 1 << 32, 4], DType::U8), &blocks_of(1 << 32)).unwrap();
    assert_error(long.kernel_limits(), "not_available", &["block_size", "4294967296"]);
    let slab = SlabLayout::of_cache(&fits, 2, 3, 1 << 32).unwrap();
    let plan = CopyPlan::new(&fits, &slab, bases(&fits)).unwrap();
    assert_error(plan.geometry().kernel_limits(), "not_available", &["slab tokens", "4294967296"]);
    assert_eq!(self::plan(4).geometry().kernel_limits(), Ok(()));
}
