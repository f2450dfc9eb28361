//! `Engine`: stores and loads of registered caches.

use std::sync::atomic::{AtomicU64, Ordering};

use maru_cxl::Slab;
use maru_layout::{Direction, Fingerprint, SlotMapping};
use maru_transfer::config::Config;
use maru_transfer::{Place, Stream, Transfer, TransferEngine, TransferRequest};
use pyo3::prelude::*;
use pyo3::types::PyRange;

use crate::args;
use crate::cache::PyPagedCache;
use crate::errors::{Fault, Result, detached, guard};
use crate::memory::with_context;
use crate::pool::PyPool;
use crate::process::{Owned, claim_cuda, cuda_allowed, process};
use crate::region::{PySlab, no_pickle};
use crate::tensor::{Tensor, stream_of};
use crate::transfer::PyTransfer;
use crate::words::Words;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Moves slabs of caches on one device, by one configuration.
#[pyclass(module = "maru_kv_ops", name = "Engine", frozen)]
pub(crate) struct PyEngine {
    engine: Owned<TransferEngine>,
    id: u64,
}

/// One slab of a call, before the GIL is released.
struct Item {
    slots: SlotMapping,
    slab: SlabSource,
    tokens: Option<u64>,
    keep: Vec<Py<PyAny>>,
}

enum SlabSource {
    Ours(Slab),
    Array { addr: u64, bytes: u64, on_host: bool, owner: Py<PyAny> },
}

/// What every slab of a call has in common.
#[derive(Clone, Copy, Default)]
struct Options {
    skip: u64,
    partial: bool,
    layers: Option<(u32, u32)>,
    layer_group: Option<u32>,
    tokens: Option<u64>,
    fingerprint: Option<u64>,
    raw: bool,
}

/// The options as they came.
#[derive(Clone, Copy)]
struct Given<'a, 'py> {
    skip_tokens: Option<&'a Bound<'py, PyAny>>,
    partial: bool,
    layers: Option<&'a Bound<'py, PyAny>>,
    layer_group: Option<&'a Bound<'py, PyAny>>,
    slab_tokens: Option<&'a Bound<'py, PyAny>>,
    fingerprint: Option<&'a Bound<'py, PyAny>>,
    raw: bool,
    stream: Option<&'a Bound<'py, PyAny>>,
}

impl Given<'_, '_> {
    fn read(&self) -> Result<Options> {
        let group = args::optional(self.layer_group, "layer_group")?;
        let fingerprint = self.fingerprint.filter(|f| !f.is_none());
        let fingerprint = fingerprint.map(|f| f.extract::<u64>()).transpose();
        Ok(Options {
            skip: self.skip_tokens.map_or(Ok(0), |s| args::count(s, "skip_tokens"))?,
            partial: self.partial,
            layers: self.layers.filter(|l| !l.is_none()).map(layer_range).transpose()?,
            layer_group: group.map(|g| u32::try_from(g).unwrap_or(u32::MAX)),
            tokens: args::optional(self.slab_tokens, "slab_tokens")?,
            fingerprint: fingerprint
                .map_err(|_| Fault::wrong_type("fingerprint is no unsigned 64-bit int"))?,
            raw: self.raw,
        })
    }
}

/// A layer, `(first, count)`, or a range.
fn layer_range(object: &Bound<'_, PyAny>) -> Result<(u32, u32)> {
    let fit = |n: u64, name: &str| {
        u32::try_from(n).map_err(|_| Fault::value(format!("{name} is {n}, beyond 32 bits")))
    };
    if let Ok(range) = object.cast::<PyRange>() {
        let (start, stop) = (range.getattr("start")?, range.getattr("stop")?);
        let (start, stop) = (args::count(&start, "layers.start")?, args::count(&stop, "layers.stop")?);
        if range.getattr("step")?.extract::<i64>()? != 1 || stop <= start {
            return Err(Fault::value(format!(
                "layers is {}; a range of at least one layer with step 1 is needed",
                range.str()?
            ))
            .into());
        }
        return Ok((fit(start, "layers.start")?, fit(stop - start, "layers")?));
    }
    if let Ok((first, count)) = object.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() {
        return Ok((
            fit(args::count(&first, "layers[0]")?, "layers[0]")?,
            fit(args::positive(&count, "layers[1]")?, "layers[1]")?,
        ));
    }
    Ok((fit(args::count(object, "layers")?, "layers")?, 1))
}

