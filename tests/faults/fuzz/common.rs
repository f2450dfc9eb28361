//! What the targets share: edges of numbers, the form of a refusal, a place for files.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;

thread_local! {
    static ACCEPTED: Cell<u64> = const { Cell::new(0) };
}

/// Counts an input that was accepted and looked into; a target that accepts none tests little.
pub(crate) fn accept() {
    ACCEPTED.set(ACCEPTED.get() + 1);
}

/// Inputs of this thread's target that were accepted so far.
pub(crate) fn accepted() -> u64 {
    ACCEPTED.get()
}

/// Numbers where things go wrong.
pub(crate) const EDGES: [i64; 16] = [
    0,
    -1,
    i64::MIN,
    i64::MAX,
    i64::MAX - 1,
    1 << 31,
    (1 << 31) - 1,
    (1 << 31) + 1,
    1 << 32,
    (1 << 32) - 1,
    1 << 40,
    1 << 52,
    1 << 61,
    1 << 62,
    4096,
    4095,
];

/// Small numbers, usual ones, and those where things go wrong.
pub(crate) fn edge() -> impl Strategy<Value = i64> {
    prop_oneof![
        10 => 1i64..5,
        4 => select(&[8i64, 16, 32, 64, 128, 256, 576][..]),
        3 => 1i64..300,
        2 => select(EDGES.to_vec()),
        1 => any::<i64>(),
    ]
}

/// That a refusal has words of bearable length, and a kind as documented.
pub(crate) fn worded(text: &str, kind: &str) -> TestCaseResult {
    prop_assert!(!text.is_empty() && text.len() < 20_000, "{} bytes of text", text.len());
    prop_assert!(!kind.is_empty() && kind.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'));
    Ok(())
}

/// A directory in memory where there is one.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}
