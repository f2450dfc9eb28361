//! One transfer with every address known and in bounds: the contract that all movers share.

use std::sync::Arc;

use crate::batch::Place;
use crate::plan::access;
use crate::runs::collect;
use crate::{CopyPlan, LayoutError, Run, Runs, SlotMapping};

/// Which side is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Paged cache → slab (store, D2H).
    Gather,
    /// Slab → paged cache (load, H2D).
    Scatter,
}

/// Where a slab is: as the host and as the device address it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabSpan {
    /// Host address; `None` for a slab in device memory.
    pub host: Option<u64>,
    /// Device address; `None` for memory that is not registered, which no kernel may touch.
    pub device: Option<u64>,
    /// Bytes.
    pub len: u64,
}

/// What is wanted of one slab.
#[derive(Clone, Debug)]
pub struct JobRequest {
    /// Store or load.
    pub direction: Direction,
    /// Where the slab is.
    pub slab: SlabSpan,
    /// Token → slot; token 0 is the slab's first.
    pub slots: SlotMapping,
    /// Leave the first tokens alone on both sides; the rest does not shift.
    pub skip_tokens: u64,
    /// Whether fewer slots than the slab has tokens may be given.
    pub partial: bool,
    /// `(first, count)` of the cache's layers; `None` = all, a count of 0 moves nothing. A slab of all layers is
    /// addressed at the same layers, a layerwise object (one layer) takes exactly one.
    pub layers: Option<(u32, u32)>,
}

/// The slots of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum JobSlots {
    /// Checked: each is −1 or inside the cache, and a scatter names none twice.
    Host {
        /// One per token, the skipped prefix included.
        slots: Arc<[i64]>,
        /// The tokens that are moved, in token order, as runs.
        runs: Runs,
    },
    /// In device memory: the mover checks each against −1 and `0..num_slots` and touches nothing for others.
    Device {
        /// Address of token 0's slot.
        addr: u64,
        /// Slots, the skipped prefix included.
        len: u64,
    },
}

/// A transfer that is safe to carry out: every byte it names lies in the planes and the slab it was made for.
///
/// It can be built by [`CopyJob::new`] and [`crate::JobBatch`] only. What it cannot know is whether those memories
/// still exist: that is the promise of whoever registered them.
#[derive(Clone, Debug)]
pub struct CopyJob {
    direction: Direction,
    plan: Arc<CopyPlan>,
    slab: SlabSpan,
    slots: JobSlots,
    skip: u64,
    tokens: u64,
    moved: Option<u64>,
    first_layer: u32,
    layer_count: u32,
    pub(crate) place: Place,
}

impl CopyJob {
    /// Checks everything of a request but that no slot is written twice. Its runs are added to `runs`, with which the job
    /// is to be [settled](CopyJob::settle); what an error leaves there says nothing.
    pub(crate) fn check(
        plan: &Arc<CopyPlan>,
        request: JobRequest,
        runs: &mut Vec<Run>,
    ) -> Result<Self, LayoutError> {
        let g = plan.geometry();
        let (first_layer, layer_count) = layer_range(plan, request.layers)?;
        let slab = check_slab(plan, request.slab, first_layer)?;
        let tokens = request.slots.len();
        if tokens > g.slab_tokens || (tokens < g.slab_tokens && !request.partial) {
            return Err(LayoutError::SlotCount { slots: tokens, tokens: g.slab_tokens });
        }
        if request.skip_tokens > tokens {
            return Err(LayoutError::SkipTooLarge { skip: request.skip_tokens, tokens });
        }
        let (slots, moved) = match request.slots {
            SlotMapping::Device { addr, len } => {
                if (addr == 0 || !addr.is_multiple_of(8)) && len > 0 {
                    return Err(LayoutError::OutOfRange {
                        what: "address of the slot list",
                        found: i128::from(addr),
                        allowed: "a multiple of 8, not 0".into(),
                    });
                }
                if len.checked_mul(8).and_then(|bytes| addr.checked_add(bytes)).is_none() {
                    return Err(LayoutError::Overflow { what: "the slot list's last address" });
                }
                (JobSlots::Device { addr, len }, None)
            }
            SlotMapping::Host(slots) => {
                let before = runs.len();
                let moved = collect(&slots, request.skip_tokens, g.num_slots, runs)?;
                (JobSlots::Host { slots, runs: Runs::pending(before..runs.len()) }, Some(moved))
            }
        };
        Ok(CopyJob {
            direction: request.direction,
            plan: Arc::clone(plan),
            slab,
            slots,
            skip: request.skip_tokens,
            tokens,
            moved,
            first_layer,
            layer_count,
            place: Place::default(),
        })
    }

    /// Gives it the runs of all jobs that were checked with it.
    pub(crate) fn settle(&mut self, all: &Arc<[Run]>) {
        if let JobSlots::Host { runs, .. } = &mut self.slots {
            runs.settle(Arc::clone(all));
        }
    }

    /// The same tokens on another plan over the same planes, with another slab at its first layer moved.
    pub(crate) fn on_plan(
        &self,
        plan: Arc<CopyPlan>,
        slab: SlabSpan,
        first_layer: u32,
        layer_count: u32,
    ) -> Self {
        CopyJob { plan, slab, first_layer, layer_count, ..self.clone() }
    }

