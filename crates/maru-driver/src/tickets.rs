//! Events of work in flight, used again and again: whoever queues work takes a ticket, its completion handle
//! gives it back.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};

use crate::{Context, DriverError, check};

/// An event, and what its owner keeps with it (a record the device writes, for instance).
///
/// It belongs to one piece of work at a time and is valid as long as the [`Tickets`] it came from.
#[derive(Clone, Copy, Debug)]
pub struct Ticket<T = ()> {
    event: CUevent,
    /// The owner's.
    pub payload: T,
}

// SAFETY: event handles may be used from any thread with the context current.
unsafe impl<T: Send> Send for Ticket<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Ticket<T> {}

impl<T> Ticket<T> {
    /// The event.
    pub fn event(&self) -> CUevent {
        self.event
    }

    /// Marks the end of what is queued on a stream so far. The context is current.
    ///
    /// # Errors
    /// [`DriverError`].
    ///
    /// # Safety
    /// The ticket's pool is alive, and so is the stream, of the same context.
    pub unsafe fn record(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, stream) })
    }

    /// Whether everything before the last [`Ticket::record`] is over. Any other error than "not yet" is an
    /// error, so that nobody polls for ever. The context is current.
    ///
    /// # Errors
    /// [`DriverError`], which may stem from other work of the context.
    ///
    /// # Safety
    /// The ticket's pool is alive.
    pub unsafe fn is_complete(&self) -> Result<bool, DriverError> {
        // SAFETY: the caller's promise.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Waits for the same. The context is current.
    ///
    /// # Errors
    /// As [`Ticket::is_complete`].
    ///
    /// # Safety
    /// The ticket's pool is alive.
    pub unsafe fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.event) })
    }

    /// Makes what is queued on a stream from now on wait for the same. The context is current.
    ///
    /// # Errors
    /// [`DriverError`].
    ///
    /// # Safety
    /// The ticket's pool is alive, and so is the stream.
    pub unsafe fn order_before(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, self.event, 0) })
    }
}

#[derive(Debug)]
struct State<T> {
    free: Vec<Ticket<T>>,
    /// Given back before their work was known to be over, oldest first.
    pending: VecDeque<Ticket<T>>,
    events: Vec<CUevent>,
}

// SAFETY: event handles may be used from any thread; everything else is `Send`.
unsafe impl<T: Send> Send for State<T> {}

impl<T: Copy> State<T> {
    fn unused(&mut self) -> Result<Option<Ticket<T>>, DriverError> {
        if let Some(ticket) = self.free.pop() {
            return Ok(Some(ticket));
        }
        let Some(oldest) = self.pending.front() else { return Ok(None) };
        // SAFETY: it is an event of this pool.
        Ok(if unsafe { oldest.is_complete() }? { self.pending.pop_front() } else { None })
    }
}

/// A pool of [`Ticket`]s of one context. It grows while more of them are out than ever before, and never
/// shrinks.
#[derive(Debug)]
pub struct Tickets<T = ()> {
    state: Mutex<State<T>>,
    batch: usize,
    context: Context,
}

impl<T: Copy> Tickets<T> {
    /// An empty pool that will make `batch` events at a time.
    pub fn new(context: &Arc<CudaContext>, batch: usize) -> Self {
        let state = State { free: Vec::new(), pending: VecDeque::new(), events: Vec::new() };
        Tickets { state: Mutex::new(state), batch: batch.max(1), context: Context::new(context.clone()) }
    }

    /// A ticket whose event nobody uses. `payloads(n)` makes what is kept with `n` new events. The context is
    /// current.
    ///
    /// # Errors
    /// [`DriverError`] if an event cannot be made, or the oldest pending one reports an error.
    pub fn take(
        &self,
        payloads: impl FnOnce(usize) -> Result<Vec<T>, DriverError>,
    ) -> Result<Ticket<T>, DriverError> {
        let mut state = self.lock();
        if let Some(ticket) = state.unused()? {
            return Ok(ticket);
        }
        for payload in payloads(self.batch)? {
            let mut event = std::ptr::null_mut();
            let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: the out pointer is valid; the context is current.
            check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
            state.events.push(event);
            state.free.push(Ticket { event, payload });
        }
        // Room for all that exist, so that giving back allocates nothing.
        let all = state.events.len();
        let (free, pending) = (state.free.len(), state.pending.len());
        state.free.reserve(all - free);
        state.pending.reserve(all - pending);
        state.free.pop().ok_or_else(|| DriverError::new("cuEventCreate", CUresult::CUDA_ERROR_OUT_OF_MEMORY))
    }

    /// The same as far as the pool has grown: `None` if all are in use. The context is current.
    ///
    /// # Errors
    /// [`DriverError`] if the oldest pending one reports an error.
    pub fn take_unused(&self) -> Result<Option<Ticket<T>>, DriverError> {
        self.lock().unused()
    }

    /// Gives a ticket back. `complete`: its work is known to be over.
    pub fn give_back(&self, ticket: Ticket<T>, complete: bool) {
        let mut state = self.lock();
        match complete {
            true => state.free.push(ticket),
            false => state.pending.push_back(ticket),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing in here panics half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tickets {
    /// [`Tickets::take`] for a pool of plain events.
    ///
    /// # Errors
    /// As there.
    pub fn take_event(&self) -> Result<Ticket, DriverError> {
        self.take(|n| Ok(vec![(); n]))
    }
}

impl<T> Drop for Tickets<T> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.context.give_back("a pool of events", || {
            let mut outcome = Ok(());
            for event in state.events.drain(..) {
                // SAFETY: made by `take` and destroyed once; the driver frees it when it has completed.
                outcome = outcome.and(check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event) }));
            }
            outcome
        });
    }
}
