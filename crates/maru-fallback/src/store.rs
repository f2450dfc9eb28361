//! How bytes are written: ordinary stores, or stores that bypass the caches.
//!
//! A large copy whose destination is not read soon pays three memory transfers a byte with ordinary stores
//! (read the source, read the destination's line to own it, write it back) and two with streaming ones.
#![allow(unsafe_code)]

use crate::nest::{Ahead, Nest};

/// Bytes of a cache line: what a streaming store should fill in one go.
#[cfg(target_arch = "x86_64")]
pub(crate) const LINE: usize = 64;

/// The kinds of store a processor may offer, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Store {
    /// Ordinary stores through the caches; on every processor.
    Plain,
    /// 16-byte streaming stores; on every x86-64.
    Sse2,
    /// 32-byte streaming stores.
    Avx2,
    /// 64-byte streaming stores: a line at once.
    Avx512,
}

impl Store {
    /// The kinds this processor has, weakest first.
    pub fn available() -> Vec<Store> {
        [Store::Plain, Store::Sse2, Store::Avx2, Store::Avx512]
            .into_iter()
            .filter(|s| s.is_available())
            .collect()
    }

    /// Whether this processor has it. Does not change while the program runs.
    pub fn is_available(self) -> bool {
        self.mover().is_some()
    }

    /// The strongest kind this processor has.
    pub fn best() -> Store {
        [Store::Avx512, Store::Avx2, Store::Sse2]
            .into_iter()
            .find(|s| s.is_available())
            .unwrap_or(Store::Plain)
    }

    /// The loop that moves a nest with stores of this kind.
    pub(crate) fn mover(self) -> Option<MoveNest> {
        match self {
            Store::Plain => Some(crate::nest::plain),
            #[cfg(target_arch = "x86_64")]
            Store::Sse2 => Some(x86::sse2),
            #[cfg(target_arch = "x86_64")]
            Store::Avx2 => is_x86_feature_detected!("avx2").then_some(x86::avx2 as MoveNest),
            #[cfg(target_arch = "x86_64")]
            Store::Avx512 => is_x86_feature_detected!("avx512f").then_some(x86::avx512 as MoveNest),
            #[cfg(not(target_arch = "x86_64"))]
            _ => None,
        }
    }
}

/// Moves the rows of a nest that starts at these addresses.
///
/// # Safety
/// Every row of the nest is readable at its source and writable at its destination, no destination byte is
/// also a source byte, nobody else accesses the destinations or writes the sources, and the processor has the
/// features the function was chosen for (see [`Store::mover`]). Any [`Ahead`] is sound.
pub(crate) type MoveNest = unsafe fn(&Nest, dst: *mut u8, src: *const u8, ahead: Ahead);

/// Makes the streaming stores of this thread visible before anything it does later. Free where there were none.
pub(crate) fn fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 has sfence, and it touches no memory.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
}

/// Copies whole lines, past the caches.
#[cfg(target_arch = "x86_64")]
pub(crate) trait Lines {
    /// Copies `N` lines.
    ///
    /// # Safety
    /// `N * LINE` bytes are readable at `src` and writable at `dst`, which is aligned to [`LINE`]; they do not
    /// overlap. The processor has the features of the implementor.
    unsafe fn stream<const N: usize>(dst: *mut u8, src: *const u8);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::*;

    #[cfg(miri)]
    use self::interpreted::{_mm_stream_si128, _mm256_stream_si256, _mm512_stream_si512};
    use super::{LINE, Lines};
    use crate::nest::{Ahead, Nest, streaming};

    macro_rules! kind {
        ($kind:ident, $mover:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
            struct $kind;

            impl Lines for $kind {
                #[inline(always)]
                unsafe fn stream<const N: usize>(dst: *mut u8, src: *const u8) {
                    const WIDTH: usize = size_of::<$vector>();
                    const PER_LINE: usize = LINE / WIDTH;
                    // All loads first, so that they are under way together.
                    let lines: [[$vector; PER_LINE]; N] = core::array::from_fn(|line| {
                        core::array::from_fn(|part| {
                            let from = src.wrapping_add(line * LINE + part * WIDTH);
                            // SAFETY: readable and the feature present by this method's contract; the load
                            // needs no alignment.
                            unsafe { $load(from.cast()) }
                        })
                    });
                    for (line, parts) in lines.into_iter().enumerate() {
                        for (part, value) in parts.into_iter().enumerate() {
                            let to = dst.wrapping_add(line * LINE + part * WIDTH);
                            // SAFETY: writable and the feature present by this method's contract; `dst` is
                            // aligned to a line, hence each part to its width.
                            unsafe { $store(to.cast(), value) };
                        }
                    }
                }
            }

            /// See [`super::MoveNest`].
            ///
            /// # Safety
            /// That of [`super::MoveNest`].
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $mover(nest: &Nest, dst: *mut u8, src: *const u8, ahead: Ahead) {
                // SAFETY: the caller's promise is the same; the feature is enabled here.
                unsafe { streaming::<$kind>(nest, dst, src, ahead) }
            }
        };
    }

    kind!(Sse2, sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);
    kind!(Avx2, avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256);
    kind!(Avx512, avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512);

    /// Miri has no streaming stores. Ordinary ones stand in for them there, of the same width and with the same
    /// need of alignment, so that it sees every address of the loops around them.
    #[cfg(miri)]
    mod interpreted {
        use core::arch::x86_64::{__m128i, __m256i, __m512i};

        macro_rules! store {
            ($name:ident, $vector:ty) => {
                /// # Safety
                /// As [`core::ptr::write`].
                pub(super) unsafe fn $name(to: *mut $vector, value: $vector) {
                    // SAFETY: that of this function.
                    unsafe { to.write(value) }
                }
            };
        }

        store!(_mm_stream_si128, __m128i);
        store!(_mm256_stream_si256, __m256i);
        store!(_mm512_stream_si512, __m512i);
    }
}
