//! What one call puts on one stream.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys::CUstream;
use maru_driver::stream as streams;
use maru_layout::{CopyJob, JobSlots};

use crate::abi::{INLINE_SLOTS, PagedCopyInlineArgs};
use crate::geometry::{Addresses, BatchLaunch, Launch, Launches, LayersLaunch, SlotSource};
use crate::launched::{Mark, State};
use crate::ring::{CAPACITY, SlotLists};
use crate::tickets::{Ticket, Told};
use crate::{KernelError, LaunchOptions, Launched, PagedCopyKernel, PlaneTable};

/// Most slots of a batch: those of 64 slabs of 256 tokens.
const BATCH_SLOTS: u32 = 4 * CAPACITY;

/// Launches of one cache on one stream, by one call. The context stays current while it lives.
pub(crate) struct Session<'a> {
    kernel: &'a PagedCopyKernel,
    planes: &'a PlaneTable,
    stream: CUstream,
    options: LaunchOptions,
    capturing: bool,
    lists: SlotLists<'a>,
}

impl<'a> Session<'a> {
    /// Asks whether the stream is being captured.
    ///
    /// # Safety
    /// As [`Session::uncaptured`], except that.
    pub(crate) unsafe fn new(
        kernel: &'a PagedCopyKernel,
        planes: &'a PlaneTable,
        stream: CUstream,
        options: LaunchOptions,
    ) -> Result<Self, KernelError> {
        // SAFETY: the caller's promise.
        let capturing = unsafe { streams::is_capturing(stream) }?;
        // SAFETY: as above.
        Ok(Session { capturing, ..unsafe { Session::uncaptured(kernel, planes, stream, options) } })
    }

    /// # Safety
    /// `stream` is a live stream of the kernel's context, which is current while this value lives, and is not being
    /// captured; the jobs put are alive as long.
    pub(crate) unsafe fn uncaptured(
        kernel: &'a PagedCopyKernel,
        planes: &'a PlaneTable,
        stream: CUstream,
        options: LaunchOptions,
    ) -> Self {
        // SAFETY: the caller's promise.
        let lists = unsafe { SlotLists::new(&kernel.inner.ring, stream) };
        Session { kernel, planes, stream, options, capturing: false, lists }
    }

    /// Everything is put.
    pub(crate) fn finish(self) -> Result<(), KernelError> {
        self.lists.finish()
    }

    /// Uploads the slots of jobs that will share launches, before anything that could keep the copy engine busy.
    /// What finds no room is uploaded, or passed by value, with its launch. Not while the stream is being captured:
    /// a graph must not use the ring.
    pub(crate) fn upload(&mut self, jobs: impl Iterator<Item = &'a CopyJob>) -> Result<(), KernelError> {
        if self.capturing {
            return Ok(());
        }
        let lists = jobs.filter_map(|job| match job.slots() {
            JobSlots::Host { slots, .. } => slots.get(usize::try_from(job.skip()).ok()?..),
            JobSlots::Device { .. } | _ => None,
        });
        for list in lists {
            if self.lists.put(list)?.is_none() {
                break;
            }
        }
        self.lists.flush()
    }

