//! Pinned memory between the device and a slab that the driver does not know.
//!
//! What the driver does with asynchronous copies of pageable memory is left open: it may stage them during
//! the call, wait for the stream first, or read and write the memory later, where the device can reach it.
//! Here the device only touches pinned memory of the mover, and the host copies between that and the slab
//! during the call, so none of it matters.
//!
//! The memory is a ring of parts. A window of the job, as many layers or tokens as fit, passes through one
//! part while the device works on the others.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUstream;
use maru_driver::{DriverError, PinnedBuffer, Ticket, stream as streams};
use maru_layout::{CopyJob, Direction, Run};

use super::completion::State;
use super::plan::{Packed, Plan, Work};
use super::queue::{Queue, Side, size};
use super::{Inner, drain, queue_plan};
use crate::FallbackError;

const PARTS: usize = 4;

/// Fewest bytes of a part.
const LEAST: u64 = 64 << 10;

#[derive(Debug)]
pub(super) struct Bounce {
    memory: PinnedBuffer,
    part_bytes: u64,
    /// Per part, the event after which it is free; `None` if it is.
    parts: [Option<Ticket>; PARTS],
    next: usize,
}

impl Bounce {
    fn new(context: &Arc<CudaContext>, bytes: u64) -> Result<Self, DriverError> {
        let part_bytes = (bytes / PARTS as u64).max(LEAST) & !4095;
        let memory = PinnedBuffer::new(context, size(part_bytes * PARTS as u64))?;
        Ok(Bounce { memory, part_bytes, parts: [None; PARTS], next: 0 })
    }

    fn device(&self, part: usize) -> u64 {
        self.memory.device() + part as u64 * self.part_bytes
    }

    fn host(&self, part: usize) -> *mut u8 {
        self.memory.host().wrapping_add(part * size(self.part_bytes))
    }
}

/// Some layers and some tokens of a job.
struct Window<'a> {
    first_layer: u64,
    layers: u64,
    tokens: &'a Tokens,
}

/// Consecutive tokens of a job.
#[derive(Debug, PartialEq, Eq)]
struct Tokens {
    first: u64,
    count: u64,
    /// Those that are moved, counted from `first`.
    runs: Vec<Run>,
}

impl Inner {
    /// A slab in pageable memory at `host`.
    ///
    /// # Safety
    /// As [`super::DeviceMover::copy_on`]; the context is current and nothing is captured.
    pub(super) unsafe fn pageable(
        &self,
        job: &CopyJob,
        runs: &[Run],
        host: u64,
        stream: CUstream,
    ) -> Result<State, FallbackError> {
        let mut lock = self.bounce.lock().unwrap_or_else(PoisonError::into_inner);
        let bounce = match &mut *lock {
            Some(bounce) => bounce,
            none => none.insert(Bounce::new(self.context.get(), self.options.bounce_bytes)?),
        };
        let g = job.plan().geometry();
        let token_bytes = g.kv_planes * g.token_bytes();
        let room = bounce.part_bytes / token_bytes;
        if room == 0 {
            // SAFETY: the caller's promises, passed on.
            return unsafe { self.pageable_by_driver(job, runs, host, stream) };
        }
        // A store is over when the call returns; for a load the event is taken before anything is queued.
        let ticket = match job.direction() {
            Direction::Gather => None,
            Direction::Scatter => Some(self.tickets.take_event()?),
        };
        let mut done = 0;
        // SAFETY: as above.
        let passed = unsafe { self.pass(bounce, job, &split(runs, room), room, host, stream, &mut done) };
        let passed = passed.and_then(|()| match &ticket {
            None => Ok(()),
            // SAFETY: an event of ours; the stream is the caller's promise.
            Some(ticket) => unsafe { ticket.record(stream) },
        });
        let error = match (passed, ticket) {
            (Ok(()), None) => return Ok(State::Done),
            (Ok(()), Some(ticket)) => return Ok(State::Queued(ticket)),
            (Err(error), _) => error,
        };
        // SAFETY: the stream is the caller's promise.
        let (source, drained) = unsafe { drain(stream, error) };
        if let Some(ticket) = ticket {
            self.tickets.give_back(ticket, drained);
        }
        if !drained && let Some(bounce) = lock.take() {
            // The device may still use it, so nobody else does; the next call makes another.
            std::mem::forget(bounce);
        }
        let layers_done = if drained { done } else { 0 };
        Err(FallbackError::CopyFailed { layers_done, layers: job.layer_count(), source })
    }

