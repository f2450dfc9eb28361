//! The maru-native kernel on one device.

use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use maru_kernel_cuda::{
    CUevent, CUstream, KernelError, LaunchOptions, LaunchStep, Launched, LaunchedRun, PagedCopyKernel,
    PlaneTable, StagedLaunch, StagedMover, StagedOptions, open_context,
};
use maru_layout::{CopyJob, CopyPlan, Pieces};

use super::{Capabilities, DeviceBackend, Enqueued, Prepared, Step, TransferBackend};
use crate::calibration::{Calibration, Choice, cache_dir};
use crate::config::{StrategyChoice, TransferConfig};
use crate::{Completion, Event, PagedCache, Pending, Place, Stream, TransferError};

/// The CUDA kernel of `maru-kernel-cuda`, loaded on one device.
#[derive(Debug)]
pub struct NativeBackend {
    kernel: PagedCopyKernel,
    device: u32,
    options: LaunchOptions,
    /// None for `strategy = "direct"` and where there is no memory for a ring.
    staged: Option<StagedMover>,
    /// What `strategy = "auto"` goes by; none where there is nothing to choose.
    calibration: Option<Calibration>,
    /// Where the calibration found driver copies to be fastest.
    copies: Option<DeviceBackend>,
}

/// What is prepared for a cache.
#[derive(Debug)]
struct Table {
    planes: PlaneTable,
    /// Whether it was said that the ring is too small for its slabs.
    warned: AtomicBool,
}

impl NativeBackend {
    /// Loads the kernel on a device and allocates the ring of the staged strategy, as configured.
    ///
    /// # Errors
    /// [`TransferError::NotAvailable`] with the reason when the kernel cannot run there, or when the staged
    /// strategy was asked for by name and has no ring. [`TransferError::Kernel`] of the kind `context_lost` when
    /// the device's context is lost: no mover can work there then.
    pub fn open(device: u32, config: &TransferConfig) -> Result<Self, TransferError> {
        let load = || PagedCopyKernel::load(open_context(usize::try_from(device).unwrap_or(usize::MAX))?);
        let kernel = load().map_err(|e| unless_lost(e, format!("the native kernel on cuda:{device}")))?;
        let ring = StagedOptions::with_ring_bytes(config.staging_bytes);
        let (staged, calibration) = match config.strategy {
            StrategyChoice::Direct => (None, None),
            _ if config.staging_bytes == 0 => (None, None),
            StrategyChoice::Staged => {
                let what = format!("a ring of {} bytes", config.staging_bytes);
                (Some(StagedMover::new(&kernel, ring).map_err(|e| unless_lost(e, what))?), None)
            }
            _ => match StagedMover::new(&kernel, ring) {
                Ok(mover) => {
                    let found = Calibration::obtain(&kernel, &mover, config, cache_dir().as_deref())?;
                    (Some(mover), Some(found))
                }
                Err(e) if e.kind() == "context_lost" => return Err(e.into()),
                Err(e) => {
                    tracing::warn!(bytes = config.staging_bytes, error = %e, "no ring; transfers go directly");
                    (None, None)
                }
            },
        };
        let options = LaunchOptions::default().with_sm_budget(config.sm_budget);
        let copies = copies(device, calibration.as_ref())?;
        Ok(NativeBackend { kernel, device, options, staged, calibration, copies })
    }

    /// What `strategy = "auto"` goes by; `None` where there is nothing to choose.
    pub fn calibration(&self) -> Option<&Calibration> {
        self.calibration.as_ref()
    }

    /// The same going by another calibration, to compare choices. Nothing changes where there is nothing to choose.
    ///
    /// # Errors
    /// [`TransferError::Fallback`] of the kind `context_lost` only.
    pub fn with_calibration(mut self, calibration: Calibration) -> Result<Self, TransferError> {
        if self.calibration.is_some() {
            self.copies = copies(self.device, Some(&calibration))?;
            self.calibration = Some(calibration);
        }
        Ok(self)
    }

