//! Every address of every engine format against indexing written from the documented table.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use common::{address, assert_error};
use maru_layout::{
    Axis, CopyPlan, DType, EngineFormat, EngineGeometry, EngineOp, EnginePlanes, EnginePointers, RowKind,
    SlabLayout,
};

/// Sizes of a small cache, all different, so that no two axes can be mistaken for each other.
struct Sizes {
    l: u64,
    nb: u64,
    bs: u64,
    nh: u64,
    /// Elements of one head in one plane: `HS`, `D`, or the packed content `C`.
    width: u64,
    /// Elements from block to block, where the table has `step`.
    step: u64,
}

impl Sizes {
    fn h(&self) -> u64 {
        self.nh * self.width
    }
}

/// `(pointer, element)` of plane `kv`, layer `l`, slot `s`, head `n`, position `d`.
type Index = fn(&Sizes, u64, u64, u64, u64, u64) -> (u64, u64);

fn geometry(z: &Sizes, dtype: DType, head_size: u64, content: Option<u64>) -> EngineGeometry {
    EngineGeometry {
        num_blocks: z.nb,
        block_size: z.bs,
        num_heads: z.nh,
        head_size,
        layers: z.l,
        dtype,
        block_stride_elems: 0,
        content_width: content,
    }
}

/// Pointers far apart and in no order.
fn pointers(n: u64) -> Vec<u64> {
    (0..n).map(|i| 0x10_0000_0000 + ((i * 7) % n) * 0x1000_0000).collect()
}

fn check(z: &Sizes, planes: &EnginePlanes, kv_planes: u64, index: Index) {
    assert_eq!(planes.planes(), kv_planes);
    assert_eq!(planes.layers(), z.l);
    let pointers = pointers(planes.pointer_count());
    let bases = planes.bases(&pointers).unwrap();
    assert_eq!(bases.len() as u64, kv_planes * z.l);
    let element = planes.layout().dtype().size();
    let mut checked = 0u64;
    for kv in 0..kv_planes {
        for l in 0..z.l {
            for s in 0..z.nb * z.bs {
                for n in 0..z.nh {
                    for d in 0..z.width {
                        let (pointer, at) = index(z, kv, l, s, n, d);
                        let expect = pointers[pointer as usize] + at * element;
                        let base = bases[(kv * z.l + l) as usize];
                        assert_eq!(address(planes.layout(), base, s, n, d), expect, "{kv} {l} {s} {n} {d}");
                        checked += 1;
                    }
                }
            }
        }
    }
    assert_eq!(checked, kv_planes * z.l * z.nb * z.bs * z.h());
    let slab = SlabLayout::of_cache(planes.layout(), planes.planes(), planes.layers(), 5).unwrap();
    let plan = CopyPlan::new(planes.layout(), &slab, bases).unwrap();
    assert_eq!(plan.geometry().num_slots, z.nb * z.bs);
}

fn check_plain(number: i64, name: &str, op: EngineOp, kv_planes: u64, index: Index) {
    let format = EngineFormat::from_number(number).unwrap();
    assert_eq!((format.number(), format.name()), (number, name));
    for dtype in [DType::Bf16, DType::U8] {
        let z = Sizes { l: 3, nb: 5, bs: 4, nh: 2, width: 6, step: 0 };
        let planes = format.planes_of(op, &geometry(&z, dtype, z.width, None)).unwrap();
        assert_eq!(planes.layout().row_kind(), RowKind::Plain);
        check(&z, &planes, kv_planes, index);
    }
}

fn check_latent(number: i64, name: &str, index: Index) {
    let format = EngineFormat::from_number(number).unwrap();
    assert_eq!(format.name(), name);
    let z = Sizes { l: 3, nb: 5, bs: 4, nh: 1, width: 7, step: 0 };
    for op in [EngineOp::Token, EngineOp::Block] {
        let planes = format.planes_of(op, &geometry(&z, DType::Bf16, z.width, None)).unwrap();
        check(&z, &planes, 1, index);
    }
}