impl PyEngine {
    fn item(
        &self,
        cache: &Bound<'_, PyPagedCache>,
        slots: &Bound<'_, PyAny>,
        slab: &Bound<'_, PyAny>,
        direction: Direction,
        options: &Options,
    ) -> Result<Item> {
        let place = self.engine.place();
        let (slots, slots_owner) = Words::of(slots, "slots")?.slots("slots", place)?;
        let mut keep: Vec<Py<PyAny>> = slots_owner.into_iter().collect();
        let stores = direction == Direction::Gather;
        if let Ok(ours) = slab.cast::<PySlab>() {
            let ours = ours.get().slab();
            if stores && ours.is_read_only() {
                return Err(Fault::value("slab is read-only and would be written").into());
            }
            return Ok(Item { slots, slab: SlabSource::Ours(ours.clone()), tokens: options.tokens, keep });
        }
        let paged = cache.get().paged();
        let tensor = Tensor::of(slab, "slab")?;
        if stores && tensor.read_only {
            return Err(Fault::value("slab is read-only and would be written").into());
        }
        if !tensor.is_contiguous() {
            return Err(Fault::value(format!("slab has {tensor}; it must be contiguous")).into());
        }
        if let Place::Cuda(_) = tensor.place {
            tensor.expect_place("slab", place)?;
        }
        let (found, wanted) = (tensor.element.kv().map_err(|e| e.of("slab"))?, paged.layout().dtype());
        if !options.raw && !found.moves_as(wanted) {
            let message = format!(
                "the slab holds {found}, the paged cache {wanted}; pass raw=True to move bytes regardless"
            );
            return Err(Fault { kind: "dtype_mismatch", message }.into());
        }
        let tokens = options.tokens.or(match tensor.rank() {
            4 => Some(tokens_of_shape(&tensor, cache, found.size())?),
            _ => None,
        });
        let bytes = tensor
            .count()?
            .checked_mul(found.size())
            .ok_or_else(|| Fault::overflow("the slab's size does not fit 64 bits"))?;
        let owner = tensor.owner.clone_ref(slab.py());
        keep.push(tensor.owner);
        let slab =
            SlabSource::Array { addr: tensor.addr, bytes, on_host: tensor.place == Place::Host, owner };
        Ok(Item { slots, slab, tokens, keep })
    }

    fn transfer(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        items: &[(Bound<'_, PyAny>, Bound<'_, PyAny>)],
        direction: Direction,
        given: Given<'_, '_>,
    ) -> Result<PyTransfer> {
        let engine = self.engine.get("Engine")?;
        let options = given.read()?;
        if direction == Direction::Scatter && cache.get().is_read_only() {
            return Err(Fault::value("the cache's tensors are read-only and would be written").into());
        }
        let mut read = Vec::with_capacity(items.len());
        let mut keep = vec![cache.clone().into_any().unbind()];
        for (i, (slots, slab)) in items.iter().enumerate() {
            let mut item = self.item(cache, slots, slab, direction, &options).map_err(|e| match e {
                crate::errors::Error::Fault(fault) if items.len() > 1 => fault.of(format!("item {i}")).into(),
                e => e,
            })?;
            keep.append(&mut item.keep);
            read.push(item);
        }
        let place = engine.place();
        let stream = stream_of(py, place, cache.get().is_torch(), given.stream)?;
        let (cache, id) = (cache.get(), self.id);
        let parts = detached(py, move || {
            let cache = cache.registered(id, engine)?;
            let mut requests = Vec::with_capacity(read.len());
            for item in read {
                let slab = item.slab.open(place)?;
                let request = match direction {
                    Direction::Gather => TransferRequest::gather(&cache, item.slots, &slab),
                    Direction::Scatter => TransferRequest::scatter(&cache, item.slots, &slab),
                };
                // SAFETY: torch's current stream, the default one, or a live one as the caller states.
                let stream = unsafe { Stream::cuda(stream) };
                let mut request = request.skip_tokens(options.skip).partial(options.partial).on(stream);
                if let Some(tokens) = item.tokens {
                    request = request.slab_tokens(tokens);
                }
                if let Some(fingerprint) = options.fingerprint {
                    request = request.stored_as(Fingerprint(fingerprint));
                }
                requests.push(request);
            }
            let layers = u32::try_from(cache.paged().layers()).unwrap_or(u32::MAX);
            submit(engine, requests, options, layers)
        })?;
        process().reap(py);
        Ok(PyTransfer::new(parts, keep))
    }
}

