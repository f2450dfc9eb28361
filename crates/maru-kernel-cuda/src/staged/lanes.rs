//! The streams that staged work goes through.

use cudarc::driver::sys::CUstream;
use maru_driver::stream::{OwnStream, synchronize};
use maru_driver::{Context, DriverError, Ticket};
use maru_layout::Direction;

use crate::KernelError;

/// Where each kind of work of one transfer goes. Copies stay on the caller's stream, which would only wait for them
/// elsewhere: the fewer streams the device holds back, the better (two or three cost its copies up to 15 % beside a
/// memory-bound kernel).
#[derive(Clone, Copy, Debug)]
pub(super) struct Lanes {
    copies: CUstream,
    pub(super) kernel: CUstream,
}

impl Lanes {
    /// Everything on one stream.
    pub(super) fn all(stream: CUstream) -> Self {
        Lanes { copies: stream, kernel: stream }
    }

    /// The streams of the first and the last work of a direction.
    pub(super) fn ends(self, direction: Direction) -> (CUstream, CUstream) {
        match direction {
            Direction::Scatter => (self.copies, self.kernel),
            Direction::Gather => (self.kernel, self.copies),
        }
    }
}

/// What is queued on `to` from now on waits for what is on `from`; nothing to do for one stream.
///
/// # Safety
/// The ticket's pool is alive, and so are the streams; the context is current.
pub(super) unsafe fn order(event: &Ticket, from: CUstream, to: CUstream) -> Result<(), KernelError> {
    if from == to {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { event.record(from) }?;
    // SAFETY: as above.
    Ok(unsafe { event.order_before(to) }?)
}

/// The mover's own stream, for its kernels: they go before those of every other stream, whatever the caller's is.
#[derive(Debug)]
pub(super) struct KernelStream {
    stream: OwnStream,
    context: Context,
}

impl KernelStream {
    pub(super) fn new(context: &Context) -> Result<Self, DriverError> {
        Ok(KernelStream { stream: OwnStream::urgent(context)?, context: context.clone() })
    }

    /// The lanes of a transfer on the caller's stream.
    pub(super) fn lanes(&self, stream: CUstream) -> Lanes {
        Lanes { copies: stream, kernel: self.stream.get() }
    }

    /// Waits for everything queued. The context is current.
    pub(super) fn drain(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is this value's.
        unsafe { synchronize(self.stream.get()) }
    }
}

impl Drop for KernelStream {
    fn drop(&mut self) {
        self.context.give_back("the ring of the staged strategy", || self.drain());
    }
}
