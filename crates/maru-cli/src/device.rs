//! Memory of a CUDA device that a paged cache lives in.

#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};
use maru::cxl::Slab;

use crate::error::CliError;

/// An allocation of one device. Every call leaves the device's primary context current on this thread, which is
/// this program's own.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    context: Arc<CudaContext>,
    addr: u64,
    len: u64,
}

impl DeviceMemory {
    /// Allocates `len` bytes (at least 1) on a device.
    pub(crate) fn new(device: u32, len: u64) -> Result<Self, CliError> {
        let ordinal = usize::try_from(device).unwrap_or(usize::MAX);
        let context = maru::kernel::open_context(ordinal).map_err(|e| CliError::Transfer(e.into()))?;
        let what = || format!("allocating {len} bytes on cuda:{device}");
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        context.bind_to_thread().map_err(|e| driver(what(), e))?;
        // SAFETY: a context is current; the driver refuses sizes that it cannot serve.
        let addr = unsafe { result::malloc_sync(bytes) }.map_err(|e| driver(what(), e))?;
        Ok(DeviceMemory { context, addr, len })
    }

    /// Address of the first byte.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    /// Copies bytes in.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CliError> {
        let addr = self.checked(offset, bytes.len())?;
        // SAFETY: the range lies inside this allocation, which is alive; the copy is done when the call returns.
        unsafe { result::memcpy_htod_sync(addr, bytes) }.map_err(|e| driver("writing device memory", e))
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), CliError> {
        let addr = self.checked(offset, bytes.len())?;
        // SAFETY: the range lies inside this allocation, which is alive; the copy is done when the call returns.
        unsafe { result::memcpy_dtoh_sync(bytes, addr) }.map_err(|e| driver("reading device memory", e))
    }

    /// Copies the whole slab to (or from) the beginning of this memory with one asynchronous copy on the default
    /// stream, and waits for it.
    pub(crate) fn flat(&mut self, to_device: bool, slab: &Slab) -> Result<(), CliError> {
        let len = usize::try_from(slab.len()).unwrap_or(usize::MAX);
        let addr = self.checked(0, len)?;
        let (host, stream) = (slab.addr().as_ptr(), std::ptr::null_mut());
        let code = if to_device {
            // SAFETY: both ranges hold `len` bytes and outlive the copy, which is waited for below.
            unsafe { sys::cuMemcpyHtoDAsync_v2(addr, host.cast_const().cast(), len, stream) }
        } else {
            // SAFETY: as above.
            unsafe { sys::cuMemcpyDtoHAsync_v2(host.cast(), addr, len, stream) }
        };
        let queued = code.result().map_err(|e| driver("queueing a copy", e));
        // SAFETY: the default stream of the context that `checked` made current.
        let done = unsafe { sys::cuStreamSynchronize(stream) }.result();
        queued?;
        done.map_err(|e| driver("waiting for a copy", e))
    }

    /// The address of a range that lies inside, with the context current.
    fn checked(&self, offset: u64, len: usize) -> Result<u64, CliError> {
        let end = u64::try_from(len).ok().and_then(|len| offset.checked_add(len));
        if end.is_none_or(|end| end > self.len) {
            return Err(CliError::invalid(format!(
                "{len} bytes at offset {offset} are outside the cache's {}",
                self.len
            )));
        }
        self.context.bind_to_thread().map_err(|e| driver("entering the device's context", e))?;
        // Inside the allocation, so this cannot wrap.
        Ok(self.addr + offset)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let freed = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: allocated by `new` in this context and freed only here; transfers were waited for.
            unsafe { result::free_sync(self.addr) }
        });
        if let Err(error) = freed {
            tracing::error!(%error, "could not free device memory");
        }
    }
}

fn driver(what: impl Into<String>, error: DriverError) -> CliError {
    let text =
        error.error_string().map_or_else(|_| error.to_string(), |text| text.to_string_lossy().into_owned());
    CliError::Cuda { what: what.into(), text }
}
