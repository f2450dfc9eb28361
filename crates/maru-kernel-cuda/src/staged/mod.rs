//! The staged strategy: the copy engine moves slab bytes between host memory and a ring on the device, the
//! kernel moves them between ring and pages.
//!
//! A kernel that touches host memory directly stops short of the link's rate, because its accesses are small,
//! and a direct store makes every multiprocessor's memory traffic wait behind posted writes. The copy engine
//! reaches the link's rate, and a short burst of the kernel between ring and pages is all the compute sees.
//!
//! Pieces go round the ring in order. Copies are on the caller's stream, kernels on one of this value; each piece's
//! events tie the two:
//!
//! ```text
//! load    caller ─► copy in: fill 0 │ fill 1 │ … ────┐ goes on    store   caller ─┐  copy out: drain 0 │ drain 1 │ … ─► goes on
//!                   kernel:    └► scatter 0 │ scatter 1 ┘                  start └► kernel: gather 0 │ gather 1 │ …
//! ```
//!
//! A buffer is filled again when its last use is over, by an event; the host waits for nothing. What fits one
//! buffer has nothing to overlap with and stays on the caller's stream alone: two calls instead of seven.

mod group;
mod lanes;
mod pipeline;
mod spans;

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUstream};
use maru_driver::stream::{synchronize, wait_for};
use maru_driver::{DeviceBuffer, Ticket, Tickets, check};
use maru_layout::{CopyJob, Direction, Pieces};

use self::group::{Group, groups};
use self::lanes::{KernelStream, Lanes, order};
use self::pipeline::Pipeline;
use crate::launched::Mark;
use crate::session::Session;
use crate::{KernelError, LaunchOptions, LaunchStep, Launched, PagedCopyKernel, PlaneTable};

/// Buffers of the ring. Two are enough to overlap; more let small pieces wait for multiprocessors without
/// stopping the copy engine.
const BUFFERS: u64 = 4;

/// How transfers are staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagedOptions {
    /// Device memory of the ring.
    pub ring_bytes: u64,
    /// Buffers that it is cut into.
    pub buffers: u64,
    /// Thread blocks of a kernel between ring and pages; 0 = one for every other multiprocessor, as fast as one for each
    /// and easier on what computes meanwhile.
    pub blocks: u32,
}

impl StagedOptions {
    /// A ring of this size, cut into buffers as measured best.
    pub fn with_ring_bytes(ring_bytes: u64) -> Self {
        StagedOptions { ring_bytes, buffers: BUFFERS, blocks: 0 }
    }

    /// Another number of buffers.
    #[must_use]
    pub fn with_buffers(mut self, buffers: u64) -> Self {
        self.buffers = buffers;
        self
    }

    /// Another number of thread blocks.
    #[must_use]
    pub fn with_blocks(mut self, blocks: u32) -> Self {
        self.blocks = blocks;
        self
    }
}

/// Moves packed slabs through a ring in device memory. Made once; its memory is all it will ever take.
#[derive(Clone, Debug)]
pub struct StagedMover {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    buffer_bytes: u64,
    options: LaunchOptions,
    /// Goes first: waits for the work that uses the rest.
    kernels: KernelStream,
    state: Mutex<Ring>,
    /// Owns the events of the ring.
    _events: Tickets,
    _memory: DeviceBuffer,
    kernel: PagedCopyKernel,
}

#[derive(Debug)]
struct Ring {
    next: usize,
    buffers: Vec<Buffer>,
    /// Recorded on the caller's stream when a transfer begins.
    start: Ticket,
}

#[derive(Debug)]
struct Buffer {
    addr: u64,
    /// Its bytes are there, for whoever takes them out.
    full: Ticket,
    /// It may be filled again; `None` before its first use.
    free: Option<Arc<Mark>>,
}