    /// Queues the launches of one job.
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch`].
    pub(crate) unsafe fn put(&mut self, job: &CopyJob) -> Result<Launched, KernelError> {
        let kernel = &self.kernel.inner;
        let num_slots = job.plan().geometry().num_slots;
        let planes = self.planes;
        let launched = |state| Launched::new(kernel, planes, state, num_slots);
        if !planes.is_of(job.plan().bases()) {
            return Err(KernelError::WrongPlanes);
        }
        let (source, reports) = match job.slots() {
            JobSlots::Device { addr, .. } => (SlotSource::Device { addr: *addr }, true),
            // A graph must not use the ring: its buffers are used again before a replay.
            JobSlots::Host { slots, .. } => match slots.len() as u64 - job.skip() > INLINE_SLOTS as u64 {
                true if !self.capturing => (SlotSource::Uploaded { capacity: CAPACITY }, false),
                _ => (SlotSource::Inline, false),
            },
            _ => (SlotSource::Inline, false),
        };
        // Looks at the job before a ticket is taken.
        let addresses = Addresses { planes: self.planes.addr(), error: 0 };
        let limits = self.options.limits();
        let mut launches = Launches::new(job, source, addresses, limits)?;
        if launches.is_empty() {
            return Ok(launched(State::Empty));
        }
        let ticket = if self.capturing { kernel.captured } else { kernel.tickets.take()? };
        if reports {
            launches.report_to(ticket.payload.device);
            match self.capturing {
                true => kernel.captured_slots.store(num_slots, Ordering::Relaxed),
                false => ticket.payload.clear(),
            }
        }
        let told = if self.capturing { None } else { ticket.payload.next() };
        // SAFETY: the caller's promises, passed on.
        let queued = unsafe { self.queue(job, launches, told) };
        if self.capturing {
            return queued.map(|()| launched(State::Captured));
        }
        // SAFETY: the stream is live.
        let mark = unsafe { self.kernel.mark(queued, ticket, (told, 1), self.stream) }?;
        Ok(launched(State::Queued { mark, reports }))
    }

    /// Queues the launches of jobs, as few as can be; what is launched goes to `queued`.
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch`], for every job.
    pub(crate) unsafe fn put_many(
        &mut self,
        jobs: &[CopyJob],
        queued: &mut Vec<Launched>,
    ) -> Result<(), KernelError> {
        if let Some(job) = jobs.iter().find(|job| !self.planes.is_of(job.plan().bases())) {
            tracing::debug!(planes = job.plan().bases().len(), "a job of another cache in a batch");
            return Err(KernelError::WrongPlanes);
        }
        // A graph must not use the ring.
        let batches = jobs.len() > 1 && !self.capturing;
        let limits = self.options.limits();
        let mut rest = jobs;
        while let Some(job) = rest.first() {
            let batch =
                batches.then(|| BatchLaunch::new(rest, self.planes.addr(), limits, BATCH_SLOTS)).flatten();
            if let Some(batch) = batch {
                let (together, others) = rest.split_at(batch.jobs);
                // SAFETY: the caller's promises, passed on.
                if let Some(launched) = unsafe { self.put_batch(batch, together) }? {
                    queued.push(launched);
                    rest = others;
                    continue;
                }
            }
            // SAFETY: the caller's promises, passed on.
            queued.push(unsafe { self.put(job) }?);
            rest = &rest[1..];
        }
        Ok(())
    }

    /// One launch for several jobs; `None` if there is no room for their slots now.
    ///
    /// # Safety
    /// As [`Session::put_many`]; the stream is not being captured.
    unsafe fn put_batch(
        &mut self,
        mut batch: BatchLaunch,
        jobs: &[CopyJob],
    ) -> Result<Option<Launched>, KernelError> {
        if !self.upload_slots(&mut batch, jobs)? {
            return Ok(None);
        }
        let ticket = self.kernel.inner.tickets.take()?;
        let told = ticket.payload.next();
        told.inspect(|told| told.by(&mut batch.args.copy));
        // SAFETY: the caller's promises, passed on.
        unsafe { self.launch(&batch, &batch.args, ticket, (told, 1), jobs) }.map(Some)
    }

    /// One launch for all jobs in the order of their layers, telling of each run of them; `None` if that cannot be.
    ///
    /// # Safety
    /// As [`Session::put_many`].
    pub(crate) unsafe fn put_layers(
        &mut self,
        jobs: &[CopyJob],
        layers_per_run: u32,
    ) -> Result<Option<Launched>, KernelError> {
        let kernel = &self.kernel.inner;
        let limits = self.options.limits();
        let planned = LayersLaunch::new(jobs, self.planes.addr(), limits, layers_per_run);
        let Some(mut layers) = planned.filter(|_| !self.capturing) else { return Ok(None) };
        // Before the slots, whose buffers would be taken in vain.
        let Some(ticket) = kernel.tickets.take_layered()? else { return Ok(None) };
        let uploaded = if layers.is_inline() { Ok(true) } else { self.upload_slots(&mut layers.batch, jobs) };
        let told = uploaded.as_ref().is_ok_and(|there| *there).then(|| ticket.payload.next()).flatten();
        let Some(told) = told else {
            kernel.tickets.give_back(ticket, true);
            return uploaded.map(|_| None);
        };
        told.by(&mut layers.batch.args.copy);
        let (words, tells) = (told.device(), (Some(told), layers.runs as usize));
        match jobs {
            [job] if layers.is_inline() => {
                let args = layers.inline_args(words, layers.batch.slots(job));
                // SAFETY: the caller's promises, passed on.
                unsafe { self.launch(&layers.batch, &args, ticket, tells, jobs) }
            }
            // SAFETY: as above.
            _ => unsafe { self.launch(&layers.batch, &layers.args(words), ticket, tells, jobs) },
        }
        .map(Some)
    }

    /// Puts the slots of jobs where their launch reads them; false if there is no room now.
    fn upload_slots(&mut self, batch: &mut BatchLaunch, jobs: &[CopyJob]) -> Result<bool, KernelError> {
        let mut all = true;
        for (i, job) in jobs.iter().enumerate() {
            let Some(addr) = self.lists.put(batch.slots(job))? else {
                all = false;
                break;
            };
            batch.set_slots(i, addr);
        }
        self.lists.flush()?;
        Ok(all)
    }

    /// Launches jobs together, telling of so many runs.
    ///
    /// # Safety
    /// As [`Session::put_many`]; the arguments are those of the launch's entry, made of these jobs and their slots, which
    /// are uploaded or go by value, as the entry takes them.
    unsafe fn launch<T>(
        &self,
        batch: &BatchLaunch,
        args: &T,
        ticket: Ticket,
        told: (Option<Told>, usize),
        jobs: &[CopyJob],
    ) -> Result<Launched, KernelError> {
        let kernel = &self.kernel.inner;
        let shape = (batch.entry, batch.blocks, batch.threads);
        // SAFETY: the caller's promise.
        let started = unsafe { kernel.start_entry(shape, args, self.stream) };
        // SAFETY: the stream is live.
        let mark = unsafe { self.kernel.mark(started, ticket, told, self.stream) }?;
        let num_slots = jobs.first().map_or(0, |job| job.plan().geometry().num_slots);
        let state = State::Queued { mark, reports: false };
        Ok(Launched::new(kernel, self.planes, state, num_slots))
    }

    /// Queues every launch of a job. `told`: how the last of them tells that it is over.
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch`].
    unsafe fn queue(
        &mut self,
        job: &CopyJob,
        launches: Launches,
        told: Option<Told>,
    ) -> Result<(), KernelError> {
        let host: &[i64] = match job.slots() {
            JobSlots::Host { slots, .. } => slots,
            _ => &[],
        };
        let uploads = launches.source_is_uploaded();
        let mut launches = launches.peekable();
        while let Some(mut launch) = launches.next() {
            let told = told.filter(|_| launches.peek().is_none());
            let slots = launch.slots(host);
            let uploaded = if uploads { self.lists.put(slots)? } else { None };
            if let Some(addr) = uploaded {
                self.lists.flush()?;
                launch.args.slots = addr;
            } else if !host.is_empty() {
                // SAFETY: as for this function.
                unsafe { self.queue_inline(&launch, slots, told) }?;
                continue;
            }
            told.inspect(|told| told.by(&mut launch.args));
            // SAFETY: the arguments come from a checked job; its memory is the caller's promise.
            unsafe { self.kernel.inner.start(&launch, &launch.args, self.stream) }?;
        }
        Ok(())
    }

    /// Queues one launch with its slots by value, cut where they are too many.
    ///
    /// # Safety
    /// As [`PagedCopyKernel::launch`].
    unsafe fn queue_inline(
        &self,
        launch: &Launch,
        slots: &[i64],
        told: Option<Told>,
    ) -> Result<(), KernelError> {
        let mut pieces = launch.inline_pieces(slots).peekable();
        while let Some((piece, slots)) = pieces.next() {
            let mut args = PagedCopyInlineArgs { copy: piece.args, slots: [0; INLINE_SLOTS] };
            args.slots[..slots.len()].copy_from_slice(slots);
            told.filter(|_| pieces.peek().is_none()).inspect(|told| told.by(&mut args.copy));
            // SAFETY: the arguments come from a checked job; its memory is the caller's promise.
            unsafe { self.kernel.inner.start(&piece, &args, self.stream) }?;
        }
        Ok(())
    }
}

impl PagedCopyKernel {
    /// Marks the end of what was queued on a stream, the last launch of which tells of so many runs. If something
    /// failed, waits for what is there, so that its memory may be reused once the error is returned.
    ///
    /// # Safety
    /// A live stream; the context is current.
    pub(crate) unsafe fn mark(
        &self,
        outcome: Result<(), KernelError>,
        ticket: Ticket,
        (told, runs): (Option<Told>, usize),
        stream: CUstream,
    ) -> Result<Arc<Mark>, KernelError> {
        // SAFETY: the pool is alive; the stream is the caller's promise.
        let marked = outcome.and_then(|()| Ok(unsafe { ticket.record(stream) }?));
        let Err(error) = marked else { return Ok(Mark::new(&self.inner, ticket, told, runs)) };
        // SAFETY: the stream is the caller's promise.
        if unsafe { streams::synchronize(stream) }.is_ok() {
            self.inner.tickets.give_back(ticket, true);
        }
        Err(error)
    }
}
