//! The engine: one configuration, one place, the movers that serve it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use maru_cxl::Slab;
use maru_layout::{CopyJob, Direction, JobBatch, LayoutError};

use crate::backend::{Backend, DeviceBackend, Enqueued, HostBackend, NativeBackend, Step, TransferBackend};
use crate::config::{BackendChoice, Config, DeviceChoice, TransferConfig};
use crate::layers::{by_layer, layers_of_a_step, runs};
use crate::registered::Mover;
use crate::transfer::Layers;
use crate::{
    Completion, Event, PagedCache, Place, RegisteredCache, Stream, Transfer, TransferError, TransferRequest,
};

/// Moves slabs of registered caches. Cheap to clone; belongs to one device.
#[derive(Clone, Debug)]
pub struct TransferEngine(Arc<Engine>);

#[derive(Debug)]
struct Engine {
    id: u64,
    config: Config,
    place: Place,
    mover: Arc<Backend>,
    second: Option<Arc<Backend>>,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl TransferEngine {
    /// Opens the device and the movers the configuration asks for. Pools are opened apart, see
    /// [`TransferEngine::open_pool`].
    ///
    /// # Errors
    /// [`TransferError::Config`] for contradictions, [`TransferError::NotAvailable`] when what was asked for
    /// by name cannot run; only `auto` degrades, and logs the reason.
    pub fn open(config: &Config) -> Result<Self, TransferError> {
        let config = config.clone().checked()?;
        config.log_warnings();
        let (place, mover, second) = choose(&config)?;
        Ok(Self::assemble(config, place, mover, second))
    }

    /// An engine around a mover of your own, for caches in `place`.
    ///
    /// # Errors
    /// [`TransferError::Config`] for contradictions.
    pub fn with_backend(
        config: &Config,
        place: Place,
        backend: Box<dyn TransferBackend>,
    ) -> Result<Self, TransferError> {
        let config = config.clone().checked()?;
        config.log_warnings();
        Ok(Self::assemble(config, place, Backend::Other(backend), None))
    }

    fn assemble(config: Config, place: Place, mover: Backend, second: Option<Backend>) -> Self {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (mover, second) = (Arc::new(mover), second.map(Arc::new));
        TransferEngine(Arc::new(Engine { id, config, place, mover, second }))
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The memory it serves.
    pub fn place(&self) -> Place {
        self.0.place
    }

    /// The mover that registered caches get.
    pub fn backend(&self) -> &'static str {
        self.0.mover.name()
    }

    /// Chooses the mover of a cache and prepares its plan for slabs of `kv_chunk_tokens` tokens. Under `auto` a
    /// cache that the kernel cannot take (counts beyond 32 bits) goes to the fallback, with a warning.
    ///
    /// # Errors
    /// [`TransferError::WrongPlace`] for a cache in other memory, and what the mover refuses.
    pub fn register(&self, cache: PagedCache) -> Result<RegisteredCache, TransferError> {
        if cache.place() != self.0.place {
            return Err(TransferError::WrongPlace { found: cache.place(), expected: self.0.place });
        }
        let second = self.0.second.as_ref().map(|second| Mover::of(second, &cache)).transpose()?;
        let (mover, second) = match (Mover::of(&self.0.mover, &cache), second) {
            (Err(error), Some(second)) if error.kind() == "not_available" => {
                tracing::warn!(backend = second.backend.name(), %error, "the cache takes another mover");
                (second, None)
            }
            (mover, second) => (mover?, second),
        };
        tracing::info!(
            backend = mover.backend.name(),
            place = %self.0.place,
            layers = cache.layers(),
            planes = cache.planes(),
            slots = cache.num_slots(),
            "registered a paged cache"
        );
        RegisteredCache::new(cache, self.0.id, mover, second, self.0.config.transfer.kv_chunk_tokens.into())
    }

    /// Moves one slab. Host transfers are done when this returns; device transfers are queued.
    ///
    /// # Errors
    /// As [`TransferRequest::resolve`], with nothing changed; and what the mover reports, with nothing in
    /// flight.
    pub fn submit(&self, request: &TransferRequest) -> Result<Transfer, TransferError> {
        self.submit_many(std::slice::from_ref(request))
    }

    /// Moves any number of slabs of one cache with one mover. Every request is checked before the first is
    /// begun.
    ///
    /// # Errors
    /// As [`TransferEngine::submit`]; [`TransferError::MixedBatch`] for slabs of several caches,
    /// [`TransferError::MixedStreams`] for several streams.
    pub fn submit_many(&self, requests: &[TransferRequest]) -> Result<Transfer, TransferError> {
        let Some(batch) = self.check(requests)? else { return Ok(self.nothing()) };
        let t = &self.0.config.transfer;
        let loads = batch.jobs.iter().all(|job| job.direction() == Direction::Scatter);
        if t.enable_fused_load && loads && matches!(*batch.mover.backend, Backend::Native(_)) {
            return self.enqueue_by_layer(batch, &[]);
        }
        let layers = Layers { count: batch.layers, per_step: 1, runs: None };
        if batch.jobs.is_empty() {
            return Ok(batch.finished(Vec::new(), layers, "none"));
        }
        let mover = batch.mover;
        // SAFETY: the cache's memory is valid by the promise made to `PagedCache::new`; the slabs' by the clones
        // that the returned `Transfer` holds.
        let enqueued = unsafe { mover.backend.enqueue(&mover.prepared, &batch.jobs, batch.stream) }?;
        Ok(batch.finished(vec![enqueued.completion], layers, enqueued.strategy))
    }

    /// The same layer by layer: the layers of all slabs in order, the first layer of the cache first. The transfer
    /// then tells of each layer when it is there ([`Transfer::layer_done`], [`Transfer::order_before_layer`]);
    /// small layers go together, as many as make a launch worth while. Loads that wait for nothing are one launch where
    /// the kernel moves them directly, which it does under `auto`.
    ///
    /// `after[l]`, where there is one, is an event that layer `l` waits for besides the stream: that of the forward
    /// pass having written the layer's K and V, for a store that goes along with it. With events every layer is
    /// alone, however small.
    ///
    /// With `strategy = "staged"` other staged transfers of the engine wait along with a layer that waits for its event;
    /// under `auto` such transfers go directly.
    ///
    /// Batches of stores and loads of the same slab or pages keep their order within a layer only.
    ///
    /// # Errors
    /// As [`TransferEngine::submit_many`]; [`maru_layout::LayoutError::LayerRange`] for more events than layers,
    /// [`TransferError::NotAvailable`] for events where the mover knows no streams.
    pub fn submit_by_layer(
        &self,
        requests: &[TransferRequest],
        after: &[Option<Event>],
    ) -> Result<Transfer, TransferError> {
        match self.check(requests)? {
            Some(batch) => self.enqueue_by_layer(batch, after),
            None => Ok(self.nothing()),
        }
    }

    fn enqueue_by_layer(&self, batch: Batch<'_>, after: &[Option<Event>]) -> Result<Transfer, TransferError> {
        let events = u32::try_from(after.len()).unwrap_or(u32::MAX);
        if events > batch.layers {
            return Err(LayoutError::LayerRange { first: 0, count: events, layers: batch.layers }.into());
        }
        // With events every layer is alone, however small.
        let per_step = if events > 0 { 1 } else { layers_of_a_step(&batch.jobs) };
        let mover = batch.mover;
        if events == 0
            && let Some(first) = batch.jobs.first()
        {
            // SAFETY: as in `submit_many`.
            let enqueued = unsafe {
                mover.backend.enqueue_by_layer(&mover.prepared, &batch.jobs, per_step, batch.stream)
            }?;
            if let Some(enqueued) = enqueued {
                let layers = runs(first, batch.layers, per_step);
                return Ok(batch.finished_steps(enqueued, layers));
            }
        }
        let cut = by_layer(&batch.jobs, batch.layers, per_step);
        let runs = cut.layers.runs.iter().flatten();
        let event = |layer: &u32| usize::try_from(*layer).ok().and_then(|l| after.get(l).copied().flatten());
        let steps: Vec<Step<'_>> =
            cut.steps.iter().zip(runs).map(|(jobs, run)| Step { jobs, after: event(run) }).collect();
        // SAFETY: as in `submit_many`; the events are live by the promise made to `Event::cuda`.
        let enqueued = unsafe { mover.backend.enqueue_steps(&mover.prepared, &steps, batch.stream) }?;
        Ok(batch.finished_steps(enqueued, cut.layers))
    }

    /// Checks a batch; `None` for no requests at all.
    fn check<'a>(&self, requests: &'a [TransferRequest]) -> Result<Option<Batch<'a>>, TransferError> {
        let Some(first) = requests.first() else { return Ok(None) };
        let cache = first.cache();
        if cache.engine() != self.0.id {
            return Err(TransferError::ForeignCache);
        }
        if let Some(index) = requests.iter().position(|r| !r.cache().is(cache)) {
            return Err(TransferError::MixedBatch { index });
        }
        let stream = first.stream();
        if let Some(index) = requests.iter().position(|r| r.stream() != stream) {
            return Err(TransferError::MixedStreams { index });
        }
        let mut batch = JobBatch::with_capacity(requests.len());
        requests.iter().try_for_each(|request| request.resolve_into(&mut batch))?;
        let mut jobs = batch.finish();
        let mover = pick(cache, &jobs)?;
        let slabs = requests.iter().map(|r| r.slab().clone()).collect();
        jobs.retain(|job| !job.is_empty());
        let layers = u32::try_from(cache.paged().layers()).unwrap_or(u32::MAX);
        Ok(Some(Batch { jobs, slabs, mover, stream, layers }))
    }

    fn nothing(&self) -> Transfer {
        let layers = Layers { count: u32::MAX, per_step: 1, runs: None };
        Transfer::new(Vec::new(), layers, Vec::new(), (self.backend(), "none"), 0)
    }
}

