//! Every driver call of a transfer fails once: the right error, no hang, no leak, and the next transfer is
//! exact.

use cudarc::driver::sys::CUstream;
use maru_kernel_cuda::{KernelError, LaunchOptions, PagedCopyKernel, StagedMover, StagedOptions};
use maru_layout::{Direction, SlotMapping};
use maru_sim_driver::Session;

use crate::cases::{Cache, Dims, ORDERS, Rng, random_slots};
use crate::common::log::warnings;
use crate::common::{Device, Stream, Test, context, leaves_nothing};
use crate::setup::{DIMS, Rig, Setup, Way};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        loading_fails_at_every_call,
        making_a_ring_fails_at_every_call,
        registering_a_cache_fails_at_every_call,
        a_direct_transfer_fails_at_every_call,
        a_staged_transfer_fails_at_every_call,
        a_transfer_of_a_long_list_fails_at_every_call,
        a_transfer_of_slots_on_the_device_fails_at_every_call,
        buffers_of_long_lists_are_not_lost_by_failures,
        a_buffer_taken_while_the_one_before_cannot_be_copied_is_not_lost,
        the_second_image_is_tried_when_the_first_does_not_load,
        a_kernel_that_fails_on_its_way_loses_the_context_and_nothing_hangs,
        a_query_that_fails_is_an_error_and_not_pending,
        what_goes_with_a_lost_context_is_one_line,
        what_cannot_be_given_back_is_a_line_each,
        many_transfers_leave_nothing,
    ]
}

const OUT_OF_MEMORY: u32 = 2;
const NOT_PERMITTED: u32 = 800;

/// Those that destructors do not make, where a failure has to leave something behind.
const CALLS: [&str; 22] = [
    "cuDeviceGetAttribute",
    "cuCtxGetStreamPriorityRange",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuMemAlloc",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuLaunchKernel",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpy2DAsync",
    "cuMemcpyHtoD",
    "cuMemcpyBatchAsync",
];

/// Lets each call of `run` fail in turn. What it leaves behind on failure counts as a leak.
fn each_call(session: &Session, run: impl Fn() -> Result<(), KernelError>) {
    each_call_of(session, &CALLS, run);
}

fn each_call_of(session: &Session, calls: &[&str], run: impl Fn() -> Result<(), KernelError>) {
    // Once without faults: pools grow to their size.
    run().unwrap();
    let mut struck = 0;
    for (&function, code) in calls.iter().flat_map(|f| [(f, OUT_OF_MEMORY), (f, NOT_PERMITTED)]) {
        for nth in 1.. {
            let before = session.census();
            session.fail(function, nth, code);
            let outcome = run();
            let reached = session.faults_left() == 0;
            session.clear_faults();
            let census = session.census();
            assert_eq!(before, census, "{function} call {nth} fails with {code}: something leaked");
            match outcome {
                Ok(()) if !reached => break,
                // Tidying up after success may fail without harm.
                Ok(()) => assert!(
                    ["cuStreamSynchronize", "cuEventQuery"].contains(&function),
                    "{function} call {nth} failed and nobody said so"
                ),
                Err(error) => {
                    assert!(reached, "{function} call {nth}: {error} without a fault");
                    let wanted = match (function, code) {
                        ("cuModuleLoadData", _) => "not_available",
                        (_, OUT_OF_MEMORY) => "out_of_memory",
                        _ => "driver",
                    };
                    assert_eq!(error.kind(), wanted, "{function} call {nth}: {error}");
                }
            }
            struck += 1;
            run().unwrap_or_else(|e| panic!("after {function} call {nth} failed: {e}"));
            assert_eq!(before, session.census(), "after {function} call {nth} failed");
        }
    }
    assert!(struck > 0, "no call was made");
}

fn loading_fails_at_every_call(session: &Session) {
    let context = context(0);
    each_call(session, || PagedCopyKernel::load(context.clone()).map(drop));
}

fn making_a_ring_fails_at_every_call(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    each_call(session, || StagedMover::new(&kernel, StagedOptions::with_ring_bytes(1 << 16)).map(drop));
}

fn registering_a_cache_fails_at_every_call(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let setup = Setup::new(session, 0, Direction::Gather, 1);
    each_call(session, || kernel.register(&setup.plan).map(drop));
}

