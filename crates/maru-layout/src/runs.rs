//! The tokens of a job that move, as runs of consecutive slots.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::LayoutError;

/// Consecutive tokens whose slots are consecutive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First token.
    pub token: u64,
    /// Its slot.
    pub slot: u64,
    /// Tokens.
    pub len: u64,
}

/// The runs of one job, in token order. Jobs that were checked together share the memory of theirs.
#[derive(Clone, Default)]
pub struct Runs {
    /// Of all jobs that were checked together; `None` until they all are.
    all: Option<Arc<[Run]>>,
    own: Range<usize>,
}

impl Runs {
    /// A part of runs that are still being collected.
    pub(crate) fn pending(own: Range<usize>) -> Self {
        Runs { all: None, own }
    }

    /// They are collected.
    pub(crate) fn settle(&mut self, all: Arc<[Run]>) {
        self.all = Some(all);
    }
}

impl Deref for Runs {
    type Target = [Run];

    fn deref(&self) -> &[Run] {
        self.all.as_deref().and_then(|all| all.get(self.own.clone())).unwrap_or_default()
    }
}

impl PartialEq for Runs {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Runs {}

impl fmt::Debug for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a> IntoIterator for &'a Runs {
    type Item = &'a Run;
    type IntoIter = std::slice::Iter<'a, Run>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Checks every slot's range and adds the moved tokens to `runs`, in one pass; returns how many move.
pub(crate) fn collect(
    slots: &[i64],
    skip: u64,
    num_slots: u64,
    runs: &mut Vec<Run>,
) -> Result<u64, LayoutError> {
    let end = i64::try_from(num_slots).unwrap_or(i64::MAX);
    let bad = || first_out_of_range(slots, end, num_slots);
    let mut at = usize::try_from(skip).unwrap_or(usize::MAX).min(slots.len());
    if slots[..at].iter().any(|&s| s < -1 || s >= end) {
        return Err(bad());
    }
    runs.reserve((slots.len() - at) / 8 + 1);
    let mut moved = 0;
    while let Some(&slot) = slots.get(at) {
        if slot == -1 {
            at += 1;
            continue;
        }
        // A run's ends are in range exactly if all of it is.
        let len = run_length(&slots[at..], slot);
        let last = slots[at + len - 1];
        if slot < 0 || last < slot || last >= end {
            return Err(bad());
        }
        runs.push(Run { token: at as u64, slot: slot.unsigned_abs(), len: len as u64 });
        moved += len as u64;
        at += len;
    }
    Ok(moved)
}

/// How many slots from the first on are consecutive; the first is `slot`.
fn run_length(slots: &[i64], slot: i64) -> usize {
    const STEP: usize = 8;
    let mut len = 0;
    let mut next = slot;
    // Without a branch per slot, and in a form that compilers turn into vector code.
    for step in slots.chunks_exact(STEP) {
        let differ = step.iter().zip(0i64..).fold(0, |acc, (s, k)| acc | (s ^ next.wrapping_add(k)));
        if differ != 0 {
            break;
        }
        len += STEP;
        next = next.wrapping_add(STEP as i64);
    }
    // A run that wraps past the largest slot is out of range before it wraps.
    len + slots[len..].iter().zip(0i64..).take_while(|(s, k)| next.checked_add(*k) == Some(**s)).count()
}

fn first_out_of_range(slots: &[i64], end: i64, num_slots: u64) -> LayoutError {
    let token = slots.iter().position(|&s| s < -1 || s >= end).unwrap_or(0);
    let slot = slots.get(token).copied().unwrap_or(-1);
    LayoutError::SlotOutOfRange { token: token as u64, slot, num_slots }
}
