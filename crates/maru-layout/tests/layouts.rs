//! Tensors, byte strides, slabs and fingerprints as plain values.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{assert_error, bf16, blocks_of, dense};
use maru_layout::{
    Axis, DType, LayoutError, PagedLayout, RowKind, SlabLayout, StridedSpec, TensorDesc, planes_overlap,
};

// Tensors.

fn tensor(shape: &[i64], strides: &[i64]) -> Result<TensorDesc, LayoutError> {
    TensorDesc::strided(shape, strides, DType::Bf16)
}

#[test]
fn contiguous_strides_are_computed() {
    let t = bf16(&[6, 2, 16, 2, 128]);
    assert_eq!(t.strides(), [8192, 4096, 256, 128, 1]);
    assert_eq!((t.rank(), t.span_bytes(), t.dtype()), (5, 6 * 8192 * 2, DType::Bf16));
}

#[test]
fn axes_of_length_zero_or_less_are_refused() {
    for len in [0, -1, i64::MIN] {
        let found = TensorDesc::contiguous(&[6, len, 16], DType::Bf16);
        assert_error(found, "invalid_argument", &["axis 1", &format!("length {len};")]);
        assert_error(tensor(&[6, len, 16], &[16, 16, 1]), "invalid_argument", &["axis 1"]);
    }
}

#[test]
fn no_axes_or_more_than_eight_are_refused() {
    assert_error(TensorDesc::contiguous(&[], DType::U8), "invalid_argument", &["0 axes", "1 to 8"]);
    assert!(TensorDesc::contiguous(&[2; 8], DType::U8).is_ok());
    assert_error(TensorDesc::contiguous(&[2; 9], DType::U8), "invalid_argument", &["9 axes", "1 to 8"]);
}

#[test]
fn a_stride_for_each_axis() {
    assert_error(tensor(&[2, 3], &[3]), "invalid_argument", &["1 strides", "2 axes"]);
    assert_error(tensor(&[2, 3], &[6, 3, 1]), "invalid_argument", &["3 strides", "2 axes"]);
}

#[test]
fn strides_that_repeat_or_reverse_are_refused() {
    for stride in [0, -1, -128, i64::MIN] {
        let found = tensor(&[4, 3], &[stride, 1]);
        assert_error(found, "invalid_argument", &["axis 0 (length 4)", &format!("stride {stride};")]);
    }
}

#[test]
fn strides_of_single_axes_are_arbitrary() {
    for stride in [0, -1, i64::MIN, i64::MAX] {
        assert_eq!(tensor(&[4, 1, 3], &[3, stride, 1]).unwrap().strides(), [3, 0, 1]);
    }
}

#[test]
fn positions_that_share_memory_are_refused() {
    assert_error(tensor(&[4, 3], &[2, 1]), "invalid_argument", &["[4, 3]", "[2, 1]", "would share memory"]);
    assert_error(tensor(&[3, 4], &[3, 2]), "invalid_argument", &["share memory"]);
    assert!(tensor(&[2, 3], &[3, 2]).is_ok(), "interleaved, yet apart");
}

#[test]
fn spans_beyond_63_bits_are_refused() {
    for shape in [&[i64::MAX, 2][..], &[1 << 62, 2], &[i64::MAX], &[1 << 31, 1 << 31, 2]] {
        assert_error(TensorDesc::contiguous(shape, DType::Bf16), "invalid_argument", &["2^63"]);
    }
    assert!(TensorDesc::contiguous(&[i64::MAX], DType::U8).is_ok());
    assert_error(tensor(&[2, 2], &[i64::MAX, 1]), "invalid_argument", &["2^63"]);
    assert_error(tensor(&[3, 2], &[i64::MAX, 1]), "invalid_argument", &["2^63"]);
    assert!(tensor(&[2, 2], &[1 << 60, 1]).is_ok());
}

#[test]
fn words_of_axes_and_types() {
    for axis in Axis::ALL {
        assert_eq!(axis.to_string().parse::<Axis>().unwrap(), axis);
    }
    for dtype in DType::ALL {
        assert_eq!(dtype.to_string().parse::<DType>().unwrap(), dtype);
    }
    assert_eq!(Axis::parse_list("block, kv ,dim").unwrap(), [Axis::Block, Axis::Kv, Axis::Dim]);
    assert_error(Axis::parse_list("block,,dim"), "invalid_argument", &["\"\"", "heads_dim"]);
    assert_error(Axis::parse_list("block,heads"), "invalid_argument", &["heads", "slot"]);
    assert_error("bfloat16".parse::<DType>(), "invalid_argument", &["bfloat16", "bf16", "raw64"]);
    assert_error("BF16".parse::<DType>(), "invalid_argument", &["BF16"]);
}

