//! From an engine format and pointers to a registered cache, once per cache.

use std::sync::{Arc, Mutex};

use maru_layout::{
    Axis, CacheSpec, DType, EngineFormat, EngineGeometry, EngineOp, EnginePlanes, EnginePointers,
    LayoutError, SlabLayout, TensorDesc,
};
use maru_transfer::{CacheTensor, PagedCache, Place, RegisteredCache, Tensors, TransferEngine};
use pyo3::intern;
use pyo3::prelude::*;

use crate::driver;
use crate::errors::{Fault, Result};
use crate::memory::{mapped, still_mapped, with_context};
use crate::process::{lock, process};
use crate::tensor::Dims;
use crate::words::Words;

/// Caches, pointer lists and slab geometries remembered; the oldest is forgotten first.
const MOST: usize = 64;
/// The same for single layers, of which a model has many.
const MOST_LAYERS: usize = 512;

/// What earlier calls have registered.
#[derive(Default)]
pub(crate) struct Registrations {
    caches: Mutex<Vec<(Key, RegisteredCache)>>,
    lists: Mutex<Vec<List>>,
    layers: Mutex<Layers>,
    parts: Mutex<Vec<(PartKey, SlabLayout)>>,
}

/// One layer's tensor, as the single-layer call reads it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LayerKey {
    pub(super) addr: u64,
    pub(super) shape: Dims,
    /// In elements.
    pub(super) strides: Dims,
    pub(super) dtype: DType,
    pub(super) axes: Vec<Axis>,
    pub(super) place: Place,
}

/// Layers that were met, with their addresses side by side, where a search is short.
#[derive(Default)]
struct Layers {
    addrs: Vec<u64>,
    layers: Vec<Layer>,
}

impl Layers {
    fn find(&self, key: &LayerKey) -> Option<&Layer> {
        let mut at = self.addrs.iter().zip(&self.layers).filter(|(addr, _)| **addr == key.addr);
        at.find(|(_, layer)| layer.key == *key).map(|(_, layer)| layer)
    }

    fn push(&mut self, layer: Layer) {
        if self.layers.len() >= MOST_LAYERS {
            self.addrs.remove(0);
            self.layers.remove(0);
        }
        self.addrs.push(layer.key.addr);
        self.layers.push(layer);
    }
}

struct Layer {
    key: LayerKey,
    /// From the first to the last.
    bytes: u64,
    cache: RegisteredCache,
}

/// The cache of one layer's tensor, registered when it is first met. Blocks then.
pub(super) fn registered_layer(
    key: LayerKey,
    engine: &TransferEngine,
) -> std::result::Result<RegisteredCache, Fault> {
    let layers = &process().registrations.layers;
    let known = lock(layers).find(&key).map(|layer| (layer.bytes, layer.cache.clone()));
    if let Some((bytes, cache)) = known {
        if key.place == Place::Host {
            tensor_in_memory(key.place, key.addr, bytes)?;
        }
        return Ok(cache);
    }
    let desc = TensorDesc::strided(&key.shape, &key.strides, key.dtype)?;
    let bytes = desc.span_bytes();
    tensor_in_memory(key.place, key.addr, bytes)?;
    let tensor = CacheTensor { addr: key.addr, len: bytes, desc };
    let spec = CacheSpec { axes: Some(key.axes.clone()), ..CacheSpec::default() };
    // SAFETY: the tensor is kept alive until its transfers are over, and its bytes are memory of its place, as
    // just checked.
    let paged = unsafe { PagedCache::new(&Tensors::PerLayer(vec![tensor]), &spec, key.place, Some(1)) }?;
    let cache = engine.register(paged)?;
    lock(layers).push(Layer { key, bytes, cache: cache.clone() });
    Ok(cache)
}

/// Counts, row, strides, element type.
type PartKey = ([u64; 3], u64, [u64; 3], DType);

/// [`SlabLayout::strided`], remembered: it looks for bytes that two positions share.
pub(super) fn slab_part(key: PartKey) -> std::result::Result<SlabLayout, LayoutError> {
    let parts = &process().registrations.parts;
    if let Some((_, known)) = lock(parts).iter().find(|(k, _)| *k == key) {
        return Ok(known.clone());
    }
    let (counts, row, strides, dtype) = key;
    let layout = SlabLayout::strided(counts, row, strides, dtype)?;
    let mut parts = lock(parts);
    if parts.len() >= MOST {
        parts.remove(0);
    }
    parts.push((key, layout.clone()));
    Ok(layout)
}

