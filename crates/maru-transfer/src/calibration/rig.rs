//! A cache, a slab and a stream of their own, to time transfers with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUstream};
use maru_driver::stream::OwnStream;
use maru_driver::{Context, DeviceBuffer, PinnedBuffer, Ticket, Tickets, check};
use maru_fallback::{DeviceCopy, DeviceMover, DeviceOptions};
use maru_kernel_cuda::{
    KernelError, LaunchOptions, Launched, PagedCopyKernel, PlaneTable, StagedLaunch, StagedMover,
};
use maru_layout::{
    CopyJob, CopyPlan, DType, Direction, JobRequest, PagedLayout, Pieces, RowKind, SlabLayout, SlabSpan,
    SlotMapping, StridedSpec,
};

use super::RUNS;
use crate::TransferError;

/// Layers of the cache, enough for driver copies of all layers at once to be of a usual size.
const LAYERS: u64 = 32;
const HEADS: u64 = 8;
const HEAD_BYTES: u64 = 256;
const BLOCK: u64 = 16;
const BLOCKS: u64 = 32;
/// Tokens of a whole slab.
const CHUNK: u64 = 256;

const TOKEN_BYTES: u64 = HEADS * HEAD_BYTES;
/// K or V of a block in one layer; V lies behind K.
const HALF_BLOCK: u64 = BLOCK * TOKEN_BYTES;
const LAYER_BYTES: u64 = BLOCKS * 2 * HALF_BLOCK;
/// All of the cache, and of the slabs beside it: 64 MiB.
pub(super) const BYTES: u64 = LAYERS * LAYER_BYTES;

/// A way to move a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mover {
    Direct,
    Staged,
    CopyEngine,
}

/// Why a time is missing.
#[derive(Debug)]
pub(super) enum Stop {
    /// It was not over in time; something is still in flight.
    Stuck,
    Failed(TransferError),
}

impl<E: Into<TransferError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Stop::Failed(error.into())
    }
}

/// A batch, ready to be moved any number of times.
#[derive(Debug)]
pub(super) struct Batch {
    jobs: Vec<CopyJob>,
    /// For the ring; nothing where it does not fit.
    pieces: Option<Vec<Pieces>>,
}

/// What is kept until a transfer is over.
#[derive(Debug)]
enum Flight {
    Direct { _all: Vec<Launched> },
    Staged { _all: StagedLaunch },
    Copies { _last: Option<DeviceCopy> },
    Flat,
}

/// Everything that a measurement needs. Its memory goes with it.
#[derive(Debug)]
pub(super) struct Rig {
    patience: Duration,
    options: LaunchOptions,
    /// Goes first, with everything that uses the rest.
    stream: OwnStream,
    end: Ticket,
    _events: Tickets,
    planes: PlaneTable,
    host: PinnedBuffer,
    cache: DeviceBuffer,
    copies: Option<DeviceMover>,
    ring: StagedMover,
    kernel: PagedCopyKernel,
    context: Context,
}

impl Rig {
    pub(super) fn new(
        kernel: &PagedCopyKernel,
        ring: &StagedMover,
        options: LaunchOptions,
        patience: Duration,
    ) -> Result<Self, TransferError> {
        let context = Context::new(kernel.context().clone());
        let bytes = usize::try_from(BYTES).unwrap_or(usize::MAX);
        let host = PinnedBuffer::new(context.get(), bytes).map_err(KernelError::from)?;
        let cache = DeviceBuffer::new(context.get(), bytes).map_err(KernelError::from)?;
        let planes = kernel.register(&*plan(cache.addr(), RUNS[0], CHUNK)?)?;
        let stream = OwnStream::new(&context).map_err(KernelError::from)?;
        let events = Tickets::new(context.get(), 1);
        let current = context.enter().map_err(KernelError::from)?;
        let end = events.take_event().map_err(KernelError::from)?;
        drop(current);
        let copies = match DeviceMover::open(context.get().clone(), DeviceOptions::default()) {
            Ok(mover) => Some(mover),
            Err(error) if error.kind() == "context_lost" => return Err(error.into()),
            Err(error) => {
                tracing::debug!(%error, "driver copies are not timed");
                None
            }
        };
        let (kernel, ring) = (kernel.clone(), ring.clone());
        Ok(Rig {
            patience,
            options,
            stream,
            end,
            _events: events,
            planes,
            host,
            cache,
            copies,
            ring,
            kernel,
            context,
        })
    }

