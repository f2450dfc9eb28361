//! Copy commands as driver calls on one stream.
#![allow(unsafe_code)]

use cudarc::driver::sys::{self, CUdeviceptr, CUmemorytype, CUresult, CUstream};
use maru_driver::{DriverError, check};
use maru_layout::Direction;

use super::abilities::{Abilities, Batch, Refused, Slices};
use super::plan::Command;
use super::plan::cost::Limits;

/// Most entries of one batched call: more than about 50 000 hang or crash some drivers.
const MOST_ENTRIES: usize = 32 << 10;

/// Entries from which a batch is handed over at a layer's end: enough to pay for the call, few enough that
/// the copy engine does not wait for the rest of the job.
const ENOUGH_ENTRIES: usize = 128;

/// Bytes from which it is: what they take hides the call behind them.
const ENOUGH_BYTES: u64 = 4 << 20;

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
    slices: Option<Slices>,
    limits: Limits,
    stream: CUstream,
    direction: Direction,
    side: Side,
    order: sys::CUmemcpySrcAccessOrder,
    to: Vec<CUdeviceptr>,
    from: Vec<CUdeviceptr>,
    bytes: Vec<usize>,
    /// Sum of `bytes`.
    kept: u64,
    refused: Refused,
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
        // Memory the driver knows nothing of is left to the simplest copies.
        let slices = abilities.slices.filter(|_| side != Side::Pageable);
        Queue {
            batch,
            slices,
            limits: Limits {
                max_pitch: abilities.max_pitch,
                batch: batch.is_some(),
                slices: slices.is_some(),
                layers_together: abilities.rows_anywhere,
                inside: side == Side::Device,
            },
            stream,
            direction,
            side,
            order,
            to: Vec::new(),
            from: Vec::new(),
            bytes: Vec::new(),
            kept: 0,
            refused: Refused::default(),
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
        if c.slices == 1 {
            // SAFETY: as for this function.
            return unsafe { self.push_rows(c) };
        }
        if let Some(call) = self.slices {
            // SAFETY: as for this function.
            match unsafe { self.slices(call, &c) } {
                // The driver may refuse slices in several allocations, for instance. Then nothing was queued,
                // and they go one by one, as do all that follow.
                Err(error) if error.is_refusal() => {
                    self.slices = None;
                    self.refused.slices = true;
                }
                result => return result,
            }
        }
        // SAFETY: slices of the command.
        c.each_slice().try_for_each(|slice| unsafe { self.push_rows(slice) })
    }

    /// Takes a command of one slice.
    ///
    /// # Safety
    /// As [`Queue::push`].
    unsafe fn push_rows(&mut self, c: Command) -> Result<(), DriverError> {
        if c.rows == 1 {
            // SAFETY: as for this function.
            return unsafe { self.push_row(c.paged, c.slab, c.width) };
        }
        // SAFETY: as for this function.
        match unsafe { self.rows(&c) } {
            // The driver may refuse rows in several allocations, and, inside device memory, pitches that it did
            // not choose. Then nothing was queued, and the rows go one by one.
            Err(error) if error.is_refusal() => {
                self.refused.rows = true;
                // SAFETY: rows of the command.
                c.each_row().try_for_each(|row| unsafe { self.push_row(row.paged, row.slab, row.width) })
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
        self.kept = self.kept.saturating_add(width);
        match self.to.len() < MOST_ENTRIES {
            true => Ok(()),
            // SAFETY: as for this function, for every command taken so far.
            false => unsafe { self.flush() },
        }
    }

    /// What the driver refused.
    pub(super) fn refused(&self) -> Refused {
        self.refused
    }

    /// What the slab is.
    pub(super) fn side(&self) -> Side {
        self.side
    }

    /// Whether what is kept back is worth a call by now.
    pub(super) fn is_worth_flushing(&self) -> bool {
        self.to.len() >= ENOUGH_ENTRIES || self.kept >= ENOUGH_BYTES
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
        self.kept = 0;
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
        let (to_type, from_type) = self.kinds();
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

    /// A three-dimensional copy.
    ///
    /// # Safety
    /// As [`Queue::push`].
    unsafe fn slices(&self, call: Slices, c: &Command) -> Result<(), DriverError> {
        let (to, from) = self.ends(c.paged, c.slab);
        let (to_pitch, from_pitch) = self.ends(c.paged_pitch, c.slab_pitch);
        let (to_height, from_height) = self.ends(c.paged_height, c.slab_height);
        let (to_type, from_type) = self.kinds();
        let copy = sys::CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: from_type,
            srcHost: std::ptr::null(),
            srcDevice: from,
            srcArray: std::ptr::null_mut(),
            reserved0: std::ptr::null_mut(),
            srcPitch: size(from_pitch),
            srcHeight: size(from_height),
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: to_type,
            dstHost: std::ptr::null_mut(),
            dstDevice: to,
            dstArray: std::ptr::null_mut(),
            reserved1: std::ptr::null_mut(),
            dstPitch: size(to_pitch),
            dstHeight: size(to_height),
            WidthInBytes: size(c.width),
            Height: size(c.rows),
            Depth: size(c.slices),
        };
        // SAFETY: the description outlives the call; the memory is the caller's promise. No side is pageable,
        // for which there are no such calls, so the addresses are the device's.
        check("cuMemcpy3DAsync", unsafe { call(&raw const copy, self.stream) })
    }

    /// Kinds of memory: (destination, source).
    fn kinds(&self) -> (CUmemorytype, CUmemorytype) {
        let slab_type = match self.side {
            Side::Pageable => CUmemorytype::CU_MEMORYTYPE_HOST,
            _ => CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        };
        let paged_type = CUmemorytype::CU_MEMORYTYPE_UNIFIED;
        match self.direction {
            Direction::Gather => (slab_type, paged_type),
            Direction::Scatter => (paged_type, slab_type),
        }
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
