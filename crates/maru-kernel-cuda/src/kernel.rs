//! Loading the kernel and putting transfers on a stream.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUevent, CUstream};
use maru_driver::{Context, check, stream as streams};
use maru_layout::{CopyJob, CopyPlan, JobSlots};

use crate::abi::{Entry, INLINE_SLOTS, PagedCopyArgs, PagedCopyInlineArgs};
use crate::geometry::{Addresses, Launch, Launches, Limits, SlotSource};
use crate::launched::{Mark, State};
use crate::module::Module;
use crate::ring::{self, SlotRing};
use crate::tickets::{Ticket, Tickets};
use crate::{Image, KernelError, Launched, PlaneTable};

/// How a transfer is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaunchOptions {
    /// Most thread blocks (of 1024 threads) at once. Four reach the link's rate; more only cost the engine's
    /// compute.
    pub sm_budget: u32,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        LaunchOptions { sm_budget: 4 }
    }
}

impl LaunchOptions {
    /// At most `blocks` thread blocks at once (0 counts as 1).
    #[must_use]
    pub fn with_sm_budget(mut self, blocks: u32) -> Self {
        self.sm_budget = blocks;
        self
    }
}

/// The kernel, loaded into one context.
#[derive(Clone, Debug)]
pub struct PagedCopyKernel {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    /// Goes first: the driver then waits for kernels that use the rest.
    module: Module,
    pub(crate) tickets: Tickets,
    pub(crate) ring: SlotRing,
    /// Error record of captured launches; it is never given back.
    captured: Ticket,
    /// Slots of the cache of the last captured launch, for the message.
    captured_slots: AtomicU64,
    pub(crate) context: Context,
}

impl PagedCopyKernel {
    /// Loads the kernel into a context and makes everything that transfers need: afterwards no call on the
    /// way of a transfer allocates memory.
    ///
    /// The fat binary is tried first if there is one, then the portable PTX, which the driver compiles (tens
    /// of milliseconds, cached by the driver).
    ///
    /// # Errors
    /// [`KernelError`] with the reason: device too old, PTX version not known to the driver, image refused,
    /// out of memory.
    pub fn load(context: Arc<CudaContext>) -> Result<Self, KernelError> {
        Self::load_first(context, Image::embedded())
    }

    /// Loads one certain image, to compare them.
    ///
    /// # Errors
    /// As [`PagedCopyKernel::load`], and [`KernelError::ModuleLoad`] for an image this binary does not hold.
    pub fn load_image(context: Arc<CudaContext>, image: Image) -> Result<Self, KernelError> {
        Self::load_first(context, Image::embedded().filter(|held| *held == image))
    }

    fn load_first(
        context: Arc<CudaContext>,
        images: impl Iterator<Item = Image>,
    ) -> Result<Self, KernelError> {
        let context = Context::new(context);
        crate::device::check_capability(context.get().ordinal(), context.get().cu_device())?;
        let current = context.enter()?;
        let module = Module::load(&context, images)?;
        let tickets = Tickets::new(&context);
        let ring = SlotRing::new(&context)?;
        let captured = tickets.take()?;
        drop(current);
        tracing::debug!(device = context.get().ordinal(), image = %module.image, "native kernel loaded");
        let captured_slots = AtomicU64::new(0);
        let inner = Inner { module, tickets, ring, captured, captured_slots, context };
        Ok(PagedCopyKernel { inner: Arc::new(inner) })
    }

    /// Which of the embedded images runs.
    pub fn image(&self) -> Image {
        self.inner.module.image
    }

