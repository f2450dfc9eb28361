//! Three loops around rows: what is left of a piece of a job once everything contiguous is folded.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use crate::store::{LINE, Lines};

/// Bytes of a row from which streaming pays although its ends share lines with other rows. Ordinary and
/// streaming stores to one line in turn cost more than either.
#[cfg(target_arch = "x86_64")]
const WORTH: usize = 1024;

/// A loop: how often, and how far each side advances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dim {
    pub(crate) n: usize,
    pub(crate) dst: isize,
    pub(crate) src: isize,
}

impl Dim {
    /// The loop that runs once.
    pub(crate) const ONCE: Dim = Dim { n: 1, dst: 0, src: 0 };
}

/// Where to prefetch while reading: a distance that depends on how far reading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct Ahead {
    /// Reads below this address prefetch `before` bytes further on, others `after`.
    pub(crate) border: usize,
    pub(crate) before: isize,
    pub(crate) after: isize,
}

/// `dims[0] x dims[1] x dims[2]` rows of `row` bytes, the last innermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nest {
    pub(crate) row: usize,
    pub(crate) dims: [Dim; 3],
}

impl Nest {
    /// The fewest loops that visit the same bytes, keeping the order of the loops given (outermost first).
    pub(crate) fn folded(mut row: usize, dims: [Dim; 3]) -> Nest {
        let mut out = [Dim::ONCE; 3];
        // Filled from the back; `at` is the outermost loop so far, 3 while there is none.
        let mut at = 3;
        for dim in dims.into_iter().rev().filter(|d| d.n != 1) {
            let bytes = row.cast_signed();
            if at == 3 && dim.dst == bytes && dim.src == bytes {
                row *= dim.n;
                continue;
            }
            if let Some(inner) = out.get_mut(at) {
                let n = inner.n.cast_signed();
                if inner.dst.checked_mul(n) == Some(dim.dst) && inner.src.checked_mul(n) == Some(dim.src) {
                    inner.n *= dim.n;
                    continue;
                }
            }
            at -= 1;
            out[at] = dim;
        }
        Nest { row, dims: out }
    }

    /// Whether every row of a nest that starts at `dst` is made of whole lines there.
    #[cfg(target_arch = "x86_64")]
    fn whole_lines(&self, dst: usize) -> bool {
        let strides = self.dims.iter().fold(0, |bits, d| bits | d.dst.cast_unsigned());
        (self.row | dst | strides).is_multiple_of(LINE)
    }

    /// Calls `row(dst, src)` for each row. Computes addresses only.
    #[inline(always)]
    fn each(&self, dst: *mut u8, src: *const u8, mut row: impl FnMut(*mut u8, *const u8)) {
        let [a, b, c] = self.dims;
        let (mut dst_a, mut src_a) = (dst, src);
        for _ in 0..a.n {
            let (mut dst_b, mut src_b) = (dst_a, src_a);
            for _ in 0..b.n {
                let (mut dst_c, mut src_c) = (dst_b, src_b);
                for _ in 0..c.n {
                    row(dst_c, src_c);
                    dst_c = dst_c.wrapping_offset(c.dst);
                    src_c = src_c.wrapping_offset(c.src);
                }
                dst_b = dst_b.wrapping_offset(b.dst);
                src_b = src_b.wrapping_offset(b.src);
            }
            dst_a = dst_a.wrapping_offset(a.dst);
            src_a = src_a.wrapping_offset(a.src);
        }
    }
}

/// Moves a nest with ordinary stores.
///
/// # Safety
/// That of [`crate::store::MoveNest`].
pub(crate) unsafe fn plain(nest: &Nest, dst: *mut u8, src: *const u8, _ahead: Ahead) {
    nest.each(dst, src, |dst, src| {
        // SAFETY: the caller vouches for each row of the nest, and that the sides do not overlap.
        unsafe { core::ptr::copy_nonoverlapping(src, dst, nest.row) }
    });
}

