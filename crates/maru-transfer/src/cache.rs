//! The engine's KV tensors: do all layers agree, and which memory do they live in?

use std::sync::Arc;

use maru_layout::{CacheSpec, PagedLayout, SlabLayout, TensorDesc, planes_overlap};

use crate::{Place, TransferError};

/// Most layers of a cache. A tensor with more has another axis in that place.
const MOST_LAYERS: u64 = 1 << 20;

/// One registered tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheTensor {
    /// Address of its first element (the tensor's own data pointer, its storage offset counted in).
    pub addr: u64,
    /// Bytes that may be addressed from there on.
    pub len: u64,
    /// Shape, strides, element type.
    pub desc: TensorDesc,
}

/// How the tensors make a cache.
#[derive(Clone, Debug)]
pub enum Tensors {
    /// One tensor per layer, K and V inside it (or one plane).
    PerLayer(Vec<CacheTensor>),
    /// A list of K tensors and one of V tensors.
    Split {
        /// K of each layer.
        k: Vec<CacheTensor>,
        /// V of each layer.
        v: Vec<CacheTensor>,
    },
    /// One tensor with a `layer` axis.
    CrossLayer(CacheTensor),
}

/// A group of layers with the same geometry, ready to be registered with a [`crate::TransferEngine`].
///
/// A model whose layers differ (sliding window, MLA plus indexer) is several caches, one per group.
#[derive(Clone, Debug)]
pub struct PagedCache {
    layout: PagedLayout,
    bases: Arc<[u64]>,
    planes: u64,
    layers: u64,
    place: Place,
    tensors: Arc<[(u64, u64)]>,
    /// From the first byte of all tensors to behind the last.
    extent: (u64, u64),
}

impl PagedCache {
    /// Reads the tensors' layout and checks that they make one cache.
    ///
    /// `num_layers` is what the model says it has, if known.
    ///
    /// # Errors
    /// Everything [`PagedLayout::detect`] reports; [`TransferError::LayerDiffers`] naming the first layer that
    /// is unlike layer 0; counts that do not fit; tensors reaching beyond their memory; planes sharing memory.
    ///
    /// # Safety
    /// Each tensor's `len` bytes from `addr` are memory of `place` that stays valid while this value, a
    /// registered copy of it or a transfer of it lives. While a transfer is in flight nobody else writes the
    /// slots it reads or touches the slots it writes, other than in stream order.
    pub unsafe fn new(
        tensors: &Tensors,
        spec: &CacheSpec,
        place: Place,
        num_layers: Option<usize>,
    ) -> Result<Self, TransferError> {
        let mut spec = spec.clone();
        let list: Vec<&CacheTensor> = match tensors {
            Tensors::PerLayer(list) => list.iter().collect(),
            Tensors::CrossLayer(one) => vec![one],
            Tensors::Split { k, v } => {
                if k.len() != v.len() {
                    return Err(TransferError::SplitCount { k: k.len(), v: v.len() });
                }
                spec.split_kv = true;
                k.iter().chain(v).collect()
            }
        };
        let split = matches!(tensors, Tensors::Split { .. });
        let per_tensor = if split { list.len() / 2 } else { list.len() };
        let first = *list.first().ok_or(TransferError::NoTensors)?;
        let layout = PagedLayout::detect(&first.desc, &spec)?;
        for (i, tensor) in list.iter().enumerate() {
            let layer = i % per_tensor.max(1);
            agree(layer, i >= per_tensor, &tensor.desc, &first.desc)?;
            in_bounds(layer, tensor, layout.span_bytes())?;
        }
        if layout.layers() > 1 && !matches!(tensors, Tensors::CrossLayer(_)) {
            let own = layout.layers();
            return Err(maru_layout::LayoutError::Mismatch {
                shape: first.desc.shape().to_vec(),
                reasons: vec![format!(
                    "each tensor of a list is one layer, this one has {own}; register it alone, as one tensor of all layers"
                )],
            }
            .into());
        }
        let layers = match tensors {
            Tensors::CrossLayer(_) => layout.layers(),
            _ => u64::try_from(per_tensor).unwrap_or(u64::MAX),
        };
        let found = usize::try_from(layers).unwrap_or(usize::MAX);
        if let Some(expected) = num_layers.filter(|n| *n != found) {
            return Err(TransferError::LayerCount { found, expected });
        }
        if layers > MOST_LAYERS {
            let (found, allowed) = (i128::from(layers), format!("1 to {MOST_LAYERS}"));
            return Err(maru_layout::LayoutError::OutOfRange { what: "layers", found, allowed }.into());
        }
        let (planes, bases) = plane_bases(&layout, &list, layers, split)?;
        // The planes of one tensor were shown to be apart when it was read.
        if list.len() > 1
            && let Some((a, b)) = planes_overlap(&layout, &bases)
        {
            let name = |i: usize| plane_name(i, layers);
            return Err(TransferError::SharedPlanes { first: name(a), second: name(b) });
        }
        let tensors: Arc<[(u64, u64)]> = list.iter().map(|t| (t.addr, layout.span_bytes())).collect();
        let extent = tensors.iter().fold((u64::MAX, 0), |(first, end), &(addr, len)| {
            (first.min(addr), end.max(addr.saturating_add(len)))
        });
        Ok(PagedCache { layout, bases: bases.into(), planes, layers, place, tensors, extent })
    }