    /// Moves window after window.
    ///
    /// # Safety
    /// As [`Inner::pageable`].
    #[allow(clippy::too_many_arguments, reason = "one caller; the parts of one call")]
    unsafe fn pass(
        &self,
        bounce: &mut Bounce,
        job: &CopyJob,
        tokens: &[Tokens],
        room: u64,
        host: u64,
        stream: CUstream,
        done: &mut u32,
    ) -> Result<(), DriverError> {
        let layers = u64::from(job.layer_count());
        // Several layers at a time only where all tokens of one fit.
        let together = if let [all] = tokens { (room / all.count).max(1) } else { 1 };
        let mut on_the_way = VecDeque::with_capacity(PARTS);
        let mut first_layer = 0;
        while first_layer < layers {
            let count = together.min(layers - first_layer);
            for tokens in tokens {
                if on_the_way.len() == PARTS {
                    // SAFETY: as for this function.
                    unsafe { self.arrive(bounce, job, on_the_way.pop_front(), host, done) }?;
                }
                let part = bounce.next;
                self.free(bounce, part)?;
                bounce.next = (part + 1) % PARTS;
                let window = Window { first_layer, layers: count, tokens };
                if job.direction() == Direction::Scatter {
                    // SAFETY: as for this function; the part is free.
                    unsafe { host_copy(job, &window, host, bounce.host(part)) };
                }
                let ticket = self.tickets.take_event()?;
                // From here on an error leaves the part taken until its event says otherwise.
                bounce.parts[part] = Some(ticket);
                // SAFETY: as for this function; the part is memory of ours, free, and as large as the window.
                unsafe { self.depart(job, &window, bounce.device(part), stream) }?;
                // SAFETY: an event of ours; the stream is the caller's promise.
                unsafe { ticket.record(stream) }?;
                match job.direction() {
                    Direction::Gather => on_the_way.push_back((part, window)),
                    Direction::Scatter => *done = finished(&window, job),
                }
            }
            first_layer += count;
        }
        while let Some(oldest) = on_the_way.pop_front() {
            // SAFETY: as for this function.
            unsafe { self.arrive(bounce, job, Some(oldest), host, done) }?;
        }
        Ok(())
    }

    /// Queues the copies between the cache and a part.
    ///
    /// # Safety
    /// As [`Inner::pageable`]; `part` is pinned memory that nobody uses, of the window's size.
    unsafe fn depart(
        &self,
        job: &CopyJob,
        window: &Window<'_>,
        part: u64,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        let ends = (job.direction(), Side::Registered);
        // What the host put into a part stays there until the copy is over.
        let batched = !streams::is_legacy_default(stream);
        let mut queue = Queue::new(self.abilities(ends.1), stream, ends, batched, true);
        let image = image(job, window, part);
        let work = Work::new(job, image, &window.tokens.runs, window.first_layer, window.layers);
        let plan = Plan::new(work, queue.limits());
        // SAFETY: the caller's promises, passed on.
        let queued = unsafe { queue_plan(&mut queue, &plan, &mut 0) };
        self.learn(&queue);
        queued
    }