/// One opaque plane; tight, and with padded pages.
fn check_packed(number: i64, name: &str, index: Index) {
    let format = EngineFormat::from_number(number).unwrap();
    assert_eq!(format.name(), name);
    for pad in [0, 10] {
        let (l, nb, bs, nh, width) = (2, 5, 4, 3, 8);
        let z = Sizes { l, nb, bs, nh, width, step: bs * nh * width + pad };
        let content = if number >= 12 { Some(width) } else { None };
        let mut g = geometry(&z, DType::U8, width / 2, content);
        g.block_stride_elems = if pad == 0 { 0 } else { z.step };
        let planes = format.planes_of(EngineOp::Token, &g).unwrap();
        assert_eq!(planes.layout().row_kind(), RowKind::OpaqueRows);
        assert_eq!(planes.layout().token_bytes(), nh * width);
        check(&z, &planes, 1, index);
    }
}

fn kv_first(z: &Sizes, kv: u64, s: u64, n: u64, d: u64) -> u64 {
    let i = n * z.width + d;
    kv * z.nb * z.bs * z.h() + s * z.h() + i
}

#[test]
fn format_0_token_op_reads_kv_first_layers() {
    check_plain(0, "NB_NL_TWO_BS_NH_HS", EngineOp::Token, 2, |z, kv, l, s, n, d| {
        (l, kv_first(z, kv, s, n, d))
    });
}

#[test]
fn format_0_block_op_reads_one_cross_layer_tensor() {
    check_plain(0, "NB_NL_TWO_BS_NH_HS", EngineOp::Block, 2, |z, kv, l, s, n, d| {
        let (b, o, i) = (s / z.bs, s % z.bs, n * z.width + d);
        (0, ((b * z.l + l) * 2 + kv) * z.bs * z.h() + o * z.h() + i)
    });
}

#[test]
fn format_1_kv_first() {
    for op in [EngineOp::Token, EngineOp::Block] {
        check_plain(1, "NL_X_TWO_NB_BS_NH_HS", op, 2, |z, kv, l, s, n, d| (l, kv_first(z, kv, s, n, d)));
    }
}

#[test]
fn format_2_blocks_first() {
    check_plain(2, "NL_X_NB_TWO_BS_NH_HS", EngineOp::Token, 2, |z, kv, l, s, n, d| {
        let (b, o, i) = (s / z.bs, s % z.bs, n * z.width + d);
        (l, (b * 2 + kv) * z.bs * z.h() + o * z.h() + i)
    });
}

#[test]
fn format_3_latent_blocks() {
    check_latent(3, "NL_X_NB_BS_HS", |z, _, l, s, _, d| (l, s * z.width + d));
}

#[test]
fn format_4_key_list_then_value_list() {
    check_plain(4, "TWO_X_NL_X_NBBS_NH_HS", EngineOp::Token, 2, |z, kv, l, s, n, d| {
        (kv * z.l + l, s * z.h() + n * z.width + d)
    });
}

#[test]
fn format_5_latent_slots() {
    check_latent(5, "NL_X_NBBS_ONE_HS", |z, _, l, s, _, d| (l, s * z.width + d));
}

#[test]
fn format_6_kv_first_heads_first() {
    check_plain(6, "NL_X_TWO_NB_NH_BS_HS", EngineOp::Token, 2, |z, kv, l, s, n, d| {
        let (b, o) = (s / z.bs, s % z.bs);
        let block = z.bs * z.h();
        (l, kv * z.nb * block + b * block + n * z.bs * z.width + o * z.width + d)
    });
}

#[test]
fn format_7_blocks_first_heads_first() {
    check_plain(7, "NL_X_NB_TWO_NH_BS_HS", EngineOp::Token, 2, |z, kv, l, s, n, d| {
        let (b, o) = (s / z.bs, s % z.bs);
        (l, (b * 2 + kv) * z.bs * z.h() + n * z.bs * z.width + o * z.width + d)
    });
}

