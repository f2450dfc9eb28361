//! The dict form that Python connectors use.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use maru_transfer::config::{BackendChoice, Config, DeviceChoice, KernelSource, Warning};

/// A dict, written as TOML.
fn dict(text: &str) -> toml::Table {
    text.parse().unwrap()
}

fn read(text: &str) -> Config {
    match Config::from_dict(&dict(text)) {
        Ok(config) => config,
        Err(error) => panic!("refused: {error}\n{text}"),
    }
}

fn says(text: &str, parts: &[&str]) {
    let error = match Config::from_dict(&dict(text)) {
        Err(error) => error,
        Ok(config) => panic!("accepted as {config:?}:\n{text}"),
    };
    assert_eq!(error.kind(), "config");
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}\n{text}");
    }
}

#[test]
fn an_empty_dict_is_the_defaults() {
    assert_eq!(read(""), Config::default());
}

#[test]
fn nested_sections_read_as_in_a_file() {
    let text = r#"
        [transfer]
        backend = "fallback"
        staging_bytes = "64M"
        [cxl]
        pool = [{ path = "/dev/dax0.0", size = "1G" }]
        [index]
        path = "/run/maru/index"
    "#;
    assert_eq!(read(text), Config::from_toml_str(text, "x").unwrap());
}

#[test]
fn flat_keys_read_as_their_nested_forms() {
    for (flat, nested) in [
        ("maru_backend = \"native\"", "transfer.backend = \"native\""),
        ("maru_device = \"cuda:1\"", "transfer.device = \"cuda:1\""),
        ("maru_strategy = \"direct\"", "transfer.strategy = \"direct\""),
        ("maru_kv_chunk_tokens = 64", "transfer.kv_chunk_tokens = 64"),
        ("maru_sm_budget = 8", "transfer.sm_budget = 8"),
        ("maru_staging_bytes = \"1M\"", "transfer.staging_bytes = \"1M\""),
        ("maru_host_threads = 3", "transfer.host_threads = 3"),
        ("maru_calibrate = false", "transfer.calibrate = false"),
        ("maru_checksum = \"xxh3\"", "transfer.checksum = \"xxh3\""),
        ("maru_enable_fused_load = true", "transfer.enable_fused_load = true"),
        ("maru_use_native_kernels = false", "transfer.maru_use_native_kernels = false"),
        ("maru_cxl_prefault = false", "cxl.prefault = false"),
        ("maru_cxl_prefault_threads = 2", "cxl.prefault_threads = 2"),
        ("maru_cxl_register = false", "cxl.register = false"),
        ("maru_cxl_require_registration = true", "cxl.require_registration = true"),
        ("maru_cxl_register_piece = \"8G\"", "cxl.register_piece = \"8G\""),
        ("maru_cxl_coherence = \"flush\"", "cxl.coherence = \"flush\""),
        ("maru_index_path = \"/run/i\"", "index.path = \"/run/i\""),
        ("maru_pool_path = \"/dev/dax0.0\"", "cxl.pool = [{ path = \"/dev/dax0.0\" }]"),
        (
            "maru_pool_size = \"8G\"\nmaru_pool_path = \"p\"\nmaru_pool_offset = \"2M\"",
            "cxl.pool = [{ path = \"p\", offset = \"2M\", size = \"8G\" }]",
        ),
    ] {
        let from_nested = Config::from_toml_str(nested, "x").unwrap();
        assert_ne!(from_nested, Config::default(), "{nested}");
        assert_eq!(read(flat), from_nested, "{flat}");
    }
}

#[test]
fn flat_and_nested_mix() {
    let config = read(
        "maru_sm_budget = 8\nmaru_cxl_prefault = false\nmaru_pool_path = \"p\"\n\
         [transfer]\nkv_chunk_tokens = 64\n[cxl]\nregister = false",
    );
    assert_eq!(config.transfer.sm_budget, 8);
    assert_eq!(config.transfer.kv_chunk_tokens, 64);
    assert!(!config.cxl.prefault && !config.cxl.register);
    assert_eq!(config.cxl.pools.len(), 1);
}

