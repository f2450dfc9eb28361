//! Random strides: any order of the axes, any padding between them, any base alignment.

use libtest_mimic::Failed;
use maru_kernel_cuda::geometry::Limits;
use maru_kernel_host::{Options, run};
use maru_layout::{
    CopyJob, CopyPlan, DType, Direction, JobRequest, PagedLayout, RowKind, SlabLayout, SlabSpan, SlotMapping,
    StridedSpec,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::cases::{Rng, compare, random_slots};
use crate::memory::Guarded;
use crate::text;

/// A cache and slab by numbers only.
#[derive(Clone, Debug)]
struct Input {
    dtype: DType,
    planes: u64,
    layers: u64,
    blocks: u64,
    block_size: u64,
    heads: u64,
    head_size: u64,
    /// Order of block, token, head from the innermost, and padding in elements after each.
    order: [usize; 3],
    pads: [u64; 3],
    slab_order: [usize; 3],
    slab_pads: [u64; 3],
    tokens: u64,
    skip: u64,
    hole: usize,
    shifts: [usize; 2],
    inline: bool,
    units: u32,
    blocks_budget: u32,
    descending: bool,
    layer_range: (u32, u32),
    scatter: bool,
    seed: u64,
}

fn input() -> impl Strategy<Value = Input> {
    let dtype = prop::sample::select(vec![DType::U8, DType::Bf16, DType::F32, DType::Raw64]);
    let orders = || Just([0usize, 1, 2]).prop_shuffle();
    let pads = || prop::array::uniform3(prop_oneof![3 => Just(0u64), 1 => 1u64..9, 1 => Just(16u64)]);
    let size = prop_oneof![Just(1u64), Just(8u64), Just(16u64), 1u64..40];
    let cache = (dtype, 1u64..=2, 1u64..4, 1u64..7, 1u64..9, 1u64..6, size);
    let strides = (orders(), pads(), orders(), pads());
    let run = (0usize..6, prop::array::uniform2(0usize..32), any::<bool>(), 200u32..4000, 1u32..5);
    let rest = (any::<bool>(), any::<bool>(), any::<u64>());
    (cache, strides, run, rest).prop_map(|(c, s, r, x)| {
        let mut rng = Rng::new(x.2);
        let tokens = 1 + rng.below(c.3 * c.4 + 4);
        let first = rng.below(c.2);
        let count = 1 + rng.below(c.2 - first);
        let small = |n: u64| u32::try_from(n).unwrap();
        Input {
            dtype: c.0,
            planes: c.1,
            layers: c.2,
            blocks: c.3,
            block_size: c.4,
            heads: c.5,
            head_size: c.6,
            order: s.0,
            pads: s.1,
            slab_order: s.2,
            slab_pads: s.3,
            tokens,
            skip: rng.below(3).min(tokens),
            hole: r.0,
            shifts: r.1,
            inline: r.2,
            // A token of a layer must fit: 2 planes * 5 heads * 40 elements * 8 bytes, one byte at a time.
            units: r.3.max(small(c.1 * c.5 * c.6 * c.0.size())),
            blocks_budget: r.4,
            descending: x.0,
            layer_range: (small(first), small(count)),
            scatter: x.1,
            seed: x.2,
        }
    })
}

pub(crate) fn random_strides() -> Result<(), Failed> {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(3000);
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    runner.run(&input(), |input| check(&input).map_err(TestCaseError::fail)).map_err(text)
}

/// Strides for `lens` laid out in `order` (innermost first) over rows of `row`, with padding.
fn strides(lens: [u64; 3], order: [usize; 3], pads: [u64; 3], row: u64) -> [u64; 3] {
    let mut out = [0; 3];
    let mut step = row;
    for axis in order {
        step += pads[axis];
        out[axis] = step;
        step *= lens[axis];
    }
    out
}

fn check(input: &Input) -> Result<(), String> {
    let element = input.dtype.size();
    let lens = [input.blocks, input.block_size, input.heads];
    let [block, token, head] = strides(lens, input.order, input.pads, input.head_size).map(|s| s * element);
    let spec = StridedSpec {
        dtype: input.dtype,
        row_kind: RowKind::Plain,
        kv_planes: 1,
        kv_stride: 0,
        layers: 1,
        layer_stride: 0,
        num_blocks: input.blocks,
        block_size: input.block_size,
        num_heads: input.heads,
        head_size: input.head_size,
        block_stride: block,
        token_stride: token,
        head_stride: head,
    };
    let paged = PagedLayout::from_strides(&spec).map_err(|e| e.to_string())?;
    let row = input.heads * input.head_size;
    let counts = [input.planes, input.layers, input.tokens];
    let slab_strides = strides(counts, input.slab_order, input.slab_pads, row).map(|s| s * element);
    let slab =
        SlabLayout::strided(counts, row * element, slab_strides, input.dtype).map_err(|e| e.to_string())?;

    let mut rng = Rng::new(input.seed);
    let planes = input.planes * input.layers;
    let pitch = paged.plane_bytes() + rng.below(3) * element;
    let at = |n: u64| usize::try_from(n).unwrap();
    let cache_bytes = rng.bytes(at(planes * pitch));
    let slab_bytes = rng.bytes(at(slab.bytes()));
    let mut cache_memory = Guarded::new(&cache_bytes, input.shifts[0]);
    let mut slab_memory = Guarded::new(&slab_bytes, input.shifts[1]);
    let base = cache_memory.addr();
    // Planes in descending order, so that no table of even steps would do.
    let bases: Vec<u64> = (0..planes).map(|p| base + (planes - 1 - p) * pitch).collect();
    let plan = CopyPlan::new(&paged, &slab, bases.clone()).map_err(|e| e.to_string())?;

    let slots = random_slots(&mut rng, paged.num_slots(), at(input.tokens), input.hole);
    let skip = input.skip.min(slots.len() as u64);
    let direction = if input.scatter { Direction::Scatter } else { Direction::Gather };
    let (mut cache_after, mut slab_after) = (cache_bytes, slab_bytes);
    naive(
        input,
        &slots,
        skip,
        &bases.iter().map(|b| b - base).collect::<Vec<_>>(),
        [block, token, head],
        slab.strides(),
        &mut cache_after,
        &mut slab_after,
    );

    let mapping = match input.inline {
        true => SlotMapping::from_slots(slots.as_slice()),
        false => SlotMapping::Device { addr: slots.as_ptr() as u64, len: slots.len() as u64 },
    };
    let span = SlabSpan { host: None, device: Some(slab_memory.addr()), len: slab.bytes() };
    let layers = (input.layers != 1 || input.seed.is_multiple_of(2)).then_some(input.layer_range);
    let request =
        JobRequest { direction, slab: span, slots: mapping, skip_tokens: skip, partial: true, layers };
    let job = CopyJob::new(plan.into(), request).map_err(|e| e.to_string())?;
    let limits = Limits { units: input.units, ..Limits::blocks(input.blocks_budget) };
    let options = Options { limits, upload: None, descending: input.descending };
    // SAFETY: cache, slab and slots are this function's memory, as large as the plan says.
    let ran = unsafe { run(&job, options) }.map_err(|e| e.to_string())?;
    compare("cache", &cache_memory.check("cache")?, &cache_after)?;
    compare("slab", &slab_memory.check("slab")?, &slab_after)?;
    match (ran.misaligned, ran.error.raised) {
        (0, 0) => Ok(()),
        _ => Err(format!("{ran:?} at width {}", job.access_bytes())),
    }
}

/// The address formula of the documentation, byte by byte.
#[allow(clippy::too_many_arguments, reason = "plain numbers")]
fn naive(
    input: &Input,
    slots: &[i64],
    skip: u64,
    bases: &[u64],
    [block, token, head]: [u64; 3],
    [slab_kv, slab_layer, slab_token]: [u64; 3],
    cache: &mut [u8],
    slab: &mut [u8],
) {
    let head_bytes = input.head_size * input.dtype.size();
    let at = |n: u64| usize::try_from(n).unwrap();
    let (first, count) = input.layer_range;
    for kv in 0..input.planes {
        for l in u64::from(first)..u64::from(first + count) {
            for (t, slot) in (0u64..).zip(slots) {
                let Ok(s) = u64::try_from(*slot) else { continue };
                if t < skip {
                    continue;
                }
                for n in 0..input.heads {
                    for byte in 0..head_bytes {
                        let paged = bases[at(kv * input.layers + l)]
                            + (s / input.block_size) * block
                            + (s % input.block_size) * token
                            + n * head
                            + byte;
                        let packed = kv * slab_kv + l * slab_layer + t * slab_token + n * head_bytes + byte;
                        match input.scatter {
                            true => cache[at(paged)] = slab[at(packed)],
                            false => slab[at(packed)] = cache[at(paged)],
                        }
                    }
                }
            }
        }
    }
}
