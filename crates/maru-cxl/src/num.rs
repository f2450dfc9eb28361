//! Checked 64-bit arithmetic: the only place where ranges are compared with sizes.

use crate::error::CxlError;

/// The granule of the layout: page size of the directory, slab stride and driver pieces.
pub(crate) const PAGE: u64 = 4096;

/// `value` rounded up to a multiple of `align` (not zero), or `None` past 2^64.
pub(crate) fn round_up(value: u64, align: u64) -> Option<u64> {
    value.checked_next_multiple_of(align)
}

/// `value` rounded down to a multiple of `align` (not zero).
pub(crate) fn round_down(value: u64, align: u64) -> u64 {
    value - value % align
}

/// Checks that `[offset, offset + len)` lies inside `size` bytes.
pub(crate) fn check_range(what: &'static str, offset: u64, len: u64, size: u64) -> Result<(), CxlError> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(CxlError::OutOfBounds { what, offset, len, size }),
    }
}

/// Whether `[a, a + a_len)` and `[b, b + b_len)` share a byte. Both must not wrap.
pub(crate) fn overlaps(a: u64, a_len: u64, b: u64, b_len: u64) -> bool {
    a < b.saturating_add(b_len) && b < a.saturating_add(a_len) && a_len > 0 && b_len > 0
}

/// A 64-bit count as `usize`; the crate refuses targets where that could fail.
#[allow(clippy::cast_possible_truncation, reason = "lib.rs refuses targets whose usize is not 64 bits")]
pub(crate) const fn to_usize(value: u64) -> usize {
    value as usize
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// FNV-1a, 64 bits: the check words of the directory. Not cryptographic; each step is a bijection of the
/// running value, so any change of a single byte changes the result.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_check_refuses_wrap_around() {
        assert!(check_range("x", u64::MAX - 1, 4, 100).is_err());
        assert!(check_range("x", 96, 4, 100).is_ok());
        assert!(check_range("x", 97, 4, 100).is_err());
        assert!(check_range("x", 100, 0, 100).is_ok());
    }

    #[test]
    fn overlap_is_symmetric_and_ignores_empty_ranges() {
        assert!(overlaps(0, 8, 4, 8) && overlaps(4, 8, 0, 8));
        assert!(!overlaps(0, 8, 8, 8) && !overlaps(8, 8, 0, 8));
        assert!(!overlaps(4, 0, 0, 8));
    }

    #[test]
    fn fnv_reference_values() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
    }
}
