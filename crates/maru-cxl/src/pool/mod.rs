//! Pools: a region cut into slabs of one size, with a directory that says what is published.

mod found;
mod label;
pub(crate) mod lock;
mod process;
mod state;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

pub use self::found::{OpenOptions, PoolOptions, PoolStats, PooledSlab, Published};
pub use self::process::Liveness;
pub(crate) use self::state::Lease;

use self::label::{check_label, label, refuse_existing};
use self::lock::WriterLock;
use self::state::Ledger;
use crate::coherence::{self, Coherence};
use crate::directory::{Body, Entry, EntryState, PoolInfo, SlabDirectory, key_text};
use crate::error::CxlError;
use crate::header::Uuid;
use crate::region::Region;
use crate::registration::{HostRegistrar, RegisterOptions, RegisterOutcome};
use crate::slab::Slab;

/// How often a lookup starts over because the entry it found was withdrawn meanwhile.
const LOOKUP_RETRIES: usize = 64;

/// A pool of equal slabs. Cheap to clone; safe to use from several threads.
///
/// The writer allocates slabs, fills them, publishes them under a key and withdraws keys; any number of readers,
/// in this process, another or on another host, look keys up.
#[derive(Debug, Clone)]
pub struct SlabPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    directory: SlabDirectory,
    coherence: Coherence,
    writer: Option<Writer>,
}

#[derive(Debug)]
struct Writer {
    ledger: Arc<Ledger>,
    lock: Arc<WriterLock>,
}

impl SlabPool {
    /// Makes a new, empty pool of the whole region and opens it for writing.
    ///
    /// On a region that starts at device offset 0 the header unit stays reserved and gets a device header if it
    /// is blank; an existing device header is kept. A pool at another offset has no device header.
    ///
    /// # Errors
    /// [`CxlError::PoolExists`], [`CxlError::ForeignHeader`] and [`CxlError::NotAPool`] (the directory's place
    /// holds something else) unless forced; [`CxlError::PoolLocked`] even then; [`CxlError::PoolTooSmall`];
    /// [`CxlError::ReadOnly`]; [`CxlError::MemoryFault`].
    pub fn create(region: Region, options: PoolOptions) -> Result<Self, CxlError> {
        if options.slab_bytes == 0 {
            return Err(CxlError::InvalidArgument {
                what: "slab_bytes",
                found: 0,
                allowed: "at least 1 byte is needed".to_owned(),
            });
        }
        if region.is_read_only() {
            return Err(CxlError::ReadOnly { wanted: "create a pool" });
        }
        let (header_unit, len) = (region.header_unit(), region.len());
        let laid_out = PoolInfo::lay_out(len, header_unit, options.slab_bytes, options.entries);
        let (slab_stride, entry_count, data_offset, slab_count) = laid_out.map_err(|needed| {
            CxlError::PoolTooSmall { len, slab_bytes: options.slab_bytes, needed: needed.unwrap_or(u64::MAX) }
        })?;

        let lock = Arc::new(WriterLock::acquire(&region)?);
        if !options.force {
            refuse_existing(&region)?;
        }
        let device_uuid = label(&region, options.force)?;
        SlabDirectory::wipe(&region)?;
        let me = process::current();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let info = PoolInfo {
            uuid: Uuid::random()?,
            device_uuid,
            slab_bytes: options.slab_bytes,
            slab_stride,
            slab_count,
            data_offset,
            directory_offset: header_unit,
            entry_count,
            region_bytes: len,
            created_unix_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            creator: me,
        };
        let directory = SlabDirectory::format(region, info, options.coherence)?;
        directory.set_writer(&me)?;
        let ledger = Arc::new(Ledger::new(slab_count, HashMap::new()));
        Ok(Self::build(directory, options.coherence, Some(Writer { ledger, lock })))
    }

