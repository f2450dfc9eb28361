//! The host mover: which loop, how many threads, in which order.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};

use maru_layout::{CopyJob, Direction, Geometry, JobSlots};

use crate::nest::Ahead;
use crate::pieces::{self, Piece, Planes, Way, size};
use crate::store::{MoveNest, fence};
use crate::{FallbackError, Store};

/// Most threads a mover takes.
const MAX_THREADS: usize = 1024;

/// Most threads that `0` stands for. One thread moves some 10 GB/s, so that one or two saturate a CXL expander
/// and a handful a socket's memory; what is left of the cores belongs to the engine.
const AUTO_THREADS: usize = 8;

/// How far ahead of what is read is prefetched, in bytes read: far enough that the start of the next block, which
/// no hardware can guess, is there in time.
const AHEAD: usize = 8192;

/// What decides how a job is carried out. Every value moves the same bytes.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Kind of stores for large jobs; `None` = the best this processor has.
    pub store: Option<Store>,
    /// Jobs of fewer bytes use ordinary stores.
    pub stream_from: u64,
    /// Bytes for which a thread takes part.
    pub unit_bytes: u64,
    /// Most bytes of a plane in one piece.
    pub piece_bytes: u64,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning { store: None, stream_from: 1 << 20, unit_bytes: 2 << 20, piece_bytes: 64 << 10 }
    }
}

/// Moves jobs whose cache and slab are both in host memory, at about the speed of `memcpy`.
///
/// Any number of threads may use one mover at a time. Jobs below 1 MiB are copied with ordinary stores and stay
/// in the caches; larger ones bypass them with the widest streaming stores this processor has.
#[derive(Debug)]
pub struct HostMover {
    threads: usize,
    tuning: Tuning,
    stream: MoveNest,
    /// The threads besides the caller's; `None` for one thread.
    workers: Option<rayon_core::ThreadPool>,
}

impl HostMover {
    /// A mover that uses up to `threads` threads for a job, the caller's among them; 0 = as many as help: one
    /// for each processor available to this process, at most 8.
    ///
    /// The threads besides the caller's are started here, sleep between jobs and end with the mover. A job
    /// uses one thread for every 2 MiB it moves, so that small ones wake nobody.
    ///
    /// # Errors
    /// [`FallbackError::TooManyThreads`] over 1024; [`FallbackError::Threads`] when the workers cannot be started.
    pub fn new(threads: usize) -> Result<HostMover, FallbackError> {
        Self::tuned(threads, Tuning::default())
    }

    /// A mover with chosen stores and thresholds, for tests and measurements.
    #[doc(hidden)]
    pub fn tuned(threads: usize, tuning: Tuning) -> Result<HostMover, FallbackError> {
        if threads > MAX_THREADS {
            return Err(FallbackError::TooManyThreads { found: threads, max: MAX_THREADS });
        }
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()).min(AUTO_THREADS),
            n => n,
        };
        let store = tuning.store.unwrap_or_else(Store::best);
        let stream = store
            .mover()
            .ok_or_else(|| FallbackError::StoreNotAvailable { store, available: Store::available() })?;
        let workers = match threads {
            1 => None,
            _ => Some(
                rayon_core::ThreadPoolBuilder::new()
                    .num_threads(threads - 1)
                    .thread_name(|i| format!("maru-copy-{i}"))
                    .build()
                    .map_err(|e| FallbackError::Threads { threads, reason: e.to_string() })?,
            ),
        };
        Ok(HostMover { threads, tuning, stream, workers })
    }

    /// Threads a large job uses, the caller's among them.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Carries out a job; done when it returns.
    ///
    /// # Errors
    /// [`FallbackError::NoHostAddress`], [`FallbackError::DeviceSlots`]: before anything is moved.
    ///
    /// # Safety
    /// Every plane of the job and its slab, `job.slab().host`, are memory mapped into this process until the
    /// call returns, readable where the job reads and writable where it writes. During the call nobody writes
    /// the bytes it reads, and nobody reads or writes the bytes it writes. The two are disjoint. Other bytes
    /// of the same memory, between rows for instance, may be in use by anyone.
    pub unsafe fn copy(&self, job: &CopyJob) -> Result<(), FallbackError> {
        let slab = job.slab();
        let host = slab.host.ok_or(FallbackError::NoHostAddress { len: slab.len })?;
        let runs = match job.slots() {
            JobSlots::Host { runs, .. } => runs,
            JobSlots::Device { addr, len } => {
                return Err(FallbackError::DeviceSlots { addr: *addr, len: *len });
            }
            _ => return Err(FallbackError::DeviceSlots { addr: 0, len: job.tokens() }),
        };
        if job.is_empty() {
            return Ok(());
        }
        let bytes = job.bytes();
        let g = *job.plan().geometry();
        let work = Work {
            pieces: pieces::cut(&g, runs, self.tuning.piece_bytes),
            planes: pieces::planes(job, host),
            direction: job.direction(),
            g,
            mover: if bytes < self.tuning.stream_from { crate::nest::plain } else { self.stream },
        };
        let per_thread = self.tuning.unit_bytes.max(1);
        let threads = size(bytes / per_thread).clamp(1, self.threads);
        let wanted = if threads == 1 { 1 } else { size(bytes.div_ceil(per_thread)) };
        let units = units(work.planes.len(), work.pieces.len(), wanted);
        let next = AtomicUsize::new(0);
        let help = || {
            while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                // SAFETY: the contract of this function, which returns after the last unit. Units are disjoint
                // and the counter gives each to one thread.
                unsafe { work.run(*unit) };
            }
            // The scope's end synchronises ordinary stores with the caller; this does so for streaming ones.
            fence();
        };
        match &self.workers {
            Some(pool) if threads > 1 => pool.in_place_scope(|scope| {
                for _ in 1..threads {
                    scope.spawn(|_| help());
                }
                help();
            }),
            _ => help(),
        }
        Ok(())
    }
}

