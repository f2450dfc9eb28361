//! The simulator itself: does it behave as the driver's documentation and the measurements say?
#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

mod abi;
mod copies;
mod devices;
mod faults;
mod graphs;
mod memory;
mod streams;

fn main() {
    let mut tests = abi::tests();
    tests.extend(devices::tests());
    tests.extend(streams::tests());
    tests.extend(memory::tests());
    tests.extend(copies::tests());
    tests.extend(graphs::tests());
    tests.extend(faults::tests());
    common::main(tests);
}
