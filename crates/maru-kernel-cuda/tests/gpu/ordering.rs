//! Order on the caller's stream and between streams, with kernels slow enough to be caught, and CUDA graphs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use maru_kernel_cuda::{KernelError, LaunchOptions};
use maru_layout::{CopyJob, CopyPlan, Direction, SlotMapping};

use crate::cases::{Cache, Rng, compare, job, random_slots};
use crate::edges::small;
use crate::gpu::{Device, Gpu, Graph, Pinned, Stream, slot_bytes};
use crate::harness::{Body, text};

pub(crate) const TRIALS: [(&str, Body); 9] = [
    ("a_store_waits_for_the_slow_kernel_that_writes_its_pages", producer),
    ("a_load_waits_for_the_slow_kernel_that_reads_its_pages", reader),
    ("a_reader_of_loaded_pages_waits_for_the_load", consumer),
    ("another_stream_waits_where_it_is_told_to", other_stream),
    ("launching_waits_for_nothing", asynchronous),
    ("captured_device_slots_are_read_by_every_replay", capture_device),
    ("captured_host_slots_are_baked_in_short_and_long", capture_host),
    ("another_threads_capture_is_left_alone", foreign_capture),
    ("a_bad_slot_of_a_replay_is_reported", capture_bad),
];

const STALL: u64 = 60;

/// A cache of one image on the device, a pinned slab, and what moves between them.
pub(crate) struct Setup {
    pub(crate) cache: Cache,
    pub(crate) pages: Device,
    pub(crate) slab: Pinned,
    pub(crate) plan: Arc<CopyPlan>,
    pub(crate) slots: Vec<i64>,
}

impl Setup {
    /// 64 slots in reverse order.
    pub(crate) fn new() -> Self {
        let cache = small("blocks_first_hnd");
        let pages = Device::new(usize::try_from(cache.bytes).unwrap());
        let mut slab = Pinned::new(cache.slab_bytes(64));
        let mut rng = Rng::new(20);
        pages.write(0, &rng.bytes(pages.len));
        let filling = rng.bytes(cache.slab_bytes(64));
        slab.bytes().copy_from_slice(&filling);
        let plan = cache.plan(pages.addr, 64).unwrap();
        Setup { cache, pages, slab, plan, slots: (0..64).rev().collect() }
    }

    pub(crate) fn job(&self, direction: Direction) -> CopyJob {
        let slots = SlotMapping::from_slots(self.slots.as_slice());
        job(&self.plan, direction, self.slab.addr, slots, 0).unwrap()
    }

    /// What a transfer makes of these images.
    pub(crate) fn after(&self, direction: Direction, pages: &[u8], slab: &[u8]) -> (Vec<u8>, Vec<u8>) {
        self.after_with(direction, pages, slab, &self.slots)
    }

    fn after_with(
        &self,
        direction: Direction,
        pages: &[u8],
        slab: &[u8],
        slots: &[i64],
    ) -> (Vec<u8>, Vec<u8>) {
        let (mut pages, mut slab) = (pages.to_vec(), slab.to_vec());
        assert!(self.cache.reference.copy(direction, &mut pages, &mut slab, 64, slots, 0) > 0);
        (pages, slab)
    }

    fn words(&self) -> u32 {
        assert_eq!(self.pages.len % 8, 0);
        u32::try_from(self.pages.len / 8).unwrap()
    }
}

fn producer(gpu: &Gpu) -> Result<(), Failed> {
    let mut setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let fresh = Rng::new(21).bytes(setup.pages.len);
    let source = Device::holding(&fresh);
    let before = setup.slab.bytes().to_vec();
    let stream = Stream::new();
    let job = setup.job(Direction::Gather);
    gpu.stall(&stream, STALL, setup.pages.addr, source.addr, setup.words());
    // SAFETY: the set-up's memory lives until the wait below.
    let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
    let launched = launched.map_err(text)?;
    if launched.is_complete().map_err(text)? {
        return Err("the launch was over before its producer".into());
    }
    launched.wait().map_err(text)?;
    let (_, expected) = setup.after(Direction::Gather, &fresh, &before);
    Ok(compare("slab", setup.slab.bytes(), &expected)?)
}