    pub(super) fn has_copies(&self) -> bool {
        self.copies.is_some()
    }

    /// Driver copies failed and are left out from now on.
    pub(super) fn without_copies(&mut self) {
        self.copies = None;
    }

    /// A batch of `bytes` in slabs of at most 256 tokens, in blocks that are out of order.
    pub(super) fn batch(&self, bytes: u64, run: u64, direction: Direction) -> Result<Batch, TransferError> {
        let token_bytes = LAYERS * 2 * TOKEN_BYTES;
        let tokens = bytes.min(BYTES) / token_bytes;
        let chunk = tokens.min(CHUNK);
        let plan = plan(self.cache.addr(), run, chunk)?;
        let slab_bytes = chunk * token_bytes;
        let mut jobs = Vec::new();
        for at in 0..tokens / chunk {
            let slab = at * slab_bytes;
            let slots: Vec<i64> = (at * chunk..(at + 1) * chunk).filter_map(slot_of).collect();
            let request = JobRequest {
                direction,
                slab: SlabSpan {
                    host: Some(self.host.host().expose_provenance() as u64 + slab),
                    device: Some(self.host.device() + slab),
                    len: slab_bytes,
                },
                slots: SlotMapping::from_slots(slots),
                skip_tokens: 0,
                partial: false,
                layers: None,
            };
            jobs.push(CopyJob::new(Arc::clone(&plan), request)?);
        }
        let pieces = jobs.iter().map(|job| self.ring.pieces(job)).collect();
        Ok(Batch { jobs, pieces })
    }

    /// Moves a batch and waits for it; microseconds from the call to the end. Nothing where this mover cannot.
    pub(super) fn time(&self, batch: &Batch, mover: Mover) -> Result<Option<f64>, Stop> {
        match (mover, &batch.pieces, &self.copies) {
            (Mover::Direct, ..) => self.clock(|stream| {
                // SAFETY: cache, slab and plane table are this rig's, which waits for the end or keeps them; the
                // stream is its own and nobody else touches either memory.
                let all =
                    unsafe { self.kernel.launch_many(&batch.jobs, &self.planes, stream, self.options) }?;
                Ok(Flight::Direct { _all: all })
            }),
            (Mover::Staged, Some(pieces), _) => self.clock(|stream| {
                // SAFETY: as above; the slab is page-locked, and the stream is not being captured.
                let all = unsafe { self.ring.launch(pieces, &self.planes, stream) }?;
                Ok(Flight::Staged { _all: all })
            }),
            (Mover::CopyEngine, _, Some(copies)) => self.clock(|stream| {
                let mut last = None;
                for job in &batch.jobs {
                    // SAFETY: as above.
                    last = Some(unsafe { copies.copy_on(job, stream) }?);
                }
                Ok(Flight::Copies { _last: last })
            }),
            _ => return Ok(None),
        }
        .map(Some)
    }

