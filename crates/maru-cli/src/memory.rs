//! Memory of the place a mover serves: the host's, or a device's.

use std::path::Path;

use maru::Place;
use maru::cxl::{CreateOptions, CxlError, DaxDevice, MapOptions, Mapping, Region, Slab, Uuid};
use maru::transfer::TransferError;

use crate::device::DeviceMemory;
use crate::error::CliError;

/// Where the bytes of a paged cache are.
#[derive(Debug)]
pub(crate) enum Memory {
    Host(Slab),
    Device(DeviceMemory),
}

impl Memory {
    /// `len` bytes, at least 1; zero on the host, undefined on a device.
    pub(crate) fn new(place: Place, len: u64) -> Result<Self, CliError> {
        match place {
            Place::Host => Ok(Memory::Host(Region::anonymous(len)?.slab(0, len)?)),
            Place::Cuda(device) => Ok(Memory::Device(DeviceMemory::new(device, len)?)),
            other => Err(CliError::Transfer(TransferError::NotAvailable {
                what: format!("a paged cache on {other}"),
                reason: "this command has caches in host memory and on CUDA devices".to_owned(),
            })),
        }
    }

    /// Address of the first byte; page-aligned on the host, 256-byte aligned at least on a device.
    pub(crate) fn addr(&self) -> u64 {
        match self {
            Memory::Host(slab) => slab.addr().as_ptr().expose_provenance() as u64,
            Memory::Device(memory) => memory.addr(),
        }
    }

    /// Copies bytes in.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CliError> {
        match self {
            Memory::Host(slab) => Ok(slab.write_at(offset, bytes)?),
            Memory::Device(memory) => memory.write(offset, bytes),
        }
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), CliError> {
        match self {
            Memory::Host(slab) => Ok(slab.read_at(offset, bytes)?),
            Memory::Device(memory) => memory.read(offset, bytes),
        }
    }
}

/// A shared mapping as pools have them, of a file in `dir` that has no name any more when this returns; `bytes` long
/// and then some to the end of its last page.
pub(crate) fn shared_file(dir: &Path, bytes: u64) -> Result<Region, CxlError> {
    const PAGE: u64 = 4096;
    // A length that cannot be rounded is refused like any other that is too large.
    let bytes = bytes.checked_next_multiple_of(PAGE).unwrap_or(bytes);
    let path = dir.join(format!("maru-{}-{}", std::process::id(), Uuid::random()?));
    let device = DaxDevice::create_file(&path, bytes, CreateOptions::default())?;
    let mapping = Mapping::map(&device, &MapOptions { prefault: true, ..MapOptions::default() });
    device.remove_file()?;
    Ok(Region::new(mapping?))
}
