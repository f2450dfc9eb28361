//! The kernel's source on the host against the oracle. Without a C++ compiler every trial shows as ignored,
//! with the reason; `MARU_REQUIRE_CXX=1` makes that a failure already when the crate is built.
#![allow(clippy::unwrap_used, reason = "tests")]

mod batches;
#[path = "../../../maru-kernel-cuda/tests/common/cases.rs"]
mod cases;
mod edges;
mod layouts;
mod memory;
mod strides;

use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    trials.extend(layouts::trials());
    trials.extend(edges::trials());
    trials.extend(batches::trials());
    trials.push(Trial::test("random_strides", strides::random_strides));
    if let Some(reason) = maru_kernel_host::MISSING {
        eprintln!("no C++ compiler, so the kernel's source was not compiled: {reason}");
        trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn text(error: impl std::fmt::Display) -> Failed {
    Failed::from(error.to_string())
}
