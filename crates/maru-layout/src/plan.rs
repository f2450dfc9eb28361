//! What a mover needs to know of a cache and a slab geometry, worked out once.

use std::sync::{Arc, OnceLock};

use crate::{LayoutError, PagedLayout, SlabLayout};

/// The widest access a mover makes, in bytes.
const WIDEST: u64 = 16;

/// Numbers of a [`CopyPlan`], all strides in bytes.
///
/// Row `r` of token `t`, plane `kv`, layer `l` (of the layers moved) is `row_bytes` contiguous bytes at
///
/// * paged: `base[kv, l] + (s div block_size) * block_stride + (s mod block_size) * token_stride + r * row_stride`
/// * slab:  `slab + kv * slab_kv_stride + l * slab_layer_stride + t * slab_token_stride + r * row_bytes`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Geometry {
    /// Planes per layer: 2 (K, V) or 1.
    pub kv_planes: u64,
    /// Layers of the cache.
    pub layers: u64,
    /// Slots of the cache.
    pub num_slots: u64,
    /// Tokens of a block.
    pub block_size: u64,
    /// Block to block; 0 for one block.
    pub block_stride: u64,
    /// Token to token inside a block; 0 for blocks of one token.
    pub token_stride: u64,
    /// Rows of a token in one plane: 1 where its heads lie side by side on the paged side.
    pub rows: u64,
    /// Row to row on the paged side; 0 for one row.
    pub row_stride: u64,
    /// Bytes contiguous on both sides.
    pub row_bytes: u64,
    /// Plane to plane in the slab; 0 for one plane.
    pub slab_kv_stride: u64,
    /// Layer to layer in the slab; 0 for one layer.
    pub slab_layer_stride: u64,
    /// Token to token in the slab; 0 for one token.
    pub slab_token_stride: u64,
    /// Tokens of the slab.
    pub slab_tokens: u64,
    /// Consecutive slots are `token_stride` (of one-token blocks: `block_stride`) apart across blocks too.
    pub linear_slots: bool,
    /// Consecutive tokens with consecutive slots inside a block are one run on both sides.
    pub tokens_adjacent: bool,
    /// Widest power of two (at most 16) that divides every stride, plane base and row.
    pub access_bytes: u64,
}

impl Geometry {
    /// Distance of consecutive slots where they are evenly spaced ([`Geometry::linear_slots`]).
    pub fn slot_stride(&self) -> u64 {
        if self.block_size == 1 { self.block_stride } else { self.token_stride }
    }

    /// Whether the native kernel can take this geometry: its counts are 32-bit, its offsets 64-bit.
    ///
    /// # Errors
    /// [`LayoutError::KernelLimit`] with the first of block size, rows, layers, row bytes, token bytes and
    /// slab tokens above [`u32::MAX`].
    pub fn kernel_limits(&self) -> Result<(), LayoutError> {
        fit_kernel(&[
            ("block_size", self.block_size),
            ("rows of a token", self.rows),
            ("layers", self.layers),
            ("row_bytes", self.row_bytes),
            ("bytes of a token in one plane", self.token_bytes()),
            ("slab tokens", self.slab_tokens),
        ])
    }

    /// Bytes of one token in one plane.
    pub fn token_bytes(&self) -> u64 {
        self.rows * self.row_bytes
    }
}

/// A cache's plane addresses and how its rows meet those of a slab geometry. Shared by every transfer
/// between the two.
#[derive(Clone, Debug)]
pub struct CopyPlan {
    geometry: Geometry,
    bases: Arc<[u64]>,
    plane_bytes: u64,
    slab: SlabLayout,
    derived: Derived,
}

/// Plans for staging buffers, worked out when first asked for.
#[derive(Clone, Debug, Default)]
struct Derived {
    flat: OnceLock<Arc<CopyPlan>>,
    /// For this many layers at once.
    window: OnceLock<(u64, Arc<CopyPlan>)>,
}

/// Two plans are equal if they move the same bytes, whatever was derived from either.
impl PartialEq for CopyPlan {
    fn eq(&self, other: &Self) -> bool {
        let key = |p: &CopyPlan| (p.geometry, p.plane_bytes);
        key(self) == key(other) && self.bases == other.bases && self.slab == other.slab
    }
}

impl Eq for CopyPlan {}

impl CopyPlan {
    /// Relates a cache to a slab geometry.
    ///
    /// `bases[kv * layers + l]` is the address of layer `l`'s plane `kv`. The slab has as many planes as the
    /// cache and either all its layers or one (a layerwise object, see [`crate::JobRequest::layers`]).
    ///
    /// # Errors
    /// [`LayoutError::Disagree`] or [`LayoutError::DtypeMismatch`] when the two hold different tokens,
    /// [`LayoutError::PlaneCount`] when the bases are no whole number of layers, [`LayoutError::Overflow`]
    /// when a plane would wrap the address space.
    pub fn new(
        paged: &PagedLayout,
        slab: &SlabLayout,
        bases: impl Into<Arc<[u64]>>,
    ) -> Result<Self, LayoutError> {
        let bases: Arc<[u64]> = bases.into();
        let planes = slab.planes;
        let found = u64::try_from(bases.len()).unwrap_or(u64::MAX);
        let layers = found / planes;
        if layers == 0 || found % planes != 0 {
            let layers = layers.max(1);
            return Err(LayoutError::PlaneCount {
                found: bases.len(),
                needed: planes * layers,
                planes,
                layers,
            });
        }
        if slab.layers != layers && slab.layers != 1 {
            return Err(LayoutError::Disagree { what: "layers", paged: layers, slab: slab.layers });
        }
        if paged.kv_planes() > planes {
            return Err(LayoutError::Disagree { what: "planes", paged: paged.kv_planes(), slab: planes });
        }
        if paged.token_bytes() != slab.row_bytes {
            return Err(LayoutError::Disagree {
                what: "bytes of a token in one plane",
                paged: paged.token_bytes(),
                slab: slab.row_bytes,
            });
        }
        if !paged.dtype().moves_as(slab.dtype) {
            return Err(LayoutError::DtypeMismatch { paged: paged.dtype(), slab: slab.dtype });
        }
        if bases.iter().any(|b| b.checked_add(paged.plane_bytes()).is_none()) {
            return Err(LayoutError::Overflow { what: "a plane's last address" });
        }
        let geometry = fold(paged, slab, layers, &bases);
        let (plane_bytes, slab) = (paged.plane_bytes(), slab.clone());
        Ok(CopyPlan { geometry, bases, plane_bytes, slab, derived: Derived::default() })
    }

