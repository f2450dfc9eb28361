//! Byte formats of the slab directory. Pure; everything little-endian.

use crate::header::Uuid;
use crate::num::{PAGE, check_range, fnv1a, round_up};

/// First eight bytes of a directory.
pub const DIRECTORY_MAGIC: [u8; 8] = *b"MARUDIR\0";

/// The version this program writes and reads.
pub const DIRECTORY_VERSION: u32 = 1;

/// Bytes of the directory header that are in use; it has a page of 4096 to itself.
pub const HEADER_BYTES: usize = 256;

/// Bytes of one entry: two cache lines.
pub const ENTRY_BYTES: usize = 128;

/// [`ENTRY_BYTES`] as the header holds it.
const ENTRY_SIZE: u32 = 128;
const _: () = assert!(ENTRY_SIZE as usize == ENTRY_BYTES);

/// Offset of the writer's record in the header page: a line of its own, since it changes while the rest does not.
pub(crate) const WRITER_RECORD: u64 = 256;

/// Bytes of the writer's record.
pub(crate) const WRITER_BYTES: usize = 64;

/// Who made something, as far as it can be recognised later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Creator {
    /// Process id.
    pub pid: u32,
    /// When that process started, in clock ticks since boot; tells a reused process id apart.
    pub start_ticks: u64,
    /// The boot of the machine it ran on; differs between hosts and between boots.
    pub boot_id: [u8; 16],
}

/// The directory header: what a pool says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolInfo {
    /// Identity of this pool; every creation makes a new one.
    pub uuid: Uuid,
    /// Identity of the device, from its header; zero where it has none.
    pub device_uuid: Uuid,
    /// Bytes a slab holds.
    pub slab_bytes: u64,
    /// Distance from slab to slab in bytes: `slab_bytes` rounded up to 4096.
    pub slab_stride: u64,
    /// Number of slabs.
    pub slab_count: u64,
    /// Offset of the first slab from the start of the region, in bytes.
    pub data_offset: u64,
    /// Offset of the directory header from the start of the region, in bytes.
    pub directory_offset: u64,
    /// Number of entries.
    pub entry_count: u64,
    /// Length of the region at creation, in bytes.
    pub region_bytes: u64,
    /// Time of creation, nanoseconds since 1970.
    pub created_unix_ns: u64,
    /// Who created it.
    pub creator: Creator,
}

