//! DLPack, both ways. The C structures are those of version 0.8, which every library speaks.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use maru_layout::DType;
use maru_transfer::Place;
use pyo3::ffi;
use pyo3::prelude::*;

use super::interface::contiguous;
use super::{Dims, Tensor};
use crate::dtype::Element;
use crate::errors::{Fault, Result};

const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;
pub(super) const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

#[repr(C)]
pub(super) struct DLTensor {
    pub(super) data: *mut c_void,
    pub(super) device_type: i32,
    pub(super) device_id: i32,
    ndim: i32,
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    pub(super) byte_offset: u64,
}

impl Default for DLTensor {
    fn default() -> Self {
        DLTensor {
            data: std::ptr::null_mut(),
            device_type: CPU,
            device_id: 0,
            ndim: 0,
            code: 0,
            bits: 0,
            lanes: 0,
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        }
    }
}

impl DLTensor {
    /// Length and stride of the only axis; `None` if there are more, or fewer.
    ///
    /// # Safety
    /// As [`DLTensor::dims`].
    pub(super) unsafe fn only_axis(&self) -> Option<(u64, i64)> {
        if self.ndim != 1 {
            return None;
        }
        // SAFETY: DLPack's contract: a number an axis at each list that is not null.
        let len = *unsafe { self.shape.as_ref() }?;
        // SAFETY: as above.
        let stride = unsafe { self.strides.as_ref() }.copied().unwrap_or(1);
        Some((u64::try_from(len).ok()?, stride))
    }

    /// Shape and strides; `None` where there is no shape.
    ///
    /// # Safety
    /// A producer has filled it, whose lists are still there.
    pub(super) unsafe fn dims(&self) -> Option<(Dims, Dims)> {
        let axes = usize::try_from(self.ndim).ok()?;
        let list = |first: *mut i64| -> Option<Dims> {
            if axes == 0 {
                return Some(Dims::new());
            }
            let first = NonNull::new(first)?;
            // SAFETY: DLPack's contract: as many numbers as axes at each list that is not null.
            Some(Dims::from_slice(unsafe { std::slice::from_raw_parts(first.as_ptr(), axes) }))
        };
        let shape = list(self.shape)?;
        let strides = list(self.strides).unwrap_or_else(|| contiguous(&shape));
        Some((shape, strides))
    }
}

/// Where a device is that DLPack names; `None` for kinds that are neither cpu nor cuda, or no device.
pub(super) fn place(kind: i32, id: i32) -> Option<Place> {
    match kind {
        CPU | CUDA_HOST => Some(Place::Host),
        CUDA | CUDA_MANAGED => u32::try_from(id).ok().map(Place::Cuda),
        _ => None,
    }
}

/// An element type by DLPack's numbers; `None` for elements of no whole byte.
pub(super) fn element(code: u8, bits: u8, lanes: u16) -> Option<Element> {
    let width = u64::from(bits) * u64::from(lanes);
    if !width.is_multiple_of(8) || width == 0 {
        return None;
    }
    Some(match code {
        _ if lanes != 1 => Element::of_kind('x', width / 8),
        0 => Element::of_kind('i', width / 8),
        1 => Element::of_kind('u', width / 8),
        2 => Element::of_kind('f', width / 8),
        3 => Element::of_kind('V', width / 8),
        4 if bits == 16 => Element::Kv(DType::Bf16),
        _ => Element::of_kind('x', width / 8),
    })
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
    let place = match (i32::try_from(kind), i32::try_from(id)) {
        (Ok(kind), Ok(id)) => place(kind, id),
        _ => None,
    };
    let place = place.ok_or_else(|| {
        Fault::value(format!("{name} is on device {id} of DLPack kind {kind}, not cpu or cuda"))
    })?;
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
    // SAFETY: as above.
    let (shape, strides) = unsafe { tensor.dims() }.ok_or_else(|| bad("no shape".to_owned()))?;
    let element = element(tensor.code, tensor.bits, tensor.lanes);
    let element = element.ok_or_else(|| {
        bad(format!("elements of {} bits", u64::from(tensor.bits) * u64::from(tensor.lanes)))
    })?;
    let addr = (tensor.data.expose_provenance() as u64).checked_add(tensor.byte_offset);
    let addr = addr.ok_or_else(|| bad("an address that wraps".to_owned()))?;
    let owner = capsule.unbind();
    Ok(Some(Tensor {
        addr,
        shape,
        strides,
        element,
        place,
        read_only: false,
        torch: false,
        owned: false,
        owner,
    }))
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