impl SlabSource {
    fn open(self, place: Place) -> std::result::Result<Slab, Fault> {
        match self {
            SlabSource::Ours(slab) => Ok(slab),
            SlabSource::Array { addr, bytes, on_host, owner } => {
                let memory = &process().memory;
                let slab = match place {
                    Place::Cuda(device) => {
                        with_context(place, || memory.device_slab(addr, bytes, device, on_host))
                    }
                    _ => memory.host_slab(addr, bytes, Some(owner)),
                };
                slab.map_err(|e| e.of("slab"))
            }
        }
    }
}

/// One submission, or one for each group of layers, in order.
fn submit(
    engine: &TransferEngine,
    requests: Vec<TransferRequest>,
    options: Options,
    layers: u32,
) -> std::result::Result<Vec<(u64, u64, Transfer)>, Fault> {
    let (first, count) = options.layers.unwrap_or((0, layers));
    let with = |first: u32, count: u32| -> Vec<TransferRequest> {
        requests.iter().map(|r| r.clone().layers(first, count)).collect()
    };
    let Some(group) = options.layer_group else {
        let transfer = match options.layers {
            None => engine.submit_many(&requests)?,
            Some((first, count)) => engine.submit_many(&with(first, count))?,
        };
        return Ok(vec![(first.into(), count.into(), transfer)]);
    };
    // Everything is checked before the first group is begun.
    for request in with(first, count) {
        request.resolve()?;
    }
    let end = u64::from(first) + u64::from(count);
    let mut parts: Vec<(u64, u64, Transfer)> = Vec::new();
    let mut at = first;
    while u64::from(at) < end {
        let n = group.min(u32::try_from(end - u64::from(at)).unwrap_or(group));
        match engine.submit_many(&with(at, n)) {
            Ok(transfer) => parts.push((at.into(), n.into(), transfer)),
            Err(e) => {
                // Nothing of a failed call is in flight when it returns; dropping a transfer waits for it.
                drop(parts);
                return Err(e.into());
            }
        }
        at = at.saturating_add(n);
    }
    Ok(parts)
}

/// A slab given with its shape must have the cache's.
fn tokens_of_shape(
    tensor: &Tensor,
    cache: &Bound<'_, PyPagedCache>,
    element: u64,
) -> std::result::Result<u64, Fault> {
    let paged = cache.get().paged();
    let row = paged.layout().token_bytes();
    let needed = [paged.planes(), paged.layers(), row / element.max(1)];
    let found = [tensor.len_of(0), tensor.len_of(1), tensor.len_of(3)];
    match found == needed && row.is_multiple_of(element.max(1)) {
        true => Ok(tensor.len_of(2)),
        false => Err(Fault {
            kind: "layout_mismatch",
            message: format!(
                "slab has shape {:?}; ({}, {}, tokens, {}) is needed",
                tensor.shape, needed[0], needed[1], needed[2]
            ),
        }),
    }
}

