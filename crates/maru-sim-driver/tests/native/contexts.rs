//! Two devices, threads without a context, and the caller's context (CASES C17).

use maru_kernel_cuda::{PagedCopyKernel, StagedMover, StagedOptions};
use maru_layout::Direction;
use maru_sim_driver::Session;

use crate::common::{Stream, Test, context, current, unbind};
use crate::setup::{Setup, Way};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        c17_two_devices_in_one_thread,
        c17_a_thread_without_a_context,
        c17_the_callers_context_is_what_it_was,
        c17_a_stream_of_another_device_is_an_error,
        c17_letting_go_of_a_kernel_leaves_the_context_alone,
        a_lost_context_is_called_so_by_load,
        one_device_lost_does_not_concern_the_other,
    ]
}

fn c17_two_devices_in_one_thread(session: &Session) {
    let contexts = [context(0), context(1)];
    let kernels = contexts.each_ref().map(|c| PagedCopyKernel::load(c.clone()).unwrap());
    for i in 0..10 {
        let device = i % 2;
        contexts[device].bind_to_thread().unwrap();
        let stream = Stream::new(true);
        let setup = Setup::new(session, i, Direction::Gather, i as u64);
        // The other device is current when the transfer is made.
        contexts[1 - device].bind_to_thread().unwrap();
        let mover = StagedMover::new(&kernels[device], StagedOptions::with_ring_bytes(1 << 16)).unwrap();
        let way = if i < 5 { Way::Direct } else { Way::Staged(&mover) };
        setup.run(session, &kernels[device], stream.0, way).unwrap();
        assert_eq!(current(), contexts[1 - device].cu_ctx().addr());
    }
}

fn c17_a_thread_without_a_context(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(1 << 16)).unwrap();
    let stream = Stream::new(true);
    let handle = stream.0.expose_provenance();
    for way in [Way::Direct, Way::Staged(&mover)] {
        let setup = Setup::new(session, 0, Direction::Scatter, 5);
        let planes = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    assert_eq!(current(), 0);
                    let planes = kernel.register(&setup.plan).unwrap();
                    let stream = std::ptr::with_exposed_provenance_mut(handle);
                    let job = setup.job(setup.host_slots());
                    match way {
                        Way::Direct => {
                            // SAFETY: everything lives until the transfer is over.
                            let l = unsafe { kernel.launch(&job, &planes, stream, Default::default()) };
                            l.unwrap().wait().unwrap();
                        }
                        Way::Staged(mover) => {
                            // SAFETY: as above; the slab is pinned.
                            let l = unsafe { mover.launch(&[mover.pieces(&job).unwrap()], &planes, stream) };
                            l.unwrap().wait().unwrap();
                        }
                    }
                    assert_eq!(current(), 0);
                    planes
                })
                .join()
                .unwrap()
        });
        setup.check(session);
        drop(planes);
    }
}

fn c17_the_callers_context_is_what_it_was(session: &Session) {
    let (a, b) = (context(0), context(1));
    a.bind_to_thread().unwrap();
    let setup = Setup::new(session, 0, Direction::Gather, 1);
    let stream = Stream::new(true);
    for bound in [Some(&b), None] {
        match bound {
            Some(context) => context.bind_to_thread().unwrap(),
            None => unbind(),
        }
        let before = current();
        maru_kernel_cuda::availability(0).unwrap();
        let opened = maru_kernel_cuda::open_context(1).unwrap();
        assert_eq!(current(), before, "open_context");
        drop(opened);
        // Letting go of a bare handle of cudarc's makes its context current.
        match bound {
            Some(context) => context.bind_to_thread().unwrap(),
            None => unbind(),
        }
        let kernel = PagedCopyKernel::load(a.clone()).unwrap();
        assert_eq!(current(), before, "load");
        let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(1 << 16)).unwrap();
        assert_eq!(current(), before, "a ring");
        let planes = kernel.register(&setup.plan).unwrap();
        assert_eq!(current(), before, "register");
        for way in [Way::Direct, Way::Staged(&mover)] {
            let flight = setup.launch(&kernel, &planes, setup.host_slots(), stream.0, way).unwrap();
            assert_eq!(current(), before, "launch");
            flight.is_complete().unwrap();
            flight.wait().unwrap();
            assert_eq!(current(), before, "wait");
            session.fail("cuLaunchKernel", 1, 701);
            assert!(setup.launch(&kernel, &planes, setup.host_slots(), stream.0, way).is_err());
            assert_eq!(current(), before, "a launch that fails");
        }
        drop((planes, mover, kernel));
        assert_eq!(current(), before, "drop");
        session.fail("cuModuleLoadData", 1, 2);
        session.fail("cuModuleLoadData", 2, 2);
        assert!(PagedCopyKernel::load(a.clone()).is_err());
        session.clear_faults();
        assert_eq!(current(), before, "a load that fails");
    }
    a.bind_to_thread().unwrap();
}

fn c17_a_stream_of_another_device_is_an_error(session: &Session) {
    let (a, b) = (context(0), context(1));
    let foreign = Stream::new(true);
    a.bind_to_thread().unwrap();
    let kernel = PagedCopyKernel::load(a.clone()).unwrap();
    let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(1 << 16)).unwrap();
    let setup = Setup::new(session, 0, Direction::Gather, 1);
    let planes = kernel.register(&setup.plan).unwrap();
    for way in [Way::Direct, Way::Staged(&mover)] {
        let error = setup.launch(&kernel, &planes, setup.host_slots(), foreign.0, way).err().unwrap();
        assert_eq!(error.kind(), "driver", "{error}");
        assert!(error.to_string().contains("INVALID_HANDLE"), "{error}");
        assert!(setup.untouched(session));
    }
    setup.run(session, &kernel, std::ptr::null_mut(), Way::Direct).unwrap();
    b.bind_to_thread().unwrap();
    drop(foreign);
    a.bind_to_thread().unwrap();
}

fn one_device_lost_does_not_concern_the_other(session: &Session) {
    let (a, b) = (context(0), context(1));
    let stream = Stream::new(true);
    let setup = Setup::new(session, 0, Direction::Gather, 1);
    let kernel = PagedCopyKernel::load(b.clone()).unwrap();
    session.poison(0, 700);
    setup.run(session, &kernel, stream.0, Way::Direct).unwrap();
    let error = PagedCopyKernel::load(a.clone()).err().unwrap();
    assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "{error}");
    session.poison(0, 0);
}

fn c17_letting_go_of_a_kernel_leaves_the_context_alone(session: &Session) {
    unbind();
    let kernel = PagedCopyKernel::load(maru_kernel_cuda::open_context(0).unwrap()).unwrap();
    assert_eq!(current(), 0);
    drop(kernel);
    assert_eq!(current(), 0);
    assert_eq!(session.census().contexts, 0);
}

fn a_lost_context_is_called_so_by_load(session: &Session) {
    let context = context(0);
    session.poison(0, 700);
    let error = PagedCopyKernel::load(context.clone()).err().unwrap();
    session.poison(0, 0);
    assert_eq!(error.kind(), "context_lost", "{error}");
}
