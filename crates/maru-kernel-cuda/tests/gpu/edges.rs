//! Cases that broke others, on the device.

use libtest_mimic::Failed;
use maru_kernel_cuda::{KernelError, LaunchOptions};
use maru_layout::{
    CopyJob, CopyPlan, DType, Direction, JobRequest, PagedLayout, RowKind, SlabLayout, SlabSpan, SlotMapping,
    StridedSpec,
};

use crate::cases::{Cache, Dims, Images, ORDERS, Rng, compare, random_slots};
use crate::gpu::{Device, Gpu, Pinned, Stream};
use crate::harness::{Body, text};
use crate::layouts::{Case, Source};

pub(crate) const BOTH: [Direction; 2] = [Direction::Gather, Direction::Scatter];

pub(crate) const TRIALS: [(&str, Body); 10] = [
    ("bad_device_slots_are_skipped_and_the_first_is_reported", bad_slots),
    ("a_bad_slot_among_70_000", late_bad_slot),
    ("skip_moves_nothing_before_it_and_does_not_shift", skip),
    ("rows_of_92_bytes_and_a_slab_two_bytes_off", odd_rows),
    ("one_head_is_one_head", one_head),
    ("heads_128", many_heads),
    ("seventy_thousand_slots", seventy_thousand),
    ("nothing_to_do_touches_nothing_and_the_next_launch_works", empty),
    ("block_65536_of_a_2_gib_plane", beyond_two_gib),
    ("wide_block_strides_past_4_gib", beyond_four_gib),
];

pub(crate) fn small(order: &str) -> Cache {
    let dims =
        Dims { layers: 2, blocks: 4, block_size: 16, heads: 2, head_size: 8, dtype: DType::Bf16, pad: 0 };
    Cache::new(ORDERS.iter().find(|o| o.name == order).unwrap(), dims).unwrap()
}

fn good(slots: &[i64], num_slots: i64) -> Vec<i64> {
    slots.iter().map(|s| if (0..num_slots).contains(s) { *s } else { -1 }).collect()
}

fn bad_slots(gpu: &Gpu) -> Result<(), Failed> {
    type Expected = Option<(u64, i64)>;
    let cache = small("blocks_first_nhd");
    let lists: [(&[i64], Expected); 7] = [
        (&[5, -1, 63], None),
        (&[64], Some((0, 64))),
        (&[-2], Some((0, -2))),
        (&[(1 << 40) + 17], Some((0, (1 << 40) + 17))),
        (&[3, i64::MIN, 64, 5], Some((1, i64::MIN))),
        (&[3, 4, i64::MAX, -2], Some((2, i64::MAX))),
        (&[-1, 9, 10, 1 << 32], Some((3, 1 << 32))),
    ];
    for direction in BOTH {
        for (slots, expected) in lists {
            let images = Images::new(&cache, direction, 4, &good(slots, 64), 0, &mut Rng::new(1));
            let mut case = Case::new(&cache, direction, 4, slots);
            case.source = Source::Device;
            let (_, outcome) = case.check(&gpu.kernel, &images)?;
            let wanted = expected.map_or(Ok(()), |(token, slot)| {
                Err(KernelError::SlotOutOfRange { token, slot, num_slots: 64 })
            });
            if outcome != wanted {
                return Err(format!("{slots:?}: {outcome:?}, expected {wanted:?}").into());
            }
        }
    }
    Ok(())
}

fn long_cache() -> Result<Cache, Failed> {
    let dims =
        Dims { layers: 2, blocks: 4400, block_size: 16, heads: 1, head_size: 8, dtype: DType::U8, pad: 0 };
    Cache::new(&ORDERS[0], dims).map_err(text)
}

fn late_bad_slot(gpu: &Gpu) -> Result<(), Failed> {
    let cache = long_cache()?;
    let mut slots = random_slots(&mut Rng::new(2), 70_400, 70_000, 0);
    // Everything from 60,000 on is bad: the search for earlier ones must stop at the first.
    slots[60_000..].iter_mut().for_each(|slot| *slot += 70_400);
    let first = (60_000, slots[60_000]);
    for direction in BOTH {
        let images = Images::new(&cache, direction, 70_000, &good(&slots, 70_400), 0, &mut Rng::new(3));
        let mut case = Case::new(&cache, direction, 70_000, &slots);
        case.source = Source::Device;
        let (_, outcome) = case.check(&gpu.kernel, &images)?;
        let (token, slot) = first;
        if outcome != Err(KernelError::SlotOutOfRange { token, slot, num_slots: 70_400 }) {
            return Err(format!("{outcome:?}").into());
        }
    }
    Ok(())
}

