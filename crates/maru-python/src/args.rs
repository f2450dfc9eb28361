//! Arguments as numbers, with the argument's name in every error.

use pyo3::exceptions::PyOverflowError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyString};

use crate::errors::{Fault, Result};
use crate::tensor::Dims;

/// An argument that may be left out.
pub(crate) type Arg<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// A short name of an object's type, for messages.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string())
}

/// An integer (anything with `__index__`, enum members included, but neither a bool nor a float).
pub(crate) fn int(object: &Bound<'_, PyAny>, name: &str) -> Result<i64> {
    let of_ints = object.is_instance_of::<PyInt>();
    if of_ints && !object.is_exact_instance_of::<PyBool>() {
        // SAFETY: an int, or of a class of ints.
        let number = unsafe { ffi::PyLong_AsLongLong(object.as_ptr()) };
        // Nothing else goes wrong with an int.
        if number == -1 && PyErr::take(object.py()).is_some() {
            return Err(beyond(name).into());
        }
        return Ok(number);
    }
    if of_ints || object.is_instance_of::<PyFloat>() {
        return Err(not_an_int(object, name).into());
    }
    match object.extract::<i64>() {
        Ok(number) => Ok(number),
        Err(e) if e.is_instance_of::<PyOverflowError>(object.py()) => Err(beyond(name).into()),
        Err(_) => int_convertible(object, name),
    }
}

fn beyond(name: &str) -> Fault {
    Fault::overflow(format!("{name} is beyond 64 bits; allowed: -2^63 to 2^63-1"))
}

/// Enums of compiled modules convert with `int()` but have no `__index__`.
fn int_convertible(object: &Bound<'_, PyAny>, name: &str) -> Result<i64> {
    let text = object.is_instance_of::<PyString>() || object.is_instance_of::<pyo3::types::PyBytes>();
    let enum_like =
        !text && object.hasattr("__int__").unwrap_or(false) && object.hasattr("name").unwrap_or(false);
    if !enum_like {
        return Err(not_an_int(object, name).into());
    }
    let number = object.call_method0("__int__").and_then(|n| n.extract::<i64>());
    number.map_err(|_| not_an_int(object, name).into())
}

fn not_an_int(object: &Bound<'_, PyAny>, name: &str) -> Fault {
    Fault::wrong_type(format!("{name} is {}, an int is needed", a(&type_name(object))))
}

/// `a Tensor`, `an int`.
pub(crate) fn a(word: &str) -> String {
    let vowel = word.starts_with(['a', 'e', 'i', 'o', 'u', 'A', 'E', 'I', 'O', 'U']);
    format!("{} {word}", if vowel { "an" } else { "a" })
}

/// An integer of 0 or more.
pub(crate) fn count(object: &Bound<'_, PyAny>, name: &str) -> Result<u64> {
    let number = int(object, name)?;
    u64::try_from(number).map_err(|_| Fault::value(format!("{name} is {number}; allowed: 0 or more")).into())
}

/// An integer of 1 or more.
pub(crate) fn positive(object: &Bound<'_, PyAny>, name: &str) -> Result<u64> {
    match count(object, name)? {
        0 => Err(Fault::value(format!("{name} is 0; allowed: 1 or more")).into()),
        number => Ok(number),
    }
}

/// `None` or an integer of 1 or more.
pub(crate) fn optional(object: Option<&Bound<'_, PyAny>>, name: &str) -> Result<Option<u64>> {
    object.filter(|o| !o.is_none()).map(|o| positive(o, name)).transpose()
}

/// A truth value: a bool, or something NumPy made of one. Not any object, so that swapped arguments are seen.
pub(crate) fn boolean(object: &Bound<'_, PyAny>, name: &str) -> Result<bool> {
    if let Ok(value) = object.extract::<bool>() {
        return Ok(value);
    }
    match object.extract::<i64>() {
        Ok(0) => Ok(false),
        Ok(1) => Ok(true),
        _ => Err(Fault::wrong_type(format!("{name} is {}, a bool is needed", a(&type_name(object)))).into()),
    }
}

/// Longest sequence that is read item by item; a range can be longer than any memory.
pub(crate) const MOST_ITEMS: usize = 1 << 26;

/// A list of words. Nothing is reserved for a length that an object only claims.
pub(crate) fn texts(object: Option<&Bound<'_, PyAny>>, name: &str) -> Result<Vec<String>> {
    let Some(object) = object.filter(|o| !o.is_none()) else { return Ok(Vec::new()) };
    let wrong =
        || Fault::wrong_type(format!("{name} is {}, a list of text is needed", a(&type_name(object))));
    if object.is_instance_of::<PyString>() {
        return Err(wrong().into());
    }
    let mut texts = Vec::new();
    for item in object.try_iter().map_err(|_| wrong())? {
        texts.push(item?.extract::<String>().map_err(|_| wrong())?);
    }
    Ok(texts)
}

/// The items of a list, its length checked first.
pub(crate) fn numbers<'py, T: for<'a> FromPyObject<'a, 'py>>(
    object: &Bound<'py, PyAny>,
    name: &str,
) -> Result<Vec<T>> {
    let len = object.len().unwrap_or(0);
    if len > MOST_ITEMS {
        let message = format!("{name} has {len} numbers; allowed: up to {MOST_ITEMS}, or an array");
        return Err(Fault::value(message).into());
    }
    match object.extract::<Vec<T>>() {
        Ok(numbers) => Ok(numbers),
        Err(e) if e.is_instance_of::<PyOverflowError>(object.py()) => {
            Err(Fault::overflow(format!("{name} holds a number that does not fit")).into())
        }
        Err(_) => Err(Fault::wrong_type(format!(
            "{name} is {}, an int64 tensor or a list of ints is needed",
            a(&type_name(object))
        ))
        .into()),
    }
}

/// A shape or strides: a short list of ints.
pub(crate) fn dims(object: &Bound<'_, PyAny>) -> Option<Dims> {
    const MOST_AXES: usize = 64;
    object.len().ok().filter(|len| *len <= MOST_AXES)?;
    object.extract::<Vec<i64>>().ok().map(Dims::from_vec)
}
