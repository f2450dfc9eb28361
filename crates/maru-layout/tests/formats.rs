//! Every layout that an engine registers, one test a row: what detection reads, its strides, and each address
//! against indexing written here from the documented table. A new engine layout is a new row.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{address, axes, bf16, blocks_of, dense, known, names, strided};
use maru_layout::oracle::Reference;
use maru_layout::{Axis, CacheSpec, CopyPlan, DType, PagedLayout, RowKind, SlabLayout, TensorDesc};

/// What is expected of a cache.
struct Row {
    tensor: TensorDesc,
    spec: CacheSpec,
    axes: &'static str,
    /// Planes per layer and layers of the whole cache.
    planes: u64,
    layers: u64,
    /// Byte offset of each tensor, as in [`Reference::tensors`].
    tensors: Vec<u64>,
    /// Blocks, tokens of a block, heads, elements of a head.
    counts: [u64; 4],
    /// kv, block, token, head, in elements; 0 where an axis does not exist or has length 1.
    strides: [u64; 4],
}

/// Byte offset of K/V plane, layer, block, token of the block, head, element.
type Naive = fn(kv: u64, l: u64, b: u64, o: u64, n: u64, d: u64) -> u64;

fn some_of(len: u64) -> Vec<u64> {
    if len <= 40 { (0..len).collect() } else { vec![0, 1, len / 2, len - 2, len - 1] }
}

