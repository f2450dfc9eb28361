//! Staged transfers in steps: layer by layer, each step waited for and held back alone.

use maru_kernel_cuda::{LaunchStep, PagedCopyKernel, StagedLaunch, StagedMover, StagedOptions};
use maru_layout::{CopyJob, Direction, Pieces, SlotMapping};
use maru_sim_driver::{CopyKind, Session};

use crate::cases::{Cache, Dims, ORDERS, Rng, random_slots};
use crate::common::{Device, Event, Stream, Test, context};
use crate::setup::{DIMS, Setup};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        layers_one_by_one_make_the_whole,
        a_step_is_over_before_the_next,
        a_step_waits_for_its_event,
        steps_of_both_directions_share_a_pipeline,
        a_bad_slot_is_said_when_all_pieces_are_there,
        no_steps_are_nothing,
        lists_are_uploaded_before_slabs_are_copied,
    ]
}

const BOTH: [Direction; 2] = [Direction::Gather, Direction::Scatter];

/// Rings whose buffers hold one plane, and every layer at once.
const RINGS: [u64; 2] = [4 * 4096, 4 << 16];

fn layers(mover: &StagedMover, job: &CopyJob) -> Vec<Vec<Pieces>> {
    job.single_layers().map(|(_, layer)| vec![mover.pieces(&layer).expect("can be staged")]).collect()
}

fn wait(launched: &[StagedLaunch]) {
    launched.iter().for_each(|step| step.wait().unwrap());
}

fn layers_one_by_one_make_the_whole(session: &Session) {
    let kernel = PagedCopyKernel::load(context(0)).unwrap();
    let stream = Stream::new(true);
    for ring in RINGS {
        let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(ring)).unwrap();
        for (order, direction) in (0..ORDERS.len()).flat_map(|order| BOTH.map(|d| (order, d))) {
            let setup = Setup::new(session, order, direction, order as u64);
            let planes = kernel.register(&setup.plan).unwrap();
            let layers = layers(&mover, &setup.job(setup.host_slots()));
            assert_eq!(layers.len() as u64, DIMS.layers);
            let steps: Vec<_> = layers.iter().map(|jobs| LaunchStep::new(jobs)).collect();
            // SAFETY: cache and slab live until the transfer is over; the slab is pinned.
            let launched = unsafe { mover.launch_steps(&steps, &planes, stream.0) }.unwrap();
            assert_eq!(launched.len(), steps.len());
            wait(&launched);
            setup.check(session);
        }
    }
}

fn a_step_is_over_before_the_next(session: &Session) {
    let kernel = PagedCopyKernel::load(context(0)).unwrap();
    let stream = Stream::new(true);
    let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(RINGS[0])).unwrap();
    for direction in BOTH {
        let setup = Setup::new(session, 0, direction, 4);
        let planes = kernel.register(&setup.plan).unwrap();
        let layers = layers(&mover, &setup.job(setup.host_slots()));
        let steps: Vec<_> = layers.iter().map(|jobs| LaunchStep::new(jobs)).collect();
        session.set("delay_us", 3000);
        // SAFETY: as above.
        let launched = unsafe { mover.launch_steps(&steps, &planes, stream.0) }.unwrap();
        launched[0].wait().unwrap();
        assert!(!launched[1].is_complete().unwrap(), "{direction:?}");
        launched[1].wait().unwrap();
        session.set("delay_us", 0);
        setup.check(session);
    }
}

fn a_step_waits_for_its_event(session: &Session) {
    let kernel = PagedCopyKernel::load(context(0)).unwrap();
    let (stream, other) = (Stream::new(true), Stream::new(true));
    for ring in RINGS {
        let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(ring)).unwrap();
        for direction in BOTH {
            let setup = Setup::new(session, 0, direction, 5);
            let planes = kernel.register(&setup.plan).unwrap();
            let layers = layers(&mover, &setup.job(setup.host_slots()));
            let (busy, event) = (Device::new(64), Event::new());
            session.set("delay_us", 2000);
            for _ in 0..40 {
                ok!(cuMemsetD8Async(busy.addr, 1, busy.len, other.0));
            }
            ok!(cuEventRecord(event.0, other.0));
            let steps =
                [LaunchStep::new(&layers[0]), LaunchStep { after: event.0, ..LaunchStep::new(&layers[1]) }];
            // SAFETY: as above; the event lives until the transfer is over.
            let launched = unsafe { mover.launch_steps(&steps, &planes, stream.0) }.unwrap();
            launched[0].wait().unwrap();
            assert!(!launched[1].is_complete().unwrap() && !event.is_over(), "{direction:?}");
            launched[1].wait().unwrap();
            assert!(event.is_over());
            session.set("delay_us", 0);
            setup.check(session);
        }
    }
}

