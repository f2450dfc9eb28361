//! One trait, the movers behind it, and the enum that picks one at run time.
//!
//! Trait, enum and implementations live in one crate because `enum_dispatch` generates nothing across
//! crates; each implementation is a line that forwards to its mover's inherent method of another name.

mod device;
mod host;
mod native;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use enum_dispatch::enum_dispatch;
use maru_layout::CopyJob;

use crate::{Completion, Event, PagedCache, Stream, TransferError};

pub use device::DeviceBackend;
pub use host::HostBackend;
pub use native::NativeBackend;

/// What a mover can take, so that callers ask instead of trying.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Slabs in memory that is not registered with the device.
    pub unregistered_slab: bool,
    /// Slot lists in device memory.
    pub device_slots: bool,
    /// `enqueue` returns before the bytes are moved.
    pub asynchronous: bool,
}

impl Capabilities {
    /// Nothing but the minimum: host-resident slots, synchronous.
    pub const fn new() -> Self {
        Capabilities { unregistered_slab: false, device_slots: false, asynchronous: false }
    }

    /// With or without unregistered slabs.
    #[must_use]
    pub const fn with_unregistered_slab(mut self, can: bool) -> Self {
        self.unregistered_slab = can;
        self
    }

    /// With or without device-resident slots.
    #[must_use]
    pub const fn with_device_slots(mut self, can: bool) -> Self {
        self.device_slots = can;
        self
    }

    /// Asynchronous or not.
    #[must_use]
    pub const fn with_asynchronous(mut self, is: bool) -> Self {
        self.asynchronous = is;
        self
    }
}

/// What a mover made of a cache when it was registered; handed back to it with every job of that cache.
pub type Prepared = Option<Arc<dyn Any + Send + Sync>>;

/// A mover: puts the bytes of a [`CopyJob`] where they belong.
#[enum_dispatch]
pub trait TransferBackend: Send + Sync + fmt::Debug {
    /// `native`, `fallback`, or the name of a mover of your own.
    fn name(&self) -> &'static str;

    /// What it can take.
    fn capabilities(&self) -> Capabilities;

    /// Called once when a cache is registered; a mover prepares its tables here, or refuses the cache.
    ///
    /// # Errors
    /// Why it cannot move this cache.
    fn prepare(&self, cache: &PagedCache) -> Result<Prepared, TransferError>;

    /// Moves the bytes of jobs of one cache, ordered on `stream`. None of them is empty. `prepared` is what
    /// [`TransferBackend::prepare`] returned for the cache.
    ///
    /// If it fails half-way it returns only when nothing is in flight any more.
    ///
    /// # Errors
    /// What went wrong; slots of a device-resident list are reported by the [`Completion`].
    ///
    /// # Safety
    /// The memory that the jobs address is valid, as [`PagedCache::new`] demands of the cache and as a live
    /// slab guarantees, until the completion is done.
    unsafe fn enqueue(
        &self,
        prepared: &Prepared,
        jobs: &[CopyJob],
        stream: Stream,
    ) -> Result<Enqueued, TransferError>;

