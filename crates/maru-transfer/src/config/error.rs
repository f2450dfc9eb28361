//! What can be wrong with a configuration, in words for the person who wrote it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Where a configuration value was written: a file (or "configuration dict") and, when it came
/// from text, a line.
///
/// Prints as `maru.toml:12`, as `maru.toml` without a line, and as nothing when the value was
/// set in code.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Location {
    origin: Option<Arc<str>>,
    line: Option<u32>,
}

impl Location {
    pub(super) fn new(origin: &Arc<str>, line: Option<u32>) -> Self {
        Location { origin: Some(Arc::clone(origin)), line }
    }

    /// The file name or other origin given by whoever read the configuration.
    #[must_use]
    pub fn origin(&self) -> Option<&str> {
        self.origin.as_deref()
    }

    /// The line, counted from 1, where it is known.
    #[must_use]
    pub fn line(&self) -> Option<u32> {
        self.line
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.origin, self.line) {
            (Some(origin), Some(line)) => write!(f, "{origin}:{line}"),
            (Some(origin), None) => f.write_str(origin),
            (None, _) => Ok(()),
        }
    }
}

/// `maru.toml:12: `, or nothing for a place that is not known.
struct Prefix<'a>(&'a Location);

impl fmt::Display for Prefix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.origin.is_some() { write!(f, "{}: ", self.0) } else { Ok(()) }
    }
}

/// Why a configuration or a model profile was refused.
///
/// Keys are given as paths, the way they were written: `transfer.sm_budget`,
/// `cxl.pool[1].size` (entries counted from 0), or `maru_sm_budget` for the flat form.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not TOML.
    #[error("{}not valid TOML: {message}", Prefix(.at))]
    Syntax {
        /// Where parsing stopped.
        at: Location,
        /// What the parser found there.
        message: String,
    },
    /// A key nobody reads, a typing mistake as a rule.
    #[error("{}unknown key `{key}`{hint}; known here: {known}", Prefix(.at))]
    UnknownKey {
        /// Where the key stands.
        at: Location,
        /// Its path.
        key: String,
        /// `""`, or a guess at what was meant, starting with a comma or semicolon.
        hint: String,
        /// The keys that would be read at that level, comma-separated.
        known: String,
    },
    /// A key without a default is absent.
    #[error("{}`{key}` is missing; needed: {allowed}", Prefix(.at))]
    MissingKey {
        /// Where the table stands that lacks the key.
        at: Location,
        /// Path of the missing key.
        key: String,
        /// What it may hold.
        allowed: String,
    },
    /// A value of another type than the key takes.
    #[error("{}`{key}` has the wrong type: found {found}, allowed: {allowed}", Prefix(.at))]
    WrongType {
        /// Where the value stands.
        at: Location,
        /// Path of the key.
        key: String,
        /// What was found, type and value.
        found: String,
        /// What the key takes.
        allowed: String,
    },
    /// A value of the right type that the key does not take.
    #[error("{}`{key}`: found {found}, allowed: {allowed}", Prefix(.at))]
    InvalidValue {
        /// Where the value stands.
        at: Location,
        /// Path of the key.
        key: String,
        /// What was found.
        found: String,
        /// What the key takes.
        allowed: String,
    },
    /// Two keys that cannot both be meant.
    #[error("{}`{key}` contradicts `{other}`: {why}", Prefix(.at))]
    Contradiction {
        /// Where the first of the two stands.
        at: Location,
        /// Path of one key.
        key: String,
        /// Path of the other.
        other: String,
        /// Both values, and what to do.
        why: String,
    },
    /// The same setting written in two ways in one dict.
    #[error("{}`{key}` and `{other}` are the same setting; give one of them", Prefix(.at))]
    GivenTwice {
        /// Where they stand.
        at: Location,
        /// One spelling.
        key: String,
        /// The other.
        other: String,
    },
    /// Two pools would use the same bytes of one device or file.
    #[error("{}`{first}` and `{second}` overlap on {detail}", Prefix(.at))]
    OverlappingPools {
        /// Where the second pool stands.
        at: Location,
        /// Path of the earlier pool.
        first: String,
        /// Path of the later pool.
        second: String,
        /// The device and both byte ranges.
        detail: String,
    },
    /// There is no built-in profile of that name.
    #[error("no built-in profile `{name}`; there are: {known}")]
    UnknownProfile {
        /// The name asked for.
        name: String,
        /// All names, comma-separated.
        known: String,
    },
    /// The configuration cannot be written as TOML.
    #[error("cannot be written as TOML: {message}")]
    Unwritable {
        /// Why not.
        message: String,
    },
    /// The file could not be read.
    #[error("cannot read {}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl ConfigError {
    /// The stable snake_case kind: `"io"` for a file that could not be read, else `"config"`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            ConfigError::Io { .. } => "io",
            _ => "config",
        }
    }

    /// Path of the key at fault, where one is.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        match self {
            ConfigError::UnknownKey { key, .. }
            | ConfigError::MissingKey { key, .. }
            | ConfigError::WrongType { key, .. }
            | ConfigError::InvalidValue { key, .. }
            | ConfigError::Contradiction { key, .. }
            | ConfigError::GivenTwice { key, .. } => Some(key),
            ConfigError::OverlappingPools { second, .. } => Some(second),
            _ => None,
        }
    }

    /// Where the fault stands, where that is known.
    #[must_use]
    pub fn location(&self) -> Option<&Location> {
        match self {
            ConfigError::Syntax { at, .. }
            | ConfigError::UnknownKey { at, .. }
            | ConfigError::MissingKey { at, .. }
            | ConfigError::WrongType { at, .. }
            | ConfigError::InvalidValue { at, .. }
            | ConfigError::Contradiction { at, .. }
            | ConfigError::GivenTwice { at, .. }
            | ConfigError::OverlappingPools { at, .. } => Some(at),
            _ => None,
        }
    }

    pub(crate) fn invalid(
        key: impl Into<String>,
        found: impl Into<String>,
        allowed: impl Into<String>,
    ) -> Self {
        ConfigError::InvalidValue {
            at: Location::default(),
            key: key.into(),
            found: found.into(),
            allowed: allowed.into(),
        }
    }

    pub(crate) fn contradiction(key: &str, other: &str, why: impl Into<String>) -> Self {
        ConfigError::Contradiction {
            at: Location::default(),
            key: key.to_owned(),
            other: other.to_owned(),
            why: why.into(),
        }
    }

    /// Fills in what checks on bare values cannot know: where each key was written, and under
    /// which spelling.
    pub(crate) fn located(mut self, sources: &super::node::Sources) -> Self {
        match &mut self {
            ConfigError::InvalidValue { at, key, .. } => sources.locate(at, key),
            ConfigError::Contradiction { at, key, other, .. } => {
                sources.locate(&mut Location::default(), other);
                sources.locate(at, key);
            }
            ConfigError::OverlappingPools { at, first, second, .. } => {
                sources.locate(&mut Location::default(), first);
                sources.locate(at, second);
            }
            _ => {}
        }
        self
    }
}
