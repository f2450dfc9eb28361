//! Allocations and registrations.

use cudarc::driver::sys::{self, CUpointer_attribute};
use maru_sim_driver::Session;
use memmap2::{MmapMut, MmapOptions, MmapRaw};

use crate::common::{Device, Pinned, Stream, Test, context, pattern};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        fresh_memory_holds_no_zeroes,
        copies_end_where_the_allocation_does,
        an_address_is_asked_for,
        pinned_memory_has_a_device_address,
        with_shift_the_device_has_its_own_addresses,
        registration_pins_pages_once,
        memory_that_is_not_there_is_not_registered,
        device_memory_is_not_registered,
        a_read_only_mapping_needs_the_flag_and_a_device_that_can,
        a_file_on_a_disk_is_not_registered,
        the_size_of_a_registration_is_limited,
        a_copy_across_two_registrations_is_refused,
        freeing_waits_for_work,
        unregistering_does_not_wait_for_work,
    ]
}

const PORTABLE_MAPPED: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

fn shared(len: usize) -> MmapRaw {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(len as u64).unwrap();
    MmapOptions::new().len(len).map_raw(&file).unwrap()
}

fn fresh_memory_holds_no_zeroes(session: &Session) {
    let _context = context(0);
    assert_eq!(Device::new(3).read(session), [0xa5; 3]);
}

fn copies_end_where_the_allocation_does(_: &Session) {
    let _context = context(0);
    let device = Device::new(100);
    let host = [0u8; 200];
    assert_eq!(code!(cuMemcpyHtoD_v2(device.addr + 1, host.as_ptr().cast(), 100)), 1);
    ok!(cuMemcpyHtoD_v2(device.addr + 1, host.as_ptr().cast(), 99));
    assert_eq!(code!(cuMemcpyHtoD_v2(device.addr + 100, host.as_ptr().cast(), 1)), 1);
    assert_eq!(code!(cuMemcpyHtoD_v2(host.as_ptr().addr() as u64, host.as_ptr().cast(), 1)), 1);
}

fn an_address_is_asked_for(_: &Session) {
    let context = context(1);
    let device = Device::new(4096);
    let (mut first, mut size) = (0, 0);
    ok!(cuMemGetAddressRange_v2(&mut first, &mut size, device.addr + 77));
    assert_eq!((first, size), (device.addr, 4096));
    assert_eq!(code!(cuMemGetAddressRange_v2(&mut first, &mut size, device.addr + 4096)), 500);
    let mut kind = 0u32;
    let out = std::ptr::from_mut(&mut kind).cast();
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    ok!(cuPointerGetAttribute(out, attribute, device.addr));
    assert_eq!(kind, 2);
    let mut ordinal = 0i32;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    ok!(cuPointerGetAttribute(std::ptr::from_mut(&mut ordinal).cast(), attribute, device.addr));
    assert_eq!(ordinal, 1);
    let local = 0u64;
    let unknown = std::ptr::from_ref(&local).addr() as u64;
    assert_eq!(code!(cuPointerGetAttribute(out, attribute, unknown)), 1);
    let mut attributes = [CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE];
    let mut outs = [out];
    ok!(cuPointerGetAttributes(1, attributes.as_mut_ptr(), outs.as_mut_ptr(), unknown));
    assert_eq!(kind, 0);
    drop(device);
    drop(context);
}

fn pinned_memory_has_a_device_address(_: &Session) {
    let _context = context(0);
    let pinned = Pinned::new(&[1; 64]);
    assert_eq!(pinned.device, pinned.host.addr().get() as u64);
    let mut address = 0;
    let local = [0u8; 8];
    let host = local.as_ptr().cast_mut().cast();
    assert_eq!(code!(cuMemHostGetDevicePointer_v2(&mut address, host, 0)), 1);
}

