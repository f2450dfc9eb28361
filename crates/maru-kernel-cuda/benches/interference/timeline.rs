//! Points in time by events of any stream, all counted from one origin.

use cudarc::driver::sys;

use crate::gpu::{Stream, cu, ok};

/// An event that may be handed to another thread.
pub(crate) struct Event(sys::CUevent);

// SAFETY: a handle that any thread may use with the context current.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new() -> Self {
        let mut event = std::ptr::null_mut();
        cu!(cuEventCreate(&mut event, 0));
        Event(event)
    }

    /// After everything queued on the stream by now.
    pub(crate) fn record(&self, stream: &Stream) {
        cu!(cuEventRecord(self.0, stream.0));
    }

    pub(crate) fn wait(&self) {
        cu!(cuEventSynchronize(self.0));
    }

    pub(crate) fn is_over(&self) -> bool {
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => false,
            result => {
                ok("cuEventQuery", result);
                true
            }
        }
    }

    /// Milliseconds since another event; both are over.
    pub(crate) fn since(&self, origin: &Event) -> f64 {
        let mut milliseconds = 0.0f32;
        cu!(cuEventElapsedTime_v2(&mut milliseconds, origin.0, self.0));
        f64::from(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// A stream that goes before others of the device where both have blocks to run.
pub(crate) fn urgent_stream() -> Stream {
    let (mut least, mut greatest) = (0, 0);
    cu!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest));
    let mut stream = std::ptr::null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    cu!(cuStreamCreateWithPriority(&mut stream, flags, greatest));
    Stream(stream)
}
