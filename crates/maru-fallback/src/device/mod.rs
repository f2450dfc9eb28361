//! The device mover: copies by the driver, layer by layer, no kernel of ours.
//!
//! The way of a job through the files: `slots` makes sure that the tokens are known here, `plan` turns them
//! into copy commands (pure arithmetic), `abilities` knows what the driver has for them, `queue` puts them on a
//! stream, `bounce` stands between the device and a slab that the driver does not know, `completion` says when
//! it is over.
#![allow(unsafe_code)]

mod abilities;
mod bounce;
mod completion;
mod plan;
mod queue;
mod slots;

use std::sync::{Arc, Mutex};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUevent, CUstream};
use maru_driver::stream::OwnStream;
use maru_driver::{Context, DriverError, Health, Tickets, check, stream as streams};
use maru_layout::{CopyJob, JobSlots, Run};

pub use completion::DeviceCopy;

use crate::FallbackError;
use abilities::{Abilities, Memory};
use bounce::Bounce;
use completion::State;
use plan::{Packed, Plan, Work};
use queue::{Queue, Side};

/// Driver functions that are called here, or by cudarc's context. One that is missing would panic when it is
/// called, so all are looked up before.
const SYMBOLS: [&str; 31] = [
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuMemFreeHost",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyAsync",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamGetCtx",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];

/// Events made at once.
const EVENTS: usize = 64;

/// How the device mover works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// Pinned host memory that slabs the driver does not know pass through, made when the first of them is
    /// moved. At least 256 KiB are used.
    pub bounce_bytes: u64,
    /// Nobody writes a slab from the call that loads it until the load is over, not even work queued on the
    /// stream before: lets the driver read it ahead of that work.
    pub stable_slabs: bool,
    /// Use the driver's batched copies if it has them.
    pub batched: bool,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        DeviceOptions { bounce_bytes: 16 << 20, stable_slabs: false, batched: true }
    }
}

impl DeviceOptions {
    /// Sets [`DeviceOptions::bounce_bytes`].
    #[must_use]
    pub fn with_bounce_bytes(mut self, bytes: u64) -> Self {
        self.bounce_bytes = bytes;
        self
    }

    /// Sets [`DeviceOptions::stable_slabs`].
    #[must_use]
    pub fn with_stable_slabs(mut self, stable: bool) -> Self {
        self.stable_slabs = stable;
        self
    }

    /// Sets [`DeviceOptions::batched`].
    #[must_use]
    pub fn with_batched(mut self, batched: bool) -> Self {
        self.batched = batched;
        self
    }
}

/// Moves jobs whose cache is in device memory, and whose slab is in host memory (registered with the driver
/// or not) or in device memory. Cheap to clone; for one context, from any thread.
#[derive(Clone, Debug)]
pub struct DeviceMover {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    bounce: Mutex<Option<Bounce>>,
    tickets: Tickets,
    /// Stands in for the legacy default stream, which takes no batches.
    side: OwnStream,
    abilities: Abilities,
    /// What the driver has refused between host and device, and inside the device.
    refused: [Memory; 2],
    options: DeviceOptions,
    health: Health,
    context: Context,
}

impl DeviceMover {
    /// A mover in the primary context of a device, whatever its compute capability: there is no kernel to run.
    ///
    /// # Errors
    /// As [`DeviceMover::open`], and [`FallbackError::Driver`] when there is no such device.
    pub fn on_device(ordinal: usize, options: DeviceOptions) -> Result<Self, FallbackError> {
        maru_driver::require(&SYMBOLS)?;
        Self::open(Arc::clone(Context::open(ordinal)?.get()), options)
    }

    /// A mover in `context`.
    ///
    /// # Errors
    /// [`FallbackError::NoDriver`] when the driver lacks a function it needs; [`FallbackError::Driver`] when a
    /// stream cannot be made.
    pub fn open(context: Arc<CudaContext>, options: DeviceOptions) -> Result<Self, FallbackError> {
        maru_driver::require(&SYMBOLS)?;
        let context = Context::new(context);
        let current = context.enter()?;
        let abilities = Abilities::of(context.get(), options.batched)?;
        let side = OwnStream::new(&context)?;
        drop(current);
        tracing::debug!(
            device = context.get().ordinal(),
            batch = abilities.batch.map(|b| b.name()),
            slices = abilities.slices.is_some(),
            "device fallback opened"
        );
        let tickets = Tickets::new(context.get(), EVENTS);
        let inner = Inner {
            bounce: Mutex::new(None),
            tickets,
            side,
            abilities,
            refused: Default::default(),
            options,
            health: Health::new(),
            context,
        };
        Ok(DeviceMover { inner: Arc::new(inner) })
    }

