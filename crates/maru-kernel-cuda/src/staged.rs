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

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUevent, CUstream};
use maru_layout::{CopyJob, Direction, Piece, Pieces, SlabSpan};

use crate::driver::{Current, DeviceBuffer, check};
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
    kernel: PagedCopyKernel,
    buffer_bytes: u64,
    options: LaunchOptions,
    /// Streams: into the ring, out of it, and the kernel's. Destroyed before the ring is freed.
    streams: Streams,
    state: Mutex<Ring>,
    _memory: DeviceBuffer,
}

#[derive(Debug)]
struct Ring {
    next: usize,
    buffers: Vec<Buffer>,
    /// Recorded on the caller's stream when a transfer begins.
    start: Event,
}

#[derive(Debug)]
struct Buffer {
    addr: u64,
    /// Its bytes are there, for whoever takes them out.
    full: Event,
    /// It may be filled again.
    free: Event,
}

impl StagedMover {
    /// Allocates the ring and the streams.
    ///
    /// # Errors
    /// [`KernelError::Driver`], out of memory for instance.
    pub fn new(kernel: &PagedCopyKernel, options: StagedOptions) -> Result<Self, KernelError> {
        let context = kernel.context();
        let _current = Current::enter(context)?;
        let buffers = options.buffers.clamp(2, 64);
        // Buffers start on borders that suit every access and the copy engine.
        let buffer_bytes = options.ring_bytes / buffers / 4096 * 4096;
        let count = usize::try_from(buffers).unwrap_or(2);
        let bytes = usize::try_from(buffer_bytes * buffers).unwrap_or(usize::MAX);
        let memory = DeviceBuffer::new(context, bytes.max(1))?;
        let streams = Streams::new(kernel)?;
        let mut ring = Ring { next: 0, buffers: Vec::with_capacity(count), start: Event::new(kernel)? };
        for i in 0..buffers {
            let (full, free) = (Event::new(kernel)?, Event::new(kernel)?);
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
            inner: Arc::new(Inner { kernel, buffer_bytes, options, streams, state, _memory: memory }),
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
        let _current = Current::enter(inner.kernel.context())?;
        let mut ring = inner.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut launched = StagedLaunch { parts: Vec::with_capacity(2), _mover: self.clone() };
        // SAFETY: the caller's promises, passed on.
        let queued = unsafe { inner.queue(&mut ring, jobs, planes, stream, &mut launched) };
        if let Err(error) = queued {
            inner.streams.drain();
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
        let Streams { copy_in, copy_out, kernel, .. } = self.streams;
        ring.start.record(stream)?;
        for internal in [copy_in, copy_out, kernel] {
            ring.start.wait(internal)?;
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
        let Streams { copy_in, copy_out, kernel, .. } = self.streams;
        let Some((first, ..)) = group.members.first() else { return Ok(()) };
        let load = first.job().direction() == Direction::Scatter;
        let index = ring.next;
        ring.next = (index + 1) % ring.buffers.len();
        let buffer = &ring.buffers[index];
        let copies = |into, stream| {
            group.members.iter().try_for_each(|(pieces, piece, at)| {
                // SAFETY: the slab is the caller's promise; `Group::takes` saw to it that the piece fits.
                unsafe { copy(piece, pieces.job().slab(), buffer.addr + at, into, stream) }
            })
        };
        let jobs = group
            .members
            .iter()
            .map(|(pieces, piece, at)| pieces.staged(piece, None, Some(buffer.addr + at)));
        let jobs: Vec<CopyJob> = jobs.collect();
        if load {
            buffer.free.wait(copy_in)?;
            copies(true, copy_in)?;
            buffer.full.record(copy_in)?;
            buffer.full.wait(kernel)?;
        } else {
            buffer.free.wait(kernel)?;
        }
        // SAFETY: the planes are the caller's promise; the buffer holds the pieces.
        let parts = unsafe { self.kernel.launch_many(&jobs, planes, kernel, self.options) }?;
        launched.parts.extend(parts.into_iter().filter(Launched::reports));
        if load {
            buffer.free.record(kernel)?;
        } else {
            buffer.full.record(kernel)?;
            buffer.full.wait(copy_out)?;
            copies(false, copy_out)?;
            buffer.free.record(copy_out)?;
        }
        group.members.clear();
        Ok(())
    }

    /// A completion of everything on a stream so far.
    fn finished(&self, stream: CUstream, planes: &PlaneTable) -> Result<Launched, KernelError> {
        let kernel = self.kernel.inner();
        let ticket = kernel.tickets.take()?;
        // SAFETY: the ticket is owned here; the stream is this value's.
        check("cuEventRecord", unsafe { sys::cuEventRecord(ticket.event, stream) })?;
        let state = State::Queued { ticket, reports: false };
        Ok(Launched::new(kernel, planes, state, 0))
    }
}

/// Pieces that share a buffer: small slabs of one direction travel together, so that neither the copy engine nor
/// the kernel waits between them.
#[derive(Default)]
struct Group<'a> {
    /// Each with its offset in the buffer.
    members: Vec<(&'a Pieces, &'a Piece, u64)>,
}

impl<'a> Group<'a> {
    /// Where the next piece would begin: on a border that suits every access.
    fn end(&self) -> u64 {
        self.members
            .last()
            .map_or(0, |(_, piece, at)| (at + piece.pitch * piece.height).next_multiple_of(256))
    }

    fn takes(&self, direction: Direction, piece: &Piece, room: u64) -> bool {
        let same = self.members.first().is_none_or(|(pieces, ..)| pieces.job().direction() == direction);
        same && self.end() + piece.pitch * piece.height <= room
    }

    fn add(&mut self, pieces: &'a Pieces, piece: &'a Piece) {
        self.members.push((pieces, piece, self.end()));
    }
}

/// One piece between slab and buffer by the copy engine.
///
/// # Safety
/// The slab is host memory that stays, and the piece lies in it; the buffer has room for the piece.
unsafe fn copy(
    piece: &Piece,
    slab: SlabSpan,
    buffer: u64,
    into: bool,
    stream: CUstream,
) -> Result<(), KernelError> {
    let host = slab.host.ok_or(KernelError::SlabNotAddressable)?.wrapping_add_signed(piece.offset);
    let device = buffer + piece.lead;
    let narrow = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let pointer = std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(narrow(host));
    if piece.is_contiguous() {
        let bytes = narrow(piece.bytes());
        return match into {
            // SAFETY: `bytes` bytes at either place, by the caller's promise.
            true => check("cuMemcpyHtoDAsync", unsafe {
                sys::cuMemcpyHtoDAsync_v2(device, pointer, bytes, stream)
            }),
            // SAFETY: as above.
            false => check("cuMemcpyDtoHAsync", unsafe {
                sys::cuMemcpyDtoHAsync_v2(pointer, device, bytes, stream)
            }),
        };
    }
    let (host_type, device_type) =
        (sys::CUmemorytype::CU_MEMORYTYPE_HOST, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE);
    let pitch = narrow(piece.pitch);
    let spans = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: if into { host_type } else { device_type },
        srcHost: pointer,
        srcDevice: device,
        srcArray: std::ptr::null_mut(),
        srcPitch: pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: if into { device_type } else { host_type },
        dstHost: pointer,
        dstDevice: device,
        dstArray: std::ptr::null_mut(),
        dstPitch: pitch,
        WidthInBytes: narrow(piece.width),
        Height: narrow(piece.height),
    };
    // SAFETY: the spans lie in slab and buffer by the caller's promise; the driver copies the description.
    check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&spans, stream) })
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

