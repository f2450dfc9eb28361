//! A cache, slabs and movers over the same memory, so that they can be checked and timed against each other.

#![allow(unsafe_code)]

use std::sync::Arc;

use maru::cxl::{CudaRegistrar, Region, RegisterOptions, Slab};
use maru::layout::{Direction, SlotMapping};
use maru::transfer::{
    CacheTensor, PagedCache, Place, RegisteredCache, Tensors, TransferEngine, TransferRequest,
};

use crate::error::CliError;
use crate::layouts::{Built, Kind};
use crate::memory::Memory;

/// One cache in one place, registered with several engines.
#[derive(Debug)]
pub(crate) struct Rig {
    /// Dropped before the memory that they describe.
    lanes: Vec<(TransferEngine, RegisteredCache)>,
    memory: Memory,
    slabs: Region,
    all_slabs: Slab,
    built: Built,
}

/// One slab's transfer.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) slots: Vec<i64>,
    /// First byte of the slab in the slabs' memory.
    pub(crate) offset: u64,
    /// Tokens that the slab has room for.
    pub(crate) tokens: u64,
    pub(crate) skip: u64,
}

/// What a transfer came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) bytes: u64,
    pub(crate) backend: &'static str,
    pub(crate) strategy: &'static str,
}

impl Rig {
    /// Allocates the cache in the engines' place, which they share, and registers it with each of them, and the
    /// slabs' memory with the device.
    pub(crate) fn new(engines: &[TransferEngine], built: Built, slabs: Region) -> Result<Self, CliError> {
        let place = engines.first().map_or(Place::Host, TransferEngine::place);
        let memory = Memory::new(place, built.bytes)?;
        let base = memory.addr();
        let tensor = |offset: &u64| CacheTensor {
            addr: base + offset,
            len: built.bytes - offset,
            desc: built.tensor.clone(),
        };
        let list: Vec<CacheTensor> = built.reference.tensors.iter().map(tensor).collect();
        let tensors = match (built.kind, list.first()) {
            (Kind::CrossLayer, Some(one)) => Tensors::CrossLayer(one.clone()),
            (Kind::Split, _) => {
                let (k, v) = list.split_at(list.len() / 2);
                Tensors::Split { k: k.to_vec(), v: v.to_vec() }
            }
            _ => Tensors::PerLayer(list),
        };
        let mut lanes = Vec::with_capacity(engines.len());
        for engine in engines {
            // SAFETY: every tensor lies in the `built.bytes` from `base`, memory of `place` that `memory` keeps
            // alive. The caches never leave this value but in requests, which only this value can submit, and it
            // drops them before `memory`. `submit` waits for every transfer, and like everything else that writes
            // the bytes it borrows this value mutably.
            let cache = unsafe { PagedCache::new(&tensors, &built.spec, place, None) }?;
            lanes.push((engine.clone(), engine.register(cache)?));
        }
        if let Place::Cuda(device) = place {
            let registrar = CudaRegistrar::open(usize::try_from(device).unwrap_or(usize::MAX))?;
            let options = RegisterOptions { required: true, ..RegisterOptions::default() };
            slabs.register(Arc::new(registrar), options)?;
        }
        let all_slabs = slabs.slab(0, slabs.len())?;
        Ok(Rig { lanes, memory, slabs, all_slabs, built })
    }

    /// The layout.
    pub(crate) fn built(&self) -> &Built {
        &self.built
    }

    /// Overwrites bytes of the cache.
    pub(crate) fn write_cache(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CliError> {
        self.memory.write(offset, bytes)
    }

    /// Reads the cache from its first byte on.
    pub(crate) fn read_cache(&self, bytes: &mut [u8]) -> Result<(), CliError> {
        self.memory.read(0, bytes)
    }

    /// Overwrites bytes of the slabs.
    pub(crate) fn write_slabs(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CliError> {
        Ok(self.all_slabs.write_at(offset, bytes)?)
    }

    /// Reads bytes of the slabs.
    pub(crate) fn read_slabs(&self, offset: u64, bytes: &mut [u8]) -> Result<(), CliError> {
        Ok(self.all_slabs.read_at(offset, bytes)?)
    }

    /// Bytes of the slabs' memory.
    pub(crate) fn slabs_len(&self) -> u64 {
        self.slabs.len()
    }

    /// Copies `bytes` bytes between the beginnings of cache and slabs in one piece, as a ceiling for transfers:
    /// one `memcpy` of this thread, or one asynchronous copy of the device's, waited for.
    pub(crate) fn flat(&mut self, direction: Direction, bytes: u64) -> Result<(), CliError> {
        let slab = self.slabs.slab(0, bytes)?;
        match &mut self.memory {
            Memory::Host(cache) => {
                let cache = cache.span(0, bytes)?;
                let len = usize::try_from(bytes).unwrap_or(usize::MAX);
                let (from, to) = match direction {
                    Direction::Gather => (cache.addr(), slab.addr()),
                    Direction::Scatter => (slab.addr(), cache.addr()),
                };
                // SAFETY: both spans have `bytes` bytes, as just checked, of different mappings that live in
                // this value, which is borrowed mutably: nobody else of this process touches them.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
                Ok(())
            }
            Memory::Device(cache) => cache.flat(direction == Direction::Scatter, &slab),
        }
    }

    /// The requests of some work, checked and ready to be submitted again and again.
    pub(crate) fn requests(
        &self,
        lane: usize,
        direction: Direction,
        work: &[Work],
    ) -> Result<Vec<TransferRequest>, CliError> {
        let (_, cache) = self.lane(lane)?;
        let row =
            self.built.reference.planes * self.built.reference.layers * self.built.reference.row_bytes();
        let request = |work: &Work| {
            let slab = self.slabs.slab(work.offset, work.tokens * row)?;
            let slots = SlotMapping::from_slots(work.slots.as_slice());
            let request = match direction {
                Direction::Gather => TransferRequest::gather(cache, slots, &slab),
                Direction::Scatter => TransferRequest::scatter(cache, slots, &slab),
            };
            Ok(request.slab_tokens(work.tokens).skip_tokens(work.skip).partial(true))
        };
        work.iter().map(request).collect()
    }

    /// Moves and waits. The requests are this lane's.
    pub(crate) fn submit(&mut self, lane: usize, requests: &[TransferRequest]) -> Result<Moved, CliError> {
        let (engine, _) = self.lane(lane)?;
        let transfer = engine.submit_many(requests)?;
        let moved =
            Moved { bytes: transfer.bytes(), backend: transfer.backend(), strategy: transfer.strategy() };
        transfer.wait()?;
        Ok(moved)
    }

    fn lane(&self, lane: usize) -> Result<&(TransferEngine, RegisteredCache), CliError> {
        self.lanes.get(lane).ok_or_else(|| CliError::invalid(format!("there is no mover {lane}")))
    }
}
