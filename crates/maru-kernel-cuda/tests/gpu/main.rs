//! The kernel on a device against the oracle. Without a usable GPU every trial shows as ignored and the
//! reason is printed; `MARU_REQUIRE_GPU=1` makes that a failure.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../common/cases.rs"]
mod cases;
mod edges;
#[path = "../common/gpu.rs"]
mod gpu;
mod harness;
mod layers;
mod layouts;
mod ordering;
mod runtime;

use libtest_mimic::Arguments;

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let mut trials = harness::trials();
    match gpu::Gpu::open() {
        Ok(gpu) => {
            eprintln!("image: {}", gpu.kernel.image());
            harness::run_on(gpu);
        }
        Err(error) => {
            let required = std::env::var("MARU_REQUIRE_GPU").is_ok_and(|v| !v.is_empty() && v != "0");
            eprintln!("not available: {error}");
            if required {
                eprintln!("MARU_REQUIRE_GPU is set");
                std::process::exit(1);
            }
            trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}