#[test]
fn a_setting_given_twice() {
    says(
        "maru_sm_budget = 8\ntransfer.sm_budget = 8",
        &["configuration dict: ", "`maru_sm_budget`", "`transfer.sm_budget`", "same setting"],
    );
    says("maru_pool_path = \"p\"\ncxl.pool = []", &["`maru_pool_path`", "`cxl.pool`", "same setting"]);
    says("maru_index_path = \"p\"\nindex.path = \"p\"", &["same setting"]);
}

#[test]
fn switches_in_the_dict() {
    assert_eq!(read("maru_use_native_kernels = true").transfer.backend, BackendChoice::Auto);
    assert_eq!(read("maru_use_native_kernels = false").transfer.backend, BackendChoice::Fallback);
    let config = read("maru_use_lmcache_kernels = false");
    assert_eq!(config.transfer.backend, BackendChoice::Fallback);
    assert_eq!(
        config.warnings()[0].to_string(),
        "configuration dict: `maru_use_lmcache_kernels` is deprecated, use \
         `maru_use_native_kernels`"
    );
    says(
        "maru_use_native_kernels = true\nmaru_use_lmcache_kernels = false",
        &["`maru_use_native_kernels` contradicts `maru_use_lmcache_kernels`"],
    );
    says(
        "maru_use_native_kernels = true\nmaru_backend = \"fallback\"",
        &["`maru_use_native_kernels` contradicts `maru_backend`"],
    );
    says(
        "maru_use_lmcache_kernels = false\ntransfer.backend = \"native\"",
        &["`maru_use_lmcache_kernels` contradicts `transfer.backend`"],
    );
}

#[test]
fn fused_load_without_kernels_is_disabled() {
    let config = read("maru_enable_fused_load = true\nmaru_use_native_kernels = false");
    assert!(!config.transfer.enable_fused_load);
    assert!(matches!(config.warnings(), [Warning::FusedLoadDisabled { .. }]));
}

#[test]
fn kernel_source_is_for_the_dict_only() {
    assert_eq!(read("").kernel_source, KernelSource::Maru);
    assert_eq!(read("maru_kernel_source = \"maru\"").kernel_source, KernelSource::Maru);
    let config = read("maru_kernel_source = \"lmcache\"");
    assert_eq!(config.kernel_source, KernelSource::Lmcache);
    assert!(!config.to_toml().unwrap().contains("source"));
    says("maru_kernel_source = \"torch\"", &["`maru_kernel_source`", "\"maru\" | \"lmcache\""]);
    let config = read("maru_kernel_source = \"lmcache\"\nmaru_use_native_kernels = false");
    assert!(matches!(config.warnings(), [Warning::KernelSourceIgnored { .. }]));
}

#[test]
fn unknown_maru_keys_are_errors() {
    for (key, hint) in [
        ("maru_sm_budge", "did you mean `maru_sm_budget`?"),
        ("maru_use_native_kernel", "did you mean `maru_use_native_kernels`?"),
        ("maru_server_url", "known here: maru_backend, "),
        ("maru_", "known here"),
        ("maru_transfer", "known here"),
        ("maru_pool", "known here"),
    ] {
        says(&format!("{key} = 1"), &["configuration dict: ", &format!("`{key}`"), hint]);
    }
}

#[test]
fn keys_of_others_are_ignored() {
    let config =
        read("kv_role = \"both\"\nport = 5\nbackend = \"ucx\"\npath = 5\n[nixl]\nmaru_x = 1\n[a.b.c.d]");
    assert_eq!(config, Config::default());
    assert!(config.warnings().is_empty());
}

#[test]
fn misspelt_sections_are_noticed() {
    for (text, resembles) in [
        ("transfr.sm_budget = 4", "transfer"),
        ("Transfer.sm_budget = 4", "transfer"),
        ("mar_sm_budget = 4", "maru_sm_budget"),
        ("MARU_BACKEND = \"native\"", "maru_backend"),
        ("maru-device = \"host\"", "maru_device"),
    ] {
        let config = read(text);
        let [Warning::LookalikeKey { resembles: found, .. }] = config.warnings() else {
            panic!("{text}: {:?}", config.warnings());
        };
        assert_eq!(found, resembles, "{text}");
    }
}