// Byte strides.

fn spec() -> StridedSpec {
    StridedSpec {
        dtype: DType::Bf16,
        row_kind: RowKind::Plain,
        kv_planes: 2,
        kv_stride: 512,
        layers: 1,
        layer_stride: 0,
        num_blocks: 4,
        block_size: 16,
        num_heads: 2,
        head_size: 8,
        block_stride: 1024,
        token_stride: 32,
        head_stride: 16,
    }
}

#[test]
fn strides_alone_make_the_same_layout() {
    let numbers = PagedLayout::from_strides(&spec()).unwrap();
    let read = PagedLayout::detect(&bf16(&[4, 2, 16, 2, 8]), &blocks_of(16)).unwrap();
    assert_eq!(numbers.spec(), read.spec());
    assert!(numbers.axes().is_empty());
    assert_eq!((numbers.span_bytes(), numbers.plane_bytes()), (4096, 3 * 1024 + 512));
}

#[test]
fn counts_and_strides_of_zero_are_refused() {
    type Spoil = fn(&mut StridedSpec);
    let spoil: [(&str, Spoil); 10] = [
        ("kv_planes", |s| s.kv_planes = 0),
        ("kv_planes", |s| s.kv_planes = 3),
        ("layers", |s| s.layers = 0),
        ("num_blocks", |s| s.num_blocks = 0),
        ("block_size", |s| s.block_size = 0),
        ("num_heads", |s| s.num_heads = 0),
        ("head_size", |s| s.head_size = 0),
        ("kv stride", |s| s.kv_stride = 0),
        ("token stride", |s| s.token_stride = 0),
        ("head stride", |s| s.head_stride = 0),
    ];
    for (what, spoil) in spoil {
        let mut s = spec();
        spoil(&mut s);
        assert_error(PagedLayout::from_strides(&s), "invalid_argument", &[what, "is "]);
    }
}

#[test]
fn huge_strides_and_counts_are_errors() {
    let spoil: [fn(&mut StridedSpec); 9] = [
        |s| s.num_blocks = u64::MAX,
        |s| s.block_size = u64::MAX,
        |s| s.num_heads = u64::MAX,
        |s| s.head_size = u64::MAX,
        |s| s.layers = u64::MAX,
        |s| s.block_stride = u64::MAX,
        |s| s.token_stride = u64::MAX / 2,
        |s| s.head_stride = 1 << 63,
        |s| s.kv_stride = 1 << 63,
    ];
    for (i, spoil) in spoil.into_iter().enumerate() {
        let mut s = spec();
        spoil(&mut s);
        assert!(PagedLayout::from_strides(&s).is_err(), "{i}");
    }
}

#[test]
fn overlapping_strides_are_refused() {
    for (kv, block, token, head) in
        [(256, 1024, 32, 16), (512, 512, 32, 16), (512, 1024, 16, 16), (512, 1024, 32, 8)]
    {
        let s = StridedSpec {
            kv_stride: kv,
            block_stride: block,
            token_stride: token,
            head_stride: head,
            ..spec()
        };
        assert_error(PagedLayout::from_strides(&s), "invalid_argument", &["share memory"]);
    }
}

#[test]
fn planes_that_are_not_there_are_refused() {
    let layout = PagedLayout::from_strides(&spec()).unwrap();
    assert_eq!(layout.plane_offset(1, 0).unwrap(), 512);
    assert_error(layout.plane_offset(2, 0), "invalid_argument", &["plane is 2", "0 to 1"]);
    assert_error(layout.plane_offset(0, 1), "invalid_argument", &["layer is 1", "0 to 0"]);
}

