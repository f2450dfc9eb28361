//! Every driver call on the way of a transfer made to fail, once each: the error names the call, nothing
//! leaks, nothing is left in flight, and the next transfer is exact.

use std::ffi::CString;

use cudarc::driver::sys;
use libtest_mimic::{Failed, Trial};
use maru_kernel_cuda::{Image, KernelError, LaunchOptions, PagedCopyKernel, open_context};
use maru_layout::{Direction, SlotMapping};

use crate::cases::{Rng, compare, job, random_slots};
use crate::gpu::{Device, Gpu, Graph, Pinned, Stream, slot_bytes};
use crate::harness::{text, trial};
use crate::runtime::long;

type Number = unsafe extern "C" fn() -> i32;

fn number(name: &[u8]) -> i32 {
    // SAFETY: the process runs with the stand-in.
    let library = unsafe { sys::culib() };
    // SAFETY: the stand-in has these functions with this signature.
    let function = unsafe { library.get::<Number>(name) }.unwrap();
    // SAFETY: as above.
    unsafe { function() }
}

/// The `n`-th call from now of a driver function fails with `code`.
pub(crate) fn fault(function: &str, n: i64, code: i32) {
    type Fault = unsafe extern "C" fn(*const libc::c_char, i64, i32) -> i32;
    // SAFETY: the process runs with the stand-in.
    let library = unsafe { sys::culib() };
    // SAFETY: the stand-in has this function with this signature.
    let set = unsafe { library.get::<Fault>(b"maru_fake_fault") }.unwrap();
    let function = CString::new(function).unwrap();
    // SAFETY: a C string that lives until the call returns.
    unsafe { set(function.as_ptr(), n, code) };
}

/// How many devices there are, and their compute capability times ten.
pub(crate) fn device(count: i32, capability: i32) {
    type Set = unsafe extern "C" fn(i32, i32) -> i32;
    // SAFETY: the process runs with the stand-in.
    let library = unsafe { sys::culib() };
    // SAFETY: the stand-in has this function with this signature.
    let set = unsafe { library.get::<Set>(b"maru_fake_device") }.unwrap();
    // SAFETY: as above.
    unsafe { set(count, capability) };
}

pub(crate) fn trials() -> Vec<Trial> {
    let transfers = [
        "cuCtxGetCurrent",
        "cuStreamIsCapturing",
        "cuLaunchKernel",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuMemcpyHtoDAsync_v2",
        "cuMemAlloc_v2",
        "cuStreamCreate",
        "cuStreamSynchronize",
    ];
    let loads = [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer_v2",
        "cuEventCreate",
        "cuMemAlloc_v2",
        "cuCtxGetCurrent",
        "cuDeviceGetAttribute",
    ];
    let mut trials = Vec::new();
    for function in transfers {
        trials.push(trial(format!("fault::transfer::{function}"), move |gpu| transfer(gpu, function)));
    }
    for function in loads {
        trials.push(trial(format!("fault::load::{function}"), move |gpu| load(gpu, function)));
    }
    trials.push(trial("fault::lost_context_is_reported_as_such".into(), lost));
    trials.push(trial("nothing_leaks_over_many_transfers".into(), no_leak));
    trials.push(trial("a_transfer_waits_for_nothing_on_the_host".into(), no_wait));
    trials
}

/// One store and one load through the ring, with device slots and by value, checked; every error on the way
/// is returned.
fn round_trip(gpu: &Gpu, kernel: &PagedCopyKernel) -> Result<(), String> {
    let (cache, tokens) = long();
    let mut rng = Rng::new(40);
    let pages = Device::new(usize::try_from(cache.bytes).unwrap());
    let mut contents = rng.bytes(pages.len);
    pages.write(0, &contents);
    let mut slab = Pinned::new(cache.slab_bytes(tokens));
    let stream = Stream::new();
    let slots = random_slots(&mut rng, tokens, usize::try_from(tokens).unwrap(), 0);
    let on_device = Device::holding(&slot_bytes(&slots));
    let plan = cache.plan(pages.addr, tokens).map_err(|e| e.to_string())?;
    let say = |error: KernelError| format!("{}: {error}", error.kind());
    // From here on driver calls may fail.
    let planes = kernel.register(&plan).map_err(say)?;
    let run = |direction, mapping, skip| -> Result<(), String> {
        let job = job(&plan, direction, slab.addr, mapping, skip).map_err(|e| e.to_string())?;
        gpu.stall(&stream, 0, 0, 0, 0);
        // SAFETY: pages, slab and slots live until the wait.
        let launched = unsafe { kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
        let launched = launched.map_err(say)?;
        launched.is_complete().map_err(say)?;
        launched.wait().map_err(say)
    };
    run(Direction::Gather, SlotMapping::from_slots(slots.as_slice()), 0)?;
    run(Direction::Scatter, SlotMapping::Device { addr: on_device.addr, len: tokens }, 0)?;
    run(Direction::Gather, SlotMapping::from_slots(slots.as_slice()), tokens - 100)?;
    let mut expected = vec![0; cache.slab_bytes(tokens)];
    cache.reference.copy(Direction::Gather, &mut contents, &mut expected, tokens, &slots, 0);
    compare("slab", slab.bytes(), &expected)?;
    compare("cache", &pages.read(0, pages.len), &contents)
}

fn heal() -> i32 {
    number(b"maru_fake_heal")
}

/// Fails each call of `function` in turn until one run has no such call any more. Calls of the tests' own
/// set-up panic instead of returning an error, and are passed over.
fn each_call(function: &str, code: i32, mut run: impl FnMut() -> Result<(), String>) -> Result<u32, Failed> {
    let mut reported = 0;
    for n in 1..2000 {
        fault(function, n, code);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut run));
        if heal() > 0 {
            // It was never called that often: this run was whole.
            return match outcome {
                Ok(Ok(())) => Ok(reported),
                other => Err(format!("{function}, call {n}: {other:?} without a fault").into()),
            };
        }
        match outcome {
            Ok(Err(said)) if said.contains(&format!("({code})")) => reported += 1,
            Ok(Err(said)) => return Err(format!("{function}, call {n}: {said}").into()),
            // A failure that costs nothing, in a destructor for instance, or the test's own call.
            Ok(Ok(())) | Err(_) => {}
        }
    }
    Err("too many calls".into())
}

