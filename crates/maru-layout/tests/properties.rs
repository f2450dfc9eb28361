//! Random caches and slots: movers written here from the documented geometry equal the oracle, and nothing
//! that anyone can type makes a panic.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use std::sync::Arc;

use maru_layout::oracle::Reference;
use maru_layout::{
    Axis, CacheSpec, CopyJob, CopyPlan, DType, Direction, JobRequest, JobSlots, PagedLayout, SlabLayout,
    SlabSpan, SlotMapping, TensorDesc,
};
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// A cache as a test registers it, with the memory it needs.
#[derive(Clone, Debug)]
struct Cache {
    reference: Reference,
    spec: CacheSpec,
    bytes: u64,
    /// Address of the memory's first byte; odd ones too.
    base: u64,
}

/// Which axes a tensor has besides the innermost one, which are tensors of their own, and the innermost.
const KINDS: [(&[Axis], &[Axis], Axis); 9] = [
    (&[Axis::Block, Axis::Token, Axis::Head, Axis::Kv], &[Axis::Layer], Axis::Dim),
    (&[Axis::Block, Axis::Token, Axis::Head], &[Axis::Layer], Axis::KvDim),
    (&[Axis::Block, Axis::Token, Axis::Head], &[Axis::Layer, Axis::Kv], Axis::Dim),
    (&[Axis::Slot, Axis::Head], &[Axis::Layer, Axis::Kv], Axis::Dim),
    (&[Axis::Block, Axis::Token, Axis::Head, Axis::Kv, Axis::Layer], &[], Axis::Dim),
    (&[Axis::Block, Axis::Token, Axis::Kv], &[Axis::Layer], Axis::HeadsDim),
    (&[Axis::Block, Axis::Token], &[Axis::Layer], Axis::Dim),
    (&[Axis::Block, Axis::Token, Axis::Head], &[Axis::Layer], Axis::Content),
    (&[Axis::Block], &[Axis::Layer], Axis::Content),
];

fn caches() -> impl Strategy<Value = Cache> {
    let order = || Just([0usize, 1, 2, 3, 4]).prop_shuffle();
    let sizes = (1u64..5, 1u64..6, 1u64..4, 1u64..9, 1u64..4, select(&DType::ALL[..]));
    let pads = prop::array::uniform5(prop_oneof![3 => Just(0u64), 1 => 1u64..6]);
    let base = prop_oneof![Just(0u64), 0u64..16].prop_map(|b| 0x1000 + b);
    (select(&KINDS[..]), sizes, order(), order(), pads, base, any::<Index>()).prop_map(build)
}

type Parts = (
    (&'static [Axis], &'static [Axis], Axis),
    (u64, u64, u64, u64, u64, DType),
    [usize; 5],
    [usize; 5],
    [u64; 5],
    u64,
    Index,
);

fn build((kind, sizes, memory, shown, pads, base, inner_at): Parts) -> Cache {
    let (inside, outside, inner) = kind;
    let (nb, bs, nh, hs, layers, dtype) = sizes;
    let opaque_blocks = inside == [Axis::Block];
    let width = match inner {
        Axis::KvDim => 2 * hs,
        Axis::HeadsDim => nh * hs,
        _ => hs,
    };
    let len = |axis: &Axis| match axis {
        Axis::Block => nb,
        Axis::Token => bs,
        Axis::Slot => nb * bs,
        Axis::Head => nh,
        Axis::Kv => 2,
        Axis::Layer => layers,
        _ => width,
    };
    // Memory order: any, from the innermost outward, with pads.
    let all: Vec<Axis> = inside.iter().chain(outside).copied().collect();
    let mut step = width;
    let mut strides = Vec::new();
    for i in memory.into_iter().filter(|i| *i < all.len()) {
        strides.push((all[i], step));
        step = step * len(&all[i]) + pads[i];
    }
    let stride = |axis: Axis| strides.iter().find(|s| s.0 == axis).map_or(1, |s| s.1);
    // Shape order: any; opaque blocks come first.
    let mut axes: Vec<Axis> = shown.into_iter().filter(|i| *i < inside.len()).map(|i| inside[i]).collect();
    axes.insert(if opaque_blocks { 1 } else { inner_at.index(axes.len() + 1) }, inner);
    let signed = |n: u64| i64::try_from(n).unwrap();
    let shape: Vec<i64> = axes.iter().map(|a| signed(len(a))).collect();
    let shown_strides: Vec<i64> =
        axes.iter().map(|a| if *a == inner { 1 } else { signed(stride(*a)) }).collect();
    let tensor = TensorDesc::strided(&shape, &shown_strides, dtype).unwrap();
    let planes = if all.contains(&Axis::Kv) || inner == Axis::KvDim { 2 } else { 1 };
    let lists = if outside.contains(&Axis::Kv) { 2 } else { 1 };
    let apart = if outside.contains(&Axis::Layer) { layers } else { 1 };
    let at = |kv, l| base + (kv * stride(Axis::Kv) + l * stride(Axis::Layer)) * dtype.size();
    let tensors = (0..lists).flat_map(|kv| (0..apart).map(move |l| (kv, l))).map(|(kv, l)| at(kv, l));
    let spec = CacheSpec {
        block_size: (!opaque_blocks).then_some(bs),
        num_kv_heads: (inner == Axis::HeadsDim).then_some(nh),
        split_kv: outside.contains(&Axis::Kv),
        axes: Some(axes.clone()),
        ..CacheSpec::default()
    };
    let tensors = tensors.collect();
    let reference = Reference { tensor, axes, block_size: bs, planes, layers, tensors };
    Cache { reference, spec, bytes: step * dtype.size(), base }
}

