//! A cache in device memory, slabs, and the jobs between them.

use std::sync::Arc;

use maru_fallback::DeviceMover;
use maru_layout::oracle::Reference;
use maru_layout::{
    CopyJob, CopyPlan, DType, Direction, JobRequest, PagedLayout, SlabLayout, SlabSpan, SlotMapping,
};

use crate::cases::{Cache, Dims, ORDERS, Rng, random_slots};
use crate::gpu::{Device, Pinned, Stream, cu};

/// Tokens of a slab.
const TOKENS: u64 = 256;

/// Length of the content that repeats through memory; a prime, so that it meets no stride.
const PERIOD: usize = 8_388_593;

#[derive(Debug)]
pub(crate) struct Profile {
    pub(crate) name: &'static str,
    pub(crate) order: &'static str,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) head_size: u64,
    pub(crate) block_size: u64,
    pub(crate) dtype: DType,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocks {
    Random,
    Consecutive,
}

impl Blocks {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Blocks::Random => "random",
            Blocks::Consecutive => "consecutive",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layers {
    Even,
    Anywhere,
}

impl Layers {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Layers::Even => "even",
            Layers::Anywhere => "anywhere",
        }
    }
}

enum Slabs {
    Registered(Pinned),
    Pageable(Vec<u8>),
}

impl Slabs {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Slabs::Registered(memory) => memory.bytes(),
            Slabs::Pageable(bytes) => bytes,
        }
    }
}

pub(crate) struct Setting {
    layout: PagedLayout,
    reference: Reference,
    plan: Arc<CopyPlan>,
    pub(crate) pages: Device,
    page_bytes: usize,
    slab: Slabs,
    pub(crate) slab_bytes: usize,
    pub(crate) slabs: usize,
    lists: Vec<Vec<i64>>,
}

impl Setting {
    pub(crate) fn new(profile: &Profile, blocks: Blocks, layers: Layers, pageable: bool, bytes: u64) -> Self {
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
        let Cache { layout, mut reference, .. } = Cache::new(order, dims).unwrap();
        for (i, at) in (0u64..).zip(reference.tensors.iter_mut()) {
            *at = i * (layout.span_bytes() + 512).next_multiple_of(512);
            if layers == Layers::Anywhere {
                // As allocations of their own may lie: never evenly spaced.
                *at += i * i * 4096;
            }
        }
        let page_bytes = reference.tensors.iter().max().unwrap() + layout.span_bytes();
        let page_bytes = usize::try_from(page_bytes).unwrap().max(slabs * slab_bytes);
        let pages = Device::new(page_bytes);
        let mut bases = Vec::new();
        for kv in 0..reference.planes {
            for tensor in &reference.tensors {
                let inside = layout.plane_offset(if layout.kv_planes() == 2 { kv } else { 0 }, 0).unwrap();
                bases.push(pages.addr + tensor + inside);
            }
        }
        let slab_layout = SlabLayout::of_cache(&layout, reference.planes, profile.layers, TOKENS).unwrap();
        let plan = Arc::new(CopyPlan::new(&layout, &slab_layout, bases).unwrap());
        let slab = match pageable {
            true => Slabs::Pageable(vec![0; slabs * slab_bytes]),
            false => Slabs::Registered(Pinned::new(slabs * slab_bytes)),
        };
        let per_slab = usize::try_from(TOKENS / profile.block_size).unwrap();
        let list = match blocks {
            Blocks::Random => random_slots(&mut Rng::new(1), dims.blocks, slabs * per_slab, 0),
            Blocks::Consecutive => (0..i64::try_from(slabs * per_slab).unwrap()).collect(),
        };
        let block_size = i64::try_from(profile.block_size).unwrap();
        let slots = |blocks: &[i64]| -> Vec<i64> {
            blocks.iter().flat_map(|b| b * block_size..(b + 1) * block_size).collect()
        };
        let lists = list.chunks(per_slab).map(slots).collect();
        Setting { layout, reference, plan, pages, page_bytes, slab, slab_bytes, slabs, lists }
    }

    /// Device address of the slabs, which lie one after the other, if they are pinned.
    pub(crate) fn pinned_slabs(&self) -> Option<u64> {
        match &self.slab {
            Slabs::Registered(memory) => Some(memory.addr),
            Slabs::Pageable(_) => None,
        }
    }

    pub(crate) fn jobs(&mut self, direction: Direction) -> Vec<CopyJob> {
        let len = self.slab_bytes as u64;
        let (host, device) = match &mut self.slab {
            Slabs::Registered(memory) => (memory.host_addr(), Some(memory.addr)),
            Slabs::Pageable(bytes) => (bytes.as_mut_ptr().expose_provenance() as u64, None),
        };
        (0u64..)
            .zip(&self.lists)
            .map(|(i, slots)| {
                let slab = SlabSpan { host: Some(host + i * len), device: device.map(|d| d + i * len), len };
                let slots = SlotMapping::from_slots(slots.clone());
                let request =
                    JobRequest { direction, slab, slots, skip_tokens: 0, partial: false, layers: None };
                CopyJob::new(self.plan.clone(), request).unwrap()
            })
            .collect()
    }

    /// Moves everything once and compares every head of the first and the last slab with where the oracle has
    /// it.
    pub(crate) fn check(&mut self, mover: &DeviceMover, direction: Direction, stream: &Stream) {
        let content = Rng::new(9).bytes(PERIOD);
        match direction {
            Direction::Gather => {
                let mut at = 0;
                while at < self.page_bytes {
                    let n = PERIOD.min(self.page_bytes - at);
                    cu!(cuMemcpyHtoD_v2(self.pages.addr + at as u64, content.as_ptr().cast(), n));
                    at += n;
                }
                self.slab.bytes().fill(0);
            }
            Direction::Scatter => {
                for chunk in self.slab.bytes().chunks_mut(PERIOD) {
                    chunk.copy_from_slice(&content[..chunk.len()]);
                }
                cu!(cuMemsetD8_v2(self.pages.addr, 0, self.page_bytes));
            }
        }
        cu!(cuCtxSynchronize());
        for job in self.jobs(direction) {
            // SAFETY: cache and slabs live until the wait.
            unsafe { mover.copy_on(&job, stream.0) }.unwrap().wait().unwrap();
        }
        let mut pages = Vec::new();
        if direction == Direction::Scatter {
            pages = self.pages.read(self.page_bytes);
        }
        let periodic =
            |at: usize, found: &[u8]| found.iter().zip(at..).all(|(b, i)| *b == content[i % PERIOD]);
        let (r, head) = (&self.reference, self.layout.head_bytes());
        let index = |n: u64| usize::try_from(n).unwrap();
        for slab in [0, self.slabs - 1] {
            let image = slab * self.slab_bytes;
            for kv in 0..r.planes {
                for layer in 0..r.layers {
                    for (token, slot) in (0u64..).zip(&self.lists[slab]) {
                        for n in 0..self.layout.num_heads() {
                            let paged = index(r.paged_offset(kv, layer, slot.unsigned_abs(), n * head));
                            let row = ((kv * r.layers + layer) * TOKENS + token) * r.row_bytes() + n * head;
                            let packed = image + index(row);
                            let same = match direction {
                                Direction::Gather => {
                                    periodic(paged, &self.slab.bytes()[packed..packed + index(head)])
                                }
                                Direction::Scatter => periodic(packed, &pages[paged..paged + index(head)]),
                            };
                            assert!(
                                same,
                                "{direction:?}: kv {kv} layer {layer} token {token} head {n} differs"
                            );
                        }
                    }
                }
            }
        }
    }
}
