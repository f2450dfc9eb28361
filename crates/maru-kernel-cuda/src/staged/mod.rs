//! The staged strategy: the copy engine moves slab bytes between host memory and a ring on the device, the
//! kernel moves them between ring and pages.
//!
//! A kernel that touches host memory directly stops short of the link's rate, because its accesses are small,
//! and a direct store makes every multiprocessor's memory traffic wait behind posted writes. The copy engine
//! reaches the link's rate, and a short burst of the kernel between ring and pages is all the compute sees.
//!
//! Pieces go round the ring in order. Streams of this value carry the work and join the caller's stream by
//! events on both ends:
//!
//! ```text
//! load    caller ─start─► copy in: fill 0 │ fill 1 │ …          store   caller ─start─► kernel: gather 0 │ gather 1 │ …
//!                         kernel:    └► scatter 0 │ scatter 1 ─► caller              copy out:    └► drain 0 │ drain 1 ─► caller
//! ```
//!
//! A buffer is filled again when its last use is over, by an event; the host waits for nothing.

mod group;

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUstream};
use maru_driver::stream::{OwnStream, synchronize};
use maru_driver::{Context, DeviceBuffer, DriverError, Ticket, Tickets, check};
use maru_layout::{CopyJob, Direction, Pieces};

use self::group::{Group, copy};
use crate::launched::State;
use crate::{KernelError, LaunchOptions, Launched, PagedCopyKernel, PlaneTable};

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
    /// Thread blocks of a kernel between ring and pages; 0 = one per multiprocessor.
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
    streams: Streams,
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
    /// It may be filled again.
    free: Ticket,
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
        let streams = Streams {
            copy_in: OwnStream::urgent(context)?,
            copy_out: OwnStream::urgent(context)?,
            kernel: OwnStream::urgent(context)?,
            context: context.clone(),
        };
        let events = Tickets::new(context.get(), 2 * count + 1);
        let mut ring = Ring { next: 0, buffers: Vec::with_capacity(count), start: events.take_event()? };
        for i in 0..buffers {
            let (full, free) = (events.take_event()?, events.take_event()?);
            ring.buffers.push(Buffer { addr: memory.addr() + i * buffer_bytes, full, free });
        }
        let blocks = match options.blocks {
            0 => multiprocessors(kernel)?,
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
                streams,
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
        let inner = &*self.inner;
        let _current = inner.kernel.inner.context.enter()?;
        let mut ring = inner.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut launched = StagedLaunch { parts: Vec::with_capacity(2), _mover: self.clone() };
        // SAFETY: the caller's promises, passed on.
        let queued = unsafe { inner.queue(&mut ring, jobs, planes, stream, &mut launched) };
        if let Err(error) = queued {
            // Memory named by the jobs may be reused once this returns.
            if let Err(error) = inner.streams.drain() {
                tracing::error!(%error, "a failed staged transfer could not be waited for");
            }
            return Err(error);
        }
        Ok(launched)
    }
}

impl Inner {
    /// # Safety
    /// As [`StagedMover::launch`]; the context is current.
    unsafe fn queue(
        &self,
        ring: &mut Ring,
        jobs: &[Pieces],
        planes: &PlaneTable,
        stream: CUstream,
        launched: &mut StagedLaunch,
    ) -> Result<(), KernelError> {
        let [copy_in, copy_out, kernel] = self.streams.get();
        // SAFETY: the stream is the caller's promise; events and streams of this value live as long as it.
        unsafe { ring.start.record(stream) }?;
        for internal in [copy_in, copy_out, kernel] {
            // SAFETY: as above.
            unsafe { ring.start.order_before(internal) }?;
        }
        let (mut loads, mut stores) = (false, false);
        let mut group = Group::default();
        let pieces = jobs.iter().flat_map(|pieces| pieces.list().iter().map(move |piece| (pieces, piece)));
        for (pieces, piece) in pieces {
            let direction = pieces.job().direction();
            match direction {
                Direction::Scatter => loads = true,
                Direction::Gather => stores = true,
            }
            if !group.takes(direction, piece, self.buffer_bytes) {
                // SAFETY: the caller's promises, passed on.
                unsafe { self.send(ring, &mut group, planes, launched) }?;
            }
            group.add(pieces, piece);
        }
        // SAFETY: as above.
        unsafe { self.send(ring, &mut group, planes, launched) }?;
        for (any, internal) in [(loads, kernel), (stores, copy_out)] {
            if any {
                launched.parts.push(self.finished(internal, planes)?);
            }
        }
        // The caller's stream goes on when everything is done.
        // SAFETY: the stream is the caller's promise.
        unsafe { launched.order_before(stream) }
    }