impl Cache {
    fn layout(&self) -> PagedLayout {
        PagedLayout::detect(&self.reference.tensor, &self.spec).unwrap()
    }

    fn plan(&self, tokens: u64) -> Arc<CopyPlan> {
        let (layout, r) = (self.layout(), &self.reference);
        let slab = SlabLayout::of_cache(&layout, r.planes, r.layers, tokens).unwrap();
        let mut bases = Vec::new();
        for kv in 0..r.planes {
            for l in 0..r.layers {
                let (inside, list) = if layout.kv_planes() == 2 { (kv, 0) } else { (0, kv) };
                let layer = if r.axes.contains(&Axis::Layer) { l } else { 0 };
                let apart = if r.axes.contains(&Axis::Layer) { 0 } else { list * r.layers + l };
                bases.push(r.tensors[apart as usize] + layout.plane_offset(inside, layer).unwrap());
            }
        }
        Arc::new(CopyPlan::new(&layout, &slab, bases).unwrap())
    }

    /// The memory from address 0 on, so that addresses index it; nothing before `base` is the cache's.
    fn memory(&self, seed: u64) -> Vec<u8> {
        noise(self.base + self.bytes + 64, seed)
    }
}

fn noise(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|i| maru_layout::oracle::pattern(seed, 1, i, 2, 3)).collect()
}

/// What is moved: distinct slots in any order, with skips and holes.
#[derive(Clone, Debug)]
struct Wanted {
    slots: Vec<i64>,
    skip: u64,
    slab_tokens: u64,
    /// Address of the slab, for its alignment.
    slab_at: u64,
}

fn wanted(num_slots: u64) -> impl Strategy<Value = Wanted> {
    let all: Vec<i64> = (0..i64::try_from(num_slots).unwrap()).collect();
    let shuffled = prop_oneof![Just(all.clone()).prop_shuffle(), Just(all)];
    (shuffled, any::<Index>(), prop::collection::vec(any::<Index>(), 0..4), any::<Index>(), 0u64..3, 0u64..17)
        .prop_map(|(mut slots, keep, holes, skip, spare, slab_at)| {
            slots.truncate(keep.index(slots.len() + 1));
            for hole in holes {
                slots.insert(hole.index(slots.len() + 1), -1);
            }
            let skip = skip.index(slots.len() + 1) as u64;
            let slab_tokens = (slots.len() as u64 + spare).max(1);
            Wanted { slots, skip, slab_tokens, slab_at }
        })
}

fn transfers() -> impl Strategy<Value = (Cache, Wanted)> {
    caches().prop_flat_map(|cache| {
        let slots = cache.layout().num_slots();
        (Just(cache), wanted(slots))
    })
}

fn request(plan: &CopyPlan, wanted: &Wanted, direction: Direction) -> JobRequest {
    JobRequest {
        direction,
        slab: SlabSpan { host: Some(wanted.slab_at), device: None, len: plan.slab().bytes() },
        slots: SlotMapping::from_slots(wanted.slots.clone()),
        skip_tokens: wanted.skip,
        partial: true,
        layers: None,
    }
}

