//! The whole engine on the simulated driver: a device cache, slabs in registered memory, both directions.
#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

#[path = "../../../maru-kernel-cuda/tests/common/cases.rs"]
#[allow(dead_code, reason = "shared with other tests, which use other parts")]
mod cases;
mod layers;
mod random;
mod setup;
mod words;

use cases::{Dims, compare};
use common::log::warnings;
use common::{Device, Stream, context, current, each_failing_call, unbind};
use maru_cxl::Region;
use maru_layout::{Direction, SlotMapping};
use maru_sim_driver::{CopyKind, Session};
use maru_transfer::config::{BackendChoice, PoolConfig, StrategyChoice};
use maru_transfer::{TransferEngine, TransferError, TransferRequest};
use setup::{DIMS, Setup, config, on};

fn main() {
    let mut tests = tests![
        conformance_of_the_native_backend,
        an_unregistered_slab_under_native_is_an_error,
        the_native_backend_opens_or_says_why,
        a_pool_of_the_engine_is_registered_and_given_back,
        submit_returns_before_the_bytes_are_moved,
        transfers_are_ordered_by_the_callers_stream,
        a_dropped_transfer_waits,
        a_batch_loads_what_it_stored_before,
        a_region_outlives_its_transfer,
        every_call_of_a_submit_fails_once,
        a_lost_context_is_said_and_nothing_hangs,
        a_lost_context_does_not_degrade_to_the_fallback,
        an_engine_goes_with_a_lost_context_in_one_line,
        a_gpu_too_old_for_the_kernel_has_the_fallback,
        c17_two_engines_on_two_devices,
        c17_a_thread_without_a_context,
        c21_seventy_thousand_slots_and_none,
    ];
    tests.extend(layers::tests());
    tests.extend(random::tests());
    tests.extend(words::tests());
    common::main(tests);
}

fn conformance_of_the_native_backend(session: &Session) {
    let _context = context(0);
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let names = [
        "blocks_first_nhd",
        "blocks_first_hnd",
        "kv_first_nhd",
        "fused_lbnhc",
        "fused_lhbnc",
        "mla",
        "sglang_split_slots",
        "cross_layer",
        "trt_llm",
    ];
    for shift in [0, 1] {
        session.set("shift", shift);
        for name in names {
            for direction in [Direction::Gather, Direction::Scatter] {
                let setup = Setup::new(session, &engine, name, DIMS, direction).pinned(0);
                session.clear_records();
                let transfer = engine.submit(&setup.request()).unwrap();
                assert_eq!(transfer.backend(), "native");
                transfer.wait().unwrap();
                setup.check(session);
                assert!(session.records().iter().any(|r| r.kind == CopyKind::Kernel), "{name}");
            }
        }
    }
}

fn an_unregistered_slab_under_native_is_an_error(session: &Session) {
    let _context = context(0);
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, Direction::Gather);
    session.clear_records();
    let error = engine.submit(&setup.request()).unwrap_err();
    assert_eq!(error.kind(), "not_available", "{error}");
    assert!(error.to_string().contains("not registered"), "{error}");
    assert!(session.records().is_empty() && setup.untouched(session));
}

fn the_native_backend_opens_or_says_why(session: &Session) {
    for (function, code) in [("cuInit", 100), ("cuDeviceGetCount", 999), ("cuDevicePrimaryCtxRetain", 2)] {
        session.fail_from(function, 1, code);
        let error = TransferEngine::open(&config(0, 24)).unwrap_err();
        assert_eq!(error.kind(), "not_available", "{function}: {error}");
        session.clear_faults();
    }
    session.set("devices", 1);
    let error = TransferEngine::open(&config(1, 24)).unwrap_err();
    assert_eq!(error.kind(), "not_available", "{error}");
    assert_eq!(session.census().contexts, 0);
    TransferEngine::open(&config(0, 24)).unwrap();
}

