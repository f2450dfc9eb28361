//! What is measured: loads that keep the device busy, movers beside them.

use std::fmt;

/// What the device computes meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadKind {
    /// 8192 x 8192 x 8192 bf16 products: all multiprocessors, hardly any memory traffic.
    Products,
    /// `y += a x` over 1 GiB each: all memory traffic.
    Memory,
    /// 16384 x 8192 by 8, bf16: what decoding does.
    Decode,
    /// One block that waits: to try this program where there is no cuBLAS.
    Stall,
    /// Nothing: the rate of a mover alone.
    None,
}

/// What is measured unless something else is asked for.
pub(crate) const LOADS: [LoadKind; 3] = [LoadKind::Products, LoadKind::Memory, LoadKind::Decode];

impl LoadKind {
    pub(crate) const ALL: [LoadKind; 5] =
        [LoadKind::Products, LoadKind::Memory, LoadKind::Decode, LoadKind::Stall, LoadKind::None];

    pub(crate) fn name(self) -> &'static str {
        match self {
            LoadKind::Products => "products",
            LoadKind::Memory => "memory",
            LoadKind::Decode => "decode",
            LoadKind::Stall => "stall",
            LoadKind::None => "none",
        }
    }

    pub(crate) fn needs_blas(self) -> bool {
        !matches!(self, LoadKind::Stall | LoadKind::None)
    }
}

/// What moves bytes beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoverKind {
    /// One flat copy of the same bytes by the copy engine: what everything is compared with.
    Flat,
    /// The kernel on host memory, at most so many thread blocks.
    Direct(u32),
    /// Through a ring: MiB, buffers, thread blocks (0: half as many as multiprocessors).
    Staged(u64, u64, u32),
    /// Copies by the driver, no kernel of ours.
    Fallback,
}

impl fmt::Display for MoverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MoverKind::Flat => f.write_str("flat copy"),
            MoverKind::Direct(blocks) => write!(f, "direct {blocks}"),
            MoverKind::Staged(ring, buffers, 0) => write!(f, "staged {ring}M/{buffers} half"),
            MoverKind::Staged(ring, buffers, blocks) => write!(f, "staged {ring}M/{buffers} b{blocks}"),
            MoverKind::Fallback => f.write_str("fallback"),
        }
    }
}

/// Everything that can be measured; the flat copy first.
pub(crate) fn movers() -> Vec<MoverKind> {
    let direct = [1, 2, 3, 4, 8].map(MoverKind::Direct);
    let rings = [128, 64, 32].into_iter().flat_map(|ring| [2, 4, 8].map(|buffers| (ring, buffers)));
    let staged = rings.flat_map(|(ring, buffers)| [0, 32, 132].map(|b| MoverKind::Staged(ring, buffers, b)));
    let mut all = vec![MoverKind::Flat];
    all.extend(direct);
    all.extend(staged);
    all.push(MoverKind::Fallback);
    all
}

/// Those whose name contains one of the words, and the flat copy in any case.
pub(crate) fn chosen(only: &[String]) -> Vec<MoverKind> {
    let mut all = movers();
    all.retain(|mover| {
        let name = mover.to_string();
        *mover == MoverKind::Flat || only.is_empty() || only.iter().any(|word| name.contains(word.as_str()))
    });
    all
}
