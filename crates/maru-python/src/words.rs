//! Lists of 64-bit integers: slots, pointers, block ids.

use std::sync::Arc;

use maru_layout::SlotMapping;
use maru_transfer::Place;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyRange, PyTuple};

use crate::args::{MOST_ITEMS, a, numbers, type_name};
use crate::driver;
use crate::dtype::Element;
use crate::errors::{Fault, Result, detached};
use crate::memory::{mapped, with_context};
use crate::tensor::{Line, Tensor, expect_place};

/// A list as it came: values on the host, or a tensor in device memory.
pub(crate) enum Words {
    Host(Arc<[i64]>),
    Device(DeviceList),
}

/// A contiguous tensor in device memory.
pub(crate) struct DeviceList {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    place: Place,
    /// Keeps the memory alive.
    pub(crate) owner: Py<PyAny>,
}

impl Words {
    /// A one-dimensional int64 array, or a sequence of ints.
    pub(crate) fn of(object: &Bound<'_, PyAny>, name: &str) -> Result<Words> {
        if let Some(line) = Line::quick(object) {
            return Self::of_line(line, || object.clone().unbind(), name);
        }
        // The usual sequences are no arrays; asking them costs an exception for every kind of array.
        if object.is_instance_of::<PyList>()
            || object.is_instance_of::<PyTuple>()
            || object.is_instance_of::<PyRange>()
        {
            return sequence(object, name);
        }
        let Some(tensor) = Tensor::try_of(object, name)? else { return sequence(object, name) };
        if tensor.element != Element::Int64 {
            let found = object.getattr("dtype").and_then(|d| d.str().map(|s| s.to_string()));
            let found = found.unwrap_or_else(|_| format!("{}-byte elements", tensor.element.size()));
            return Err(Fault::wrong_type(format!("{name} has dtype {found}, int64 is needed")).into());
        }
        if tensor.rank() != 1 {
            return Err(
                Fault::value(format!("{name} has shape {:?}, one axis is needed", tensor.shape)).into()
            );
        }
        Self::of_line(Line::of(&tensor), || tensor.owner, name)
    }