    /// The context it moves in.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.inner.context.get()
    }

    /// Puts a transfer on the caller's stream, one layer after the other, or several at once where their
    /// addresses are evenly spaced.
    ///
    /// Returns at once if the slab has a device address and the slots are in host memory. Otherwise:
    ///
    /// * **A slab without a device address** (pageable memory) passes through pinned memory of the mover,
    ///   because what the driver promises of asynchronous copies with such memory differs from version to
    ///   version. A store waits for the stream and is complete when the call returns; a load reads the slab
    ///   during the call, so that the slab may go as soon as it returns, and the cache is written in the
    ///   order of the stream.
    /// * **Slots in device memory** are read back in the order of the stream, which the call waits for, and
    ///   checked before anything is moved.
    ///
    /// While the stream is being captured the copies become nodes of the graph, see
    /// [`DeviceCopy::is_captured`]; neither of the above is possible then.
    ///
    /// # Errors
    /// Before anything is queued: [`FallbackError::ForeignStream`], [`FallbackError::Capturing`],
    /// [`FallbackError::Slots`] for slots in device memory that are out of range or named twice by a load.
    /// [`FallbackError::CopyFailed`] if the driver refuses a copy; what was queued before has then been waited
    /// for. [`FallbackError::Driver`] otherwise; after an error of the kind `context_lost` every later call
    /// returns it.
    ///
    /// # Safety
    /// * `stream` is a live stream, or one of the default ones.
    /// * The planes the job's plan names, its slab and its slots in device memory are what the job says, and
    ///   stay so until the transfer is over (a pageable slab: until the call returns).
    /// * Nobody else writes what the transfer reads, or touches what it writes, until it is over, other than
    ///   ordered by the stream.
    pub unsafe fn copy_on(&self, job: &CopyJob, stream: CUstream) -> Result<DeviceCopy, FallbackError> {
        let inner = &self.inner;
        inner.health.check()?;
        // SAFETY: the caller's promises, passed on.
        let result = unsafe { inner.copy(job, stream) };
        match result {
            Ok(state) => Ok(DeviceCopy::new(inner, state)),
            Err(FallbackError::Driver(error)) => Err(inner.health.note(error).into()),
            Err(error) => {
                if let FallbackError::CopyFailed { source, .. } = &error {
                    inner.health.note(source.clone());
                }
                Err(error)
            }
        }
    }

    /// Makes everything queued on a stream from now on wait for an event, as it was last recorded.
    ///
    /// # Errors
    /// [`FallbackError::Driver`].
    ///
    /// # Safety
    /// Both are live and of this mover's context.
    pub unsafe fn wait_for(&self, event: CUevent, stream: CUstream) -> Result<(), FallbackError> {
        let inner = &self.inner;
        inner.health.check()?;
        let _current = inner.context.enter()?;
        // SAFETY: the caller's promise.
        unsafe { streams::wait_for(event, stream) }.map_err(|error| inner.health.note(error).into())
    }
}

impl Inner {
    /// What the driver can do with slabs there, as far as is known by now.
    fn abilities(&self, side: Side) -> Abilities {
        self.abilities.but(self.memory(side).refused())
    }

    /// Remembers what a queue has learned, so that the next plan does without.
    fn learn(&self, queue: &Queue) {
        self.memory(queue.side()).learn(queue.refused(), self.context.get().ordinal());
    }

    fn memory(&self, side: Side) -> &Memory {
        &self.refused[usize::from(side == Side::Device)]
    }

    /// # Safety
    /// As [`DeviceMover::copy_on`].
    unsafe fn copy(&self, job: &CopyJob, stream: CUstream) -> Result<State, FallbackError> {
        if job.is_empty() {
            return Ok(State::Done);
        }
        let _current = self.context.enter()?;
        if !streams::is_default(stream) {
            // SAFETY: the stream is the caller's promise.
            let owner = unsafe { streams::context(stream) }?;
            if owner != self.context.get().cu_ctx() {
                return Err(FallbackError::ForeignStream { device: self.context.get().ordinal() });
            }
        }
        // SAFETY: the stream is the caller's promise.
        let capturing = unsafe { streams::is_capturing(stream) }?;
        let read_back;
        let job = match job.slots() {
            JobSlots::Host { .. } => job,
            JobSlots::Device { .. } if capturing => {
                return Err(FallbackError::Capturing { what: "slots in device memory have to be read back" });
            }
            // SAFETY: the caller's promises, passed on.
            _ => match unsafe { slots::read_back(job, stream) }? {
                Some(job) => {
                    read_back = job;
                    &read_back
                }
                None => return Ok(State::Done),
            },
        };
        let JobSlots::Host { runs, .. } = job.slots() else { return Ok(State::Done) };
        let slab = job.slab();
        match (slab.device, slab.host) {
            // SAFETY: the caller's promises, passed on.
            (Some(addr), Some(_)) => unsafe {
                self.direct(job, runs, addr, Side::Registered, stream, capturing)
            },
            // SAFETY: as above.
            (Some(addr), None) => unsafe { self.direct(job, runs, addr, Side::Device, stream, capturing) },
            (None, Some(_)) if capturing => {
                Err(FallbackError::Capturing { what: "a slab that is not registered is copied by the host" })
            }
            // SAFETY: as above.
            (None, Some(addr)) => unsafe { self.pageable(job, runs, addr, stream) },
            (None, None) => Err(FallbackError::NoAddress { len: slab.len }),
        }
    }

