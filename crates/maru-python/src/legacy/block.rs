//! `multi_layer_block_kv_transfer`: whole blocks, any number of slabs.

use maru_layout::{Axis, DType, Direction, EngineFormat, EngineGeometry, EngineOp, SlotMapping};
use maru_transfer::{Place, Stream, TransferRequest};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::planes::{Key, pointers, registered};
use super::{direction, finish, format, place};
use crate::args::{self, a, type_name};
use crate::errors::{Fault, Result, detached, guard};
use crate::memory::Foreign;
use crate::process::process;
use crate::tensor::{is_torch, stream_of};
use crate::words::Words;

/// Geometry of a paged cache, as old callers state it. All fields are ints and 0 at first.
#[pyclass(module = "maru_kv_ops", name = "PageBufferShapeDesc", get_all, set_all, eq)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageBufferShapeDesc {
    /// Planes of a layer: 2 (K, V) or 1.
    kv_size: i64,
    /// Layers.
    nl: i64,
    /// Blocks.
    nb: i64,
    /// Tokens of a block.
    bs: i64,
    /// KV heads of this rank.
    nh: i64,
    /// Elements of a head.
    hs: i64,
    /// Bytes of an element.
    element_size: i64,
    /// Elements from block to block where pages are padded; 0 = tight.
    block_stride_elems: i64,
}

#[pymethods]
impl PageBufferShapeDesc {
    #[new]
    #[pyo3(signature = (kv_size=0, nl=0, nb=0, bs=0, nh=0, hs=0, element_size=0, block_stride_elems=0))]
    #[allow(clippy::too_many_arguments, reason = "one for each field")]
    fn new(
        kv_size: i64,
        nl: i64,
        nb: i64,
        bs: i64,
        nh: i64,
        hs: i64,
        element_size: i64,
        block_stride_elems: i64,
    ) -> Self {
        PageBufferShapeDesc { kv_size, nl, nb, bs, nh, hs, element_size, block_stride_elems }
    }

    fn __repr__(&self) -> String {
        let PageBufferShapeDesc { kv_size, nl, nb, bs, nh, hs, element_size, block_stride_elems } = self;
        format!(
            "PageBufferShapeDesc(kv_size={kv_size}, nl={nl}, nb={nb}, bs={bs}, nh={nh}, hs={hs}, \
             element_size={element_size}, block_stride_elems={block_stride_elems})"
        )
    }

    /// Plain numbers, so copies and pickles are as good as the original.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let d = *slf.borrow();
        let fields = [d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size, d.block_stride_elems];
        Ok((slf.get_type().into_any(), PyTuple::new(slf.py(), fields)?))
    }
}

/// The fields of ours, or of another module's object with the same ones.
fn shape(object: &Bound<'_, PyAny>) -> Result<[u64; 8]> {
    const FIELDS: [&str; 8] = ["kv_size", "nl", "nb", "bs", "nh", "hs", "element_size", "block_stride_elems"];
    let mut values = [0; 8];
    for (value, field) in values.iter_mut().zip(FIELDS) {
        let name = format!("shape_desc.{field}");
        let Ok(object) = object.getattr(field) else {
            let found = a(&type_name(object));
            return Err(Fault::wrong_type(format!(
                "shape_desc is {found} without {field}; a PageBufferShapeDesc is needed"
            ))
            .into());
        };
        *value = if field == "block_stride_elems" {
            args::count(&object, &name)?
        } else {
            args::positive(&object, &name)?
        };
    }
    Ok(values)
}

/// Moves whole blocks between a paged cache and any number of slabs of `lmcache_chunk_size` tokens each.
///
/// The blocks of slab `k` are `block_ids[k * n : (k + 1) * n]`, `n` times the block size being the chunk size.
/// The first `skip_prefix_n_blocks` of the whole list are left alone.
#[pyfunction]
#[pyo3(signature = (paged_buffer_ptrs_tensor, lmcache_objects_ptrs, block_ids, device, direction, shape_desc,
    lmcache_chunk_size, engine_kv_format, skip_prefix_n_blocks=None),
    text_signature = "(paged_buffer_ptrs_tensor, lmcache_objects_ptrs, block_ids, device, direction, shape_desc, \
    lmcache_chunk_size, engine_kv_format, skip_prefix_n_blocks=0)")]
