use std::sync::Arc;

use maru_layout::{
    CopyPlan, DType, Direction, JobRequest, PagedLayout, RowKind, SlabLayout, SlabSpan, SlotMapping,
    StridedSpec,
};
use proptest::prelude::*;

use super::*;

/// K and V of one layer, two heads of 64 in two bytes: rows of 256 bytes.
pub(crate) fn spec(block_size: u64, num_blocks: u64) -> StridedSpec {
    StridedSpec {
        dtype: DType::Bf16,
        row_kind: RowKind::Plain,
        kv_planes: 2,
        kv_stride: 1 << 12,
        layers: 1,
        layer_stride: 0,
        num_blocks,
        block_size,
        num_heads: 2,
        head_size: 64,
        block_stride: 1 << 16,
        token_stride: 256,
        head_stride: 128,
    }
}

fn job(tokens: u64, slots: SlotMapping, skip: u64, device: Option<u64>) -> CopyJob {
    job_of(Direction::Gather, tokens, slots, skip, device)
}

fn job_of(direction: Direction, tokens: u64, slots: SlotMapping, skip: u64, device: Option<u64>) -> CopyJob {
    let paged = PagedLayout::from_strides(&spec(16, 100_000)).unwrap();
    let slab = SlabLayout::of_cache(&paged, 2, 3, tokens).unwrap();
    let bases: Vec<u64> = (0..6).map(|i| 0x1000_0000 * (i + 1)).collect();
    let plan = Arc::new(CopyPlan::new(&paged, &slab, bases).unwrap());
    let len = plan.slab().bytes();
    let slab = SlabSpan { host: None, device, len };
    let request = JobRequest { direction, slab, slots, skip_tokens: skip, partial: true, layers: None };
    CopyJob::new(plan, request).unwrap()
}

fn launches(job: &CopyJob, source: SlotSource, limits: Limits) -> Vec<Launch> {
    let addresses = Addresses { planes: 0x9000, error: 0x7000 };
    Launches::new(job, source, addresses, limits).unwrap().collect()
}

fn host(n: i64) -> SlotMapping {
    SlotMapping::from_slots((0..n).collect::<Vec<_>>())
}

#[test]
fn an_ordinary_slab_is_one_launch() {
    let job = job(256, host(256), 0, Some(0x5000));
    let got = launches(&job, SlotSource::Inline, Limits::blocks(4));
    assert_eq!(got.len(), 1);
    let Launch { entry, blocks, threads, args, .. } = got[0];
    assert_eq!(entry.name(), c"maru_gather_16_inline");
    assert_eq!((blocks, threads), (4, 1024));
    assert_eq!((args.token_units, args.row_units, args.tokens, args.layers), (16, 16, 256, 3));
    assert_eq!(args.units, 2 * 3 * 256 * 16);
    assert_eq!((args.planes, args.slab, args.slots, args.error), (0x9000, 0x5000, 0, 0));
}

#[test]
fn a_small_copy_takes_no_more_blocks_than_it_has_work_for() {
    let job = job(1, host(1), 0, Some(0x5000));
    let got = launches(&job, SlotSource::Inline, Limits::blocks(4));
    assert_eq!((got[0].args.units, got[0].blocks, got[0].threads), (96, 1, 96));
}

#[test]
fn empty_work_is_no_launch() {
    for (slots, skip) in [(host(0), 0), (host(8), 8), (SlotMapping::Device { addr: 0x800, len: 4 }, 4)] {
        let job = job(8, slots, skip, Some(0x5000));
        assert_eq!(launches(&job, SlotSource::Device { addr: 0x800 }, Limits::blocks(4)), []);
    }
    let skipped = job(8, SlotMapping::from_slots(vec![-1i64; 8]), 0, Some(0x5000));
    assert_eq!(launches(&skipped, SlotSource::Inline, Limits::blocks(4)), []);
}

#[test]
fn inline_slots_split_long_lists_and_skip_shifts_nothing() {
    let job = job(600, host(600), 10, Some(0x5000));
    let got = launches(&job, SlotSource::Inline, Limits::blocks(4));
    let windows: Vec<_> = got.iter().map(|l| (l.first_token, l.args.tokens)).collect();
    assert_eq!(windows, [(10, 256), (266, 256), (522, 78)]);
    for launch in &got {
        assert_eq!(launch.args.slab, 0x5000 + launch.first_token * 256);
    }
    let uploaded = launches(&job, SlotSource::Uploaded { capacity: 512 }, Limits::blocks(4));
    let windows: Vec<_> = uploaded.iter().map(|l| (l.first_token, l.args.tokens)).collect();
    assert_eq!(windows, [(10, 512), (522, 78)]);
}

