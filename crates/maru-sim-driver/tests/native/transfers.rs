//! Every layout staged, and what only the simulator shows. The device tests of maru-kernel-cuda, which run on
//! the simulator as well, have every layout direct.

use maru_kernel_cuda::{KernelError, PagedCopyKernel, StagedMover, StagedOptions};
use maru_layout::{Direction, SlotMapping};
use maru_sim_driver::{CopyKind, Record, Session};

use crate::cases::{Cache, ORDERS, Rng, random_slots};
use crate::common::{Device, Stream, Test, context, leaves_nothing};
use crate::setup::{DIMS, Setup, Way};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        every_layout_staged_through_a_small_ring,
        the_order_of_threads_does_not_matter,
        registered_memory_at_other_addresses,
        staged_bytes_pass_through_the_copy_engine,
        direct_bytes_do_not,
        bad_device_slots_are_skipped_and_reported,
        a_list_longer_than_the_ring,
        memory_that_is_not_the_devices_loses_the_context,
        old_drivers_and_devices_are_refused_with_the_reason,
    ]
}

const BOTH: [Direction; 2] = [Direction::Gather, Direction::Scatter];

/// Transfers go round it in several pieces.
fn small_ring(kernel: &PagedCopyKernel) -> StagedMover {
    StagedMover::new(kernel, StagedOptions::with_ring_bytes(4 * 4096).with_blocks(2)).unwrap()
}

/// Any transfer here fits one buffer.
fn roomy_ring(kernel: &PagedCopyKernel) -> StagedMover {
    StagedMover::new(kernel, StagedOptions::with_ring_bytes(4 << 16).with_blocks(2)).unwrap()
}

fn every_layout(session: &Session, run: impl Fn(&PagedCopyKernel, &Stream, &Setup)) {
    let _context = context(0);
    leaves_nothing(session, || {
        let kernel = PagedCopyKernel::load(context(0)).unwrap();
        let stream = Stream::new(true);
        for order in 0..ORDERS.len() {
            for direction in BOTH {
                run(&kernel, &stream, &Setup::new(session, order, direction, order as u64));
            }
        }
    });
}

fn every_layout_staged_through_a_small_ring(session: &Session) {
    every_layout(session, |kernel, stream, setup| {
        for mover in [small_ring(kernel), roomy_ring(kernel)] {
            setup.restore(session);
            setup.run(session, kernel, stream.0, Way::Staged(&mover)).unwrap();
        }
    });
}

fn the_order_of_threads_does_not_matter(session: &Session) {
    session.set("descending", 1);
    every_layout(session, |kernel, stream, setup| setup.run(session, kernel, stream.0, Way::Direct).unwrap());
}

fn registered_memory_at_other_addresses(session: &Session) {
    session.set("shift", 1);
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let (stream, mover) = (Stream::new(true), small_ring(&kernel));
    for direction in BOTH {
        let setup = Setup::new(session, 0, direction, 3);
        assert_ne!(setup.slab.device, setup.slab.host.addr().get() as u64);
        setup.run(session, &kernel, stream.0, Way::Direct).unwrap();
        setup.restore(session);
        setup.run(session, &kernel, stream.0, Way::Staged(&mover)).unwrap();
    }
}

fn staged_bytes_pass_through_the_copy_engine(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let stream = Stream::new(true);
    // Copies stay on the caller's stream; with one buffer's worth, which has nothing to overlap with, kernels do, too.
    for (mover, on_the_callers) in [(small_ring(&kernel), false), (roomy_ring(&kernel), true)] {
        for (direction, kind) in
            [(Direction::Gather, CopyKind::DeviceToHost), (Direction::Scatter, CopyKind::HostToDevice)]
        {
            let setup = Setup::new(session, 0, direction, 3);
            let planes = kernel.register(&setup.plan).unwrap();
            session.clear_records();
            let flight =
                setup.launch(&kernel, &planes, setup.host_slots(), stream.0, Way::Staged(&mover)).unwrap();
            flight.wait().unwrap();
            setup.check(session);
            let records = session.records();
            let copied: u64 = records.iter().filter(|r| r.kind == kind).map(|r| r.bytes).sum();
            assert!(copied >= setup.slab.len as u64, "{copied} of {}", setup.slab.len);
            assert!(records.iter().all(|r| !r.pageable_source && !r.pageable_destination));
            let callers = stream.0.addr() as u64;
            let on_it = |r: &Record| r.kind != CopyKind::Kernel || on_the_callers;
            assert!(records.iter().all(|r| (r.stream == callers) == on_it(r)), "{records:?}");
            assert!(records.iter().any(|r| r.kind == CopyKind::Kernel));
        }
    }
}

