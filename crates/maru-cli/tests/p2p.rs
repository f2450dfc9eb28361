//! `maru p2p` as a process: the main job and its answers.

mod common;

use common::{Place, Run, leftovers, maru};
use serde_json::Value;

const KEYS: [&str; 9] = [
    "cache_hit",
    "verified",
    "bytes",
    "store_gbps",
    "load_gbps",
    "backend",
    "strategy",
    "device",
    "first_difference",
];

/// Bytes of a token of the small profile in a slab.
const TOKEN: u64 = 2 * 2 * 2 * 8 * 2;

#[track_caller]
fn good(run: &Run) -> Value {
    assert_eq!(run.code, Some(0), "{run:?}");
    let value = run.json();
    assert_eq!(
        (&value["cache_hit"], &value["verified"]),
        (&Value::Bool(true), &Value::Bool(true)),
        "{run:?}"
    );
    assert!(value["first_difference"].is_null(), "{run:?}");
    value
}

#[test]
fn two_processes_share_a_prompt() {
    let run = Place::new().run(&["--tokens", "600", "--json"]);
    let value = good(&run);
    let keys: Vec<&String> = value.as_object().expect("an object").keys().collect();
    assert_eq!(keys, KEYS);
    assert_eq!(value["bytes"], 600 * TOKEN);
    assert_eq!(
        (&value["backend"], &value["strategy"], &value["device"]),
        (&"fallback".into(), &"host".into(), &"host".into())
    );
    assert!(value["store_gbps"].as_f64() > Some(0.0) && value["load_gbps"].as_f64() > Some(0.0), "{value}");
    assert_eq!(leftovers(run.pid), Vec::<std::path::PathBuf>::new());
}

