//! What the caller wants of one slab, and the check that turns it into a job.

use std::sync::Arc;

use maru_cxl::{CxlError, Slab};
use maru_layout::{
    CopyJob, CopyPlan, Direction, Fingerprint, JobBatch, JobRequest, SlabLayout, SlabSpan, SlotMapping,
};

use crate::{RegisteredCache, Stream, TransferError};

/// A store or load of one slab. Built with [`TransferRequest::gather`] or [`TransferRequest::scatter`], then
/// given to [`crate::TransferEngine::submit`].
#[derive(Clone, Debug)]
#[must_use = "a request does nothing until it is submitted"]
pub struct TransferRequest {
    cache: RegisteredCache,
    slab: Slab,
    direction: Direction,
    slots: SlotMapping,
    skip_tokens: u64,
    partial: bool,
    layers: Option<(u32, u32)>,
    layout: Option<SlabLayout>,
    tokens: Option<u64>,
    expected: Option<Fingerprint>,
    stream: Stream,
}

impl TransferRequest {
    /// Paged cache → slab. Token `t` of the slab is in slot `slots[t]`.
    pub fn gather(cache: &RegisteredCache, slots: SlotMapping, slab: &Slab) -> Self {
        Self::new(Direction::Gather, cache, slots, slab)
    }

    /// Slab → paged cache.
    pub fn scatter(cache: &RegisteredCache, slots: SlotMapping, slab: &Slab) -> Self {
        Self::new(Direction::Scatter, cache, slots, slab)
    }

    fn new(direction: Direction, cache: &RegisteredCache, slots: SlotMapping, slab: &Slab) -> Self {
        TransferRequest {
            cache: cache.clone(),
            slab: slab.clone(),
            direction,
            slots,
            skip_tokens: 0,
            partial: false,
            layers: None,
            layout: None,
            tokens: None,
            expected: None,
            stream: Stream::none(),
        }
    }

    /// Leave the first `n` tokens alone on both sides; the rest does not shift.
    pub fn skip_tokens(mut self, n: u64) -> Self {
        self.skip_tokens = n;
        self
    }

    /// Allow fewer slots than the slab has tokens.
    pub fn partial(mut self, allowed: bool) -> Self {
        self.partial = allowed;
        self
    }

    /// Move `count` layers from `first` on only.
    pub fn layers(mut self, first: u32, count: u32) -> Self {
        self.layers = Some((first, count));
        self
    }

    /// The slab holds this many tokens; otherwise the engine's chunk size.
    pub fn slab_tokens(mut self, tokens: u64) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// The slab has this geometry instead of the packed one (layerwise objects, strided slices).
    pub fn slab_layout(mut self, layout: SlabLayout) -> Self {
        self.layout = Some(layout);
        self
    }

    /// The fingerprint the slab was stored with; a slab of another geometry is refused before any address is
    /// computed from it.
    pub fn stored_as(mut self, fingerprint: Fingerprint) -> Self {
        self.expected = Some(fingerprint);
        self
    }

    /// Order the transfer on this stream.
    pub fn on(mut self, stream: Stream) -> Self {
        self.stream = stream;
        self
    }

    /// The cache.
    pub fn cache(&self) -> &RegisteredCache {
        &self.cache
    }

    /// The slab.
    pub fn slab(&self) -> &Slab {
        &self.slab
    }

    /// The stream.
    pub fn stream(&self) -> Stream {
        self.stream
    }

    /// Checks everything and computes every address.
    ///
    /// # Errors
    /// [`TransferError`] with the numbers; nothing is changed.
    pub fn resolve(&self) -> Result<CopyJob, TransferError> {
        let (plan, request) = self.described()?;
        Ok(CopyJob::new(plan, request)?)
    }

    /// The same for one of several requests.
    pub(crate) fn resolve_into(&self, batch: &mut JobBatch) -> Result<(), TransferError> {
        let (plan, request) = self.described()?;
        Ok(batch.push(&plan, request)?)
    }

    /// All that a job needs; its slots are not looked at.
    fn described(&self) -> Result<(Arc<CopyPlan>, JobRequest), TransferError> {
        let plan = match (&self.layout, self.tokens) {
            (Some(layout), _) => self.cache.plan(layout)?,
            (None, Some(tokens)) => self.cache.chunk_plan(tokens)?,
            (None, None) => self.cache.default_plan(),
        };
        if let Some(found) = self.expected {
            let expected = plan.slab().fingerprint();
            if found != expected {
                return Err(TransferError::Fingerprint { found, expected });
            }
        }
        if self.direction == Direction::Gather && self.slab.is_read_only() {
            return Err(CxlError::ReadOnly { wanted: "store into a slab of it" }.into());
        }
        let span = SlabSpan {
            host: Some(self.slab.addr().as_ptr().expose_provenance() as u64),
            device: self.slab.device_addr(),
            len: self.slab.len(),
        };
        if let Some(addr) = span.host
            && let Some(plane) = self.cache.paged().meets(addr, span.len)
        {
            return Err(TransferError::SlabInCache { slab: addr, len: span.len, plane });
        }
        let request = JobRequest {
            direction: self.direction,
            slab: span,
            slots: self.slots.clone(),
            skip_tokens: self.skip_tokens,
            partial: self.partial,
            layers: self.layers,
        };
        Ok((plan, request))
    }
}