fn steps_of_both_directions_share_a_pipeline(session: &Session) {
    let kernel = PagedCopyKernel::load(context(0)).unwrap();
    let stream = Stream::new(true);
    for ring in RINGS {
        let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(ring)).unwrap();
        let setups: Vec<_> = (0..6).map(|i| Setup::new(session, 0, BOTH[i % 2], i as u64)).collect();
        let planes: Vec<_> = setups.iter().map(|s| kernel.register(&s.plan).unwrap()).collect();
        for (setup, planes) in setups.iter().zip(&planes) {
            let layers = layers(&mover, &setup.job(setup.host_slots()));
            let steps: Vec<_> = layers.iter().map(|jobs| LaunchStep::new(jobs)).collect();
            // SAFETY: as above.
            drop(unsafe { mover.launch_steps(&steps, planes, stream.0) }.unwrap());
        }
        stream.wait();
        setups.iter().for_each(|setup| setup.check(session));
    }
}

fn a_bad_slot_is_said_when_all_pieces_are_there(session: &Session) {
    let kernel = PagedCopyKernel::load(context(0)).unwrap();
    let stream = Stream::new(true);
    // Two pieces, of three planes and one.
    let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(RINGS[0])).unwrap();
    let cache = Cache::new(&ORDERS[0], DIMS).unwrap();
    let mut slots: Vec<i64> = (0..24).collect();
    slots[7] = 1 << 40;
    let list: Vec<u8> = slots.iter().flat_map(|s| s.to_ne_bytes()).collect();
    let setup = Setup::with(session, &cache, Direction::Scatter, slots, 0, &mut Rng::new(9));
    let (on_device, planes) = (Device::of(session, &list), kernel.register(&setup.plan).unwrap());
    let pieces = mover.pieces(&setup.job(SlotMapping::Device { addr: on_device.addr, len: 24 })).unwrap();
    assert_eq!(pieces.list().len(), 2);
    session.set("delay_us", 3000);
    // SAFETY: as above.
    let launched = unsafe { mover.launch(&[pieces], &planes, stream.0) }.unwrap();
    let error = loop {
        match launched.is_complete() {
            Ok(done) => assert!(!done, "nobody reports the slot"),
            Err(error) => break error,
        }
    };
    // Whoever sees the error may use the memory again.
    setup.check(session);
    session.set("delay_us", 0);
    assert!(error.to_string().contains("1099511627776"), "{error}");
    assert_eq!(launched.wait(), Err(error));
}

fn no_steps_are_nothing(session: &Session) {
    let kernel = PagedCopyKernel::load(context(0)).unwrap();
    let stream = Stream::new(true);
    let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(RINGS[0])).unwrap();
    let setup = Setup::new(session, 0, Direction::Gather, 3);
    let planes = kernel.register(&setup.plan).unwrap();
    session.clear_records();
    // SAFETY: nothing is moved.
    let none = unsafe { mover.launch_steps(&[], &planes, stream.0) }.unwrap();
    // SAFETY: as above.
    let empty = unsafe { mover.launch(&[], &planes, stream.0) }.unwrap();
    assert!(none.is_empty() && empty.is_complete().unwrap());
    assert!(session.records().is_empty() && setup.untouched(session));
}

/// Lists too long for the arguments are there before the first slab is copied, so that none waits for the copy engine: of
/// slabs that share buffers, of one that is left alone in the last, and of one that passes through several.
fn lists_are_uploaded_before_slabs_are_copied(session: &Session) {
    let kernel = PagedCopyKernel::load(context(0)).unwrap();
    let stream = Stream::new(true);
    let cache = Cache::new(&ORDERS[0], Dims { blocks: 80, ..DIMS }).unwrap();
    let setup = |seed| {
        let mut rng = Rng::new(seed);
        let slots = random_slots(&mut rng, 320, 320, 0);
        Setup::with(session, &cache, Direction::Scatter, slots, 0, &mut rng)
    };
    let setups: Vec<_> = (0..16).map(setup).collect();
    // Into the pages of the first; their contents are looked at elsewhere.
    let plan = &setups[0].plan;
    let planes = kernel.register(plan).unwrap();
    let slab = plan.slab().bytes();
    for (count, buffer) in [(16, 8 * slab), (1, slab / 2)] {
        let options = StagedOptions::with_ring_bytes(2 * buffer.next_multiple_of(4096)).with_buffers(2);
        let mover = StagedMover::new(&kernel, options).unwrap();
        let job = |setup: &Setup| mover.pieces(&setup.job_of(plan, setup.host_slots())).unwrap();
        let pieces: Vec<Pieces> = setups[..count].iter().map(job).collect();
        session.clear_records();
        // SAFETY: cache and slabs live until the transfer is over; the slabs are pinned.
        unsafe { mover.launch(&pieces, &planes, stream.0) }.unwrap().wait().unwrap();
        let of_slab = |at: u64| setups.iter().any(|s| (s.slab.device..s.slab.device + slab).contains(&at));
        let records = session.records();
        let copies = records.iter().filter(|r| r.kind != CopyKind::Kernel).map(|r| of_slab(r.source));
        let copies: Vec<bool> = copies.collect();
        assert!(!copies[0] && copies.is_sorted(), "{count} slabs, whether copies are of slabs: {copies:?}");
    }
}
