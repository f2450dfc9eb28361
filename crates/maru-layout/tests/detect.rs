//! The rules of detection and their traps, one test each.
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

// Which of K/V and blocks comes first.

#[test]
fn c01_two_blocks_and_two_planes_are_ambiguous() {
    let tensor = strided(&[2, 2, 16, 8, 128], &[32768, 16384, 1024, 128, 1], DType::Bf16);
    let both = ["[2, 2, 16, 8, 128]", "kv,block,token,head,dim", "block,kv,token,head,dim", "axes"];
    assert_error(detect(&tensor, &CacheSpec::default()), "ambiguous_layout", &both);
}

#[test]
fn c01_more_facts_do_not_settle_two_and_two() {
    let spec = CacheSpec { num_blocks: Some(2), backend_head_size: Some(128), ..known(16, 8, 128) };
    let parts = ["kv,block,token,head,dim", "block,kv,token,head,dim", "pass the axis order"];
    assert_error(detect(&bf16(&[2, 2, 16, 8, 128]), &spec), "ambiguous_layout", &parts);
}

#[test]
fn c01_a_stated_order_settles_two_and_two() {
    let tensor = bf16(&[2, 2, 16, 8, 128]);
    let kv_first = detect(&tensor, &named("kv,block,token,head,dim")).unwrap();
    assert_eq!(kv_first.plane_offset(1, 0).unwrap(), 32768 * 2);
    let blocks_first = detect(&tensor, &named("block,kv,token,head,dim")).unwrap();
    assert_eq!(blocks_first.plane_offset(1, 0).unwrap(), 16384 * 2);
}

#[test]
fn c01_heads_of_two_are_not_planes() {
    for spec in [CacheSpec::default(), blocks_of(16), known(16, 2, 128)] {
        is_read(&[6, 2, 16, 2, 128], &spec, "block,kv,token,head,dim", [6, 16, 2, 128]);
    }
}

#[test]
fn two_and_two_with_two_heads_and_two_tokens_lists_both_orders() {
    let found = detect(&bf16(&[2, 2, 2, 2, 2]), &blocks_of(2));
    assert_error(found, "ambiguous_layout", &["kv,block,token", "block,kv,token"]);
}

#[test]
fn flattened_two_and_two_is_ambiguous() {
    let found = detect(&bf16(&[2, 2, 16, 24]), &known(16, 3, 8));
    assert_error(found, "ambiguous_layout", &["kv,block,token,heads_dim", "block,kv,token,heads_dim"]);
}

#[test]
fn neither_axis_of_length_two_is_a_mismatch() {
    let found = detect(&bf16(&[6, 3, 16, 2, 128]), &blocks_of(16));
    assert_error(found, "layout_mismatch", &["[6, 3, 16, 2, 128]", "kv axis has length 6", "length 3"]);
}

// Strides.

#[test]
fn c02_views_of_one_allocation_keep_their_block_step() {
    let tensor = strided(&[4, 2, 16, 2, 64], &[12288, 2048, 128, 64, 1], DType::Bf16);
    let layout = detect(&tensor, &blocks_of(16)).unwrap();
    assert_eq!(layout.byte_strides().block, Some(12288 * 2));
    // Addressed through the view's own pointer, layer 1 stays in layer 1.
    let base = 8192;
    for s in 0..64 {
        for n in 0..2 {
            for kv in 0..2 {
                let at = address(&layout, base + layout.plane_offset(kv, 0).unwrap(), s, n, 0) / 2;
                assert_eq!(at / 4096 % 3, 1);
            }
        }
    }
}

#[test]
fn c03_one_head_reads_the_same_in_all_shapes() {
    let spec = known(128, 1, 128);
    let a = detect(&bf16(&[8, 2, 1, 128, 128]), &spec).unwrap();
    let b = detect(&bf16(&[8, 2, 128, 1, 128]), &spec).unwrap();
    for l in [&a, &b] {
        assert_eq!((l.num_blocks(), l.block_size(), l.num_heads(), l.head_size()), (8, 128, 1, 128));
    }
    assert_eq!(a.byte_strides(), b.byte_strides());
}

