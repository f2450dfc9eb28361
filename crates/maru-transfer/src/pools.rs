//! Pools of an engine: mapped, prefaulted and registered as the configuration says.

use std::sync::Arc;

use maru_cxl::{
    Coherence, CreateOptions, CudaRegistrar, CxlError, DaxDevice, DeviceKind, MapOptions, Mapping,
    OpenOptions, PoolOptions, Region, Slab, SlabPool,
};
use xxhash_rust::xxh3::Xxh3Default;

use crate::config::{ChecksumKind, CoherenceKind, PoolConfig};
use crate::{Place, TransferEngine, TransferError};

/// Bytes read at a time for a checksum; a few of them fit any L2 cache.
const CHUNK: usize = 256 << 10;

impl TransferEngine {
    /// Makes a pool of slabs of `slab_bytes` and becomes its writer. A file that does not exist is created
    /// with its space reserved; one that exists, or a pool on a device, is replaced only if `replace`.
    ///
    /// # Errors
    /// [`TransferError::Cxl`]: no space (with wanted and free bytes), a pool or foreign data in the way, a
    /// live writer, a window that does not fit the device; registration that failed and was required.
    pub fn create_pool(
        &self,
        pool: &PoolConfig,
        slab_bytes: u64,
        replace: bool,
    ) -> Result<SlabPool, TransferError> {
        let (device, made) = match DaxDevice::open(&pool.path) {
            Ok(device) if device.kind() == DeviceKind::File && !replace => {
                return Err(CxlError::FileExists { path: pool.path.clone() }.into());
            }
            Ok(device) => (device, false),
            Err(CxlError::NotFound { .. }) => {
                let len = pool
                    .offset
                    .checked_add(pool.size)
                    .ok_or(maru_layout::LayoutError::Overflow { what: "the pool's end" })?;
                (DaxDevice::create_file(&pool.path, len, CreateOptions { replace })?, true)
            }
            Err(e) => return Err(e.into()),
        };
        let create = || -> Result<SlabPool, TransferError> {
            let region = self.map(&device, pool, false)?;
            let coherence = self.coherence();
            let options = PoolOptions { slab_bytes, entries: 0, force: replace, coherence };
            self.registered_pool(SlabPool::create(region, options)?)
        };
        create().inspect_err(|_| {
            if made && let Err(e) = device.remove_file() {
                tracing::warn!(path = %pool.path.display(), error = %e, "an unfinished pool file stays behind");
            }
        })
    }

    /// Opens a pool that exists: to read it, or, one process at a time, to add to it. Slabs that others
    /// published are taken.
    ///
    /// # Errors
    /// [`TransferError::Cxl`]: no pool there, a damaged or foreign one, a live writer when `writable`;
    /// registration that failed and was required.
    pub fn open_pool(&self, pool: &PoolConfig, writable: bool) -> Result<SlabPool, TransferError> {
        let device = DaxDevice::open(&pool.path)?;
        let region = self.map(&device, pool, true)?;
        let options = OpenOptions { writable, force: false, coherence: self.coherence() };
        self.registered_pool(SlabPool::open(region, options)?)
    }

    /// A pool's configured window; a file that is shorter than configured is taken whole when it is opened,
    /// since its pool says itself how long it is.
    fn map(&self, device: &DaxDevice, pool: &PoolConfig, existing: bool) -> Result<Region, TransferError> {
        let cxl = &self.config().cxl;
        let room = device.len().saturating_sub(pool.offset);
        let len =
            if existing && device.kind() == DeviceKind::File && room < pool.size { 0 } else { pool.size };
        let options = MapOptions {
            offset: pool.offset,
            len,
            prefault: cxl.prefault,
            prefault_threads: usize::try_from(cxl.prefault_threads).unwrap_or(0),
            ..MapOptions::default()
        };
        Ok(Region::new(Mapping::map(device, &options)?))
    }

    fn coherence(&self) -> Coherence {
        match self.config().cxl.coherence {
            CoherenceKind::Flush => Coherence::Flush,
            _ => Coherence::None,
        }
    }

    fn registered_pool(&self, pool: SlabPool) -> Result<SlabPool, TransferError> {
        let cxl = &self.config().cxl;
        if let (Place::Cuda(device), true) = (self.place(), cxl.register) {
            let registrar = CudaRegistrar::open(usize::try_from(device).unwrap_or(usize::MAX))?;
            pool.register(Arc::new(registrar), cxl.register_piece, cxl.require_registration)?;
        }
        Ok(pool)
    }

    /// The checksum to publish a slab with, if the configuration wants one: XXH3-64 of its bytes.
    ///
    /// # Errors
    /// [`TransferError::Cxl`] when the memory cannot be read.
    pub fn checksum(&self, slab: &Slab) -> Result<Option<u64>, TransferError> {
        match self.config().transfer.checksum {
            ChecksumKind::Xxh3 => Ok(Some(checksum(slab)?)),
            _ => Ok(None),
        }
    }
}

/// XXH3-64 (seed 0) of a slab's bytes.
///
/// # Errors
/// [`TransferError::Cxl`] when the memory cannot be read.
pub fn checksum(slab: &Slab) -> Result<u64, TransferError> {
    let mut hash = Xxh3Default::new();
    let mut chunk = vec![0u8; CHUNK];
    let mut at = 0;
    while at < slab.len() {
        let n = usize::try_from(slab.len() - at).unwrap_or(CHUNK).min(CHUNK);
        slab.read_at(at, &mut chunk[..n])?;
        hash.update(&chunk[..n]);
        at += n as u64;
    }
    Ok(hash.digest())
}
