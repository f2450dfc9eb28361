//! Kind: keys that are not ours, values that are not allowed (C11). Every key and every bad value is a row of
//! `crates/maru-transfer/tests/config_refuse.rs`.

use maru::{Config, TransferEngine};

use crate::harness::Test;

pub(crate) fn tests() -> Vec<Test> {
    tests![
        plain:
            c11_a_misspelt_key_is_named_with_its_file,
            c11_other_keys_in_wrong_places,
            c11_an_engine_refuses_what_was_set_by_hand;
    ]
}

fn refused(text: &str, parts: &[&str]) {
    let error = Config::from_toml_str(text, "/etc/maru/maru.toml").unwrap_err();
    assert_eq!(error.kind(), "config");
    let message = error.to_string();
    for part in parts.iter().chain(&["/etc/maru/maru.toml"]) {
        assert!(message.contains(part), "{part} is not in: {message}");
    }
}

fn c11_a_misspelt_key_is_named_with_its_file() {
    refused("[cxl]\nprefalt = true", &["cxl.prefalt"]);
    refused("[transfer]\npath = \"/dev/dax0.0\"", &["transfer.path"]);
    refused("chunk_sise = 256", &["chunk_sise"]);
    refused("[[cxl.pool]]\nsize = \"1GiB\"", &["cxl.pool", "path"]);
}

fn c11_other_keys_in_wrong_places() {
    for (text, part) in [
        ("[Transfer]\nbackend = \"auto\"", "Transfer"),
        ("[transfer]\nBackend = \"auto\"", "Backend"),
        ("[transfer]\n\"backend \" = \"auto\"", "backend "),
        ("[transfer.backend]\nkind = \"native\"", "transfer.backend"),
        ("[[transfer]]\nbackend = \"auto\"", "transfer"),
        ("transfer = 1", "transfer"),
        ("[cxl.pool]\npath = \"/dev/dax0.0\"", "cxl.pool"),
        ("[cxl]\npool = \"/dev/dax0.0\"", "cxl.pool"),
        ("[[cxl.pool]]\npath = \"/dev/dax0.0\"\nkind = \"dax\"", "kind"),
        ("[[cxl.pool]]\npath = \"\"", "path"),
        ("[[cxl.pool]]\npath = 3", "path"),
        ("[cxl]\nprefault = \"true\"", "cxl.prefault"),
        ("[cxl]\nprefault = 1", "cxl.prefault"),
        ("[transfer]\nbackend = \"lmcache\"", "transfer.backend"),
        ("[transfer]\nbackend = \"Auto\"", "transfer.backend"),
        ("[transfer]\ndevice = \"cuda\"", "transfer.device"),
        ("[transfer]\ndevice = \"cuda:-1\"", "transfer.device"),
        ("[transfer]\ndevice = \"cuda:4294967296\"", "transfer.device"),
        ("[transfer]\nkv_chunk_tokens = 0", "transfer.kv_chunk_tokens"),
        ("[transfer]\nkv_chunk_tokens = -1", "transfer.kv_chunk_tokens"),
        ("[transfer]\nkv_chunk_tokens = 256.0", "transfer.kv_chunk_tokens"),
        ("[transfer]\nkv_chunk_tokens = 4294967297", "transfer.kv_chunk_tokens"),
        ("[transfer]\nstaging_bytes = \"1.5\"", "transfer.staging_bytes"),
        ("[transfer]\nstaging_bytes = \"16EiB\"", "transfer.staging_bytes"),
        ("[transfer]\nstaging_bytes = \"-1\"", "transfer.staging_bytes"),
        ("[cxl]\nregister_piece = \"512GiB\"", "cxl.register_piece"),
        ("[cxl]\nregister_piece = 0", "cxl.register_piece"),
        ("[index]\npath = \"/dev/dax0.0\"\npth = \"x\"", "index.pth"),
        ("[transfer]\nbackend = \"native\"\nmaru_use_native_kernels = false", "maru_use_native_kernels"),
    ] {
        refused(text, &[part]);
    }
    // Twice the same key, and no TOML at all: still with the file's name.
    refused("[cxl]\nprefault = true\nprefault = false", &["prefault"]);
    refused("prefault = ", &[]);
    refused("\u{0}", &[]);
}

fn c11_an_engine_refuses_what_was_set_by_hand() {
    let mut config = Config::from_toml_str("[transfer]\ndevice = \"host\"", "x").unwrap();
    config.transfer.kv_chunk_tokens = 0;
    let error = TransferEngine::open(&config).unwrap_err();
    assert_eq!(error.kind(), "config");
    assert!(error.to_string().contains("kv_chunk_tokens"), "{error}");
}
