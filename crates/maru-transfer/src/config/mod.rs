//! The configuration: `[transfer]`, `[cxl]` with its pools, and `[index]`.
//!
//! A configuration is a plain value, read from TOML text ([`Config::from_toml_str`]), a file
//! ([`Config::from_file`]) or a dict ([`Config::from_dict`]), or made in code from
//! [`Config::default`]. It is never global and never looked for in directories. Every key has a
//! default, any section may be absent, and nothing that is written is ever silently replaced by
//! a default: an unknown key, a wrong type, a value out of range, contradicting keys and
//! overlapping pools are errors that name the key, the place, what was found and what is allowed.
//!
//! ```
//! use maru_transfer::config::{BackendChoice, Config};
//!
//! let config = Config::from_toml_str(
//!     r#"
//!     [transfer]
//!     backend = "fallback"
//!
//!     [[cxl.pool]]
//!     path = "/dev/dax0.0"
//!     size = "1.5GiB"
//!     "#,
//!     "maru.toml",
//! )?;
//! assert_eq!(config.transfer.backend, BackendChoice::Fallback);
//! assert_eq!(config.cxl.pools[0].size, 1_610_612_736);
//!
//! let error = Config::from_toml_str("[cxl]\nprefalt = true", "maru.toml").unwrap_err();
//! assert!(error.to_string().starts_with(
//!     "maru.toml:2: unknown key `cxl.prefalt`, did you mean `prefault`?"
//! ));
//! # Ok::<(), maru_transfer::config::ConfigError>(())
//! ```

mod choice;
mod cxl;
mod dict;
mod error;
mod index;
mod limit;
mod node;
mod section;
mod size;
mod transfer;
mod warning;

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

pub use choice::{BackendChoice, ChecksumKind, CoherenceKind, DeviceChoice, KernelSource, StrategyChoice};
pub use cxl::{CxlConfig, PoolConfig};
pub use error::{ConfigError, Location};
pub use index::IndexConfig;
pub use transfer::TransferConfig;
pub use warning::Warning;

pub(crate) use limit::Limit;
pub(crate) use node::{Node, Sources, quoted};
pub(crate) use section::Section;

/// The whole configuration of an engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Config {
    /// `[transfer]`: which mover, and how it works.
    pub transfer: TransferConfig,
    /// `[cxl]`: which memory, and how it is mapped.
    pub cxl: CxlConfig,
    /// `[index]`: where the policy index is kept.
    pub index: IndexConfig,
    /// `maru_kernel_source` of the dict form, of interest to Python connectors only and not a
    /// key of the file.
    #[serde(skip)]
    pub kernel_source: KernelSource,
    #[serde(skip)]
    warnings: Vec<Warning>,
}

/// Far more than any configuration needs, and little enough that a wrong path such as a device
/// or a log file is refused quickly.
const MAX_FILE_BYTES: u64 = 1 << 20;

const DICT: &str = "configuration dict";

impl Config {
    /// `config/maru.toml`: every key with its default and a comment.
    pub const REFERENCE: &str = include_str!("../../../../config/maru.toml");

    /// Reads TOML text; `origin` (a file name) is what errors and warnings call it.
    ///
    /// # Errors
    /// [`ConfigError`] for anything but a valid configuration; nothing is repaired.
    pub fn from_toml_str(text: &str, origin: &str) -> Result<Config, ConfigError> {
        let mut sources = Sources::new(Arc::from(origin));
        let root = Node::parse(text, &sources.origin)?;
        Config::read(root, &mut sources, Vec::new(), false)
    }

