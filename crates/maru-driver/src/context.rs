//! Contexts that leave the caller's current one alone.

use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, result, sys};

use crate::{DriverError, check};

/// Makes a context current for a scope and restores what was current before, be it nothing.
///
/// It also says that the driver calls of the scope have nothing to do with a capture that another thread may
/// have going on: by default asking an event or allocating memory would break it (PyTorch captures that way).
#[derive(Debug)]
pub struct Current<'a> {
    pushed: bool,
    capture_mode: sys::CUstreamCaptureMode,
    /// Borrows the context, which must live until it is popped; stays on its thread.
    _scope: PhantomData<(&'a CudaContext, *const ())>,
}

impl<'a> Current<'a> {
    /// Makes `context` current on this thread until the value is dropped.
    ///
    /// # Errors
    /// [`DriverError`], for a context that was destroyed for instance.
    pub fn enter(context: &'a CudaContext) -> Result<Self, DriverError> {
        let before = current()?;
        let mut capture_mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid for the call; `Drop` exchanges back.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut capture_mode) };
        check("cuThreadExchangeStreamCaptureMode", exchanged)?;
        let mut entered = Current { pushed: false, capture_mode, _scope: PhantomData };
        if before != context.cu_ctx() {
            // SAFETY: the context is alive while it is borrowed; `Drop` pops it again.
            check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(context.cu_ctx()) })?;
            entered.pushed = true;
        }
        Ok(entered)
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        // SAFETY: the pointer is valid for the call; gives the thread back the mode it had.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.capture_mode) };
        if let Err(error) = check("cuThreadExchangeStreamCaptureMode", exchanged) {
            tracing::error!(%error, "the caller's capture mode was not restored");
        }
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops what `enter` pushed on this thread; the type is not `Send`.
            let result = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
            if let Err(error) = check("cuCtxPopCurrent", result) {
                tracing::error!(%error, "the caller's CUDA context was not restored");
            }
        }
    }
}

/// Contexts whose loss was logged while something of theirs was given back, by handle.
static LOST: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// A shared context whose release, too, leaves the caller's current one alone: cudarc makes a context current
/// when its last handle goes.
#[derive(Clone, Debug)]
pub struct Context(ManuallyDrop<Arc<CudaContext>>);

impl Context {
    /// Wraps a handle.
    pub fn new(context: Arc<CudaContext>) -> Self {
        // A later context may have the handle of a lost one; its loss is news again.
        lost().remove(&context.cu_ctx().addr());
        Context(ManuallyDrop::new(context))
    }

    /// The primary context of a device, as PyTorch and the CUDA runtime use it. The library must be there, see
    /// [`crate::require`].
    ///
    /// # Errors
    /// [`DriverError`]: no such device, no memory for a context.
    pub fn open(ordinal: usize) -> Result<Self, DriverError> {
        let cuda = |op| move |error| DriverError::from_cudarc(op, error);
        result::init().map_err(cuda("cuInit"))?;
        let device = i32::try_from(ordinal).unwrap_or(i32::MAX);
        result::device::get(device).map_err(cuda("cuDeviceGet"))?;
        let before = current()?;
        let context = CudaContext::new(ordinal).map_err(cuda("cuDevicePrimaryCtxRetain"));
        let context = context.map(Context::new);
        // Making it left it current.
        // SAFETY: the context was current, so it was alive a moment ago; null clears.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(before) })?;
        let context = context?;
        // SAFETY: no slice of cudarc's was made in this context; its event tracking only serves those, and
        // would make the context synchronise when a stream is created.
        unsafe { context.get().disable_event_tracking() };
        Ok(context)
    }

    /// The handle.
    pub fn get(&self) -> &Arc<CudaContext> {
        &self.0
    }

    /// Makes it current for a scope.
    ///
    /// # Errors
    /// As [`Current::enter`].
    pub fn enter(&self) -> Result<Current<'_>, DriverError> {
        Current::enter(self.get())
    }

    /// Gives something back in a destructor: makes the calls with the context current and logs an error, which
    /// then means that `what` leaks. In a lost context all of them fail; that is logged once for all.
    pub fn give_back(&self, what: &str, calls: impl FnOnce() -> Result<(), DriverError>) {
        let Err(error) = self.enter().and_then(|_current| calls()) else { return };
        if !error.is_context_lost() {
            tracing::error!(%error, "{what} cannot be given back and leaks");
        } else if lost().insert(self.get().cu_ctx().addr()) {
            tracing::error!(%error, device = self.get().ordinal(), "{what} is lost with its context, as all in it is");
        } else {
            tracing::debug!(%error, "{what} is lost with its context");
        }
    }
}

fn lost() -> impl std::ops::DerefMut<Target = BTreeSet<usize>> {
    LOST.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Context {
    fn drop(&mut self) {
        let before = current();
        // SAFETY: dropped here only, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.0) };
        let Ok(before) = before else { return };
        if current().is_ok_and(|now| now == before) {
            return;
        }
        // SAFETY: the context was this thread's current one a moment ago, or null for none.
        if let Err(error) = check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(before) }) {
            tracing::debug!(%error, "the caller's CUDA context was not restored");
        }
    }
}

/// The thread's current context; null for none.
fn current() -> Result<sys::CUcontext, DriverError> {
    let mut current = std::ptr::null_mut();
    // SAFETY: the out pointer is valid; the library is there, as a context exists.
    check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
    Ok(current)
}
