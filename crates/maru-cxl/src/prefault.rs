//! Making every page of a mapping present.
//!
//! `MADV_POPULATE_WRITE` (or `_READ` for a read-only mapping) faults pages in without changing a byte of them,
//! and turns what would be a SIGBUS – a truncated file, a device that went away, a page the kernel knows to be
//! poisoned – into an error number. On kernels before 5.14 the pages are touched by volatile **reads**: a
//! write-touch would dirty cache lines that another host owns. There a bad page is still a SIGBUS.

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::Advice;

use crate::error::CxlError;
use crate::mapping::{MapOptions, Mapping};
use crate::num::{round_up, to_usize};

/// What one thread takes at a time: large enough to keep threads busy, small enough for progress.
const CHUNK: u64 = 64 << 20;

pub(crate) fn populate(mapping: &Mapping, options: &MapOptions) -> Result<(), CxlError> {
    let advice = if mapping.is_read_only() { Advice::LinuxPopulateRead } else { Advice::LinuxPopulateWrite };
    let (base, total) = (Base(mapping.base()), mapping.len());
    let chunk = round_up(CHUNK, mapping.device().align()).unwrap_or(total);
    let threads = thread_count(options.prefault_threads, total.div_ceil(chunk));
    let next = AtomicU64::new(0);
    let done = AtomicU64::new(0);
    let failure: Mutex<Option<CxlError>> = Mutex::new(None);
    let worker = || {
        loop {
            let offset = next.fetch_add(chunk, Ordering::Relaxed);
            if offset >= total {
                return;
            }
            let len = chunk.min(total - offset);
            // SAFETY: `offset + len <= total`, the length of the mapping, which outlives this scope.
            let result = unsafe { populate_range(base.start(), offset, len, advice) };
            if let Err(error) = result {
                // Others stop at their next chunk; the first error is the one reported.
                next.store(total, Ordering::Relaxed);
                let mut slot = failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                slot.get_or_insert(error);
                return;
            }
            let so_far = done.fetch_add(len, Ordering::Relaxed) + len;
            if let Some(progress) = &options.progress {
                progress(so_far, total);
            }
        }
    };
    if threads <= 1 {
        worker();
    } else {
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(worker);
            }
        });
    }
    match failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// The start of a mapping, for threads that only fault its pages in.
#[derive(Clone, Copy)]
struct Base(NonNull<u8>);

impl Base {
    fn start(&self) -> NonNull<u8> {
        self.0
    }
}

// SAFETY: the pointer is only passed to madvise and read volatilely; the mapping outlives the threads' scope.
unsafe impl Send for Base {}
// SAFETY: as for Send.
unsafe impl Sync for Base {}

fn thread_count(asked: usize, chunks: u64) -> usize {
    let most = usize::try_from(chunks).unwrap_or(usize::MAX).max(1);
    // Faulting is bound by the kernel zeroing or mapping pages; beyond some eight threads nothing is gained.
    let automatic = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8);
    let wanted = if asked == 0 { automatic() } else { asked.min(256) };
    wanted.min(most)
}

/// Makes `[offset, offset + len)` present. Also the probe behind [`Slab::probe`](crate::Slab::probe).
///
/// # Safety
/// The range from `base` must lie in one live mapping.
pub(crate) unsafe fn populate_range(
    base: NonNull<u8>,
    offset: u64,
    len: u64,
    advice: Advice,
) -> Result<(), CxlError> {
    // SAFETY: inside the mapping, as the caller vouches.
    let start = unsafe { base.add(to_usize(offset)) };
    // madvise wants a page-aligned start; the bytes before belong to the same page and so to the same mapping.
    let slack = start.addr().get() % 4096;
    // SAFETY: the start of the page that holds `start`, which is mapped as a whole.
    let page = unsafe { start.sub(slack) };
    let bytes = to_usize(len).saturating_add(slack);
    loop {
        // SAFETY: populating changes no byte; the range is mapped as the caller vouches.
        match unsafe { rustix::mm::madvise(page.as_ptr().cast(), bytes, advice) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Kernels before 5.14 do not know the advice.
            Err(Errno::INVAL) => {
                // SAFETY: the range is mapped and readable as the caller vouches.
                unsafe { touch(start, to_usize(len)) };
                return Ok(());
            }
            Err(errno) => return Err(fault(offset, len, errno)),
        }
    }
}

/// Reads one byte of every page.
///
/// # Safety
/// The range must be mapped and readable.
unsafe fn touch(start: NonNull<u8>, len: usize) {
    for at in (0..len).step_by(4096).chain(len.checked_sub(1)) {
        // SAFETY: `at < len`.
        let place = unsafe { start.add(at) };
        // SAFETY: mapped and readable as the caller vouches.
        let _ = unsafe { place.read_volatile() };
    }
}

fn fault(offset: u64, len: u64, errno: Errno) -> CxlError {
    let hint = match errno {
        Errno::FAULT => "the file was truncated, or the device ends before this or has gone away",
        Errno::HWPOISON => "the memory has an uncorrectable error (poison) there",
        Errno::NOMEM => "not enough memory, or the range is not mapped any more",
        _ => "see madvise(2), MADV_POPULATE_READ",
    };
    CxlError::MemoryFault { offset, len, source: errno.into(), hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_count_is_bounded_by_work_and_request() {
        assert_eq!(thread_count(4, 1), 1);
        assert_eq!(thread_count(4, 100), 4);
        assert_eq!(thread_count(3, 0), 1);
        assert!((1..=8).contains(&thread_count(0, 100)));
    }

    #[test]
    fn the_touch_fallback_only_reads() {
        let bytes = vec![0x5a_u8; 3 * 4096 + 17];
        let start = NonNull::from(bytes.as_slice()).cast::<u8>();
        // SAFETY: the vector's own bytes.
        unsafe { touch(start, bytes.len()) };
        assert!(bytes.iter().all(|&byte| byte == 0x5a));
    }

    #[test]
    fn poison_and_truncation_have_their_own_hints() {
        assert!(fault(0, 1, Errno::HWPOISON).to_string().contains("poison"));
        assert!(fault(0, 1, Errno::FAULT).to_string().contains("truncated"));
        assert_eq!(fault(0, 1, Errno::FAULT).kind(), "memory_fault");
    }
}
