//! Host registration, against a scripted driver.

#![allow(clippy::unwrap_used, reason = "helpers of tests, where a failure is a panic")]

mod common;

use std::ptr::NonNull;
use std::sync::{Arc, Barrier};

use common::{key, options};
use maru_cxl::{
    Access, Call, CudaRegistrar, CxlError, DriverFailure, HostRegistrar, Region, RegisterOptions,
    RegisterOutcome, RegistrationState, ScriptedRegistrar, SlabPool,
};

const MIB: u64 = 1 << 20;

fn required() -> RegisterOptions {
    RegisterOptions { required: true, ..RegisterOptions::default() }
}

/// Pieces of at most 4 MiB that end on borders of 3 MiB slabs.
fn pieces() -> RegisterOptions {
    RegisterOptions { piece_limit: 4 * MIB, slab_stride: 3 * MIB, data_offset: 0, required: true }
}

fn address(region: &Region) -> u64 {
    region.base().addr().get() as u64
}

/// Address space without memory behind it, for sizes no machine has.
fn reserve(len: u64) -> Region {
    let map =
        memmap2::MmapOptions::new().len(usize::try_from(len).unwrap()).no_reserve_swap().map_anon().unwrap();
    let map = memmap2::MmapRaw::from(map);
    let start = NonNull::new(map.as_mut_ptr()).unwrap();
    // SAFETY: the mapping is the owner and lives as long as the region; nobody else has its address.
    unsafe { Region::from_raw_parts(start, len, Box::new(map)) }.unwrap()
}

/// Case C07 (i): a driver that fails at 2^39 bytes and above. The region is split, all of it is pinned.
#[test]
fn c07_a_region_over_the_driver_limit_is_split_and_fully_registered() {
    let len = (1 << 39) + (1 << 30);
    let region = reserve(len);
    let driver = Arc::new(ScriptedRegistrar::new().failing_from_len(1 << 39));
    let outcome = region.register(driver.clone(), required()).unwrap();
    assert!(outcome.is_registered());
    assert_eq!(driver.registered().iter().map(|piece| piece.1).sum::<u64>(), len);
    assert!(driver.registered().iter().all(|piece| piece.1 <= 64 << 30));
    drop(region);
    assert!(driver.registered().is_empty());
}

/// Case C07 (ii): the third of four pieces fails. Pieces 2 and 1 are unregistered in that order.
#[test]
fn c07_a_failing_piece_rolls_back_in_reverse_order() {
    let region = Region::anonymous(10 * MIB).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new().failing_at(3));
    let error = region.register(driver.clone(), pieces()).unwrap_err();
    let base = address(&region);
    match &error {
        CxlError::Registration { address, len, piece, pieces, failure, .. } => {
            assert_eq!((*address, *len), (base + 6 * MIB, 3 * MIB));
            assert_eq!((*piece, *pieces), (3, 4));
            assert_eq!(failure.code, 1);
        }
        other => panic!("{other}"),
    }
    let text = error.to_string();
    for part in ["CUDA_ERROR_INVALID_VALUE", "anonymous memory", "3145728", "piece 3 of 4"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(
        driver.calls(),
        [
            Call::Register(base, 3 * MIB),
            Call::Register(base + 3 * MIB, 3 * MIB),
            Call::Register(base + 6 * MIB, 3 * MIB),
            Call::Unregister(base + 3 * MIB),
            Call::Unregister(base),
        ]
    );
    assert!(!region.is_registered());
    assert_eq!(region.registration(), RegistrationState::Unregistered);
    // Nothing lingers: the next attempt works.
    region.register(driver, pieces()).unwrap();
}

/// Case C07, real run: slabs of 3 MiB, each within one piece.
#[test]
fn c07_no_slab_of_a_pool_crosses_two_pieces() {
    let region = Region::anonymous(10 * MIB).unwrap();
    let pool = SlabPool::create(region, options(3 * MIB - 5)).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new());
    pool.register(driver.clone(), 4 * MIB, true).unwrap();
    assert!(driver.registered().len() > 2);
    let slabs: Vec<_> = std::iter::from_fn(|| pool.alloc().unwrap()).collect();
    assert_eq!(slabs.len() as u64, pool.slab_count());
    for slab in &slabs {
        assert!(slab.is_registered());
        assert_eq!(slab.device_addr(), Some(slab.addr().addr().get() as u64));
    }
    assert_eq!(pool.stats().unusable, 0);
}

