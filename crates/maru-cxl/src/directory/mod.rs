//! The slab directory: what a pool says of itself in its own memory, for any process or host that maps it.
//!
//! # Format
//!
//! ```text
//! region start                                     (device offset 0, or the pool's offset)
//! +------------------+  0            header unit: 32-byte device header, rest unused. One alignment unit of the
//! |                  |               device (4096 bytes for files). Absent when the pool's offset is not 0.
//! +------------------+  D            directory header: 256 bytes in a page of 4096, own checksum;
//! |                  |  D + 256      the writer's record, 64 bytes: who has the pool open for writing
//! +------------------+  D + 4096     entries, 128 bytes each
//! +------------------+  data offset  slabs, one every `slab stride` bytes (slab bytes rounded up to 4096)
//! ```
//!
//! Header: magic `MARUDIR\0`, version u32 = 1 and entry size u32 at 8, pool UUID at 16, then u64s from 32: slab
//! bytes, slab stride, slab count, data offset, entry count, region bytes, creation time (ns since 1970),
//! directory offset; creator's boot id at 96, device UUID at 112, creator's start time (ticks) at 128, creator's
//! process id u32 at 136, zeros, FNV-1a of bytes 0..248 at 248. All little-endian.
//!
//! Entries form an open-addressed table: the search for a key starts at `mix(FNV-1a(key)) % entries` and goes on
//! to the next entry until an empty one. A withdrawn entry does not end it.
//!
//! # Protocol
//!
//! One writer, any number of readers, no lock between them. The writer makes the sequence odd, writes the rest,
//! makes it even; the check word covers everything including the final sequence, so an entry that is half old
//! and half new (two cache lines may arrive apart on another host) never passes for a whole one. Flushes and
//! fences as in [`coherence`](crate::coherence). Sequences of a pool begin at a random even number. A reader that used a slab asks again whether the entry still has
//! the sequence it saw; only then were the bytes it copied the ones published.

mod format;

use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

pub(crate) use self::format::{Body, EntryState, home};
pub use self::format::{
    Creator, DIRECTORY_MAGIC, DIRECTORY_VERSION, ENTRY_BYTES, HEADER_BYTES as DIRECTORY_HEADER_BYTES,
    PoolInfo,
};
use self::format::{HEADER_BYTES, WRITER_BYTES, WRITER_RECORD};

use crate::coherence::{self, Coherence};
use crate::error::CxlError;
use crate::header::Uuid;
use crate::num::{hex, to_usize};
use crate::raw;
use crate::region::Region;
use crate::slab::Slab;

/// How often a reader looks again at an entry that is being written before it passes on.
const RETRIES: usize = 128;

/// A published entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// Index of the entry in the directory.
    pub index: u64,
    /// Sequence it was read at.
    pub sequence: u64,
    /// Key.
    pub key: [u8; 32],
    /// Index of the slab.
    pub slab: u64,
    /// Bytes of the slab that count.
    pub len: u64,
    /// Fingerprint of the slab's geometry and element type.
    pub fingerprint: u64,
    /// Checksum of the bytes, if the publisher made one.
    pub checksum: Option<u64>,
}

/// A slab directory in a region. Reading needs no lock; writing is the pool's business.
#[derive(Debug, Clone)]
pub struct SlabDirectory {
    region: Region,
    info: PoolInfo,
    coherence: Coherence,
}

impl SlabDirectory {
    /// Opens the directory at the start of a region (behind the header unit, if there is one).
    ///
    /// # Errors
    /// [`CxlError::NotAPool`] when there is none, when it is damaged, of another version, or describes more than
    /// the region has; [`CxlError::MemoryFault`].
    pub fn open(region: Region, coherence: Coherence) -> Result<Self, CxlError> {
        let offset = region.header_unit();
        let not_a_pool = |reason| CxlError::NotAPool { backing: region.backing().to_owned(), offset, reason };
        let Ok(place) = region.slab(offset, HEADER_BYTES as u64) else {
            return Err(not_a_pool(format!("the region has only {} bytes", region.len())));
        };
        let bytes = read_header(&place)?;
        let info = match PoolInfo::parse(&bytes, offset, region.len()) {
            Ok(info) => info,
            Err(reason) => {
                return Err(not_a_pool(match Self::under_other_alignment(&region)? {
                    None => reason,
                    Some(info) => format!(
                        "the pool on it was made when the device's alignment was {}, now it is {offset}; set the \
                         alignment back",
                        info.directory_offset
                    ),
                }));
            }
        };
        Ok(Self { region, info, coherence })
    }

    /// A pool that was made when the device had another alignment: its directory is then in another place.
    pub(crate) fn under_other_alignment(region: &Region) -> Result<Option<PoolInfo>, CxlError> {
        for offset in Self::other_places(region) {
            let bytes = read_header(&region.slab(offset, HEADER_BYTES as u64)?)?;
            if let Ok(info) = PoolInfo::parse(&bytes, offset, u64::MAX) {
                return Ok(Some(info));
            }
        }
        Ok(None)
    }

