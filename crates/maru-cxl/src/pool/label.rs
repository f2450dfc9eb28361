//! Whether a region may become a pool, and whether a pool belongs to its device.

use super::process;
use crate::coherence::Coherence;
use crate::directory::SlabDirectory;
use crate::error::CxlError;
use crate::header::{DEVICE_VERSION, DeviceHeader, HeaderState, Uuid};
use crate::num::hex;
use crate::region::Region;

/// Refuses to create over anything that is not blank.
pub(super) fn refuse_existing(region: &Region) -> Result<(), CxlError> {
    let info = if SlabDirectory::is_blank(region)? {
        // The device's alignment may have been changed since a pool was made on it.
        match SlabDirectory::under_other_alignment(region)? {
            None => return Ok(()),
            Some(info) => info,
        }
    } else {
        *SlabDirectory::open(region.clone(), Coherence::None)?.info()
    };
    Err(CxlError::PoolExists {
        backing: region.backing().to_owned(),
        uuid: info.uuid.to_string(),
        creator_pid: info.creator.pid,
        liveness: process::liveness(&info.creator).describe(),
    })
}

/// The device's UUID, labelling a blank device on the way.
pub(super) fn label(region: &Region, force: bool) -> Result<Uuid, CxlError> {
    if region.header_unit() == 0 {
        return Ok(Uuid::default());
    }
    match DeviceHeader::read(region)? {
        HeaderState::Present(header) => return Ok(header.uuid),
        HeaderState::Foreign(start) if !force => return Err(foreign(region, &start)),
        HeaderState::Blank | HeaderState::Foreign(_) => {}
    }
    let header = DeviceHeader { version: DEVICE_VERSION, uuid: Uuid::random()? };
    header.write(region)?;
    Ok(header.uuid)
}

/// Checks that the device header belongs to the pool.
pub(super) fn check_label(directory: &SlabDirectory, force: bool) -> Result<(), CxlError> {
    let region = directory.region();
    if region.header_unit() == 0 || force {
        return Ok(());
    }
    let reason = match DeviceHeader::read(region)? {
        HeaderState::Foreign(start) => return Err(foreign(region, &start)),
        HeaderState::Blank => "the device header is missing".to_owned(),
        HeaderState::Present(header) if header.uuid != directory.info().device_uuid => format!(
            "the pool was made on device {}, but the header says {}; it is left over from before the device was \
             labelled anew",
            directory.info().device_uuid,
            header.uuid
        ),
        HeaderState::Present(_) => return Ok(()),
    };
    Err(CxlError::NotAPool {
        backing: region.backing().to_owned(),
        offset: directory.info().directory_offset,
        reason,
    })
}

fn foreign(region: &Region, start: &[u8; 16]) -> CxlError {
    CxlError::ForeignHeader { backing: region.backing().to_owned(), found: hex(start) }
}