fn with_shift_the_device_has_its_own_addresses(session: &Session) {
    let context = context(0);
    session.set("shift", 1);
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
    assert_eq!(context.attribute(attribute).unwrap(), 0);
    let map = shared(8192);
    // SAFETY: the mapping has that length.
    unsafe { map.as_mut_ptr().copy_from_nonoverlapping(pattern(8192, 3).as_ptr(), 8192) };
    ok!(cuMemHostRegister_v2(map.as_mut_ptr().cast(), 8192, PORTABLE_MAPPED));
    let mut address = 0;
    ok!(cuMemHostGetDevicePointer_v2(&mut address, map.as_mut_ptr().wrapping_add(5).cast(), 0));
    assert_ne!(address, map.as_mut_ptr().addr() as u64 + 5);
    assert_eq!(session.peek(address, 100).unwrap(), pattern(8192, 3)[5..105]);
    // Copies take either address.
    let device = Device::of(session, &[0; 100]);
    ok!(cuMemcpyDtoD_v2(device.addr, address, 100));
    ok!(cuCtxSynchronize());
    assert_eq!(device.read(session), pattern(8192, 3)[5..105]);
    ok!(cuMemHostUnregister(map.as_mut_ptr().cast()));
    assert!(session.peek(address, 1).is_none());
}

fn registration_pins_pages_once(session: &Session) {
    let _context = context(0);
    let map = MmapMut::map_anon(1 << 16).unwrap();
    let at = |offset: usize| map.as_ptr().wrapping_add(offset).cast_mut().cast();
    ok!(cuMemHostRegister_v2(at(0), 8192, PORTABLE_MAPPED));
    assert_eq!(code!(cuMemHostRegister_v2(at(0), 8192, PORTABLE_MAPPED)), 712);
    assert_eq!(code!(cuMemHostRegister_v2(at(4096), 8192, PORTABLE_MAPPED)), 712);
    ok!(cuMemHostRegister_v2(at(8192), 100, PORTABLE_MAPPED));
    assert_eq!(code!(cuMemHostRegister_v2(at(8292), 100, PORTABLE_MAPPED)), 712, "the same page");
    assert_eq!(session.census().registrations, 2);
    assert_eq!(code!(cuMemHostUnregister(at(4096))), 1, "not where it begins");
    ok!(cuMemHostUnregister(at(0)));
    ok!(cuMemHostUnregister(at(8192)));
    assert_eq!(code!(cuMemHostUnregister(at(0))), 713);
}

fn memory_that_is_not_there_is_not_registered(_: &Session) {
    let _context = context(0);
    let map = MmapMut::map_anon(8192).unwrap();
    let at: *mut u8 = map.as_ptr().cast_mut();
    drop(map);
    assert_eq!(code!(cuMemHostRegister_v2(at.cast(), 8192, PORTABLE_MAPPED)), 1);
    assert_eq!(code!(cuMemHostRegister_v2(std::ptr::null_mut(), 8192, PORTABLE_MAPPED)), 1);
    let map = MmapMut::map_anon(8192).unwrap();
    assert_eq!(code!(cuMemHostRegister_v2(map.as_ptr().cast_mut().cast(), 0, PORTABLE_MAPPED)), 1);
}

fn device_memory_is_not_registered(_: &Session) {
    let _context = context(0);
    let device = Device::new(4096);
    let at = std::ptr::with_exposed_provenance_mut(usize::try_from(device.addr).unwrap());
    assert_eq!(code!(cuMemHostRegister_v2(at, 4096, PORTABLE_MAPPED)), 1);
}

fn a_read_only_mapping_needs_the_flag_and_a_device_that_can(session: &Session) {
    let _context = context(0);
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(4096).unwrap();
    let map = MmapOptions::new().len(4096).map_raw_read_only(&file).unwrap();
    let at = || map.as_mut_ptr().cast();
    let read_only = PORTABLE_MAPPED | sys::CU_MEMHOSTREGISTER_READ_ONLY;
    assert_eq!(code!(cuMemHostRegister_v2(at(), 4096, PORTABLE_MAPPED)), 1);
    assert_eq!(code!(cuMemHostRegister_v2(at(), 4096, read_only)), 801);
    session.set("read_only_register", 1);
    ok!(cuMemHostRegister_v2(at(), 4096, read_only));
    let device = Device::new(16);
    ok!(cuMemcpyHtoD_v2(device.addr, at(), 16));
    assert_eq!(code!(cuMemcpyDtoH_v2(at(), device.addr, 16)), 1, "nobody writes there");
    ok!(cuMemHostUnregister(at()));
}

