//! Every layout of the documentation as memory: a cache with all its tensors in one image, its plan, and what
//! the oracle makes of a transfer. Used with the kernel on a device and with its source on the host.

use std::sync::Arc;

use maru_layout::oracle::Reference;
use maru_layout::{
    Axis, CacheSpec, CopyJob, CopyPlan, DType, Direction, JobRequest, LayoutError, PagedLayout, SlabLayout,
    SlabSpan, SlotMapping, TensorDesc,
};

/// A layout: the axes as the tensor has them and as memory has them (`layer` first or inside where layers
/// share an allocation).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    pub(crate) name: &'static str,
    shape: &'static str,
    memory: &'static str,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// K and V in one tensor, or fused.
    Pair,
    /// A K tensor and a V tensor per layer.
    Split,
    /// One plane.
    Single,
    /// One plane, one head.
    Latent,
}

const fn order(name: &'static str, shape: &'static str, memory: &'static str, kind: Kind) -> Order {
    Order { name, shape, memory, kind }
}

const FUSED: &str = "block,head,token,kv_dim";

/// All of them.
pub(crate) const ORDERS: [Order; 25] = [
    order("blocks_first_nhd", "block,kv,token,head,dim", "block,kv,token,head,dim", Kind::Pair),
    order("blocks_first_hnd", "block,kv,token,head,dim", "block,kv,head,token,dim", Kind::Pair),
    order("kv_first_nhd", "kv,block,token,head,dim", "kv,block,token,head,dim", Kind::Pair),
    order("kv_first_hnd", "kv,block,token,head,dim", "kv,block,head,token,dim", Kind::Pair),
    order("heads_before_tokens", "block,kv,head,token,dim", "block,kv,head,token,dim", Kind::Pair),
    order("flat_heads_kv_first", "kv,block,token,heads_dim", "kv,block,token,heads_dim", Kind::Pair),
    order("flat_heads_blocks_first", "block,kv,token,heads_dim", "block,kv,token,heads_dim", Kind::Pair),
    order("fused_lbhnc", FUSED, "layer,block,head,token,kv_dim", Kind::Pair),
    order("fused_lbnhc", FUSED, "layer,block,token,head,kv_dim", Kind::Pair),
    order("fused_lhbnc", FUSED, "layer,head,block,token,kv_dim", Kind::Pair),
    order("fused_blhnc", FUSED, "block,layer,head,token,kv_dim", Kind::Pair),
    order("fused_blnhc", FUSED, "block,layer,token,head,kv_dim", Kind::Pair),
    order("fused_bhlnc", FUSED, "block,head,layer,token,kv_dim", Kind::Pair),
    order("fused_tokens_first", "block,token,head,kv_dim", "block,token,head,kv_dim", Kind::Pair),
    order("opaque_rows", "block,token,head,content", "block,token,head,content", Kind::Single),
    order("opaque_rows_hnd", "block,head,token,content", "block,head,token,content", Kind::Single),
    order("mla", "block,token,dim", "block,token,dim", Kind::Latent),
    order("mla_one_head", "block,head,token,dim", "block,head,token,dim", Kind::Latent),
    order("sglang_split_slots", "slot,head,dim", "slot,head,dim", Kind::Split),
    order("sglang_split_blocks", "block,token,head,dim", "block,token,head,dim", Kind::Split),
    order("sglang_mla", "slot,head,dim", "slot,head,dim", Kind::Latent),
    order("opaque_blocks", "block,content", "block,content", Kind::Single),
    order("cross_layer", "block,layer,kv,token,head,dim", "block,layer,kv,token,head,dim", Kind::Pair),
    order("trt_llm", "block,layer,kv,head,token,dim", "block,layer,kv,head,token,dim", Kind::Pair),
    order("layers_inside_hnd", "block,kv,token,head,dim", "block,layer,kv,head,token,dim", Kind::Pair),
];

