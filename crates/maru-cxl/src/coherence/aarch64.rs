//! AArch64: `dc cvac`, `dc civac`.

use std::arch::asm;
use std::sync::OnceLock;

use super::Instruction;

pub(super) struct Features {
    pub(super) write_back: Instruction,
    pub(super) invalidate: Instruction,
    pub(super) line: usize,
}

pub(super) fn features() -> &'static Features {
    static FEATURES: OnceLock<Features> = OnceLock::new();
    FEATURES.get_or_init(|| {
        let ctr: u64;
        // SAFETY: reading CTR_EL0 is allowed (or emulated) at EL0 on Linux and changes nothing.
        unsafe { asm!("mrs {}, ctr_el0", out(reg) ctr, options(nomem, nostack, preserves_flags)) };
        // DminLine, bits 19:16, is the logarithm of the smallest line in words of four bytes.
        let line = 4_usize << (ctr >> 16 & 0xf);
        Features { write_back: Instruction::DcCvac, invalidate: Instruction::DcCivac, line }
    })
}

/// # Safety
/// `count` lines from `start` must be mapped.
pub(super) unsafe fn run(instruction: Instruction, start: *mut u8, count: usize, line: usize) {
    for index in 0..count {
        let at = start.wrapping_add(index * line);
        match instruction {
            // SAFETY: the line is mapped; the instruction changes no byte.
            Instruction::DcCvac => unsafe {
                asm!("dc cvac, {}", in(reg) at, options(nostack, preserves_flags))
            },
            // SAFETY: the line is mapped; the instruction changes no byte.
            Instruction::DcCivac => unsafe {
                asm!("dc civac, {}", in(reg) at, options(nostack, preserves_flags))
            },
            _ => {}
        }
    }
}

pub(super) fn store_fence() {
    full_fence();
}

pub(super) fn full_fence() {
    // SAFETY: a barrier has no operands.
    unsafe { asm!("dsb sy", options(nostack, preserves_flags)) };
}
