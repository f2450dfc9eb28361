//! The maru-native kernel on one device.

use std::sync::Arc;

use maru_kernel_cuda::{KernelError, LaunchOptions, Launched, PagedCopyKernel, PlaneTable, open_context};
use maru_layout::{CopyJob, CopyPlan};

use super::{Capabilities, Prepared, TransferBackend};
use crate::{Completion, PagedCache, Pending, Place, Stream, TransferError};

/// The CUDA kernel of `maru-kernel-cuda`, loaded on one device.
#[derive(Debug)]
pub struct NativeBackend {
    kernel: PagedCopyKernel,
    device: u32,
    options: LaunchOptions,
}

impl NativeBackend {
    /// Loads the kernel on a device; a direct launch will occupy at most `sm_budget` thread blocks.
    ///
    /// # Errors
    /// [`TransferError::NotAvailable`] with the reason when it cannot run there.
    pub fn open(device: u32, sm_budget: u32) -> Result<Self, TransferError> {
        let load = || PagedCopyKernel::load(open_context(usize::try_from(device).unwrap_or(usize::MAX))?);
        let kernel = load().map_err(|e| {
            TransferError::not_available(format!("the native kernel on cuda:{device}"), e.to_string())
        })?;
        Ok(NativeBackend { kernel, device, options: LaunchOptions::default().with_sm_budget(sm_budget) })
    }

    /// The loaded kernel.
    pub fn kernel(&self) -> &PagedCopyKernel {
        &self.kernel
    }
}

impl TransferBackend for NativeBackend {
    fn name(&self) -> &'static str {
        "native"
    }

    fn strategy(&self, _job: &CopyJob) -> &'static str {
        "direct"
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
        job: &CopyJob,
        stream: Stream,
    ) -> Result<Completion, TransferError> {
        let planes =
            prepared.as_ref().and_then(|p| p.downcast_ref::<PlaneTable>()).ok_or(KernelError::WrongPlanes)?;
        let stream = std::ptr::with_exposed_provenance_mut(stream.handle());
        // SAFETY: the caller promises that the job's memory is valid and ordered by the stream; the stream is
        // live by the promise made to `Stream::cuda`.
        let launched = unsafe { self.kernel.launch(job, planes, stream, self.options) }?;
        match launched.is_captured() {
            true => Ok(Completion::Captured),
            false => Ok(Completion::Pending(Box::new(launched))),
        }
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
