//! One cache and one slab for an engine on a simulated device.

use std::sync::Arc;

use maru_cxl::{CudaRegistrar, Region, RegisterOptions, Slab};
use maru_layout::{Axis, CacheSpec, DType, Direction, SlotMapping};
use maru_sim_driver::Session;
use maru_transfer::config::{BackendChoice, Config, DeviceChoice};
use maru_transfer::{CacheTensor, PagedCache, RegisteredCache, Tensors, TransferEngine, TransferRequest};

use crate::cases::{Cache, Dims, Images, ORDERS, Rng, compare, random_slots};
use crate::common::{Device, Stream, context};

pub(crate) const DIMS: Dims =
    Dims { layers: 2, blocks: 6, block_size: 4, heads: 3, head_size: 8, dtype: DType::Bf16, pad: 0 };

pub(crate) fn config(device: u32, tokens: u64) -> Config {
    let mut config = Config::default();
    config.transfer.device = DeviceChoice::Cuda(device);
    config.transfer.backend = BackendChoice::Native;
    config.transfer.kv_chunk_tokens = tokens.try_into().unwrap();
    config
}

/// One cache on the device and one slab, with what the oracle makes of a transfer.
pub(crate) struct Setup {
    pub(crate) paged: Device,
    pub(crate) registered: RegisteredCache,
    pub(crate) slab: Slab,
    pub(crate) images: Images,
    pub(crate) slots: Vec<i64>,
    pub(crate) direction: Direction,
}

impl Setup {
    /// The current context is of the engine's device.
    pub(crate) fn new(
        session: &Session,
        engine: &TransferEngine,
        name: &str,
        dims: Dims,
        direction: Direction,
    ) -> Setup {
        Self::with_holes(session, engine, name, dims, direction, 5)
    }

    /// No token left out.
    pub(crate) fn full(
        session: &Session,
        engine: &TransferEngine,
        name: &str,
        dims: Dims,
        direction: Direction,
    ) -> Setup {
        Self::with_holes(session, engine, name, dims, direction, 0)
    }

    fn with_holes(
        session: &Session,
        engine: &TransferEngine,
        name: &str,
        dims: Dims,
        direction: Direction,
        holes: usize,
    ) -> Setup {
        let order = ORDERS.iter().find(|o| o.name == name).unwrap();
        let cache = Cache::new(order, dims).unwrap();
        let tokens = cache.layout.num_slots();
        let mut rng = Rng::new(tokens);
        let slots = random_slots(&mut rng, tokens, usize::try_from(tokens).unwrap(), holes);
        let images = Images::new(&cache, direction, tokens, &slots, 0, &mut rng);
        let paged = Device::of(session, &images.cache);
        let registered = register(engine, &cache, name, paged.addr);
        let len = images.slab.len() as u64;
        let slab = Region::anonymous(len).unwrap().slab(0, len).unwrap();
        slab.write_at(0, &images.slab).unwrap();
        Setup { paged, registered, slab, images, slots, direction }
    }

    pub(crate) fn pinned(self, device: usize) -> Setup {
        let registrar = CudaRegistrar::open(device).unwrap();
        context(device);
        let options = RegisterOptions { required: true, ..RegisterOptions::default() };
        self.slab.region().register(Arc::new(registrar), options).unwrap();
        self
    }

    pub(crate) fn request(&self) -> TransferRequest {
        let slots = SlotMapping::from_slots(self.slots.clone());
        let tokens = self.slots.len() as u64;
        match self.direction {
            Direction::Gather => TransferRequest::gather(&self.registered, slots, &self.slab),
            _ => TransferRequest::scatter(&self.registered, slots, &self.slab),
        }
        .slab_tokens(tokens)
    }

    pub(crate) fn slab_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.images.slab.len()];
        self.slab.read_at(0, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn check(&self, session: &Session) {
        compare("cache", &self.paged.read(session), &self.images.cache_after).unwrap();
        compare("slab", &self.slab_bytes(), &self.images.slab_after).unwrap();
    }

    pub(crate) fn untouched(&self, session: &Session) -> bool {
        self.paged.read(session) == self.images.cache && self.slab_bytes() == self.images.slab
    }

    pub(crate) fn restore(&self, session: &Session) {
        assert!(session.poke(self.paged.addr, &self.images.cache));
        self.slab.write_at(0, &self.images.slab).unwrap();
    }
}

/// Registers a cache whose image is at `addr`, and stays there as long as what is returned.
pub(crate) fn register(engine: &TransferEngine, cache: &Cache, name: &str, addr: u64) -> RegisteredCache {
    let reference = &cache.reference;
    let len = reference.tensor.span_bytes();
    let tensor = |at: &u64| CacheTensor { addr: addr + at, len, desc: reference.tensor.clone() };
    let mut list: Vec<CacheTensor> = reference.tensors.iter().map(tensor).collect();
    let layers = usize::try_from(reference.layers).unwrap();
    let tensors = match list.len() {
        1 if reference.axes.contains(&Axis::Layer) => Tensors::CrossLayer(list.remove(0)),
        n if n == 2 * layers => Tensors::Split { v: list.split_off(layers), k: list },
        _ => Tensors::PerLayer(list),
    };
    let spec = CacheSpec {
        block_size: Some(reference.block_size),
        axes: Some(reference.axes.clone()),
        mla: name.contains("mla"),
        ..CacheSpec::default()
    };
    // SAFETY: the memory stays, by the promise of this function's callers.
    let paged = unsafe { PagedCache::new(&tensors, &spec, engine.place(), Some(layers)) }.unwrap();
    engine.register(paged).unwrap()
}

pub(crate) fn on(stream: &Stream) -> maru_transfer::Stream {
    // SAFETY: tests keep the stream until their transfers are done.
    unsafe { maru_transfer::Stream::cuda(stream.0.expose_provenance()) }
}
