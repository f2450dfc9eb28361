//! When a device copy is over.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use maru_driver::Ticket;

use super::Inner;
use crate::FallbackError;

/// A transfer by the device mover, on its way or done.
///
/// It keeps the mover's part of it (events, the memory pageable slabs pass through) alive. Dropping it
/// neither waits nor cancels: cache and slab must stay until the transfer is over.
#[derive(Debug)]
pub struct DeviceCopy {
    inner: Arc<Inner>,
    state: State,
}

#[derive(Debug)]
pub(super) enum State {
    /// There was nothing to do, or it was over when the call returned.
    Done,
    /// Part of a graph: there is nothing to wait for here.
    Captured,
    /// Over when the event is.
    Queued(Ticket),
}

impl DeviceCopy {
    pub(super) fn new(inner: &Arc<Inner>, state: State) -> Self {
        DeviceCopy { inner: inner.clone(), state }
    }

    /// Whether the copies became part of a CUDA graph. They then run whenever the graph does, the caller keeps
    /// every memory of them alive for as long, and the rest of this interface says "done".
    pub fn is_captured(&self) -> bool {
        matches!(self.state, State::Captured)
    }

    /// Whether the transfer is over. Does not wait.
    ///
    /// # Errors
    /// [`FallbackError::Driver`] if the driver reports one, which may stem from other work of the context.
    pub fn is_complete(&self) -> Result<bool, FallbackError> {
        // SAFETY: the pool lives as long as the mover's inner part, which this value keeps alive.
        self.with(true, |ticket| unsafe { ticket.is_complete() })
    }

    /// Waits until the transfer is over.
    ///
    /// # Errors
    /// As [`DeviceCopy::is_complete`].
    pub fn wait(&self) -> Result<(), FallbackError> {
        // SAFETY: as above.
        self.with((), |ticket| unsafe { ticket.wait() })
    }

    /// Makes everything queued on `stream` from now on wait for the transfer. The host does not wait.
    ///
    /// # Errors
    /// [`FallbackError::Driver`].
    ///
    /// # Safety
    /// `stream` is a live stream.
    pub unsafe fn order_before(&self, stream: CUstream) -> Result<(), FallbackError> {
        // SAFETY: as above; the stream is the caller's promise.
        self.with((), |ticket| unsafe { ticket.order_before(stream) })
    }

    fn with<T>(
        &self,
        done: T,
        ask: impl FnOnce(&Ticket) -> Result<T, maru_driver::DriverError>,
    ) -> Result<T, FallbackError> {
        let State::Queued(ticket) = &self.state else { return Ok(done) };
        let health = &self.inner.health;
        health.check()?;
        let _current = health.noted(self.inner.context.enter())?;
        Ok(health.noted(ask(ticket))?)
    }
}

impl Drop for DeviceCopy {
    fn drop(&mut self) {
        if let State::Queued(ticket) = self.state {
            // No driver call here: whether it is over is asked when the ticket is needed again.
            self.inner.tickets.give_back(ticket, false);
        }
    }
}
