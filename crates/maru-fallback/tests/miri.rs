//! The host mover on heap memory, small enough for an interpreter: `cargo miri test --test miri`.
//!
//! Every tensor and every slab is an allocation of its own, exactly as long as it must be, so that Miri sees each
//! byte read or written beside it. The bytes are those of the oracle. Runs as an ordinary test too.
#![allow(
    missing_docs,
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "a test, of small numbers"
)]

mod common;

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::Range;
use std::sync::Arc;

use common::{Cache, Random, request, same};
use maru_fallback::{HostMover, Store, Tuning};
use maru_layout::DType::{Bf16, F32, Raw32, Raw64, U8};
use maru_layout::{CopyJob, CopyPlan, Direction, PagedLayout, SlabLayout};

/// Bytes on the heap that begin `off` bytes behind a line's border and end where the allocation ends.
struct Heap {
    start: *mut u8,
    layout: Layout,
    off: usize,
}

impl Heap {
    fn new(bytes: &[u8], off: usize) -> Heap {
        let layout = Layout::from_size_align(off + bytes.len(), 64).unwrap();
        assert!(layout.size() > 0);
        // SAFETY: the size is not 0.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        let heap = Heap { start, layout, off };
        // SAFETY: `off + bytes.len()` bytes were allocated just now, so they are nobody's yet.
        unsafe { heap.used().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        heap
    }

    fn used(&self) -> *mut u8 {
        self.start.wrapping_add(self.off)
    }

    /// For a job: what is reached through this number is reached through the allocation.
    fn addr(&self) -> u64 {
        self.used().expose_provenance() as u64
    }

    fn read(&self) -> Vec<u8> {
        let len = self.layout.size() - self.off;
        // SAFETY: these bytes were written when they were allocated; no mover runs while a test reads.
        unsafe { std::slice::from_raw_parts(self.used(), len) }.to_vec()
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and not used after this.
        unsafe { dealloc(self.start, self.layout) };
    }
}

/// A cache and one list of slots, with everything that is the same for each transfer: an interpreter takes
/// milliseconds for the address of a byte, and a second to detect a layout.
struct Known {
    cache: Cache,
    layout: PagedLayout,
    slab: SlabLayout,
    /// Offsets of the planes in the cache's memory.
    planes: Vec<u64>,
    slots: Vec<i64>,
    /// Where each element of each token is: the token, its place in the cache by the oracle, and in the slab by
    /// the formula.
    elements: Vec<(u64, usize, usize)>,
}

impl Known {
    fn new(cache: Cache, slots: &[i64]) -> Known {
        let (layout, reference, planes) = (cache.layout(), cache.reference(), cache.bases(0));
        // Room for one token more than is moved.
        let tokens = slots.len() as u64 + 1;
        let slab = SlabLayout::of_cache(&layout, cache.planes, cache.layers, tokens).unwrap();
        let (row, element) = (reference.row_bytes(), cache.tensor.dtype().size());
        let mut elements = Vec::new();
        for plane in 0..cache.planes * cache.layers {
            for (token, slot) in (0..).zip(slots).filter(|(_, slot)| **slot >= 0) {
                for byte in (0..row).step_by(element as usize) {
                    let (kv, layer) = (plane / cache.layers, plane % cache.layers);
                    let paged = reference.paged_offset(kv, layer, *slot as u64, byte);
                    elements.push((token, paged as usize, ((plane * tokens + token) * row + byte) as usize));
                }
            }
        }
        Known { cache, layout, slab, planes, slots: slots.to_vec(), elements }
    }

    /// Both sides after a transfer, and the bytes that it moves.
    fn after(&self, direction: Direction, skip: u64, image: &mut [u8], packed: &mut [u8]) -> u64 {
        let width = self.cache.tensor.dtype().size() as usize;
        let mut moved = 0;
        for &(_, paged, slab) in self.elements.iter().filter(|(token, ..)| *token >= skip) {
            let (paged, slab) = (&mut image[paged..paged + width], &mut packed[slab..slab + width]);
            match direction {
                Direction::Gather => slab.copy_from_slice(paged),
                Direction::Scatter => paged.copy_from_slice(slab),
            }
            moved += width as u64;
        }
        moved
    }

