//! A cache and slabs for one test: every byte of both sides is compared with the oracle after every transfer.

use std::cell::RefCell;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use maru::cxl::Slab;
use maru::layout::oracle::Reference;
use maru::{
    Axis, CacheSpec, CacheTensor, Config, DType, Direction, PagedCache, Place, RegisteredCache, SlotMapping,
    TensorDesc, Tensors, TransferEngine, TransferError, TransferRequest,
};
use maru_sim_driver::Session;

use crate::memory::{self, Arena};

/// A mover as the engine is asked for it.
#[derive(Debug)]
pub(crate) struct Mover {
    pub(crate) name: &'static str,
    pub(crate) config: &'static str,
    pub(crate) backend: &'static str,
    pub(crate) strategy: &'static str,
    pub(crate) device: bool,
}

/// Every way to move bytes.
pub(crate) const MOVERS: [Mover; 4] = [
    Mover {
        name: "host",
        config: "[transfer]\ndevice = \"host\"",
        backend: "fallback",
        strategy: "host",
        device: false,
    },
    Mover {
        name: "direct",
        config: "[transfer]\ndevice = \"cuda:0\"\nbackend = \"native\"\nstrategy = \"direct\"",
        backend: "native",
        strategy: "direct",
        device: true,
    },
    Mover {
        name: "staged",
        config: "[transfer]\ndevice = \"cuda:0\"\nbackend = \"native\"\nstrategy = \"staged\"\nstaging_bytes = \"16MiB\"",
        backend: "native",
        strategy: "staged",
        device: true,
    },
    Mover {
        name: "copy_engine",
        config: "[transfer]\ndevice = \"cuda:0\"\nbackend = \"fallback\"",
        backend: "fallback",
        strategy: "copy_engine",
        device: true,
    },
];

/// An engine with one mover, and the turn with the simulated driver if that is what it runs on.
#[derive(Debug)]
pub(crate) struct Rig {
    pub(crate) engine: TransferEngine,
    pub(crate) context: Option<Arc<CudaContext>>,
    pub(crate) mover: &'static Mover,
    pub(crate) session: Option<Session>,
}

/// How a test describes its tensors: what they are, and what the engine says of them.
#[derive(Clone, Debug)]
pub(crate) struct View {
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    dtype: DType,
    axes: Vec<Axis>,
    spec: CacheSpec,
    offsets: Vec<u64>,
    split: bool,
}

pub(crate) fn axes(words: &str) -> Vec<Axis> {
    Axis::parse_list(words).unwrap()
}

/// What an engine normally says.
pub(crate) fn block_size(tokens: u64) -> CacheSpec {
    CacheSpec { block_size: Some(tokens), ..CacheSpec::default() }
}

impl View {
    /// One contiguous bf16 tensor whose axes are `words`; the engine states the block size, unless told
    /// otherwise.
    pub(crate) fn new(shape: &[i64], words: &str) -> View {
        let axes = axes(words);
        let tokens = axes.iter().position(|a| *a == Axis::Token).map(|i| shape[i].unsigned_abs());
        let spec = CacheSpec { block_size: tokens, ..CacheSpec::default() };
        let shape = shape.to_vec();
        View { shape, strides: None, dtype: DType::Bf16, axes, spec, offsets: vec![0], split: false }
    }

    pub(crate) fn strides(mut self, strides: &[i64]) -> View {
        self.strides = Some(strides.to_vec());
        self
    }

    pub(crate) fn dtype(mut self, dtype: DType) -> View {
        self.dtype = dtype;
        self
    }

    pub(crate) fn told(mut self, spec: CacheSpec) -> View {
        self.spec = spec;
        self
    }

    /// The engine states the order of the axes.
    pub(crate) fn named(mut self) -> View {
        self.spec.axes = Some(self.axes.clone());
        self
    }

    /// Several tensors, at these byte offsets of the memory.
    pub(crate) fn at(mut self, offsets: &[u64]) -> View {
        self.offsets = offsets.to_vec();
        self
    }

