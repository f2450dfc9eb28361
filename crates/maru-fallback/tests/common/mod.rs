//! A cache and slabs in one test's memory, moved by the mover and by the oracle, compared byte by byte.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::sync::Arc;

use maru_fallback::{HostMover, Store, Tuning};
use maru_layout::oracle::Reference;
use maru_layout::{
    Axis, CacheSpec, CopyJob, CopyPlan, DType, Direction, JobRequest, PagedLayout, SlabLayout, SlabSpan,
    SlotMapping, TensorDesc,
};

/// Canary bytes around every memory, more than any vector is wide.
pub const GUARD: usize = 192;

/// Memory whose first used byte has a chosen misalignment from a line, with random bytes all around.
#[derive(Clone)]
pub struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    pub fn new(len: usize, off: usize, seed: u64) -> Memory {
        let mut random = Random(seed | 1);
        let bytes: Vec<u8> = (0..len + 2 * GUARD + 128).map(|_| random.byte()).collect();
        let start = GUARD + bytes[GUARD..].as_ptr().align_offset(64) + off;
        Memory { bytes, start, len }
    }

    /// Address of the first used byte. Everything is reached through this pointer until the next `&mut`.
    pub fn addr(&mut self) -> u64 {
        self.bytes[self.start..].as_mut_ptr().expose_provenance() as u64
    }

    pub fn used(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    /// Guards included.
    pub fn all(&self) -> &[u8] {
        &self.bytes
    }

    /// A copy for the oracle: same bytes at the same places of the vector.
    pub fn twin(&self) -> Memory {
        self.clone()
    }
}

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn byte(&mut self) -> u8 {
        (self.next() >> 32) as u8
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// `count` distinct slots in runs that often end inside a block, some skipped.
    pub fn slots(&mut self, count: u64, num_slots: u64, skips: bool) -> Vec<i64> {
        let mut all: Vec<i64> = (0..num_slots as i64).collect();
        let run = 1 + self.below(7) as usize;
        let mut runs: Vec<Vec<i64>> = all.chunks(run).map(<[i64]>::to_vec).collect();
        for i in (1..runs.len()).rev() {
            runs.swap(i, self.below(i as u64 + 1) as usize);
        }
        all = runs.concat();
        all.truncate(count as usize);
        if skips {
            for slot in &mut all {
                if self.below(5) == 0 {
                    *slot = -1;
                }
            }
        }
        all
    }
}

/// A registered cache: tensors of one description at these offsets.
#[derive(Clone)]
pub struct Cache {
    pub name: &'static str,
    pub tensor: TensorDesc,
    pub axes: Vec<Axis>,
    pub spec: CacheSpec,
    pub planes: u64,
    pub layers: u64,
    pub tensors: Vec<u64>,
    pub bytes: u64,
}

impl Cache {
    /// One tensor per layer (K and V inside, or one plane), or all K then all V with `split`, `gap` bytes apart.
    pub fn new(
        name: &'static str,
        axes: &str,
        shape: &[i64],
        strides: Option<&[i64]>,
        dtype: DType,
        layers: u64,
    ) -> Cache {
        let split = name.contains("split");
        let tensor = match strides {
            Some(s) => TensorDesc::strided(shape, s, dtype).expect(name),
            None => TensorDesc::contiguous(shape, dtype).expect(name),
        };
        let axes = Axis::parse_list(axes).expect(name);
        let has = |a| axes.contains(&a);
        let planes = if has(Axis::Kv) || has(Axis::KvDim) || split { 2 } else { 1 };
        let count = match () {
            () if has(Axis::Layer) => 1,
            () if split => 2 * layers,
            () => layers,
        };
        // Layers that interleave (block outermost) lie inside each other's spans.
        let interleaved = name.contains("interleaved");
        let step = if interleaved {
            strides.expect(name)[0] as u64 * dtype.size() / layers
        } else {
            tensor.span_bytes() + 48
        };
        let tensors: Vec<u64> = (0..count).map(|i| i * step).collect();
        let bytes = tensors.last().expect(name) + tensor.span_bytes();
        let spec = CacheSpec {
            axes: Some(axes.clone()),
            split_kv: split,
            block_size: has(Axis::Slot).then_some(4),
            ..CacheSpec::default()
        };
        Cache { name, tensor, axes, spec, planes, layers, tensors, bytes }
    }

