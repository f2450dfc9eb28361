//! What the ordinary layouts come to: how many commands, of what shape.

use maru_layout::{DType, Direction, SlabLayout};

use super::tests::{Cache, DRIVER, planned};
use super::*;

/// Layers of a number of heads of 128 bf16 elements, 64 blocks of 16; `place` as in [`Cache::new`].
fn model(axes: &str, memory: &str, (layers, heads): (u64, u64), place: impl Fn(u64, u64) -> u64) -> Cache {
    let names: Vec<&str> = axes.split(',').collect();
    let lengths: Vec<(&str, u64)> = names
        .iter()
        .map(|n| match *n {
            "block" => (*n, 64),
            "kv" => (*n, 2),
            "token" => (*n, 16),
            "head" => (*n, heads),
            "layer" => (*n, layers),
            "kv_dim" => (*n, 256),
            _ => (*n, 128),
        })
        .collect();
    let order: Vec<(usize, u64)> =
        memory.split(',').map(|n| (names.iter().position(|m| *m == n).unwrap(), 0)).collect();
    Cache::new(&lengths, &order, DType::Bf16, layers, axes == SPLIT, place)
}

/// 256 tokens in these blocks.
fn in_blocks(blocks: &[i64]) -> Vec<i64> {
    blocks.iter().flat_map(|b| (0..16).map(move |o| b * 16 + o)).collect()
}

fn scattered() -> Vec<i64> {
    in_blocks(&[9, 60, 2, 31, 17, 44, 5, 58, 23, 12, 50, 37, 0, 41, 28, 19])
}

fn consecutive() -> Vec<i64> {
    in_blocks(&(8..24).collect::<Vec<_>>())
}

/// Units, layers of the first, commands of the first, and the width, rows and slices of its first.
type Summary = (usize, usize, usize, (u64, u64, u64));

fn summary_with(cache: &Cache, slots: &[i64], limits: Limits) -> Summary {
    let planes = cache.reference.planes;
    let slab = SlabLayout::of_cache(&cache.layout, planes, cache.reference.layers, 256).unwrap();
    let units = planned(&cache.job(Direction::Scatter, &slab, slots, 0), limits);
    let total: u64 = units.iter().flat_map(|(_, c)| c).map(Command::bytes).sum();
    assert_eq!(total, slab.bytes());
    let (unit, first) = &units[0];
    (units.len(), unit.count, first.len(), (first[0].width, first[0].rows, first[0].slices))
}

fn summary(cache: &Cache, slots: &[i64]) -> Summary {
    summary_with(cache, slots, DRIVER)
}

const NHD: &str = "block,kv,token,head,dim";
const HND: &str = "block,kv,head,token,dim";
const KV_FIRST: &str = "kv,block,token,head,dim";
const FUSED: &str = "block,head,token,kv_dim";
const FUSED_NHD: &str = "block,token,head,kv_dim";
const SPLIT: &str = "block,token,head,dim";
const MODEL: (u64, u64) = (64, 8);
const KIB: u64 = 1 << 10;

fn even(i: u64, span: u64) -> u64 {
    i * (span + 512)
}
fn descending(i: u64, span: u64) -> u64 {
    (128 - i) * (span + 512)
}
/// No three are evenly spaced.
fn uneven(i: u64, span: u64) -> u64 {
    i * span + i * i * 512
}
/// Nor are two a multiple of anything apart.
fn odd(i: u64, span: u64) -> u64 {
    i * (span + 16) + i * i * 512
}

#[test]
fn scattered_blocks_of_evenly_spaced_layers_take_layers_as_rows() {
    let cache = model(NHD, NHD, MODEL, even);
    assert_eq!(summary(&cache, &scattered()), (1, 64, 32, (32 * KIB, 64, 1)));
    // One head: 4 KiB rows.
    assert_eq!(summary(&model(NHD, NHD, (64, 1), even), &scattered()), (1, 64, 32, (4 * KIB, 64, 1)));
}

#[test]
fn scattered_blocks_of_layers_anywhere_go_one_by_one() {
    for place in [descending as fn(u64, u64) -> u64, uneven] {
        let cache = model(NHD, NHD, MODEL, place);
        assert_eq!(summary(&cache, &scattered()), (64, 1, 32, (32 * KIB, 1, 1)));
    }
}

#[test]
fn consecutive_blocks_become_rows_or_one_run() {
    let blocks_first = model(NHD, NHD, MODEL, uneven);
    assert_eq!(summary(&blocks_first, &consecutive()), (64, 1, 2, (32 * KIB, 16, 1)));
    let kv_first = model(KV_FIRST, KV_FIRST, MODEL, uneven);
    assert_eq!(summary(&kv_first, &consecutive()), (64, 1, 2, (512 * KIB, 1, 1)));
}

