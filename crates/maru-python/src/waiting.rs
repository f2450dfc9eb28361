//! Waiting for a transfer without holding it, so that other threads can ask it meanwhile.

use std::sync::{Arc, Mutex};

use cudarc::driver::CudaContext;
use maru_driver::Context;
use maru_driver::stream::{OwnStream, synchronize};

use crate::errors::Fault;
use crate::process::{lock, process};

/// Streams that wait in a thread's place, used again: as many as threads have ever waited at once.
#[derive(Default)]
pub(crate) struct Waiters(Mutex<Vec<(u32, OwnStream)>>);

/// A stream on which nothing but a wait is queued.
pub(crate) struct Waiter {
    device: u32,
    context: Arc<CudaContext>,
    /// Always there but in `drop`.
    stream: Option<OwnStream>,
}

impl Waiter {
    pub(crate) fn on(device: u32) -> Result<Self, Fault> {
        let context = process().context(device)?;
        let mut idle = lock(&process().waiters.0);
        let at = idle.iter().position(|(n, _)| *n == device);
        let stream = match at.map(|at| idle.swap_remove(at)) {
            Some((_, stream)) => stream,
            None => OwnStream::new(&Context::new(Arc::clone(&context)))?,
        };
        Ok(Waiter { device, context, stream: Some(stream) })
    }

    /// Its handle, for [`maru_transfer::Stream::cuda`].
    pub(crate) fn handle(&self) -> usize {
        self.stream.as_ref().map_or(0, |stream| stream.get().expose_provenance())
    }

    /// Blocks until what it waits for is over.
    pub(crate) fn wait(self) -> Result<(), Fault> {
        let Some(stream) = &self.stream else { return Ok(()) };
        let _current = maru_driver::Current::enter(&self.context)?;
        // SAFETY: a stream of our own.
        Ok(unsafe { synchronize(stream.get()) }?)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            lock(&process().waiters.0).push((self.device, stream));
        }
    }
}