#[test]
fn overlapping_layers_are_found() {
    let layout = PagedLayout::detect(&bf16(&[4, 2, 16, 2, 8]), &blocks_of(16)).unwrap();
    assert_eq!(planes_overlap(&layout, &[0, 512, 4096, 4608]), None);
    assert_eq!(planes_overlap(&layout, &[4096, 512, 0, 4096]), Some((0, 3)), "the same tensor twice");
    assert_eq!(planes_overlap(&layout, &[0, 512, 1024]), Some((0, 2)), "a block too near");
    assert_eq!(planes_overlap(&layout, &[]), None);
    assert_eq!(planes_overlap(&layout, &[u64::MAX, 0]), None);
}

// Slabs.

#[test]
fn packed_offsets_follow_the_formula() {
    let (planes, layers, tokens, heads, width) = (2, 3, 5, 4, 6);
    let slab = SlabLayout::packed(planes, layers, tokens, heads * width, DType::Bf16).unwrap();
    let [kv_stride, layer_stride, token_stride] = slab.strides();
    let mut seen = 0;
    for kv in 0..planes {
        for l in 0..layers {
            for t in 0..tokens {
                let off = (((kv * layers + l) * tokens + t) * heads * width) * 2;
                assert_eq!(kv * kv_stride + l * layer_stride + t * token_stride, off);
                seen += 1;
            }
        }
    }
    assert_eq!(seen, 30);
    assert_eq!(slab.bytes(), 2 * 3 * 5 * 24 * 2);
    assert_eq!((slab.planes(), slab.layers(), slab.tokens(), slab.row_bytes()), (2, 3, 5, 48));
}

#[test]
fn a_layer_object_and_a_token_major_one() {
    let object = SlabLayout::layer_object(2, 5, 24, DType::Bf16).unwrap();
    assert_eq!((object.strides(), object.bytes()), ([240, 0, 48], 480));
    let token_major = SlabLayout::token_major(2, 5, 24, DType::Bf16).unwrap();
    assert_eq!((token_major.strides(), token_major.bytes()), ([48, 0, 96], 480));
    assert_ne!(object.fingerprint(), token_major.fingerprint());
    let one_plane = SlabLayout::token_major(1, 5, 24, DType::Bf16).unwrap();
    assert_eq!(
        one_plane.fingerprint(),
        SlabLayout::layer_object(1, 5, 24, DType::Bf16).unwrap().fingerprint()
    );
}

#[test]
fn the_slab_does_not_depend_on_the_paged_side() {
    let slabs = [
        (bf16(&[6, 2, 16, 2, 8]), common::known(16, 2, 8)),
        (bf16(&[2, 9, 32, 2, 8]), common::known(32, 2, 8)),
        (bf16(&[6, 2, 16, 16]), common::known(16, 2, 8)),
        (common::strided(&[6, 2, 16, 2, 8], &[512, 256, 8, 128, 1], DType::Bf16), common::known(16, 2, 8)),
    ]
    .map(|(tensor, spec)| {
        let layout = PagedLayout::detect(&tensor, &spec).unwrap();
        SlabLayout::of_cache(&layout, 2, 4, 256).unwrap()
    });
    for slab in &slabs[1..] {
        assert_eq!(slab, &slabs[0]);
        assert_eq!(slab.fingerprint(), slabs[0].fingerprint());
    }
}

#[test]
fn impossible_slabs_are_refused() {
    let packed = |p, l, t, r| SlabLayout::packed(p, l, t, r, DType::Bf16);
    assert_error(packed(0, 1, 1, 1), "invalid_argument", &["planes is 0"]);
    assert_error(packed(3, 1, 1, 1), "invalid_argument", &["planes is 3", "1 or 2"]);
    assert_error(packed(2, 0, 1, 1), "invalid_argument", &["layers is 0"]);
    assert_error(packed(2, 1, 0, 1), "invalid_argument", &["tokens is 0"]);
    assert_error(packed(2, 1, 1, 0), "invalid_argument", &["row bytes is 0"]);
    for (l, t, r) in [(u64::MAX, 1, 1), (1, u64::MAX, 1), (1, 1, u64::MAX), (1 << 21, 1 << 21, 1 << 21)] {
        assert_error(packed(2, l, t, r), "invalid_argument", &["slab", "63 bits"]);
    }
    let strided = |strides| SlabLayout::strided([2, 3, 5], 48, strides, DType::Bf16);
    assert!(strided([720, 240, 48]).is_ok());
    assert_error(strided([0, 240, 48]), "invalid_argument", &["stride is 0"]);
    assert_error(strided([720, 240, 40]), "invalid_argument", &["share memory"]);
    let odd = SlabLayout::strided([1, 1, 1], 47, [0; 3], DType::Bf16);
    assert_error(odd, "invalid_argument", &["47", "2-byte"]);
}

