//! Planned commands, carried out by a few lines of Rust, against the oracle.

use std::sync::Arc;

use maru_layout::oracle::Reference;
use maru_layout::{
    Axis, CacheSpec, CopyJob, CopyPlan, DType, Direction, JobRequest, JobSlots, PagedLayout, SlabLayout,
    SlabSpan, SlotMapping, TensorDesc,
};
use proptest::prelude::*;

use super::*;

const CACHE: u64 = 1 << 20;
const SLAB: u64 = 1 << 40;
pub(super) const DRIVER: Limits =
    Limits { max_pitch: i32::MAX as u64, batch: true, slices: true, layers_together: true, inside: false };

pub(super) fn ix(n: u64) -> usize {
    usize::try_from(n).unwrap()
}

/// Tensors of a cache at offsets of one image.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    pub(super) reference: Reference,
    pub(super) layout: PagedLayout,
    bases: Vec<u64>,
    bytes: u64,
}

impl Cache {
    /// `axes` and their lengths; `order` is memory order, outermost first, with elements of padding behind
    /// every step of an axis. `place(i, span)` is the offset of the i-th tensor.
    pub(super) fn new(
        axes: &[(&str, u64)],
        order: &[(usize, u64)],
        dtype: DType,
        layers: u64,
        split: bool,
        place: impl Fn(u64, u64) -> u64,
    ) -> Cache {
        let mut strides = vec![0u64; axes.len()];
        let mut step = 1;
        for &(axis, pad) in order.iter().rev() {
            strides[axis] = step;
            step = step * axes[axis].1 + pad;
        }
        let signed = |n: u64| i64::try_from(n).unwrap();
        let shape: Vec<i64> = axes.iter().map(|a| signed(a.1)).collect();
        let steps: Vec<i64> = strides.iter().map(|s| signed(*s)).collect();
        let tensor = TensorDesc::strided(&shape, &steps, dtype).unwrap();
        let names: Vec<&str> = axes.iter().map(|a| a.0).collect();
        let axes = Axis::parse_list(&names.join(",")).unwrap();
        let has = |axis| axes.contains(&axis);
        let slot_block = has(Axis::Slot).then_some(4);
        let spec = CacheSpec {
            axes: Some(axes.clone()),
            split_kv: split,
            block_size: slot_block,
            ..Default::default()
        };
        let layout = PagedLayout::detect(&tensor, &spec).unwrap();
        let planes = if has(Axis::Kv) || has(Axis::KvDim) || split { 2 } else { 1 };
        let count = if has(Axis::Layer) {
            1
        } else if split {
            2 * layers
        } else {
            layers
        };
        let tensors: Vec<u64> = (0..count).map(|i| place(i, tensor.span_bytes())).collect();
        let bytes = tensors.iter().max().unwrap() + tensor.span_bytes();
        let mut bases = Vec::new();
        for kv in 0..planes {
            for l in 0..layers {
                let of = if has(Axis::Layer) {
                    0
                } else if split {
                    kv * layers + l
                } else {
                    l
                };
                let inside = layout.plane_offset(
                    if layout.kv_planes() == 2 { kv } else { 0 },
                    if has(Axis::Layer) { l } else { 0 },
                );
                bases.push(CACHE + tensors[ix(of)] + inside.unwrap());
            }
        }
        let reference = Reference { tensor, axes, block_size: layout.block_size(), planes, layers, tensors };
        Cache { reference, layout, bases, bytes }
    }

    pub(super) fn job(&self, direction: Direction, slab: &SlabLayout, slots: &[i64], skip: u64) -> CopyJob {
        let plan = Arc::new(CopyPlan::new(&self.layout, slab, self.bases.clone()).unwrap());
        let request = JobRequest {
            direction,
            slab: SlabSpan { host: Some(SLAB), device: None, len: slab.bytes() },
            slots: SlotMapping::from_slots(slots),
            skip_tokens: skip,
            partial: true,
            layers: None,
        };
        CopyJob::new(plan, request).unwrap()
    }
}