fn skip(gpu: &Gpu) -> Result<(), Failed> {
    let cache = small("blocks_first_nhd");
    let slots: Vec<i64> = (0..64).rev().collect();
    for direction in BOTH {
        for skip in [1, 32, 63, 64] {
            for source in [Source::Host, Source::Device] {
                let images = Images::new(&cache, direction, 64, &slots, skip, &mut Rng::new(4));
                let mut case = Case::new(&cache, direction, 64, &slots);
                (case.skip, case.source) = (skip, source);
                case.check(&gpu.kernel, &images)?.1.map_err(text)?;
            }
        }
    }
    Ok(())
}

fn odd_rows(gpu: &Gpu) -> Result<(), Failed> {
    for (head_size, shifts, expected) in [(46, [0, 0], 4), (64, [0, 2], 2), (64, [2, 0], 2), (23, [0, 0], 2)]
    {
        let dims =
            Dims { layers: 2, blocks: 4, block_size: 16, heads: 1, head_size, dtype: DType::Bf16, pad: 0 };
        let order = ORDERS.iter().find(|o| o.name == "kv_first_nhd").unwrap();
        let cache = Cache::new(order, dims).map_err(text)?;
        for direction in BOTH {
            let slots = [0, 1, 2, 3, 63];
            let images = Images::new(&cache, direction, 5, &slots, 0, &mut Rng::new(5));
            let mut case = Case::new(&cache, direction, 5, &slots);
            case.shifts = shifts;
            let (width, outcome) = case.check(&gpu.kernel, &images)?;
            outcome.map_err(text)?;
            if width != expected {
                return Err(format!("head {head_size}, {shifts:?}: width {width}").into());
            }
        }
    }
    Ok(())
}

fn heads(gpu: &Gpu, orders: &[&str], dims: Dims, tokens: u64) -> Result<(), Failed> {
    for name in orders {
        let order = ORDERS.iter().find(|o| o.name == *name).unwrap();
        let cache = Cache::new(order, dims).map_err(text)?;
        let n = usize::try_from(tokens).unwrap();
        let slots = random_slots(&mut Rng::new(6), cache.layout.num_slots(), n, 7);
        for direction in BOTH {
            let images = Images::new(&cache, direction, tokens, &slots, 0, &mut Rng::new(7));
            Case::new(&cache, direction, tokens, &slots).check(&gpu.kernel, &images)?.1.map_err(text)?;
        }
    }
    Ok(())
}

fn one_head(gpu: &Gpu) -> Result<(), Failed> {
    let dims =
        Dims { layers: 1, blocks: 3, block_size: 128, heads: 1, head_size: 128, dtype: DType::Bf16, pad: 0 };
    heads(gpu, &["blocks_first_nhd", "blocks_first_hnd", "heads_before_tokens", "fused_lbhnc"], dims, 300)
}

fn many_heads(gpu: &Gpu) -> Result<(), Failed> {
    let dims =
        Dims { layers: 1, blocks: 4, block_size: 16, heads: 128, head_size: 128, dtype: DType::Bf16, pad: 0 };
    heads(gpu, &["blocks_first_nhd", "blocks_first_hnd"], dims, 50)
}

fn seventy_thousand(gpu: &Gpu) -> Result<(), Failed> {
    let cache = long_cache()?;
    let slots = random_slots(&mut Rng::new(8), 70_400, 70_000, 0);
    for direction in BOTH {
        let images = Images::new(&cache, direction, 70_000, &slots, 0, &mut Rng::new(9));
        for source in [Source::Host, Source::Device] {
            let mut case = Case::new(&cache, direction, 70_000, &slots);
            case.source = source;
            case.check(&gpu.kernel, &images)?.1.map_err(text)?;
        }
    }
    Ok(())
}

