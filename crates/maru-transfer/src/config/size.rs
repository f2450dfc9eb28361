//! Sizes in bytes as people write them.

use std::fmt;

/// Why a text is not a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SizeFault {
    /// Not a number with an optional unit.
    Malformed,
    /// Negative.
    Negative,
    /// A number of bytes that is not whole, such as `0.3K`.
    NotWhole,
    /// More than 2^63 - 1 bytes.
    TooLarge,
}

impl fmt::Display for SizeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SizeFault::Malformed => "not a size",
            SizeFault::Negative => "negative",
            SizeFault::NotWhole => "not a whole number of bytes",
            SizeFault::TooLarge => "more than 2^63 - 1 bytes",
        })
    }
}

/// What a size may look like, for messages.
pub(super) const SIZE_FORM: &str =
    "an integer of bytes or text such as \"4G\", \"500M\", \"1.5GiB\" (units of 1024)";

/// The largest size: file offsets and TOML integers end here.
pub(super) const SIZE_MAX: u64 = i64::MAX as u64;

/// Parses `4G`, `500M`, `1.5GiB`, `4096`: digits, optionally a fraction, optionally one of
/// `K M G T P E` with an optional `B` or `iB`, or a bare `B`. Units are powers of 1024, letter
/// case does not matter, and blanks may surround the number and the unit.
pub(super) fn parse_size(text: &str) -> Result<u64, SizeFault> {
    let text = text.trim_matches(' ');
    if let Some(rest) = text.strip_prefix('-') {
        // "-5" is a negative size; "-x" is nothing.
        return Err(match parse_size(rest) {
            Ok(_) | Err(SizeFault::NotWhole | SizeFault::TooLarge) if !rest.starts_with([' ', '-']) => {
                SizeFault::Negative
            }
            _ => SizeFault::Malformed,
        });
    }
    let number_len = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(number_len);
    let shift = unit_shift(unit.trim_start_matches(' ')).ok_or(SizeFault::Malformed)?;
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
        Some(_) => return Err(SizeFault::Malformed),
        None => (number, ""),
    };
    if whole.is_empty() || fraction.contains('.') {
        return Err(SizeFault::Malformed);
    }
    let whole = digits(whole).ok_or(SizeFault::TooLarge)?;
    let whole = whole.checked_mul(1u128 << shift).ok_or(SizeFault::TooLarge)?;
    let total = whole.checked_add(fraction_bytes(fraction, shift)?).ok_or(SizeFault::TooLarge)?;
    match u64::try_from(total) {
        Ok(bytes) if bytes <= SIZE_MAX => Ok(bytes),
        _ => Err(SizeFault::TooLarge),
    }
}

/// Only called on ASCII digits; `None` where 128 bits do not hold them.
fn digits(text: &str) -> Option<u128> {
    text.parse().ok()
}

/// `fraction` are the digits behind the point; the result is exact or refused. No floating
/// point: 0.1 has none.
fn fraction_bytes(fraction: &str, shift: u32) -> Result<u128, SizeFault> {
    let fraction = fraction.trim_end_matches('0');
    if fraction.is_empty() {
        return Ok(0);
    }
    // bytes = digits * 2^shift / 10^n is whole only if 5^n divides digits, and 2^n divides the
    // rest; with shift <= 60 that needs n <= 60 + 27, so longer fractions are never whole.
    let n = u32::try_from(fraction.len()).map_err(|_| SizeFault::NotWhole)?;
    let (Some(digits), Some(fives)) = (digits(fraction), 5u128.checked_pow(n)) else {
        return Err(SizeFault::NotWhole);
    };
    if !digits.is_multiple_of(fives) || shift < n && !(digits / fives).is_multiple_of(1 << (n - shift)) {
        return Err(SizeFault::NotWhole);
    }
    let odd = digits / fives;
    if shift >= n {
        // odd < 2^n, so this stays below 2^shift.
        Ok(odd << (shift - n))
    } else {
        Ok(odd >> (n - shift))
    }
}

