//! Registration of host memory through the driver (CASES C07, C15, C17, C20), on the simulated one.
#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
mod common;

use std::sync::Arc;

use common::{Device, Stream, context, current, leaves_nothing, pattern, unbind};
use maru_cxl::{
    CreateOptions, CudaRegistrar, CxlError, DaxDevice, MapOptions, Mapping, Region, RegisterOptions,
    RegisterOutcome, Slab,
};
use maru_sim_driver::Session;

fn main() {
    common::main(tests![
        a_region_is_registered_and_unregistered,
        c07_pieces_end_on_slab_borders_and_every_slab_copies,
        c07_a_refused_piece_rolls_the_others_back_in_reverse,
        c07_the_drivers_limit_is_met_by_pieces,
        c07_a_roll_back_that_fails_keeps_the_memory_for_ever,
        every_call_of_a_registration_fails_once,
        c15_the_devices_address_is_asked_for,
        c15_memory_without_a_device_address_can_still_be_copied,
        c20_a_refusal_says_what_and_why,
        c20_read_only_memory_needs_a_device_that_can,
        c20_a_file_on_a_disk_comes_with_the_remedy,
        c20_memory_that_somebody_else_registered,
        a_region_waits_for_the_device_before_it_goes,
        a_device_that_does_not_come_to_rest_keeps_the_memory,
        c17_the_callers_context_is_what_it_was,
        c17_a_thread_without_a_context,
        c17_two_devices_share_a_registration,
        c17_letting_go_of_a_registrar_leaves_the_context_alone,
        a_device_that_is_not_there,
    ]);
}

const MIB: u64 = 1 << 20;

fn required() -> RegisterOptions {
    RegisterOptions { required: true, ..RegisterOptions::default() }
}

fn pieces_of(limit: u64, stride: u64) -> RegisterOptions {
    RegisterOptions { piece_limit: limit, slab_stride: stride, ..required() }
}

fn registrar(device: usize) -> Arc<CudaRegistrar> {
    Arc::new(CudaRegistrar::open(device).unwrap())
}

/// A region of a file on tmpfs; the file goes at once.
fn shared(len: u64) -> Region {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let device = DaxDevice::create_file(dir.path().join("pool"), len, CreateOptions::default()).unwrap();
    Region::new(Mapping::map(&device, &MapOptions::default()).unwrap())
}

/// To the device and back, by copies.
fn round_trip(slab: &Slab, seed: u8) {
    let len = usize::try_from(slab.len()).unwrap();
    let bytes = pattern(len, seed);
    slab.write_at(0, &bytes).unwrap();
    let device = Device::new(len);
    ok!(cuMemcpyHtoD_v2(device.addr, slab.addr().as_ptr().cast(), len));
    slab.write_at(0, &vec![0; len]).unwrap();
    ok!(cuMemcpyDtoH_v2(slab.addr().as_ptr().cast(), device.addr, len));
    let mut found = vec![0; len];
    slab.read_at(0, &mut found).unwrap();
    assert!(found == bytes);
}

fn a_region_is_registered_and_unregistered(session: &Session) {
    let registrar = registrar(0);
    leaves_nothing(session, || {
        let region = shared(4 * MIB);
        assert!(region.register(registrar.clone(), required()).unwrap().is_registered());
        assert_eq!(session.census().registrations, 1);
        let slab = region.slab(MIB, MIB).unwrap();
        assert_eq!(slab.device_addr(), Some(slab.addr().addr().get() as u64));
        assert!(region.unregister());
        assert_eq!(slab.device_addr(), None);
        region.register(registrar.clone(), required()).unwrap();
    });
}