/// `(slots, slab)` pairs.
fn pairs<'py>(items: &Bound<'py, PyAny>) -> Result<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
    let wrong = || Fault::wrong_type("items must be a list of (slots, slab) pairs");
    let mut pairs = Vec::new();
    for item in items.try_iter().map_err(|_| wrong())? {
        pairs.push(item?.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>().map_err(|_| wrong())?);
    }
    Ok(pairs)
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
    #[pyo3(signature = (cache, slots, slab, *, skip_tokens=None, partial=false, layers=None, layer_group=None,
        slab_tokens=None, fingerprint=None, raw=false, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "options by keyword")]
    fn store(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        slots: &Bound<'_, PyAny>,
        slab: &Bound<'_, PyAny>,
        skip_tokens: Option<&Bound<'_, PyAny>>,
        partial: bool,
        layers: Option<&Bound<'_, PyAny>>,
        layer_group: Option<&Bound<'_, PyAny>>,
        slab_tokens: Option<&Bound<'_, PyAny>>,
        fingerprint: Option<&Bound<'_, PyAny>>,
        raw: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyTransfer> {
        let given =
            Given { skip_tokens, partial, layers, layer_group, slab_tokens, fingerprint, raw, stream };
        let items = [(slots.clone(), slab.clone())];
        guard(py, || self.transfer(py, cache, &items, Direction::Gather, given))
    }

    /// Slab → paged cache.
    #[pyo3(signature = (cache, slots, slab, *, skip_tokens=None, partial=false, layers=None, layer_group=None,
        slab_tokens=None, fingerprint=None, raw=false, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "options by keyword")]
    fn load(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        slots: &Bound<'_, PyAny>,
        slab: &Bound<'_, PyAny>,
        skip_tokens: Option<&Bound<'_, PyAny>>,
        partial: bool,
        layers: Option<&Bound<'_, PyAny>>,
        layer_group: Option<&Bound<'_, PyAny>>,
        slab_tokens: Option<&Bound<'_, PyAny>>,
        fingerprint: Option<&Bound<'_, PyAny>>,
        raw: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyTransfer> {
        let given =
            Given { skip_tokens, partial, layers, layer_group, slab_tokens, fingerprint, raw, stream };
        let items = [(slots.clone(), slab.clone())];
        guard(py, || self.transfer(py, cache, &items, Direction::Scatter, given))
    }

    /// Stores of several slabs of one cache with one mover; every one is checked before the first is begun.
    #[pyo3(signature = (cache, items, *, partial=false, layers=None, layer_group=None, slab_tokens=None,
        fingerprint=None, raw=false, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "options by keyword")]
    fn store_many(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        items: &Bound<'_, PyAny>,
        partial: bool,
        layers: Option<&Bound<'_, PyAny>>,
        layer_group: Option<&Bound<'_, PyAny>>,
        slab_tokens: Option<&Bound<'_, PyAny>>,
        fingerprint: Option<&Bound<'_, PyAny>>,
        raw: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyTransfer> {
        let given =
            Given { skip_tokens: None, partial, layers, layer_group, slab_tokens, fingerprint, raw, stream };
        guard(py, || self.transfer(py, cache, &pairs(items)?, Direction::Gather, given))
    }

    /// Loads of several slabs of one cache with one mover; every one is checked before the first is begun.
    #[pyo3(signature = (cache, items, *, partial=false, layers=None, layer_group=None, slab_tokens=None,
        fingerprint=None, raw=false, stream=None))]
    #[allow(clippy::too_many_arguments, reason = "options by keyword")]
    fn load_many(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyPagedCache>,
        items: &Bound<'_, PyAny>,
        partial: bool,
        layers: Option<&Bound<'_, PyAny>>,
        layer_group: Option<&Bound<'_, PyAny>>,
        slab_tokens: Option<&Bound<'_, PyAny>>,
        fingerprint: Option<&Bound<'_, PyAny>>,
        raw: bool,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyTransfer> {
        let given =
            Given { skip_tokens: None, partial, layers, layer_group, slab_tokens, fingerprint, raw, stream };
        guard(py, || self.transfer(py, cache, &pairs(items)?, Direction::Scatter, given))
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
