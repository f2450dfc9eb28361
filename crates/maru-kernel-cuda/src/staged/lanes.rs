//! The streams that staged work goes through.

use cudarc::driver::sys::CUstream;
use maru_driver::stream::{OwnStream, synchronize};
use maru_driver::{Context, DriverError, Ticket};
use maru_layout::Direction;

use crate::KernelError;

/// Where each kind of work of one transfer goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lanes {
    copy_in: CUstream,
    copy_out: CUstream,
    pub(super) kernel: CUstream,
}

impl Lanes {
    /// Everything on one stream.
    pub(super) fn all(stream: CUstream) -> Self {
        Lanes { copy_in: stream, copy_out: stream, kernel: stream }
    }

    /// The streams of the first and the last work of a direction.
    pub(super) fn ends(self, direction: Direction) -> (CUstream, CUstream) {
        match direction {
            Direction::Scatter => (self.copy_in, self.kernel),
            Direction::Gather => (self.kernel, self.copy_out),
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

/// The streams of a mover: into the ring, out of it, and the kernel's.
#[derive(Debug)]
pub(super) struct Streams {
    copy_in: OwnStream,
    copy_out: OwnStream,
    kernel: OwnStream,
    context: Context,
}

impl Streams {
    pub(super) fn new(context: &Context) -> Result<Self, DriverError> {
        Ok(Streams {
            copy_in: OwnStream::urgent(context)?,
            copy_out: OwnStream::urgent(context)?,
            kernel: OwnStream::urgent(context)?,
            context: context.clone(),
        })
    }

    pub(super) fn lanes(&self) -> Lanes {
        Lanes { copy_in: self.copy_in.get(), copy_out: self.copy_out.get(), kernel: self.kernel.get() }
    }

    /// Waits for everything queued. The context is current.
    pub(super) fn drain(&self) -> Result<(), DriverError> {
        // An error of one wait says nothing of the others.
        // SAFETY: the streams are this value's.
        let waits = [&self.copy_in, &self.kernel, &self.copy_out].map(|s| unsafe { synchronize(s.get()) });
        waits.into_iter().collect()
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.context.give_back("the ring of the staged strategy", || self.drain());
    }
}