/// Lets every call of a transfer fail, those that make the context current included.
fn transfer_fails(session: &Session, slots: Slots, staged: bool) {
    let calls: Vec<&str> = CALLS.into_iter().chain(["cuCtxGetCurrent"]).collect();
    let rig = Rig::new();
    let (kernel, stream, way) = (&rig.kernel, &rig.stream, rig.way(staged));
    for direction in [Direction::Gather, Direction::Scatter] {
        let setup = match slots {
            Slots::Long => long(session, direction),
            _ => Setup::new(session, 0, direction, 1),
        };
        let bytes: Vec<u8> = setup.slots.iter().flat_map(|s| s.to_ne_bytes()).collect();
        let on_device = Device::of(session, &bytes);
        let mapping = || match slots {
            Slots::Device => SlotMapping::Device { addr: on_device.addr, len: setup.slots.len() as u64 },
            _ => setup.host_slots(),
        };
        let planes = kernel.register(&setup.plan).unwrap();
        each_call_of(session, &calls, || {
            setup.restore(session);
            let outcome = one(&setup, kernel, &planes, mapping(), stream.0, way);
            if outcome.is_ok() {
                setup.check(session);
            }
            outcome
        });
    }
}

#[derive(Clone, Copy)]
enum Slots {
    /// By value.
    Short,
    /// Through the ring of slot lists.
    Long,
    Device,
}

/// More slots than travel by value.
fn long(session: &Session, direction: Direction) -> Setup {
    let dims = Dims { layers: 1, blocks: 100, block_size: 4, heads: 1, head_size: 8, ..DIMS };
    let cache = Cache::new(&ORDERS[0], dims).unwrap();
    let mut rng = Rng::new(8);
    let slots = random_slots(&mut rng, 400, 400, 0);
    assert!(slots.len() > maru_kernel_cuda::abi::INLINE_SLOTS);
    Setup::with(session, &cache, direction, slots, 0, &mut rng)
}

fn one(
    setup: &Setup,
    kernel: &PagedCopyKernel,
    planes: &maru_kernel_cuda::PlaneTable,
    slots: SlotMapping,
    stream: CUstream,
    way: Way<'_>,
) -> Result<(), KernelError> {
    let flight = setup.launch(kernel, planes, slots, stream, way)?;
    let outcome = flight.is_complete().and_then(|_| flight.wait());
    if outcome.is_err() {
        // What is in flight was not waited for; the caller asks again.
        flight.wait()?;
    }
    outcome
}

fn a_direct_transfer_fails_at_every_call(session: &Session) {
    transfer_fails(session, Slots::Short, false);
}

fn a_staged_transfer_fails_at_every_call(session: &Session) {
    transfer_fails(session, Slots::Short, true);
}

fn a_transfer_of_a_long_list_fails_at_every_call(session: &Session) {
    transfer_fails(session, Slots::Long, false);
}

fn a_transfer_of_slots_on_the_device_fails_at_every_call(session: &Session) {
    transfer_fails(session, Slots::Device, false);
}

fn buffers_of_long_lists_are_not_lost_by_failures(session: &Session) {
    let rig = Rig::new();
    let (kernel, stream) = (&rig.kernel, &rig.stream);
    let setup = long(session, Direction::Gather);
    let planes = kernel.register(&setup.plan).unwrap();
    let run = || one(&setup, kernel, &planes, setup.host_slots(), stream.0, Way::Direct);
    // More often than there are buffers: the mark of the transfer, then that of the buffer.
    for nth in (1..=2).cycle().take(20) {
        session.fail("cuEventRecord", nth, NOT_PERMITTED);
        run().unwrap_err();
        assert_eq!(session.faults_left(), 0);
    }
    session.clear_records();
    run().unwrap();
    let records = session.records();
    let uploads = records.iter().filter(|r| r.function.starts_with("cuMemcpyHtoDAsync")).count();
    assert_eq!(uploads, 1, "the slots went by value: {records:?}");
    setup.check(session);
}

/// The ring ends in the middle of a batch, so that its two buffers are two copies, and the first of these fails.
fn a_buffer_taken_while_the_one_before_cannot_be_copied_is_not_lost(session: &Session) {
    let rig = Rig::new();
    let (kernel, stream) = (&rig.kernel, &rig.stream);
    let setups: Vec<Setup> = (0..11).map(|_| long(session, Direction::Gather)).collect();
    let plan = &setups[0].plan;
    let planes = kernel.register(plan).unwrap();
    // More than fits one buffer.
    let jobs: Vec<_> = setups.iter().map(|setup| setup.job_of(plan, setup.host_slots())).collect();
    let one = || {
        session.clear_records();
        one(&setups[0], kernel, &planes, setups[0].host_slots(), stream.0, Way::Direct).unwrap();
        session.records().iter().filter(|r| r.function.starts_with("cuMemcpyHtoDAsync")).count()
    };
    (0..63).for_each(|_| assert_eq!(one(), 1));
    session.fail("cuMemcpyHtoDAsync", 1, NOT_PERMITTED);
    // SAFETY: cache and slabs live until the transfers are over.
    unsafe { kernel.launch_many(&jobs, &planes, stream.0, LaunchOptions::default()) }.unwrap_err();
    assert_eq!(session.faults_left(), 0);
    let by_value = (0..64).filter(|_| one() == 0).count();
    assert_eq!(by_value, 0, "buffers are lost");
}

