//! Measuring which strategy is faster, on the simulated driver: what is measured is meaningless there, what is
//! done about it is not.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use libtest_mimic::{Arguments, Failed, Trial};
use maru_cxl::{CudaRegistrar, Region, RegisterOptions, Slab};
use maru_driver::DeviceBuffer;
use maru_kernel_cuda::{PagedCopyKernel, StagedMover, StagedOptions, open_context};
use maru_layout::{CacheSpec, DType, Direction, SlotMapping, TensorDesc};
use maru_sim_driver::{CopyKind, Session, session};
use maru_transfer::backend::NativeBackend;
use maru_transfer::calibration::{
    Calibration, Effort, Identity, RUNS, Row, SIZES, STAGE_FROM, Sample, Source,
};
use maru_transfer::config::{Config, DeviceChoice, StrategyChoice, TransferConfig};
use maru_transfer::{
    CacheTensor, PagedCache, Place, Tensors, TransferBackend, TransferEngine, TransferError, TransferRequest,
};
use tempfile::TempDir;

macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        [$((stringify!($name), $name as fn(&Session))),*]
    };
}

fn main() {
    let mut arguments = Arguments::from_args();
    // They share one driver.
    arguments.test_threads = Some(1);
    let missing = maru_sim_driver::library().err();
    if let Some(reason) = &missing {
        eprintln!("left out: {reason}");
    }
    let trials = tests![
        it_is_measured_once_and_then_read,
        measuring_leaves_nothing_behind,
        what_is_measured_is_of_its_own_ring_and_blocks,
        a_file_that_cannot_be_used_is_measured_again,
        a_pipe_and_a_directory_are_no_files,
        switched_off_nothing_is_read_measured_or_written,
        a_device_without_a_uuid_has_the_defaults,
        without_a_directory_it_is_measured_each_time,
        a_directory_that_cannot_be_written_is_no_error,
        the_first_use_makes_the_directory,
        every_call_may_fail_and_the_defaults_hold,
        a_lost_context_is_an_error,
        a_busy_device_is_not_waited_for,
        no_time_means_defaults_and_no_file,
        a_ring_too_small_to_stage_goes_directly,
        threads_measure_once,
        a_capture_going_on_is_left_alone,
        the_callers_context_stays,
        only_looking_measures_nothing,
        a_backend_goes_by_its_calibration,
        driver_copies_move_the_same_bytes,
    ];
    let trials = trials.into_iter().map(|(name, test)| {
        let run = move || {
            let session = session().map_err(|e| Failed::from(e.to_string()))?;
            session.set("uuid", 7);
            test(&session);
            Ok(())
        };
        Trial::test(name, run).with_ignored_flag(missing.is_some())
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

/// A kernel and a ring on device 0, and a directory.
struct Rig {
    ring: StagedMover,
    kernel: PagedCopyKernel,
    config: TransferConfig,
    dir: TempDir,
}

impl Rig {
    fn new() -> Rig {
        Rig::with_ring(8 << 20)
    }

    fn with_ring(bytes: u64) -> Rig {
        let kernel = PagedCopyKernel::load(open_context(0).unwrap()).unwrap();
        let ring = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(bytes)).unwrap();
        let mut config = TransferConfig::default();
        config.staging_bytes = bytes;
        Rig { ring, kernel, config, dir: tempfile::tempdir().unwrap() }
    }

    fn in_dir(&self, dir: Option<&Path>, effort: Effort) -> Result<Calibration, TransferError> {
        Calibration::obtain_with(&self.kernel, &self.ring, &self.config, dir, effort)
    }

    fn obtain(&self) -> Calibration {
        self.in_dir(Some(self.dir.path()), brief()).unwrap()
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }
}

/// The simulator is slow, and its times say nothing.
fn brief() -> Effort {
    Effort::default().with_budget(Duration::from_secs(60)).with_largest(SIZES[0].0).with_rounds(1)
}

fn measured(calibration: &Calibration) -> &Path {
    match calibration.source() {
        Source::Measured { path: Some(path), .. } => path,
        other => panic!("{other:?}"),
    }
}

fn reason(calibration: &Calibration) -> &str {
    match calibration.source() {
        Source::BuiltIn { reason } => reason,
        other => panic!("{other:?}"),
    }
}

fn has_defaults(calibration: &Calibration) -> bool {
    let ways = [Direction::Gather, Direction::Scatter];
    ways.iter().all(|way| RUNS.iter().all(|run| calibration.staged_from(*way, *run) == STAGE_FROM))
        && !calibration.uses_copy_engine()
        && calibration.stored().is_none()
}

fn it_is_measured_once_and_then_read(session: &Session) {
    let rig = Rig::new();
    let first = rig.obtain();
    let path = measured(&first).to_owned();
    assert_eq!(rig.files(), std::slice::from_ref(&path));
    let stored = first.stored().unwrap();
    assert_eq!((stored.identity.device.as_str(), stored.rows.len()), ("Simulated GPU 0", 4));
    assert!(stored.measured_at > 1_700_000_000);
    for row in &stored.rows {
        let sample = row.samples.first().expect("the smallest size fits every budget");
        assert_eq!((sample.bytes, sample.copy_engine_us.is_some()), (SIZES[0].0, row.run_bytes == RUNS[1]));
        assert!(sample.flat_us > 0.0 && sample.direct_us > 0.0 && sample.staged_us.is_some());
    }
    session.clear_records();
    let second = rig.obtain();
    assert_eq!(second.source(), &Source::Cached { path: path.clone() });
    assert_eq!(second.stored(), first.stored());
    assert!(session.records().is_empty(), "something was measured");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.starts_with('#') && text.contains("direction = \"load\""), "{text}");
}

fn measuring_leaves_nothing_behind(session: &Session) {
    let rig = Rig::new();
    // The first time fills the kernel's and the ring's pools of events, which stay with them.
    rig.in_dir(None, brief()).unwrap();
    let before = session.census();
    rig.obtain();
    assert_eq!(session.census(), before);
    assert_eq!(session.queued(), 0);
}

fn what_is_measured_is_of_its_own_ring_and_blocks(session: &Session) {
    let mut rig = Rig::new();
    let first = rig.obtain();
    rig.config.sm_budget = 2;
    let second = rig.obtain();
    session.set("uuid", 8);
    let third = rig.obtain();
    session.set("driver_version", 13010);
    let fourth = rig.obtain();
    let paths = [&first, &second, &third, &fourth].map(|c| measured(c).to_owned());
    assert_eq!(rig.files().len(), 4, "{paths:?}");
    session.set("uuid", 7);
    session.set("driver_version", 13000);
    rig.config.sm_budget = 4;
    assert_eq!(rig.obtain().source(), &Source::Cached { path: paths[0].clone() });
}

fn a_file_that_cannot_be_used_is_measured_again(_: &Session) {
    let rig = Rig::new();
    let path = measured(&rig.obtain()).to_owned();
    let good = fs::read_to_string(&path).unwrap();
    let other_device = good.replace("07070707-", "08080808-");
    let bad: [(&str, Vec<u8>); 9] = [
        ("empty", Vec::new()),
        ("half", good.as_bytes()[..good.len() / 2].to_vec()),
        ("no text", vec![0xff; 100]),
        ("huge", vec![b'#'; 1 << 20]),
        ("another format", good.replace("format = 1", "format = 2").into_bytes()),
        ("another device", other_device.into_bytes()),
        ("another kernel", good.replace("kernel = \"", "kernel = \"not ").into_bytes()),
        ("negative", good.replace("flat_us = ", "flat_us = -").into_bytes()),
        ("not a number", good.replace("direct_us = ", "direct_us = nan #").into_bytes()),
    ];
    for (what, bytes) in bad {
        assert_ne!(bytes, good.as_bytes(), "{what}");
        fs::write(&path, bytes).unwrap();
        assert_eq!(measured(&rig.obtain()), path, "{what}");
        assert_eq!(rig.files(), std::slice::from_ref(&path), "{what}");
        assert_eq!(rig.obtain().source(), &Source::Cached { path: path.clone() }, "{what}");
    }
}

fn a_pipe_and_a_directory_are_no_files(_: &Session) {
    let rig = Rig::new();
    let path = measured(&rig.obtain()).to_owned();
    fs::remove_file(&path).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    if made.is_ok_and(|status| status.success()) {
        assert_eq!(measured(&rig.obtain()), path);
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }
    let _ = fs::remove_file(&path);
    fs::create_dir(&path).unwrap();
    assert!(matches!(rig.obtain().source(), Source::Measured { path: None, .. }));
    assert_eq!(rig.files(), [path], "a temporary file stays behind");
}

fn switched_off_nothing_is_read_measured_or_written(session: &Session) {
    let mut rig = Rig::new();
    let path = measured(&rig.obtain()).to_owned();
    fs::write(&path, "untouched").unwrap();
    session.clear_records();
    let calls = session.calls("cuDeviceGetUuid");
    let on = rig.config.clone();
    for (change, says) in [
        ((|c: &mut TransferConfig| c.calibrate = false) as fn(&mut TransferConfig), "calibrate"),
        (|c| c.strategy = StrategyChoice::Direct, "strategy"),
        (|c| c.strategy = StrategyChoice::Staged, "strategy"),
        (|c| c.staging_bytes = 0, "staging_bytes"),
    ] {
        rig.config = on.clone();
        change(&mut rig.config);
        let calibration = rig.obtain();
        assert!(has_defaults(&calibration) && reason(&calibration).contains(says), "{calibration:?}");
        let looked = Calibration::look_up(0, &rig.config, Some(rig.dir.path()));
        assert!(has_defaults(&looked) && reason(&looked).contains(says), "{looked:?}");
    }
    assert!(session.records().is_empty());
    assert_eq!(session.calls("cuDeviceGetUuid"), calls);
    assert_eq!((rig.files(), fs::read_to_string(&path).unwrap()), (vec![path], "untouched".to_owned()));
}

fn a_device_without_a_uuid_has_the_defaults(session: &Session) {
    let rig = Rig::new();
    session.set("uuid", 0);
    session.clear_records();
    let calibration = rig.obtain();
    assert!(has_defaults(&calibration) && reason(&calibration).contains("which it is"), "{calibration:?}");
    assert!(session.records().is_empty() && rig.files().is_empty());
}

fn without_a_directory_it_is_measured_each_time(session: &Session) {
    let rig = Rig::new();
    for _ in 0..2 {
        session.clear_records();
        let calibration = rig.in_dir(None, brief()).unwrap();
        assert!(matches!(calibration.source(), Source::Measured { path: None, .. }), "{calibration:?}");
        assert!(!session.records().is_empty());
    }
    assert!(rig.files().is_empty());
}

fn a_directory_that_cannot_be_written_is_no_error(_: &Session) {
    let rig = Rig::new();
    let file = rig.dir.path().join("file");
    fs::write(&file, "").unwrap();
    let read_only = rig.dir.path().join("read-only");
    fs::create_dir(&read_only).unwrap();
    fs::set_permissions(&read_only, fs::Permissions::from_mode(0o555)).unwrap();
    let root = fs::write(read_only.join("probe"), "").is_ok();
    for dir in [Some(file.join("below")), (!root).then_some(read_only)].into_iter().flatten() {
        let calibration = rig.in_dir(Some(&dir), brief()).unwrap();
        assert!(matches!(calibration.source(), Source::Measured { path: None, .. }), "{calibration:?}");
        assert!(calibration.stored().is_some());
    }
}

fn the_first_use_makes_the_directory(_: &Session) {
    let rig = Rig::new();
    let dir = rig.dir.path().join("a/b/maru");
    let path = measured(&rig.in_dir(Some(&dir), brief()).unwrap()).to_owned();
    assert_eq!(path.parent(), Some(dir.as_path()));
    assert!(path.is_file());
}

fn every_call_may_fail_and_the_defaults_hold(session: &Session) {
    let rig = Rig::new();
    let before = session.census();
    let mut struck = 0;
    for function in [
        "cuDeviceGetName",
        "cuDriverGetVersion",
        "cuMemAlloc",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer",
        "cuStreamCreate",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync",
        "cuLaunchKernel",
        "cuStreamWaitEvent",
    ] {
        for nth in [1, 2, 5] {
            session.fail(function, nth, 2);
            let calibration = rig.obtain();
            let left = session.faults_left();
            session.clear_faults();
            if left == 0 {
                struck += 1;
                // Driver copies and the file do without what fails them.
                let fine = has_defaults(&calibration) && rig.files().is_empty();
                assert!(fine || calibration.stored().is_some(), "{function} {nth}: {calibration:?}");
            }
            for file in rig.files() {
                fs::remove_file(file).unwrap();
            }
        }
        let after = session.census();
        assert_eq!((after.bytes, after.pinned, after.streams), (before.bytes, before.pinned, before.streams));
    }
    assert!(struck > 20, "{struck}");
    measured(&rig.obtain());
}

fn a_lost_context_is_an_error(session: &Session) {
    for function in ["cuMemAlloc", "cuMemHostAlloc", "cuMemcpyHtoDAsync", "cuLaunchKernel", "cuEventQuery"] {
        let rig = Rig::new();
        session.fail(function, 1, 700);
        let error = rig.in_dir(Some(rig.dir.path()), brief()).unwrap_err();
        assert_eq!((error.kind(), session.faults_left()), ("context_lost", 0), "{function}: {error}");
        assert!(rig.files().is_empty());
    }
}

fn a_busy_device_is_not_waited_for(session: &Session) {
    let rig = Rig::new();
    let before = session.census();
    session.set("delay_us", 400_000);
    let begun = Instant::now();
    let effort = brief().with_patience(Duration::from_millis(100));
    let calibration = rig.in_dir(Some(rig.dir.path()), effort).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(has_defaults(&calibration) && reason(&calibration).contains("busy"), "{calibration:?}");
    assert!(rig.files().is_empty());
    session.set("delay_us", 0);
    while session.census().pinned != before.pinned || session.census().bytes != before.bytes {
        assert!(begun.elapsed() < Duration::from_secs(40), "its memory is not given back");
        std::thread::sleep(Duration::from_millis(5));
    }
    measured(&rig.obtain());
}

fn no_time_means_defaults_and_no_file(_: &Session) {
    let rig = Rig::new();
    let calibration = rig.in_dir(Some(rig.dir.path()), brief().with_budget(Duration::ZERO)).unwrap();
    assert!(has_defaults(&calibration) && reason(&calibration).contains("longer"), "{calibration:?}");
    assert!(rig.files().is_empty());
}

fn a_ring_too_small_to_stage_goes_directly(_: &Session) {
    let rig = Rig::with_ring(8 << 10);
    let calibration = rig.obtain();
    let stored = calibration.stored().unwrap();
    assert!(stored.rows.iter().flat_map(|row| &row.samples).all(|s| s.staged_us.is_none()));
}

fn threads_measure_once(_: &Session) {
    let rig = Rig::new();
    let found: Vec<Calibration> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| rig.obtain())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let first = found.iter().filter(|c| matches!(c.source(), Source::Measured { .. })).count();
    let later = found.iter().filter(|c| matches!(c.source(), Source::Cached { .. })).count();
    assert_eq!((first, later), (1, 3));
    assert!(found.iter().all(|c| c.stored() == found[0].stored()));
}