/// Sizes of a cache. `pad` elements follow every block (or slot), and are nobody's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    pub(crate) layers: u64,
    pub(crate) blocks: u64,
    pub(crate) block_size: u64,
    pub(crate) heads: u64,
    pub(crate) head_size: u64,
    pub(crate) dtype: DType,
    pub(crate) pad: u64,
}

/// A cache in one memory image, addresses counted from its start.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    pub(crate) layout: PagedLayout,
    pub(crate) reference: Reference,
    bases: Vec<u64>,
    pub(crate) bytes: u64,
}

impl Cache {
    pub(crate) fn new(order: &Order, dims: Dims) -> Result<Self, LayoutError> {
        let latent = order.kind == Kind::Latent;
        let heads = if latent { 1 } else { dims.heads };
        let len = |axis: &str| match axis {
            "layer" => dims.layers,
            "kv" => 2,
            "block" => dims.blocks,
            "token" => dims.block_size,
            "head" => heads,
            "slot" => dims.blocks * dims.block_size,
            "kv_dim" => 2 * dims.head_size,
            "heads_dim" => heads * dims.head_size,
            _ => dims.head_size,
        };
        // Element strides, innermost first; the block (or slot) axis is padded.
        let mut strides = Vec::new();
        let mut step = 1u64;
        for axis in order.memory.split(',').rev() {
            if axis == "block" || (axis == "slot" && order.kind != Kind::Pair) {
                step += dims.pad;
            }
            strides.push((axis, step));
            step *= len(axis);
        }
        let element = dims.dtype.size();
        let stride = |axis: &str| strides.iter().find(|s| s.0 == axis).map_or(0, |s| s.1);
        let signed = |n: u64| i64::try_from(n).unwrap();
        let names: Vec<&str> = order.shape.split(',').collect();
        let shape: Vec<i64> = names.iter().map(|a| signed(len(a))).collect();
        let steps: Vec<i64> = names.iter().map(|a| signed(stride(a))).collect();
        let tensor = TensorDesc::strided(&shape, &steps, dims.dtype)?;
        let planes = if matches!(order.kind, Kind::Pair | Kind::Split) { 2 } else { 1 };
        let opaque_blocks = order.shape == "block,content";
        let block_size = if opaque_blocks { 1 } else { dims.block_size };
        let spec = CacheSpec {
            block_size: Some(block_size),
            axes: Some(Axis::parse_list(order.shape)?),
            mla: latent,
            split_kv: order.kind == Kind::Split,
            ..CacheSpec::default()
        };
        let layout = PagedLayout::detect(&tensor, &spec)?;
        let tensors: Vec<u64> = if names.contains(&"layer") {
            vec![0]
        } else if stride("layer") > 0 {
            (0..dims.layers).map(|l| l * stride("layer") * element).collect()
        } else {
            // Allocations of their own, with a gap that keeps 16-byte alignment.
            let pitch = (tensor.span_bytes() + 64).next_multiple_of(64);
            let count = if order.kind == Kind::Split { 2 * dims.layers } else { dims.layers };
            (0..count).map(|t| t * pitch).collect()
        };
        let bytes = tensors.iter().max().unwrap() + tensor.span_bytes();
        let mut bases = Vec::new();
        for kv in 0..planes {
            for l in 0..dims.layers {
                let inside_kv = if layout.kv_planes() == 2 { kv } else { 0 };
                let inside_l = if layout.layers() > 1 { l } else { 0 };
                let index = match () {
                    () if layout.layers() > 1 || tensors.len() == 1 => 0,
                    () if order.kind == Kind::Split => kv * dims.layers + l,
                    () => l,
                };
                bases.push(
                    tensors[usize::try_from(index).unwrap()] + layout.plane_offset(inside_kv, inside_l)?,
                );
            }
        }
        let reference = Reference {
            tensor,
            axes: Axis::parse_list(order.shape)?,
            block_size,
            planes,
            layers: dims.layers,
            tensors,
        };
        Ok(Cache { layout, reference, bases, bytes })
    }

