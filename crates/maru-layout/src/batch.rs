//! Jobs that are checked together: one pass over each list of slots, and what that needs allocated once.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::marks::{Marked, Marks, find_duplicate};
use crate::{CopyJob, CopyPlan, Direction, JobRequest, JobSlots, LayoutError, Run};

/// Most runs whose memory a thread keeps, 1.5 MiB.
const KEPT_RUNS: usize = 1 << 16;

/// Runs that a job is expected to have: 256 tokens in blocks of 16.
const RUNS: usize = 16;

/// Which jobs are known to write other slots than each other: those of one group, each of which has another place.
/// A job and its copies have the same place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// 0 for a job of which nothing is known.
    group: u64,
    place: u64,
}

impl Place {
    /// Whether the other one is a later job of the same group.
    fn is_before(self, other: Place) -> bool {
        self.group != 0 && self.group == other.group && self.place < other.place
    }
}

static NEXT_GROUP: AtomicU64 = AtomicU64::new(1);

fn next_group() -> u64 {
    NEXT_GROUP.fetch_add(1, Ordering::Relaxed)
}

/// What checking needs; each thread keeps one.
#[derive(Debug, Default)]
struct Scratch {
    runs: Vec<Run>,
    marks: Marks,
}

impl Scratch {
    const NEW: Scratch = Scratch { runs: Vec::new(), marks: Marks::NEW };
}

thread_local! {
    static KEPT: Cell<Scratch> = const { Cell::new(Scratch::NEW) };
}

/// A thread's [`Scratch`], taken for as long as this lives.
#[derive(Debug)]
struct Taken(Scratch);

impl Taken {
    fn new() -> Self {
        // Nothing is kept when the thread is ending, or by a second one at a time.
        Taken(KEPT.try_with(Cell::take).unwrap_or_default())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut scratch = std::mem::take(&mut self.0);
        scratch.runs.clear();
        scratch.runs.shrink_to(KEPT_RUNS);
        // Of a thread that is ending, nothing is to be kept.
        let _ = KEPT.try_with(|kept| kept.set(scratch));
    }
}

/// Checks requests one after the other and makes jobs of them, as [`CopyJob::new`] does, for less: the jobs share the
/// memory of their runs, and know of each other which of them write different slots ([`JobBatch::apart`]).
///
/// ```
/// # use std::sync::Arc;
/// # use maru_layout::*;
/// # let tensor = TensorDesc::contiguous(&[6, 2, 16, 2, 128], DType::Bf16)?;
/// # let spec = CacheSpec { block_size: Some(16), ..CacheSpec::default() };
/// # let paged = PagedLayout::detect(&tensor, &spec)?;
/// # let plan = Arc::new(CopyPlan::new(&paged, &SlabLayout::of_cache(&paged, 2, 1, 16)?, vec![0x1000, 0x3000])?);
/// # let request = |block| JobRequest {
/// #     direction: Direction::Scatter,
/// #     slab: SlabSpan { host: Some(0x100_0000), device: None, len: 1 << 20 },
/// #     slots: SlotMapping::from_blocks(&[block], 16, 0..16).unwrap(),
/// #     skip_tokens: 0,
/// #     partial: false,
/// #     layers: None,
/// # };
/// let mut batch = JobBatch::with_capacity(3);
/// for block in [4, 2, 4] {
///     batch.push(&plan, request(block))?;
/// }
/// let jobs = batch.finish();
/// // The third writes the slots of the first.
/// assert_eq!((jobs.len(), JobBatch::apart(&jobs)), (3, 2));
/// # Ok::<(), maru_layout::LayoutError>(())
/// ```
#[derive(Debug)]
pub struct JobBatch {
    jobs: Vec<CopyJob>,
    scratch: Taken,
    /// Of the jobs whose slots the set holds.
    group: u64,
}

impl JobBatch {
    /// An empty batch for so many jobs; more can be put in.
    pub fn with_capacity(jobs: usize) -> Self {
        let scratch = Taken::new();
        JobBatch { jobs: Vec::with_capacity(jobs), scratch, group: 0 }
    }

