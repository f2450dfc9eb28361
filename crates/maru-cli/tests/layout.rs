//! `maru layout` as a process: every example of the layout table, and what is refused.

mod common;

use common::{Run, maru};
use serde_json::{Value, json};

fn layout(arguments: &str) -> Run {
    let mut words = vec!["layout", "--json"];
    words.extend(arguments.split_whitespace());
    maru(&words)
}

/// Runs and compares the whole object.
#[track_caller]
fn reads(arguments: &str, expected: Value) {
    let run = layout(arguments);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(run.json(), expected, "{arguments}");
}

/// Runs and compares some keys.
#[track_caller]
fn has(arguments: &str, expected: Value) {
    let run = layout(arguments);
    assert_eq!(run.code, Some(0), "{run:?}");
    let found = run.json();
    for (key, value) in expected.as_object().expect("an object") {
        assert_eq!(&found[key], value, "{key} of {arguments}: {found}");
    }
}

#[track_caller]
fn refused(arguments: &str, kind: &str, hint: &str) {
    let run = layout(arguments);
    let (found, message) = run.error(2);
    assert_eq!(found, kind, "{arguments}: {message}");
    assert!(message.contains(hint), "{arguments}: {message}");
}

#[test]
fn the_documented_keys_and_no_others() {
    reads(
        "--shape 6,2,16,2,128 --block-size 16",
        json!({
            "axes": ["block", "kv", "token", "head", "dim"], "kv_planes": 2, "num_blocks": 6, "block_size": 16,
            "num_heads": 2, "head_size": 128, "num_slots": 96,
            "byte_strides": {"kv": 8192, "block": 16384, "token": 512, "head": 256},
            "row_bytes": 512, "access_bytes": 16, "native": true, "slab_token_bytes": 1024,
        }),
    );
}

#[test]
fn hnd_shows_in_strides_only() {
    reads(
        "--shape 6,2,16,2,128 --stride 8192,4096,128,2048,1 --block-size 16",
        json!({
            "axes": ["block", "kv", "token", "head", "dim"], "kv_planes": 2, "num_blocks": 6, "block_size": 16,
            "num_heads": 2, "head_size": 128, "num_slots": 96,
            "byte_strides": {"kv": 8192, "block": 16384, "token": 256, "head": 4096},
            "row_bytes": 256, "access_bytes": 16, "native": true, "slab_token_bytes": 1024,
        }),
    );
}

#[test]
fn kv_first_nhd() {
    has(
        "--shape 2,10,16,8,128 --block-size 16",
        json!({"axes": ["kv", "block", "token", "head", "dim"], "num_blocks": 10,
               "byte_strides": {"kv": 327_680, "block": 32768, "token": 2048, "head": 256}}),
    );
}

#[test]
fn kv_first_hnd_of_a_real_engine() {
    has(
        "--shape 2,7286,64,8,128 --stride 477495296,65536,128,8192,1 --block-size 64",
        json!({"axes": ["kv", "block", "token", "head", "dim"], "num_blocks": 7286, "num_heads": 8,
               "byte_strides": {"kv": 954_990_592, "block": 131_072, "token": 256, "head": 16384},
               "row_bytes": 256}),
    );
}

#[test]
fn fused_default_of_a_real_engine() {
    has(
        "--shape 97871,2,16,256 --stride 8192,256,512,1 --block-size 16",
        json!({"axes": ["block", "head", "token", "kv_dim"], "kv_planes": 2, "num_heads": 2, "head_size": 128,
               "byte_strides": {"kv": 256, "block": 16384, "token": 1024, "head": 512}, "row_bytes": 256,
               "slab_token_bytes": 1024}),
    );
}

#[test]
fn fused_with_equal_heads_and_tokens_is_decided_by_strides() {
    has(
        "--shape 5,16,16,256 --stride 65536,256,4096,1 --block-size 16",
        json!({"axes": ["block", "head", "token", "kv_dim"], "num_heads": 16}),
    );
}

#[test]
fn fused_identity_order() {
    has(
        "--shape 9,2,16,256 --block-size 16 --kv-heads 2",
        json!({"axes": ["block", "head", "token", "kv_dim"],
        "byte_strides": {"kv": 256, "block": 16384, "token": 512, "head": 8192}}),
    );
}

#[test]
fn fused_head_outermost() {
    has(
        "--shape 9,2,16,256 --stride 4096,36864,256,1 --block-size 16 --kv-heads 2",
        json!({"byte_strides": {"kv": 256, "block": 8192, "token": 512, "head": 73728}}),
    );
}

