//! What has to hold on any device, the real one and the simulated.

use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use maru_fallback::{DeviceOptions, FallbackError};
use maru_layout::{Direction, SlotMapping};

use crate::cases::{Cache, Dims, ORDERS, Order, Rng, compare};
use crate::gpu::{Device, Graph, Stream, cu, current, make_current, mover};
use crate::rig::{DIMS, DIRECTIONS, LARGE, Rig, SLABS, SlabIn, SlabMemory, order};
use crate::spread;

pub(crate) type Outcome = Result<(), String>;
type Trial = fn(&Arc<CudaContext>) -> Outcome;
pub(crate) type Body = Box<dyn Fn(&Arc<CudaContext>) -> Outcome + Send>;

/// All of them, by name. The context is current when they are called.
pub(crate) fn all() -> Vec<(String, Body)> {
    let mut trials: Vec<(String, Body)> = Vec::new();
    for order in &ORDERS {
        for place in SLABS {
            let name = format!("layout/{}/{place:?}", order.name).to_lowercase();
            trials.push((name, Box::new(move |context| layout(context, order, place))));
        }
    }
    let named: [(&str, Trial); 19] = [
        ("pageable/several_windows", several_windows),
        ("pageable/tokens_larger_than_the_bounce_memory", large_tokens),
        ("pageable/load_returns_when_the_slab_is_read", early_return),
        ("pageable/store_is_complete_when_it_returns", late_return),
        ("slots/in_device_memory", device_slots),
        ("slots/bad_ones_in_device_memory", bad_device_slots),
        ("layers/one_of_a_packed_slab", one_layer),
        ("layers/in_allocations_of_their_own", spread::own_allocations),
        ("layers/gigabytes_apart", spread::gigabytes_apart),
        ("threads/share_a_mover", threads),
        ("devices/take_turns", devices),
        ("streams/default_ones", default_streams),
        ("streams/of_another_context", foreign_stream),
        ("streams/work_before_and_after", ordered),
        ("graph/captured_and_replayed", captured),
        ("graph/what_cannot_be_captured", not_captured),
        ("graph/capture_of_another_stream_goes_on", capture_elsewhere),
        ("context/is_restored", context_restored),
        ("empty/is_a_no_op", empty),
    ];
    trials.extend(named.into_iter().map(|(name, body)| (name.to_owned(), Box::new(body) as Body)));
    trials
}