    /// The first half of the tensors are K, the others V.
    pub(crate) fn split(mut self) -> View {
        self.split = true;
        self
    }

    pub(crate) fn desc(&self) -> TensorDesc {
        match &self.strides {
            Some(strides) => TensorDesc::strided(&self.shape, strides, self.dtype).unwrap(),
            None => TensorDesc::contiguous(&self.shape, self.dtype).unwrap(),
        }
    }

    fn has(&self, axis: Axis) -> bool {
        self.axes.contains(&axis)
    }
}

/// A registered cache in memory of its own, with canaries around it.
#[derive(Debug)]
pub(crate) struct Cache<'a> {
    pub(crate) rig: &'a Rig,
    pub(crate) arena: Arena,
    pub(crate) len: usize,
    pub(crate) registered: RegisteredCache,
    pub(crate) reference: Reference,
    random: RefCell<Random>,
}

/// One transfer.
#[derive(Clone, Debug)]
pub(crate) struct Way<'a> {
    pub(crate) slots: &'a [i64],
    pub(crate) skip: u64,
    /// Tokens of the slab.
    pub(crate) tokens: u64,
    pub(crate) layers: Option<(u32, u32)>,
    /// Bytes by which the slab's first address is off.
    pub(crate) slab_shift: u64,
    pub(crate) device_slots: bool,
}

pub(crate) fn slots(slots: &[i64]) -> Way<'_> {
    let tokens = (slots.len() as u64).max(1);
    Way { slots, skip: 0, tokens, layers: None, slab_shift: 0, device_slots: false }
}

impl Way<'_> {
    pub(crate) fn skip(mut self, skip: u64) -> Self {
        self.skip = skip;
        self
    }
    pub(crate) fn of(mut self, tokens: u64) -> Self {
        self.tokens = tokens;
        self
    }
    pub(crate) fn layers(mut self, first: u32, count: u32) -> Self {
        self.layers = Some((first, count));
        self
    }
    pub(crate) fn slab_shift(mut self, bytes: u64) -> Self {
        self.slab_shift = bytes;
        self
    }
    fn on_device(&self) -> Self {
        Way { device_slots: true, ..self.clone() }
    }
}

pub(crate) const BOTH: [Direction; 2] = [Direction::Gather, Direction::Scatter];

const GUARD: usize = 64;

impl Rig {
    pub(crate) fn open(mover: &'static Mover, session: Option<Session>) -> Rig {
        let config = Config::from_toml_str(mover.config, mover.name).unwrap();
        Rig::with(&config, mover, session)
    }

    pub(crate) fn with(config: &Config, mover: &'static Mover, session: Option<Session>) -> Rig {
        let engine = TransferEngine::open(config).unwrap();
        let context = match engine.place() {
            Place::Cuda(n) => Some(maru::kernel::open_context(n as usize).unwrap()),
            _ => None,
        };
        Rig { engine, context, mover, session }
    }

    /// Registers tensors that must be accepted.
    pub(crate) fn cache(&self, view: &View) -> Cache<'_> {
        self.try_cache(view).unwrap()
    }

    pub(crate) fn try_cache(&self, view: &View) -> Result<Cache<'_>, TransferError> {
        let desc = view.desc();
        let len = (view.offsets.iter().max().unwrap() + desc.span_bytes()) as usize + GUARD;
        let mut random = Random(0x1234_5678_9abc_def1 ^ len as u64);
        let arena = Arena::new(self.context.as_ref(), &random.bytes(len)).unwrap();
        let tensor =
            |at: &u64| CacheTensor { addr: arena.addr() + at, len: desc.span_bytes(), desc: desc.clone() };
        let mut list: Vec<CacheTensor> = view.offsets.iter().map(tensor).collect();
        let tensors = match () {
            () if view.split => {
                let v = list.split_off(list.len() / 2);
                Tensors::Split { k: list, v }
            }
            () if view.has(Axis::Layer) => Tensors::CrossLayer(list.remove(0)),
            () => Tensors::PerLayer(list),
        };
        // SAFETY: the memory lives as long as the cache and is touched by its test only.
        let cache = unsafe { PagedCache::new(&tensors, &view.spec, self.engine.place(), None) }?;
        let (planes, layers) = (cache.planes(), cache.layers());
        let registered = self.engine.register(cache)?;
        let token = view.axes.iter().position(|a| *a == Axis::Token).map_or(1, |i| desc.shape()[i]);
        let reference = Reference {
            tensor: desc,
            axes: view.axes.clone(),
            block_size: token,
            planes,
            layers,
            tensors: view.offsets.clone(),
        };
        let random = RefCell::new(random);
        Ok(Cache { rig: self, arena, len, registered, reference, random })
    }

    /// A slab with room around it, in memory the mover can use.
    pub(crate) fn slab(&self, content: &[u8]) -> Slab {
        memory::slab(self.context.as_ref(), content).unwrap()
    }
}

