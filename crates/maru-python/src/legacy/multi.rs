//! `multi_layer_kv_transfer`: all layers of a slab, tokens by slot.

use maru_layout::{Axis, DType, Direction, EngineFormat, EngineGeometry, EngineOp};
use maru_transfer::{Place, Stream, TransferRequest};
use pyo3::prelude::*;

use super::planes::{Key, pointers, registered};
use super::{blocks_of, direction, finish, format, one_per_token, place, writable};
use crate::args;
use crate::errors::{Fault, Result, detached, guard};
use crate::process::process;
use crate::tensor::{Tensor, stream_of};
use crate::words::Words;

/// What the caller says of the cache besides the pointers.
struct Stated {
    page_buffer_size: u64,
    block_size: u64,
    head_size: u64,
    block_stride_elems: u64,
}

/// Moves the tokens of one slab to or from their slots, all layers, in one go.
///
/// `key_value` is the slab, `[kv][layer][token][row]`; token `t` is in slot `slot_mapping[t]` of the paged cache
/// whose layers begin at `key_value_ptrs`. See the package's documentation for every argument.
#[pyfunction]
#[pyo3(signature = (key_value, key_value_ptrs, slot_mapping, paged_memory_device, page_buffer_size, direction,
    engine_kv_format, block_size=None, head_size=None, skip_prefix_n_tokens=None, block_stride_elems=None),
    text_signature = "(key_value, key_value_ptrs, slot_mapping, paged_memory_device, page_buffer_size, direction, \
    engine_kv_format, block_size=0, head_size=0, skip_prefix_n_tokens=0, block_stride_elems=0)")]
#[allow(clippy::too_many_arguments, reason = "the signature is the old callers'")]
pub(crate) fn multi_layer_kv_transfer(
    py: Python<'_>,
    key_value: &Bound<'_, PyAny>,
    key_value_ptrs: &Bound<'_, PyAny>,
    slot_mapping: &Bound<'_, PyAny>,
    paged_memory_device: &Bound<'_, PyAny>,
    page_buffer_size: &Bound<'_, PyAny>,
    direction: &Bound<'_, PyAny>,
    engine_kv_format: &Bound<'_, PyAny>,
    block_size: Option<&Bound<'_, PyAny>>,
    head_size: Option<&Bound<'_, PyAny>>,
    skip_prefix_n_tokens: Option<&Bound<'_, PyAny>>,
    block_stride_elems: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    guard(py, || {
        let or_zero = |o: Option<&Bound<'_, PyAny>>, name| o.map_or(Ok(0), |o| args::count(o, name));
        let direction = self::direction(direction)?;
        let format = self::format(engine_kv_format)?;
        let stated = Stated {
            page_buffer_size: args::positive(page_buffer_size, "page_buffer_size")?,
            block_size: or_zero(block_size, "block_size")?,
            head_size: or_zero(head_size, "head_size")?,
            block_stride_elems: or_zero(block_stride_elems, "block_stride_elems")?,
        };
        let skip = or_zero(skip_prefix_n_tokens, "skip_prefix_n_tokens")?;
        let place = self::place(paged_memory_device, "paged_memory_device")?;
        let slab = Tensor::of(key_value, "key_value")?;
        let dtype = slab_dtype(&slab)?;
        writable(slab.read_only, direction == Direction::Gather, "key_value")?;
        if let (Place::Cuda(_), true) = (slab.place, slab.place != place) {
            slab.expect_place("key_value", place)?;
        }
        let geometry = geometry(format, &stated, &slab, dtype)?;
        let stream = stream_of(py, place, slab.torch, None)?;
        let pointers = pointers(key_value_ptrs, "key_value_ptrs", place, stream)?;
        let slots = Words::of(slot_mapping, "slot_mapping")?;
        let tokens = slab.len_of(2);
        let (slots, slots_owner) = slots.slots("slot_mapping", place)?;
        one_per_token(&slots, tokens)?;
        let bytes = slab.count()?.checked_mul(dtype.size());
        let bytes = bytes.ok_or_else(|| Fault::overflow("key_value's size does not fit 63 bits"))?;
        if tokens == 0 {
            return Ok(());
        }
        let key = Key { format, block_op: false, geometry, place, pointers };
        let foreign = slab.foreign(py, place, bytes);
        let transfer = detached(py, move || {
            let engine = process().engine(place)?;
            let cache = registered(&key, &engine)?;
            let slab = process().memory.slab(place, foreign);
            let slab = slab.map_err(|e| e.of("key_value"))?;
            let request = match direction {
                Direction::Gather => TransferRequest::gather(&cache, slots, &slab),
                Direction::Scatter => TransferRequest::scatter(&cache, slots, &slab),
            };
            // SAFETY: the caller's current stream of the device, or its default stream.
            let stream = unsafe { Stream::cuda(stream) };
            let request = request.slab_tokens(tokens).skip_tokens(skip).on(stream);
            Ok(engine.submit(&request)?)
        })?;
        let keep = [Some(slab.owner), slots_owner].into_iter().flatten().collect();
        finish(py, place, transfer, keep);
        Ok(())
    })
}

