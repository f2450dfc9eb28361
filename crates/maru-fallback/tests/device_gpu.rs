//! The device mover on a GPU against the oracle. Without one every trial shows as ignored and the reason is
//! printed; `MARU_REQUIRE_GPU=1` makes that a failure.
#![allow(clippy::unwrap_used, dead_code, reason = "tests; shared modules are used in part")]

#[path = "../../maru-kernel-cuda/tests/common/cases.rs"]
mod cases;
#[path = "device/gpu.rs"]
mod gpu;
#[path = "device/rig.rs"]
mod rig;
#[path = "device/spread.rs"]
mod spread;
#[path = "device/trials.rs"]
mod trials;

use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let mut arguments = Arguments::from_args();
    // One device, and memory of its own for each trial.
    arguments.test_threads = Some(1);
    let context = gpu::open(0);
    if let Err(reason) = &context {
        let required = std::env::var("MARU_REQUIRE_GPU").is_ok_and(|v| !v.is_empty() && v != "0");
        eprintln!("not available: {reason}");
        if required {
            eprintln!("MARU_REQUIRE_GPU is set");
            std::process::exit(1);
        }
    }
    let trials = trials::all()
        .into_iter()
        .map(|(name, body)| {
            let opened = context.clone();
            Trial::test(name, move || {
                let context = opened?;
                context.bind_to_thread().map_err(|e| Failed::from(e.to_string()))?;
                body(&context).map_err(Failed::from)
            })
            .with_ignored_flag(context.is_err())
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit();
}
