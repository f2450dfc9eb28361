//! Open-ended inputs: whatever is typed, read from a device or found in sysfs, the answer is right or an error.
//!
//! Each target runs a few hundred inputs as an ordinary test. `MARU_FUZZ_SECONDS=600` makes it go on for so long
//! with ever new seeds; the number of inputs is printed. `fuzz/` has the same targets under libFuzzer.

mod common;
mod configuration;
mod detection;
mod device;
mod jobs;
mod sysfs;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use proptest::strategy::Strategy;
use proptest::test_runner::{Config as Budget, TestCaseResult, TestError, TestRunner};

use crate::harness::Test;

pub(crate) fn tests() -> Vec<Test> {
    tests![plain: fuzz_detection, fuzz_plan_and_job, fuzz_configuration, fuzz_device_bytes, fuzz_sysfs;]
}

fn fuzz_detection() {
    campaign("detection", &detection::inputs(), detection::check);
}

fn fuzz_plan_and_job() {
    campaign("plan and job", &jobs::inputs(), jobs::check);
}

fn fuzz_configuration() {
    campaign("configuration", &configuration::inputs(), configuration::check);
}

fn fuzz_device_bytes() {
    let pool = device::Bytes::new();
    campaign("device header and directory", &device::inputs(), |edit| pool.check(&edit));
}

fn fuzz_sysfs() {
    let sysfs = sysfs::Sysfs::new();
    campaign("sysfs", &sysfs::inputs(), |texts| sysfs.check(&texts));
}

/// Runs a target for the time asked for, at least once.
fn campaign<S: Strategy>(name: &str, inputs: &S, target: impl Fn(S::Value) -> TestCaseResult) {
    let seconds = std::env::var("MARU_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(0);
    let (begun, executions) = (Instant::now(), AtomicU64::new(0));
    loop {
        let budget = Budget { cases: 300, failure_persistence: None, ..Budget::default() };
        let outcome = TestRunner::new(budget).run(inputs, |input| {
            executions.fetch_add(1, Ordering::Relaxed);
            target(input)
        });
        match outcome {
            Ok(()) => {}
            Err(TestError::Fail(reason, input)) => panic!("{name}: {reason}\n{input:#?}"),
            Err(TestError::Abort(reason)) => panic!("{name}: {reason}"),
        }
        if begun.elapsed() >= Duration::from_secs(seconds) {
            break;
        }
    }
    assert!(common::accepted() > 0, "{name}: no input was accepted");
    if seconds > 0 {
        let (all, accepted) = (executions.load(Ordering::Relaxed), common::accepted());
        let seconds = begun.elapsed().as_secs();
        eprintln!("fuzz: {name}: {all} inputs ({accepted} accepted) in {seconds} s, no finding");
    }
}
