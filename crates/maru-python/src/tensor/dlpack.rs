//! DLPack, both ways. The C structures are those of version 0.8, which every library speaks.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use maru_layout::DType;
use maru_transfer::Place;
use pyo3::ffi;
use pyo3::prelude::*;

use super::Tensor;
use super::interface::contiguous;
use crate::dtype::Element;
use crate::errors::{Fault, Result};

const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

#[repr(C)]
struct DLTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DLManagedTensor {
    tensor: DLTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// `None` for an object without `__dlpack__`.
pub(super) fn read(object: &Bound<'_, PyAny>, name: &str) -> Result<Option<Tensor>> {
    let py = object.py();
    let Ok(device) = object.call_method0("__dlpack_device__") else { return Ok(None) };
    let (kind, id) = device
        .extract::<(i64, i64)>()
        .map_err(|_| Fault::wrong_type(format!("{name}.__dlpack_device__() is no pair of ints")))?;
    let place = match i32::try_from(kind).unwrap_or(0) {
        CPU | CUDA_HOST => Place::Host,
        CUDA | CUDA_MANAGED => {
            Place::Cuda(u32::try_from(id).map_err(|_| Fault::value(format!("{name} is on device {id}")))?)
        }
        _ => {
            return Err(Fault::value(format!(
                "{name} is on a device of DLPack kind {kind}, not cpu or cuda"
            ))
            .into());
        }
    };
    // The capsule stays unconsumed: its own destructor gives the tensor back when we let go of it.
    let capsule = object.call_method0("__dlpack__")?;
    // SAFETY: any object may be asked; the name is a C string.
    if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME.as_ptr()) } == 0 {
        return Err(Fault::wrong_type(format!("{name}.__dlpack__() gave no DLPack tensor")).into());
    }
    // SAFETY: a valid capsule of that name, as just checked.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) };
    let Some(managed) = NonNull::new(managed.cast::<DLManagedTensor>()) else {
        return Err(PyErr::fetch(py).into());
    };
    // SAFETY: a capsule of this name holds a DLManagedTensor, which the capsule keeps alive.
    let tensor = unsafe { &managed.as_ref().tensor };
    let bad = |what: String| Fault::wrong_type(format!("{name}: its DLPack tensor has {what}"));
    let ndim = usize::try_from(tensor.ndim).map_err(|_| bad(format!("{} axes", tensor.ndim)))?;
    let list = |first: *mut i64| -> Option<Vec<i64>> {
        match (NonNull::new(first), ndim) {
            (_, 0) => Some(Vec::new()),
            (None, _) => None,
            // SAFETY: DLPack's contract: `ndim` numbers at each non-null list.
            (Some(first), _) => Some(unsafe { std::slice::from_raw_parts(first.as_ptr(), ndim) }.to_vec()),
        }
    };
    let shape = list(tensor.shape).ok_or_else(|| bad("no shape".to_owned()))?;
    let strides = list(tensor.strides).unwrap_or_else(|| contiguous(&shape));
    let bits = u64::from(tensor.bits) * u64::from(tensor.lanes);
    if !bits.is_multiple_of(8) || bits == 0 {
        return Err(bad(format!("elements of {bits} bits")).into());
    }
    let kind = match tensor.code {
        _ if tensor.lanes != 1 => 'x',
        0 => 'i',
        1 => 'u',
        2 => 'f',
        3 => 'V',
        4 if bits == 16 => 'b',
        _ => 'x',
    };
    let element = match kind {
        'b' => Element::Kv(DType::Bf16),
        kind => Element::of_kind(kind, bits / 8),
    };
    let addr = (tensor.data.expose_provenance() as u64).checked_add(tensor.byte_offset);
    let addr = addr.ok_or_else(|| bad("an address that wraps".to_owned()))?;
    let owner = capsule.unbind();
    Ok(Some(Tensor { addr, shape, strides, element, place, read_only: false, torch: false, owner }))
}

/// What an exported capsule owns.
struct Exported {
    managed: DLManagedTensor,
    shape: i64,
    stride: i64,
    _owner: Py<PyAny>,
}

/// Host bytes as a one-dimensional `uint8` tensor that keeps `owner` alive.
pub(crate) fn export<'py>(
    py: Python<'py>,
    addr: usize,
    bytes: i64,
    owner: Py<PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let data = std::ptr::with_exposed_provenance_mut::<c_void>(addr);
    let tensor = DLTensor {
        data,
        device_type: CPU,
        device_id: 0,
        ndim: 1,
        code: 1,
        bits: 8,
        lanes: 1,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = DLManagedTensor { tensor, context: std::ptr::null_mut(), deleter: Some(give_back) };
    let exported = Box::into_raw(Box::new(Exported { managed, shape: bytes, stride: 1, _owner: owner }));
    // SAFETY: just made by Box, so valid and ours alone.
    let held = unsafe { &mut *exported };
    held.managed.context = exported.cast();
    held.managed.tensor.shape = &raw mut held.shape;
    held.managed.tensor.strides = &raw mut held.stride;
    let managed: *mut DLManagedTensor = &raw mut held.managed;
    // SAFETY: the pointer is not null, the name is static; the destructor takes capsules of this kind.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(drop_capsule)) };
    if capsule.is_null() {
        // SAFETY: nobody else has seen it.
        drop(unsafe { Box::from_raw(exported) });
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference to the capsule, not null.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// DLPack's deleter: the consumer is done.
unsafe extern "C" fn give_back(managed: *mut DLManagedTensor) {
    // SAFETY: the consumer passes what `export` made, once.
    let exported = unsafe { (*managed).context }.cast::<Exported>();
    // The owner's reference may be given up without the GIL: PyO3 then does it later.
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(exported) });
}

/// The capsule dies: nobody consumed it if it still has its first name.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with a capsule of ours and the GIL held.
    if unsafe { ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: valid, as just checked.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()) }.cast::<DLManagedTensor>();
    // SAFETY: not consumed, so still as `export` made it.
    unsafe { give_back(managed) };
}
