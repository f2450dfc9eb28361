//! Driver calls that fail, one after the other: the right error, nothing leaked, nothing stuck, and the next
//! transfer exact.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use maru_fallback::{DeviceMover, DeviceOptions, FallbackError};
use maru_layout::Direction;
use maru_sim_driver::Session;

use crate::cases::{Dims, Rng};
use crate::gpu::{Device, Stream, mover};
use crate::rig::{DIMS, DIRECTIONS, LARGE, Rig, SLABS, SlabIn, SlabMemory, order};
use crate::trials::{Outcome, bytes_of};

type Body = fn(&Session, &Arc<CudaContext>) -> Outcome;

pub(crate) const TRIALS: [(&str, Body); 13] = [
    ("fault/any_call", any_call),
    ("fault/opening", opening),
    ("fault/layers_done", layers_done),
    ("fault/layers_done_of_slices", layers_done_of_slices),
    ("fault/rows_refused", rows_refused),
    ("fault/slices_refused", slices_refused),
    ("fault/no_slices_function", no_slices),
    ("fault/no_batch_function", no_batch),
    ("fault/pinned_memory_refused", pinned_refused),
    ("fault/event_query", event_query),
    ("fault/context_lost_by_the_call", lost_by_the_call),
    ("fault/context_lost_by_the_work", lost_by_the_work),
    ("fault/early_return_while_work_is_held", held),
];

