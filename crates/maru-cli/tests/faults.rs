//! Processes that are killed, stopped or told to end: no hang, a clear message, nothing left behind.

mod common;

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use common::{Place, alive, children, end, leftovers, signal, start, until};
use rustix::process::Signal;

/// A run that is storing slowly; its producer's process id.
fn slow(place: &Place, more: &[&str]) -> (Child, u32) {
    let arguments = [&["--tokens", "2000", "--test-pause", "400", "--json"], more].concat();
    let run = start(&mut place.p2p(&arguments));
    let pid = run.id();
    let producer = until("the producer starts", || children(pid).first().copied());
    (run, producer)
}

#[test]
fn a_killed_producer_is_reported() {
    let place = Place::new();
    let (run, producer) = slow(&place, &[]);
    signal(producer, Signal::KILL);
    let begun = Instant::now();
    let run = end(run);
    let (kind, message) = run.error(1);
    assert_eq!(kind, "process");
    assert!(message.contains("the producer ended") && message.contains("SIGKILL"), "{message}");
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(leftovers(run.pid).len(), 0);
}

#[test]
fn a_killed_consumer_is_reported() {
    let place = Place::new();
    let run = start(&mut place.p2p(&["--tokens", "1024", "--test-pause", "150", "--json"]));
    let pid = run.id();
    let consumer = until("the consumer starts", || children(pid).get(1).copied());
    signal(consumer, Signal::KILL);
    let run = end(run);
    let (kind, message) = run.error(1);
    assert_eq!(kind, "process");
    assert!(message.contains("the consumer ended"), "{message}");
    assert!(children(pid).is_empty());
    assert_eq!(leftovers(run.pid).len(), 0);
}

#[test]
fn a_producer_that_dies_under_the_consumer_is_reported() {
    let place = Place::new();
    let run = start(&mut place.p2p(&["--tokens", "1024", "--test-pause", "150", "--json"]));
    let pid = run.id();
    let both = until("both run", || Some(children(pid)).filter(|c| c.len() == 2));
    signal(both[0], Signal::KILL);
    let (kind, message) = end(run).error(1);
    assert_eq!(kind, "process");
    assert!(message.contains("the producer ended"), "{message}");
    assert!(until("the consumer ends", || (!alive(both[1])).then_some(true)));
    assert_eq!(leftovers(pid).len(), 0);
}

#[test]
fn a_stopped_producer_is_a_time_out() {
    let place = Place::new();
    let (run, producer) = slow(&place, &["--timeout", "1"]);
    signal(producer, Signal::STOP);
    let run = end(run);
    let (kind, message) = run.error(1);
    assert_eq!(kind, "timeout");
    assert!(message.contains("the producer said nothing for 1 s"), "{message}");
    assert!(!alive(producer));
    assert_eq!(leftovers(run.pid).len(), 0);
}

#[test]
fn a_slow_producer_is_no_time_out() {
    // Eight chunks 400 ms apart take longer than the time-out, but never rest that long.
    let place = Place::new();
    let (run, _) = slow(&place, &["--timeout", "2"]);
    assert_eq!(end(run).json()["verified"], true);
}

fn ends_in_order(number: Signal, code: i32, word: &str) {
    let place = Place::new();
    let (run, producer) = slow(&place, &[]);
    let pid = run.id();
    until("the pool is made", || (!leftovers(pid).is_empty()).then_some(()));
    signal(pid, number);
    let run = end(run);
    let (kind, message) = run.error(code);
    assert_eq!(kind, "interrupted");
    assert!(message.contains(word), "{message}");
    assert!(!alive(producer));
    assert_eq!(leftovers(pid).len(), 0);
}

#[test]
fn ctrl_c_ends_both_and_removes_the_pool() {
    ends_in_order(Signal::INT, 130, "SIGINT");
}

#[test]
fn sigterm_ends_both_and_removes_the_pool() {
    ends_in_order(Signal::TERM, 143, "SIGTERM");
}

