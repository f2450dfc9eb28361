//! Copy commands as driver calls on one stream.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUdevice_attribute, CUdeviceptr, CUmemorytype, CUresult, CUstream};
use maru_driver::{DriverError, check, symbol};
use maru_layout::Direction;

use super::plan::Command;
use super::plan::cost::Limits;

/// Most entries of one batched call: more than about 50 000 hang or crash some drivers.
const MOST_ENTRIES: usize = 32 << 10;

/// Entries from which a batch is handed over at a layer's end: enough to pay for the call, few enough that
/// the copy engine does not wait for the rest of the job.
const ENOUGH_ENTRIES: usize = 128;

/// INVALID_VALUE: what the driver says of a copy that it does not do, before it queues anything.
const REFUSED: u32 = 1;

/// CUDA 12.8: with a place for the index of the entry that failed.
type BatchOf12 = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> CUresult;

/// CUDA 13.0.
type BatchOf13 = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    CUstream,
) -> CUresult;

/// The batched copy of this driver, whichever generation it has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Batch {
    Of12(BatchOf12),
    Of13(BatchOf13),
}

impl Batch {
    /// Looks for both, the newer first. Neither is an error: drivers before 12.8 have none.
    pub(super) fn look_up() -> Option<Batch> {
        // SAFETY: the type is that of the function in the headers of CUDA 13.
        if let Some(found) = unsafe { symbol::<BatchOf13>("cuMemcpyBatchAsync_v2") } {
            return Some(Batch::Of13(found));
        }
        // SAFETY: the type is that of the function in the headers of CUDA 12.8.
        unsafe { symbol::<BatchOf12>("cuMemcpyBatchAsync") }.map(Batch::Of12)
    }

    /// Which one it is, for the log.
    pub(super) fn name(self) -> &'static str {
        match self {
            Batch::Of12(_) => "cuMemcpyBatchAsync",
            Batch::Of13(_) => "cuMemcpyBatchAsync_v2",
        }
    }
}

/// What the driver of a context can do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Abilities {
    pub(super) batch: Option<Batch>,
    pub(super) max_pitch: u64,
    /// Rows of a copy may lie in several allocations.
    pub(super) rows_anywhere: bool,
}

impl Abilities {
    pub(super) fn of(context: &Arc<CudaContext>, batched: bool) -> Result<Self, DriverError> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH;
        let mut pitch = 0;
        // SAFETY: the out pointer is valid; the device is the context's.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut pitch, attribute, context.cu_device()) };
        check("cuDeviceGetAttribute", result)?;
        // A driver that does not say is taken at the value that all have had so far.
        let max_pitch = u64::try_from(pitch).ok().filter(|p| *p > 0).unwrap_or(i32::MAX as u64);
        let batch = batched.then(Batch::look_up).flatten();
        Ok(Abilities { batch, max_pitch, rows_anywhere: true })
    }
}

/// What the slab side of a job is to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Pinned or registered host memory, by its device address.
    Registered,
    /// Device memory.
    Device,
    /// Host memory the driver knows nothing of, by its host address.
    Pageable,
}

/// Puts commands on a stream, one-dimensional ones in batches where that is faster.
pub(super) struct Queue {
    batch: Option<Batch>,
    limits: Limits,
    stream: CUstream,
    direction: Direction,
    side: Side,
    order: sys::CUmemcpySrcAccessOrder,
    to: Vec<CUdeviceptr>,
    from: Vec<CUdeviceptr>,
    bytes: Vec<usize>,
    refused_rows: bool,
}

impl Queue {
    /// A queue on `stream`. `batched`: batches are allowed there. `stable`: the slab is not written from now on
    /// until the copies are over.
    pub(super) fn new(
        abilities: Abilities,
        stream: CUstream,
        (direction, side): (Direction, Side),
        batched: bool,
        stable: bool,
    ) -> Self {
        let batch = abilities.batch.filter(|_| batched && side != Side::Pageable);
        let order = match direction {
            Direction::Scatter if stable => sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
            // Live pages, and slabs of which nothing is known: what is queued before may still write them.
            _ => sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        };
        Queue {
            batch,
            limits: Limits {
                max_pitch: abilities.max_pitch,
                batch: batch.is_some(),
                layers_together: abilities.rows_anywhere,
            },
            stream,
            direction,
            side,
            order,
            to: Vec::new(),
            from: Vec::new(),
            bytes: Vec::new(),
            refused_rows: false,
        }
    }

    /// What to plan for.
    pub(super) fn limits(&self) -> Limits {
        self.limits
    }

    /// Takes a command. It may stay here until [`Queue::flush`].
    ///
    /// # Safety
    /// Both sides of the command are memory the device can reach, or pageable host memory if the queue was made
    /// for that, until the copy is over, and nobody interferes but ordered by the stream. The context is
    /// current and the stream one of its own.
    pub(super) unsafe fn push(&mut self, c: Command) -> Result<(), DriverError> {
        if c.rows == 1 {
            // SAFETY: as for this function.
            return unsafe { self.push_row(c.paged, c.slab, c.width) };
        }
        // SAFETY: as for this function.
        match unsafe { self.rows(&c) } {
            // The driver may refuse rows in several allocations, and, inside device memory, pitches that it did
            // not choose. Then nothing was queued, and the rows go one by one.
            Err(error) if error.code == REFUSED => {
                self.refused_rows = true;
                (0..c.rows).try_for_each(|row| {
                    let (paged, slab) = (c.paged + row * c.paged_pitch, c.slab + row * c.slab_pitch);
                    // SAFETY: a row of the command.
                    unsafe { self.push_row(paged, slab, c.width) }
                })
            }
            result => result,
        }
    }