fn check(row: &Row, naive: Naive) -> PagedLayout {
    let layout = PagedLayout::detect(&row.tensor, &row.spec).unwrap();
    let [nb, bs, nh, hs] = row.counts;
    assert_eq!(names(&layout), row.axes);
    assert_eq!(
        [layout.num_blocks(), layout.block_size(), layout.num_heads(), layout.head_size()],
        row.counts,
        "counts"
    );
    let element = layout.dtype().size();
    let s = layout.byte_strides();
    let found = [s.kv, s.block, s.token, s.head].map(|s| s.unwrap_or(0) / element);
    assert_eq!(found, row.strides, "strides");
    let oracle = Reference {
        tensor: row.tensor.clone(),
        axes: Axis::parse_list(row.axes).unwrap(),
        block_size: bs,
        planes: row.planes,
        layers: row.layers,
        tensors: row.tensors.clone(),
    };
    assert_eq!(oracle.row_bytes(), layout.token_bytes());
    let mut bases = Vec::new();
    let mut looked = 0u64;
    for kv in 0..row.planes {
        for l in 0..row.layers {
            let inside_kv = if layout.kv_planes() == 2 { kv } else { 0 };
            let inside_l = if layout.layers() > 1 { l } else { 0 };
            let tensor = match () {
                () if layout.layers() > 1 => 0,
                () if row.planes == layout.kv_planes() => l,
                () => kv * row.layers + l,
            };
            let base = row.tensors[usize::try_from(tensor).unwrap()]
                + layout.plane_offset(inside_kv, inside_l).unwrap();
            bases.push(base);
            for b in some_of(nb) {
                for o in some_of(bs) {
                    for n in some_of(nh) {
                        for d in some_of(hs) {
                            let expect = naive(kv, l, b, o, n, d);
                            assert_eq!(address(&layout, base, b * bs + o, n, d), expect);
                            let byte = (n * hs + d) * element;
                            assert_eq!(oracle.paged_offset(kv, l, b * bs + o, byte), expect);
                            looked += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(looked > 0);
    let slab = SlabLayout::of_cache(&layout, row.planes, row.layers, 7).unwrap();
    let plan = CopyPlan::new(&layout, &slab, bases).unwrap();
    let g = plan.geometry();
    assert_eq!((g.num_slots, g.rows * g.row_bytes), (nb * bs, nh * hs * element));
    layout
}

/// Offsets of `n` tensors, a whole number of `step` bytes apart.
fn every(step: u64, n: u64) -> Vec<u64> {
    (0..n).map(|i| i * step).collect()
}

#[test]
fn blocks_first_nhd() {
    let row = Row {
        tensor: bf16(&[6, 2, 16, 2, 8]),
        spec: blocks_of(16),
        axes: "block,kv,token,head,dim",
        planes: 2,
        layers: 3,
        tensors: every(8192, 3),
        counts: [6, 16, 2, 8],
        strides: [256, 512, 16, 8],
    };
    check(&row, |kv, l, b, o, n, d| l * 8192 + (b * 512 + kv * 256 + o * 16 + n * 8 + d) * 2);
}

#[test]
fn blocks_first_hnd() {
    let row = Row {
        tensor: strided(&[6, 2, 16, 2, 8], &[512, 256, 8, 128, 1], DType::Bf16),
        spec: blocks_of(16),
        axes: "block,kv,token,head,dim",
        planes: 2,
        layers: 2,
        tensors: every(8192, 2),
        counts: [6, 16, 2, 8],
        strides: [256, 512, 8, 128],
    };
    check(&row, |kv, l, b, o, n, d| l * 8192 + (b * 512 + kv * 256 + n * 128 + o * 8 + d) * 2);
}

#[test]
fn kv_first_nhd() {
    let row = Row {
        tensor: bf16(&[2, 6, 16, 2, 8]),
        spec: blocks_of(16),
        axes: "kv,block,token,head,dim",
        planes: 2,
        layers: 2,
        tensors: every(8192, 2),
        counts: [6, 16, 2, 8],
        strides: [1536, 256, 16, 8],
    };
    check(&row, |kv, l, b, o, n, d| l * 8192 + (kv * 1536 + b * 256 + o * 16 + n * 8 + d) * 2);
}

#[test]
fn kv_first_hnd() {
    let row = Row {
        tensor: strided(&[2, 6, 16, 2, 8], &[1536, 256, 8, 128, 1], DType::Bf16),
        spec: blocks_of(16),
        axes: "kv,block,token,head,dim",
        planes: 2,
        layers: 1,
        tensors: vec![0],
        counts: [6, 16, 2, 8],
        strides: [1536, 256, 8, 128],
    };
    check(&row, |kv, _, b, o, n, d| (kv * 1536 + b * 256 + n * 128 + o * 8 + d) * 2);
}

#[test]
fn the_real_hnd_example() {
    let row = Row {
        tensor: strided(&[2, 7286, 64, 8, 128], &[477_495_296, 65536, 128, 8192, 1], DType::Bf16),
        spec: known(64, 8, 128),
        axes: "kv,block,token,head,dim",
        planes: 2,
        layers: 1,
        tensors: vec![0],
        counts: [7286, 64, 8, 128],
        strides: [477_495_296, 65536, 128, 8192],
    };
    check(&row, |kv, _, b, o, n, d| (kv * 477_495_296 + b * 65536 + n * 8192 + o * 128 + d) * 2);
}

#[test]
fn heads_before_tokens_in_the_shape() {
    let row = Row {
        tensor: bf16(&[6, 2, 4, 16, 8]),
        spec: blocks_of(16),
        axes: "block,kv,head,token,dim",
        planes: 2,
        layers: 1,
        tensors: vec![0],
        counts: [6, 16, 4, 8],
        strides: [512, 1024, 8, 128],
    };
    check(&row, |kv, _, b, o, n, d| (b * 1024 + kv * 512 + n * 128 + o * 8 + d) * 2);
}

#[test]
fn flattened_heads_kv_first() {
    let row = Row {
        tensor: bf16(&[2, 6, 16, 24]),
        spec: known(16, 3, 8),
        axes: "kv,block,token,heads_dim",
        planes: 2,
        layers: 1,
        tensors: vec![0],
        counts: [6, 16, 3, 8],
        strides: [2304, 384, 24, 8],
    };
    check(&row, |kv, _, b, o, n, d| (kv * 2304 + b * 384 + o * 24 + n * 8 + d) * 2);
}

#[test]
fn flattened_heads_blocks_first() {
    let row = Row {
        tensor: bf16(&[6, 2, 16, 24]),
        spec: known(16, 3, 8),
        axes: "block,kv,token,heads_dim",
        planes: 2,
        layers: 1,
        tensors: vec![0],
        counts: [6, 16, 3, 8],
        strides: [384, 768, 24, 8],
    };
    check(&row, |kv, _, b, o, n, d| (b * 768 + kv * 384 + o * 24 + n * 8 + d) * 2);
}

/// A layer's `(NB,NH,BS,C)` view for strides of layer, block, head and token, over one allocation.
/// 5 blocks, 3 heads, 4 tokens, C = 12 (heads of 6), 2 layers.
fn fused(layer: u64, block: u64, head: u64, token: u64, naive: Naive) {
    let signed = |n: u64| i64::try_from(n).unwrap();
    let row = Row {
        tensor: strided(&[5, 3, 4, 12], &[signed(block), signed(head), signed(token), 1], DType::Bf16),
        spec: known(4, 3, 6),
        axes: "block,head,token,kv_dim",
        planes: 2,
        layers: 2,
        tensors: every(layer * 2, 2),
        counts: [5, 4, 3, 6],
        strides: [6, block, token, head],
    };
    let layout = check(&row, naive);
    assert_eq!(layout.row_bytes(), 12, "K and V alternate, so a row is one head of one plane");
    // All layers of the allocation together cover every element once.
    let mut seen = vec![0u8; 5 * 3 * 4 * 12 * 2];
    for l in 0..2 {
        for s in 0..20 {
            for n in 0..3 {
                for kv in 0..2 {
                    for d in 0..6 {
                        let at = naive(kv, l, s / 4, s % 4, n, d) / 2;
                        seen[usize::try_from(at).unwrap()] += 1;
                    }
                }
            }
        }
    }
    assert!(seen.iter().all(|n| *n == 1));
}

#[test]
fn fused_order_lbhnc() {
    fused(720, 144, 48, 12, |kv, l, b, o, n, d| ((((l * 5 + b) * 3 + n) * 4 + o) * 12 + kv * 6 + d) * 2);
}

#[test]
fn fused_order_lbnhc() {
    fused(720, 144, 12, 36, |kv, l, b, o, n, d| ((((l * 5 + b) * 4 + o) * 3 + n) * 12 + kv * 6 + d) * 2);
}

#[test]
fn fused_order_lhbnc() {
    fused(720, 48, 240, 12, |kv, l, b, o, n, d| ((((l * 3 + n) * 5 + b) * 4 + o) * 12 + kv * 6 + d) * 2);
}

#[test]
fn fused_order_blhnc() {
    fused(144, 288, 48, 12, |kv, l, b, o, n, d| ((((b * 2 + l) * 3 + n) * 4 + o) * 12 + kv * 6 + d) * 2);
}

#[test]
fn fused_order_blnhc() {
    fused(144, 288, 12, 36, |kv, l, b, o, n, d| ((((b * 2 + l) * 4 + o) * 3 + n) * 12 + kv * 6 + d) * 2);
}

#[test]
fn fused_order_bhlnc() {
    fused(48, 288, 96, 12, |kv, l, b, o, n, d| ((((b * 3 + n) * 2 + l) * 4 + o) * 12 + kv * 6 + d) * 2);
}

#[test]
fn the_real_fused_example() {
    let row = Row {
        tensor: strided(&[97871, 2, 16, 256], &[8192, 256, 512, 1], DType::Bf16),
        spec: known(16, 2, 128),
        axes: "block,head,token,kv_dim",
        planes: 2,
        layers: 1,
        tensors: vec![0],
        counts: [97871, 16, 2, 128],
        strides: [128, 8192, 512, 256],
    };
    check(&row, |kv, _, b, o, n, d| (b * 8192 + o * 512 + n * 256 + kv * 128 + d) * 2);
}

#[test]
fn the_real_fused_example_is_told_by_its_strides_alone() {
    let tensor = strided(&[97871, 2, 16, 256], &[8192, 256, 512, 1], DType::Bf16);
    let layout = PagedLayout::detect(&tensor, &blocks_of(16)).unwrap();
    assert_eq!(names(&layout), "block,head,token,kv_dim");
    assert_eq!((layout.num_heads(), layout.head_size()), (2, 128));
}

#[test]
fn fused_tokens_before_heads() {
    let row = Row {
        tensor: bf16(&[5, 16, 3, 12]),
        spec: known(16, 3, 6),
        axes: "block,token,head,kv_dim",
        planes: 2,
        layers: 1,
        tensors: vec![0],
        counts: [5, 16, 3, 6],
        strides: [6, 576, 36, 12],
    };
    check(&row, |kv, _, b, o, n, d| (((b * 16 + o) * 3 + n) * 12 + kv * 6 + d) * 2);
}

#[test]
fn opaque_rows_of_unequal_keys_and_values() {
    let row = Row {
        tensor: dense(&[5, 16, 3, 13], DType::U8),
        spec: CacheSpec { axes: axes("block,token,head,content"), ..blocks_of(16) },
        axes: "block,token,head,content",
        planes: 1,
        layers: 2,
        tensors: every(4096, 2),
        counts: [5, 16, 3, 13],
        strides: [0, 624, 39, 13],
    };
    let layout = check(&row, |_, l, b, o, n, d| l * 4096 + ((b * 16 + o) * 3 + n) * 13 + d);
    assert_eq!((layout.row_kind(), layout.slab_token_bytes()), (RowKind::OpaqueRows, 39));
}

#[test]
fn opaque_rows_heads_first() {
    let row = Row {
        tensor: dense(&[5, 3, 16, 13], DType::U8),
        spec: CacheSpec { axes: axes("block,head,token,content"), ..blocks_of(16) },
        axes: "block,head,token,content",
        planes: 1,
        layers: 1,
        tensors: vec![0],
        counts: [5, 16, 3, 13],
        strides: [0, 624, 13, 208],
    };
    check(&row, |_, _, b, o, n, d| ((b * 3 + n) * 16 + o) * 13 + d);
}

#[test]
fn mla_rank_3() {
    let row = Row {
        tensor: bf16(&[9, 64, 576]),
        spec: blocks_of(64),
        axes: "block,token,dim",
        planes: 1,
        layers: 2,
        tensors: every(1 << 20, 2),
        counts: [9, 64, 1, 576],
        strides: [0, 36864, 576, 0],
    };
    let layout = check(&row, |_, l, b, o, _, d| (l << 20) + ((b * 64 + o) * 576 + d) * 2);
    assert_eq!(layout.row_bytes(), 1152);
}

#[test]
fn mla_rank_4() {
    let row = Row {
        tensor: bf16(&[9, 1, 64, 576]),
        spec: CacheSpec { mla: true, ..blocks_of(64) },
        axes: "block,head,token,dim",
        planes: 1,
        layers: 1,
        tensors: vec![0],
        counts: [9, 64, 1, 576],
        strides: [0, 36864, 576, 0],
    };
    check(&row, |_, _, b, o, _, d| ((b * 64 + o) * 576 + d) * 2);
}

#[test]
fn padded_pages() {
    let row = Row {
        tensor: strided(&[12, 32, 200], &[6464, 200, 1], DType::U8),
        spec: blocks_of(32),
        axes: "block,token,dim",
        planes: 1,
        layers: 1,
        tensors: vec![0],
        counts: [12, 32, 1, 200],
        strides: [0, 6464, 200, 0],
    };
    let layout = check(&row, |_, _, b, o, _, d| b * 6464 + o * 200 + d);
    // The last block has no pad.
    assert_eq!(layout.span_bytes(), 11 * 6464 + 6400);
    assert_eq!(layout.access_bytes(0), 8);
}

#[test]
fn padded_pages_in_a_kv_cache() {
    let row = Row {
        tensor: strided(&[6, 2, 16, 2, 8], &[640, 256, 16, 8, 1], DType::Bf16),
        spec: blocks_of(16),
        axes: "block,kv,token,head,dim",
        planes: 2,
        layers: 1,
        tensors: vec![0],
        counts: [6, 16, 2, 8],
        strides: [256, 640, 16, 8],
    };
    check(&row, |kv, _, b, o, n, d| (b * 640 + kv * 256 + o * 16 + n * 8 + d) * 2);
}

#[test]
fn layers_interleaved_in_one_allocation() {
    let row = Row {
        tensor: strided(&[4, 2, 16, 2, 64], &[12288, 2048, 128, 64, 1], DType::Bf16),
        spec: blocks_of(16),
        axes: "block,kv,token,head,dim",
        planes: 2,
        layers: 3,
        tensors: every(8192, 3),
        counts: [4, 16, 2, 64],
        strides: [2048, 12288, 128, 64],
    };
    check(&row, |kv, l, b, o, n, d| (b * 12288 + l * 4096 + kv * 2048 + o * 128 + n * 64 + d) * 2);
}

#[test]
fn cross_layer() {
    let row = Row {
        tensor: bf16(&[5, 3, 2, 16, 4, 8]),
        spec: blocks_of(16),
        axes: "block,layer,kv,token,head,dim",
        planes: 2,
        layers: 3,
        tensors: vec![64],
        counts: [5, 16, 4, 8],
        strides: [512, 3072, 32, 8],
    };
    check(&row, |kv, l, b, o, n, d| 64 + (((((b * 3 + l) * 2 + kv) * 16 + o) * 4 + n) * 8 + d) * 2);
}

#[test]
fn tensorrt_llm() {
    let row = Row {
        tensor: bf16(&[5, 3, 2, 4, 16, 8]),
        spec: blocks_of(16),
        axes: "block,layer,kv,head,token,dim",
        planes: 2,
        layers: 3,
        tensors: vec![0],
        counts: [5, 16, 4, 8],
        strides: [512, 3072, 8, 128],
    };
    check(&row, |kv, l, b, o, n, d| (((((b * 3 + l) * 2 + kv) * 4 + n) * 16 + o) * 8 + d) * 2);
}

#[test]
fn sglang_lists_of_slots() {
    let row = Row {
        tensor: bf16(&[64, 3, 8]),
        spec: CacheSpec { split_kv: true, ..blocks_of(16) },
        axes: "slot,head,dim",
        planes: 2,
        layers: 2,
        tensors: every(4096, 4),
        counts: [4, 16, 3, 8],
        strides: [0, 384, 24, 8],
    };
    check(&row, |kv, l, b, o, n, d| (kv * 2 + l) * 4096 + ((b * 16 + o) * 24 + n * 8 + d) * 2);
}

#[test]
fn sglang_lists_of_blocks() {
    let row = Row {
        tensor: bf16(&[4, 16, 3, 8]),
        spec: CacheSpec { split_kv: true, ..blocks_of(16) },
        axes: "block,token,head,dim",
        planes: 2,
        layers: 2,
        tensors: every(4096, 4),
        counts: [4, 16, 3, 8],
        strides: [0, 384, 24, 8],
    };
    check(&row, |kv, l, b, o, n, d| (kv * 2 + l) * 4096 + ((b * 16 + o) * 24 + n * 8 + d) * 2);
}

#[test]
fn sglang_mla() {
    let row = Row {
        tensor: bf16(&[128, 1, 72]),
        spec: blocks_of(64),
        axes: "slot,head,dim",
        planes: 1,
        layers: 1,
        tensors: vec![0],
        counts: [2, 64, 1, 72],
        strides: [0, 4608, 72, 0],
    };
    check(&row, |_, _, b, o, _, d| ((b * 64 + o) * 72 + d) * 2);
}

#[test]
fn opaque_blocks() {
    let row = Row {
        tensor: strided(&[7, 500], &[512, 1], DType::U8),
        spec: CacheSpec { axes: axes("block,content"), ..CacheSpec::default() },
        axes: "block,content",
        planes: 1,
        layers: 2,
        tensors: every(4096, 2),
        counts: [7, 1, 1, 500],
        strides: [0, 512, 0, 0],
    };
    let layout = check(&row, |_, l, b, _, _, d| l * 4096 + b * 512 + d);
    assert_eq!((layout.row_kind(), layout.num_slots()), (RowKind::OpaqueBlocks, 7));
    assert_eq!(layout.slab_token_bytes(), 500);
}

#[test]
fn opaque_blocks_of_many_axes() {
    // The CPU backend registers (NB,NH,BS,C) and packs its bytes.
    let row = Row {
        tensor: bf16(&[7, 2, 16, 8]),
        spec: CacheSpec { axes: axes("block,content"), ..CacheSpec::default() },
        axes: "block,content",
        planes: 1,
        layers: 1,
        tensors: vec![0],
        counts: [7, 1, 1, 256],
        strides: [0, 256, 0, 0],
    };
    check(&row, |_, _, b, _, _, d| (b * 256 + d) * 2);
}

#[test]
fn opaque_blocks_with_a_last_axis_of_one() {
    let row = Row {
        tensor: dense(&[7, 30, 1], DType::U8),
        spec: CacheSpec { axes: axes("block,content"), ..CacheSpec::default() },
        axes: "block,content",
        planes: 1,
        layers: 1,
        tensors: vec![0],
        counts: [7, 1, 1, 30],
        strides: [0, 30, 0, 0],
    };
    check(&row, |_, _, b, _, _, d| b * 30 + d);
}

#[test]
fn one_head_in_every_shape_is_the_same_bytes() {
    let naive: Naive = |kv, _, b, o, _, d| (b * 512 + kv * 256 + o * 8 + d) * 2;
    let row = |shape: &[i64], axes| Row {
        tensor: bf16(shape),
        spec: known(32, 1, 8),
        axes,
        planes: 2,
        layers: 1,
        tensors: vec![0],
        counts: [8, 32, 1, 8],
        strides: [256, 512, 8, 0],
    };
    check(&row(&[8, 2, 32, 1, 8], "block,kv,token,head,dim"), naive);
    check(&row(&[8, 2, 1, 32, 8], "block,kv,head,token,dim"), naive);
}

#[test]
fn one_block_one_layer() {
    let row = Row {
        tensor: bf16(&[1, 2, 16, 2, 8]),
        spec: blocks_of(16),
        axes: "block,kv,token,head,dim",
        planes: 2,
        layers: 1,
        tensors: vec![0],
        counts: [1, 16, 2, 8],
        strides: [256, 0, 16, 8],
    };
    check(&row, |kv, _, _, o, n, d| (kv * 256 + o * 16 + n * 8 + d) * 2);
}

#[test]
fn a_seventh_axis_order_by_name() {
    let row = Row {
        tensor: bf16(&[3, 2, 5, 4, 16, 8]),
        spec: CacheSpec { axes: axes("layer,kv,block,head,token,dim"), ..blocks_of(16) },
        axes: "layer,kv,block,head,token,dim",
        planes: 2,
        layers: 3,
        tensors: vec![0],
        counts: [5, 16, 4, 8],
        strides: [2560, 512, 8, 128],
    };
    check(&row, |kv, l, b, o, n, d| (((((l * 2 + kv) * 5 + b) * 4 + n) * 16 + o) * 8 + d) * 2);
}
