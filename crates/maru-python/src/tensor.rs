//! Other libraries' tensors, read without knowing the library: address, shape, strides, element type, device.

mod dlpack;
mod exchange;
mod interface;
mod numpy;
mod torch;

use std::fmt;

use maru_layout::{LayoutError, TensorDesc};
use maru_transfer::Place;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyInt, PyString};
use smallvec::SmallVec;

pub(crate) use dlpack::export as export_dlpack;
pub(crate) use torch::is_torch;

use crate::args::{a, type_name};
use crate::dtype::Element;
use crate::errors::{Fault, Result};
use crate::memory::Foreign;

/// Lengths or strides of the axes.
pub(crate) type Dims = SmallVec<[i64; 6]>;

/// One array, alive as long as `owner` is.
#[derive(Debug)]
pub(crate) struct Tensor {
    /// First element.
    pub(crate) addr: u64,
    pub(crate) shape: Dims,
    /// In elements.
    pub(crate) strides: Dims,
    pub(crate) element: Element,
    pub(crate) place: Place,
    pub(crate) read_only: bool,
    /// Torch's, whose current stream is then the caller's.
    pub(crate) torch: bool,
    /// The object is of a class whose objects own their memory: there is no need to ask whether it is mapped.
    pub(crate) owned: bool,
    /// Keeps the memory alive.
    pub(crate) owner: Py<PyAny>,
}

impl Tensor {
    /// Reads any array object.
    pub(crate) fn of(object: &Bound<'_, PyAny>, name: &str) -> Result<Tensor> {
        Self::try_of(object, name)?.ok_or_else(|| {
            Fault::wrong_type(format!(
                "{name} is {}; a tensor is needed (torch, NumPy, or anything with data_ptr(), an array interface or DLPack)",
                a(&type_name(object))
            ))
            .into()
        })
    }

    /// `None` for an object that is no array.
    pub(crate) fn try_of(object: &Bound<'_, PyAny>, name: &str) -> Result<Option<Tensor>> {
        // The usual ones, without making Python objects.
        if let Some(tensor) = exchange::read(object).or_else(|| numpy::read(object)) {
            return Ok(Some(tensor));
        }
        if let Ok(slab) = object.cast_exact::<crate::region::PySlab>() {
            return Ok(Some(slab.get().tensor(object)));
        }
        if object.is_instance_of::<pyo3::types::PyType>() {
            return Ok(None);
        }
        if let Some(tensor) = torch::read(object, name)? {
            return Ok(Some(tensor));
        }
        if let Some(tensor) = interface::read(object, name)? {
            return Ok(Some(tensor));
        }
        dlpack::read(object, name)
    }

    pub(crate) fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Length of an axis; 0 for one that is not there.
    pub(crate) fn len_of(&self, axis: usize) -> u64 {
        self.shape.get(axis).and_then(|n| u64::try_from(*n).ok()).unwrap_or(0)
    }

    /// Elements, all axes.
    pub(crate) fn count(&self) -> std::result::Result<u64, Fault> {
        let product = self.shape.iter().try_fold(1u64, |n, len| n.checked_mul(u64::try_from(*len).ok()?));
        product.filter(|n| *n <= i64::MAX.unsigned_abs()).ok_or_else(|| {
            Fault::overflow(format!("a tensor of shape {:?} has more than 2^63 elements", self.shape))
        })
    }

    /// Whether its elements lie side by side in the order of the shape.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut expected = 1i64;
        for (len, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *len == 0 {
                return true;
            }
            if *len != 1 && *stride != expected {
                return false;
            }
            expected = expected.saturating_mul(*len);
        }
        true
    }

    /// As the layout library sees it; refuses what no cache can be (negative strides, shared bytes, …).
    pub(crate) fn desc(&self, dtype: maru_layout::DType) -> std::result::Result<TensorDesc, LayoutError> {
        TensorDesc::strided(&self.shape, &self.strides, dtype)
    }

    /// As a slab of `len` bytes of a transfer in `place`.
    pub(crate) fn foreign(&self, py: Python<'_>, place: Place, len: u64) -> Foreign {
        let on_host = self.place == Place::Host;
        // On a device whoever submits the transfer keeps it; a reference given up without the GIL costs twice.
        let owner = (place == Place::Host).then(|| self.owner.clone_ref(py));
        Foreign { addr: self.addr, len, on_host, owned: self.owned, owner }
    }

    /// Refuses a tensor elsewhere.
    pub(crate) fn expect_place(&self, name: &str, place: Place) -> std::result::Result<(), Fault> {
        expect_place(name, self.place, place)
    }
}

/// An array of one axis of 64-bit integers, alive as long as its object is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// In elements.
    pub(crate) stride: i64,
    pub(crate) place: Place,
    /// As [`Tensor::owned`].
    pub(crate) owned: bool,
}

impl Line {
    /// Of the arrays that are met most often, which need no further checks; `None` for everything else.
    pub(crate) fn quick(object: &Bound<'_, PyAny>) -> Option<Line> {
        exchange::line(object)
    }