    fn of_line(line: Line, owner: impl FnOnce() -> Py<PyAny>, name: &str) -> Result<Words> {
        let Line { addr, len, stride, place, .. } = line;
        match place {
            Place::Host => Ok(Words::Host(read(line).map_err(|e| e.of(name))?)),
            _ if line.is_contiguous() => Ok(Words::Device(DeviceList { addr, len, place, owner: owner() })),
            _ => Err(Fault::value(format!(
                "{name} has stride {stride}, in device memory it must be contiguous"
            ))
            .into()),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        match self {
            Words::Host(words) => words.len() as u64,
            Words::Device(list) => list.len,
        }
    }

    /// As the slots of a transfer of a cache in `place`; the object that must outlive it comes along.
    pub(crate) fn slots(self, name: &str, place: Place) -> Result<(SlotMapping, Option<Py<PyAny>>)> {
        match self {
            Words::Host(words) => Ok((SlotMapping::from_slots(words), None)),
            Words::Device(list) => {
                expect_place(name, list.place, place)?;
                Ok((SlotMapping::Device { addr: list.addr, len: list.len }, Some(list.owner)))
            }
        }
    }

    /// The values. Those of a device list are read in stream order, which blocks.
    pub(crate) fn values(
        self,
        py: Python<'_>,
        name: &str,
        place: Place,
        stream: usize,
    ) -> Result<Arc<[i64]>> {
        match self {
            Words::Host(words) => Ok(words),
            Words::Device(list) => {
                expect_place(name, list.place, place)?;
                let (addr, count) = (list.addr, usize::try_from(list.len).unwrap_or(usize::MAX));
                let words = detached(py, || {
                    with_context(place, || {
                        let needed = addr.saturating_add((count as u64).saturating_mul(8));
                        if driver::known_end(addr, needed) < needed {
                            return Err(Fault::value(format!(
                                "{count} words at {addr:#x} are no device memory"
                            )));
                        }
                        driver::read_words(addr, count, stream)
                    })
                });
                Ok(words.map_err(|e| e.of(name))?.into())
            }
        }
    }
}

fn sequence(object: &Bound<'_, PyAny>, name: &str) -> Result<Words> {
    if object.is_none() || object.is_instance_of::<PyDict>() {
        let found = a(&type_name(object));
        return Err(Fault::wrong_type(format!(
            "{name} is {found}, an int64 tensor or a list of ints is needed"
        ))
        .into());
    }
    match plain_ints(object) {
        Some(words) => Ok(Words::Host(words)),
        None => Ok(Words::Host(numbers(object, name)?.into())),
    }
}

/// A list or tuple of nothing but ints that fit, without the iterator and the conversions that any object may have:
/// in half the time, and what that saves for a chunk's slots is about a launch. `None` for everything else.
fn plain_ints(object: &Bound<'_, PyAny>) -> Option<Arc<[i64]>> {
    type Get = unsafe extern "C" fn(*mut ffi::PyObject, ffi::Py_ssize_t) -> *mut ffi::PyObject;
    let get: Get = match () {
        () if object.is_exact_instance_of::<PyList>() => ffi::PyList_GetItem,
        () if object.is_exact_instance_of::<PyTuple>() => ffi::PyTuple_GetItem,
        () => return None,
    };
    let len = object.len().ok().filter(|len| *len <= MOST_ITEMS)?;
    let mut words = Arc::<[i64]>::new_uninit_slice(len);
    // Ours alone so far.
    let places = Arc::get_mut(&mut words)?;
    for (i, place) in (0..ffi::Py_ssize_t::try_from(len).ok()?).zip(places) {
        // SAFETY: a list or tuple of that length. The reference is borrowed, and no Python code runs before it is
        // used for the last time.
        let item = unsafe { get(object.as_ptr(), i) };
        // SAFETY: not null, as the index is in range.
        if item.is_null() || unsafe { ffi::PyLong_CheckExact(item) } == 0 {
            return None;
        }
        // SAFETY: an int.
        let word = unsafe { ffi::PyLong_AsLongLong(item) };
        if word == -1 && PyErr::take(object.py()).is_some() {
            return None;
        }
        place.write(word);
    }
    // SAFETY: every place was written, as there are as many as numbers.
    Some(unsafe { words.assume_init() })
}

/// Copies a host tensor's numbers out, whatever its stride.
fn read(line: Line) -> std::result::Result<Arc<[i64]>, Fault> {
    let (len, stride) = (line.len, if line.len <= 1 { 1 } else { line.stride });
    let Some(last) = len.checked_sub(1) else { return Ok(Arc::default()) };
    let overflow = || Fault::overflow("its last address does not fit 64 bits");
    let reach = i128::from(last) * i128::from(stride) * 8;
    let ends = [i128::from(line.addr), i128::from(line.addr) + reach];
    let (low, high) = (ends[0].min(ends[1]), ends[0].max(ends[1]) + 8);
    let low_addr = u64::try_from(low).map_err(|_| overflow())?;
    let span = u64::try_from(high - low).map_err(|_| overflow())?;
    if !line.owned {
        mapped(low_addr, span)?;
    }
    let count = usize::try_from(len).map_err(|_| overflow())?;
    let first = usize::try_from(line.addr).map_err(|_| overflow())?;
    let step = usize::try_from(stride.unsigned_abs()).map_err(|_| overflow())?.saturating_mul(8);
    if count > MOST_ITEMS {
        // What is asked for below is there or ends the process.
        let enough = Vec::<i64>::new().try_reserve_exact(count);
        enough.map_err(|_| Fault::value(format!("{len} numbers do not fit into memory")))?;
    }
    let mut words = Arc::<[i64]>::new_uninit_slice(count);
    // Ours alone so far.
    let Some(places) = Arc::get_mut(&mut words) else { return Err(Fault::state("new memory is shared")) };
    if stride == 1 {
        let first = std::ptr::with_exposed_provenance::<u8>(first);
        // SAFETY: as many bytes are in the range that was just seen to be mapped, in an array that the caller holds; the
        // places are new memory.
        unsafe {
            std::ptr::copy_nonoverlapping(first, places.as_mut_ptr().cast::<u8>(), size_of_val(places))
        };
    } else {
        for (i, place) in places.iter_mut().enumerate() {
            // In range: the last one was computed above.
            let at = if stride < 0 { first - i * step } else { first + i * step };
            let pointer = std::ptr::with_exposed_provenance::<i64>(at);
            // SAFETY: inside the range that was just seen to be mapped, in an array that the caller holds.
            place.write(unsafe { pointer.read_unaligned() });
        }
    }
    // SAFETY: every place was written.
    Ok(unsafe { words.assume_init() })
}
