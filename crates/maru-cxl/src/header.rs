//! The 32-byte header that marks a device as maru's.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..8 | magic `MARUDEV\0` |
//! | 8..12 | version, u32 little-endian, 1 |
//! | 12..28 | UUID, version 4 |
//! | 28..32 | reserved, 0 |
//!
//! It lies at device offset 0, and the first alignment unit of the device (4096 bytes of a file) belongs to it, so
//! data never shares a unit with it. It is read by everyone and written only when a pool is created on a device
//! that has none, or when [`DeviceHeader::write`] is called.

use std::fmt;

use crate::coherence;
use crate::error::CxlError;
use crate::region::Region;

/// First eight bytes of a device that maru manages.
pub const DEVICE_MAGIC: [u8; 8] = *b"MARUDEV\0";

/// The version this program writes and knows.
pub const DEVICE_VERSION: u32 = 1;

/// Length of the header in bytes.
pub const DEVICE_HEADER_BYTES: usize = 32;

/// A 16-byte identifier, printed in the usual form.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Uuid([u8; 16]);

impl Uuid {
    /// A new random (version 4) identifier.
    ///
    /// # Errors
    /// When the system has no randomness to give.
    pub fn random() -> Result<Self, CxlError> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|error| CxlError::Io {
            op: "getrandom",
            path: "the system's random source".into(),
            source: std::io::Error::other(error.to_string()),
        })?;
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Self(bytes))
    }

    /// From its bytes, in the order they have in memory and in print.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What the first bytes of a device say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderState {
    /// A header. Of an unknown version only the UUID is used.
    Present(DeviceHeader),
    /// All zero: nobody has written one.
    Blank,
    /// Something else; the first bytes are given.
    Foreign([u8; 16]),
}

/// A device header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceHeader {
    /// Version found.
    pub version: u32,
    /// Identity of the device.
    pub uuid: Uuid,
}

impl DeviceHeader {
    /// Whether this program knows the version.
    pub fn is_known_version(&self) -> bool {
        self.version == DEVICE_VERSION
    }

    /// Reads 32 bytes.
    pub fn parse(bytes: &[u8; DEVICE_HEADER_BYTES]) -> HeaderState {
        if bytes.iter().all(|&byte| byte == 0) {
            return HeaderState::Blank;
        }
        let mut start = [0; 16];
        start.copy_from_slice(&bytes[..16]);
        if bytes[..8] != DEVICE_MAGIC {
            return HeaderState::Foreign(start);
        }
        let mut version = [0; 4];
        version.copy_from_slice(&bytes[8..12]);
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[12..28]);
        HeaderState::Present(Self { version: u32::from_le_bytes(version), uuid: Uuid::from_bytes(uuid) })
    }

    /// The 32 bytes of this header.
    pub fn to_bytes(&self) -> [u8; DEVICE_HEADER_BYTES] {
        let mut bytes = [0; DEVICE_HEADER_BYTES];
        bytes[..8].copy_from_slice(&DEVICE_MAGIC);
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[12..28].copy_from_slice(self.uuid.as_bytes());
        bytes
    }

    /// Reads the header of a region that starts at device offset 0. Logs a warning for an unknown version.
    ///
    /// # Errors
    /// [`CxlError::InvalidArgument`] when the region does not start at offset 0 of a device, and
    /// [`CxlError::MemoryFault`] when the bytes cannot be read.
    pub fn read(region: &Region) -> Result<HeaderState, CxlError> {
        let bytes = Self::read_bytes(region)?;
        let state = Self::parse(&bytes);
        if let HeaderState::Present(header) = state
            && !header.is_known_version()
        {
            tracing::warn!(
                backing = region.backing(),
                found = header.version,
                known = DEVICE_VERSION,
                "the device header has an unknown version; using its UUID only"
            );
        }
        Ok(state)
    }

    fn read_bytes(region: &Region) -> Result<[u8; DEVICE_HEADER_BYTES], CxlError> {
        require_header_unit(region)?;
        let slab = region.slab(0, DEVICE_HEADER_BYTES as u64)?;
        slab.probe()?;
        // Another host may have written it since a line of it was cached here.
        slab.invalidate();
        let mut bytes = [0; DEVICE_HEADER_BYTES];
        slab.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes this header at the start of a region and flushes it to memory, whatever was there.
    ///
    /// # Errors
    /// As [`DeviceHeader::read`]; [`CxlError::ReadOnly`] for a read-only mapping; [`CxlError::HeaderVersion`]
    /// for a version other than the known one.
    pub fn write(&self, region: &Region) -> Result<(), CxlError> {
        require_header_unit(region)?;
        if !self.is_known_version() {
            return Err(CxlError::HeaderVersion {
                path: region.backing().into(),
                found: self.version,
                known: DEVICE_VERSION,
            });
        }
        let slab = region.slab(0, DEVICE_HEADER_BYTES as u64)?;
        slab.write_at(0, &self.to_bytes())?;
        // Stays stale on other hosts otherwise, so this is done under every coherence policy.
        slab.flush();
        coherence::publish();
        Ok(())
    }
}

fn require_header_unit(region: &Region) -> Result<(), CxlError> {
    if region.header_unit() == 0 {
        return Err(CxlError::InvalidArgument {
            what: "region offset",
            found: region.device_offset(),
            allowed: "the device header is at device offset 0, so only a region mapped from there has one"
                .to_owned(),
        });
    }
    Ok(())
}
