//! The host mover beside one libc `memcpy` of the same bytes in the same run.
//!
//! `cargo bench --bench host -- [--quick] [--csv FILE] [--filter TEXT] [--threads N,N] [--stores]`
//!
//! Each line is one layout, profile shape and direction: a cache of randomly ordered blocks against 256-token
//! slabs, at least 256 MiB in all, checked row by row before anything is timed. `memcpy` and mover take turns,
//! so that a neighbour's load hits both; the ratio is the median of the rounds' ratios, GB/s the best round's.
#![allow(missing_docs, clippy::cast_possible_truncation, reason = "a benchmark of known sizes")]

#[path = "common/record.rs"]
mod record;

use std::sync::Arc;
use std::time::Instant;

use maru_fallback::{HostMover, Store, Tuning};
use maru_layout::{
    CopyJob, CopyPlan, DType, Direction, JobRequest, PagedLayout, RowKind, SlabLayout, SlabSpan, SlotMapping,
    StridedSpec,
};

use record::Record;

const CHUNK: u64 = 256;

/// How a cache lies in memory; element positions are those of the vLLM orders of the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// `(NB,2,BS,NH,HS)`
    Nhd,
    /// `(NB,2,NH,BS,HS)`
    Hnd,
    /// `(2,NB,BS,NH,HS)`
    KvFirst,
    /// Layer, block, token, head, K then V of the head
    Lbnhc,
    /// Layer, block, head, token, K then V of the head
    Lbhnc,
    /// Block, layer, head, token, K then V of the head
    Blhnc,
    /// `(NB,BS,D)`
    Mla,
}

/// What a case has that makes it harder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extra {
    /// Nothing: whole blocks in random order, slabs on a page border.
    None,
    /// Every token in a place of its own.
    Tokens,
    /// Slabs 8 bytes off a line.
    Misaligned,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    name: &'static str,
    layers: u64,
    heads: u64,
    head_size: u64,
    dtype: DType,
    block: u64,
}

impl Shape {
    const fn new(name: &'static str, layers: u64, heads: u64, head_size: u64, block: u64) -> Shape {
        Shape { name, layers, heads, head_size, dtype: DType::Bf16, block }
    }
}

/// A shape in an order: the byte distances, worked out here on their own.
struct Case {
    order: Order,
    shape: Shape,
    extra: Extra,
    blocks: u64,
    planes: u64,
    /// kv, layer, block, token, head
    strides: [u64; 5],
    head_bytes: u64,
    cache_bytes: u64,
}

impl Case {
    fn new(order: Order, shape: Shape, extra: Extra, wanted: u64) -> Case {
        let e = shape.dtype.size();
        let (l, bs, nh) = (shape.layers, shape.block, shape.heads);
        let hs = shape.head_size * e;
        let planes = if order == Order::Mla { 1 } else { 2 };
        let chunk = planes * l * CHUNK * nh * hs;
        let blocks = wanted.div_ceil(chunk) * CHUNK / bs;
        let h = nh * hs;
        let strides = match order {
            Order::Nhd => [bs * h, blocks * 2 * bs * h, 2 * bs * h, h, hs],
            Order::Hnd => [bs * h, blocks * 2 * bs * h, 2 * bs * h, hs, bs * hs],
            Order::KvFirst => [blocks * bs * h, blocks * 2 * bs * h, bs * h, h, hs],
            Order::Lbnhc => [hs, blocks * 2 * bs * h, 2 * bs * h, 2 * h, 2 * hs],
            Order::Lbhnc => [hs, blocks * 2 * bs * h, 2 * bs * h, 2 * hs, 2 * bs * hs],
            Order::Blhnc => [hs, 2 * bs * h, l * 2 * bs * h, 2 * hs, 2 * bs * hs],
            Order::Mla => [0, blocks * bs * h, bs * h, h, hs],
        };
        let cache_bytes = planes * l * blocks * bs * h;
        Case { order, shape, extra, blocks, planes, strides, head_bytes: hs, cache_bytes }
    }

    fn label(&self) -> String {
        let order = format!("{:?}", self.order).to_uppercase();
        match self.extra {
            Extra::None => order,
            Extra::Tokens => format!("{order}/token"),
            Extra::Misaligned => format!("{order}+8"),
        }
    }