    /// Moves the jobs of several steps, each in the order given, and says of each when it is over: as many values as
    /// steps, none over before those in front of it. A mover that knows streams waits with a step for its event. What is here does neither: it enqueues
    /// one step after the other and refuses events.
    ///
    /// # Errors
    /// As [`TransferBackend::enqueue`]; [`TransferError::NotAvailable`] for events.
    ///
    /// # Safety
    /// As [`TransferBackend::enqueue`]; the events are live.
    unsafe fn enqueue_steps(
        &self,
        prepared: &Prepared,
        steps: &[Step<'_>],
        stream: Stream,
    ) -> Result<Vec<Enqueued>, TransferError> {
        if steps.iter().any(|step| step.after.is_some()) {
            let reason = "it moves host memory or knows no streams; wait for the layers before submitting";
            let what = format!("events of layers with the {} mover", self.name());
            return Err(TransferError::not_available(what, reason));
        }
        // SAFETY: the caller's promises, passed on.
        one_by_one(steps, |step| unsafe { self.enqueue(prepared, step.jobs, stream) })
    }

    /// Moves jobs of the same layers in the order of the layers by one submission, and says of each run of layers when
    /// it is there: a run ends before every layer of the cache that `layers_per_run` divides. `None`, with nothing begun,
    /// where the mover cannot: the engine then cuts the jobs into steps. What is here never can.
    ///
    /// # Errors
    /// As [`TransferBackend::enqueue`].
    ///
    /// # Safety
    /// As [`TransferBackend::enqueue`].
    unsafe fn enqueue_by_layer(
        &self,
        prepared: &Prepared,
        jobs: &[CopyJob],
        layers_per_run: u32,
        stream: Stream,
    ) -> Result<Option<Vec<Enqueued>>, TransferError> {
        let _ = (prepared, jobs, layers_per_run, stream);
        Ok(None)
    }
}

/// Jobs that go together.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// What is moved; not empty.
    pub jobs: &'a [CopyJob],
    /// What they wait for besides the stream.
    pub after: Option<Event>,
}

/// Enqueues steps in turn. If one fails, waits for those before it.
fn one_by_one(
    steps: &[Step<'_>],
    enqueue: impl Fn(&Step<'_>) -> Result<Enqueued, TransferError>,
) -> Result<Vec<Enqueued>, TransferError> {
    let mut queued: Vec<Enqueued> = Vec::with_capacity(steps.len());
    for step in steps {
        match enqueue(step) {
            Ok(enqueued) => queued.push(enqueued),
            Err(error) => {
                for Enqueued { completion, .. } in &mut queued {
                    if let Err(other) = completion.wait() {
                        tracing::error!(error = %other, "an earlier step of a failed transfer had failed too");
                    }
                }
                return Err(error);
            }
        }
    }
    Ok(queued)
}

/// What [`TransferBackend::enqueue`] did.
#[derive(Debug)]
pub struct Enqueued {
    /// How far it got.
    pub completion: Completion,
    /// How it moves the bytes: `direct`, `staged`, `copy_engine`, `host`, or a word of your own.
    pub strategy: &'static str,
}

/// The movers this crate knows, and one that is yours.
#[enum_dispatch(TransferBackend)]
#[derive(Debug)]
#[non_exhaustive]
pub enum Backend {
    /// The maru-native kernel.
    Native(NativeBackend),
    /// Host memory, in Rust.
    Host(HostBackend),
    /// Driver copies on a device.
    Device(DeviceBackend),
    /// A mover of the user's own.
    Other(Box<dyn TransferBackend>),
}

impl TransferBackend for Box<dyn TransferBackend> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }

    fn prepare(&self, cache: &PagedCache) -> Result<Prepared, TransferError> {
        (**self).prepare(cache)
    }

    unsafe fn enqueue(
        &self,
        prepared: &Prepared,
        jobs: &[CopyJob],
        stream: Stream,
    ) -> Result<Enqueued, TransferError> {
        // SAFETY: the caller's promise is passed on unchanged.
        unsafe { (**self).enqueue(prepared, jobs, stream) }
    }

    unsafe fn enqueue_steps(
        &self,
        prepared: &Prepared,
        steps: &[Step<'_>],
        stream: Stream,
    ) -> Result<Vec<Enqueued>, TransferError> {
        // SAFETY: as above.
        unsafe { (**self).enqueue_steps(prepared, steps, stream) }
    }

    unsafe fn enqueue_by_layer(
        &self,
        prepared: &Prepared,
        jobs: &[CopyJob],
        layers_per_run: u32,
        stream: Stream,
    ) -> Result<Option<Vec<Enqueued>>, TransferError> {
        // SAFETY: as above.
        unsafe { (**self).enqueue_by_layer(prepared, jobs, layers_per_run, stream) }
    }
}