    /// One copy of as many bytes.
    pub(super) fn time_flat(&self, bytes: u64, direction: Direction) -> Result<f64, Stop> {
        let len = usize::try_from(bytes.min(BYTES)).unwrap_or(0);
        let (host, device) = (self.host.host().cast(), self.cache.addr());
        self.clock(|stream| {
            let (op, result) = match direction {
                Direction::Scatter => {
                    // SAFETY: both buffers have that length and stay until the copy is over.
                    ("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(device, host, len, stream) })
                }
                Direction::Gather => {
                    // SAFETY: as above.
                    ("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(host, device, len, stream) })
                }
            };
            check(op, result).map_err(KernelError::from)?;
            Ok(Flight::Flat)
        })
    }

    /// Microseconds until what `queue` puts on the stream is over. Polls, since being woken takes its time too.
    fn clock(&self, queue: impl FnOnce(CUstream) -> Result<Flight, TransferError>) -> Result<f64, Stop> {
        let _current = self.context.enter().map_err(KernelError::from)?;
        let stream = self.stream.get();
        let begun = Instant::now();
        let flight = queue(stream)?;
        // SAFETY: stream and event are this rig's.
        unsafe { self.end.record(stream) }.map_err(KernelError::from)?;
        // SAFETY: as above.
        while !unsafe { self.end.is_complete() }.map_err(KernelError::from)? {
            if begun.elapsed() > self.patience {
                return Err(Stop::Stuck);
            }
            std::thread::yield_now();
        }
        let time = begun.elapsed();
        drop(flight);
        Ok(time.as_secs_f64() * 1e6)
    }
}

/// The slot of a token: blocks go round the cache in steps, so that no two neighbours are neighbours there.
fn slot_of(token: u64) -> Option<i64> {
    let (block, offset) = (token / BLOCK, token % BLOCK);
    i64::try_from(block * 13 % BLOCKS * BLOCK + offset).ok()
}

/// The cache with runs of `run` bytes (heads side by side, or each head's tokens) and slabs of so many tokens.
fn plan(cache: u64, run: u64, tokens: u64) -> Result<Arc<CopyPlan>, TransferError> {
    let (token_stride, head_stride) = match run {
        HEAD_BYTES => (HEAD_BYTES, BLOCK * HEAD_BYTES),
        _ => (TOKEN_BYTES, HEAD_BYTES),
    };
    let paged = PagedLayout::from_strides(&StridedSpec {
        dtype: DType::U8,
        row_kind: RowKind::Plain,
        kv_planes: 2,
        kv_stride: HALF_BLOCK,
        layers: 1,
        layer_stride: 0,
        num_blocks: BLOCKS,
        block_size: BLOCK,
        num_heads: HEADS,
        head_size: HEAD_BYTES,
        block_stride: 2 * HALF_BLOCK,
        token_stride,
        head_stride,
    })?;
    let slab = SlabLayout::of_cache(&paged, 2, LAYERS, tokens)?;
    let bases: Vec<u64> =
        (0..2).flat_map(|kv| (0..LAYERS).map(move |l| cache + l * LAYER_BYTES + kv * HALF_BLOCK)).collect();
    Ok(Arc::new(CopyPlan::new(&paged, &slab, bases)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibration::SIZES;

    #[test]
    fn the_caches_are_what_the_rows_say() {
        for run in RUNS {
            let plan = plan(1 << 20, run, CHUNK).unwrap();
            let g = plan.geometry();
            let contiguous = if g.tokens_adjacent { g.row_bytes * g.block_size } else { g.row_bytes };
            assert_eq!((contiguous, g.access_bytes), (run, 16));
            assert_eq!(plan.slab().bytes() * 2, BYTES);
        }
    }

    #[test]
    fn every_size_is_a_number_of_slabs_and_fits() {
        for (bytes, _) in SIZES {
            let tokens = bytes / (LAYERS * 2 * TOKEN_BYTES);
            assert_eq!(tokens * LAYERS * 2 * TOKEN_BYTES, bytes);
            assert!(bytes <= BYTES && tokens.is_multiple_of(tokens.min(CHUNK)));
            let mut slots: Vec<_> = (0..tokens).filter_map(slot_of).collect();
            slots.sort_unstable();
            slots.dedup();
            assert_eq!(slots.len() as u64, tokens);
            assert!(slots.last().is_some_and(|s| *s < i64::try_from(BLOCKS * BLOCK).unwrap()));
        }
    }
}
