//! What a pool takes and gives: options, slabs, what a reader finds.

use std::ops::Deref;
use std::sync::Arc;

use super::Lease;
use crate::coherence::Coherence;
use crate::directory::{Entry, SlabDirectory};
use crate::slab::Slab;

/// Options of [`SlabPool::create`](crate::SlabPool::create).
#[derive(Debug, Clone, Copy, Default)]
pub struct PoolOptions {
    /// Bytes of one slab. Required.
    pub slab_bytes: u64,
    /// Directory entries; 0 is automatic: at least one per slab, usually two to four.
    pub entries: u64,
    /// Replace whatever is there: another pool, a damaged one, foreign data. A pool with a live writer is
    /// refused all the same.
    pub force: bool,
    /// What to do about CPU caches.
    pub coherence: Coherence,
}

/// Options of [`SlabPool::open`](crate::SlabPool::open).
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenOptions {
    /// Open for writing: allocate, publish, withdraw. One process at a time.
    pub writable: bool,
    /// Accept a directory whose device header is missing, foreign or of another device.
    pub force: bool,
    /// What to do about CPU caches.
    pub coherence: Coherence,
}

/// An allocated slab. Dereferences to [`Slab`].
///
/// It returns to the pool when the last handle to it is gone, freed or not, unless it is published: forgetting to
/// free leaks nothing, and freeing too early cannot hand a slab to somebody else under a running transfer.
#[derive(Debug, Clone)]
pub struct PooledSlab {
    pub(super) slab: Slab,
    pub(super) lease: Arc<Lease>,
}

impl PooledSlab {
    /// Index of the slab in its pool.
    pub fn index(&self) -> u64 {
        self.lease.index()
    }

    /// The slab itself; clones of it keep its place in the pool.
    pub fn slab(&self) -> &Slab {
        &self.slab
    }
}

impl Deref for PooledSlab {
    type Target = Slab;

    fn deref(&self) -> &Slab {
        &self.slab
    }
}

/// A published slab, as found by a reader.
///
/// In the writer's own process the slab is kept from reuse while this lives. Elsewhere the writer knows nothing
/// of its readers: copy, then ask [`Published::still_valid`], and drop what was copied if it is not.
#[derive(Debug, Clone)]
pub struct Published {
    pub(super) slab: Slab,
    pub(super) entry: Entry,
    pub(super) directory: SlabDirectory,
}

impl Published {
    /// The published bytes; exactly [`Published::len`] of them.
    pub fn slab(&self) -> &Slab {
        &self.slab
    }

    /// Bytes that were published.
    #[allow(clippy::len_without_is_empty, reason = "nothing empty can be published")]
    pub fn len(&self) -> u64 {
        self.entry.len
    }

    /// Fingerprint of the slab's geometry and element type.
    pub fn fingerprint(&self) -> u64 {
        self.entry.fingerprint
    }

    /// Checksum of the bytes, if the publisher made one.
    pub fn checksum(&self) -> Option<u64> {
        self.entry.checksum
    }

    /// Sequence of the entry when it was found.
    pub fn sequence(&self) -> u64 {
        self.entry.sequence
    }

    /// The directory entry.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Whether what was read from the slab up to now was what the key named: the entry is still the one found.
    /// A copy made by a device must have completed before this is asked.
    pub fn still_valid(&self) -> bool {
        self.directory.still_valid(&self.entry)
    }
}

/// How a pool is used. For a reader only `slabs`, `entries` and `published` are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Slabs there are.
    pub slabs: u64,
    /// Free now.
    pub free: u64,
    /// Allocated and not published, or freed and still in use by a handle.
    pub held: u64,
    /// Published.
    pub published: u64,
    /// Never handed out because they cross registered pieces.
    pub unusable: u64,
    /// Directory entries there are.
    pub entries: u64,
}