    /// Checks a request against a plan and adds its job. A request that is refused leaves the batch as it was.
    ///
    /// # Errors
    /// As [`CopyJob::new`].
    pub fn push(&mut self, plan: &Arc<CopyPlan>, request: JobRequest) -> Result<(), LayoutError> {
        let Scratch { runs, .. } = &mut self.scratch.0;
        let before = runs.len();
        let added = CopyJob::check(plan, request, runs).and_then(|mut job| {
            if writes_slots(&job) {
                job.place = self.place(before, plan.geometry().num_slots)?;
            }
            self.jobs.push(job);
            Ok(())
        });
        if added.is_err() {
            self.scratch.0.runs.truncate(before);
        }
        added
    }

    /// Sees to it that the runs from `first` on name no slot twice, and which jobs they share none with.
    fn place(&mut self, first: usize, num_slots: u64) -> Result<Place, LayoutError> {
        let expected = RUNS.saturating_mul(self.jobs.capacity());
        let Scratch { runs, marks } = &mut self.scratch.0;
        let own = runs.get(first..).unwrap_or_default();
        let begun = self.group != 0;
        if !begun {
            marks.clear(expected, num_slots);
            self.group = next_group();
        }
        let place = self.jobs.len() as u64;
        let mut marked = marks.mark(own);
        if marked != Marked::New && begun {
            // What it meets may be another job's; it begins a group of its own.
            marks.clear(expected, num_slots);
            self.group = next_group();
            marked = marks.mark(own);
        }
        if marked == Marked::New {
            return Ok(Place { group: self.group, place });
        }
        // The set holds a part of it.
        self.group = 0;
        if marked.is_twice(own) { Err(find_duplicate(own)) } else { Ok(Place::default()) }
    }

    /// The jobs, in the order of their requests.
    pub fn finish(mut self) -> Vec<CopyJob> {
        let mut jobs = std::mem::take(&mut self.jobs);
        let runs: Arc<[Run]> = Arc::from(self.scratch.0.runs.as_slice());
        for job in &mut jobs {
            job.settle(&runs);
        }
        jobs
    }

    /// How many of the first jobs write slots that none of the others among them writes. Jobs of one batch mostly
    /// know; the slots of others are compared. Of a job whose slots are in device memory nothing is known, and it
    /// counts only if it is the first; so does a store.
    pub fn apart(jobs: &[CopyJob]) -> usize {
        let known = |pair: &[CopyJob]| matches!(pair, [a, b] if a.place.is_before(b.place));
        let known = jobs.windows(2).take_while(|pair| known(pair)).count() + 1;
        if known >= jobs.len() {
            return jobs.len();
        }
        let mut scratch = Taken::new();
        let marks = &mut scratch.0.marks;
        let num_slots = jobs.iter().map(|job| job.plan().geometry().num_slots).max().unwrap_or(0);
        marks.clear(RUNS.saturating_mul(jobs.len()), num_slots);
        let new = |job: &&CopyJob| match job.slots() {
            JobSlots::Host { runs, .. } if writes_slots(job) => marks.mark(runs) == Marked::New,
            _ => false,
        };
        // At least what is known, where there are too many slots to compare.
        jobs.iter().take_while(new).count().max(known)
    }
}

fn writes_slots(job: &CopyJob) -> bool {
    job.direction() == Direction::Scatter && matches!(job.slots(), JobSlots::Host { .. })
}

impl CopyJob {
    /// Checks a request against a plan.
    ///
    /// # Errors
    /// [`LayoutError`]: slab too small or outside 64 bits, more slots than tokens or fewer without
    /// permission, more to skip than there is, layers outside the cache, a slot outside it, and a slot
    /// written twice by a scatter.
    pub fn new(plan: Arc<CopyPlan>, request: JobRequest) -> Result<Self, LayoutError> {
        let mut scratch = Taken::new();
        let Scratch { runs, marks } = &mut scratch.0;
        let mut job = CopyJob::check(&plan, request, runs)?;
        if writes_slots(&job) && runs.len() > 1 {
            marks.clear(runs.len(), plan.geometry().num_slots);
            if marks.mark(runs).is_twice(runs) {
                return Err(find_duplicate(runs));
            }
        }
        job.settle(&Arc::from(runs.as_slice()));
        Ok(job)
    }
}
