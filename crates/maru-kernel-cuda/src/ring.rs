//! Slot lists too long for the kernel arguments: pinned staging and device buffers, used again once the launches
//! that read them are over.

use std::collections::HashMap;
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
    /// Until the event completes.
    InFlight,
    /// Being filled; or a driver call failed while it was in use, and nobody knows when it is free.
    Taken,
}

#[derive(Debug)]
struct State {
    /// Position of the oldest entry.
    next: usize,
    entries: Vec<(Ticket, Use)>,
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
        let (event, used) = state.entries[index];
        let free = match used {
            Use::Free => true,
            // SAFETY: the ring owns the event; the context is current.
            Use::InFlight => unsafe { event.is_complete() }?,
            Use::Taken => false,
        };
        if free || used == Use::Taken {
            state.next = (index + 1) % ENTRIES;
        }
        if !free {
            return Ok(None);
        }
        state.entries[index].1 = Use::Taken;
        Ok(Some(index))
    }

    /// What was queued on `stream` is the last to read an entry.
    ///
    /// # Safety
    /// `stream` is a live stream of the current context.
    unsafe fn give_back(&self, index: usize, stream: CUstream) -> Result<(), KernelError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (event, used) = &mut state.entries[index];
        // SAFETY: the ring owns the event; the stream is the caller's promise.
        let recorded = unsafe { event.record(stream) };
        *used = match &recorded {
            Ok(()) => Use::InFlight,
            // The caller's transfer fails, and waits anyway.
            // SAFETY: the stream is the caller's promise.
            Err(_) if unsafe { synchronize(stream) }.is_ok() => Use::Free,
            Err(_) => Use::Taken,
        };
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
    /// Device addresses by host address and length: the jobs of the call hold the lists.
    known: HashMap<(usize, usize), u64>,
}

impl<'a> SlotLists<'a> {
    /// No lists yet.
    ///
    /// # Safety
    /// `stream` is a live stream, of the context that is current whenever this value is used or dropped; lists
    /// that it is given stay as they are meanwhile.
    pub(crate) unsafe fn new(ring: &'a SlotRing, stream: CUstream) -> Self {
        SlotLists { ring, stream, entries: Vec::new(), filled: 0, known: HashMap::new() }
    }

    /// Device address of a list that was uploaded.
    pub(crate) fn addr(&self, list: &[i64]) -> Option<u64> {
        self.known.get(&key(list)).copied()
    }

    /// Uploads the lists that are not there yet. False if one of them finds no room, because every buffer is in use
    /// or it is longer than [`CAPACITY`]: the caller then passes the slots by value, rather than wait.
    pub(crate) fn upload<'l>(&mut self, lists: impl Iterator<Item = &'l [i64]>) -> Result<bool, KernelError> {
        // Of the last entry, what is still to be copied.
        let mut from = self.filled;
        let mut all = true;
        for list in lists {
            if self.known.contains_key(&key(list)) {
                continue;
            }
            let bytes = size_of_val(list);
            if bytes > ENTRY_BYTES {
                all = false;
                break;
            }
            if self.entries.is_empty() || self.filled + bytes > ENTRY_BYTES {
                self.copy(from)?;
                let Some(index) = self.ring.take()? else {
                    from = self.filled;
                    all = false;
                    break;
                };
                self.entries.push(index);
                (from, self.filled) = (0, 0);
            }
            let Some(&index) = self.entries.last() else { break };
            let at = index * ENTRY_BYTES + self.filled;
            // SAFETY: entry and filling are inside the buffer.
            let to = unsafe { self.ring.pinned.host().add(at) };
            // SAFETY: `bytes` more fit the entry, which is ours; no copy reads this part of it yet.
            unsafe { to.copy_from_nonoverlapping(list.as_ptr().cast(), bytes) };
            self.known.insert(key(list), self.ring.device.addr() + at as u64);
            self.filled += bytes;
        }
        self.copy(from)?;
        Ok(all)
    }

    /// Copies the last entry from a byte on to the device.
    fn copy(&self, from: usize) -> Result<(), KernelError> {
        let Some(&index) = self.entries.last().filter(|_| from < self.filled) else { return Ok(()) };
        let at = index * ENTRY_BYTES + from;
        // SAFETY: the part is inside the buffer.
        let staging = unsafe { self.ring.pinned.host().add(at) };
        let addr = self.ring.device.addr() + at as u64;
        // SAFETY: both have that length and live as long as the ring, which outlives the launches (they keep the
        // kernel alive); the stream is the promise made to `new`.
        let copied =
            unsafe { sys::cuMemcpyHtoDAsync_v2(addr, staging.cast(), self.filled - from, self.stream) };
        Ok(check("cuMemcpyHtoDAsync", copied)?)
    }

    /// No launch reads them any more but those queued by now.
    pub(crate) fn finish(mut self) -> Result<(), KernelError> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<(), KernelError> {
        // An error of one says nothing of the others.
        let mut outcome = Ok(());
        for index in self.entries.drain(..) {
            // SAFETY: the stream is the promise made to `new`.
            outcome = outcome.and(unsafe { self.ring.give_back(index, self.stream) });
        }
        outcome
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

fn key(list: &[i64]) -> (usize, usize) {
    (list.as_ptr().addr(), list.len())
}
