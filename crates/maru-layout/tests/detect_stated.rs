//! Detection of what is said rather than seen: MLA, separate K and V, stated orders, opaque bytes; and what a
//! reading keeps of sizes and types.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{address, assert_error, axes, bf16, blocks_of, dense, known, names, strided};
use maru_layout::{CacheSpec, DType, LayoutError, PagedLayout, TensorDesc};

fn detect(tensor: &TensorDesc, spec: &CacheSpec) -> Result<PagedLayout, LayoutError> {
    PagedLayout::detect(tensor, spec)
}

fn named(list: &str) -> CacheSpec {
    CacheSpec { axes: axes(list), ..CacheSpec::default() }
}

/// `(axes, blocks, tokens of a block, heads, head width)`.
fn read(shape: &[i64], spec: &CacheSpec) -> (String, u64, u64, u64, u64) {
    let l = detect(&bf16(shape), spec).unwrap();
    (names(&l), l.num_blocks(), l.block_size(), l.num_heads(), l.head_size())
}

fn is_read(shape: &[i64], spec: &CacheSpec, list: &str, counts: [u64; 4]) {
    let [nb, bs, nh, hs] = counts;
    assert_eq!(read(shape, spec), (list.to_owned(), nb, bs, nh, hs), "{shape:?}");
}

// MLA and separate K and V.

#[test]
fn c09_three_axes_are_one_plane() {
    for (shape, nb, bs) in [([512, 64, 576], 512, 64), ([2, 64, 576], 2, 64), ([512, 2, 576], 512, 2)] {
        for spec in [CacheSpec::default(), CacheSpec { mla: true, ..blocks_of(bs) }] {
            is_read(&shape, &spec, "block,token,dim", [nb, bs, 1, 576]);
            let l = detect(&bf16(&shape), &spec).unwrap();
            assert_eq!((l.kv_planes(), l.row_bytes()), (1, 1152));
        }
    }
}

#[test]
fn c09_an_override_that_contradicts_the_shape_is_an_error() {
    let found = detect(&bf16(&[64, 2, 16, 8, 128]), &named("kv,block,token,head,dim"));
    assert_error(found, "layout_mismatch", &["kv,block,token,head,dim", "length 64", "as stated"]);
}

#[test]
fn mla_excludes_two_planes() {
    let mla = CacheSpec { mla: true, ..blocks_of(16) };
    assert_error(detect(&bf16(&[6, 2, 16, 2, 128]), &mla), "layout_mismatch", &["MLA"]);
    assert_error(detect(&bf16(&[6, 2, 16, 256]), &mla), "layout_mismatch", &["MLA"]);
    let split = CacheSpec { split_kv: true, ..mla };
    assert_error(detect(&bf16(&[64, 1, 128]), &split), "layout_mismatch", &["MLA"]);
}

#[test]
fn latent_rows_have_one_head() {
    let spec = CacheSpec { num_kv_heads: Some(8), ..blocks_of(64) };
    assert_error(detect(&bf16(&[512, 64, 576]), &spec), "layout_mismatch", &["1 head(s)", "8 were stated"]);
    is_read(&[512, 64, 576], &known(64, 1, 576), "block,token,dim", [512, 64, 1, 576]);
}

#[test]
fn one_head_without_a_width_is_two_planes_or_a_latent_row() {
    let found = detect(&bf16(&[8, 1, 128, 256]), &blocks_of(128));
    assert_error(found, "ambiguous_layout", &["block,head,token,kv_dim", "block,head,token,dim", "mla"]);
    let latent = known(128, 1, 256);
    is_read(&[8, 1, 128, 256], &latent, "block,head,token,dim", [8, 128, 1, 256]);
}

#[test]
fn slots_in_place_of_blocks_and_tokens() {
    let split = CacheSpec { split_kv: true, ..blocks_of(16) };
    is_read(&[64, 3, 8], &split, "slot,head,dim", [4, 16, 3, 8]);
    is_read(&[64, 1, 8], &blocks_of(16), "slot,head,dim", [4, 16, 1, 8]);
    let found = detect(&bf16(&[63, 3, 8]), &split);
    assert_error(found, "layout_mismatch", &["63 slots", "blocks of 16"]);
}

