//! Random transfers of several threads, whole and by layer, by every mover, on several streams, while the driver is
//! slow now and then: in the end, and whenever a layer is there, every byte is as the oracle says.

use maru_cxl::{CudaRegistrar, Region, RegisterOptions};
use maru_layout::{DType, Direction, SlabLayout, SlotMapping};
use maru_sim_driver::{Session, Simulator};
use maru_transfer::config::{BackendChoice, Config, StrategyChoice};
use maru_transfer::{Event, RegisteredCache, Transfer, TransferEngine, TransferError, TransferRequest};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cases::{Cache, Dims, ORDERS, Rng, random_slots};
use crate::common::{Device, Event as OwnEvent, Stream, Test, context};
use crate::setup::{config, on, register};

pub(crate) fn tests() -> Vec<Test> {
    tests![random_transfers_of_several_threads, random_transfers_with_failing_calls]
}

/// `MARU_FUZZ_SECONDS` and `MARU_FUZZ_SEED` for longer searches and to repeat one.
fn random_transfers_of_several_threads(session: &Session) {
    let number = |name| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let _context = context(0);
    let end = Instant::now() + Duration::from_secs(number("MARU_FUZZ_SECONDS").unwrap_or(4));
    let mut seed = number("MARU_FUZZ_SEED").unwrap_or(1);
    while Instant::now() < end {
        eprintln!("seed {seed}");
        round(session, seed);
        seed += 1;
    }
}

/// One engine, some threads.
fn round(session: &Session, seed: u64) {
    let mut rng = Rng::new(seed);
    session.set("shift", rng.below(2));
    session.set("descending", rng.below(2));
    session.set("delay_us", [0, 0, 20, 80][pick(&mut rng, 4)]);
    session.set("word_us", [0, 0, 50, 300][pick(&mut rng, 4)]);
    let config = any_config(&mut rng);
    let engine = TransferEngine::open(&config).unwrap();
    let threads = 1 + rng.below(4);
    let native = config.transfer.backend == BackendChoice::Native;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (engine, simulator, seed) = (&engine, &**session, rng.next());
            scope.spawn(move || Worker::new(simulator, engine, Rng::new(seed), native, thread).run());
        }
    });
    session.set("delay_us", 0);
    session.set("word_us", 0);
}

/// Calls whose failure a transfer has to report.
const CALLS: [&str; 10] = [
    "cuLaunchKernel",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpy2DAsync",
    "cuMemcpy3DAsync",
    "cuMemcpyBatchAsync",
    "cuEventQuery",
];

fn random_transfers_with_failing_calls(session: &Session) {
    let number = |name| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let _context = context(0);
    let end = Instant::now() + Duration::from_secs(number("MARU_FUZZ_SECONDS").unwrap_or(4));
    let (mut seed, mut struck) = (number("MARU_FUZZ_SEED").unwrap_or(1), 0);
    while Instant::now() < end {
        eprintln!("seed {seed}");
        let mut rng = Rng::new(seed);
        let config = any_config(&mut rng);
        let engine = TransferEngine::open(&config).unwrap();
        let native = config.transfer.backend == BackendChoice::Native;
        session.set("delay_us", [0, 50][pick(&mut rng, 2)]);
        struck += Worker::new(session, &engine, rng, native, 0).run_with_faults();
        session.set("delay_us", 0);
        seed += 1;
    }
    assert!(struck > 0, "{struck} faults");
}

fn any_config(rng: &mut Rng) -> Config {
    let mut config = config(0, 8);
    let t = &mut config.transfer;
    (t.backend, t.strategy) = match rng.below(5) {
        0 => (BackendChoice::Fallback, StrategyChoice::Auto),
        1 => (BackendChoice::Native, StrategyChoice::Direct),
        _ => (BackendChoice::Native, StrategyChoice::Staged),
    };
    // From one small plane a buffer to everything.
    t.staging_bytes = [4 * 4096, 4 * 8192, 4 << 16, 4 << 20][pick(rng, 4)];
    t.enable_fused_load = rng.below(4) == 0;
    config
}

/// Mostly one that waits for no other; now and then a default stream, under any of its names, or one that goes with it.
fn any_stream(rng: &mut Rng) -> Stream {
    match rng.below(8) {
        0 => Stream::new(false),
        1 => Stream(std::ptr::with_exposed_provenance_mut(pick(rng, 3))),
        _ => Stream::new(true),
    }
}

fn pick(rng: &mut Rng, n: u64) -> usize {
    usize::try_from(rng.below(n)).unwrap()
}