#[test]
fn c03_the_stride_of_a_single_head_is_ignored() {
    let spec = known(128, 1, 128);
    let clean = detect(&bf16(&[8, 2, 1, 128, 128]), &spec).unwrap().byte_strides();
    for arbitrary in [1, 16384, 999_999, 0, -7, i64::MAX] {
        let heads_first = strided(&[8, 2, 1, 128, 128], &[32768, 16384, arbitrary, 128, 1], DType::Bf16);
        let tokens_first = strided(&[8, 2, 128, 1, 128], &[32768, 16384, 128, arbitrary, 1], DType::Bf16);
        for tensor in [heads_first, tokens_first] {
            assert_eq!(detect(&tensor, &spec).unwrap().byte_strides(), clean, "{arbitrary}");
        }
    }
}

#[test]
fn c03_packed_single_heads_read_the_same() {
    let spec = known(128, 1, 128);
    let a = detect(&bf16(&[8, 1, 128, 256]), &spec).unwrap();
    let b = detect(&bf16(&[8, 128, 1, 256]), &spec).unwrap();
    for l in [&a, &b] {
        let counts = (l.kv_planes(), l.num_blocks(), l.block_size(), l.num_heads(), l.head_size());
        assert_eq!(counts, (2, 8, 128, 1, 128));
    }
    assert_eq!(a.byte_strides(), b.byte_strides());
}

#[test]
fn c03_a_hundred_and_twenty_eight_heads() {
    is_read(&[8, 2, 16, 128, 128], &blocks_of(16), "block,kv,token,head,dim", [8, 16, 128, 128]);
    is_read(&[8, 2, 128, 16, 128], &blocks_of(16), "block,kv,head,token,dim", [8, 16, 128, 128]);
}

#[test]
fn size_one_strides_do_not_decide_anything() {
    for arbitrary in [1, 5, 1 << 40] {
        let tensor = strided(&[1, 2, 16, 1, 8], &[arbitrary, 128, 8, arbitrary, 1], DType::Bf16);
        let layout = detect(&tensor, &blocks_of(16)).unwrap();
        let s = layout.byte_strides();
        assert_eq!((s.kv, s.block, s.token, s.head), (Some(256), None, Some(16), None));
    }
}

#[test]
fn a_last_axis_with_gaps_is_a_mismatch() {
    let tensor = strided(&[6, 2, 16, 2, 8], &[1024, 512, 32, 16, 2], DType::Bf16);
    assert_error(detect(&tensor, &blocks_of(16)), "layout_mismatch", &["stride 2", "contiguous"]);
    let named = named("block,kv,token,head,dim");
    assert_error(detect(&tensor, &named), "layout_mismatch", &["stride 2", "contiguous"]);
}

// Block size and kernel blocks.

#[test]
fn c08_the_stated_block_size_finds_the_token_axis() {
    let tensor = strided(&[4, 2, 4, 16, 64], &[147_456, 4096, 64, 256, 1], DType::Bf16);
    let layout = detect(&tensor, &blocks_of(16)).unwrap();
    assert_eq!(names(&layout), "block,kv,head,token,dim");
    let s = layout.spec();
    assert_eq!((s.block_stride, s.token_stride, s.head_stride), (147_456 * 2, 512, 128));
    assert_eq!(layout.num_slots(), 64);
    assert_eq!(address(&layout, 0, 63, 0, 0), (3 * 147_456 + 15 * 256) * 2);
}

#[test]
fn an_exact_block_size_beats_every_other_reading() {
    // Read as tokens first it would be kernel blocks of 8; 32 is there, so it is the token axis.
    is_read(&[5, 2, 8, 32, 64], &blocks_of(32), "block,kv,head,token,dim", [5, 32, 8, 64]);
}