impl StagedMover {
    /// Allocates the ring and the streams.
    ///
    /// # Errors
    /// [`KernelError::Driver`], out of memory for instance.
    pub fn new(kernel: &PagedCopyKernel, options: StagedOptions) -> Result<Self, KernelError> {
        let context = &kernel.inner.context;
        let _current = context.enter()?;
        let buffers = options.buffers.clamp(2, 64);
        // Buffers start on borders that suit every access and the copy engine.
        let buffer_bytes = options.ring_bytes / buffers / 4096 * 4096;
        let count = usize::try_from(buffers).unwrap_or(2);
        let bytes = usize::try_from(buffer_bytes * buffers).unwrap_or(usize::MAX);
        let memory = DeviceBuffer::new(context.get(), bytes)?;
        let kernels = KernelStream::new(context)?;
        let events = Tickets::new(context.get(), count + 1);
        let mut ring = Ring { next: 0, buffers: Vec::with_capacity(count), start: events.take_event()? };
        for i in 0..buffers {
            let full = events.take_event()?;
            ring.buffers.push(Buffer { addr: memory.addr() + i * buffer_bytes, full, free: None });
        }
        let blocks = match options.blocks {
            0 => multiprocessors(kernel)?.div_ceil(2),
            n => n,
        };
        let options = LaunchOptions::default().with_sm_budget(blocks);
        let kernel = kernel.clone();
        let state = Mutex::new(ring);
        Ok(StagedMover {
            inner: Arc::new(Inner {
                kernel,
                buffer_bytes,
                options,
                kernels,
                state,
                _events: events,
                _memory: memory,
            }),
        })
    }

    /// Cuts a job for this ring. `None` where it cannot be staged: the slab has no host address, is not
    /// packed, or a store leaves tokens out; the kernel then takes it directly.
    pub fn pieces(&self, job: &CopyJob) -> Option<Pieces> {
        job.slab().host?;
        job.pieces(self.inner.buffer_bytes)
    }

    /// Bytes of a buffer: the largest plane that can pass.
    pub fn buffer_bytes(&self) -> u64 {
        self.inner.buffer_bytes
    }

