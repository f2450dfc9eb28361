//! Time by events of the device.

use cudarc::driver::sys;

use crate::gpu::{Stream, cu};

/// Two events.
pub(crate) struct Clock([sys::CUevent; 2]);

impl Clock {
    pub(crate) fn new() -> Self {
        Clock([0, 1].map(|_| {
            let mut event = std::ptr::null_mut();
            cu!(cuEventCreate(&mut event, 0));
            event
        }))
    }

    /// Seconds on the stream from before `work` is queued until it is over; what the host takes to queue it is
    /// part of it.
    pub(crate) fn time(&self, stream: &Stream, work: impl FnOnce()) -> f64 {
        stream.wait();
        cu!(cuEventRecord(self.0[0], stream.0));
        work();
        cu!(cuEventRecord(self.0[1], stream.0));
        stream.wait();
        let mut milliseconds = 0.0;
        cu!(cuEventElapsedTime_v2(&mut milliseconds, self.0[0], self.0[1]));
        f64::from(milliseconds) / 1e3
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        for event in self.0 {
            // SAFETY: made by `new`, destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(event) };
        }
    }
}

/// Sorts.
pub(crate) fn median(times: &mut [f64]) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}