/// `(paged address, slab address, bytes)` of every row, by the formula of [`maru_layout::Geometry`].
fn rows(job: &CopyJob) -> Vec<(u64, u64, u64)> {
    let g = job.plan().geometry();
    let JobSlots::Host { slots, .. } = job.slots() else { panic!("host slots") };
    let slab = job.slab().host.unwrap();
    let mut rows = Vec::new();
    for kv in 0..g.kv_planes {
        for l in 0..u64::from(job.layer_count()) {
            for (t, &s) in slots.iter().enumerate().skip(job.skip() as usize) {
                let Ok(s) = u64::try_from(s) else { continue };
                for r in 0..g.rows {
                    let paged = job.base(kv, l)
                        + s / g.block_size * g.block_stride
                        + s % g.block_size * g.token_stride
                        + r * g.row_stride;
                    let packed = slab
                        + kv * g.slab_kv_stride
                        + l * g.slab_layer_stride
                        + t as u64 * g.slab_token_stride
                        + r * g.row_bytes;
                    rows.push((paged, packed, g.row_bytes));
                }
            }
        }
    }
    rows
}

/// The same bytes by runs: tokens that lie together on both sides are one piece, up to the block's end, or
/// across blocks where slots are evenly spaced.
fn pieces(job: &CopyJob) -> Vec<(u64, u64, u64)> {
    let g = job.plan().geometry();
    let JobSlots::Host { runs, .. } = job.slots() else { panic!("host slots") };
    let slab = job.slab().host.unwrap();
    let mut out = Vec::new();
    for kv in 0..g.kv_planes {
        for l in 0..u64::from(job.layer_count()) {
            let (base, slab) = (job.base(kv, l), slab + kv * g.slab_kv_stride + l * g.slab_layer_stride);
            for run in runs.iter() {
                let mut done = 0;
                while done < run.len {
                    let (s, t) = (run.slot + done, run.token + done);
                    let at = match g.linear_slots {
                        true => s * g.slot_stride(),
                        false => s / g.block_size * g.block_stride + s % g.block_size * g.token_stride,
                    };
                    let n = match g.tokens_adjacent {
                        true => (g.block_size - s % g.block_size).min(run.len - done),
                        false => 1,
                    };
                    for r in 0..g.rows {
                        let packed = slab + t * g.slab_token_stride + r * g.row_bytes;
                        out.push((base + at + r * g.row_stride, packed, n * g.row_bytes));
                    }
                    done += n;
                }
            }
        }
    }
    out
}