    /// All planes as the layers of one plane kind, of a packed slab. The caller sees to it that the slab is
    /// packed.
    pub(crate) fn flattened(&self) -> Arc<Self> {
        Arc::clone(self.derived.flat.get_or_init(|| {
            let planes = self.geometry.kv_planes * self.geometry.layers;
            Arc::new(self.with_slab(planes, 1, planes))
        }))
    }

    /// The same planes with a packed slab that holds `layers` of the layers.
    pub(crate) fn windowed(&self, layers: u64) -> Arc<Self> {
        let make = || Arc::new(self.with_slab(self.geometry.layers, self.geometry.kv_planes, layers));
        // Transfers layer by layer ask for the same number again and again.
        let (kept, plan) = self.derived.window.get_or_init(|| (layers, make()));
        if *kept == layers { Arc::clone(plan) } else { make() }
    }

    /// The planes as `kv_planes` kinds of `layers` each, with a packed slab of `in_slab` layers.
    fn with_slab(&self, layers: u64, kv_planes: u64, in_slab: u64) -> Self {
        let strip = self.slab.row_bytes() * self.slab.tokens();
        let stride = |count: u64, bytes: u64| if count == 1 { 0 } else { bytes };
        let mut plan = CopyPlan { derived: Derived::default(), ..self.clone() };
        let (g, slab) = (&mut plan.geometry, &mut plan.slab);
        (g.layers, g.kv_planes) = (layers, kv_planes);
        g.slab_kv_stride = stride(kv_planes, in_slab * strip);
        g.slab_layer_stride = stride(in_slab, strip);
        (slab.layers, slab.planes) = (in_slab, kv_planes);
        (slab.kv_stride, slab.layer_stride) = (g.slab_kv_stride, g.slab_layer_stride);
        slab.bytes = kv_planes * in_slab * strip;
        plan
    }

    /// The numbers.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Plane addresses, `bases[kv * layers + l]`.
    pub fn bases(&self) -> &Arc<[u64]> {
        &self.bases
    }

    /// Bytes from a plane's base to behind its last addressed byte.
    pub fn plane_bytes(&self) -> u64 {
        self.plane_bytes
    }

    /// The slab geometry.
    pub fn slab(&self) -> &SlabLayout {
        &self.slab
    }
}

/// Folds what is contiguous on both sides into rows.
fn fold(paged: &PagedLayout, slab: &SlabLayout, layers: u64, bases: &[u64]) -> Geometry {
    let s = paged.spec();
    let (rows, row_stride, row_bytes) = match paged.heads_adjacent() {
        true => (1, 0, paged.token_bytes()),
        false => (s.num_heads, s.head_stride, paged.head_bytes()),
    };
    let token_adjacent_paged = s.block_size == 1 || s.token_stride == row_bytes;
    let token_adjacent_slab = slab.tokens == 1 || slab.token_stride == row_bytes;
    let strides =
        [s.block_stride, s.token_stride, row_stride, slab.kv_stride, slab.layer_stride, slab.token_stride];
    Geometry {
        kv_planes: slab.planes,
        layers,
        num_slots: paged.num_slots(),
        block_size: s.block_size,
        block_stride: s.block_stride,
        token_stride: s.token_stride,
        rows,
        row_stride,
        row_bytes,
        slab_kv_stride: slab.kv_stride,
        slab_layer_stride: slab.layer_stride,
        slab_token_stride: slab.token_stride,
        slab_tokens: slab.tokens,
        linear_slots: paged.linear_slots(),
        tokens_adjacent: rows == 1 && token_adjacent_paged && token_adjacent_slab,
        access_bytes: access(strides.iter().chain(bases).copied().chain([row_bytes])),
    }
}

/// The first of the named counts that does not fit 32 bits.
pub(crate) fn fit_kernel(counts: &[(&'static str, u64)]) -> Result<(), LayoutError> {
    let max = u64::from(u32::MAX);
    match counts.iter().find(|(_, n)| *n > max) {
        Some(&(what, found)) => Err(LayoutError::KernelLimit { what, found, max }),
        None => Ok(()),
    }
}

/// The widest power of two, at most [`WIDEST`], that divides every number; zeros do not count.
pub(crate) fn access(numbers: impl Iterator<Item = u64>) -> u64 {
    let bits = numbers.fold(WIDEST, |a, n| a | n);
    1 << bits.trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::access;

    #[test]
    fn access_width_is_the_widest_common_power_of_two() {
        for (numbers, width) in [
            (&[256u64, 4096, 0][..], 16),
            (&[92, 16], 4),
            (&[8, 32], 8),
            (&[2, 64], 2),
            (&[4096, 4097], 1),
            (&[], 16),
        ] {
            assert_eq!(access(numbers.iter().copied()), width, "{numbers:?}");
        }
    }
}
