//! `single_layer_kv_transfer`: one layer, the paged tensor itself.

use maru_layout::{Axis, Direction, EngineFormat, SlabLayout};
use maru_transfer::{Place, Stream, TransferRequest};
use pyo3::prelude::*;

use super::planes::{LayerKey, registered_layer, slab_part};
use super::{direction, finish, format, one_per_token, writable};
use crate::args;
use crate::errors::{Fault, detached, guard};
use crate::process::process;
use crate::tensor::{Tensor, stream_of};
use crate::words::Words;

/// Moves the tokens of one layer between its part of a slab and the paged tensor.
///
/// The slab part is `[2][T][H]`, or `[T][2][H]` with `token_major`; the paged tensor is read by its strides, so
/// an HND cache may have the engine's shape or its head axis moved to where memory has it.
#[pyfunction]
#[pyo3(signature = (lmc_key_value_cache, vllm_key_value_cache, slot_mapping, direction, engine_kv_format,
    token_major=None), text_signature = "(lmc_key_value_cache, vllm_key_value_cache, slot_mapping, direction, \
    engine_kv_format, token_major=False)")]
pub(crate) fn single_layer_kv_transfer(
    py: Python<'_>,
    lmc_key_value_cache: &Bound<'_, PyAny>,
    vllm_key_value_cache: &Bound<'_, PyAny>,
    slot_mapping: &Bound<'_, PyAny>,
    direction: &Bound<'_, PyAny>,
    engine_kv_format: &Bound<'_, PyAny>,
    token_major: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    guard(py, || {
        let direction = self::direction(direction)?;
        let format = self::format(engine_kv_format)?;
        let token_major = token_major.map_or(Ok(false), |t| args::boolean(t, "token_major"))?;
        if !matches!(format.number(), 1 | 2 | 3 | 6 | 7) {
            return Err(Fault {
                kind: "unsupported_format",
                message: format!(
                    "engine format {} ({format}) has no single-layer call; allowed: 1, 2, 3, 6, 7",
                    format.number()
                ),
            }
            .into());
        }
        let slab = Tensor::of(lmc_key_value_cache, "lmc_key_value_cache")?;
        let paged = Tensor::of(vllm_key_value_cache, "vllm_key_value_cache")?;
        let place = paged.place;
        writable(slab.read_only, direction == Direction::Gather, "lmc_key_value_cache")?;
        writable(paged.read_only, direction == Direction::Scatter, "vllm_key_value_cache")?;
        if let Place::Cuda(_) = slab.place {
            slab.expect_place("lmc_key_value_cache", place)?;
        }
        same_elements(&slab, &paged)?;
        let part = SlabPart::of(&slab, format, token_major)?;
        let layout = part.layout(&slab)?;
        let (slots, slots_owner) = Words::of(slot_mapping, "slot_mapping")?.slots("slot_mapping", place)?;
        one_per_token(&slots, part.tokens)?;
        let (Some(layout), Some(axes)) = (layout, axes(&paged, format, part.row)?) else { return Ok(()) };
        let dtype = paged.element.kv().map_err(|e| e.of("vllm_key_value_cache"))?;
        let stream = stream_of(py, place, slab.torch || paged.torch, None)?;
        let (addr, shape, strides) = (paged.addr, paged.shape, paged.strides);
        let key = LayerKey { addr, shape, strides, dtype, axes, place };
        let foreign = slab.foreign(py, place, layout.bytes());
        let transfer = detached(py, move || {
            let engine = process().engine(place)?;
            let cache = registered_layer(key, &engine).map_err(|e| e.of("vllm_key_value_cache"))?;
            let slab = process().memory.slab(place, foreign);
            let slab = slab.map_err(|e| e.of("lmc_key_value_cache"))?;
            let request = match direction {
                Direction::Gather => TransferRequest::gather(&cache, slots, &slab),
                Direction::Scatter => TransferRequest::scatter(&cache, slots, &slab),
            };
            // SAFETY: the caller's current stream of the device, or its default stream.
            let stream = unsafe { Stream::cuda(stream) };
            Ok(engine.submit(&request.slab_layout(layout).on(stream))?)
        })?;
        let keep = [Some(slab.owner), Some(paged.owner), slots_owner].into_iter().flatten().collect();
        finish(py, place, transfer, keep);
        Ok(())
    })
}

/// Refuses a slab of another element type before anything is read out of its shape: bits of one type are not
/// another's, and rows are counted in elements.
fn same_elements(slab: &Tensor, paged: &Tensor) -> std::result::Result<(), Fault> {
    let found = slab.element.kv().map_err(|e| e.of("lmc_key_value_cache"))?;
    let wanted = paged.element.kv().map_err(|e| e.of("vllm_key_value_cache"))?;
    match found.moves_as(wanted) && found.size() == wanted.size() {
        true => Ok(()),
        false => Err(Fault {
            kind: "dtype_mismatch",
            message: format!(
                "lmc_key_value_cache holds {found}, vllm_key_value_cache {wanted}; view one as integers of {} bytes to move bits",
                wanted.size()
            ),
        }),
    }
}

/// A layer's part of a slab: which axis is which.
struct SlabPart {
    planes: u64,
    tokens: u64,
    row: u64,
    /// In elements; `None` where there is no such axis.
    plane_stride: Option<i64>,
    token_stride: i64,
}