    /// A slab that the device reaches.
    ///
    /// # Safety
    /// As [`DeviceMover::copy_on`]; the context is current.
    unsafe fn direct(
        &self,
        job: &CopyJob,
        runs: &[Run],
        addr: u64,
        side: Side,
        stream: CUstream,
        capturing: bool,
    ) -> Result<State, FallbackError> {
        // The legacy default stream takes no batches. It is left for a stream that waits for it first, and for
        // which it waits afterwards.
        let fork = streams::is_legacy_default(stream) && self.abilities.batch.is_some();
        let lane = if fork { self.side.get() } else { stream };
        let (ends, stable) = ((job.direction(), side), self.options.stable_slabs);
        let mut queue = Queue::new(self.abilities(side), lane, ends, !capturing, stable);
        let layers = u64::from(job.layer_count());
        let plan = Plan::new(Work::new(job, Packed::of(job, addr), runs, 0, layers), queue.limits());
        if capturing {
            // SAFETY: the caller's promises, passed on. Nothing runs, so nothing is to be waited for.
            return match unsafe { queue_plan(&mut queue, &plan, &mut 0) } {
                Ok(()) => Ok(State::Captured),
                Err(source) => {
                    Err(FallbackError::CopyFailed { layers_done: 0, layers: job.layer_count(), source })
                }
            };
        }
        // Before anything is queued, so that what is queued can always be waited for.
        let ticket = self.tickets.take_event()?;
        if fork {
            // SAFETY: an event of ours; the streams are the caller's and ours.
            let forked = unsafe { ticket.record(stream) };
            // SAFETY: as above.
            let forked = forked.and_then(|()| unsafe { ticket.order_before(lane) });
            if let Err(error) = forked {
                self.tickets.give_back(ticket, false);
                return Err(error.into());
            }
        }
        let mut done = 0;
        // SAFETY: the caller's promises, passed on.
        let queued = unsafe { queue_plan(&mut queue, &plan, &mut done) };
        self.learn(&queue);
        // SAFETY: an event of ours; the stream is the caller's promise or ours.
        let queued = queued.and_then(|()| unsafe { ticket.record(lane) });
        // SAFETY: as above.
        let queued = queued.and_then(|()| if fork { unsafe { ticket.order_before(stream) } } else { Ok(()) });
        match queued {
            Ok(()) => Ok(State::Queued(ticket)),
            Err(error) => {
                // SAFETY: as above.
                let (error, drained) = unsafe { drain(lane, error) };
                self.tickets.give_back(ticket, drained);
                let layers_done = if drained { done } else { 0 };
                Err(FallbackError::CopyFailed { layers_done, layers: job.layer_count(), source: error })
            }
        }
    }
}

/// Queues every unit of a plan; `done` counts the layers that are wholly in the driver's hands.
///
/// # Safety
/// As [`Queue::push`] for all of the plan's commands.
unsafe fn queue_plan(queue: &mut Queue, plan: &Plan<'_>, done: &mut u32) -> Result<(), DriverError> {
    for unit in plan.units() {
        // SAFETY: the caller's promise.
        plan.commands(*unit, |command| unsafe { queue.push(command) })?;
        if queue.is_worth_flushing() {
            // SAFETY: the caller's promise.
            unsafe { queue.flush() }?;
        }
        if queue.is_flushed() {
            *done = u32::try_from(unit.first + unit.count).unwrap_or(u32::MAX);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { queue.flush() }
}

/// Waits for what was queued before an error, so that its memory can be reused, and returns the error to
/// report and whether nothing is in flight any more.
///
/// # Safety
/// The stream is live; its context is current.
unsafe fn drain(stream: CUstream, error: DriverError) -> (DriverError, bool) {
    // SAFETY: the caller's promise.
    let waited = unsafe { streams::synchronize(stream) }.or_else(|_| {
        // SAFETY: waits for the current context.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    });
    match waited {
        Ok(()) => (error, true),
        // Nothing queued there will run any more.
        Err(worse) if worse.is_context_lost() => (worse, false),
        Err(worse) => {
            tracing::error!(error = %worse, "copies may still be in flight after an error");
            (error, false)
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.empty_bounce();
    }
}