impl PoolInfo {
    /// Lays a pool out in a region. `entries` = 0 means automatic: a power of two at least twice the number of
    /// slabs, so that looking a key up meets few other entries. Returns the bytes a single slab would need when
    /// not even one fits.
    pub(crate) fn lay_out(
        region_bytes: u64,
        header_unit: u64,
        slab_bytes: u64,
        entries: u64,
    ) -> Result<(u64, u64, u64, u64), Option<u64>> {
        let stride = round_up(slab_bytes, PAGE).ok_or(None)?;
        let smallest = if entries == 0 { 2 } else { entries };
        let before_data = |entries: u64| {
            let table = entries.checked_mul(ENTRY_BYTES as u64)?;
            round_up(header_unit.checked_add(PAGE)?.checked_add(table)?, PAGE)
        };
        let needed = before_data(smallest).and_then(|data| data.checked_add(stride));
        if needed.is_none_or(|needed| needed > region_bytes) {
            return Err(needed);
        }
        let entries = if entries == 0 {
            // As if the table took no space: at most a few entries too many.
            let most = (region_bytes - header_unit - PAGE) / stride;
            let wanted =
                most.checked_mul(2).and_then(u64::checked_next_power_of_two).unwrap_or(smallest).max(2);
            // A slab smaller than its entries could leave no room for any slab.
            std::iter::successors(Some(wanted), |&more| (more > 2).then_some(more / 2))
                .find(|&some| before_data(some).is_some_and(|data| data <= region_bytes - stride))
                .unwrap_or(smallest)
        } else {
            entries
        };
        let data_offset = before_data(entries).ok_or(None)?;
        let slabs = (region_bytes - data_offset) / stride;
        Ok((stride, entries, data_offset, slabs))
    }

    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &DIRECTORY_MAGIC);
        put(8, &DIRECTORY_VERSION.to_le_bytes());
        put(12, &ENTRY_SIZE.to_le_bytes());
        put(16, self.uuid.as_bytes());
        put(32, &self.slab_bytes.to_le_bytes());
        put(40, &self.slab_stride.to_le_bytes());
        put(48, &self.slab_count.to_le_bytes());
        put(56, &self.data_offset.to_le_bytes());
        put(64, &self.entry_count.to_le_bytes());
        put(72, &self.region_bytes.to_le_bytes());
        put(80, &self.created_unix_ns.to_le_bytes());
        put(88, &self.directory_offset.to_le_bytes());
        put(96, &self.creator.boot_id);
        put(112, self.device_uuid.as_bytes());
        put(128, &self.creator.start_ticks.to_le_bytes());
        put(136, &self.creator.pid.to_le_bytes());
        let check = fnv1a(&bytes[..HEADER_BYTES - 8]);
        bytes[HEADER_BYTES - 8..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Reads a header and checks that it describes something possible in a region of `region_bytes`.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES], offset: u64, region_bytes: u64) -> Result<Self, String> {
        if bytes[..8] != DIRECTORY_MAGIC {
            return Err("there is no directory (its magic is missing)".to_owned());
        }
        if u64_at(bytes, HEADER_BYTES - 8) != fnv1a(&bytes[..HEADER_BYTES - 8]) {
            return Err("the directory header is damaged or half-written (its checksum is wrong)".to_owned());
        }
        let (version, entry_bytes) = (u32_at(bytes, 8), u32_at(bytes, 12));
        if version != DIRECTORY_VERSION || entry_bytes != ENTRY_SIZE {
            return Err(format!(
                "the directory has version {version} with {entry_bytes}-byte entries; this program knows version \
                 {DIRECTORY_VERSION} with {ENTRY_BYTES}"
            ));
        }
        let info = Self {
            uuid: Uuid::from_bytes(array_at(bytes, 16)),
            slab_bytes: u64_at(bytes, 32),
            slab_stride: u64_at(bytes, 40),
            slab_count: u64_at(bytes, 48),
            data_offset: u64_at(bytes, 56),
            entry_count: u64_at(bytes, 64),
            region_bytes: u64_at(bytes, 72),
            created_unix_ns: u64_at(bytes, 80),
            directory_offset: u64_at(bytes, 88),
            device_uuid: Uuid::from_bytes(array_at(bytes, 112)),
            creator: Creator {
                pid: u32_at(bytes, 136),
                start_ticks: u64_at(bytes, 128),
                boot_id: array_at(bytes, 96),
            },
        };
        info.check(offset, region_bytes)?;
        Ok(info)
    }

    fn check(&self, offset: u64, region_bytes: u64) -> Result<(), String> {
        if self.directory_offset != offset {
            return Err(format!(
                "the directory says it is at offset {}; the region does not start where the pool does",
                self.directory_offset
            ));
        }
        let table = self.entry_count.checked_mul(ENTRY_BYTES as u64);
        let table_end = table.and_then(|table| table.checked_add(offset)?.checked_add(PAGE));
        let slabs = self.slab_count.checked_mul(self.slab_stride);
        let fits = table_end.is_some_and(|end| end <= self.data_offset)
            && slabs.is_some_and(|slabs| {
                check_range("slabs", self.data_offset, slabs, self.region_bytes).is_ok()
            });
        let sensible = self.slab_bytes > 0
            && round_up(self.slab_bytes, PAGE) == Some(self.slab_stride)
            && self.data_offset.is_multiple_of(PAGE)
            && self.slab_count > 0
            && self.entry_count > 0;
        if !fits || !sensible {
            return Err("the directory's geometry contradicts itself".to_owned());
        }
        if self.region_bytes > region_bytes {
            return Err(format!(
                "the pool was made in {} bytes, but the region has {region_bytes}; map all of it",
                self.region_bytes
            ));
        }
        Ok(())
    }

    /// Offset of an entry from the start of the region.
    pub(crate) fn entry_offset(&self, index: u64) -> u64 {
        self.directory_offset + PAGE + index * ENTRY_BYTES as u64
    }

    /// Offset of a slab from the start of the region.
    pub fn slab_offset(&self, index: u64) -> Option<u64> {
        (index < self.slab_count).then(|| self.data_offset + index * self.slab_stride)
    }
}

/// State of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EntryState {
    /// Never used, or nothing behind it in its chain: a search ends here.
    Empty,
    /// Names a slab.
    Published,
    /// Named one; a search goes on.
    Withdrawn,
}

