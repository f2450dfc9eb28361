//! Many slabs of one cache in few launches: between two launches the link runs dry for some microseconds, which
//! small slabs feel.

use cudarc::driver::sys::CUstream;
use maru_driver::stream as streams;
use maru_layout::CopyJob;

use crate::geometry::{BatchLaunch, Limits};
use crate::launched::State;
use crate::ring::CAPACITY;
use crate::{KernelError, LaunchOptions, Launched, PagedCopyKernel, PlaneTable};

impl PagedCopyKernel {
    /// Puts the transfers of one cache on the caller's stream and returns at once. Neighbours in the list that
    /// differ in slab and slots only share a launch, as far as their slots are on the host; others go one by
    /// one, as [`PagedCopyKernel::launch`] takes them.
    ///
    /// Returns what was launched, in stream order; the last is over last.
    ///
    /// # Errors
    /// As [`PagedCopyKernel::launch`]; what was queued before is then waited for.
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch`], for every job.
    pub unsafe fn launch_many(
        &self,
        jobs: &[CopyJob],
        planes: &PlaneTable,
        stream: CUstream,
        options: LaunchOptions,
    ) -> Result<Vec<Launched>, KernelError> {
        let _current = self.inner.context.enter()?;
        // SAFETY: the stream is the caller's promise.
        let capturing = unsafe { streams::is_capturing(stream) }?;
        let mut queued = Vec::with_capacity(1);
        // SAFETY: the caller's promises, passed on.
        match unsafe { self.put_many(jobs, planes, stream, options, capturing, &mut queued) } {
            Ok(()) => Ok(queued),
            Err(error) => {
                for launched in &queued {
                    if let Err(other) = launched.wait() {
                        tracing::error!(error = %other, "an earlier slab of a failed batch had failed too");
                    }
                }
                Err(error)
            }
        }
    }

    /// [`PagedCopyKernel::launch_many`] with the context current; leaves the waiting after an error to the caller.
    ///
    /// # Safety
    /// As there; `capturing` says whether the stream is being captured.
    pub(crate) unsafe fn put_many(
        &self,
        jobs: &[CopyJob],
        planes: &PlaneTable,
        stream: CUstream,
        options: LaunchOptions,
        capturing: bool,
        queued: &mut Vec<Launched>,
    ) -> Result<(), KernelError> {
        if let Some(job) = jobs.iter().find(|job| !planes.is_of(job.plan().bases())) {
            tracing::debug!(planes = job.plan().bases().len(), "a job of another cache in a batch");
            return Err(KernelError::WrongPlanes);
        }
        // A graph must not use the ring.
        let batches = jobs.len() > 1 && !capturing;
        let limits = Limits::blocks(options.sm_budget);
        let mut rest = jobs;
        while let Some(job) = rest.first() {
            let batch = batches.then(|| BatchLaunch::new(rest, planes.addr(), limits, CAPACITY)).flatten();
            if let Some(batch) = batch {
                let (together, others) = rest.split_at(batch.jobs);
                // SAFETY: the caller's promises, passed on.
                if let Some(launched) = unsafe { self.launch_batch(batch, together, planes, stream) }? {
                    queued.push(launched);
                    rest = others;
                    continue;
                }
            }
            // SAFETY: the caller's promises, passed on.
            let state = unsafe { self.put(job, planes, stream, options, capturing) }?;
            queued.push(Launched::new(&self.inner, planes, state, job.plan().geometry().num_slots));
            rest = &rest[1..];
        }
        Ok(())
    }

    /// One launch for several jobs; `None` if the ring has no room now.
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch_many`]; the stream is not being captured and the context is current.
    unsafe fn launch_batch(
        &self,
        mut batch: BatchLaunch,
        jobs: &[CopyJob],
        planes: &PlaneTable,
        stream: CUstream,
    ) -> Result<Option<Launched>, KernelError> {
        let kernel = &self.inner;
        let ticket = kernel.tickets.take()?;
        let shape = (batch.entry, batch.blocks, batch.threads);
        let planned = batch;
        let lists = jobs.iter().map(|job| planned.slots(job));
        let start = |addr| {
            batch.set_slots(addr);
            // SAFETY: the arguments come from checked jobs and a filled buffer; their memory is the caller's
            // promise.
            unsafe { kernel.start_entry(shape, &batch.args, stream) }
        };
        // SAFETY: the stream is the caller's promise.
        let uploaded = unsafe { kernel.ring.with_slots(lists, stream, start) };
        if uploaded == Ok(false) {
            kernel.tickets.give_back(ticket, true);
            return Ok(None);
        }
        // SAFETY: the stream is the caller's promise.
        let mark = unsafe { self.queued(uploaded.map(drop), ticket, stream) }?;
        let num_slots = jobs.first().map_or(0, |job| job.plan().geometry().num_slots);
        let state = State::Queued { mark, reports: false };
        Ok(Some(Launched::new(kernel, planes, state, num_slots)))
    }
}