#[test]
fn kernel_blocks_divide_the_stated_block() {
    is_read(&[8, 2, 16, 6, 64], &blocks_of(64), "block,kv,token,head,dim", [8, 16, 6, 64]);
    is_read(&[2, 8, 16, 6, 64], &blocks_of(64), "kv,block,token,head,dim", [8, 16, 6, 64]);
    is_read(&[8, 64, 576], &blocks_of(128), "block,token,dim", [8, 64, 1, 576]);
    is_read(&[8, 3, 2, 16, 5, 64], &blocks_of(32), "block,layer,kv,token,head,dim", [8, 16, 5, 64]);
}

#[test]
fn kernel_blocks_count_as_the_tensor_has_them_or_as_the_scheduler_does() {
    for num_blocks in [8, 2] {
        let spec = CacheSpec { num_blocks: Some(num_blocks), ..blocks_of(64) };
        is_read(&[8, 2, 16, 6, 64], &spec, "block,kv,token,head,dim", [8, 16, 6, 64]);
    }
    let spec = CacheSpec { num_blocks: Some(4), ..blocks_of(64) };
    let found = detect(&bf16(&[8, 2, 16, 6, 64]), &spec);
    assert_error(found, "layout_mismatch", &["8 blocks", "4 were stated"]);
}

#[test]
fn a_block_size_that_is_no_multiple_is_a_mismatch() {
    for size in [8, 24, 17, 1] {
        let found = detect(&bf16(&[6, 2, 16, 2, 128]), &blocks_of(size));
        assert_error(found, "layout_mismatch", &["length 16", &format!("block_size is {size}")]);
    }
}

#[test]
fn kernel_blocks_are_not_tried_when_an_axis_is_the_block_size() {
    // 32 tokens cannot be blocks of 16 when another axis is 32 long, even if that reading fails otherwise.
    let spec = CacheSpec { num_kv_heads: Some(32), ..blocks_of(32) };
    let found = detect(&bf16(&[6, 2, 16, 32, 64]), &spec);
    assert_error(found, "layout_mismatch", &["16 head(s)", "32 were stated"]);
    // Nor for K and V lists, where heads first is not even a reading.
    let spec = CacheSpec { split_kv: true, ..blocks_of(16) };
    let found = detect(&bf16(&[6, 8, 16, 64]), &spec);
    assert_error(found, "layout_mismatch", &["length 8", "block_size is 16"]);
}

#[test]
fn kernel_blocks_with_heads_first_are_not_guessed() {
    // (NB,NH,BS,C) with kernel blocks of 16, or (NB,BS,NH,C) with kernel blocks of 4: both exist.
    let spec = CacheSpec { head_size: Some(128), ..blocks_of(32) };
    let found = detect(&bf16(&[10, 4, 16, 256]), &spec);
    assert_error(
        found,
        "ambiguous_layout",
        &["block,head,token,kv_dim", "block,token,head,kv_dim", "num_kv_heads"],
    );
}

#[test]
fn kernel_blocks_with_heads_first_need_the_axes() {
    let found = detect(&bf16(&[10, 4, 16, 256]), &known(32, 4, 128));
    assert_error(found, "layout_mismatch", &["length 16", "block_size is 32", "axes"]);
    let spec = CacheSpec { axes: axes("block,head,token,kv_dim"), ..known(32, 4, 128) };
    is_read(&[10, 4, 16, 256], &spec, "block,head,token,kv_dim", [10, 16, 4, 128]);
    is_read(&[10, 4, 16, 256], &known(32, 16, 128), "block,token,head,kv_dim", [10, 4, 16, 128]);
}

#[test]
fn kernel_blocks_of_one_head_have_no_order() {
    is_read(&[10, 1, 16, 256], &known(32, 1, 128), "block,head,token,kv_dim", [10, 16, 1, 128]);
    let mla = CacheSpec { mla: true, ..blocks_of(128) };
    is_read(&[9, 1, 64, 576], &mla, "block,head,token,dim", [9, 64, 1, 576]);
}

