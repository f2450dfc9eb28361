//! The plane addresses of a cache in device memory.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use maru_driver::DeviceBuffer;
use maru_layout::CopyPlan;

use crate::KernelError;

/// The plane addresses of one cache (`[kv][layer]`) where the kernel reads them. Made once, when the cache is
/// registered; cheap to clone.
#[derive(Clone, Debug)]
pub struct PlaneTable {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    bases: Arc<[u64]>,
    buffer: DeviceBuffer,
}

impl PlaneTable {
    pub(crate) fn new(context: &Arc<CudaContext>, plan: &CopyPlan) -> Result<Self, KernelError> {
        let bases = plan.bases().clone();
        let bytes: Vec<u8> = bases.iter().flat_map(|base| base.to_ne_bytes()).collect();
        let buffer = DeviceBuffer::holding(context, &bytes)?;
        Ok(PlaneTable { inner: Arc::new(Inner { bases, buffer }) })
    }

    /// Device address of the table.
    pub(crate) fn addr(&self) -> u64 {
        self.inner.buffer.addr()
    }

    /// Whether this is the table of a cache with these planes.
    pub(crate) fn is_of(&self, bases: &Arc<[u64]>) -> bool {
        Arc::ptr_eq(&self.inner.bases, bases) || self.inner.bases == *bases
    }
}
