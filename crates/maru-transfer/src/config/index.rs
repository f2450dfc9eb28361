//! `[index]`: where the policy index on top of the slab directory is kept.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::cxl::{CxlConfig, normalised};
use super::error::ConfigError;
use super::node::{Sources, quoted};
use super::section::Section;

/// Section `[index]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct IndexConfig {
    /// The index file; empty (the default) means `$XDG_RUNTIME_DIR/maru/<pool id>`. Never on the
    /// dax device.
    pub path: PathBuf,
}

pub(super) const KEYS: &[&str] = &["path"];

const ALLOWED: &str = "text: a file path outside the pools and outside /dev/dax*, or \"\" for \
                       $XDG_RUNTIME_DIR/maru/<pool id>";

impl IndexConfig {
    pub(super) fn read(mut section: Section, sources: &mut Sources) -> Result<Self, ConfigError> {
        let path = section.text("path", ALLOWED, sources)?.unwrap_or_default();
        section.finish(sources)?;
        Ok(IndexConfig { path: path.into() })
    }

    pub(super) fn check(&self, cxl: &CxlConfig) -> Result<(), ConfigError> {
        const KEY: &str = "index.path";
        if self.path.as_os_str().is_empty() {
            return Ok(());
        }
        let text = writable_path(KEY, &self.path, ALLOWED)?;
        let normal = normalised(text);
        if normal.starts_with("/dev/dax") {
            return Err(ConfigError::invalid(KEY, quoted(text), ALLOWED));
        }
        for (i, pool) in cxl.pools.iter().enumerate() {
            if pool.path.to_str().map(normalised).as_deref() == Some(&*normal) {
                return Err(ConfigError::contradiction(
                    KEY,
                    &format!("cxl.pool[{i}].path"),
                    format!("both are {}; the index is a file of its own", quoted(text)),
                ));
            }
        }
        Ok(())
    }
}

/// The path as text that a configuration file and the system both take.
pub(super) fn writable_path<'a>(key: &str, path: &'a Path, allowed: &str) -> Result<&'a str, ConfigError> {
    match path.to_str() {
        Some(text) if !text.contains('\0') => Ok(text),
        Some(text) => {
            Err(ConfigError::invalid(key, format!("{} (contains a zero byte)", quoted(text)), allowed))
        }
        None => Err(ConfigError::invalid(
            key,
            format!("{} (not UTF-8)", quoted(&path.to_string_lossy())),
            allowed,
        )),
    }
}
