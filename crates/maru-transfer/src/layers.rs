//! Cutting a batch into steps, one after the other, so that its first layers are there first.

use maru_layout::CopyJob;

use crate::transfer::Layers;

/// Fewest bytes of a step: below, a launch and an event cost more than its layers would gain by coming earlier.
const STEP_BYTES: u64 = 256 << 10;

/// The same layers of all jobs, in the order of the layers.
pub(crate) struct LayerSteps {
    pub(crate) layers: Layers,
    pub(crate) steps: Vec<Vec<CopyJob>>,
}

/// Cuts jobs of one cache of `count` layers.
pub(crate) fn by_layer(jobs: &[CopyJob], count: u32, per_step: u32) -> LayerSteps {
    let mut cut: Vec<(u32, CopyJob)> = jobs.iter().flat_map(|job| job.layer_runs(per_step)).collect();
    // Stable: jobs of the same layers keep their order.
    cut.sort_by_key(|(run, _)| *run);
    let (mut runs, mut steps) = (Vec::<u32>::new(), Vec::<Vec<CopyJob>>::new());
    for (run, job) in cut {
        match steps.last_mut() {
            Some(step) if runs.last() == Some(&run) => step.push(job),
            _ => {
                runs.push(run);
                steps.push(vec![job]);
            }
        }
    }
    LayerSteps { layers: Layers { count, per_step, runs: Some(runs) }, steps }
}

/// The runs of layers of a job, where all jobs have those of this one.
pub(crate) fn runs(job: &CopyJob, count: u32, per_step: u32) -> Layers {
    let (first, layers) = (job.first_layer(), job.layer_count());
    let runs = match layers {
        0 => Vec::new(),
        n => (first / per_step..=(first + n - 1) / per_step).collect(),
    };
    Layers { count, per_step, runs: Some(runs) }
}

/// Layers that go together, as many as make a launch worth while.
pub(crate) fn layers_of_a_step(jobs: &[CopyJob]) -> u32 {
    let of_a_layer = |job: &CopyJob| job.bytes() / u64::from(job.layer_count().max(1));
    let bytes = jobs.iter().fold(0u64, |sum, job| sum.saturating_add(of_a_layer(job)));
    u32::try_from(STEP_BYTES.div_ceil(bytes.max(1))).unwrap_or(u32::MAX)
}