fn c07_pieces_end_on_slab_borders_and_every_slab_copies(session: &Session) {
    let _context = context(0);
    let registrar = registrar(0);
    let region = shared(10 * MIB);
    match region.register(registrar, pieces_of(4 * MIB, 3 * MIB)).unwrap() {
        RegisterOutcome::Registered { pieces, bytes } => assert_eq!((pieces, bytes), (4, 10 * MIB)),
        other => panic!("{other:?}"),
    }
    assert_eq!(session.census().registrations, 4);
    for i in 0..3 {
        round_trip(&region.slab(i * 3 * MIB, 3 * MIB).unwrap(), 1);
    }
    // What the cut is for: one copy across a border fails.
    let across = region.slab(2 * MIB, 2 * MIB).unwrap();
    assert_eq!((across.device_addr(), region.straddles_pieces(2 * MIB, 2 * MIB)), (None, true));
    let device = Device::new(2 << 20);
    assert_eq!(code!(cuMemcpyHtoD_v2(device.addr, across.addr().as_ptr().cast(), 2 << 20)), 1);
}

fn c07_a_refused_piece_rolls_the_others_back_in_reverse(session: &Session) {
    let _context = context(0);
    let registrar = registrar(0);
    let region = shared(10 * MIB);
    session.fail("cuMemHostRegister", 3, 2);
    let before = session.census();
    match region.register(registrar.clone(), pieces_of(4 * MIB, 3 * MIB)).unwrap_err() {
        CxlError::Registration { address, len, piece, pieces, failure, .. } => {
            let base = region.base().addr().get() as u64;
            assert_eq!((address, len, piece, pieces), (base + 6 * MIB, 3 * MIB, 3, 4));
            assert_eq!((failure.code, failure.text.as_str()), (2, "CUDA_ERROR_OUT_OF_MEMORY"));
        }
        other => panic!("{other}"),
    }
    assert_eq!((session.census(), session.calls("cuMemHostUnregister")), (before, 2));
    assert!(!region.is_registered());
    // Nothing lingers.
    region.register(registrar, pieces_of(4 * MIB, 3 * MIB)).unwrap();
    round_trip(&region.slab(0, 3 * MIB).unwrap(), 2);
}

fn c07_the_drivers_limit_is_met_by_pieces(session: &Session) {
    let registrar = registrar(0);
    session.set("register_limit", 4 * MIB + 1);
    let region = shared(10 * MIB);
    let error = region.register(registrar.clone(), required()).unwrap_err().to_string();
    assert!(error.contains("OUT_OF_MEMORY") && error.contains("register_piece"), "{error}");
    assert!(region.register(registrar, pieces_of(4 * MIB, 0)).unwrap().is_registered());
    assert_eq!(session.census().registrations, 3);
}

fn c07_a_roll_back_that_fails_keeps_the_memory_for_ever(session: &Session) {
    let _context = context(0);
    let registrar = registrar(0);
    let region = shared(10 * MIB);
    let base = region.base();
    session.fail("cuMemHostRegister", 2, 1);
    session.fail("cuMemHostUnregister", 1, 999);
    region.register(registrar.clone(), pieces_of(4 * MIB, 3 * MIB)).unwrap_err();
    assert_eq!(session.census().registrations, 1);
    drop(region);
    // The first piece is still registered, so it must still be there.
    let device = Device::new(4096);
    ok!(cuMemcpyHtoD_v2(device.addr, base.as_ptr().cast(), 4096));
    ok!(cuCtxSynchronize());
    assert_eq!(device.read(session), [0; 4096]);
    ok!(cuMemHostUnregister(base.as_ptr().cast()));
}

/// Whatever fails: an error or a region that says it is not registered, and never a registration left over.
fn every_call_of_a_registration_fails_once(session: &Session) {
    let registrar = registrar(0);
    let calls = ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuMemHostRegister", "cuMemHostGetDevicePointer"];
    for required in [true, false] {
        for function in calls {
            for nth in 1.. {
                let before = session.census();
                let region = shared(10 * MIB);
                session.fail(function, nth, 800);
                let options = RegisterOptions { required, ..pieces_of(4 * MIB, 3 * MIB) };
                let outcome = region.register(registrar.clone(), options);
                let reached = session.faults_left() == 0;
                session.clear_faults();
                match outcome {
                    Ok(outcome) => assert_eq!(outcome.is_registered(), region.is_registered()),
                    Err(error) => {
                        assert!(required && !region.is_registered(), "{function} call {nth}: {error}");
                    }
                }
                if !region.is_registered() {
                    assert_eq!(before, session.census(), "{function} call {nth}");
                    assert!(region.register(registrar.clone(), options).unwrap().is_registered());
                }
                drop(region);
                assert_eq!(before, session.census(), "{function} call {nth}");
                if !reached {
                    break;
                }
            }
        }
    }
}