#[test]
fn fused_rows_take_layers_as_slices() {
    // K and V of 16 blocks: 128 rows of 256 bytes each, all layers at once.
    let cache = model(FUSED, FUSED_NHD, MODEL, even);
    assert_eq!(summary(&cache, &scattered()), (1, 64, 32, (256, 128, 64)));
    // One head.
    assert_eq!(summary(&model(FUSED, FUSED_NHD, (64, 1), even), &scattered()), (1, 64, 32, (256, 16, 64)));
    // Dense blocks in a row: 2048 rows at once.
    assert_eq!(summary(&cache, &consecutive()), (1, 64, 2, (256, 2048, 64)));
}

#[test]
fn fused_rows_of_layers_anywhere_go_in_pairs() {
    let cache = model(FUSED, FUSED_NHD, MODEL, uneven);
    assert_eq!(summary(&cache, &scattered()), (32, 2, 32, (256, 128, 2)));
    // A distance that is no multiple of the rows' pitch; descending ones.
    for place in [odd as fn(u64, u64) -> u64, descending] {
        let cache = model(FUSED, FUSED_NHD, MODEL, place);
        assert_eq!(summary(&cache, &scattered()), (64, 1, 32, (256, 128, 1)));
        assert_eq!(summary(&cache, &consecutive()), (64, 1, 2, (256, 2048, 1)));
    }
}

#[test]
fn heads_outside_tokens_take_layers_as_slices() {
    // 16 blocks, K and V, 8 heads: 16 tokens of 256 bytes.
    assert_eq!(summary(&model(NHD, HND, MODEL, even), &scattered()), (1, 64, 256, (256, 16, 64)));
    // Heads outermost of all but layers, fused.
    let cache = model(FUSED, "head,block,token,kv_dim", MODEL, even);
    assert_eq!(summary(&cache, &scattered()), (1, 64, 256, (256, 16, 64)));
    // Layers inside of blocks.
    let cross = "block,layer,kv,token,head,dim";
    let cache = model(cross, "block,layer,kv,head,token,dim", MODEL, even);
    assert_eq!(summary(&cache, &scattered()), (1, 64, 256, (256, 16, 64)));
}

#[test]
fn heads_outside_tokens_of_layers_anywhere_take_what_else_there_is() {
    // K and V: 128 commands of two slices for a layer, rather than two layers.
    let (units, layers, commands, first) = summary(&model(NHD, HND, MODEL, odd), &scattered());
    assert_eq!((units, layers, commands, first), (64, 1, 128, (256, 16, 2)));
    // Blocks in a row.
    assert_eq!(summary(&model(NHD, HND, MODEL, odd), &consecutive()), (64, 1, 16, (256, 16, 16)));
    // Without slices.
    let old = Limits { slices: false, ..DRIVER };
    assert_eq!(summary_with(&model(NHD, HND, MODEL, odd), &scattered(), old), (64, 1, 256, (256, 16, 1)));
    assert_eq!(summary_with(&model(NHD, HND, MODEL, even), &scattered(), old), (1, 64, 4096, (256, 64, 1)));
}

#[test]
fn lists_of_k_and_v_take_layers_as_rows_and_both_as_slices() {
    // All layers of K, then all of V, with a gap between: one distance between layers, another from K to V.
    let place = |i: u64, span: u64| (i + if i >= 64 { 3 } else { 0 }) * span;
    let cache = model(SPLIT, SPLIT, MODEL, place);
    assert_eq!(summary(&cache, &scattered()), (1, 64, 16, (32 * KIB, 64, 2)));
}

#[test]
fn layers_gigabytes_apart_are_slices() {
    let far = |i: u64, _| i * (3 << 30);
    assert_eq!(summary(&model(NHD, NHD, MODEL, far), &scattered()), (1, 64, 32, (32 * KIB, 1, 64)));
    assert_eq!(summary(&model(FUSED, FUSED_NHD, MODEL, far), &scattered()), (1, 64, 32, (256, 128, 64)));
    // Nothing to be done about a pitch over the limit without them.
    let old = Limits { slices: false, ..DRIVER };
    assert_eq!(summary_with(&model(NHD, NHD, MODEL, far), &scattered(), old), (64, 1, 32, (32 * KIB, 1, 1)));
}

#[test]
fn a_pitch_over_the_limit_is_not_used() {
    let near = Limits { max_pitch: 300, ..DRIVER };
    let cache = model(FUSED, FUSED_NHD, (4, 8), even);
    assert_eq!(summary_with(&cache, &scattered(), near).3.1, 1);
}

#[test]
fn inside_device_memory_fewer_commands_win() {
    let inside = Limits { inside: true, batch: false, ..DRIVER };
    let cache = model(FUSED, FUSED_NHD, MODEL, even);
    assert_eq!(summary_with(&cache, &scattered(), inside), (1, 64, 32, (256, 128, 64)));
}

#[test]
fn a_gap_between_layers_splits_them_in_two() {
    let gap = |i: u64, span: u64| i * (span + 512) + if i >= 40 { 4096 } else { 0 };
    for memory in [NHD, HND] {
        let (units, first, ..) = summary(&model(NHD, memory, MODEL, gap), &scattered());
        assert_eq!((units, first), (2, 40));
    }
}
