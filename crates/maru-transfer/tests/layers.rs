//! Transfers layer by layer through the public API: host memory, and a mover of the user's own.
#![allow(clippy::cast_possible_truncation, reason = "test sizes are small")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use maru_cxl::{Region, Slab};
use maru_layout::{CacheSpec, CopyJob, DType, SlotMapping, TensorDesc};
use maru_transfer::config::{Config, DeviceChoice};
use maru_transfer::{
    CacheTensor, Capabilities, Completion, Enqueued, Event, PagedCache, Pending, Place, Prepared,
    RegisteredCache, Stream, Tensors, Transfer, TransferBackend, TransferEngine, TransferError,
    TransferRequest,
};

const LAYERS: u32 = 3;
const TOKENS: u32 = 32;

fn config() -> Config {
    let mut config = Config::default();
    config.transfer.device = DeviceChoice::Host;
    config.transfer.kv_chunk_tokens = TOKENS;
    config
}

/// A cache of [`LAYERS`] layers of 64 slots in memory of its own; `head_size` elements make two heads large or
/// small.
struct World {
    engine: TransferEngine,
    memory: Slab,
    cache: RegisteredCache,
}

/// Two slabs of a layer: 512 KiB, and 2 KiB.
const LARGE: i64 = 2048;
const SMALL: i64 = 8;

fn memory(len: u64) -> Slab {
    Region::anonymous(len).expect("anonymous memory").slab(0, len).expect("the whole region")
}

fn world(engine: TransferEngine, head_size: i64) -> World {
    let desc = TensorDesc::contiguous(&[4, 2, 16, 2, head_size], DType::Bf16).expect("a sound tensor");
    let each = desc.span_bytes();
    let memory = memory(each * u64::from(LAYERS));
    let bytes: Vec<u8> = (0..memory.len()).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 11) as u8).collect();
    memory.write_at(0, &bytes).expect("writable");
    let base = memory.addr().as_ptr().expose_provenance() as u64;
    let layer = |l| CacheTensor { addr: base + u64::from(l) * each, len: each, desc: desc.clone() };
    let tensors = Tensors::PerLayer((0..LAYERS).map(layer).collect());
    let spec = CacheSpec { block_size: Some(16), ..CacheSpec::default() };
    // SAFETY: the memory lives as long as the world.
    let cache = unsafe { PagedCache::new(&tensors, &spec, Place::Host, Some(LAYERS as usize)) };
    let cache = engine.register(cache.expect("a sound cache")).expect("registers");
    World { engine, memory, cache }
}

impl World {
    fn slab(&self) -> Slab {
        memory(self.cache.slab_layout().bytes())
    }

    fn store(&self, first_slot: i64, slab: &Slab) -> TransferRequest {
        let slots: Vec<i64> = (first_slot..first_slot + i64::from(TOKENS)).collect();
        TransferRequest::gather(&self.cache, SlotMapping::from_slots(slots), slab)
    }
}

fn content(slab: &Slab) -> Vec<u8> {
    let mut bytes = vec![0; slab.len() as usize];
    slab.read_at(0, &mut bytes).expect("readable");
    bytes
}

type Call<'a> = &'a dyn Fn(&mut Transfer) -> Result<(), TransferError>;

/// Notes which layers come in, and is done with a step when told.
#[derive(Debug, Default)]
struct Steps {
    seen: Mutex<Vec<Vec<(u32, u32)>>>,
    done: Mutex<Vec<Arc<AtomicBool>>>,
    fail_at: Option<usize>,
}

#[derive(Debug)]
struct OneStep(Arc<AtomicBool>);

impl Pending for OneStep {
    fn is_done(&mut self) -> Result<bool, TransferError> {
        Ok(self.0.load(Ordering::SeqCst))
    }
    fn wait(&mut self) -> Result<(), TransferError> {
        self.0.store(true, Ordering::SeqCst);
        Ok(())
    }
    fn order_before(&mut self, _: Stream) -> Result<(), TransferError> {
        Ok(())
    }
}

#[derive(Debug)]
struct Noting(Arc<Steps>);

impl TransferBackend for Noting {
    fn name(&self) -> &'static str {
        "noting"
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::new().with_unregistered_slab(true).with_asynchronous(true)
    }
    fn prepare(&self, _: &PagedCache) -> Result<Prepared, TransferError> {
        Ok(None)
    }
    unsafe fn enqueue(&self, _: &Prepared, jobs: &[CopyJob], _: Stream) -> Result<Enqueued, TransferError> {
        let mut seen = self.0.seen.lock().expect("no panic");
        if self.0.fail_at == Some(seen.len()) {
            return Err(TransferError::Mover { mover: "noting".into(), message: "as told".into() });
        }
        seen.push(jobs.iter().map(|job| (job.first_layer(), job.layer_count())).collect());
        let done = Arc::new(AtomicBool::new(false));
        self.0.done.lock().expect("no panic").push(Arc::clone(&done));
        Ok(Enqueued { completion: Completion::Pending(Box::new(OneStep(done))), strategy: "noted" })
    }
}

fn noting(fail_at: Option<usize>) -> (TransferEngine, Arc<Steps>) {
    let steps = Arc::new(Steps { fail_at, ..Steps::default() });
    let backend = Box::new(Noting(Arc::clone(&steps)));
    (TransferEngine::with_backend(&config(), Place::Host, backend).expect("own mover"), steps)
}

fn flags(steps: &Steps) -> Vec<bool> {
    steps.done.lock().expect("no panic").iter().map(|done| done.load(Ordering::SeqCst)).collect()
}