impl Cache<'_> {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.arena.read(self.len).unwrap()
    }

    pub(crate) fn slab_bytes(&self, tokens: u64) -> u64 {
        self.reference.planes * self.reference.layers * tokens * self.reference.row_bytes()
    }

    /// Moves both ways, with the slots in host memory and, on a device, also there; all bytes as the oracle has
    /// them.
    pub(crate) fn exact(&self, way: &Way<'_>) {
        for direction in BOTH {
            self.one(direction, way);
            if self.rig.mover.device {
                self.one(direction, &way.on_device());
            }
        }
    }

    fn one(&self, direction: Direction, way: &Way<'_>) {
        let mut cache = self.bytes();
        let (slab, whole, mut image) = self.new_slab(way);
        let moved = self.expect(direction, way, &mut cache, &mut image);
        let _list = self.list(way);
        let transfer = self.rig.engine.submit(&self.request(direction, way, &slab, _list.as_ref())).unwrap();
        let mover = self.rig.mover;
        assert_eq!(transfer.backend(), mover.backend);
        let holes = direction == Direction::Gather && way.slots.contains(&-1);
        match transfer.strategy() {
            "none" => assert_eq!(moved, 0),
            // The ring would write over what is left out, and needs to know the slots.
            "direct" if mover.strategy == "staged" && (holes || way.device_slots) => {}
            strategy => assert_eq!(strategy, mover.strategy),
        }
        if !way.device_slots {
            assert_eq!(transfer.bytes(), moved);
        }
        transfer.wait().unwrap();
        same("cache", direction, &self.bytes(), &cache);
        same("slab", direction, &read(&whole), &image);
    }

    /// A transfer that is refused both ways, with nothing touched, after which the next one works; returns what
    /// the user reads.
    pub(crate) fn refused(&self, way: &Way<'_>, kind: &str) -> String {
        let mut text = String::new();
        for direction in BOTH {
            let cache = self.bytes();
            let (slab, whole, image) = self.new_slab(way);
            let error = self.rig.engine.submit(&self.request(direction, way, &slab, None)).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            same("cache", direction, &self.bytes(), &cache);
            same("slab", direction, &read(&whole), &image);
            text = error.to_string();
        }
        self.exact(&slots(&[0]));
        text
    }

    /// Slots in device memory of which some are wrong: an error both ways, at once or from the transfer, and
    /// wrong tokens are left alone on both sides.
    pub(crate) fn reported(&self, way: &Way<'_>) -> String {
        let mut text = String::new();
        for direction in BOTH {
            let (before, mut cache) = (self.bytes(), self.bytes());
            let (slab, whole, original) = self.new_slab(way);
            let mut image = original.clone();
            let num_slots = self.registered.paged().num_slots() as i64;
            let good: Vec<i64> =
                way.slots.iter().map(|s| if (0..num_slots).contains(s) { *s } else { -1 }).collect();
            self.expect(direction, &Way { slots: &good, ..way.clone() }, &mut cache, &mut image);
            let way = way.on_device();
            let list = self.list(&way);
            let submitted = self.rig.engine.submit(&self.request(direction, &way, &slab, list.as_ref()));
            let error = match submitted {
                Ok(transfer) => transfer.wait().unwrap_err(),
                Err(error) => {
                    (cache, image) = (before, original);
                    error
                }
            };
            assert_eq!(error.kind(), "slot_out_of_range", "{error}");
            same("cache", direction, &self.bytes(), &cache);
            same("slab", direction, &read(&whole), &image);
            text = error.to_string();
        }
        self.exact(&slots(&[0]));
        text
    }

    fn new_slab(&self, way: &Way<'_>) -> (Slab, Slab, Vec<u8>) {
        let len = self.slab_bytes(way.tokens);
        let image = self.random.borrow_mut().bytes(len as usize + way.slab_shift as usize + GUARD);
        let whole = self.rig.slab(&image);
        (whole.span(way.slab_shift, len).unwrap(), whole, image)
    }

    fn list(&self, way: &Way<'_>) -> Option<Arena> {
        let bytes: Vec<u8> = way.slots.iter().flat_map(|s| s.to_le_bytes()).chain([0; 8]).collect();
        way.device_slots.then(|| Arena::new(self.rig.context.as_ref(), &bytes).unwrap())
    }

    fn request(
        &self,
        direction: Direction,
        way: &Way<'_>,
        slab: &Slab,
        list: Option<&Arena>,
    ) -> TransferRequest {
        let mapping = match list {
            Some(list) => SlotMapping::Device { addr: list.addr(), len: way.slots.len() as u64 },
            None => SlotMapping::from_slots(way.slots),
        };
        let request = match direction {
            Direction::Gather => TransferRequest::gather(&self.registered, mapping, slab),
            Direction::Scatter => TransferRequest::scatter(&self.registered, mapping, slab),
        };
        let request = request.slab_tokens(way.tokens).skip_tokens(way.skip).partial(true);
        match way.layers {
            Some((first, count)) => request.layers(first, count),
            None => request,
        }
    }

    /// The oracle, for some of the layers; returns the bytes it moved.
    fn expect(&self, direction: Direction, way: &Way<'_>, cache: &mut [u8], slab: &mut [u8]) -> u64 {
        let r = &self.reference;
        let (first, count) = way.layers.map_or((0, r.layers), |(f, n)| (f.into(), n.into()));
        let row = r.row_bytes();
        let mut moved = 0;
        for kv in 0..r.planes {
            for layer in first..first + count {
                for (token, &slot) in way.slots.iter().enumerate().skip(way.skip as usize) {
                    let Ok(slot) = u64::try_from(slot) else { continue };
                    let at = ((kv * r.layers + layer) * way.tokens + token as u64) * row + way.slab_shift;
                    for byte in 0..row {
                        let paged = r.paged_offset(kv, layer, slot, byte) as usize;
                        match direction {
                            Direction::Gather => slab[(at + byte) as usize] = cache[paged],
                            Direction::Scatter => cache[paged] = slab[(at + byte) as usize],
                        }
                    }
                    moved += row;
                }
            }
        }
        moved
    }
}

pub(crate) fn read(slab: &Slab) -> Vec<u8> {
    let mut bytes = vec![0; slab.len() as usize];
    slab.read_at(0, &mut bytes).unwrap();
    bytes
}

pub(crate) fn same(what: &str, direction: Direction, found: &[u8], expected: &[u8]) {
    let differs = found.iter().zip(expected).position(|(f, e)| f != e);
    assert_eq!(differs, None, "{direction:?}: the first byte of the {what} that differs");
}

/// Small and the same everywhere.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(n + 8);
        while bytes.len() < n {
            bytes.extend(self.next().to_le_bytes());
        }
        bytes.truncate(n);
        bytes
    }

    /// Slots 0..n in some order.
    pub(crate) fn shuffled(&mut self, n: i64) -> Vec<i64> {
        let mut all: Vec<i64> = (0..n).collect();
        for i in (1..all.len()).rev() {
            all.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
        all
    }
}
