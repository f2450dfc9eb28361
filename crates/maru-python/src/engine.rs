//! `Engine`: stores and loads of registered caches.

use std::sync::atomic::{AtomicU64, Ordering};

use maru_layout::Direction;
use maru_transfer::config::Config;
use maru_transfer::{Place, RegisteredCache, Stream, Transfer, TransferEngine, TransferRequest};
use pyo3::prelude::*;

use crate::args::{self, Arg};
use crate::cache::PyPagedCache;
use crate::errors::{Error, Fault, Result, detached, guard};
use crate::pool::PyPool;
use crate::process::{Keep, Owned, claim_cuda, cuda_allowed, process};
use crate::region::no_pickle;
use crate::request::{Given, Item, Options, Pair, pairs};
use crate::tensor::stream_of;
use crate::transfer::PyTransfer;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Moves slabs of caches on one device, by one configuration.
#[pyclass(module = "maru_kv_ops", name = "Engine", frozen)]
pub(crate) struct PyEngine {
    engine: Owned<TransferEngine>,
    id: u64,
}

impl PyEngine {
    /// One slab.
    fn one(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        item: Pair<'_, '_>,
        direction: Direction,
        given: &Given<'_, '_>,
    ) -> Result<Py<PyTransfer>> {
        let place = self.engine.get("Engine")?.place();
        let (cache, options, mut keep) = begin(cache, direction, given)?;
        let item = Item::read(cache, item, (direction, place), &options, &mut keep)?;
        self.send(py, cache, keep, given.stream, |engine, cache, stream| {
            let request = item.request(cache, (direction, place), &options, stream)?;
            submit(engine, std::slice::from_ref(&request), &options)
        })
    }

    /// Any number of slabs.
    fn many(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        items: &Bound<'_, PyAny>,
        direction: Direction,
        given: &Given<'_, '_>,
    ) -> Result<Py<PyTransfer>> {
        let items = pairs(items)?;
        let place = self.engine.get("Engine")?.place();
        let (cache, options, mut keep) = begin(cache, direction, given)?;
        let mut read = Vec::with_capacity(items.len());
        for (i, (slots, slab)) in items.iter().enumerate() {
            let item = Item::read(cache, (slots, slab), (direction, place), &options, &mut keep);
            read.push(item.map_err(|e| match e {
                Error::Fault(fault) if items.len() > 1 => fault.of(format!("item {i}")).into(),
                e => e,
            })?);
        }
        self.send(py, cache, keep, given.stream, |engine, cache, stream| {
            let request = |item: Item<'_>| item.request(cache, (direction, place), &options, stream);
            let requests = read.into_iter().map(request).collect::<Result<Vec<_>, Fault>>()?;
            submit(engine, &requests, &options)
        })
    }

    /// Lets `submit` put a transfer on the stream, without the GIL.
    fn send(
        &self,
        py: Python<'_>,
        cache: &PyPagedCache,
        keep: Keep,
        stream: Arg<'_, '_>,
        submit: impl FnOnce(&TransferEngine, &RegisteredCache, Stream) -> Result<Transfer, Fault> + Send,
    ) -> Result<Py<PyTransfer>> {
        let engine = self.engine.get("Engine")?;
        let (place, id) = (engine.place(), self.id);
        let stream = stream_of(py, place, cache.is_torch(), stream)?;
        let transfer = detached(py, || {
            let cache = cache.registered(id, engine)?;
            // SAFETY: torch's current stream, the default one, or a live one as the caller states.
            submit(engine, &cache, unsafe { Stream::cuda(stream) })
        })?;
        process().reap(py);
        Ok(Py::new(py, PyTransfer::new(transfer, (place, cache.paged().layers()), keep))?)
    }
}

/// What every slab of a call has in common, and what the transfer of them is to keep.
fn begin<'a>(
    cache: &'a Bound<'_, PyPagedCache>,
    direction: Direction,
    given: &Given<'_, '_>,
) -> Result<(&'a PyPagedCache, Options, Keep)> {
    let mut keep = Keep::new();
    keep.push(cache.clone().into_any().unbind());
    let cache = cache.get();
    let options = given.read(cache.paged().layers(), &mut keep)?;
    if direction == Direction::Scatter && cache.is_read_only() {
        return Err(Fault::value("the cache's tensors are read-only and would be written").into());
    }
    Ok((cache, options, keep))
}

