//! Loading the kernel and putting transfers on a stream.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUstream};
use cudarc::driver::{CudaContext, DriverError};
use maru_layout::{CopyJob, CopyPlan, JobSlots};

use crate::abi::{Entry, INLINE_SLOTS, PagedCopyArgs, PagedCopyInlineArgs};
use crate::driver::{Current, check, name};
use crate::geometry::{Addresses, Launch, Launches, Limits, SlotSource};
use crate::launched::State;
use crate::ring::{self, SlotRing};
use crate::tickets::{Ticket, Tickets};
use crate::{Image, KernelError, Launched, PlaneTable, image};

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
    pub(crate) context: Arc<CudaContext>,
    module: sys::CUmodule,
    functions: [sys::CUfunction; Entry::COUNT],
    image: Image,
    pub(crate) tickets: Tickets,
    pub(crate) ring: SlotRing,
    /// Error record of captured launches; it is never given back.
    captured: Ticket,
    /// Slots of the cache of the last captured launch, for the message.
    captured_slots: AtomicU64,
}

// SAFETY: module and function handles may be used from any thread with the context current, which every
// method sees to.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

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
        crate::device::check_capability(context.ordinal(), context.cu_device())?;
        let _current = Current::enter(&context)?;
        let (module, image) = load_module(images)?;
        let loaded = Module(module);
        let mut functions = [std::ptr::null_mut(); Entry::COUNT];
        for entry in Entry::all() {
            let function = &mut functions[entry.index()];
            // SAFETY: the module was just loaded; the name is a C string.
            let found = unsafe { sys::cuModuleGetFunction(function, loaded.0, entry.name().as_ptr()) };
            check("cuModuleGetFunction", found)?;
        }
        let tickets = Tickets::new(&context)?;
        let ring = SlotRing::new(&context)?;
        let captured = tickets.take()?;
        captured.clear();
        std::mem::forget(loaded);
        tracing::debug!(device = context.ordinal(), %image, "native kernel loaded");
        let captured_slots = AtomicU64::new(0);
        let inner = Inner { context, module, functions, image, tickets, ring, captured, captured_slots };
        Ok(PagedCopyKernel { inner: Arc::new(inner) })
    }

    /// Which of the embedded images runs.
    pub fn image(&self) -> Image {
        self.inner.image
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// The context it was loaded into.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// Puts the plane addresses of a cache where the kernel reads them. Once per cache; waits until they are
    /// there.
    ///
    /// # Errors
    /// [`KernelError::Driver`], out of memory for instance.
    pub fn register(&self, plan: &CopyPlan) -> Result<PlaneTable, KernelError> {
        PlaneTable::new(&self.inner.context, plan)
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
        let kernel = &self.inner;
        if !planes.is_of(job.plan().bases()) {
            return Err(KernelError::WrongPlanes);
        }
        let num_slots = job.plan().geometry().num_slots;
        let finish = |state| Ok(Launched::new(kernel, planes, state, num_slots));
        let _current = Current::enter(&kernel.context)?;
        // SAFETY: the stream is the caller's promise.
        let capturing = unsafe { is_capturing(stream) }?;
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
            return finish(State::Empty);
        }
        let ticket = if capturing { kernel.captured } else { kernel.tickets.take()? };
        if reports {
            launches.report_to(ticket.record_device);
            match capturing {
                true => kernel.captured_slots.store(num_slots, Ordering::Relaxed),
                false => ticket.clear(),
            }
        }
        // SAFETY: the caller's promises, passed on.
        let queued = unsafe { kernel.queue(job, launches, stream) };
        if capturing {
            return queued.and_then(|()| finish(State::Captured));
        }
        let queued = queued.and_then(|()| {
            // SAFETY: the ticket is owned here; the stream is the caller's promise.
            check("cuEventRecord", unsafe { sys::cuEventRecord(ticket.event, stream) })
        });
        if let Err(error) = queued {
            // Memory named by the job may be reused once this returns.
            // SAFETY: the stream is the caller's promise.
            let drained = check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) });
            if drained.is_ok() {
                kernel.tickets.give_back(ticket, true);
            }
            return Err(error);
        }
        finish(State::Queued { ticket, reports })
    }

    /// Whether a stream is being captured into a graph.
    ///
    /// # Errors
    /// [`KernelError::Driver`].
    ///
    /// # Safety
    /// `stream` is a live stream of this kernel's context, or null.
    pub unsafe fn is_capturing(&self, stream: CUstream) -> Result<bool, KernelError> {
        let _current = Current::enter(&self.inner.context)?;
        // SAFETY: the caller's promise.
        unsafe { is_capturing(stream) }
    }

    /// The first bad slot that a replay of a captured launch met since the last call, if any. To be asked
    /// when the replay is over. With several captured launches the last report wins.
    ///
    /// # Errors
    /// [`KernelError::SlotOutOfRange`].
    pub fn take_captured_error(&self) -> Result<(), KernelError> {
        let record = self.inner.captured.record();
        if record.raised == 0 {
            return Ok(());
        }
        self.inner.captured.clear();
        Err(KernelError::SlotOutOfRange {
            token: record.token,
            slot: record.slot,
            num_slots: self.inner.captured_slots.load(Ordering::Relaxed),
        })
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
            let slots = window(host, &launch);
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
                self.functions[entry.index()],
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
        check("cuLaunchKernel", result)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let unloaded = Current::enter(&self.context).and_then(|_current| {
            // SAFETY: loaded by `load`, unloaded once. Every completion handle keeps this value alive, and the
            // driver waits for kernels that still run.
            check("cuModuleUnload", unsafe { sys::cuModuleUnload(self.module) })
        });
        if let Err(error) = unloaded {
            tracing::error!(%error, "the kernel's module leaks");
        }
    }
}

