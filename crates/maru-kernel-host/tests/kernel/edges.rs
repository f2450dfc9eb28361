//! Cases that broke others: bad slots, odd rows, offsets beyond 32 bits, one head, many heads, long and empty
//! lists.

use libtest_mimic::{Failed, Trial};
use maru_kernel_cuda::geometry::Limits;
use maru_kernel_host::{Options, run};
use maru_layout::{
    CopyJob, CopyPlan, DType, Direction, JobRequest, PagedLayout, RowKind, SlabLayout, SlabSpan, SlotMapping,
    StridedSpec,
};

use crate::cases::{Cache, Dims, Images, ORDERS, Rng, random_slots};
use crate::memory::{Case, Source};
use crate::text;

const BOTH: [Direction; 2] = [Direction::Gather, Direction::Scatter];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("bad_device_slots_are_skipped_and_the_first_is_reported", bad_slots),
        Trial::test("a_bad_slot_is_reported_once_across_many_launches", bad_slots_in_pieces),
        Trial::test("skip_hides_a_bad_slot_before_it", skipped_bad_slot),
        Trial::test("skip_moves_nothing_before_it_and_does_not_shift", skip),
        Trial::test("rows_of_92_bytes_and_a_slab_two_bytes_off", odd_rows),
        Trial::test("one_head_is_one_head", one_head),
        Trial::test("heads_128", many_heads),
        Trial::test("seventy_thousand_slots", seventy_thousand),
        Trial::test("nothing_to_do_touches_nothing", empty),
        Trial::test("block_65536_of_a_2_gib_plane", beyond_two_gib),
        Trial::test("wide_block_strides_past_4_gib", beyond_four_gib),
        Trial::test("slab_offsets_past_4_gib", wide_slab),
    ]
}

fn small(order: &str) -> Cache {
    let dims =
        Dims { layers: 2, blocks: 4, block_size: 16, heads: 2, head_size: 8, dtype: DType::Bf16, pad: 0 };
    Cache::new(ORDERS.iter().find(|o| o.name == order).unwrap(), dims).unwrap()
}

fn plain<'a>(cache: &'a Cache, direction: Direction, tokens: u64, slots: &'a [i64]) -> Case<'a> {
    let (shifts, source, options) = ([0, 0], Source::Device, Options::default());
    Case { cache, direction, tokens, slots, skip: 0, shifts, source, options }
}

fn bad_slots() -> Result<(), Failed> {
    let cache = small("blocks_first_nhd");
    type Expected = Option<(u64, i64)>;
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
            let good: Vec<i64> = slots.iter().map(|s| if (0..64).contains(s) { *s } else { -1 }).collect();
            let images = Images::new(&cache, direction, 4, &good, 0, &mut Rng::new(1));
            let (ran, _) = plain(&cache, direction, 4, slots).check(&images)?;
            let found = (ran.error.raised == 1).then_some((ran.error.token, ran.error.slot));
            if found != expected {
                return Err(format!("{slots:?}: reported {found:?}, expected {expected:?}").into());
            }
        }
    }
    Ok(())
}

fn bad_slots_in_pieces() -> Result<(), Failed> {
    let cache = small("blocks_first_hnd");
    let mut slots: Vec<i64> = (0..60).collect();
    (slots[23], slots[24], slots[59]) = (64, -7, 99);
    let good: Vec<i64> = slots.iter().map(|s| if (0..64).contains(s) { *s } else { -1 }).collect();
    for direction in BOTH {
        for (units, descending) in [(200, false), (200, true), (16, true), (16, false), (1 << 20, true)] {
            let images = Images::new(&cache, direction, 60, &good, 0, &mut Rng::new(2));
            let mut case = plain(&cache, direction, 60, &slots);
            case.options =
                Options { limits: Limits { units, ..Limits::blocks(3) }, upload: None, descending };
            let (ran, _) = case.check(&images)?;
            if (ran.error.raised, ran.error.token, ran.error.slot) != (1, 23, 64) {
                return Err(format!("{units} accesses a launch: {ran:?}").into());
            }
        }
    }
    Ok(())
}

