//! Loads in the order of their layers, in one launch.

use maru_layout::{CopyJob, Direction, JobSlots};

use super::batch::{alike, overlap, slabs, whole};
use super::{Limits, MAX_UNITS, division, narrow, window};
use crate::abi::{BATCH_SLABS, Entry, PagedCopyBatchArgs, PagedCopyLayersArgs, RUNS};

/// One launch for all jobs of a list, which tells of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayersLaunch {
    /// First token moved.
    pub first_token: u64,
    /// Which kernel.
    pub entry: Entry,
    /// Thread blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Its arguments; `slots` of the slabs, and whom it tells, is left 0.
    pub args: PagedCopyLayersArgs,
}

impl LayersLaunch {
    /// Plans a launch in which a run ends before every layer of the cache whose number `layers_per_run` divides. `None`
    /// where the jobs are not all loads of one plan, layers, number of tokens and prefix to skip, at full access width,
    /// with slots on the host; are more than a launch takes; or two of them write the same pages.
    pub fn new(jobs: &[CopyJob], planes: u64, limits: Limits, layers_per_run: u32) -> Option<Self> {
        let first = jobs.first()?;
        if jobs.len() > BATCH_SLABS || first.direction() != Direction::Scatter || layers_per_run == 0 {
            return None;
        }
        let launch = whole(first, planes, limits)?;
        let count = narrow(jobs.len() as u64);
        let mut copy = launch.args;
        copy.units = copy.units.checked_mul(count).filter(|n| *n <= limits.units.clamp(1, MAX_UNITS))?;
        if !jobs.iter().all(|job| alike(first, job)) || overlap(jobs) {
            return None;
        }
        let kv_planes = launch.args.units / (copy.layers * copy.tokens * copy.token_units);
        let planes = kv_planes * count;
        let layer_units = planes * copy.tokens * copy.token_units;
        let before = first.first_layer() % layers_per_run;
        let first_run = (layers_per_run - before).min(copy.layers);
        let runs = 1 + (copy.layers - first_run).div_ceil(layers_per_run);
        if runs as usize > RUNS {
            return None;
        }
        let (planes_magic, planes_shift) = division(planes);
        let (blocks, threads) = limits.shape(copy.units);
        copy.slab = 0;
        let slabs = slabs(jobs, &launch)?;
        Some(LayersLaunch {
            first_token: launch.first_token,
            entry: Entry::layers(),
            blocks,
            threads,
            args: PagedCopyLayersArgs {
                batch: PagedCopyBatchArgs { copy, planes, planes_magic, planes_shift, unused: 0, slabs },
                words: 0,
                runs,
                // No more than the copy has accesses.
                first_units: first_run * layer_units,
                run_units: layers_per_run.min(copy.layers) * layer_units,
                pair: kv_planes - 1,
            },
        })
    }

    /// Says where the slots of a job are.
    pub fn set_slots(&mut self, job: usize, addr: u64) {
        if let Some(slab) = self.args.batch.slabs.get_mut(job) {
            slab.slots = addr;
        }
    }

    /// The slots a job brings.
    pub fn slots<'a>(&self, job: &'a CopyJob) -> &'a [i64] {
        let JobSlots::Host { slots, .. } = job.slots() else { return &[] };
        window(slots, self.first_token, self.args.batch.copy.tokens)
    }
}