/// A cache and slabs of one thread, with what they should hold.
struct Worker<'a> {
    simulator: &'a Simulator,
    engine: &'a TransferEngine,
    rng: Rng,
    native: bool,
    cache: Cache,
    tokens: u64,
    registered: RegisteredCache,
    paged: Device,
    region: Region,
    /// Offsets of slabs.
    slabs: Vec<u64>,
    /// Whether some of them share memory.
    overlapping: bool,
    /// What the cache and the region should hold.
    pages: Vec<u8>,
    bytes: Vec<u8>,
    streams: Vec<Stream>,
    /// Lists and events of transfers in flight.
    lists: Vec<Device>,
    events: Vec<OwnEvent>,
    flights: Vec<(Transfer, bool)>,
    /// Waits for nothing until the end.
    patient: bool,
    what: String,
}

/// What goes to the engine in one call.
struct Batch {
    wanted: Vec<Wanted>,
    requests: Vec<TransferRequest>,
    by_layer: bool,
    after: Vec<Option<Event>>,
    /// Whether it reports a bad slot.
    bad: bool,
}

/// A request as the oracle sees it.
struct Wanted {
    direction: Direction,
    slab: u64,
    slots: Vec<i64>,
    skip: u64,
    layers: (u64, u64),
    single: bool,
}

impl Wanted {
    /// Whether the layer has anything to move.
    fn moves(&self, layer: u64) -> bool {
        let (first, count) = self.layers;
        let skip = usize::try_from(self.skip).unwrap();
        (first..first + count).contains(&layer) && self.slots.iter().skip(skip).any(|s| *s >= 0)
    }
}

impl<'a> Worker<'a> {
    fn new(
        simulator: &'a Simulator,
        engine: &'a TransferEngine,
        mut rng: Rng,
        native: bool,
        thread: u64,
    ) -> Self {
        context(0);
        let order = &ORDERS[pick(&mut rng, ORDERS.len() as u64)];
        let patient = rng.below(3) == 0;
        let long = rng.below(if patient { 2 } else { 6 }) == 0;
        let dims = Dims {
            layers: 1 + rng.below(5),
            blocks: if long { 160 } else { 2 + rng.below(8) },
            block_size: [1, 4, 4, 5][pick(&mut rng, 4)],
            heads: if long { 1 } else { 1 + rng.below(3) },
            head_size: [8, 16, 24, 23][pick(&mut rng, 4)],
            dtype: [DType::Bf16, DType::U8, DType::F32][pick(&mut rng, 3)],
            pad: [0, 0, 8, 3][pick(&mut rng, 4)],
        };
        let cache = Cache::new(order, dims).unwrap();
        let slots = cache.layout.num_slots();
        let tokens = 1 + rng.below(slots);
        let slab = cache.slab_bytes(tokens) as u64;
        let step = [1, 16, 16, 256][pick(&mut rng, 4)];
        let (gap, overlapping) = match rng.below(6) {
            0 => (rng.below(slab), true),
            1 => (slab, false),
            _ => (slab + rng.below(3) * 512, false),
        };
        let gap = if overlapping { gap.max(1) } else { gap.next_multiple_of(step) };
        let mut at = 64 * rng.below(3);
        let mut slabs = vec![at];
        for _ in 0..rng.below(6) {
            at += gap + if rng.below(4) == 0 { 16 * rng.below(40) } else { 0 };
            slabs.push(at);
        }
        match rng.below(3) {
            0 => slabs.reverse(),
            1 => slabs.rotate_left(1),
            _ => {}
        }
        let len = (at + slab + 64).next_multiple_of(4096);
        let region = Region::anonymous(len).unwrap();
        let registrar = CudaRegistrar::open(0).unwrap();
        context(0);
        let options = RegisterOptions { required: true, ..RegisterOptions::default() };
        region.register(Arc::new(registrar), options).unwrap();
        let pages = rng.bytes(usize::try_from(cache.bytes).unwrap());
        let bytes = rng.bytes(usize::try_from(region.len()).unwrap());
        region.slab(0, region.len()).unwrap().write_at(0, &bytes).unwrap();
        let paged = Device::new(pages.len());
        assert!(simulator.poke(paged.addr, &pages));
        let registered = register(engine, &cache, order.name, paged.addr);
        let streams = (0..1 + rng.below(3)).map(|_| any_stream(&mut rng)).collect();
        let what = format!("thread {thread}, {}, {dims:?}, {tokens} tokens, slabs {slabs:?}", order.name);
        Worker {
            simulator,
            engine,
            rng,
            native,
            cache,
            tokens,
            registered,
            paged,
            region,
            slabs,
            overlapping,
            pages,
            bytes,
            streams,
            lists: Vec::new(),
            events: Vec::new(),
            flights: Vec::new(),
            patient,
            what,
        }
    }