    /// Puts transfers of one cache on the caller's stream, all through one pipeline, and returns at once.
    ///
    /// # Errors
    /// [`KernelError::WrongPlanes`], and [`KernelError::Driver`] if the driver refuses a call; what was queued
    /// before is then waited for.
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch`], for every job; the slabs' host addresses are page-locked memory. The
    /// stream is not being captured.
    pub unsafe fn launch(
        &self,
        jobs: &[Pieces],
        planes: &PlaneTable,
        stream: CUstream,
    ) -> Result<StagedLaunch, KernelError> {
        // SAFETY: the caller's promises, passed on.
        let mut launched = unsafe { self.launch_steps(&[LaunchStep::new(jobs)], planes, stream) }?;
        Ok(launched.pop().unwrap_or_else(|| StagedLaunch { parts: Vec::new(), _mover: self.clone() }))
    }

    /// The same in steps, one after the other through the same pipeline: each can be waited for alone, and can
    /// wait for an event of its own. The caller's stream goes on when all are over.
    ///
    /// # Errors
    /// As [`StagedMover::launch`].
    ///
    /// # Safety
    /// As [`StagedMover::launch`]; the events are live and of this context.
    pub unsafe fn launch_steps(
        &self,
        steps: &[LaunchStep<'_, Pieces>],
        planes: &PlaneTable,
        stream: CUstream,
    ) -> Result<Vec<StagedLaunch>, KernelError> {
        let inner = &*self.inner;
        let _current = inner.kernel.inner.context.enter()?;
        let mut ring = inner.state.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = |_| StagedLaunch { parts: Vec::with_capacity(1), _mover: self.clone() };
        let mut launched: Vec<StagedLaunch> = steps.iter().map(begin).collect();
        // SAFETY: the caller's promises, passed on.
        let queued = unsafe { inner.queue(&mut ring, steps, planes, stream, &mut launched) };
        if let Err(error) = queued {
            // Memory named by the jobs may be reused once this returns.
            // SAFETY: the stream is the caller's promise.
            if let Err(error) = inner.kernels.drain().and(unsafe { synchronize(stream) }) {
                tracing::error!(%error, "a failed staged transfer could not be waited for");
            }
            return Err(error);
        }
        Ok(launched)
    }
}

impl Inner {
    /// # Safety
    /// As [`StagedMover::launch_steps`]; the context is current.
    unsafe fn queue(
        &self,
        ring: &mut Ring,
        steps: &[LaunchStep<'_, Pieces>],
        planes: &PlaneTable,
        stream: CUstream,
        launched: &mut [StagedLaunch],
    ) -> Result<(), KernelError> {
        let groups = groups(steps, self.buffer_bytes);
        let lanes = if groups.len() > 1 { self.kernels.lanes(stream) } else { Lanes::all(stream) };
        // SAFETY: the stream is this value's or the caller's; the steps hold the jobs.
        let mut session = unsafe { Session::uncaptured(&self.kernel, planes, lanes.kernel, self.options) };
        // The pieces of a transfer follow each other: one list for all of them.
        let mut last = std::ptr::null();
        let listed = groups.iter().flat_map(Group::listed);
        session.upload(listed.filter(|job| !std::ptr::eq(std::mem::replace(&mut last, *job), *job)))?;
        let start = ring.start;
        let kernel = &self.kernel;
        let mut pipeline = Pipeline { kernel, planes, ring, session, lanes, launched, end_of_loads: None };
        let mut begun = [false; 2];
        for (i, group) in groups.iter().enumerate() {
            let (first, _) = lanes.ends(group.direction);
            if !std::mem::replace(&mut begun[usize::from(group.direction == Direction::Gather)], true) {
                // SAFETY: the stream is the caller's promise; event and stream of this value live as long as it.
                unsafe { order(&start, stream, first) }?;
            }
            let after = steps[group.step].after;
            if !after.is_null() && i.checked_sub(1).is_none_or(|i| !groups[i].goes_with(group)) {
                // SAFETY: event and stream are the caller's promise, or this value's.
                unsafe { wait_for(after, first) }?;
            }
            let closes = groups.get(i + 1).is_none_or(|next| !next.goes_with(group));
            // SAFETY: the caller's promises, passed on.
            unsafe { pipeline.push(group, closes) }?;
        }
        let end_of_loads = pipeline.finish()?;
        if let Some(end) = end_of_loads.filter(|_| lanes.kernel != stream) {
            // The caller's stream goes on when everything is done; stores end on it.
            // SAFETY: the stream is the caller's promise.
            unsafe { end.order_before(stream) }?;
        }
        Ok(())
    }
}

/// Staged transfers on their way; keeps ring, kernel and plane table alive. Dropping it neither waits nor
/// cancels.
#[derive(Debug)]
pub struct StagedLaunch {
    /// Launches that report bad slots, and the ends of what was queued.
    parts: Vec<Launched>,
    _mover: StagedMover,
}

impl StagedLaunch {
    /// Whether the transfers are over. Does not wait.
    ///
    /// # Errors
    /// As [`Launched::is_complete`].
    pub fn is_complete(&self) -> Result<bool, KernelError> {
        // The last is over last; what an earlier one has to report is said when all are.
        for part in self.parts.iter().rev() {
            if !part.is_complete()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until the transfers are over.
    ///
    /// # Errors
    /// As [`Launched::wait`].
    pub fn wait(&self) -> Result<(), KernelError> {
        let mut outcome = Ok(());
        for part in &self.parts {
            outcome = outcome.and(part.wait());
        }
        outcome
    }

    /// Makes everything queued on `stream` from now on wait for the transfers. The host does not wait.
    ///
    /// # Errors
    /// [`KernelError::Driver`].
    ///
    /// # Safety
    /// `stream` is a live stream.
    pub unsafe fn order_before(&self, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        self.parts.iter().try_for_each(|part| unsafe { part.order_before(stream) })
    }
}

fn multiprocessors(kernel: &PagedCopyKernel) -> Result<u32, KernelError> {
    let mut count = 0;
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    // SAFETY: the out pointer is valid; the device belongs to a live context.
    let found = unsafe { sys::cuDeviceGetAttribute(&raw mut count, attribute, kernel.context().cu_device()) };
    check("cuDeviceGetAttribute", found)?;
    Ok(u32::try_from(count).unwrap_or(1))
}