/// By default memory that is allocated while any thread captures would spoil the graph.
fn a_capture_going_on_is_left_alone(_: &Session) {
    let rig = Rig::new();
    let context = open_context(0).unwrap();
    context.bind_to_thread().unwrap();
    let stream = context.new_stream().unwrap();
    let global = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    stream.begin_capture(global).unwrap();
    std::thread::scope(|scope| measured(&scope.spawn(|| rig.obtain()).join().unwrap()).to_owned());
    fs::remove_file(&rig.files()[0]).unwrap();
    measured(&rig.obtain());
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let captured = stream.end_capture(flags);
    assert!(captured.is_ok(), "the capture was spoilt: {:?}", captured.err());
}

fn the_callers_context_stays(_: &Session) {
    let rig = Rig::new();
    let set = |context| {
        // SAFETY: a live context or none.
        assert_eq!(unsafe { sys::cuCtxSetCurrent(context) }, sys::CUresult::CUDA_SUCCESS);
    };
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the out pointer is valid.
        assert_eq!(unsafe { sys::cuCtxGetCurrent(&raw mut context) }, sys::CUresult::CUDA_SUCCESS);
        context
    };
    let other = open_context(1).unwrap();
    for context in [std::ptr::null_mut(), other.cu_ctx()] {
        set(context);
        measured(&rig.obtain());
        assert_eq!(current(), context);
        fs::remove_file(&rig.files()[0]).unwrap();
    }
    set(std::ptr::null_mut());
}