/// What an entry holds besides its sequence.
///
/// | bytes | field |
/// | --- | --- |
/// | 0..8 | sequence: even when at rest, odd while being written, 0 in a new directory |
/// | 8..12 | state: 0 empty, 1 published, 2 withdrawn |
/// | 12..16 | flags: bit 0, the checksum field counts |
/// | 16..48 | key |
/// | 48..56 | slab index |
/// | 56..64 | length in bytes |
/// | 64..72 | fingerprint |
/// | 72..80 | checksum of the slab |
/// | 80..96 | UUID of the pool |
/// | 96..120 | 0 |
/// | 120..128 | check word: FNV-1a of bytes 0..120 with the final sequence |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Body {
    pub(crate) state: EntryState,
    pub(crate) key: [u8; 32],
    pub(crate) slab: u64,
    pub(crate) len: u64,
    pub(crate) fingerprint: u64,
    pub(crate) checksum: Option<u64>,
}

impl Body {
    pub(crate) fn to_bytes(self, sequence: u64, pool: &Uuid) -> [u8; ENTRY_BYTES] {
        let state: u32 = match self.state {
            EntryState::Empty => 0,
            EntryState::Published => 1,
            EntryState::Withdrawn => 2,
        };
        let mut bytes = [0; ENTRY_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &sequence.to_le_bytes());
        put(8, &state.to_le_bytes());
        put(12, &u32::from(self.checksum.is_some()).to_le_bytes());
        put(16, &self.key);
        put(48, &self.slab.to_le_bytes());
        put(56, &self.len.to_le_bytes());
        put(64, &self.fingerprint.to_le_bytes());
        put(72, &self.checksum.unwrap_or(0).to_le_bytes());
        put(80, pool.as_bytes());
        let check = fnv1a(&bytes[..ENTRY_BYTES - 8]);
        bytes[ENTRY_BYTES - 8..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// `None` for anything that this pool's writer did not write whole.
    pub(crate) fn parse(bytes: &[u8; ENTRY_BYTES], info: &PoolInfo) -> Option<Self> {
        if bytes.iter().all(|&byte| byte == 0) {
            let body = Self {
                state: EntryState::Empty,
                key: [0; 32],
                slab: 0,
                len: 0,
                fingerprint: 0,
                checksum: None,
            };
            return Some(body);
        }
        if u64_at(bytes, ENTRY_BYTES - 8) != fnv1a(&bytes[..ENTRY_BYTES - 8]) {
            return None;
        }
        if array_at(bytes, 80) != *info.uuid.as_bytes() {
            return None;
        }
        let state = match u32_at(bytes, 8) {
            0 => EntryState::Empty,
            1 => EntryState::Published,
            2 => EntryState::Withdrawn,
            _ => return None,
        };
        let body = Self {
            state,
            key: array_at(bytes, 16),
            slab: u64_at(bytes, 48),
            len: u64_at(bytes, 56),
            fingerprint: u64_at(bytes, 64),
            checksum: (u32_at(bytes, 12) & 1 != 0).then(|| u64_at(bytes, 72)),
        };
        let possible = body.slab < info.slab_count && (1..=info.slab_bytes).contains(&body.len);
        (state != EntryState::Published || possible).then_some(body)
    }
}

/// Where the search for a key begins: FNV-1a of the key, mixed so that keys that differ in few bits spread.
pub(crate) fn home(key: &[u8; 32], entries: u64) -> u64 {
    let mut hash = fnv1a(key);
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (hash ^ hash >> 31) % entries
}

/// The writer's record: who has the pool open for writing. Only advice; the lock decides.
pub(crate) fn writer_to_bytes(writer: &Creator) -> [u8; WRITER_BYTES] {
    let mut bytes = [0; WRITER_BYTES];
    bytes[..4].copy_from_slice(&writer.pid.to_le_bytes());
    bytes[8..16].copy_from_slice(&writer.start_ticks.to_le_bytes());
    bytes[16..32].copy_from_slice(&writer.boot_id);
    let check = fnv1a(&bytes[..WRITER_BYTES - 8]);
    bytes[WRITER_BYTES - 8..].copy_from_slice(&check.to_le_bytes());
    bytes
}

pub(crate) fn parse_writer(bytes: &[u8; WRITER_BYTES]) -> Option<Creator> {
    if u64_at(bytes, WRITER_BYTES - 8) != fnv1a(&bytes[..WRITER_BYTES - 8]) {
        return None;
    }
    Some(Creator { pid: u32_at(bytes, 0), start_ticks: u64_at(bytes, 8), boot_id: array_at(bytes, 16) })
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}
