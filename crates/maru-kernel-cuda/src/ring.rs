//! Slot lists too long for the kernel arguments: pinned staging and device buffers, used again once their
//! launch is over.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;
use maru_driver::{Context, DeviceBuffer, PinnedBuffer, Ticket, Tickets, check};

use crate::KernelError;

/// Buffers of the ring.
const ENTRIES: usize = 8;

/// Slots of a buffer (128 KiB).
pub(crate) const CAPACITY: u32 = 16 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    /// Until the event completes.
    InFlight,
    /// A driver call failed while it was in use; nobody knows when it is free.
    Lost,
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
        let bytes = ENTRIES * CAPACITY as usize * size_of::<i64>();
        let pinned = PinnedBuffer::new(context.get(), bytes)?;
        let device = DeviceBuffer::new(context.get(), bytes)?;
        let events = Tickets::new(context.get(), ENTRIES);
        let entries = (0..ENTRIES).map(|_| Ok((events.take_event()?, Use::Free)));
        let entries = entries.collect::<Result<_, KernelError>>()?;
        Ok(SlotRing { pinned, device, state: Mutex::new(State { next: 0, entries }), _events: events })
    }

    /// Uploads lists (at most [`CAPACITY`] slots in all, one after the other) on `stream` and calls `launch` with
    /// their device address. False if every buffer is still in use: the caller then passes the slots by value,
    /// rather than wait.
    ///
    /// # Safety
    /// `stream` is a live stream of the current context.
    pub(crate) unsafe fn with_slots<'a>(
        &self,
        lists: impl Iterator<Item = &'a [i64]> + Clone,
        stream: sys::CUstream,
        launch: impl FnOnce(u64) -> Result<(), KernelError>,
    ) -> Result<bool, KernelError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let index = state.next % ENTRIES;
        let (event, used) = state.entries[index];
        let free = match used {
            Use::Free => true,
            // SAFETY: the ring owns the event; the context is current.
            Use::InFlight => unsafe { event.is_complete() }?,
            Use::Lost => false,
        };
        if used == Use::Lost {
            state.next = (index + 1) % ENTRIES;
        }
        let bytes = lists.clone().map(size_of_val).sum();
        if !free || bytes > CAPACITY as usize * size_of::<i64>() {
            return Ok(false);
        }
        state.next = (index + 1) % ENTRIES;
        state.entries[index].1 = Use::Lost;
        let at = index * CAPACITY as usize * size_of::<i64>();
        // SAFETY: the buffer has ENTRIES such pieces.
        let staging = unsafe { self.pinned.host().add(at) };
        let addr = self.device.addr() + at as u64;
        let mut filled = 0;
        for list in lists {
            // SAFETY: a piece holds CAPACITY slots, and the lists are no more.
            let to = unsafe { staging.add(filled) };
            // SAFETY: as above; no copy reads this piece, its event is complete.
            unsafe { to.copy_from_nonoverlapping(list.as_ptr().cast(), size_of_val(list)) };
            filled += size_of_val(list);
        }
        // SAFETY: source and destination have that length and live as long as the ring, which outlives the
        // launches (they keep the kernel alive); the stream is the caller's promise.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(addr, staging.cast(), bytes, stream) };
        let copied = check("cuMemcpyHtoDAsync", copied).map_err(KernelError::from);
        let launched = copied.and_then(|()| launch(addr));
        // Also after a failure: the copy may be on its way.
        // SAFETY: the ring owns the event; the stream is the caller's promise.
        let recorded = unsafe { event.record(stream) };
        if recorded.is_ok() {
            state.entries[index].1 = Use::InFlight;
        }
        launched.and(recorded.map_err(KernelError::from)).map(|()| true)
    }
}