    /// Opens the pool that lies in a region; its geometry is read from the pool itself. For writing, slabs that
    /// are published already are taken, and entries that a writer left half-written are cleared.
    ///
    /// # Errors
    /// [`CxlError::NotAPool`] when there is none or it is not usable; [`CxlError::ForeignHeader`] unless forced;
    /// [`CxlError::PoolLocked`] when another writer lives; [`CxlError::ReadOnly`]; [`CxlError::MemoryFault`].
    pub fn open(region: Region, options: OpenOptions) -> Result<Self, CxlError> {
        if !options.writable {
            let directory = SlabDirectory::open(region, options.coherence)?;
            check_label(&directory, options.force)?;
            return Ok(Self::build(directory, options.coherence, None));
        }
        if region.is_read_only() {
            return Err(CxlError::ReadOnly { wanted: "open a pool for writing" });
        }
        // A pool that is none must be told apart from one that is locked, and looked at again under the lock.
        check_label(&SlabDirectory::open(region.clone(), options.coherence)?, options.force)?;
        let lock = Arc::new(WriterLock::acquire(&region)?);
        let directory = SlabDirectory::open(region, options.coherence)?;
        check_label(&directory, options.force)?;
        directory.set_writer(&process::current())?;
        let count = directory.info().slab_count;
        let ledger = Arc::new_cyclic(|ledger| Ledger::new(count, take_published(&directory, ledger, &lock)));
        Ok(Self::build(directory, options.coherence, Some(Writer { ledger, lock })))
    }

    fn build(directory: SlabDirectory, coherence: Coherence, writer: Option<Writer>) -> Self {
        Self { shared: Arc::new(Shared { directory, coherence, writer }) }
    }

    /// Takes the slab that has been free for longest; `None` when every slab is in use. Its bytes are whatever
    /// was there before.
    ///
    /// # Errors
    /// [`CxlError::NotWriter`].
    pub fn alloc(&self) -> Result<Option<PooledSlab>, CxlError> {
        let writer = self.writer("allocate slabs")?;
        let info = self.info();
        loop {
            let index = {
                let mut state = writer.ledger.lock();
                let Some(index) = state.free.pop_front() else { return Ok(None) };
                let offset = info.data_offset + index * info.slab_stride;
                if self.region().straddles_pieces(offset, info.slab_bytes) {
                    state.unusable += 1;
                    continue;
                }
                index
            };
            let lease = Arc::new(Lease::held(&writer.ledger, &writer.lock, index));
            let slab = self.slab_at(index, info.slab_bytes)?.with_lease(Arc::clone(&lease));
            return Ok(Some(PooledSlab { slab, lease }));
        }
    }

    /// Gives a slab back. It can be allocated again once every other handle to it is gone.
    ///
    /// # Errors
    /// [`CxlError::DoubleFree`], [`CxlError::ForeignSlab`], [`CxlError::SlabPublished`], [`CxlError::NotWriter`].
    pub fn free(&self, slab: PooledSlab) -> Result<(), CxlError> {
        let writer = self.writer("free slabs")?;
        own(writer, &slab)?;
        slab.lease.free()
    }

    /// Publishes the first `len` bytes of a slab under a key. The slab must be complete: device copies into it
    /// have ended. From here on it may not be written until the key is withdrawn.
    ///
    /// `fingerprint` names geometry and element type, `checksum` the content; both come back to readers as they
    /// are.
    ///
    /// # Errors
    /// [`CxlError::KeyExists`], [`CxlError::DirectoryFull`], [`CxlError::InvalidArgument`] for a length of 0 or
    /// more than the slab has, and the errors of [`SlabPool::free`]. The slab stays allocated then.
    pub fn publish(
        &self,
        slab: &PooledSlab,
        key: &[u8; 32],
        len: u64,
        fingerprint: u64,
        checksum: Option<u64>,
    ) -> Result<Entry, CxlError> {
        let writer = self.writer("publish slabs")?;
        own(writer, slab)?;
        let slab_bytes = self.info().slab_bytes;
        if !(1..=slab_bytes).contains(&len) {
            return Err(CxlError::InvalidArgument {
                what: "published length",
                found: len,
                allowed: format!("1 to {slab_bytes} bytes (one slab) are allowed"),
            });
        }
        if self.shared.coherence == Coherence::Flush {
            // Also what a device wrote: its writes may rest in this host's last-level cache.
            slab.span(0, len)?.flush();
        }
        coherence::publish();
        let mut state = writer.ledger.lock();
        let place = self.place_for(key)?;
        slab.lease.publish()?;
        let body =
            Body { state: EntryState::Published, key: *key, slab: slab.index(), len, fingerprint, checksum };
        let sequence = self.shared.directory.write(place, &body);
        state.published.insert(slab.index(), (Arc::clone(&slab.lease), place));
        drop(state);
        match self.shared.directory.get(place) {
            Some(entry) if entry.sequence == sequence && entry.key == *key => Ok(entry),
            // Memory that does not keep what is stored to it.
            _ => {
                writer.ledger.lock().published.remove(&slab.index());
                slab.lease.unpublish();
                Err(CxlError::NotAPool {
                    backing: self.region().backing().to_owned(),
                    offset: self.info().entry_offset(place),
                    reason: "an entry did not read back as it was written; the memory is not usable"
                        .to_owned(),
                })
            }
        }
    }

