//! The pools of a configuration: is each one's device or file there, does its window fit, what is in it?

use std::os::unix::fs::MetadataExt as _;

use maru::cxl::{
    Coherence, CxlError, DaxDevice, DeviceKind, MapOptions, Mapping, OpenOptions, Region, SlabPool,
};
use maru::transfer::config::{CxlConfig, PoolConfig};
use serde::Serialize;

use crate::doctor::{Findings, Roots, dax, rooms};

/// A configured pool, as far as it can be looked at without changing anything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Pool {
    pub(crate) path: String,
    pub(crate) offset: u64,
    /// As configured; 0 = all of the device.
    pub(crate) size: u64,
    /// `device`, `file`, or null where neither could be opened.
    pub(crate) kind: Option<&'static str>,
    pub(crate) bytes: Option<u64>,
    pub(crate) align: Option<u64>,
    pub(crate) writable: Option<bool>,
    /// Whether CUDA can register it, as far as its file system tells.
    pub(crate) registrable: Option<bool>,
    /// What is published there, if it holds a pool.
    pub(crate) contents: Option<Contents>,
    pub(crate) problem: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Contents {
    pub(crate) slab_bytes: u64,
    pub(crate) slabs: u64,
    pub(crate) published: u64,
}

pub(crate) fn look(config: &CxlConfig, roots: &Roots, findings: &mut Findings) -> Vec<Pool> {
    config.pools.iter().map(|pool| one(pool, config, roots, findings)).collect()
}

fn one(config: &PoolConfig, cxl: &CxlConfig, roots: &Roots, findings: &mut Findings) -> Pool {
    let mut pool = Pool {
        path: config.path.display().to_string(),
        offset: config.offset,
        size: config.size,
        kind: None,
        bytes: None,
        align: None,
        writable: None,
        registrable: None,
        contents: None,
        problem: None,
    };
    if let Ok(metadata) = std::fs::metadata(&config.path)
        && metadata.is_file()
    {
        pool.kind = Some("file");
        pool.bytes = Some(metadata.len());
        pool.registrable =
            rustix::fs::statfs(&config.path).ok().and_then(|stat| rooms::file_system(stat.f_type).1);
        if pool.registrable == Some(false) && cxl.register {
            findings.warning(
                format!("{} is on a disk file system, which CUDA cannot register", pool.path),
                "keep the pool in tmpfs (/dev/shm), hugetlbfs or a device-dax node",
            );
        }
        // Opening a sparse file reserves its space, which is more than looking.
        if metadata.blocks().saturating_mul(512) < metadata.len() {
            findings.note(
                format!(
                    "{} is a sparse file: its {} bytes are reserved when it is opened",
                    pool.path,
                    metadata.len()
                ),
                "nothing, if the file system has the room",
            );
            return pool;
        }
    }
    if let Err(error) = open(config, roots, &mut pool) {
        match error {
            CxlError::NotFound { .. } if config.size > 0 => findings.note(
                format!("{} does not exist; a pool made there is a new file of its size", pool.path),
                "nothing, if that is meant",
            ),
            _ => findings.error(error.to_string(), dax::remedy_of(&error)),
        }
        pool.problem = Some(error.to_string());
    }
    if pool.writable == Some(false) {
        findings.warning(
            format!("{} can be read only: this user can load from the pool and cannot store", pool.path),
            "give it write access (udev rule for a device, owner and mode for a file) if it is to store",
        );
    }
    pool
}

fn open(config: &PoolConfig, roots: &Roots, pool: &mut Pool) -> Result<(), CxlError> {
    let device = DaxDevice::open_with_sysfs(&config.path, &roots.sys)?;
    pool.kind = Some(match device.kind() {
        DeviceKind::Device => "device",
        DeviceKind::File => "file",
    });
    pool.bytes = Some(device.len());
    pool.align = Some(device.align());
    pool.writable = Some(device.is_writable());
    if device.kind() == DeviceKind::Device {
        pool.registrable = Some(true);
    }
    let options = MapOptions {
        offset: config.offset,
        len: config.size,
        prefault: false,
        read_only: true,
        ..MapOptions::default()
    };
    let region = Region::new(Mapping::map(&device, &options)?);
    // Whether there is a pool yet is no fault of the place.
    let open = OpenOptions { writable: false, force: false, coherence: Coherence::None };
    if let Ok(found) = SlabPool::open(region, open) {
        let stats = found.stats();
        pool.contents =
            Some(Contents { slab_bytes: found.slab_bytes(), slabs: stats.slabs, published: stats.published });
    }
    Ok(())
}