    /// Where the directory would be under each other alignment that devices have.
    fn other_places(region: &Region) -> impl Iterator<Item = u64> + use<> {
        let (unit, len) = (region.header_unit(), region.len());
        let places = [4 << 10, 2 << 20, 1 << 30];
        places
            .into_iter()
            .filter(move |&place| unit != 0 && place != unit && place + HEADER_BYTES as u64 <= len)
    }

    /// Whether the place of the directory header is all zero, as in fresh memory.
    pub(crate) fn is_blank(region: &Region) -> Result<bool, CxlError> {
        let bytes = read_header(&region.slab(region.header_unit(), HEADER_BYTES as u64)?)?;
        Ok(bytes.iter().all(|&byte| byte == 0))
    }

    /// Writes an empty directory. The magic comes last, so a half-made one is none.
    pub(crate) fn format(region: Region, info: PoolInfo, coherence: Coherence) -> Result<Self, CxlError> {
        let before_data = region.slab(info.directory_offset, info.data_offset - info.directory_offset)?;
        if before_data.is_read_only() {
            return Err(CxlError::ReadOnly { wanted: "create a pool" });
        }
        // SAFETY: the slab's own range, which is writable.
        unsafe { raw::zero(before_data.addr().as_ptr(), to_usize(before_data.len())) };
        before_data.flush();
        coherence::publish();
        let bytes = info.to_bytes();
        before_data.write_at(8, &bytes[8..])?;
        before_data.span(0, HEADER_BYTES as u64)?.flush();
        coherence::publish();
        before_data.write_at(0, &bytes[..8])?;
        before_data.span(0, HEADER_BYTES as u64)?.flush();
        coherence::publish();
        Ok(Self { region, info, coherence })
    }

    /// Makes an existing directory unrecognisable before it is replaced, so that its readers stop; one under
    /// another alignment as well, or it would be taken for a pool when that alignment is set again.
    pub(crate) fn wipe(region: &Region) -> Result<(), CxlError> {
        let mut places = vec![region.header_unit()];
        if let Some(info) = Self::under_other_alignment(region)? {
            places.push(info.directory_offset);
        }
        for place in places {
            let magic = region.slab(place, 8)?;
            magic.write_at(0, &[0; 8])?;
            magic.flush();
        }
        coherence::publish();
        Ok(())
    }

    /// What the pool says of itself.
    pub fn info(&self) -> &PoolInfo {
        &self.info
    }

    /// The region it lies in.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The published entry at an index, or `None` when nothing (whole) is published there.
    pub fn get(&self, index: u64) -> Option<Entry> {
        let (sequence, body) = self.read(index)?;
        (body.state == EntryState::Published).then(|| entry(index, sequence, &body))
    }

    /// The published entry of a key.
    pub fn find(&self, key: &[u8; 32]) -> Option<Entry> {
        for index in self.chain(key) {
            match self.read(index) {
                Some((sequence, body)) if body.state == EntryState::Published && body.key == *key => {
                    return Some(entry(index, sequence, &body));
                }
                Some((_, body)) if body.state == EntryState::Empty => return None,
                // Another key, a withdrawn entry, or one that cannot be read: the key may be further on.
                _ => {}
            }
        }
        None
    }