/// A job, cut.
struct Work {
    pieces: Vec<Piece>,
    planes: Vec<Planes>,
    direction: Direction,
    g: Geometry,
    mover: MoveNest,
}

/// Pieces `first..end` of one entry of [`Work::planes`].
#[derive(Clone, Copy, Debug)]
struct Unit {
    planes: usize,
    first: usize,
    end: usize,
}

/// Everything, in about `wanted` units, at least one for each of the planes; there is a piece.
fn units(planes: usize, pieces: usize, wanted: usize) -> Vec<Unit> {
    let parts = wanted.div_ceil(planes.max(1)).clamp(1, pieces);
    let step = pieces.div_ceil(parts);
    (0..planes)
        .flat_map(|planes| {
            let starts = (0..pieces).step_by(step);
            starts.map(move |first| Unit { planes, first, end: (first + step).min(pieces) })
        })
        .collect()
}

impl Work {
    /// Moves a unit. No fence.
    ///
    /// # Safety
    /// As [`HostMover::copy`] for the job's bytes in this unit.
    unsafe fn run(&self, unit: Unit) {
        let planes = &self.planes[unit.planes];
        let mut tokens = 0;
        let mut way = None;
        for at in unit.first..unit.end {
            let piece = &self.pieces[at];
            if way.is_none() || piece.tokens != tokens {
                tokens = piece.tokens;
                way = Some(planes.way(&self.g, self.direction, tokens));
            }
            let Some(way) = &way else { return };
            let (paged, slab) = (size(planes.paged + piece.paged), size(planes.slab + piece.slab));
            let (dst, src) = match self.direction {
                Direction::Gather => (slab, paged),
                Direction::Scatter => (paged, slab),
            };
            let ahead = self.ahead(unit, at, src, way);
            let dst = core::ptr::with_exposed_provenance_mut(dst);
            let src = core::ptr::with_exposed_provenance(src);
            // SAFETY: the rows of a job are in bounds of memory for which the caller vouches, and the mover
            // was chosen by the processor's features.
            unsafe { (self.mover)(&way.nest, dst, src, ahead) };
        }
    }

    /// What to prefetch while piece `at` is read from `src` on: what comes [`AHEAD`] bytes later, be it in
    /// another piece.
    fn ahead(&self, unit: Unit, at: usize, src: usize, way: &Way) -> Ahead {
        let far = AHEAD.cast_signed();
        let dense = way.span <= way.bytes + way.bytes / 4;
        let (span, bytes) = (size(way.span), size(way.bytes));
        // Pieces smaller than the distance, or full of holes: the same place some pieces on.
        let skip = if dense { 1.max(AHEAD / bytes.max(1)) } else { 1 + AHEAD / bytes.max(1) };
        let Some(next) = self.source(unit, at + skip) else {
            return Ahead { border: 0, before: 0, after: 0 };
        };
        match dense && span > AHEAD {
            true => {
                let border = src + span - AHEAD;
                Ahead { border, before: far, after: next.wrapping_sub(border).cast_signed() }
            }
            false => Ahead { border: 0, before: 0, after: next.wrapping_sub(src).cast_signed() },
        }
    }

    /// Where piece `at` is read; behind the last, the first of the next planes.
    fn source(&self, unit: Unit, at: usize) -> Option<usize> {
        let (planes, piece) = match self.pieces.get(at) {
            Some(piece) => (self.planes.get(unit.planes), piece),
            None => (self.planes.get(unit.planes + 1), self.pieces.first()?),
        };
        planes.map(|planes| match self.direction {
            Direction::Gather => size(planes.paged + piece.paged),
            Direction::Scatter => size(planes.slab + piece.slab),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::units;

    #[test]
    fn units_are_a_partition_of_the_work() {
        for pieces in 1..9 {
            for planes in 1..5 {
                for wanted in [0, 1, 2, 3, 7, 100] {
                    let mut seen = vec![0; planes * pieces];
                    for unit in units(planes, pieces, wanted) {
                        for at in unit.first..unit.end {
                            seen[unit.planes * pieces + at] += 1;
                        }
                    }
                    assert!(seen.iter().all(|n| *n == 1), "{planes} x {pieces} in {wanted}: {seen:?}");
                }
            }
        }
    }
}
