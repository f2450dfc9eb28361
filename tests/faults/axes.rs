//! Kind: which axis is which (C01, C02, C03, C08, C09).

use maru::{CacheSpec, DType, Direction, LayoutError, PagedLayout, TensorDesc, TransferError};

use crate::harness::Test;
use crate::rig::{Rig, View, axes, block_size, same, slots};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        plain:
            c01_two_by_two_is_ambiguous_without_a_hint,
            c01_two_by_two_in_other_guises,
            c02_views_that_are_no_cache,
            c03_the_stride_of_a_single_head_is_never_used,
            c08_other_packed_views,
            c09_three_axes_are_one_plane,
            c09_an_order_that_contradicts_the_shape_is_an_error,
            c09_one_plane_in_other_guises,
            shapes_of_engines_to_come;
        moved:
            c01_a_hint_decides_two_by_two,
            c01_heads_of_two_are_not_planes,
            c02_one_layer_of_a_shared_allocation,
            c02_one_tensor_for_all_layers,
            c03_one_head_in_every_form_moves_the_same_bytes,
            c03_a_hundred_and_twenty_eight_heads,
            c08_a_packed_view_is_divided_by_the_stated_block,
            c09_latent_rows_move_as_one_plane,
            odd_geometries_move_exactly;
    ]
}

fn detect(shape: &[i64], spec: &CacheSpec) -> Result<PagedLayout, LayoutError> {
    PagedLayout::detect(&TensorDesc::contiguous(shape, DType::Bf16)?, spec)
}

fn named(words: &str) -> CacheSpec {
    CacheSpec { axes: Some(axes(words)), ..CacheSpec::default() }
}

const TWO: [i64; 5] = [2, 2, 16, 8, 128];