#[test]
fn format_8_one_cross_layer_tensor_heads_first() {
    for op in [EngineOp::Token, EngineOp::Block] {
        check_plain(8, "NB_NL_TWO_NH_BS_HS", op, 2, |z, kv, l, s, n, d| {
            let (b, o) = (s / z.bs, s % z.bs);
            (0, ((b * z.l + l) * 2 + kv) * z.bs * z.h() + n * z.bs * z.width + o * z.width + d)
        });
    }
}

#[test]
fn format_9_key_and_value_lists_of_blocks() {
    check_plain(9, "TWO_X_NL_X_NB_BS_NH_HS", EngineOp::Token, 2, |z, kv, l, s, n, d| {
        let (b, o, i) = (s / z.bs, s % z.bs, n * z.width + d);
        (kv * z.l + l, b * z.bs * z.h() + o * z.h() + i)
    });
}

fn packed_heads_first(z: &Sizes, _: u64, l: u64, s: u64, n: u64, c: u64) -> (u64, u64) {
    let (b, o) = (s / z.bs, s % z.bs);
    (l, b * z.step + n * z.bs * z.width + o * z.width + c)
}

fn packed_tokens_first(z: &Sizes, _: u64, l: u64, s: u64, n: u64, c: u64) -> (u64, u64) {
    let (b, o, i) = (s / z.bs, s % z.bs, n * z.width + c);
    (l, b * z.step + o * z.nh * z.width + i)
}

#[test]
fn format_10_packed_heads_first() {
    check_packed(10, "NL_X_NB_NH_BS_TWO_HS", packed_heads_first);
}

#[test]
fn format_11_packed_tokens_first() {
    check_packed(11, "NL_X_NB_BS_NH_TWO_HS", packed_tokens_first);
}

#[test]
fn format_12_content_heads_first() {
    check_packed(12, "NL_X_NB_NH_BS_CS", packed_heads_first);
}

#[test]
fn format_13_content_tokens_first() {
    check_packed(13, "NL_X_NB_BS_NH_CS", packed_tokens_first);
}

#[test]
fn format_16_key_and_value_tensor_per_layer() {
    check_plain(16, "NL_X_TWO_X_NB_BS_NH_HS", EngineOp::Token, 2, |z, kv, l, s, n, d| {
        (2 * l + kv, s * z.h() + n * z.width + d)
    });
}

#[test]
fn refused_formats_are_refused_by_name() {
    for (number, name) in [
        (14, "NL_X_NB_BSV_BSS"),
        (15, "NL_X_TWO_NB_NH_ONE_BS_HS"),
        (17, "NL_X_NP_X_NB_BS_ONE_HS"),
        (18, "NL_X_NB_BS_NH_HS"),
    ] {
        assert_error(EngineFormat::from_number(number), "unsupported_format", &[name, &number.to_string()]);
        assert_error(EngineFormat::from_name(name), "unsupported_format", &[name, &number.to_string()]);
    }
}

#[test]
fn unknown_numbers_and_names_are_refused() {
    for number in [-1, 19, 20, 255, i64::MIN, i64::MAX] {
        assert_error(
            EngineFormat::from_number(number),
            "unsupported_format",
            &[&number.to_string(), "unknown"],
        );
    }
    for name in ["", "NL_X_TWO_NB_BS_NH_H", "nl_x_two_nb_bs_nh_hs", "1"] {
        let listed = ["NL_X_TWO_NB_BS_NH_HS", "NL_X_TWO_X_NB_BS_NH_HS"];
        assert_error(EngineFormat::from_name(name), "unsupported_format", &listed);
    }
}

#[test]
fn numbers_and_names_agree_and_are_complete() {
    let numbers: Vec<i64> = EngineFormat::supported().map(EngineFormat::number).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16]);
    for format in EngineFormat::supported() {
        assert_eq!(EngineFormat::from_name(format.name()).unwrap(), format);
        assert_eq!(EngineFormat::from_number(format.number()).unwrap(), format);
    }
    assert_eq!(EngineFormat::known().map(|k| k.0).collect::<Vec<_>>(), (0..19).collect::<Vec<_>>());
}

