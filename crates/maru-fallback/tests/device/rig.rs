//! One transfer in memory of its own, compared byte by byte with what the oracle makes of it.

use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use maru_fallback::{DeviceCopy, DeviceMover, FallbackError};
use maru_layout::{CopyJob, CopyPlan, DType, Direction, JobRequest, SlabSpan, SlotMapping};

use crate::cases::{Cache, Dims, Images, ORDERS, Order, Rng, compare, random_slots};
use crate::gpu::{Device, Pinned};

/// Where a slab is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlabIn {
    Registered,
    Pageable,
    Device,
}

pub(crate) const SLABS: [SlabIn; 3] = [SlabIn::Registered, SlabIn::Pageable, SlabIn::Device];
pub(crate) const DIRECTIONS: [Direction; 2] = [Direction::Gather, Direction::Scatter];

pub(crate) enum SlabMemory {
    Registered(Pinned),
    Pageable(Vec<u8>),
    Device(Device, usize),
}

impl SlabMemory {
    pub(crate) fn holding(bytes: &[u8], place: SlabIn) -> Self {
        match place {
            SlabIn::Registered => {
                let mut memory = Pinned::new(bytes.len());
                memory.bytes().copy_from_slice(bytes);
                SlabMemory::Registered(memory)
            }
            SlabIn::Pageable => SlabMemory::Pageable(bytes.to_vec()),
            SlabIn::Device => SlabMemory::Device(Device::holding(bytes), bytes.len()),
        }
    }

    pub(crate) fn read(&mut self) -> Vec<u8> {
        match self {
            SlabMemory::Registered(memory) => memory.bytes().to_vec(),
            SlabMemory::Pageable(bytes) => bytes.clone(),
            SlabMemory::Device(memory, len) => memory.read(*len),
        }
    }

    pub(crate) fn span(&mut self) -> SlabSpan {
        match self {
            SlabMemory::Registered(memory) => SlabSpan {
                host: Some(memory.host_addr()),
                device: Some(memory.addr),
                len: memory.bytes().len() as u64,
            },
            SlabMemory::Pageable(bytes) => SlabSpan {
                host: Some(bytes.as_mut_ptr().expose_provenance() as u64),
                device: None,
                len: bytes.len() as u64,
            },
            SlabMemory::Device(memory, len) => {
                SlabSpan { host: None, device: Some(memory.addr), len: *len as u64 }
            }
        }
    }
}

/// A transfer that is ready to be made.
pub(crate) struct Rig {
    pub(crate) images: Images,
    pub(crate) paged: Device,
    pub(crate) slab: SlabMemory,
    pub(crate) plan: Arc<CopyPlan>,
    pub(crate) slots: Vec<i64>,
    skip: u64,
    direction: Direction,
}

impl Rig {
    /// `slots` name what is to be moved; bad ones only where the transfer is to fail.
    pub(crate) fn new(
        cache: &Cache,
        direction: Direction,
        place: SlabIn,
        tokens: u64,
        slots: &[i64],
        skip: u64,
        rng: &mut Rng,
    ) -> Self {
        let images = Images::new(cache, direction, tokens, slots, skip, rng);
        let paged = Device::holding(&images.cache);
        let slab = SlabMemory::holding(&images.slab, place);
        let plan = cache.plan(paged.addr, tokens).expect("a plan");
        Rig { images, paged, slab, plan, slots: slots.to_vec(), skip, direction }
    }

    /// The usual one: three layers, small blocks, random slots with holes.
    pub(crate) fn small(order: &Order, direction: Direction, place: SlabIn, rng: &mut Rng) -> Self {
        Self::of(order, DIMS, direction, place, rng)
    }

    pub(crate) fn of(order: &Order, dims: Dims, direction: Direction, place: SlabIn, rng: &mut Rng) -> Self {
        let cache = Cache::new(order, dims).expect("a cache");
        let n = cache.layout.num_slots();
        let take = usize::try_from(n).expect("small") - 2;
        // Halves of blocks in order, so that there are runs, some of which end inside a block.
        let half = (cache.layout.block_size() / 2).max(1);
        let mut groups: Vec<i64> = random_slots(rng, n / half, usize::MAX, 0);
        let half = i64::try_from(half).expect("small");
        let mut slots: Vec<i64> = groups.drain(..).flat_map(|g| g * half..(g + 1) * half).collect();
        slots.truncate(take);
        slots.iter_mut().skip(3).step_by(7).for_each(|s| *s = -1);
        let tokens = slots.len() as u64 + 2;
        Rig::new(&cache, direction, place, tokens, &slots, 1, rng)
    }

    pub(crate) fn job_with(&mut self, slots: SlotMapping, layers: Option<(u32, u32)>) -> CopyJob {
        let request = JobRequest {
            direction: self.direction,
            slab: self.slab.span(),
            slots,
            skip_tokens: self.skip,
            partial: true,
            layers,
        };
        CopyJob::new(self.plan.clone(), request).expect("a job")
    }

    pub(crate) fn job(&mut self) -> CopyJob {
        let slots = SlotMapping::from_slots(self.slots.clone());
        self.job_with(slots, None)
    }

    pub(crate) fn start(
        &mut self,
        mover: &DeviceMover,
        stream: CUstream,
    ) -> Result<DeviceCopy, FallbackError> {
        let job = self.job();
        // SAFETY: everything is alive until the test has waited.
        unsafe { mover.copy_on(&job, stream) }
    }

    /// Both sides against the oracle's.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        self.check_against(&self.images.cache_after.clone(), &self.images.slab_after.clone())
    }

    /// Nothing was touched.
    pub(crate) fn check_untouched(&mut self) -> Result<(), String> {
        self.check_against(&self.images.cache.clone(), &self.images.slab.clone())
    }

    pub(crate) fn check_against(&mut self, cache: &[u8], slab: &[u8]) -> Result<(), String> {
        compare("cache", &self.paged.read(cache.len()), cache)?;
        compare("slab", &self.slab.read(), slab)
    }

    /// Makes the transfer and compares.
    pub(crate) fn run(&mut self, mover: &DeviceMover, stream: CUstream) -> Result<(), String> {
        let copy = self.start(mover, stream).map_err(|e| e.to_string())?;
        copy.wait().map_err(|e| e.to_string())?;
        assert!(copy.is_complete().map_err(|e| e.to_string())?);
        self.check()
    }
}

/// Small, with head count, block size and layer count all different, and padded blocks.
pub(crate) const DIMS: Dims =
    Dims { layers: 3, blocks: 6, block_size: 4, heads: 2, head_size: 8, dtype: DType::Bf16, pad: 8 };

/// Large enough for several windows of the smallest bounce memory (64 KiB each).
pub(crate) const LARGE: Dims =
    Dims { layers: 7, blocks: 12, block_size: 16, heads: 4, head_size: 64, dtype: DType::Bf16, pad: 0 };

pub(crate) fn order(name: &str) -> &'static Order {
    ORDERS.iter().find(|o| o.name == name).expect("a layout of that name")
}
