//! Devices and contexts.

use maru_sim_driver::Session;

use crate::common::{Device, Stream, Test, context, current, unbind};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        two_devices_unless_told_otherwise,
        a_device_that_does_not_exist_is_refused,
        the_context_stack_is_the_threads_own,
        no_context_is_an_error,
        a_primary_context_ends_with_its_last_holder,
        a_stream_of_another_context_is_refused,
        memory_runs_out,
    ]
}

fn two_devices_unless_told_otherwise(session: &Session) {
    assert_eq!(maru_kernel_cuda::device_count().unwrap(), 2);
    session.set("devices", 5);
    assert_eq!(maru_kernel_cuda::device_count().unwrap(), 5);
}

fn a_device_that_does_not_exist_is_refused(_: &Session) {
    let mut device = 0;
    assert_eq!(code!(cuDeviceGet(&mut device, 2)), 101);
    assert_eq!(code!(cuDeviceGet(&mut device, -1)), 101);
}

fn the_context_stack_is_the_threads_own(_: &Session) {
    let (a, b) = (context(0), context(1));
    unbind();
    ok!(cuCtxPushCurrent_v2(a.cu_ctx()));
    ok!(cuCtxPushCurrent_v2(b.cu_ctx()));
    assert_eq!(current(), b.cu_ctx().addr());
    assert_eq!(std::thread::spawn(current).join().unwrap(), 0);
    let mut popped = std::ptr::null_mut();
    ok!(cuCtxPopCurrent_v2(&mut popped));
    assert_eq!((popped, current()), (b.cu_ctx(), a.cu_ctx().addr()));
    ok!(cuCtxPopCurrent_v2(&mut popped));
    assert_eq!(current(), 0);
    assert_eq!(code!(cuCtxPopCurrent_v2(&mut popped)), 201);
}

fn no_context_is_an_error(_: &Session) {
    let _context = context(0);
    unbind();
    let mut addr = 0;
    assert_eq!(code!(cuMemAlloc_v2(&mut addr, 64)), 201);
    let mut stream = std::ptr::null_mut();
    assert_eq!(code!(cuStreamCreate(&mut stream, 0)), 201);
    assert_eq!(code!(cuStreamSynchronize(std::ptr::null_mut())), 201);
    assert_eq!(code!(cuCtxSynchronize()), 201);
}

fn a_primary_context_ends_with_its_last_holder(session: &Session) {
    let context = context(0);
    let mut addr = 0;
    ok!(cuMemAlloc_v2(&mut addr, 64));
    assert_eq!(session.census().contexts, 1);
    drop(context);
    let census = session.census();
    assert_eq!((census.contexts, census.allocations, census.lost), (0, 0, 1));
    assert_eq!(code!(cuMemAlloc_v2(&mut addr, 64)), 709, "it is still current, and destroyed");
    unbind();
}

fn a_stream_of_another_context_is_refused(session: &Session) {
    let a = context(0);
    let memory = Device::of(session, &[0; 64]);
    let b = context(1);
    let stream = Stream::new(true);
    a.bind_to_thread().unwrap();
    let mut host = [0u8; 64];
    let copied = code!(cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), memory.addr, 64, stream.0));
    assert_eq!(copied, 400);
    b.bind_to_thread().unwrap();
    ok!(cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), memory.addr, 64, stream.0));
}

fn memory_runs_out(session: &Session) {
    let _context = context(0);
    session.set("memory_bytes", 1 << 20);
    let first = Device::new(1 << 19);
    let mut addr = 0;
    assert_eq!(code!(cuMemAlloc_v2(&mut addr, (1 << 19) + 1)), 2);
    let _second = Device::new(1 << 19);
    assert_eq!(code!(cuMemAlloc_v2(&mut addr, 1)), 2);
    drop(first);
    let _third = Device::new(1);
}
