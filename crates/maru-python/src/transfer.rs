//! `Transfer`: when is it done, and who moved it?

use std::sync::{Mutex, TryLockError};

use maru_transfer::{Place, Stream, Transfer};
use pyo3::prelude::*;

use crate::args;
use crate::errors::{Fault, detached, guard};
use crate::process::{lock, pid, process};
use crate::region::no_pickle;
use crate::tensor::stream_of;

/// One submission: some of the layers.
struct Part {
    first_layer: u64,
    layers: u64,
    transfer: Option<Transfer>,
}

struct State {
    parts: Vec<Part>,
    failed: Option<Fault>,
    keep: Vec<Py<PyAny>>,
}

/// A submitted transfer. Keeps cache, slab and slots alive until it is over; letting go of it neither waits nor
/// cancels.
#[pyclass(module = "maru_kv_ops", name = "Transfer", frozen)]
pub(crate) struct PyTransfer {
    state: Mutex<State>,
    pid: u32,
    backend: &'static str,
    strategy: &'static str,
    bytes: u64,
    captured: bool,
}

impl PyTransfer {
    /// `parts` are `(first layer, layers, transfer)` in the order they were submitted.
    pub(crate) fn new(parts: Vec<(u64, u64, Transfer)>, keep: Vec<Py<PyAny>>) -> Self {
        let first = parts.first().map(|p| &p.2);
        PyTransfer {
            pid: pid(),
            backend: first.map_or("none", Transfer::backend),
            strategy: first.map_or("none", Transfer::strategy),
            bytes: parts.iter().map(|p| p.2.bytes()).sum(),
            captured: parts.iter().any(|p| p.2.captured()),
            state: Mutex::new(State {
                parts: parts
                    .into_iter()
                    .map(|(first_layer, layers, transfer)| Part {
                        first_layer,
                        layers,
                        transfer: Some(transfer),
                    })
                    .collect(),
                failed: None,
                keep,
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
}

impl State {
    /// Waits for the parts that a predicate names; remembers the first failure.
    fn wait(&mut self, wanted: impl Fn(&Part) -> bool) -> Result<(), Fault> {
        for part in self.parts.iter_mut().filter(|p| wanted(p)) {
            if let Some(transfer) = part.transfer.take()
                && let Err(e) = transfer.wait()
            {
                self.failed.get_or_insert(e.into());
            }
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn is_done(&mut self) -> Result<bool, Fault> {
        for part in &mut self.parts {
            match part.transfer.as_mut().map(Transfer::is_done) {
                None => {}
                Some(Ok(false)) => return Ok(false),
                Some(Ok(true)) => part.transfer = None,
                Some(Err(e)) => {
                    part.transfer = None;
                    self.failed.get_or_insert(e.into());
                }
            }
        }
        self.failed.clone().map_or(Ok(true), Err)
    }
}

#[pymethods]
impl PyTransfer {
    /// Blocks until it is over, with the GIL released. Raises what went wrong in flight.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        guard(py, || {
            self.here()?;
            let (kept, outcome) = py.detach(|| {
                let mut state = lock(&self.state);
                let outcome = state.wait(|_| true);
                (std::mem::take(&mut state.keep), outcome)
            });
            drop(kept);
            Ok(outcome?)
        })
    }

    /// Blocks until a layer is where it should be. Layers become ready in groups of `layer_group`, if the
    /// transfer was submitted with one, else all at once.
    fn wait_layer(&self, py: Python<'_>, layer: &Bound<'_, PyAny>) -> PyResult<()> {
        guard(py, || {
            self.here()?;
            let layer = args::count(layer, "layer")?;
            Ok(detached(py, || {
                let mut state = lock(&self.state);
                let holds = |p: &Part| (p.first_layer..p.first_layer + p.layers).contains(&layer);
                if !state.parts.iter().any(holds) {
                    return Err(Fault::value(format!("layer {layer} is not part of this transfer")));
                }
                state.wait(holds)
            })?)
        })
    }

    /// Whether it is over. Raises what went wrong in flight.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        guard(py, || {
            self.here()?;
            let (kept, outcome) = py.detach(|| {
                let mut state = match self.state.try_lock() {
                    Ok(state) => state,
                    Err(TryLockError::Poisoned(state)) => state.into_inner(),
                    // Another thread waits for it, so it is not over.
                    Err(TryLockError::WouldBlock) => return (Vec::new(), Ok(false)),
                };
                let outcome = state.is_done();
                let over = !matches!(outcome, Ok(false));
                (if over { std::mem::take(&mut state.keep) } else { Vec::new() }, outcome)
            });
            drop(kept);
            Ok(outcome?)
        })
    }

    /// Makes later work on a stream (a handle, or torch's, CuPy's, … stream object) wait for it, or for one of
    /// its layers, without blocking the host.
    #[pyo3(signature = (stream, layer=None))]
    fn order_before(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        layer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        guard(py, || {
            self.here()?;
            let handle = stream_of(py, Place::Host, false, Some(stream))?;
            let layer = layer.filter(|l| !l.is_none()).map(|l| args::count(l, "layer")).transpose()?;
            Ok(detached(py, || {
                let mut state = lock(&self.state);
                for part in &mut state.parts {
                    let holds =
                        layer.is_none_or(|l| (part.first_layer..part.first_layer + part.layers).contains(&l));
                    if let (true, Some(transfer)) = (holds, part.transfer.as_mut()) {
                        // SAFETY: a live stream of the device, as the caller states.
                        transfer.order_before(unsafe { Stream::cuda(handle) })?;
                    }
                }
                Ok(())
            })?)
        })
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
        let mut keep = std::mem::take(&mut state.keep);
        let left: Vec<Transfer> = state.parts.iter_mut().filter_map(|p| p.transfer.take()).collect();
        if self.pid != pid() {
            std::mem::forget(left);
            return;
        }
        // Waiting here would stop every thread of the interpreter: whoever comes next looks after it. What must
        // live goes with the last part, which the stream finishes last.
        let last = left.len();
        for (i, transfer) in left.into_iter().enumerate() {
            let keep = if i + 1 == last { std::mem::take(&mut keep) } else { Vec::new() };
            process().park(transfer, keep);
        }
    }
}