    /// Takes a one-dimensional copy.
    ///
    /// # Safety
    /// As [`Queue::push`].
    unsafe fn push_row(&mut self, paged: u64, slab: u64, width: u64) -> Result<(), DriverError> {
        if !self.limits.batches(width) {
            // SAFETY: as for this function.
            return unsafe { self.run(paged, slab, size(width)) };
        }
        let (to, from) = self.ends(paged, slab);
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(size(width));
        match self.to.len() < MOST_ENTRIES {
            true => Ok(()),
            // SAFETY: as for this function, for every command taken so far.
            false => unsafe { self.flush() },
        }
    }

    /// Whether the driver refused a two-dimensional copy.
    pub(super) fn refused_rows(&self) -> bool {
        self.refused_rows
    }

    /// Whether what is kept back is worth a call by now.
    pub(super) fn is_worth_flushing(&self) -> bool {
        self.to.len() >= ENOUGH_ENTRIES
    }

    /// Whether nothing is kept back.
    pub(super) fn is_flushed(&self) -> bool {
        self.to.is_empty()
    }

    /// Hands over what was kept back.
    ///
    /// # Safety
    /// As [`Queue::push`], for the commands kept back.
    pub(super) unsafe fn flush(&mut self) -> Result<(), DriverError> {
        let result = match (self.batch, self.to.len()) {
            (_, 0) => return Ok(()),
            (Some(batch), 2..) => self.call(batch),
            _ => (0..self.to.len()).try_for_each(|i| {
                // SAFETY: as for this function.
                let result =
                    unsafe { sys::cuMemcpyAsync(self.to[i], self.from[i], self.bytes[i], self.stream) };
                check("cuMemcpyAsync", result)
            }),
        };
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
        result
    }

    fn call(&mut self, batch: Batch) -> Result<(), DriverError> {
        let nowhere =
            sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: self.order,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let (mut first, mut failed) = (0usize, usize::MAX);
        let (to, from, bytes) = (self.to.as_mut_ptr(), self.from.as_mut_ptr(), self.bytes.as_mut_ptr());
        let (count, attributes, first) = (self.to.len(), &raw mut attributes, &raw mut first);
        let result = match batch {
            // SAFETY: three arrays of `count`; one set of attributes, from entry 0 on; all outlive the call,
            // which copies them. The memory is the promise made to `push`.
            Batch::Of13(call) => unsafe { call(to, from, bytes, count, attributes, first, 1, self.stream) },
            // SAFETY: as above.
            Batch::Of12(call) => unsafe {
                call(to, from, bytes, count, attributes, first, 1, &raw mut failed, self.stream)
            },
        };
        if result != CUresult::CUDA_SUCCESS {
            tracing::debug!(count, entry = failed, "a batch of copies was refused");
        }
        check("cuMemcpyBatchAsync", result)
    }

    /// A one-dimensional copy.
    ///
    /// # Safety
    /// As [`Queue::push`].
    unsafe fn run(&self, paged: u64, slab: u64, bytes: usize) -> Result<(), DriverError> {
        let (to, from) = self.ends(paged, slab);
        match (self.side, self.direction) {
            (Side::Pageable, Direction::Gather) => {
                let to = std::ptr::with_exposed_provenance_mut(size(to));
                // SAFETY: the caller's promise.
                check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, bytes, self.stream) })
            }
            (Side::Pageable, Direction::Scatter) => {
                let from = std::ptr::with_exposed_provenance(size(from));
                // SAFETY: the caller's promise.
                check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes, self.stream) })
            }
            // SAFETY: the caller's promise.
            _ => check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(to, from, bytes, self.stream) }),
        }
    }

    /// A two-dimensional copy.
    ///
    /// # Safety
    /// As [`Queue::push`].
    unsafe fn rows(&self, c: &Command) -> Result<(), DriverError> {
        let (to, from) = self.ends(c.paged, c.slab);
        let (to_pitch, from_pitch) = self.ends(c.paged_pitch, c.slab_pitch);
        let slab_type = match self.side {
            Side::Pageable => CUmemorytype::CU_MEMORYTYPE_HOST,
            _ => CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        };
        let paged_type = CUmemorytype::CU_MEMORYTYPE_UNIFIED;
        let (to_type, from_type) = match self.direction {
            Direction::Gather => (slab_type, paged_type),
            Direction::Scatter => (paged_type, slab_type),
        };
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: from_type,
            srcHost: std::ptr::with_exposed_provenance(size(from)),
            srcDevice: from,
            srcArray: std::ptr::null_mut(),
            srcPitch: size(from_pitch),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: to_type,
            dstHost: std::ptr::with_exposed_provenance_mut(size(to)),
            dstDevice: to,
            dstArray: std::ptr::null_mut(),
            dstPitch: size(to_pitch),
            WidthInBytes: size(c.width),
            Height: size(c.rows),
        };
        // SAFETY: the description outlives the call; the memory is the caller's promise.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.stream) })
    }

    /// (destination, source) of a (cache, slab) pair.
    fn ends(&self, paged: u64, slab: u64) -> (u64, u64) {
        match self.direction {
            Direction::Gather => (slab, paged),
            Direction::Scatter => (paged, slab),
        }
    }
}

/// A size of a job as the machine's; the crate does not compile where they differ.
pub(super) fn size(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