fn c15_the_devices_address_is_asked_for(session: &Session) {
    session.set("shift", 1);
    let _context = context(0);
    let region = shared(4 * MIB);
    region.register(registrar(0), pieces_of(2 * MIB, 0)).unwrap();
    let slab = region.slab(2 * MIB + 77, 1000).unwrap();
    let device_addr = slab.device_addr().unwrap();
    assert_ne!(device_addr, slab.addr().addr().get() as u64);
    // A write through that address arrives in the slab; copies take the host's.
    ok!(cuMemsetD8_v2(device_addr, 9, 1000));
    ok!(cuCtxSynchronize());
    let mut found = [0; 1000];
    slab.read_at(0, &mut found).unwrap();
    assert_eq!(found, [9; 1000]);
    round_trip(&slab, 3);
    drop((slab, region));
    assert_eq!(session.census().registrations, 0, "unregistered by the host's address");
}

fn c15_memory_without_a_device_address_can_still_be_copied(session: &Session) {
    let _context = context(0);
    session.fail_from("cuMemHostGetDevicePointer", 1, 1);
    let region = shared(4 * MIB);
    let outcome = region.register(registrar(0), required()).unwrap();
    assert!(outcome.is_registered());
    let slab = region.slab(0, MIB).unwrap();
    assert_eq!(slab.device_addr(), None, "no kernel may touch it");
    round_trip(&slab, 4);
}

fn c20_a_refusal_says_what_and_why(session: &Session) {
    let registrar = registrar(0);
    let region = shared(4 * MIB);
    session.fail("cuMemHostRegister", 1, 1);
    let error = region.register(registrar.clone(), required()).unwrap_err().to_string();
    for part in ["CUDA_ERROR_INVALID_VALUE", "code 1", &(4 * MIB).to_string(), "pool", "devdax"] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    session.fail("cuMemHostRegister", 1, 1);
    let outcome = region.register(registrar, RegisterOptions::default()).unwrap();
    assert!(!outcome.is_registered() && !region.is_registered());
    let state = format!("{:?}", region.registration());
    assert!(state.contains("Failed") && state.contains("CUDA_ERROR_INVALID_VALUE"), "{state}");
    assert_eq!(region.slab(0, MIB).unwrap().device_addr(), None);
}

fn c20_read_only_memory_needs_a_device_that_can(session: &Session) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("pool");
    drop(DaxDevice::create_file(&path, 4 * MIB, CreateOptions::default()).unwrap());
    let device = DaxDevice::open(&path).unwrap();
    let options = MapOptions { read_only: true, ..MapOptions::default() };
    let region = Region::new(Mapping::map(&device, &options).unwrap());
    let registrar = registrar(0);
    let error = region.register(registrar.clone(), required()).unwrap_err().to_string();
    assert!(error.contains("read-only"), "{error}");
    session.set("read_only_register", 1);
    assert!(region.register(registrar, required()).unwrap().is_registered());
}