#[test]
fn pointer_counts_follow_the_format() {
    let z = Sizes { l: 3, nb: 2, bs: 4, nh: 2, width: 6, step: 0 };
    for (number, op, count) in [
        (0, EngineOp::Token, 3),
        (0, EngineOp::Block, 1),
        (1, EngineOp::Token, 3),
        (4, EngineOp::Token, 6),
        (8, EngineOp::Token, 1),
        (9, EngineOp::Block, 6),
        (16, EngineOp::Token, 6),
    ] {
        let format = EngineFormat::from_number(number).unwrap();
        let planes = format.planes_of(op, &geometry(&z, DType::Bf16, 6, None)).unwrap();
        assert_eq!(planes.pointer_count(), count, "{format}");
        for wrong in [0, count - 1, count + 1, 2 * count] {
            let given = vec![0x1000; wrong as usize];
            if wrong != count {
                let parts = [format.name(), &count.to_string(), &wrong.to_string()];
                assert_error(planes.bases(&given), "invalid_argument", &parts);
            }
        }
    }
}

#[test]
fn padded_pages_move_the_block_step_only() {
    let z = Sizes { l: 2, nb: 3, bs: 4, nh: 2, width: 6, step: 0 };
    let mut g = geometry(&z, DType::Bf16, 6, None);
    // A block of format 2 holds K and V of 4 tokens of 12 elements: 96 elements.
    g.block_stride_elems = 112;
    let planes = EngineFormat::from_number(2).unwrap().planes_of(EngineOp::Token, &g).unwrap();
    let s = planes.layout().spec();
    assert_eq!((s.kv_stride, s.block_stride, s.token_stride, s.head_stride), (96, 224, 24, 12));
}

#[test]
fn a_cross_layer_step_may_be_padded_too() {
    let z = Sizes { l: 3, nb: 3, bs: 4, nh: 2, width: 6, step: 0 };
    let mut g = geometry(&z, DType::Bf16, 6, None);
    g.block_stride_elems = 3 * 96 + 32;
    let planes = EngineFormat::from_number(8).unwrap().planes_of(EngineOp::Block, &g).unwrap();
    assert_eq!(planes.layout().byte_strides().block, Some((3 * 96 + 32) * 2));
    assert_eq!(planes.bases(&[1 << 20]).unwrap()[1], (1 << 20) + 96 * 2);
}

#[test]
fn padded_pages_under_kv_first_leave_the_values_plane_open() {
    let z = Sizes { l: 2, nb: 3, bs: 4, nh: 2, width: 6, step: 0 };
    for number in [1, 6] {
        let mut g = geometry(&z, DType::Bf16, 6, None);
        g.block_stride_elems = 64;
        let planes = EngineFormat::from_number(number).unwrap().planes_of(EngineOp::Token, &g);
        assert_error(planes, "invalid_argument", &["block_stride_elems is 64", "48"]);
        g.block_stride_elems = 48;
        assert!(EngineFormat::from_number(number).unwrap().planes_of(EngineOp::Token, &g).is_ok());
    }
}

#[test]
fn a_block_step_below_the_block_is_refused() {
    let z = Sizes { l: 2, nb: 3, bs: 4, nh: 2, width: 6, step: 0 };
    let mut g = geometry(&z, DType::Bf16, 6, None);
    g.block_stride_elems = 95;
    let planes = EngineFormat::from_number(2).unwrap().planes_of(EngineOp::Token, &g);
    assert_error(planes, "invalid_argument", &["block_stride_elems is 95", "96"]);
}

#[test]
fn content_width_is_stated_or_implied_never_both() {
    let z = Sizes { l: 1, nb: 3, bs: 4, nh: 2, width: 6, step: 0 };
    let of = |number, content| {
        let format = EngineFormat::from_number(number).unwrap();
        format.planes_of(EngineOp::Token, &geometry(&z, DType::U8, 6, content))
    };
    assert_eq!(of(10, None).unwrap().layout().head_size(), 12);
    assert_eq!(of(11, Some(12)).unwrap().layout().head_size(), 12);
    assert_error(of(10, Some(13)), "invalid_argument", &["content_width is 13", "12"]);
    assert_eq!(of(12, Some(13)).unwrap().layout().head_size(), 13);
    assert_error(of(13, None), "invalid_argument", &["content_width"]);
    assert_eq!(of(1, Some(6)).unwrap().layout().head_size(), 6);
    assert_error(of(1, Some(12)), "invalid_argument", &["content_width is 12", "6"]);
}