    /// Reads a TOML file of at most 1 MiB.
    ///
    /// # Errors
    /// [`ConfigError::Io`] if the file cannot be read, else as [`Config::from_toml_str`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Config, ConfigError> {
        let path = path.as_ref();
        Config::from_toml_str(&read_file(path)?, &path.display().to_string())
    }

    /// Reads a table that came as data, by the same rules as a file: every unknown key is an
    /// error.
    ///
    /// # Errors
    /// As [`Config::from_toml_str`].
    pub fn from_table(table: &toml::Table, origin: &str) -> Result<Config, ConfigError> {
        let mut sources = Sources::new(Arc::from(origin));
        Config::read(Node::from_table(table), &mut sources, Vec::new(), false)
    }

    /// Reads a connector's dict, such as vLLM's `kv_connector_extra_config`.
    ///
    /// It holds the sections `transfer`, `cxl` and `index` nested as in the file, or flat keys,
    /// or both as long as no setting is given twice:
    ///
    /// * `maru_` and a key of `[transfer]`: `maru_backend`, `maru_device`, `maru_strategy`,
    ///   `maru_kv_chunk_tokens`, `maru_sm_budget`, `maru_staging_bytes`, `maru_host_threads`,
    ///   `maru_calibrate`, `maru_checksum`, `maru_enable_fused_load`, and the switches
    ///   `maru_use_native_kernels` and (deprecated) `maru_use_lmcache_kernels`;
    /// * `maru_cxl_` and a key of `[cxl]`: `maru_cxl_prefault`, `maru_cxl_prefault_threads`,
    ///   `maru_cxl_register`, `maru_cxl_require_registration`, `maru_cxl_register_piece`,
    ///   `maru_cxl_coherence`;
    /// * `maru_pool_path`, `maru_pool_offset`, `maru_pool_size` for one pool (several need the
    ///   nested form);
    /// * `maru_index_path`;
    /// * `maru_kernel_source` (`maru` or `lmcache`), which has no place in the file.
    ///
    /// Other keys that start with `maru_` are errors. All others are not ours and are ignored,
    /// with a [`Warning::LookalikeKey`] where one looks like a slip of the pen.
    ///
    /// # Errors
    /// As [`Config::from_toml_str`].
    pub fn from_dict(dict: &toml::Table) -> Result<Config, ConfigError> {
        Config::from_dict_beside(dict, &[])
    }

    /// As [`Config::from_dict`], for a connector that has `maru_` keys of its own in the same
    /// dict: those named in `foreign` are ignored.
    ///
    /// # Errors
    /// As [`Config::from_toml_str`].
    pub fn from_dict_beside(dict: &toml::Table, foreign: &[&str]) -> Result<Config, ConfigError> {
        let mut sources = Sources::new(Arc::from(DICT));
        let mut warnings = Vec::new();
        let root = dict::nested(dict, foreign, &sources, &mut warnings)?;
        Config::read(root, &mut sources, warnings, true)
    }

    /// As [`Config::from_dict`], for anything that serialises to a map with text keys.
    ///
    /// # Errors
    /// [`ConfigError::Syntax`] for what does not fit a TOML table (an integer over 64 bits, a
    /// key that is no text), else as [`Config::from_toml_str`].
    pub fn from_map<T: Serialize + ?Sized>(map: &T) -> Result<Config, ConfigError> {
        let table = toml::Table::try_from(map).map_err(|error| ConfigError::Syntax {
            at: Location::new(&Arc::from(DICT), None),
            message: error.to_string(),
        })?;
        Config::from_dict(&table)
    }

    /// Whether [`Config::from_dict`] would read this top-level key (or refuse it as a misspelt
    /// one of ours), so that a caller need not convert the rest of a foreign dict.
    #[must_use]
    pub fn is_dict_key(key: &str) -> bool {
        dict::is_ours(key)
    }

    /// The flat keys of the dict form.
    pub fn flat_keys() -> impl Iterator<Item = &'static str> {
        dict::flat_keys()
    }

    fn read(
        root: Node,
        sources: &mut Sources,
        mut warnings: Vec<Warning>,
        dict: bool,
    ) -> Result<Config, ConfigError> {
        let table = "a table";
        let mut root = Section::new(root, "", table, sources)?;
        let transfer = root.take("transfer", sources);
        let cxl = root.take("cxl", sources);
        let index = root.take("index", sources);
        let kernel_source = if dict { root.word(dict::KERNEL_SOURCE, sources)? } else { None };
        root.finish(sources)?;

        let mut config = Config { kernel_source: kernel_source.unwrap_or_default(), ..Config::default() };
        if let Some(node) = transfer {
            let section = Section::new(node, "transfer", table, sources)?;
            config.transfer = TransferConfig::read(section, sources, &mut warnings)?;
        }
        if let Some(node) = cxl {
            let section = Section::new(node, "cxl", table, sources)?;
            config.cxl = CxlConfig::read(section, sources)?;
        }
        if let Some(node) = index {
            let section = Section::new(node, "index", table, sources)?;
            config.index = IndexConfig::read(section, sources)?;
        }
        config.warnings = warnings;
        config.checked().map_err(|error| error.located(sources))
    }

    /// Checks ranges and contradictions, as reading does. For configurations changed in code.
    ///
    /// # Errors
    /// [`ConfigError`] without a place; keys are given as paths of the file form.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.transfer.check()?;
        self.cxl.check()?;
        self.index.check(&self.cxl)
    }

    /// The configuration an engine runs with: valid, and with what its backend cannot do
    /// switched off and noted in [`Config::warnings`]. Reading ends with this; a configuration
    /// made in code needs it once, and `TransferEngine::open` does it in any case.
    ///
    /// # Errors
    /// As [`Config::validate`].
    pub fn checked(mut self) -> Result<Config, ConfigError> {
        self.validate()?;
        self.transfer.settle(&mut self.warnings);
        if self.kernel_source != KernelSource::Maru && self.transfer.backend == BackendChoice::Fallback {
            let ignored = Warning::KernelSourceIgnored { source: self.kernel_source };
            if !self.warnings.contains(&ignored) {
                self.warnings.push(ignored);
            }
        }
        Ok(self)
    }

    /// What was accepted but is worth saying, in the order it was noticed.
    #[must_use]
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Logs every warning. Reading a configuration logs nothing; whoever opens an engine with
    /// it calls this once.
    pub fn log_warnings(&self) {
        for warning in &self.warnings {
            tracing::warn!("{warning}");
        }
    }

    /// The configuration as TOML with every key present and sizes as integers of bytes. Reading
    /// it gives the same configuration, without the warnings.
    ///
    /// # Errors
    /// As [`Config::validate`], for configurations made in code.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        self.validate()?;
        toml::to_string(self).map_err(|error| ConfigError::Unwritable { message: error.to_string() })
    }
}

/// A section of somebody else's file: reads as [`Config::from_table`] does.
impl<'de> serde::Deserialize<'de> for Config {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let table = toml::Table::deserialize(deserializer)?;
        Config::from_table(&table, "maru configuration").map_err(serde::de::Error::custom)
    }
}

/// The text of a file of moderate size.
pub(crate) fn read_file(path: &Path) -> Result<String, ConfigError> {
    let io = |source| ConfigError::Io { path: path.to_owned(), source };
    let syntax = |line, message: &str| ConfigError::Syntax {
        at: Location::new(&Arc::from(path.display().to_string()), line),
        message: message.to_owned(),
    };
    let file = std::fs::File::open(path).map_err(io)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(syntax(None, "the file is larger than 1 MiB (1048576 bytes)"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let newlines = valid.iter().filter(|&&b| b == b'\n').count();
        let line = u32::try_from(newlines + 1).ok();
        syntax(line, "the file is not UTF-8 text")
    })
}
