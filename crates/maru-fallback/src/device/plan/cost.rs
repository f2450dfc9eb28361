//! What a copy command costs, in nanoseconds.
//!
//! The figures are those measured on an H200 behind PCIe 5.0 x16 (driver 580). Only their ratios matter, and
//! those come from the driver's work per call and the copy engine's per row, which change little from device
//! to device:
//!
//! * the link moves 55 bytes a nanosecond;
//! * an entry of a batched call: 0.95 µs of processor time (4 KiB entries reach 4.2 GB/s, 16 KiB 17, 32 KiB
//!   30), or half a microsecond between entries where the link is the limit (64 KiB 40, 256 KiB 46);
//! * a call of its own for a one-dimensional copy: 3.3 µs of processor time (32 KiB: 10 GB/s), overlapped with
//!   the copy, plus a microsecond between copies;
//! * a two-dimensional copy: 2.5 µs of processor time, 3 µs between copies; next to nothing per row as long as
//!   rows are near each other (256-byte rows 47.5 GB/s), 70 ns where each lies in another large page (64
//!   layers as rows: 32 KiB rows 45 GB/s, 8 KiB 30, 4 KiB 22).

/// Bytes the link moves in a nanosecond.
const LINK: u64 = 55;
const BATCHED: u64 = 950;
const BATCHED_GAP: u64 = 500;
const PLAIN: u64 = 3_300;
const PLAIN_GAP: u64 = 1_000;
const TWO_D: u64 = 2_500;
const TWO_D_GAP: u64 = 3_000;
const FAR_ROW: u64 = 70;
const NEAR_ROW: u64 = 1;
/// Rows at least this far apart lie in pages of their own.
const FAR: u64 = 2 << 20;

/// What the driver can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Longest pitch of a two-dimensional copy.
    pub(crate) max_pitch: u64,
    /// Whether one-dimensional copies can be batched.
    pub(crate) batch: bool,
    /// Whether layers may be moved together. They may lie in several allocations.
    pub(crate) layers_together: bool,
}

impl Limits {
    /// A command of `rows` rows of `width` bytes, `pitch` apart.
    pub(super) fn command(self, width: u64, rows: u64, pitch: u64) -> u64 {
        let wire = width.saturating_mul(rows) / LINK;
        if rows > 1 {
            let row = if pitch >= FAR { FAR_ROW } else { NEAR_ROW };
            return TWO_D.max(wire.saturating_add(TWO_D_GAP).saturating_add(rows.saturating_mul(row)));
        }
        match self.batches(width) {
            true => BATCHED.max(wire + BATCHED_GAP),
            false => PLAIN.max(wire + PLAIN_GAP),
        }
    }

    /// Whether a one-dimensional copy of `width` bytes belongs into a batch: it does while a call of its own
    /// takes longer than the copy. A batch starts when its last entry is known, a call at once.
    pub(crate) fn batches(self, width: u64) -> bool {
        self.batch && width / LINK < PLAIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRIVER: Limits = Limits { max_pitch: i32::MAX as u64, batch: true, layers_together: true };

    fn rate(bytes: u64, nanoseconds: u64) -> f64 {
        bytes as f64 / nanoseconds as f64
    }

    /// The model against the measured rates it was made from, within a fifth.
    #[test]
    fn the_model_reproduces_what_was_measured() {
        let near =
            |found: f64, measured: f64| assert!((found / measured - 1.0).abs() < 0.2, "{found} {measured}");
        for (kib, measured) in [(4, 4.2), (16, 17.0), (32, 30.0), (64, 40.0)] {
            near(rate(kib << 10, DRIVER.command(kib << 10, 1, 0)), measured);
        }
        let plain = Limits { batch: false, ..DRIVER };
        near(rate(32 << 10, plain.command(32 << 10, 1, 0)), 10.0);
        for (width, rows, pitch, measured) in [
            (256, 4096, 512, 47.5),
            (2048, 4096, 4096, 54.5),
            (32 << 10, 64, 1 << 30, 45.0),
            (8 << 10, 64, 1 << 30, 30.0),
            (4 << 10, 64, 1 << 30, 22.0),
        ] {
            near(rate(width * rows, DRIVER.command(width, rows, pitch)), measured);
        }
    }
}