#[test]
fn a_connector_can_keep_its_own_keys() {
    let dict = dict("maru_server_url = \"tcp://x\"\nmaru_sm_budget = 2");
    let config = Config::from_dict_beside(&dict, &["maru_server_url"]).unwrap();
    assert_eq!(config.transfer.sm_budget, 2);
    assert!(Config::from_dict_beside(&dict, &["maru_server"]).is_err());
}

#[test]
fn flat_keys_are_named_as_written() {
    for (text, parts) in [
        ("maru_sm_budget = 0", ["configuration dict: `maru_sm_budget`", "from 1 to 1024"]),
        ("maru_sm_budget = \"4\"", ["`maru_sm_budget` has the wrong type", "from 1 to 1024"]),
        ("maru_calibrate = \"yes\"", ["`maru_calibrate`", "true | false"]),
        ("maru_device = 0", ["`maru_device`", "\"cuda:N\""]),
        ("maru_pool_size = \"1G\"", ["`maru_pool_path` is missing", "dax device"]),
        ("maru_pool_path = \"\"", ["`maru_pool_path`: found \"\"", "dax device"]),
        ("maru_pool_path = 5", ["`maru_pool_path`", "the integer 5"]),
        (
            "maru_pool_path = \"p\"\nmaru_pool_size = \"1.5\"",
            ["`maru_pool_size`", "not a whole number of bytes"],
        ),
        (
            "maru_cxl_register = false\nmaru_cxl_require_registration = true",
            ["`maru_cxl_require_registration`", "contradicts `maru_cxl_register`"],
        ),
        ("maru_index_path = \"/dev/dax0.0\"", ["`maru_index_path`", "/dev/dax"]),
    ] {
        says(text, &parts);
    }
}

#[test]
fn nested_faults_are_errors_as_in_a_file() {
    says("transfer = 5", &["`transfer` has the wrong type"]);
    says("transfer = 5\nmaru_sm_budget = 4", &["`transfer` has the wrong type"]);
    says("cxl = []\nmaru_pool_path = \"p\"", &["`cxl` has the wrong type"]);
    says("[transfer]\nsm_budge = 4", &["`transfer.sm_budge`", "did you mean `sm_budget`"]);
    says("[cxl]\npool = [{ size = 4096 }]", &["`cxl.pool[0].path` is missing"]);
    says("[cxl]\npool = [{ path = \"a\" }, { path = \"a\" }]", &["overlap"]);
}

#[test]
fn any_map_will_do() {
    let map = BTreeMap::from([("maru_sm_budget", 7), ("other", -1)]);
    assert_eq!(Config::from_map(&map).unwrap().transfer.sm_budget, 7);
    assert!(Config::from_map(&BTreeMap::from([("maru_sm_budget", u64::MAX)])).is_err());
    assert!(Config::from_map(&5).is_err());
    assert!(Config::from_map(&["maru_sm_budget"]).is_err());
}

#[test]
fn which_keys_are_ours() {
    for key in Config::flat_keys().chain(["transfer", "cxl", "index", "maru_other"]) {
        assert!(Config::is_dict_key(key), "{key}");
    }
    for key in ["kv_role", "backend", "maru", "Transfer", ""] {
        assert!(!Config::is_dict_key(key), "{key}");
    }
}

#[test]
fn a_strict_table_refuses_foreign_and_flat_keys() {
    assert!(Config::from_table(&dict("kv_role = 1"), "x").is_err());
    assert!(Config::from_table(&dict("maru_sm_budget = 1"), "x").is_err());
    let config = Config::from_table(&dict("transfer.device = \"host\""), "x").unwrap();
    assert_eq!(config.transfer.device, DeviceChoice::Host);
}

#[test]
fn a_deep_dict_is_not_walked() {
    let mut value = toml::Value::Integer(1);
    for _ in 0..2000 {
        value = toml::Value::Array(vec![value]);
    }
    let mut deep = toml::Table::new();
    deep.insert("transfer".to_owned(), value.clone());
    assert!(Config::from_dict(&deep).is_err());
    let mut foreign = toml::Table::new();
    foreign.insert("other".to_owned(), value);
    assert_eq!(Config::from_dict(&foreign).unwrap(), Config::default());
}
