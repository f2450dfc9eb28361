//! What `submit` gives back: when is it done, and who moved it?

use std::fmt;

use maru_cxl::Slab;

use crate::{Stream, TransferError};

/// Something in flight. Made by a mover, consumed by [`Transfer`].
pub trait Pending: Send + fmt::Debug {
    /// Whether the work is finished; an error if it failed.
    ///
    /// # Errors
    /// What the mover found out, for example a slot outside the cache in a device-resident list.
    fn is_done(&mut self) -> Result<bool, TransferError>;

    /// Blocks until the work is finished.
    ///
    /// # Errors
    /// As [`Pending::is_done`].
    fn wait(&mut self) -> Result<(), TransferError>;

    /// Makes later work on `stream` wait for this, without blocking the host.
    ///
    /// # Errors
    /// When the driver refuses.
    fn order_before(&mut self, stream: Stream) -> Result<(), TransferError>;
}

/// How far a mover got when it returned.
#[derive(Debug)]
#[non_exhaustive]
pub enum Completion {
    /// Everything is moved.
    Done,
    /// Queued; the value knows when it is over.
    Pending(Box<dyn Pending>),
    /// Recorded into a graph; there is nothing to wait on, and the caller keeps the memory alive.
    Captured,
}

/// A submitted transfer. Keeps its slabs (and their regions) alive until it is done; dropping it waits.
#[derive(Debug)]
#[must_use = "dropping a transfer waits for it; call wait() to see its errors"]
pub struct Transfer {
    completion: Completion,
    _slabs: Vec<Slab>,
    backend: &'static str,
    strategy: &'static str,
    bytes: u64,
}

impl Transfer {
    pub(crate) fn new(
        completion: Completion,
        slabs: Vec<Slab>,
        backend: &'static str,
        strategy: &'static str,
        bytes: u64,
    ) -> Self {
        Transfer { completion, _slabs: slabs, backend, strategy, bytes }
    }

    /// The mover: `native`, `fallback`, or a user's own name.
    pub fn backend(&self) -> &'static str {
        self.backend
    }

    /// How it moved: `direct`, `staged`, `copy_engine`, `host`, a user's own word, or `none` where there was
    /// nothing to move.
    pub fn strategy(&self) -> &'static str {
        self.strategy
    }

    /// Bytes moved one way; with device-resident slots as if none was −1.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it was recorded into a graph instead of being run.
    pub fn captured(&self) -> bool {
        matches!(self.completion, Completion::Captured)
    }

    /// Whether it is over.
    ///
    /// # Errors
    /// What went wrong in flight.
    pub fn is_done(&mut self) -> Result<bool, TransferError> {
        match &mut self.completion {
            Completion::Pending(pending) => pending.is_done(),
            Completion::Done | Completion::Captured => Ok(true),
        }
    }

    /// Blocks until it is over.
    ///
    /// # Errors
    /// What went wrong in flight.
    pub fn wait(mut self) -> Result<(), TransferError> {
        match std::mem::replace(&mut self.completion, Completion::Done) {
            Completion::Pending(mut pending) => pending.wait(),
            Completion::Done | Completion::Captured => Ok(()),
        }
    }

    /// Makes later work on `stream` wait for it, without blocking the host.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn order_before(&mut self, stream: Stream) -> Result<(), TransferError> {
        match &mut self.completion {
            Completion::Pending(pending) => pending.order_before(stream),
            Completion::Done | Completion::Captured => Ok(()),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Completion::Pending(pending) = &mut self.completion
            && let Err(e) = pending.wait()
        {
            tracing::error!(backend = self.backend, error = %e, "a dropped transfer had failed");
        }
    }
}
