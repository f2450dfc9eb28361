//! Loading the kernel and putting transfers on a stream.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUstream};
use maru_driver::stream::{self as streams, WordWaits};
use maru_driver::{Context, check};
use maru_layout::{CopyJob, CopyPlan};

use crate::abi::{Entry, PagedCopyArgs, PagedCopyInlineArgs};
use crate::geometry::{Launch, Limits};
use crate::module::Module;
use crate::ring::SlotRing;
use crate::session::Session;
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

    pub(crate) fn limits(self) -> Limits {
        Limits::blocks(self.sm_budget)
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
    pub(crate) captured: Ticket,
    /// Slots of the cache of the last captured launch, for the message.
    pub(crate) captured_slots: AtomicU64,
    /// How streams wait for a run; `None` where they can wait for events only.
    pub(crate) word_waits: Option<WordWaits>,
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
        let tickets = Tickets::new(&context)?;
        let word_waits = WordWaits::of(&context)?;
        let ring = SlotRing::new(&context)?;
        let captured = tickets.take()?;
        drop(current);
        tracing::debug!(device = context.get().ordinal(), image = %module.image, "native kernel loaded");
        let captured_slots = AtomicU64::new(0);
        let inner = Inner { module, tickets, ring, captured, captured_slots, word_waits, context };
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
        // SAFETY: the caller's promises, passed on.
        let mut session = unsafe { Session::new(self, planes, stream, options) }?;
        // SAFETY: as above.
        let launched = unsafe { session.put(job) }?;
        // If that fails, the caller must know that nothing is in flight.
        session.finish().inspect_err(|_| drop(launched.wait()))?;
        Ok(launched)
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

impl Inner {
    /// One kernel launch.
    ///
    /// # Safety
    /// `args` is what the entry takes, and every address it can form is the device's to touch.
    pub(crate) unsafe fn start<T>(
        &self,
        launch: &Launch,
        args: &T,
        stream: CUstream,
    ) -> Result<(), KernelError> {
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
