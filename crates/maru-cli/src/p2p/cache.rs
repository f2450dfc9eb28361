//! The paged cache of one process: its memory, and the engine's view of it.

#![allow(unsafe_code)]

use maru::cxl::Slab;
use maru::layout::{SlabLayout, SlotMapping};
use maru::transfer::{
    CacheTensor, PagedCache, Place, RegisteredCache, Tensors, TransferEngine, TransferRequest,
};

use crate::error::CliError;
use crate::memory::Memory;
use crate::p2p::shape::Shape;

/// A paged cache and its mover.
#[derive(Debug)]
pub(crate) struct Cache {
    engine: TransferEngine,
    /// Dropped before the memory it describes.
    registered: RegisteredCache,
    memory: Memory,
}

/// What a transfer came to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moved {
    pub(crate) bytes: u64,
    pub(crate) backend: &'static str,
    pub(crate) strategy: &'static str,
}

impl Cache {
    /// Allocates a cache where the engine wants it and registers it.
    pub(crate) fn new(engine: TransferEngine, shape: &Shape) -> Result<Self, CliError> {
        let place = engine.place();
        let memory = Memory::new(place, shape.bytes())?;
        let base = memory.addr();
        let desc = shape.tensor()?;
        let len = shape.num_blocks * shape.block_bytes;
        let tensor = |layer| CacheTensor { addr: base + layer * shape.layer_stride, len, desc: desc.clone() };
        let tensors = Tensors::PerLayer((0..shape.layers).map(tensor).collect());
        let layers = usize::try_from(shape.layers).ok();
        // SAFETY: each tensor's `len` bytes lie inside the `shape.bytes()` from `base` (layer strides are at least
        // `len`), memory of `place` which `memory` keeps alive. The cache and its registered copy never leave this
        // value, which drops them before `memory`, and every transfer is waited for inside `store` and `load`.
        // Meanwhile nobody else touches the bytes: they are reached through `self` only, which `load` borrows
        // mutably and `store` shares with readers alone.
        let paged = unsafe { PagedCache::new(&tensors, &shape.spec(), place, layers) }?;
        let registered = engine.register(paged)?;
        Ok(Cache { engine, registered, memory })
    }

    /// Copies bytes into the cache.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CliError> {
        self.memory.write(offset, bytes)
    }

    /// Copies bytes out of the cache.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), CliError> {
        self.memory.read(offset, bytes)
    }

    /// The slab of `tokens` tokens of this cache.
    pub(crate) fn slab_layout(&self, tokens: u64) -> Result<SlabLayout, CliError> {
        Ok(self.registered.paged().slab_layout(tokens)?)
    }

    /// Paged cache → slab.
    pub(crate) fn store(&self, slots: SlotMapping, slab: &Slab) -> Result<Moved, CliError> {
        let tokens = slots.len();
        self.submit(&TransferRequest::gather(&self.registered, slots, slab).slab_tokens(tokens))
    }

    /// Slab → paged cache; `stored_as` is the fingerprint that the slab was published with.
    pub(crate) fn load(
        &mut self,
        slots: SlotMapping,
        slab: &Slab,
        stored_as: u64,
    ) -> Result<Moved, CliError> {
        let tokens = slots.len();
        let request = TransferRequest::scatter(&self.registered, slots, slab).slab_tokens(tokens);
        self.submit(&request.stored_as(maru::layout::Fingerprint(stored_as)))
    }

    fn submit(&self, request: &TransferRequest) -> Result<Moved, CliError> {
        let transfer = self.engine.submit(request)?;
        let (bytes, backend, strategy) = (transfer.bytes(), transfer.backend(), transfer.strategy());
        transfer.wait()?;
        Ok(Moved { bytes, backend, strategy })
    }

    /// The mover.
    pub(crate) fn backend(&self) -> &'static str {
        self.registered.backend()
    }

    /// Where it is.
    pub(crate) fn place(&self) -> Place {
        self.engine.place()
    }
}
