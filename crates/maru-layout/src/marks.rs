//! Which slots were seen: a set that costs by what is put into it, not by the cache's size.

use crate::{LayoutError, Run};

/// Slots of a word of the set.
const WORD: u64 = 64;

/// Entries at first, 4 KiB.
const FEWEST: usize = 1 << 8;

/// Entries at most, 1 MiB: enough for half as many words.
const MOST: usize = 1 << 16;

/// A set of slots. Emptying it takes no time, whatever it holds.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// Open addressing; the first `size` entries are in use.
    table: Vec<Entry>,
    /// A power of two.
    size: usize,
    /// Entries of other epochs are empty.
    epoch: u32,
    used: usize,
    /// Every word has an entry of its own, so that none is ever looked for.
    direct: bool,
}

/// Epoch, then the slot's number divided by [`WORD`], in 32 bits each; and a bit per slot. No struct, so that fresh memory
/// is not touched before it is used.
type Entry = [u64; 2];

/// What putting slots into the set found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marked {
    /// All of them were new.
    New,
    /// One of them was there; some of the others may have been put in.
    Again,
    /// The set does not take them: they are too many, or too large numbers.
    Full,
}

impl Marked {
    /// Whether two of the runs, put into an empty set, name the same slot.
    pub(crate) fn is_twice(self, runs: &[Run]) -> bool {
        match self {
            Marked::New => false,
            Marked::Again => true,
            Marked::Full => sorted_overlap(runs),
        }
    }
}

impl Marks {
    pub(crate) const NEW: Marks = Marks { table: Vec::new(), size: 0, epoch: 0, used: 0, direct: false };

    /// Empties the set and prepares for about so many runs of slots below `num_slots`.
    pub(crate) fn clear(&mut self, runs: usize, num_slots: u64) {
        let words = usize::try_from(num_slots.div_ceil(WORD)).unwrap_or(usize::MAX);
        // Looking for entries costs more than they do, unless most of a large table is never used.
        self.direct = words <= runs.saturating_mul(8).clamp(16 * FEWEST, MOST);
        let entries = if self.direct { words } else { runs.saturating_mul(2) };
        self.begin(entries.clamp(FEWEST, MOST).next_power_of_two());
    }

    fn begin(&mut self, size: usize) {
        (self.size, self.used) = (size, 0);
        self.epoch = self.epoch.wrapping_add(1);
        if self.epoch == 0 || self.table.len() < size {
            // Epochs begin anew, so what is left of the old ones has to go. Entries of epoch 0 are empty for ever.
            self.table = vec![[0; 2]; size.max(self.table.len())];
            self.epoch = 1;
        }
    }

    /// Puts the slots of runs into the set.
    pub(crate) fn mark(&mut self, runs: &[Run]) -> Marked {
        self.touch(runs);
        for run in runs {
            let (mut slot, end) = (run.slot, run.slot + run.len);
            while slot < end {
                let (word, bit) = (slot / WORD, slot % WORD);
                let n = (WORD - bit).min(end - slot);
                let mask = (u64::MAX >> (WORD - n)) << bit;
                let Ok(word) = u32::try_from(word) else { return Marked::Full };
                match self.mark_word(word, mask) {
                    Marked::New => slot += n,
                    other => return other,
                }
            }
        }
        Marked::New
    }

    /// Looks at where the runs begin, so that the entries come from far caches all at once instead of one after the other.
    fn touch(&self, runs: &[Run]) {
        let last = self.size.saturating_sub(1);
        let first =
            |run: &Run| self.table.get(self.first(run.slot / WORD) & last).map_or(0, |entry| entry[0]);
        std::hint::black_box(runs.iter().fold(0, |all, run| all ^ first(run)));
    }

    /// Where looking for a word begins, before it is brought into the table.
    #[inline]
    fn first(&self, word: u64) -> usize {
        let first = match self.direct {
            true => word,
            // Neighbouring words come far from each other, so that chains stay short.
            false => word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32,
        };
        usize::try_from(first).unwrap_or(usize::MAX)
    }

