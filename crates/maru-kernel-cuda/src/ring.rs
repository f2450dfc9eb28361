//! Slot lists too long for the kernel arguments: pinned staging and device buffers, used again once the launches
//! that read them are over.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{self, CUstream};
use maru_driver::stream::synchronize;
use maru_driver::{Context, DeviceBuffer, PinnedBuffer, Ticket, Tickets, check};

use crate::KernelError;

/// Buffers of the ring.
const ENTRIES: usize = 64;

/// Slots of a buffer (32 KiB).
pub(crate) const CAPACITY: u32 = 4 * 1024;

const ENTRY_BYTES: usize = CAPACITY as usize * size_of::<i64>();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    /// Until the event of this entry completes: buffers given back together share one.
    InFlight(usize),
    /// Being filled; or a driver call failed while it was in use, and nobody knows when it is free.
    Taken,
}

#[derive(Debug)]
struct State {
    /// Position of the oldest entry.
    next: usize,
    entries: Vec<(Ticket, Use)>,
}

impl State {
    /// Whether nobody uses an entry any more; then the same is known of all that share its event, which is free to be
    /// recorded again.
    ///
    /// # Safety
    /// The ring is alive, and its context current.
    unsafe fn is_free(&mut self, index: usize) -> Result<bool, KernelError> {
        let Use::InFlight(shared) = self.entries[index].1 else {
            return Ok(self.entries[index].1 == Use::Free);
        };
        // SAFETY: the ring owns the event; the context is current.
        let over = unsafe { self.entries[shared].0.is_complete() }?;
        if over {
            let sharing = self.entries.iter_mut().filter(|(_, used)| *used == Use::InFlight(shared));
            sharing.for_each(|(_, used)| *used = Use::Free);
        }
        Ok(over)
    }
}

/// The ring of one kernel.
#[derive(Debug)]
pub(crate) struct SlotRing {
    pinned: PinnedBuffer,
    device: DeviceBuffer,
    state: Mutex<State>,
    /// Owns the events of the entries.
    _events: Tickets,
}

impl SlotRing {
    /// The context is current.
    pub(crate) fn new(context: &Context) -> Result<Self, KernelError> {
        let bytes = ENTRIES * ENTRY_BYTES;
        let pinned = PinnedBuffer::new(context.get(), bytes)?;
        let device = DeviceBuffer::new(context.get(), bytes)?;
        let events = Tickets::new(context.get(), ENTRIES);
        let entries = (0..ENTRIES).map(|_| Ok((events.take_event()?, Use::Free)));
        let entries = entries.collect::<Result<_, KernelError>>()?;
        Ok(SlotRing { pinned, device, state: Mutex::new(State { next: 0, entries }), _events: events })
    }

    /// The oldest entry, if nobody uses it any more. The context is current.
    fn take(&self) -> Result<Option<usize>, KernelError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let index = state.next % ENTRIES;
        // SAFETY: the ring is alive; the context is current.
        let free = unsafe { state.is_free(index) }?;
        if free || state.entries[index].1 == Use::Taken {
            state.next = (index + 1) % ENTRIES;
        }
        if !free {
            return Ok(None);
        }
        state.entries[index].1 = Use::Taken;
        Ok(Some(index))
    }

    /// What was queued on `stream` is the last to read these entries.
    ///
    /// # Safety
    /// `stream` is a live stream of the current context.
    unsafe fn give_back(&self, taken: &[usize], stream: CUstream) -> Result<(), KernelError> {
        let Some(&shared) = taken.first() else { return Ok(()) };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the ring owns the event; the stream is the caller's promise.
        let recorded = unsafe { state.entries[shared].0.record(stream) };
        let used = match &recorded {
            Ok(()) => Use::InFlight(shared),
            // The caller's transfer fails, and waits anyway.
            // SAFETY: the stream is the caller's promise.
            Err(_) if unsafe { synchronize(stream) }.is_ok() => Use::Free,
            Err(_) => Use::Taken,
        };
        taken.iter().for_each(|&index| state.entries[index].1 = used);
        Ok(recorded?)
    }
}

/// The lists that the launches of one call on one stream read: each is uploaded once, however many launches
/// read it.
#[derive(Debug)]
pub(crate) struct SlotLists<'a> {
    ring: &'a SlotRing,
    stream: CUstream,
    entries: Vec<usize>,
    /// Bytes of the last entry that are taken.
    filled: usize,
    /// Bytes of the buffer that are still to be copied: they lie side by side.
    pending: Range<usize>,
    known: Known,
}

impl<'a> SlotLists<'a> {
    /// # Safety
    /// `stream` is a live stream of the ring's context, which is current while this value lives; the lists put stay
    /// where they are as long.
    pub(crate) unsafe fn new(ring: &'a SlotRing, stream: CUstream) -> Self {
        SlotLists { ring, stream, entries: Vec::new(), filled: 0, pending: 0..0, known: Known::default() }
    }

