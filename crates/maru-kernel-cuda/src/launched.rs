//! What a launch returns: when it is done, and what the kernel had to say.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use maru_driver::stream::is_capturing;

use crate::kernel::Inner;
use crate::tickets::{Ticket, Told};
use crate::{KernelError, PlaneTable};

/// How long a thread polls for the word of a launch before it lets the driver wait: words are there a microsecond
/// before the driver says so, which matters to short transfers only.
const POLL: Duration = Duration::from_micros(100);

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
    /// What the launch tells before its event does; `None` for what is no launch of the kernel.
    told: Option<Told>,
    /// Runs that it tells of; one if it tells of the end only.
    runs: usize,
    /// Set once it is known to be reached, so that the ticket can be used again without asking.
    over: AtomicBool,
    kernel: Arc<Inner>,
}

impl Mark {
    /// Around a ticket that is recorded behind the launch that tells.
    pub(crate) fn new(kernel: &Arc<Inner>, ticket: Ticket, told: Option<Told>, runs: usize) -> Arc<Self> {
        Arc::new(Mark { ticket, told, runs, over: AtomicBool::new(false), kernel: Arc::clone(kernel) })
    }

    /// Whether it is known to be reached. Asks no driver.
    pub(crate) fn is_known_over(&self) -> bool {
        self.over.load(Ordering::Acquire) || self.has_told(self.last_run())
    }

    /// The run with which all of it is there.
    fn last_run(&self) -> usize {
        self.runs.saturating_sub(1)
    }

    /// Whether the launch has told that a run is there.
    fn has_told(&self, run: usize) -> bool {
        self.told.is_some_and(|told| told.is_there(run))
    }

    /// Whether a run is there.
    fn is_there(&self, run: usize) -> Result<bool, KernelError> {
        if self.has_told(run) || self.is_known_over() {
            return Ok(true);
        }
        let _current = self.kernel.context.enter()?;
        // Not only for launches that tell nothing: a failed one never tells.
        // SAFETY: the pool lives as long as the kernel, which this value keeps alive.
        let over = unsafe { self.ticket.is_complete() }?;
        self.over.fetch_or(over, Ordering::Release);
        Ok(over)
    }

    /// Waits until a run is there.
    fn wait(&self, run: usize) -> Result<(), KernelError> {
        // What is over already need not look at a clock.
        if self.has_told(run) {
            return Ok(());
        }
        let begun = Instant::now();
        while self.told.is_some() && begun.elapsed() < POLL {
            if self.has_told(run) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        if self.is_known_over() {
            return Ok(());
        }
        if run < self.last_run() {
            // The event is that of the last run.
            while !self.is_there(run)? {
                std::thread::yield_now();
            }
            return Ok(());
        }
        let _current = self.kernel.context.enter()?;
        // SAFETY: as above.
        unsafe { self.ticket.wait() }?;
        self.over.store(true, Ordering::Release);
        Ok(())
    }

    /// Makes what is queued on a stream from now on wait for a run: by its word if it has one, else by the event
    /// behind all of them.
    ///
    /// # Safety
    /// `stream` is a live stream.
    unsafe fn order_run_before(&self, run: usize, stream: CUstream) -> Result<(), KernelError> {
        if self.has_told(run) {
            return Ok(());
        }
        let _current = self.kernel.context.enter()?;
        if let (Some(told), Some(waits)) = (self.told, self.kernel.word_waits)
            && run < self.last_run()
            // In a graph the wait would be for a value that was reached long ago.
            // SAFETY: the stream is the caller's promise.
            && !unsafe { is_capturing(stream) }?
        {
            let (addr, value) = told.device_word(run);
            // SAFETY: as above; the launch is queued. The word lives as long as the context's work: freeing it waits.
            return Ok(unsafe { waits.at_least(addr, value, stream) }?);
        }
        // SAFETY: as above; the context is current.
        unsafe { self.order_before(stream) }
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
        if !mark.is_there(mark.last_run())? {
            return Ok(false);
        }
        self.outcome().map(|()| true)
    }

    /// Waits until the transfer is over.
    ///
    /// # Errors
    /// As [`Launched::is_complete`].
    pub fn wait(&self) -> Result<(), KernelError> {
        let State::Queued { mark, .. } = &self.state else { return Ok(()) };
        mark.wait(mark.last_run())?;
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

/// Some layers of a load that tells of its layers as they come, see
/// [`crate::PagedCopyKernel::launch_by_layer`]. Dropping it neither waits nor cancels.
#[derive(Clone, Debug)]
pub struct LaunchedRun {
    all: Arc<Launched>,
    run: usize,
}

impl LaunchedRun {
    /// The runs of a launch.
    pub(crate) fn all_of(launched: Launched) -> Vec<Self> {
        let runs = launched.mark().map_or(0, |mark| mark.runs);
        let all = Arc::new(launched);
        (0..runs).map(|run| LaunchedRun { all: Arc::clone(&all), run }).collect()
    }

    /// Whether the layers are there. Does not wait.
    ///
    /// # Errors
    /// [`KernelError::Driver`] if the driver reports one, which may stem from other work of the context.
    pub fn is_complete(&self) -> Result<bool, KernelError> {
        self.all.mark().map_or(Ok(true), |mark| mark.is_there(self.run))
    }

    /// Waits until the layers are there.
    ///
    /// # Errors
    /// As [`LaunchedRun::is_complete`].
    pub fn wait(&self) -> Result<(), KernelError> {
        self.all.mark().map_or(Ok(()), |mark| mark.wait(self.run))
    }

    /// Makes everything queued on `stream` from now on wait for the layers; for the whole load where the device cannot
    /// wait for less. The host does not wait.
    ///
    /// # Errors
    /// [`KernelError::Driver`].
    ///
    /// # Safety
    /// `stream` is a live stream.
    pub unsafe fn order_before(&self, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        self.all.mark().map_or(Ok(()), |mark| unsafe { mark.order_run_before(self.run, stream) })
    }
}
