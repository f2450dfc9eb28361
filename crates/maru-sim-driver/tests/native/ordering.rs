//! Who waits for whom.

use maru_kernel_cuda::{PagedCopyKernel, StagedMover, StagedOptions};
use maru_layout::Direction;
use maru_sim_driver::Session;

use crate::common::{Device, Graph, Stream, Test, context};
use crate::setup::{Rig, Setup, Way};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        launching_waits_for_nothing,
        a_staged_launch_waits_for_nothing,
        c10_a_load_waits_for_the_reader_of_its_pages,
        a_store_waits_for_the_writer_of_its_pages,
        later_work_of_the_stream_waits_for_the_transfer,
        another_stream_waits_where_it_is_told_to,
        many_transfers_in_flight_are_each_exact,
        a_captured_launch_runs_with_every_replay,
        a_dropped_launch_still_arrives,
    ]
}

fn launching_waits_for_nothing(session: &Session) {
    nothing_is_waited_for(session, false);
}

fn a_staged_launch_waits_for_nothing(session: &Session) {
    nothing_is_waited_for(session, true);
}

fn nothing_is_waited_for(session: &Session, staged: bool) {
    let rig = Rig::new();
    let (kernel, stream, way) = (&rig.kernel, &rig.stream, rig.way(staged));
    let (setup, planes) = rig.setup(session, Direction::Gather);
    let hold = session.hold();
    let flights: Vec<_> =
        (0..5).map(|_| setup.launch(kernel, &planes, setup.host_slots(), stream.0, way).unwrap()).collect();
    assert!(!flights[0].is_complete().unwrap());
    assert!(setup.untouched(session));
    drop(hold);
    flights.iter().for_each(|f| f.wait().unwrap());
    setup.check(session);
}

fn c10_a_load_waits_for_the_reader_of_its_pages(session: &Session) {
    for staged in [false, true] {
        let rig = Rig::new();
        let (kernel, stream, way) = (&rig.kernel, &rig.stream, rig.way(staged));
        let (setup, planes) = rig.setup(session, Direction::Scatter);
        let seen = Device::new(setup.paged.len);
        session.set("delay_us", 2000);
        for _ in 0..3 {
            ok!(cuMemcpyDtoDAsync_v2(seen.addr, setup.paged.addr, setup.paged.len, stream.0));
        }
        let flight = setup.launch(kernel, &planes, setup.host_slots(), stream.0, way).unwrap();
        flight.wait().unwrap();
        assert_eq!(seen.read(session), setup.images.cache);
        setup.check(session);
    }
}

fn a_store_waits_for_the_writer_of_its_pages(session: &Session) {
    for staged in [false, true] {
        let rig = Rig::new();
        let (kernel, stream, way) = (&rig.kernel, &rig.stream, rig.way(staged));
        let (setup, planes) = rig.setup(session, Direction::Gather);
        let written = Device::of(session, &setup.images.cache);
        assert!(session.poke(setup.paged.addr, &vec![0; setup.paged.len]));
        session.set("delay_us", 5000);
        ok!(cuMemcpyDtoDAsync_v2(setup.paged.addr, written.addr, setup.paged.len, stream.0));
        let flight = setup.launch(kernel, &planes, setup.host_slots(), stream.0, way).unwrap();
        flight.wait().unwrap();
        setup.check(session);
    }
}

fn later_work_of_the_stream_waits_for_the_transfer(session: &Session) {
    for staged in [false, true] {
        let rig = Rig::new();
        let (kernel, stream, way) = (&rig.kernel, &rig.stream, rig.way(staged));
        let (setup, planes) = rig.setup(session, Direction::Scatter);
        let seen = Device::new(setup.paged.len);
        session.set("delay_us", 1000);
        let _flight = setup.launch(kernel, &planes, setup.host_slots(), stream.0, way).unwrap();
        ok!(cuMemcpyDtoDAsync_v2(seen.addr, setup.paged.addr, setup.paged.len, stream.0));
        stream.wait();
        assert_eq!(seen.read(session), setup.images.cache_after);
    }
}

fn another_stream_waits_where_it_is_told_to(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let (stream, other) = (Stream::new(true), Stream::new(true));
    let setup = Setup::new(session, 0, Direction::Scatter, 3);
    let planes = kernel.register(&setup.plan).unwrap();
    let seen = Device::new(setup.paged.len);
    session.set("delay_us", 5000);
    let job = setup.job(setup.host_slots());
    // SAFETY: everything lives until both streams were waited for.
    let launched = unsafe { kernel.launch(&job, &planes, stream.0, Default::default()) }.unwrap();
    // SAFETY: the stream is alive.
    unsafe { launched.order_before(other.0) }.unwrap();
    ok!(cuMemcpyDtoDAsync_v2(seen.addr, setup.paged.addr, setup.paged.len, other.0));
    other.wait();
    assert_eq!(seen.read(session), setup.images.cache_after);
}

fn many_transfers_in_flight_are_each_exact(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(4 * 4096)).unwrap();
    let streams = [Stream::new(true), Stream::new(false)];
    let setups: Vec<_> = (0..150)
        .map(|i| {
            let direction = if i % 3 == 0 { Direction::Gather } else { Direction::Scatter };
            Setup::new(session, i % 5, direction, i as u64)
        })
        .collect();
    let planes: Vec<_> = setups.iter().map(|s| kernel.register(&s.plan).unwrap()).collect();
    let flights: Vec<_> = setups
        .iter()
        .zip(&planes)
        .enumerate()
        .map(|(i, (setup, planes))| {
            let way = if i % 4 == 0 { Way::Staged(&mover) } else { Way::Direct };
            setup.launch(&kernel, planes, setup.host_slots(), streams[i % 2].0, way).unwrap()
        })
        .collect();
    for (flight, setup) in flights.iter().zip(&setups) {
        flight.wait().unwrap();
        setup.check(session);
    }
}

fn a_captured_launch_runs_with_every_replay(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let stream = Stream::new(true);
    let setup = Setup::new(session, 0, Direction::Scatter, 3);
    let planes = kernel.register(&setup.plan).unwrap();
    let job = setup.job(setup.host_slots());
    let (launched, graph) = Graph::capture(&stream, || {
        // SAFETY: everything outlives the graph.
        unsafe { kernel.launch(&job, &planes, stream.0, Default::default()) }.unwrap()
    });
    assert!(launched.is_captured() && setup.untouched(session));
    for _ in 0..2 {
        graph.replay(&stream);
        setup.check(session);
        setup.restore(session);
    }
    drop(graph);
    kernel.take_captured_error().unwrap();
}

fn a_dropped_launch_still_arrives(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let stream = Stream::new(true);
    let setup = Setup::new(session, 0, Direction::Gather, 3);
    let planes = kernel.register(&setup.plan).unwrap();
    let hold = session.hold();
    drop(setup.launch(&kernel, &planes, setup.host_slots(), stream.0, Way::Direct).unwrap());
    drop(hold);
    // The plane table and the kernel are freed while the launch is queued: the driver waits for it.
    drop((planes, kernel));
    stream.wait();
    setup.check(session);
}
