//! Plans and jobs at the edges of 64 bits.

use std::sync::Arc;

use maru::layout::{
    CopyJob, CopyPlan, JobRequest, JobSlots, PagedLayout, RowKind, SlabLayout, SlabSpan, StridedSpec,
};
use maru::{DType, Direction, SlotMapping};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;

use super::common::{accept, edge, worded};

/// What a mover could be asked for.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) spec: StridedSpec,
    pub(crate) base: u64,
    pub(crate) layers: u64,
    pub(crate) slab: ([u64; 3], [u64; 3], DType, bool),
    pub(crate) span: SlabSpan,
    pub(crate) slots: SlotMapping,
    pub(crate) skip: u64,
    pub(crate) partial: bool,
    pub(crate) range: Option<(u32, u32)>,
    pub(crate) direction: Direction,
}

fn count() -> impl Strategy<Value = u64> {
    prop_oneof![60 => 1u64..6, 6 => 1u64..70, 1 => edge().prop_map(i64::unsigned_abs)]
}

/// Geometries, slabs, slots, skips and layers.
pub(crate) fn inputs() -> impl Strategy<Value = Job> {
    let dtype = || select(&DType::ALL[..]);
    let number = || edge().prop_map(i64::unsigned_abs);
    let geometry = (
        count(),
        count(),
        count(),
        count(),
        count(),
        prop::array::uniform5(number()),
        prop::bool::weighted(0.9),
        0u64..4,
    );
    let slots = prop_oneof![
        3 => prop::collection::vec(prop_oneof![40 => -1i64..16, 1 => edge()], 0..40).prop_map(SlotMapping::from_slots),
        3 => Just((-3i64..12).map(|s| s.max(-1)).collect::<Vec<_>>()).prop_shuffle().prop_flat_map(|all| {
            (0..all.len()).prop_map(move |n| SlotMapping::from_slots(all[..n].to_vec()))
        }),
        2 => (-1i64..8, 0i64..24).prop_map(|(s, n)| SlotMapping::from_slots((s..s + n).collect::<Vec<_>>())),
        1 => (number(), number()).prop_map(|(addr, len)| SlotMapping::Device { addr, len }),
    ];
    let address = || prop_oneof![1 => Just(None), 1 => number().prop_map(Some), 6 => (0u64..9).prop_map(|n| Some((1 << 20) + n))];
    let span = (address(), address(), prop_oneof![9 => Just(1u64 << 40), 1 => number()]);
    let tokens = prop_oneof![9 => 8u64..64, 1 => number()];
    let slab = (
        (tokens, number(), number()).prop_map(|(t, a, b)| [t, a, b]),
        prop::array::uniform3(number()),
        dtype(),
        prop::bool::weighted(0.8),
    );
    let range = prop_oneof![
        9 => Just(None),
        4 => (0u32..3, 0u32..3).prop_map(Some),
        1 => any::<(u32, u32)>().prop_map(Some)
    ];
    let base = prop_oneof![12 => 0x1000u64..0x1010, 1 => any::<u64>()];
    let skip = prop_oneof![12 => 0u64..4, 1 => any::<u64>()];
    let rest = (skip, prop::bool::weighted(0.9), range, any::<bool>());
    (geometry, dtype(), base, slab, span, slots, rest).prop_map(
        |(g, dtype, base, slab, span, slots, (skip, partial, range, gather))| {
            let (num_blocks, block_size, num_heads, head_size, layers, free, dense, pad) = g;
            let [block_stride, token_stride, head_stride, kv_stride, layer_stride] = free;
            let mut spec = StridedSpec {
                dtype,
                row_kind: RowKind::Plain,
                kv_planes: 1 + pad % 2,
                kv_stride,
                layers: 1,
                layer_stride,
                num_blocks,
                block_size,
                num_heads,
                head_size,
                block_stride,
                token_stride,
                head_stride,
            };
            if dense {
                pack(&mut spec, pad);
            }
            let direction = if gather { Direction::Gather } else { Direction::Scatter };
            let span = SlabSpan { host: span.0, device: span.1, len: span.2 };
            Job { spec, base, layers, slab, span, slots, skip, partial, range, direction }
        },
    )
}

