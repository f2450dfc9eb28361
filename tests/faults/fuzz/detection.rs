//! Detection: shapes, strides, facts and orders.

use maru::layout::{PagedLayout, RowKind};
use maru::{Axis, CacheSpec, DType, TensorDesc};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;

use super::common::{accept, edge, worded};

fn fact() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![8 => Just(None), 3 => edge().prop_map(|n| Some(n.unsigned_abs()))]
}

/// Orders of axes that engines have.
pub(crate) const ORDERS: [&str; 12] = [
    "block,kv,token,head,dim",
    "kv,block,token,head,dim",
    "block,kv,head,token,dim",
    "block,head,token,kv_dim",
    "block,token,head,content",
    "kv,block,token,heads_dim",
    "block,token,dim",
    "slot,head,dim",
    "block,content",
    "block,layer,kv,token,head,dim",
    "layer,kv,block,head,token,dim",
    "kv,slot,head,content",
];

pub(crate) type Tensor = (Vec<i64>, Vec<i64>, DType, CacheSpec);

/// Tensors as engines register them, and others.
pub(crate) fn inputs() -> impl Strategy<Value = Tensor> {
    let axes = prop_oneof![
        8 => Just(None),
        4 => select(ORDERS.to_vec()).prop_map(Axis::parse_list).prop_map(|axes| axes.ok()),
        2 => select(ORDERS.to_vec()).prop_map(|text| Axis::parse_list(text).unwrap()).prop_shuffle().prop_map(Some),
        1 => prop::collection::vec(select(&Axis::ALL[..]), 0..9).prop_map(Some),
    ];
    let facts = (fact(), fact(), fact(), fact(), fact(), any::<bool>(), prop::bool::weighted(0.2), axes);
    let len = || prop_oneof![8 => 1i64..6, 4 => Just(2i64), 3 => select(&[8i64, 16, 64, 128][..])];
    let shape = prop_oneof![
        8 => prop::collection::vec(len(), 2..7),
        2 => prop::collection::vec(prop_oneof![6 => len(), 1 => edge()], 1..8),
        1 => prop::collection::vec(edge(), 0..10),
    ];
    let strides = prop_oneof![
        // Dense in some order of the axes, with pads; and anything.
        9 => (prop::collection::vec(0i64..6, 10), any::<u64>()).prop_map(|(pads, seed)| (true, pads, seed)),
        1 => (prop::collection::vec(edge(), 10), any::<u64>()).prop_map(|(s, seed)| (false, s, seed)),
    ];
    (shape, strides, select(&DType::ALL[..]), facts).prop_map(|(shape, strides, dtype, facts)| {
        let (dense, numbers, seed) = strides;
        let strides =
            if dense { dense_strides(&shape, &numbers, seed) } else { numbers[..shape.len()].to_vec() };
        let (block_size, num_kv_heads, head_size, backend_head_size, num_blocks, mla, split_kv, axes) = facts;
        // Mostly what is stated is found in the tensor.
        let of = |stated: Option<u64>, at: u64| match (stated, seed >> at & 3) {
            (Some(_), 1..) if !shape.is_empty() => {
                shape.get((seed >> (at + 8)) as usize % shape.len()).map(|n| n.unsigned_abs())
            }
            (stated, _) => stated,
        };
        let spec = CacheSpec {
            block_size: of(block_size, 1),
            num_kv_heads: of(num_kv_heads, 2),
            head_size: of(head_size, 3),
            backend_head_size: of(backend_head_size, 4),
            num_blocks: of(num_blocks, 5),
            mla: mla && seed & 0x30 == 0,
            split_kv,
            axes,
        };
        (shape, strides, dtype, spec)
    })
}

/// Strides without overlap, the axes in an order that the seed says, with pads where it says so.
pub(crate) fn dense_strides(shape: &[i64], pads: &[i64], seed: u64) -> Vec<i64> {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    for i in (1..order.len().saturating_sub(1)).rev() {
        order.swap(i, (seed >> (3 * i)) as usize % (i + 1));
    }
    let mut strides = vec![1i64; shape.len()];
    let mut step = 1i64;
    for &axis in order.iter().rev() {
        strides[axis] = step;
        step = step.wrapping_mul(shape[axis].max(1)).wrapping_add(pads[axis] * i64::from(seed & 7 == 0));
    }
    strides
}

/// Whatever the tensor, detection ends with a layout whose numbers hold together, or with an error in words.
pub(crate) fn check((shape, strides, dtype, spec): Tensor) -> TestCaseResult {
    let _ = TensorDesc::contiguous(&shape, dtype);
    let tensor = match TensorDesc::strided(&shape, &strides, dtype) {
        Ok(tensor) => tensor,
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    let layout = match PagedLayout::detect(&tensor, &spec) {
        Ok(layout) => layout,
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    accept();
    // Nothing is addressed beyond the tensor, and as many bytes as it has.
    prop_assert!(layout.span_bytes() <= tensor.span_bytes());
    let elements = shape.iter().fold(1u128, |n, len| n * u128::from(len.unsigned_abs()));
    let found = u128::from(layout.num_slots())
        * u128::from(layout.token_bytes())
        * u128::from(layout.kv_planes())
        * u128::from(layout.layers());
    prop_assert_eq!(found, elements * u128::from(dtype.size()));
    prop_assert!(!(spec.mla && layout.kv_planes() != 1));
    for (stated, found) in [(spec.num_kv_heads, layout.num_heads()), (spec.head_size, layout.head_size())] {
        if layout.row_kind() == RowKind::Plain {
            prop_assert!(stated.is_none_or(|n| n == found));
        }
    }
    if let (Some(size), true) = (spec.block_size, layout.row_kind() != RowKind::OpaqueBlocks) {
        prop_assert!(size.is_multiple_of(layout.block_size()));
    }
    prop_assert!(matches!(layout.access_bytes(0), 1 | 2 | 4 | 8 | 16));
    prop_assert!(layout.row_bytes().is_multiple_of(dtype.size()));
    let _ = layout.kernel_limits();
    let _ = layout.byte_strides();
    // The numbers alone give the same layout again.
    let again = PagedLayout::from_strides(layout.spec());
    prop_assert_eq!(again.map(|l| l.span_bytes()), Ok(layout.span_bytes()));
    Ok(())
}
