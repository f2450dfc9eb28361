//! Keys of chunks: what a prompt's tokens are found by.

use std::fmt;

use maru_layout::Fingerprint;
use sha2::{Digest, Sha256};

/// The 32-byte key of one chunk of a prompt.
///
/// It is SHA-256 over `maru-chunk/1\0`, the previous chunk's key (of the first chunk: the namespace's hash),
/// and the chunk's token ids as little-endian `u32`. So equal keys mean an equal prefix, not an equal chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkKey(pub [u8; 32]);

/// Keys of a prompt's chunks in order.
#[derive(Clone, Debug)]
pub struct ChunkKeys {
    previous: [u8; 32],
}

impl ChunkKeys {
    /// Keys in a namespace: everything that must be equal for two servers to share KV (model, revision, rank,
    /// …), and the slab geometry.
    pub fn new(namespace: &str, geometry: Fingerprint) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"maru-namespace/1\0");
        hash.update(geometry.0.to_le_bytes());
        hash.update(namespace.as_bytes());
        ChunkKeys { previous: hash.finalize().into() }
    }

    /// The key of the next chunk.
    pub fn chunk(&mut self, tokens: &[u32]) -> ChunkKey {
        let mut hash = Sha256::new();
        hash.update(b"maru-chunk/1\0");
        hash.update(self.previous);
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        self.previous = hash.finalize().into();
        ChunkKey(self.previous)
    }
}

impl fmt::Debug for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChunkKey({self})")
    }
}

impl fmt::Display for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_the_whole_prefix() {
        let keys = |namespace: &str, chunks: &[&[u32]]| {
            let mut keys = ChunkKeys::new(namespace, Fingerprint(7));
            chunks.iter().map(|c| keys.chunk(c)).collect::<Vec<_>>()
        };
        let a = keys("m", &[&[1, 2], &[3, 4]]);
        assert_eq!(a, keys("m", &[&[1, 2], &[3, 4]]));
        assert_ne!(a[1], keys("m", &[&[1, 9], &[3, 4]])[1]);
        assert_ne!(a[0], keys("n", &[&[1, 2]])[0]);
        assert_ne!(a[0], ChunkKeys::new("m", Fingerprint(8)).chunk(&[1, 2]));
    }
}