fn submit(
    engine: &TransferEngine,
    requests: &[TransferRequest],
    options: &Options,
) -> Result<Transfer, Fault> {
    Ok(match &options.by_layer {
        Some(after) => engine.submit_by_layer(requests, after)?,
        None => engine.submit_many(requests)?,
    })
}

#[pymethods]
impl PyEngine {
    /// Opens the device and the mover that a configuration asks for: a dict with the keys of vLLM's
    /// `kv_connector_extra_config`, the path of a TOML file, or nothing for the defaults.
    #[new]
    #[pyo3(signature = (config=None, *, foreign=None))]
    fn new(
        py: Python<'_>,
        config: Option<&Bound<'_, PyAny>>,
        foreign: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        guard(py, || {
            let foreign = args::texts(foreign, "foreign")?;
            let config: Config = crate::config::read(config, &foreign)?;
            let engine = detached(py, move || {
                let cuda = maru_kernel_cuda::device_count().is_ok();
                let wants_host = config.transfer.device == maru_transfer::config::DeviceChoice::Host;
                if cuda && !wants_host {
                    cuda_allowed()?;
                }
                let engine = TransferEngine::open(&config)?;
                if matches!(engine.place(), Place::Cuda(_)) {
                    claim_cuda();
                }
                Ok(engine)
            })?;
            let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
            Ok(PyEngine { engine: Owned::new(engine), id })
        })
    }

