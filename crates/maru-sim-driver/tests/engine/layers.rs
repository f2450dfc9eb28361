//! Transfers layer by layer: the same bytes, each layer told of alone, held back by an event of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use maru_cxl::{CudaRegistrar, Region, RegisterOptions};
use maru_layout::{DType, Direction, SlotMapping};
use maru_sim_driver::Session;
use maru_transfer::config::{BackendChoice, Config, StrategyChoice};
use maru_transfer::{Event, TransferEngine, TransferError, TransferRequest};

use crate::cases::{Dims, compare};
use crate::common::log::warnings;
use crate::common::{Device, Event as OwnEvent, Graph, Pinned, Stream, Test, context, each_failing_call};
use crate::setup::{DIMS, Setup, config, on};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        layer_by_layer_is_the_whole,
        layers_come_one_after_the_other,
        a_layer_waits_for_its_event,
        another_stream_waits_for_one_layer,
        a_transfer_by_layer_fails_at_every_call,
        fused_loads_tell_of_their_layers,
        planes_larger_than_a_buffer_are_said_once_per_cache,
        a_captured_transfer_by_layer_runs_with_every_replay,
        slabs_of_several_registrations_are_copied_apart,
        under_auto_nobody_waits_for_the_events_of_others,
    ]
}

const BOTH: [Direction; 2] = [Direction::Gather, Direction::Scatter];

/// Layers of 256 KiB for one slab: each is a step.
pub(crate) const LARGE: Dims =
    Dims { layers: 3, blocks: 6, block_size: 4, heads: 3, head_size: 1024, dtype: DType::Bf16, pad: 0 };

