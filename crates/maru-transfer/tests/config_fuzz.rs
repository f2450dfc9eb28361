//! No input makes reading a configuration panic, and what is accepted stays what it is.
#![allow(clippy::unwrap_used)]

use maru_transfer::config::Config;
use maru_transfer::profile::Profile;
use proptest::prelude::*;

/// Reads in every way; what is accepted must survive being written and read again.
fn try_text(text: &str) {
    let _ = Profile::from_toml_str(text, "x");
    if let Ok(config) = Config::from_toml_str(text, "x") {
        check_accepted(&config);
    }
    if let Ok(table) = text.parse::<toml::Table>() {
        try_table(&table);
    }
}

fn try_table(table: &toml::Table) {
    for config in [Config::from_dict(table), Config::from_table(table, "x")].into_iter().flatten() {
        check_accepted(&config);
    }
}

fn check_accepted(config: &Config) {
    config.validate().unwrap();
    assert_eq!(&config.clone().checked().unwrap(), config);
    let written = config.to_toml().unwrap();
    let again = Config::from_toml_str(&written, "again").unwrap();
    assert_eq!(again.transfer, config.transfer);
    assert_eq!(again.cxl, config.cxl);
    assert_eq!(again.index, config.index);
    for warning in config.warnings() {
        assert!(!warning.to_string().is_empty());
    }
}

const KEYS: &[&str] = &[
    "transfer",
    "cxl",
    "index",
    "pool",
    "path",
    "offset",
    "size",
    "backend",
    "device",
    "strategy",
    "kv_chunk_tokens",
    "sm_budget",
    "staging_bytes",
    "host_threads",
    "calibrate",
    "checksum",
    "enable_fused_load",
    "maru_use_native_kernels",
    "maru_use_lmcache_kernels",
    "prefault",
    "prefault_threads",
    "register",
    "require_registration",
    "register_piece",
    "coherence",
    "maru_backend",
    "maru_pool_path",
    "maru_pool_size",
    "maru_kernel_source",
    "maru_x",
    "transfr",
    "name",
    "layers",
    "kv_heads",
    "head_size",
    "mla",
    "dtype",
    "block_size",
    "",
];

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => prop::sample::select(KEYS).prop_map(str::to_owned),
        1 => ".{0,8}",
    ]
}

fn scalar() -> impl Strategy<Value = toml::Value> {
    prop_oneof![
        any::<bool>().prop_map(toml::Value::Boolean),
        any::<i64>().prop_map(toml::Value::Integer),
        (0i64..4096).prop_map(toml::Value::Integer),
        any::<f64>().prop_map(toml::Value::Float),
        prop::sample::select(
            &[
                "auto",
                "native",
                "fallback",
                "host",
                "cuda:0",
                "cuda:99999999999",
                "direct",
                "staged",
                "none",
                "xxh3",
                "flush",
                "lmcache",
                "4G",
                "1.5GiB",
                "0.1K",
                "-1",
                "99E",
                "/dev/dax0.0",
                "a/../b",
                "",
                "bf16",
                "\0",
            ][..]
        )
        .prop_map(toml::Value::from),
        ".{0,12}".prop_map(toml::Value::from),
    ]
}

fn tree() -> impl Strategy<Value = toml::Value> {
    scalar().prop_recursive(5, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(toml::Value::Array),
            prop::collection::vec((key(), inner), 0..6)
                .prop_map(|entries| toml::Value::Table(entries.into_iter().collect())),
        ]
    })
}

fn table() -> impl Strategy<Value = toml::Table> {
    prop::collection::vec((key(), tree()), 0..6).prop_map(|entries| entries.into_iter().collect())
}

/// Sections with the right keys and mostly the right values, so that much is accepted.
fn plausible() -> impl Strategy<Value = toml::Table> {
    let entry = |keys: &'static [&'static str]| (prop::sample::select(keys), scalar());
    let section = |keys| prop::collection::vec(entry(keys), 0..3);
    (section(&KEYS[7..19]), section(&KEYS[19..25]), prop::collection::vec(section(&KEYS[4..7]), 0..3))
        .prop_map(|(transfer, cxl, pools)| {
            let table = |entries: Vec<(&str, toml::Value)>| -> toml::Table {
                entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
            };
            let mut cxl = table(cxl);
            if !pools.is_empty() {
                let pools: Vec<_> = pools.into_iter().map(|p| table(p).into()).collect();
                cxl.insert("pool".to_owned(), toml::Value::Array(pools));
            }
            [("transfer", table(transfer)), ("cxl", cxl)]
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value.into()))
                .collect()
        })
}

/// 2000 cases, or `PROPTEST_CASES` for a long run.
fn budget() -> ProptestConfig {
    let config = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_some() {
        config
    } else {
        ProptestConfig { cases: 2000, ..config }
    }
}

proptest! {
    #![proptest_config(budget())]

    #[test]
    fn random_text(text in ".{0,200}") {
        try_text(&text);
    }

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        try_text(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn toml_like_text(lines in prop::collection::vec(
        prop_oneof![
            key().prop_map(|k| format!("[{k}]")),
            key().prop_map(|k| format!("[[{k}]]")),
            (key(), scalar()).prop_map(|(k, v)| format!("{k} = {v}")),
            (key(), key(), tree()).prop_map(|(a, b, v)| format!("{a}.{b} = {v}")),
            "[\\[\\]{}=\"'.,#a-z0-9 ]{0,20}",
        ],
        0..12,
    )) {
        try_text(&lines.join("\n"));
    }

    #[test]
    fn random_trees(table in table()) {
        try_table(&table);
        try_text(&toml::to_string(&table).unwrap_or_default());
    }

    #[test]
    fn plausible_trees(table in plausible()) {
        try_table(&table);
        try_text(&toml::to_string(&table).unwrap());
    }
}

/// One byte of the reference file replaced, removed or doubled, everywhere.
#[test]
fn damaged_reference_file() {
    let reference = Config::REFERENCE.as_bytes();
    for i in (0..reference.len()).step_by(7) {
        for byte in [b'[', b'"', b'=', b'\n', b'9', 0xff] {
            let mut bytes = reference.to_vec();
            bytes[i] = byte;
            let _ = Config::from_toml_str(&String::from_utf8_lossy(&bytes), "x");
        }
        let cut = String::from_utf8_lossy(&reference[..i]);
        let _ = Config::from_toml_str(&cut, "x");
    }
}