    /// How a batch is to be moved, if it can be. Under `auto` what waits for events goes directly: all transfers
    /// share the ring's stream of kernels, and would wait along.
    fn choose(&self, steps: &[Step<'_>]) -> Choice {
        let Some(calibration) = &self.calibration else { return Choice::Staged };
        if steps.iter().any(|step| step.after.is_some()) {
            return Choice::Direct;
        }
        calibration.choose_batch(steps.iter().flat_map(|step| step.jobs))
    }

    /// The pieces of every job, if this batch is to be staged and can be. A batch of stores and loads,
    /// where one may read what another wrote, goes directly: there its order is that of one stream.
    fn pieces(
        &self,
        steps: &[Step<'_>],
        choice: Choice,
        table: &Table,
    ) -> Option<(&StagedMover, Vec<Vec<Pieces>>)> {
        let mover = self.staged.as_ref()?;
        let mut jobs = steps.iter().flat_map(|step| step.jobs);
        let direction = jobs.next()?.direction();
        if choice != Choice::Staged || jobs.any(|job| job.direction() != direction) {
            return None;
        }
        let cut = |job: &CopyJob| mover.pieces(job).or_else(|| self.explain(mover, job, table));
        let pieces = |step: &Step<'_>| step.jobs.iter().map(cut).collect::<Option<_>>();
        Some((mover, steps.iter().map(pieces).collect::<Option<_>>()?))
    }

    /// Says once per cache that `strategy = "staged"` cannot be followed because the ring is too small.
    fn explain(&self, mover: &StagedMover, job: &CopyJob, table: &Table) -> Option<Pieces> {
        let slab = job.plan().slab();
        let plane = slab.row_bytes().saturating_mul(slab.tokens());
        let asked_for = self.calibration.is_none();
        if asked_for && plane > mover.buffer_bytes() && !table.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                plane_bytes = plane,
                buffer_bytes = mover.buffer_bytes(),
                "strategy = \"staged\" goes directly: one plane of a slab is larger than a buffer of the ring, a \
                 quarter of staging_bytes; set staging_bytes to more than four times plane_bytes"
            );
        }
        None
    }