#[allow(clippy::too_many_arguments, reason = "the signature is the old callers'")]
pub(crate) fn multi_layer_block_kv_transfer(
    py: Python<'_>,
    paged_buffer_ptrs_tensor: &Bound<'_, PyAny>,
    lmcache_objects_ptrs: &Bound<'_, PyAny>,
    block_ids: &Bound<'_, PyAny>,
    device: &Bound<'_, PyAny>,
    direction: &Bound<'_, PyAny>,
    shape_desc: &Bound<'_, PyAny>,
    lmcache_chunk_size: &Bound<'_, PyAny>,
    engine_kv_format: &Bound<'_, PyAny>,
    skip_prefix_n_blocks: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    guard(py, || {
        let direction = self::direction(direction)?;
        let format = self::format(engine_kv_format)?;
        let place = self::place(device, "device")?;
        let skip = skip_prefix_n_blocks.map_or(Ok(0), |s| args::count(s, "skip_prefix_n_blocks"))?;
        let chunk = args::positive(lmcache_chunk_size, "lmcache_chunk_size")?;
        let geometry = geometry(format, shape(shape_desc)?)?;
        let torch = is_torch(paged_buffer_ptrs_tensor) || is_torch(block_ids);
        let stream = stream_of(py, place, torch, None)?;
        let pointers = pointers(paged_buffer_ptrs_tensor, "paged_buffer_ptrs_tensor", place, stream)?;
        let slabs = Words::of(lmcache_objects_ptrs, "lmcache_objects_ptrs")?;
        let slabs = slabs.values(py, "lmcache_objects_ptrs", place, stream)?;
        let blocks = Words::of(block_ids, "block_ids")?;
        let work = Work::of(&slabs, blocks.len(), chunk, geometry.block_size, skip)?;
        if slabs.is_empty() || blocks.len() == skip {
            return Ok(());
        }
        let (list, geometry) = match (blocks, rows_of_blocks(format, &geometry)) {
            (blocks @ Words::Device(_), Some(rows)) => {
                let (slots, owner) = blocks.slots("block_ids", place)?;
                (List::Device(slots, owner), rows)
            }
            (blocks, _) => {
                let blocks = blocks.values(py, "block_ids", place, stream)?;
                (List::Host(slots(&blocks, geometry.num_blocks, geometry.block_size)?), geometry)
            }
        };
        // Slots of a slab, and slots to a block.
        let (per_slab, per_block) = match &list {
            List::Host(_) => (chunk, work.block_size),
            List::Device(..) => (work.per_slab, 1),
        };
        let key = Key { format, block_op: true, geometry, place, pointers };
        let (list, owner) = list.split();
        let transfer = detached(py, move || {
            let engine = process().engine(place)?;
            let cache = registered(&key, &engine)?;
            let bytes = cache.paged().slab_layout(per_slab)?.bytes();
            // SAFETY: the caller's current stream of the device, or its default stream.
            let stream = unsafe { Stream::cuda(stream) };
            let mut requests = Vec::with_capacity(slabs.len());
            for (i, addr) in (0u64..).zip(&*slabs) {
                let skip = work.skipped_blocks(i) * per_block;
                if skip == per_slab {
                    continue;
                }
                let slab = slab(addr.cast_unsigned(), bytes, place)
                    .map_err(|e| e.of(format!("lmcache_objects_ptrs[{i}]")))?;
                let slots = part(&list, i * per_slab, per_slab)?;
                let request = match direction {
                    Direction::Gather => TransferRequest::gather(&cache, slots, &slab),
                    Direction::Scatter => TransferRequest::scatter(&cache, slots, &slab),
                };
                requests.push(request.slab_tokens(per_slab).skip_tokens(skip).on(stream));
            }
            Ok(engine.submit_many(&requests)?)
        })?;
        let lists = [paged_buffer_ptrs_tensor, lmcache_objects_ptrs].map(|list| list.clone().unbind());
        let keep = lists.into_iter().chain(owner).collect();
        // Slabs are given as addresses; keeping them alive is the caller's part, as it was upstream.
        finish(py, place, transfer, keep);
        Ok(())
    })
}

fn slab(addr: u64, len: u64, place: Place) -> std::result::Result<maru_cxl::Slab, Fault> {
    process().memory.slab(place, Foreign { addr, len, on_host: true, owned: false, owner: None })
}

/// Slots of all slabs: of tokens, checked, or of whole blocks where the list is on the device.
enum List {
    Host(Vec<i64>),
    Device(SlotMapping, Option<Py<PyAny>>),
}

impl List {
    fn split(self) -> (SlotMapping, Option<Py<PyAny>>) {
        match self {
            List::Host(slots) => (SlotMapping::from_slots(slots), None),
            List::Device(slots, owner) => (slots, owner),
        }
    }
}

/// `len` slots from `first` on.
fn part(list: &SlotMapping, first: u64, len: u64) -> std::result::Result<SlotMapping, Fault> {
    let beyond = || Fault::overflow("block_ids does not fit an address");
    match list {
        SlotMapping::Host(slots) => {
            let first = usize::try_from(first).map_err(|_| beyond())?;
            let end = usize::try_from(len).ok().and_then(|n| first.checked_add(n)).ok_or_else(beyond)?;
            slots.get(first..end).map(SlotMapping::from_slots).ok_or_else(beyond)
        }
        SlotMapping::Device { addr, .. } => {
            let addr = first.checked_mul(8).and_then(|n| addr.checked_add(n)).ok_or_else(beyond)?;
            Ok(SlotMapping::Device { addr, len })
        }
        _ => Err(beyond()),
    }
}

