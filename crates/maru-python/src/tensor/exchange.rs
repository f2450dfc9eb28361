//! Torch's tensors and current stream through DLPack's C functions (torch 2.10 and later): no Python object is made on
//! the way, which over a call saves more than its launch costs.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::{ffi, intern};

use super::dlpack::{self, DLTensor};
use super::torch;
use super::{Line, Tensor};
use crate::dtype::Element;

const NAME: &CStr = c"dlpack_exchange_api";
/// The version whose table this is. A later one may be another.
const MAJOR: u32 = 1;

/// `DLPackExchangeAPI`.
#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    older: *const Table,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: *const c_void,
    /// May be null.
    borrow: Option<unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> c_int>,
    stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

/// Torch's functions.
#[derive(Clone, Copy)]
struct Exchange {
    /// `torch.Tensor`. Its subclasses may be anything and are asked in Python.
    class: usize,
    borrow: unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> c_int,
    stream: unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int,
}

impl Exchange {
    /// Torch's, if it is loaded and has them.
    fn get(py: Python<'_>) -> Option<Exchange> {
        static FOUND: PyOnceLock<Option<Exchange>> = PyOnceLock::new();
        if let Some(found) = FOUND.get(py) {
            return *found;
        }
        // Not inside the cell, where a search in vain costs as much as all else that a call does.
        let class = torch::class(py)?;
        *FOUND.get_or_init(py, || Exchange::find(class))
    }

    fn find(class: &Bound<'_, PyAny>) -> Option<Exchange> {
        let py = class.py();
        let capsule = class.getattr_opt(intern!(py, "__dlpack_c_exchange_api__")).ok()??;
        // SAFETY: any object may be asked; the name is a C string.
        if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME.as_ptr()) } == 0 {
            return None;
        }
        // SAFETY: a valid capsule of that name, as just checked.
        let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) };
        let table = NonNull::new(table.cast::<Table>())?;
        // SAFETY: DLPack's contract: a capsule of this name holds such a table for as long as the process lives; its
        // first two fields are the same in every version.
        let major = unsafe { (*table.as_ptr()).major };
        if major != MAJOR {
            return None;
        }
        // SAFETY: as above, of this version.
        let table = unsafe { table.as_ref() };
        Some(Exchange { class: class.as_ptr().addr(), borrow: table.borrow?, stream: table.stream? })
    }
}

/// A plain torch tensor as torch describes it. What it points to is the tensor's, which nobody changes while the GIL is
/// held.
fn borrowed(object: &Bound<'_, PyAny>) -> Option<DLTensor> {
    let py = object.py();
    let exchange = Exchange::get(py)?;
    if object.get_type_ptr().addr() != exchange.class {
        return None;
    }
    let mut found = DLTensor::default();
    // SAFETY: a tensor of the class that the function is of, with the GIL held; it fills what it is given.
    if unsafe { (exchange.borrow)(object.as_ptr().cast(), &raw mut found) } != 0 {
        // The Python way says what is wrong.
        drop(PyErr::take(py));
        return None;
    }
    Some(found)
}

/// `None` for anything but a plain torch tensor of one axis of 64-bit integers.
pub(super) fn line(object: &Bound<'_, PyAny>) -> Option<Line> {
    let found = borrowed(object)?;
    if dlpack::element(found.code, found.bits, found.lanes) != Some(Element::Int64) {
        return None;
    }
    // SAFETY: just filled.
    let (len, stride) = unsafe { found.only_axis() }?;
    let addr = (found.data.expose_provenance() as u64).checked_add(found.byte_offset)?;
    let place = dlpack::place(found.device_type, found.device_id)?;
    Some(Line { addr, len, stride, place, owned: addr != 0 })
}

/// `None` for anything but a plain torch tensor of a usual element type, or without these functions.
pub(super) fn read(object: &Bound<'_, PyAny>) -> Option<Tensor> {
    let found = borrowed(object)?;
    // SAFETY: just filled.
    let (shape, strides) = unsafe { found.dims() }?;
    let element = match dlpack::element(found.code, found.bits, found.lanes) {
        Some(Element::Other(_)) | None => return None,
        Some(element) => element,
    };
    let addr = (found.data.expose_provenance() as u64).checked_add(found.byte_offset)?;
    let place = dlpack::place(found.device_type, found.device_id)?;
    let owner = object.clone().unbind();
    Some(Tensor {
        addr,
        shape,
        strides,
        element,
        place,
        read_only: false,
        torch: true,
        owned: addr != 0,
        owner,
    })
}

/// Torch's current stream of a device.
pub(super) fn current_stream(py: Python<'_>, device: u32) -> Option<usize> {
    let exchange = Exchange::get(py)?;
    let mut stream = std::ptr::null_mut();
    // SAFETY: the function writes one handle, with the GIL held.
    let code = unsafe { (exchange.stream)(dlpack::CUDA, i32::try_from(device).ok()?, &raw mut stream) };
    if code != 0 {
        drop(PyErr::take(py));
        return None;
    }
    Some(stream.expose_provenance())
}
