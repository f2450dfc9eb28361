//! `config/maru.toml` documents every key and says the truth about every default.
#![allow(clippy::unwrap_used)]

use maru_transfer::config::{Config, PoolConfig};

#[test]
fn the_reference_file_is_exactly_the_defaults() {
    let config = Config::from_toml_str(Config::REFERENCE, "config/maru.toml").unwrap();
    assert_eq!(config, Config::default());
}

/// Every key path of a TOML table, arrays of tables by their first entry.
fn keys(table: &toml::Table, prefix: &str, out: &mut Vec<String>) {
    for (key, value) in table {
        let path = format!("{prefix}{key}");
        match value {
            toml::Value::Table(inner) => keys(inner, &format!("{path}."), out),
            toml::Value::Array(items) => match items.first() {
                Some(toml::Value::Table(inner)) => keys(inner, &format!("{path}."), out),
                _ => out.push(path),
            },
            _ => out.push(path),
        }
    }
}

/// The reference with its pool entry uncommented.
fn with_pool() -> String {
    let mut in_pool = false;
    let mut text = String::new();
    for line in Config::REFERENCE.lines() {
        in_pool = line == "# [[cxl.pool]]" || in_pool && line.starts_with("# ");
        text.push_str(if in_pool { &line[2..] } else { line });
        text.push('\n');
    }
    text
}

#[test]
fn every_key_is_in_the_reference_file() {
    let mut config = Config::default();
    config.cxl.pools.push(PoolConfig::new("/dev/dax0.0"));
    let mut expected = Vec::new();
    keys(&config.to_toml().unwrap().parse().unwrap(), "", &mut expected);
    let mut written = Vec::new();
    keys(&with_pool().parse().unwrap(), "", &mut written);
    expected.sort();
    written.sort();
    assert_eq!(written, expected);
    assert_eq!(written.len(), 20);
}

#[test]
fn the_commented_pool_is_the_default_pool() {
    let config = Config::from_toml_str(&with_pool(), "config/maru.toml").unwrap();
    assert_eq!(config.cxl.pools, [PoolConfig::new("/dev/dax0.0")]);
}

#[test]
fn the_reference_file_names_the_switches() {
    for key in ["# maru_use_native_kernels = ", "# maru_use_lmcache_kernels = "] {
        assert!(Config::REFERENCE.contains(key), "{key}");
    }
}

/// Every key is explained: the line before it is a comment.
#[test]
fn every_key_of_the_reference_file_has_a_comment() {
    let lines: Vec<&str> = Config::REFERENCE.lines().collect();
    for pair in lines.windows(2) {
        let is_key = !pair[1].starts_with(['#', '[']) && pair[1].contains(" = ");
        assert!(!is_key || pair[0].starts_with('#'), "{}", pair[1]);
    }
}