    /// The context it was loaded into.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.inner.context.get()
    }

    /// Puts the plane addresses of a cache where the kernel reads them. Once per cache; waits until they are
    /// there.
    ///
    /// # Errors
    /// [`KernelError::Driver`], out of memory for instance.
    pub fn register(&self, plan: &CopyPlan) -> Result<PlaneTable, KernelError> {
        PlaneTable::new(self.context(), plan)
    }

    /// Puts a transfer on the caller's stream and returns at once.
    ///
    /// Host slots travel in the kernel's arguments, longer lists through a pinned ring. While the stream is
    /// being captured the launch becomes part of the graph, with host slots baked in and device slots read
    /// anew by every replay; see [`Launched::is_captured`].
    ///
    /// # Errors
    /// [`KernelError::SlabNotAddressable`], [`KernelError::WrongPlanes`] and [`KernelError::TokenTooLarge`]
    /// before anything is queued. [`KernelError::Driver`] if the driver refuses a call; what was queued before
    /// that is then waited for.
    ///
    /// # Safety
    /// * `stream` is a live stream of this kernel's context, or null for its default stream.
    /// * The planes the job's plan names, its slab at its device address and its slots in device memory are
    ///   memory the device can address, and stay so until the transfer is over.
    /// * Nobody else writes what the transfer reads, or touches what it writes, until it is over, other than
    ///   ordered by the stream.
    pub unsafe fn launch(
        &self,
        job: &CopyJob,
        planes: &PlaneTable,
        stream: CUstream,
        options: LaunchOptions,
    ) -> Result<Launched, KernelError> {
        let _current = self.inner.context.enter()?;
        // SAFETY: the stream is the caller's promise.
        let capturing = unsafe { streams::is_capturing(stream) }?;
        // SAFETY: as for this function.
        let state = unsafe { self.put(job, planes, stream, options, capturing) }?;
        Ok(Launched::new(&self.inner, planes, state, job.plan().geometry().num_slots))
    }

    /// [`PagedCopyKernel::launch`] with the context current.
    ///
    /// # Safety
    /// As there; `capturing` says whether the stream is being captured.
    pub(crate) unsafe fn put(
        &self,
        job: &CopyJob,
        planes: &PlaneTable,
        stream: CUstream,
        options: LaunchOptions,
        capturing: bool,
    ) -> Result<State, KernelError> {
        let kernel = &self.inner;
        if !planes.is_of(job.plan().bases()) {
            return Err(KernelError::WrongPlanes);
        }
        let num_slots = job.plan().geometry().num_slots;
        let (source, reports) = match job.slots() {
            JobSlots::Device { addr, .. } => (SlotSource::Device { addr: *addr }, true),
            // A graph must not use the ring: its buffers are used again before a replay.
            JobSlots::Host { slots, .. } => match slots.len() as u64 - job.skip() > INLINE_SLOTS as u64 {
                true if !capturing => (SlotSource::Uploaded { capacity: ring::CAPACITY }, false),
                _ => (SlotSource::Inline, false),
            },
            _ => (SlotSource::Inline, false),
        };
        // Looks at the job before a ticket is taken.
        let addresses = Addresses { planes: planes.addr(), error: 0 };
        let mut launches = Launches::new(job, source, addresses, Limits::blocks(options.sm_budget))?;
        if launches.is_empty() {
            return Ok(State::Empty);
        }
        let ticket = if capturing { kernel.captured } else { kernel.tickets.take()? };
        if reports {
            launches.report_to(ticket.payload.device);
            match capturing {
                true => kernel.captured_slots.store(num_slots, Ordering::Relaxed),
                false => ticket.payload.clear(),
            }
        }
        // SAFETY: the caller's promises, passed on.
        let queued = unsafe { kernel.queue(job, launches, stream) };
        if capturing {
            return queued.map(|()| State::Captured);
        }
        // SAFETY: the stream is the caller's promise.
        let mark = unsafe { self.queued(queued, ticket, stream) }?;
        Ok(State::Queued { mark, reports })
    }

    /// Whether a stream is being captured into a graph.
    ///
    /// # Errors
    /// [`KernelError::Driver`].
    ///
    /// # Safety
    /// `stream` is a live stream of this kernel's context, or null.
    pub unsafe fn is_capturing(&self, stream: CUstream) -> Result<bool, KernelError> {
        let _current = self.inner.context.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { streams::is_capturing(stream) }?)
    }

    /// Makes everything queued on a stream from now on wait for an event, as it was last recorded.
    ///
    /// # Errors
    /// [`KernelError::Driver`].
    ///
    /// # Safety
    /// Both are live and of this kernel's context.
    pub unsafe fn wait_for(&self, event: CUevent, stream: CUstream) -> Result<(), KernelError> {
        let _current = self.inner.context.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { streams::wait_for(event, stream) }?)
    }

    /// The first bad slot that a replay of a captured launch met since the last call, if any. To be asked
    /// when the replay is over. With several captured launches the last report wins.
    ///
    /// # Errors
    /// [`KernelError::SlotOutOfRange`].
    pub fn take_captured_error(&self) -> Result<(), KernelError> {
        let record = self.inner.captured.payload.read();
        if record.raised == 0 {
            return Ok(());
        }
        self.inner.captured.payload.clear();
        Err(KernelError::SlotOutOfRange {
            token: record.token,
            slot: record.slot,
            num_slots: self.inner.captured_slots.load(Ordering::Relaxed),
        })
    }
}

