//! Copies: shapes, pageable memory, batches.

use cudarc::driver::sys::{self, CUmemorytype};
use maru_sim_driver::{CopyKind, Session};

use crate::common::{Device, Pinned, Stream, Test, context, pattern};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        two_dimensions_leave_the_gaps_alone,
        a_pitch_beyond_the_limit_is_refused,
        three_dimensions_step_by_slices,
        pageable_sources_are_read_during_the_call,
        pageable_sources_are_read_late_when_asked,
        pageable_destinations_are_complete_on_return,
        a_synchronous_upload_may_arrive_later,
        a_batch_in_stream_order_sees_earlier_work,
        a_batch_in_any_order_may_miss_earlier_work,
        a_bad_entry_of_a_batch_is_named_and_nothing_is_moved,
        batches_have_limits,
        sets_repeat_their_element,
        records_say_what_moved,
    ]
}

fn two(src: (bool, u64, usize), dst: (bool, u64, usize), width: usize, height: usize) -> sys::CUDA_MEMCPY2D {
    let kind = |device| match device {
        true => CUmemorytype::CU_MEMORYTYPE_DEVICE,
        false => CUmemorytype::CU_MEMORYTYPE_HOST,
    };
    let host = |addr: u64| std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap());
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: kind(src.0),
        srcHost: host(src.1),
        srcDevice: src.1,
        srcArray: std::ptr::null_mut(),
        srcPitch: src.2,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: kind(dst.0),
        dstHost: host(dst.1),
        dstDevice: dst.1,
        dstArray: std::ptr::null_mut(),
        dstPitch: dst.2,
        WidthInBytes: width,
        Height: height,
    }
}

fn two_dimensions_leave_the_gaps_alone(session: &Session) {
    let _context = context(0);
    let from = Device::of(session, &pattern(8 * 100, 1));
    let to = Pinned::new(&[0; 8 * 64]);
    let stream = Stream::new(true);
    let copy = two((true, from.addr, 100), (false, to.host.addr().get() as u64, 64), 32, 8);
    ok!(cuMemcpy2DAsync_v2(&copy, stream.0));
    stream.wait();
    let (source, found) = (pattern(8 * 100, 1), to.read());
    for row in 0..8 {
        assert_eq!(found[row * 64..row * 64 + 32], source[row * 100..row * 100 + 32]);
        assert_eq!(found[row * 64 + 32..row * 64 + 64], [0; 32]);
    }
}

fn a_pitch_beyond_the_limit_is_refused(session: &Session) {
    let _context = context(0);
    let (from, to) = (Device::new(64), Device::new(64));
    let stream = Stream::new(true);
    let copy = two((true, from.addr, 1 << 31), (true, to.addr, 32), 32, 2);
    assert_eq!(code!(cuMemcpy2DAsync_v2(&copy, stream.0)), 1);
    let copy = two((true, from.addr, 16), (true, to.addr, 32), 32, 2);
    assert_eq!(code!(cuMemcpy2DAsync_v2(&copy, stream.0)), 1, "rows overlap");
    let copy = two((true, from.addr, 33), (true, to.addr, 32), 32, 2);
    assert_eq!(code!(cuMemcpy2DAsync_v2(&copy, stream.0)), 1, "the last row ends behind the memory");
    assert_eq!(session.records().len(), 0);
}

fn three_dimensions_step_by_slices(session: &Session) {
    let _context = context(0);
    let from = Device::of(session, &pattern(3 * 4 * 16, 5));
    let to = Device::of(session, &[0; 3 * 2 * 8]);
    let mut copy = sys::CUDA_MEMCPY3D {
        srcXInBytes: 4,
        srcY: 1,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: from.addr,
        srcArray: std::ptr::null_mut(),
        reserved0: std::ptr::null_mut(),
        srcPitch: 16,
        srcHeight: 4,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: to.addr,
        dstArray: std::ptr::null_mut(),
        reserved1: std::ptr::null_mut(),
        dstPitch: 8,
        dstHeight: 2,
        WidthInBytes: 8,
        Height: 2,
        Depth: 3,
    };
    ok!(cuMemcpy3DAsync_v2(&copy, std::ptr::null_mut()));
    ok!(cuCtxSynchronize());
    let (source, found) = (pattern(3 * 4 * 16, 5), to.read(session));
    for z in 0..3 {
        for y in 0..2 {
            let at = z * 64 + (y + 1) * 16 + 4;
            assert_eq!(found[z * 16 + y * 8..][..8], source[at..at + 8]);
        }
    }
    copy.srcHeight = 1;
    assert_eq!(code!(cuMemcpy3DAsync_v2(&copy, std::ptr::null_mut())), 1);
}

