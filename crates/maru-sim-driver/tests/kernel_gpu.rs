//! The device tests of maru-kernel-cuda, unchanged, on the simulated driver. They say nothing about a GPU.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../maru-kernel-cuda/tests/common/cases.rs"]
mod cases;
#[path = "../../maru-kernel-cuda/tests/gpu/edges.rs"]
mod edges;
#[path = "../../maru-kernel-cuda/tests/common/gpu.rs"]
mod gpu;
#[path = "../../maru-kernel-cuda/tests/gpu/harness.rs"]
mod harness;
#[path = "../../maru-kernel-cuda/tests/gpu/layers.rs"]
mod layers;
#[path = "../../maru-kernel-cuda/tests/gpu/layouts.rs"]
mod layouts;
#[path = "../../maru-kernel-cuda/tests/gpu/ordering.rs"]
mod ordering;
#[path = "../../maru-kernel-cuda/tests/gpu/runtime.rs"]
mod runtime;

use libtest_mimic::Arguments;

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let mut trials = harness::trials();
    match maru_sim_driver::install() {
        Ok(_) if arguments.list => {}
        Ok(_) => harness::run_on(gpu::Gpu::open().unwrap()),
        Err(reason) => {
            eprintln!("left out: {reason}");
            trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}