fn options() -> DeviceOptions {
    DeviceOptions::default().with_bounce_bytes(0)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Layouts whose commands differ: runs that are batched, layers as slices, rows, and (one layer of one plane)
/// runs one by one.
const LAYOUTS: [(&str, u64, bool); 4] =
    [("blocks_first_nhd", 3, true), ("fused_lbnhc", 3, true), ("fused_lbnhc", 1, true), ("mla", 1, false)];

/// Every call of every function on the way of a transfer fails once.
fn any_call(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    let functions = [
        "cuCtxGetCurrent",
        "cuStreamGetCtx",
        "cuStreamIsCapturing",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer",
        "cuMemcpyAsync",
        "cuMemcpy2DAsync",
        "cuMemcpy3DAsync",
        "cuMemcpyBatchAsync",
        "cuMemcpyDtoHAsync",
        "cuStreamSynchronize",
    ];
    let mut struck = std::collections::BTreeMap::new();
    let stream = Stream::new();
    let mut rng = Rng::new(1);
    for place in SLABS {
        for direction in DIRECTIONS {
            for (name, layers, batched) in LAYOUTS {
                let dims = Dims { layers, ..DIMS };
                let options = options().with_batched(batched);
                for in_device in [false, true] {
                    for function in functions {
                        // Events are made by the dozen.
                        let most = if function == "cuEventCreate" { 3 } else { 40 };
                        for nth in 1..=most {
                            let what = format!("{place:?} {direction:?} {name} {in_device} {function} {nth}");
                            let before = session.census();
                            let mut rig = Rig::of(order(name), dims, direction, place, &mut rng);
                            let slots = Device::holding(&bytes_of(&rig.slots));
                            let job = match in_device {
                                true => {
                                    let len = rig.slots.len() as u64;
                                    rig.job_with(
                                        maru_layout::SlotMapping::Device { addr: slots.addr, len },
                                        None,
                                    )
                                }
                                false => rig.job(),
                            };
                            let mover = mover(context, options);
                            session.fail(function, nth, 999);
                            // SAFETY: everything is alive until the end of the loop.
                            let result = unsafe { mover.copy_on(&job, stream.0) };
                            let hit = session.faults_left() == 0;
                            session.clear_faults();
                            match (&result, hit) {
                                (Err(error), true) => assert_eq!(error.kind(), "driver", "{what}: {error}"),
                                (Ok(copy), false) => copy.wait().map_err(text)?,
                                (Ok(_), true) => return Err(format!("{what}: the fault was swallowed")),
                                (Err(error), false) => return Err(format!("{what}: {error}")),
                            }
                            // Nothing is in flight.
                            assert_eq!(session.queued(), 0, "{what}");
                            drop(result);
                            // The same mover goes on.
                            Rig::of(order(name), dims, direction, place, &mut rng)
                                .run(&mover, stream.0)
                                .map_err(|e| format!("after {what}: {e}"))?;
                            drop((mover, rig, slots));
                            assert_eq!(session.census(), before, "{what}: something leaked");
                            if !hit {
                                break;
                            }
                            *struck.entry(function).or_insert(0) += 1;
                        }
                    }
                }
            }
        }
    }
    for function in functions {
        assert!(struck.contains_key(function), "{function} never failed: {struck:?}");
    }
    Ok(())
}

fn opening(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    for (function, code, kind) in [
        ("cuStreamCreate", 2, "out_of_memory"),
        ("cuDeviceGetAttribute", 999, "driver"),
        ("cuCtxGetCurrent", 999, "driver"),
    ] {
        let before = session.census();
        session.fail(function, 1, code);
        let error = DeviceMover::open(context.clone(), options()).expect_err(function);
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(session.census(), before, "{function}: something leaked");
    }
    Ok(())
}

/// Which layers were moved when the n-th copy failed.
fn layers_done(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    let (stream, mut rng) = (Stream::new(), Rng::new(2));
    // Plain copies of rows, one layer after the other: a 2-D copy per half block, K and V. Rows are 20 bytes
    // apart, of which the distance of the layers is no multiple.
    let mover = mover(context, options());
    let dims = Dims { layers: 3, heads: 8, head_size: 5, ..DIMS };
    let mut seen = std::collections::BTreeSet::new();
    for nth in 1.. {
        let mut rig = Rig::of(order("fused_lbnhc"), dims, Direction::Scatter, SlabIn::Registered, &mut rng);
        session.clear_records();
        session.fail("cuMemcpy2DAsync", nth, 999);
        let result = rig.start(&mover, stream.0);
        let hit = session.faults_left() == 0;
        session.clear_faults();
        if !hit {
            result.map_err(text)?.wait().map_err(text)?;
            assert!(nth > 3, "no copy failed");
            break;
        }
        let Err(FallbackError::CopyFailed { layers_done, layers, .. }) = result else {
            return Err("not the error of a copy".into());
        };
        assert_eq!(layers, 3);
        seen.insert(layers_done);
        // Those layers are exact in the cache; layer bases ascend here, and so does the image.
        let per_layer = rig.images.cache.len() / 3;
        let done = per_layer * layers_done as usize;
        let now = rig.paged.read(rig.images.cache.len());
        crate::cases::compare("layers done", &now[..done], &rig.images.cache_after[..done])?;
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 1, 2]);
    Ok(())
}

/// Layers that are moved together are over together.
fn layers_done_of_slices(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    let (stream, mut rng, mover) = (Stream::new(), Rng::new(16), mover(context, options()));
    for nth in 1.. {
        let mut rig = Rig::small(order("fused_lbnhc"), Direction::Scatter, SlabIn::Registered, &mut rng);
        session.fail("cuMemcpy3DAsync", nth, 999);
        let result = rig.start(&mover, stream.0);
        let hit = session.faults_left() == 0;
        session.clear_faults();
        match result {
            Err(FallbackError::CopyFailed { layers_done: 0, layers: 3, .. }) if hit => {}
            Ok(copy) if !hit => {
                copy.wait().map_err(text)?;
                assert!(nth > 3, "too few copies failed");
                return rig.check();
            }
            other => return Err(format!("{nth}: {other:?}")),
        }
    }
    Ok(())
}

