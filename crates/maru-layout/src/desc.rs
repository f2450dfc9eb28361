//! A tensor as the engine hands it over: shape, strides, element type.

use crate::overlap::{Overlap, self_overlap};
use crate::{DType, LayoutError};

/// Most axes a tensor may have.
pub const MAX_AXES: usize = 8;

/// Shape, element strides and type of a registered tensor; addresses are kept apart from it.
///
/// A value of this type is sound: no axis of length 0, strides positive wherever they are used, no two
/// positions sharing a byte, and an address span below 2^63 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorDesc {
    shape: Vec<u64>,
    /// Elements; 0 for an axis of length 1, whose stride is arbitrary and never used.
    strides: Vec<u64>,
    dtype: DType,
    span_bytes: u64,
}

impl TensorDesc {
    /// A C-contiguous tensor.
    ///
    /// # Errors
    /// As [`TensorDesc::strided`].
    pub fn contiguous(shape: &[i64], dtype: DType) -> Result<Self, LayoutError> {
        check_shape(shape)?;
        let mut strides = vec![0i64; shape.len()];
        let mut step = 1i64;
        for (stride, &len) in strides.iter_mut().zip(shape).rev() {
            *stride = step;
            step = step.checked_mul(len).ok_or_else(|| span_error(shape))?;
        }
        Self::strided(shape, &strides, dtype)
    }

    /// A tensor with strides in elements, as the engine reports them.
    ///
    /// # Errors
    /// [`LayoutError`] naming the axis and number for: no axes or more than [`MAX_AXES`], lengths below 1,
    /// a different number of strides, a zero or negative stride on an axis longer than 1, an address span
    /// over 2^63 bytes, and two positions sharing a byte.
    pub fn strided(shape: &[i64], strides: &[i64], dtype: DType) -> Result<Self, LayoutError> {
        check_shape(shape)?;
        if strides.len() != shape.len() {
            return Err(LayoutError::StrideCount { axes: shape.len(), strides: strides.len() });
        }
        let mut span: u64 = 1;
        let mut elements: u64 = 1;
        let mut axes = Vec::with_capacity(shape.len());
        for (axis, (&len, &stride)) in shape.iter().zip(strides).enumerate() {
            let len = len.unsigned_abs();
            elements = elements
                .checked_mul(len)
                .filter(|e| *e <= i64::MAX.unsigned_abs())
                .ok_or_else(|| span_error(shape))?;
            if len == 1 {
                axes.push((len, 0));
                continue;
            }
            if stride <= 0 {
                return Err(LayoutError::BadStride { axis, stride, len });
            }
            let stride = stride.unsigned_abs();
            span = stride
                .checked_mul(len - 1)
                .and_then(|reach| span.checked_add(reach))
                .ok_or_else(|| span_error(shape))?;
            axes.push((len, stride));
        }
        let span_bytes = span
            .checked_mul(dtype.size())
            .filter(|bytes| *bytes <= i64::MAX.unsigned_abs())
            .ok_or_else(|| span_error(shape))?;
        match self_overlap(&axes, 1) {
            Overlap::Disjoint => {}
            outcome => {
                return Err(LayoutError::SharedBytes {
                    shape: shape.to_vec(),
                    strides: strides.to_vec(),
                    proven: outcome == Overlap::Shared,
                });
            }
        }
        Ok(TensorDesc {
            shape: axes.iter().map(|a| a.0).collect(),
            strides: axes.iter().map(|a| a.1).collect(),
            dtype,
            span_bytes,
        })
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Lengths of the axes.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Strides in elements; 0 for an axis of length 1.
    pub fn strides(&self) -> &[u64] {
        &self.strides
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes from the first to behind the last addressed element.
    pub fn span_bytes(&self) -> u64 {
        self.span_bytes
    }

    /// Byte stride of an axis; 0 for an axis of length 1. Cannot overflow: the span is checked.
    pub(crate) fn byte_stride(&self, axis: usize) -> u64 {
        self.strides[axis] * self.dtype.size()
    }
}

fn check_shape(shape: &[i64]) -> Result<(), LayoutError> {
    if shape.is_empty() || shape.len() > MAX_AXES {
        return Err(LayoutError::AxisCount { found: shape.len(), max: MAX_AXES });
    }
    match shape.iter().position(|len| *len < 1) {
        Some(axis) => Err(LayoutError::BadLength { axis, len: shape[axis] }),
        None => Ok(()),
    }
}

fn span_error(shape: &[i64]) -> LayoutError {
    LayoutError::SpanTooLarge { shape: shape.to_vec() }
}