    fn job(&self, tensors: &Tensors, slab: &Heap, direction: Direction, skip: u64) -> CopyJob {
        let mut wanted = request(direction, slab.addr(), self.slab.bytes(), &self.slots);
        wanted.skip_tokens = skip;
        let plan = CopyPlan::new(&self.layout, &self.slab, tensors.bases(&self.planes)).unwrap();
        CopyJob::new(Arc::new(plan), wanted).unwrap()
    }
}

/// A cache's tensors, each in memory of its own unless they lie inside each other.
struct Tensors {
    extents: Vec<(Range<u64>, Heap)>,
}

impl Tensors {
    /// `image` has the tensors at the places where the cache says they are.
    fn new(known: &Known, image: &[u8], off: usize) -> Tensors {
        let cache = &known.cache;
        let ranges = match cache.name.contains("interleaved") {
            true => std::iter::once(0..cache.bytes).collect::<Vec<_>>(),
            false => cache.tensors.iter().map(|at| *at..at + cache.tensor.span_bytes()).collect(),
        };
        let extent = |r: Range<u64>| (r.clone(), Heap::new(&image[r.start as usize..r.end as usize], off));
        Tensors { extents: ranges.into_iter().map(extent).collect() }
    }

    /// Addresses of what is at these offsets of the cache's memory.
    fn bases(&self, offsets: &[u64]) -> Vec<u64> {
        let addr = |at: &u64| {
            let (range, heap) = self.extents.iter().find(|(range, _)| range.contains(at)).unwrap();
            heap.addr() + at - range.start
        };
        offsets.iter().map(addr).collect()
    }

    /// That every tensor has the bytes which are in its place of the image.
    fn check(&self, image: &[u8], what: &str) {
        for (range, heap) in &self.extents {
            equal(&heap.read(), &image[range.start as usize..range.end as usize], what);
        }
    }
}

/// Movers of one thread with every kind of store there is and jobs cut small.
fn movers() -> Vec<HostMover> {
    let small = |store| Tuning { store: Some(store), stream_from: 0, unit_bytes: 256, piece_bytes: 1 << 10 };
    Store::available().into_iter().map(|store| HostMover::tuned(1, small(store)).unwrap()).collect()
}

fn random(len: u64, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..len).map(|_| random.byte()).collect()
}

/// All at once where nothing differs.
fn equal(found: &[u8], wanted: &[u8], what: &str) {
    if found != wanted {
        same(found, wanted, what);
    }
}

/// What a transfer leaves out at its start, and by how much cache and slab are off a line's border.
type Way = (u64, (usize, usize));

/// Both directions: the bytes of the oracle, on both sides.
fn exact(known: &Known, movers: &[HostMover], ways: &[Way]) {
    let (image, packed) = (random(known.cache.bytes, 0x5eed_0001), random(known.slab.bytes(), 0x5eed_0002));
    for &(skip, offs) in ways {
        for direction in [Direction::Gather, Direction::Scatter] {
            let (mut image_after, mut packed_after) = (image.clone(), packed.clone());
            let moved = known.after(direction, skip, &mut image_after, &mut packed_after);
            for mover in movers {
                let (tensors, slab) = (Tensors::new(known, &image, offs.0), Heap::new(&packed, offs.1));
                let job = known.job(&tensors, &slab, direction, skip);
                assert_eq!(job.bytes(), moved, "{}", known.cache.name);
                // SAFETY: the memories are alive and only used here.
                unsafe { mover.copy(&job) }.unwrap();
                let what = format!("{} {direction:?} skip {skip} offsets {offs:?}", known.cache.name);
                tensors.check(&image_after, &what);
                equal(&slab.read(), &packed_after, &what);
            }
        }
    }
}

/// Ends of blocks, slots in no order, two that are skipped.
const SLOTS: [i64; 7] = [6, 7, -1, 2, 1, 5, -1];

macro_rules! layouts {
    ($($name:ident: $label:literal, $axes:literal, $shape:expr, $strides:expr, $dtype:expr, $layers:literal;)*) => {$(
        #[test]
        fn $name() {
            let known = Known::new(Cache::new($label, $axes, &$shape, $strides, $dtype, $layers), &SLOTS);
            exact(&known, &movers(), &[(0, (0, 0)), (1, (1, 16))]);
        }
    )*};
}