    /// Of a tensor with one axis.
    pub(crate) fn of(tensor: &Tensor) -> Line {
        let (addr, place, owned) = (tensor.addr, tensor.place, tensor.owned);
        let stride = tensor.strides.first().copied().unwrap_or(1);
        Line { addr, len: tensor.len_of(0), stride, place, owned }
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        self.len <= 1 || self.stride == 1
    }
}

/// Refuses a tensor that is elsewhere than the cache.
pub(crate) fn expect_place(name: &str, found: Place, place: Place) -> std::result::Result<(), Fault> {
    match found == place {
        true => Ok(()),
        false => Err(Fault::value(format!("{name} is on {found}, the paged cache is on {place}"))),
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shape {:?} with strides {:?} on {}", self.shape, self.strides, self.place)
    }
}

/// A module, if the process has loaded it.
fn loaded<'py>(py: Python<'py>, name: &Bound<'py, PyString>) -> Option<Bound<'py, PyAny>> {
    static MODULES: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let modules =
        MODULES.get_or_try_init(py, || PyResult::Ok(py.import("sys")?.getattr("modules")?.unbind()));
    // Not `get_item` of any object, which raises for one that is missing.
    modules.ok()?.bind(py).cast::<PyDict>().ok()?.get_item(name).ok()?
}

/// A class of a module, if the process has loaded that. It is looked for until it is found.
fn loaded_class<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyAny>>,
    module: &Bound<'py, PyString>,
    name: &Bound<'py, PyString>,
) -> Option<&'py Bound<'py, PyAny>> {
    if let Some(class) = cell.get(py) {
        return Some(class.bind(py));
    }
    // Not inside the cell, where a search in vain costs as much as all else that a call does.
    let class = loaded(py, module)?.getattr_opt(name).ok()??;
    Some(cell.get_or_init(py, || class.unbind()).bind(py))
}

/// `cuda:1`, `cuda`, `cpu`, a device object that has a type and an index or prints as one, or an ordinal.
pub(crate) fn place_of(device: &Bound<'_, PyAny>, name: &str) -> Result<Place> {
    // Without a failing look-up on the way of a torch device: a Python exception costs as much as a launch.
    if let Some(place) = torch::known_device(device) {
        return Ok(place);
    }
    let py = device.py();
    let text = if let Ok(text) = device.cast::<PyString>() {
        text.to_str()?.to_owned()
    } else if device.is_instance_of::<PyInt>() {
        match device.extract::<i64>() {
            Ok(-1) => return Ok(Place::Host),
            Ok(ordinal) => format!("cuda:{ordinal}"),
            Err(_) => device.str()?.to_string(),
        }
    } else if let (Ok(kind), Ok(index)) =
        (device.getattr(intern!(py, "type")), device.getattr(intern!(py, "index")))
        && let Ok(kind) = kind.cast::<PyString>()
    {
        match (kind.to_str()?, index.is_none()) {
            ("cpu", _) => {
                torch::remember_device(device, Place::Host);
                return Ok(Place::Host);
            }
            ("cuda", false) => match index.extract::<u32>() {
                Ok(ordinal) => {
                    torch::remember_device(device, Place::Cuda(ordinal));
                    return Ok(Place::Cuda(ordinal));
                }
                Err(_) => device.str()?.to_string(),
            },
            (kind, _) => kind.to_owned(),
        }
    } else {
        device.str()?.to_string()
    };
    let place = match text.as_str() {
        "cpu" | "host" | "cpu:0" => Some(Place::Host),
        // Torch's `cuda` is the current device of the caller.
        "cuda" => Some(Place::Cuda(torch::current_device(py).unwrap_or(0))),
        other => other.strip_prefix("cuda:").and_then(|n| n.parse::<u32>().ok()).map(Place::Cuda),
    };
    place.ok_or_else(|| {
        let message =
            format!("{name} is {text:?}; allowed: a cpu or cuda device (\"cpu\", \"cuda:N\", an ordinal)");
        Fault::value(message).into()
    })
}

/// The caller's current stream of a device: torch's where torch is in use, else the default stream. A raw
/// handle that the caller states wins.
pub(crate) fn stream_of(
    py: Python<'_>,
    place: Place,
    torch_tensors: bool,
    stated: Option<&Bound<'_, PyAny>>,
) -> Result<usize> {
    if let Some(stream) = stated.filter(|s| !s.is_none()) {
        return torch::stream_handle(stream);
    }
    match place {
        Place::Cuda(device) if torch_tensors => torch::current_stream(py, device),
        _ => Ok(0),
    }
}

/// The stream that a caller names, or the one it is on: torch's current one of the device, if torch is loaded.
pub(crate) fn stream_or_current(
    py: Python<'_>,
    place: Place,
    stated: Option<&Bound<'_, PyAny>>,
) -> Result<usize> {
    stream_of(py, place, true, stated)
}

/// The raw handle of an event.
pub(crate) fn event_handle(event: &Bound<'_, PyAny>, name: &str) -> Result<usize> {
    torch::event_handle(event, name)
}
