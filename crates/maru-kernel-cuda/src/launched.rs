//! What a launch returns: when it is done, and what the kernel had to say.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::CUstream;

use crate::kernel::Inner;
use crate::tickets::Ticket;
use crate::{KernelError, PlaneTable};

/// A transfer on its way.
///
/// It keeps the kernel and the plane table alive. Dropping it neither waits nor cancels; slab, cache and
/// device slots must stay until the transfer is over.
#[derive(Debug)]
pub struct Launched {
    /// The kernel, for a captured launch, which has no mark that holds it.
    _kernel: Arc<Inner>,
    /// Held for its memory, which the launch reads.
    _planes: PlaneTable,
    pub(crate) state: State,
    /// Slots of the cache, for the message.
    num_slots: u64,
}

#[derive(Debug)]
pub(crate) enum State {
    /// There was nothing to do.
    Empty,
    /// Part of a graph: there is nothing to wait for here.
    Captured,
    /// Done when the mark is reached; `reports` if the kernel checks the slots.
    Queued { mark: Arc<Mark>, reports: bool },
}

/// A place on a stream: a recorded ticket, given back when the last holder goes. Keeps the kernel alive, whose
/// the ticket is.
#[derive(Debug)]
pub(crate) struct Mark {
    ticket: Ticket,
    /// Set once it is known to be reached, so that the ticket can be used again without asking.
    over: AtomicBool,
    kernel: Arc<Inner>,
}

impl Mark {
    /// Around a ticket that is recorded.
    pub(crate) fn new(kernel: &Arc<Inner>, ticket: Ticket) -> Arc<Self> {
        Arc::new(Mark { ticket, over: AtomicBool::new(false), kernel: Arc::clone(kernel) })
    }

    /// Whether someone has found it reached. Asks no driver.
    pub(crate) fn is_known_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Makes what is queued on a stream from now on wait for it. The context is current.
    ///
    /// # Safety
    /// `stream` is a live stream.
    pub(crate) unsafe fn order_before(&self, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: the pool lives as long as the kernel, which this value keeps alive; the stream is the
        // caller's promise.
        Ok(unsafe { self.ticket.order_before(stream) }?)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // No driver call here: whether it is reached is asked when the ticket is needed again.
        self.kernel.tickets.give_back(self.ticket, self.is_known_over());
    }
}

impl Launched {
    pub(crate) fn new(kernel: &Arc<Inner>, planes: &PlaneTable, state: State, num_slots: u64) -> Self {
        Launched { _kernel: Arc::clone(kernel), _planes: planes.clone(), state, num_slots }
    }

    /// Whether the launch became part of a CUDA graph. It then runs whenever the graph does, the caller keeps
    /// every memory of it alive for as long, and the rest of this interface says "done". Bad slots are
    /// reported by [`crate::PagedCopyKernel::take_captured_error`].
    pub fn is_captured(&self) -> bool {
        matches!(self.state, State::Captured)
    }

    /// Whether the kernel checks slots, whose errors only this value will tell.
    pub(crate) fn reports(&self) -> bool {
        matches!(self.state, State::Queued { reports: true, .. })
    }

    /// The place on the stream behind it; `None` where there is none.
    pub(crate) fn mark(&self) -> Option<&Arc<Mark>> {
        match &self.state {
            State::Queued { mark, .. } => Some(mark),
            State::Empty | State::Captured => None,
        }
    }

    /// Whether the transfer is over. Does not wait.
    ///
    /// # Errors
    /// [`KernelError::Driver`] if the driver reports one, which may stem from other work of the context;
    /// [`KernelError::SlotOutOfRange`] once it is over and a slot in device memory was bad.
    pub fn is_complete(&self) -> Result<bool, KernelError> {
        let State::Queued { mark, .. } = &self.state else { return Ok(true) };
        let _current = mark.kernel.context.enter()?;
        // SAFETY: the pool lives as long as the kernel, which the mark keeps alive.
        if !unsafe { mark.ticket.is_complete() }? {
            return Ok(false);
        }
        mark.over.store(true, Ordering::Relaxed);
        self.outcome().map(|()| true)
    }

    /// Waits until the transfer is over.
    ///
    /// # Errors
    /// As [`Launched::is_complete`].
    pub fn wait(&self) -> Result<(), KernelError> {
        let State::Queued { mark, .. } = &self.state else { return Ok(()) };
        let _current = mark.kernel.context.enter()?;
        // SAFETY: as above.
        unsafe { mark.ticket.wait() }?;
        mark.over.store(true, Ordering::Relaxed);
        self.outcome()
    }

    /// Makes everything queued on `stream` from now on wait for the transfer. The host does not wait.
    ///
    /// # Errors
    /// [`KernelError::Driver`].
    ///
    /// # Safety
    /// `stream` is a live stream.
    pub unsafe fn order_before(&self, stream: CUstream) -> Result<(), KernelError> {
        let State::Queued { mark, .. } = &self.state else { return Ok(()) };
        let _current = mark.kernel.context.enter()?;
        // SAFETY: the stream is the caller's promise.
        unsafe { mark.order_before(stream) }
    }

    /// What the kernel reported; to be asked when the transfer is over.
    fn outcome(&self) -> Result<(), KernelError> {
        match &self.state {
            State::Queued { mark, reports: true } => {
                let record = mark.ticket.payload.read();
                match record.raised {
                    0 => Ok(()),
                    _ => Err(KernelError::SlotOutOfRange {
                        token: record.token,
                        slot: record.slot,
                        num_slots: self.num_slots,
                    }),
                }
            }
            _ => Ok(()),
        }
    }
}
