//! The kernel on a device against the oracle. Without a usable GPU every trial shows as ignored and the
//! reason is printed; `MARU_REQUIRE_GPU=1` makes that a failure.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../common/cases.rs"]
mod cases;
mod edges;
#[path = "../common/gpu.rs"]
mod gpu;
mod layouts;
mod ordering;
mod runtime;

use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Failed, Trial};

use gpu::Gpu;

type Body = fn(&Gpu) -> Result<(), Failed>;

/// The device, opened once. A `OnceLock` would be dropped never, which is what a test process wants.
static GPU: OnceLock<Arc<Gpu>> = OnceLock::new();

fn main() {
    let mut arguments = Arguments::from_args();
    // One device: trials that look at timing would disturb each other.
    arguments.test_threads = Some(1);
    let opened = Gpu::open();
    let mut trials = Vec::new();
    for (name, body) in edges::TRIALS.into_iter().chain(ordering::TRIALS).chain(runtime::TRIALS) {
        trials.push(trial(name.into(), body));
    }
    trials.extend(layouts::trials());
    match opened {
        Ok(gpu) => {
            eprintln!("image: {}", gpu.kernel.image());
            let _ = GPU.set(Arc::new(gpu));
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

fn trial(name: String, body: impl FnOnce(&Gpu) -> Result<(), Failed> + Send + 'static) -> Trial {
    Trial::test(name, move || {
        let gpu = GPU.get().ok_or("no device")?;
        gpu.bind();
        body(gpu)
    })
}

fn text(error: impl std::fmt::Display) -> Failed {
    Failed::from(error.to_string())
}
