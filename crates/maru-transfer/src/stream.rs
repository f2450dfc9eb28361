//! Where a transfer is ordered.

/// The caller's place in time: a CUDA stream it owns, or nothing for host memory, where a transfer is done
/// when `submit` returns.
///
/// The library never replaces the caller's stream; what it moves to streams of its own joins back to this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(Option<usize>);

impl Stream {
    /// No stream: host transfers, and the device's default stream for device transfers.
    pub const fn none() -> Self {
        Stream(None)
    }

    /// A CUDA stream (`CUstream` / `cudaStream_t`) of the engine's device, as a raw handle.
    ///
    /// # Safety
    /// The handle is a live stream of the engine's device until every transfer submitted with it is done.
    pub const unsafe fn cuda(handle: usize) -> Self {
        Stream(Some(handle))
    }

    /// The raw handle; 0 is the default stream.
    pub fn handle(self) -> usize {
        self.0.unwrap_or(0)
    }
}

/// A CUDA event that a layer of a transfer waits for, as the caller recorded it on a stream of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(usize);

impl Event {
    /// A CUDA event (`CUevent` / `cudaEvent_t`) of the engine's device, as a raw handle.
    ///
    /// # Safety
    /// The handle is a live event of the engine's device when it is submitted, recorded before that: a wait for
    /// an event that is recorded later waits for nothing. It may be destroyed or recorded anew afterwards.
    pub const unsafe fn cuda(handle: usize) -> Self {
        Event(handle)
    }

    /// The raw handle.
    pub fn handle(self) -> usize {
        self.0
    }
}