fn a_pool_of_the_engine_is_registered_and_given_back(session: &Session) {
    let _context = context(0);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let before = session.census();
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let mut pool = PoolConfig::new(dir.path().join("pool"));
    pool.size = 8 << 20;
    let slabs = engine.create_pool(&pool, 1 << 20, false).unwrap();
    assert_eq!(session.census().registrations, 1);
    let slab = slabs.alloc().unwrap().unwrap();
    assert!(slab.device_addr().is_some());
    drop((slab, slabs));
    assert_eq!(session.census().registrations, 0);
    // Refused and not required: the pool works without.
    session.fail("cuMemHostRegister", 1, 1);
    let slabs = engine.open_pool(&pool, true).unwrap();
    assert_eq!(slabs.alloc().unwrap().unwrap().device_addr(), None);
    drop(slabs);
    let mut required = config(0, 24);
    required.cxl.require_registration = true;
    let strict = TransferEngine::open(&required).unwrap();
    session.fail("cuMemHostRegister", 1, 1);
    let error = strict.open_pool(&pool, true).err().unwrap().to_string();
    assert!(error.contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
    drop((engine, strict));
    context(0);
    assert_eq!(session.census(), before, "an engine leaves nothing behind");
}

fn submit_returns_before_the_bytes_are_moved(session: &Session) {
    let _context = context(0);
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, Direction::Gather).pinned(0);
    let stream = Stream::new(true);
    let hold = session.hold();
    let mut transfer = engine.submit(&setup.request().on(on(&stream))).unwrap();
    assert!(!transfer.is_done().unwrap() && setup.untouched(session));
    drop(hold);
    transfer.wait().unwrap();
    setup.check(session);
}

fn transfers_are_ordered_by_the_callers_stream(session: &Session) {
    let _context = context(0);
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let setup = Setup::new(session, &engine, "fused_lbnhc", DIMS, Direction::Gather).pinned(0);
    let stream = Stream::new(true);
    let written = Device::of(session, &setup.images.cache);
    assert!(session.poke(setup.paged.addr, &vec![0; setup.paged.len]));
    session.set("delay_us", 3000);
    ok!(cuMemcpyDtoDAsync_v2(setup.paged.addr, written.addr, written.len, stream.0));
    let transfer = engine.submit(&setup.request().on(on(&stream))).unwrap();
    // Ordered behind the transfer, so it does no harm.
    ok!(cuMemsetD8Async(setup.paged.addr, 0xee, setup.paged.len, stream.0));
    transfer.wait().unwrap();
    stream.wait();
    compare("slab", &setup.slab_bytes(), &setup.images.slab_after).unwrap();
}

fn a_dropped_transfer_waits(session: &Session) {
    let _context = context(0);
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, Direction::Gather).pinned(0);
    session.set("delay_us", 10_000);
    drop(engine.submit(&setup.request()).unwrap());
    setup.check(session);
}

fn a_region_outlives_its_transfer(session: &Session) {
    let _context = context(0);
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let mut setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, Direction::Scatter).pinned(0);
    session.set("delay_us", 10_000);
    let transfer = engine.submit(&setup.request()).unwrap();
    let one = Region::anonymous(4096).unwrap().slab(0, 4096).unwrap();
    drop(std::mem::replace(&mut setup.slab, one));
    assert_eq!(session.census().registrations, 1);
    transfer.wait().unwrap();
    compare("cache", &setup.paged.read(session), &setup.images.cache_after).unwrap();
    context(0);
    assert_eq!(session.census().registrations, 0);
}