/// Every way to move, with the words a transfer says.
fn ways() -> [(Config, &'static str); 3] {
    let way = |backend, strategy| {
        let mut config = config(0, 24);
        config.transfer.backend = backend;
        config.transfer.strategy = strategy;
        config.transfer.staging_bytes = 4 << 20;
        config
    };
    [
        (way(BackendChoice::Native, StrategyChoice::Direct), "direct"),
        (way(BackendChoice::Native, StrategyChoice::Staged), "staged"),
        (way(BackendChoice::Fallback, StrategyChoice::Auto), "copy_engine"),
    ]
}

/// No token left out, so that a store can be staged.
fn full(session: &Session, engine: &TransferEngine, dims: Dims, direction: Direction) -> Setup {
    Setup::full(session, engine, "blocks_first_nhd", dims, direction).pinned(0)
}

fn layer_by_layer_is_the_whole(session: &Session) {
    let _context = context(0);
    let stream = Stream::new(true);
    for (config, strategy) in ways() {
        let engine = TransferEngine::open(&config).unwrap();
        for (dims, direction) in [DIMS, LARGE].into_iter().flat_map(|dims| BOTH.map(|d| (dims, d))) {
            let setup = full(session, &engine, dims, direction);
            let transfer = engine.submit_by_layer(&[setup.request().on(on(&stream))], &[]).unwrap();
            assert_eq!(transfer.strategy(), strategy);
            transfer.wait().unwrap();
            setup.check(session);
        }
    }
}

fn layers_come_one_after_the_other(session: &Session) {
    let _context = context(0);
    let stream = Stream::new(true);
    for (config, strategy) in ways() {
        let engine = TransferEngine::open(&config).unwrap();
        for direction in BOTH {
            let setup = full(session, &engine, LARGE, direction);
            session.set("delay_us", 3000);
            session.set("word_us", 3000);
            let mut transfer = engine.submit_by_layer(&[setup.request().on(on(&stream))], &[]).unwrap();
            for layer in 0..3 {
                transfer.wait_layer(layer).unwrap();
                assert!(transfer.layer_done(layer).unwrap());
                if layer < 2 {
                    assert!(!transfer.layer_done(layer + 1).unwrap(), "{strategy} {direction:?} {layer}");
                }
            }
            assert!(transfer.is_done().unwrap());
            session.set("delay_us", 0);
            session.set("word_us", 0);
            transfer.wait().unwrap();
            setup.check(session);
        }
    }
}

fn a_layer_waits_for_its_event(session: &Session) {
    let _context = context(0);
    let (stream, other) = (Stream::new(true), Stream::new(true));
    for (config, strategy) in ways() {
        let engine = TransferEngine::open(&config).unwrap();
        for direction in BOTH {
            let setup = full(session, &engine, DIMS, direction);
            let (busy, event) = (Device::new(64), OwnEvent::new());
            session.set("delay_us", 2000);
            for _ in 0..60 {
                ok!(cuMemsetD8Async(busy.addr, 1, busy.len, other.0));
            }
            ok!(cuEventRecord(event.0, other.0));
            // SAFETY: the event lives until the transfer is over.
            let after = unsafe { Event::cuda(event.0.expose_provenance()) };
            let request = setup.request().on(on(&stream));
            let mut transfer = engine.submit_by_layer(&[request], &[None, Some(after)]).unwrap();
            transfer.wait_layer(0).unwrap();
            assert!(!event.is_over() && !transfer.layer_done(1).unwrap(), "{strategy} {direction:?}");
            transfer.wait_layer(1).unwrap();
            assert!(event.is_over());
            session.set("delay_us", 0);
            transfer.wait().unwrap();
            setup.check(session);
        }
    }
}

fn another_stream_waits_for_one_layer(session: &Session) {
    let _context = context(0);
    let (stream, attention) = (Stream::new(true), Stream::new(true));
    for (config, strategy) in ways() {
        let engine = TransferEngine::open(&config).unwrap();
        let setup = full(session, &engine, LARGE, Direction::Scatter);
        let layer_bytes = setup.paged.len / usize::try_from(LARGE.layers).unwrap();
        let seen = Device::new(layer_bytes);
        session.set("delay_us", 3000);
        // Long enough for the other stream's wait and copy.
        session.set("word_us", 20_000);
        let mut transfer = engine.submit_by_layer(&[setup.request().on(on(&stream))], &[]).unwrap();
        transfer.order_before_layer(on(&attention), 0).unwrap();
        ok!(cuMemcpyDtoDAsync_v2(seen.addr, setup.paged.addr, layer_bytes, attention.0));
        attention.wait();
        assert!(!transfer.is_done().unwrap(), "{strategy}: the stream waited for more than the layer");
        session.set("delay_us", 0);
        session.set("word_us", 0);
        compare("layer 0", &seen.read(session), &setup.images.cache_after[..layer_bytes]).unwrap();
        transfer.wait().unwrap();
        setup.check(session);
    }
}

fn a_transfer_by_layer_fails_at_every_call(session: &Session) {
    let _context = context(0);
    let (stream, event) = (Stream::new(true), OwnEvent::new());
    ok!(cuEventRecord(event.0, stream.0));
    // SAFETY: the event outlives the transfers.
    let after = unsafe { Event::cuda(event.0.expose_provenance()) };
    for ((config, strategy), direction) in ways().into_iter().flat_map(|way| BOTH.map(|d| (way.clone(), d))) {
        let engine = TransferEngine::open(&config).unwrap();
        let setup = full(session, &engine, DIMS, direction);
        let run = || -> Result<(), TransferError> {
            setup.restore(session);
            let request = setup.request().on(on(&stream));
            engine.submit_by_layer(&[request], &[Some(after), Some(after)])?.wait()?;
            setup.check(session);
            Ok(())
        };
        run().unwrap();
        for function in ["cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpy2DAsync"] {
            each_failing_call(session, function, run, |nth, _| {
                assert!(session.queued() == 0, "{strategy} {function} call {nth}");
                stream.wait();
                run().unwrap();
            });
        }
    }
}

fn fused_loads_tell_of_their_layers(session: &Session) {
    let _context = context(0);
    let stream = Stream::new(true);
    let mut config = config(0, 24);
    config.transfer.enable_fused_load = true;
    let engine = TransferEngine::open(&config).unwrap();
    let setup = full(session, &engine, LARGE, Direction::Scatter);
    session.set("word_us", 3000);
    let mut transfer = engine.submit(&setup.request().on(on(&stream))).unwrap();
    transfer.wait_layer(0).unwrap();
    assert!(!transfer.layer_done(2).unwrap());
    session.set("word_us", 0);
    transfer.wait().unwrap();
    setup.check(session);
}

/// Evenly spaced slabs are one copy where the driver does it; over two registrations it does not.
fn slabs_of_several_registrations_are_copied_apart(session: &Session) {
    const STRIDE: u64 = 8192;
    let _context = context(0);
    let stream = Stream::new(true);
    for piece_limit in [STRIDE, 1 << 20] {
        for (config, strategy) in ways() {
            let engine = TransferEngine::open(&config).unwrap();
            let setup = full(session, &engine, DIMS, Direction::Gather);
            let region = Region::anonymous(6 * STRIDE).unwrap();
            let options = RegisterOptions {
                piece_limit,
                slab_stride: STRIDE,
                required: true,
                ..RegisterOptions::default()
            };
            region.register(Arc::new(CudaRegistrar::open(0).unwrap()), options).unwrap();
            context(0);
            let slabs: Vec<_> = (0..6).map(|i| region.slab(i * STRIDE, STRIDE).unwrap()).collect();
            let requests = |direction: Direction, first: usize| -> Vec<TransferRequest> {
                let one = |(i, slab)| {
                    let slots = SlotMapping::from_slots((8 * i..8 * i + 8).collect::<Vec<i64>>());
                    match direction {
                        Direction::Gather => TransferRequest::gather(&setup.registered, slots, slab),
                        _ => TransferRequest::scatter(&setup.registered, slots, slab),
                    }
                    .slab_tokens(8)
                    .on(on(&stream))
                };
                (0i64..).zip(&slabs[first..first + 3]).map(one).collect()
            };
            for by_layer in [false, true] {
                let submit = |direction, first| match by_layer {
                    true => engine.submit_by_layer(&requests(direction, first), &[]).unwrap(),
                    false => engine.submit_many(&requests(direction, first)).unwrap(),
                };
                let stored = submit(Direction::Gather, 0);
                assert_eq!(stored.strategy(), strategy);
                stored.wait().unwrap();
                // Zeros from the other slabs.
                submit(Direction::Scatter, 3).wait().unwrap();
                assert_ne!(setup.paged.read(session), setup.images.cache);
                submit(Direction::Scatter, 0).wait().unwrap();
                compare("cache", &setup.paged.read(session), &setup.images.cache).unwrap();
            }
        }
    }
}

fn planes_larger_than_a_buffer_are_said_once_per_cache(session: &Session) {
    let _context = context(0);
    for (strategy, wanted) in [(StrategyChoice::Staged, 1), (StrategyChoice::Auto, 0)] {
        let mut config = config(0, 24);
        config.transfer.strategy = strategy;
        // Buffers of 8 KiB.
        config.transfer.staging_bytes = 32 << 10;
        let engine = TransferEngine::open(&config).unwrap();
        for _ in 0..2 {
            let large = full(session, &engine, LARGE, Direction::Scatter);
            let lines = warnings(|| {
                for _ in 0..3 {
                    let transfer = engine.submit_by_layer(&[large.request()], &[]).unwrap();
                    assert_eq!(transfer.strategy(), "direct");
                    transfer.wait().unwrap();
                }
            });
            large.check(session);
            assert_eq!(lines.len(), wanted, "{strategy:?}: {lines:#?}");
            for word in ["plane_bytes=147456", "buffer_bytes=8192", "staging_bytes"] {
                assert!(lines.iter().all(|line| line.contains(word)), "{word}: {lines:?}");
            }
        }
        // What fits, and what goes directly for another reason, is nothing to warn of.
        let small = full(session, &engine, DIMS, Direction::Scatter);
        let lines = warnings(|| engine.submit(&small.request()).unwrap().wait().unwrap());
        assert!(lines.is_empty(), "{lines:?}");
        small.check(session);
    }
}

/// With a graph there is nothing to wait for: all layers are part of it.
fn a_captured_transfer_by_layer_runs_with_every_replay(session: &Session) {
    let _context = context(0);
    let stream = Stream::new(true);
    for ((config, _), direction) in ways().into_iter().flat_map(|way| BOTH.map(|d| (way.clone(), d))) {
        let engine = TransferEngine::open(&config).unwrap();
        let setup = full(session, &engine, LARGE, direction);
        let request = setup.request().on(on(&stream));
        let (mut transfer, graph) =
            Graph::capture(&stream, || engine.submit_by_layer(&[request], &[]).unwrap());
        assert!(transfer.captured() && transfer.strategy() != "staged" && setup.untouched(session));
        transfer.wait_layer(1).unwrap();
        for _ in 0..2 {
            graph.replay(&stream);
            setup.check(session);
            setup.restore(session);
        }
        drop(graph);
        transfer.wait().unwrap();
    }
}

/// 17 MiB, which `auto` stages: one transfer waits for an event, another one of the same engine does not.
fn under_auto_nobody_waits_for_the_events_of_others(session: &Session) {
    const STAGED: Dims = Dims { head_size: 20 * 1024, ..LARGE };
    let _context = context(0);
    let (stream, free, other) = (Stream::new(true), Stream::new(true), Stream::new(true));
    let mut config = config(0, 24);
    config.transfer.calibrate = false;
    let engine = TransferEngine::open(&config).unwrap();
    let [held, moves] = [(); 2].map(|()| full(session, &engine, STAGED, Direction::Scatter));
    let (gate, event) = (Pinned::new(&[0; 4]), OwnEvent::new());
    ok!(cuStreamWaitValue32_v2(other.0, gate.device, 1, 0));
    ok!(cuEventRecord(event.0, other.0));
    // SAFETY: the event lives until the transfer is over.
    let after = unsafe { Event::cuda(event.0.expose_provenance()) };
    let waits = engine.submit_by_layer(&[held.request().on(on(&stream))], &[Some(after)]).unwrap();
    let mut transfer = engine.submit(&moves.request().on(on(&free))).unwrap();
    assert_eq!(transfer.strategy(), "staged");
    let patience = Instant::now() + Duration::from_secs(10);
    while !transfer.is_done().unwrap() && Instant::now() < patience {
        std::thread::yield_now();
    }
    let over = transfer.is_done().unwrap();
    // SAFETY: the word is pinned memory that the driver reads.
    unsafe { gate.host.cast::<u32>().write_volatile(1) };
    assert!(over, "it waits for the event of another transfer");
    transfer.wait().unwrap();
    moves.check(session);
    assert_eq!(waits.strategy(), "direct");
    waits.wait().unwrap();
    held.check(session);
}
