//! Loads that tell by words how far they are: failures, more of them than can tell, streams that wait, lost contexts.

use maru_layout::Direction;
use maru_sim_driver::Session;
use maru_transfer::config::StrategyChoice;
use maru_transfer::{Transfer, TransferEngine, TransferError};

use crate::cases::Dims;
use crate::common::{Device, Event as OwnEvent, Stream, Test, context, each_failing_call};
use crate::layers::LARGE;
use crate::setup::{Setup, config, on};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        a_load_by_layer_without_events_fails_at_every_call,
        waiting_for_a_layer_fails_and_is_asked_again,
        a_stream_being_captured_does_not_wait_for_words,
        more_loads_than_can_tell_are_each_exact,
        a_told_load_is_followed_by_others_before_it_ends,
        layers_after_a_lost_context_are_errors,
        streams_of_every_kind_stage_across_each_other,
    ]
}

fn engine(strategy: StrategyChoice) -> TransferEngine {
    let mut config = config(0, 24);
    config.transfer.strategy = strategy;
    config.transfer.staging_bytes = 4 << 20;
    TransferEngine::open(&config).unwrap()
}

/// Layers come one by one, and the slots are not all in one run.
fn load(session: &Session, engine: &TransferEngine) -> Setup {
    Setup::new(session, engine, "blocks_first_nhd", LARGE, Direction::Scatter).pinned(0)
}

fn by_layer(engine: &TransferEngine, setup: &Setup, stream: &Stream) -> Transfer {
    engine.submit_by_layer(&[setup.request().on(on(stream))], &[]).unwrap()
}

fn a_load_by_layer_without_events_fails_at_every_call(session: &Session) {
    const CALLS: [&str; 7] = [
        "cuStreamIsCapturing",
        "cuMemcpyHtoDAsync",
        "cuMemcpy2DAsync",
        "cuLaunchKernel",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuEventQuery",
    ];
    let _context = context(0);
    let stream = Stream::new(true);
    for strategy in [StrategyChoice::Direct, StrategyChoice::Staged] {
        let engine = engine(strategy);
        let setup = load(session, &engine);
        let run = || -> Result<(), TransferError> {
            setup.restore(session);
            engine.submit_by_layer(&[setup.request().on(on(&stream))], &[])?.wait()?;
            setup.check(session);
            Ok(())
        };
        run().unwrap();
        for function in CALLS {
            let before = session.census();
            each_failing_call(session, function, run, |nth, outcome| {
                if outcome.is_err() {
                    // What is in flight now would be seen to write here.
                    setup.restore(session);
                    while session.queued() > 0 {
                        std::thread::yield_now();
                    }
                    assert!(setup.untouched(session), "{strategy:?} {function} {nth}");
                }
                run().unwrap();
                assert_eq!(before, session.census(), "{strategy:?} {function} {nth}");
            });
        }
    }
}

fn waiting_for_a_layer_fails_and_is_asked_again(session: &Session) {
    let _context = context(0);
    let (stream, attention) = (Stream::new(true), Stream::new(true));
    let engine = engine(StrategyChoice::Direct);
    let setup = load(session, &engine);
    let seen = Device::new(setup.paged.len);
    for function in ["cuStreamWaitValue64", "cuStreamIsCapturing", "cuStreamWaitEvent"] {
        setup.restore(session);
        let hold = session.hold();
        let mut transfer = by_layer(&engine, &setup, &stream);
        session.fail(function, 1, 801);
        let outcomes: Vec<_> =
            (0..3).map(|layer| transfer.order_before_layer(on(&attention), layer).is_err()).collect();
        assert_eq!(session.faults_left(), 0, "{function}");
        assert_eq!(outcomes.iter().filter(|failed| **failed).count(), 1, "{function} {outcomes:?}");
        for layer in 0..3 {
            transfer.order_before_layer(on(&attention), layer).unwrap();
        }
        ok!(cuMemcpyDtoDAsync_v2(seen.addr, setup.paged.addr, setup.paged.len, attention.0));
        drop(hold);
        attention.wait();
        assert_eq!(seen.read(session), setup.images.cache_after, "{function}");
        transfer.wait().unwrap();
        setup.check(session);
    }
}

/// A graph would wait for a value that was reached long ago: the driver refuses the event, which is an error.
fn a_stream_being_captured_does_not_wait_for_words(session: &Session) {
    let _context = context(0);
    let (stream, captured) = (Stream::new(true), Stream::new(true));
    let engine = engine(StrategyChoice::Direct);
    let setup = load(session, &engine);
    let hold = session.hold();
    let mut transfer = by_layer(&engine, &setup, &stream);
    let mode = cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    ok!(cuStreamBeginCapture_v2(captured.0, mode));
    for layer in 0..3 {
        assert!(transfer.order_before_layer(on(&captured), layer).is_err());
    }
    let mut graph = std::ptr::null_mut();
    assert_ne!(code!(cuStreamEndCapture(captured.0, &mut graph)), 0);
    drop(hold);
    transfer.wait().unwrap();
    setup.check(session);
}

