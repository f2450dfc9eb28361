//! Detection with some of the facts: the bytes that the engine meant, or an error; never other bytes.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use maru_layout::{Axis, CacheSpec, DType, PagedLayout, TensorDesc};
use proptest::prelude::*;
use proptest::sample::select;

/// Layouts that engines register: axes of the shape, and memory orders of them, outermost first.
const ENGINES: [(&str, &[&str]); 12] = [
    ("block,kv,token,head,dim", &["block,kv,token,head", "block,kv,head,token", "kv,block,token,head"]),
    ("kv,block,token,head,dim", &["kv,block,token,head", "kv,block,head,token", "block,kv,token,head"]),
    ("block,kv,head,token,dim", &["block,kv,head,token"]),
    ("block,head,token,kv_dim", &["block,head,token", "block,token,head", "head,block,token"]),
    ("block,token,head,kv_dim", &["block,token,head"]),
    ("block,kv,token,heads_dim", &["block,kv,token"]),
    ("kv,block,token,heads_dim", &["kv,block,token"]),
    ("block,token,dim", &["block,token"]),
    ("block,head,token,dim", &["block,head,token"]),
    ("block,layer,kv,token,head,dim", &["block,layer,kv,token,head", "block,layer,kv,head,token"]),
    ("block,layer,kv,head,token,dim", &["block,layer,kv,head,token"]),
    ("slot,head,dim", &["slot,head"]),
];

#[derive(Clone, Debug)]
struct Engine {
    axes: &'static str,
    tensor: TensorDesc,
    /// Everything there is to know.
    truth: CacheSpec,
    /// The scheduler's blocks per block of the tensor.
    factor: u64,
}

fn engines() -> impl Strategy<Value = Engine> {
    // Small numbers, so that axes are equal often and 2 is frequent.
    let sizes = (1i64..6, 1i64..7, 1i64..7, prop_oneof![Just(2i64), 1i64..9], 1i64..4, 0i64..3);
    let factor = prop_oneof![3 => Just(1u64), 1 => 2u64..5];
    (select(&ENGINES[..]), any::<prop::sample::Index>(), sizes, factor).prop_map(
        |((axes, orders), order, (nb, bs, nh, hs, layers, pad), factor)| {
            let order = Axis::parse_list(orders[order.index(orders.len())]).unwrap();
            let words = Axis::parse_list(axes).unwrap();
            let one_plane = matches!(axes, "block,token,dim" | "block,head,token,dim" | "slot,head,dim");
            let nh = if one_plane { 1 } else { nh };
            let len = |axis: &Axis| match axis {
                Axis::Block => nb,
                Axis::Token => bs,
                Axis::Slot => nb * bs,
                Axis::Head => nh,
                Axis::Kv => 2,
                Axis::Layer => layers,
                Axis::KvDim => 2 * hs,
                Axis::HeadsDim => nh * hs,
                _ => hs,
            };
            let mut step = len(words.last().unwrap());
            let mut strides = vec![1i64; words.len()];
            for axis in order.iter().rev() {
                strides[words.iter().position(|w| w == axis).unwrap()] = step;
                step *= len(axis);
                // Pages may be padded.
                if *axis == order[1.min(order.len() - 1)] && order[0] == Axis::Block {
                    step += pad;
                }
            }
            let shape: Vec<i64> = words.iter().map(len).collect();
            let some = |n: i64| Some(n as u64);
            let factor = if words.contains(&Axis::Slot) { 1 } else { factor };
            let truth = CacheSpec {
                block_size: some(bs * factor as i64),
                num_kv_heads: some(nh),
                head_size: some(hs),
                num_blocks: some(nb),
                mla: one_plane,
                axes: Some(words),
                ..CacheSpec::default()
            };
            let tensor = TensorDesc::strided(&shape, &strides, DType::Bf16).unwrap();
            Engine { axes, tensor, truth, factor }
        },
    )
}

/// What the rules decide by convention where a shape is both: these are the documented preferences.
fn by_convention(e: &Engine, facts: &CacheSpec) -> bool {
    let shape = e.tensor.shape();
    let has = |word| e.axes.split(',').any(|w| w == word);
    let at = |word| e.axes.split(',').position(|w| w == word).map(|i| shape[i]);
    let heads_first_5 = e.axes == "block,kv,head,token,dim";
    let exact = facts.block_size == at("token");
    // Rank 5 is token-major unless the block size is exactly the other axis.
    let rank_5 = heads_first_5 && (!exact || at("head") == at("token"));
    // An axis that is the stated block size is the token axis, though kernel blocks could explain another.
    let middle = &shape[1..shape.len() - 1];
    let other_is_block = e.factor > 1 && middle.iter().any(|len| Some(*len) == facts.block_size);
    // Flattened heads yield to fused ones.
    let flattened = has("heads_dim") && facts.num_kv_heads == Some(shape[1]);
    rank_5 || other_is_block || flattened
}

/// Every address, in the order of the slab.
fn image(layout: &PagedLayout) -> Vec<u64> {
    let mut all = Vec::new();
    for kv in 0..layout.kv_planes() {
        for l in 0..layout.layers() {
            let base = layout.plane_offset(kv, l).unwrap();
            for s in 0..layout.num_slots() {
                for n in 0..layout.num_heads() {
                    for d in 0..layout.head_size() {
                        all.push(common::address(layout, base, s, n, d));
                    }
                }
            }
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_facts_give_the_right_bytes_or_an_error(
        engine in engines(), block_size in prop::bool::weighted(0.8), know in prop::array::uniform4(any::<bool>()),
    ) {
        let t = &engine.truth;
        let facts = CacheSpec {
            block_size: t.block_size.filter(|_| block_size),
            num_kv_heads: t.num_kv_heads.filter(|_| know[0]),
            head_size: t.head_size.filter(|_| know[1]),
            // The scheduler's own count, only where it is a whole one.
            num_blocks: t.num_blocks.filter(|_| know[2] && engine.factor == 1),
            mla: t.mla && know[3],
            ..CacheSpec::default()
        };
        let named = CacheSpec { num_blocks: None, ..t.clone() };
        let truth = PagedLayout::detect(&engine.tensor, &named).unwrap();
        if let Ok(found) = PagedLayout::detect(&engine.tensor, &facts)
            && !by_convention(&engine, &facts)
        {
            prop_assert_eq!(image(&found), image(&truth), "{} read as {:?}", engine.axes, found.axes());
        }
    }

    #[test]
    fn all_facts_are_enough_or_the_error_says_what_is_missing(engine in engines()) {
        let facts = CacheSpec { axes: None, num_blocks: None, ..engine.truth.clone() };
        match PagedLayout::detect(&engine.tensor, &facts) {
            Ok(_) => {}
            Err(e) if e.kind() == "ambiguous_layout" => {
                let shape = engine.tensor.shape();
                let equal = shape[..shape.len() - 1].contains(&2)
                    || (1..shape.len() - 1).any(|i| shape[i..shape.len() - 1].iter().any(|n| *n == shape[i - 1]))
                    || engine.factor > 1;
                prop_assert!(equal, "asks without need: {}", e);
                prop_assert!(e.to_string().contains("axes="), "{}", e);
            }
            Err(e) => {
                prop_assert_eq!(e.kind(), "layout_mismatch");
                let excused = engine.factor > 1 || by_convention(&engine, &facts);
                prop_assert!(excused, "{} refused: {}", engine.axes, e);
            }
        }
    }
}