/// The streams of a mover.
#[derive(Debug)]
struct Streams {
    copy_in: CUstream,
    copy_out: CUstream,
    kernel: CUstream,
    owner: PagedCopyKernel,
}

// SAFETY: stream handles may be used from any thread.
unsafe impl Send for Streams {}
// SAFETY: as above.
unsafe impl Sync for Streams {}

impl Streams {
    fn new(kernel: &PagedCopyKernel) -> Result<Self, KernelError> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the out pointers are valid; the context is current.
        let range = unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) };
        check("cuCtxGetStreamPriorityRange", range)?;
        let null = std::ptr::null_mut();
        let mut streams = Streams { copy_in: null, copy_out: null, kernel: null, owner: kernel.clone() };
        for stream in [&mut streams.copy_in, &mut streams.copy_out, &mut streams.kernel] {
            let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the out pointer is valid; the context is current.
            let made = unsafe { sys::cuStreamCreateWithPriority(stream, flags, greatest) };
            check("cuStreamCreateWithPriority", made)?;
        }
        Ok(streams)
    }

    /// Waits for everything queued; an error that a wait meets was met before.
    fn drain(&self) {
        for stream in [self.copy_in, self.kernel, self.copy_out] {
            // SAFETY: the stream is this value's.
            if let Err(error) = check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) }) {
                tracing::error!(%error, "a failed staged transfer could not be waited for");
            }
        }
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        let Ok(_current) = Current::enter(self.owner.context()) else { return };
        self.drain();
        for stream in [self.copy_in, self.copy_out, self.kernel] {
            if !stream.is_null() {
                // SAFETY: made by `new`, destroyed once, nothing is queued on it any more.
                let _ = unsafe { sys::cuStreamDestroy_v2(stream) };
            }
        }
    }
}

/// An event without timing.
#[derive(Debug)]
struct Event {
    event: CUevent,
    owner: PagedCopyKernel,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn new(kernel: &PagedCopyKernel) -> Result<Self, KernelError> {
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the out pointer is valid; the context is current.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Event { event, owner: kernel.clone() })
    }

    fn record(&self, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: the event is this value's; the stream is alive by the callers' promises.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, stream) })
    }

    fn wait(&self, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: as above.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, self.event, 0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_current) = Current::enter(self.owner.context()) else { return };
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}

fn multiprocessors(kernel: &PagedCopyKernel) -> Result<u32, KernelError> {
    let mut count = 0;
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    // SAFETY: the out pointer is valid; the device belongs to a live context.
    let found = unsafe { sys::cuDeviceGetAttribute(&mut count, attribute, kernel.context().cu_device()) };
    check("cuDeviceGetAttribute", found)?;
    Ok(u32::try_from(count).unwrap_or(1))
}
