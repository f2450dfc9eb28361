//! Stream capture and graphs.

use cudarc::driver::sys::{self, CUstreamCaptureMode, CUstreamCaptureStatus};
use maru_sim_driver::Session;

use crate::common::{Device, Event, Stream, Test, context};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        captured_work_runs_with_the_graph_only,
        a_captured_event_brings_another_stream_in,
        a_stream_that_does_not_come_back_spoils_the_graph,
        waiting_inside_a_capture_spoils_it,
        unsafe_calls_spoil_a_global_capture_of_any_thread,
        relaxed_captures_are_left_alone,
        the_default_stream_minds_captures_of_blocking_streams,
        events_of_a_capture_cannot_be_asked,
        outside_work_cannot_be_waited_for_inside,
    ]
}

fn begin(stream: &Stream, mode: CUstreamCaptureMode) {
    ok!(cuStreamBeginCapture_v2(stream.0, mode));
}

fn end(stream: &Stream) -> (u32, sys::CUgraph) {
    let mut graph = std::ptr::null_mut();
    let code = code!(cuStreamEndCapture(stream.0, &mut graph));
    (code, graph)
}

fn run(graph: sys::CUgraph, stream: &Stream, times: usize) {
    let mut exec = std::ptr::null_mut();
    ok!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    for _ in 0..times {
        ok!(cuGraphLaunch(exec, stream.0));
    }
    stream.wait();
    ok!(cuGraphExecDestroy(exec));
    ok!(cuGraphDestroy(graph));
}

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

fn captured_work_runs_with_the_graph_only(session: &Session) {
    let _context = context(0);
    let (stream, memory) = (Stream::new(true), Device::of(session, &[0; 4]));
    begin(&stream, GLOBAL);
    ok!(cuMemsetD8Async(memory.addr, 3, 4, stream.0));
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    ok!(cuStreamIsCapturing(stream.0, &mut status));
    assert_eq!(status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    let (code, graph) = end(&stream);
    assert_eq!((code, memory.read(session)), (0, vec![0; 4]));
    run(graph, &stream, 2);
    assert_eq!(memory.read(session), [3; 4]);
    assert_eq!((session.census().graphs, session.census().graph_execs), (0, 0));
}

fn a_captured_event_brings_another_stream_in(session: &Session) {
    let _context = context(0);
    let (a, b, memory) = (Stream::new(true), Stream::new(true), Device::of(session, &[0; 8]));
    let (fork, join) = (Event::new(), Event::new());
    begin(&a, GLOBAL);
    ok!(cuMemsetD8Async(memory.addr, 1, 8, a.0));
    ok!(cuEventRecord(fork.0, a.0));
    ok!(cuStreamWaitEvent(b.0, fork.0, 0));
    ok!(cuMemsetD8Async(memory.addr, 2, 4, b.0));
    ok!(cuEventRecord(join.0, b.0));
    ok!(cuStreamWaitEvent(a.0, join.0, 0));
    ok!(cuMemsetD8Async(memory.addr, 3, 1, a.0));
    let (code, graph) = end(&a);
    assert_eq!(code, 0);
    run(graph, &a, 1);
    assert_eq!(memory.read(session), [3, 2, 2, 2, 1, 1, 1, 1]);
}

fn a_stream_that_does_not_come_back_spoils_the_graph(session: &Session) {
    let _context = context(0);
    let (a, b, memory) = (Stream::new(true), Stream::new(true), Device::of(session, &[0; 4]));
    let fork = Event::new();
    begin(&a, GLOBAL);
    ok!(cuEventRecord(fork.0, a.0));
    ok!(cuStreamWaitEvent(b.0, fork.0, 0));
    ok!(cuMemsetD8Async(memory.addr, 2, 4, b.0));
    assert_eq!(end(&a).0, 904);
    ok!(cuMemsetD8Async(memory.addr, 4, 4, b.0));
    b.wait();
    assert_eq!(memory.read(session), [4; 4], "the stream works again");
}

fn waiting_inside_a_capture_spoils_it(_: &Session) {
    let _context = context(0);
    let stream = Stream::new(true);
    begin(&stream, RELAXED);
    assert_eq!(code!(cuStreamSynchronize(stream.0)), 900);
    assert_eq!(end(&stream).0, 901);
}

fn unsafe_calls_spoil_a_global_capture_of_any_thread(_: &Session) {
    let context = context(0);
    let stream = Stream::new(true);
    begin(&stream, GLOBAL);
    let other = std::thread::spawn(move || {
        context.bind_to_thread().unwrap();
        let mut addr = 0;
        let code = code!(cuMemAlloc_v2(&mut addr, 64));
        (code, context)
    });
    let (code, _context) = other.join().unwrap();
    assert_eq!(code, 900);
    assert_eq!(end(&stream).0, 901);
}

fn relaxed_captures_are_left_alone(_: &Session) {
    let _context = context(0);
    let stream = Stream::new(true);
    begin(&stream, RELAXED);
    let memory = Device::new(64);
    ok!(cuMemsetD8Async(memory.addr, 2, 4, stream.0));
    let (code, graph) = end(&stream);
    assert_eq!(code, 0);
    run(graph, &stream, 1);
}

fn the_default_stream_minds_captures_of_blocking_streams(session: &Session) {
    let _context = context(0);
    let memory = Device::of(session, &[0; 4]);
    let stream = Stream::new(false);
    begin(&stream, RELAXED);
    assert_eq!(code!(cuMemsetD8Async(memory.addr, 2, 4, std::ptr::null_mut())), 906);
    assert_eq!(end(&stream).0, 901);
    let stream = Stream::new(true);
    begin(&stream, RELAXED);
    ok!(cuMemsetD8Async(memory.addr, 2, 4, std::ptr::null_mut()));
    let (code, graph) = end(&stream);
    assert_eq!(code, 0);
    ok!(cuGraphDestroy(graph));
}

fn events_of_a_capture_cannot_be_asked(_: &Session) {
    let _context = context(0);
    let (stream, event) = (Stream::new(true), Event::new());
    begin(&stream, RELAXED);
    ok!(cuEventRecord(event.0, stream.0));
    let (code, graph) = end(&stream);
    assert_eq!(code, 0);
    assert_eq!(code!(cuEventQuery(event.0)), 907);
    assert_eq!(code!(cuEventSynchronize(event.0)), 907);
    ok!(cuEventRecord(event.0, stream.0));
    ok!(cuEventSynchronize(event.0));
    ok!(cuGraphDestroy(graph));
}

fn outside_work_cannot_be_waited_for_inside(_: &Session) {
    let _context = context(0);
    let (a, b, event) = (Stream::new(true), Stream::new(true), Event::new());
    ok!(cuEventRecord(event.0, b.0));
    begin(&a, RELAXED);
    assert_eq!(code!(cuStreamWaitEvent(a.0, event.0, 0)), 905);
    assert_eq!(end(&a).0, 901);
}
