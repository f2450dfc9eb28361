//! Writing CPU cache lines back and dropping them, for memory that several hosts share.
//!
//! # What is guaranteed
//!
//! **One host.** CPU caches and device DMA are kept coherent by the hardware; nothing here is needed. A pool
//! works under [`Coherence::None`] and pays nothing.
//!
//! **Several hosts, no hardware coherence** (CXL 2.0 pooling, or CXL 3 regions without Back-Invalidate). A store
//! stays in the writer's cache until it is written back, and a reader may hold a line it fetched earlier, by a
//! prefetch perhaps. [`Coherence::Flush`] makes the pool do the following, and the functions here let others do
//! the same:
//!
//! * writer: store the data; [`flush`] it (`clwb`, else `clflushopt`, else `clflush`, each line, then `sfence`);
//!   store the entry; flush the entry; fence;
//! * reader: [`invalidate`] the entry's lines (`clflushopt`, else `clflush`, then `mfence`), load the entry;
//!   invalidate the data lines; load the data; invalidate and load the entry's sequence again.
//!
//! x86 has no instruction for user space that drops a *dirty* line: `clflush` writes it back. So a reader must
//! never have stored to a line it reads, and no line may have writers on two hosts. The layout of the pool
//! (64-byte aligned entries, page-aligned slabs, one writer) keeps to that. Atomics, `flock` and OFD locks do
//! not work across such hosts.
//!
//! A flush returns before the device has the data for good: there is no completion that software could wait
//! for. Sequence numbers and check words in the directory, and optional checksums of slabs, are the safeguard.
//!
//! **GPU DMA.** A GPU's write goes through the root complex of its host, and with allocating writes (Intel DDIO
//! and its likes) it ends in that host's last-level cache, where another host does not see it. [`flush`] of the
//! slab after the copy pushes it out, since `clwb` and `clflush` act on the whole coherence domain; this is why
//! publishing under [`Coherence::Flush`] flushes the slab even when no CPU has touched it. Turning allocating
//! writes off for the GPU's root port avoids the detour and makes the flush cheaper: on Intel that is
//! `Use_Allocating_Flow_Wr` = 0 in the port's `PERFCTRLSTS` register, set by a firmware option ("DDIO" or
//! "allocating write flows") or with `setpci`; elsewhere ask the platform's vendor. A GPU's read of host memory
//! snoops the caches, hence stale lines must be invalidated before a load to the GPU just as before a read by
//! the CPU.
//!
//! **AArch64.** `dc cvac` writes back and `dc civac` writes back and drops, to the point of coherency, each
//! followed by `dsb sy`. The kernel must let user space use them (Linux does).
//!
//! **Elsewhere** the functions do nothing and say so: [`Effect::NoOp`].

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), path = "other.rs")]
mod arch;

use std::ptr::NonNull;

/// What a pool does about CPU caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Coherence {
    /// Nothing: one host, or hardware that keeps several coherent.
    #[default]
    None,
    /// Write back what is published, drop lines before reading.
    Flush,
}

/// The instruction that is used on each line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Instruction {
    /// x86 `clwb`: writes back, may keep the line.
    Clwb,
    /// x86 `clflushopt`: writes back and drops, unordered.
    Clflushopt,
    /// x86 `clflush`: writes back and drops.
    Clflush,
    /// AArch64 `dc cvac`: writes back to the point of coherency.
    DcCvac,
    /// AArch64 `dc civac`: writes back to the point of coherency and drops.
    DcCivac,
    /// Nothing on this architecture.
    Nothing,
}

/// Whether something was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The instruction ran on every line of the range.
    Done(Instruction),
    /// This architecture has none; the range is as it was.
    NoOp,
}

impl Effect {
    fn of(instruction: Instruction) -> Self {
        if instruction == Instruction::Nothing { Self::NoOp } else { Self::Done(instruction) }
    }
}

/// The instruction [`flush`] uses on this machine.
pub fn flush_instruction() -> Instruction {
    arch::features().write_back
}

/// The instruction [`invalidate`] uses on this machine.
pub fn invalidate_instruction() -> Instruction {
    arch::features().invalidate
}

/// Size of a cache line in bytes, the step between two instructions.
pub fn line_bytes() -> usize {
    arch::features().line
}

/// Writes every cache line that holds a byte of the range back to memory, and orders it before later stores.
///
/// # Safety
/// Every byte of the range must be mapped.
pub unsafe fn flush(addr: NonNull<u8>, len: usize) -> Effect {
    let features = arch::features();
    // SAFETY: the lines of a mapped range are mapped.
    unsafe { each_line(addr, len, features.line, features.write_back) };
    arch::store_fence();
    Effect::of(features.write_back)
}

/// Drops every cache line that holds a byte of the range, so that later loads come from memory.
///
/// A line this host has stored to is written back, not discarded: never invalidate what another host writes
/// and this one has written too.
///
/// # Safety
/// Every byte of the range must be mapped.
pub unsafe fn invalidate(addr: NonNull<u8>, len: usize) -> Effect {
    let features = arch::features();
    // Earlier loads must not be taken for loads after the drop, nor the other way round.
    arch::full_fence();
    // SAFETY: the lines of a mapped range are mapped.
    unsafe { each_line(addr, len, features.line, features.invalidate) };
    arch::full_fence();
    Effect::of(features.invalidate)
}

/// Orders everything stored and flushed so far before every later store. Put it between the data and the flag.
pub fn publish() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    arch::store_fence();
}

/// Orders every later load after everything loaded so far. Put it between the flag and the data.
pub fn acquire() {
    arch::full_fence();
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// # Safety
/// Every byte of the range must be mapped.
unsafe fn each_line(addr: NonNull<u8>, len: usize, line: usize, instruction: Instruction) {
    if len == 0 || instruction == Instruction::Nothing {
        return;
    }
    let first = addr.addr().get() & !(line - 1);
    // A mapped range ends below the end of the address space, so this cannot wrap.
    let end = addr.addr().get() + len;
    let start = addr.as_ptr().with_addr(first);
    // SAFETY: all lines from the first byte's to the last byte's.
    unsafe { arch::run(instruction, start, (end - first).div_ceil(line), line) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flush_and_invalidate_keep_the_bytes_of_every_alignment() {
        let mut bytes: Vec<u8> = (0..=255).cycle().take(4096).collect();
        let copy = bytes.clone();
        let base = NonNull::from(bytes.as_mut_slice()).cast::<u8>();
        for (offset, len) in [(0, 4096), (1, 63), (63, 2), (64, 64), (4095, 1), (17, 0)] {
            // SAFETY: `offset <= 4096`.
            let start = unsafe { base.add(offset) };
            // SAFETY: inside the vector.
            let flushed = unsafe { flush(start, len) };
            // SAFETY: inside the vector.
            let dropped = unsafe { invalidate(start, len) };
            if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
                assert_eq!(flushed, Effect::Done(flush_instruction()));
                assert_eq!(dropped, Effect::Done(invalidate_instruction()));
            }
        }
        publish();
        acquire();
        assert_eq!(bytes, copy);
    }

    #[test]
    fn the_line_size_is_a_sensible_power_of_two() {
        assert!(line_bytes().is_power_of_two() && (16..=2048).contains(&line_bytes()));
    }

    #[test]
    fn write_back_alone_is_never_taken_for_invalidation() {
        assert!(!matches!(invalidate_instruction(), Instruction::Clwb | Instruction::DcCvac));
    }
}