fn reader(gpu: &Gpu) -> Result<(), Failed> {
    let mut setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let old = setup.pages.read(0, setup.pages.len);
    let seen = Device::new(setup.pages.len);
    let stream = Stream::new();
    let job = setup.job(Direction::Scatter);
    gpu.stall(&stream, STALL, seen.addr, setup.pages.addr, setup.words());
    // SAFETY: the set-up's memory lives until the wait below.
    let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
    launched.map_err(text)?.wait().map_err(text)?;
    compare("what the reader saw", &seen.read(0, seen.len), &old)?;
    let slab = setup.slab.bytes().to_vec();
    let (expected, _) = setup.after(Direction::Scatter, &old, &slab);
    Ok(compare("cache", &setup.pages.read(0, setup.pages.len), &expected)?)
}

fn consumer(gpu: &Gpu) -> Result<(), Failed> {
    let mut setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let old = setup.pages.read(0, setup.pages.len);
    let seen = Device::new(setup.pages.len);
    let stream = Stream::new();
    let job = setup.job(Direction::Scatter);
    gpu.stall(&stream, STALL, 0, 0, 0);
    // SAFETY: the set-up's memory lives until the wait below.
    let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
    drop(launched.map_err(text)?);
    gpu.stall(&stream, 0, seen.addr, setup.pages.addr, setup.words());
    stream.wait();
    let slab = setup.slab.bytes().to_vec();
    let (expected, _) = setup.after(Direction::Scatter, &old, &slab);
    Ok(compare("what the consumer saw", &seen.read(0, seen.len), &expected)?)
}

fn other_stream(gpu: &Gpu) -> Result<(), Failed> {
    let mut setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let old = setup.pages.read(0, setup.pages.len);
    let seen = Device::new(setup.pages.len);
    let (stream, other) = (Stream::new(), Stream::new());
    let job = setup.job(Direction::Scatter);
    gpu.stall(&stream, STALL, 0, 0, 0);
    // SAFETY: the set-up's memory lives until the wait below.
    let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
    let launched = launched.map_err(text)?;
    // SAFETY: the stream is alive.
    unsafe { launched.order_before(other.0) }.map_err(text)?;
    gpu.stall(&other, 0, seen.addr, setup.pages.addr, setup.words());
    other.wait();
    let slab = setup.slab.bytes().to_vec();
    let (expected, _) = setup.after(Direction::Scatter, &old, &slab);
    compare("what the other stream saw", &seen.read(0, seen.len), &expected)?;
    launched.wait().map_err(text)
}

fn asynchronous(gpu: &Gpu) -> Result<(), Failed> {
    let setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let device_slots = Device::holding(&slot_bytes(&setup.slots));
    let stream = Stream::new();
    let on_device = SlotMapping::Device { addr: device_slots.addr, len: 64 };
    let on_device = job(&setup.plan, Direction::Gather, setup.slab.addr, on_device, 0).map_err(text)?;
    for job in [setup.job(Direction::Gather), setup.job(Direction::Scatter), on_device] {
        gpu.stall(&stream, 200, 0, 0, 0);
        let start = Instant::now();
        let mut held = Vec::new();
        for _ in 0..100 {
            // SAFETY: the set-up's memory lives until the wait below.
            let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
            held.push(launched.map_err(text)?);
        }
        let took = start.elapsed();
        if stream.idle() || took > Duration::from_millis(150) {
            return Err(format!("100 launches behind a stall of 200 ms took {took:?}").into());
        }
        for launched in held {
            launched.wait().map_err(text)?;
        }
    }
    Ok(())
}

fn capture_device(gpu: &Gpu) -> Result<(), Failed> {
    let mut setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let device_slots = Device::holding(&slot_bytes(&setup.slots));
    let stream = Stream::new();
    let mapping = SlotMapping::Device { addr: device_slots.addr, len: 64 };
    let job = job(&setup.plan, Direction::Gather, setup.slab.addr, mapping, 0).map_err(text)?;
    let graph = Graph::capture(&stream, || {
        // SAFETY: the set-up's memory outlives the graph.
        let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
        let launched = launched.unwrap();
        assert!(launched.is_captured());
        assert_eq!(launched.is_complete(), Ok(true), "nothing to wait for");
        launched.wait().unwrap();
    });
    let mut rng = Rng::new(22);
    for _ in 0..3 {
        let slots = random_slots(&mut rng, 64, 64, 9);
        let pages = rng.bytes(setup.pages.len);
        device_slots.write(0, &slot_bytes(&slots));
        setup.pages.write(0, &pages);
        let before = setup.slab.bytes().to_vec();
        graph.launch(&stream);
        stream.wait();
        let (_, expected) = setup.after_with(Direction::Gather, &pages, &before, &slots);
        compare("slab", setup.slab.bytes(), &expected)?;
    }
    gpu.kernel.take_captured_error().map_err(text)
}