#[test]
fn sigterm_under_the_consumer_removes_the_pool() {
    let place = Place::new();
    let run = start(&mut place.p2p(&["--tokens", "1024", "--test-pause", "150"]));
    let pid = run.id();
    let both = until("both run", || Some(children(pid)).filter(|c| c.len() == 2));
    signal(pid, Signal::TERM);
    let run = end(run);
    assert_eq!((run.code, run.out.as_str()), (Some(143), ""), "{run:?}");
    assert!(run.err.contains("error: interrupted by SIGTERM"), "{}", run.err);
    assert!(both.iter().all(|pid| !alive(*pid)));
    assert_eq!(leftovers(pid).len(), 0);
}

#[test]
fn children_of_a_killed_parent_end_and_remove_the_pool() {
    let place = Place::new();
    let (mut run, producer) = slow(&place, &[]);
    let pid = run.id();
    until("the pool is made", || (!leftovers(pid).is_empty()).then_some(()));
    // From here on the producer has opened it, so that it can remove it.
    std::thread::sleep(Duration::from_millis(300));
    run.kill().expect("kill");
    run.wait().expect("wait");
    until("the producer ends", || (!alive(producer)).then_some(()));
    assert_eq!(leftovers(pid).len(), 0);
}

#[test]
fn a_producer_alone_that_is_interrupted_removes_its_unfinished_pool() {
    let place = Place::new();
    let pool = place.path("pool");
    for (number, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let arguments =
            ["--role", "producer", "--pool", &pool, "--tokens", "2000", "--test-pause", "300", "--json"];
        let run = start(&mut place.p2p(&arguments));
        until("the pool is made", || Path::new(&pool).exists().then_some(()));
        std::thread::sleep(Duration::from_millis(200));
        signal(run.id(), number);
        assert_eq!(end(run).error(code).0, "interrupted");
        assert!(!Path::new(&pool).exists());
    }
}

#[test]
fn a_consumer_alone_that_is_interrupted_says_so() {
    let place = Place::new();
    let pool = place.path("pool");
    let run = start(&mut place.p2p(&["--role", "consumer", "--pool", &pool, "--json"]));
    std::thread::sleep(Duration::from_millis(400));
    signal(run.id(), Signal::INT);
    assert_eq!(end(run).error(130).0, "interrupted");
}

#[test]
fn the_pool_of_a_killed_producer_is_not_taken_for_a_whole_one() {
    let place = Place::new();
    let pool = place.path("pool");
    let arguments = ["--role", "producer", "--pool", &pool, "--tokens", "2000", "--test-pause", "300"];
    let mut run = start(&mut place.p2p(&arguments));
    until("the pool is made", || Path::new(&pool).exists().then_some(()));
    std::thread::sleep(Duration::from_millis(900));
    run.kill().expect("kill");
    run.wait().expect("wait");
    let consumer = ["--role", "consumer", "--pool", &pool, "--tokens", "2000", "--json", "--timeout", "1"];
    let run = place.run(&consumer);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert_eq!(run.json()["cache_hit"], false, "{run:?}");
    // A new producer takes the pool over.
    let run = place.run(&["--role", "producer", "--pool", &pool, "--tokens", "2000"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(place.run(&consumer).json()["verified"], true);
}

#[test]
fn two_producers_of_one_pool_do_not_mix() {
    let place = Place::new();
    let pool = place.path("pool");
    let arguments =
        ["--role", "producer", "--pool", &pool, "--tokens", "2000", "--test-pause", "300", "--json"];
    let first = start(&mut place.p2p(&arguments));
    until("the pool is made", || Path::new(&pool).exists().then_some(()));
    std::thread::sleep(Duration::from_millis(300));
    let second = place.run(&["--role", "producer", "--pool", &pool, "--tokens", "2000", "--force", "--json"]);
    assert_eq!(second.error(1).0, "busy");
    assert_eq!(end(first).code, Some(0));
}
