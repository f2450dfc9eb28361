//! The maru-native kernel on one device.

use std::sync::Arc;

use maru_kernel_cuda::{
    KernelError, LaunchOptions, Launched, PagedCopyKernel, PlaneTable, StagedLaunch, StagedMover,
    StagedOptions, open_context,
};
use maru_layout::{CopyJob, CopyPlan, Pieces};

use super::{Capabilities, Enqueued, Prepared, TransferBackend};
use crate::config::{StrategyChoice, TransferConfig};
use crate::{Completion, PagedCache, Pending, Place, Stream, TransferError};

/// Bytes of a batch from which `strategy = "auto"` stages. Below, one launch is over before the copy engine
/// and a second launch would be; see docs/performance.md.
const STAGE_FROM: u64 = 16 << 20;

/// The CUDA kernel of `maru-kernel-cuda`, loaded on one device.
#[derive(Debug)]
pub struct NativeBackend {
    kernel: PagedCopyKernel,
    device: u32,
    options: LaunchOptions,
    /// None for `strategy = "direct"` and where there is no memory for a ring.
    staged: Option<StagedMover>,
    stage_from: u64,
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
        let (staged, stage_from) = match config.strategy {
            StrategyChoice::Direct => (None, u64::MAX),
            _ if config.staging_bytes == 0 => (None, u64::MAX),
            StrategyChoice::Staged => {
                let what = format!("a ring of {} bytes", config.staging_bytes);
                (Some(StagedMover::new(&kernel, ring).map_err(|e| unless_lost(e, what))?), 0)
            }
            _ => match StagedMover::new(&kernel, ring) {
                Ok(mover) => (Some(mover), STAGE_FROM),
                Err(e) if e.kind() == "context_lost" => return Err(e.into()),
                Err(e) => {
                    tracing::warn!(bytes = config.staging_bytes, error = %e, "no ring; transfers go directly");
                    (None, u64::MAX)
                }
            },
        };
        let options = LaunchOptions::default().with_sm_budget(config.sm_budget);
        Ok(NativeBackend { kernel, device, options, staged, stage_from })
    }

    /// The pieces of every job, if this batch is to be staged and can be. The ring's streams do not wait for each
    /// other, so a batch of stores and loads, where one may read what another wrote, goes directly, in order.
    fn pieces(&self, jobs: &[CopyJob]) -> Option<(&StagedMover, Vec<Pieces>)> {
        let mover = self.staged.as_ref()?;
        let bytes = jobs.iter().fold(0u64, |sum, job| sum.saturating_add(job.bytes()));
        let mixed = jobs.windows(2).any(|pair| pair[0].direction() != pair[1].direction());
        if bytes < self.stage_from || mixed {
            return None;
        }
        let pieces = jobs.iter().map(|job| mover.pieces(job)).collect::<Option<_>>()?;
        Some((mover, pieces))
    }

    /// The loaded kernel.
    pub fn kernel(&self) -> &PagedCopyKernel {
        &self.kernel
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
        Ok(Some(Arc::new(self.kernel.register(&plan)?)))
    }

    unsafe fn enqueue(
        &self,
        prepared: &Prepared,
        jobs: &[CopyJob],
        stream: Stream,
    ) -> Result<Enqueued, TransferError> {
        let planes =
            prepared.as_ref().and_then(|p| p.downcast_ref::<PlaneTable>()).ok_or(KernelError::WrongPlanes)?;
        let stream = std::ptr::with_exposed_provenance_mut(stream.handle());
        if let Some((mover, pieces)) = self.pieces(jobs)
            // SAFETY: the stream is live by the promise made to `Stream::cuda`.
            && !unsafe { self.kernel.is_capturing(stream) }?
        {
            // SAFETY: as below; registered memory is page-locked, and the stream is not being captured.
            let launched = unsafe { mover.launch(&pieces, planes, stream) }?;
            return Ok(Enqueued { completion: Completion::Pending(Box::new(launched)), strategy: "staged" });
        }
        // SAFETY: the caller promises that the jobs' memory is valid and ordered by the stream; the stream is
        // live by the promise made to `Stream::cuda`.
        let mut queued = unsafe { self.kernel.launch_many(jobs, planes, stream, self.options) }?;
        let completion = match queued.pop() {
            Some(last) if last.is_captured() => Completion::Captured,
            Some(last) if queued.is_empty() => Completion::Pending(Box::new(last)),
            Some(last) => {
                queued.push(last);
                Completion::Pending(Box::new(Batch(queued)))
            }
            None => Completion::Done,
        };
        Ok(Enqueued { completion, strategy: "direct" })
    }
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
        Ok(unsafe {
            StagedLaunch::order_before(self, std::ptr::with_exposed_provenance_mut(stream.handle()))
        }?)
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
        Ok(unsafe { Launched::order_before(self, std::ptr::with_exposed_provenance_mut(stream.handle())) }?)
    }
}