fn pageable_sources_are_read_during_the_call(session: &Session) {
    let _context = context(0);
    let (stream, to) = (Stream::new(true), Device::of(session, &[0; 64]));
    let mut source = [1u8; 64];
    let hold = session.hold();
    ok!(cuMemcpyHtoDAsync_v2(to.addr, source.as_ptr().cast(), 64, stream.0));
    source.fill(2);
    drop(hold);
    stream.wait();
    assert_eq!(to.read(session), [1; 64]);
}

fn pageable_sources_are_read_late_when_asked(session: &Session) {
    let _context = context(0);
    session.set("pageable_lazy", 1);
    let (stream, to) = (Stream::new(true), Device::of(session, &[0; 64]));
    let mut source = [1u8; 64];
    let hold = session.hold();
    ok!(cuMemcpyHtoDAsync_v2(to.addr, source.as_ptr().cast(), 64, stream.0));
    source.fill(2);
    drop(hold);
    stream.wait();
    assert_eq!(to.read(session), [2; 64]);
}

fn pageable_destinations_are_complete_on_return(session: &Session) {
    let _context = context(0);
    session.set("delay_us", 3000);
    let (stream, from) = (Stream::new(true), Device::of(session, &[5; 64]));
    let mut to = vec![0u8; 64];
    ok!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.addr, 64, stream.0));
    assert_eq!(to, [5; 64]);
}

fn a_synchronous_upload_may_arrive_later(session: &Session) {
    let _context = context(0);
    session.set("delay_us", 300_000);
    let to = Device::of(session, &[0; 64]);
    ok!(cuMemcpyHtoD_v2(to.addr, [1u8; 64].as_ptr().cast(), 64));
    assert_eq!(to.read(session), [0; 64], "the source was read, the copy is on its way");
    ok!(cuStreamSynchronize(std::ptr::null_mut()));
    assert_eq!(to.read(session), [1; 64]);
}

/// The batch call of CUDA 12.8.
fn batch(to: &[u64], from: &[u64], sizes: &[usize], order: u32, stream: sys::CUstream) -> (u32, usize) {
    // SAFETY: four bytes that hold one of the enumeration's values.
    let order = unsafe { std::mem::transmute::<u32, sys::CUmemcpySrcAccessOrder>(order) };
    let nowhere =
        || sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
    let mut attributes = sys::CUmemcpyAttributes {
        srcAccessOrder: order,
        srcLocHint: nowhere(),
        dstLocHint: nowhere(),
        flags: 0,
    };
    let (mut to, mut from, mut sizes) = (to.to_vec(), from.to_vec(), sizes.to_vec());
    let (mut first, mut failed) = (0, 0);
    let code = code!(cuMemcpyBatchAsync(
        to.as_mut_ptr(),
        from.as_mut_ptr(),
        sizes.as_mut_ptr(),
        sizes.len(),
        &mut attributes,
        &mut first,
        1,
        &mut failed,
        stream
    ));
    (code, failed)
}

fn a_batch_in_stream_order_sees_earlier_work(session: &Session) {
    let _context = context(0);
    let (stream, from, to) =
        (Stream::new(true), Device::of(session, &[0; 64]), Device::of(session, &[0; 64]));
    let hold = session.hold();
    ok!(cuMemsetD8Async(from.addr, 8, 64, stream.0));
    let (to_at, from_at) = ([to.addr, to.addr + 32], [from.addr, from.addr + 32]);
    assert_eq!(batch(&to_at, &from_at, &[32, 16], 1, stream.0).0, 0);
    drop(hold);
    stream.wait();
    assert_eq!(to.read(session), [[8u8; 32], std::array::from_fn(|i| if i < 16 { 8 } else { 0 })].concat());
}

