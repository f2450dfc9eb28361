//! What can go wrong here.

use std::path::PathBuf;

/// Why there is no simulated driver.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// It was not compiled.
    #[error("the simulated driver was not built: {reason}")]
    NotBuilt {
        /// The compiler's words, or that there is none.
        reason: String,
    },
    /// It was compiled and cannot be loaded.
    #[error("the simulated driver {} cannot be loaded: {reason}", path.display())]
    NotLoaded {
        /// The library.
        path: PathBuf,
        /// The loader's words.
        reason: String,
    },
    /// Another driver library was loaded first.
    #[error("another libcuda.so is already loaded in this process; install the simulated one first")]
    AnotherDriver,
    /// A copy of the library cannot be written.
    #[error("{} cannot be written: {reason}", path.display())]
    NotWritten {
        /// Where to.
        path: PathBuf,
        /// The system's words.
        reason: String,
    },
    /// A function that the library does not have anyway.
    #[error("the simulated driver has no function {function}, so it cannot be taken away")]
    NoSuchFunction {
        /// What was named.
        function: String,
    },
}

impl SimError {
    /// The stable snake_case kind.
    pub fn kind(&self) -> &'static str {
        match self {
            SimError::NotBuilt { .. } | SimError::NotLoaded { .. } | SimError::AnotherDriver => {
                "not_available"
            }
            SimError::NotWritten { .. } => "io",
            SimError::NoSuchFunction { .. } => "invalid_argument",
        }
    }
}