/// Carries out pieces; the slab begins at `slab_at`.
fn carry(
    direction: Direction,
    list: &[(u64, u64, u64)],
    cache: &mut [u8],
    slab: &mut [u8],
    slab_at: u64,
) -> u64 {
    let mut moved = 0;
    for &(paged, packed, n) in list {
        let (p, q, n) = (paged as usize, (packed - slab_at) as usize, n as usize);
        match direction {
            Direction::Gather => slab[q..q + n].copy_from_slice(&cache[p..p + n]),
            Direction::Scatter => cache[p..p + n].copy_from_slice(&slab[q..q + n]),
        }
        moved += n as u64;
    }
    moved
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_movers_equal_the_oracle((cache, wanted) in transfers(), scatter in any::<bool>()) {
        let direction = if scatter { Direction::Scatter } else { Direction::Gather };
        let plan = cache.plan(wanted.slab_tokens);
        let job = CopyJob::new(plan.clone(), request(&plan, &wanted, direction)).unwrap();
        let (memory, slab) = (cache.memory(1), noise(plan.slab().bytes() + 32, 2));
        let (mut cache_o, mut slab_o) = (memory.clone(), slab.clone());
        let written = cache.reference.copy(
            direction, &mut cache_o, &mut slab_o, wanted.slab_tokens, &wanted.slots, wanted.skip,
        );
        prop_assert_eq!(written, job.bytes());
        for list in [rows(&job), pieces(&job)] {
            let (mut cache_m, mut slab_m) = (memory.clone(), slab.clone());
            let moved = carry(direction, &list, &mut cache_m, &mut slab_m, wanted.slab_at);
            prop_assert_eq!(moved, job.bytes());
            prop_assert!(cache_m == cache_o && slab_m == slab_o);
        }
        prop_assert_eq!(job.is_empty(), written == 0);
    }

    #[test]
    fn gather_then_scatter_into_other_slots_is_the_identity((cache, wanted) in transfers()) {
        let plan = cache.plan(wanted.slab_tokens);
        let job = |slots: &[i64], direction| {
            let wanted = Wanted { slots: slots.to_vec(), ..wanted.clone() };
            CopyJob::new(plan.clone(), request(&plan, &wanted, direction)).unwrap()
        };
        let num_slots = i64::try_from(plan.geometry().num_slots).unwrap();
        let elsewhere: Vec<i64> =
            wanted.slots.iter().map(|s| if *s < 0 { -1 } else { (s + 1) % num_slots }).collect();
        let mut memory = cache.memory(1);
        let mut first = noise(plan.slab().bytes(), 2);
        let store = rows(&job(&wanted.slots, Direction::Gather));
        carry(Direction::Gather, &store, &mut memory, &mut first, wanted.slab_at);
        let mut other = noise(memory.len() as u64, 7);
        let load = rows(&job(&elsewhere, Direction::Scatter));
        carry(Direction::Scatter, &load, &mut other, &mut first, wanted.slab_at);
        let mut second = noise(plan.slab().bytes(), 2);
        let again = rows(&job(&elsewhere, Direction::Gather));
        carry(Direction::Gather, &again, &mut other, &mut second, wanted.slab_at);
        prop_assert!(first == second);
    }

    #[test]
    fn nothing_but_the_addressed_bytes_changes((cache, wanted) in transfers()) {
        let plan = cache.plan(wanted.slab_tokens);
        let job = CopyJob::new(plan.clone(), request(&plan, &wanted, Direction::Scatter)).unwrap();
        let before = cache.memory(1);
        // Every byte of the slab differs from the cache's at its place, so that each write shows.
        let mut slab = vec![0u8; plan.slab().bytes() as usize];
        carry(Direction::Gather, &rows(&job), &mut before.clone(), &mut slab, wanted.slab_at);
        slab.iter_mut().for_each(|b| *b = !*b);
        let mut after = before.clone();
        carry(Direction::Scatter, &rows(&job), &mut after, &mut slab, wanted.slab_at);
        let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count();
        prop_assert_eq!(changed as u64, job.bytes(), "each byte of the job once, and no other");
        prop_assert!(after[..cache.base as usize] == before[..cache.base as usize]);
        let end = (cache.base + cache.bytes) as usize;
        prop_assert!(after[end..] == before[end..]);
    }

    #[test]
    fn the_access_width_divides_every_address((cache, wanted) in transfers()) {
        let plan = cache.plan(wanted.slab_tokens);
        let job = CopyJob::new(plan.clone(), request(&plan, &wanted, Direction::Gather)).unwrap();
        let width = job.access_bytes();
        prop_assert!(width.is_power_of_two() && width <= 16);
        for (paged, packed, n) in rows(&job).into_iter().chain(pieces(&job)) {
            prop_assert!((paged | packed | n).is_multiple_of(width));
        }
        let layout = cache.layout();
        prop_assert!(cache.reference.tensors.iter().all(|t| t % layout.access_bytes(*t) == 0));
    }

    #[test]
    fn every_address_is_inside_its_plane((cache, wanted) in transfers()) {
        let plan = cache.plan(wanted.slab_tokens);
        let job = CopyJob::new(plan.clone(), request(&plan, &wanted, Direction::Gather)).unwrap();
        let inside = |paged: u64, n: u64| {
            plan.bases().iter().any(|b| paged >= *b && paged + n <= b + plan.plane_bytes())
        };
        for (paged, packed, n) in pieces(&job) {
            prop_assert!(inside(paged, n));
            prop_assert!(paged >= cache.base && paged + n <= cache.base + cache.bytes);
            prop_assert!(packed >= wanted.slab_at && packed + n <= wanted.slab_at + plan.slab().bytes());
        }
    }

    #[test]
    fn runs_are_the_slots((cache, wanted) in transfers()) {
        let plan = cache.plan(wanted.slab_tokens);
        let job = CopyJob::new(plan.clone(), request(&plan, &wanted, Direction::Gather)).unwrap();
        let JobSlots::Host { runs, slots } = job.slots() else { panic!("host slots") };
        let mut rebuilt = vec![-1i64; slots.len()];
        for run in runs.iter() {
            for i in 0..run.len {
                rebuilt[(run.token + i) as usize] = (run.slot + i) as i64;
            }
        }
        let skip = wanted.skip as usize;
        prop_assert_eq!(&rebuilt[skip..], &wanted.slots[skip..]);
        prop_assert!(rebuilt[..skip].iter().all(|s| *s == -1));
        let joined = |w: &[maru_layout::Run]| {
            w[0].token + w[0].len == w[1].token && w[0].slot + w[0].len == w[1].slot
        };
        prop_assert!(!runs.windows(2).any(joined), "runs are as long as they can be");
    }

    #[test]
    fn a_slot_out_of_range_is_always_refused(
        (cache, wanted) in transfers(), at in any::<Index>(), scatter in any::<bool>(), bad in any::<i64>(),
    ) {
        let plan = cache.plan(wanted.slab_tokens + 1);
        let end = plan.geometry().num_slots as i64;
        let bad = if (-1..end).contains(&bad) { end } else { bad };
        let mut wanted = wanted;
        wanted.slots.insert(at.index(wanted.slots.len() + 1), bad);
        let direction = if scatter { Direction::Scatter } else { Direction::Gather };
        let error = CopyJob::new(plan.clone(), request(&plan, &wanted, direction)).unwrap_err();
        prop_assert_eq!(error.kind(), "slot_out_of_range");
        prop_assert!(error.to_string().contains(&bad.to_string()));
    }

    #[test]
    fn a_slot_named_twice_is_refused_by_scatter_only(
        (cache, wanted) in transfers(), from in any::<Index>(), at in any::<Index>(),
    ) {
        let plan = cache.plan(wanted.slab_tokens + 1);
        let mut wanted = Wanted { skip: 0, ..wanted };
        if wanted.slots.iter().all(|s| *s < 0) {
            wanted.slots = vec![0];
        }
        let used: Vec<i64> = wanted.slots.iter().copied().filter(|s| *s >= 0).collect();
        let twice = used[from.index(used.len())];
        wanted.slots.insert(at.index(wanted.slots.len() + 1), twice);
        let error = CopyJob::new(plan.clone(), request(&plan, &wanted, Direction::Scatter)).unwrap_err();
        let places: Vec<u64> = (0..).zip(&wanted.slots).filter(|(_, s)| **s == twice).map(|p| p.0).collect();
        let expect =
            maru_layout::LayoutError::DuplicateSlot { slot: twice as u64, first: places[0], second: places[1] };
        prop_assert_eq!(error, expect);
        prop_assert!(CopyJob::new(plan.clone(), request(&plan, &wanted, Direction::Gather)).is_ok());
    }

    #[test]
    fn blocks_and_slots_agree(
        blocks in prop::collection::vec(0i64..1000, 0..8), size in 1u64..20, a in any::<Index>(), b in any::<Index>(),
    ) {
        let room = blocks.len() as u64 * size;
        let (a, b) = (a.index(room as usize + 1) as u64, b.index(room as usize + 1) as u64);
        let slots = SlotMapping::from_blocks(&blocks, size, a.min(b)..a.max(b)).unwrap();
        let expect: Vec<i64> = (a.min(b)..a.max(b))
            .map(|t| blocks[(t / size) as usize] * size as i64 + (t % size) as i64)
            .collect();
        prop_assert_eq!(slots, SlotMapping::from_slots(expect));
    }
}