/// Strides that fit the counts, with some bytes between tokens and between blocks.
pub(crate) fn pack(spec: &mut StridedSpec, pad: u64) {
    spec.head_stride = spec.head_size.wrapping_mul(spec.dtype.size());
    spec.token_stride = spec.head_stride.wrapping_mul(spec.num_heads).wrapping_add(pad);
    spec.block_stride = spec.token_stride.wrapping_mul(spec.block_size).wrapping_add(pad);
    spec.kv_stride = spec.block_stride.wrapping_mul(spec.num_blocks);
}

/// A job that is made stays inside its planes and its slab, whatever was asked.
pub(crate) fn check(input: Job) -> TestCaseResult {
    let layout = match PagedLayout::from_strides(&input.spec) {
        Ok(layout) => layout,
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    let planes = layout.kv_planes();
    let layers = input.layers.min(8);
    let ([tokens, a, b], strides, dtype, packed) = input.slab;
    let slab = match packed {
        true => SlabLayout::of_cache(&layout, planes, layers, tokens.min(1 << 20)),
        false => SlabLayout::strided([1 + a % 2, 1 + b % 8, tokens], layout.token_bytes(), strides, dtype),
    };
    let slab = match slab {
        Ok(slab) => slab,
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    let step = layout.span_bytes();
    let bases: Vec<u64> =
        (0..planes * layers).map(|i| input.base.wrapping_add(i.wrapping_mul(step))).collect();
    let plan = match CopyPlan::new(&layout, &slab, bases.clone()) {
        Ok(plan) => Arc::new(plan),
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    let request = JobRequest {
        direction: input.direction,
        slab: input.span,
        slots: input.slots.clone(),
        skip_tokens: input.skip,
        partial: input.partial,
        layers: input.range,
    };
    let job = match CopyJob::new(plan, request) {
        Ok(job) => job,
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    accept();
    let g = *job.plan().geometry();
    let wide = |n: u64| u128::from(n);
    prop_assert!(u64::from(job.first_layer()) + u64::from(job.layer_count()) <= g.layers);
    prop_assert!(job.skip() <= job.tokens() && job.tokens() <= g.slab_tokens);
    // The last byte of the slab that any mover computes.
    if job.layer_count() > 0 {
        let last = wide(g.kv_planes - 1) * wide(g.slab_kv_stride)
            + wide(u64::from(job.layer_count()) - 1) * wide(g.slab_layer_stride)
            + wide(g.slab_tokens - 1) * wide(g.slab_token_stride)
            + wide(g.token_bytes());
        prop_assert!(last <= wide(job.slab().len), "{} of {}", last, job.slab().len);
        for (addr, given) in [(job.slab().host, input.span.host), (job.slab().device, input.span.device)] {
            prop_assert_eq!(addr.is_some(), given.is_some());
            if let (Some(addr), Some(given)) = (addr, given) {
                prop_assert!(addr >= given && wide(addr) + last <= wide(given) + wide(input.span.len));
            }
        }
    }
    if let JobSlots::Host { slots, runs } = job.slots() {
        let mut named = Vec::new();
        for run in runs.iter() {
            prop_assert!(run.token >= job.skip() && run.token + run.len <= job.tokens());
            prop_assert!(run.len > 0 && run.slot + run.len <= g.num_slots);
            for i in 0..run.len {
                prop_assert_eq!(slots[(run.token + i) as usize], (run.slot + i) as i64);
            }
            named.extend(run.slot..run.slot + run.len);
            let last = run.slot + run.len - 1;
            let at = wide(last / g.block_size) * wide(g.block_stride)
                + wide(last % g.block_size) * wide(g.token_stride)
                + wide(g.rows - 1) * wide(g.row_stride)
                + wide(g.row_bytes);
            prop_assert!(at <= wide(job.plan().plane_bytes()));
        }
        let wanted = slots.iter().skip(job.skip() as usize).filter(|s| **s != -1).count();
        prop_assert_eq!(named.len(), wanted);
        if input.direction == Direction::Scatter {
            named.sort_unstable();
            prop_assert!(named.windows(2).all(|w| w[0] != w[1]), "a slot is written twice");
        }
    }
    for kv in 0..g.kv_planes {
        for l in 0..u64::from(job.layer_count()) {
            let base = job.base(kv, l);
            prop_assert_eq!(base, bases[(kv * g.layers + u64::from(job.first_layer()) + l) as usize]);
            prop_assert!(base.is_multiple_of(job.access_bytes()));
        }
    }
    prop_assert_eq!(job.single_layers().count(), job.layer_count() as usize);
    let _ = (job.bytes(), job.is_empty(), g.kernel_limits());
    Ok(())
}
