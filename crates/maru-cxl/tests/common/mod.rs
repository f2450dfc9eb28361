//! Helpers shared by the tests of this crate.
#![allow(dead_code, reason = "each test target uses its own part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests, where a failure is a panic")]

use std::path::{Path, PathBuf};

use maru_cxl::{CreateOptions, DaxDevice, MapOptions, Mapping, OpenOptions, PoolOptions, Region, SlabPool};

/// A directory on tmpfs where there is one, so that tests do not wait for a disk.
pub(crate) fn scratch() -> tempfile::TempDir {
    let shm = Path::new("/dev/shm");
    if shm.is_dir()
        && let Ok(dir) = tempfile::tempdir_in(shm)
    {
        return dir;
    }
    tempfile::tempdir().unwrap()
}

/// A new file of `len` bytes, mapped.
pub(crate) fn new_file_region(dir: &tempfile::TempDir, len: u64) -> (PathBuf, Region) {
    let path = dir.path().join("pool");
    let device = DaxDevice::create_file(&path, len, CreateOptions::default()).unwrap();
    (path, Region::new(Mapping::map(&device, &MapOptions::default()).unwrap()))
}

/// Another mapping of a file.
pub(crate) fn map(path: &Path) -> Region {
    let device = DaxDevice::open(path).unwrap();
    Region::new(Mapping::map(&device, &MapOptions::default()).unwrap())
}

/// Another, read-only mapping of a file.
pub(crate) fn map_read_only(path: &Path) -> Region {
    let device = DaxDevice::open(path).unwrap();
    let options = MapOptions { read_only: true, ..MapOptions::default() };
    Region::new(Mapping::map(&device, &options).unwrap())
}

pub(crate) fn options(slab_bytes: u64) -> PoolOptions {
    PoolOptions { slab_bytes, ..PoolOptions::default() }
}

pub(crate) fn writable() -> OpenOptions {
    OpenOptions { writable: true, ..OpenOptions::default() }
}

/// A pool of slabs of 4096 bytes in anonymous memory, with at least `slabs` of them.
pub(crate) fn anonymous_pool(slabs: u64) -> SlabPool {
    let entries = (slabs * 2).next_power_of_two().max(2) * 128;
    let region = Region::anonymous(4096 + entries.next_multiple_of(4096) + slabs * 4096).unwrap();
    SlabPool::create(region, PoolOptions { entries: entries / 128, ..options(4096) }).unwrap()
}

pub(crate) fn key(n: u64) -> [u8; 32] {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&n.to_le_bytes());
    key
}
