//! Cutting a region into pieces for the driver.

use crate::error::CxlError;
use crate::num::{PAGE, round_down};

/// One driver call fails at this size and above on drivers of the 580 series: their page table of 16 bytes per
/// 4 KiB page meets the kernel's 2 GiB limit for one allocation.
pub(crate) const DRIVER_LIMIT: u64 = 512 << 30;

/// How to register a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegisterOptions {
    /// Most bytes of one driver call; 0 means 64 GiB. Must stay under 512 GiB.
    pub piece_limit: u64,
    /// Distance of two slabs in bytes, a multiple of 4096; pieces end on its multiples. 0 if there are no slabs.
    pub slab_stride: u64,
    /// Where the first slab begins in the region, a multiple of 4096.
    pub data_offset: u64,
    /// Whether a refusal of the driver is an error rather than an unregistered region.
    pub required: bool,
}

impl RegisterOptions {
    /// The default of `piece_limit`.
    pub const DEFAULT_PIECE: u64 = 64 << 30;
}

impl Default for RegisterOptions {
    fn default() -> Self {
        Self { piece_limit: Self::DEFAULT_PIECE, slab_stride: 0, data_offset: 0, required: false }
    }
}

/// Offsets and lengths of the pieces of a region of `len` bytes that starts at `address`.
///
/// A region within the limit is one piece. Otherwise a piece ends at the last slab border it can reach; what is
/// left behind the last whole slab is a piece of its own. Before the first slab, borders are 4 KiB.
pub(crate) fn cut(address: u64, len: u64, options: &RegisterOptions) -> Result<Vec<(u64, u64)>, CxlError> {
    let limit = if options.piece_limit == 0 { RegisterOptions::DEFAULT_PIECE } else { options.piece_limit };
    let invalid = |what, found, allowed: String| Err(CxlError::InvalidArgument { what, found, allowed });
    if !(PAGE..DRIVER_LIMIT).contains(&limit) {
        return invalid(
            "register_piece",
            limit,
            format!("{PAGE} bytes to just under {DRIVER_LIMIT} are allowed"),
        );
    }
    for (what, value) in [("slab stride", options.slab_stride), ("data offset", options.data_offset)] {
        if value % PAGE != 0 {
            return Err(CxlError::Misaligned { what, value, align: PAGE });
        }
    }
    if options.data_offset > len {
        return invalid("data offset", options.data_offset, format!("the region has {len} bytes"));
    }
    if len <= limit {
        return Ok(vec![(0, len)]);
    }
    // Two pieces that shared a page would be two registrations of that page.
    if !address.is_multiple_of(PAGE) {
        return Err(CxlError::Misaligned {
            what: "address of a region in several pieces",
            value: address,
            align: PAGE,
        });
    }
    let limit = round_down(limit, PAGE);
    let stride = if options.slab_stride == 0 { PAGE } else { options.slab_stride };
    if stride > limit {
        return invalid(
            "register_piece",
            limit,
            format!("at least the slab stride of {stride} bytes is needed"),
        );
    }
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < len {
        // at < len < 2^63 and limit < 2^39: no overflow.
        let reach = (at + limit).min(len);
        let end = if reach < options.data_offset {
            round_down(reach, PAGE)
        } else {
            let slabs = (reach - options.data_offset) / stride;
            options.data_offset + slabs * stride
        };
        // Less than a slab is left.
        let end = if end <= at { reach } else { end };
        pieces.push((at, end - at));
        at = end;
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn options(piece_limit: u64, slab_stride: u64, data_offset: u64) -> RegisterOptions {
        RegisterOptions { piece_limit, slab_stride, data_offset, required: true }
    }

    const MIB: u64 = 1 << 20;

    /// Case C07: cap 4 MiB, region 10 MiB, slab 3 MiB.
    #[test]
    fn c07_pieces_end_on_slab_borders() {
        let pieces = cut(0, 10 * MIB, &options(4 * MIB, 3 * MIB, 0)).unwrap();
        assert_eq!(pieces.iter().map(|p| p.1 / MIB).collect::<Vec<_>>(), [3, 3, 3, 1]);
    }

    #[test]
    fn a_region_within_the_limit_is_one_piece() {
        assert_eq!(cut(7, 10 * MIB, &options(0, 3 * MIB, 0)).unwrap(), [(0, 10 * MIB)]);
    }

    #[test]
    fn an_mla_slab_that_divides_nothing_round() {
        let stride = 17_989_632;
        for (offset, len) in cut(0, 1 << 30, &options(64 * MIB, stride, 8192)).unwrap() {
            assert!(len <= 64 * MIB);
            assert!(offset == 0 || (offset - 8192) % stride == 0);
        }
    }

    #[test]
    fn a_header_larger_than_the_limit_is_cut_in_pages() {
        let pieces = cut(0, 20 * MIB, &options(3 * MIB, 3 * MIB, 8 * MIB)).unwrap();
        assert_eq!(pieces[..4], [(0, 3 * MIB), (3 * MIB, 3 * MIB), (6 * MIB, 2 * MIB), (8 * MIB, 3 * MIB)]);
    }

    #[test]
    fn limits_outside_what_the_driver_takes_are_refused() {
        for limit in [1, 4095, DRIVER_LIMIT, u64::MAX] {
            assert_eq!(cut(0, MIB, &options(limit, 0, 0)).unwrap_err().kind(), "invalid_argument");
        }
        assert!(cut(0, MIB, &options(DRIVER_LIMIT - 1, 0, 0)).is_ok());
    }

    #[test]
    fn a_slab_larger_than_the_limit_is_refused() {
        let text = cut(0, 100 * MIB, &options(4 * MIB, 5 * MIB, 0)).unwrap_err().to_string();
        assert!(text.contains("5242880"), "{text}");
    }

    #[test]
    fn an_unaligned_region_in_several_pieces_is_refused() {
        assert!(matches!(cut(100, 10 * MIB, &options(4 * MIB, 0, 0)), Err(CxlError::Misaligned { .. })));
    }

    proptest! {
        #[test]
        fn pieces_tile_the_region_and_never_cut_a_slab(
            pages in 1_u64..5000, limit_pages in 1_u64..300, stride_pages in 1_u64..300, data_pages in 0_u64..600,
        ) {
            let len = pages * PAGE;
            let (stride, data) = (stride_pages * PAGE, data_pages.min(pages) * PAGE);
            let limit = limit_pages * PAGE;
            let Ok(pieces) = cut(0, len, &options(limit, stride, data)) else {
                prop_assert!(stride > limit && len > limit);
                return Ok(());
            };
            let mut at = 0;
            for &(offset, size) in &pieces {
                prop_assert_eq!(offset, at);
                prop_assert!(size > 0 && size <= limit);
                at += size;
            }
            prop_assert_eq!(at, len);
            let slabs = (len - data) / stride;
            for slab in 0..slabs {
                let (start, end) = (data + slab * stride, data + (slab + 1) * stride);
                prop_assert!(pieces.iter().any(|&(o, l)| o <= start && end <= o + l), "slab {} is cut", slab);
            }
        }
    }
}
