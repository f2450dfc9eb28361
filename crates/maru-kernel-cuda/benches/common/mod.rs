//! What the device benches share: profiles, a cache with slabs and jobs between them, timing by events.
#![allow(clippy::unwrap_used, reason = "programs for people who want to see them fail loudly")]

use cudarc::driver::sys;
use maru_kernel_cuda::{LaunchOptions, PlaneTable};
use maru_layout::{CopyJob, DType, Direction, SlotMapping};

use crate::cases::{Cache, Dims, ORDERS, Rng, job, random_slots};
use crate::gpu::{Device, Gpu, Pinned, Stream, cu, slot_bytes};

/// Tokens of a slab.
pub(crate) const TOKENS: u64 = 256;

pub(crate) struct Profile {
    pub(crate) name: &'static str,
    pub(crate) order: &'static str,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) head_size: u64,
    pub(crate) dtype: DType,
    pub(crate) block_size: u64,
}

pub(crate) const fn profile(
    name: &'static str,
    order: &'static str,
    shape: [u64; 4],
    dtype: DType,
) -> Profile {
    let [layers, heads, head_size, block_size] = shape;
    Profile { name, order, layers, heads, head_size, dtype, block_size }
}

pub(crate) const PROFILES: [Profile; 9] = [
    profile("qwen2.5-32b", "blocks_first_nhd", [64, 8, 128, 16], DType::Bf16),
    profile("qwen2.5-32b", "blocks_first_hnd", [64, 8, 128, 16], DType::Bf16),
    profile("qwen2.5-32b", "fused_lbnhc", [64, 8, 128, 16], DType::Bf16),
    profile("qwen2.5-32b-tp8", "blocks_first_nhd", [64, 1, 128, 16], DType::Bf16),
    profile("qwen2.5-32b-tp8", "fused_lbnhc", [64, 1, 128, 16], DType::Bf16),
    profile("llama-3.1-8b-fp8", "blocks_first_nhd", [32, 8, 128, 16], DType::Fp8E4m3),
    profile("llama-3.1-8b-fp8", "blocks_first_hnd", [32, 8, 128, 16], DType::Fp8E4m3),
    profile("llama-3.1-8b-fp8", "fused_lbnhc", [32, 8, 128, 16], DType::Fp8E4m3),
    profile("deepseek-v3-mla", "mla", [61, 1, 576, 64], DType::Bf16),
];

/// A cache, slabs in pinned memory, and jobs between them.
pub(crate) struct Bench {
    pub(crate) cache: Cache,
    pub(crate) pages: Device,
    pub(crate) slab: [Pinned; 2],
    pub(crate) planes: PlaneTable,
    /// By direction; loads read the first pinned region, stores write the second.
    pub(crate) jobs: [Vec<CopyJob>; 2],
    pub(crate) lists: Vec<Vec<i64>>,
    pub(crate) slab_bytes: usize,
    /// Slots in device memory, for the jobs that use them.
    _device_slots: Device,
}

impl Bench {
    pub(crate) fn new(gpu: &Gpu, profile: &Profile, bytes: u64, device_slots: bool) -> Self {
        let order = ORDERS.iter().find(|o| o.name == profile.order).unwrap();
        let mut dims = Dims {
            layers: profile.layers,
            blocks: 2,
            block_size: profile.block_size,
            heads: profile.heads,
            head_size: profile.head_size,
            dtype: profile.dtype,
            pad: 0,
        };
        let slab_bytes = Cache::new(order, dims).unwrap().slab_bytes(TOKENS);
        let slabs = usize::try_from(bytes).unwrap().div_ceil(slab_bytes);
        // Blocks to spare, all in random order.
        dims.blocks = (slabs as u64 * TOKENS / profile.block_size) * 5 / 4;
        let cache = Cache::new(order, dims).unwrap();
        let pages = Device::new(usize::try_from(cache.bytes).unwrap());
        let plan = cache.plan(pages.addr, TOKENS).unwrap();
        let planes = gpu.kernel.register(&plan).unwrap();
        let slab = [Pinned::new(slabs * slab_bytes), Pinned::new(slabs * slab_bytes)];
        let blocks = random_slots(
            &mut Rng::new(1),
            dims.blocks,
            slabs * 256 / usize::try_from(dims.block_size).unwrap(),
            0,
        );
        let slots: Vec<i64> = blocks
            .iter()
            .flat_map(|b| (0..dims.block_size as i64).map(move |o| b * dims.block_size as i64 + o))
            .collect();
        let on_device = Device::holding(&slot_bytes(&slots));
        let lists: Vec<Vec<i64>> = slots.chunks(256).map(<[i64]>::to_vec).collect();
        let make = |direction: Direction, region: &Pinned| -> Vec<CopyJob> {
            let jobs = lists.iter().enumerate().map(|(i, list)| {
                let mapping = match device_slots {
                    true => SlotMapping::Device { addr: on_device.addr + (i * 2048) as u64, len: TOKENS },
                    false => SlotMapping::from_slots(list.as_slice()),
                };
                job(&plan, direction, region.addr + (i * slab_bytes) as u64, mapping, 0).unwrap()
            });
            jobs.collect()
        };
        let jobs = [make(Direction::Scatter, &slab[0]), make(Direction::Gather, &slab[1])];
        Bench { cache, pages, slab, planes, jobs, lists, slab_bytes, _device_slots: on_device }
    }

