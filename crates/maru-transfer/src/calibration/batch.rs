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
        let (run, direction) = (run_bytes(first), first.direction());
        match self.choose(bytes, run, direction, true) {
            // Looked at only where it matters: it takes longer than the rest.
            Choice::CopyEngine if !jobs.clone().all(copies_well) => self.choose(bytes, run, direction, false),
            choice => choice,
        }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use maru_layout::{
        CopyPlan, DType, Direction, JobRequest, PagedLayout, RowKind, SlabLayout, SlabSpan, SlotMapping,
        StridedSpec,
    };

    use super::*;
    use crate::calibration::{Identity, Row, SIZES, Sample};

    const LAYERS: u64 = 32;
    const ROW: u64 = 2048;
    const HALF: u64 = 16 * ROW;

    /// Driver copies always won, and staged was ahead from 8 MiB on.
    fn calibration() -> Calibration {
        let times = |bytes| if bytes < 8 << 20 { (10.0, 11.0, 9.0) } else { (10.0, 9.0, 9.0) };
        let samples = SIZES.iter().map(|(bytes, _)| {
            let (direct, staged, copies) = times(*bytes);
            Sample::new(*bytes, 8.0, direct, Some(staged), Some(copies))
        });
        let rows = [Direction::Scatter, Direction::Gather]
            .map(|direction| Row::new(direction, RUNS[1], samples.clone().collect()));
        let identity = Identity {
            device: String::new(),
            uuid: String::new(),
            driver: String::new(),
            library: String::new(),
            kernel: String::new(),
            ring_bytes: 1,
            sm_budget: 1,
        };
        Calibration::of_rows(identity, rows.to_vec())
    }

    #[derive(Clone)]
    struct Case {
        direction: Direction,
        slots: SlotMapping,
        /// Heads side by side, or each head's tokens.
        heads_apart: bool,
        /// Added to the address of every other layer.
        uneven: u64,
        layers: Option<(u32, u32)>,
        host: Option<u64>,
        device: Option<u64>,
    }

    impl Case {
        fn new() -> Case {
            Case {
                direction: Direction::Scatter,
                slots: SlotMapping::from_slots((0..64).collect::<Vec<i64>>()),
                heads_apart: false,
                uneven: 0,
                layers: None,
                host: Some(1 << 40),
                device: Some(1 << 41),
            }
        }

        fn job(&self) -> CopyJob {
            let paged = PagedLayout::from_strides(&StridedSpec {
                dtype: DType::U8,
                row_kind: RowKind::Plain,
                kv_planes: 2,
                kv_stride: HALF,
                layers: 1,
                layer_stride: 0,
                num_blocks: 64,
                block_size: 16,
                num_heads: 8,
                head_size: 256,
                block_stride: 2 * HALF,
                token_stride: if self.heads_apart { 256 } else { ROW },
                head_stride: if self.heads_apart { 4096 } else { 256 },
            })
            .unwrap();
            let slab = SlabLayout::of_cache(&paged, 2, LAYERS, self.slots.len()).unwrap();
            let base = |kv: u64, l: u64| (1 << 30) + l * (1 << 24) + l % 2 * self.uneven + kv * HALF;
            let bases: Vec<u64> = (0..2).flat_map(|kv| (0..LAYERS).map(move |l| base(kv, l))).collect();
            let len = slab.bytes();
            let request = JobRequest {
                direction: self.direction,
                slab: SlabSpan { host: self.host, device: self.device, len },
                slots: self.slots.clone(),
                skip_tokens: 0,
                partial: false,
                layers: self.layers,
            };
            CopyJob::new(Arc::new(CopyPlan::new(&paged, &slab, bases).unwrap()), request).unwrap()
        }
    }

    fn chosen(case: &Case) -> Choice {
        calibration().choose_batch([case.job()].iter())
    }

    #[test]
    fn long_runs_of_even_layers_go_by_the_copy_engine() {
        let plain = Case::new();
        assert_eq!(plain.job().bytes(), 8 << 20);
        assert_eq!(run_bytes(&plain.job()), RUNS[1]);
        assert_eq!(chosen(&plain), Choice::CopyEngine);
        assert_eq!(chosen(&Case { direction: Direction::Gather, ..plain }), Choice::CopyEngine);
    }

    #[test]
    fn what_the_times_say_nothing_of_goes_by_the_kernel() {
        let plain = Case::new();
        let holes = (0..64).map(|i| if i % 2 == 0 { i } else { -1 }).collect::<Vec<i64>>();
        for (what, case, choice) in [
            ("layers anywhere", Case { uneven: 64, ..plain.clone() }, Choice::Staged),
            ("heads apart", Case { heads_apart: true, ..plain.clone() }, Choice::Direct),
            (
                "runs of one token",
                Case { slots: SlotMapping::from_slots(holes), ..plain.clone() },
                Choice::Direct,
            ),
            (
                "slots on the device",
                Case { slots: SlotMapping::Device { addr: 4096, len: 64 }, ..plain.clone() },
                Choice::Staged,
            ),
            ("a slab on the device", Case { host: None, ..plain.clone() }, Choice::Staged),
            ("a slab it cannot reach", Case { device: None, ..plain.clone() }, Choice::Staged),
            ("few layers", Case { layers: Some((0, 31)), ..plain.clone() }, Choice::Direct),
        ] {
            assert_eq!(chosen(&case), choice, "{what}");
        }
    }

    #[test]
    fn a_batch_is_judged_as_a_whole() {
        let (load, store) = (Case::new(), Case { direction: Direction::Gather, ..Case::new() });
        let odd = Case { uneven: 64, ..Case::new() };
        let choose = |cases: &[&Case]| {
            let jobs: Vec<CopyJob> = cases.iter().map(|case| case.job()).collect();
            calibration().choose_batch(jobs.iter())
        };
        assert_eq!(choose(&[]), Choice::Direct);
        assert_eq!(choose(&[&load, &store]), Choice::Direct, "they may touch the same memory");
        assert_eq!(choose(&[&load; 8]), Choice::CopyEngine);
        assert_eq!(choose(&[&load; 9]), Choice::Staged, "more than was measured");
        assert_eq!(choose(&[&load, &odd]), Choice::Staged);
    }

    #[test]
    fn a_run_is_a_block_at_most() {
        let whole: Vec<i64> = (0..64).collect();
        let run =
            |slots: Vec<i64>| run_bytes(&Case { slots: SlotMapping::from_slots(slots), ..Case::new() }.job());
        assert_eq!(run(whole), 16 * ROW);
        assert_eq!(run(vec![5, 4, 3]), ROW);
        assert_eq!(run(vec![-1, -1]), ROW);
        assert_eq!(run_bytes(&Case { heads_apart: true, ..Case::new() }.job()), 256);
    }
}