/// All commands of a job, unit by unit.
pub(super) fn planned(job: &CopyJob, limits: Limits) -> Vec<(Unit, Vec<Command>)> {
    let JobSlots::Host { runs, .. } = job.slots() else { panic!("host slots") };
    let packed = Packed::of(job, job.slab().host.unwrap());
    let plan = Plan::new(Work::new(job, packed, runs, 0, job.layer_count().into()), limits);
    let commands = |unit: &Unit| {
        let mut all = Vec::new();
        let Ok(()) = plan.commands(*unit, |c| {
            all.push(c);
            Ok::<(), std::convert::Infallible>(())
        });
        (*unit, all)
    };
    let units: Vec<_> = plan.units().iter().map(commands).collect();
    let covered: Vec<usize> = units.iter().flat_map(|(u, _)| u.first..u.first + u.count).collect();
    assert_eq!(covered, (0..ix(job.layer_count().into())).collect::<Vec<_>>(), "layers in order, each once");
    assert!(runs.is_empty() || plan.cost() > 0);
    units
}

/// What a driver asks of a command.
pub(super) fn assert_allowed(c: &Command, limits: Limits) {
    assert!(c.width > 0 && c.rows > 0 && c.slices > 0, "{c:?}");
    assert!(c.slices == 1 || limits.slices, "{c:?}");
    for (pitch, height) in [(c.paged_pitch, c.paged_height), (c.slab_pitch, c.slab_height)] {
        match (c.rows, c.slices) {
            (1, 1) => assert_eq!(pitch, 0, "{c:?}"),
            _ => assert!((c.width..=limits.max_pitch).contains(&pitch), "{c:?}"),
        }
        match c.slices {
            1 => assert_eq!(height, 0, "{c:?}"),
            _ => assert!(height >= c.rows, "{c:?}"),
        }
    }
}

/// Carries commands out, checks what a driver would refuse, and returns the bytes moved.
fn carry_out(
    commands: &[Command],
    direction: Direction,
    limits: Limits,
    cache: &mut [u8],
    slab: &mut [u8],
) -> u64 {
    let mut moved = 0;
    for c in commands {
        assert_allowed(c, limits);
        for row in c.all_rows() {
            let (paged, packed, n) = (ix(row.paged - CACHE), ix(row.slab - SLAB), ix(c.width));
            match direction {
                Direction::Gather => slab[packed..packed + n].copy_from_slice(&cache[paged..paged + n]),
                Direction::Scatter => cache[paged..paged + n].copy_from_slice(&slab[packed..packed + n]),
            }
        }
        moved += c.bytes();
    }
    moved
}

fn noise(n: u64, seed: u64) -> Vec<u8> {
    let mut x = seed | 1;
    (0..n)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x.to_le_bytes()[3]
        })
        .collect()
}

/// Both directions against the oracle, every byte of both memories, pads and gaps included.
fn check(cache: &Cache, slab: &SlabLayout, slots: &[i64], skip: u64, limits: Limits) {
    let r = &cache.reference;
    let tokens = slab.tokens();
    let packed_bytes = r.planes * r.layers * tokens * r.row_bytes();
    let [kv, layer, token] = slab.strides();
    // (position in the strided slab, position in the packed one), byte by byte.
    let mut places = Vec::new();
    for (k, l, t) in
        (0..r.planes).flat_map(|k| (0..r.layers).flat_map(move |l| (0..tokens).map(move |t| (k, l, t))))
    {
        let from = ((k * r.layers + l) * tokens + t) * r.row_bytes();
        let to = k * kv + l * layer + t * token;
        places.extend((0..r.row_bytes()).map(|i| (ix(to + i), ix(from + i))));
    }
    for direction in [Direction::Gather, Direction::Scatter] {
        let (mut paged, mut image) = (noise(cache.bytes, 7), noise(slab.bytes(), 11));
        let (mut paged_after, mut image_after) = (paged.clone(), image.clone());
        let mut packed = vec![0; ix(packed_bytes)];
        places.iter().for_each(|&(to, from)| packed[from] = image[to]);
        let written = r.copy(direction, &mut paged_after, &mut packed, tokens, slots, skip);
        places.iter().for_each(|&(to, from)| image_after[to] = packed[from]);
        let job = cache.job(direction, slab, slots, skip);
        let commands: Vec<Command> = planned(&job, limits).into_iter().flat_map(|(_, c)| c).collect();
        let moved = carry_out(&commands, direction, limits, &mut paged, &mut image);
        // As many bytes as there are, and every one of them right: none is moved twice.
        assert_eq!(moved, written, "{direction:?}");
        assert!(paged == paged_after, "{direction:?}: the cache differs");
        assert!(image == image_after, "{direction:?}: the slab differs");
    }
}