#[test]
fn slabs_that_straddle_pieces_of_an_earlier_registration_stay_unused() {
    let region = Region::anonymous(16 * MIB).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new());
    region.register(driver, RegisterOptions { piece_limit: 4 * MIB, ..required() }).unwrap();
    let pool = SlabPool::create(region, options(3 * MIB)).unwrap();
    let slabs: Vec<_> = std::iter::from_fn(|| pool.alloc().unwrap()).collect();
    let stats = pool.stats();
    assert!(stats.unusable > 0);
    assert_eq!(slabs.len() as u64 + stats.unusable, pool.slab_count());
    assert!(slabs.iter().all(|slab| slab.is_registered() && slab.device_addr().is_some()));
}

/// Case C15: the device reaches the memory at another address than the host.
#[test]
fn c15_the_device_address_is_the_drivers_and_unregistering_uses_the_hosts() {
    let region = Region::anonymous(10 * MIB).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new().with_device_shift(Some(1 << 40)));
    region.register(driver.clone(), pieces()).unwrap();
    let base = address(&region);
    let slab = region.slab(3 * MIB + 7, 100).unwrap();
    assert_eq!(slab.device_addr(), Some(base + 3 * MIB + 7 + (1 << 40)));
    assert_eq!(region.slab(3 * MIB - 1, 2).unwrap().device_addr(), None, "crosses two pieces");
    assert_eq!(region.slab(9 * MIB, MIB).unwrap().device_addr(), Some(base + 9 * MIB + (1 << 40)));
    assert!(region.unregister());
    assert_eq!(slab.device_addr(), None);
    let calls = driver.calls();
    let end: Vec<_> = [9, 6, 3, 0].map(|at| Call::Unregister(base + at * MIB)).into();
    assert_eq!(calls[calls.len() - 5..][0], Call::Quiesce);
    assert_eq!(calls[calls.len() - 4..], end);
}

/// Case C15: no mapped address: the memory is registered, but no kernel may be given an address.
#[test]
fn c15_without_a_device_address_no_slab_has_one() {
    let region = Region::anonymous(MIB).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new().with_device_shift(None));
    assert!(region.register(driver, required()).unwrap().is_registered());
    let slab = region.slab(0, 4096).unwrap();
    assert!(slab.is_registered());
    assert_eq!(slab.device_addr(), None);
}

/// Case C20: refusal is an error with code, address, size, backing and hint.
#[test]
fn c20_a_required_registration_that_fails_says_everything() {
    let dir = common::scratch();
    let (path, region) = common::new_file_region(&dir, MIB);
    let driver = Arc::new(ScriptedRegistrar::new().failing_at(1));
    let error = region.register(driver, required()).unwrap_err();
    assert_eq!(error.kind(), "registration");
    let text = error.to_string();
    for part in ["code 1", "1048576", &format!("{:#x}", address(&region)), &path.display().to_string()] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

/// Case C20: where unpinned memory is allowed the region works on, and says so.
#[test]
fn c20_an_optional_registration_that_fails_leaves_a_working_region() {
    let region = Region::anonymous(MIB).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new().failing_at(1));
    let outcome = region.register(driver, RegisterOptions::default()).unwrap();
    assert!(matches!(outcome, RegisterOutcome::Unregistered { reason: CxlError::Registration { .. } }));
    assert!(!region.is_registered());
    assert!(matches!(region.registration(), RegistrationState::Failed { .. }));
    let slab = region.slab(0, 16).unwrap();
    assert_eq!((slab.device_addr(), slab.is_registered()), (None, false));
    slab.write_at(0, b"works").unwrap();
}

#[test]
fn wrong_options_are_errors_even_where_registration_is_optional() {
    let region = Region::anonymous(10 * MIB).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new());
    let wrong = RegisterOptions { piece_limit: 512 << 30, ..RegisterOptions::default() };
    assert_eq!(region.register(driver.clone(), wrong).unwrap_err().kind(), "invalid_argument");
    let wrong = RegisterOptions { slab_stride: 1000, ..RegisterOptions::default() };
    assert_eq!(region.register(driver.clone(), wrong).unwrap_err().kind(), "invalid_argument");
    assert!(driver.calls().is_empty());
}

#[test]
fn registering_twice_is_counted() {
    let region = Region::anonymous(MIB).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new());
    for _ in 0..3 {
        region.register(driver.clone(), required()).unwrap();
    }
    assert_eq!(region.registration(), RegistrationState::Registered { pieces: 1, count: 3 });
    assert!(!region.unregister());
    assert!(!region.unregister());
    assert!(region.is_registered());
    assert!(region.unregister());
    assert!(!region.is_registered());
    let registrations = driver.calls().iter().filter(|call| matches!(call, Call::Register(..))).count();
    assert_eq!(registrations, 1);
    assert!(region.unregister(), "nothing is left to undo");
    region.register(driver, required()).unwrap();
}

