//! Many slabs of one cache in few launches: between two launches the link runs dry for some microseconds, which
//! small slabs feel.

use cudarc::driver::sys::{CUevent, CUstream};
use maru_driver::stream::{synchronize, wait_for};
use maru_layout::CopyJob;

use crate::session::Session;
use crate::{KernelError, LaunchOptions, Launched, LaunchedRun, PagedCopyKernel, PlaneTable};

/// Transfers that go together: jobs of a [`PagedCopyKernel`], or pieces of a [`crate::StagedMover`].
#[derive(Clone, Copy, Debug)]
pub struct LaunchStep<'a, J> {
    /// What moves.
    pub jobs: &'a [J],
    /// An event, recorded before the call, that they wait for besides the stream; null for none.
    pub after: CUevent,
}

impl<'a, J> LaunchStep<'a, J> {
    /// A step that waits for the stream only.
    pub fn new(jobs: &'a [J]) -> Self {
        LaunchStep { jobs, after: std::ptr::null_mut() }
    }
}

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
        // SAFETY: the caller's promises, passed on.
        let mut launched = unsafe { self.launch_steps(&[LaunchStep::new(jobs)], planes, stream, options) }?;
        Ok(launched.pop().unwrap_or_default())
    }

    /// The same in steps, one after the other: each can be waited for alone, and can wait for an event of its own.
    /// Returns what was launched for each.
    ///
    /// # Errors
    /// As [`PagedCopyKernel::launch_many`].
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch`], for every job; the events are live and of this context.
    pub unsafe fn launch_steps(
        &self,
        steps: &[LaunchStep<'_, CopyJob>],
        planes: &PlaneTable,
        stream: CUstream,
        options: LaunchOptions,
    ) -> Result<Vec<Vec<Launched>>, KernelError> {
        let _current = self.inner.context.enter()?;
        let mut queued: Vec<Vec<Launched>> = steps.iter().map(|_| Vec::with_capacity(1)).collect();
        let mut put = || {
            // SAFETY: the caller's promises, passed on.
            let mut session = unsafe { Session::new(self, planes, stream, options) }?;
            session.upload(steps.iter().filter(|step| step.jobs.len() > 1).flat_map(|step| step.jobs))?;
            for (step, queued) in steps.iter().zip(&mut queued) {
                if !step.after.is_null() {
                    // SAFETY: event and stream are the caller's promise.
                    unsafe { wait_for(step.after, stream) }?;
                }
                // SAFETY: the caller's promises, passed on.
                unsafe { session.put_many(step.jobs, queued) }?;
            }
            session.finish()
        };
        let outcome = put();
        if outcome.is_err() {
            for launched in queued.iter().flatten() {
                if let Err(other) = launched.wait() {
                    tracing::error!(error = %other, "an earlier slab of a failed batch had failed too");
                }
            }
            // The launches have told that they are over; now the stream has come to their ends, too.
            // SAFETY: the stream is the caller's promise.
            if let Err(error) = unsafe { synchronize(stream) } {
                tracing::error!(%error, "a failed batch could not be waited for");
            }
        }
        outcome.map(|()| queued)
    }

    /// Puts loads of one cache on the caller's stream by one launch, in the order of their layers: K and V of the
    /// first layer of all of them, then of the next. The layers come in runs, each of which can be waited for alone:
    /// up to the next layer of the cache whose number `layers_per_run` divides. The host does nothing more for it.
    ///
    /// `None`, with nothing queued, where one launch cannot do that: jobs that are no loads, differ in more than slab
    /// and slots, write the same pages, have their slots on the device or rows that 16 bytes do not divide, are too many,
    /// or while the stream is being captured. [`PagedCopyKernel::launch_steps`] then takes them run by run.
    ///
    /// # Errors
    /// As [`PagedCopyKernel::launch`].
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch`], for every job.
    pub unsafe fn launch_by_layer(
        &self,
        jobs: &[CopyJob],
        planes: &PlaneTable,
        stream: CUstream,
        options: LaunchOptions,
        layers_per_run: u32,
    ) -> Result<Option<Vec<LaunchedRun>>, KernelError> {
        if jobs.iter().any(|job| !planes.is_of(job.plan().bases())) {
            return Err(KernelError::WrongPlanes);
        }
        let _current = self.inner.context.enter()?;
        // SAFETY: the caller's promises, passed on.
        let mut session = unsafe { Session::new(self, planes, stream, options) }?;
        // SAFETY: as above.
        let launched = unsafe { session.put_layers(jobs, layers_per_run) }?;
        let finished = session.finish();
        if let (Err(_), Some(launched)) = (&finished, &launched) {
            // The caller must know that nothing is in flight.
            drop(launched.wait());
        }
        finished.map(|()| launched.map(LaunchedRun::all_of))
    }
}
