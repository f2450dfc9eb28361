//! `Transfer`: when is it done, and who moved it?

use std::sync::{Mutex, MutexGuard, TryLockError};

use maru_layout::LayoutError;
use maru_transfer::{Place, Stream, Transfer, TransferError};
use pyo3::prelude::*;

use crate::args::{self, Arg};
use crate::errors::{Fault, Result, detached, guard};
use crate::process::{lock, pid, process};
use crate::region::no_pickle;
use crate::tensor::stream_or_current;

struct State {
    /// `None` once it is over.
    transfer: Option<Transfer>,
    failed: Option<Fault>,
    keep: Vec<Py<PyAny>>,
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
    pub(crate) fn new(transfer: Transfer, (place, layers): (Place, u64), keep: Vec<Py<PyAny>>) -> Self {
        PyTransfer {
            pid: pid(),
            place,
            layers: u32::try_from(layers).unwrap_or(u32::MAX),
            backend: transfer.backend(),
            strategy: transfer.strategy(),
            bytes: transfer.bytes(),
            captured: transfer.captured(),
            state: Mutex::new(State { transfer: Some(transfer), failed: None, keep }),
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

    /// Asks the transfer with the GIL released, and gives back what it kept if that showed that it is over. `None`
    /// while another thread waits for it.
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        block: bool,
        question: impl FnOnce(&mut State) -> Result<T, Fault> + Send,
    ) -> Result<Option<T>> {
        self.here()?;
        let (answer, kept) = detached(py, || {
            let Some(mut state) = self.take(block) else { return Ok((Ok(None), Vec::new())) };
            let answer = question(&mut state);
            let over = state.transfer.is_none();
            Ok((answer.map(Some), if over { std::mem::take(&mut state.keep) } else { Vec::new() }))
        })?;
        // With the GIL, outside the lock: an object's finaliser may ask this transfer.
        drop(kept);
        Ok(answer?)
    }

    fn order(&self, py: Python<'_>, stream: Arg<'_, '_>, layer: Option<u32>) -> Result<()> {
        let stream = stream_or_current(py, self.place, stream)?;
        // SAFETY: a live stream of the device, as the caller states, or torch's current one.
        let stream = unsafe { Stream::cuda(stream) };
        let order = |transfer: &mut Transfer| match layer {
            Some(layer) => transfer.order_before_layer(stream, layer),
            None => transfer.order_before(stream),
        };
        self.ask(py, true, |state| state.with((), order)).map(drop)
    }

    fn take(&self, block: bool) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => block.then(|| lock(&self.state)),
        }
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
        let Some(transfer) = &mut self.transfer else { return Ok(over) };
        body(transfer).map_err(|e| {
            let fault = Fault::from(e);
            self.failed = Some(fault.clone());
            // What else it reports was caused by the first, or is like it.
            let _ = self.transfer.take().map(Transfer::wait);
            fault
        })
    }

    fn wait(&mut self) -> Result<(), Fault> {
        if let Some(transfer) = self.transfer.take()
            && let Err(e) = transfer.wait()
        {
            self.failed.get_or_insert(e.into());
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn is_done(&mut self) -> Result<bool, Fault> {
        let done = self.with(true, Transfer::is_done)?;
        if done {
            self.transfer = None;
        }
        Ok(done)
    }
}

#[pymethods]
impl PyTransfer {
    /// Blocks until it is over, with the GIL released. Raises what went wrong in flight.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || self.ask(py, true, State::wait).map(drop))
    }

    /// Blocks until a layer of the cache is where it should be; of a transfer that was not submitted with
    /// `by_layer`, until it is over.
    fn wait_layer(&self, py: Python<'_>, layer: &Bound<'_, PyAny>) -> PyResult<()> {
        guard(py, || {
            let layer = self.layer(layer)?;
            self.ask(py, true, |state| state.with((), |t| t.wait_layer(layer))).map(drop)
        })
    }

    /// Whether it is over. Raises what went wrong in flight.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        // Another thread that waits for it knows that it is not over.
        guard(py, || Ok(self.ask(py, false, State::is_done)?.unwrap_or(false)))
    }

    /// Whether a layer of the cache is where it should be.
    fn layer_done(&self, py: Python<'_>, layer: &Bound<'_, PyAny>) -> PyResult<bool> {
        guard(py, || {
            let layer = self.layer(layer)?;
            let done = self.ask(py, false, |state| state.with(true, |t| t.layer_done(layer)))?;
            Ok(done.unwrap_or(false))
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
        let Some(transfer) = state.transfer.take() else { return };
        if self.pid != pid() {
            std::mem::forget(transfer);
            return;
        }
        // Waiting here would stop every thread of the interpreter: whoever comes next looks after it.
        process().park(self.place, transfer, std::mem::take(&mut state.keep));
    }
}