    /// The plan of this cache, its image at `addr`, for packed slabs of `tokens` tokens.
    pub(crate) fn plan(&self, addr: u64, tokens: u64) -> Result<Arc<CopyPlan>, LayoutError> {
        let slab = SlabLayout::of_cache(&self.layout, self.reference.planes, self.reference.layers, tokens)?;
        let bases: Vec<u64> = self.bases.iter().map(|base| addr + base).collect();
        Ok(Arc::new(CopyPlan::new(&self.layout, &slab, bases)?))
    }

    /// Bytes of a packed slab of `tokens` tokens.
    pub(crate) fn slab_bytes(&self, tokens: u64) -> usize {
        let r = &self.reference;
        usize::try_from(r.planes * r.layers * tokens * r.row_bytes()).unwrap()
    }
}

/// A job on a slab at one address, for whoever addresses it.
pub(crate) fn job(
    plan: &Arc<CopyPlan>,
    direction: Direction,
    slab: u64,
    slots: SlotMapping,
    skip: u64,
) -> Result<CopyJob, LayoutError> {
    let len = plan.slab().bytes();
    // Pinned memory has one address here; the kernel only looks at the device's.
    let slab = SlabSpan { host: Some(slab), device: Some(slab), len };
    let request = JobRequest { direction, slab, slots, skip_tokens: skip, partial: true, layers: None };
    CopyJob::new(plan.clone(), request)
}

/// Memory before and after a transfer.
#[derive(Clone, Debug)]
pub(crate) struct Images {
    pub(crate) cache: Vec<u8>,
    pub(crate) slab: Vec<u8>,
    pub(crate) cache_after: Vec<u8>,
    pub(crate) slab_after: Vec<u8>,
}

impl Images {
    /// Random contents, and what the oracle makes of them. `slots` are the ones the kernel ought to follow:
    /// bad ones replaced by −1.
    pub(crate) fn new(
        cache: &Cache,
        direction: Direction,
        tokens: u64,
        slots: &[i64],
        skip: u64,
        rng: &mut Rng,
    ) -> Self {
        let before = rng.bytes(usize::try_from(cache.bytes).unwrap());
        let slab = rng.bytes(cache.slab_bytes(tokens));
        let (mut cache_after, mut slab_after) = (before.clone(), slab.clone());
        let written = cache.reference.copy(direction, &mut cache_after, &mut slab_after, tokens, slots, skip);
        let skip = usize::try_from(skip).unwrap();
        let moves = slots.iter().skip(skip).any(|s| *s >= 0);
        assert_eq!(written > 0, moves, "the oracle wrote {written} bytes");
        Images { cache: before, slab, cache_after, slab_after }
    }
}

/// Names the first byte in which two images differ.
pub(crate) fn compare(what: &str, found: &[u8], expected: &[u8]) -> Result<(), String> {
    assert_eq!(found.len(), expected.len());
    match found.iter().zip(expected).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(format!(
            "{what}: byte {at} of {} is {:#04x}, expected {:#04x}",
            found.len(),
            found[at],
            expected[at]
        )),
    }
}

/// `n` different slots in random order, every `hole`-th token (0: none) without one.
pub(crate) fn random_slots(rng: &mut Rng, num_slots: u64, n: usize, hole: usize) -> Vec<i64> {
    let mut all: Vec<i64> = (0..i64::try_from(num_slots).unwrap()).collect();
    let n = n.min(all.len());
    for i in 0..n {
        let left = u64::try_from(all.len() - i).unwrap();
        let j = i + usize::try_from(rng.below(left)).unwrap();
        all.swap(i, j);
    }
    all.truncate(n);
    if hole > 0 {
        all.iter_mut().skip(hole / 2).step_by(hole).for_each(|slot| *slot = -1);
    }
    all
}

/// A small deterministic generator, so that a failure repeats.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(n + 8);
        while out.len() < n {
            out.extend_from_slice(&self.next().to_le_bytes());
        }
        out.truncate(n);
        out
    }
}
