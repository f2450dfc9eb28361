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
    pub(crate) kernel: Arc<Inner>,
    /// Held for its memory, which the launch reads.
    pub(crate) _planes: PlaneTable,
    pub(crate) state: State,
    /// Slots of the cache, for the message.
    pub(crate) num_slots: u64,
    /// Set once the transfer is known to be over, so that its ticket can be used again without asking.
    over: AtomicBool,
}

#[derive(Debug)]
pub(crate) enum State {
    /// There was nothing to do.
    Empty,
    /// Part of a graph: there is nothing to wait for here.
    Captured,
    /// Done when the ticket's event is; `reports` if the kernel checks the slots.
    Queued { ticket: Ticket, reports: bool },
}

impl Launched {
    pub(crate) fn new(kernel: &Arc<Inner>, planes: &PlaneTable, state: State, num_slots: u64) -> Self {
        let over = AtomicBool::new(false);
        Launched { kernel: Arc::clone(kernel), _planes: planes.clone(), state, num_slots, over }
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

    /// Whether the transfer is over. Does not wait.
    ///
    /// # Errors
    /// [`KernelError::Driver`] if the driver reports one, which may stem from other work of the context;
    /// [`KernelError::SlotOutOfRange`] once it is over and a slot in device memory was bad.
    pub fn is_complete(&self) -> Result<bool, KernelError> {
        let State::Queued { ticket, .. } = &self.state else { return Ok(true) };
        let _current = self.kernel.context.enter()?;
        // SAFETY: the pool lives as long as the kernel, which this value keeps alive.
        if !unsafe { ticket.is_complete() }? {
            return Ok(false);
        }
        self.over.store(true, Ordering::Relaxed);
        self.outcome().map(|()| true)
    }

    /// Waits until the transfer is over.
    ///
    /// # Errors
    /// As [`Launched::is_complete`].
    pub fn wait(&self) -> Result<(), KernelError> {
        let State::Queued { ticket, .. } = &self.state else { return Ok(()) };
        let _current = self.kernel.context.enter()?;
        // SAFETY: as above.
        unsafe { ticket.wait() }?;
        self.over.store(true, Ordering::Relaxed);
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
        let State::Queued { ticket, .. } = &self.state else { return Ok(()) };
        let _current = self.kernel.context.enter()?;
        // SAFETY: as above; the stream is the caller's promise.
        Ok(unsafe { ticket.order_before(stream) }?)
    }

    /// What the kernel reported; to be asked when the transfer is over.
    fn outcome(&self) -> Result<(), KernelError> {
        match &self.state {
            State::Queued { ticket, reports: true } => {
                let record = ticket.payload.read();
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

impl Drop for Launched {
    fn drop(&mut self) {
        if let State::Queued { ticket, .. } = &self.state {
            // No driver call here: whether it is over is asked when the ticket is needed again.
            self.kernel.tickets.give_back(*ticket, self.over.load(Ordering::Relaxed));
        }
    }
}