fn capture_host(gpu: &Gpu) -> Result<(), Failed> {
    let mut setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let stream = Stream::new();
    let job = setup.job(Direction::Scatter);
    let graph = Graph::capture(&stream, || {
        // SAFETY: the set-up's memory outlives the graph.
        let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
        assert!(launched.unwrap().is_captured());
    });
    let mut rng = Rng::new(23);
    for _ in 0..2 {
        let old = setup.pages.read(0, setup.pages.len);
        let slab = rng.bytes(setup.cache.slab_bytes(64));
        setup.slab.bytes().copy_from_slice(&slab);
        graph.launch(&stream);
        stream.wait();
        let (expected, _) = setup.after(Direction::Scatter, &old, &slab);
        compare("cache", &setup.pages.read(0, setup.pages.len), &expected)?;
    }
    // A list longer than travels by value must not use the ring: its buffer would be reused before a replay.
    let (cache, dims) = crate::runtime::long();
    let pages = Device::new(usize::try_from(cache.bytes).unwrap());
    let mut packed = Pinned::new(cache.slab_bytes(dims));
    let plan = cache.plan(pages.addr, dims).map_err(text)?;
    let planes = gpu.kernel.register(&plan).map_err(text)?;
    let slots = random_slots(&mut rng, dims, usize::try_from(dims).unwrap(), 0);
    let long = SlotMapping::from_slots(slots.as_slice());
    let long = crate::cases::job(&plan, Direction::Gather, packed.addr, long, 0).map_err(text)?;
    let graph = Graph::capture(&stream, || {
        // SAFETY: pages and slab outlive the graph.
        let launched = unsafe { gpu.kernel.launch(&long, &planes, stream.0, LaunchOptions::default()) };
        assert!(launched.unwrap().is_captured());
    });
    crate::runtime::churn_ring(gpu, &stream)?;
    let contents = rng.bytes(pages.len);
    pages.write(0, &contents);
    graph.launch(&stream);
    stream.wait();
    let (mut contents, mut expected) = (contents, vec![0; cache.slab_bytes(dims)]);
    cache.reference.copy(Direction::Gather, &mut contents, &mut expected, dims, &slots, 0);
    Ok(compare("slab", packed.bytes(), &expected)?)
}

fn foreign_capture(gpu: &Gpu) -> Result<(), Failed> {
    let setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let (captured, stream) = (Stream::new(), Stream::new());
    let job = setup.job(Direction::Gather);
    let handle = stream.0 as usize;
    let mut outcome = Ok(());
    let graph = Graph::capture(&captured, || {
        gpu.stall(&captured, 0, 0, 0, 0);
        let work = || -> Result<(), KernelError> {
            let stream = handle as cudarc::driver::sys::CUstream;
            for _ in 0..300 {
                // SAFETY: the set-up outlives the thread.
                let one = unsafe { gpu.kernel.launch(&job, &planes, stream, LaunchOptions::default()) }?;
                one.is_complete()?;
                // Dropped while it may be in flight: its event is asked for again later.
            }
            gpu.kernel.register(&setup.plan)?;
            // SAFETY: as above.
            unsafe { gpu.kernel.launch(&job, &planes, stream, LaunchOptions::default()) }?.wait()
        };
        outcome = std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    });
    outcome.map_err(text)?;
    graph.launch(&captured);
    captured.wait();
    Ok(())
}

fn capture_bad(gpu: &Gpu) -> Result<(), Failed> {
    let setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let device_slots = Device::holding(&slot_bytes(&setup.slots));
    let stream = Stream::new();
    let mapping = SlotMapping::Device { addr: device_slots.addr, len: 64 };
    let job = job(&setup.plan, Direction::Gather, setup.slab.addr, mapping, 0).map_err(text)?;
    let graph = Graph::capture(&stream, || {
        // SAFETY: the set-up's memory outlives the graph.
        let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
        drop(launched.unwrap());
    });
    graph.launch(&stream);
    stream.wait();
    gpu.kernel.take_captured_error().map_err(text)?;
    device_slots.write(8 * 7, &slot_bytes(&[64]));
    graph.launch(&stream);
    stream.wait();
    let expected = Err(KernelError::SlotOutOfRange { token: 7, slot: 64, num_slots: 64 });
    let found = gpu.kernel.take_captured_error();
    if found != expected {
        return Err(format!("{found:?}").into());
    }
    Ok(gpu.kernel.take_captured_error().map_err(|e| format!("reported twice: {e}"))?)
}
