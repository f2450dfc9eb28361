//! What several test files need. Addresses are written here from the documentation, not from the code.
#![allow(dead_code, clippy::unwrap_used, reason = "test helpers; each test file uses a part")]

use maru_layout::{CacheSpec, DType, LayoutError, PagedLayout, TensorDesc};

/// Byte address of element `d` of head `n` of slot `s`, by the one address formula.
pub(crate) fn address(layout: &PagedLayout, base: u64, s: u64, n: u64, d: u64) -> u64 {
    let g = layout.spec();
    base + (s / g.block_size) * g.block_stride
        + (s % g.block_size) * g.token_stride
        + n * g.head_stride
        + d * g.dtype.size()
}

pub(crate) fn dense(shape: &[i64], dtype: DType) -> TensorDesc {
    TensorDesc::contiguous(shape, dtype).unwrap()
}

pub(crate) fn bf16(shape: &[i64]) -> TensorDesc {
    dense(shape, DType::Bf16)
}

pub(crate) fn strided(shape: &[i64], strides: &[i64], dtype: DType) -> TensorDesc {
    TensorDesc::strided(shape, strides, dtype).unwrap()
}

/// Only the block size is known.
pub(crate) fn blocks_of(block_size: u64) -> CacheSpec {
    CacheSpec { block_size: Some(block_size), ..CacheSpec::default() }
}

/// Block size, KV heads and head width are known.
pub(crate) fn known(block_size: u64, heads: u64, head_size: u64) -> CacheSpec {
    CacheSpec { num_kv_heads: Some(heads), head_size: Some(head_size), ..blocks_of(block_size) }
}

pub(crate) fn axes(list: &str) -> Option<Vec<maru_layout::Axis>> {
    Some(maru_layout::Axis::parse_list(list).unwrap())
}

pub(crate) fn names(layout: &PagedLayout) -> String {
    maru_layout::Axis::join(layout.axes())
}

/// The error has this kind and its message holds every one of `parts`.
pub(crate) fn assert_error<T: std::fmt::Debug>(result: Result<T, LayoutError>, kind: &str, parts: &[&str]) {
    let error = result.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}