    /// The job cut into its layers: the cache's layer and the job of that layer alone.
    pub fn single_layers(&self) -> impl Iterator<Item = (u32, Self)> + '_ {
        self.layer_runs(1)
    }

    /// The job cut where the cache's layer is a multiple of `per` (0 counts as 1): the number of the run
    /// (layer / `per`) and its job.
    pub fn layer_runs(&self, per: u32) -> impl Iterator<Item = (u32, Self)> + '_ {
        let (per, step) = (per.max(1), self.plan.geometry().slab_layer_stride);
        let (first, end) = (self.first_layer, self.first_layer.saturating_add(self.layer_count));
        let runs = if first < end { first / per..(end - 1) / per + 1 } else { 0..0 };
        runs.map(move |run| {
            let from = run.saturating_mul(per).max(first);
            let to = (run + 1).saturating_mul(per).min(end);
            let shift = u64::from(from - first) * step;
            let moved = |addr: Option<u64>| addr.map(|a| a + shift);
            let slab = SlabSpan {
                host: moved(self.slab.host),
                device: moved(self.slab.device),
                len: self.slab.len - shift,
            };
            (run, self.on_plan(Arc::clone(&self.plan), slab, from, to - from))
        })
    }

    /// Store or load.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The cache's plan.
    pub fn plan(&self) -> &Arc<CopyPlan> {
        &self.plan
    }

    /// The slab at the first layer moved; a mover adds `l * slab_layer_stride` for the `l`-th layer moved.
    pub fn slab(&self) -> SlabSpan {
        self.slab
    }

    /// The slots.
    pub fn slots(&self) -> &JobSlots {
        &self.slots
    }

    /// Tokens left alone at the front.
    pub fn skip(&self) -> u64 {
        self.skip
    }

    /// Tokens of the transfer, the skipped prefix included.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// First layer of the cache that is moved.
    pub fn first_layer(&self) -> u32 {
        self.first_layer
    }

    /// Layers moved.
    pub fn layer_count(&self) -> u32 {
        self.layer_count
    }

    /// Base address of plane `kv` of the `l`-th layer moved; 0 for a plane that is not part of the job.
    pub fn base(&self, kv: u64, l: u64) -> u64 {
        let g = self.plan.geometry();
        if l >= u64::from(self.layer_count) || kv >= g.kv_planes {
            return 0;
        }
        let index = kv * g.layers + u64::from(self.first_layer) + l;
        usize::try_from(index).ok().and_then(|i| self.plan.bases().get(i)).copied().unwrap_or(0)
    }

    /// Whether nothing is to be moved. Device slots count as something unless all are skipped.
    pub fn is_empty(&self) -> bool {
        self.layer_count == 0 || self.moved.unwrap_or(self.tokens - self.skip) == 0
    }

    /// Bytes moved one way; with device slots as if none was −1.
    pub fn bytes(&self) -> u64 {
        let g = self.plan.geometry();
        let tokens = self.moved.unwrap_or(self.tokens - self.skip);
        g.token_bytes()
            .saturating_mul(g.kv_planes)
            .saturating_mul(tokens)
            .saturating_mul(self.layer_count.into())
    }

    /// Widest power of two (at most 16) for every access of this job, the slab's address included.
    pub fn access_bytes(&self) -> u64 {
        let slab = [self.slab.host, self.slab.device];
        access(slab.into_iter().flatten().chain([self.plan.geometry().access_bytes]))
    }
}

fn layer_range(plan: &CopyPlan, wanted: Option<(u32, u32)>) -> Result<(u32, u32), LayoutError> {
    let have = plan.geometry().layers;
    let layers = u32::try_from(have).map_err(|_| LayoutError::OutOfRange {
        what: "layers",
        found: i128::from(have),
        allowed: format!("1 to {}", u32::MAX),
    })?;
    let (first, count) = wanted.unwrap_or((0, layers));
    if count == 0 && first <= layers {
        return Ok((0, 0));
    }
    if u64::from(first) + u64::from(count) > u64::from(layers) {
        return Err(LayoutError::LayerRange { first, count, layers });
    }
    let in_slab = plan.slab().layers();
    if in_slab == 1 && count != 1 {
        return Err(LayoutError::Disagree {
            what: "layers of the transfer",
            paged: count.into(),
            slab: in_slab,
        });
    }
    Ok((first, count))
}

/// Checks the slab's size and ends, and moves its start to the first layer of the job.
fn check_slab(plan: &CopyPlan, span: SlabSpan, first_layer: u32) -> Result<SlabSpan, LayoutError> {
    let needed = plan.slab().bytes();
    if span.len < needed {
        return Err(LayoutError::SlabTooSmall { found: span.len, needed });
    }
    for addr in [span.host, span.device].into_iter().flatten() {
        if addr.checked_add(span.len).is_none() {
            return Err(LayoutError::Overflow { what: "the slab's last address" });
        }
    }
    // A layerwise object has stride 0 here; the ends were checked above.
    let shift = u64::from(first_layer) * plan.geometry().slab_layer_stride;
    let shifted = |addr: Option<u64>| addr.map(|a| a + shift);
    Ok(SlabSpan { host: shifted(span.host), device: shifted(span.device), len: span.len - shift })
}