/// A driver that refuses copies of slices gets them slice by slice, and is not asked for long.
fn slices_refused(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    let (stream, mut rng) = (Stream::new(), Rng::new(18));
    let calls = |function: &str| session.calls(function);
    for place in SLABS {
        for direction in DIRECTIONS {
            for code in [1, 801] {
                for rows_too in [false, true] {
                    let mover = mover(context, options());
                    let slices = calls("cuMemcpy3DAsync");
                    let rows = calls("cuMemcpy2DAsync");
                    session.fail_from("cuMemcpy3DAsync", 1, code);
                    if rows_too {
                        session.fail_from("cuMemcpy2DAsync", 1, code);
                    }
                    for name in ["fused_lbnhc", "blocks_first_hnd", "fused_lbnhc"] {
                        Rig::small(order(name), direction, place, &mut rng).run(&mover, stream.0)?;
                    }
                    session.clear_faults();
                    assert_eq!(calls("cuMemcpy3DAsync"), slices + 1, "{place:?}: asked once");
                    assert!(calls("cuMemcpy2DAsync") > rows + 1, "{place:?}");
                }
            }
        }
    }
    // What is refused inside the device is not given up between host and device.
    let mover = mover(context, options());
    let mut run =
        |place| Rig::small(order("fused_lbnhc"), DIRECTIONS[0], place, &mut rng).run(&mover, stream.0);
    session.fail_from("cuMemcpy3DAsync", 1, 1);
    run(SlabIn::Device)?;
    session.clear_faults();
    let slices = calls("cuMemcpy3DAsync");
    run(SlabIn::Device)?;
    assert_eq!(calls("cuMemcpy3DAsync"), slices);
    run(SlabIn::Registered)?;
    assert!(calls("cuMemcpy3DAsync") > slices);
    Ok(())
}

/// In a process whose driver lacks copies of slices.
fn no_slices(_: &Session, _: &Arc<CudaContext>) -> Outcome {
    without("cuMemcpy3DAsync_v2", &["layout/fused_lbnhc/registered", "layout/blocks_first_hnd/device"])
}

/// A driver that refuses copies of rows gets the rows one by one.
fn rows_refused(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    let (stream, mut rng) = (Stream::new(), Rng::new(14));
    for place in SLABS {
        for direction in DIRECTIONS {
            for (name, _, batched) in LAYOUTS {
                let mover = mover(context, options().with_batched(batched));
                session.fail_from("cuMemcpy2DAsync", 1, 1);
                for _ in 0..2 {
                    Rig::small(order(name), direction, place, &mut rng).run(&mover, stream.0)?;
                }
                session.clear_faults();
            }
        }
    }
    Ok(())
}

/// In a process whose driver lacks the batched copy, or has the older one only.
fn no_batch(_: &Session, _: &Arc<CudaContext>) -> Outcome {
    let trials = ["layout/blocks_first_nhd/registered", "streams/default_ones"];
    without("cuMemcpyBatchAsync_v2", &trials)?;
    without("cuMemcpyBatchAsync+cuMemcpyBatchAsync_v2", &trials)
}

/// Runs trials in a process whose driver lacks these functions.
fn without(missing: &str, trials: &[&str]) -> Outcome {
    const VARIABLE: &str = maru_sim_driver::VARIABLE;
    if std::env::var_os(VARIABLE).is_some() {
        return Ok(());
    }
    let program = std::env::current_exe().map_err(text)?;
    for trial in trials {
        let output = std::process::Command::new(&program)
            .args(["--exact", trial])
            .env(VARIABLE, format!("missing={missing}"))
            .output()
            .map_err(text)?;
        let said = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() || !said.contains("1 passed") {
            return Err(format!("without {missing}: {said}{}", String::from_utf8_lossy(&output.stderr)));
        }
    }
    Ok(())
}

fn pinned_refused(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    let (mover, stream, mut rng) = (mover(context, options()), Stream::new(), Rng::new(4));
    for direction in DIRECTIONS {
        let mut rig = Rig::small(order("kv_first_nhd"), direction, SlabIn::Pageable, &mut rng);
        if direction == Direction::Gather {
            session.fail("cuMemHostAlloc", 1, 2);
            let error = rig.start(&mover, stream.0).expect_err("refused");
            assert_eq!(error.kind(), "out_of_memory", "{error}");
            rig.check_untouched()?;
        }
        rig.run(&mover, stream.0)?;
    }
    Ok(())
}

