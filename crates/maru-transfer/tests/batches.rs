//! Batches whose slabs write the same slots, and batches of many threads at once.
#![allow(clippy::cast_possible_truncation, reason = "test sizes are small")]

use std::sync::Arc;

use maru_cxl::{Region, Slab};
use maru_layout::{CacheSpec, DType, LayoutError, SlotMapping, TensorDesc};
use maru_transfer::config::{Config, DeviceChoice};
use maru_transfer::{
    CacheTensor, PagedCache, Place, RegisteredCache, Tensors, TransferEngine, TransferError, TransferRequest,
};

/// One plane of 64 blocks of 4 tokens, 8 bytes a token.
const SLOTS: i64 = 256;
const TOKEN: usize = 8;
const TOKENS: usize = 8;

struct World {
    engine: TransferEngine,
    cache: RegisteredCache,
    pages: Slab,
}

fn memory(len: usize) -> Slab {
    let len = u64::try_from(len).expect("small");
    Region::anonymous(len).expect("anonymous memory").slab(0, len).expect("the whole region")
}

fn world() -> World {
    let mut config = Config::default();
    config.transfer.device = DeviceChoice::Host;
    config.transfer.kv_chunk_tokens = 8;
    let engine = TransferEngine::open(&config).expect("a host engine");
    let desc = TensorDesc::contiguous(&[SLOTS / 4, 4, 8], DType::U8).expect("a sound tensor");
    let pages = memory(SLOTS.unsigned_abs() as usize * TOKEN);
    let addr = pages.addr().as_ptr().expose_provenance() as u64;
    let tensors = Tensors::PerLayer(vec![CacheTensor { addr, len: desc.span_bytes(), desc }]);
    let spec = CacheSpec { block_size: Some(4), mla: true, ..CacheSpec::default() };
    // SAFETY: the memory lives as long as the world, which waits for every transfer.
    let paged = unsafe { PagedCache::new(&tensors, &spec, Place::Host, Some(1)) }.expect("a sound cache");
    let cache = engine.register(paged).expect("registers");
    World { engine, cache, pages }
}

/// A slab whose every byte is `value`.
fn slab(value: u8) -> Slab {
    let slab = memory(TOKENS * TOKEN);
    slab.write_at(0, &[value; TOKENS * TOKEN]).expect("writable");
    slab
}

impl World {
    fn load(&self, slots: [i64; TOKENS], value: u8) -> TransferRequest {
        TransferRequest::scatter(&self.cache, SlotMapping::from_slots(slots), &slab(value))
    }

    fn submit(&self, requests: &[TransferRequest]) -> Result<(), TransferError> {
        self.engine.submit_many(requests)?.wait()
    }

    /// The first byte of each slot, all of whose bytes are the same.
    fn slots(&self) -> Vec<u8> {
        self.some_slots(0, SLOTS.unsigned_abs())
    }

    fn some_slots(&self, first: u64, count: u64) -> Vec<u8> {
        let mut bytes = vec![0; count as usize * TOKEN];
        self.pages.read_at(first * TOKEN as u64, &mut bytes).expect("readable");
        let same = |slot: &[u8]| slot.iter().all(|byte| *byte == slot[0]);
        bytes.chunks(TOKEN).inspect(|slot| assert!(same(slot))).map(|slot| slot[0]).collect()
    }
}

fn from(first: i64) -> [i64; TOKENS] {
    std::array::from_fn(|t| first + t as i64)
}

#[test]
fn slabs_of_a_batch_that_write_the_same_slots_do_so_in_their_order() {
    let world = world();
    let requests = [(0, 1), (8, 2), (4, 3), (16, 4), (6, 5), (0, 6)];
    let batch: Vec<_> = requests.iter().map(|&(first, value)| world.load(from(first), value)).collect();
    world.submit(&batch).expect("no slab names a slot twice");
    let mut expect = vec![0; SLOTS.unsigned_abs() as usize];
    for (first, value) in requests {
        from(first).iter().for_each(|slot| expect[slot.unsigned_abs() as usize] = value);
    }
    assert_eq!(world.slots(), expect);
}

#[test]
fn a_slot_twice_in_one_slab_of_a_batch_is_refused_before_anything_moves() {
    let world = world();
    let twice = [40, 41, 42, 43, -1, 5, 41, 44];
    // It shares slot 5 with the first slab, which is none of its faults.
    let batch = [world.load(from(0), 1), world.load(twice, 2), world.load([0; TOKENS], 3)];
    match world.submit(&batch) {
        Err(TransferError::Layout(error)) => {
            assert_eq!(error, LayoutError::DuplicateSlot { slot: 41, first: 1, second: 6 });
        }
        other => panic!("{other:?}"),
    }
    assert!(world.slots().iter().all(|byte| *byte == 0));
    // The slots that it named are free for others.
    world.submit(&[world.load(from(0), 1), world.load(from(40), 2)]).expect("nothing twice");
    assert_eq!((world.slots()[7], world.slots()[41]), (1, 2));
}

#[test]
fn the_first_bad_slab_of_a_batch_is_reported_whatever_is_wrong_with_later_ones() {
    let world = world();
    let outside = [0, 1, SLOTS, -2, 4, 5, 6, 7];
    let batch = [world.load(from(0), 1), world.load(outside, 2), world.load([3; TOKENS], 3)];
    let Err(TransferError::Layout(error)) = world.submit(&batch) else { panic!("a slot is outside") };
    assert_eq!(error, LayoutError::SlotOutOfRange { token: 2, slot: SLOTS, num_slots: 256 });
    let Err(TransferError::Layout(error)) = world.submit(&[world.load([3; TOKENS], 3), batch[1].clone()])
    else {
        panic!("a slot is named twice")
    };
    assert_eq!(error, LayoutError::DuplicateSlot { slot: 3, first: 0, second: 1 });
    assert!(world.slots().iter().all(|byte| *byte == 0));
}

#[test]
fn threads_submit_batches_side_by_side() {
    let world = Arc::new(world());
    let threads = (0..8).map(|thread: u8| {
        let world = Arc::clone(&world);
        std::thread::spawn(move || {
            // 32 slots of its own, four slabs at a time, the last of which takes slots of the first two.
            let base = i64::from(thread) * 32;
            for round in 0..200 {
                let value = |slab: u8| round ^ (slab << 6);
                let places = [base, base + 8, base + 16, base + 4];
                let batch: Vec<_> =
                    (0..).zip(places).map(|(i, first)| world.load(from(first), value(i))).collect();
                world.submit(&batch).expect("slots of its own");
                let refused = world.submit(&[batch[0].clone(), world.load([base; TOKENS], 0xff)]);
                assert_eq!(refused.expect_err("a slot twice").kind(), "duplicate_slot");
                // The others' are being written.
                let found = world.some_slots(base.unsigned_abs(), 24);
                let expect = [(0, 4), (3, 8), (1, 4), (2, 8)].map(|(slab, n)| vec![value(slab); n]).concat();
                assert_eq!(found, expect, "thread {thread}, round {round}");
            }
        })
    });
    let threads: Vec<_> = threads.collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no thread failed"));
}