    /// Every published entry. Entries published or withdrawn meanwhile may or may not be among them.
    pub fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        (0..self.info.entry_count).filter_map(|index| self.get(index))
    }

    /// Whether an entry still has the sequence it had. Everything read from its slab before this call was then
    /// read while the entry was published.
    pub fn still_valid(&self, entry: &Entry) -> bool {
        if entry.index >= self.info.entry_count {
            return false;
        }
        // Loads of the slab, those of string instructions included, must not move behind the load of the
        // sequence.
        coherence::acquire();
        self.invalidate_entry(entry.index);
        // SAFETY: the place of an entry is mapped and 8-byte aligned.
        unsafe { raw::load_u64(self.place(entry.index)) == entry.sequence }
    }

    /// Entries in the order in which a key is searched.
    pub(crate) fn chain(&self, key: &[u8; 32]) -> impl Iterator<Item = u64> + use<> {
        let count = self.info.entry_count;
        let start = home(key, count);
        (start..count).chain(0..start)
    }

    /// Sequence and body of an entry as one consistent whole; `None` if it stays torn or is not of this pool.
    pub(crate) fn read(&self, index: u64) -> Option<(u64, Body)> {
        if index >= self.info.entry_count {
            return None;
        }
        let place = self.place(index);
        for _ in 0..RETRIES {
            self.invalidate_entry(index);
            // SAFETY: the place of an entry is mapped and 8-byte aligned.
            let before = unsafe { raw::load_u64(place) };
            if before % 2 == 0 {
                let mut bytes = [0; ENTRY_BYTES];
                for (word, at) in bytes.chunks_exact_mut(8).zip((0..ENTRY_BYTES).step_by(8)) {
                    // SAFETY: inside the entry, which has ENTRY_BYTES.
                    let from = unsafe { place.add(at) };
                    // SAFETY: mapped, and 8-byte aligned as the entry is.
                    word.copy_from_slice(&unsafe { raw::load_u64(from) }.to_le_bytes());
                }
                fence(Ordering::Acquire);
                // SAFETY: as above.
                let after = unsafe { raw::load_u64(place) };
                bytes[..8].copy_from_slice(&before.to_le_bytes());
                if before == after {
                    if let Some(body) = Body::parse(&bytes, &self.info) {
                        return Some((before, body));
                    }
                    // On another host the two lines of an entry can arrive apart: look again under Flush.
                    if self.coherence == Coherence::None {
                        return None;
                    }
                }
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Replaces an entry. Only the pool's one writer calls this, one call at a time.
    pub(crate) fn write(&self, index: u64, body: &Body) -> u64 {
        let place = self.place(index);
        // SAFETY: the place of an entry is mapped and 8-byte aligned.
        let old = unsafe { raw::load_u64(place) };
        let at_rest = match old {
            // Sequences of a pool begin somewhere random, so that an entry of a pool that was replaced is not
            // taken for one of its successor.
            0 => first_sequence(&self.info.uuid),
            // A writer that died in the middle left it odd.
            odd if odd % 2 == 1 => odd.wrapping_add(1),
            even => even,
        };
        let sequence = at_rest.wrapping_add(2);
        let bytes = body.to_bytes(sequence, &self.info.uuid);
        // SAFETY: mapped, aligned and writable: a pool with a writer is in a writable region.
        unsafe { raw::store_u64(place, at_rest.wrapping_add(1)) };
        fence(Ordering::SeqCst);
        self.flush_entry(index);
        for (word, at) in bytes.chunks_exact(8).zip((0..ENTRY_BYTES).step_by(8)).skip(1) {
            let mut value = [0; 8];
            value.copy_from_slice(word);
            // SAFETY: inside the entry, which has ENTRY_BYTES.
            let to = unsafe { place.add(at) };
            // SAFETY: mapped and writable as above, and 8-byte aligned as the entry is.
            unsafe { raw::store_u64(to, u64::from_le_bytes(value)) };
        }
        fence(Ordering::SeqCst);
        self.flush_entry(index);
        // SAFETY: as above.
        unsafe { raw::store_u64(place, sequence) };
        self.flush_entry(index);
        // What the writer does to the slab afterwards must not be seen before this.
        coherence::publish();
        sequence
    }

    /// Who has the pool open for writing, by its own word.
    pub(crate) fn writer(region: &Region) -> Option<Creator> {
        let place = region.slab(region.header_unit() + WRITER_RECORD, WRITER_BYTES as u64).ok()?;
        place.invalidate();
        let mut bytes = [0; WRITER_BYTES];
        place.read_at(0, &mut bytes).ok()?;
        format::parse_writer(&bytes)
    }

    pub(crate) fn set_writer(&self, writer: &Creator) -> Result<(), CxlError> {
        let place = self.region.slab(self.info.directory_offset + WRITER_RECORD, WRITER_BYTES as u64)?;
        place.write_at(0, &format::writer_to_bytes(writer))?;
        place.flush();
        Ok(())
    }

    fn place(&self, index: u64) -> NonNull<u8> {
        // SAFETY: callers pass `index < entry_count`, and the header was checked to describe entries that lie
        // inside the region.
        unsafe { self.region.base().add(to_usize(self.info.entry_offset(index))) }
    }

    fn flush_entry(&self, index: u64) {
        if self.coherence == Coherence::Flush {
            // SAFETY: an entry's own bytes are mapped.
            unsafe { coherence::flush(self.place(index), ENTRY_BYTES) };
        }
    }

    fn invalidate_entry(&self, index: u64) {
        if self.coherence == Coherence::Flush {
            // SAFETY: an entry's own bytes are mapped.
            unsafe { coherence::invalidate(self.place(index), ENTRY_BYTES) };
        }
    }

    /// Identity of the pool.
    pub fn uuid(&self) -> Uuid {
        self.info.uuid
    }
}

fn first_sequence(pool: &Uuid) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&pool.as_bytes()[8..]);
    (u64::from_le_bytes(word) >> 16 | 1 << 40) & !1
}

fn entry(index: u64, sequence: u64, body: &Body) -> Entry {
    Entry {
        index,
        sequence,
        key: body.key,
        slab: body.slab,
        len: body.len,
        fingerprint: body.fingerprint,
        checksum: body.checksum,
    }
}

fn read_header(place: &Slab) -> Result<[u8; HEADER_BYTES], CxlError> {
    place.probe()?;
    // Another host may have written it since a line of it was cached here.
    place.invalidate();
    let mut bytes = [0; HEADER_BYTES];
    place.read_at(0, &mut bytes)?;
    Ok(bytes)
}

/// A key for messages.
pub(crate) fn key_text(key: &[u8; 32]) -> String {
    hex(key)
}