    /// Finds the slab published under a key. Under [`Coherence::Flush`] the slab's lines are dropped from this
    /// host's caches, so that the next read comes from memory.
    ///
    /// # Errors
    /// None of its own today; a fault of the memory may become one.
    pub fn lookup(&self, key: &[u8; 32]) -> Result<Option<Published>, CxlError> {
        for _ in 0..LOOKUP_RETRIES {
            let Some(entry) = self.shared.directory.find(key) else { return Ok(None) };
            if let Some(found) = self.resolve(entry)? {
                return Ok(Some(found));
            }
            // Withdrawn between the two looks at it; look again.
        }
        // A key that changes all the time, or an entry that this writer did not write.
        Ok(None)
    }

    /// The slab of an entry that was found; `None` if the entry has changed.
    ///
    /// # Errors
    /// As [`SlabPool::lookup`].
    pub fn resolve(&self, entry: Entry) -> Result<Option<Published>, CxlError> {
        let mut slab = self.slab_at(entry.slab, entry.len)?;
        if let Some(writer) = &self.shared.writer {
            let state = writer.ledger.lock();
            match state.published.get(&entry.slab) {
                Some((lease, place)) if *place == entry.index => slab = slab.with_lease(Arc::clone(lease)),
                _ => return Ok(None),
            }
        }
        if !self.shared.directory.still_valid(&entry) {
            return Ok(None);
        }
        if self.shared.coherence == Coherence::Flush {
            slab.invalidate();
        }
        Ok(Some(Published { slab, entry, directory: self.shared.directory.clone() }))
    }

    /// Takes a key back; `false` if it was not published. The slab is free once the last handle of this process
    /// is gone. Readers elsewhere see it in [`Published::still_valid`].
    ///
    /// # Errors
    /// [`CxlError::NotWriter`].
    pub fn withdraw(&self, key: &[u8; 32]) -> Result<bool, CxlError> {
        let writer = self.writer("withdraw keys")?;
        let mut state = writer.ledger.lock();
        let Some(entry) = self.shared.directory.find(key) else { return Ok(false) };
        let gone = state.published.remove(&entry.slab);
        self.clear(entry.index, state.published.is_empty());
        drop(state);
        // Dropping the lease may give the slab back, which takes the lock.
        if let Some((lease, _)) = gone {
            lease.withdrawn();
        }
        Ok(true)
    }