fn options() -> DeviceOptions {
    DeviceOptions::default().with_bounce_bytes(0)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn layout(context: &Arc<CudaContext>, order: &Order, place: SlabIn) -> Outcome {
    let stream = Stream::new();
    let mut rng = Rng::new(17);
    for batched in [true, false] {
        let mover = mover(context, options().with_batched(batched).with_stable_slabs(true));
        for dims in [DIMS, Dims { block_size: 8, pad: 0, layers: 5, ..DIMS }, Dims { head_size: 5, ..DIMS }] {
            for direction in DIRECTIONS {
                let what = |e: String| format!("{direction:?} {dims:?} batched {batched}: {e}");
                Rig::of(order, dims, direction, place, &mut rng).run(&mover, stream.0).map_err(what)?;
            }
        }
    }
    Ok(())
}

fn several_windows(context: &Arc<CudaContext>) -> Outcome {
    let (mover, stream, mut rng) = (mover(context, options()), Stream::new(), Rng::new(3));
    for name in ["blocks_first_nhd", "fused_lbnhc", "kv_first_hnd", "trt_llm"] {
        // A layer of several windows, and windows of several layers.
        for dims in [LARGE, Dims { blocks: 2, ..LARGE }] {
            for direction in DIRECTIONS {
                for _ in 0..2 {
                    Rig::of(order(name), dims, direction, SlabIn::Pageable, &mut rng)
                        .run(&mover, stream.0)?;
                }
            }
        }
    }
    Ok(())
}

fn large_tokens(context: &Arc<CudaContext>) -> Outcome {
    let (mover, stream, mut rng) = (mover(context, options()), Stream::new(), Rng::new(5));
    let dims = Dims { head_size: 70_000, layers: 2, ..DIMS };
    for direction in DIRECTIONS {
        for name in ["opaque_blocks", "mla"] {
            Rig::of(order(name), dims, direction, SlabIn::Pageable, &mut rng).run(&mover, stream.0)?;
        }
    }
    Ok(())
}

/// The slab is overwritten as soon as the call returns.
fn early_return(context: &Arc<CudaContext>) -> Outcome {
    let (mover, stream, mut rng) = (mover(context, DeviceOptions::default()), Stream::new(), Rng::new(7));
    for _ in 0..4 {
        let mut rig =
            Rig::of(order("blocks_first_nhd"), LARGE, Direction::Scatter, SlabIn::Pageable, &mut rng);
        let copy = rig.start(&mover, stream.0).map_err(text)?;
        let SlabMemory::Pageable(slab) = &mut rig.slab else { unreachable!() };
        slab.fill(0x5a);
        copy.wait().map_err(text)?;
        let slab = vec![0x5a; rig.images.slab.len()];
        rig.check_against(&rig.images.cache_after.clone(), &slab)?;
    }
    Ok(())
}

fn late_return(context: &Arc<CudaContext>) -> Outcome {
    let (mover, stream, mut rng) = (mover(context, DeviceOptions::default()), Stream::new(), Rng::new(9));
    let mut rig = Rig::of(order("blocks_first_nhd"), LARGE, Direction::Gather, SlabIn::Pageable, &mut rng);
    let copy = rig.start(&mover, stream.0).map_err(text)?;
    // No wait.
    rig.check()?;
    assert!(copy.is_complete().map_err(text)?);
    Ok(())
}

fn device_slots(context: &Arc<CudaContext>) -> Outcome {
    let (mover, stream, mut rng) = (mover(context, options()), Stream::new(), Rng::new(11));
    for place in SLABS {
        for direction in DIRECTIONS {
            let mut rig = Rig::small(order("kv_first_nhd"), direction, place, &mut rng);
            // What is skipped may be anything.
            let mut slots = rig.slots.clone();
            slots[0] = i64::MAX;
            let memory = Device::holding(&bytes_of(&slots));
            let job = rig.job_with(SlotMapping::Device { addr: memory.addr, len: slots.len() as u64 }, None);
            // SAFETY: everything is alive until the wait below.
            let copy = unsafe { mover.copy_on(&job, stream.0) }.map_err(text)?;
            copy.wait().map_err(text)?;
            rig.check().map_err(|e| format!("{place:?} {direction:?}: {e}"))?;
        }
    }
    Ok(())
}

fn bad_device_slots(context: &Arc<CudaContext>) -> Outcome {
    let (mover, stream, mut rng) = (mover(context, options()), Stream::new(), Rng::new(13));
    for direction in DIRECTIONS {
        for (change, kind) in
            [(24, "slot_out_of_range"), (-2, "slot_out_of_range"), (i64::MIN, "slot_out_of_range")]
        {
            let mut rig = Rig::small(order("kv_first_nhd"), direction, SlabIn::Registered, &mut rng);
            let mut slots = rig.slots.clone();
            slots[5] = change;
            let memory = Device::holding(&bytes_of(&slots));
            let job = rig.job_with(SlotMapping::Device { addr: memory.addr, len: slots.len() as u64 }, None);
            // SAFETY: everything is alive until the wait below.
            let error = unsafe { mover.copy_on(&job, stream.0) }.expect_err("a bad slot");
            assert_eq!(error.kind(), kind, "{error}");
            stream.wait();
            rig.check_untouched()?;
        }
    }
    let mut rig = Rig::small(order("kv_first_nhd"), Direction::Scatter, SlabIn::Registered, &mut rng);
    let mut slots = rig.slots.clone();
    slots[5] = slots[4];
    let memory = Device::holding(&bytes_of(&slots));
    let job = rig.job_with(SlotMapping::Device { addr: memory.addr, len: slots.len() as u64 }, None);
    // SAFETY: as above.
    let error = unsafe { mover.copy_on(&job, stream.0) }.expect_err("a slot twice");
    assert_eq!(error.kind(), "duplicate_slot", "{error}");
    rig.check_untouched()
}

fn one_layer(context: &Arc<CudaContext>) -> Outcome {
    let (mover, stream, mut rng) = (mover(context, options()), Stream::new(), Rng::new(15));
    for place in SLABS {
        for direction in DIRECTIONS {
            for in_device in [false, true] {
                let mut rig = Rig::small(order("blocks_first_hnd"), direction, place, &mut rng);
                let memory = Device::holding(&bytes_of(&rig.slots));
                // Layer by layer, out of order; together they are the whole.
                for layer in [2, 0, 1] {
                    let slots = match in_device {
                        true => SlotMapping::Device { addr: memory.addr, len: rig.slots.len() as u64 },
                        false => SlotMapping::from_slots(rig.slots.clone()),
                    };
                    let job = rig.job_with(slots, Some((layer, 1)));
                    // SAFETY: everything is alive until the wait below.
                    unsafe { mover.copy_on(&job, stream.0) }.map_err(text)?.wait().map_err(text)?;
                }
                rig.check().map_err(|e| format!("{place:?} {direction:?} {in_device}: {e}"))?;
            }
        }
    }
    Ok(())
}

/// Threads that never saw a context, each with a stream of its own, on one mover.
fn threads(context: &Arc<CudaContext>) -> Outcome {
    let mover = mover(context, options());
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let start = |seed: u64| {
            let (mover, context) = (&mover, context.clone());
            scope.spawn(move || {
                let mut rng = Rng::new(seed);
                for round in 0..6 {
                    context.bind_to_thread().map_err(text)?;
                    let (place, direction) = (SLABS[round % 3], DIRECTIONS[round / 3]);
                    let stream = Stream::new();
                    let mut rig = Rig::of(order("blocks_first_nhd"), LARGE, direction, place, &mut rng);
                    make_current(std::ptr::null_mut());
                    let moved = rig.start(mover, stream.0).and_then(|copy| copy.wait());
                    assert!(current().is_null());
                    context.bind_to_thread().map_err(text)?;
                    moved.map_err(text)?;
                    rig.check()?;
                }
                Ok(())
            })
        };
        let running: Vec<_> = (1..4).map(start).collect();
        running.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a thread panicked".into()))).collect()
    });
    outcomes.into_iter().collect()
}

