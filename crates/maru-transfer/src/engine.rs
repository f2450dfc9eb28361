//! The engine: one configuration, one place, the movers that serve it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use maru_cxl::Slab;
use maru_layout::{CopyJob, Direction};

use crate::backend::{Backend, DeviceBackend, HostBackend, NativeBackend, TransferBackend};
use crate::config::{BackendChoice, Config, DeviceChoice, TransferConfig};
use crate::registered::Mover;
use crate::{Completion, PagedCache, Place, RegisteredCache, Transfer, TransferError, TransferRequest};

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
        let Some(first) = requests.first() else {
            return Ok(Transfer::new(Completion::Done, Vec::new(), self.backend(), "none", 0));
        };
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
        let mut jobs: Vec<CopyJob> =
            requests.iter().map(TransferRequest::resolve).collect::<Result<_, _>>()?;
        let mover = pick(cache, &jobs)?;
        let slabs: Vec<Slab> = requests.iter().map(|r| r.slab().clone()).collect();
        jobs.retain(|job| !job.is_empty());
        if self.0.config.transfer.enable_fused_load && matches!(*mover.backend, Backend::Native(_)) {
            jobs = by_layer(jobs);
        }
        let name = mover.backend.name();
        if jobs.is_empty() {
            return Ok(Transfer::new(Completion::Done, slabs, name, "none", 0));
        }
        let bytes = jobs.iter().fold(0u64, |sum, job| sum.saturating_add(job.bytes()));
        // SAFETY: the cache's memory is valid by the promise made to `PagedCache::new`; the slabs' by the clones
        // that the returned `Transfer` holds.
        let enqueued = unsafe { mover.backend.enqueue(&mover.prepared, &jobs, stream) }?;
        Ok(Transfer::new(enqueued.completion, slabs, name, enqueued.strategy, bytes))
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

/// A batch of loads one layer after the other, the same layer of all slabs side by side, so that the first layers
/// are there first (`enable_fused_load`). A batch with stores in it keeps its order.
fn by_layer(jobs: Vec<CopyJob>) -> Vec<CopyJob> {
    if jobs.iter().any(|job| job.direction() == Direction::Gather) {
        return jobs;
    }
    let mut layers: Vec<(u32, CopyJob)> = jobs.iter().flat_map(CopyJob::single_layers).collect();
    layers.sort_by_key(|(layer, _)| *layer);
    layers.into_iter().map(|(_, job)| job).collect()
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
