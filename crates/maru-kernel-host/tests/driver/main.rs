//! The code around the kernel – contexts, streams, events, buffers, errors – on a stand-in for the driver
//! (`host/fake_driver.cpp`): the device tests of maru-kernel-cuda, and every driver call made to fail. None of
//! this says anything about a GPU.
//!
//! The process starts itself again with the stand-in in its library path.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../../maru-kernel-cuda/tests/common/cases.rs"]
mod cases;
#[path = "../../../maru-kernel-cuda/tests/gpu/edges.rs"]
mod edges;
mod faults;
#[path = "../../../maru-kernel-cuda/tests/common/gpu.rs"]
mod gpu;
#[path = "../../../maru-kernel-cuda/tests/gpu/harness.rs"]
mod harness;
#[path = "../../../maru-kernel-cuda/tests/gpu/layouts.rs"]
mod layouts;
#[path = "../../../maru-kernel-cuda/tests/gpu/ordering.rs"]
mod ordering;
mod presence;
#[path = "../../../maru-kernel-cuda/tests/gpu/runtime.rs"]
mod runtime;

use std::process::{Command, ExitCode};

use libtest_mimic::Arguments;

const STAND_IN: Option<&str> = option_env!("MARU_STAND_IN_DRIVER");
const STARTED_AGAIN: &str = "MARU_TEST_STARTED_AGAIN";

fn main() -> ExitCode {
    // A trial that needs a process of its own.
    if let Ok(what) = std::env::var(presence::PROBE) {
        return presence::probe(&what);
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let mut trials = harness::trials();
    trials.extend(presence::trials());
    trials.extend(faults::trials());
    let Some(stand_in) = STAND_IN else {
        eprintln!("no C++ compiler, so there is no stand-in for the driver");
        let trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
        return libtest_mimic::run(&arguments, trials).exit_code();
    };
    if std::env::var_os(STARTED_AGAIN).is_none() {
        let program = std::env::current_exe().unwrap();
        let mut again = Command::new(program);
        again.args(std::env::args_os().skip(1)).env("LD_LIBRARY_PATH", stand_in).env(STARTED_AGAIN, "1");
        let status = again.status().unwrap();
        return if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    if !arguments.list {
        let gpu = gpu::Gpu::open().unwrap();
        assert_eq!(gpu.context.name().unwrap(), "stand-in", "another driver library was found first");
        harness::run_on(gpu);
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
