//! Events and error records of launches in flight, used again and again: a launch takes a ticket, its
//! completion handle gives it back.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, sys};

use crate::KernelError;
use crate::abi::PagedCopyError;
use crate::driver::{Current, PinnedBuffer, check};

/// Tickets made at once. The first batch is made when the kernel is loaded; more only if more launches are
/// in flight than ever before.
const BATCH: usize = 256;

/// An event and an error record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) event: sys::CUevent,
    /// In pinned host memory, as the host addresses it.
    record: *mut PagedCopyError,
    /// The same as the device addresses it.
    pub(crate) record_device: u64,
}

// SAFETY: a ticket is owned by one launch at a time; event handles may be used from any thread, and its
// record is touched by its owner only.
unsafe impl Send for Ticket {}
// SAFETY: as above; the record is read by volatile loads.
unsafe impl Sync for Ticket {}

impl Ticket {
    /// What the kernel reported so far.
    pub(crate) fn record(&self) -> PagedCopyError {
        // SAFETY: the record lives as long as the pool, which the owner of the ticket keeps alive; the device
        // may write it meanwhile, hence volatile.
        unsafe { self.record.read_volatile() }
    }

    /// Forgets what was reported.
    pub(crate) fn clear(&self) {
        // SAFETY: as above; no launch that could write the record is in flight for this ticket.
        unsafe { self.record.write_volatile(PagedCopyError::default()) };
    }
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Ticket>,
    /// Given back before their launch was known to be complete, oldest first.
    pending: VecDeque<Ticket>,
    events: Vec<sys::CUevent>,
    records: Vec<PinnedBuffer>,
}

// SAFETY: event handles may be used from any thread; everything else is `Send`.
unsafe impl Send for State {}

/// All tickets of a kernel.
#[derive(Debug)]
pub(crate) struct Tickets {
    context: Arc<CudaContext>,
    state: Mutex<State>,
}

impl Tickets {
    /// The first batch. The context is current.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self, KernelError> {
        let tickets = Tickets { context: context.clone(), state: Mutex::default() };
        tickets.grow(&mut tickets.lock())?;
        Ok(tickets)
    }

    /// A ticket whose event and record nobody uses. The context is current.
    pub(crate) fn take(&self) -> Result<Ticket, KernelError> {
        let mut state = self.lock();
        if let Some(ticket) = state.free.pop() {
            return Ok(ticket);
        }
        if let Some(&oldest) = state.pending.front()
            && is_complete(oldest.event)?
        {
            state.pending.pop_front();
            return Ok(oldest);
        }
        self.grow(&mut state)?;
        state.free.pop().ok_or(KernelError::Driver {
            op: "cuEventCreate",
            name: "no event was made".into(),
            code: 0,
        })
    }

    /// Gives a ticket back. `complete`: its launch is known to be over.
    pub(crate) fn give_back(&self, ticket: Ticket, complete: bool) {
        let mut state = self.lock();
        match complete {
            true => state.free.push(ticket),
            false => state.pending.push_back(ticket),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grow(&self, state: &mut State) -> Result<(), KernelError> {
        let size = size_of::<PagedCopyError>();
        let records = PinnedBuffer::new(&self.context, BATCH * size)?;
        // Room for all that exist, so that giving back allocates nothing.
        state.free.reserve(state.events.len() + BATCH);
        let pending = state.events.len() + BATCH - state.pending.len().min(state.events.len());
        state.pending.reserve(pending);
        for i in 0..BATCH {
            let mut event = std::ptr::null_mut();
            let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: the out pointer is valid; the context is current.
            check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
            state.events.push(event);
            // SAFETY: the buffer has BATCH records; pinned memory is aligned to pages.
            let record = unsafe { records.host().cast::<PagedCopyError>().add(i) };
            let record_device = records.device() + (i * size) as u64;
            state.free.push(Ticket { event, record, record_device });
        }
        state.records.push(records);
        Ok(())
    }
}

impl Drop for Tickets {
    fn drop(&mut self) {
        let _current = match Current::enter(&self.context) {
            Ok(current) => current,
            Err(error) => {
                tracing::error!(%error, "events of the kernel leak");
                return;
            }
        };
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for event in state.events.drain(..) {
            // SAFETY: made by `grow` and destroyed once; the driver frees it when it has completed.
            if let Err(error) = check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event) }) {
                tracing::error!(%error, "an event of the kernel leaks");
            }
        }
    }
}

/// Whether everything before the event's last record is over.
pub(crate) fn is_complete(event: sys::CUevent) -> Result<bool, KernelError> {
    // SAFETY: the callers own the event.
    match unsafe { sys::cuEventQuery(event) } {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => check("cuEventQuery", result).map(|()| true),
    }
}
