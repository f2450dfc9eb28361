//! Configuration files.

use maru::Config;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;

use super::common::accept;

const WORDS: &str = "transfer cxl cxl.pool index path size offset backend device strategy kv_chunk_tokens \
    sm_budget staging_bytes host_threads calibrate checksum enable_fused_load maru_use_lmcache_kernels \
    maru_use_native_kernels prefault prefault_threads register require_registration register_piece coherence \
    auto native fallback host cuda:0 cuda:-1 cuda:4294967296 direct staged none xxh3 flush true false 0 1 -1 256 \
    9223372036854775807 18446744073709551616 1e3 0x10 nan 4GiB 1.5gib 0.1 512GiB 99999999999E -1K 4 /dev/dax0.0 \
    /tmp/p ../p é \\u0000 chunk_sise prefalt pool";

/// Text, much of it nearly right.
pub(crate) fn inputs() -> impl Strategy<Value = String> {
    let words: Vec<String> = WORDS.split_whitespace().map(str::to_owned).collect();
    let word = move || prop_oneof![9 => select(words.clone()), 1 => "\\PC{0,6}"];
    let value = {
        let word = word.clone();
        move || {
            prop_oneof![
                3 => word(),
                3 => word().prop_map(|w| format!("\"{w}\"")),
                1 => (word(), word()).prop_map(|(a, b)| format!("[{a}, \"{b}\"]")),
                1 => (word(), word()).prop_map(|(a, b)| format!("{{ {a} = \"{b}\" }}")),
            ]
        }
    };
    let line = prop_oneof![
        6 => (word(), value()).prop_map(|(k, v)| format!("{k} = {v}")),
        2 => word().prop_map(|w| format!("[{w}]")),
        2 => word().prop_map(|w| format!("[[{w}]]")),
        1 => "\\PC{0,30}",
    ];
    // Whole sections in the right place, and heaps of lines.
    prop_oneof![
        2 => prop::collection::vec(line, 0..12).prop_map(|lines| lines.join("\n")),
        1 => (select(&["transfer", "cxl", "index"][..]), prop::collection::vec((word(), value()), 0..4)).prop_map(
            |(section, keys)| {
                let keys: Vec<_> = keys.into_iter().map(|(k, v)| format!("{k} = {v}")).collect();
                format!("[{section}]\n{}", keys.join("\n"))
            }
        ),
        1 => "(?s).{0,80}",
    ]
}

/// What is accepted is in range and stays what it is; what is refused says where.
pub(crate) fn check(text: String) -> TestCaseResult {
    match Config::from_toml_str(&text, "some/maru.toml") {
        Ok(config) => {
            accept();
            prop_assert!(config.validate().is_ok());
            let written = config.to_toml().map_err(|e| TestCaseError::fail(e.to_string()))?;
            let again = Config::from_toml_str(&written, "again")
                .map_err(|e| TestCaseError::fail(format!("{e}\nfrom\n{written}")))?;
            prop_assert_eq!(&again.transfer, &config.transfer);
            prop_assert_eq!(&again.cxl, &config.cxl);
            prop_assert_eq!(&again.index, &config.index);
        }
        Err(e) => {
            prop_assert_eq!(e.kind(), "config");
            prop_assert!(e.to_string().contains("some/maru.toml"), "{}", e);
        }
    }
    if let Ok(table) = text.parse::<toml::Table>() {
        let _ = Config::from_dict(&table).map_err(|e| e.to_string());
    }
    Ok(())
}