    fn run(mut self) {
        let mut last = 0;
        let ops = if self.patient { 20 } else { 4 + self.rng.below(10) };
        for op in 0..ops {
            let stream = pick(&mut self.rng, self.streams.len() as u64);
            if stream != last {
                self.order(last, stream);
                last = stream;
            }
            self.op(op, stream);
        }
        for (transfer, bad) in std::mem::take(&mut self.flights) {
            assert_eq!(transfer.wait().is_err(), bad, "{}", self.what);
        }
        self.check();
    }

    /// Lets a call of each transfer fail and checks that the error leaves nothing in flight and nothing broken.
    /// How many failed.
    fn run_with_faults(mut self) -> u64 {
        let mut struck = 0;
        for op in 0..30 {
            let batch = self.batch(op, 0);
            let function = CALLS[pick(&mut self.rng, CALLS.len() as u64)];
            let most = [2, 12][pick(&mut self.rng, 2)];
            let nth = 1 + self.rng.below(most);
            self.simulator.fail(function, nth, 801);
            let submitted = self.submit(&batch);
            let reached = self.simulator.faults_left() == 0;
            self.simulator.clear_faults();
            self.what
                .push_str(&format!("{function} {nth} failed: {reached}, {:?}", submitted.as_ref().err()));
            match submitted {
                Err(error) => {
                    assert!(reached, "{error}: {}", self.what);
                    struck += 1;
                    // The memory is free: what is still in flight must not touch it.
                    self.restore();
                    while self.simulator.queued() > 0 {
                        std::thread::yield_now();
                    }
                }
                Ok(transfer) => {
                    // Movers go another way where a driver refuses a copy; the bytes tell.
                    let goes_on =
                        !self.native || function == "cuEventQuery" || function.starts_with("cuMemcpy");
                    assert!(!reached || goes_on, "{}", self.what);
                    self.follow(&batch.wanted);
                    assert_eq!(transfer.wait().is_err(), batch.bad, "{}", self.what);
                }
            }
            self.check();
        }
        struck
    }

    /// Puts both sides back.
    fn restore(&self) {
        assert!(self.simulator.poke(self.paged.addr, &self.pages));
        self.region.slab(0, self.region.len()).unwrap().write_at(0, &self.bytes).unwrap();
    }

    /// Every byte of both sides; nothing is in flight.
    fn check(&self) {
        let found = self.paged.read_with(self.simulator);
        self.same("cache", &found, &self.pages);
        let mut found = vec![0; self.bytes.len()];
        self.region.slab(0, self.region.len()).unwrap().read_at(0, &mut found).unwrap();
        self.same("slabs", &found, &self.bytes);
    }

    fn same(&self, side: &str, found: &[u8], wanted: &[u8]) {
        let differs = found.iter().zip(wanted).position(|(a, b)| a != b);
        assert!(differs.is_none(), "{side} differ at {differs:?} of {}: {}", wanted.len(), self.what);
    }

    /// What comes on one stream waits for what is on another.
    fn order(&mut self, from: usize, to: usize) {
        if self.rng.below(2) == 0 {
            let to = on(&self.streams[to]);
            for (transfer, _) in &mut self.flights {
                transfer.order_before(to).unwrap();
            }
        } else {
            let event = OwnEvent::new();
            ok!(cuEventRecord(event.0, self.streams[from].0));
            ok!(cuStreamWaitEvent(self.streams[to].0, event.0, 0));
            self.events.push(event);
        }
    }