/// Unloads a module unless loading goes through. The context is current.
struct Module(sys::CUmodule);

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: just loaded and not used yet.
        let _ = unsafe { sys::cuModuleUnload(self.0) };
    }
}

/// A launch's part of the host slots.
fn window<'a>(host: &'a [i64], launch: &Launch) -> &'a [i64] {
    let first = usize::try_from(launch.first_token).unwrap_or(usize::MAX).min(host.len());
    let end = first.saturating_add(launch.args.tokens as usize).min(host.len());
    &host[first..end]
}

/// # Safety
/// `stream` is a live stream of the current context.
unsafe fn is_capturing(stream: CUstream) -> Result<bool, KernelError> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the out pointer is valid; the stream is the caller's promise.
    check("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream, &mut status) })?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// The first image the driver takes; the error of the last.
fn load_module(images: impl Iterator<Item = Image>) -> Result<(sys::CUmodule, Image), KernelError> {
    let mut last = None;
    for image in images {
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a fat binary or zero-terminated PTX; the out pointer is valid.
        let result = unsafe { sys::cuModuleLoadData(&mut module, image.bytes().as_ptr().cast()) };
        if result == sys::CUresult::CUDA_SUCCESS {
            return Ok((module, image));
        }
        let error = load_error(image, result);
        tracing::debug!(%error, %image, "an image of the kernel did not load");
        last = Some(error);
    }
    Err(last.unwrap_or(KernelError::ModuleLoad { image: "image", name: "there is none".into(), code: 0 }))
}

fn load_error(image: Image, result: sys::CUresult) -> KernelError {
    if result == sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION {
        let mut cuda_version = 0;
        // SAFETY: the out pointer is valid.
        let _ = unsafe { sys::cuDriverGetVersion(&mut cuda_version) };
        return KernelError::UnsupportedPtx { ptx_version: image::PORTABLE_PTX_VERSION, cuda_version };
    }
    KernelError::ModuleLoad { image: image.label(), name: name(DriverError(result)), code: result as u32 }
}

/// The arguments of a captured or queued launch never outlive `cuLaunchKernel`, which copies them; both
/// kinds are plain bytes.
const _: fn() = || {
    fn plain<T: Copy + Send + 'static>() {}
    plain::<PagedCopyArgs>();
    plain::<PagedCopyInlineArgs>();
};