/// Requests of one cache, checked.
struct Batch<'a> {
    jobs: Vec<CopyJob>,
    slabs: Vec<Slab>,
    mover: &'a Mover,
    stream: Stream,
    /// Of the cache.
    layers: u32,
}

impl Batch<'_> {
    fn finished_steps(self, enqueued: Vec<Enqueued>, layers: Layers) -> Transfer {
        let strategy = enqueued.first().map_or("none", |e| e.strategy);
        let steps = enqueued.into_iter().map(|e| e.completion).collect();
        self.finished(steps, layers, strategy)
    }

    fn finished(self, steps: Vec<Completion>, layers: Layers, strategy: &'static str) -> Transfer {
        let bytes = self.jobs.iter().fold(0u64, |sum, job| sum.saturating_add(job.bytes()));
        Transfer::new(steps, layers, self.slabs, (self.mover.backend.name(), strategy), bytes)
    }
}

/// The cache's mover, or its second one for slabs the first cannot take.
fn pick<'a>(cache: &'a RegisteredCache, jobs: &[CopyJob]) -> Result<&'a Mover, TransferError> {
    let mover = cache.mover();
    let unregistered = jobs.iter().any(|j| j.slab().device.is_none());
    if !unregistered || mover.backend.capabilities().unregistered_slab {
        return Ok(mover);
    }
    match cache.second() {
        Some(second) => {
            if cache.first_warning() {
                let backend = second.backend.name();
                tracing::warn!(
                    backend,
                    "slabs whose memory is not registered with the device take another mover"
                );
            }
            Ok(second)
        }
        None => Err(TransferError::not_available(
            format!("the {} backend for this slab", mover.backend.name()),
            "its memory is not registered with the device",
        )),
    }
}