layouts! {
    nhd: "nhd", "block,kv,token,head,dim", [2, 2, 4, 2, 4], None, Bf16, 2;
    kv_first: "kv first", "kv,block,token,head,dim", [2, 2, 4, 3, 2], None, U8, 1;
    hnd: "hnd", "block,kv,token,head,dim", [2, 2, 4, 3, 4], Some(&[96, 48, 4, 16, 1]), Bf16, 1;
    hnd_heads_equal_block: "hnd 4=4", "block,kv,token,head,dim", [2, 2, 4, 4, 2], Some(&[64, 32, 2, 8, 1]), F32, 1;
    fused: "LBHNC", "block,head,token,kv_dim", [2, 2, 4, 8], None, Bf16, 1;
    fused_interleaved_layers: "BLNHC interleaved", "block,head,token,kv_dim", [2, 3, 4, 4], Some(&[96, 4, 12, 1]), Bf16, 2;
    fused_odd_width: "fused odd", "block,head,token,kv_dim", [2, 3, 4, 6], None, F32, 1;
    mla: "mla", "block,token,dim", [2, 4, 9], None, Bf16, 1;
    mla_padded: "mla padded", "block,token,dim", [2, 4, 9], Some(&[44, 10, 1]), F32, 1;
    whole_lines: "lines", "block,token,dim", [2, 4, 16], None, Raw64, 1;
    keys_and_values_apart: "split", "slot,head,dim", [8, 2, 4], None, Bf16, 2;
    cross_layer_heads_first: "trt", "block,layer,kv,head,token,dim", [2, 2, 2, 2, 4, 3], None, Bf16, 2;
    opaque_blocks: "opaque blocks", "block,content", [8, 20], Some(&[24, 1]), Raw32, 1;
    one_token_blocks: "one token", "block,kv,token,head,dim", [8, 2, 1, 2, 4], None, Bf16, 1;
}

fn nhd_cache(slots: &[i64]) -> Known {
    Known::new(Cache::new("nhd", "block,kv,token,head,dim", &[2, 2, 4, 2, 4], None, Bf16, 1), slots)
}

#[test]
fn nothing_to_move_touches_nothing() {
    let movers = movers();
    exact(&nhd_cache(&[]), &movers, &[(0, (0, 0))]);
    exact(&nhd_cache(&[-1, -1, -1]), &movers, &[(0, (0, 0))]);
    exact(&nhd_cache(&[3, 1, 2]), &movers, &[(3, (0, 0))]);
}

#[test]
fn the_mover_that_users_get() {
    exact(&nhd_cache(&SLOTS), &[HostMover::new(1).unwrap()], &[(0, (0, 0))]);
}

/// Rows of 1088 bytes: a part of a line at either end, whole lines between.
#[test]
fn rows_that_stream() {
    let cache = Cache::new("wide", "block,token,dim", &[2, 2, 136], Some(&[290, 140, 1]), Raw64, 1);
    exact(&Known::new(cache, &[2, 1]), &movers(), &[(0, (0, 0)), (0, (8, 24))]);
}

/// Two threads use one mover, on the same tensors but not the same slots: a byte that one touches beside its own
/// is a race.
#[test]
fn neighbours_in_a_cache_are_independent() {
    let known = [[0, 2, 4, 6], [1, 3, 5, 7]].map(|slots| nhd_cache(&slots));
    for mover in movers() {
        let mut image = random(known[0].cache.bytes, 3);
        let tensors = Tensors::new(&known[0], &image, 3);
        let jobs = [4, 5].map(|seed| {
            let known = &known[seed - 4];
            let mut packed = random(known.slab.bytes(), seed as u64);
            let slab = Heap::new(&packed, 0);
            known.after(Direction::Scatter, 0, &mut image, &mut packed);
            (known.job(&tensors, &slab, Direction::Scatter, 0), slab)
        });
        std::thread::scope(|scope| {
            for (job, _) in &jobs {
                let mover = &mover;
                // SAFETY: the memories outlive the scope, and the jobs write different slots.
                scope.spawn(move || unsafe { mover.copy(job) }.unwrap());
            }
        });
        tensors.check(&image, "the cache");
    }
}

/// One job on the mover's own threads. Under Miri it needs flags of its own, for the sake of the thread pool's
/// dependencies; see `docs/faults.md`.
#[test]
#[cfg_attr(miri, ignore = "the pool needs -Zmiri-tree-borrows -Zmiri-ignore-leaks")]
fn pool() {
    let tuning = Tuning { store: None, stream_from: 0, unit_bytes: 64, piece_bytes: 1 << 10 };
    exact(&nhd_cache(&SLOTS), &[HostMover::tuned(3, tuning).unwrap()], &[(0, (1, 0))]);
}