fn a_file_on_a_disk_is_not_registered(session: &Session) {
    let _context = context(0);
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    file.as_file().set_len(4096).unwrap();
    let map = MmapOptions::new().len(4096).map_raw(file.as_file()).unwrap();
    let at = || map.as_mut_ptr().cast();
    assert_eq!(code!(cuMemHostRegister_v2(at(), 4096, PORTABLE_MAPPED)), 1);
    session.set("reject_disk_files", 0);
    ok!(cuMemHostRegister_v2(at(), 4096, PORTABLE_MAPPED));
    ok!(cuMemHostUnregister(at()));
}

fn the_size_of_a_registration_is_limited(session: &Session) {
    let _context = context(0);
    let map = MmapMut::map_anon(1 << 20).unwrap();
    session.set("register_limit", 1 << 20);
    let at = || map.as_ptr().cast_mut().cast();
    assert_eq!(code!(cuMemHostRegister_v2(at(), 1 << 20, PORTABLE_MAPPED)), 2);
    ok!(cuMemHostRegister_v2(at(), (1 << 20) - 1, PORTABLE_MAPPED));
    ok!(cuMemHostUnregister(at()));
}

fn a_copy_across_two_registrations_is_refused(_: &Session) {
    let _context = context(0);
    let map = MmapMut::map_anon(8192).unwrap();
    let at = |offset: usize| map.as_ptr().wrapping_add(offset).cast_mut().cast();
    ok!(cuMemHostRegister_v2(at(0), 4096, PORTABLE_MAPPED));
    ok!(cuMemHostRegister_v2(at(4096), 4096, PORTABLE_MAPPED));
    let device = Device::new(8192);
    assert_eq!(code!(cuMemcpyHtoD_v2(device.addr, at(4000), 200)), 1);
    ok!(cuMemcpyHtoD_v2(device.addr, at(4000), 96));
    ok!(cuMemHostUnregister(at(0)));
    assert_eq!(code!(cuMemcpyHtoD_v2(device.addr, at(4000), 200)), 1, "from pageable into registered");
    ok!(cuMemHostUnregister(at(4096)));
    ok!(cuMemcpyHtoD_v2(device.addr, at(4000), 200));
}

fn freeing_waits_for_work(session: &Session) {
    let _context = context(0);
    session.set("delay_us", 5000);
    let stream = Stream::new(true);
    let (from, to) = (Device::of(session, &[7; 64]), Pinned::new(&[0; 64]));
    ok!(cuMemcpyDtoHAsync_v2(to.host.as_ptr().cast(), from.addr, 64, stream.0));
    drop(from);
    assert_eq!(to.read(), [7; 64]);
    stream.wait();
}

fn unregistering_does_not_wait_for_work(session: &Session) {
    let context = context(0);
    let map = shared(4096);
    ok!(cuMemHostRegister_v2(map.as_mut_ptr().cast(), 4096, PORTABLE_MAPPED));
    let (stream, to) = (Stream::new(true), Device::new(4096));
    let hold = session.hold();
    ok!(cuMemcpyHtoDAsync_v2(to.addr, map.as_mut_ptr().cast(), 4096, stream.0));
    ok!(cuMemHostUnregister(map.as_mut_ptr().cast()));
    drop(hold);
    assert_eq!(code!(cuStreamSynchronize(stream.0)), 700);
    assert_eq!(code!(cuCtxSynchronize()), 700, "and so is everything after it");
    session.poison(0, 0);
    drop((stream, to, context));
}
