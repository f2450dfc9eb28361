//! What surrounds a launch: contexts, threads, many launches in flight, refusals.

use std::sync::Arc;

use cudarc::driver::sys;
use libtest_mimic::Failed;
use maru_kernel_cuda::{Image, KernelError, LaunchOptions, availability, device_count};
use maru_layout::{CopyJob, DType, Direction, JobRequest, SlabSpan, SlotMapping};

use crate::cases::{Cache, Dims, ORDERS, Rng, compare, job, random_slots};
use crate::gpu::{Device, Gpu, Pinned, Stream, cu};
use crate::harness::{Body, text};
use crate::ordering::Setup;

pub(crate) const TRIALS: [(&str, Body); 10] = [
    ("availability_says_yes_and_no", available),
    ("the_callers_context_is_what_it_was", context_restored),
    ("threads_without_a_context", new_thread),
    ("many_launches_in_flight_each_exact", in_flight),
    ("a_full_ring_falls_back_to_slots_by_value", full_ring),
    ("many_slabs_in_few_launches", batches),
    ("a_batch_of_unlike_jobs_goes_in_order", mixed_batch),
    ("an_unregistered_slab_is_refused_before_anything_is_queued", unregistered),
    ("a_plane_table_of_another_cache_is_refused", wrong_planes),
    ("a_registered_tmpfs_mapping_as_slab", tmpfs),
];

fn available(gpu: &Gpu) -> Result<(), Failed> {
    availability(0).map_err(text)?;
    let count = device_count().map_err(text)?;
    let beyond = availability(count);
    if beyond != Err(KernelError::DeviceOutOfRange { device: count, count }) {
        return Err(format!("{beyond:?}").into());
    }
    let wanted = Image::embedded().next();
    match Some(gpu.kernel.image()) == wanted {
        true => Ok(()),
        false => Err(format!("{:?} runs, {wanted:?} was wanted", gpu.kernel.image()).into()),
    }
}

fn current() -> sys::CUcontext {
    let mut current = std::ptr::null_mut();
    cu!(cuCtxGetCurrent(&mut current));
    current
}

fn context_restored(gpu: &Gpu) -> Result<(), Failed> {
    let setup = Setup::new();
    let stream = Stream::new();
    let job = setup.job(Direction::Gather);
    let ours = gpu.context.cu_ctx();
    let mut other = std::ptr::null_mut();
    cu!(cuCtxCreate_v2(&mut other, 0, gpu.context.cu_device()));
    // Making it pushed it; setting null later pops one, and nothing must be left below.
    cu!(cuCtxPopCurrent_v2(&mut other));
    for caller in [other, std::ptr::null_mut(), ours] {
        cu!(cuCtxSetCurrent(caller));
        let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
        assert_eq!(current(), caller, "register");
        // SAFETY: the set-up's memory lives until the wait below.
        let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
        let launched = launched.map_err(text)?;
        assert_eq!(current(), caller, "launch");
        launched.is_complete().map_err(text)?;
        assert_eq!(current(), caller, "is_complete");
        launched.wait().map_err(text)?;
        assert_eq!(current(), caller, "wait");
        let opened = maru_kernel_cuda::open_context(0).map_err(text)?;
        assert_eq!(current(), caller, "open_context");
        let kernel = maru_kernel_cuda::PagedCopyKernel::load(opened).map_err(text)?;
        assert_eq!(current(), caller, "load");
        drop((launched, planes, kernel));
        assert_eq!(current(), caller, "drop");
        cu!(cuCtxSetCurrent(ours));
    }
    cu!(cuCtxDestroy_v2(other));
    gpu.bind();
    Ok(())
}

