//! The fallback for caches in host memory.

use maru_fallback::HostMover;
use maru_layout::CopyJob;

use super::{Capabilities, Enqueued, Prepared, TransferBackend};
use crate::{Completion, PagedCache, Place, Stream, TransferError};

/// Host memory to host memory, synchronous.
#[derive(Debug)]
pub struct HostBackend {
    mover: HostMover,
}

impl HostBackend {
    /// A mover of up to `threads` threads, 0 = as many as help.
    ///
    /// # Errors
    /// When its threads cannot be started.
    pub fn new(threads: usize) -> Result<Self, TransferError> {
        Ok(HostBackend { mover: HostMover::new(threads)? })
    }
}

impl TransferBackend for HostBackend {
    fn name(&self) -> &'static str {
        "fallback"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new().with_unregistered_slab(true)
    }

    fn prepare(&self, cache: &PagedCache) -> Result<Prepared, TransferError> {
        match cache.place() {
            Place::Host => Ok(None),
            found => Err(TransferError::WrongPlace { found, expected: Place::Host }),
        }
    }

    unsafe fn enqueue(
        &self,
        _prepared: &Prepared,
        jobs: &[CopyJob],
        _stream: Stream,
    ) -> Result<Enqueued, TransferError> {
        for job in jobs {
            // SAFETY: the caller promises that the job's memory is valid; `prepare` let only host caches pass.
            unsafe { self.mover.copy(job) }?;
        }
        Ok(Enqueued { completion: Completion::Done, strategy: "host" })
    }
}