/// Two devices in one thread, by turns; what is current stays so.
fn devices(context: &Arc<CudaContext>) -> Outcome {
    let mut count = 0;
    cu!(cuDeviceGetCount(&mut count));
    if count < 2 {
        eprintln!("one device only: turns were not taken");
        return Ok(());
    }
    let mine = current();
    let other = crate::gpu::open(1)?;
    let mut rng = Rng::new(37);
    {
        let movers = [mover(context, options()), mover(&other, options())];
        for round in 0..10 {
            for (mover, context) in movers.iter().zip([context, &other]) {
                context.bind_to_thread().map_err(text)?;
                let stream = Stream::new();
                let place = SLABS[round % 3];
                let mut rig = Rig::small(order("fused_lbnhc"), DIRECTIONS[round % 2], place, &mut rng);
                // The other device is current, or this one.
                make_current(if round % 4 < 2 { mine } else { context.cu_ctx() });
                let before = current();
                let moved = rig.start(mover, stream.0).and_then(|copy| copy.wait());
                assert_eq!(current(), before);
                context.bind_to_thread().map_err(text)?;
                moved.map_err(text)?;
                rig.check()?;
            }
        }
    }
    drop(other);
    make_current(mine);
    Ok(())
}

fn default_streams(context: &Arc<CudaContext>) -> Outcome {
    let (mover, mut rng) = (mover(context, options()), Rng::new(19));
    for handle in [0usize, 1, 2] {
        let stream = std::ptr::without_provenance_mut(handle);
        for place in SLABS {
            for direction in DIRECTIONS {
                for name in ["blocks_first_nhd", "fused_lbnhc"] {
                    let what = |e| format!("stream {handle} {place:?} {direction:?}: {e}");
                    let mut rig = Rig::small(order(name), direction, place, &mut rng);
                    let copy = rig.start(&mover, stream).map_err(text)?;
                    // The stream itself is what is waited for.
                    cu!(cuStreamSynchronize(stream));
                    rig.check().map_err(what)?;
                    drop(copy);
                }
            }
        }
    }
    Ok(())
}