const SHAPES: [(&str, bool); 9] = [
    ("block,kv,token,head,dim", false),
    ("kv,block,token,head,dim", false),
    ("block,head,token,kv_dim", false),
    ("block,token,head,dim", false),
    ("block,token,head,dim", true),
    ("slot,head,dim", true),
    ("block,layer,kv,token,head,dim", false),
    ("block,token,dim", false),
    ("kv,block,token,heads_dim", false),
];

#[derive(Clone, Copy, Debug)]
enum Spacing {
    Even,
    Descending,
    Uneven,
}

prop_compose! {
    fn caches()(
        shape in 0..SHAPES.len(),
        lengths in (1u64..4, 1u64..6, 2u64..5, 1u64..4, 1u64..6),
        keys in prop::collection::vec(any::<u32>(), 6),
        pads in prop::collection::vec(0u64..5, 6),
        padded in any::<bool>(),
        wide in any::<bool>(),
        spacing in prop_oneof![
            Just(Spacing::Even), Just(Spacing::Descending), Just(Spacing::Uneven)
        ],
    ) -> Cache {
        let (names, split) = SHAPES[shape];
        let (layers, blocks, block_size, heads, width) = lengths;
        let axes: Vec<(&str, u64)> = names.split(',').map(|name| (name, match name {
            "block" => blocks,
            "kv" => 2,
            "token" => block_size,
            "head" => heads,
            "layer" => layers,
            "slot" => blocks * 4,
            "kv_dim" => 2 * width,
            "heads_dim" => heads * width,
            _ => width,
        })).collect();
        // Any order of memory, except that what lies together stays together.
        let mut order: Vec<usize> = (0..axes.len() - 1).collect();
        order.sort_by_key(|i| keys[*i]);
        if axes[axes.len() - 2].0 == "head" && names.starts_with("slot") {
            order = (0..axes.len() - 1).collect();
        }
        order.push(axes.len() - 1);
        let order: Vec<(usize, u64)> =
            order.into_iter().enumerate().map(|(at, axis)| (axis, if padded && at > 0 { pads[at] } else { 0 })).collect();
        let dtype = if wide { DType::Bf16 } else { DType::U8 };
        let count = if split { 2 * layers } else { layers };
        let gap = pads[0];
        Cache::new(&axes, &order, dtype, layers, split, move |i, span| match spacing {
            Spacing::Even => i * (span + gap),
            Spacing::Descending => (count - 1 - i) * (span + gap),
            Spacing::Uneven => i * span + (i * i * 7) % 23 + i * 23,
        })
    }
}

/// Runs in random order, some tokens skipped.
fn slots(num_slots: u64, run: u64, seed: u64, holes: bool) -> Vec<i64> {
    let all: Vec<i64> = (0..i64::try_from(num_slots).unwrap()).collect();
    let mut runs: Vec<Vec<i64>> = all.chunks(ix(run)).map(<[i64]>::to_vec).collect();
    let random = noise(num_slots * 8, seed);
    runs.sort_by_key(|r| random[ix(r[0].unsigned_abs())]);
    let mut slots = runs.concat();
    if holes {
        slots.iter_mut().step_by(5).for_each(|s| *s = -1);
    }
    slots
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn any_cache_any_slots(
        cache in caches(),
        run in 1u64..9,
        seed in any::<u64>(),
        holes in any::<bool>(),
        (skip, spare) in (0u64..4, 0u64..4),
        (batch, slices, layers_together, inside) in (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
        max_pitch in prop_oneof![Just(i32::MAX as u64), 1u64..400],
        slab_kind in 0..4,
    ) {
        let slots = slots(cache.layout.num_slots(), run, seed, holes);
        let tokens = slots.len() as u64 + spare;
        let r = &cache.reference;
        let row = r.row_bytes();
        let dtype = cache.layout.dtype();
        let e = dtype.size();
        let counts = [r.planes, r.layers, tokens];
        // Packed; padded; tokens outermost; layers outermost.
        let strides = match slab_kind {
            0 => [tokens * row * r.layers, tokens * row, row],
            1 => [(tokens * (row + e) + e) * r.layers, tokens * (row + e) + e, row + e],
            2 => [row, row * r.planes, row * r.planes * r.layers],
            _ => [tokens * row, tokens * row * r.planes, row],
        };
        let slab = SlabLayout::strided(counts, row, strides, dtype).unwrap();
        check(&cache, &slab, &slots, skip.min(slots.len() as u64), Limits { max_pitch, batch, slices, layers_together, inside });
    }
}