    #[inline]
    fn mark_word(&mut self, word: u32, mask: u64) -> Marked {
        if self.used >= self.size / 2 && !self.direct && !self.grow() {
            return Marked::Full;
        }
        let Some([_, held]) = self.find(word) else { return Marked::Full };
        if *held & mask != 0 {
            return Marked::Again;
        }
        *held |= mask;
        Marked::New
    }

    /// The entry of a word, a new one if there is none; `None` for a word beyond the cache it was prepared for.
    #[inline]
    fn find(&mut self, word: u32) -> Option<&mut Entry> {
        let key = u64::from(self.epoch) << 32 | u64::from(word);
        let last = self.size.checked_sub(1)?;
        let first = self.first(word.into());
        if self.direct && first > last {
            return None;
        }
        let mut at = first & last;
        // Half of the entries are empty, or every word has its own.
        while self.table.get(at)?[0] != key {
            if self.table.get(at)?[0] >> 32 != u64::from(self.epoch) {
                self.used += 1;
                *self.table.get_mut(at)? = [key, 0];
                break;
            }
            at = (at + 1) & last;
        }
        self.table.get_mut(at)
    }

    /// Twice as many entries; false where that is more than allowed.
    #[cold]
    fn grow(&mut self) -> bool {
        if self.size == 0 || self.size >= MOST {
            return false;
        }
        let epoch = u64::from(self.epoch);
        let held = self.table.iter().take(self.size).filter(|[key, _]| key >> 32 == epoch);
        let held: Vec<Entry> = held.copied().collect();
        self.begin(2 * self.size);
        for [key, mask] in held {
            let word = u32::try_from(key & u64::from(u32::MAX)).unwrap_or(0);
            if let Some(entry) = self.find(word) {
                entry[1] = mask;
            }
        }
        true
    }
}

/// Whether two of the runs name the same slot, by sorting them: for what a set does not take.
fn sorted_overlap(runs: &[Run]) -> bool {
    let mut order: Vec<(u64, u64)> = runs.iter().map(|r| (r.slot, r.slot + r.len)).collect();
    order.sort_unstable();
    order.windows(2).any(|w| w[0].1 > w[1].0)
}