#[test]
fn the_human_answer_has_the_two_lines() {
    let run = Place::new().run(&["--tokens", "256"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    for line in ["Cache Hit: Yes", "Output verified: Yes"] {
        assert!(run.out.lines().any(|l| l == line), "{line}: {}", run.out);
    }
    assert!(run.out.contains("GB/s") && run.out.contains("fallback"), "{}", run.out);
    assert!(!run.out.contains('\x1b') && run.err.is_empty(), "{run:?}");
}

#[test]
fn prompts_of_any_length() {
    let place = Place::new();
    // One token, less than a block, a block, around the chunk of 256.
    for tokens in [1, 3, 4, 5, 255, 256, 257, 513] {
        let run = place.run(&["--tokens", &tokens.to_string(), "--json"]);
        assert_eq!(good(&run)["bytes"], tokens * TOKEN);
    }
}

#[test]
fn every_cache_layout_verifies() {
    let place = Place::new();
    for layout in ["nhd", "hnd", "fused"] {
        good(&place.run(&["--tokens", "300", "--layout", layout, "--json"]));
    }
}

#[test]
fn latent_rows_of_mla() {
    let place = Place::new();
    let profile = place.file(
        "mla.toml",
        "name='m'\nmodel='m'\nlayers=3\nkv_heads=1\nhead_size=36\nmla=true\ndtype='bf16'\nblock_size=8\n",
    );
    good(&maru(&["p2p", "--device", "host", "--json", "--tokens", "300", "--profile", &profile]));
}

#[test]
fn odd_widths_and_single_token_blocks() {
    let place = Place::new();
    for (heads, size, dtype, block) in
        [(3, 5, "fp8_e4m3", 1), (1, 1, "u8", 7), (5, 3, "f32", 16), (2, 24, "i8", 2)]
    {
        let text = format!(
            "name='o'\nmodel='o'\nlayers=2\nkv_heads={heads}\nhead_size={size}\ndtype='{dtype}'\nblock_size={block}\n"
        );
        let profile = place.file("odd.toml", &text);
        for layout in ["nhd", "hnd", "fused"] {
            good(&maru(&[
                "p2p",
                "--device",
                "host",
                "--json",
                "--tokens",
                "270",
                "--profile",
                &profile,
                "--layout",
                layout,
            ]));
        }
    }
}

#[test]
fn a_built_in_profile() {
    let value = good(&maru(&[
        "p2p",
        "--device",
        "host",
        "--json",
        "--tokens",
        "16",
        "--profile",
        "llama-3.1-8b-fp8",
    ]));
    assert_eq!(value["bytes"], 16 * 2 * 32 * 8 * 128);
}

#[test]
fn the_configuration_file_counts() {
    let place = Place::new();
    let config = place.file(
        "maru.toml",
        "[transfer]\nkv_chunk_tokens=64\nbackend='fallback'\nchecksum='xxh3'\nhost_threads=1\n[cxl]\nprefault=false\ncoherence='flush'\n",
    );
    good(&place.run(&["--tokens", "200", "--config", &config, "--json"]));
}

#[test]
fn another_prompt_misses() {
    let place = Place::new();
    let run = place.run(&["--tokens", "300", "--miss", "--json"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    let value = run.json();
    assert_eq!((&value["cache_hit"], &value["verified"]), (&Value::Bool(false), &Value::Bool(false)));
    assert!(value["load_gbps"].is_null() && value["first_difference"].is_null(), "{value}");
    assert_eq!(value["bytes"], 300 * TOKEN);
    let run = place.run(&["--tokens", "300", "--miss"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.out.contains("Cache Hit: No"), "{}", run.out);
    assert_eq!(leftovers(run.pid).len(), 0);
}

#[test]
fn a_flipped_byte_is_found_and_named() {
    let place = Place::new();
    let run = place.run(&["--tokens", "600", "--corrupt", "--json"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    let value = run.json();
    assert_eq!((&value["cache_hit"], &value["verified"]), (&Value::Bool(true), &Value::Bool(false)));
    let difference = value["first_difference"].as_object().expect("an object");
    assert_eq!(difference.keys().collect::<Vec<_>>(), ["layer", "kv", "token", "head", "byte"]);
    // The byte that was flipped: of chunk 1 (256 tokens), 9/14 into its slab.
    let (slab, row) = (256 * TOKEN, 2 * 8 * 2);
    let at = slab / 2 + slab / 7;
    let (plane, rest) = (at / (256 * row), at % (256 * row));
    let wanted = [plane % 2, plane / 2, 256 + rest / row, rest % row / 16, rest % 16];
    assert_eq!(difference.values().filter_map(Value::as_u64).collect::<Vec<_>>(), wanted);
    let run = place.run(&["--tokens", "600", "--corrupt"]);
    assert!(run.out.contains("Output verified: No") && run.out.contains("first wrong byte"), "{}", run.out);
    assert_eq!(leftovers(run.pid).len(), 0);
}

#[test]
fn a_checksum_stops_a_corrupt_load() {
    let place = Place::new();
    let config = place.file("c.toml", "[transfer]\nchecksum='xxh3'\n");
    let run = place.run(&["--tokens", "300", "--corrupt", "--config", &config, "--json"]);
    let (kind, message) = run.error(1);
    assert_eq!(kind, "mismatch");
    assert!(message.contains("checksum"), "{message}");
    assert_eq!(leftovers(run.pid).len(), 0);
}

#[test]
fn what_cannot_run_here_is_not_available() {
    let place = Place::new();
    let run = place.run(&["--device", "host", "--backend", "native", "--json"]);
    let (kind, message) = run.error(2);
    assert_eq!(kind, "not_available");
    assert!(message.contains("native"), "{message}");
    // No machine has that many.
    let run = place.run(&["--device", "cuda:1023", "--json"]);
    assert_eq!(run.error(2).0, "not_available");
    assert_eq!(leftovers(run.pid).len(), 0);
}

#[test]
fn bad_profiles_and_configurations_are_refused() {
    let place = Place::new();
    let missing = place.path("missing.toml");
    let bad = place.file("bad.toml", "name='x'\nlayers=0\n");
    for (arguments, kind) in [
        (["--profile", "gpt-7"], "config"),
        (["--profile", missing.as_str()], "io"),
        (["--profile", bad.as_str()], "config"),
        (["--config", missing.as_str()], "io"),
        (["--config", bad.as_str()], "config"),
    ] {
        let run = maru(&["p2p", "--json", arguments[0], arguments[1]]);
        assert_eq!(run.error(2).0, kind, "{run:?}");
    }
}

#[test]
fn a_pool_that_does_not_fit_says_how_much_is_missing() {
    let run = maru(&["p2p", "--json", "--tokens", "16777216", "--profile", "qwen2.5-32b"]);
    let (kind, message) = run.error(1);
    assert_eq!(kind, "no_space");
    assert!(message.contains("bytes are wanted") && message.contains("bytes free"), "{message}");
    assert_eq!(leftovers(run.pid).len(), 0);
}