#[test]
fn layer_by_layer_moves_the_same_bytes() {
    for head_size in [SMALL, LARGE] {
        let w = world(TransferEngine::open(&config()).expect("host engine"), head_size);
        let (whole, layered) = (w.slab(), w.slab());
        w.engine.submit(&w.store(7, &whole)).expect("stores").wait().expect("done");
        let mut transfer = w.engine.submit_by_layer(&[w.store(7, &layered)], &[]).expect("stores");
        assert_eq!((transfer.bytes(), transfer.strategy()), (whole.len(), "host"));
        assert!(transfer.layer_done(0).expect("no error") && transfer.is_done().expect("no error"));
        transfer.wait().expect("done");
        assert!(content(&whole) == content(&layered) && content(&whole).iter().any(|b| *b != 0));
    }
}

#[test]
fn the_layers_of_all_slabs_come_in_order() {
    let (engine, steps) = noting(None);
    let w = world(engine, LARGE);
    let slab = w.slab();
    let batch = [w.store(0, &slab), w.store(8, &slab).layers(1, 2), w.store(16, &slab).layers(2, 1)];
    let mut transfer = w.engine.submit_by_layer(&batch, &[]).expect("queued");
    let seen = steps.seen.lock().expect("no panic").clone();
    assert_eq!(seen, [vec![(0, 1)], vec![(1, 1), (1, 1)], vec![(2, 1), (2, 1), (2, 1)]]);
    transfer.wait_layer(0).expect("done");
    assert_eq!(flags(&steps), [true, false, false], "only the layer that was asked for is waited for");
    assert!(transfer.layer_done(0).expect("no error") && !transfer.layer_done(2).expect("no error"));
    assert!(!transfer.is_done().expect("no error"));
    transfer.wait().expect("done");
    assert_eq!(flags(&steps), [true; 3]);
}

#[test]
fn small_layers_go_together_unless_they_wait_for_events() {
    let (engine, steps) = noting(None);
    let w = world(engine, SMALL);
    let slab = w.slab();
    let mut transfer = w.engine.submit_by_layer(&[w.store(0, &slab)], &[]).expect("queued");
    assert_eq!(*steps.seen.lock().expect("no panic"), [vec![(0, LAYERS)]]);
    transfer.wait_layer(2).expect("done");
    assert!(transfer.layer_done(0).expect("no error"), "they come together");
    drop(transfer);
    let transfer = w.engine.submit_by_layer(&[w.store(0, &slab)], &[None; 1]).expect("queued");
    assert_eq!(steps.seen.lock().expect("no panic").len(), 1 + LAYERS as usize);
    drop(transfer);
}

#[test]
fn a_layer_that_is_not_moved_is_done_and_one_that_is_not_there_an_error() {
    let (engine, steps) = noting(None);
    let w = world(engine, LARGE);
    let slab = w.slab();
    let layered = |r: TransferRequest| w.engine.submit_by_layer(&[r], &[]).expect("queued");
    let mut part = layered(w.store(0, &slab).layers(1, 1));
    assert!(part.layer_done(0).expect("not part of it") && !part.layer_done(1).expect("no error"));
    let mut whole = w.engine.submit(&w.store(0, &slab)).expect("queued");
    for transfer in [&mut part, &mut whole] {
        let calls: [Call<'_>; 3] = [&|t| t.layer_done(LAYERS).map(drop), &|t| t.wait_layer(LAYERS), &|t| {
            t.order_before_layer(Stream::none(), LAYERS)
        }];
        for call in calls {
            let error = call(transfer).expect_err("there are three layers");
            assert!(error.to_string().contains("layers 3..4"), "{error}");
        }
    }
    assert!(!whole.layer_done(2).expect("no error"), "submitted whole, a layer is done with all");
    whole.wait_layer(0).expect("done");
    assert_eq!(flags(&steps), [false, true]);
}

#[test]
fn a_step_that_fails_waits_for_those_before_it() {
    let (engine, steps) = noting(Some(2));
    let w = world(engine, LARGE);
    let slab = w.slab();
    let error = w.engine.submit_by_layer(&[w.store(0, &slab)], &[]).expect_err("the third step fails");
    assert_eq!(error.to_string(), "noting: as told");
    assert_eq!(flags(&steps), [true, true]);
}

#[test]
fn events_without_streams_and_too_many_events_are_refused_and_nothing_moves() {
    let w = world(TransferEngine::open(&config()).expect("host engine"), LARGE);
    let (slab, cache) = (w.slab(), content(&w.memory));
    // SAFETY: it is refused before it is used.
    let event = Some(unsafe { Event::cuda(8) });
    let error = w.engine.submit_by_layer(&[w.store(0, &slab)], &[None, event]).expect_err("no streams");
    assert_eq!(error.kind(), "not_available", "{error}");
    let error = w.engine.submit_by_layer(&[w.store(0, &slab)], &[event; 4]).expect_err("three layers");
    assert!(error.to_string().contains("layers 0..4"), "{error}");
    assert!(content(&slab).iter().all(|b| *b == 0) && content(&w.memory) == cache);
}

#[test]
fn nothing_at_all_is_done() {
    let (engine, steps) = noting(None);
    let w = world(engine, LARGE);
    let slab = w.slab();
    let mut none = w.engine.submit_by_layer(&[], &[]).expect("nothing to do");
    let mut empty = w.engine.submit_by_layer(&[w.store(0, &slab).layers(1, 0)], &[]).expect("nothing to do");
    for transfer in [&mut none, &mut empty] {
        assert!(transfer.is_done().expect("no error") && transfer.layer_done(1).expect("no error"));
        assert_eq!((transfer.bytes(), transfer.strategy()), (0, "none"));
    }
    assert!(steps.seen.lock().expect("no panic").is_empty());
}
