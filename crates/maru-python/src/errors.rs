//! Errors as Python sees them, and the fence that keeps panics on this side.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use maru_cxl::CxlError;
use maru_driver::DriverError;
use maru_layout::LayoutError;
use maru_transfer::TransferError;
use maru_transfer::config::ConfigError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;

/// An error before it is a Python object: the stable kind and the message.
///
/// Made without the interpreter, so that code which has released the GIL can make one. Whatever makes one is cold: so the
/// compiler puts it apart, and what runs when nothing is wrong lies close together, which calls after a launch feel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: &'static str,
    pub(crate) message: String,
}

impl Fault {
    /// A wrong value: `ValueError`.
    #[cold]
    pub(crate) fn value(message: impl Into<String>) -> Self {
        Fault { kind: "invalid_argument", message: message.into() }
    }

    /// A wrong type or dtype: `TypeError`.
    #[cold]
    pub(crate) fn wrong_type(message: impl Into<String>) -> Self {
        Fault { kind: "wrong_type", message: message.into() }
    }

    /// A number that does not fit: `OverflowError`.
    #[cold]
    pub(crate) fn overflow(message: impl Into<String>) -> Self {
        Fault { kind: "overflow", message: message.into() }
    }

    /// A handle used after it was given up, or in a forked child: `RuntimeError`.
    #[cold]
    pub(crate) fn state(message: impl Into<String>) -> Self {
        Fault { kind: "invalid_state", message: message.into() }
    }

    /// The same error, saying first which argument it is about.
    #[cold]
    pub(crate) fn of(mut self, argument: impl fmt::Display) -> Self {
        self.message = format!("{argument}: {}", self.message);
        self
    }

    #[cold]
    pub(crate) fn into_py(self, py: Python<'_>) -> PyErr {
        match class_of(py, self.kind) {
            Ok(class) => match class.call1((self.message.as_str(), self.kind)) {
                Ok(instance) => PyErr::from_value(instance),
                Err(error) => error,
            },
            Err(error) => error,
        }
    }
}

/// The exception class of a kind, from `maru_kv_ops._errors`.
fn class_of<'py>(py: Python<'py>, kind: &str) -> PyResult<Bound<'py, PyAny>> {
    static OF_KIND: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let of_kind = OF_KIND.get_or_try_init(py, || -> PyResult<Py<PyAny>> {
        Ok(py.import("maru_kv_ops._errors")?.getattr("class_of_kind")?.unbind())
    })?;
    of_kind.bind(py).call1((PyString::new(py, kind),))
}

impl From<LayoutError> for Fault {
    #[cold]
    fn from(e: LayoutError) -> Self {
        let kind = match &e {
            LayoutError::Overflow { .. } | LayoutError::SpanTooLarge { .. } => "overflow",
            _ => e.kind(),
        };
        Fault { kind, message: e.to_string() }
    }
}

impl From<CxlError> for Fault {
    #[cold]
    fn from(e: CxlError) -> Self {
        Fault { kind: e.kind(), message: e.to_string() }
    }
}

impl From<DriverError> for Fault {
    #[cold]
    fn from(e: DriverError) -> Self {
        Fault { kind: e.kind(), message: e.to_string() }
    }
}

impl From<ConfigError> for Fault {
    #[cold]
    fn from(e: ConfigError) -> Self {
        Fault { kind: e.kind(), message: e.to_string() }
    }
}

impl From<TransferError> for Fault {
    #[cold]
    fn from(e: TransferError) -> Self {
        match e {
            TransferError::Layout(e) => e.into(),
            e => Fault { kind: e.kind(), message: e.to_string() },
        }
    }
}

/// Either kind of error, for code that calls back into Python.
#[derive(Debug)]
pub(crate) enum Error {
    /// Ours.
    Fault(Fault),
    /// What Python raised; it passes through unchanged.
    Python(PyErr),
}

impl<T: Into<Fault>> From<T> for Error {
    fn from(e: T) -> Self {
        Error::Fault(e.into())
    }
}

impl From<PyErr> for Error {
    fn from(e: PyErr) -> Self {
        Error::Python(e)
    }
}

impl Error {
    pub(crate) fn into_py(self, py: Python<'_>) -> PyErr {
        match self {
            Error::Fault(fault) => fault.into_py(py),
            Error::Python(error) => error,
        }
    }
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// Runs the body of a public call: errors become exceptions, and so does a panic, which must not unwind into
/// the interpreter.
pub(crate) fn guard<T>(py: Python<'_>, body: impl FnOnce() -> Result<T>) -> PyResult<T> {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panicked(&*panic).into()));
    crate::log::drain(py);
    outcome.map_err(|e| e.into_py(py))
}

/// As [`guard`] with the GIL released, for work that blocks or calls the driver. A panic is caught before the
/// GIL is taken again.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    body: impl FnOnce() -> std::result::Result<T, Fault> + Send,
) -> std::result::Result<T, Fault> {
    py.detach(|| catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panicked(&*panic))))
}

#[cold]
fn panicked(panic: &(dyn Any + Send)) -> Fault {
    let text = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    Fault { kind: "internal", message: format!("a bug in maru_kv_ops, please report it: {text}") }
}