    fn op(&mut self, op: u64, stream: usize) {
        let batch = self.batch(op, stream);
        self.follow(&batch.wanted);
        let mut transfer = self.submit(&batch).unwrap_or_else(|e| panic!("{e}: {}", self.what));
        self.what.push_str(transfer.strategy());
        match if self.patient { 9 } else { self.rng.below(6) } {
            0 => assert_eq!(transfer.wait().is_err(), batch.bad, "{}", self.what),
            1 => drop(transfer),
            2 => {
                let layer = self.rng.below(self.cache.reference.layers);
                let outcome = transfer.wait_layer(u32::try_from(layer).unwrap());
                assert!(batch.bad || outcome.is_ok(), "{outcome:?}: {}", self.what);
                // A transfer that does not move the layer waits for nothing.
                if !self.overlapping && batch.wanted.iter().any(|w| w.moves(layer)) {
                    self.layer_is_there(layer, &self.paged.read_with(self.simulator));
                }
                self.flights.push((transfer, batch.bad));
            }
            // Another stream waits for a layer, and sees it.
            3 => {
                let layer = self.rng.below(self.cache.reference.layers);
                let (reader, seen) = (Stream::new(true), Device::new(self.paged.len));
                transfer.order_before_layer(on(&reader), u32::try_from(layer).unwrap()).unwrap();
                ok!(cuMemcpyDtoDAsync_v2(seen.addr, self.paged.addr, seen.len, reader.0));
                reader.wait();
                if !self.overlapping && batch.wanted.iter().any(|w| w.moves(layer)) {
                    self.layer_is_there(layer, &seen.read_with(self.simulator));
                }
                self.flights.push((transfer, batch.bad));
            }
            _ => self.flights.push((transfer, batch.bad)),
        }
    }

    fn batch(&mut self, op: u64, stream: usize) -> Batch {
        let count = 1 + self.rng.below(4);
        // By layer the order of a batch holds within a layer only, so its slabs must not have memory of two in
        // one place.
        let wants_layers = !self.overlapping && self.rng.below(3) > 0;
        let mixed = self.rng.below(5) == 0;
        let direction = self.direction();
        let same_slots = self.rng.below(3) == 0;
        let (mut wanted, mut requests, mut bad) = (Vec::<Wanted>::new(), Vec::new(), false);
        for i in 0..count {
            let direction = if mixed { self.direction() } else { direction };
            let mut w = self.wanted(direction);
            if i > 0 && same_slots {
                // The layers too, so that launches are shared.
                (w.layers, w.single, w.skip) = (wanted[0].layers, wanted[0].single, wanted[0].skip);
                w.slots.clone_from(&wanted[0].slots);
            }
            let (request, raises) = self.request(&mut w, stream);
            bad |= raises;
            wanted.push(w);
            requests.push(request);
        }
        let by_layer = wants_layers && (count == 1 || wanted.iter().all(|w| !w.single));
        let events = if by_layer { self.rng.below(self.cache.reference.layers + 1) } else { 0 };
        let after = (0..events).map(|_| self.event()).collect();
        let each = wanted.iter().map(|w| (w.direction, w.slab, w.slots.len(), w.skip, w.layers, w.single));
        let text =
            format!("\nop {op}: by layer {by_layer}, {events} events, {:?} ", each.collect::<Vec<_>>());
        self.what.push_str(&text);
        Batch { wanted, requests, by_layer, after, bad }
    }

    fn submit(&self, batch: &Batch) -> Result<Transfer, TransferError> {
        match batch.by_layer {
            true => self.engine.submit_by_layer(&batch.requests, &batch.after),
            false => self.engine.submit_many(&batch.requests),
        }
    }

    fn direction(&mut self) -> Direction {
        if self.rng.below(2) == 0 { Direction::Gather } else { Direction::Scatter }
    }

    fn event(&mut self) -> Option<Event> {
        if self.rng.below(2) == 0 {
            return None;
        }
        let stream = pick(&mut self.rng, self.streams.len() as u64);
        let event = OwnEvent::new();
        ok!(cuEventRecord(event.0, self.streams[stream].0));
        // SAFETY: the event outlives the transfers.
        let after = unsafe { Event::cuda(event.0.expose_provenance()) };
        self.events.push(event);
        Some(after)
    }

    fn wanted(&mut self, direction: Direction) -> Wanted {
        let layers = self.cache.reference.layers;
        let rng = &mut self.rng;
        let count = match rng.below(4) {
            0 => rng.below(self.tokens + 1),
            _ => self.tokens,
        };
        let hole = if rng.below(3) == 0 { 1 + pick(rng, 6) } else { 0 };
        let slots = match rng.below(3) {
            // Consecutive.
            0 => {
                let first = rng.below(self.cache.layout.num_slots() - count + 1);
                (first..first + count).map(|s| i64::try_from(s).unwrap()).collect()
            }
            _ => random_slots(rng, self.cache.layout.num_slots(), usize::try_from(count).unwrap(), hole),
        };
        let skip = if rng.below(3) == 0 { rng.below(count + 1) } else { 0 };
        let first = rng.below(layers);
        let (layers, single) = match rng.below(5) {
            0 => ((first, 1), true),
            1 => ((first, rng.below(layers - first + 1)), false),
            _ => ((0, layers), false),
        };
        Wanted {
            direction,
            slab: self.slabs[pick(rng, self.slabs.len() as u64)],
            slots,
            skip,
            layers,
            single,
        }
    }