#[test]
fn rank_5_heads_first_needs_an_exact_block_size() {
    // Without it, tokens come first.
    is_read(&[6, 2, 4, 16, 8], &CacheSpec::default(), "block,kv,token,head,dim", [6, 4, 16, 8]);
    is_read(&[6, 2, 4, 16, 8], &blocks_of(16), "block,kv,head,token,dim", [6, 16, 4, 8]);
    let spec = CacheSpec { num_kv_heads: Some(4), ..CacheSpec::default() };
    assert_error(detect(&bf16(&[6, 2, 4, 16, 8]), &spec), "layout_mismatch", &["block_size", "16"]);
}

#[test]
fn one_token_blocks_are_blocks() {
    is_read(&[64, 2, 1, 6, 8], &blocks_of(1), "block,kv,token,head,dim", [64, 1, 6, 8]);
    is_read(&[64, 2, 24, 6, 8], &blocks_of(24), "block,kv,token,head,dim", [64, 24, 6, 8]);
}

// As many heads as tokens.

#[test]
fn as_many_heads_as_tokens_rank_5_is_token_major() {
    is_read(&[6, 2, 16, 16, 8], &known(16, 16, 8), "block,kv,token,head,dim", [6, 16, 16, 8]);
    let spec = CacheSpec { axes: axes("block,kv,head,token,dim"), ..known(16, 16, 8) };
    is_read(&[6, 2, 16, 16, 8], &spec, "block,kv,head,token,dim", [6, 16, 16, 8]);
}

#[test]
fn as_many_heads_as_tokens_fused_is_ambiguous() {
    let found = detect(&bf16(&[6, 16, 16, 256]), &known(16, 16, 128));
    assert_error(found, "ambiguous_layout", &["block,head,token,kv_dim", "block,token,head,kv_dim", "axes"]);
}

#[test]
fn as_many_heads_as_tokens_fused_may_be_told_by_strides() {
    let spec = known(16, 16, 128);
    // LBNHC: tokens outside heads. Under (NB,BS,NH,C) no engine has that.
    let tensor = strided(&[6, 16, 16, 256], &[65536, 256, 4096, 1], DType::Bf16);
    assert_eq!(names(&detect(&tensor, &spec).unwrap()), "block,head,token,kv_dim");
    // LHBNC: heads outermost.
    let tensor = strided(&[6, 16, 16, 256], &[4096, 24576, 256, 1], DType::Bf16);
    assert_eq!(names(&detect(&tensor, &spec).unwrap()), "block,head,token,kv_dim");
}

#[test]
fn a_fused_memory_order_of_no_engine_is_no_reading() {
    // Tokens outermost of all.
    let tensor = strided(&[6, 4, 16, 256], &[1024, 256, 6144, 1], DType::Bf16);
    let found = detect(&tensor, &known(16, 4, 128));
    assert_error(found, "layout_mismatch", &["no engine", "6144"]);
    // Named, it is believed.
    let spec = CacheSpec { axes: axes("block,head,token,kv_dim"), ..known(16, 4, 128) };
    assert_eq!(detect(&tensor, &spec).unwrap().byte_strides().token, Some(12288));
}

#[test]
fn as_many_heads_as_tokens_in_rank_6_is_ambiguous() {
    let found = detect(&bf16(&[6, 3, 2, 16, 16, 8]), &known(16, 16, 8));
    assert_error(
        found,
        "ambiguous_layout",
        &["block,layer,kv,token,head,dim", "block,layer,kv,head,token,dim"],
    );
}

#[test]
fn rank_6_without_a_block_size_asks_for_it() {
    let found = detect(&bf16(&[6, 3, 2, 16, 4, 8]), &CacheSpec::default());
    assert_error(found, "ambiguous_layout", &["pass block_size, num_kv_heads"]);
    let spec = CacheSpec { num_kv_heads: Some(4), ..CacheSpec::default() };
    is_read(&[6, 3, 2, 16, 4, 8], &spec, "block,layer,kv,token,head,dim", [6, 16, 4, 8]);
}