    pub(crate) fn total(&self) -> usize {
        self.lists.len() * self.slab_bytes
    }

    /// As the engine does it: small slabs share a launch.
    pub(crate) fn launch_batch(&self, gpu: &Gpu, stream: &Stream, direction: usize, blocks: u32) {
        let options = LaunchOptions::default().with_sm_budget(blocks);
        let jobs = &self.jobs[direction];
        // SAFETY: pages and slabs belong to the bench, which waits before it touches them.
        drop(unsafe { gpu.kernel.launch_many(jobs, &self.planes, stream.0, options) }.unwrap());
    }

    /// One launch a slab.
    pub(crate) fn launch_all(&self, gpu: &Gpu, stream: &Stream, direction: usize, blocks: u32) {
        let options = LaunchOptions::default().with_sm_budget(blocks);
        for job in &self.jobs[direction] {
            // SAFETY: pages and slabs belong to the bench, which waits before it touches them.
            drop(unsafe { gpu.kernel.launch(job, &self.planes, stream.0, options) }.unwrap());
        }
    }

    pub(crate) fn launch_one(&self, gpu: &Gpu, stream: &Stream, job: &CopyJob, blocks: u32) {
        let options = LaunchOptions::default().with_sm_budget(blocks);
        // SAFETY: pages and slabs belong to the bench, which waits before it touches them.
        drop(unsafe { gpu.kernel.launch(job, &self.planes, stream.0, options) }.unwrap());
    }

    pub(crate) fn flat(&self, stream: &Stream, direction: usize) {
        let n = self.total().min(self.pages.len);
        let (host, device) = (self.slab[direction].addr, self.pages.addr);
        match direction {
            0 => cu!(cuMemcpyHtoDAsync_v2(device, host as *const _, n, stream.0)),
            _ => cu!(cuMemcpyDtoHAsync_v2(host as *mut _, device, n, stream.0)),
        }
    }

    /// Loads random slabs into poisoned pages, looks at some addresses, stores them into poisoned slabs and
    /// compares every byte.
    pub(crate) fn check(&mut self, gpu: &Gpu, stream: &Stream) {
        fill_random(self.slab[0].bytes());
        self.pages.fill(0xa5);
        self.launch_batch(gpu, stream, 0, 4);
        stream.wait();
        let r = &self.cache.reference;
        let row = r.row_bytes();
        let head = self.cache.layout.head_bytes();
        for (kv, layer, token) in [(0, 0, 0u64), (r.planes - 1, r.layers - 1, 255), (0, r.layers / 2, 17)] {
            let (index, list) = (self.lists.len() - 1, self.lists.last().unwrap());
            let slot = u64::try_from(list[usize::try_from(token).unwrap()]).unwrap();
            for n in 0..row / head {
                let at = usize::try_from(r.paged_offset(kv, layer, slot, n * head)).unwrap();
                let found = self.pages.read(at, usize::try_from(head).unwrap());
                let packed = ((kv * r.layers + layer) * TOKENS + token) * row + n * head;
                let from = index * self.slab_bytes + usize::try_from(packed).unwrap();
                assert!(found == self.slab[0].bytes()[from..][..found.len()], "loaded to a wrong place");
            }
        }
        for batch in [false, true] {
            self.slab[1].bytes().fill(0x5a);
            match batch {
                true => self.launch_batch(gpu, stream, 1, 4),
                false => self.launch_all(gpu, stream, 1, 4),
            }
            stream.wait();
            let [loaded, stored] = &mut self.slab;
            assert!(loaded.bytes() == stored.bytes(), "what was stored differs from what was loaded");
        }
    }
}

pub(crate) fn fill_random(bytes: &mut [u8]) {
    let mut rng = Rng::new(7);
    for chunk in bytes.chunks_mut(8) {
        let word = rng.next().to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// Time of what `queue` queues, by events, in seconds.
pub(crate) fn timed(stream: &Stream, events: &[sys::CUevent; 2], queue: impl FnOnce()) -> f64 {
    let mut milliseconds = 0.0f32;
    cu!(cuEventRecord(events[0], stream.0));
    queue();
    cu!(cuEventRecord(events[1], stream.0));
    cu!(cuEventSynchronize(events[1]));
    cu!(cuEventElapsedTime_v2(&mut milliseconds, events[0], events[1]));
    f64::from(milliseconds) / 1e3
}

pub(crate) fn events() -> [sys::CUevent; 2] {
    let mut events = [std::ptr::null_mut(); 2];
    for event in &mut events {
        cu!(cuEventCreate(event, 0));
    }
    events
}

pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