fn the_second_image_is_tried_when_the_first_does_not_load(session: &Session) {
    let context = context(0);
    session.set("accept_fatbin", 0);
    leaves_nothing(session, || {
        let kernel = PagedCopyKernel::load(context.clone()).unwrap();
        assert_eq!(kernel.image(), maru_kernel_cuda::Image::PortablePtx);
    });
}

fn a_kernel_that_fails_on_its_way_loses_the_context_and_nothing_hangs(session: &Session) {
    for staged in [false, true] {
        let rig = Rig::new();
        let (kernel, stream, way) = (&rig.kernel, &rig.stream, rig.way(staged));
        let (setup, planes) = rig.setup(session, Direction::Gather);
        session.fail_later("cuLaunchKernel", 1, 719);
        let lost = |error: &KernelError| assert_eq!(error.kind(), "context_lost", "{error}");
        match setup.launch(kernel, &planes, setup.host_slots(), stream.0, way) {
            Ok(flight) => {
                lost(&flight.wait().unwrap_err());
                lost(&flight.is_complete().unwrap_err());
            }
            Err(error) => lost(&error),
        }
        for _ in 0..3 {
            lost(&setup.launch(kernel, &planes, setup.host_slots(), stream.0, way).err().unwrap());
            lost(&kernel.register(&setup.plan).err().unwrap());
        }
        // The context works again as a new one would.
        session.poison(0, 0);
        setup.restore(session);
        setup.run(session, kernel, stream.0, way).unwrap();
    }
}

fn a_query_that_fails_is_an_error_and_not_pending(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let stream = Stream::new(true);
    let setup = Setup::new(session, 0, Direction::Gather, 1);
    let planes = kernel.register(&setup.plan).unwrap();
    let flight = setup.launch(&kernel, &planes, setup.host_slots(), stream.0, Way::Direct).unwrap();
    session.fail("cuEventQuery", 1, 700);
    assert_eq!(flight.is_complete().unwrap_err().kind(), "context_lost");
    flight.wait().unwrap();
    setup.check(session);
}

fn what_goes_with_a_lost_context_is_one_line(session: &Session) {
    let context = context(0);
    // Again with the same handle, as after a reset of the device.
    for _ in 0..2 {
        let kernel = PagedCopyKernel::load(context.clone()).unwrap();
        let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(1 << 16)).unwrap();
        let stream = Stream::new(true);
        let setup = Setup::new(session, 0, Direction::Gather, 1);
        let planes = kernel.register(&setup.plan).unwrap();
        let flight = setup.launch(&kernel, &planes, setup.host_slots(), stream.0, Way::Direct).unwrap();
        flight.wait().unwrap();
        session.poison(0, 719);
        let lines = warnings(|| drop((flight, planes, mover, kernel)));
        session.poison(0, 0);
        assert_eq!(lines.len(), 1, "{lines:#?}");
        assert!(lines[0].contains("CUDA_ERROR_LAUNCH_FAILED (719)"), "{lines:?}");
    }
}

fn what_cannot_be_given_back_is_a_line_each(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    session.fail_from("cuEventDestroy", 1, 999);
    session.fail("cuModuleUnload", 1, 999);
    let lines = warnings(|| drop(kernel));
    session.clear_faults();
    assert_eq!(lines.iter().filter(|l| l.contains("the native kernel cannot")).count(), 1, "{lines:#?}");
    // Events of launches, of loads that tell of their layers, and of slot lists.
    assert_eq!(lines.iter().filter(|l| l.contains("a pool of events cannot")).count(), 3, "{lines:#?}");
    assert_eq!(lines.len(), 4, "{lines:#?}");
}

fn many_transfers_leave_nothing(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(1 << 16)).unwrap();
    let stream = Stream::new(true);
    let setups = [Setup::new(session, 0, Direction::Gather, 1), long(session, Direction::Gather)];
    leaves_nothing(session, || {
        for _ in 0..20 {
            for (setup, way) in setups.iter().flat_map(|s| [(s, Way::Direct), (s, Way::Staged(&mover))]) {
                setup.restore(session);
                setup.run(session, &kernel, stream.0, way).unwrap();
            }
        }
    });
}
