//! Listing the dax devices of this machine.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::sysfs::PhysicalRange;
use super::{DaxDevice, Mode, sysfs};
use crate::error::{CxlError, io_error};
use crate::header::{DeviceHeader, HeaderState};
use crate::mapping::{MapOptions, Mapping};
use crate::region::Region;

/// One dax device as the kernel describes it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DaxInfo {
    /// The kernel's name, e.g. `dax0.0`.
    pub name: String,
    /// Its node, e.g. `/dev/dax0.0`.
    pub path: PathBuf,
    /// How it is bound.
    pub mode: Mode,
    /// Size in bytes, where the kernel gives a sensible one.
    pub size: Option<u64>,
    /// Alignment in bytes, where the kernel gives a sensible one.
    pub align: Option<u64>,
    /// NUMA node the memory is near to.
    pub numa_node: Option<i32>,
    /// NUMA node it would be as RAM.
    pub target_node: Option<i32>,
    /// Its physical address ranges, where this user may read them.
    pub ranges: Vec<PhysicalRange>,
    /// What the first bytes say; `None` when they could not be read.
    pub header: Option<HeaderState>,
    /// What is wrong with the device, one sentence each; empty when it is ready to use.
    pub problems: Vec<String>,
}

pub(super) fn scan(sysfs_root: &Path, dev_root: &Path) -> Result<Vec<DaxInfo>, CxlError> {
    let dir = sysfs_root.join("bus/dax/devices");
    let entries = match fs::read_dir(&dir) {
        Ok(entries) => entries,
        // A kernel without the dax bus has no such devices.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io_error("readdir", &dir, error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| io_error("readdir", &dir, error))?;
        found.push(examine(&entry.path(), sysfs_root, dev_root));
    }
    found.sort_by(|a, b| natural(&a.name).cmp(&natural(&b.name)));
    Ok(found)
}

/// dax2.0 before dax10.0.
fn natural(name: &str) -> (Vec<u64>, &str) {
    let numbers = name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect();
    (numbers, name)
}

fn examine(link: &Path, sysfs_root: &Path, dev_root: &Path) -> DaxInfo {
    let dir = fs::canonicalize(link).unwrap_or_else(|_| link.to_owned());
    let name = sysfs::name(link);
    let path = dev_root.join(&name);
    let mut info = DaxInfo {
        mode: sysfs::mode(&dir),
        ranges: sysfs::ranges(&dir),
        name,
        path,
        size: None,
        align: None,
        numa_node: None,
        target_node: None,
        header: None,
        problems: Vec::new(),
    };
    match sysfs::attributes(&dir, &info.path) {
        Ok(attributes) => {
            info.size = Some(attributes.size);
            info.align = Some(attributes.align);
            info.numa_node = attributes.numa_node;
            info.target_node = attributes.target_node;
        }
        Err(error) => info.problems.push(error.to_string()),
    }
    if info.mode != Mode::DevDax {
        info.problems.push(sysfs::not_devdax(&info.path, Some(&dir)).to_string());
    } else if info.problems.is_empty() {
        match read_header(&info.path, sysfs_root) {
            Ok(header) => info.header = Some(header),
            Err(error) => info.problems.push(error.to_string()),
        }
    }
    info
}

/// Maps one unit for reading; a device-dax node has no `read(2)`.
fn read_header(path: &Path, sysfs_root: &Path) -> Result<HeaderState, CxlError> {
    // Opening read-only first gives the plain error when there is no node at all.
    File::open(path).map_err(|error| sysfs::open_error(path, error, None))?;
    let device = DaxDevice::open_with_sysfs(path, sysfs_root)?;
    let options =
        MapOptions { len: device.align(), read_only: true, prefault: false, ..MapOptions::default() };
    DeviceHeader::read(&Region::new(Mapping::map(&device, &options)?))
}