fn unit_shift(unit: &str) -> Option<u32> {
    let unit = unit.to_ascii_lowercase();
    let prefix = match unit.as_str() {
        "" | "b" => return Some(0),
        other => other.strip_suffix("ib").or_else(|| other.strip_suffix('b')).unwrap_or(other),
    };
    match prefix {
        "k" => Some(10),
        "m" => Some(20),
        "g" => Some(30),
        "t" => Some(40),
        "p" => Some(50),
        "e" => Some(60),
        _ => None,
    }
}

/// `4294967296 (4 GiB)`; sizes that are no whole multiple of a unit print as bytes only.
pub(super) fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let steps = (bytes.trailing_zeros() / 10).min(6);
    if bytes == 0 || steps == 0 {
        return bytes.to_string();
    }
    let unit = UNITS[steps as usize - 1];
    format!("{bytes} ({} {unit})", bytes >> (10 * steps))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn accepted_sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("12B", 12),
            ("1k", 1024),
            ("1KB", 1024),
            ("1KiB", 1024),
            ("4G", 4 << 30),
            ("4g", 4 << 30),
            ("4GB", 4 << 30),
            ("4gib", 4 << 30),
            ("500M", 500 << 20),
            ("1.5GiB", 3 << 29),
            ("0.5K", 512),
            ("1.0", 1),
            ("2.50M", 2_621_440),
            ("0.0009765625K", 1),
            ("4 GiB", 4 << 30),
            (" 7P ", 7 << 50),
            ("9223372036854775807", SIZE_MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn refused_sizes() {
        use SizeFault::{Malformed, Negative, NotWhole, TooLarge};
        for (text, fault) in [
            ("", Malformed),
            (" ", Malformed),
            ("G", Malformed),
            ("iB", Malformed),
            (".5G", Malformed),
            ("5.G", Malformed),
            (".", Malformed),
            ("1.2.3G", Malformed),
            ("1_000", Malformed),
            ("1e9", Malformed),
            ("0x10", Malformed),
            ("+4G", Malformed),
            ("4X", Malformed),
            ("4Gi", Malformed),
            ("4GiBB", Malformed),
            ("4G 4M", Malformed),
            ("4\tG", Malformed),
            ("٤G", Malformed),
            ("inf", Malformed),
            ("--4", Malformed),
            ("- 4", Malformed),
            ("-", Malformed),
            ("-G", Malformed),
            ("-4G", Negative),
            ("-0.3", Negative),
            ("0.3K", NotWhole),
            ("7.99E", NotWhole),
            ("1.5", NotWhole),
            ("1.5B", NotWhole),
            ("0.00048828125K", NotWhole),
            ("8E", TooLarge),
            ("9223372036854775808", TooLarge),
            ("18446744073709551616", TooLarge),
            ("99999999999999999999999999999999999999999999", TooLarge),
            ("340282366920938463463374607431768211455E", TooLarge),
        ] {
            assert_eq!(parse_size(text), Err(fault), "{text:?}");
        }
    }

    #[test]
    fn human_sizes() {
        assert_eq!(human(0), "0");
        assert_eq!(human(1000), "1000");
        assert_eq!(human(1536), "1536");
        assert_eq!(human(4 << 30), "4294967296 (4 GiB)");
        assert_eq!(human(3 << 29), "1610612736 (1536 MiB)");
        assert_eq!(human(1 << 63), "9223372036854775808 (8 EiB)");
    }

    proptest! {
        #[test]
        fn any_text_is_answered(text in ".*") {
            let _ = parse_size(&text);
        }

        #[test]
        fn size_like_text_is_answered(text in "-?[0-9]{0,45}\\.?[0-9]{0,60} ?[kKmMgGtTpPeE]?i?[bB]?") {
            let _ = parse_size(&text);
        }

        #[test]
        fn whole_sizes_are_exact(n in 0u64..1 << 33, unit in 0usize..4) {
            let text = format!("{n}{}", ["", "K", "mib", "GB"][unit]);
            prop_assert_eq!(parse_size(&text), Ok(n << (10 * unit)));
        }

        #[test]
        fn binary_fractions_are_exact(whole in 0u64..1000, sixteenths in 0u32..16) {
            let text = format!("{whole}.{:04}M", sixteenths * 625);
            prop_assert_eq!(
                parse_size(&text),
                Ok((whole << 20) + u64::from(sixteenths) * 65536)
            );
        }
    }
}