/// Everything that a registered cache follows from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) format: EngineFormat,
    pub(super) block_op: bool,
    pub(super) geometry: EngineGeometry,
    pub(super) place: Place,
    pub(super) pointers: Arc<[u64]>,
}

/// A pointer list in device memory that was read. The tensor is kept, so that its memory cannot become another
/// list's; torch's version counter tells when it is written in place.
struct List {
    addr: u64,
    len: u64,
    version: i64,
    values: Arc<[u64]>,
    _tensor: Py<PyAny>,
}

/// The addresses in a pointer list.
pub(super) fn pointers(
    list: &Bound<'_, PyAny>,
    name: &str,
    place: Place,
    stream: usize,
) -> Result<Arc<[u64]>> {
    let py = list.py();
    let words = Words::of(list, name)?;
    let Words::Device(device) = words else {
        return Ok(unsigned(&words.values(py, name, place, stream)?, name)?);
    };
    let lists = &process().registrations.lists;
    let (addr, len, version) = (device.addr, device.len, version(list));
    let same = |l: &&List| (l.addr, l.len, l.version) == (addr, len, version);
    if let Some(known) = lock(lists).iter().find(same) {
        return Ok(Arc::clone(&known.values));
    }
    let keep = device.owner.clone_ref(py);
    let values = unsigned(&Words::Device(device).values(py, name, place, stream)?, name)?;
    let mut lists = lock(lists);
    let mut forgotten: Vec<List> = lists.extract_if(.., |l| (l.addr, l.len) == (addr, len)).collect();
    if lists.len() >= MOST {
        forgotten.push(lists.remove(0));
    }
    lists.push(List { addr, len, version, values: Arc::clone(&values), _tensor: keep });
    drop(lists);
    // Outside the lock: a tensor's end may run Python code.
    drop(forgotten);
    Ok(values)
}

/// Torch counts writes in place, except for tensors made under inference mode.
fn version(list: &Bound<'_, PyAny>) -> i64 {
    let version = list.getattr_opt(intern!(list.py(), "_version")).ok().flatten();
    version.and_then(|v| v.extract().ok()).unwrap_or(-1)
}

fn unsigned(words: &[i64], name: &str) -> std::result::Result<Arc<[u64]>, Fault> {
    match words.iter().position(|word| *word == 0) {
        Some(i) => Err(Fault::value(format!("{name}[{i}] is 0, which is no address"))),
        None => Ok(words.iter().map(|word| word.cast_unsigned()).collect()),
    }
}

/// The cache of a key, registered with the engine of its place when it is first met. Blocks then.
pub(super) fn registered(key: &Key, engine: &TransferEngine) -> std::result::Result<RegisteredCache, Fault> {
    let caches = &process().registrations.caches;
    let known = lock(caches).iter().find(|(k, _)| k == key).map(|(_, cache)| cache.clone());
    if let Some(cache) = known {
        // Host memory may have been given back meanwhile.
        if key.place == Place::Host {
            let (paged, len) = (cache.paged(), cache.paged().layout().plane_bytes());
            still_mapped(paged.bases(), len).map_err(|i| {
                let gone = format!("{len} bytes at {:#x} are no memory any more", paged.bases()[i]);
                Fault::value(gone).of(plane_name(i, paged))
            })?;
        }
        return Ok(cache);
    }
    let paged = paged(key)?;
    let cache = engine.register(paged)?;
    let mut caches = lock(caches);
    if caches.len() >= MOST {
        caches.remove(0);
    }
    caches.push((key.clone(), cache.clone()));
    Ok(cache)
}

/// Every plane lies in memory that its place knows.
fn planes_mapped(paged: &PagedCache) -> std::result::Result<(), Fault> {
    let bytes = paged.layout().plane_bytes();
    for (i, base) in paged.bases().iter().enumerate() {
        mapped(*base, bytes).map_err(|e| e.of(plane_name(i, paged)))?;
    }
    Ok(())
}

fn plane_name(index: usize, paged: &PagedCache) -> String {
    let layers = usize::try_from(paged.layers()).unwrap_or(1).max(1);
    format!("layer {} plane {}", index % layers, index / layers)
}

