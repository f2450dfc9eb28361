//! Scripted faults, fatal errors, the census.

use maru_sim_driver::Session;

use crate::common::{Device, Event, Stream, Test, context, leaves_nothing};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        the_nth_call_fails_and_does_nothing,
        all_later_calls_fail_when_asked,
        work_fails_later_when_asked,
        after_a_fatal_error_everything_says_so_and_nothing_hangs,
        the_other_device_is_not_concerned,
        the_census_counts_what_lives,
        a_session_starts_clean,
        functions_can_be_missing,
    ]
}

fn the_nth_call_fails_and_does_nothing(session: &Session) {
    let _context = context(0);
    session.fail("cuMemAlloc", 2, 2);
    let _first = Device::new(64);
    let mut addr = 0;
    assert_eq!(session.faults_left(), 1);
    assert_eq!(code!(cuMemAlloc_v2(&mut addr, 64)), 2);
    assert_eq!((addr, session.faults_left()), (0, 0));
    let _third = Device::new(64);
    assert_eq!(session.calls("cuMemAlloc"), 3);
    assert_eq!(session.census().allocations, 2);
}

fn all_later_calls_fail_when_asked(session: &Session) {
    let _context = context(0);
    session.fail_from("cuStreamCreate", 2, 999);
    let _first = Stream::new(true);
    let mut stream = std::ptr::null_mut();
    for _ in 0..3 {
        assert_eq!(code!(cuStreamCreate(&mut stream, 0)), 999);
    }
    session.clear_faults();
    let _last = Stream::new(true);
}

fn work_fails_later_when_asked(session: &Session) {
    let context = context(0);
    let (stream, memory) = (Stream::new(true), Device::of(session, &[0; 4]));
    session.fail_later("cuMemsetD8Async", 1, 719);
    ok!(cuMemsetD8Async(memory.addr, 1, 4, stream.0));
    assert_eq!(code!(cuStreamSynchronize(stream.0)), 719);
    assert_eq!(memory.read(session), [0; 4]);
    session.poison(0, 0);
    drop((stream, memory, context));
}

fn after_a_fatal_error_everything_says_so_and_nothing_hangs(session: &Session) {
    let context = context(0);
    let (stream, event, memory) = (Stream::new(true), Event::new(), Device::new(4));
    ok!(cuEventRecord(event.0, stream.0));
    session.poison(0, 700);
    assert_eq!(code!(cuEventQuery(event.0)), 700);
    assert_eq!(code!(cuEventSynchronize(event.0)), 700);
    assert_eq!(code!(cuStreamSynchronize(stream.0)), 700);
    assert_eq!(code!(cuMemsetD8Async(memory.addr, 1, 4, stream.0)), 700);
    assert_eq!(code!(cuMemFree_v2(memory.addr)), 700);
    assert_eq!(code!(cuEventRecord(event.0, stream.0)), 700);
    assert_eq!(code!(cuCtxSynchronize()), 700);
    session.poison(0, 0);
    drop((stream, event, memory, context));
}

fn the_other_device_is_not_concerned(session: &Session) {
    let (a, b) = (context(0), context(1));
    session.poison(0, 700);
    leaves_nothing(session, || {
        let (stream, memory) = (Stream::new(true), Device::new(4));
        ok!(cuMemsetD8Async(memory.addr, 1, 4, stream.0));
        stream.wait();
    });
    session.poison(0, 0);
    drop((a, b));
}

fn the_census_counts_what_lives(session: &Session) {
    let _context = context(0);
    let empty = session.census();
    let things = (Stream::new(true), Event::new(), Device::new(100), Device::new(28));
    let full = session.census();
    assert_eq!((full.streams, full.events, full.allocations, full.bytes), (1, 1, 2, 128));
    assert_eq!((empty.contexts, full.contexts), (1, 1));
    drop(things);
    assert_eq!(session.census(), empty);
}

fn a_session_starts_clean(session: &Session) {
    assert_eq!(session.calls("cuMemAlloc"), 0);
    assert_eq!(session.records(), []);
    assert_eq!(session.get("delay_us"), 0);
    let census = session.census();
    assert_eq!((census.contexts, census.allocations, census.streams, census.events), (0, 0, 0, 0));
}

/// In a process of its own, since a library is loaded once.
fn functions_can_be_missing(_: &Session) {
    const ASKED: &str = "MARU_SIM_TEST_MISSING";
    if std::env::var_os(ASKED).is_some() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let wrong = maru_sim_driver::write_library(directory.path(), &["cuNoSuchThing"]).unwrap_err();
    assert_eq!(wrong.kind(), "invalid_argument");
    let child = |missing: &str| {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["functions_are_found_by_name_and_version", "--exact"])
            .env(maru_sim_driver::VARIABLE, format!("devices=1;missing={missing}"))
            .env(ASKED, "1")
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert!(child("cuMemsetD8Async").0);
    let (success, text) = child("cuMemcpyBatchAsync_v2+cuMemcpyBatchAsync");
    assert!(!success && text.contains("cuMemcpyBatchAsync"), "{text}");
}