#[test]
fn padded_slabs_keep_their_strides() {
    let slab = SlabLayout::strided([2, 3, 5], 48, [4096, 512, 64], DType::Bf16).unwrap();
    assert_eq!(slab.strides(), [4096, 512, 64]);
    assert_eq!(slab.bytes(), 4096 + 2 * 512 + 4 * 64 + 48);
}

// Fingerprints.

#[test]
fn fingerprints_are_pinned() {
    // Keys of pools out there: these numbers may never change. Computed from the documented byte string by
    // another implementation of XXH3-64.
    let packed = |p, l, t, r, d| SlabLayout::packed(p, l, t, r, d).unwrap().fingerprint().to_string();
    assert_eq!(packed(2, 32, 256, 1024, DType::Bf16), "47fe9452de0fc1f7");
    assert_eq!(packed(2, 64, 256, 1024, DType::Bf16), "9c290c8479d5cd33");
    assert_eq!(packed(1, 61, 256, 576, DType::Bf16), "a5999b0478e933cb");
    assert_eq!(packed(2, 32, 256, 1024, DType::Fp8E4m3), "17c78817ece1b258");
    let opaque = SlabLayout::packed(1, 7, 3, 500, DType::U8).unwrap();
    assert_eq!(opaque.with_row_kind(RowKind::OpaqueBlocks).fingerprint().to_string(), "b4994d849af84984");
}

#[test]
fn fingerprints_tell_every_number_apart() {
    let base = || SlabLayout::packed(2, 4, 8, 16, DType::Bf16).unwrap();
    let mut all = vec![
        base(),
        SlabLayout::packed(1, 4, 8, 16, DType::Bf16).unwrap(),
        SlabLayout::packed(1, 8, 8, 16, DType::Bf16).unwrap(),
        SlabLayout::packed(2, 8, 4, 16, DType::Bf16).unwrap(),
        SlabLayout::packed(2, 4, 16, 8, DType::Bf16).unwrap(),
        SlabLayout::packed(2, 4, 8, 32, DType::Bf16).unwrap(),
        SlabLayout::strided([2, 4, 8], 32, [2048, 512, 64], DType::Bf16).unwrap(),
        SlabLayout::strided([2, 4, 8], 32, [32, 512, 64], DType::Bf16).unwrap(),
        base().with_row_kind(RowKind::OpaqueRows),
        base().with_row_kind(RowKind::OpaqueBlocks),
    ];
    all.extend(
        DType::ALL
            .into_iter()
            .filter(|d| *d != DType::Bf16)
            .map(|d| SlabLayout::packed(2, 4, 8, 32 / d.size(), d).unwrap()),
    );
    let mut prints: Vec<_> = all.iter().map(SlabLayout::fingerprint).collect();
    prints.sort_unstable();
    prints.dedup();
    assert_eq!(prints.len(), all.len());
}

#[test]
fn fingerprints_depend_on_geometry_only() {
    let made = SlabLayout::packed(2, 4, 8, 16, DType::Bf16).unwrap();
    let strided = SlabLayout::strided([2, 4, 8], 32, [1024, 256, 32], DType::Bf16).unwrap();
    assert_eq!(made.fingerprint(), strided.fingerprint());
    let layout = PagedLayout::detect(&dense(&[9, 2, 4, 2, 8], DType::Bf16), &blocks_of(4)).unwrap();
    assert_eq!(SlabLayout::of_cache(&layout, 2, 4, 8).unwrap().fingerprint(), made.fingerprint());
}

#[test]
fn opaque_caches_make_opaque_slabs() {
    let spec = maru_layout::CacheSpec { axes: common::axes("block,content"), ..Default::default() };
    let layout = PagedLayout::detect(&dense(&[7, 500], DType::U8), &spec).unwrap();
    let slab = SlabLayout::of_cache(&layout, 1, 2, 3).unwrap();
    assert_eq!((slab.row_kind(), slab.row_bytes()), (RowKind::OpaqueBlocks, 500));
}