#[test]
fn two_threads_make_one_registration() {
    let region = Region::anonymous(MIB).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new());
    let barrier = Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                barrier.wait();
                region.register(driver.clone(), required()).unwrap();
            });
        }
    });
    assert_eq!(driver.calls().len(), 1);
    assert_eq!(region.registration(), RegistrationState::Registered { pieces: 1, count: 8 });
}

/// Two regions over the same memory, as two wrappers of one tensor would be.
fn twins(first: (u64, u64), second: (u64, u64)) -> (Region, Region) {
    let whole = Region::anonymous(8 * MIB).unwrap();
    let part = |(offset, len): (u64, u64)| {
        let start = whole.slab(offset, len).unwrap().addr();
        // SAFETY: the whole region is the owner and lives as long as the part.
        unsafe { Region::from_raw_parts(start, len, Box::new(whole.clone())) }.unwrap()
    };
    (part(first), part(second))
}

#[test]
fn the_same_range_in_two_regions_is_one_registration() {
    let (first, second) = twins((0, MIB), (0, MIB));
    let driver = Arc::new(ScriptedRegistrar::new());
    first.register(driver.clone(), required()).unwrap();
    second.register(driver.clone(), required()).unwrap();
    assert_eq!(driver.calls().len(), 1);
    drop(first);
    assert_eq!(driver.registered().len(), 1, "the second still uses it");
    assert!(second.slab(0, 1).unwrap().device_addr().is_some());
    drop(second);
    assert!(driver.registered().is_empty());
}

#[test]
fn partial_overlap_is_refused_and_leaves_the_first_alone() {
    for second in [(MIB / 2, MIB), (0, 2 * MIB), (4096, 4096)] {
        let (first, second) = twins((0, MIB), second);
        let driver = Arc::new(ScriptedRegistrar::new());
        first.register(driver.clone(), required()).unwrap();
        let error = second.register(driver.clone(), RegisterOptions::default()).unwrap_err();
        assert!(matches!(error, CxlError::RegistrationOverlap { other_len: MIB, .. }), "{error}");
        assert_eq!(driver.registered().len(), 1);
        drop(first);
        second.register(driver, required()).unwrap();
    }
}

#[test]
fn neighbours_do_not_overlap() {
    let (first, second) = twins((0, MIB), (MIB, MIB));
    let driver = Arc::new(ScriptedRegistrar::new());
    first.register(driver.clone(), required()).unwrap();
    second.register(driver.clone(), required()).unwrap();
    assert_eq!(driver.registered().len(), 2);
}

#[test]
fn a_second_device_joins_if_it_sees_the_same_addresses() {
    let region = Region::anonymous(MIB).unwrap();
    let (first, second) = (Arc::new(ScriptedRegistrar::new()), Arc::new(ScriptedRegistrar::new()));
    region.register(first.clone(), required()).unwrap();
    region.register(second.clone(), required()).unwrap();
    drop(region);
    assert_eq!(first.calls().iter().filter(|call| **call == Call::Quiesce).count(), 1);
    assert_eq!(second.calls(), [Call::Quiesce], "waited for, and nothing else");

    let region = Region::anonymous(MIB).unwrap();
    let elsewhere = Arc::new(ScriptedRegistrar::new().with_device_shift(Some(4096)));
    region.register(first, required()).unwrap();
    let error = region.register(elsewhere.clone(), required()).unwrap_err();
    assert!(matches!(error, CxlError::DeviceAddressDiffers { .. }), "{error}");
    assert!(region.is_registered());
    assert!(elsewhere.calls().is_empty());
}

/// Asserts the order of everything that happens at the end, and that the memory outlives the driver calls.
#[derive(Debug)]
struct Watcher {
    driver: ScriptedRegistrar,
    alive: std::sync::Weak<()>,
}

impl HostRegistrar for Watcher {
    fn register(&self, addr: NonNull<u8>, len: usize, access: Access) -> Result<(), DriverFailure> {
        self.driver.register(addr, len, access)
    }
    fn unregister(&self, addr: NonNull<u8>) -> Result<(), DriverFailure> {
        assert!(self.alive.upgrade().is_some(), "unmapped before it was unregistered");
        assert!(self.driver.calls().contains(&Call::Quiesce), "unregistered before the device came to rest");
        self.driver.unregister(addr)
    }
    fn device_pointer(&self, addr: NonNull<u8>) -> Result<u64, DriverFailure> {
        self.driver.device_pointer(addr)
    }
    fn quiesce(&self) -> Result<(), DriverFailure> {
        assert!(self.alive.upgrade().is_some(), "unmapped before the device came to rest");
        self.driver.quiesce()
    }
}