impl SlabPart {
    fn of(slab: &Tensor, format: EngineFormat, token_major: bool) -> std::result::Result<Self, Fault> {
        let planes = format.planes();
        let needed = || {
            let shape = if token_major { "[T][kv][H]" } else { "[kv][T][H]" };
            Fault::value(format!(
                "lmc_key_value_cache has shape {:?}; {shape} with {planes} plane(s) is needed for format {format}",
                slab.shape
            ))
        };
        let (plane_axis, token_axis, row_axis) = match (slab.rank(), token_major) {
            (3, false) => (Some(0), 1, 2),
            (3, true) => (Some(1), 0, 2),
            (2, _) if planes == 1 => (None, 0, 1),
            _ => return Err(needed()),
        };
        if plane_axis.is_some_and(|axis| slab.len_of(axis) != planes) {
            return Err(needed());
        }
        if slab.len_of(row_axis) > 1 && slab.strides[row_axis] != 1 {
            return Err(Fault::value(format!(
                "lmc_key_value_cache has strides {:?}; the elements of a row must be contiguous",
                slab.strides
            )));
        }
        Ok(SlabPart {
            planes,
            tokens: slab.len_of(token_axis),
            row: slab.len_of(row_axis),
            plane_stride: plane_axis.map(|axis| slab.strides[axis]),
            token_stride: slab.strides[token_axis],
        })
    }

    /// `None` for a part without tokens.
    fn layout(&self, slab: &Tensor) -> std::result::Result<Option<SlabLayout>, Fault> {
        if self.tokens == 0 {
            return Ok(None);
        }
        let dtype = slab.element.kv().map_err(|e| e.of("lmc_key_value_cache"))?;
        let bytes = |len: u64, stride: i64| match u64::try_from(stride)
            .ok()
            .and_then(|s| s.checked_mul(dtype.size()))
        {
            // The stride of an axis of one is arbitrary.
            _ if len == 1 => Ok(0),
            Some(bytes) => Ok(bytes),
            None => {
                Err(Fault::value(format!("lmc_key_value_cache has the stride {stride}; allowed: 1 or more")))
            }
        };
        let plane = self.plane_stride.map_or(Ok(0), |stride| bytes(self.planes, stride))?;
        let token = bytes(self.tokens, self.token_stride)?;
        let row = self
            .row
            .checked_mul(dtype.size())
            .ok_or_else(|| Fault::overflow("a row does not fit 63 bits"))?;
        let layout = slab_part(([self.planes, 1, self.tokens], row, [plane, 0, token], dtype));
        Ok(Some(layout.map_err(|e| Fault::from(e).of("lmc_key_value_cache"))?))
    }
}

/// The paged tensor's axes, from its shape, its strides and the width of the slab's row; never from the shape
/// alone. `None` for a slab without bytes.
fn axes(paged: &Tensor, format: EngineFormat, row: u64) -> std::result::Result<Option<Vec<Axis>>, Fault> {
    use Axis::{Block, Dim, Head, HeadsDim, Kv, Slot, Token};
    let number = format.number();
    let wrong = |needed: &str| Fault {
        kind: "layout_mismatch",
        message: format!("vllm_key_value_cache has {paged}; {needed} is needed for format {format}"),
    };
    if number == 3 {
        let axes = match paged.rank() {
            3 if paged.len_of(1) == 1 && paged.len_of(0) > 0 => vec![Slot, Head, Dim],
            3 => vec![Block, Token, Dim],
            4 if paged.len_of(1) == 1 => vec![Block, Head, Token, Dim],
            _ => return Err(wrong("(blocks, tokens, width)")),
        };
        return Ok(Some(axes));
    }
    let kv_first = matches!(number, 1 | 6);
    let lead = if kv_first { [Kv, Block] } else { [Block, Kv] };
    let kv_axis = usize::from(!kv_first);
    if paged.len_of(kv_axis) != 2 || !matches!(paged.rank(), 4 | 5) {
        return Err(wrong(if kv_first { "(2, blocks, ...)" } else { "(blocks, 2, ...)" }));
    }
    if paged.rank() == 4 {
        return match matches!(number, 1 | 2) {
            true => Ok(Some([&lead[..], &[Token, HeadsDim]].concat())),
            false => Err(wrong("a tensor of 5 axes")),
        };
    }
    let (a, b, width) = (paged.len_of(2), paged.len_of(3), paged.len_of(4));
    let heads = match row.checked_rem(width) {
        Some(0) => row / width,
        _ => {
            return Err(Fault {
                kind: "layout_mismatch",
                message: format!(
                    "lmc_key_value_cache has rows of {row} elements, which is no whole number of heads of {width}"
                ),
            });
        }
    };
    let tokens_first = match (b == heads, a == heads) {
        (true, false) => true,
        (false, true) => false,
        (false, false) => {
            return Err(wrong(&format!(
                "an axis of {heads} head(s) (rows of {row} elements, heads of {width})"
            )));
        }
        // Both axes are that long: memory order tells, which the format names.
        (true, true) => {
            let first_is_outer = paged.strides[2] >= paged.strides[3];
            let nhd = matches!(number, 1 | 2);
            first_is_outer == nhd
        }
    };
    let tail = if tokens_first { [Token, Head, Dim] } else { [Head, Token, Dim] };
    Ok(Some([&lead[..], &tail].concat()))
}
