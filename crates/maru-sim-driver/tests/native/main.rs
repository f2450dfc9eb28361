//! The native kernel, unchanged, on the simulated driver: direct and staged, in both directions.
#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

#[path = "../../../maru-kernel-cuda/tests/common/cases.rs"]
#[allow(dead_code, reason = "shared with other tests, which use other parts")]
mod cases;
mod contexts;
mod faults;
mod ordering;
mod presence;
mod setup;
mod steps;
mod transfers;

fn main() {
    if presence::probe() {
        return;
    }
    let mut tests = transfers::tests();
    tests.extend(ordering::tests());
    tests.extend(steps::tests());
    tests.extend(contexts::tests());
    tests.extend(faults::tests());
    tests.extend(presence::tests());
    common::main(tests);
}
