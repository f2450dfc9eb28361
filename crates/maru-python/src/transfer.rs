//! `Transfer`: when is it done, and who moved it?

use std::sync::Mutex;

use maru_layout::LayoutError;
use maru_transfer::{Place, Stream, Transfer, TransferError};
use pyo3::prelude::*;

use crate::args::{self, Arg};
use crate::errors::{Fault, Result, detached, guard};
use crate::process::{InFlight, Keep, lock, pid, process};
use crate::region::no_pickle;
use crate::tensor::stream_or_current;
use crate::waiting::Waiter;

struct State {
    /// `None` once it is over.
    flight: Option<Box<InFlight>>,
    /// What was kept for it, once it is over.
    kept: Keep,
    failed: Option<Fault>,
}

/// A submitted transfer. Keeps cache, slab, slots and events alive until it is over; letting go of it neither waits
/// nor cancels.
#[pyclass(module = "maru_kv_ops", name = "Transfer", frozen)]
pub(crate) struct PyTransfer {
    state: Mutex<State>,
    pid: u32,
    place: Place,
    /// Of the cache.
    layers: u32,
    backend: &'static str,
    strategy: &'static str,
    bytes: u64,
    captured: bool,
}

impl PyTransfer {
    /// A transfer of a cache of `layers` layers in `place`.
    pub(crate) fn new(transfer: Transfer, (place, layers): (Place, u64), keep: Keep) -> Self {
        PyTransfer {
            pid: pid(),
            place,
            layers: u32::try_from(layers).unwrap_or(u32::MAX),
            backend: transfer.backend(),
            strategy: transfer.strategy(),
            bytes: transfer.bytes(),
            captured: transfer.captured(),
            state: Mutex::new(State {
                flight: Some(Box::new(InFlight { transfer, keep })),
                kept: Keep::new(),
                failed: None,
            }),
        }
    }

    fn here(&self) -> Result<(), Fault> {
        match self.pid == pid() {
            true => Ok(()),
            false => Err(Fault::state(format!(
                "this Transfer was submitted in process {} and cannot be asked in its forked child",
                self.pid
            ))),
        }
    }

    fn layer(&self, layer: &Bound<'_, PyAny>) -> Result<u32> {
        let layer = u32::try_from(args::count(layer, "layer")?).unwrap_or(u32::MAX);
        match layer < self.layers {
            true => Ok(layer),
            false => Err(LayoutError::LayerRange { first: layer, count: 1, layers: self.layers }.into()),
        }
    }

    /// Asks the transfer with the GIL released, and gives back what it kept if that showed that it is over.
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        question: impl FnOnce(&mut State) -> Result<T, Fault> + Send,
    ) -> Result<T> {
        self.here()?;
        let (answer, kept) = detached(py, || {
            let mut state = lock(&self.state);
            let answer = question(&mut state);
            Ok((answer, std::mem::take(&mut state.kept)))
        })?;
        // With the GIL, outside the lock: an object's finaliser may ask this transfer.
        drop(kept);
        Ok(answer?)
    }

    /// Blocks until the transfer or a layer of it is over, or has failed. Nothing is locked meanwhile.
    fn block(&self, py: Python<'_>, layer: Option<u32>) -> Result<()> {
        self.here()?;
        let Place::Cuda(device) = self.place else { return Ok(()) };
        Ok(detached(py, || {
            let waiter = lock(&self.state).waiter(device, layer);
            // Whoever asks the transfer next is told what went wrong.
            let _ = waiter.map(Waiter::wait);
            Ok(())
        })?)
    }

    fn order(&self, py: Python<'_>, stream: Arg<'_, '_>, layer: Option<u32>) -> Result<()> {
        let stream = stream_or_current(py, self.place, stream)?;
        // SAFETY: a live stream of the device, as the caller states, or torch's current one.
        let stream = unsafe { Stream::cuda(stream) };
        self.ask(py, |state| state.order_before(stream, layer))
    }
}

impl State {
    /// Does something with the transfer, if it is not over; `over` says so of one that is. A failure ends it: the rest
    /// is waited for, and the failure is told to everybody who asks later.
    fn with<T>(
        &mut self,
        over: T,
        body: impl FnOnce(&mut Transfer) -> Result<T, TransferError>,
    ) -> Result<T, Fault> {
        if let Some(fault) = &self.failed {
            return Err(fault.clone());
        }
        let Some(flight) = &mut self.flight else { return Ok(over) };
        body(&mut flight.transfer).map_err(|e| {
            let fault = Fault::from(e);
            self.failed = Some(fault.clone());
            // What else it reports was caused by the first, or is like it.
            let _ = self.end().map(Transfer::wait);
            fault
        })
    }