fn empty(gpu: &Gpu) -> Result<(), Failed> {
    let cache = small("blocks_first_nhd");
    for direction in BOTH {
        for slots in [&[][..], &[-1, -1, -1], &[1, 2]] {
            for source in [Source::Host, Source::Device] {
                let images = Images::new(&cache, direction, 4, slots, 0, &mut Rng::new(10));
                let mut case = Case::new(&cache, direction, 4, slots);
                case.source = source;
                case.check(&gpu.kernel, &images)?.1.map_err(text)?;
            }
        }
    }
    Ok(())
}

/// Moves single tokens of a large cache and compares each with its address worked out here; block 0 holds a
/// pattern that must stay.
fn far_blocks(
    gpu: &Gpu,
    blocks: u64,
    block_stride: u64,
    block_size: u64,
    wanted: &[u64],
) -> Result<(), Failed> {
    let row = 1024u64;
    let at = |n: u64| usize::try_from(n).unwrap();
    let memory = Device::new(at(blocks * block_stride));
    let spec = StridedSpec {
        dtype: DType::U8,
        row_kind: RowKind::Plain,
        kv_planes: 1,
        kv_stride: 0,
        layers: 1,
        layer_stride: 0,
        num_blocks: blocks,
        block_size,
        num_heads: 8,
        head_size: 128,
        block_stride,
        token_stride: row,
        head_stride: 128,
    };
    let paged = PagedLayout::from_strides(&spec).map_err(text)?;
    let tokens = wanted.len() as u64;
    let slab = SlabLayout::of_cache(&paged, 1, 1, tokens).map_err(text)?;
    let plan = std::sync::Arc::new(CopyPlan::new(&paged, &slab, vec![memory.addr]).map_err(text)?);
    let planes = gpu.kernel.register(&plan).map_err(text)?;
    let offset = |slot: u64| at((slot / block_size) * block_stride + (slot % block_size) * row);
    let mut rng = Rng::new(11);
    let canary = rng.bytes(at(row * block_size));
    memory.write(0, &canary);
    let slots: Vec<i64> = wanted.iter().map(|s| i64::try_from(*s).unwrap()).collect();
    for direction in BOTH {
        let mut packed = Pinned::new(at(tokens * row));
        let filling = rng.bytes(at(tokens * row));
        packed.bytes().copy_from_slice(&filling);
        for slot in wanted {
            memory.write(offset(*slot), &rng.bytes(at(row)));
        }
        let gathered = || wanted.iter().flat_map(|s| memory.read(offset(*s), at(row))).collect::<Vec<u8>>();
        let expected = if direction == Direction::Gather { gathered() } else { filling };
        let span = SlabSpan { host: None, device: Some(packed.addr), len: tokens * row };
        let slots = SlotMapping::from_slots(slots.as_slice());
        let request =
            JobRequest { direction, slab: span, slots, skip_tokens: 0, partial: false, layers: None };
        let job = CopyJob::new(plan.clone(), request).map_err(text)?;
        let stream = Stream::new();
        // SAFETY: cache and slab are this function's memory; it waits below.
        let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
        launched.map_err(text)?.wait().map_err(text)?;
        let found = if direction == Direction::Gather { packed.bytes().to_vec() } else { gathered() };
        compare("far blocks", &found, &expected)?;
        compare("block 0", &memory.read(0, canary.len()), &canary)?;
    }
    Ok(())
}

fn beyond_two_gib(gpu: &Gpu) -> Result<(), Failed> {
    // u8 (65537, 2, 16, 8, 128): a block is 2 * 16 KiB, so block 65536 starts at 2 GiB.
    let slot = |block: u64, token: u64| block * 16 + token;
    let wanted = [slot(65535, 15), slot(65536, 0), slot(65536, 15), slot(65535, 0)];
    far_blocks(gpu, 65537, 2 * 16 * 1024, 16, &wanted)
}

fn beyond_four_gib(gpu: &Gpu) -> Result<(), Failed> {
    let slot = |block: u64, token: u64| block * 16 + token;
    let wanted = [slot(2065, 3), slot(2066, 3), slot(4131, 15), slot(4132, 0), slot(4199, 15)];
    far_blocks(gpu, 4200, 1_039_680, 16, &wanted)?;
    far_blocks(gpu, 4200, 1_039_680, 7, &[2065 * 7, 4132 * 7 + 6, 4199 * 7 + 3])
}
