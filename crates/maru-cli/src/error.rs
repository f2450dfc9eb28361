//! What a command can fail with, its stable kind and its exit code.

use maru::cxl::CxlError;
use maru::layout::LayoutError;
use maru::transfer::TransferError;
use maru::transfer::config::ConfigError;
use thiserror::Error;

/// Everything that ends a command other than with a result.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum CliError {
    /// Arguments that make no sense, together or alone.
    #[error("{0}")]
    Invalid(String),
    /// A layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A layout that more knowledge decides, and the options that give it.
    #[error("{source} (options that say more: {options})")]
    Undecided {
        /// What was found.
        source: LayoutError,
        /// As they are written.
        options: &'static str,
    },
    /// A configuration or profile.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The engine.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// Memory and pools.
    #[error(transparent)]
    Cxl(#[from] CxlError),
    /// The system.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Bytes that are not what they should be, other than in the prompt's own slots.
    #[error("{0}")]
    Mismatch(String),
    /// The CUDA driver.
    #[error("{what} failed: {text}")]
    Cuda {
        /// What was tried.
        what: String,
        /// The driver's answer.
        text: String,
    },
    /// The pool is full.
    #[error("{0}")]
    NoSpace(String),
    /// Nothing happened for too long.
    #[error("{0}")]
    Timeout(String),
    /// A child process ended on its own or talked nonsense.
    #[error("{0}")]
    Process(String),
    /// What a child process reported.
    #[error("{who}: {message}")]
    Child {
        /// Which one.
        who: &'static str,
        /// The kind it gave.
        kind: String,
        /// Its message.
        message: String,
        /// The exit code that goes with it.
        code: u8,
    },
    /// A signal asked this process to end.
    #[error("interrupted by {name}")]
    Interrupted {
        /// Its name.
        name: &'static str,
        /// Its number.
        signal: u8,
    },
}

/// Kinds that are about the work and not about what was asked for.
const WORK_FAILED: &[&str] = &[
    "io",
    "no_space",
    "memory_fault",
    "registration",
    "cuda",
    "busy",
    "mover",
    "timeout",
    "mismatch",
    "process",
];

impl CliError {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        CliError::Invalid(message.into())
    }

    pub(crate) fn io(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        CliError::Io { what: what.into(), source: source.into() }
    }

    /// The stable snake_case kind.
    pub(crate) fn kind(&self) -> &str {
        match self {
            CliError::Invalid(_) => "invalid_argument",
            CliError::Layout(e) | CliError::Undecided { source: e, .. } => e.kind(),
            CliError::Config(e) => e.kind(),
            CliError::Transfer(e) => e.kind(),
            CliError::Cxl(e) => e.kind(),
            CliError::Io { .. } => "io",
            CliError::Mismatch(_) => "mismatch",
            CliError::Cuda { .. } => "cuda",
            CliError::NoSpace(_) => "no_space",
            CliError::Timeout(_) => "timeout",
            CliError::Process(_) => "process",
            CliError::Child { kind, .. } => kind,
            CliError::Interrupted { .. } => "interrupted",
        }
    }

    /// 1 the work failed, 2 what was asked for is wrong here, 128 and the number for a signal.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            // An unreadable configuration is bad input, whatever the system's reason.
            CliError::Config(_) => 2,
            CliError::Child { code, .. } => *code,
            CliError::Interrupted { signal, .. } => 128u8.saturating_add(*signal),
            other if WORK_FAILED.contains(&other.kind()) => 1,
            _ => 2,
        }
    }
}