    /// The transfer, which ends here; what was kept for it may go when this was said.
    fn end(&mut self) -> Option<Transfer> {
        let InFlight { transfer, keep } = *self.flight.take()?;
        self.kept = keep;
        Some(transfer)
    }

    fn order_before(&mut self, stream: Stream, layer: Option<u32>) -> Result<(), Fault> {
        self.with((), |transfer| match layer {
            Some(layer) => transfer.order_before_layer(stream, layer),
            None => transfer.order_before(stream),
        })
    }

    /// Something that waits for it, or for one of its layers; `None` if there is no need, or it cannot be had.
    fn waiter(&mut self, device: u32, layer: Option<u32>) -> Option<Waiter> {
        let over = self.with(true, |transfer| match layer {
            Some(layer) => transfer.layer_done(layer),
            None => transfer.is_done(),
        });
        if !matches!(over, Ok(false)) {
            return None;
        }
        let waiter = Waiter::on(device).ok()?;
        // SAFETY: a live stream of the device, which waits for this alone.
        let stream = unsafe { Stream::cuda(waiter.handle()) };
        self.order_before(stream, layer).ok()?;
        Some(waiter)
    }

    fn wait(&mut self) -> Result<(), Fault> {
        if let Some(transfer) = self.end()
            && let Err(e) = transfer.wait()
        {
            self.failed.get_or_insert(e.into());
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn is_done(&mut self) -> Result<bool, Fault> {
        let done = self.with(true, Transfer::is_done)?;
        if done {
            drop(self.end());
        }
        Ok(done)
    }
}

#[pymethods]
impl PyTransfer {
    /// Blocks until it is over, with the GIL released. Raises what went wrong in flight.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || {
            self.block(py, None)?;
            let outcome = self.ask(py, State::wait);
            process().reap_some(py);
            outcome
        })
    }

    /// Blocks until a layer of the cache is where it should be; of a transfer that was not submitted with
    /// `by_layer`, until it is over.
    fn wait_layer(&self, py: Python<'_>, layer: &Bound<'_, PyAny>) -> PyResult<()> {
        guard(py, || {
            let layer = self.layer(layer)?;
            self.block(py, Some(layer))?;
            self.ask(py, |state| state.with((), |t| t.wait_layer(layer)))
        })
    }

    /// Whether it is over. Raises what went wrong in flight.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        guard(py, || self.ask(py, State::is_done))
    }

    /// Whether a layer of the cache is where it should be.
    fn layer_done(&self, py: Python<'_>, layer: &Bound<'_, PyAny>) -> PyResult<bool> {
        guard(py, || {
            let layer = self.layer(layer)?;
            self.ask(py, |state| state.with(true, |t| t.layer_done(layer)))
        })
    }

    /// Makes later work on a stream (a handle, or torch's, CuPy's, … stream object; without one, the caller's
    /// current one) wait for it, or for one of its layers, without blocking the host.
    #[pyo3(signature = (stream=None, layer=None))]
    fn order_before(&self, py: Python<'_>, stream: Arg<'_, '_>, layer: Arg<'_, '_>) -> PyResult<()> {
        guard(py, || {
            let layer = layer.filter(|l| !l.is_none()).map(|l| self.layer(l)).transpose()?;
            self.order(py, stream, layer)
        })
    }

    /// The same for one layer.
    #[pyo3(signature = (layer, stream=None))]
    fn order_before_layer(
        &self,
        py: Python<'_>,
        layer: &Bound<'_, PyAny>,
        stream: Arg<'_, '_>,
    ) -> PyResult<()> {
        guard(py, || self.order(py, stream, Some(self.layer(layer)?)))
    }

    /// The mover: `native` or `fallback`.
    #[getter]
    fn backend(&self) -> &'static str {
        self.backend
    }

    /// How it moved: `direct`, `staged`, `copy_engine`, `host`.
    #[getter]
    fn strategy(&self) -> &'static str {
        self.strategy
    }

    /// Bytes moved one way.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it was recorded into a CUDA graph; then there is nothing to wait for.
    #[getter]
    fn captured(&self) -> bool {
        self.captured
    }

    fn __repr__(&self) -> String {
        format!("Transfer({} bytes, backend={:?}, strategy={:?})", self.bytes, self.backend, self.strategy)
    }

    fn __reduce__(&self, py: Python<'_>) -> PyResult<()> {
        Err(no_pickle(py, "Transfer", "wait for it in the process that submitted it"))
    }
}

impl Drop for PyTransfer {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if self.pid != pid() {
            std::mem::forget(state.end());
            return;
        }
        let Some(flight) = state.flight.take() else { return };
        // Waiting here would stop every thread of the interpreter: whoever comes next looks after it.
        process().park(self.place, flight);
    }
}