    /// Moves a group through the next buffer.
    ///
    /// # Safety
    /// As [`StagedMover::launch`]; the context is current.
    unsafe fn send(
        &self,
        ring: &mut Ring,
        group: &mut Group<'_>,
        planes: &PlaneTable,
        launched: &mut StagedLaunch,
    ) -> Result<(), KernelError> {
        let [copy_in, copy_out, kernel] = self.streams.get();
        let Some(direction) = group.direction() else { return Ok(()) };
        let load = direction == Direction::Scatter;
        let index = ring.next;
        ring.next = (index + 1) % ring.buffers.len();
        let buffer = &ring.buffers[index];
        let copies = |stream| {
            group.members().try_for_each(|(pieces, piece, at)| {
                // SAFETY: the slab is the caller's promise; `Group::takes` saw to it that the piece fits.
                unsafe { copy(piece, pieces.job().slab(), buffer.addr + at, load, stream) }
            })
        };
        let then = |event: &Ticket, from, to| -> Result<(), KernelError> {
            // SAFETY: events and streams of this value live as long as it.
            unsafe { event.record(from) }?;
            // SAFETY: as above.
            Ok(unsafe { event.order_before(to) }?)
        };
        let jobs =
            group.members().map(|(pieces, piece, at)| pieces.staged(piece, None, Some(buffer.addr + at)));
        let jobs: Vec<CopyJob> = jobs.collect();
        let (first, last) = if load { (copy_in, kernel) } else { (kernel, copy_out) };
        // SAFETY: as above.
        unsafe { buffer.free.order_before(first) }?;
        if load {
            copies(copy_in)?;
            then(&buffer.full, copy_in, kernel)?;
        }
        // SAFETY: the planes are the caller's promise; the buffer holds the pieces.
        let parts = unsafe { self.kernel.launch_many(&jobs, planes, kernel, self.options) }?;
        launched.parts.extend(parts.into_iter().filter(Launched::reports));
        if !load {
            then(&buffer.full, kernel, copy_out)?;
            copies(copy_out)?;
        }
        // SAFETY: as above.
        unsafe { buffer.free.record(last) }?;
        group.clear();
        Ok(())
    }

    /// A completion of everything on a stream so far.
    fn finished(&self, stream: CUstream, planes: &PlaneTable) -> Result<Launched, KernelError> {
        let kernel = &self.kernel.inner;
        let ticket = kernel.tickets.take()?;
        // SAFETY: the ticket's pool is the kernel's; the stream is this value's.
        unsafe { ticket.record(stream) }?;
        let state = State::Queued { ticket, reports: false };
        Ok(Launched::new(kernel, planes, state, 0))
    }
}

/// Staged transfers on their way; keeps ring, kernel and plane table alive. Dropping it neither waits nor
/// cancels.
#[derive(Debug)]
pub struct StagedLaunch {
    /// Launches that report bad slots, then the ends of the streams that worked.
    parts: Vec<Launched>,
    _mover: StagedMover,
}

impl StagedLaunch {
    /// Whether the transfers are over. Does not wait.
    ///
    /// # Errors
    /// As [`Launched::is_complete`].
    pub fn is_complete(&self) -> Result<bool, KernelError> {
        for part in &self.parts {
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

/// The streams of a mover: into the ring, out of it, and the kernel's.
#[derive(Debug)]
struct Streams {
    copy_in: OwnStream,
    copy_out: OwnStream,
    kernel: OwnStream,
    context: Context,
}

impl Streams {
    fn get(&self) -> [CUstream; 3] {
        [self.copy_in.get(), self.copy_out.get(), self.kernel.get()]
    }

    /// Waits for everything queued. The context is current.
    fn drain(&self) -> Result<(), DriverError> {
        let [copy_in, copy_out, kernel] = self.get();
        // An error of one wait says nothing of the others.
        // SAFETY: the streams are this value's.
        let waits = [copy_in, kernel, copy_out].map(|stream| unsafe { synchronize(stream) });
        waits.into_iter().collect()
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.context.give_back("the ring of the staged strategy", || self.drain());
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