/// Names the first two tokens of the lowest slot that is written twice. The runs are in token order.
pub(crate) fn find_duplicate(runs: &[Run]) -> LayoutError {
    let mut order: Vec<(u64, u64)> = runs.iter().map(|r| (r.slot, r.slot + r.len)).collect();
    order.sort_unstable();
    // The first that begins before one in front of it ends: those in front of that one are apart.
    let slot = order.windows(2).find(|w| w[0].1 > w[1].0).map_or(0, |w| w[1].0);
    let holds = |run: &&Run| (run.slot..run.slot + run.len).contains(&slot);
    let mut tokens = runs.iter().filter(holds).map(|run| run.token + (slot - run.slot));
    let (first, second) = (tokens.next().unwrap_or(0), tokens.next().unwrap_or(0));
    LayoutError::DuplicateSlot { slot, first, second }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn run(slot: u64, len: u64) -> Run {
        Run { token: 0, slot, len }
    }

    #[test]
    fn the_first_two_tokens_of_a_slot_are_named() {
        // Slots 5, 5, 0 to 5.
        let runs = [(0, 5, 1), (1, 5, 1), (2, 0, 6)].map(|(token, slot, len)| Run { token, slot, len });
        let expect = LayoutError::DuplicateSlot { slot: 5, first: 0, second: 1 };
        assert_eq!(find_duplicate(&runs), expect);
    }

    #[test]
    fn runs_meet_at_their_ends_or_not_at_all() {
        let mut marks = Marks::default();
        marks.clear(1, u64::MAX);
        assert_eq!(marks.mark(&[run(60, 10), run(50, 10), run(70, 130)]), Marked::New);
        for (slot, len) in [(50, 1), (59, 2), (0, 51), (199, 1), (0, 1000)] {
            assert_eq!(marks.mark(&[run(slot, len)]), Marked::Again, "{slot} {len}");
        }
        marks.clear(1, u64::MAX);
        assert_eq!(marks.mark(&[run(0, 1000)]), Marked::New);
        assert_eq!(marks.mark(&[run(1000, 1), run(1001, 0)]), Marked::New);
        assert_eq!(marks.mark(&[run(1000, 1)]), Marked::Again);
    }

    #[test]
    fn an_emptied_set_holds_nothing_even_when_its_epochs_begin_anew() {
        let mut marks = Marks::default();
        for (epoch, num_slots) in [(0, 100), (1, u64::MAX), (u32::MAX - 2, u64::MAX), (u32::MAX - 2, 100)] {
            marks.epoch = epoch;
            for _ in 0..4 {
                marks.clear(1, num_slots);
                assert_eq!(marks.direct, num_slots == 100);
                assert_ne!(marks.epoch, 0);
                assert_eq!(marks.mark(&[run(0, 1), run(77, 1)]), Marked::New);
                assert_eq!(marks.mark(&[run(77, 1)]), Marked::Again);
            }
        }
    }

    #[test]
    fn it_grows_with_what_it_holds_up_to_its_limit() {
        let mut marks = Marks::default();
        marks.clear(1, u64::MAX);
        let most = MOST as u64 / 2;
        let apart: Vec<Run> = (0..most).map(|i| run(i * 64, 1)).collect();
        assert_eq!(marks.mark(&apart), Marked::New);
        assert_eq!(marks.mark(&[run(most * 64, 1)]), Marked::Full);
        assert!(marks.table.len() <= MOST);
        for kept in [0, 1, most / 2, most - 1] {
            marks.used = 0; // Look although it is full.
            assert_eq!(marks.mark(&[run(kept * 64, 1)]), Marked::Again, "{kept}");
        }
        marks.clear(1, u64::MAX);
        assert_eq!(marks.mark(&apart[..100]), Marked::New);
    }

    #[test]
    fn in_a_small_cache_every_word_has_its_entry() {
        let mut marks = Marks::default();
        let num_slots = MOST as u64 * 64;
        marks.clear(MOST / 8, num_slots);
        assert!(marks.direct);
        assert_eq!(marks.mark(&[run(0, num_slots)]), Marked::New);
        assert_eq!((marks.used, marks.table.len()), (MOST, MOST));
        assert_eq!(marks.mark(&[run(num_slots - 1, 1)]), Marked::Again);
        assert_eq!(marks.mark(&[run(num_slots, 1)]), Marked::Full);
        // A larger one shares entries, of which there are fewer.
        marks.clear(MOST / 8, num_slots + 1);
        assert!(!marks.direct);
        assert_eq!(marks.mark(&[run(num_slots - 1, 1)]), Marked::New);
    }

    #[test]
    fn numbers_beyond_its_words_are_refused() {
        let mut marks = Marks::default();
        marks.clear(1, u64::MAX);
        let edge = u64::from(u32::MAX) * 64 + 63;
        assert_eq!(marks.mark(&[run(edge, 1)]), Marked::New);
        assert_eq!(marks.mark(&[run(edge, 1)]), Marked::Again);
        assert_eq!(marks.mark(&[run(edge + 1, 1)]), Marked::Full);
    }

    proptest! {
        #[test]
        fn it_is_a_set(batches in prop::collection::vec(
            (
                prop::collection::vec((0u64..5000, 1u64..70, prop::sample::select(vec![1u64, 64, 1 << 20])), 0..60),
                1usize..2000,
            ),
            1..6,
        )) {
            let mut marks = Marks::default();
            for (batch, runs) in batches {
                let num_slots = batch.iter().map(|(slot, len, scale)| slot * scale + len).max().unwrap_or(0);
                marks.clear(runs, num_slots);
                let mut seen = HashSet::new();
                for (slot, len, scale) in batch {
                    let slot = slot * scale;
                    let new = (slot..slot + len).all(|s| !seen.contains(&s));
                    let expect = if new { Marked::New } else { Marked::Again };
                    prop_assert_eq!(marks.mark(&[run(slot, len)]), expect);
                    if !new {
                        break;
                    }
                    seen.extend(slot..slot + len);
                }
            }
        }
    }
}
