//! What a copy command costs, in nanoseconds.
//!
//! Measured on 2026-11-30 on an H200 behind PCIe 5.0 x16, slabs in pinned memory, with the bench
//! `fallback_device --probe`; loads / stores. Only the ratios matter, and those come from the driver's work
//! per call and the copy engine's per command, which change little from device to device.
//!
//! * The link moves 55 bytes a nanosecond (flat copy 55.4 / 55.3 GB/s).
//! * **A call of its own** costs 2.4 / 2.0 µs beside the bytes, whatever it moves: one run (4 KiB 1.6 / 1.8
//!   GB/s, 32 KiB 10.5 / 11.6, 256 KiB 36.1 / 39.6, 1 MiB 48.8 / 50.4), rows (128 of 256 bytes 10.8 / 12.6,
//!   2048 of them 43.4 / 47.6, 16 of 32 KiB 43.9 / 47.7, 64 of 32 KiB 51.9 / 52.8), slices of rows (64 of 128
//!   rows of 256 bytes 51.8 / 52.4, 64 of 16 rows 33.3 / 37.1). About 1.8 µs of it are processor time.
//! * Rows and slices cost nothing as long as one of the two sides goes on near the last one; where both jump,
//!   20 to 55 ns each (layers 10 MiB apart in the cache and 64 KiB in the slab: 64 rows of 4 KiB 27.8 / 25.3
//!   GB/s, where a contiguous slab has 35.0 / 39.1; 64 rows of 256 bytes 4.1 / 3.8).
//! * **An entry of a batched call** costs no more than its bytes as long as those take longer than the
//!   driver's work for it, 0.45 to 0.75 µs (4 KiB entries 7.6 / 5.5 GB/s, 16 KiB 32.7 / 30.5, 32 KiB 53.1 /
//!   53.3, 72 KiB 54.0 / 53.9). On another host with the same device that work took 0.95 µs (32 KiB: 30 GB/s).
//! * **Inside device memory** a call takes 3.8 µs, whatever it moves up to 512 KiB.
//!
//! Half of the processor time is counted on top: it keeps the caller, and on a slower processor it is what
//! the copy engine waits for. Where two ways are equally fast, the one of fewer commands wins.

use super::Command;

/// Bytes the link moves in a nanosecond.
const LINK: u64 = 55;
/// Bytes a device moves in itself in a nanosecond. Not measured, only that it is far more than the link.
const INSIDE: u64 = 1_000;
/// Of a call, beside its bytes.
const CALL: u64 = 2_300;
/// Of that, or meanwhile, the processor's.
const CALL_WORK: u64 = 1_800;
/// Of a call inside device memory, at least.
const CALL_INSIDE: u64 = 3_800;
/// Of an entry of a batch, at least.
const ENTRY: u64 = 580;
/// Of an entry, beside its bytes.
const ENTRY_GAP: u64 = 20;
/// Of an entry, the processor's.
const ENTRY_WORK: u64 = 500;
/// Of a row or a slice that is far from the one before on both sides.
const FAR_STEP: u64 = 40;
/// From here on it is far.
const FAR: u64 = 64 << 10;

/// What the driver can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Longest pitch of a copy of rows.
    pub(crate) max_pitch: u64,
    /// Whether one-dimensional copies can be batched.
    pub(crate) batch: bool,
    /// Whether there are copies of several slices.
    pub(crate) slices: bool,
    /// Whether layers may be moved together. They may lie in several allocations.
    pub(crate) layers_together: bool,
    /// Whether the slab, too, is in device memory.
    pub(crate) inside: bool,
}

impl Limits {
    /// Expected nanoseconds of a command.
    pub(super) fn cost(self, c: &Command) -> u64 {
        let bytes = c.width.saturating_mul(c.rows).saturating_mul(c.slices);
        let wire = bytes / if self.inside { INSIDE } else { LINK };
        if c.rows == 1 && c.slices == 1 && self.batches(c.width) {
            return ENTRY.max(wire + ENTRY_GAP) + ENTRY_WORK / 2;
        }
        let took = match self.inside {
            true => CALL_INSIDE.max(wire),
            false => wire.saturating_add(CALL).saturating_add(far_steps(c).saturating_mul(FAR_STEP)),
        };
        took.saturating_add(CALL_WORK / 2)
    }

    /// Whether a one-dimensional copy of `width` bytes belongs into a batch: it does until a call of its own
    /// costs next to nothing beside its bytes. A batch starts when its last entry is known, a call at once.
    pub(crate) fn batches(self, width: u64) -> bool {
        self.batch && width / LINK < 16 * CALL
    }
}