#[test]
fn fused_block_outermost_over_three_layers() {
    has(
        "--shape 9,2,16,256 --stride 24576,256,512,1 --block-size 16",
        json!({"byte_strides": {"kv": 256, "block": 49152, "token": 1024, "head": 512}}),
    );
}

#[test]
fn fused_tokens_before_heads() {
    has(
        "--shape 9,16,2,256 --block-size 16 --kv-heads 2",
        json!({"axes": ["block", "token", "head", "kv_dim"], "num_heads": 2, "head_size": 128}),
    );
}

#[test]
fn content_is_opaque_when_it_is_declared() {
    has(
        "--shape 9,16,2,136 --dtype u8 --block-size 16 --axes block,token,head,content",
        json!({"kv_planes": 1, "head_size": 136, "row_bytes": 272, "slab_token_bytes": 272}),
    );
}

#[test]
fn mla_rank_3() {
    has(
        "--shape 7,64,576 --block-size 64 --mla",
        json!({"axes": ["block", "token", "dim"], "kv_planes": 1, "num_heads": 1, "head_size": 576,
               "byte_strides": {"kv": null, "block": 73728, "token": 1152, "head": null}}),
    );
}

#[test]
fn mla_rank_4() {
    has(
        "--shape 7,1,64,576 --block-size 64 --mla",
        json!({"axes": ["block", "head", "token", "dim"], "kv_planes": 1, "num_heads": 1, "slab_token_bytes": 1152}),
    );
}

#[test]
fn sglang_mla_slots() {
    has(
        "--shape 448,1,576 --block-size 64 --mla",
        json!({"axes": ["slot", "head", "dim"], "num_blocks": 7, "block_size": 64, "num_slots": 448}),
    );
}

#[test]
fn flattened_heads() {
    has(
        "--shape 2,10,16,1024 --block-size 16 --kv-heads 8",
        json!({"axes": ["kv", "block", "token", "heads_dim"], "num_heads": 8, "head_size": 128, "row_bytes": 2048}),
    );
    has(
        "--shape 10,2,16,1024 --block-size 16 --axes block,kv,token,heads_dim",
        json!({"kv_planes": 2, "num_blocks": 10, "row_bytes": 2048}),
    );
}

#[test]
fn cross_layer_tensors() {
    has(
        "--shape 4,3,2,16,2,64 --block-size 16",
        json!({"axes": ["block", "layer", "kv", "token", "head", "dim"],
               "byte_strides": {"kv": 4096, "block": 24576, "token": 256, "head": 128}}),
    );
}

#[test]
fn opaque_blocks() {
    has(
        "--shape 6,8192 --dtype u8 --axes block,content",
        json!({"axes": ["block", "content"], "num_slots": 6, "block_size": 1, "slab_token_bytes": 8192,
               "byte_strides": {"kv": null, "block": 8192, "token": null, "head": null}}),
    );
}

#[test]
fn padded_pages_keep_their_stride() {
    has(
        "--shape 12,32,200 --stride 6464,200,1 --dtype u8 --block-size 32 --mla",
        json!({"byte_strides": {"kv": null, "block": 6464, "token": 200, "head": null}, "access_bytes": 8}),
    );
}

#[test]
fn the_stride_of_a_single_head_is_not_used() {
    for stride in ["1", "16384", "999999"] {
        has(
            &format!(
                "--shape 8,2,128,1,128 --stride 32768,16384,128,{stride},1 --block-size 128 --kv-heads 1"
            ),
            json!({"num_heads": 1, "block_size": 128, "row_bytes": 256,
                   "byte_strides": {"kv": 32768, "block": 65536, "token": 256, "head": null}}),
        );
    }
}

#[test]
fn the_base_offset_narrows_accesses() {
    for (offset, access) in [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1), (64, 16)] {
        has(&format!("--shape 6,2,16,2,128 --base-offset {offset}"), json!({"access_bytes": access}));
    }
}

#[test]
fn lists_as_python_prints_them() {
    let run =
        maru(&["layout", "--json", "--shape", "(6, 2, 16, 2, 128)", "--stride", "[8192, 4096, 256, 128, 1]"]);
    assert_eq!(run.json()["num_blocks"], 6);
}

