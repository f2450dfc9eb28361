//! Every layout × direction × place of the slots, each at every access width, padded and not, with both
//! images; and the case machinery the other files use.

use libtest_mimic::{Failed, Trial};
use maru_kernel_cuda::{Image, KernelError, LaunchOptions, PagedCopyKernel};
use maru_layout::{DType, Direction, SlotMapping};

use crate::cases::{Cache, Dims, Images, ORDERS, Order, Rng, compare, job, random_slots};
use crate::gpu::{Device, Gpu, Pinned, Stream, slot_bytes};
use crate::harness::{text, trial};

/// Bytes behind a 16-byte boundary of cache and slab, and the access width that leaves.
const SHIFTS: [([usize; 2], u64); 6] =
    [([0, 0], 16), ([8, 0], 8), ([0, 8], 8), ([4, 0], 4), ([0, 2], 2), ([1, 1], 1)];

const GUARD: usize = 256;

/// Where the slots of a trial are: up to 256 by value, more through the ring, or in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Host,
    Device,
}

/// Where the slab is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlabIn {
    Pinned,
    Device,
}

/// One transfer.
#[derive(Clone, Debug)]
pub(crate) struct Case<'a> {
    pub(crate) cache: &'a Cache,
    pub(crate) direction: Direction,
    pub(crate) tokens: u64,
    pub(crate) slots: &'a [i64],
    pub(crate) skip: u64,
    pub(crate) shifts: [usize; 2],
    pub(crate) source: Source,
    pub(crate) slab_in: SlabIn,
    pub(crate) blocks: u32,
}

impl<'a> Case<'a> {
    pub(crate) fn new(cache: &'a Cache, direction: Direction, tokens: u64, slots: &'a [i64]) -> Self {
        let (source, slab_in) = (Source::Host, SlabIn::Pinned);
        Case { cache, direction, tokens, slots, skip: 0, shifts: [0, 0], source, slab_in, blocks: 4 }
    }

    /// Runs it and compares both sides, guards included, with the oracle. Returns the width and what the
    /// kernel reported.
    pub(crate) fn check(
        &self,
        kernel: &PagedCopyKernel,
        images: &Images,
    ) -> Result<(u64, Result<(), KernelError>), String> {
        let frame = |bytes: &[u8], shift: usize| {
            let mut all = vec![0xa5; 2 * GUARD + 64 + bytes.len()];
            all[GUARD + shift..][..bytes.len()].copy_from_slice(bytes);
            all
        };
        let cache = Device::holding(&frame(&images.cache, self.shifts[0]));
        let framed = frame(&images.slab, self.shifts[1]);
        let mut pinned = Pinned::new(framed.len());
        pinned.bytes().copy_from_slice(&framed);
        let on_device = Device::holding(&framed);
        let slab = if self.slab_in == SlabIn::Pinned { pinned.addr } else { on_device.addr };
        let at = |addr: u64, shift: usize| addr + (GUARD + shift) as u64;
        let plan = self.cache.plan(at(cache.addr, self.shifts[0]), self.tokens).map_err(|e| e.to_string())?;
        let device_slots = Device::holding(&slot_bytes(self.slots));
        let mapping = match self.source {
            Source::Device => SlotMapping::Device { addr: device_slots.addr, len: self.slots.len() as u64 },
            Source::Host => SlotMapping::from_slots(self.slots),
        };
        let job = job(&plan, self.direction, at(slab, self.shifts[1]), mapping, self.skip)
            .map_err(|e| e.to_string())?;
        let planes = kernel.register(&plan).map_err(|e| e.to_string())?;
        let stream = Stream::new();
        let options = LaunchOptions::default().with_sm_budget(self.blocks);
        // SAFETY: cache, slab and slots are this function's device-addressable memory; it waits below.
        let launched = unsafe { kernel.launch(&job, &planes, stream.0, options) };
        let outcome = launched.map_err(|e| e.to_string())?.wait();
        stream.wait();
        let frame_after =
            |what: &str, found: &[u8], bytes: &[u8], shift| compare(what, found, &frame(bytes, shift));
        frame_after("cache", &cache.read(0, cache.len), &images.cache_after, self.shifts[0])?;
        let found = match self.slab_in {
            SlabIn::Pinned => pinned.bytes().to_vec(),
            SlabIn::Device => on_device.read(0, on_device.len),
        };
        frame_after("slab", &found, &images.slab_after, self.shifts[1])?;
        Ok((job.access_bytes(), outcome))
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for order in ORDERS {
        for direction in [Direction::Gather, Direction::Scatter] {
            for source in [Source::Host, Source::Device] {
                let name = format!("layout::{}::{direction:?}::{source:?}", order.name);
                trials.push(trial(name, move |gpu| check(&gpu.kernel, &order, direction, source)));
            }
        }
    }
    trials.push(trial("portable_ptx_moves_the_same_bytes".into(), portable));
    trials
}

fn check(
    kernel: &PagedCopyKernel,
    order: &Order,
    direction: Direction,
    source: Source,
) -> Result<(), Failed> {
    let mut rng = Rng::new(order.name.len() as u64 * 2 + u64::from(direction == Direction::Gather));
    // Head count and block size differ in the first two, are equal in the third; the last has one of each.
    // The first has more slots than travel by value.
    for (blocks, block_size, heads, layers, pad) in
        [(24, 16, 3, 2, 8), (5, 4, 3, 3, 0), (5, 4, 4, 2, 16), (9, 1, 1, 1, 0)]
    {
        let dims = Dims { layers, blocks, block_size, heads, head_size: 8, dtype: DType::Bf16, pad };
        let cache = Cache::new(order, dims).map_err(text)?;
        let tokens = cache.layout.num_slots();
        let slots = random_slots(&mut rng, tokens, usize::try_from(tokens).unwrap() - 1, 5);
        let images = Images::new(&cache, direction, tokens, &slots, 2, &mut rng);
        for (shifts, expected) in SHIFTS {
            let mut case = Case::new(&cache, direction, tokens, &slots);
            (case.skip, case.shifts, case.source) = (2, shifts, source);
            (case.blocks, case.slab_in) = match expected {
                16 => (4, SlabIn::Pinned),
                8 => (1, SlabIn::Device),
                _ => (64, SlabIn::Pinned),
            };
            let (width, outcome) = case.check(kernel, &images).map_err(|e| format!("{case:?}: {e}"))?;
            outcome.map_err(|e| format!("{case:?}: {e}"))?;
            if width != expected {
                return Err(format!("{case:?}: width {width}, expected {expected}").into());
            }
        }
    }
    Ok(())
}

/// The embedded PTX is what machines with only a driver run, also where this binary holds a fat binary.
fn portable(gpu: &Gpu) -> Result<(), Failed> {
    let kernel = PagedCopyKernel::load_image(gpu.context.clone(), Image::PortablePtx).map_err(text)?;
    if kernel.image() != Image::PortablePtx {
        return Err("another image was loaded".into());
    }
    for order in &ORDERS {
        for direction in [Direction::Gather, Direction::Scatter] {
            for source in [Source::Host, Source::Device] {
                check(&kernel, order, direction, source)?;
            }
        }
    }
    Ok(())
}