fn only_looking_measures_nothing(session: &Session) {
    let rig = Rig::new();
    session.clear_records();
    let look = || Calibration::look_up(0, &rig.config, Some(rig.dir.path()));
    assert_eq!(reason(&look()), "not measured yet");
    assert!(session.records().is_empty() && rig.files().is_empty());
    let measured = rig.obtain();
    assert!(matches!(look().source(), Source::Cached { .. }), "{:?}", look());
    assert_eq!(look().stored(), measured.stored());
    assert!(has_defaults(&Calibration::look_up(0, &rig.config, None)));
    assert!(has_defaults(&Calibration::look_up(9, &rig.config, Some(rig.dir.path()))));
}

fn a_backend_goes_by_its_calibration(session: &Session) {
    // Without a UUID, so that nothing is written where this process would write it.
    session.set("uuid", 0);
    let mut config = TransferConfig::default();
    let auto = NativeBackend::open(0, &config).unwrap();
    assert_eq!(auto.name(), "native");
    assert!(has_defaults(auto.calibration().unwrap()));
    for strategy in [StrategyChoice::Direct, StrategyChoice::Staged] {
        config.strategy = strategy;
        assert!(NativeBackend::open(0, &config).unwrap().calibration().is_none());
    }
    config.strategy = StrategyChoice::Auto;
    config.staging_bytes = 0;
    assert!(NativeBackend::open(0, &config).unwrap().calibration().is_none());
}