fn c01_two_by_two_is_ambiguous_without_a_hint() {
    let more = CacheSpec { num_blocks: Some(2), ..block_size(16) };
    for spec in [CacheSpec::default(), more] {
        let error = detect(&TWO, &spec).unwrap_err();
        assert_eq!(error.kind(), "ambiguous_layout");
        let text = error.to_string();
        for part in ["kv,block,token,head,dim", "block,kv,token,head,dim", "pass", "axis order"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
}

/// V of block 0 begins where the hint says.
fn c01_a_hint_decides_two_by_two(rig: &Rig) {
    for (words, v) in [("kv,block,token,head,dim", 32_768), ("block,kv,token,head,dim", 16_384)] {
        let cache = rig.cache(&View::new(&TWO, words).named());
        let bases = cache.registered.paged().bases();
        assert_eq!(bases[1] - bases[0], v * 2);
        cache.exact(&slots(&[0, 31, 7, 16]));
    }
}

fn c01_heads_of_two_are_not_planes(rig: &Rig) {
    let cache = rig.cache(&View::new(&[6, 2, 16, 2, 128], "block,kv,token,head,dim"));
    let layout = cache.registered.paged().layout();
    assert_eq!((layout.num_blocks(), layout.block_size(), layout.num_heads()), (6, 16, 2));
    assert_eq!(cache.registered.paged().planes(), 2);
    cache.exact(&slots(&[95, 0, 33]));
}

/// Twos in other places: `Some(planes, blocks, tokens, heads)`, or ambiguous.
fn c01_two_by_two_in_other_guises() {
    let spec = |block, heads| CacheSpec { num_kv_heads: heads, ..block_size(block) };
    type Row = (&'static [i64], CacheSpec, Option<(u64, u64, u64, u64)>);
    let table: &[Row] = &[
        (&[1, 2, 16, 8, 128], spec(16, None), Some((2, 1, 16, 8))),
        (&[2, 1, 16, 8, 128], spec(16, None), Some((2, 1, 16, 8))),
        (&[2, 3, 2, 2, 2], spec(2, None), Some((2, 3, 2, 2))),
        (&[3, 2, 2, 2, 64], spec(2, Some(2)), Some((2, 3, 2, 2))),
        (&[2, 2, 16, 2, 128], spec(16, Some(2)), None),
        (&[2, 2, 2, 2, 2], spec(2, Some(2)), None),
        (&[2, 2, 1, 1, 1], spec(1, Some(1)), None),
        (&[2, 2, 16, 1, 64], spec(16, Some(1)), None),
        // Flattened heads.
        (&[2, 2, 16, 1024], spec(16, None), None),
        (&[2, 5, 16, 1024], CacheSpec { head_size: Some(128), ..spec(16, Some(8)) }, Some((2, 5, 16, 8))),
        (&[5, 2, 16, 1024], CacheSpec { head_size: Some(128), ..spec(16, Some(8)) }, Some((2, 5, 16, 8))),
        // Two heads fused, and two planes of one flattened head, are the same shape.
        (&[5, 2, 16, 256], CacheSpec { head_size: Some(128), ..spec(16, Some(2)) }, Some((2, 5, 16, 2))),
        (&[5, 2, 16, 256], spec(16, None), None),
    ];
    for (shape, spec, expected) in table {
        let found = detect(shape, spec)
            .map(|l| (l.kv_planes(), l.num_blocks(), l.block_size(), l.num_heads()))
            .map_err(|e| e.kind());
        assert_eq!(found, expected.ok_or("ambiguous_layout"), "{shape:?} {spec:?}");
    }
    // Strides do not tell K/V first from blocks first either: pools interleave in any order.
    for strides in [[40_000, 16_384, 1024, 128, 1], [16_384, 40_000, 1024, 128, 1]] {
        let tensor = TensorDesc::strided(&TWO, &strides, DType::Bf16).unwrap();
        let error = PagedLayout::detect(&tensor, &block_size(16)).unwrap_err();
        assert_eq!(error.kind(), "ambiguous_layout");
    }
}

/// Three views of one allocation of 4 blocks, block step 12288 elements; layer 1 alone is moved.
fn c02_one_layer_of_a_shared_allocation(rig: &Rig) {
    let view = View::new(&[4, 2, 16, 2, 64], "block,kv,token,head,dim").strides(&[12_288, 2048, 128, 64, 1]);
    let all: Vec<i64> = (0..64).collect();
    let cache = rig.cache(&view.clone().at(&[0, 2 * 4096, 2 * 8192]));
    assert_eq!(cache.registered.paged().layout().byte_strides().block, Some(2 * 12_288));
    // The storage offset is counted once: the base is the view's own address.
    assert_eq!(cache.registered.paged().bases()[1], cache.arena.addr() + 2 * 4096);
    cache.exact(&slots(&all).layers(1, 1));
    cache.exact(&slots(&all));
    // The view alone, in memory that goes on behind it.
    rig.cache(&view.at(&[2 * 4096])).exact(&slots(&all));
}

fn c02_one_tensor_for_all_layers(rig: &Rig) {
    let all: Vec<i64> = (0..64).rev().collect();
    for (shape, words) in [
        ([4, 3, 2, 16, 2, 64], "block,layer,kv,token,head,dim"),
        ([4, 2, 2, 16, 2, 64], "block,layer,kv,token,head,dim"),
        ([4, 3, 2, 3, 16, 8], "block,layer,kv,head,token,dim"),
    ] {
        let cache = rig.cache(&View::new(&shape, words));
        assert_eq!(cache.registered.paged().layers(), shape[1] as u64);
        cache.exact(&slots(&all).layers(1, 1));
        cache.exact(&slots(&all));
    }
}

fn c02_views_that_are_no_cache() {
    let rig = host();
    let view = View::new(&[4, 2, 16, 2, 64], "block,kv,token,head,dim").strides(&[12_288, 2048, 128, 64, 1]);
    let refused = |offsets: &[u64]| rig.try_cache(&view.clone().at(offsets)).unwrap_err();
    // The same view twice, and one that begins inside another.
    for second in [0, 2, 2 * 128, 2 * 2048, 2 * 12_288] {
        let error = refused(&[0, second]);
        assert!(matches!(error, TransferError::SharedPlanes { .. }), "{second}: {error}");
        assert!(error.to_string().contains("layer 0") && error.to_string().contains("layer 1"), "{error}");
    }
    // Strides that make a tensor meet itself.
    for (strides, what) in [
        ([0, 2048, 128, 64, 1], "stride 0"),
        ([-12_288, 2048, 128, 64, 1], "stride -12288"),
        ([12_288, 2048, 128, 0, 1], "stride 0"),
        ([12_288, 2048, 128, 64, i64::MIN], "stride -9223372036854775808"),
        ([2048, 2048, 128, 64, 1], "share memory"),
        ([12_288, 2047, 128, 64, 1], "share memory"),
        ([12_288, 2048, 128, 63, 1], "share memory"),
    ] {
        let error = TensorDesc::strided(&[4, 2, 16, 2, 64], &strides, DType::Bf16).unwrap_err();
        assert_eq!(error.kind(), "invalid_argument");
        assert!(error.to_string().contains(what), "{error}");
    }
}

fn host() -> Rig {
    Rig::open(&crate::rig::MOVERS[0], None)
}

/// 128 tokens, one head of 128: heads before tokens, after them, packed with K and V side by side.
fn c03_one_head_in_every_form_moves_the_same_bytes(rig: &Rig) {
    let spec = CacheSpec { num_kv_heads: Some(1), head_size: Some(128), ..block_size(128) };
    let list = [5, 127, 128, 1023, 0, 640];
    for (forms, words) in [
        (
            [[8, 2, 1, 128, 128], [8, 2, 128, 1, 128]].map(|s| s.to_vec()),
            ["block,kv,head,token,dim", "block,kv,token,head,dim"],
        ),
        (
            [[8, 1, 128, 256], [8, 128, 1, 256]].map(|s| s.to_vec()),
            ["block,head,token,kv_dim", "block,token,head,kv_dim"],
        ),
    ] {
        let caches = [0, 1].map(|i| rig.cache(&View::new(&forms[i], words[i]).told(spec.clone())));
        for cache in &caches {
            let layout = cache.registered.paged().layout();
            assert_eq!((layout.num_heads(), layout.block_size(), layout.head_size()), (1, 128, 128));
            assert_eq!(layout.num_blocks(), 8);
            cache.exact(&slots(&list));
        }
        // The same memory was read the same way.
        let [a, b] = [&caches[0], &caches[1]].map(|c| c.registered.paged().layout().byte_strides());
        assert_eq!(a, b);
        same("cache", Direction::Scatter, &caches[0].bytes(), &caches[1].bytes());
    }
}

fn c03_the_stride_of_a_single_head_is_never_used() {
    let spec = CacheSpec { num_kv_heads: Some(1), head_size: Some(128), ..block_size(128) };
    let dense = detect(&[8, 2, 1, 128, 128], &spec).unwrap();
    for stride in [1, 16_384, 999_999, 0, -1, 7, i64::MIN, i64::MAX] {
        for (shape, strides) in [
            ([8, 2, 1, 128, 128], [32_768, 16_384, stride, 128, 1]),
            ([8, 2, 128, 1, 128], [32_768, 16_384, 128, stride, 1]),
        ] {
            let tensor = TensorDesc::strided(&shape, &strides, DType::Bf16).unwrap();
            let layout = PagedLayout::detect(&tensor, &spec).unwrap();
            assert_eq!((layout.num_heads(), layout.block_size()), (1, 128));
            assert_eq!(layout.byte_strides(), dense.byte_strides());
            assert_eq!(layout.span_bytes(), dense.span_bytes());
        }
        for (shape, strides) in
            [([8, 1, 128, 256], [32_768, stride, 256, 1]), ([8, 128, 1, 256], [32_768, 256, stride, 1])]
        {
            let tensor = TensorDesc::strided(&shape, &strides, DType::Bf16).unwrap();
            let layout = PagedLayout::detect(&tensor, &spec).unwrap();
            assert_eq!(layout.spec().kv_stride, 256, "{shape:?} {stride}");
        }
        // Every axis of length 1.
        let one = TensorDesc::strided(&[1, 2, 1, 1, 1], &[stride, 1, stride, stride, stride], DType::Bf16);
        let layout = PagedLayout::detect(&one.unwrap(), &block_size(1)).unwrap();
        assert_eq!((layout.num_slots(), layout.token_bytes(), layout.kv_planes()), (1, 2, 2));
    }
}

/// Genuine heads of 128: no launch with more than 1024 threads to a block.
fn c03_a_hundred_and_twenty_eight_heads(rig: &Rig) {
    let hnd = [2 * 16 * 128 * 128, 16 * 128 * 128, 128, 16 * 128, 1];
    for strides in [None, Some(hnd)] {
        let mut view = View::new(&[3, 2, 16, 128, 128], "block,kv,token,head,dim");
        if let Some(strides) = strides {
            view = view.strides(&strides);
        }
        let cache = rig.cache(&view);
        assert_eq!(cache.registered.paged().layout().num_heads(), 128);
        cache.exact(&slots(&[47, 0, 17]));
        for record in rig.session.iter().flat_map(|s| s.records()) {
            let kernel = record.kind == maru_sim_driver::CopyKind::Kernel;
            assert!(!kernel || record.bytes <= 1024, "{record:?}");
        }
    }
}

/// Heads on axis 2, tokens on axis 3, 18 layers packed.
fn c08_a_packed_view_is_divided_by_the_stated_block(rig: &Rig) {
    let view = View::new(&[4, 2, 4, 16, 64], "block,kv,head,token,dim").strides(&[147_456, 4096, 64, 256, 1]);
    let cache = rig.cache(&view.told(block_size(16)).at(&[2 * 8192 * 5]));
    let strides = cache.registered.paged().layout().byte_strides();
    assert_eq!((strides.token, strides.head), (Some(2 * 256), Some(2 * 64)));
    let all: Vec<i64> = (0..64).collect();
    cache.exact(&slots(&all));
    cache.exact(&slots(&[63]));
    let text = cache.refused(&slots(&[64]), "slot_out_of_range");
    assert!(text.contains("slot 64") && text.contains("63"), "{text}");
}

fn c08_other_packed_views() {
    type Row = (&'static [i64], &'static [i64], u64, Result<(u64, u64, u64), &'static str>);
    let table: &[Row] = &[
        // As many heads as tokens: token-major by rule.
        (&[4, 2, 16, 16, 64], &[147_456, 16_384, 64, 1024, 1], 16, Ok((16, 16, 128))),
        // A block of 12 tokens, 3 heads.
        (&[4, 2, 3, 12, 8], &[20_000, 288, 8, 24, 1], 12, Ok((12, 3, 48))),
        // The stated block is on neither axis, nor a multiple of the token axis.
        (&[4, 2, 4, 16, 64], &[147_456, 4096, 64, 256, 1], 17, Err("layout_mismatch")),
        // Blocks of 64 for the scheduler, of 16 for the kernel: token-major (rank 5), 16 heads.
        (&[4, 2, 16, 4, 64], &[147_456, 4096, 256, 64, 1], 64, Ok((16, 4, 512))),
        // One token to a block.
        (&[9, 2, 4, 1, 64], &[147_456, 4096, 64, 256, 1], 1, Ok((1, 4, 0))),
        // Of a prime.
        (&[5, 2, 13, 3, 8], &[10_000, 312, 24, 8, 1], 13, Ok((13, 3, 48))),
    ];
    for (shape, strides, block, expected) in table {
        let tensor = TensorDesc::strided(shape, strides, DType::Bf16).unwrap();
        let found = PagedLayout::detect(&tensor, &block_size(*block))
            .map(|l| (l.block_size(), l.num_heads(), l.byte_strides().token.unwrap_or(0)))
            .map_err(|e| e.kind());
        assert_eq!(found, *expected, "{shape:?} {block}");
    }
}

fn c09_three_axes_are_one_plane() {
    for (shape, blocks, tokens) in [([512, 64, 576], 512, 64), ([2, 64, 576], 2, 64), ([512, 2, 576], 512, 2)]
    {
        for mla in [true, false] {
            for spec in [block_size(tokens), CacheSpec::default()] {
                let layout = detect(&shape, &CacheSpec { mla, ..spec }).unwrap();
                assert_eq!(layout.kv_planes(), 1);
                assert_eq!((layout.num_blocks(), layout.block_size()), (blocks, tokens));
                assert_eq!(layout.row_bytes(), 1152);
            }
        }
    }
}

fn c09_latent_rows_move_as_one_plane(rig: &Rig) {
    for shape in [[2, 64, 576], [65, 2, 576], [2, 2, 576], [3, 1, 2]] {
        let cache = rig.cache(&View::new(&shape, "block,token,dim"));
        assert_eq!(cache.registered.paged().planes(), 1);
        let last = shape[0] * shape[1] - 1;
        cache.exact(&slots(&[last, 0, 1]));
    }
}

fn c09_an_order_that_contradicts_the_shape_is_an_error() {
    for (shape, words, part) in [
        (&[64, 2, 16, 8, 128][..], "kv,block,token,head,dim", "its kv axis has length 64"),
        (&[2, 64, 16, 8, 128], "block,kv,token,head,dim", "its kv axis has length 64"),
        (&[512, 64, 576], "block,kv,token,head,dim", "5 axes are named, the tensor has 3"),
        (&[64, 2, 16, 8, 128], "block,token,kv,head,dim", "its kv axis has length 16"),
        (&[64, 2, 16, 8, 128], "block,kv,token,head,content,dim", "6 axes are named"),
        (&[64, 2, 16, 8, 128], "block,kv,token,token,dim", "token is named twice"),
        (&[64, 2, 16, 8, 128], "block,kv,head,layer,dim", "needs block and token"),
        (&[64, 2, 16, 8, 128], "slot,kv,token,head,dim", "slot in place of both"),
        (&[64, 2, 16, 8, 128], "block,kv,token,head,layer", "exactly one of dim"),
        (&[64, 2, 16, 8, 127], "block,layer,token,head,kv_dim", "127 cannot be halved"),
        (&[64, 2, 16, 256], "block,kv,token,kv_dim", "kv and kv_dim exclude each other"),
        (&[64, 8, 16, 256], "block,head,token,heads_dim", "head and heads_dim exclude each other"),
    ] {
        let error = detect(shape, &named(words)).unwrap_err();
        assert_eq!(error.kind(), "layout_mismatch");
        assert!(error.to_string().contains(part), "{words}: {error}");
    }
    // A block size that the named order does not have.
    let error =
        detect(&[64, 2, 16, 8, 128], &CacheSpec { block_size: Some(8), ..named("block,kv,token,head,dim") });
    assert_eq!(error.unwrap_err().kind(), "layout_mismatch");
}

fn c09_one_plane_in_other_guises() {
    let mla = |block| CacheSpec { mla: true, ..block_size(block) };
    for (shape, spec, expected) in [
        (&[2, 2, 2][..], mla(2), Ok((2, 2, 4))),
        (&[2, 1, 2], mla(1), Ok((2, 1, 4))),
        (&[1, 64, 576], mla(64), Ok((1, 64, 1152))),
        (&[512, 1, 64, 576], mla(64), Ok((512, 64, 1152))),
        (&[512, 64, 1, 576], mla(64), Err("layout_mismatch")),
        (&[2, 1, 64, 2], mla(64), Ok((2, 64, 4))),
        (&[2, 2, 64, 576], mla(64), Err("layout_mismatch")),
        (&[6, 2, 16, 2, 128], mla(16), Err("layout_mismatch")),
        // A merged slot axis and kernel blocks of one token are the same bytes.
        (&[512, 1, 576], mla(64), Ok((512, 1, 1152))),
        (&[512, 64, 576], mla(96), Err("layout_mismatch")),
        (&[512, 64, 576], CacheSpec { head_size: Some(512), ..mla(64) }, Err("layout_mismatch")),
        (&[512, 64, 576], CacheSpec { num_kv_heads: Some(8), ..mla(64) }, Err("layout_mismatch")),
    ] {
        let found = detect(shape, &spec).map_err(|e| e.kind());
        let found = found.map(|l| {
            assert_eq!(l.kv_planes(), 1);
            (l.num_slots(), l.row_bytes())
        });
        assert_eq!(found, expected.map(|(b, t, row)| (b * t, row)), "{shape:?} {spec:?}");
    }
}

/// Engines that do not exist yet: an error that says what to state, never a guess.
fn shapes_of_engines_to_come() {
    for (shape, spec, kind, part) in [
        (&[4, 3, 2, 16, 2, 64, 2][..], block_size(16), "layout_mismatch", "with 7 axes"),
        (&[4, 3, 2, 16, 2, 64, 2, 1], block_size(16), "layout_mismatch", "with 8 axes"),
        (&[4, 3, 2, 16, 2, 64, 2, 1, 1], block_size(16), "invalid_argument", "9 axes is not supported"),
        (&[4096], block_size(16), "layout_mismatch", "with 1 axes"),
        (&[64, 4096], block_size(16), "layout_mismatch", "with 2 axes"),
        (&[], block_size(16), "invalid_argument", "0 axes"),
        (&[4, 0, 16, 2, 64], block_size(16), "invalid_argument", "axis 1 has length 0"),
        (&[4, 2, 16, -2, 64], block_size(16), "invalid_argument", "axis 3 has length -2"),
        (&[4, 3, 16, 2, 64], block_size(16), "layout_mismatch", "kv axis"),
        (&[4, 2, 16, 2, 64], block_size(0), "invalid_argument", "block_size is 0"),
        (&[4, 2, 16, 2, 64], block_size(u64::MAX), "layout_mismatch", "18446744073709551615"),
        (
            &[4, 2, 16, 2, 64],
            CacheSpec { num_blocks: Some(5), ..block_size(16) },
            "layout_mismatch",
            "5 were stated",
        ),
        (
            &[4, 2, 16, 2, 64],
            CacheSpec { split_kv: true, ..block_size(16) },
            "layout_mismatch",
            "separate K or V",
        ),
        (&[4, 3, 2, 16, 2, 64], CacheSpec { mla: true, ..block_size(16) }, "layout_mismatch", "one plane"),
    ] {
        let error = detect(shape, &spec).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(part), "{part} is not in: {error}");
    }
}

/// What may come and can be stated: blocks of 1, 3, 7 and 12 tokens, pads everywhere, axes in unusual places,
/// opaque blocks of many axes, one layer, one block.
fn odd_geometries_move_exactly(rig: &Rig) {
    for view in [
        View::new(&[7, 2, 1, 3, 8], "block,kv,token,head,dim"),
        View::new(&[5, 2, 3, 5, 4], "block,kv,token,head,dim").at(&[0, 4096]),
        View::new(&[5, 2, 12, 3, 10], "block,kv,token,head,dim").strides(&[1000, 400, 31, 10, 1]),
        View::new(&[2, 7, 7, 1, 6], "kv,block,token,head,dim"),
        // The innermost axis is not the last, blocks are in the middle.
        View::new(&[8, 3, 2, 5, 4], "dim,head,kv,block,token").strides(&[1, 8, 24 * 20, 24 * 4, 24]).named(),
        View::new(&[4, 5, 3, 16], "token,block,head,kv_dim").named(),
        View::new(&[1, 2, 1, 1, 1], "block,kv,token,head,dim"),
        View::new(&[6, 3, 2, 5, 2], "block,layer,kv,token,heads_dim").named(),
        View::new(&[9, 4, 6], "slot,head,dim").split().at(&[0, 4096]).told(block_size(3)),
        View::new(&[3, 2, 5, 2, 3, 7], "block,content")
            .named()
            .told(CacheSpec { axes: Some(axes("block,content")), ..block_size(16) }),
    ] {
        let cache = rig.cache(&view);
        let n = cache.registered.paged().num_slots() as i64;
        let all: Vec<i64> = (0..n).rev().collect();
        cache.exact(&slots(&all));
        cache.exact(&slots(&all[..all.len().div_ceil(2)]).of(n as u64));
    }
}
