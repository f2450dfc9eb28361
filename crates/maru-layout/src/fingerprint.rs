//! A 64-bit name for a slab's geometry.

use std::fmt;

use crate::{RowKind, SlabLayout};

/// Ties a key to a slab's geometry and element type, so that a slab of another kind is refused before any
/// address is computed from it.
///
/// The value is XXH3-64 (seed 0) over the 12 bytes `maru-slab/1\0` followed by nine little-endian `u64`:
/// planes, layers, tokens, row bytes, dtype code, row kind (0 plain, 1 opaque rows, 2 opaque blocks), and the
/// byte strides of plane, layer and token (0 for a count of 1). It does not change between versions; a new
/// meaning would get a new prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub u64);

impl SlabLayout {
    /// The fingerprint of this geometry.
    pub fn fingerprint(&self) -> Fingerprint {
        let kind = match self.row_kind {
            RowKind::Plain => 0,
            RowKind::OpaqueRows => 1,
            RowKind::OpaqueBlocks => 2,
        };
        let words = [
            self.planes,
            self.layers,
            self.tokens,
            self.row_bytes,
            self.dtype.code(),
            kind,
            self.kv_stride,
            self.layer_stride,
            self.token_stride,
        ];
        let mut bytes = b"maru-slab/1\0".to_vec();
        bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        Fingerprint(xxhash_rust::xxh3::xxh3_64(&bytes))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