fn quietly<T>(run: impl FnOnce() -> T) -> T {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let out = run();
    std::panic::set_hook(hook);
    out
}

fn transfer(gpu: &Gpu, function: &str) -> Result<(), Failed> {
    round_trip(gpu, &gpu.kernel)?;
    let reported = quietly(|| each_call(function, 2, || round_trip(gpu, &gpu.kernel)))?;
    gpu.bind();
    round_trip(gpu, &gpu.kernel).map_err(|e| format!("after the faults: {e}"))?;
    match reported {
        0 => Err(format!("no failure of {function} was reported").into()),
        _ => Ok(()),
    }
}

fn load(gpu: &Gpu, function: &str) -> Result<(), Failed> {
    let once = || -> Result<(), String> {
        let load = || PagedCopyKernel::load(open_context(0)?);
        let kernel = load().map_err(|e| e.to_string())?;
        drop(kernel);
        gpu.bind();
        Ok(())
    };
    once()?;
    let before = number(b"maru_fake_live");
    let reported = quietly(|| each_call(function, 2, once))?;
    gpu.bind();
    let after = number(b"maru_fake_live");
    // Where giving back itself fails something has to stay.
    let frees = ["cuCtxGetCurrent"];
    if after != before && !frees.contains(&function) {
        return Err(format!("{} objects were left behind", after - before).into());
    }
    // With a fat binary beside it, the portable image is tried after the first failure.
    let second_try = function == "cuModuleLoadData" && Image::embedded().count() > 1;
    match reported {
        0 if !second_try => Err(format!("no failure of {function} was reported").into()),
        1.. if second_try => Err("the portable image was not tried".into()),
        _ => once().map_err(text),
    }
}

fn lost(gpu: &Gpu) -> Result<(), Failed> {
    // The first launch of a round trip is the stalling kernel's.
    for (function, n) in [("cuLaunchKernel", 2), ("cuEventQuery", 1), ("cuEventSynchronize", 1)] {
        fault(function, n, 700);
        let said = quietly(|| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| round_trip(gpu, &gpu.kernel)))
        });
        heal();
        gpu.bind();
        match said {
            Ok(Err(text)) if text.starts_with("context_lost: ") => {}
            other => return Err(format!("{function}: {other:?}").into()),
        }
    }
    round_trip(gpu, &gpu.kernel).map_err(text)
}

fn no_leak(gpu: &Gpu) -> Result<(), Failed> {
    round_trip(gpu, &gpu.kernel)?;
    let before = number(b"maru_fake_live");
    for _ in 0..20 {
        round_trip(gpu, &gpu.kernel)?;
    }
    match number(b"maru_fake_live") {
        after if after == before => Ok(()),
        after => Err(format!("{before} objects before, {after} after").into()),
    }
}

fn no_wait(gpu: &Gpu) -> Result<(), Failed> {
    let (cache, tokens) = long();
    let pages = Device::new(usize::try_from(cache.bytes).unwrap());
    let slab = Pinned::new(cache.slab_bytes(tokens));
    let plan = cache.plan(pages.addr, tokens).map_err(text)?;
    let planes = gpu.kernel.register(&plan).map_err(text)?;
    let stream = Stream::new();
    let slots: Vec<i64> = (0..i64::try_from(tokens).unwrap()).collect();
    let on_device = Device::holding(&slot_bytes(&slots));
    let (waits, live) = (number(b"maru_fake_waits"), number(b"maru_fake_live"));
    let mut held = Vec::new();
    for _ in 0..50 {
        for mapping in [
            SlotMapping::from_slots(slots.as_slice()),
            SlotMapping::from_slots(&slots[..200]),
            SlotMapping::Device { addr: on_device.addr, len: tokens },
        ] {
            let job = job(&plan, Direction::Gather, slab.addr, mapping, 0).map_err(text)?;
            // SAFETY: pages, slab and slots live until the wait below.
            let one = unsafe { gpu.kernel.launch(&job, &planes, stream.0, LaunchOptions::default()) };
            held.push(one.map_err(text)?);
        }
    }
    if number(b"maru_fake_waits") != waits {
        return Err("a launch waited for the device".into());
    }
    if number(b"maru_fake_live") != live {
        return Err("a launch allocated".into());
    }
    drop(Graph::capture(&stream, || {}));
    held.iter().try_for_each(|one| one.wait()).map_err(text)
}
