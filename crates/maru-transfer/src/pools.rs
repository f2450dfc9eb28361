//! Pools of an engine: mapped, prefaulted and registered as the configuration says.

use std::fmt;
use std::sync::Arc;

use maru_cxl::{
    Coherence, CreateOptions, CudaRegistrar, CxlError, DaxDevice, DeviceKind, MapOptions, Mapping,
    OpenOptions, PoolOptions, Progress, Region, Slab, SlabPool,
};
use xxhash_rust::xxh3::Xxh3Default;

use crate::config::{ChecksumKind, CoherenceKind, PoolConfig};
use crate::{Place, TransferEngine, TransferError};

/// Bytes read at a time for a checksum; a few of them fit any L2 cache.
const CHUNK: usize = 256 << 10;

/// How a pool is mapped and registered; [`TransferEngine::pool_access`] says what the configuration wants.
#[derive(Clone)]
#[non_exhaustive]
pub struct PoolAccess {
    /// Map it so that this process cannot change it. Not every driver registers such memory.
    pub read_only: bool,
    /// Touch every page now rather than in the first transfer.
    pub prefault: bool,
    /// Register it with the engine's device, if that is one.
    pub register: bool,
    /// Called with bytes done and bytes in all while pages are touched, from the threads that do it.
    pub progress: Option<Progress>,
}

impl fmt::Debug for PoolAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut f = f.debug_struct("PoolAccess");
        f.field("read_only", &self.read_only).field("prefault", &self.prefault);
        f.field("register", &self.register).finish_non_exhaustive()
    }
}

impl TransferEngine {
    /// What the configuration wants: writable memory, prefaulted and registered as it says.
    pub fn pool_access(&self) -> PoolAccess {
        let cxl = &self.config().cxl;
        PoolAccess { read_only: false, prefault: cxl.prefault, register: cxl.register, progress: None }
    }

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
        let created = self.create_pool_on(&device, pool, slab_bytes, replace, &self.pool_access());
        created.inspect_err(|_| {
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
        self.open_pool_on(&device, pool, writable, &self.pool_access())
    }

    /// [`TransferEngine::create_pool`] on a device or file that is open already, with its own way of mapping;
    /// `replace` does away with what is there.
    ///
    /// # Errors
    /// As [`TransferEngine::create_pool`].
    pub fn create_pool_on(
        &self,
        device: &DaxDevice,
        pool: &PoolConfig,
        slab_bytes: u64,
        replace: bool,
        access: &PoolAccess,
    ) -> Result<SlabPool, TransferError> {
        let region = self.map(device, pool, false, access)?;
        let options = PoolOptions { slab_bytes, entries: 0, force: replace, coherence: self.coherence() };
        self.registered_pool(SlabPool::create(region, options)?, access)
    }

    /// [`TransferEngine::open_pool`] on a device or file that is open already, with its own way of mapping.
    ///
    /// # Errors
    /// As [`TransferEngine::open_pool`].
    pub fn open_pool_on(
        &self,
        device: &DaxDevice,
        pool: &PoolConfig,
        writable: bool,
        access: &PoolAccess,
    ) -> Result<SlabPool, TransferError> {
        let region = self.map(device, pool, true, access)?;
        let options = OpenOptions { writable, force: false, coherence: self.coherence() };
        self.registered_pool(SlabPool::open(region, options)?, access)
    }

    /// A pool's configured window; a file that is shorter than configured is taken whole when it is opened,
    /// since its pool says itself how long it is.
    fn map(
        &self,
        device: &DaxDevice,
        pool: &PoolConfig,
        existing: bool,
        access: &PoolAccess,
    ) -> Result<Region, TransferError> {
        let room = device.len().saturating_sub(pool.offset);
        let len =
            if existing && device.kind() == DeviceKind::File && room < pool.size { 0 } else { pool.size };
        let options = MapOptions {
            offset: pool.offset,
            len,
            prefault: access.prefault,
            prefault_threads: usize::try_from(self.config().cxl.prefault_threads).unwrap_or(0),
            read_only: access.read_only,
            progress: access.progress.clone(),
        };
        Ok(Region::new(Mapping::map(device, &options)?))
    }

    fn coherence(&self) -> Coherence {
        match self.config().cxl.coherence {
            CoherenceKind::Flush => Coherence::Flush,
            _ => Coherence::None,
        }
    }

    fn registered_pool(&self, pool: SlabPool, access: &PoolAccess) -> Result<SlabPool, TransferError> {
        let cxl = &self.config().cxl;
        if let (Place::Cuda(device), true) = (self.place(), access.register) {
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