    fn slab_off(&self) -> usize {
        if self.extra == Extra::Misaligned { 8 } else { 0 }
    }

    fn plan(&self, base: u64) -> Arc<CopyPlan> {
        let s = &self.shape;
        let [kv_stride, layer_stride, block_stride, token_stride, head_stride] = self.strides;
        let layout = PagedLayout::from_strides(&StridedSpec {
            dtype: s.dtype,
            row_kind: RowKind::Plain,
            kv_planes: self.planes,
            kv_stride,
            layers: s.layers,
            layer_stride,
            num_blocks: self.blocks,
            block_size: s.block,
            num_heads: s.heads,
            head_size: s.head_size,
            block_stride,
            token_stride,
            head_stride,
        })
        .expect("layout");
        let slab =
            SlabLayout::packed(self.planes, s.layers, CHUNK, s.heads * s.head_size, s.dtype).expect("slab");
        let bases: Vec<u64> = (0..self.planes)
            .flat_map(|kv| (0..s.layers).map(move |l| (kv, l)))
            .map(|(kv, l)| base + layout.plane_offset(kv, l).expect("plane"))
            .collect();
        Arc::new(CopyPlan::new(&layout, &slab, bases).expect("plan"))
    }

    /// Whether cache and slabs hold the same rows, head by head, by the formulas of the layouts.
    fn equal(&self, cache: &[u8], slabs: &[u8], slots: &[i64]) -> bool {
        let s = &self.shape;
        let [kv_s, layer_s, block_s, token_s, head_s] = self.strides;
        let row = s.heads * self.head_bytes;
        let slab_bytes = self.planes * s.layers * CHUNK * row;
        (0..self.blocks * s.block).all(|t| {
            let slot = slots[t as usize] as u64;
            let (block, token) = (slot / s.block, slot % s.block);
            (0..self.planes * s.layers).all(|p| {
                let (kv, l) = (p / s.layers, p % s.layers);
                (0..s.heads).all(|n| {
                    let paged = kv * kv_s + l * layer_s + block * block_s + token * token_s + n * head_s;
                    let packed = t / CHUNK * slab_bytes
                        + ((kv * s.layers + l) * CHUNK + t % CHUNK) * row
                        + n * self.head_bytes;
                    let (a, b, n) = (paged as usize, packed as usize, self.head_bytes as usize);
                    cache[a..a + n] == slabs[b..b + n]
                })
            })
        })
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(8) {
            part.copy_from_slice(&self.next().to_le_bytes()[..part.len()]);
        }
    }

    fn shuffled(&mut self, n: u64) -> Vec<i64> {
        let mut all: Vec<i64> = (0..n as i64).collect();
        for i in (1..all.len()).rev() {
            all.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
        all
    }
}

/// Memory from `off` behind a page border on; the bench's only owner of bytes.
struct Memory {
    bytes: Vec<u8>,
    at: usize,
    len: usize,
}

impl Memory {
    fn new(len: u64, off: usize) -> Memory {
        let len = len as usize;
        let bytes = vec![1u8; len + 8192];
        let at = bytes.as_ptr().align_offset(4096) + off;
        Memory { bytes, at, len }
    }

    fn addr(&mut self) -> u64 {
        self.bytes.as_mut_ptr().wrapping_add(self.at).expose_provenance() as u64
    }

    fn slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.at..self.at + self.len]
    }
}

#[derive(Default)]
struct Args {
    quick: bool,
    csv: Option<String>,
    filter: Option<String>,
    threads: Vec<usize>,
    stores: bool,
    rounds: Option<usize>,
}

fn args() -> Args {
    let mut args = Args::default();
    let mut words = std::env::args().skip(1);
    let value = |words: &mut dyn Iterator<Item = String>, name: &str| match words.next() {
        Some(v) => v,
        None => exit(&format!("{name} needs a value")),
    };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--quick" => args.quick = true,
            "--stores" => args.stores = true,
            "--csv" => args.csv = Some(value(&mut words, "--csv")),
            "--filter" => args.filter = Some(value(&mut words, "--filter").to_uppercase()),
            "--threads" => {
                let list = value(&mut words, "--threads");
                args.threads = list
                    .split(',')
                    .map(|n| n.parse().unwrap_or_else(|_| exit("--threads takes numbers")))
                    .collect();
            }
            "--rounds" => args.rounds = value(&mut words, "--rounds").parse().ok(),
            // What cargo passes.
            "--bench" => {}
            other => exit(&format!("unknown argument {other:?}")),
        }
    }
    args
}