    /// Paged cache → slab: token `t` of the slab is read from slot `slots[t]`.
    #[pyo3(signature = (cache, slots, slab, *, skip_tokens=None, partial=false, layers=None, by_layer=false,
        after=None, slab_tokens=None, fingerprint=None, raw=false, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "options by keyword")]
    fn store(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        slots: &Bound<'_, PyAny>,
        slab: &Bound<'_, PyAny>,
        skip_tokens: Arg<'_, '_>,
        partial: bool,
        layers: Arg<'_, '_>,
        by_layer: bool,
        after: Arg<'_, '_>,
        slab_tokens: Arg<'_, '_>,
        fingerprint: Arg<'_, '_>,
        raw: bool,
        stream: Arg<'_, '_>,
    ) -> PyResult<Py<PyTransfer>> {
        let given =
            Given { skip_tokens, partial, layers, by_layer, after, slab_tokens, fingerprint, raw, stream };
        guard(py, || self.one(py, cache, (slots, slab), Direction::Gather, &given))
    }

    /// Slab → paged cache.
    #[pyo3(signature = (cache, slots, slab, *, skip_tokens=None, partial=false, layers=None, by_layer=false,
        after=None, slab_tokens=None, fingerprint=None, raw=false, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "options by keyword")]
    fn load(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        slots: &Bound<'_, PyAny>,
        slab: &Bound<'_, PyAny>,
        skip_tokens: Arg<'_, '_>,
        partial: bool,
        layers: Arg<'_, '_>,
        by_layer: bool,
        after: Arg<'_, '_>,
        slab_tokens: Arg<'_, '_>,
        fingerprint: Arg<'_, '_>,
        raw: bool,
        stream: Arg<'_, '_>,
    ) -> PyResult<Py<PyTransfer>> {
        let given =
            Given { skip_tokens, partial, layers, by_layer, after, slab_tokens, fingerprint, raw, stream };
        guard(py, || self.one(py, cache, (slots, slab), Direction::Scatter, &given))
    }

    /// Stores of several slabs of one cache with one mover; every one is checked before the first is begun.
    #[pyo3(signature = (cache, items, *, partial=false, layers=None, by_layer=false, after=None,
        slab_tokens=None, fingerprint=None, raw=false, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "options by keyword")]
    fn store_many(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        items: &Bound<'_, PyAny>,
        partial: bool,
        layers: Arg<'_, '_>,
        by_layer: bool,
        after: Arg<'_, '_>,
        slab_tokens: Arg<'_, '_>,
        fingerprint: Arg<'_, '_>,
        raw: bool,
        stream: Arg<'_, '_>,
    ) -> PyResult<Py<PyTransfer>> {
        let given = Given {
            skip_tokens: None,
            partial,
            layers,
            by_layer,
            after,
            slab_tokens,
            fingerprint,
            raw,
            stream,
        };
        guard(py, || self.many(py, cache, items, Direction::Gather, &given))
    }

    /// Loads of several slabs of one cache with one mover; every one is checked before the first is begun.
    #[pyo3(signature = (cache, items, *, partial=false, layers=None, by_layer=false, after=None,
        slab_tokens=None, fingerprint=None, raw=false, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "options by keyword")]
    fn load_many(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        items: &Bound<'_, PyAny>,
        partial: bool,
        layers: Arg<'_, '_>,
        by_layer: bool,
        after: Arg<'_, '_>,
        slab_tokens: Arg<'_, '_>,
        fingerprint: Arg<'_, '_>,
        raw: bool,
        stream: Arg<'_, '_>,
    ) -> PyResult<Py<PyTransfer>> {
        let given = Given {
            skip_tokens: None,
            partial,
            layers,
            by_layer,
            after,
            slab_tokens,
            fingerprint,
            raw,
            stream,
        };
        guard(py, || self.many(py, cache, items, Direction::Scatter, &given))
    }

    /// Prepares a cache, so that its first transfer costs no more than later ones.
    fn register(&self, py: Python<'_>, cache: &Bound<'_, PyPagedCache>) -> PyResult<()> {
        guard(py, || {
            let engine = self.engine.get("Engine")?;
            let (cache, id) = (cache.get(), self.id);
            Ok(detached(py, || cache.registered(id, engine).map(drop))?)
        })
    }

    /// Makes a pool of slabs in a file or on a dax device and becomes its writer.
    #[pyo3(signature = (slab_bytes, path=None, *, size=None, offset=None, replace=false))]
    fn create_pool(
        &self,
        py: Python<'_>,
        slab_bytes: &Bound<'_, PyAny>,
        path: Option<std::path::PathBuf>,
        size: Option<&Bound<'_, PyAny>>,
        offset: Option<&Bound<'_, PyAny>>,
        replace: bool,
    ) -> PyResult<PyPool> {
        guard(py, || {
            let slab_bytes = args::positive(slab_bytes, "slab_bytes")?;
            let engine = self.engine.get("Engine")?;
            let pool = crate::pool::window(engine, path, size, offset)?;
            let made = detached(py, || Ok(engine.create_pool(&pool, slab_bytes, replace)?))?;
            Ok(PyPool::new(made, engine.clone()))
        })
    }

    /// Opens a pool that exists, to read it or, one process at a time, to add to it.
    #[pyo3(signature = (path=None, *, writable=false, size=None, offset=None))]
    fn open_pool(
        &self,
        py: Python<'_>,
        path: Option<std::path::PathBuf>,
        writable: bool,
        size: Option<&Bound<'_, PyAny>>,
        offset: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyPool> {
        guard(py, || {
            let engine = self.engine.get("Engine")?;
            let pool = crate::pool::window(engine, path, size, offset)?;
            let opened = detached(py, || Ok(engine.open_pool(&pool, writable)?))?;
            Ok(PyPool::new(opened, engine.clone()))
        })
    }

    /// The mover of its caches: `native` or `fallback`.
    #[getter]
    fn backend(&self) -> &'static str {
        self.engine.backend()
    }

    /// The memory it serves: `host` or `cuda:N`.
    #[getter]
    fn device(&self) -> String {
        self.engine.place().to_string()
    }

    /// Tokens of a slab where a call does not say.
    #[getter]
    fn chunk_tokens(&self) -> u32 {
        self.engine.config().transfer.kv_chunk_tokens
    }

    /// The configuration in force, as TOML.
    #[getter]
    fn config(&self, py: Python<'_>) -> PyResult<String> {
        guard(py, || Ok(self.engine.config().to_toml()?))
    }

    fn __repr__(&self) -> String {
        format!(
            "Engine(device={:?}, backend={:?}, chunk_tokens={})",
            self.device(),
            self.backend(),
            self.chunk_tokens()
        )
    }

    fn __reduce__(&self, py: Python<'_>) -> PyResult<()> {
        Err(no_pickle(py, "Engine", "open one with the same configuration in the other process"))
    }
}