    /// What was detected.
    pub fn layout(&self) -> &PagedLayout {
        &self.layout
    }

    /// Address of layer `l`'s plane `kv` at `[kv * layers + l]`.
    pub fn bases(&self) -> &Arc<[u64]> {
        &self.bases
    }

    /// Planes of a layer: 2 (K, V) or 1.
    pub fn planes(&self) -> u64 {
        self.planes
    }

    /// Layers.
    pub fn layers(&self) -> u64 {
        self.layers
    }

    /// Slots.
    pub fn num_slots(&self) -> u64 {
        self.layout.num_slots()
    }

    /// Where it is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The packed slab of `tokens` tokens of this cache.
    ///
    /// # Errors
    /// [`maru_layout::LayoutError`] for no tokens or a size beyond 63 bits.
    pub fn slab_layout(&self, tokens: u64) -> Result<SlabLayout, TransferError> {
        Ok(SlabLayout::of_cache(&self.layout, self.planes, self.layers, tokens)?)
    }

    /// The first tensor that has bytes in `addr .. addr + len`, by name.
    pub(crate) fn meets(&self, addr: u64, len: u64) -> Option<String> {
        let end = addr.saturating_add(len);
        // Slabs seldom lie among the tensors, of which there are many.
        if end <= self.extent.0 || self.extent.1 <= addr {
            return None;
        }
        let hit = self.tensors.iter().position(|&(a, n)| a < end && addr < a.saturating_add(n))?;
        Some(format!("tensor {hit}"))
    }
}

/// `v`: the tensor is of the V list, which is compared with the first of the K list.
fn agree(layer: usize, v: bool, found: &TensorDesc, first: &TensorDesc) -> Result<(), TransferError> {
    let differs = |what: [&'static str; 2], found: String, first: String| match (found == first, v) {
        (true, _) => Ok(()),
        (false, false) => Err(TransferError::LayerDiffers { layer, what: what[0], found, first }),
        (false, true) => {
            let first = format!("K {} {first}", what[0]);
            Err(TransferError::LayerDiffers { layer, what: what[1], found, first })
        }
    };
    differs(["dtype", "V dtype"], found.dtype().to_string(), first.dtype().to_string())?;
    differs(["shape", "V shape"], format!("{:?}", found.shape()), format!("{:?}", first.shape()))?;
    differs(["strides", "V strides"], format!("{:?}", found.strides()), format!("{:?}", first.strides()))
}

fn in_bounds(layer: usize, tensor: &CacheTensor, needed: u64) -> Result<(), TransferError> {
    if tensor.addr == 0 || tensor.addr.checked_add(tensor.len).is_none() {
        return Err(TransferError::BadAddress { layer, addr: tensor.addr, found: tensor.len });
    }
    if tensor.len < needed {
        return Err(TransferError::TensorTooSmall { layer, found: tensor.len, needed });
    }
    Ok(())
}

/// Planes per layer and the address of each, K planes of all layers first.
fn plane_bases(
    layout: &PagedLayout,
    list: &[&CacheTensor],
    layers: u64,
    split: bool,
) -> Result<(u64, Vec<u64>), TransferError> {
    if split {
        return Ok((2, list.iter().map(|t| t.addr).collect()));
    }
    let planes = layout.kv_planes();
    let mut bases = Vec::with_capacity(list.len() * 2);
    for kv in 0..planes {
        for l in 0..layers {
            let (tensor, layer) = if layout.layers() > 1 { (0, l) } else { (l, 0) };
            let tensor =
                usize::try_from(tensor).ok().and_then(|i| list.get(i)).ok_or(TransferError::NoTensors)?;
            // In bounds: the tensor's span, which holds every plane, was checked against its memory.
            bases.push(tensor.addr + layout.plane_offset(kv, layer)?);
        }
    }
    Ok((planes, bases))
}

fn plane_name(index: usize, layers: u64) -> String {
    let index = u64::try_from(index).unwrap_or(u64::MAX);
    let layers = layers.max(1);
    format!("layer {} plane {}", index % layers, index / layers)
}
