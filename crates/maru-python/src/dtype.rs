//! Element types of other libraries, by the name they print.

use std::sync::Mutex;

use maru_layout::DType;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::errors::{Fault, Result};

/// What an array holds. Slots and pointers are `Int64`; all else is moved, not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    /// 64-bit signed integers: slot lists, pointers, block ids; as KV, words without a type.
    Int64,
    /// Something a cache or slab may hold.
    Kv(DType),
    /// Something that it may not; the value is the size of an element.
    Other(u64),
}

impl Element {
    /// By the name that torch, NumPy, ml_dtypes and JAX print, or one of ours.
    pub(crate) fn of_name(name: &str) -> Option<Element> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        Some(Element::Kv(match name {
            "int64" => return Some(Element::Int64),
            "float32" | "float" | "f32" => DType::F32,
            "float16" | "half" | "f16" => DType::F16,
            "bfloat16" | "bf16" => DType::Bf16,
            "uint8" | "u8" => DType::U8,
            "int8" | "i8" => DType::I8,
            "float8_e4m3fn" | "float8_e4m3" | "fp8_e4m3" => DType::Fp8E4m3,
            "float8_e5m2" | "fp8_e5m2" => DType::Fp8E5m2,
            "raw8" => DType::Raw8,
            // NumPy has no bfloat16: its users keep such bits in 16-bit integers.
            "int16" | "uint16" | "raw16" => DType::Raw16,
            "int32" | "uint32" | "raw32" => DType::Raw32,
            "uint64" | "float64" | "double" | "raw64" => DType::Raw64,
            _ => return None,
        }))
    }

    /// By kind and width of an array interface or DLPack.
    pub(crate) fn of_kind(kind: char, bytes: u64) -> Element {
        Element::Kv(match (kind, bytes) {
            ('i', 8) => return Element::Int64,
            ('f', 4) => DType::F32,
            ('f', 2) => DType::F16,
            ('u', 1) => DType::U8,
            ('i', 1) => DType::I8,
            ('V', 1) => DType::Raw8,
            ('i' | 'u' | 'V', 2) => DType::Raw16,
            ('i' | 'u' | 'V', 4) => DType::Raw32,
            ('u' | 'f' | 'V', 8) => DType::Raw64,
            _ => return Element::Other(bytes),
        })
    }

    pub(crate) fn size(self) -> u64 {
        match self {
            Element::Int64 => 8,
            Element::Kv(dtype) => dtype.size(),
            Element::Other(bytes) => bytes,
        }
    }

    /// As what a cache or slab holds.
    pub(crate) fn kv(self) -> std::result::Result<DType, Fault> {
        match self {
            Element::Int64 => Ok(DType::Raw64),
            Element::Kv(dtype) => Ok(dtype),
            Element::Other(bytes) => Err(Fault::wrong_type(format!(
                "elements of {bytes} bytes of an unknown type; give a dtype of {}, or view them as integers of the same width",
                DType::ALL.map(DType::name).join(", ")
            ))),
        }
    }
}

/// The element type of a `dtype` object. Objects are remembered, since there are few and asking each for its
/// name costs more than a launch.
pub(crate) fn of_object(dtype: &Bound<'_, PyAny>) -> Result<Element> {
    type Known = Vec<(Py<PyAny>, Element)>;
    static KNOWN: PyOnceLock<Mutex<Known>> = PyOnceLock::new();
    const MOST: usize = 64;
    let py = dtype.py();
    let known = KNOWN.get_or_init(py, || Mutex::new(Vec::new()));
    let look = || {
        let known = known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        known.iter().find(|(object, _)| object.is(dtype)).map(|(_, element)| *element)
    };
    if let Some(element) = look() {
        return Ok(element);
    }
    let name = match dtype.getattr("name") {
        Ok(name) => name.str()?.to_string(),
        Err(_) => dtype.str()?.to_string(),
    };
    let element = match Element::of_name(&name) {
        Some(element) => element,
        None => {
            let size = dtype.getattr("itemsize").and_then(|n| n.extract::<u64>()).unwrap_or(0);
            Element::Other(size)
        }
    };
    let mut known = known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if known.len() < MOST {
        known.push((dtype.clone().unbind(), element));
    }
    Ok(element)
}

/// A dtype that the caller states: one of our names, or a dtype object.
pub(crate) fn stated(object: &Bound<'_, PyAny>) -> Result<DType> {
    let element = match object.extract::<String>() {
        Ok(name) => Element::of_name(&name),
        Err(_) => Some(of_object(object)?),
    };
    match element.map(Element::kv) {
        Some(Ok(dtype)) => Ok(dtype),
        _ => Err(Fault::value(format!(
            "dtype is {}; allowed: {}",
            object.str()?,
            DType::ALL.map(DType::name).join(", ")
        ))
        .into()),
    }
}
