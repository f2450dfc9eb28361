//! Work is done later, in order, and streams wait for each other exactly where the driver says.

use std::time::{Duration, Instant};

use maru_sim_driver::Session;

use crate::common::{Device, Event, Pinned, Stream, Test, context, pattern};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        a_queued_copy_has_not_happened_yet,
        work_of_one_stream_runs_in_order,
        an_event_is_ready_when_what_came_before_is,
        a_stream_waits_for_another_ones_event,
        streams_without_an_event_between_them_do_not_wait,
        the_default_stream_waits_for_blocking_streams_and_they_for_it,
        non_blocking_streams_ignore_the_default_stream,
        elapsed_time_is_that_between_the_events,
        a_destroyed_stream_finishes_its_work,
        destroyed_handles_are_refused,
        a_delay_holds_up_the_work_not_the_caller,
        values_in_memory_let_streams_wait,
    ]
}

fn a_queued_copy_has_not_happened_yet(session: &Session) {
    let _context = context(0);
    let (from, to) = (Pinned::new(&pattern(256, 1)), Device::of(session, &[0; 256]));
    let stream = Stream::new(true);
    let hold = session.hold();
    ok!(cuMemcpyHtoDAsync_v2(to.addr, from.host.as_ptr().cast(), 256, stream.0));
    assert_eq!(code!(cuStreamQuery(stream.0)), 600);
    assert_eq!(to.read(session), [0; 256]);
    drop(hold);
    stream.wait();
    assert_eq!(code!(cuStreamQuery(stream.0)), 0);
    assert_eq!(to.read(session), pattern(256, 1));
}

fn work_of_one_stream_runs_in_order(session: &Session) {
    let _context = context(0);
    let to = Device::of(session, &[0; 4]);
    let stream = Stream::new(true);
    for value in 0..100u8 {
        ok!(cuMemsetD8Async(to.addr, value, 4, stream.0));
    }
    stream.wait();
    assert_eq!(to.read(session), [99; 4]);
}

fn an_event_is_ready_when_what_came_before_is(session: &Session) {
    let _context = context(0);
    let to = Device::new(4);
    let (stream, event) = (Stream::new(true), Event::new());
    assert_eq!(code!(cuEventQuery(event.0)), 0, "never recorded");
    let hold = session.hold();
    ok!(cuMemsetD8Async(to.addr, 7, 4, stream.0));
    ok!(cuEventRecord(event.0, stream.0));
    assert_eq!(code!(cuEventQuery(event.0)), 600);
    drop(hold);
    ok!(cuEventSynchronize(event.0));
    assert_eq!(to.read(session), [7; 4]);
    assert_eq!(code!(cuEventQuery(event.0)), 0);
}

fn a_stream_waits_for_another_ones_event(session: &Session) {
    let _context = context(0);
    session.set("delay_us", 2000);
    let (a, b) = (Stream::new(true), Stream::new(true));
    let memory = Device::of(session, &[0; 4]);
    let event = Event::new();
    for _ in 0..5 {
        ok!(cuMemsetD8Async(memory.addr, 1, 4, a.0));
    }
    ok!(cuEventRecord(event.0, a.0));
    ok!(cuStreamWaitEvent(b.0, event.0, 0));
    ok!(cuMemsetD8Async(memory.addr, 2, 4, b.0));
    b.wait();
    assert_eq!(memory.read(session), [2; 4]);
    a.wait();
    assert_eq!(memory.read(session), [2; 4], "b came last");
}

fn streams_without_an_event_between_them_do_not_wait(session: &Session) {
    let _context = context(0);
    let (a, b) = (Stream::new(true), Stream::new(true));
    let word = Device::of(session, &[0; 8]);
    // a waits for what only b writes.
    ok!(cuStreamWaitValue32_v2(a.0, word.addr, 1, 1));
    ok!(cuStreamWriteValue32_v2(b.0, word.addr, 1, 0));
    a.wait();
    b.wait();
}