fn skipped_bad_slot() -> Result<(), Failed> {
    let cache = small("kv_first_nhd");
    for direction in BOTH {
        let images = Images::new(&cache, direction, 4, &[-1, 5, 6, 7], 1, &mut Rng::new(3));
        let mut case = plain(&cache, direction, 4, &[99, 5, 6, 7]);
        case.skip = 1;
        let (ran, _) = case.check(&images)?;
        if ran.error.raised != 0 {
            return Err(format!("{ran:?}").into());
        }
    }
    Ok(())
}

fn skip() -> Result<(), Failed> {
    let cache = small("blocks_first_nhd");
    let slots: Vec<i64> = (0..64).rev().collect();
    for direction in BOTH {
        for skip in [1, 32, 63, 64] {
            for source in Source::ALL {
                let images = Images::new(&cache, direction, 64, &slots, skip, &mut Rng::new(4));
                let mut case = plain(&cache, direction, 64, &slots);
                (case.skip, case.source) = (skip, source);
                let (ran, _) = case.check(&images)?;
                if (ran.launches == 0) != (skip == 64) {
                    return Err(format!("skip {skip}: {ran:?}").into());
                }
            }
        }
    }
    Ok(())
}

fn odd_rows() -> Result<(), Failed> {
    for (head_size, shifts, expected) in [(46, [0, 0], 4), (64, [0, 2], 2), (64, [2, 0], 2), (23, [0, 0], 2)]
    {
        let dims =
            Dims { layers: 2, blocks: 4, block_size: 16, heads: 1, head_size, dtype: DType::Bf16, pad: 0 };
        let order = ORDERS.iter().find(|o| o.name == "kv_first_nhd").unwrap();
        let cache = Cache::new(order, dims).map_err(text)?;
        for direction in BOTH {
            let slots = [0, 1, 2, 3, 63];
            let images = Images::new(&cache, direction, 5, &slots, 0, &mut Rng::new(5));
            let mut case = plain(&cache, direction, 5, &slots);
            case.shifts = shifts;
            let (_, width) = case.check(&images)?;
            if width != expected {
                return Err(format!("head {head_size}, {shifts:?}: width {width}").into());
            }
        }
    }
    Ok(())
}

fn one_head() -> Result<(), Failed> {
    for order in ["blocks_first_nhd", "blocks_first_hnd", "heads_before_tokens", "fused_lbhnc"] {
        let order = ORDERS.iter().find(|o| o.name == order).unwrap();
        let dims = Dims {
            layers: 1,
            blocks: 3,
            block_size: 128,
            heads: 1,
            head_size: 128,
            dtype: DType::Bf16,
            pad: 0,
        };
        let cache = Cache::new(order, dims).map_err(text)?;
        let slots = random_slots(&mut Rng::new(6), 384, 200, 0);
        for direction in BOTH {
            let images = Images::new(&cache, direction, 200, &slots, 0, &mut Rng::new(7));
            plain(&cache, direction, 200, &slots).check(&images)?;
        }
    }
    Ok(())
}

fn many_heads() -> Result<(), Failed> {
    for order in ["blocks_first_nhd", "blocks_first_hnd"] {
        let order = ORDERS.iter().find(|o| o.name == order).unwrap();
        let dims = Dims {
            layers: 1,
            blocks: 4,
            block_size: 16,
            heads: 128,
            head_size: 16,
            dtype: DType::Bf16,
            pad: 0,
        };
        let cache = Cache::new(order, dims).map_err(text)?;
        let slots = random_slots(&mut Rng::new(8), 64, 50, 7);
        for direction in BOTH {
            let images = Images::new(&cache, direction, 50, &slots, 0, &mut Rng::new(9));
            plain(&cache, direction, 50, &slots).check(&images)?;
        }
    }
    Ok(())
}

