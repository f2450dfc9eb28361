//! Every layout, each kind of store, one and several threads: equal to the oracle, nothing else touched.
#![allow(
    missing_docs,
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "a test, of small numbers"
)]

mod common;

use common::{Cache, Random, check, mover};
use maru_fallback::Store;
use maru_layout::DType::{self, Bf16, F32, Raw8, U8};

/// Every store there is here, with one, two and three threads, aligned and not, with skips and partial blocks.
fn all(cache: Cache) {
    let mut random = Random(0xabcd_ef01);
    let num_slots = cache.layout().num_slots();
    for store in Store::available() {
        for threads in [1, 2, 3] {
            let mover = mover(threads, store);
            for offs in [(0, 0), (1, 0), (0, 1), (2, 2), (4, 8), (8, 16), (16, 48), (5, 3)] {
                let tokens = 1 + random.below(num_slots);
                let slots = random.slots(tokens, num_slots, offs.0 != 0);
                let skip = if offs.1 > 2 { random.below(tokens + 1) } else { 0 };
                check(&cache, &mover, tokens, &slots, skip, offs, random.next());
            }
            // Whole blocks in order: the longest runs.
            let slots: Vec<i64> = (0..num_slots as i64).collect();
            check(&cache, &mover, num_slots, &slots, 0, (0, 0), random.next());
            // A slab with room for more than is moved.
            check(&cache, &mover, num_slots + 3, &slots, 1, (0, 0), random.next());
        }
    }
}

macro_rules! layouts {
    ($($name:ident: $label:literal, $axes:literal, $shape:expr, $strides:expr, $dtype:expr, $layers:literal;)*) => {$(
        #[test]
        fn $name() {
            let dtype: DType = $dtype;
            all(Cache::new($label, $axes, &$shape, $strides, dtype, $layers));
        }
    )*};
}

layouts! {
    nhd_blocks_first: "nhd", "block,kv,token,head,dim", [6, 2, 4, 2, 64], None, Bf16, 2;
    nhd_narrow_rows: "nhd narrow", "block,kv,token,head,dim", [5, 2, 4, 3, 5], None, U8, 3;
    hnd_blocks_first: "hnd", "block,kv,token,head,dim", [5, 2, 4, 3, 64], Some(&[1536, 768, 64, 256, 1]), Bf16, 2;
    hnd_heads_equal_block: "hnd 4=4", "block,kv,token,head,dim", [5, 2, 4, 4, 32], Some(&[1024, 512, 32, 128, 1]), Bf16, 2;
    hnd_one_byte_rows: "hnd tiny", "block,kv,token,head,dim", [5, 2, 4, 3, 1], Some(&[24, 12, 1, 4, 1]), U8, 2;
    kv_first: "kv first", "kv,block,token,head,dim", [2, 6, 4, 2, 64], None, Bf16, 2;
    kv_first_hnd: "kv first hnd", "kv,block,token,head,dim", [2, 6, 4, 2, 64], Some(&[3072, 512, 64, 256, 1]), Bf16, 2;
    flattened_heads: "flat", "kv,block,token,heads_dim", [2, 6, 4, 96], None, Bf16, 2;
    fused_lbhnc: "LBHNC", "block,head,token,kv_dim", [6, 3, 4, 128], None, Bf16, 2;
    fused_lbnhc: "LBNHC", "block,head,token,kv_dim", [6, 3, 4, 256], Some(&[3072, 256, 768, 1]), Bf16, 2;
    fused_lhbnc: "LHBNC", "block,head,token,kv_dim", [6, 3, 4, 128], Some(&[512, 3072, 128, 1]), Bf16, 2;
    fused_blhnc: "BLHNC interleaved", "block,head,token,kv_dim", [6, 3, 4, 128], Some(&[3072, 512, 128, 1]), Bf16, 2;
    fused_blnhc: "BLNHC interleaved", "block,head,token,kv_dim", [6, 3, 4, 128], Some(&[3072, 128, 384, 1]), Bf16, 2;
    fused_odd_width: "fused odd", "block,head,token,kv_dim", [6, 3, 4, 6], None, F32, 2;
    fused_one_head: "fused one head", "block,head,token,kv_dim", [6, 1, 4, 256], None, Bf16, 2;
    diffkv_fused: "diffkv", "block,token,head,kv_dim", [6, 4, 3, 64], None, Bf16, 2;
    opaque_rows: "opaque rows", "block,token,head,content", [6, 4, 3, 40], None, Raw8, 2;
    mla: "mla", "block,token,dim", [6, 4, 72], None, Bf16, 3;
    mla_padded: "mla padded", "block,token,dim", [6, 4, 72], Some(&[320, 80, 1]), Bf16, 3;
    sglang_split: "split", "slot,head,dim", [24, 2, 64], None, Bf16, 2;
    sglang_split_blocks: "split blocks", "block,token,head,dim", [6, 4, 2, 64], None, Bf16, 2;
    sglang_mla: "slots mla", "slot,head,dim", [24, 1, 72], None, Bf16, 2;
    cross_layer: "cross", "block,layer,kv,token,head,dim", [5, 3, 2, 4, 2, 32], None, Bf16, 3;
    cross_layer_hnd: "trt", "block,layer,kv,head,token,dim", [5, 3, 2, 2, 4, 32], None, Bf16, 3;
    opaque_blocks: "opaque blocks", "block,content", [9, 1000], None, Raw8, 2;
    opaque_blocks_padded: "opaque blocks padded", "block,content", [9, 1000], Some(&[1024, 1]), Raw8, 2;
    padded_pages: "padded", "block,token,dim", [12, 32, 200], Some(&[6464, 200, 1]), U8, 2;
    padded_tokens: "padded tokens", "block,kv,token,head,dim", [6, 2, 4, 2, 64], Some(&[2000, 1000, 200, 80, 1]), Bf16, 2;
    one_token_blocks: "one token", "block,kv,token,head,dim", [24, 2, 1, 2, 64], None, Bf16, 2;
    one_block: "one block", "block,kv,token,head,dim", [1, 2, 24, 2, 64], None, Bf16, 2;
}
