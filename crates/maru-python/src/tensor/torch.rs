//! Torch tensors, and whatever has their methods.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use maru_transfer::Place;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyFloat, PyInt, PyString};

use super::{Tensor, place_of};
use crate::args;
use crate::dtype::{self, Element};
use crate::errors::{Fault, Result};
use crate::process::lock;

/// `None` for an object without `data_ptr()`.
pub(super) fn read(object: &Bound<'_, PyAny>, name: &str) -> Result<Option<Tensor>> {
    let py = object.py();
    let torch = is_torch(object);
    let Ok(Some(data_ptr)) = object.getattr_opt(intern!(py, "data_ptr")) else { return Ok(None) };
    if !data_ptr.is_callable() {
        return Ok(None);
    }
    let addr = data_ptr.call0()?;
    let addr =
        addr.extract::<u64>().map_err(|_| Fault::wrong_type(format!("{name}.data_ptr() is no address")))?;
    let shape = object.getattr(intern!(py, "shape"))?;
    let shape =
        args::dims(&shape).ok_or_else(|| Fault::wrong_type(format!("{name}.shape is no list of ints")))?;
    let strides = object.call_method0(intern!(py, "stride"))?;
    let strides = args::dims(&strides)
        .ok_or_else(|| Fault::wrong_type(format!("{name}.stride() is no list of ints")))?;
    if shape.len() != strides.len() {
        let message = format!("{name} has {} axes and {} strides", shape.len(), strides.len());
        return Err(Fault::wrong_type(message).into());
    }
    if let Some(axis) = shape.iter().position(|len| *len < 0) {
        return Err(Fault::value(format!("axis {axis} of {name} has length {}", shape[axis])).into());
    }
    let element = element(object, name)?;
    let place = match torch {
        true => match object.call_method0(intern!(py, "get_device"))?.extract::<i64>()? {
            -1 => {
                let device = object.getattr(intern!(py, "device"))?;
                place_of(&device, &format!("{name}.device"))?
            }
            n => Place::Cuda(u32::try_from(n).map_err(|_| Fault::value(format!("{name} is on device {n}")))?),
        },
        false => place_of(&object.getattr(intern!(py, "device"))?, &format!("{name}.device"))?,
    };
    Ok(Some(Tensor {
        addr,
        shape,
        strides,
        element,
        place,
        read_only: false,
        torch,
        owned: false,
        owner: object.clone().unbind(),
    }))
}

fn element(object: &Bound<'_, PyAny>, name: &str) -> Result<Element> {
    let py = object.py();
    let element = match object.getattr(intern!(py, "dtype")) {
        Ok(dtype) => dtype::of_object(&dtype)?,
        Err(_) => Element::Other(0),
    };
    if let Element::Other(0) = element {
        let size = object.call_method0(intern!(py, "element_size"))?;
        return Ok(Element::Other(args::positive(&size, &format!("{name}.element_size()"))?));
    }
    Ok(element)
}

/// Torch, if the process has loaded it. It is never imported from here.
fn torch(py: Python<'_>) -> Option<Bound<'_, PyAny>> {
    // A module that is being imported has no Tensor yet.
    class(py)?;
    super::loaded(py, intern!(py, "torch"))
}

/// `torch.Tensor`, if torch is loaded.
pub(super) fn class<'py>(py: Python<'py>) -> Option<&'py Bound<'py, PyAny>> {
    static TENSOR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    super::loaded_class(py, &TENSOR, intern!(py, "torch"), intern!(py, "Tensor"))
}

/// Whether it is torch's own tensor.
pub(crate) fn is_torch(object: &Bound<'_, PyAny>) -> bool {
    class(object.py()).is_some_and(|class| object.is_instance(class).unwrap_or(false))
}

/// Devices of torch whose place is known: few, and torch makes the name of a device's type anew for each question.
static DEVICES: Mutex<Vec<(Py<PyAny>, Place)>> = Mutex::new(Vec::new());
const MOST_DEVICES: usize = 64;

/// Whether it is a `torch.device`. Comparing those runs no Python code.
fn is_device(object: &Bound<'_, PyAny>) -> bool {
    static DEVICE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = object.py();
    let class = super::loaded_class(py, &DEVICE, intern!(py, "torch"), intern!(py, "device"));
    class.is_some_and(|class| object.get_type_ptr().cast() == class.as_ptr())
}

/// The place of a `torch.device` that was met before.
pub(super) fn known_device(device: &Bound<'_, PyAny>) -> Option<Place> {
    if !is_device(device) {
        return None;
    }
    let known = lock(&DEVICES);
    let same = |other: &Py<PyAny>| other.is(device) || device.eq(other).unwrap_or(false);
    known.iter().find(|(other, _)| same(other)).map(|(_, place)| *place)
}