fn foreign_stream(context: &Arc<CudaContext>) -> Outcome {
    let mut count = 0;
    cu!(cuDeviceGetCount(&mut count));
    if count < 2 {
        eprintln!("one device only: streams of another were not tried");
        return Ok(());
    }
    let mine = current();
    let other = crate::gpu::open(1)?;
    other.bind_to_thread().map_err(text)?;
    let stream = Stream::new();
    make_current(mine);
    let (mover, mut rng) = (mover(context, options()), Rng::new(21));
    let mut rig = Rig::small(order("kv_first_nhd"), Direction::Gather, SlabIn::Registered, &mut rng);
    let error = rig.start(&mover, stream.0).expect_err("a stream of another device");
    assert!(matches!(error, FallbackError::ForeignStream { device: 0 }), "{error}");
    assert_eq!(error.kind(), "invalid_argument");
    rig.check_untouched()
}

/// A store waits for what was queued before it and is waited for by what is queued behind `order_before`.
fn ordered(context: &Arc<CudaContext>) -> Outcome {
    let (mover, mut rng) = (mover(context, options()), Rng::new(23));
    let (first, second) = (Stream::new(), Stream::new());
    // Copies of rows, and batches.
    for (place, dims) in SLABS.iter().flat_map(|p| [(*p, LARGE), (*p, DIMS)]) {
        let mut rig = Rig::of(order("kv_first_nhd"), dims, Direction::Gather, place, &mut rng);
        let cache = rig.images.cache.clone();
        // The cache gets its content on the stream only.
        rig.paged.write(&vec![0; cache.len()]);
        let source = Device::holding(&cache);
        cu!(cuMemcpyDtoDAsync_v2(rig.paged.addr, source.addr, cache.len(), first.0));
        let copy = rig.start(&mover, first.0).map_err(text)?;
        // SAFETY: the stream is alive.
        unsafe { copy.order_before(second.0) }.map_err(text)?;
        cu!(cuMemsetD8Async(rig.paged.addr, 0xee, cache.len(), second.0));
        second.wait();
        rig.check_against(&vec![0xee; cache.len()], &rig.images.slab_after.clone())
            .map_err(|e| format!("{place:?}: {e}"))?;
    }
    // A load overwrites pages only after what was queued before it has read them.
    for place in SLABS {
        let mut rig = Rig::of(order("kv_first_nhd"), LARGE, Direction::Scatter, place, &mut rng);
        let len = rig.images.cache.len();
        let kept = Device::new(len);
        cu!(cuMemcpyDtoDAsync_v2(kept.addr, rig.paged.addr, len, first.0));
        rig.run(&mover, first.0)?;
        compare("what was read before", &kept.read(len), &rig.images.cache)?;
    }
    Ok(())
}

fn captured(context: &Arc<CudaContext>) -> Outcome {
    let (mover, mut rng) = (mover(context, options()), Rng::new(25));
    let stream = Stream::new();
    for place in [SlabIn::Registered, SlabIn::Device] {
        for direction in DIRECTIONS {
            for name in ["blocks_first_nhd", "fused_lbnhc"] {
                let mut rig = Rig::small(order(name), direction, place, &mut rng);
                let job = rig.job();
                let graph = Graph::capture(&stream, || {
                    // SAFETY: everything is alive until the graph has run.
                    let copy = unsafe { mover.copy_on(&job, stream.0) }.expect("captured");
                    assert!(copy.is_captured());
                    assert!(copy.is_complete().expect("done"));
                });
                rig.check_untouched()?;
                graph.launch(&stream);
                graph.launch(&stream);
                stream.wait();
                rig.check().map_err(|e| format!("{place:?} {direction:?}: {e}"))?;
            }
        }
    }
    Ok(())
}

