//! What a batch of jobs is to [`Calibration::choose`].

use maru_layout::{CopyJob, JobSlots};

use super::{Calibration, Choice, RUNS};

/// Bytes that one driver copy of all layers must move for the measured times to say something: what it moved
/// when it was timed.
const COPY_BYTES: u64 = 1 << 20;

impl Calibration {
    /// How to move a batch of jobs of one cache. Stores and loads in one batch go directly, in order: they may
    /// touch the same memory.
    pub fn choose_batch<'a>(&self, jobs: impl Iterator<Item = &'a CopyJob> + Clone) -> Choice {
        let Some(first) = jobs.clone().next() else { return Choice::Direct };
        if jobs.clone().any(|job| job.direction() != first.direction()) {
            return Choice::Direct;
        }
        let bytes = jobs.clone().fold(0u64, |sum, job| sum.saturating_add(job.bytes()));
        let spaced = self.uses_copy_engine() && jobs.clone().all(copies_well);
        self.choose(bytes, run_bytes(first), first.direction(), spaced)
    }
}

/// Bytes contiguous on both sides in one layer: a row, or the tokens of a block where they are adjacent.
fn run_bytes(job: &CopyJob) -> u64 {
    let g = job.plan().geometry();
    if !g.tokens_adjacent {
        return g.row_bytes;
    }
    let tokens = match job.slots() {
        JobSlots::Host { runs, .. } => {
            let moved: u64 = runs.iter().map(|run| run.len).sum();
            moved / (runs.len() as u64).max(1)
        }
        _ => g.block_size,
    };
    g.row_bytes.saturating_mul(tokens.clamp(1, g.block_size))
}

/// Whether driver copies move all layers of a run at once, and enough bytes with each: host slots (others are
/// waited for), a slab that both sides reach, layers evenly spaced.
fn copies_well(job: &CopyJob) -> bool {
    let g = job.plan().geometry();
    let run = run_bytes(job);
    let layers = u64::from(job.layer_count());
    let reachable = job.slab().host.is_some() && job.slab().device.is_some();
    if !matches!(job.slots(), JobSlots::Host { .. }) || !reachable {
        return false;
    }
    if run < RUNS[1] || run.saturating_mul(layers) < COPY_BYTES {
        return false;
    }
    let step = |kv, l| job.base(kv, l + 1).wrapping_sub(job.base(kv, l));
    (0..g.kv_planes).all(|kv| (1..layers.saturating_sub(1)).all(|l| step(kv, l) == step(kv, 0)))
}