fn seventy_thousand() -> Result<(), Failed> {
    let dims =
        Dims { layers: 2, blocks: 4400, block_size: 16, heads: 1, head_size: 8, dtype: DType::U8, pad: 0 };
    let cache = Cache::new(&ORDERS[0], dims).map_err(text)?;
    let slots = random_slots(&mut Rng::new(10), 70_400, 70_000, 0);
    for direction in BOTH {
        let images = Images::new(&cache, direction, 70_000, &slots, 0, &mut Rng::new(11));
        for source in Source::ALL {
            let mut case = plain(&cache, direction, 70_000, &slots);
            case.source = source;
            case.options.upload = (source == Source::Uploaded).then_some(16 * 1024);
            let (ran, _) = case.check(&images)?;
            let expected = match source {
                Source::Inline => 70_000u64.div_ceil(256),
                Source::Uploaded => 5,
                Source::Device => 1,
            };
            if ran.launches != expected {
                return Err(format!("{source:?}: {} launches", ran.launches).into());
            }
        }
    }
    Ok(())
}

fn empty() -> Result<(), Failed> {
    let cache = small("blocks_first_nhd");
    for direction in BOTH {
        for slots in [&[][..], &[-1, -1, -1]] {
            for source in Source::ALL {
                let images = Images::new(&cache, direction, 4, slots, 0, &mut Rng::new(12));
                let mut case = plain(&cache, direction, 4, slots);
                case.source = source;
                let (ran, _) = case.check(&images)?;
                if ran.accesses != 0 || (source != Source::Device && ran.launches != 0) {
                    return Err(format!("{slots:?}: {ran:?}").into());
                }
            }
        }
    }
    Ok(())
}

/// Address space that takes memory only where it is touched.
struct Sparse {
    start: *mut u8,
    len: usize,
}

impl Sparse {
    fn new(len: usize) -> Result<Self, Failed> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping where the kernel likes it.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags) };
        Ok(Sparse { start: start.map_err(text)?.cast(), len })
    }

    fn at(&mut self, offset: u64, len: u64) -> &mut [u8] {
        let (offset, len) = (usize::try_from(offset).unwrap(), usize::try_from(len).unwrap());
        assert!(offset + len <= self.len);
        // SAFETY: inside the mapping, as just checked.
        let start = unsafe { self.start.add(offset) };
        // SAFETY: as above; the borrow of `self` keeps the mapping and other slices away.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }
}

impl Drop for Sparse {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.len) };
    }
}

/// Moves single tokens of a cache of u8 `(blocks, 16, 8, 128)` rows and compares each with its address worked
/// out here; block 0 holds a pattern that must stay.
fn far_blocks(blocks: u64, block_stride: u64, block_size: u64, wanted: &[u64]) -> Result<(), Failed> {
    let row = 1024;
    let mut memory = Sparse::new(usize::try_from(blocks * block_stride).unwrap())?;
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
    let plan = std::sync::Arc::new(CopyPlan::new(&paged, &slab, vec![memory.start as u64]).map_err(text)?);
    let offset = |slot: u64| (slot / block_size) * block_stride + (slot % block_size) * row;
    let mut rng = Rng::new(13);
    let canary = rng.bytes(usize::try_from(row * block_size).unwrap());
    memory.at(0, row * block_size).copy_from_slice(&canary);
    let slots: Vec<i64> = wanted.iter().map(|s| i64::try_from(*s).unwrap()).collect();
    for direction in BOTH {
        let mut packed = rng.bytes(usize::try_from(tokens * row).unwrap());
        for slot in wanted {
            memory.at(offset(*slot), row).copy_from_slice(&rng.bytes(1024));
        }
        let expected: Vec<u8> = match direction {
            Direction::Gather => wanted.iter().flat_map(|s| memory.at(offset(*s), row).to_vec()).collect(),
            Direction::Scatter => packed.clone(),
        };
        let span = SlabSpan { host: None, device: Some(packed.as_mut_ptr() as u64), len: tokens * row };
        let slots = SlotMapping::from_slots(slots.as_slice());
        let request =
            JobRequest { direction, slab: span, slots, skip_tokens: 0, partial: false, layers: None };
        let job = CopyJob::new(plan.clone(), request).map_err(text)?;
        // SAFETY: the cache is the sparse mapping, the slab the vector.
        unsafe { run(&job, Options::default()) }.map_err(text)?;
        let found: Vec<u8> = match direction {
            Direction::Gather => packed,
            Direction::Scatter => wanted.iter().flat_map(|s| memory.at(offset(*s), row).to_vec()).collect(),
        };
        if found != expected {
            return Err(format!("{direction:?}: wrong bytes").into());
        }
        if memory.at(0, row * block_size) != canary {
            return Err(format!("{direction:?}: block 0 was written").into());
        }
    }
    Ok(())
}