fn exit(message: &str) -> ! {
    eprintln!("host bench: {message}");
    std::process::exit(2)
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// A case with its memory, filled.
struct Setup {
    case: Case,
    cache: Memory,
    slabs: Memory,
    slots: Vec<i64>,
    plan: Arc<CopyPlan>,
}

impl Setup {
    fn new(case: Case) -> Setup {
        let mut cache = Memory::new(case.cache_bytes, 0);
        let slabs = Memory::new(case.cache_bytes, case.slab_off());
        let mut random = Random(0x1234_5678_9abc_def1);
        random.fill(cache.slice());
        let (blocks, bs) = (case.blocks, case.shape.block as i64);
        let slots = match case.extra {
            Extra::Tokens => random.shuffled(blocks * case.shape.block),
            _ => random.shuffled(blocks).into_iter().flat_map(|b| b * bs..(b + 1) * bs).collect(),
        };
        let plan = case.plan(cache.addr());
        Setup { case, cache, slabs, slots, plan }
    }

    fn jobs(&mut self, direction: Direction) -> Vec<CopyJob> {
        let len = self.plan.slab().bytes();
        let start = self.slabs.addr();
        (self.slots.chunks(CHUNK as usize).zip(0..))
            .map(|(slots, i)| {
                let request = JobRequest {
                    direction,
                    slab: SlabSpan { host: Some(start + i * len), device: None, len },
                    slots: SlotMapping::from_slots(slots),
                    skip_tokens: 0,
                    partial: false,
                    layers: None,
                };
                CopyJob::new(self.plan.clone(), request).expect("job")
            })
            .collect()
    }

    /// Seconds of (flat copy, mover), a pair a round. Ends the process if the mover moves wrong bytes.
    fn measure(&mut self, mover: &HostMover, direction: Direction, rounds: usize) -> Vec<(f64, f64)> {
        let jobs = self.jobs(direction);
        // SAFETY: cache and slabs are alive and only used by this thread.
        let moved = || jobs.iter().for_each(|job| unsafe { mover.copy(job) }.expect("copy"));
        let (to, from) = match direction {
            Direction::Gather => (&mut self.slabs, &mut self.cache),
            Direction::Scatter => (&mut self.cache, &mut self.slabs),
        };
        to.slice().fill(0);
        let len = to.len;
        let dst = core::ptr::with_exposed_provenance_mut::<u8>(to.addr() as usize);
        let src = core::ptr::with_exposed_provenance::<u8>(from.addr() as usize);
        moved();
        if !self.case.equal(self.cache.slice(), self.slabs.slice(), &self.slots) {
            exit(&format!("{} {direction:?}: wrong bytes", self.case.label()));
        }
        // SAFETY: two whole live allocations of that size; nobody else uses them. This is libc's memcpy.
        let flat = || unsafe { core::ptr::copy_nonoverlapping(src, dst, std::hint::black_box(len)) };
        let pairs = (0..rounds)
            .map(|round| match round % 2 {
                0 => (timed(flat), timed(moved)),
                _ => {
                    let mover = timed(moved);
                    (timed(flat), mover)
                }
            })
            .collect();
        // The flat copy is no permutation; put back what it overwrote.
        moved();
        pairs
    }
}

fn cases(wanted: u64) -> Vec<Case> {
    let llama = Shape::new("llama-3.1-8b", 32, 8, 128, 16);
    let tp4 = Shape::new("llama-3.1-70b-tp4", 80, 2, 128, 16);
    let tp8 = Shape::new("qwen2.5-32b-tp8", 64, 1, 128, 16);
    let oss = Shape::new("gpt-oss-120b", 36, 8, 64, 16);
    let fp8 = Shape { dtype: DType::Fp8E4m3, ..Shape::new("llama-3.1-8b-fp8", 32, 8, 128, 16) };
    let odd = Shape::new("head width 80", 32, 8, 80, 16);
    let mla = Shape::new("deepseek-v3-mla", 61, 1, 576, 64);
    let mut cases = vec![(Order::Mla, mla, Extra::None)];
    for order in [Order::Nhd, Order::Hnd, Order::KvFirst, Order::Lbnhc, Order::Lbhnc, Order::Blhnc] {
        cases.extend([llama, tp4].map(|shape| (order, shape, Extra::None)));
    }
    cases.extend([(Order::Nhd, tp8), (Order::Lbnhc, tp8)].map(|c| (c.0, c.1, Extra::None)));
    cases.extend([oss, fp8].map(|shape| (Order::Lbnhc, shape, Extra::None)));
    cases.extend([Order::Nhd, Order::Hnd, Order::Lbnhc].map(|order| (order, odd, Extra::None)));
    for extra in [Extra::Tokens, Extra::Misaligned] {
        cases.extend([Order::Nhd, Order::Lbnhc].map(|order| (order, llama, extra)));
    }
    cases.into_iter().map(|(order, shape, extra)| Case::new(order, shape, extra, wanted)).collect()
}

fn main() {
    let args = args();
    let wanted = if args.quick { 64 << 20 } else { 256 << 20 };
    let rounds = args.rounds.unwrap_or(if args.quick { 3 } else { 8 }).max(1);
    let all = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut threads = if args.threads.is_empty() { vec![1, all] } else { args.threads };
    threads.dedup();
    let stores = if args.stores { Store::available() } else { vec![Store::best()] };
    let head =
        "layout,profile,heads,row_bytes,mib,direction,store,threads,gbps,memcpy_gbps,ratio_median,ratio_best";
    let mut record = Record::create(args.csv, None, head).unwrap_or_else(|error| exit(&error));
    println!(
        "{:13} {:18} {:>5} {:8} {:7} {:>7} {:>7} {:>7} {:>7} {:>7}",
        "layout", "profile", "row", "to", "store", "threads", "GB/s", "memcpy", "ratio", "best"
    );
    for case in cases(wanted) {
        let (label, shape, bytes) = (case.label(), case.shape, case.cache_bytes);
        let name = format!("{label} {}", shape.name.to_uppercase());
        if args.filter.as_ref().is_some_and(|f| !name.contains(f.as_str())) {
            continue;
        }
        let mut setup = Setup::new(case);
        let row = setup.plan.geometry().row_bytes;
        for (&store, &threads) in stores.iter().flat_map(|s| threads.iter().map(move |t| (s, t))) {
            let tuning = Tuning { store: Some(store), ..Tuning::default() };
            let mover = HostMover::tuned(threads, tuning).expect("mover");
            let threads = mover.threads();
            record.progress(format_args!("{label} {}, {store:?}, threads {threads}", shape.name));
            for direction in [Direction::Gather, Direction::Scatter] {
                let pairs = setup.measure(&mover, direction, rounds);
                let best = |f: fn(&(f64, f64)) -> f64| pairs.iter().map(f).fold(f64::INFINITY, f64::min);
                let (flat, moved) = (best(|p| p.0), best(|p| p.1));
                let ratio = median(pairs.iter().map(|p| p.0 / p.1).collect());
                let (best, gbps) = (flat / moved, bytes as f64 / moved / 1e9);
                let memcpy = bytes as f64 / flat / 1e9;
                let (to, kind) = (format!("{direction:?}"), format!("{store:?}"));
                println!(
                    "{label:13} {:18} {row:>5} {to:8} {kind:7} {threads:>7} {gbps:>7.2} {memcpy:>7.2} {ratio:>7.2} {best:>7.2}",
                    shape.name,
                );
                let written = record.row(format_args!(
                    "{label},{},{},{row},{},{to},{kind},{threads},{gbps:.3},{memcpy:.3},{ratio:.3},{best:.3}",
                    shape.name,
                    shape.heads,
                    bytes >> 20,
                ));
                written.unwrap_or_else(|error| exit(&error));
            }
        }
    }
}
