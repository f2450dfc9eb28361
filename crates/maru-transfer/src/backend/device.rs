//! The fallback for caches on a device: driver copies, no kernel of ours.

use maru_fallback::{DeviceCopy, DeviceMover, DeviceOptions};
use maru_layout::CopyJob;

use super::{Capabilities, Enqueued, Prepared, Step, TransferBackend, one_by_one};
use crate::{Completion, PagedCache, Pending, Place, Stream, TransferError};

/// Copies by the driver, layer by layer. Uses no processor of the GPU and takes unregistered slabs.
#[derive(Debug)]
pub struct DeviceBackend {
    mover: DeviceMover,
    device: u32,
}

impl DeviceBackend {
    /// A mover on a device.
    ///
    /// # Errors
    /// [`TransferError::NotAvailable`] with the reason when there is no such device or driver.
    pub fn open(device: u32) -> Result<Self, TransferError> {
        let ordinal = usize::try_from(device).unwrap_or(usize::MAX);
        let mover =
            DeviceMover::on_device(ordinal, DeviceOptions::default()).map_err(|e| match e.kind() {
                "context_lost" => e.into(),
                _ => TransferError::not_available(format!("the fallback on cuda:{device}"), e.to_string()),
            })?;
        Ok(DeviceBackend { mover, device })
    }
}

impl TransferBackend for DeviceBackend {
    fn name(&self) -> &'static str {
        "fallback"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new().with_unregistered_slab(true).with_device_slots(true).with_asynchronous(true)
    }

    fn prepare(&self, cache: &PagedCache) -> Result<Prepared, TransferError> {
        let expected = Place::Cuda(self.device);
        match cache.place() == expected {
            true => Ok(None),
            false => Err(TransferError::WrongPlace { found: cache.place(), expected }),
        }
    }

    unsafe fn enqueue(
        &self,
        _prepared: &Prepared,
        jobs: &[CopyJob],
        stream: Stream,
    ) -> Result<Enqueued, TransferError> {
        let stream = std::ptr::with_exposed_provenance_mut(stream.handle());
        let mut queued: Vec<DeviceCopy> = Vec::with_capacity(1);
        for job in jobs {
            // SAFETY: the caller promises that the job's memory is valid and ordered by the stream; the stream
            // is live by the promise made to `Stream::cuda`.
            match unsafe { self.mover.copy_on(job, stream) } {
                // Of one stream the last is over last, and nothing is reported later.
                Ok(copy) => {
                    queued.clear();
                    queued.push(copy);
                }
                Err(error) => {
                    if let Some(Err(other)) = queued.last().map(DeviceCopy::wait) {
                        tracing::error!(error = %other, "an earlier slab of a failed batch had failed too");
                    }
                    return Err(error.into());
                }
            }
        }
        let completion = match queued.pop() {
            None => Completion::Done,
            Some(copy) if copy.is_captured() => Completion::Captured,
            Some(copy) => Completion::Pending(Box::new(copy)),
        };
        Ok(Enqueued { completion, strategy: "copy_engine" })
    }

    unsafe fn enqueue_steps(
        &self,
        prepared: &Prepared,
        steps: &[Step<'_>],
        stream: Stream,
    ) -> Result<Vec<Enqueued>, TransferError> {
        one_by_one(steps, |step| {
            if let Some(event) = step.after {
                let event = std::ptr::with_exposed_provenance_mut(event.handle());
                let stream = std::ptr::with_exposed_provenance_mut(stream.handle());
                // SAFETY: stream and event are live by the promises made to `Stream::cuda` and `Event::cuda`.
                unsafe { self.mover.wait_for(event, stream) }?;
            }
            // SAFETY: the caller's promises, passed on.
            unsafe { self.enqueue(prepared, step.jobs, stream) }
        })
    }
}

impl Pending for DeviceCopy {
    fn is_done(&mut self) -> Result<bool, TransferError> {
        Ok(self.is_complete()?)
    }

    fn wait(&mut self) -> Result<(), TransferError> {
        Ok(DeviceCopy::wait(self)?)
    }

    fn order_before(&mut self, stream: Stream) -> Result<(), TransferError> {
        // SAFETY: the stream is live by the promise made to `Stream::cuda`.
        let ordered =
            unsafe { DeviceCopy::order_before(self, std::ptr::with_exposed_provenance_mut(stream.handle())) };
        Ok(ordered?)
    }
}