    /// Every published entry, in no particular order.
    pub fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        self.shared.directory.entries()
    }

    /// How the pool is used now.
    pub fn stats(&self) -> PoolStats {
        let info = self.info();
        let (slabs, entries) = (info.slab_count, info.entry_count);
        match &self.shared.writer {
            None => {
                let published = self.entries().count() as u64;
                PoolStats { slabs, free: 0, held: 0, published, unusable: 0, entries }
            }
            Some(writer) => {
                let state = writer.ledger.lock();
                let (free, published) = (state.free.len() as u64, state.published.len() as u64);
                let unusable = state.unusable;
                let held = writer.ledger.count().saturating_sub(free + published + unusable);
                PoolStats { slabs, free, held, published, unusable, entries }
            }
        }
    }

    /// Registers the pool's region with a device's driver, cut so that no slab crosses two pieces.
    ///
    /// # Errors
    /// As [`Region::register`].
    pub fn register(
        &self,
        registrar: Arc<dyn HostRegistrar>,
        piece_limit: u64,
        required: bool,
    ) -> Result<RegisterOutcome, CxlError> {
        let info = self.info();
        let options = RegisterOptions {
            piece_limit,
            slab_stride: info.slab_stride,
            data_offset: info.data_offset,
            required,
        };
        self.region().register(registrar, options)
    }

    /// What the pool says of itself: geometry, identity, creator.
    pub fn info(&self) -> &PoolInfo {
        self.shared.directory.info()
    }

    /// Whether the process that created the pool still runs.
    pub fn creator_liveness(&self) -> Liveness {
        process::liveness(&self.info().creator)
    }

    /// Bytes of one slab.
    pub fn slab_bytes(&self) -> u64 {
        self.info().slab_bytes
    }

    /// Number of slabs.
    pub fn slab_count(&self) -> u64 {
        self.info().slab_count
    }

    /// Whether it is open for writing.
    pub fn is_writable(&self) -> bool {
        self.shared.writer.is_some()
    }

    /// The region it lies in.
    pub fn region(&self) -> &Region {
        self.shared.directory.region()
    }

    /// The directory.
    pub fn directory(&self) -> &SlabDirectory {
        &self.shared.directory
    }

    fn writer(&self, wanted: &'static str) -> Result<&Writer, CxlError> {
        self.shared.writer.as_ref().ok_or(CxlError::NotWriter { wanted })
    }

    fn slab_at(&self, index: u64, len: u64) -> Result<Slab, CxlError> {
        let info = self.info();
        let offset = info.slab_offset(index).ok_or(CxlError::OutOfBounds {
            what: "slab of the pool",
            offset: index,
            len: 1,
            size: info.slab_count,
        })?;
        self.region().slab(offset, len)
    }

    /// The entry to use for a new key: the first one in its chain that is not published. Under the ledger's lock.
    fn place_for(&self, key: &[u8; 32]) -> Result<u64, CxlError> {
        let directory = &self.shared.directory;
        let mut place = None;
        for index in directory.chain(key) {
            match directory.read(index) {
                Some((_, body)) if body.state == EntryState::Published => {
                    if body.key == *key {
                        return Err(CxlError::KeyExists { key: key_text(key), index: body.slab });
                    }
                }
                Some((_, body)) if body.state == EntryState::Empty => {
                    place.get_or_insert(index);
                    break;
                }
                _ => {
                    place.get_or_insert(index);
                }
            }
        }
        place.ok_or(CxlError::DirectoryFull { entries: self.info().entry_count })
    }

    /// Ends an entry. If nothing follows it in its chain it becomes empty, and so do withdrawn ones before it:
    /// searches stay short however often keys come and go. `last`: nothing is published any more. Under the
    /// ledger's lock.
    fn clear(&self, index: u64, last: bool) {
        let directory = &self.shared.directory;
        let count = self.info().entry_count;
        let state_of = |index| directory.read(index).map(|(_, body)| body.state);
        let end = |index, state| {
            let body = Body { state, key: [0; 32], slab: 0, len: 0, fingerprint: 0, checksum: None };
            directory.write(index, &body);
        };
        if state_of((index + 1) % count) == Some(EntryState::Empty) {
            end(index, EntryState::Empty);
            let mut at = (index + count - 1) % count;
            while state_of(at) == Some(EntryState::Withdrawn) {
                end(at, EntryState::Empty);
                at = (at + count - 1) % count;
            }
        } else if last {
            // A table without a single empty entry has no end to begin from.
            (0..count).for_each(|index| end(index, EntryState::Empty));
        } else {
            end(index, EntryState::Withdrawn);
        }
    }
}

/// Refuses slabs of other pools.
fn own(writer: &Writer, slab: &PooledSlab) -> Result<(), CxlError> {
    if slab.lease.is_of(&writer.ledger) { Ok(()) } else { Err(CxlError::ForeignSlab { index: slab.index() }) }
}

/// What a new writer finds published. Entries that no writer finished, and second claims on a slab or key, are
/// cleared.
fn take_published(
    directory: &SlabDirectory,
    ledger: &Weak<Ledger>,
    lock: &Arc<WriterLock>,
) -> HashMap<u64, (Arc<Lease>, u64)> {
    let mut taken: HashMap<u64, (Arc<Lease>, u64)> = HashMap::new();
    let withdrawn =
        Body { state: EntryState::Withdrawn, key: [0; 32], slab: 0, len: 0, fingerprint: 0, checksum: None };
    for index in 0..directory.info().entry_count {
        let Some((_, body)) = directory.read(index) else {
            tracing::warn!(index, "clearing a damaged or half-written directory entry");
            directory.write(index, &withdrawn);
            continue;
        };
        if body.state != EntryState::Published {
            continue;
        }
        // The first entry in the chain is the one readers find.
        let is_found = directory.find(&body.key).is_some_and(|found| found.index == index);
        if !is_found || taken.contains_key(&body.slab) {
            tracing::warn!(
                index,
                slab = body.slab,
                "clearing a directory entry that another one contradicts"
            );
            directory.write(index, &withdrawn);
            continue;
        }
        let lease = Arc::new(Lease::published(Weak::clone(ledger), lock, body.slab));
        taken.insert(body.slab, (lease, index));
    }
    taken
}
