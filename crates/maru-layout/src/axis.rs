//! The words for a tensor's axes.

use std::fmt;
use std::str::FromStr;

use crate::LayoutError;

/// What an axis of a registered tensor counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Axis {
    /// Blocks of the paged cache.
    Block,
    /// K and V (length 2).
    Kv,
    /// Tokens of a block.
    Token,
    /// KV heads of this rank.
    Head,
    /// Elements of a head, or of MLA's latent row.
    Dim,
    /// K then V of one head, fused in the last axis.
    KvDim,
    /// Opaque bytes: of a head's or token's row when there is a token axis, else of a whole block.
    Content,
    /// All heads of a token, flattened.
    HeadsDim,
    /// Block and token merged into one axis (SGLang).
    Slot,
    /// Model layers in one tensor (cross-layer caches).
    Layer,
}

impl Axis {
    /// Every word.
    pub const ALL: [Axis; 10] = [
        Axis::Block,
        Axis::Kv,
        Axis::Token,
        Axis::Head,
        Axis::Dim,
        Axis::KvDim,
        Axis::Content,
        Axis::HeadsDim,
        Axis::Slot,
        Axis::Layer,
    ];

    /// The word used on the command line, in Python and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Block => "block",
            Axis::Kv => "kv",
            Axis::Token => "token",
            Axis::Head => "head",
            Axis::Dim => "dim",
            Axis::KvDim => "kv_dim",
            Axis::Content => "content",
            Axis::HeadsDim => "heads_dim",
            Axis::Slot => "slot",
            Axis::Layer => "layer",
        }
    }

    /// Reads a comma-separated list such as `block,kv,token,head,dim`.
    pub fn parse_list(text: &str) -> Result<Vec<Axis>, LayoutError> {
        text.split(',').map(|word| word.trim().parse()).collect()
    }

    /// The list as text, comma-separated.
    pub fn join(axes: &[Axis]) -> String {
        axes.iter().map(|a| a.name()).collect::<Vec<_>>().join(",")
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Axis {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        Axis::ALL.into_iter().find(|a| a.name() == text).ok_or_else(|| LayoutError::UnknownAxis {
            found: text.to_owned(),
            allowed: Axis::ALL.map(Axis::name).join(" "),
        })
    }
}
