//! Which memory a cache is in.

use std::fmt;

/// The memory an engine serves and a cache lives in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// Host memory.
    Host,
    /// Memory of the CUDA device with this ordinal.
    Cuda(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("host"),
            Place::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}