    /// The request, and whether it reports a bad slot.
    fn request(&mut self, w: &mut Wanted, stream: usize) -> (TransferRequest, bool) {
        let tokens = self.tokens;
        let r = &self.cache.reference;
        let layers = if w.single { 1 } else { r.layers };
        let len = r.planes * layers * tokens * r.row_bytes();
        let slab = self.region.slab(w.slab, len).unwrap();
        let mut bad = false;
        let mapping = if self.rng.below(4) == 0 && !w.slots.is_empty() {
            let mut given = w.slots.clone();
            if self.native && self.rng.below(3) == 0 {
                let at = pick(&mut self.rng, given.len() as u64);
                given[at] = [-2, 1 << 40, i64::MAX][pick(&mut self.rng, 3)];
                w.slots[at] = -1;
                bad = at as u64 >= w.skip && w.layers.1 > 0;
            }
            let list: Vec<u8> = given.iter().flat_map(|s| s.to_ne_bytes()).collect();
            let device = Device::new(list.len());
            assert!(self.simulator.poke(device.addr, &list));
            let addr = device.addr;
            self.lists.push(device);
            SlotMapping::Device { addr, len: given.len() as u64 }
        } else {
            SlotMapping::from_slots(w.slots.clone())
        };
        let request = match w.direction {
            Direction::Gather => TransferRequest::gather(&self.registered, mapping, &slab),
            _ => TransferRequest::scatter(&self.registered, mapping, &slab),
        };
        let narrow = |n: u64| u32::try_from(n).unwrap();
        let mut request = request
            .partial(true)
            .skip_tokens(w.skip)
            .layers(narrow(w.layers.0), narrow(w.layers.1))
            .on(on(&self.streams[stream]));
        request = if w.single {
            let layout = self.registered.paged().layout();
            request.slab_layout(SlabLayout::of_cache(layout, r.planes, 1, tokens).unwrap())
        } else {
            request.slab_tokens(tokens)
        };
        (request, bad)
    }

    /// Where a layer's strips are in the slab of a request, and in a slab of all layers.
    fn strips(&self, w: &Wanted) -> Vec<(usize, usize, usize)> {
        let r = &self.cache.reference;
        let strip = self.tokens * r.row_bytes();
        let (first, count) = w.layers;
        let mut list = Vec::new();
        for kv in 0..r.planes {
            for layer in first..first + count {
                let at = if w.single { kv } else { kv * r.layers + layer };
                let small = |n: u64| usize::try_from(n).unwrap();
                list.push((small(w.slab + at * strip), small((kv * r.layers + layer) * strip), small(strip)));
            }
        }
        list
    }

    /// Lets the oracle do it.
    fn follow(&mut self, wanted: &[Wanted]) {
        for w in wanted {
            self.follow_one(w);
        }
    }

    fn follow_one(&mut self, w: &Wanted) {
        let strips = self.strips(w);
        let r = &self.cache.reference;
        // A slab that a scatter would change nothing from, with the request's layers put in.
        let mut slab = vec![0; self.cache.slab_bytes(self.tokens)];
        let gather = |slab: &mut Vec<u8>, pages: &mut Vec<u8>| {
            r.copy(Direction::Gather, pages, slab, self.tokens, &w.slots, w.skip);
        };
        if w.direction == Direction::Scatter {
            gather(&mut slab, &mut self.pages);
        }
        for &(at, all, len) in &strips {
            slab[all..all + len].copy_from_slice(&self.bytes[at..at + len]);
        }
        if w.direction == Direction::Scatter {
            r.copy(Direction::Scatter, &mut self.pages, &mut slab, self.tokens, &w.slots, w.skip);
        } else {
            gather(&mut slab, &mut self.pages);
            for (at, all, len) in strips {
                self.bytes[at..at + len].copy_from_slice(&slab[all..all + len]);
            }
        }
    }

    /// What is known to be over is there, on both sides.
    fn layer_is_there(&self, layer: u64, found: &[u8]) {
        let r = &self.cache.reference;
        for kv in 0..r.planes {
            for slot in 0..self.cache.layout.num_slots() {
                for byte in 0..r.row_bytes() {
                    let at = usize::try_from(r.paged_offset(kv, layer, slot, byte)).unwrap();
                    assert_eq!(found[at], self.pages[at], "layer {layer} slot {slot}: {}", self.what);
                }
            }
        }
    }
}