fn every_call_of_a_submit_fails_once(session: &Session) {
    let _context = context(0);
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let stream = Stream::new(true);
    for direction in [Direction::Gather, Direction::Scatter] {
        let setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, direction).pinned(0);
        let run = || -> Result<(), TransferError> {
            setup.restore(session);
            engine.submit(&setup.request().on(on(&stream)))?.wait()?;
            setup.check(session);
            Ok(())
        };
        run().unwrap();
        let calls = [
            "cuLaunchKernel",
            "cuEventRecord",
            "cuStreamIsCapturing",
            "cuStreamWaitEvent",
            "cuEventQuery",
            "cuMemcpyHtoDAsync",
            "cuMemcpyDtoHAsync",
            "cuMemcpy2DAsync",
            "cuEventSynchronize",
        ];
        for function in calls {
            let before = session.census();
            each_failing_call(session, function, run, |nth, outcome| {
                if let Err(error) = outcome {
                    assert_eq!(error.kind(), "driver", "{function} call {nth}: {error}");
                }
                // Nothing is in flight unless the wait was what failed.
                assert!(session.queued() == 0 || function == "cuEventSynchronize", "{function} call {nth}");
                stream.wait();
                run().unwrap();
                assert_eq!(session.census(), before, "{function} call {nth}");
            });
        }
    }
}

fn a_lost_context_is_said_and_nothing_hangs(session: &Session) {
    let _context = context(0);
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, Direction::Gather).pinned(0);
    session.fail_later("cuLaunchKernel", 1, 700);
    let outcome = engine.submit(&setup.request()).and_then(maru_transfer::Transfer::wait);
    assert_eq!(outcome.unwrap_err().kind(), "context_lost");
    for _ in 0..3 {
        let error = engine.submit(&setup.request()).unwrap_err();
        assert_eq!(error.kind(), "context_lost", "{error}");
    }
    session.poison(0, 0);
}

/// At every call of opening; the fallback cannot work there either.
fn a_lost_context_does_not_degrade_to_the_fallback(session: &Session) {
    let _context = context(0);
    let mut auto = config(0, 24);
    auto.transfer.backend = BackendChoice::Auto;
    for function in ["cuModuleLoadData", "cuMemHostAlloc", "cuCtxGetStreamPriorityRange", "cuEventCreate"] {
        for backend in [BackendChoice::Auto, BackendChoice::Native] {
            auto.transfer.backend = backend;
            session.fail(function, 1, 700);
            let error = TransferEngine::open(&auto).unwrap_err();
            assert_eq!((error.kind(), session.faults_left()), ("context_lost", 0), "{function}: {error}");
        }
    }
    session.poison(0, 719);
    let error = TransferEngine::open(&auto).unwrap_err();
    session.poison(0, 0);
    assert_eq!(error.kind(), "context_lost", "{error}");
    TransferEngine::open(&auto).unwrap();
}

/// Stores twelve tokens and loads them into twelve other slots in one batch, however batches are moved.
fn a_batch_loads_what_it_stored_before(session: &Session) {
    let _context = context(0);
    for (strategy, fused) in
        [(StrategyChoice::Staged, false), (StrategyChoice::Auto, true), (StrategyChoice::Direct, false)]
    {
        let mut config = config(0, 12);
        config.transfer.strategy = strategy;
        config.transfer.enable_fused_load = fused;
        let engine = TransferEngine::open(&config).unwrap();
        let setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, Direction::Gather).pinned(0);
        let (from, to): (Vec<i64>, Vec<i64>) = ((0..12).collect(), (12..24).collect());
        let store = |slots: &[i64]| {
            TransferRequest::gather(&setup.registered, SlotMapping::from_slots(slots), &setup.slab)
        };
        let load =
            TransferRequest::scatter(&setup.registered, SlotMapping::from_slots(to.clone()), &setup.slab);
        let transfer = engine.submit_many(&[store(&from), load]).unwrap();
        assert_eq!(transfer.strategy(), "direct");
        transfer.wait().unwrap();
        let stored = setup.slab_bytes();
        setup.slab.write_at(0, &[0x5a; 64]).unwrap();
        let transfer = engine.submit(&store(&to)).unwrap();
        assert_eq!(transfer.strategy(), if strategy == StrategyChoice::Staged { "staged" } else { "direct" });
        transfer.wait().unwrap();
        assert!(setup.slab_bytes() == stored, "{strategy:?}: the load read something else than was stored");
    }
}

