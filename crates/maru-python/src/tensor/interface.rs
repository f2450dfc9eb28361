//! `__cuda_array_interface__` and `__array_interface__`.

use maru_transfer::Place;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::{Dims, Tensor};
use crate::args;
use crate::driver;
use crate::dtype::{self, Element};
use crate::errors::{Fault, Result};

/// `None` for an object that has neither interface.
pub(super) fn read(object: &Bound<'_, PyAny>, name: &str) -> Result<Option<Tensor>> {
    let py = object.py();
    let mut cuda = true;
    let mut found = object.getattr_opt(intern!(py, "__cuda_array_interface__")).unwrap_or(None);
    if found.is_none() {
        cuda = false;
        found = object.getattr_opt(intern!(py, "__array_interface__")).unwrap_or(None);
    }
    let Some(interface) = found else { return Ok(None) };
    let bad = |what: &str| Fault::wrong_type(format!("{name}: its array interface has {what}"));
    let Ok(interface) = interface.cast_into::<PyDict>() else { return Err(bad("no dict").into()) };
    let item = |key: &str| -> Result<Option<Bound<'_, PyAny>>> {
        Ok(interface.get_item(key)?.filter(|value| !value.is_none()))
    };
    let shape = item("shape")?.and_then(|s| args::dims(&s)).ok_or_else(|| bad("no shape"))?;
    if shape.iter().any(|len| *len < 0) {
        return Err(bad("a negative length").into());
    }
    let data = item("data")?.and_then(|d| d.extract::<(u64, bool)>().ok());
    let (addr, read_only) = data.ok_or_else(|| bad("no data address"))?;
    let typestr =
        item("typestr")?.and_then(|t| t.extract::<String>().ok()).ok_or_else(|| bad("no typestr"))?;
    let element = element(object, &typestr).ok_or_else(|| bad(&format!("the typestr {typestr:?}")))?;
    let strides = match item("strides")? {
        None => contiguous(&shape),
        Some(strides) => {
            let bytes = args::dims(&strides).ok_or_else(|| bad("no list of strides"))?;
            if bytes.len() != shape.len() {
                return Err(bad(&format!("{} strides for {} axes", bytes.len(), shape.len())).into());
            }
            in_elements(&shape, &bytes, element.size()).ok_or_else(|| bad("strides of no whole element"))?
        }
    };
    let place = match cuda {
        false => Place::Host,
        true => driver::device_of(addr).map_or(Place::Cuda(0), Place::Cuda),
    };
    let owner = object.clone().unbind();
    Ok(Some(Tensor { addr, shape, strides, element, place, read_only, torch: false, owned: false, owner }))
}

/// `<f4`, `|u1`, `<V2`: byte order, kind, bytes. Swapped byte order is not moved as if it were native.
fn element(object: &Bound<'_, PyAny>, typestr: &str) -> Option<Element> {
    let mut chars = typestr.chars();
    let (order, kind) = (chars.next()?, chars.next()?);
    let bytes: u64 = chars.as_str().parse().ok()?;
    let swapped = if cfg!(target_endian = "little") { '>' } else { '<' };
    if order == swapped && bytes > 1 {
        return None;
    }
    if !"iufV".contains(kind) || bytes == 0 {
        return Some(Element::Other(bytes));
    }
    // Types that NumPy itself does not know (bfloat16, fp8 of ml_dtypes) are named by the dtype object only.
    if kind == 'V'
        && let Ok(dtype) = object.getattr("dtype")
        && let Ok(named @ Element::Kv(_)) = dtype::of_object(&dtype)
    {
        return Some(named);
    }
    Some(Element::of_kind(kind, bytes))
}

pub(super) fn contiguous(shape: &[i64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        // A product that saturates belongs to a shape that every reader refuses for its size.
        strides[axis] = strides[axis + 1].saturating_mul(shape[axis + 1].max(1));
    }
    strides
}

pub(super) fn in_elements(shape: &[i64], bytes: &[i64], size: u64) -> Option<Dims> {
    let size = i64::try_from(size).ok().filter(|size| *size > 0)?;
    let convert = |(len, stride): (&i64, &i64)| match (*len <= 1, stride % size) {
        (true, _) => Some(stride / size),
        (false, 0) => Some(stride / size),
        _ => None,
    };
    shape.iter().zip(bytes).map(convert).collect()
}