fn not_captured(context: &Arc<CudaContext>) -> Outcome {
    let (mover, mut rng) = (mover(context, options()), Rng::new(27));
    let stream = Stream::new();
    let mut pageable = Rig::small(order("kv_first_nhd"), Direction::Gather, SlabIn::Pageable, &mut rng);
    let mut slots = Rig::small(order("kv_first_nhd"), Direction::Gather, SlabIn::Registered, &mut rng);
    let mut fine = Rig::small(order("kv_first_nhd"), Direction::Gather, SlabIn::Registered, &mut rng);
    let memory = Device::holding(&bytes_of(&slots.slots));
    let in_device = SlotMapping::Device { addr: memory.addr, len: slots.slots.len() as u64 };
    let jobs = [pageable.job(), slots.job_with(in_device, None)];
    let good = fine.job();
    let graph = Graph::capture(&stream, || {
        for job in &jobs {
            // SAFETY: everything is alive until the graph has run.
            let error = unsafe { mover.copy_on(job, stream.0) }.expect_err("cannot be captured");
            assert_eq!(error.kind(), "not_available", "{error}");
        }
        // The capture goes on.
        // SAFETY: as above.
        unsafe { mover.copy_on(&good, stream.0) }.expect("captured");
    });
    graph.launch(&stream);
    stream.wait();
    fine.check()
}

/// Transfers while somebody captures another stream in the strictest mode, as PyTorch does.
fn capture_elsewhere(context: &Arc<CudaContext>) -> Outcome {
    let (mover, mut rng) = (mover(context, options()), Rng::new(33));
    let (captured, stream) = (Stream::new(), Stream::new());
    let mut rigs: Vec<Rig> = SLABS
        .iter()
        .map(|place| Rig::small(order("blocks_first_nhd"), Direction::Scatter, *place, &mut rng))
        .collect();
    let memory = Device::new(64);
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    cu!(cuStreamBeginCapture_v2(captured.0, mode));
    cu!(cuMemsetD8Async(memory.addr, 1, 64, captured.0));
    let moved: Result<Vec<()>, String> =
        rigs.iter_mut().map(|rig| rig.start(&mover, stream.0).map_err(text)?.wait().map_err(text)).collect();
    let mut graph = std::ptr::null_mut();
    cu!(cuStreamEndCapture(captured.0, &mut graph));
    cu!(cuGraphDestroy(graph));
    moved?;
    rigs.iter_mut().try_for_each(Rig::check)
}

/// On a thread without a context, and with another one current.
fn context_restored(context: &Arc<CudaContext>) -> Outcome {
    let (mine, stream, mut rng) = (current(), Stream::new(), Rng::new(29));
    for place in SLABS {
        for direction in DIRECTIONS {
            let mut rig = Rig::small(order("blocks_first_nhd"), direction, place, &mut rng);
            make_current(std::ptr::null_mut());
            let moved = {
                let mover = mover(context, options());
                let copy = rig.start(&mover, stream.0).map_err(text)?;
                copy.is_complete().map_err(text)?;
                copy.wait().map_err(text)
            };
            let now = current();
            make_current(mine);
            moved?;
            assert!(now.is_null(), "a context stayed current");
            rig.check()?;
        }
    }
    Ok(())
}

fn empty(context: &Arc<CudaContext>) -> Outcome {
    let (mover, stream, mut rng) = (mover(context, options()), Stream::new(), Rng::new(31));
    for place in SLABS {
        let mut rig = Rig::small(order("kv_first_nhd"), Direction::Gather, place, &mut rng);
        let none = vec![-1; rig.slots.len()];
        let memory = Device::holding(&bytes_of(&none));
        for slots in [
            SlotMapping::from_slots(none.clone()),
            SlotMapping::from_slots(vec![]),
            SlotMapping::Device { addr: memory.addr, len: none.len() as u64 },
        ] {
            if slots.is_empty() {
                // There is nothing to skip in it.
                continue;
            }
            let job = rig.job_with(slots, None);
            // SAFETY: everything is alive.
            let copy = unsafe { mover.copy_on(&job, stream.0) }.map_err(text)?;
            assert!(copy.is_complete().map_err(text)?);
        }
        rig.check_untouched()?;
    }
    let cache = Cache::new(order("kv_first_nhd"), DIMS).map_err(text)?;
    assert_eq!(cache.layout.num_slots(), 24);
    Ok(())
}

pub(crate) fn bytes_of(slots: &[i64]) -> Vec<u8> {
    slots.iter().flat_map(|slot| slot.to_ne_bytes()).collect()
}