impl PagedCopyKernel {
    /// Marks the end of what was queued on a stream. If something failed, waits for what is there, so that its
    /// memory may be reused once the error is returned.
    ///
    /// # Safety
    /// A live stream; the context is current.
    pub(crate) unsafe fn queued(
        &self,
        outcome: Result<(), KernelError>,
        ticket: Ticket,
        stream: CUstream,
    ) -> Result<Arc<Mark>, KernelError> {
        // SAFETY: the pool is alive; the stream is the caller's promise.
        let marked = outcome.and_then(|()| Ok(unsafe { ticket.record(stream) }?));
        let Err(error) = marked else { return Ok(Mark::new(&self.inner, ticket)) };
        // SAFETY: the stream is the caller's promise.
        if unsafe { streams::synchronize(stream) }.is_ok() {
            self.inner.tickets.give_back(ticket, true);
        }
        Err(error)
    }
}

impl Inner {
    /// Queues every launch of a job.
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch`]; the context is current.
    unsafe fn queue(&self, job: &CopyJob, launches: Launches, stream: CUstream) -> Result<(), KernelError> {
        let host: &[i64] = match job.slots() {
            JobSlots::Host { slots, .. } => slots,
            _ => &[],
        };
        let uploads = launches.source_is_uploaded();
        for mut launch in launches {
            let slots = launch.slots(host);
            if uploads {
                let entry = launch;
                let start = |addr| {
                    launch.args.slots = addr;
                    // SAFETY: the arguments come from a checked job and a filled buffer.
                    unsafe { self.start(&launch, &launch.args, stream) }
                };
                // SAFETY: the stream is the caller's promise.
                let uploaded = unsafe { self.ring.with_slots(std::iter::once(slots), stream, start) }?;
                if !uploaded {
                    // SAFETY: as for this function.
                    unsafe { self.queue_inline(&entry, slots, stream) }?;
                }
            } else if host.is_empty() {
                // SAFETY: the arguments come from a checked job; its memory is the caller's promise.
                unsafe { self.start(&launch, &launch.args, stream) }?;
            } else {
                // SAFETY: as for this function.
                unsafe { self.queue_inline(&launch, slots, stream) }?;
            }
        }
        Ok(())
    }

    /// Queues one launch with its slots by value, cut where they are too many.
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch`]; the context is current.
    unsafe fn queue_inline(
        &self,
        launch: &Launch,
        slots: &[i64],
        stream: CUstream,
    ) -> Result<(), KernelError> {
        for (piece, slots) in launch.inline_pieces(slots) {
            let mut args = PagedCopyInlineArgs { copy: piece.args, slots: [0; INLINE_SLOTS] };
            args.slots[..slots.len()].copy_from_slice(slots);
            // SAFETY: the arguments come from a checked job; its memory is the caller's promise.
            unsafe { self.start(&piece, &args, stream) }?;
        }
        Ok(())
    }

    /// One kernel launch.
    ///
    /// # Safety
    /// `args` is what the entry takes, and every address it can form is the device's to touch.
    unsafe fn start<T>(&self, launch: &Launch, args: &T, stream: CUstream) -> Result<(), KernelError> {
        let shape = (launch.entry, launch.blocks, launch.threads);
        // SAFETY: the caller's promise.
        unsafe { self.start_entry(shape, args, stream) }
    }

    /// The same for any entry: kernel, blocks, threads.
    ///
    /// # Safety
    /// As [`Inner::start`].
    pub(crate) unsafe fn start_entry<T>(
        &self,
        (entry, blocks, threads): (Entry, u32, u32),
        args: &T,
        stream: CUstream,
    ) -> Result<(), KernelError> {
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: function and stream belong to the current context; the driver copies the arguments before
        // it returns and does not write them.
        let result = unsafe {
            sys::cuLaunchKernel(
                self.module.function(entry),
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        Ok(check("cuLaunchKernel", result)?)
    }
}

/// The arguments of a captured or queued launch never outlive `cuLaunchKernel`, which copies them; both
/// kinds are plain bytes.
const _: fn() = || {
    fn plain<T: Copy + Send + 'static>() {}
    plain::<PagedCopyArgs>();
    plain::<PagedCopyInlineArgs>();
};
