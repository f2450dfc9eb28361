//! NumPy's arrays through the buffer protocol: their array interface is a dict that is made anew for each question.

use std::ffi::CStr;

use maru_transfer::Place;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::{ffi, intern};

use super::interface::in_elements;
use super::{Dims, Tensor, loaded_class};
use crate::dtype::Element;

/// `None` for anything but a plain array of a usual element type.
pub(super) fn read(object: &Bound<'_, PyAny>) -> Option<Tensor> {
    static ARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = object.py();
    let class = loaded_class(py, &ARRAY, intern!(py, "numpy"), intern!(py, "ndarray"))?;
    if object.get_type_ptr().cast() != class.as_ptr() {
        return None;
    }
    let mut view = ffi::Py_buffer::new();
    // SAFETY: any object may be asked; the view is released below.
    if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut view, ffi::PyBUF_RECORDS_RO) } != 0 {
        // Types that the protocol does not know are described elsewhere.
        drop(PyErr::take(py));
        return None;
    }
    // SAFETY: the view is filled and not released yet.
    let tensor = unsafe { of_view(&view, object) };
    // SAFETY: filled above, released once.
    unsafe { ffi::PyBuffer_Release(&raw mut view) };
    tensor
}

/// # Safety
/// The view is filled, with shape, strides and format.
unsafe fn of_view(view: &ffi::Py_buffer, object: &Bound<'_, PyAny>) -> Option<Tensor> {
    let (axes, size) = (usize::try_from(view.ndim).ok()?, u64::try_from(view.itemsize).ok()?);
    let list = |first: *mut isize| -> Option<Dims> {
        if axes == 0 {
            return Some(Dims::new());
        }
        let first = std::ptr::NonNull::new(first)?;
        // SAFETY: the protocol's contract: as many numbers as axes.
        let numbers = unsafe { std::slice::from_raw_parts(first.as_ptr(), axes) };
        numbers.iter().map(|n| i64::try_from(*n).ok()).collect()
    };
    let (shape, bytes) = (list(view.shape)?, list(view.strides)?);
    let format = std::ptr::NonNull::new(view.format)?;
    // SAFETY: the protocol's contract: a C string as long as the view is not released.
    let format = unsafe { CStr::from_ptr(format.as_ptr()) };
    let element = element(format.to_bytes(), size)?;
    Some(Tensor {
        addr: view.buf.expose_provenance() as u64,
        strides: in_elements(&shape, &bytes, size)?,
        shape,
        element,
        place: Place::Host,
        read_only: view.readonly != 0,
        torch: false,
        owned: true,
        owner: object.clone().unbind(),
    })
}

/// Native numbers of one letter.
fn element(format: &[u8], size: u64) -> Option<Element> {
    let letter = match format {
        [letter] | [b'@' | b'=', letter] => letter,
        _ => return None,
    };
    let kind = match letter {
        b'b' | b'h' | b'i' | b'l' | b'q' => 'i',
        b'B' | b'H' | b'I' | b'L' | b'Q' => 'u',
        b'e' | b'f' | b'd' => 'f',
        _ => return None,
    };
    Some(Element::of_kind(kind, size))
}