#[test]
fn every_dtype_is_known() {
    for (dtype, bytes) in [
        ("f32", 4),
        ("f16", 2),
        ("bf16", 2),
        ("u8", 1),
        ("i8", 1),
        ("fp8_e4m3", 1),
        ("fp8_e5m2", 1),
        ("raw8", 1),
        ("raw16", 2),
        ("raw32", 4),
        ("raw64", 8),
    ] {
        has(&format!("--shape 6,2,16,2,128 --dtype {dtype}"), json!({"row_bytes": 256 * bytes}));
    }
}

#[test]
fn what_decides_is_said_as_options() {
    refused("--shape 2,2,16,8,128", "ambiguous_layout", "--axes, --block-size, --kv-heads");
    refused("--shape 6x2x16", "invalid_argument", "such as 6,2,16,2,128");
    refused("--shape 6,2,16,2,128 --block-size many", "invalid_argument", "a whole number is needed");
}

#[test]
fn two_blocks_of_k_and_v_are_ambiguous() {
    refused("--shape 2,2,16,8,128 --block-size 16 --num-blocks 2", "ambiguous_layout", "axes");
    has(
        "--shape 2,2,16,8,128 --axes kv,block,token,head,dim",
        json!({"byte_strides": {"kv": 65536, "block": 32768, "token": 2048, "head": 256}}),
    );
    has(
        "--shape 2,2,16,8,128 --axes block,kv,token,head,dim",
        json!({"byte_strides": {"kv": 32768, "block": 65536, "token": 2048, "head": 256}}),
    );
}

#[test]
fn two_fused_heads_may_be_k_and_v() {
    refused("--shape 9,2,16,256 --block-size 16", "ambiguous_layout", "num_kv_heads");
}

#[test]
fn contradictions_are_a_mismatch() {
    refused("--shape 6,2,16,2,128 --kv-heads 3", "layout_mismatch", "3");
    refused("--shape 6,2,16,2,128 --block-size 17", "layout_mismatch", "17");
    refused("--shape 6,2,16,2,128 --mla", "layout_mismatch", "MLA");
    refused("--shape 6,2,16,2,128 --axes block,kv,token,head", "layout_mismatch", "4 axes");
    refused("--shape 6", "layout_mismatch", "1 axes");
}

#[test]
fn bad_numbers_are_invalid_arguments() {
    for (arguments, hint) in [
        ("--shape 6,0,16", "length 0"),
        ("--shape -6,2,16", "-6"),
        ("--shape 6,x", "\"x\""),
        ("--shape 99999999999999999999", "99999999999999999999"),
        ("--shape 9223372036854775807,9223372036854775807", "2^63"),
        ("--shape 2,3,4 --stride 1,2", "2 strides"),
        ("--shape 2,3,4 --stride -12,4,1", "-12"),
        ("--shape 2,3,4 --stride 0,4,1", "stride 0"),
        ("--shape 2,3,4 --stride 1,1,1", "share"),
        ("--shape 1,1,1,1,1,1,1,1,1", "9 axes"),
        ("--shape 6,2,16,2,128 --dtype bf17", "bf17"),
        ("--shape 6,2,16,2,128 --axes block,kv,token,head,depth", "depth"),
        ("--shape 6,2,16,2,128 --block-size 0", "block_size"),
        ("--shape 6,2,16,2,128 --block-size -16", "--block-size"),
        ("--shape 6,2,16,2,128 --base-offset -1", "--base-offset"),
        ("--shape 6,2,16,2,128 --num-blocks 1e3", "--num-blocks"),
        ("--shape ,", "nothing"),
    ] {
        refused(arguments, "invalid_argument", hint);
    }
}

#[test]
fn the_human_answer_explains() {
    let run = maru(&["layout", "--shape", "6,2,16,2,128", "--stride", "8192,4096,128,2048,1"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    for words in ["6 blocks of 16 tokens", "2 heads", "bf16", "4096 bytes apart", "rows of 256 bytes"] {
        assert!(run.out.contains(words), "{words}: {}", run.out);
    }
    assert!(!run.out.contains('\x1b'), "no colours in a pipe");
    assert_eq!(run.err, "");
}

#[test]
fn a_human_sees_errors_on_stderr() {
    let run = maru(&["layout", "--shape", "2,2,16,8,128"]);
    assert_eq!((run.code, run.out.as_str()), (Some(2), ""));
    assert!(run.err.starts_with("error: shape [2, 2, 16, 8, 128] can be read as"), "{}", run.err);
}
