//! Every driver call of a transfer fails once: the right error, no hang, no leak, and the next transfer is
//! exact.

use cudarc::driver::sys::CUstream;
use maru_kernel_cuda::{KernelError, PagedCopyKernel, StagedMover, StagedOptions};
use maru_layout::Direction;
use maru_sim_driver::Session;

use crate::common::{Stream, Test, context, leaves_nothing};
use crate::setup::{Setup, Way};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        loading_fails_at_every_call,
        making_a_ring_fails_at_every_call,
        registering_a_cache_fails_at_every_call,
        a_direct_transfer_fails_at_every_call,
        a_staged_transfer_fails_at_every_call,
        the_second_image_is_tried_when_the_first_does_not_load,
        a_kernel_that_fails_on_its_way_loses_the_context_and_nothing_hangs,
        a_query_that_fails_is_an_error_and_not_pending,
    ]
}

const OUT_OF_MEMORY: u32 = 2;
const NOT_PERMITTED: u32 = 800;

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
    // Once without faults: pools grow to their size.
    run().unwrap();
    let mut struck = 0;
    for (function, code) in CALLS.into_iter().flat_map(|f| [(f, OUT_OF_MEMORY), (f, NOT_PERMITTED)]) {
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

fn transfer_fails(session: &Session, staged: bool) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(4 * 4096)).unwrap();
    let way = if staged { Way::Staged(&mover) } else { Way::Direct };
    let stream = Stream::new(true);
    for direction in [Direction::Gather, Direction::Scatter] {
        let setup = Setup::new(session, 0, direction, 1);
        let planes = kernel.register(&setup.plan).unwrap();
        each_call(session, || {
            setup.restore(session);
            let outcome = one(&setup, &kernel, &planes, stream.0, way);
            if outcome.is_ok() {
                setup.check(session);
            }
            outcome
        });
    }
}

fn one(
    setup: &Setup,
    kernel: &PagedCopyKernel,
    planes: &maru_kernel_cuda::PlaneTable,
    stream: CUstream,
    way: Way<'_>,
) -> Result<(), KernelError> {
    let flight = setup.launch(kernel, planes, setup.host_slots(), stream, way)?;
    let outcome = flight.is_complete().and_then(|_| flight.wait());
    if outcome.is_err() {
        // What is in flight was not waited for; the caller asks again.
        flight.wait()?;
    }
    outcome
}

fn a_direct_transfer_fails_at_every_call(session: &Session) {
    transfer_fails(session, false);
}

fn a_staged_transfer_fails_at_every_call(session: &Session) {
    transfer_fails(session, true);
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
        let context = context(0);
        let kernel = PagedCopyKernel::load(context.clone()).unwrap();
        let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(4 * 4096)).unwrap();
        let way = if staged { Way::Staged(&mover) } else { Way::Direct };
        let stream = Stream::new(true);
        let setup = Setup::new(session, 0, Direction::Gather, 1);
        let planes = kernel.register(&setup.plan).unwrap();
        session.fail_later("cuLaunchKernel", 1, 719);
        let lost = |error: &KernelError| assert_eq!(error.kind(), "context_lost", "{error}");
        match setup.launch(&kernel, &planes, setup.host_slots(), stream.0, way) {
            Ok(flight) => {
                lost(&flight.wait().unwrap_err());
                lost(&flight.is_complete().unwrap_err());
            }
            Err(error) => lost(&error),
        }
        for _ in 0..3 {
            lost(&setup.launch(&kernel, &planes, setup.host_slots(), stream.0, way).err().unwrap());
            lost(&kernel.register(&setup.plan).err().unwrap());
        }
        // The context works again as a new one would.
        session.poison(0, 0);
        setup.restore(session);
        setup.run(session, &kernel, stream.0, way).unwrap();
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