/// An error is an error, not "not yet", and does not stick.
fn event_query(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    let (mover, stream, mut rng) = (mover(context, options()), Stream::new(), Rng::new(6));
    let mut rig = Rig::small(order("kv_first_nhd"), Direction::Scatter, SlabIn::Registered, &mut rng);
    let copy = rig.start(&mover, stream.0).map_err(text)?;
    session.fail("cuEventQuery", 1, 999);
    session.fail("cuEventSynchronize", 1, 999);
    assert_eq!(copy.is_complete().expect_err("a failing query").kind(), "driver");
    assert_eq!(copy.wait().expect_err("a failing wait").kind(), "driver");
    copy.wait().map_err(text)?;
    assert!(copy.is_complete().map_err(text)?);
    rig.check()
}

fn assert_lost<T>(what: &str, result: Result<T, FallbackError>) {
    match result {
        Ok(_) => panic!("{what} succeeded in a lost context"),
        Err(error) => assert_eq!(error.kind(), "context_lost", "{what}: {error}"),
    }
}

fn lost_by_the_call(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    let (stream, mut rng) = (Stream::new(), Rng::new(8));
    for place in SLABS {
        let mover = mover(context, options());
        let mut earlier = Rig::small(order("kv_first_nhd"), Direction::Scatter, place, &mut rng);
        let copy = earlier.start(&mover, stream.0).map_err(text)?;
        let mut rig = Rig::small(order("kv_first_nhd"), Direction::Scatter, place, &mut rng);
        session.fail("cuEventRecord", 1, 700);
        assert_lost("the call", rig.start(&mover, stream.0));
        let calls = session.calls("cuMemcpyAsync");
        assert_lost("the next call", rig.start(&mover, stream.0));
        assert_eq!(session.calls("cuMemcpyAsync"), calls, "a lost context was used");
        assert_lost("completion", copy.is_complete());
        assert_lost("waiting", copy.wait());
        // SAFETY: the stream is alive.
        assert_lost("ordering", unsafe { copy.order_before(stream.0) });
    }
    Ok(())
}

fn lost_by_the_work(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    let mut rng = Rng::new(10);
    for place in SLABS {
        for direction in DIRECTIONS {
            let stream = Stream::new();
            let mover = mover(context, options());
            let mut rig = Rig::small(order("blocks_first_nhd"), direction, place, &mut rng);
            let job = rig.job();
            for function in ["cuMemcpyBatchAsync", "cuMemcpy2DAsync", "cuMemcpy3DAsync", "cuMemcpyAsync"] {
                session.fail_later(function, 1, 719);
            }
            // SAFETY: everything is alive until the wait.
            let result = unsafe { mover.copy_on(&job, stream.0) }.and_then(|copy| copy.wait());
            assert_lost("the transfer", result);
            // SAFETY: as above.
            assert_lost("the next", unsafe { mover.copy_on(&job, stream.0) });
            session.clear_faults();
            session.poison(0, 0);
        }
    }
    Ok(())
}

/// A load from pageable memory returns although nothing runs yet, and the slab may go at once.
fn held(session: &Session, context: &Arc<CudaContext>) -> Outcome {
    let (stream, mut rng) = (Stream::new(), Rng::new(12));
    session.set("pageable_lazy", 1);
    let mover = mover(context, DeviceOptions::default());
    let mut rig = Rig::of(order("blocks_first_nhd"), LARGE, Direction::Scatter, SlabIn::Pageable, &mut rng);
    let hold = session.hold();
    let copy = rig.start(&mover, stream.0).map_err(text)?;
    assert!(!copy.is_complete().map_err(text)?);
    rig.slab = SlabMemory::Pageable(vec![0; rig.images.slab.len()]);
    drop(hold);
    copy.wait().map_err(text)?;
    assert_eq!(session.holds_expired(), 0);
    rig.check_against(&rig.images.cache_after.clone(), &vec![0; rig.images.slab.len()])
}
