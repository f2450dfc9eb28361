//! The flat keys of a connector's dict, `maru_backend` and the like, and their places in the
//! nested form.

use super::error::ConfigError;
use super::node::{Node, Sources, Value};
use super::section::{nearest, wrong_type};
use super::warning::Warning;

/// Where a flat key goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    Transfer,
    Cxl,
    Pool,
    Index,
    /// The connector's own switch, not in the TOML form.
    Root,
}

/// Flat key, section, key there.
const FLAT: &[(&str, Home, &str)] = &[
    ("maru_backend", Home::Transfer, "backend"),
    ("maru_device", Home::Transfer, "device"),
    ("maru_strategy", Home::Transfer, "strategy"),
    ("maru_kv_chunk_tokens", Home::Transfer, "kv_chunk_tokens"),
    ("maru_sm_budget", Home::Transfer, "sm_budget"),
    ("maru_staging_bytes", Home::Transfer, "staging_bytes"),
    ("maru_host_threads", Home::Transfer, "host_threads"),
    ("maru_calibrate", Home::Transfer, "calibrate"),
    ("maru_checksum", Home::Transfer, "checksum"),
    ("maru_enable_fused_load", Home::Transfer, "enable_fused_load"),
    (super::transfer::NATIVE_TOGGLE, Home::Transfer, super::transfer::NATIVE_TOGGLE),
    (super::transfer::OLD_TOGGLE, Home::Transfer, super::transfer::OLD_TOGGLE),
    ("maru_pool_path", Home::Pool, "path"),
    ("maru_pool_offset", Home::Pool, "offset"),
    ("maru_pool_size", Home::Pool, "size"),
    ("maru_cxl_prefault", Home::Cxl, "prefault"),
    ("maru_cxl_prefault_threads", Home::Cxl, "prefault_threads"),
    ("maru_cxl_register", Home::Cxl, "register"),
    ("maru_cxl_require_registration", Home::Cxl, "require_registration"),
    ("maru_cxl_register_piece", Home::Cxl, "register_piece"),
    ("maru_cxl_coherence", Home::Cxl, "coherence"),
    ("maru_index_path", Home::Index, "path"),
    (KERNEL_SOURCE, Home::Root, KERNEL_SOURCE),
];

/// The path of the one pool that flat keys describe: `maru_pool_path` is its `path`.
pub(super) const FLAT_POOL: &str = "maru_pool";
pub(super) const KERNEL_SOURCE: &str = "maru_kernel_source";
const SECTIONS: [&str; 3] = ["transfer", "cxl", "index"];
const PREFIX: &str = "maru_";

/// Every flat key.
pub(super) fn flat_keys() -> impl Iterator<Item = &'static str> {
    FLAT.iter().map(|(flat, ..)| *flat)
}

/// Whether a dict key is ours: a section, or anything that starts with `maru_`.
pub(super) fn is_ours(key: &str) -> bool {
    SECTIONS.contains(&key) || key.starts_with(PREFIX)
}

/// Brings a dict into the nested form. `foreign` are `maru_` keys that somebody else reads.
pub(super) fn nested(
    dict: &toml::Table,
    foreign: &[&str],
    sources: &Sources,
    warnings: &mut Vec<Warning>,
) -> Result<Node, ConfigError> {
    let mut root: Vec<(String, Node)> = SECTIONS
        .iter()
        .filter_map(|name| {
            let node = Node::from_value((*name).to_owned(), dict.get(*name)?);
            Some(((*name).to_owned(), node))
        })
        .collect();
    let mut pool: Vec<(String, Node)> = Vec::new();

    for (key, value) in dict {
        if SECTIONS.contains(&key.as_str()) || foreign.contains(&key.as_str()) {
            continue;
        }
        let Some((_, home, name)) = FLAT.iter().find(|(flat, ..)| flat == key) else {
            if key.starts_with(PREFIX) {
                return Err(unknown(key, sources));
            }
            if let Some(resembles) = lookalike(key) {
                warnings.push(Warning::LookalikeKey { key: key.clone(), resembles: resembles.to_owned() });
            }
            continue;
        };
        let node = Node::from_value(key.clone(), value);
        let entries = match home {
            Home::Transfer => section(&mut root, "transfer", sources)?,
            Home::Cxl => section(&mut root, "cxl", sources)?,
            Home::Index => section(&mut root, "index", sources)?,
            Home::Pool => &mut pool,
            Home::Root => &mut root,
        };
        insert(entries, name, node, sources)?;
    }
    if !pool.is_empty() {
        let written = match pool.first() {
            Some((_, node)) => node.path.clone(),
            None => String::new(),
        };
        let table = Node { path: FLAT_POOL.to_owned(), line: None, value: Value::Table(pool) };
        let array = Node { path: written, line: None, value: Value::Array(vec![table]) };
        insert(section(&mut root, "cxl", sources)?, "pool", array, sources)?;
    }
    Ok(Node { path: String::new(), line: None, value: Value::Table(root) })
}

/// The entries of a section, made if it is not there yet.
fn section<'a>(
    root: &'a mut Vec<(String, Node)>,
    name: &str,
    sources: &Sources,
) -> Result<&'a mut Vec<(String, Node)>, ConfigError> {
    let at = match root.iter().position(|(key, _)| key == name) {
        Some(at) => at,
        None => {
            let node = Node { path: name.to_owned(), line: None, value: Value::Table(Vec::new()) };
            root.push((name.to_owned(), node));
            root.len() - 1
        }
    };
    let node = &mut root[at].1;
    let otherwise = wrong_type(node, "a table", sources);
    match &mut node.value {
        Value::Table(entries) => Ok(entries),
        _ => Err(otherwise),
    }
}

fn insert(
    entries: &mut Vec<(String, Node)>,
    name: &str,
    node: Node,
    sources: &Sources,
) -> Result<(), ConfigError> {
    if let Some((_, other)) = entries.iter().find(|(key, _)| key == name) {
        return Err(ConfigError::GivenTwice {
            at: sources.location(None),
            key: node.path,
            other: other.path.clone(),
        });
    }
    entries.push((name.to_owned(), node));
    Ok(())
}

fn unknown(key: &str, sources: &Sources) -> ConfigError {
    let known: Vec<&str> = flat_keys().collect();
    ConfigError::UnknownKey {
        at: sources.location(None),
        key: super::node::joined("", key),
        hint: nearest(key, &known).map(|near| format!(", did you mean `{near}`?")).unwrap_or_default(),
        known: known.join(", "),
    }
}

/// A key of somebody else's that is suspiciously like one of ours.
fn lookalike(key: &str) -> Option<&'static str> {
    let plain = key.to_ascii_lowercase().replace('-', "_");
    let known: Vec<&str> = flat_keys().chain(SECTIONS).collect();
    nearest(&plain, &known)
}