/// Remembers the place of a `torch.device` that always means the same.
pub(super) fn remember_device(device: &Bound<'_, PyAny>, place: Place) {
    if is_device(device) && known_device(device).is_none() {
        let mut known = lock(&DEVICES);
        if known.len() < MOST_DEVICES {
            known.push((device.clone().unbind(), place));
        }
    }
}

pub(super) fn current_device(py: Python<'_>) -> Option<u32> {
    torch(py)?.getattr("cuda").ok()?.call_method0("current_device").ok()?.extract().ok()
}

/// Torch's current stream of a device.
pub(super) fn current_stream(py: Python<'_>, device: u32) -> Result<usize> {
    static RAW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if !initialised(py)? {
        return Ok(0);
    }
    if let Some(stream) = super::exchange::current_stream(py, device) {
        return Ok(stream);
    }
    let Some(torch) = torch(py) else { return Ok(0) };
    let raw = RAW.get_or_try_init(py, || -> PyResult<Py<PyAny>> {
        Ok(torch.getattr("_C")?.getattr("_cuda_getCurrentRawStream")?.unbind())
    });
    if let Ok(raw) = raw {
        return Ok(raw.bind(py).call1((device,))?.extract()?);
    }
    let cuda = torch.getattr("cuda")?;
    Ok(cuda.call_method1("current_stream", (device,))?.getattr("cuda_stream")?.extract()?)
}

/// Whether torch uses CUDA already: until then its caller is on the default stream, and asking it for another would make
/// it initialise parts of CUDA behind its own back. False also for a torch without CUDA.
fn initialised(py: Python<'_>) -> PyResult<bool> {
    /// Once initialised it stays so, but for a forked child, where CUDA is of no use.
    static YES: AtomicBool = AtomicBool::new(false);
    if YES.load(Ordering::Relaxed) {
        return Ok(true);
    }
    let Some(torch) = torch(py) else { return Ok(false) };
    let Some(cuda) = torch.getattr_opt(intern!(py, "cuda"))? else { return Ok(false) };
    let yes = cuda.call_method0(intern!(py, "is_initialized"))?.is_truthy()?;
    YES.store(yes, Ordering::Relaxed);
    Ok(yes)
}

/// A raw handle, or an object of torch, CuPy, Numba or the stream protocol.
pub(super) fn stream_handle(stream: &Bound<'_, PyAny>) -> Result<usize> {
    let py = stream.py();
    let names = [intern!(py, "cuda_stream"), intern!(py, "ptr"), intern!(py, "handle")];
    handle(stream, "stream", &names, intern!(py, "__cuda_stream__"))
}

/// The same of an event.
pub(super) fn event_handle(event: &Bound<'_, PyAny>, name: &str) -> Result<usize> {
    let py = event.py();
    let names =
        [intern!(py, "cuda_event"), intern!(py, "ptr"), intern!(py, "handle"), intern!(py, "event_id")];
    handle(event, name, &names, intern!(py, "__cuda_event__"))
}

/// An int, what an object has under one of these names, or the second number that its protocol gives.
fn handle(
    object: &Bound<'_, PyAny>,
    name: &str,
    attributes: &[&Bound<'_, PyString>],
    protocol: &Bound<'_, PyString>,
) -> Result<usize> {
    // Ints first: each attribute that is not there costs a Python exception.
    if !object.is_instance_of::<PyInt>() {
        for attribute in attributes {
            if let Ok(Some(found)) = object.getattr_opt(attribute)
                && let Some(handle) = address(&found)
            {
                return Ok(handle);
            }
        }
        if let Ok(Some(protocol)) = object.getattr_opt(protocol)
            && let Ok(pair) = protocol.call0()
            && let Ok((_, handle)) = pair.extract::<(u32, usize)>()
        {
            return Ok(handle);
        }
    }
    let handle = args::count(object, name)?;
    usize::try_from(handle).map_err(|_| Fault::overflow(format!("{name} does not fit an address")).into())
}

/// A handle as libraries keep it: an int, something `int()` takes (CUDA's own bindings), a ctypes pointer.
fn address(found: &Bound<'_, PyAny>) -> Option<usize> {
    let py = found.py();
    if let Ok(handle) = found.extract() {
        return Some(handle);
    }
    if found.is_instance_of::<PyString>() || found.is_instance_of::<PyFloat>() {
        return None;
    }
    match found.getattr_opt(intern!(py, "__int__")) {
        Ok(Some(int)) => int.call0().ok()?.extract().ok(),
        // ctypes has None for null.
        _ => match found.getattr_opt(intern!(py, "value")).ok()?? {
            value if value.is_none() => Some(0),
            value => value.extract().ok(),
        },
    }
}