#[test]
fn work_beyond_the_limit_is_split_by_tokens_then_layers() {
    let slots = SlotMapping::Device { addr: 0x800, len: 20 };
    let job = job(20, slots, 2, Some(0x5000));
    let source = SlotSource::Device { addr: 0x800 };
    // One token of one layer is 2 * 16 accesses; 100 allow 3 layers of 1 token.
    let got = launches(&job, source, Limits { units: 100, ..Limits::blocks(4) });
    assert_eq!(got.len(), 18);
    for (i, launch) in (0u64..).zip(&got) {
        assert_eq!((launch.first_token, launch.args.layers, launch.args.units), (2 + i, 3, 96));
        assert_eq!((launch.args.slots, launch.args.earlier), (0x800 + 8 * (2 + i), i));
        assert_eq!(launch.args.error, 0x7000);
    }
    // 64 allow 2 layers: two launches a token, of which the first reports.
    let got = launches(&job, source, Limits { units: 64, ..Limits::blocks(4) });
    assert_eq!(got.len(), 36);
    assert_eq!((got[0].args.layers, got[0].args.error, got[0].args.planes), (2, 0x7000, 0x9000));
    assert_eq!((got[1].args.layers, got[1].args.error, got[1].args.planes), (1, 0, 0x9010));
    assert_eq!(got[1].args.slab - got[0].args.slab, 2 * 20 * 256);
    let addresses = Addresses { planes: 0x9000, error: 0 };
    let limits = Limits { units: 31, ..Limits::blocks(4) };
    let error = Launches::new(&job, source, addresses, limits).unwrap_err();
    assert_eq!(error, KernelError::TokenTooLarge { units: 16, limit: 31 });
}

#[test]
fn what_no_kernel_may_touch_is_refused() {
    let addresses = Addresses { planes: 0x9000, error: 0 };
    let unregistered = job(8, host(8), 0, None);
    let error = Launches::new(&unregistered, SlotSource::Inline, addresses, Limits::blocks(4)).unwrap_err();
    assert_eq!((error.kind(), error), ("not_available", KernelError::SlabNotAddressable));
}

#[test]
fn the_kernels_counter_cannot_wrap() {
    let reach = u64::from(MAX_UNITS) + 8 * u64::from(MAX_BLOCKS) * u64::from(MAX_THREADS);
    assert!(reach < 1 << 31);
}

#[test]
fn divisions_are_exact_at_their_edges() {
    for d in [1u32, 2, 3, 5, 7, 16, 255, 256, 257, 641, 65_535, 65_537, (1 << 30) - 1, 1 << 30, (1 << 31) - 1]
    {
        let near = [0u64, 1, 2].into_iter().flat_map(|k| {
            let multiple = u64::from(d) * ((u64::from(u32::MAX) / 2) / u64::from(d));
            [k, u64::from(d) - 1 + k, multiple.saturating_sub(k), (1 << 31) - 1 - k]
        });
        for n in near.filter(|n| *n < 1 << 31) {
            let n = u32::try_from(n).unwrap();
            assert_eq!(quotient(n, d), n / d, "{n} / {d}");
        }
    }
}

#[allow(clippy::cast_possible_truncation, reason = "mirrors the kernel's 32-bit multiply-high")]
fn quotient(n: u32, d: u32) -> u32 {
    let (magic, shift) = division(d);
    ((u64::from(n << 1) * u64::from(magic)) >> 32) as u32 >> shift
}

#[allow(clippy::cast_possible_truncation, reason = "mirrors the kernel's 64-bit multiply-high")]
fn wide_quotient(n: u64, d: u64) -> u64 {
    let (magic, shift) = wide_division(d);
    ((u128::from(n << 1) * u128::from(magic)) >> 64) as u64 >> shift
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn division_by_multiplication_is_division(n in 0u32..1 << 31, d in 1u32..=1 << 31, s in 0u32..31) {
        let d = (d >> s).max(1);
        prop_assert_eq!(quotient(n, d), n / d);
    }

    #[test]
    fn wide_division_by_multiplication_is_division(n in 0u64..1 << 63, d in 1u64..=1 << 63, s in 0u32..63) {
        let d = (d >> s).max(1);
        prop_assert_eq!(wide_quotient(n, d), n / d);
        let edge = (n / d) * d;
        prop_assert_eq!(wide_quotient(edge, d), edge / d);
        prop_assert_eq!(wide_quotient(edge.saturating_sub(1), d), edge.saturating_sub(1) / d);
    }
}

#[test]
fn by_layer_one_slab_of_few_tokens_passes_its_slots_by_value() {
    let load = |tokens: u64, skip| {
        let slots = host(i64::try_from(tokens).unwrap());
        job_of(Direction::Scatter, tokens, slots, skip, Some(0x5000))
    };
    let plan = |jobs: &[CopyJob]| LayersLaunch::new(jobs, 0x9000, Limits::blocks(4), 1).unwrap();
    for (tokens, skip, inline) in [(1, 0, true), (256, 0, true), (257, 0, false), (300, 44, true)] {
        let jobs = [load(tokens, skip)];
        let launch = plan(&jobs);
        assert_eq!((launch.is_inline(), launch.runs), (inline, 3), "{tokens} tokens, {skip} skipped");
        let args = launch.inline_args(0x7000, launch.batch.slots(&jobs[0]));
        let moved = i64::from(launch.batch.tokens);
        if inline {
            let first = i64::try_from(skip).unwrap();
            assert_eq!(
                args.slab.slots[..launch.batch.tokens as usize],
                (first..first + moved).collect::<Vec<_>>()
            );
            assert_eq!(args.slab.copy.slab, launch.batch.args.slabs[0].slab);
            assert_eq!((args.runs.words, args.runs.count, args.runs.pair), (0x7000, 3, 1));
        }
    }
    assert!(
        !plan(&[
            load(1, 0),
            job_of(Direction::Scatter, 1, SlotMapping::from_slots(vec![5]), 0, Some(0x9000))
        ])
        .is_inline()
    );
}