    /// Waits for a window of a store and copies it to the slab.
    ///
    /// # Safety
    /// As [`Inner::pageable`].
    unsafe fn arrive(
        &self,
        bounce: &mut Bounce,
        job: &CopyJob,
        window: Option<(usize, Window<'_>)>,
        host: u64,
        done: &mut u32,
    ) -> Result<(), DriverError> {
        let Some((part, window)) = window else { return Ok(()) };
        self.free(bounce, part)?;
        // SAFETY: as for this function; the device is done with the part.
        unsafe { host_copy(job, &window, host, bounce.host(part)) };
        *done = finished(&window, job);
        Ok(())
    }

    /// Waits until the device is done with a part.
    fn free(&self, bounce: &mut Bounce, part: usize) -> Result<(), DriverError> {
        if let Some(ticket) = bounce.parts[part] {
            // SAFETY: an event of our pool.
            unsafe { ticket.wait() }?;
            self.tickets.give_back(ticket, true);
            bounce.parts[part] = None;
        }
        Ok(())
    }

    /// A slab whose tokens are larger than a part: the driver's own copies, one by one, and a wait for the
    /// stream, after which even the loosest reading of its promises has them complete.
    ///
    /// # Safety
    /// As [`Inner::pageable`].
    unsafe fn pageable_by_driver(
        &self,
        job: &CopyJob,
        runs: &[Run],
        host: u64,
        stream: CUstream,
    ) -> Result<State, FallbackError> {
        let ends = (job.direction(), Side::Pageable);
        let mut queue = Queue::new(self.abilities(ends.1), stream, ends, false, false);
        let layers = u64::from(job.layer_count());
        let plan = Plan::new(Work::new(job, Packed::of(job, host), runs, 0, layers), queue.limits());
        let mut done = 0;
        // SAFETY: the caller's promises, passed on.
        let queued = unsafe { queue_plan(&mut queue, &plan, &mut done) };
        let error = match queued {
            // SAFETY: the stream is the caller's promise.
            Ok(()) => match unsafe { streams::synchronize(stream) } {
                Ok(()) => return Ok(State::Done),
                Err(error) => error,
            },
            Err(error) => error,
        };
        // SAFETY: as above.
        let (source, drained) = unsafe { drain(stream, error) };
        let layers_done = if drained { done } else { 0 };
        Err(FallbackError::CopyFailed { layers_done, layers: job.layer_count(), source })
    }

    /// Waits until the device is done with all parts, so that they can be freed.
    pub(super) fn empty_bounce(&mut self) {
        let mut slot = self.bounce.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(bounce) = &mut *slot else { return };
        let waited = self.context.enter().and_then(|_current| {
            bounce.parts.iter().flatten().try_for_each(|ticket| {
                // SAFETY: an event of our pool.
                unsafe { ticket.wait() }
            })
        });
        if let Err(error) = waited
            && !error.is_context_lost()
            && let Some(bounce) = slot.take()
        {
            tracing::error!(%error, "pinned memory leaks: the device may still use it");
            std::mem::forget(bounce);
        }
    }
}

/// Layers that are over once this window is, all before it being so.
fn finished(window: &Window<'_>, job: &CopyJob) -> u32 {
    let last_run = match job.slots() {
        maru_layout::JobSlots::Host { runs, .. } => runs.last(),
        _ => None,
    };
    let end = last_run.map_or(0, |run| run.token + run.len);
    let whole = window.tokens.first + window.tokens.count >= end;
    let layers = if whole { window.first_layer + window.layers } else { window.first_layer };
    u32::try_from(layers).unwrap_or(u32::MAX)
}

/// A window as it lies in a part that begins at `addr`: `[layer][plane][token]`, packed.
fn image(job: &CopyJob, window: &Window<'_>, addr: u64) -> Packed {
    let g = job.plan().geometry();
    let token = g.token_bytes();
    let kv = window.tokens.count * token;
    Packed { addr, kv, layer: g.kv_planes * kv, token }
}

/// Cuts the moved tokens into spans of at most `room`.
fn split(runs: &[Run], room: u64) -> Vec<Tokens> {
    let mut all: Vec<Tokens> = Vec::new();
    for run in runs {
        let (mut token, mut slot, mut left) = (run.token, run.slot, run.len);
        while left > 0 {
            let fits = |t: &Tokens| token < t.first + room;
            if !all.last().is_some_and(fits) {
                all.push(Tokens { first: token, count: 0, runs: Vec::new() });
            }
            let Some(last) = all.last_mut() else { return all };
            let len = left.min(last.first + room - token);
            last.runs.push(Run { token: token - last.first, slot, len });
            last.count = token - last.first + len;
            (token, slot, left) = (token + len, slot + len, left - len);
        }
    }
    all
}

/// Copies the moved tokens of a window between the slab and a part.
///
/// # Safety
/// The job's slab is at `slab`, readable for a load and writable for a store, and nobody else uses those
/// bytes; the same goes for the part, of the window's size.
unsafe fn host_copy(job: &CopyJob, window: &Window<'_>, slab: u64, part: *mut u8) {
    let g = job.plan().geometry();
    let (slab_side, part_side) = (Packed::of(job, slab), image(job, window, 0));
    let token_bytes = g.token_bytes();
    let dense = slab_side.token == token_bytes;
    let first = window.first_layer * slab_side.layer + window.tokens.first * slab_side.token;
    for layer in 0..window.layers {
        for kv in 0..g.kv_planes {
            for span in spans(&window.tokens.runs) {
                let (pieces, bytes) = if dense { (1, span.1 * token_bytes) } else { (span.1, token_bytes) };
                for token in span.0..span.0 + pieces {
                    let at = |p: &Packed| layer * p.layer + kv * p.kv + token * p.token;
                    let slab = size(slab + first + at(&slab_side));
                    let part = part.wrapping_add(size(at(&part_side)));
                    match job.direction() {
                        Direction::Gather => {
                            let slab = std::ptr::with_exposed_provenance_mut::<u8>(slab);
                            // SAFETY: bytes of the job on one side, of its window's image on the other.
                            unsafe { std::ptr::copy_nonoverlapping(part, slab, size(bytes)) };
                        }
                        Direction::Scatter => {
                            let slab = std::ptr::with_exposed_provenance::<u8>(slab);
                            // SAFETY: as above.
                            unsafe { std::ptr::copy_nonoverlapping(slab, part, size(bytes)) };
                        }
                    }
                }
            }
        }
    }
}

/// Moved tokens as (first, count), runs that follow each other as one.
fn spans(runs: &[Run]) -> impl Iterator<Item = (u64, u64)> + '_ {
    runs.chunk_by(|a, b| a.token + a.len == b.token).map(|chunk| {
        let (first, last) = (&chunk[0], &chunk[chunk.len() - 1]);
        (first.token, last.token + last.len - first.token)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(token: u64, slot: u64, len: u64) -> Run {
        Run { token, slot, len }
    }

    #[test]
    fn tokens_are_cut_into_what_fits() {
        let runs = [run(3, 100, 5), run(8, 40, 4), run(20, 7, 9)];
        let all = split(&runs, 100);
        assert_eq!(
            all,
            [Tokens { first: 3, count: 26, runs: vec![run(0, 100, 5), run(5, 40, 4), run(17, 7, 9)] }]
        );
        let cut = split(&runs, 7);
        assert_eq!(
            cut,
            [
                Tokens { first: 3, count: 7, runs: vec![run(0, 100, 5), run(5, 40, 2)] },
                Tokens { first: 10, count: 2, runs: vec![run(0, 42, 2)] },
                Tokens { first: 20, count: 7, runs: vec![run(0, 7, 7)] },
                Tokens { first: 27, count: 2, runs: vec![run(0, 14, 2)] },
            ]
        );
    }

    #[test]
    fn neighbouring_runs_are_one_span() {
        let runs = [run(0, 9, 2), run(2, 1, 3), run(6, 0, 1)];
        assert_eq!(spans(&runs).collect::<Vec<_>>(), [(0, 5), (6, 1)]);
    }
}