fn c20_a_file_on_a_disk_comes_with_the_remedy(_: &Session) {
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let device = DaxDevice::create_file(dir.path().join("pool"), MIB, CreateOptions::default()).unwrap();
    let region = Region::new(Mapping::map(&device, &MapOptions::default()).unwrap());
    let error = region.register(registrar(0), required()).unwrap_err().to_string();
    assert!(error.contains("tmpfs") && error.contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
}

fn c20_memory_that_somebody_else_registered(session: &Session) {
    let context = context(0);
    let region = shared(4 * MIB);
    let base = region.base().as_ptr();
    ok!(cuMemHostRegister_v2(base.cast(), 4096, 3));
    let error = region.register(registrar(0), required()).unwrap_err();
    match &error {
        CxlError::Registration { failure, .. } => assert_eq!(failure.code, 712),
        other => panic!("{other}"),
    }
    context.bind_to_thread().unwrap();
    ok!(cuMemHostUnregister(base.cast()));
    assert_eq!(session.census().registrations, 0);
}

fn a_region_waits_for_the_device_before_it_goes(session: &Session) {
    let _context = context(0);
    let region = shared(MIB);
    region.register(registrar(0), required()).unwrap();
    region.slab(0, MIB).unwrap().write_at(0, &[5; 4096]).unwrap();
    let (stream, device) = (Stream::new(true), Device::new(4096));
    session.set("delay_us", 20_000);
    ok!(cuMemcpyHtoDAsync_v2(device.addr, region.base().as_ptr().cast(), 4096, stream.0));
    drop(region);
    stream.wait();
    assert_eq!(device.read(session), [5; 4096]);
    assert_eq!(session.census().registrations, 0);
}

fn a_device_that_does_not_come_to_rest_keeps_the_memory(session: &Session) {
    let context = context(0);
    let region = shared(MIB);
    let base = region.base().as_ptr();
    region.register(registrar(0), required()).unwrap();
    session.fail("cuCtxSynchronize", 1, 719);
    drop(region);
    assert_eq!(session.census().registrations, 1);
    // Still mapped.
    context.bind_to_thread().unwrap();
    round_trip_raw(base);
    ok!(cuMemHostUnregister(base.cast()));
}

fn round_trip_raw(base: *mut u8) {
    let device = Device::new(16);
    ok!(cuMemcpyHtoD_v2(device.addr, base.cast(), 16));
    ok!(cuMemcpyDtoH_v2(base.cast(), device.addr, 16));
}

fn c17_the_callers_context_is_what_it_was(session: &Session) {
    let b = context(1);
    let registrar = registrar(0);
    for bound in [true, false] {
        if bound {
            b.bind_to_thread().unwrap();
        } else {
            unbind();
        }
        let before = current();
        let region = shared(MIB);
        region.register(registrar.clone(), required()).unwrap();
        assert_eq!(current(), before, "register");
        region.unregister();
        assert_eq!(current(), before, "unregister");
        session.fail("cuMemHostRegister", 1, 1);
        region.register(registrar.clone(), required()).unwrap_err();
        assert_eq!(current(), before, "a registration that fails");
        region.register(registrar.clone(), required()).unwrap();
        drop(region);
        assert_eq!(current(), before, "drop");
        assert!(CudaRegistrar::open(9).is_err());
        assert_eq!(current(), before, "a device that is not there");
    }
}

fn c17_a_thread_without_a_context(session: &Session) {
    let registrar = registrar(0);
    std::thread::spawn(move || {
        assert_eq!(current(), 0);
        let region = shared(MIB);
        region.register(registrar, required()).unwrap();
        drop(region);
        assert_eq!(current(), 0);
    })
    .join()
    .unwrap();
    assert_eq!(session.census().registrations, 0);
}

fn c17_two_devices_share_a_registration(session: &Session) {
    let (a, b) = (registrar(0), registrar(1));
    let region = shared(MIB);
    region.register(a, required()).unwrap();
    region.register(b, required()).unwrap();
    assert_eq!(session.census().registrations, 1);
    for device in [0, 1] {
        let _context = context(device);
        round_trip(&region.slab(0, MIB).unwrap(), 6);
    }
    assert!(!region.unregister());
    assert_eq!(session.census().registrations, 1);
    assert!(region.unregister());
    assert_eq!(session.census().registrations, 0);
}

fn c17_letting_go_of_a_registrar_leaves_the_context_alone(_: &Session) {
    unbind();
    drop(CudaRegistrar::open(0).unwrap());
    assert_eq!(current(), 0);
}

fn a_device_that_is_not_there(session: &Session) {
    let error = CudaRegistrar::open(2).unwrap_err();
    assert!(error.to_string().contains("INVALID_DEVICE"), "{error}");
    session.fail("cuDevicePrimaryCtxRetain", 1, 2);
    let error = CudaRegistrar::open(0).unwrap_err();
    assert!(error.to_string().contains("OUT_OF_MEMORY"), "{error}");
    assert_eq!(session.census().contexts, 0);
}