#[test]
fn slots_of_one_head_move_the_same_bytes_under_both_readings() {
    // Blocks of one latent row, or slots of one head: the same memory, so nothing is asked.
    is_read(&[64, 1, 72], &CacheSpec::default(), "block,token,dim", [64, 1, 1, 72]);
}

#[test]
fn a_separate_tensor_has_no_planes_of_its_own() {
    let split = CacheSpec { split_kv: true, ..blocks_of(16) };
    assert_error(detect(&bf16(&[6, 2, 16, 2, 128]), &split), "layout_mismatch", &["separate", "5 axes"]);
    let spec = CacheSpec { axes: axes("block,kv,token,head,dim"), ..split };
    assert_error(detect(&bf16(&[6, 2, 16, 2, 128]), &spec), "layout_mismatch", &["separate"]);
}

#[test]
fn several_heads_and_one_plane_need_the_axes() {
    // (NB·BS,NH,HS) is K or V alone, and then the caller says so.
    let found = detect(&bf16(&[64, 3, 8]), &blocks_of(16));
    assert_error(found, "layout_mismatch", &["one head", "3"]);
}

// Stated orders.

#[test]
fn stated_orders_are_checked_word_by_word() {
    let shape = [6, 2, 16, 2, 128];
    for (list, part) in [
        ("block,kv,token,head", "4 axes are named, the tensor has 5"),
        ("block,kv,token,head,dim,dim", "6 axes are named"),
        ("block,kv,token,token,dim", "token is named twice"),
        ("block,kv,layer,head,dim", "block and token"),
        ("slot,kv,token,head,dim", "block and token"),
        ("block,kv,token,head,layer", "exactly one of dim"),
        ("block,kv,token,content,dim", "exactly one of dim"),
        ("block,kv,token,head,heads_dim", "exclude"),
        ("block,kv,token,head,kv_dim", "exclude"),
        ("block,token,kv,head,dim", "length 16, K and V make 2"),
        ("dim,kv,token,head,block", "contiguous"),
    ] {
        let found = detect(&bf16(&shape), &named(list));
        assert_error(found, "layout_mismatch", &[list, part, "[6, 2, 16, 2, 128]"]);
    }
}

#[test]
fn stated_orders_must_agree_with_other_facts() {
    let order = axes("block,kv,token,head,dim");
    let shape = bf16(&[6, 2, 16, 2, 128]);
    let with = |spec: CacheSpec| detect(&shape, &CacheSpec { axes: order.clone(), ..spec });
    assert!(with(known(16, 2, 128)).is_ok());
    assert!(with(known(32, 2, 128)).is_ok());
    assert_error(with(blocks_of(8)), "layout_mismatch", &["16", "8"]);
    assert_error(with(known(16, 4, 128)), "layout_mismatch", &["2 head(s)", "4 were stated"]);
    assert_error(with(known(16, 2, 64)), "layout_mismatch", &["128", "64"]);
    let blocks = CacheSpec { num_blocks: Some(7), ..blocks_of(16) };
    assert_error(with(blocks), "layout_mismatch", &["6 blocks", "7 were stated"]);
    assert_error(with(CacheSpec { mla: true, ..CacheSpec::default() }), "layout_mismatch", &["MLA"]);
}

#[test]
fn opaque_blocks_are_never_detected() {
    assert_error(detect(&bf16(&[7, 512]), &blocks_of(16)), "layout_mismatch", &["2 axes", "block,content"]);
    assert_error(detect(&bf16(&[512]), &blocks_of(16)), "layout_mismatch", &["1 axes"]);
}

#[test]
fn opaque_blocks_must_be_contiguous_inside() {
    let tensor = strided(&[7, 4, 8], &[64, 16, 1], DType::U8);
    let found = detect(&tensor, &named("block,content"));
    assert_error(found, "layout_mismatch", &["axis 1 has stride 16", "needs 8"]);
}

#[test]
fn opaque_blocks_need_content() {
    let found = detect(&bf16(&[7]), &named("block,content"));
    assert_error(found, "layout_mismatch", &["at least 2 axes"]);
}