/// A calibration by which every batch that driver copies could move goes that way.
fn copies_everywhere(config: &TransferConfig) -> Calibration {
    let samples: Vec<Sample> =
        SIZES.iter().map(|(bytes, _)| Sample::new(*bytes, 1.0, 3.0, Some(2.0), Some(1.5))).collect();
    let rows = [Direction::Scatter, Direction::Gather].map(|way| Row::new(way, RUNS[1], samples.clone()));
    Calibration::of_rows(Identity::of_device(0, None, config).unwrap(), rows.to_vec())
}

fn driver_copies_move_the_same_bytes(session: &Session) {
    session.set("uuid", 7);
    let mut config = Config::default();
    config.transfer.device = DeviceChoice::Cuda(0);
    config.transfer.calibrate = false;
    config.transfer.kv_chunk_tokens = 64;
    let native = NativeBackend::open(0, &config.transfer).unwrap();
    let native = native.with_calibration(copies_everywhere(&config.transfer)).unwrap();
    let engine = TransferEngine::with_backend(&config, Place::Cuda(0), Box::new(native)).unwrap();

    // 32 layers of (6 blocks, K and V, 16 tokens, 8 heads, 128 elements).
    let context = open_context(0).unwrap();
    let tensor = TensorDesc::contiguous(&[6, 2, 16, 8, 128], DType::Bf16).unwrap();
    let layer = tensor.span_bytes();
    let memory = DeviceBuffer::new(&context, usize::try_from(32 * layer).unwrap()).unwrap();
    let registered = |evenly: bool| {
        // Two layers that change places are spaced otherwise.
        let place = |l: u64| if evenly || l > 1 { l } else { 1 - l };
        let at =
            |l: u64| CacheTensor { addr: memory.addr() + place(l) * layer, len: layer, desc: tensor.clone() };
        let tensors = Tensors::PerLayer((0..32).map(at).collect());
        // SAFETY: the memory outlives the caches and their transfers.
        let cache = unsafe { PagedCache::new(&tensors, &CacheSpec::default(), Place::Cuda(0), Some(32)) };
        engine.register(cache.unwrap()).unwrap()
    };
    let (even, uneven) = (registered(true), registered(false));
    let contents: Vec<u8> = (0..32 * layer).map(|i| ((i * 2_654_435_761) >> 13).to_le_bytes()[0]).collect();
    assert!(session.poke(memory.addr(), &contents));

    let len = 64 * 32 * 2 * 2048;
    let registrar = Arc::new(CudaRegistrar::open(0).unwrap());
    let slab = || {
        let slab = Region::anonymous(len).unwrap().slab(0, len).unwrap();
        let options = RegisterOptions { required: true, ..RegisterOptions::default() };
        slab.region().register(registrar.clone(), options).unwrap();
        slab
    };
    let (copied, kernel) = (slab(), slab());
    let slots = |blocks: [i64; 4]| SlotMapping::from_blocks(&blocks, 16, 0..64).unwrap();
    let from = || slots([4, 0, 3, 1]);
    let submit = |request: &TransferRequest| {
        session.clear_records();
        let transfer = engine.submit(request).unwrap();
        let strategy = transfer.strategy();
        assert_eq!(transfer.backend(), "native");
        transfer.wait().unwrap();
        let kernels = session.records().iter().filter(|r| r.kind == CopyKind::Kernel).count();
        assert_eq!(kernels == 0, strategy == "copy_engine");
        strategy
    };
    assert_eq!(submit(&TransferRequest::gather(&even, from(), &copied)), "copy_engine");
    assert_eq!(submit(&TransferRequest::gather(&uneven, from(), &kernel)), "staged");
    // The first two layers lie the other way round in the second slab.
    let bytes = |slab: &Slab| {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        slab.read_at(0, &mut bytes).unwrap();
        bytes
    };
    let swapped = |slab: &Slab| {
        let (mut bytes, strip) = (bytes(slab), 64 * 2048);
        for kv in bytes.chunks_mut(32 * strip) {
            let (first, rest) = kv.split_at_mut(strip);
            first.swap_with_slice(&mut rest[..strip]);
        }
        bytes
    };
    let stored = bytes(&copied);
    assert!(stored == swapped(&kernel) && stored.iter().any(|byte| *byte != stored[0]));

    // And back, into other blocks.
    assert!(session.poke(memory.addr(), &vec![0; contents.len()]));
    assert_eq!(submit(&TransferRequest::scatter(&even, slots([5, 2, 0, 4]), &copied)), "copy_engine");
    assert_eq!(submit(&TransferRequest::gather(&uneven, slots([5, 2, 0, 4]), &kernel)), "staged");
    assert!(stored == swapped(&kernel));
}
