//! What is accepted but worth saying.

use std::fmt;

use super::error::Location;

/// Something in a configuration that works but not the way it reads.
///
/// Warnings are data: reading a configuration logs nothing. Whoever opens an engine with it
/// logs them once, with [`Config::log_warnings`](super::Config::log_warnings).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// A key that still works under its old name.
    DeprecatedKey {
        /// Where it was written.
        at: Location,
        /// The old name, as a path.
        key: String,
        /// The name to use.
        replacement: String,
    },
    /// `enable_fused_load` was asked for, but the fallback has no fused load; it is off.
    FusedLoadDisabled {
        /// Why only the fallback is left.
        because: String,
    },
    /// `strategy` was chosen, but only the native backend has strategies.
    StrategyIgnored {
        /// The strategy that was asked for.
        strategy: super::StrategyChoice,
    },
    /// `maru_kernel_source` was chosen, but kernels are switched off.
    KernelSourceIgnored {
        /// The source that was asked for.
        source: super::KernelSource,
    },
    /// A dict key that is not ours by its name but looks like one of ours misspelt; ignored.
    LookalikeKey {
        /// The key as written.
        key: String,
        /// The key of ours it resembles.
        resembles: String,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::DeprecatedKey { at, key, replacement } => {
                if at.origin().is_some() {
                    write!(f, "{at}: ")?;
                }
                write!(f, "`{key}` is deprecated, use `{replacement}`")
            }
            Warning::FusedLoadDisabled { because } => {
                write!(f, "enable_fused_load needs the native backend and is disabled: {because}")
            }
            Warning::StrategyIgnored { strategy } => write!(
                f,
                "strategy = \"{strategy}\" has no effect: only the native backend has \
                 strategies, and the backend is the fallback"
            ),
            Warning::KernelSourceIgnored { source } => {
                write!(f, "maru_kernel_source = \"{source}\" has no effect: kernels are switched off")
            }
            Warning::LookalikeKey { key, resembles } => {
                write!(f, "`{key}` is not a key of ours and is ignored; was `{resembles}` meant?")
            }
        }
    }
}
