//! Loads in the order of their layers, in one launch.

use maru_layout::{CopyJob, Direction};

use super::batch::{BatchLaunch, alike, overlap, slabs, whole};
use super::{Limits, MAX_UNITS, division, narrow};
use crate::abi::{BATCH_SLABS, Entry, INLINE_SLOTS, PagedCopyBatchArgs, PagedCopyInlineArgs};
use crate::abi::{PagedCopyLayersArgs, PagedCopyLayersInlineArgs, PagedCopyRuns, RUNS};

/// One launch for all jobs of a list, which tells of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayersLaunch {
    /// What is launched, but for the order of its layers; whom it tells is left 0.
    pub batch: BatchLaunch,
    /// Runs of layers.
    pub runs: u32,
    first_units: u32,
    run_units: u32,
    pair: u32,
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
        let inline = jobs.len() == 1 && copy.tokens as usize <= INLINE_SLOTS;
        let slabs = slabs(jobs, &launch)?;
        copy.slab = if inline { slabs[0].slab } else { 0 };
        Some(LayersLaunch {
            batch: BatchLaunch {
                jobs: jobs.len(),
                tokens: copy.tokens,
                first_token: launch.first_token,
                entry: Entry::layers(inline),
                blocks,
                threads,
                args: PagedCopyBatchArgs { copy, planes, planes_magic, planes_shift, unused: 0, slabs },
            },
            runs,
            // No more than the copy has accesses.
            first_units: first_run * layer_units,
            run_units: layers_per_run.min(copy.layers) * layer_units,
            pair: kv_planes - 1,
        })
    }

    /// Whether its slots go by value: those of one slab, if they are few enough.
    pub fn is_inline(&self) -> bool {
        self.batch.entry == Entry::layers(true)
    }

    /// The arguments, with the words in device memory that it tells; for uploaded slots.
    pub fn args(&self, words: u64) -> PagedCopyLayersArgs {
        PagedCopyLayersArgs { batch: self.batch.args, runs: self.runs(words) }
    }

    /// The same for slots by value.
    pub fn inline_args(&self, words: u64, slots: &[i64]) -> PagedCopyLayersInlineArgs {
        let mut slab = PagedCopyInlineArgs { copy: self.batch.args.copy, slots: [0; INLINE_SLOTS] };
        slab.slots.iter_mut().zip(slots).for_each(|(to, slot)| *to = *slot);
        PagedCopyLayersInlineArgs { slab, runs: self.runs(words) }
    }

    fn runs(&self, words: u64) -> PagedCopyRuns {
        let LayersLaunch { runs, first_units, run_units, pair, .. } = *self;
        PagedCopyRuns { words, count: runs, first_units, units: run_units, pair }
    }
}
