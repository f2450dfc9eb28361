//! Several jobs in one launch.

use std::sync::Arc;

use maru_layout::{CopyJob, Direction, JobBatch, JobSlots};

use super::{Addresses, Launch, Launches, Limits, MAX_UNITS, SlotSource};
use super::{division, narrow, window};
use crate::abi::{BATCH_SLABS, Entry, PagedCopyBatchArgs, PagedCopySlab};

/// One launch for the first jobs of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLaunch {
    /// Jobs it takes.
    pub jobs: usize,
    /// Slots of each job, from [`BatchLaunch::first_token`] on.
    pub tokens: u32,
    /// First token moved.
    pub first_token: u64,
    /// Which kernel.
    pub entry: Entry,
    /// Thread blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Its arguments; `slots` of the slabs is left 0.
    pub args: PagedCopyBatchArgs,
}

impl BatchLaunch {
    /// Plans the longest beginning of `jobs` that can share a launch: one plan, direction, layers, number of
    /// tokens and prefix to skip, full access width, slots on the host (`slot_capacity` in all), and no two that write
    /// the same memory: one after the other they have an order. `None` if that is fewer than two.
    pub fn new(jobs: &[CopyJob], planes: u64, limits: Limits, slot_capacity: u32) -> Option<Self> {
        let first = jobs.first()?;
        let launch = whole(first, planes, limits)?;
        let units = limits.units.clamp(1, MAX_UNITS) / launch.args.units;
        let most = BATCH_SLABS
            .min(usize::try_from(slot_capacity / launch.args.tokens).unwrap_or(0))
            .min(usize::try_from(units).unwrap_or(0));
        let taken = jobs.iter().take(most).take_while(|job| alike(first, job)).count();
        let taken = if taken < 2 { taken } else { apart(&jobs[..taken]) };
        if taken < 2 {
            return None;
        }
        let mut copy = launch.args;
        copy.slab = 0;
        copy.units *= narrow(taken as u64);
        let planes = launch.args.units / (launch.args.tokens * launch.args.token_units);
        let (planes_magic, planes_shift) = division(planes);
        let (blocks, threads) = limits.shape(copy.units);
        let slabs = slabs(&jobs[..taken], &launch)?;
        Some(BatchLaunch {
            jobs: taken,
            tokens: copy.tokens,
            first_token: launch.first_token,
            entry: Entry::batch(first.direction()),
            blocks,
            threads,
            args: PagedCopyBatchArgs { copy, planes, planes_magic, planes_shift, unused: 0, slabs },
        })
    }

    /// Says where the slots of a job are.
    pub fn set_slots(&mut self, job: usize, addr: u64) {
        if let Some(slab) = self.args.slabs[..self.jobs].get_mut(job) {
            slab.slots = addr;
        }
    }

    /// The slots a job brings to the batch.
    pub fn slots<'a>(&self, job: &'a CopyJob) -> &'a [i64] {
        let JobSlots::Host { slots, .. } = job.slots() else { return &[] };
        window(slots, self.first_token, self.tokens)
    }
}

/// The one launch of a job at full access width, slots left out; `None` if that is not one.
pub(super) fn whole(job: &CopyJob, planes: u64, limits: Limits) -> Option<Launch> {
    let source = SlotSource::Uploaded { capacity: u32::MAX };
    let mut launches = Launches::new(job, source, Addresses { planes, error: 0 }, limits).ok()?;
    let launch = launches.next()?;
    (launches.next().is_none() && job.access_bytes() == 16).then_some(launch)
}

/// The slabs of jobs that share a launch, at the first token moved.
pub(super) fn slabs(jobs: &[CopyJob], launch: &Launch) -> Option<[PagedCopySlab; BATCH_SLABS]> {
    let mut slabs = [PagedCopySlab::default(); BATCH_SLABS];
    for (entry, job) in slabs.iter_mut().zip(jobs) {
        let to_first_token = launch.first_token * job.plan().geometry().slab_token_stride;
        entry.slab = job.slab().device? + to_first_token;
    }
    Some(slabs)
}

/// Whether two of the jobs, which are [`alike`], write the same memory.
pub(super) fn overlap(jobs: &[CopyJob]) -> bool {
    apart(jobs) < jobs.len()
}

/// How many of the first jobs, which are [`alike`], write other memory than each other.
fn apart(jobs: &[CopyJob]) -> usize {
    match jobs.first().map(CopyJob::direction) {
        Some(Direction::Gather) => slabs_apart(jobs),
        _ => JobBatch::apart(jobs),
    }
}

/// Of stores: all of them, or one.
fn slabs_apart(jobs: &[CopyJob]) -> usize {
    let span = |job: &CopyJob| {
        let start = job.slab().device.unwrap_or(0);
        (start, start.saturating_add(job.plan().slab().bytes()))
    };
    let ascending = |spans: &[(u64, u64)]| spans.windows(2).all(|pair| pair[0].1 <= pair[1].0);
    let mut written: Vec<(u64, u64)> = jobs.iter().map(span).collect();
    // Slabs mostly come in the order in which they lie.
    if !ascending(&written) {
        written.sort_unstable();
        if !ascending(&written) {
            return 1;
        }
    }
    jobs.len()
}

/// Whether two jobs differ in their slab and slots only.
pub(super) fn alike(a: &CopyJob, b: &CopyJob) -> bool {
    let shape =
        |job: &CopyJob| (job.direction(), job.first_layer(), job.layer_count(), job.tokens(), job.skip());
    shape(a) == shape(b)
        && b.access_bytes() == 16
        && b.slab().device.is_some()
        && matches!(b.slots(), JobSlots::Host { .. })
        && (Arc::ptr_eq(a.plan(), b.plan()) || a.plan() == b.plan())
}
