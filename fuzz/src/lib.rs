//! The targets of `tests/faults/fuzz`, driven by libFuzzer: the same checks on inputs made from its bytes.
//!
//! proptest's generators cannot read such bytes themselves: each choice between strategies takes away half of what
//! is left, and with none left they draw numbers for ever.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests of small sizes")]
#![allow(clippy::cast_sign_loss, clippy::cast_possible_wrap, reason = "tests of small sizes")]
#![allow(dead_code, reason = "the generators are proptest's")]

#[path = "../../tests/faults/fuzz/common.rs"]
mod common;
#[path = "../../tests/faults/fuzz/configuration.rs"]
mod configuration_target;
mod decode;
#[path = "../../tests/faults/fuzz/detection.rs"]
mod detection_target;
#[path = "../../tests/faults/fuzz/device.rs"]
mod device_target;
#[path = "../../tests/faults/fuzz/jobs.rs"]
mod jobs_target;
#[path = "../../tests/faults/fuzz/sysfs.rs"]
mod sysfs_target;

use std::fmt::Debug;
use std::sync::LazyLock;

use arbitrary::Unstructured;
use proptest::test_runner::{TestCaseError, TestCaseResult};

/// Checks what the bytes make, if they make anything.
fn run<T: Clone + Debug>(input: arbitrary::Result<T>, check: impl Fn(T) -> TestCaseResult) {
    if let Ok(input) = input
        && let Err(TestCaseError::Fail(reason)) = check(input.clone())
    {
        panic!("{reason}\n{input:#?}");
    }
}

/// Shapes, strides, facts and orders.
pub fn detection(data: &[u8]) {
    run(decode::tensor(&mut Unstructured::new(data)), detection_target::check);
}

/// Geometries, slabs, slots, skips and layers.
pub fn plan_and_job(data: &[u8]) {
    run(decode::job(&mut Unstructured::new(data)), jobs_target::check);
}

/// Configuration files: the bytes are the text.
pub fn configuration(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        run(Ok(text.to_owned()), configuration_target::check);
    }
}

/// A pool's file, edited.
pub fn device_bytes(data: &[u8]) {
    static POOL: LazyLock<device_target::Bytes> = LazyLock::new(device_target::Bytes::new);
    run(decode::edit(&mut Unstructured::new(data)), |edit| POOL.check(&edit));
}

/// Attributes of a device: a line each.
pub fn sysfs(data: &[u8]) {
    static SYSFS: LazyLock<sysfs_target::Sysfs> = LazyLock::new(sysfs_target::Sysfs::new);
    if let Ok(text) = std::str::from_utf8(data) {
        run(Ok(decode::attributes(text)), |texts| SYSFS.check(&texts));
    }
}