fn beyond_two_gib() -> Result<(), Failed> {
    // u8 (65537, 2, 16, 8, 128): a block is 2 * 16 KiB, so block 65536 starts at 2 GiB.
    let slot = |block: u64, token: u64| block * 16 + token;
    far_blocks(65537, 2 * 16 * 1024, 16, &[slot(65535, 15), slot(65536, 0), slot(65536, 15), slot(65535, 0)])
}

fn beyond_four_gib() -> Result<(), Failed> {
    // Packed layers: 1,039,680 bytes a block wrap 31 bits at block 2066 and 32 at 4132.
    let slot = |block: u64, token: u64| block * 16 + token;
    let wanted = [slot(2065, 3), slot(2066, 3), slot(4131, 15), slot(4132, 0), slot(4199, 15)];
    far_blocks(4200, 1_039_680, 16, &wanted)?;
    // No power of two, and one slot a block.
    far_blocks(4200, 1_039_680, 7, &[2065 * 7, 4132 * 7 + 6, 4199 * 7 + 3])?;
    far_blocks(4200, 1_039_680, 1, &[2065, 2066, 4132, 4199])
}

fn wide_slab() -> Result<(), Failed> {
    // Two planes 5 GiB apart, tokens 700 MB apart.
    let (kv, token, row) = (5 << 30, 700_000_000u64, 64u64);
    let counts = [2, 1, 4];
    let slab = SlabLayout::strided(counts, row, [kv, 0, token], DType::U8).map_err(text)?;
    let mut memory = Sparse::new(usize::try_from(slab.bytes()).unwrap())?;
    let spec = StridedSpec {
        dtype: DType::U8,
        row_kind: RowKind::Plain,
        kv_planes: 1,
        kv_stride: 0,
        layers: 1,
        layer_stride: 0,
        num_blocks: 2,
        block_size: 2,
        num_heads: 1,
        head_size: row,
        block_stride: 2 * row,
        token_stride: row,
        head_stride: 0,
    };
    let paged = PagedLayout::from_strides(&spec).map_err(text)?;
    let mut rng = Rng::new(14);
    let mut cache = rng.bytes(8 * 64);
    let base = cache.as_mut_ptr() as u64;
    let plan = std::sync::Arc::new(CopyPlan::new(&paged, &slab, vec![base, base + 256]).map_err(text)?);
    let span = SlabSpan { host: None, device: Some(memory.start as u64), len: slab.bytes() };
    for direction in BOTH {
        let slots = SlotMapping::from_slots(vec![3i64, 0, 2, 1]);
        let request =
            JobRequest { direction, slab: span, slots, skip_tokens: 0, partial: false, layers: None };
        let job = CopyJob::new(plan.clone(), request).map_err(text)?;
        let before = cache.clone();
        if direction == Direction::Scatter {
            cache.fill(0);
        }
        // SAFETY: the slab is the sparse mapping, the planes the vector.
        unsafe { run(&job, Options::default()) }.map_err(text)?;
        // After the gather the slab holds the cache; the scatter brings it back.
        if cache != before {
            return Err(format!("{direction:?}: wrong bytes").into());
        }
        for plane in 0..2 {
            for (t, slot) in [3u64, 0, 2, 1].into_iter().enumerate() {
                let from = usize::try_from(plane * 256 + slot * row).unwrap();
                if memory.at(plane * kv + t as u64 * token, row) != &before[from..from + 64] {
                    return Err(format!("{direction:?}: plane {plane}, token {t}").into());
                }
            }
        }
    }
    Ok(())
}