fn the_default_stream_waits_for_blocking_streams_and_they_for_it(session: &Session) {
    let _context = context(0);
    session.set("delay_us", 3000);
    let stream = Stream::new(false);
    let memory = Device::of(session, &[0; 4]);
    for _ in 0..4 {
        ok!(cuMemsetD8Async(memory.addr, 1, 4, stream.0));
    }
    ok!(cuMemsetD8Async(memory.addr, 2, 4, std::ptr::null_mut()));
    ok!(cuMemsetD8Async(memory.addr, 3, 4, stream.0));
    ok!(cuCtxSynchronize());
    assert_eq!(memory.read(session), [3; 4]);
    ok!(cuMemsetD8Async(memory.addr, 4, 4, stream.0));
    ok!(cuStreamSynchronize(std::ptr::null_mut()));
    assert_eq!(code!(cuStreamQuery(std::ptr::null_mut())), 0);
    stream.wait();
}

fn non_blocking_streams_ignore_the_default_stream(session: &Session) {
    let _context = context(0);
    let stream = Stream::new(true);
    let word = Device::of(session, &[0; 8]);
    ok!(cuStreamWaitValue32_v2(std::ptr::null_mut(), word.addr, 5, 0));
    ok!(cuStreamWriteValue32_v2(stream.0, word.addr, 6, 0));
    ok!(cuStreamSynchronize(std::ptr::null_mut()));
    stream.wait();
}

fn elapsed_time_is_that_between_the_events(session: &Session) {
    let _context = context(0);
    session.set("delay_us", 20_000);
    let stream = Stream::new(true);
    let (first, last) = (Event::new(), Event::new());
    let mut ms = 0.0;
    assert_eq!(code!(cuEventElapsedTime(&mut ms, first.0, last.0)), 400, "not recorded");
    ok!(cuEventRecord(first.0, stream.0));
    ok!(cuEventRecord(last.0, stream.0));
    assert_eq!(code!(cuEventElapsedTime(&mut ms, first.0, last.0)), 600);
    stream.wait();
    ok!(cuEventElapsedTime(&mut ms, first.0, last.0));
    assert!((19.0..2000.0).contains(&ms), "{ms}");
}

fn a_destroyed_stream_finishes_its_work(session: &Session) {
    let _context = context(0);
    let memory = Device::of(session, &[0; 4]);
    let stream = Stream::new(true);
    let hold = session.hold();
    ok!(cuMemsetD8Async(memory.addr, 9, 4, stream.0));
    drop(stream);
    assert_eq!(session.census().streams, 0);
    drop(hold);
    ok!(cuCtxSynchronize());
    assert_eq!(memory.read(session), [9; 4]);
}

fn destroyed_handles_are_refused(_: &Session) {
    let _context = context(0);
    let (stream, event) = (Stream::new(true), Event::new());
    let (s, e) = (stream.0, event.0);
    drop((stream, event));
    assert_eq!(code!(cuStreamSynchronize(s)), 400);
    assert_eq!(code!(cuStreamDestroy_v2(s)), 400);
    assert_eq!(code!(cuEventQuery(e)), 400);
    assert_eq!(code!(cuEventRecord(e, std::ptr::null_mut())), 400);
}

fn a_delay_holds_up_the_work_not_the_caller(session: &Session) {
    let _context = context(0);
    session.set("delay_us", 400_000);
    let (stream, memory) = (Stream::new(true), Device::new(4));
    let started = Instant::now();
    ok!(cuMemsetD8Async(memory.addr, 9, 4, stream.0));
    let called = started.elapsed();
    stream.wait();
    assert!(called < Duration::from_millis(350), "{called:?}");
    assert!(started.elapsed() >= Duration::from_millis(400));
}

fn values_in_memory_let_streams_wait(session: &Session) {
    let _context = context(0);
    let (stream, word) = (Stream::new(true), Device::of(session, &[0; 8]));
    let memory = Device::of(session, &[0; 4]);
    ok!(cuStreamWaitValue32_v2(stream.0, word.addr, 3, 0));
    ok!(cuMemsetD8Async(memory.addr, 1, 4, stream.0));
    assert!(session.poke(word.addr, &2u32.to_ne_bytes()));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(memory.read(session), [0; 4]);
    assert!(session.poke(word.addr, &4u32.to_ne_bytes()));
    stream.wait();
    assert_eq!(memory.read(session), [1; 4]);
}