fn direct_bytes_do_not(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let setup = Setup::new(session, 0, Direction::Gather, 3);
    let (stream, planes) = (Stream::new(true), kernel.register(&setup.plan).unwrap());
    session.clear_records();
    let flight = setup.launch(&kernel, &planes, setup.host_slots(), stream.0, Way::Direct).unwrap();
    flight.wait().unwrap();
    let records = session.records();
    assert_eq!(records.len(), 1, "{records:?}");
    assert_eq!((records[0].kind, records[0].stream), (CopyKind::Kernel, stream.0.addr() as u64));
    assert!(records[0].function.starts_with("maru_gather_16"), "{}", records[0].function);
}

fn bad_device_slots_are_skipped_and_reported(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let cache = Cache::new(&ORDERS[0], DIMS).unwrap();
    let stream = Stream::new(true);
    for direction in BOTH {
        let slots = vec![5, -1, 23, 24, 7, (1 << 40) + 1, -2];
        let setup = Setup::with(session, &cache, direction, slots, 1, &mut Rng::new(9));
        let bytes: Vec<u8> = setup.slots.iter().flat_map(|s| s.to_ne_bytes()).collect();
        let on_device = Device::of(session, &bytes);
        let planes = kernel.register(&setup.plan).unwrap();
        let mapping = SlotMapping::Device { addr: on_device.addr, len: 7 };
        let flight = setup.launch(&kernel, &planes, mapping, stream.0, Way::Direct).unwrap();
        let error = flight.wait().unwrap_err();
        assert_eq!(error, KernelError::SlotOutOfRange { token: 3, slot: 24, num_slots: 24 });
        setup.check(session);
    }
}

fn a_list_longer_than_the_ring(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let dims =
        crate::cases::Dims { layers: 1, blocks: 20_000, block_size: 1, heads: 1, head_size: 8, ..DIMS };
    let cache = Cache::new(&ORDERS[0], dims).unwrap();
    let stream = Stream::new(true);
    for direction in BOTH {
        let mut rng = Rng::new(77);
        let slots = random_slots(&mut rng, 20_000, 20_000, 0);
        let setup = Setup::with(session, &cache, direction, slots, 3, &mut rng);
        setup.run(session, &kernel, stream.0, Way::Direct).unwrap();
    }
}

/// Whoever says that pageable memory is the device's is found out.
fn memory_that_is_not_the_devices_loses_the_context(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let mut setup = Setup::new(session, 0, Direction::Gather, 3);
    let planes = kernel.register(&setup.plan).unwrap();
    let stream = Stream::new(true);
    let pageable = vec![0u8; setup.slab.len];
    let true_address = std::mem::replace(&mut setup.slab.device, pageable.as_ptr().addr() as u64);
    let flight = setup.launch(&kernel, &planes, setup.host_slots(), stream.0, Way::Direct).unwrap();
    assert_eq!(flight.wait().unwrap_err().kind(), "context_lost");
    let again = setup.launch(&kernel, &planes, setup.host_slots(), stream.0, Way::Direct);
    assert_eq!(again.err().unwrap().kind(), "context_lost");
    session.poison(0, 0);
    setup.slab.device = true_address;
    drop(flight);
}

fn old_drivers_and_devices_are_refused_with_the_reason(session: &Session) {
    let context = context(0);
    session.set("accept_fatbin", 0);
    session.set("driver_version", 11080);
    let error = PagedCopyKernel::load(context.clone()).unwrap_err();
    assert_eq!(error, KernelError::UnsupportedPtx { ptx_version: "8.0", cuda_version: 11080 });
    assert!(error.to_string().contains("11.8"), "{error}");
    session.set("driver_version", 12000);
    PagedCopyKernel::load(context.clone()).unwrap();
    session.set("cc_major", 6);
    let error = PagedCopyKernel::load(context.clone()).unwrap_err();
    assert_eq!(error, KernelError::DeviceTooOld { device: 0, major: 6, minor: 0 });
    assert_eq!(session.census().modules, 0);
}