#[test]
fn rank_6_strides_may_decide() {
    // Heads outside tokens under the token-major shape: no TensorRT-LLM cache has tokens outside heads.
    let tensor = strided(&[6, 3, 2, 16, 16, 8], &[12288, 4096, 2048, 8, 128, 1], DType::Bf16);
    let layout = detect(&tensor, &known(16, 16, 8)).unwrap();
    assert_eq!(names(&layout), "block,layer,kv,token,head,dim");
    assert_eq!(layout.byte_strides().head, Some(256));
}

// Flattened heads, fused heads, head widths.

#[test]
fn legacy_flattened_heads_yield_to_fused_ones() {
    is_read(&[6, 2, 16, 256], &known(16, 2, 128), "block,head,token,kv_dim", [6, 16, 2, 128]);
    let spec = CacheSpec { num_kv_heads: Some(2), ..blocks_of(16) };
    is_read(&[6, 2, 16, 256], &spec, "block,head,token,kv_dim", [6, 16, 2, 128]);
}

#[test]
fn legacy_flattened_heads_can_be_forced() {
    let spec = CacheSpec { axes: axes("block,kv,token,heads_dim"), ..known(16, 2, 128) };
    is_read(&[6, 2, 16, 256], &spec, "block,kv,token,heads_dim", [6, 16, 2, 128]);
    assert_eq!(detect(&bf16(&[6, 2, 16, 256]), &spec).unwrap().kv_planes(), 2);
}

#[test]
fn flattened_or_fused_without_a_head_count_is_ambiguous() {
    for spec in [blocks_of(16), CacheSpec { head_size: Some(128), ..blocks_of(16) }] {
        let found = detect(&bf16(&[6, 2, 16, 256]), &spec);
        let parts = ["block,head,token,kv_dim", "block,kv,token,heads_dim", "axes"];
        assert_error(found, "ambiguous_layout", &parts);
    }
}

#[test]
fn flattened_kv_first_needs_heads_or_width() {
    let found = detect(&bf16(&[2, 6, 16, 24]), &blocks_of(16));
    assert_error(found, "ambiguous_layout", &["kv,block,token,heads_dim", "block,head,token,kv_dim"]);
    is_read(&[2, 6, 16, 24], &known(16, 3, 8), "kv,block,token,heads_dim", [6, 16, 3, 8]);
    let spec = CacheSpec { head_size: Some(8), ..blocks_of(16) };
    is_read(&[2, 6, 16, 24], &spec, "kv,block,token,heads_dim", [6, 16, 3, 8]);
}

#[test]
fn a_flattened_row_must_hold_whole_heads() {
    for (heads, width) in [(5, 8), (3, 9), (4, 8)] {
        let found = detect(&bf16(&[2, 6, 16, 24]), &known(16, heads, width));
        assert_error(found, "layout_mismatch", &["24", &heads.to_string(), &width.to_string()]);
    }
}

#[test]
fn fused_content_splits_at_the_stated_width() {
    is_read(&[9, 4, 16, 256], &known(16, 4, 128), "block,head,token,kv_dim", [9, 16, 4, 128]);
    let l = detect(&bf16(&[9, 4, 16, 256]), &known(16, 4, 128)).unwrap();
    assert_eq!((l.kv_planes(), l.byte_strides().kv), (2, Some(256)));
}

#[test]
fn fused_content_splits_evenly_where_no_width_is_stated() {
    let spec = CacheSpec { num_kv_heads: Some(4), ..blocks_of(16) };
    is_read(&[9, 4, 16, 256], &spec, "block,head,token,kv_dim", [9, 16, 4, 128]);
}