fn a_batch_in_any_order_may_miss_earlier_work(session: &Session) {
    let _context = context(0);
    let (stream, from, to) =
        (Stream::new(true), Device::of(session, &[0; 64]), Device::of(session, &[1; 64]));
    let hold = session.hold();
    ok!(cuMemsetD8Async(from.addr, 8, 64, stream.0));
    assert_eq!(batch(&[to.addr], &[from.addr], &[64], 3, stream.0).0, 0);
    drop(hold);
    stream.wait();
    assert_eq!(to.read(session), [0; 64]);
}

fn a_bad_entry_of_a_batch_is_named_and_nothing_is_moved(session: &Session) {
    let _context = context(0);
    let (stream, from, to) =
        (Stream::new(true), Device::of(session, &[7; 64]), Device::of(session, &[1; 64]));
    let (to_at, from_at) = ([to.addr, to.addr + 32], [from.addr, from.addr + 33]);
    assert_eq!(batch(&to_at, &from_at, &[32, 32], 1, stream.0), (1, 1));
    stream.wait();
    assert_eq!(to.read(session), [1; 64]);
}

fn batches_have_limits(session: &Session) {
    let _context = context(0);
    let (stream, from, to) =
        (Stream::new(true), Device::of(session, &[7; 64]), Device::of(session, &[1; 64]));
    assert_eq!(batch(&[to.addr], &[from.addr], &[64], 1, std::ptr::null_mut()).0, 1, "the default stream");
    assert_eq!(batch(&[to.addr], &[from.addr], &[64], 0, stream.0).0, 1, "no order");
    assert_eq!(batch(&[], &[], &[], 1, stream.0).0, 1, "nothing");
    let many = 60_000;
    assert_eq!(batch(&vec![to.addr; many], &vec![from.addr; many], &vec![1; many], 1, stream.0).0, 1);
}

fn sets_repeat_their_element(session: &Session) {
    let _context = context(0);
    let memory = Device::of(session, &[0; 16]);
    ok!(cuMemsetD16Async(memory.addr + 2, 0x0102, 3, std::ptr::null_mut()));
    ok!(cuMemsetD32Async(memory.addr + 8, 0x0304_0506, 1, std::ptr::null_mut()));
    ok!(cuCtxSynchronize());
    assert_eq!(memory.read(session), [0, 0, 2, 1, 2, 1, 2, 1, 6, 5, 4, 3, 0, 0, 0, 0]);
    assert_eq!(code!(cuMemsetD32Async(memory.addr + 2, 0, 1, std::ptr::null_mut())), 1, "misaligned");
}

fn records_say_what_moved(session: &Session) {
    let _context = context(0);
    let (device, pinned, stream) = (Device::new(64), Pinned::new(&[1; 64]), Stream::new(true));
    let pageable = [0u8; 32];
    session.clear_records();
    ok!(cuMemcpyHtoDAsync_v2(device.addr, pinned.host.as_ptr().cast(), 64, stream.0));
    ok!(cuMemcpyHtoDAsync_v2(device.addr, pageable.as_ptr().cast(), 32, stream.0));
    ok!(cuMemcpyDtoDAsync_v2(device.addr, device.addr + 32, 32, stream.0));
    stream.wait();
    let records = session.records();
    let seen: Vec<_> = records.iter().map(|r| (r.kind, r.bytes, r.pageable_source)).collect();
    assert_eq!(
        seen,
        [
            (CopyKind::HostToDevice, 64, false),
            (CopyKind::HostToDevice, 32, true),
            (CopyKind::DeviceToDevice, 32, false)
        ]
    );
    assert_eq!(records[0].function, "cuMemcpyHtoDAsync_v2");
    assert_eq!(records[0].stream, stream.0.addr() as u64);
}