/// A region whose owner can be watched, with a driver that checks the order of teardown.
fn watched() -> (Region, Arc<Watcher>, std::sync::Weak<()>) {
    let memory = Region::anonymous(2 * MIB).unwrap();
    let token = Arc::new(());
    let alive = Arc::downgrade(&token);
    let start = memory.base();
    // SAFETY: the anonymous region is (part of) the owner.
    let region = unsafe { Region::from_raw_parts(start, 2 * MIB, Box::new((memory, token))) }.unwrap();
    let driver = Arc::new(Watcher { driver: ScriptedRegistrar::new(), alive: alive.clone() });
    region.register(driver.clone(), required()).unwrap();
    (region, driver, alive)
}

#[test]
fn teardown_waits_then_unregisters_then_unmaps() {
    let (region, driver, alive) = watched();
    drop(region);
    assert!(alive.upgrade().is_none());
    assert!(driver.driver.registered().is_empty());
}

#[test]
fn pool_slab_and_region_handles_may_go_in_any_order() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
        let (region, driver, alive) = watched();
        let pool = SlabPool::create(region.clone(), options(4096)).unwrap();
        let slab = pool.alloc().unwrap().unwrap();
        let published = pool.alloc().unwrap().unwrap();
        pool.publish(&published, &key(1), 1, 0, None).unwrap();
        drop(published);
        let found = pool.lookup(&key(1)).unwrap().unwrap();
        let mut handles: Vec<Option<Box<dyn std::any::Any>>> =
            vec![Some(Box::new(region)), Some(Box::new(pool)), Some(Box::new(slab)), Some(Box::new(found))];
        for (n, &which) in order.iter().enumerate() {
            assert!(alive.upgrade().is_some(), "gone after {n} of {order:?}");
            assert_eq!(driver.driver.registered().len(), 1);
            handles[which] = None;
        }
        assert!(alive.upgrade().is_none(), "{order:?}");
        assert!(driver.driver.registered().is_empty());
    }
}

#[test]
fn if_unregistering_fails_the_memory_is_leaked() {
    let (region, driver, alive) = watched();
    driver.driver.set_fail_unregister(true);
    drop(region);
    assert!(alive.upgrade().is_some(), "unmapped although the driver may still use it");
}

#[test]
fn if_the_device_does_not_come_to_rest_nothing_is_unregistered_or_unmapped() {
    let (region, driver, alive) = watched();
    driver.driver.set_fail_quiesce(true);
    drop(region);
    assert!(alive.upgrade().is_some());
    assert_eq!(driver.driver.registered().len(), 1);
    assert!(!driver.driver.calls().iter().any(|call| matches!(call, Call::Unregister(_))));
}

#[test]
fn an_explicit_unregister_that_fails_leaks_later() {
    let (region, driver, alive) = watched();
    driver.driver.set_fail_unregister(true);
    region.unregister();
    assert!(!region.is_registered());
    driver.driver.set_fail_unregister(false);
    drop(region);
    assert!(alive.upgrade().is_some());
}

#[test]
fn a_failed_roll_back_leaks_as_well() {
    let memory = Region::anonymous(10 * MIB).unwrap();
    let token = Arc::new(());
    let alive = Arc::downgrade(&token);
    let start = memory.base();
    // SAFETY: the anonymous region is (part of) the owner.
    let region = unsafe { Region::from_raw_parts(start, 10 * MIB, Box::new((memory, token))) }.unwrap();
    let driver = Arc::new(ScriptedRegistrar::new().failing_at(2));
    driver.set_fail_unregister(true);
    region.register(driver, pieces()).unwrap_err();
    drop(region);
    assert!(alive.upgrade().is_some());
}

#[test]
fn read_only_mappings_are_registered_as_such() {
    #[derive(Debug)]
    struct Reads;
    impl HostRegistrar for Reads {
        fn register(&self, _: NonNull<u8>, _: usize, access: Access) -> Result<(), DriverFailure> {
            assert_eq!(access, Access::ReadOnly);
            Ok(())
        }
        fn unregister(&self, _: NonNull<u8>) -> Result<(), DriverFailure> {
            Ok(())
        }
        fn device_pointer(&self, addr: NonNull<u8>) -> Result<u64, DriverFailure> {
            Ok(addr.addr().get() as u64)
        }
        fn quiesce(&self) -> Result<(), DriverFailure> {
            Ok(())
        }
    }
    let dir = common::scratch();
    let (path, _region) = common::new_file_region(&dir, MIB);
    common::map_read_only(&path).register(Arc::new(Reads), required()).unwrap();
}

#[test]
fn without_a_driver_cuda_is_unavailable_and_nothing_panics() {
    if CudaRegistrar::is_driver_present() {
        return; // tests/cuda.rs covers machines with a driver
    }
    let error = CudaRegistrar::open(0).unwrap_err();
    assert!(matches!(error, CxlError::CudaUnavailable { .. }), "{error}");
    assert_eq!(error.kind(), "not_available");
}
