//! Architectures without instructions for cache maintenance in user space.

use super::Instruction;

pub(super) struct Features {
    pub(super) write_back: Instruction,
    pub(super) invalidate: Instruction,
    pub(super) line: usize,
}

pub(super) fn features() -> &'static Features {
    &Features { write_back: Instruction::Nothing, invalidate: Instruction::Nothing, line: 64 }
}

/// # Safety
/// Never called: there is no instruction to run.
pub(super) unsafe fn run(_instruction: Instruction, _start: *mut u8, _count: usize, _line: usize) {}

pub(super) fn store_fence() {
    full_fence();
}

pub(super) fn full_fence() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}