/// Moves a nest with streaming stores wherever a whole line of the destination is written.
///
/// # Safety
/// That of [`crate::store::MoveNest`], and the features of `L` are enabled in the caller.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn streaming<L: Lines>(nest: &Nest, dst: *mut u8, src: *const u8, ahead: Ahead) {
    if nest.whole_lines(dst.addr()) {
        nest.each(dst, src, |dst, src| {
            // SAFETY: the caller vouches for each row; it was just shown to consist of aligned lines.
            unsafe { lines::<L>(dst, src, nest.row, ahead) }
        });
        return;
    }
    if nest.row < WORTH {
        nest.each(dst, src, |dst, src| {
            for line in (0..nest.row).step_by(LINE) {
                prefetch(src.wrapping_add(line).wrapping_offset(ahead.at(src)));
            }
            // SAFETY: the caller vouches for each row of the nest, and that the sides do not overlap.
            unsafe { core::ptr::copy_nonoverlapping(src, dst, nest.row) }
        });
        return;
    }
    nest.each(dst, src, |dst, src| {
        let head = dst.align_offset(LINE).min(nest.row);
        let body = (nest.row - head) & !(LINE - 1);
        let tail = nest.row - head - body;
        // SAFETY: the first `head` of the row's bytes, for which the caller vouches.
        unsafe { core::ptr::copy_nonoverlapping(src, dst, head) };
        let (to, from) = (dst.wrapping_add(head), src.wrapping_add(head));
        // SAFETY: `body` bytes of the same row; `to` is on a line border or `body` is 0.
        unsafe { lines::<L>(to, from, body, ahead) };
        let (to, from) = (to.wrapping_add(body), from.wrapping_add(body));
        // SAFETY: the last `tail` of the row's bytes.
        unsafe { core::ptr::copy_nonoverlapping(from, to, tail) };
    });
}

/// Copies `bytes`, a whole number of lines.
///
/// # Safety
/// As [`Lines::stream`] for that many lines.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn lines<L: Lines>(mut dst: *mut u8, mut src: *const u8, bytes: usize, ahead: Ahead) {
    const STEP: usize = 4;
    for _ in 0..bytes / (STEP * LINE) {
        let early = src.wrapping_offset(ahead.at(src));
        for line in 0..STEP {
            prefetch(early.wrapping_add(line * LINE));
        }
        // SAFETY: this step lies inside `bytes`, and `dst` stays on line borders.
        unsafe { L::stream::<STEP>(dst, src) };
        (dst, src) = (dst.wrapping_add(STEP * LINE), src.wrapping_add(STEP * LINE));
    }
    for _ in 0..bytes / LINE % STEP {
        prefetch(src.wrapping_offset(ahead.at(src)));
        // SAFETY: one of the lines that are left over.
        unsafe { L::stream::<1>(dst, src) };
        (dst, src) = (dst.wrapping_add(LINE), src.wrapping_add(LINE));
    }
}

#[cfg(target_arch = "x86_64")]
impl Ahead {
    #[inline(always)]
    fn at(&self, src: *const u8) -> isize {
        if src.addr() < self.border { self.before } else { self.after }
    }
}

/// Asks for the line at an address, which need not be mapped, in the second-level cache: what is read ahead
/// would push what is about to be used out of the first.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(not(miri))]
    use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    #[cfg(not(miri))]
    // SAFETY: a prefetch never faults and changes nothing but cache state; every x86-64 has it.
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(miri)]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::{Dim, Nest};

    fn dim(n: usize, dst: isize, src: isize) -> Dim {
        Dim { n, dst, src }
    }

    /// All rows of a nest as (destination, source, bytes), byte by byte.
    fn bytes(nest: &Nest) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        nest.each(
            std::ptr::without_provenance_mut(1 << 20),
            std::ptr::without_provenance(1 << 30),
            |d, s| {
                all.extend((0..nest.row).map(|i| (d.addr() + i, s.addr() + i)));
            },
        );
        all.sort_unstable();
        all
    }

    fn check(row: usize, dims: [Dim; 3], wanted: Nest) {
        let folded = Nest::folded(row, dims);
        assert_eq!(folded, wanted);
        assert_eq!(bytes(&folded), bytes(&Nest { row, dims }));
    }

    #[test]
    fn what_is_contiguous_on_both_sides_becomes_one_row() {
        let dims = [dim(2, 4096, 8192), dim(16, 256, 256), dim(4, 64, 64)];
        check(64, dims, Nest { row: 4096, dims: [Dim::ONCE, Dim::ONCE, dim(2, 4096, 8192)] });
    }

    #[test]
    fn evenly_spaced_tokens_and_heads_become_one_loop() {
        // Fused, heads inside tokens: 512 bytes a head here, 256 there.
        let dims = [dim(16, 1024, 2048), dim(4, 256, 512), dim(2, 90_000, 256)];
        check(256, dims, Nest { row: 256, dims: [Dim::ONCE, dim(64, 256, 512), dim(2, 90_000, 256)] });
    }

    #[test]
    fn loops_that_run_once_vanish_and_the_others_stay() {
        let dims = [dim(3, 1000, 77), dim(1, 5, 5), dim(2, 100, -300)];
        check(8, dims, Nest { row: 8, dims: [Dim::ONCE, dim(3, 1000, 77), dim(2, 100, -300)] });
    }

    #[test]
    fn heads_outside_tokens_stay_two_loops() {
        let dims = [dim(4, 256, 4096), dim(16, 1024, 256), Dim::ONCE];
        check(256, dims, Nest { row: 256, dims: [Dim::ONCE, dim(4, 256, 4096), dim(16, 1024, 256)] });
    }
}
