//! Memory of the driver: pinned on the host, and on the device.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use crate::stream::{OwnStream, synchronize};
use crate::{Context, DriverError, check};

/// Host memory that copies are asynchronous with and every device of the process can address.
#[derive(Debug)]
pub struct PinnedBuffer {
    host: NonNull<u8>,
    device: u64,
    len: usize,
    context: Context,
}

// SAFETY: an address and its owner; the users of the memory see to exclusive access.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above; nothing is read or written through a shared reference here.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// `len` bytes (at least 1), not initialised.
    ///
    /// # Errors
    /// [`DriverError`], out of memory for instance.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self, DriverError> {
        let context = Context::new(context.clone());
        let current = context.enter()?;
        let mut host = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the out pointer is valid; the context is current.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut host, len.max(1), flags) })?;
        let Some(start) = NonNull::new(host.cast::<u8>()) else {
            return Err(DriverError::new("cuMemHostAlloc", sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        };
        drop(current);
        // From here on `Drop` frees it.
        let mut buffer = PinnedBuffer { host: start, device: 0, len, context };
        let mut device = 0;
        let current = buffer.context.enter()?;
        // SAFETY: the allocation was made mappable; the out pointer is valid.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut device, host, 0) };
        drop(current);
        check("cuMemHostGetDevicePointer", result)?;
        buffer.device = device;
        Ok(buffer)
    }

    /// As the host addresses it.
    pub fn host(&self) -> *mut u8 {
        self.host.as_ptr()
    }

    /// As devices address it.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.context.give_back("pinned memory", || {
            // SAFETY: allocated by `new` and freed once. The driver waits for work that uses it.
            check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(self.host.as_ptr().cast()) })
        });
    }
}

/// Device memory.
#[derive(Debug)]
pub struct DeviceBuffer {
    addr: u64,
    len: usize,
    context: Context,
}

impl DeviceBuffer {
    /// `len` bytes (at least 1), not initialised.
    ///
    /// # Errors
    /// [`DriverError`], out of memory for instance.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self, DriverError> {
        let context = Context::new(context.clone());
        let current = context.enter()?;
        let mut addr = 0;
        // SAFETY: the out pointer is valid; the context is current.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut addr, len.max(1)) })?;
        drop(current);
        Ok(DeviceBuffer { addr, len, context })
    }

    /// `bytes`, there when this returns. For set-up: it waits.
    ///
    /// # Errors
    /// As [`DeviceBuffer::new`].
    pub fn holding(context: &Arc<CudaContext>, bytes: &[u8]) -> Result<Self, DriverError> {
        let buffer = Self::new(context, bytes.len())?;
        // A stream of its own: a plain synchronous copy of pageable memory may return before the data has
        // arrived, and on the default stream it would wait for everybody's work.
        let stream = OwnStream::new(&buffer.context)?;
        let current = buffer.context.enter()?;
        // SAFETY: the buffer has that length; `bytes` outlives the copy, which is waited for below.
        let copied = unsafe {
            sys::cuMemcpyHtoDAsync_v2(buffer.addr, bytes.as_ptr().cast(), bytes.len(), stream.get())
        };
        let copied = check("cuMemcpyHtoDAsync", copied);
        // SAFETY: the stream is alive.
        let waited = unsafe { synchronize(stream.get()) };
        copied.and(waited)?;
        drop(current);
        Ok(buffer)
    }

    /// Its address.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.context.give_back("device memory", || {
            // SAFETY: allocated by `new` and freed once. The driver waits for work that uses it.
            check("cuMemFree", unsafe { sys::cuMemFree_v2(self.addr) })
        });
    }
}