    /// Steps as chosen, as far as that can be.
    ///
    /// # Safety
    /// As [`TransferBackend::enqueue_steps`].
    unsafe fn enqueue_chosen(
        &self,
        choice: Choice,
        table: &Table,
        steps: &[Step<'_>],
        stream: Stream,
    ) -> Result<Vec<Enqueued>, TransferError> {
        let planes = &table.planes;
        if let (Choice::CopyEngine, Some(copies)) = (choice, &self.copies) {
            // SAFETY: the caller's promises, passed on.
            return unsafe { copies.enqueue_steps(&None, steps, stream) };
        }
        let stream = with_exposed_provenance_mut(stream.handle());
        if let Some((mover, pieces)) = self.pieces(steps, choice, table)
            // SAFETY: the stream is live by the promise made to `Stream::cuda`.
            && !unsafe { self.kernel.is_capturing(stream) }?
        {
            // SAFETY: the caller's promises, passed on; the stream is not being captured.
            return unsafe { self.stage(mover, &pieces, steps, planes, stream) };
        }
        // SAFETY: the caller's promises, passed on.
        unsafe { self.launch(steps, planes, stream) }
    }

    /// Steps through the ring.
    ///
    /// # Safety
    /// As [`TransferBackend::enqueue_steps`]; the stream is not being captured.
    unsafe fn stage(
        &self,
        mover: &StagedMover,
        pieces: &[Vec<Pieces>],
        steps: &[Step<'_>],
        planes: &PlaneTable,
        stream: CUstream,
    ) -> Result<Vec<Enqueued>, TransferError> {
        let steps: Vec<_> = pieces
            .iter()
            .zip(steps)
            .map(|(jobs, step)| LaunchStep { jobs: jobs.as_slice(), after: event(step.after) })
            .collect();
        // SAFETY: the caller's promises; registered memory is page-locked.
        let launched = unsafe { mover.launch_steps(&steps, planes, stream) }?;
        let pending = |launch| Completion::Pending(Box::new(launch));
        Ok(launched
            .into_iter()
            .map(|launch| Enqueued { completion: pending(launch), strategy: "staged" })
            .collect())
    }

    /// Steps by the kernel alone.
    ///
    /// # Safety
    /// As [`TransferBackend::enqueue_steps`].
    unsafe fn launch(
        &self,
        steps: &[Step<'_>],
        planes: &PlaneTable,
        stream: CUstream,
    ) -> Result<Vec<Enqueued>, TransferError> {
        let steps: Vec<_> =
            steps.iter().map(|step| LaunchStep { jobs: step.jobs, after: event(step.after) }).collect();
        // SAFETY: the caller promises that the jobs' memory is valid and ordered by the stream; the stream is
        // live by the promise made to `Stream::cuda`.
        let launched = unsafe { self.kernel.launch_steps(&steps, planes, stream, self.options) }?;
        let completion = |mut queued: Vec<Launched>| match queued.pop() {
            Some(last) if last.is_captured() || queued.is_empty() => completion(last),
            Some(last) => {
                queued.push(last);
                Completion::Pending(Box::new(Batch(queued)))
            }
            None => Completion::Done,
        };
        Ok(launched
            .into_iter()
            .map(|queued| Enqueued { completion: completion(queued), strategy: "direct" })
            .collect())
    }

    /// The loaded kernel.
    pub fn kernel(&self) -> &PagedCopyKernel {
        &self.kernel
    }
}

/// The mover for batches that driver copies move, if there are any.
fn copies(device: u32, calibration: Option<&Calibration>) -> Result<Option<DeviceBackend>, TransferError> {
    if !calibration.is_some_and(Calibration::uses_copy_engine) {
        return Ok(None);
    }
    match DeviceBackend::open(device) {
        Ok(copies) => Ok(Some(copies)),
        Err(error) if error.kind() == "context_lost" => Err(error),
        Err(error) => {
            tracing::warn!(device, %error, "driver copies cannot be had; the kernel moves everything");
            Ok(None)
        }
    }
}

/// What cannot be had here is not available; a lost context is nothing to go round.
fn unless_lost(error: KernelError, what: String) -> TransferError {
    match error.kind() {
        "context_lost" => error.into(),
        _ => TransferError::not_available(what, error.to_string()),
    }
}

impl TransferBackend for NativeBackend {
    fn name(&self) -> &'static str {
        "native"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new().with_device_slots(true).with_asynchronous(true)
    }

    fn prepare(&self, cache: &PagedCache) -> Result<Prepared, TransferError> {
        let expected = Place::Cuda(self.device);
        if cache.place() != expected {
            return Err(TransferError::WrongPlace { found: cache.place(), expected });
        }
        cache.layout().kernel_limits()?;
        // Any slab geometry will do: the table holds the planes' addresses only.
        let plan = CopyPlan::new(cache.layout(), &cache.slab_layout(1)?, Arc::clone(cache.bases()))?;
        let planes = self.kernel.register(&plan)?;
        Ok(Some(Arc::new(Table { planes, warned: AtomicBool::new(false) })))
    }

    unsafe fn enqueue(
        &self,
        prepared: &Prepared,
        jobs: &[CopyJob],
        stream: Stream,
    ) -> Result<Enqueued, TransferError> {
        let steps = [Step { jobs, after: None }];
        let (table, choice) = (Self::table(prepared)?, self.choose(&steps));
        if let [job] = jobs
            && (self.staged.is_none() || choice == Choice::Direct)
        {
            // One slab needs no lists.
            let stream = with_exposed_provenance_mut(stream.handle());
            // SAFETY: the caller's promises, passed on; the stream is live by the promise made to `Stream::cuda`.
            let launched = unsafe { self.kernel.launch(job, &table.planes, stream, self.options) }?;
            return Ok(Enqueued { completion: completion(launched), strategy: "direct" });
        }
        // SAFETY: the caller's promises, passed on.
        let mut enqueued = unsafe { self.enqueue_chosen(choice, table, &steps, stream) }?;
        Ok(enqueued.pop().unwrap_or(Enqueued { completion: Completion::Done, strategy: "none" }))
    }

    unsafe fn enqueue_steps(
        &self,
        prepared: &Prepared,
        steps: &[Step<'_>],
        stream: Stream,
    ) -> Result<Vec<Enqueued>, TransferError> {
        // SAFETY: the caller's promises, passed on.
        unsafe { self.enqueue_chosen(self.choose(steps), Self::table(prepared)?, steps, stream) }
    }

    unsafe fn enqueue_by_layer(
        &self,
        prepared: &Prepared,
        jobs: &[CopyJob],
        layers_per_run: u32,
        stream: Stream,
    ) -> Result<Option<Vec<Enqueued>>, TransferError> {
        // Asked by name, the ring serves layers as well.
        if self.staged.is_some() && self.calibration.is_none() {
            return Ok(None);
        }
        let planes = &Self::table(prepared)?.planes;
        let stream = with_exposed_provenance_mut(stream.handle());
        // SAFETY: the caller's promises, passed on; the stream is live by the promise made to `Stream::cuda`.
        let runs =
            unsafe { self.kernel.launch_by_layer(jobs, planes, stream, self.options, layers_per_run) }?;
        let pending = |run| Completion::Pending(Box::new(run));
        let enqueued = |run| Enqueued { completion: pending(run), strategy: "direct" };
        Ok(runs.map(|runs| runs.into_iter().map(enqueued).collect()))
    }
}

impl NativeBackend {
    fn table(prepared: &Prepared) -> Result<&Table, TransferError> {
        let table = prepared.as_ref().and_then(|p| p.downcast_ref::<Table>());
        Ok(table.ok_or(KernelError::WrongPlanes)?)
    }
}

fn completion(launched: Launched) -> Completion {
    match launched.is_captured() {
        true => Completion::Captured,
        false => Completion::Pending(Box::new(launched)),
    }
}

fn event(event: Option<Event>) -> CUevent {
    event.map_or(null_mut(), |event| with_exposed_provenance_mut(event.handle()))
}

/// Launches of one stream, in its order.
#[derive(Debug)]
struct Batch(Vec<Launched>);

impl Pending for Batch {
    fn is_done(&mut self) -> Result<bool, TransferError> {
        // The last is over last; the others may still report a slot.
        for launched in self.0.iter().rev() {
            if !launched.is_complete()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn wait(&mut self) -> Result<(), TransferError> {
        let mut outcome = Ok(());
        for launched in self.0.iter().rev() {
            outcome = launched.wait().and(outcome);
        }
        Ok(outcome?)
    }

    fn order_before(&mut self, stream: Stream) -> Result<(), TransferError> {
        match self.0.last_mut() {
            Some(last) => Pending::order_before(last, stream),
            None => Ok(()),
        }
    }
}

impl Pending for StagedLaunch {
    fn is_done(&mut self) -> Result<bool, TransferError> {
        Ok(self.is_complete()?)
    }

    fn wait(&mut self) -> Result<(), TransferError> {
        Ok(StagedLaunch::wait(self)?)
    }

    fn order_before(&mut self, stream: Stream) -> Result<(), TransferError> {
        // SAFETY: the stream is live by the promise made to `Stream::cuda`.
        Ok(unsafe { StagedLaunch::order_before(self, with_exposed_provenance_mut(stream.handle())) }?)
    }
}

impl Pending for LaunchedRun {
    fn is_done(&mut self) -> Result<bool, TransferError> {
        Ok(self.is_complete()?)
    }

    fn wait(&mut self) -> Result<(), TransferError> {
        Ok(LaunchedRun::wait(self)?)
    }

    fn order_before(&mut self, stream: Stream) -> Result<(), TransferError> {
        // SAFETY: the stream is live by the promise made to `Stream::cuda`.
        Ok(unsafe { LaunchedRun::order_before(self, with_exposed_provenance_mut(stream.handle())) }?)
    }
}

impl Pending for Launched {
    fn is_done(&mut self) -> Result<bool, TransferError> {
        Ok(self.is_complete()?)
    }

    fn wait(&mut self) -> Result<(), TransferError> {
        Ok(Launched::wait(self)?)
    }

    fn order_before(&mut self, stream: Stream) -> Result<(), TransferError> {
        // SAFETY: the stream is live by the promise made to `Stream::cuda`.
        Ok(unsafe { Launched::order_before(self, with_exposed_provenance_mut(stream.handle())) }?)
    }
}