fn a_gpu_too_old_for_the_kernel_has_the_fallback(session: &Session) {
    let _context = context(0);
    session.set("cc_major", 6);
    let mut old = config(0, 24);
    let error = TransferEngine::open(&old).unwrap_err();
    assert_eq!(error.kind(), "not_available", "{error}");
    for backend in [BackendChoice::Auto, BackendChoice::Fallback] {
        old.transfer.backend = backend;
        let engine = TransferEngine::open(&old).unwrap();
        let setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, Direction::Gather);
        let transfer = engine.submit(&setup.request()).unwrap();
        assert_eq!((transfer.backend(), transfer.strategy()), ("fallback", "copy_engine"));
        transfer.wait().unwrap();
    }
}

fn an_engine_goes_with_a_lost_context_in_one_line(session: &Session) {
    let _context = context(0);
    let mut auto = config(0, 24);
    auto.transfer.backend = BackendChoice::Auto;
    let engine = TransferEngine::open(&auto).unwrap();
    let setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, Direction::Gather);
    // Through the fallback, so that both movers hold something.
    engine.submit(&setup.request()).unwrap().wait().unwrap();
    let Setup { registered, .. } = setup;
    session.poison(0, 700);
    let lines = warnings(|| drop((registered, engine)));
    session.poison(0, 0);
    assert_eq!(lines.len(), 1, "{lines:#?}");
}

fn c17_two_engines_on_two_devices(session: &Session) {
    let contexts = [context(0), context(1)];
    let engines = [0, 1].map(|n| TransferEngine::open(&config(n, 24)).unwrap());
    for i in 0..10 {
        let device = i % 2;
        contexts[device].bind_to_thread().unwrap();
        let direction = if i < 5 { Direction::Gather } else { Direction::Scatter };
        let setup = Setup::new(session, &engines[device], "kv_first_hnd", DIMS, direction).pinned(device);
        contexts[1 - device].bind_to_thread().unwrap();
        let before = current();
        engines[device].submit(&setup.request()).unwrap().wait().unwrap();
        assert_eq!(current(), before);
        setup.check(session);
    }
    // A stream of the other device is an error.
    contexts[1].bind_to_thread().unwrap();
    let foreign = Stream::new(true);
    contexts[0].bind_to_thread().unwrap();
    let setup = Setup::new(session, &engines[0], "kv_first_hnd", DIMS, Direction::Gather).pinned(0);
    let error = engines[0].submit(&setup.request().on(on(&foreign))).unwrap_err();
    assert!(error.to_string().contains("INVALID_HANDLE"), "{error}");
    assert!(setup.untouched(session));
}

fn c17_a_thread_without_a_context(session: &Session) {
    let _context = context(0);
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, Direction::Gather).pinned(0);
    let request = setup.request();
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                unbind();
                engine.submit(&request).unwrap().wait().unwrap();
                assert_eq!(current(), 0);
            })
            .join()
            .unwrap();
    });
    setup.check(session);
}

fn c21_seventy_thousand_slots_and_none(session: &Session) {
    let _context = context(0);
    let engine = TransferEngine::open(&config(0, 24)).unwrap();
    let dims = Dims { layers: 1, blocks: 4375, block_size: 16, heads: 1, head_size: 8, ..DIMS };
    for direction in [Direction::Gather, Direction::Scatter] {
        let setup = Setup::new(session, &engine, "blocks_first_nhd", dims, direction).pinned(0);
        assert_eq!(setup.slots.len(), 70_000);
        engine.submit(&setup.request()).unwrap().wait().unwrap();
        setup.check(session);
    }
    let setup = Setup::new(session, &engine, "blocks_first_nhd", DIMS, Direction::Gather).pinned(0);
    let none = TransferRequest::gather(&setup.registered, SlotMapping::from_slots(Vec::new()), &setup.slab)
        .partial(true);
    session.clear_records();
    engine.submit(&none).unwrap().wait().unwrap();
    assert!(session.records().is_empty() && setup.untouched(session));
    engine.submit(&setup.request()).unwrap().wait().unwrap();
    setup.check(session);
}