/// Any number, small ones and edges more often than others.
fn numbers() -> impl Strategy<Value = i64> {
    let edges = [0, -1, i64::MIN, i64::MAX, 1 << 31, 1 << 32, (1 << 62) + 1, i64::MAX / 2];
    prop_oneof![4 => 1i64..20, 1 => select(edges.to_vec()), 1 => any::<i64>()]
}

fn facts() -> impl Strategy<Value = Option<u64>> {
    let some = prop_oneof![4 => 0u64..20, 1 => any::<u64>(), 1 => Just(u64::MAX)];
    prop::option::of(some)
}

fn specs() -> impl Strategy<Value = CacheSpec> {
    let axes = prop::option::weighted(0.4, prop::collection::vec(select(Axis::ALL.to_vec()), 0..9));
    (facts(), facts(), facts(), facts(), facts(), any::<bool>(), any::<bool>(), axes).prop_map(
        |(block_size, num_kv_heads, head_size, backend_head_size, num_blocks, mla, split_kv, axes)| {
            CacheSpec {
                block_size,
                num_kv_heads,
                head_size,
                backend_head_size,
                num_blocks,
                mla,
                split_kv,
                axes,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn words_never_panic(text in ".{0,40}") {
        let _ = Axis::parse_list(&text);
        let _ = text.parse::<DType>();
        let _ = text.parse::<Axis>();
        let _ = maru_layout::EngineFormat::from_name(&text);
    }

    #[test]
    fn tensors_and_detection_never_panic(
        shape in prop::collection::vec(numbers(), 0..10),
        strides in prop::collection::vec(numbers(), 0..10),
        dtype in select(DType::ALL.to_vec()),
        spec in specs(),
    ) {
        let n = shape.len();
        let same: Vec<i64> = strides.iter().copied().cycle().take(if strides.is_empty() { 0 } else { n }).collect();
        for tensor in [
            TensorDesc::contiguous(&shape, dtype),
            TensorDesc::strided(&shape, &strides, dtype),
            TensorDesc::strided(&shape, &same, dtype),
        ]
        .into_iter()
        .flatten()
        {
            match PagedLayout::detect(&tensor, &spec) {
                Ok(layout) => {
                    prop_assert!(layout.span_bytes() <= tensor.span_bytes(), "reads beyond the tensor");
                    let _ = (layout.kernel_limits(), layout.access_bytes(1), layout.byte_strides());
                    let _ = SlabLayout::of_cache(&layout, layout.kv_planes(), layout.layers(), 256);
                }
                Err(e) => prop_assert!(!e.to_string().is_empty() && !e.kind().is_empty()),
            }
        }
    }

    #[test]
    fn slots_and_slabs_never_panic(
        blocks in prop::collection::vec(any::<i64>(), 0..4),
        size in prop_oneof![0u64..9, Just(u64::MAX), Just(1 << 62)],
        start in 0u64..20, end in prop_oneof![0u64..20, Just(u64::MAX)],
        counts in prop::array::uniform3(prop_oneof![0u64..4, any::<u64>()]),
        row in prop_oneof![0u64..64, any::<u64>()],
        strides in prop::array::uniform3(prop_oneof![0u64..512, any::<u64>()]),
        dtype in select(DType::ALL.to_vec()),
    ) {
        let _ = SlotMapping::from_blocks(&blocks, size, start..end);
        let [planes, layers, tokens] = counts;
        if let Ok(slab) = SlabLayout::strided(counts, row, strides, dtype) {
            let _ = slab.fingerprint();
        }
        let _ = SlabLayout::packed(planes, layers, tokens, row, dtype);
        let _ = SlabLayout::token_major(planes, tokens, row, dtype);
    }

    #[test]
    fn jobs_never_panic(
        slots in prop::collection::vec(numbers(), 0..20),
        skip in prop_oneof![0u64..20, any::<u64>()],
        first in prop_oneof![0u32..4, any::<u32>()], count in prop_oneof![0u32..4, any::<u32>()],
        host in prop::option::of(any::<u64>()), len in prop_oneof![0u64..4096, any::<u64>()],
        device_slots in prop::option::of((any::<u64>(), any::<u64>())),
        scatter in any::<bool>(),
    ) {
        let tensor = common::bf16(&[1 << 20, 2, 16, 2, 8]);
        let layout = PagedLayout::detect(&tensor, &common::blocks_of(16)).unwrap();
        let slab = SlabLayout::of_cache(&layout, 2, 3, 20).unwrap();
        let plan = Arc::new(CopyPlan::new(&layout, &slab, vec![4096; 6]).unwrap());
        let request = JobRequest {
            direction: if scatter { Direction::Scatter } else { Direction::Gather },
            slab: SlabSpan { host, device: host, len },
            slots: match device_slots {
                Some((addr, len)) => SlotMapping::Device { addr, len },
                None => SlotMapping::from_slots(slots),
            },
            skip_tokens: skip,
            partial: true,
            layers: Some((first, count)),
        };
        if let Ok(job) = CopyJob::new(plan, request) {
            let _ = (job.bytes(), job.is_empty(), job.access_bytes(), job.base(1, 2));
        }
    }
}
