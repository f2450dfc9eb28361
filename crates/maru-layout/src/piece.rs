//! Cutting a job into pieces that pass through a staging buffer.
//!
//! In a packed slab the planes (all K, then all V) follow each other without gaps, so any run of planes is one
//! strip of bytes and, to a mover, a cache of one plane kind with that many layers.

use std::sync::Arc;

use crate::{CopyJob, CopyPlan, JobSlots, LayoutError, SlabSpan};

/// A run of planes of a job: what moves through a staging buffer at once.
///
/// In the slab its bytes are `runs` runs, `run_stride` apart, of `height` spans of `width` bytes, `pitch` apart,
/// the first `offset` bytes behind the job's slab address ([`CopyJob::slab`]). A staging buffer holds the spans
/// at the same pitch from `lead` on, one run after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First span in the slab, from the job's slab address on.
    pub offset: i64,
    /// First span in the staging buffer: tokens before it are not moved.
    pub lead: u64,
    /// Bytes of a span.
    pub width: u64,
    /// Spans of a run.
    pub height: u64,
    /// Bytes from span to span, on both sides.
    pub pitch: u64,
    /// Runs: 2 for K and V of some of a slab's layers, which do not follow each other there.
    pub runs: u64,
    /// Bytes from run to run in the slab.
    pub run_stride: u64,
    /// Plane or, with several runs, layer.
    first: u32,
}

impl Piece {
    /// Whether the spans of a run lie side by side.
    pub fn has_whole_runs(&self) -> bool {
        self.height == 1 || self.width == self.pitch
    }

    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        self.width * self.height * self.runs
    }

    /// Bytes of staging buffer.
    pub fn room(&self) -> u64 {
        self.pitch * self.height * self.runs
    }

    /// Cuts it behind so many spans; `None` where that leaves one part empty, or if it has several runs.
    pub fn split(&self, spans: u64) -> Option<(Piece, Piece)> {
        if self.runs != 1 || spans == 0 || spans >= self.height {
            return None;
        }
        let offset = self.offset.checked_add_unsigned(spans.checked_mul(self.pitch)?)?;
        let first = self.first.checked_add(u32::try_from(spans).ok()?)?;
        let rest = Piece { offset, first, height: self.height - spans, ..*self };
        Some((Piece { height: spans, ..*self }, rest))
    }
}

/// The pieces of one job.
#[derive(Clone, Debug)]
pub struct Pieces {
    job: CopyJob,
    /// The same planes as layers of one plane kind.
    flat: Arc<CopyPlan>,
    list: Vec<Piece>,
}

impl CopyJob {
    /// Cuts the job into pieces of at most `most` bytes of staging buffer, in the slab's order. `None` where
    /// that cannot be: the slab is not packed, a plane is larger than the buffer, or a store leaves tokens out
    /// (the buffer's bytes would be written over them).
    pub fn pieces(&self, most: u64) -> Option<Pieces> {
        let g = self.plan().geometry();
        let slab = self.plan().slab();
        let (row, tokens, layers) = (slab.row_bytes(), slab.tokens(), slab.layers());
        let strip = row.checked_mul(tokens)?;
        let used = |count: u64, stride: u64, packed: u64| count == 1 || stride == packed;
        let [kv_stride, layer_stride, token_stride] = slab.strides();
        let packed = used(slab.planes(), kv_stride, strip.checked_mul(layers)?)
            && used(layers, layer_stride, strip)
            && used(tokens, token_stride, row);
        if !packed || layers != g.layers || strip > most || self.leaves_tokens_out() {
            return None;
        }
        let per_piece = most / strip;
        let moved = self.tokens() - self.skip();
        let (first, count) = (u64::from(self.first_layer()), u64::from(self.layer_count()));
        let mut list = Vec::new();
        let lead = self.skip() * row;
        let flat = self.plan().flattened();
        if self.is_empty() {
            return Some(Pieces { job: self.clone(), flat, list });
        }
        // Some layers: K and V together if they fit.
        if count < g.layers && g.kv_planes > 1 && count > 0 && count * g.kv_planes <= per_piece {
            let (width, run_stride) = (moved * row, g.layers * strip);
            let (runs, first) = (g.kv_planes, self.first_layer());
            let offset = i64::try_from(lead).ok()?;
            list.push(Piece { offset, lead, width, height: count, pitch: strip, runs, run_stride, first });
            return Some(Pieces { job: self.clone(), flat, list });
        }
        // All layers: K and V planes are one run. Some layers: a run each.
        let runs = match count == g.layers {
            true => vec![(0, g.kv_planes * g.layers)],
            false => (0..g.kv_planes).map(|kv| (kv * g.layers + first, count)).collect(),
        };
        for (start, planes) in runs {
            let mut plane = start;
            while plane < start + planes {
                let height = per_piece.min(start + planes - plane);
                // Relative to the job's slab address, which is that of plane `first`. Below 2^63: the slab is.
                let offset = i64::try_from(plane * strip + lead).ok()? - i64::try_from(first * strip).ok()?;
                let (width, first) = (moved * row, u32::try_from(plane).ok()?);
                list.push(Piece { offset, lead, width, height, pitch: strip, runs: 1, run_stride: 0, first });
                plane += height;
            }
        }
        Some(Pieces { job: self.clone(), flat, list })
    }

    /// Whether a store would not write some token between its first and its last. Device-resident slots may
    /// hold −1 anywhere.
    fn leaves_tokens_out(&self) -> bool {
        let holes = match self.slots() {
            JobSlots::Host { runs, .. } => {
                runs.iter().map(|r| r.len).sum::<u64>() != self.tokens() - self.skip()
            }
            JobSlots::Device { .. } => true,
        };
        holes && self.direction() == crate::Direction::Gather
    }
}

impl Pieces {
    /// The job they were cut from.
    pub fn job(&self) -> &CopyJob {
        &self.job
    }

    /// The pieces, in the slab's order.
    pub fn list(&self) -> &[Piece] {
        &self.list
    }

    /// The job that moves a piece between the cache and a staging buffer at this address.
    ///
    /// # Errors
    /// [`LayoutError::LayerRange`] for a piece that is none of these, nor a part of one: its planes are not the slab's.
    pub fn staged(
        &self,
        piece: &Piece,
        host: Option<u64>,
        device: Option<u64>,
    ) -> Result<CopyJob, LayoutError> {
        let (plan, slab) = (self.job.plan(), self.job.plan().slab());
        let (plan, runs) = match piece.runs {
            1 => (Arc::clone(&self.flat), 1),
            _ if piece.height > slab.layers() => (Arc::clone(plan), 0),
            _ => (plan.windowed(piece.height), slab.planes()),
        };
        let layers = plan.geometry().layers;
        let end = u64::from(piece.first).checked_add(piece.height).filter(|end| *end <= layers);
        // The job's slab is known to hold the whole, so no product is too large.
        if end.is_none() || piece.runs != runs || piece.pitch != slab.row_bytes() * slab.tokens() {
            let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
            let (first, count, layers) = (piece.first, narrow(piece.height), narrow(layers));
            return Err(LayoutError::LayerRange { first, count, layers });
        }
        let count = u32::try_from(piece.height).unwrap_or(0);
        Ok(self.job.on_plan(plan, SlabSpan { host, device, len: piece.room() }, piece.first, count))
    }
}