    pub fn layout(&self) -> PagedLayout {
        PagedLayout::detect(&self.tensor, &self.spec).expect(self.name)
    }

    pub fn reference(&self) -> Reference {
        Reference {
            tensor: self.tensor.clone(),
            axes: self.axes.clone(),
            block_size: self.layout().block_size(),
            planes: self.planes,
            layers: self.layers,
            tensors: self.tensors.clone(),
        }
    }

    pub fn bases(&self, cache: u64) -> Vec<u64> {
        let layout = self.layout();
        let mut bases = Vec::new();
        for kv in 0..self.planes {
            for layer in 0..self.layers {
                let tensor = match () {
                    () if layout.layers() > 1 => 0,
                    () if layout.kv_planes() == self.planes => layer,
                    () => kv * self.layers + layer,
                };
                let inside = layout
                    .plane_offset(
                        if layout.kv_planes() > 1 { kv } else { 0 },
                        if layout.layers() > 1 { layer } else { 0 },
                    )
                    .expect(self.name);
                bases.push(cache + self.tensors[tensor as usize] + inside);
            }
        }
        bases
    }

    pub fn slab(&self, tokens: u64) -> SlabLayout {
        SlabLayout::of_cache(&self.layout(), self.planes, self.layers, tokens).expect(self.name)
    }

    pub fn plan(&self, cache: u64, slab: &SlabLayout) -> Arc<CopyPlan> {
        Arc::new(CopyPlan::new(&self.layout(), slab, self.bases(cache)).expect(self.name))
    }
}

pub fn request(direction: Direction, slab: u64, len: u64, slots: &[i64]) -> JobRequest {
    JobRequest {
        direction,
        slab: SlabSpan { host: Some(slab), device: None, len },
        slots: SlotMapping::from_slots(slots),
        skip_tokens: 0,
        partial: true,
        layers: None,
    }
}

/// A mover that takes every path also for tests' small jobs.
pub fn mover(threads: usize, store: Store) -> HostMover {
    let tuning = Tuning { store: Some(store), stream_from: 0, unit_bytes: 256, piece_bytes: 1 << 10 };
    HostMover::tuned(threads, tuning).expect("mover")
}

/// Moves both ways with the mover and with the oracle and compares all memory, guards included.
pub fn check(
    cache: &Cache,
    mover: &HostMover,
    tokens: u64,
    slots: &[i64],
    skip: u64,
    offs: (usize, usize),
    seed: u64,
) {
    for direction in [Direction::Gather, Direction::Scatter] {
        let slab = cache.slab(tokens);
        let mut paged = Memory::new(cache.bytes as usize, offs.0, seed);
        let mut packed = Memory::new(slab.bytes() as usize, offs.1, seed ^ 0x5555_0000);
        let (mut paged_twin, mut packed_twin) = (paged.twin(), packed.twin());
        let written =
            cache.reference().copy(direction, paged_twin.used(), packed_twin.used(), tokens, slots, skip);
        let plan = cache.plan(paged.addr(), &slab);
        let mut wanted = request(direction, packed.addr(), slab.bytes(), slots);
        wanted.skip_tokens = skip;
        let job = CopyJob::new(plan, wanted).expect(cache.name);
        assert_eq!(job.bytes(), written, "{} {direction:?}: the oracle moves something else", cache.name);
        // SAFETY: both memories are alive and only used here.
        unsafe { mover.copy(&job) }.expect(cache.name);
        let what = format!("{} {direction:?} {tokens} tokens skip {skip} offsets {offs:?}", cache.name);
        same(paged.all(), paged_twin.all(), &format!("{what}: cache"));
        same(packed.all(), packed_twin.all(), &format!("{what}: slab"));
    }
}

/// `assert_eq` that names the first difference instead of printing both.
pub fn same(found: &[u8], wanted: &[u8], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    if let Some(at) = found.iter().zip(wanted).position(|(a, b)| a != b) {
        panic!("{what}: byte {at} is {}, should be {}", found[at], wanted[at]);
    }
}