fn new_thread(gpu: &Gpu) -> Result<(), Failed> {
    let setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let streams: Vec<Stream> = (0..4).map(|_| Stream::new()).collect();
    let job = setup.job(Direction::Gather);
    let handles: Vec<usize> = streams.iter().map(|s| s.0 as usize).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = handles
            .iter()
            .map(|stream| {
                let (job, planes, kernel) = (&job, &planes, &gpu.kernel);
                scope.spawn(move || -> Result<(), KernelError> {
                    for _ in 0..200 {
                        let stream = *stream as sys::CUstream;
                        // SAFETY: the set-up outlives the scope; all threads gather the same bytes.
                        unsafe { kernel.launch(job, planes, stream, LaunchOptions::default()) }?.wait()?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })
    .map_err(text)
}

/// A cache with more slots than travel by value.
pub(crate) fn long() -> (Cache, u64) {
    let dims =
        Dims { layers: 2, blocks: 80, block_size: 16, heads: 2, head_size: 8, dtype: DType::Bf16, pad: 0 };
    (Cache::new(&ORDERS[0], dims).unwrap(), 1280)
}

/// Sends more lists through the ring than it has buffers.
pub(crate) fn churn_ring(gpu: &Gpu, stream: &Stream) -> Result<(), Failed> {
    let (cache, tokens) = long();
    let pages = Device::new(usize::try_from(cache.bytes).unwrap());
    let packed = Pinned::new(cache.slab_bytes(tokens));
    let plan = cache.plan(pages.addr, tokens).map_err(text)?;
    let planes = gpu.kernel.register(&plan).map_err(text)?;
    let mut rng = Rng::new(30);
    for _ in 0..20 {
        let slots = random_slots(&mut rng, tokens, usize::try_from(tokens).unwrap(), 0);
        let slots = SlotMapping::from_slots(slots);
        let job = job(&plan, Direction::Gather, packed.addr, slots, 0).map_err(text)?;
        // SAFETY: pages and slab live until the wait.
        let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
        launched.map_err(text)?.wait().map_err(text)?;
    }
    Ok(())
}

/// Queues `n` gathers of different slots into slabs of their own behind a stall, then checks every one.
fn many(gpu: &Gpu, cache: &Cache, tokens: u64, n: usize) -> Result<(), Failed> {
    let pages = Device::new(usize::try_from(cache.bytes).unwrap());
    let mut rng = Rng::new(31);
    let mut contents = rng.bytes(pages.len);
    pages.write(0, &contents);
    let bytes = cache.slab_bytes(tokens);
    let mut packed = Pinned::new(bytes * n);
    let plan = cache.plan(pages.addr, tokens).map_err(text)?;
    let planes = gpu.kernel.register(&plan).map_err(text)?;
    let stream = Stream::new();
    let count = usize::try_from(tokens).unwrap();
    let lists: Vec<Vec<i64>> = (0..n).map(|_| random_slots(&mut rng, tokens, count, 0)).collect();
    gpu.stall(&stream, 100, 0, 0, 0);
    let mut launched = Vec::new();
    for (i, list) in lists.iter().enumerate() {
        let slab = packed.addr + (i * bytes) as u64;
        let mapping = SlotMapping::from_slots(list.as_slice());
        let job = job(&plan, Direction::Gather, slab, mapping, 0).map_err(text)?;
        // SAFETY: pages and slabs live until the wait below.
        let one = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
        launched.push(one.map_err(text)?);
    }
    if stream.idle() {
        return Err("the stall was over before everything was queued".into());
    }
    // Half are waited for, half are dropped while in flight.
    for (i, one) in launched.into_iter().enumerate() {
        if i % 2 == 0 {
            one.wait().map_err(text)?;
        }
    }
    stream.wait();
    for (i, list) in lists.iter().enumerate() {
        let mut expected = vec![0; bytes];
        cache.reference.copy(Direction::Gather, &mut contents, &mut expected, tokens, list, 0);
        compare(&format!("slab {i}"), &packed.bytes()[i * bytes..][..bytes], &expected)?;
    }
    Ok(())
}

fn in_flight(gpu: &Gpu) -> Result<(), Failed> {
    // Again and again, so that events and records are reused.
    for _ in 0..3 {
        many(gpu, &crate::edges::small("kv_first_nhd"), 64, 300)?;
    }
    Ok(())
}

fn full_ring(gpu: &Gpu) -> Result<(), Failed> {
    let (cache, tokens) = long();
    many(gpu, &cache, tokens, 24)
}

/// `n` slabs of 64 tokens each, every slot of the cache in one of them.
struct Slabs {
    cache: Cache,
    pages: Device,
    slabs: Pinned,
    lists: Vec<Vec<i64>>,
    plan: Arc<maru_layout::CopyPlan>,
}

impl Slabs {
    fn new(seed: u64) -> Self {
        let (cache, slots) = long();
        let mut rng = Rng::new(seed);
        let pages = Device::holding(&rng.bytes(usize::try_from(cache.bytes).unwrap()));
        let all = random_slots(&mut rng, slots, usize::try_from(slots).unwrap(), 11);
        let lists: Vec<Vec<i64>> = all.chunks(64).map(<[i64]>::to_vec).collect();
        let mut slabs = Pinned::new(lists.len() * cache.slab_bytes(64));
        let filling = rng.bytes(lists.len() * cache.slab_bytes(64));
        slabs.bytes().copy_from_slice(&filling);
        let plan = cache.plan(pages.addr, 64).unwrap();
        Slabs { cache, pages, slabs, lists, plan }
    }

    fn job(&self, direction: Direction, i: usize, mapping: SlotMapping) -> CopyJob {
        let slab = self.slabs.addr + (i * self.cache.slab_bytes(64)) as u64;
        job(&self.plan, direction, slab, mapping, 0).unwrap()
    }

    fn jobs(&self, direction: Direction) -> Vec<CopyJob> {
        let lists = self.lists.iter().enumerate();
        lists.map(|(i, l)| self.job(direction, i, SlotMapping::from_slots(l.as_slice()))).collect()
    }

    /// Launches the jobs and compares both sides with the oracle's work in the order of `moves`.
    fn check(&mut self, gpu: &Gpu, jobs: &[CopyJob], moves: &[(Direction, usize)]) -> Result<usize, Failed> {
        let planes = gpu.kernel.register(&self.plan).map_err(text)?;
        let (mut pages, mut slabs) = (self.pages.read(0, self.pages.len), self.slabs.bytes().to_vec());
        let bytes = self.cache.slab_bytes(64);
        for (direction, i) in moves {
            let slab = &mut slabs[i * bytes..][..bytes];
            self.cache.reference.copy(*direction, &mut pages, slab, 64, &self.lists[*i], 0);
        }
        let stream = Stream::new();
        gpu.stall(&stream, 5, 0, 0, 0);
        // SAFETY: pages and slabs live until the wait below.
        let launched = unsafe { gpu.kernel.launch_many(jobs, &planes, stream.0, LaunchOptions::default()) };
        let launched = launched.map_err(text)?;
        launched.iter().try_for_each(|one| one.wait()).map_err(text)?;
        compare("slabs", self.slabs.bytes(), &slabs)?;
        compare("cache", &self.pages.read(0, self.pages.len), &pages)?;
        Ok(launched.len())
    }
}

fn batches(gpu: &Gpu) -> Result<(), Failed> {
    for direction in [Direction::Gather, Direction::Scatter] {
        // More rounds than the ring has buffers.
        for seed in 0..12 {
            let mut setup = Slabs::new(seed);
            let moves: Vec<_> = (0..setup.lists.len()).map(|i| (direction, i)).collect();
            let jobs = setup.jobs(direction);
            let launches = setup.check(gpu, &jobs, &moves)?;
            if (jobs.len(), launches) != (20, 1) {
                return Err(format!("{launches} launches for {} slabs", jobs.len()).into());
            }
        }
    }
    Ok(())
}

fn mixed_batch(gpu: &Gpu) -> Result<(), Failed> {
    use Direction::{Gather, Scatter};
    let mut setup = Slabs::new(60);
    let on_device = Device::holding(&crate::gpu::slot_bytes(&setup.lists[3]));
    let (load, store) = (setup.jobs(Scatter), setup.jobs(Gather));
    let device = SlotMapping::Device { addr: on_device.addr, len: 64 };
    let jobs = vec![
        load[0].clone(),
        load[1].clone(),
        // The same slab stored, loaded, stored again.
        store[0].clone(),
        load[0].clone(),
        store[0].clone(),
        setup.job(Gather, 3, device),
        store[4].clone(),
        store[5].clone(),
        store[4].clone(),
    ];
    let moves = [
        (Scatter, 0),
        (Scatter, 1),
        (Gather, 0),
        (Scatter, 0),
        (Gather, 0),
        (Gather, 3),
        (Gather, 4),
        (Gather, 5),
        (Gather, 4),
    ];
    setup.check(gpu, &jobs, &moves)?;
    Ok(())
}

fn unregistered(gpu: &Gpu) -> Result<(), Failed> {
    let mut setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let before = setup.slab.bytes().to_vec();
    let slab = SlabSpan { host: Some(setup.slab.addr), device: None, len: before.len() as u64 };
    let slots = SlotMapping::from_slots(setup.slots.as_slice());
    let direction = Direction::Gather;
    let request = JobRequest { direction, slab, slots, skip_tokens: 0, partial: false, layers: None };
    let job = CopyJob::new(setup.plan.clone(), request).map_err(text)?;
    let stream = Stream::new();
    // SAFETY: refused.
    let refused = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
    stream.wait();
    compare("slab", setup.slab.bytes(), &before)?;
    match refused {
        Err(KernelError::SlabNotAddressable) => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

fn wrong_planes(gpu: &Gpu) -> Result<(), Failed> {
    let (setup, other) = (Setup::new(), Setup::new());
    let planes = gpu.kernel.register(&other.plan).map_err(text)?;
    let stream = Stream::new();
    let job = setup.job(Direction::Gather);
    // SAFETY: refused.
    match unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) } {
        Err(KernelError::WrongPlanes) => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

fn tmpfs(gpu: &Gpu) -> Result<(), Failed> {
    use std::os::fd::AsRawFd;
    let path = format!("/dev/shm/maru-kernel-test-{}", std::process::id());
    let file =
        std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(text)?;
    std::fs::remove_file(&path).map_err(text)?;
    let len = 2 << 20;
    file.set_len(len as u64).map_err(text)?;
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping of a file of that length.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0) };
    assert!(start != libc::MAP_FAILED);
    cu!(cuMemHostRegister_v2(
        start,
        len,
        sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP
    ));
    let mut addr = 0;
    cu!(cuMemHostGetDevicePointer_v2(&mut addr, start, 0));
    let setup = Setup::new();
    let planes = gpu.kernel.register(&setup.plan).map_err(text)?;
    let old = setup.pages.read(0, setup.pages.len);
    let bytes = setup.cache.slab_bytes(64);
    let slots = || SlotMapping::from_slots(setup.slots.as_slice());
    let stream = Stream::new();
    let launch = |direction, slab| -> Result<(), Failed> {
        let job = job(&setup.plan, direction, slab, slots(), 0).map_err(text)?;
        // SAFETY: pages and mapping live until the wait.
        let launched = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
        launched.map_err(text)?.wait().map_err(text)
    };
    launch(Direction::Gather, addr + 4096)?;
    // SAFETY: the mapping is larger than that.
    let packed = unsafe { start.cast::<u8>().add(4096) };
    // SAFETY: inside the mapping; nothing is in flight.
    let found = unsafe { std::slice::from_raw_parts(packed, bytes) };
    let (_, expected) = setup.after(Direction::Gather, &old, &vec![0; bytes]);
    compare("slab", found, &expected)?;
    setup.pages.fill(0);
    launch(Direction::Scatter, addr + 4096)?;
    let zeros = vec![0; setup.pages.len];
    let (expected, _) = setup.after(Direction::Scatter, &zeros, &expected);
    compare("cache", &setup.pages.read(0, setup.pages.len), &expected)?;
    cu!(cuMemHostUnregister(start));
    // SAFETY: mapped above; nothing uses it any more.
    assert_eq!(unsafe { libc::munmap(start, len) }, 0);
    Ok(())
}

/// Jobs can be shared between threads.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<maru_kernel_cuda::Launched>();
    shared::<maru_kernel_cuda::PagedCopyKernel>();
    shared::<Arc<CopyJob>>();
};