fn more_loads_than_can_tell_are_each_exact(session: &Session) {
    const SMALL: Dims = Dims { head_size: 1024, heads: 1, ..LARGE };
    let _context = context(0);
    let streams = [Stream::new(true), Stream::new(false), Stream::new(true)];
    let engine = engine(StrategyChoice::Direct);
    let setups: Vec<Setup> = (0..140)
        .map(|_| Setup::new(session, &engine, "blocks_first_nhd", SMALL, Direction::Scatter).pinned(0))
        .collect();
    for round in 0..2 {
        let hold = session.hold();
        let mut transfers: Vec<Transfer> = setups
            .iter()
            .enumerate()
            .map(|(i, setup)| {
                setup.restore(session);
                by_layer(&engine, setup, &streams[i % 3])
            })
            .collect();
        for transfer in &mut transfers {
            assert!(!transfer.layer_done(0).unwrap());
        }
        // Held back, some are dropped and wait: not before the hold ends.
        drop(hold);
        for (i, (mut transfer, setup)) in transfers.into_iter().zip(&setups).enumerate() {
            match (i + round) % 3 {
                0 => drop(transfer),
                1 => (0..3).rev().for_each(|layer| transfer.wait_layer(layer).unwrap()),
                _ => transfer.wait().unwrap(),
            }
            setup.check(session);
        }
    }
}

/// The ticket of a load that told of its last layer goes to the next one, on another stream, while the launch still
/// runs.
fn a_told_load_is_followed_by_others_before_it_ends(session: &Session) {
    let _context = context(0);
    let streams = [Stream::new(true), Stream::new(true)];
    let attention = Stream::new(true);
    let engine = engine(StrategyChoice::Direct);
    let setups = [load(session, &engine), load(session, &engine)];
    let seen = Device::new(setups[0].paged.len);
    session.set("word_us", 1500);
    for i in 0..12 {
        let (setup, stream) = (&setups[i % 2], &streams[i % 2]);
        stream.wait();
        setup.restore(session);
        let mut transfer = by_layer(&engine, setup, stream);
        let layer = u32::try_from(i % 3).unwrap();
        transfer.order_before_layer(on(&attention), layer).unwrap();
        ok!(cuMemcpyDtoDAsync_v2(seen.addr, setup.paged.addr, setup.paged.len, attention.0));
        attention.wait();
        let layer_bytes = setup.paged.len / 3;
        let at = layer_bytes * (i % 3)..layer_bytes * (i % 3 + 1);
        assert_eq!(seen.read(session)[at.clone()], setup.images.cache_after[at]);
        transfer.wait().unwrap();
        setup.check(session);
    }
    session.set("word_us", 0);
}

fn layers_after_a_lost_context_are_errors(session: &Session) {
    let _context = context(0);
    let stream = Stream::new(true);
    let engine = engine(StrategyChoice::Direct);
    let setup = load(session, &engine);
    // One that told before: what was there is there.
    let mut earlier = by_layer(&engine, &setup, &stream);
    earlier.wait_layer(2).unwrap();
    // Not before everything is queued.
    session.set("delay_us", 50_000);
    session.fail_later("cuLaunchKernel", 1, 700);
    let mut transfer = by_layer(&engine, &setup, &stream);
    for layer in 0..3 {
        assert_eq!(transfer.wait_layer(layer).unwrap_err().kind(), "context_lost");
        assert!(transfer.layer_done(layer).is_err());
    }
    assert!(transfer.is_done().is_err());
    assert_eq!(transfer.wait().unwrap_err().kind(), "context_lost");
    assert!(earlier.layer_done(1).unwrap());
    earlier.wait().unwrap();
    let error = engine.submit_by_layer(&[setup.request().on(on(&stream))], &[]).unwrap_err();
    assert_eq!(error.kind(), "context_lost");
}

/// Two threads send stores and loads through one ring, on streams that wait for each other's transfers; one of them is
/// a default stream.
fn streams_of_every_kind_stage_across_each_other(session: &Session) {
    let _context = context(0);
    let mut config = config(0, 24);
    config.transfer.strategy = StrategyChoice::Staged;
    // Buffers of one plane: every transfer goes round the ring.
    config.transfer.staging_bytes = 4 * (160 << 10);
    let engine = TransferEngine::open(&config).unwrap();
    session.set("delay_us", 100);
    for default in [0usize, 1, 2] {
        let setup = |direction| Setup::full(session, &engine, "blocks_first_nhd", LARGE, direction).pinned(0);
        let sets = [0, 1].map(|_| [setup(Direction::Gather), setup(Direction::Scatter)]);
        std::thread::scope(|scope| {
            for (thread, setups) in sets.iter().enumerate() {
                let engine = &engine;
                scope.spawn(move || {
                    context(0);
                    let first = match thread {
                        0 => Stream(std::ptr::with_exposed_provenance_mut(default)),
                        _ => Stream::new(true),
                    };
                    let streams = [first, Stream::new(false)];
                    for round in 0..3 {
                        let [a, b] = [&streams[round % 2], &streams[(round + 1) % 2]];
                        let mut store = engine.submit(&setups[0].request().on(on(a))).unwrap();
                        assert_eq!(store.strategy(), "staged");
                        store.order_before(on(b)).unwrap();
                        let mut load = engine.submit(&setups[1].request().on(on(b))).unwrap();
                        load.order_before(on(a)).unwrap();
                        let again = engine.submit(&setups[0].request().on(on(a))).unwrap();
                        let (event, whole) = (OwnEvent::new(), setups[1].paged.len);
                        let seen = Device::new(whole);
                        // The caller's stream goes on when its load is over.
                        ok!(cuMemcpyDtoDAsync_v2(seen.addr, setups[1].paged.addr, whole, b.0));
                        ok!(cuEventRecord(event.0, b.0));
                        ok!(cuEventSynchronize(event.0));
                        let mut bytes = vec![0u8; whole];
                        ok!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), seen.addr, whole));
                        assert_eq!(bytes, setups[1].images.cache_after);
                        for transfer in [again, load, store] {
                            transfer.wait().unwrap();
                        }
                    }
                });
            }
        });
        sets.iter().flatten().for_each(|setup| setup.check(session));
    }
    session.set("delay_us", 0);
}
