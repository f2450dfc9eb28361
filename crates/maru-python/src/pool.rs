//! `Pool` and `ChunkKeys`: slabs that other processes find by key.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use maru_cxl::SlabPool;
use maru_layout::Fingerprint;
use maru_transfer::config::PoolConfig;
use maru_transfer::{ChunkKeys, TransferEngine};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::args;
use crate::errors::{Fault, Result, detached, guard};
use crate::memory::Tracked;
use crate::process::{Owned, lock, process};
use crate::region::{PySlab, no_pickle};

/// The window of a call, or the first pool of the configuration.
pub(crate) fn window(
    engine: &TransferEngine,
    path: Option<PathBuf>,
    size: Option<&Bound<'_, PyAny>>,
    offset: Option<&Bound<'_, PyAny>>,
) -> Result<PoolConfig> {
    let mut pool = match path {
        Some(path) => PoolConfig::new(path),
        None => engine.config().cxl.pools.first().cloned().ok_or_else(|| {
            Fault::value("no path was given and the configuration has no pool (maru_pool_path)")
        })?,
    };
    if let Some(size) = size.filter(|s| !s.is_none()) {
        pool = pool.with_size(args::count(size, "size")?);
    }
    if let Some(offset) = offset.filter(|o| !o.is_none()) {
        pool = pool.with_offset(args::count(offset, "offset")?);
    }
    Ok(pool)
}

fn key(bytes: &[u8]) -> std::result::Result<[u8; 32], Fault> {
    bytes.try_into().map_err(|_| Fault::value(format!("key has {} bytes, 32 are needed", bytes.len())))
}

/// A pool of slabs of one size, with a directory that other processes read.
#[pyclass(module = "maru_kv_ops", name = "Pool", frozen)]
pub(crate) struct PyPool {
    pool: Owned<SlabPool>,
    engine: Owned<TransferEngine>,
    tracked: Arc<Tracked>,
}

impl PyPool {
    pub(crate) fn new(pool: SlabPool, engine: TransferEngine) -> Self {
        let tracked = Tracked::new(pool.region().clone());
        PyPool { pool: Owned::new(pool), engine: Owned::new(engine), tracked }
    }
}

#[pymethods]
impl PyPool {
    /// A free slab, or `None` if there is none. It returns to the pool when nothing refers to it any more,
    /// unless it was published.
    fn alloc(&self, py: Python<'_>) -> PyResult<Option<PySlab>> {
        guard(py, || {
            let pool = self.pool.get("Pool")?;
            let mut pooled = detached(py, || Ok(pool.alloc()?))?;
            if pooled.is_none() {
                // Transfers that are over, but have not been asked, hold slabs.
                process().reap_some(py);
                pooled = detached(py, || Ok(pool.alloc()?))?;
            }
            Ok(pooled.map(|p| PySlab::new(p.slab().clone(), Arc::clone(&self.tracked), Some(p))))
        })
    }

    /// Lets others find a slab's first `nbytes` (all, if not given) by a 32-byte key, once it is complete. The
    /// fingerprint is the cache's for that number of tokens.
    #[pyo3(signature = (slab, key, *, fingerprint, nbytes=None))]
    fn publish(
        &self,
        py: Python<'_>,
        slab: &Bound<'_, PySlab>,
        key: &[u8],
        fingerprint: u64,
        nbytes: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        guard(py, || {
            let pool = self.pool.get("Pool")?;
            let engine = self.engine.get("Pool")?;
            let key = self::key(key)?;
            let slab = slab.get();
            let Some(pooled) = slab.pooled() else {
                return Err(Fault::value(
                    "slab is not from Pool.alloc(); only slabs of the pool can be published",
                )
                .into());
            };
            let len = args::optional(nbytes, "nbytes")?.unwrap_or(slab.slab().len());
            Ok(detached(py, || {
                let checksum = engine.checksum(&pooled.slab().span(0, len)?)?;
                pool.publish(pooled, &key, len, fingerprint, checksum)?;
                Ok(())
            })?)
        })
    }

    /// The slab published under a key, as `(slab, fingerprint)`, or `None`.
    fn lookup(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<(PySlab, u64)>> {
        guard(py, || {
            let pool = self.pool.get("Pool")?;
            let key = self::key(key)?;
            let found = detached(py, || Ok(pool.lookup(&key)?))?;
            Ok(found
                .map(|p| (PySlab::new(p.slab().clone(), Arc::clone(&self.tracked), None), p.fingerprint())))
        })
    }

    /// Whether a key that was there is no longer.
    fn withdraw(&self, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        guard(py, || {
            let pool = self.pool.get("Pool")?;
            let key = self::key(key)?;
            Ok(detached(py, || Ok(pool.withdraw(&key)?))?)
        })
    }

    /// Counts: slabs, free, held, published, unusable, entries.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        guard(py, || {
            let pool = self.pool.get("Pool")?;
            let stats = detached(py, || Ok(pool.stats()))?;
            let dict = PyDict::new(py);
            for (name, value) in [
                ("slabs", stats.slabs),
                ("free", stats.free),
                ("held", stats.held),
                ("published", stats.published),
                ("unusable", stats.unusable),
                ("entries", stats.entries),
            ] {
                dict.set_item(name, value)?;
            }
            Ok(dict)
        })
    }

    /// Bytes of a slab.
    #[getter]
    fn slab_bytes(&self) -> u64 {
        self.pool.slab_bytes()
    }

    /// Whether this process may add to it.
    #[getter]
    fn writable(&self) -> bool {
        self.pool.is_writable()
    }

    /// Whether a CUDA device reaches it.
    #[getter]
    fn is_registered(&self) -> bool {
        self.pool.region().is_registered()
    }

    fn __repr__(&self) -> String {
        format!(
            "Pool({}, {} slabs of {} bytes, writable={})",
            self.pool.region().backing(),
            self.pool.slab_count(),
            self.pool.slab_bytes(),
            self.pool.is_writable()
        )
    }

    fn __reduce__(&self, py: Python<'_>) -> PyResult<()> {
        Err(no_pickle(py, "Pool", "open its path in the other process"))
    }
}

/// Keys of a prompt's chunks, in order. Equal keys mean an equal prefix.
#[pyclass(module = "maru_kv_ops", name = "ChunkKeys", frozen)]
pub(crate) struct PyChunkKeys(Mutex<ChunkKeys>);

#[pymethods]
impl PyChunkKeys {
    /// `namespace` names all that must be equal for two servers to share KV: model, revision, rank, …
    #[new]
    fn new(namespace: &str, fingerprint: u64) -> Self {
        PyChunkKeys(Mutex::new(ChunkKeys::new(namespace, Fingerprint(fingerprint))))
    }

    /// The 32-byte key of the next chunk.
    fn chunk<'py>(&self, py: Python<'py>, tokens: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        guard(py, || {
            let tokens: Vec<u32> = args::numbers(tokens, "tokens")?;
            Ok(PyBytes::new(py, &lock(&self.0).chunk(&tokens).0))
        })
    }
}
