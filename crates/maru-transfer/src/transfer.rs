//! What `submit` gives back: when is it done, and who moved it?

use std::fmt;

use maru_cxl::Slab;
use maru_layout::LayoutError;

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
///
/// Submitted layer by layer ([`crate::TransferEngine::submit_by_layer`]), each layer can be asked, waited for and
/// ordered before alone; otherwise all layers are there when all of it is.
#[derive(Debug)]
#[must_use = "dropping a transfer waits for it; call wait() to see its errors"]
pub struct Transfer {
    /// In the order in which they become done.
    steps: Vec<Completion>,
    layers: Layers,
    _slabs: Vec<Slab>,
    backend: &'static str,
    strategy: &'static str,
    bytes: u64,
}

/// Which step of a transfer a layer of the cache belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layers {
    /// Layers of the cache.
    pub(crate) count: u32,
    /// Layers that go together.
    pub(crate) per_step: u32,
    /// The runs of `per_step` layers that the steps are, ascending; `None`: any layer is done with all of it.
    pub(crate) runs: Option<Vec<u32>>,
}

impl Transfer {
    pub(crate) fn new(
        steps: Vec<Completion>,
        layers: Layers,
        slabs: Vec<Slab>,
        (backend, strategy): (&'static str, &'static str),
        bytes: u64,
    ) -> Self {
        Transfer { steps, layers, _slabs: slabs, backend, strategy, bytes }
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
        self.steps.iter().any(|step| matches!(step, Completion::Captured))
    }

    /// Whether it is over.
    ///
    /// # Errors
    /// What went wrong in flight.
    pub fn is_done(&mut self) -> Result<bool, TransferError> {
        // The last is over last; the others may still have an error to report.
        all(self.steps.iter_mut().rev(), Completion::is_done)
    }

    /// Whether a layer of the cache is moved; a layer that is not part of the transfer is.
    ///
    /// # Errors
    /// What went wrong in flight; [`maru_layout::LayoutError::LayerRange`] for a layer the cache does not have.
    pub fn layer_done(&mut self, layer: u32) -> Result<bool, TransferError> {
        all(self.steps_of(layer)?.iter_mut().rev(), Completion::is_done)
    }

    /// Blocks until it is over.
    ///
    /// # Errors
    /// What went wrong in flight.
    pub fn wait(mut self) -> Result<(), TransferError> {
        each(&mut std::mem::take(&mut self.steps), Completion::wait)
    }

    /// Blocks until a layer of the cache is moved.
    ///
    /// # Errors
    /// As [`Transfer::layer_done`].
    pub fn wait_layer(&mut self, layer: u32) -> Result<(), TransferError> {
        each(self.steps_of(layer)?, Completion::wait)
    }

    /// Makes later work on `stream` wait for it, without blocking the host.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn order_before(&mut self, stream: Stream) -> Result<(), TransferError> {
        // The last is over last.
        self.steps.last_mut().map_or(Ok(()), |step| step.order_before(stream))
    }

    /// Makes later work on `stream` wait for one layer, so that its attention starts when its K and V are there.
    /// The stream is another one than the transfer's own, which goes on when everything is moved.
    ///
    /// # Errors
    /// When the driver refuses; [`maru_layout::LayoutError::LayerRange`] for a layer the cache does not have.
    pub fn order_before_layer(&mut self, stream: Stream, layer: u32) -> Result<(), TransferError> {
        each(self.steps_of(layer)?, |step| step.order_before(stream))
    }

    /// The steps a layer is done with: one, none, or all.
    fn steps_of(&mut self, layer: u32) -> Result<&mut [Completion], TransferError> {
        let Layers { count, per_step, runs } = &self.layers;
        if layer >= *count {
            return Err(LayoutError::LayerRange { first: layer, count: 1, layers: *count }.into());
        }
        let Some(runs) = runs else { return Ok(&mut self.steps) };
        let found = runs.binary_search(&(layer / (*per_step).max(1)));
        Ok(found.ok().and_then(|i| self.steps.get_mut(i..=i)).unwrap_or_default())
    }
}

impl Completion {
    /// Whether it is over.
    ///
    /// # Errors
    /// What went wrong in flight.
    pub fn is_done(&mut self) -> Result<bool, TransferError> {
        match self {
            Completion::Pending(pending) => pending.is_done(),
            Completion::Done | Completion::Captured => Ok(true),
        }
    }

    /// Blocks until it is over.
    ///
    /// # Errors
    /// What went wrong in flight.
    pub fn wait(&mut self) -> Result<(), TransferError> {
        match self {
            Completion::Pending(pending) => pending.wait(),
            Completion::Done | Completion::Captured => Ok(()),
        }
    }

    /// Makes later work on `stream` wait for it, without blocking the host.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn order_before(&mut self, stream: Stream) -> Result<(), TransferError> {
        match self {
            Completion::Pending(pending) => pending.order_before(stream),
            Completion::Done | Completion::Captured => Ok(()),
        }
    }
}

fn all<'a>(
    mut steps: impl Iterator<Item = &'a mut Completion>,
    is: impl Fn(&mut Completion) -> Result<bool, TransferError>,
) -> Result<bool, TransferError> {
    steps.try_fold(true, |done, step| Ok(done && is(step)?))
}

/// Goes through all of them, whatever each says, the last first: when it is over, so are the others. The error of the
/// earliest counts.
fn each(
    steps: &mut [Completion],
    call: impl Fn(&mut Completion) -> Result<(), TransferError>,
) -> Result<(), TransferError> {
    let mut outcome = Ok(());
    for step in steps.iter_mut().rev() {
        outcome = call(step).and(outcome);
    }
    outcome
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Err(e) = each(&mut self.steps, Completion::wait) {
            tracing::error!(backend = self.backend, error = %e, "a dropped transfer had failed");
        }
    }
}