#[test]
fn formats_without_heads_take_one() {
    let z = Sizes { l: 1, nb: 3, bs: 4, nh: 2, width: 6, step: 0 };
    for number in [3, 5] {
        let planes = EngineFormat::from_number(number)
            .unwrap()
            .planes_of(EngineOp::Token, &geometry(&z, DType::Bf16, 6, None));
        assert_error(planes, "invalid_argument", &["num_heads is 2"]);
    }
}

#[test]
fn absurd_geometries_are_errors() {
    let z = Sizes { l: 1, nb: 3, bs: 4, nh: 1, width: 6, step: 0 };
    for format in EngineFormat::supported() {
        for op in [EngineOp::Token, EngineOp::Block] {
            let content = if format.number() >= 12 { Some(6) } else { None };
            let content = if format.number() == 16 { None } else { content };
            let good = geometry(&z, DType::Bf16, 6, content);
            assert!(format.planes_of(op, &good).is_ok(), "{format}");
            let breakers: [fn(&mut EngineGeometry); 9] = [
                |g| g.num_blocks = 0,
                |g| g.num_blocks = u64::MAX,
                |g| g.block_size = 0,
                |g| g.block_size = 1 << 62,
                |g| g.num_heads = 0,
                |g| g.num_heads = u64::MAX,
                |g| g.layers = 0,
                |g| g.layers = u64::MAX,
                |g| g.block_stride_elems = u64::MAX,
            ];
            for (i, spoil) in breakers.into_iter().enumerate() {
                let mut g = good.clone();
                spoil(&mut g);
                assert!(format.planes_of(op, &g).is_err(), "{format} {i}");
            }
        }
    }
}

#[test]
fn pointers_that_wrap_are_errors() {
    let z = Sizes { l: 1, nb: 3, bs: 4, nh: 2, width: 6, step: 0 };
    let format = EngineFormat::from_number(1).unwrap();
    let planes = format.planes_of(EngineOp::Token, &geometry(&z, DType::Bf16, 6, None)).unwrap();
    assert_error(planes.bases(&[u64::MAX - 300]), "invalid_argument", &["address"]);
}

#[test]
fn heads_may_be_unknown_where_they_lie_side_by_side() {
    let z = Sizes { l: 1, nb: 3, bs: 4, nh: 1, width: 12, step: 0 };
    let wide = geometry(&z, DType::Bf16, 12, None);
    let split = EngineGeometry { num_heads: 2, head_size: 6, ..wide.clone() };
    let format = EngineFormat::from_number(2).unwrap();
    let of = |g| {
        let planes = format.planes_of(EngineOp::Token, g).unwrap();
        let slab = SlabLayout::packed(2, 1, 8, 12, DType::Bf16).unwrap();
        *CopyPlan::new(planes.layout(), &slab, planes.bases(&[4096]).unwrap()).unwrap().geometry()
    };
    assert_eq!(of(&wide), of(&split));
}

#[test]
fn orders_and_pointers_can_be_asked() {
    let format = EngineFormat::from_number(0).unwrap();
    assert_eq!(format.pointers(EngineOp::Token), EnginePointers::PerLayer);
    assert_eq!(format.pointers(EngineOp::Block), EnginePointers::One);
    assert_eq!(Axis::join(format.order(EngineOp::Block)), "block,layer,kv,token,head,dim");
    assert_eq!(EngineFormat::from_number(16).unwrap().pointers(EngineOp::Token), EnginePointers::LayerMajor);
    assert_eq!(EngineFormat::from_number(12).unwrap().planes(), 1);
    assert_eq!(EngineFormat::from_number(4).unwrap().planes(), 2);
    assert_eq!(format!("{format}"), "NB_NL_TWO_BS_NH_HS");
    assert_eq!(format!("{format:?}"), "EngineFormat(0 NB_NL_TWO_BS_NH_HS)");
}