type Chosen = (Place, Backend, Option<Backend>);

/// Place and movers for a configuration.
fn choose(config: &Config) -> Result<Chosen, TransferError> {
    let t = &config.transfer;
    match (t.device, t.backend) {
        (DeviceChoice::Host, BackendChoice::Native) => Err(TransferError::not_available(
            "the native backend",
            "it moves GPU memory, and device = \"host\"; use backend = \"auto\" or a cuda device",
        )),
        (DeviceChoice::Host, _) => host(t),
        (DeviceChoice::Cuda(n), _) => cuda(n, t),
        (DeviceChoice::Auto, backend) => match cuda(0, t) {
            Err(TransferError::NotAvailable { reason, .. }) if backend != BackendChoice::Native => {
                tracing::info!(%reason, "serving host memory");
                host(t)
            }
            chosen => chosen,
        },
    }
}

fn host(t: &TransferConfig) -> Result<Chosen, TransferError> {
    let threads = usize::try_from(t.host_threads).unwrap_or(usize::MAX);
    Ok((Place::Host, Backend::Host(HostBackend::new(threads)?), None))
}

/// The kernel if it was asked for or can run, with the fallback behind it for slabs it cannot take; only
/// `auto` goes without it.
fn cuda(n: u32, t: &TransferConfig) -> Result<Chosen, TransferError> {
    let place = Place::Cuda(n);
    let fallback = || DeviceBackend::open(n).map(Backend::Device);
    match t.backend {
        BackendChoice::Fallback => Ok((place, fallback()?, None)),
        BackendChoice::Native => Ok((place, Backend::Native(NativeBackend::open(n, t)?), None)),
        _ => match NativeBackend::open(n, t) {
            Ok(native) => Ok((place, Backend::Native(native), Some(fallback()?))),
            Err(TransferError::NotAvailable { reason, .. }) => {
                let chosen = (place, fallback()?, None);
                tracing::warn!(%reason, "the native kernel cannot run; the fallback moves");
                if t.enable_fused_load {
                    tracing::warn!("enable_fused_load needs the native kernel and is disabled");
                }
                Ok(chosen)
            }
            Err(e) => Err(e),
        },
    }
}
