//! The slab side.

use crate::{DType, LayoutError, PagedLayout, RowKind};

/// Geometry of a slab: `[planes][layers][tokens][row]`, C-contiguous unless made with strides.
///
/// The byte image does not depend on the paged side: `off(kv, l, t, i) = ((kv*L + l)*T + t)*H*E + i*E`, K
/// before V, `i = head * head_size + position`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SlabLayout {
    pub(crate) planes: u64,
    pub(crate) layers: u64,
    pub(crate) tokens: u64,
    pub(crate) row_bytes: u64,
    pub(crate) dtype: DType,
    pub(crate) row_kind: RowKind,
    pub(crate) kv_stride: u64,
    pub(crate) layer_stride: u64,
    pub(crate) token_stride: u64,
    pub(crate) bytes: u64,
}

impl SlabLayout {
    /// The packed slab of a chunk: `[planes][layers][tokens][row]`.
    ///
    /// `planes` is 2 (K, V) or 1, `row_elements` the elements of a token in one plane (all heads).
    ///
    /// # Errors
    /// [`LayoutError`] for a count of 0, more than two planes, or a size beyond 63 bits.
    pub fn packed(
        planes: u64,
        layers: u64,
        tokens: u64,
        row_elements: u64,
        dtype: DType,
    ) -> Result<Self, LayoutError> {
        let row = mul(row_elements, dtype.size())?;
        let token = row;
        let layer = mul(token, tokens)?;
        let kv = mul(layer, layers)?;
        Self::strided([planes, layers, tokens], row, [kv, layer, token], dtype)
    }

    /// The packed slab that holds `tokens` tokens of `layers` layers of a cache. `planes` is 2 also where K
    /// and V come as separate tensors.
    ///
    /// # Errors
    /// As [`SlabLayout::packed`].
    pub fn of_cache(paged: &PagedLayout, planes: u64, layers: u64, tokens: u64) -> Result<Self, LayoutError> {
        let row = mul(paged.num_heads(), paged.head_size())?;
        let mut slab = Self::packed(planes, layers, tokens, row, paged.dtype())?;
        slab.row_kind = paged.row_kind();
        Ok(slab)
    }

    /// One layer as its own object: `[planes][tokens][row]`.
    ///
    /// # Errors
    /// As [`SlabLayout::packed`].
    pub fn layer_object(
        planes: u64,
        tokens: u64,
        row_elements: u64,
        dtype: DType,
    ) -> Result<Self, LayoutError> {
        Self::packed(planes, 1, tokens, row_elements, dtype)
    }

    /// One layer, tokens outermost: `[tokens][planes][row]`.
    ///
    /// # Errors
    /// As [`SlabLayout::packed`].
    pub fn token_major(
        planes: u64,
        tokens: u64,
        row_elements: u64,
        dtype: DType,
    ) -> Result<Self, LayoutError> {
        let row = mul(row_elements, dtype.size())?;
        let token = mul(row, planes)?;
        Self::strided([planes, 1, tokens], row, [row, 0, token], dtype)
    }

    /// Counts `[planes, layers, tokens]` with byte strides of the same; rows of `row_bytes` are contiguous.
    /// The stride of a count of 1 is ignored.
    ///
    /// # Errors
    /// [`LayoutError`] for a count or a used stride of 0, more than two planes, rows that are no whole number
    /// of elements, positions that share memory, or a size beyond 63 bits.
    pub fn strided(
        counts: [u64; 3],
        row_bytes: u64,
        strides: [u64; 3],
        dtype: DType,
    ) -> Result<Self, LayoutError> {
        let [planes, layers, tokens] = counts;
        if !(1..=2).contains(&planes) {
            let found = i128::from(planes);
            return Err(LayoutError::OutOfRange { what: "slab planes", found, allowed: "1 or 2".into() });
        }
        for (what, n) in [("slab layers", layers), ("slab tokens", tokens), ("slab row bytes", row_bytes)] {
            if n == 0 {
                return Err(LayoutError::OutOfRange { what, found: 0, allowed: "1 or more".into() });
            }
        }
        if !row_bytes.is_multiple_of(dtype.size()) {
            return Err(LayoutError::OutOfRange {
                what: "slab row bytes",
                found: i128::from(row_bytes),
                allowed: format!("a multiple of the {}-byte element", dtype.size()),
            });
        }
        let mut bytes = row_bytes;
        let mut used = strides;
        let mut axes = [(0, 0); 3];
        for (i, (len, stride)) in counts.into_iter().zip(&mut used).enumerate() {
            if len == 1 {
                *stride = 0;
            } else if *stride == 0 {
                return Err(LayoutError::OutOfRange {
                    what: "slab stride",
                    found: 0,
                    allowed: "1 or more".into(),
                });
            }
            bytes = add(bytes, mul(*stride, len - 1)?)?;
            axes[i] = (len, *stride);
        }
        match crate::overlap::self_overlap(&axes, row_bytes) {
            crate::overlap::Overlap::Disjoint => {}
            outcome => {
                return Err(LayoutError::SharedBytes {
                    shape: axes.iter().map(|a| i64::try_from(a.0).unwrap_or(i64::MAX)).collect(),
                    strides: axes.iter().map(|a| i64::try_from(a.1).unwrap_or(i64::MAX)).collect(),
                    proven: outcome == crate::overlap::Overlap::Shared,
                });
            }
        }
        let [kv_stride, layer_stride, token_stride] = used;
        let row_kind = RowKind::Plain;
        Ok(SlabLayout {
            planes,
            layers,
            tokens,
            row_bytes,
            dtype,
            row_kind,
            kv_stride,
            layer_stride,
            token_stride,
            bytes,
        })
    }

    /// The same geometry holding rows of another kind; the kind enters the fingerprint.
    #[must_use]
    pub fn with_row_kind(mut self, kind: RowKind) -> Self {
        self.row_kind = kind;
        self
    }

    /// Planes: 2 (K, V) or 1.
    pub fn planes(&self) -> u64 {
        self.planes
    }

    /// Layers.
    pub fn layers(&self) -> u64 {
        self.layers
    }

    /// Tokens it has room for.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Bytes of one token in one plane.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What a row holds.
    pub fn row_kind(&self) -> RowKind {
        self.row_kind
    }

    /// Byte strides `[plane, layer, token]`; 0 for a count of 1.
    pub fn strides(&self) -> [u64; 3] {
        [self.kv_stride, self.layer_stride, self.token_stride]
    }

    /// Bytes from the first to behind the last addressed one.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn mul(a: u64, b: u64) -> Result<u64, LayoutError> {
    a.checked_mul(b)
        .filter(|n| *n <= i64::MAX.unsigned_abs())
        .ok_or(LayoutError::Overflow { what: "the slab's size" })
}

fn add(a: u64, b: u64) -> Result<u64, LayoutError> {
    a.checked_add(b)
        .filter(|n| *n <= i64::MAX.unsigned_abs())
        .ok_or(LayoutError::Overflow { what: "the slab's size" })
}
