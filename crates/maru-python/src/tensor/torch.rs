//! Torch tensors, and whatever has their methods.

use maru_transfer::Place;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::{Tensor, place_of};
use crate::args;
use crate::dtype::{self, Element};
use crate::errors::{Fault, Result};

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
    static TORCH: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if let Some(torch) = TORCH.get(py) {
        return Some(torch.bind(py).clone());
    }
    let modules = py.import("sys").ok()?.getattr("modules").ok()?;
    let torch = modules.get_item("torch").ok()?;
    // A module that is being imported has no Tensor yet.
    torch.getattr("Tensor").ok()?;
    Some(TORCH.get_or_init(py, || torch.unbind()).bind(py).clone())
}

/// Whether it is torch's own tensor.
pub(crate) fn is_torch(object: &Bound<'_, PyAny>) -> bool {
    static TENSOR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = object.py();
    let class = TENSOR.get_or_try_init(py, || {
        torch(py).and_then(|torch| torch.getattr("Tensor").ok()).map(Bound::unbind).ok_or(())
    });
    class.is_ok_and(|class| object.is_instance(class.bind(py)).unwrap_or(false))
}

pub(super) fn current_device(py: Python<'_>) -> Option<u32> {
    torch(py)?.getattr("cuda").ok()?.call_method0("current_device").ok()?.extract().ok()
}

/// Torch's current stream of a device.
pub(super) fn current_stream(py: Python<'_>, device: u32) -> Result<usize> {
    static RAW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let Some(torch) = torch(py) else { return Ok(0) };
    let raw = RAW.get_or_try_init(py, || -> PyResult<Py<PyAny>> {
        Ok(torch.getattr("_C")?.getattr("_cuda_getCurrentRawStream")?.unbind())
    });
    if let Ok(raw) = raw {
        return Ok(raw.bind(py).call1((device,))?.extract()?);
    }
    let stream = torch.getattr("cuda")?.call_method1("current_stream", (device,))?;
    Ok(stream.getattr("cuda_stream")?.extract()?)
}

/// A raw handle, or an object of torch, CuPy or the stream protocol.
pub(super) fn stream_handle(stream: &Bound<'_, PyAny>) -> Result<usize> {
    let py = stream.py();
    for attribute in [intern!(py, "cuda_stream"), intern!(py, "ptr"), intern!(py, "handle")] {
        if let Ok(handle) = stream.getattr(attribute)
            && let Ok(handle) = handle.extract()
        {
            return Ok(handle);
        }
    }
    if let Ok(pair) = stream.call_method0(intern!(py, "__cuda_stream__"))
        && let Ok((_, handle)) = pair.extract::<(u32, usize)>()
    {
        return Ok(handle);
    }
    let handle = args::count(stream, "stream")?;
    usize::try_from(handle).map_err(|_| Fault::overflow("stream does not fit an address").into())
}