fn far_steps(c: &Command) -> u64 {
    let far = |n: u64, paged: u64, slab: u64| n > 1 && paged.min(slab) >= FAR;
    let (paged, slab) = c.slice_steps();
    match () {
        () if far(c.rows, c.paged_pitch, c.slab_pitch) => c.rows.saturating_mul(c.slices),
        () if far(c.slices, paged, slab) => c.slices,
        () => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRIVER: Limits = Limits {
        max_pitch: i32::MAX as u64,
        batch: true,
        slices: true,
        layers_together: true,
        inside: false,
    };

    fn runs(width: u64) -> Command {
        Command { width, ..Command::NOTHING }
    }

    fn rows(width: u64, rows: u64, paged_pitch: u64, slab_pitch: u64) -> Command {
        Command { rows, paged_pitch, slab_pitch, ..runs(width) }
    }

    fn slices(c: Command, slices: u64, paged: u64, slab: u64) -> Command {
        let (paged_height, slab_height) = (paged / c.paged_pitch, slab / c.slab_pitch);
        Command { slices, paged_height, slab_height, ..c }
    }

    /// The model against the rates it was made from (the mean time of both directions), within a fifth,
    /// processor time aside.
    #[test]
    fn the_model_reproduces_what_was_measured() {
        let near = |limits: Limits, c: Command, work: u64, (load, store): (f64, f64)| {
            let bytes = (c.width * c.rows * c.slices) as f64;
            let measured = (bytes / load + bytes / store) / 2.0;
            let found = (limits.cost(&c) - work / 2) as f64;
            assert!((found / measured - 1.0).abs() < 0.2, "{c:?}: {found} ns, measured {measured}");
        };
        let plain = Limits { batch: false, ..DRIVER };
        for (kib, measured) in
            [(4, (1.6, 1.8)), (32, (10.5, 11.6)), (256, (36.1, 39.6)), (1024, (48.8, 50.4))]
        {
            near(plain, runs(kib << 10), CALL_WORK, measured);
        }
        for (kib, measured) in [(4, (7.6, 5.5)), (16, (32.7, 30.5)), (32, (53.1, 53.3)), (72, (54.0, 53.9))] {
            near(DRIVER, runs(kib << 10), ENTRY_WORK, measured);
        }
        let layer = 8 << 20;
        for (command, measured) in [
            (rows(256, 128, 512, 256), (10.8, 12.6)),
            (rows(256, 2048, 512, 256), (43.4, 47.6)),
            (rows(256, 16, 4096, 256), (1.6, 2.0)),
            (rows(2048, 16, 4096, 2048), (10.7, 12.8)),
            (rows(4096, 64, layer, 4096), (35.0, 39.1)),
            (rows(32 << 10, 16, 64 << 10, 32 << 10), (43.9, 47.7)),
            (rows(32 << 10, 64, layer, 32 << 10), (51.9, 52.8)),
            (rows(32 << 10, 64, layer, 512 << 10), (51.5, 50.5)),
            (rows(16 << 10, 32, layer, 256 << 10), (40.6, 38.7)),
            (rows(4096, 64, layer, 64 << 10), (27.8, 25.3)),
            (slices(rows(256, 128, 512, 256), 64, layer, 32 << 10), (51.8, 52.4)),
            (slices(rows(256, 16, 256, 256), 64, layer, 4096), (33.3, 37.1)),
        ] {
            near(DRIVER, command, CALL_WORK, measured);
        }
        let inside = Limits { batch: false, inside: true, ..DRIVER };
        for (command, measured) in [
            (runs(64 << 10), (16.9, 17.3)),
            (rows(256, 128, 512, 256), (8.9, 8.7)),
            (rows(256, 2048, 512, 256), (135.9, 137.5)),
        ] {
            near(inside, command, CALL_WORK, measured);
        }
    }

    /// What it is for: the order of the ways there are.
    #[test]
    fn the_faster_way_costs_less() {
        let cheaper = |a: (Command, u64), b: (Command, u64)| {
            let cost = |(c, times): (Command, u64)| DRIVER.cost(&c) * times;
            assert!(cost(a) < cost(b), "{a:?} {b:?}");
        };
        let layer = 1 << 30;
        // Layers as rows, rather than 64 entries or 64 calls.
        cheaper((rows(32 << 10, 64, layer, 512 << 10), 1), (runs(32 << 10), 64));
        cheaper((rows(4096, 64, layer, 64 << 10), 1), (runs(4096), 64));
        // Two layers are too few for that.
        cheaper((runs(32 << 10), 2), (rows(32 << 10, 2, layer, 512 << 10), 1));
        // Layers as slices, rather than a copy of rows for each.
        cheaper((slices(rows(256, 128, 512, 256), 64, layer, 512 << 10), 1), (rows(256, 128, 512, 256), 64));
        // Half a MiB goes into a batch, 4 MiB go at once.
        assert!(DRIVER.batches(512 << 10) && !DRIVER.batches(4 << 20));
    }
}