    /// Puts a list where the next [`SlotLists::flush`] copies it from, unless it is on the device already. Returns
    /// where it will be there, or `None` if it finds no room, because every buffer is in use or it is longer than
    /// [`CAPACITY`]: the caller then passes the slots by value, rather than wait.
    pub(crate) fn put(&mut self, list: &[i64]) -> Result<Option<u64>, KernelError> {
        if let Some(addr) = self.known.find(list) {
            return Ok(Some(addr));
        }
        let bytes = size_of_val(list);
        if bytes > ENTRY_BYTES {
            return Ok(None);
        }
        if self.entries.is_empty() || self.filled + bytes > ENTRY_BYTES {
            let Some(index) = self.ring.take()? else { return Ok(None) };
            // Entries side by side are one copy; what is left empty at the end of the first is copied along.
            let apart = self.entries.last().is_none_or(|last| last + 1 != index);
            self.entries.push(index);
            self.filled = 0;
            if apart {
                // Once the entry is ours: it is given back if this fails.
                self.copy()?;
            }
        }
        let Some(&index) = self.entries.last() else { return Ok(None) };
        let at = index * ENTRY_BYTES + self.filled;
        // SAFETY: entry and filling are inside the buffer.
        let to = unsafe { self.ring.pinned.host().add(at) };
        // SAFETY: `bytes` more fit the entry, which is ours; no copy reads this part of it yet.
        unsafe { to.copy_from_nonoverlapping(list.as_ptr().cast(), bytes) };
        let addr = self.ring.device.addr() + at as u64;
        self.known.add(list, addr);
        self.filled += bytes;
        let from = if self.pending.is_empty() { at } else { self.pending.start };
        self.pending = from..at + bytes;
        Ok(Some(addr))
    }

    /// Copies what was put to the device.
    pub(crate) fn flush(&mut self) -> Result<(), KernelError> {
        self.known.settle();
        self.copy()
    }

    fn copy(&mut self) -> Result<(), KernelError> {
        let Range { start, end } = std::mem::take(&mut self.pending);
        if start == end {
            return Ok(());
        }
        // SAFETY: the part is inside the buffer.
        let staging = unsafe { self.ring.pinned.host().add(start) };
        let addr = self.ring.device.addr() + start as u64;
        // SAFETY: both have that length and live as long as the ring, which outlives the launches (they keep the
        // kernel alive); the stream is the promise made to `new`.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(addr, staging.cast(), end - start, self.stream) };
        Ok(check("cuMemcpyHtoDAsync", copied)?)
    }

    /// No launch reads them any more but those queued by now.
    pub(crate) fn finish(mut self) -> Result<(), KernelError> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<(), KernelError> {
        let entries = std::mem::take(&mut self.entries);
        // SAFETY: the stream is the promise made to `new`.
        unsafe { self.ring.give_back(&entries, self.stream) }
    }
}

impl Drop for SlotLists<'_> {
    fn drop(&mut self) {
        // Also after a failure: copies and launches may be on their way.
        if let Err(error) = self.give_back() {
            tracing::debug!(%error, "buffers of slot lists are lost");
        }
    }
}

/// A list by host address and length: whoever put it keeps it there.
type Key = (usize, usize);

/// Where lists are on the device.
#[derive(Debug, Default)]
struct Known {
    /// As they came.
    lists: Vec<(Key, u64)>,
    /// How many of them came before the last flush. Within one go every list is new.
    settled: usize,
    /// The one that will be asked for next, if they are asked for as they came.
    next: usize,
    /// Where in `lists` they are, as far as somebody asked out of order.
    places: HashMap<Key, usize>,
    placed: usize,
}

impl Known {
    fn find(&mut self, list: &[i64]) -> Option<u64> {
        if self.settled == 0 {
            return None;
        }
        let key = (list.as_ptr().addr(), list.len());
        if self.lists.get(self.next).is_none_or(|(found, _)| *found != key) {
            let unplaced = self.lists.iter().enumerate().skip(self.placed);
            self.places.extend(unplaced.map(|(place, (key, _))| (*key, place)));
            self.placed = self.lists.len();
            self.next = *self.places.get(&key)?;
        }
        let (_, addr) = self.lists.get(self.next)?;
        self.next = (self.next + 1) % self.lists.len();
        Some(*addr)
    }

    fn add(&mut self, list: &[i64], addr: u64) {
        self.lists.push(((list.as_ptr().addr(), list.len()), addr));
    }

    fn settle(&mut self) {
        self.settled = self.lists.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_found_in_any_order_and_as_often_as_asked_for() {
        let slots: Vec<i64> = (0..40).collect();
        let list = |i: usize| &slots[i * 4..][..4];
        let mut known = Known::default();
        for i in 0..8 {
            // Within one go nobody asks whether a list came before.
            assert_eq!(known.find(list(i)), None);
            known.add(list(i), 100 + i as u64);
        }
        known.settle();
        let orders =
            [vec![0, 1, 2, 3, 4, 5, 6, 7], vec![0, 1, 5, 6, 2, 7, 0, 0, 3], vec![7, 6, 5, 4, 3, 2, 1, 0]];
        for i in orders.iter().flatten() {
            assert_eq!(known.find(list(*i)), Some(100 + *i as u64), "{i}");
        }
        assert_eq!((known.find(list(8)), known.find(&list(3)[1..])), (None, None));
        known.add(list(8), 108);
        assert_eq!(known.find(list(8)), Some(108));
        known.add(list(9), 109);
        known.settle();
        for i in orders.iter().flatten().chain(&[8, 9, 9]) {
            assert_eq!(known.find(list(*i)), Some(100 + *i as u64), "{i}");
        }
    }
}
