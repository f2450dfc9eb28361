//! x86-64: `clwb`, `clflushopt`, `clflush`.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use super::Instruction;

pub(super) struct Features {
    pub(super) write_back: Instruction,
    pub(super) invalidate: Instruction,
    pub(super) line: usize,
}

pub(super) fn features() -> &'static Features {
    static FEATURES: OnceLock<Features> = OnceLock::new();
    FEATURES.get_or_init(detect)
}

fn detect() -> Features {
    let most = __cpuid(0).eax;
    let first = __cpuid(1);
    // CPUID.1:EBX[15:8] is the line size in units of eight bytes, valid with CLFSH (EDX bit 19), which every
    // x86-64 has.
    let line = match (first.ebx >> 8 & 0xff) as usize * 8 {
        line if line.is_power_of_two() => line,
        _ => 64,
    };
    let seventh = if most >= 7 { __cpuid_count(7, 0).ebx } else { 0 };
    let (has_clflushopt, has_clwb) = (seventh & 1 << 23 != 0, seventh & 1 << 24 != 0);
    let invalidate = if has_clflushopt { Instruction::Clflushopt } else { Instruction::Clflush };
    let write_back = if has_clwb { Instruction::Clwb } else { invalidate };
    Features { write_back, invalidate, line }
}

/// # Safety
/// `count` lines from `start` must be mapped, and the CPU must have the instruction.
pub(super) unsafe fn run(instruction: Instruction, start: *mut u8, count: usize, line: usize) {
    macro_rules! each {
        ($text:literal) => {
            for index in 0..count {
                let at = start.wrapping_add(index * line);
                // SAFETY: the line is mapped; the instruction changes no byte and no register.
                unsafe { asm!($text, in(reg) at, options(nostack, preserves_flags)) };
            }
        };
    }
    match instruction {
        Instruction::Clwb => each!("clwb [{}]"),
        Instruction::Clflushopt => each!("clflushopt [{}]"),
        Instruction::Clflush => each!("clflush [{}]"),
        _ => {}
    }
}

pub(super) fn store_fence() {
    // SAFETY: a fence has no operands.
    unsafe { asm!("sfence", options(nostack, preserves_flags)) };
}

pub(super) fn full_fence() {
    // SAFETY: a fence has no operands.
    unsafe { asm!("mfence", options(nostack, preserves_flags)) };
}