#[test]
fn odd_content_is_never_split() {
    let spec = CacheSpec { num_kv_heads: Some(4), ..blocks_of(16) };
    let found = detect(&dense(&[9, 4, 16, 255], DType::U8), &spec);
    assert_error(found, "layout_mismatch", &["255", "halved"]);
}

#[test]
fn a_width_that_fits_neither_content_nor_half_is_an_error() {
    for width in [64, 100, 129, 255, 512] {
        let found = detect(&bf16(&[9, 4, 16, 256]), &known(16, 4, width));
        assert_error(found, "layout_mismatch", &["256", &width.to_string()]);
    }
}

#[test]
fn a_width_of_the_whole_content_does_not_split_several_heads() {
    let found = detect(&dense(&[9, 4, 16, 128], DType::U8), &known(16, 4, 128));
    assert_error(found, "layout_mismatch", &["128"]);
}

#[test]
fn declared_content_stays_whole() {
    let spec = CacheSpec { axes: axes("block,head,token,content"), ..known(16, 4, 100) };
    is_read(&[9, 4, 16, 256], &spec, "block,head,token,content", [9, 16, 4, 256]);
    assert_eq!(detect(&bf16(&[9, 4, 16, 256]), &spec).unwrap().kv_planes(), 1);
}

#[test]
fn contradicting_heads_are_an_error() {
    let found = detect(&bf16(&[6, 2, 16, 2, 128]), &known(16, 8, 128));
    assert_error(found, "layout_mismatch", &["2 head(s)", "8 were stated"]);
    let found = detect(&bf16(&[6, 2, 16, 2, 128]), &known(16, 2, 64));
    assert_error(found, "layout_mismatch", &["128", "64"]);
}

// The backend's head width.

#[test]
fn a_backend_width_breaks_a_tie() {
    // One head: two planes of 288 or a latent row of 576?
    let tie = CacheSpec { num_kv_heads: Some(1), ..blocks_of(64) };
    let tensor = bf16(&[9, 1, 64, 576]);
    assert_error(detect(&tensor, &tie), "ambiguous_layout", &["576", "288", "head_size", "mla"]);
    let l = detect(&tensor, &CacheSpec { backend_head_size: Some(576), ..tie.clone() }).unwrap();
    assert_eq!((l.kv_planes(), l.head_size()), (1, 576));
    let l = detect(&tensor, &CacheSpec { backend_head_size: Some(288), ..tie }).unwrap();
    assert_eq!((l.kv_planes(), l.head_size()), (2, 288));
}

#[test]
fn a_padded_backend_width_is_otherwise_ignored() {
    let spec = CacheSpec { backend_head_size: Some(256), ..known(16, 2, 80) };
    is_read(&[6, 2, 16, 2, 80], &spec, "block,kv,token,head,dim", [6, 16, 2, 80]);
    is_read(&[6, 2, 16, 160], &spec, "block,head,token,kv_dim", [6, 16, 2, 80]);
}

#[test]
fn a_backend_width_creates_no_reading() {
    let spec = CacheSpec { backend_head_size: Some(128), ..known(16, 4, 100) };
    assert_error(detect(&bf16(&[9, 4, 16, 256]), &spec), "layout_mismatch", &["256", "100"]);
}

#[test]
fn a_backend_width_that_fits_both_readings_decides_nothing() {
    // 2 fused heads of 128, or K and V rows of 2 heads of 128.
    let spec = CacheSpec { backend_head_size: Some(128), ..blocks_of(16) };
    let found = detect(&bf16(&[6, 2, 16, 256]), &spec);
    assert_error(found, "ambiguous_layout", &["block,head,token,kv_dim", "block,kv,token,heads_dim"]);
}

#[test]
fn a_backend_width_that_fits_no_reading_decides_nothing() {
    for width in [0, 7, 1 << 40] {
        let spec = CacheSpec { backend_head_size: Some(width), ..blocks_of(16) };
        assert_error(detect(&bf16(&[6, 2, 16, 256]), &spec), "ambiguous_layout", &["axes"]);
    }
}