fn slab_dtype(slab: &Tensor) -> Result<DType> {
    if slab.rank() != 4 {
        let message =
            format!("key_value has shape {:?}, 4 axes are needed: [kv][layer][token][row]", slab.shape);
        return Err(Fault::value(message).into());
    }
    if !slab.is_contiguous() {
        let message = format!(
            "key_value has shape {:?} with strides {:?}, it must be contiguous",
            slab.shape, slab.strides
        );
        return Err(Fault::value(message).into());
    }
    Ok(slab.element.kv().map_err(|e| e.of("key_value"))?)
}

/// Heads and their width follow from the slab's row and what the caller says.
fn geometry(
    format: EngineFormat,
    stated: &Stated,
    slab: &Tensor,
    dtype: DType,
) -> std::result::Result<EngineGeometry, Fault> {
    let (planes, row) = (format.planes(), slab.len_of(3));
    if slab.len_of(0) != planes {
        return Err(Fault::value(format!(
            "key_value has {} plane(s) (its first axis), format {format} needs {planes}",
            slab.len_of(0)
        )));
    }
    let order = format.order(EngineOp::Token);
    let has = |axis| order.contains(&axis);
    let at = |axis| order.iter().position(|a| *a == axis);
    let heads_first = matches!((at(Axis::Head), at(Axis::Token)), (Some(h), Some(t)) if h < t);
    let block_size = match (stated.block_size, format.number()) {
        (0, 3 | 5) => 1,
        (0, _) => {
            return Err(Fault::value(format!(
                "block_size is 0; format {format} needs the cache's block size"
            )));
        }
        (size, _) => size,
    };
    let num_blocks = blocks_of(stated.page_buffer_size, block_size)?;
    if heads_first && stated.head_size == 0 {
        return Err(Fault::value(format!(
            "head_size is 0; format {format} needs the width of a head in elements"
        )));
    }
    // Where a token's heads lie side by side, one head as wide as the row is the same bytes.
    let two = matches!(format.number(), 10 | 11);
    let content = has(Axis::Content);
    let (num_heads, head_size, content_width) = match (stated.head_size, content) {
        (_, false) if !has(Axis::Head) => (1, row, None),
        (0, false) => (1, row, None),
        (0, true) => (1, row / 2, Some(if two { row / 2 * 2 } else { row })),
        (size, _) => {
            let width = if two { size.checked_mul(2) } else { Some(size) };
            let width = width.filter(|w| row.is_multiple_of(*w)).ok_or_else(|| {
                Fault::value(format!(
                    "head_size is {size}, but a row of key_value has {row} elements, which is no whole number of {}",
                    if two { "heads of twice that (K and V)" } else { "heads" }
                ))
            })?;
            (row / width, size, content.then_some(width))
        }
    };
    Ok(EngineGeometry {
        num_blocks,
        block_size,
        num_heads,
        head_size,
        layers: slab.len_of(1),
        dtype,
        block_stride_elems: stated.block_stride_elems,
        content_width,
    })
}