#[test]
fn unknown_ranks_ask_for_the_axes() {
    for shape in [&[5, 4][..], &[1, 2, 3, 4, 5, 6, 7], &[1, 1, 1, 1, 1, 1, 1, 1]] {
        let axes = format!("{} axes", shape.len());
        assert_error(
            detect(&bf16(shape), &blocks_of(16)),
            "layout_mismatch",
            &[&axes, "state the axis order"],
        );
    }
}

#[test]
fn facts_of_zero_are_refused() {
    let zero = Some(0);
    let default = CacheSpec::default();
    for (spec, what) in [
        (CacheSpec { block_size: zero, ..default.clone() }, "block_size"),
        (CacheSpec { num_kv_heads: zero, ..default.clone() }, "num_kv_heads"),
        (CacheSpec { head_size: zero, ..default.clone() }, "head_size"),
        (CacheSpec { num_blocks: zero, ..default.clone() }, "num_blocks"),
    ] {
        assert_error(detect(&bf16(&[6, 2, 16, 2, 128]), &spec), "invalid_argument", &[what, "0"]);
        let named = CacheSpec { axes: axes("block,kv,token,head,dim"), ..spec };
        assert_error(detect(&bf16(&[6, 2, 16, 2, 128]), &named), "invalid_argument", &[what, "0"]);
    }
}

#[test]
fn huge_facts_are_errors_not_overflows() {
    let huge = Some(u64::MAX);
    let default = CacheSpec::default();
    for spec in [
        CacheSpec { block_size: huge, ..default.clone() },
        CacheSpec { num_kv_heads: huge, ..default.clone() },
        CacheSpec { head_size: huge, ..default.clone() },
        CacheSpec { num_blocks: huge, ..default },
    ] {
        for shape in [&[64, 4, 8][..], &[6, 2, 16, 24], &[6, 2, 16, 2, 8], &[6, 3, 2, 16, 2, 8]] {
            for split_kv in [false, true] {
                let spec = CacheSpec { split_kv, ..spec.clone() };
                assert!(detect(&bf16(shape), &spec).is_err(), "{shape:?} {spec:?}");
            }
        }
    }
}

// Alignment, size, element type.

#[test]
fn c12_an_odd_head_width_is_moved_in_narrow_words() {
    // 92 bytes: 4 divides, 8 does not. One head, so a token is one run.
    let layout = detect(&bf16(&[2, 4, 16, 1, 46]), &blocks_of(16)).unwrap();
    assert_eq!((layout.row_bytes(), layout.access_bytes(0)), (92, 4));
    let layout = detect(&bf16(&[2, 4, 16, 1, 64]), &blocks_of(16)).unwrap();
    assert_eq!((layout.access_bytes(4096), layout.access_bytes(4098)), (16, 2));
}

#[test]
fn c16_offsets_beyond_two_gib() {
    let layout = detect(&dense(&[65537, 2, 16, 8, 128], DType::U8), &blocks_of(16)).unwrap();
    assert_eq!(address(&layout, 0, 65536 * 16, 0, 0), 65536 * 32768);
    assert_eq!(address(&layout, 0, 65535 * 16 + 15, 7, 127), 65535 * 32768 + 16383);
    let tensor = strided(&[4000, 2, 16, 8, 128], &[1_039_680, 16384, 1024, 128, 1], DType::U8);
    let layout = detect(&tensor, &blocks_of(16)).unwrap();
    for b in [2065, 2066, 3999] {
        assert_eq!(address(&layout, 0, b * 16, 0, 0), b * 1_039_680);
    }
}

#[test]
fn c16_a_shape_over_the_address_space_is_an_error() {
    let found = TensorDesc::contiguous(&[1 << 40, 2, 16, 1 << 20, 128], DType::Bf16);
    assert_error(found, "invalid_argument", &["1099511627776", "2^63"]);
}

#[test]
fn c19_the_element_type_is_kept() {
    for dtype in DType::ALL {
        let layout = detect(&dense(&[6, 2, 16, 2, 8], dtype), &blocks_of(16)).unwrap();
        assert_eq!((layout.dtype(), layout.token_bytes()), (dtype, 16 * dtype.size()));
    }
}
