//! The only loads and stores this crate makes to shared memory.
//!
//! Another process, another host or a device may write the same bytes at any moment, so nothing here makes a
//! reference to them and nothing lets the compiler assume that they stay the same between two reads: bulk copies
//! are one opaque instruction, words are atomics.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Copies `len` bytes. Either side may be shared memory; the bytes read there may be torn.
///
/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes, and the two ranges must not overlap.
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller vouches for both ranges. The direction flag is clear by the ABI, and rep movsb changes
    // only the three registers named. Being assembly, the access is no Rust access that could race.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rdi") dst => _,
            inout("rsi") src => _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: as the caller vouches.
    unsafe {
        copy_volatile(src, dst, len);
    }
}

/// [`copy`] by volatile accesses: words where both sides are aligned alike, else bytes.
///
/// # Safety
/// As [`copy`].
#[cfg(any(test, not(all(target_arch = "x86_64", not(miri)))))]
#[allow(clippy::cast_ptr_alignment, reason = "alignment is established by the head loop")]
unsafe fn copy_volatile(src: *const u8, dst: *mut u8, len: usize) {
    let mut done = 0;
    let alike = (src.addr() ^ dst.addr()).is_multiple_of(8);
    let head = if alike { src.align_offset(8).min(len) } else { len };
    let byte = |at: usize| {
        // SAFETY: at < len, inside the source range.
        let value = unsafe { src.wrapping_add(at).read_volatile() };
        // SAFETY: at < len, inside the destination range.
        unsafe { dst.wrapping_add(at).write_volatile(value) }
    };
    while done < head {
        byte(done);
        done += 1;
    }
    while len - done >= 8 {
        // SAFETY: eight bytes from `done` are inside the source, which is aligned there.
        let value = unsafe { src.wrapping_add(done).cast::<u64>().read_volatile() };
        // SAFETY: eight bytes from `done` are inside the destination, which is aligned as the source is.
        unsafe { dst.wrapping_add(done).cast::<u64>().write_volatile(value) };
        done += 8;
    }
    while done < len {
        byte(done);
        done += 1;
    }
}

/// Sets `len` bytes to zero.
///
/// # Safety
/// `dst` must be writable for `len` bytes.
pub(crate) unsafe fn zero(dst: *mut u8, len: usize) {
    let zeros = [0_u8; 4096];
    let mut done = 0;
    while done < len {
        let step = zeros.len().min(len - done);
        // SAFETY: `done + step <= len`, so the place stays inside the caller's range.
        let to = unsafe { dst.add(done) };
        // SAFETY: `zeros` has `step` bytes and is private to this frame.
        unsafe { copy(zeros.as_ptr(), to, step) };
        done += step;
    }
}

/// Loads a little-endian word with acquire order.
///
/// # Safety
/// `at` must be mapped, readable and 8-byte aligned.
pub(crate) unsafe fn load_u64(at: NonNull<u8>) -> u64 {
    // SAFETY: valid and aligned as the caller vouches; every access to these words in this crate is atomic.
    let word = unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) };
    u64::from_le(word.load(Ordering::Acquire))
}

/// Stores a little-endian word with release order.
///
/// # Safety
/// `at` must be mapped, writable and 8-byte aligned.
pub(crate) unsafe fn store_u64(at: NonNull<u8>, value: u64) {
    // SAFETY: valid and aligned as the caller vouches; every access to these words in this crate is atomic.
    let word = unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) };
    word.store(value.to_le(), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_copies_are_exact_for_every_small_length_and_alignment() {
        let src: Vec<u8> = (0..64_u8).collect();
        for len in 0..40 {
            for (from, to) in [(0, 0), (1, 1), (3, 3), (1, 2), (0, 5)] {
                for volatile in [false, true] {
                    let mut dst = [0xee_u8; 64];
                    let (s, d) = (src[from..].as_ptr(), dst[to..].as_mut_ptr());
                    if volatile {
                        // SAFETY: both vectors have 64 bytes, more than 5 + 40.
                        unsafe { copy_volatile(s, d, len) };
                    } else {
                        // SAFETY: both vectors have 64 bytes, more than 5 + 40.
                        unsafe { copy(s, d, len) };
                    }
                    assert_eq!(dst[to..to + len], src[from..from + len]);
                    assert!(dst[..to].iter().chain(&dst[to + len..]).all(|&byte| byte == 0xee));
                }
            }
        }
    }

    #[test]
    fn zero_covers_more_than_one_block() {
        let mut bytes = vec![7_u8; 10_000];
        // SAFETY: 9 999 of the vector's 10 000 bytes.
        unsafe { zero(bytes.as_mut_ptr(), 9_999) };
        assert!(bytes[..9_999].iter().all(|&byte| byte == 0));
        assert_eq!(bytes[9_999], 7);
    }
}