/// A cache whose blocks are rows: where a block's tokens and heads lie as they do in the slab, a block is one
/// wide token, and a list of block ids on the device is a list of slots that need not be read here.
fn rows_of_blocks(format: EngineFormat, g: &EngineGeometry) -> Option<EngineGeometry> {
    let order = format.order(EngineOp::Block);
    let at = |axis| order.iter().position(|a| *a == axis);
    let heads_first = matches!((at(Axis::Head), at(Axis::Token)), (Some(h), Some(t)) if h < t);
    if heads_first {
        return None;
    }
    let wide = |width: u64| g.block_size.checked_mul(g.num_heads)?.checked_mul(width);
    Some(EngineGeometry {
        block_size: 1,
        num_heads: 1,
        head_size: wide(g.head_size)?,
        content_width: match g.content_width {
            None => None,
            Some(width) => Some(wide(width)?),
        },
        ..g.clone()
    })
}

/// Which blocks belong to which slab.
struct Work {
    per_slab: u64,
    block_size: u64,
    skip: u64,
}

impl Work {
    fn of(
        slabs: &[i64],
        blocks: u64,
        chunk: u64,
        block_size: u64,
        skip: u64,
    ) -> std::result::Result<Self, Fault> {
        if !chunk.is_multiple_of(block_size) {
            return Err(Fault::value(format!(
                "lmcache_chunk_size is {chunk}, which is no whole number of blocks of {block_size} (shape_desc.bs)"
            )));
        }
        let (per_slab, count) = (chunk / block_size, slabs.len() as u64);
        let needed = per_slab.checked_mul(count);
        if needed != Some(blocks) {
            return Err(Fault::value(format!(
                "block_ids has {blocks} blocks; {count} slab(s) of {chunk} tokens need {per_slab} blocks of {block_size} each"
            )));
        }
        if skip > blocks {
            return Err(Fault::value(format!(
                "skip_prefix_n_blocks is {skip}, but block_ids has {blocks} blocks"
            )));
        }
        if let Some(i) = slabs.iter().position(|addr| *addr == 0) {
            return Err(Fault::value(format!("lmcache_objects_ptrs[{i}] is 0, which is no address")));
        }
        Ok(Work { per_slab, block_size, skip })
    }

    /// Skipped blocks of slab `i`.
    fn skipped_blocks(&self, i: u64) -> u64 {
        self.skip.saturating_sub(i * self.per_slab).min(self.per_slab)
    }
}

fn slots(blocks: &[i64], num_blocks: u64, block_size: u64) -> std::result::Result<Vec<i64>, Fault> {
    let mut slots = Vec::new();
    for (i, &block) in blocks.iter().enumerate() {
        let inside = u64::try_from(block).ok().filter(|b| *b < num_blocks);
        let first = inside.and_then(|b| b.checked_mul(block_size)).and_then(|s| i64::try_from(s).ok());
        let Some(first) = first else {
            return Err(Fault {
                kind: "slot_out_of_range",
                message: format!(
                    "block_ids[{i}] is {block}; allowed: 0 to {} (shape_desc.nb)",
                    num_blocks - 1
                ),
            });
        };
        // Inside the cache, whose slots fit 63 bits.
        slots.extend((0..block_size.cast_signed()).map(|o| first + o));
    }
    Ok(slots)
}

fn geometry(format: EngineFormat, shape: [u64; 8]) -> std::result::Result<EngineGeometry, Fault> {
    let [kv_size, layers, num_blocks, block_size, nh, hs, element_size, block_stride_elems] = shape;
    let planes = format.planes();
    if kv_size != planes {
        return Err(Fault::value(format!("shape_desc.kv_size is {kv_size}, format {format} needs {planes}")));
    }
    let dtype = match element_size {
        1 => DType::Raw8,
        2 => DType::Raw16,
        4 => DType::Raw32,
        8 => DType::Raw64,
        other => {
            return Err(Fault::value(format!("shape_desc.element_size is {other}; allowed: 1, 2, 4, 8")));
        }
    };
    let order = format.order(EngineOp::Block);
    let content_width = match (format.number(), order.contains(&Axis::Content)) {
        (10 | 11, _) => hs.checked_mul(2),
        (_, true) => Some(hs),
        _ => None,
    };
    Ok(EngineGeometry {
        num_blocks,
        block_size,
        num_heads: nh,
        head_size: hs,
        layers,
        dtype,
        block_stride_elems,
        content_width,
    })
}