/// Device planes: known to the driver, on that device, and long enough, over seams of adjacent ranges.
pub(crate) fn planes_on_device(paged: &PagedCache, device: u32) -> std::result::Result<(), Fault> {
    let bytes = paged.layout().plane_bytes();
    for (i, &base) in paged.bases().iter().enumerate() {
        let name = plane_name(i, paged);
        let Some(known) = driver::known(base) else {
            return Err(Fault::value(format!("{name}: {base:#x} is no memory that cuda:{device} knows")));
        };
        match known.ordinal {
            Some(n) if n == device => {}
            Some(n) => {
                return Err(Fault::value(format!("{name} is on cuda:{n}, the paged cache on cuda:{device}")));
            }
            None => {
                return Err(Fault::value(format!(
                    "{name} is in host memory, the paged cache is on cuda:{device}"
                )));
            }
        }
        let end = base.saturating_add(bytes);
        let reached = driver::known_end(base, end);
        if reached < end {
            return Err(Fault::value(format!(
                "{name} needs {bytes} bytes at {base:#x}, its allocation has {} from there",
                reached - base
            )));
        }
    }
    Ok(())
}

fn paged(key: &Key) -> std::result::Result<PagedCache, Fault> {
    let op = if key.block_op { EngineOp::Block } else { EngineOp::Token };
    let planes = key.format.planes_of(op, &key.geometry)?;
    // Refuses a wrong number of pointers and addresses that wrap.
    planes.bases(&key.pointers)?;
    let paged = cache_of(key, op, &planes)?;
    match key.place {
        Place::Cuda(device) => with_context(key.place, || planes_on_device(&paged, device))?,
        _ => planes_mapped(&paged)?,
    }
    Ok(paged)
}

/// The engine registers tensors, so the format's strides are put as one and its axes named.
fn cache_of(key: &Key, op: EngineOp, planes: &EnginePlanes) -> std::result::Result<PagedCache, Fault> {
    let spec = planes.layout().spec();
    let order = key.format.order(op);
    let element = spec.dtype.size();
    let (mut shape, mut strides) = (Vec::new(), Vec::new());
    for axis in order {
        let (len, stride) = match axis {
            Axis::Kv => (spec.kv_planes, spec.kv_stride / element),
            Axis::Layer => (spec.layers, spec.layer_stride / element),
            Axis::Block => (spec.num_blocks, spec.block_stride / element),
            Axis::Token => (spec.block_size, spec.token_stride / element),
            Axis::Head => (spec.num_heads, spec.head_stride / element),
            _ => (spec.head_size, 1),
        };
        let signed = |n: u64| {
            i64::try_from(n).map_err(|_| Fault::overflow("the cache's address span does not fit 63 bits"))
        };
        shape.push(signed(len)?);
        strides.push(signed(stride)?);
    }
    let desc = TensorDesc::strided(&shape, &strides, spec.dtype)?;
    let len = planes.layout().span_bytes();
    let tensor = |addr: u64| CacheTensor { addr, len, desc: desc.clone() };
    let p = &key.pointers;
    let tensors = match key.format.pointers(op) {
        EnginePointers::One => Tensors::CrossLayer(tensor(p[0])),
        EnginePointers::PerLayer => Tensors::PerLayer(p.iter().copied().map(tensor).collect()),
        EnginePointers::PlaneMajor => {
            let (k, v) = p.split_at(p.len() / 2);
            Tensors::Split {
                k: k.iter().copied().map(tensor).collect(),
                v: v.iter().copied().map(tensor).collect(),
            }
        }
        EnginePointers::LayerMajor => Tensors::Split {
            k: p.iter().copied().step_by(2).map(tensor).collect(),
            v: p.iter().copied().skip(1).step_by(2).map(tensor).collect(),
        },
        _ => {
            return Err(Fault::value(format!(
                "engine format {} needs pointers of an unknown kind",
                key.format
            )));
        }
    };
    let spec =
        CacheSpec { block_size: Some(spec.block_size), axes: Some(order.to_vec()), ..CacheSpec::default() };
    let layers = usize::try_from(key.geometry.layers).ok();
    // SAFETY: the pointers are the caller's tensors, which the contract of the legacy calls has alive until the
    // transfer is over; that they are memory of the place is checked right after this.
    Ok(unsafe { PagedCache::new(&tensors, &spec, key.place, layers) }?)
}

/// A tensor's bytes lie in memory of its place; for device tensors the driver is asked.
fn tensor_in_memory(place: Place, addr: u64, bytes: u64) -> std::result::Result<(), Fault> {
    match place {
        Place::Cuda(device) => with_context(place, || {
            let end = addr.saturating_add(bytes);
            let reached = driver::known_end(addr, end);
            match driver::known(addr) {
                Some(known) if known.ordinal == Some(device) && reached >= end => Ok(()),
                _ => Err(Fault::value(format!(
                    "{bytes} bytes at {addr:#x} are not all memory of cuda:{device} ({} are)",
                    reached.saturating_sub(addr)
                ))),
            }
        }),
        _ => mapped(addr, bytes),
    }
}
