//! The engine on a device beside one flat copy of the same bytes, in one run: every strategy and the fallback,
//! by profile and layout, stores and loads; latency and throughput by size; when the layers of a load are there;
//! the CPU time of one `submit` beside a bare launch.
//!
//! `transfer [--csv FILE] [--quick] [--only throughput,sizes,layers,cpu]`. Correctness is checked before anything
//! is timed; a mismatch ends the run.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a program meant to fail loudly")]

#[path = "../../crates/maru-kernel-cuda/tests/common/cases.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod cases;
#[path = "../../crates/maru-kernel-cuda/benches/common/mod.rs"]
#[allow(dead_code, reason = "the other benches use the rest")]
mod common;
#[path = "../../crates/maru-kernel-cuda/tests/common/gpu.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod gpu;
mod layers;
mod sizes;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use maru::cxl::{CudaRegistrar, Region, RegisterOptions, Slab};
use maru::{
    CacheSpec, CacheTensor, Config, PagedCache, RegisteredCache, SlotMapping, Stream as Order, Tensors,
    TransferEngine, TransferRequest,
};

use common::{Bench, PROFILES, Profile, TOKENS, events, median, timed};
use gpu::{Gpu, Stream, cu};

/// Engines by configuration.
const ENGINES: [(&str, &str); 4] = [
    ("direct", "backend = \"native\"\nstrategy = \"direct\""),
    ("staged", "backend = \"native\"\nstrategy = \"staged\""),
    ("auto", "backend = \"auto\""),
    ("fallback", "backend = \"fallback\""),
];

fn main() {
    let mut args = std::env::args().skip(1);
    let (mut csv_path, mut bytes, mut repeats) = (None, 512_000_000u64, 5);
    let mut only = String::new();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--csv" => csv_path = args.next(),
            "--quick" => (bytes, repeats) = (128_000_000, 3),
            "--only" => only = args.next().unwrap_or_default(),
            // What cargo passes.
            "--bench" => {}
            other => panic!("unknown argument {other:?}; transfer [--csv FILE] [--quick] [--only PARTS]"),
        }
    }
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(error) => return println!("not available: {error}"),
    };
    println!("device: {}, image: {}", gpu.context.name().unwrap(), gpu.kernel.image());
    let mut csv = String::from("what,profile,layout,direction,engine,strategy,bytes,value,unit,flat,ratio\n");
    let wanted = |part: &str| only.is_empty() || only.split(',').any(|o| o == part);
    if wanted("throughput") {
        println!(
            "{:<17} {:<17} {:>4} {:<9} {:<12} {:>6} {:>6}  ratio",
            "profile", "layout", "dir", "engine", "strategy", "GB/s", "flat"
        );
        for profile in &PROFILES {
            throughput(&gpu, profile, bytes, repeats, &mut csv);
        }
    }
    if wanted("sizes") {
        sizes::sizes(&gpu, repeats, &mut csv);
    }
    if wanted("layers") {
        layers::layers(&gpu, repeats, &mut csv);
    }
    if wanted("cpu") {
        submit_cost(&gpu, &mut csv);
    }
    if let Some(path) = csv_path {
        std::fs::write(&path, csv).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

/// An engine with the bench's cache, and slabs in registered memory: loads read the first half of them.
struct World {
    engine: TransferEngine,
    cache: RegisteredCache,
    slabs: Slab,
    each: u64,
}

impl World {
    fn new(gpu: &Gpu, bench: &Bench, profile: &Profile, config: &str, slabs: &Slab) -> Self {
        let config = format!("[transfer]\ndevice = \"cuda:0\"\n{config}");
        let engine = TransferEngine::open(&Config::from_toml_str(&config, "bench").unwrap()).unwrap();
        let reference = &bench.cache.reference;
        let tensor = |offset: &u64| CacheTensor {
            addr: bench.pages.addr + offset,
            len: bench.cache.bytes - offset,
            desc: reference.tensor.clone(),
        };
        let tensors = Tensors::PerLayer(reference.tensors.iter().map(tensor).collect());
        let spec = CacheSpec {
            block_size: Some(profile.block_size),
            axes: Some(reference.axes.clone()),
            mla: reference.planes == 1,
            ..CacheSpec::default()
        };
        // SAFETY: the tensors lie in the bench's pages, which outlive every engine here.
        let cache = unsafe { PagedCache::new(&tensors, &spec, engine.place(), None) }.unwrap();
        let cache = engine.register(cache).unwrap();
        gpu.bind();
        World { engine, cache, slabs: slabs.clone(), each: bench.slab_bytes as u64 }
    }

    fn requests(&self, bench: &Bench, direction: usize, stream: &Stream) -> Vec<TransferRequest> {
        let list = bench.lists.iter().enumerate();
        list.map(|(i, list)| self.request(bench, direction, stream, i, list)).collect()
    }

    /// The first tokens of the first slab.
    fn part_of_a_slab(
        &self,
        bench: &Bench,
        direction: usize,
        stream: &Stream,
        tokens: u64,
    ) -> TransferRequest {
        let slots = &bench.lists[0][..tokens as usize];
        self.request(bench, direction, stream, 0, slots).slab_tokens(tokens)
    }

    /// Loads read the first half of the slabs, stores write the second.
    fn request(
        &self,
        bench: &Bench,
        direction: usize,
        stream: &Stream,
        index: usize,
        slots: &[i64],
    ) -> TransferRequest {
        let slots = SlotMapping::from_slots(slots);
        let at = (index + bench.lists.len() * direction) as u64 * self.each;
        let slab = self.slabs.span(at, self.each).unwrap();
        let request = match direction {
            0 => TransferRequest::scatter(&self.cache, slots, &slab),
            _ => TransferRequest::gather(&self.cache, slots, &slab),
        };
        // SAFETY: the stream outlives the request.
        request.on(unsafe { Order::cuda(stream.0 as usize) })
    }
}

/// Room for the slabs of both directions, filled at random and registered.
fn slabs(gpu: &Gpu, bench: &Bench) -> Slab {
    let bytes = 2 * bench.total() as u64;
    let slab = Region::anonymous(bytes).unwrap().slab(0, bytes).unwrap();
    let mut rng = cases::Rng::new(3);
    let random = rng.bytes(1 << 20);
    for at in (0..bytes / 2).step_by(random.len() - 8) {
        let n = (bytes / 2 - at).min(random.len() as u64) as usize;
        slab.write_at(at, &random[..n]).unwrap();
    }
    let registrar = CudaRegistrar::new(Arc::clone(&gpu.context)).unwrap();
    let options = RegisterOptions { required: true, ..RegisterOptions::default() };
    slab.region().register(Arc::new(registrar), options).unwrap();
    gpu.bind();
    slab
}

fn throughput(gpu: &Gpu, profile: &Profile, bytes: u64, repeats: usize, csv: &mut String) {
    let (stream, events) = (Stream::new(), events());
    let bench = Bench::new(gpu, profile, bytes, false);
    let memory = slabs(gpu, &bench);
    let worlds: Vec<World> = ENGINES.iter().map(|e| World::new(gpu, &bench, profile, e.1, &memory)).collect();
    let half = bench.total() as u64;
    for (world, (name, _)) in worlds.iter().zip(ENGINES) {
        bench.pages.fill(0xa5);
        for direction in [0, 1] {
            let transfer = world.engine.submit_many(&world.requests(&bench, direction, &stream)).unwrap();
            transfer.wait().unwrap();
        }
        let (mut loaded, mut stored) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        for at in (0..half).step_by(1 << 20) {
            let n = (half - at).min(1 << 20) as usize;
            memory.read_at(at, &mut loaded[..n]).unwrap();
            memory.read_at(half + at, &mut stored[..n]).unwrap();
            assert!(loaded[..n] == stored[..n], "{name}: what was stored differs from what was loaded");
        }
        memory.write_at(half, &vec![0; 1 << 20]).unwrap();
    }
    let total = half as f64 / 1e9;
    let host = memory.addr().as_ptr() as u64;
    for (direction, dir) in ["H2D", "D2H"].into_iter().enumerate() {
        let requests: Vec<_> = worlds.iter().map(|w| w.requests(&bench, direction, &stream)).collect();
        let (mut flat, mut rates, mut strategy) =
            (Vec::new(), vec![Vec::new(); worlds.len()], vec![""; worlds.len()]);
        for round in 0..=repeats {
            let n = (half as usize).min(bench.pages.len);
            let seconds = timed(&stream, &events, || match direction {
                0 => cu!(cuMemcpyHtoDAsync_v2(bench.pages.addr, host as *const _, n, stream.0)),
                _ => cu!(cuMemcpyDtoHAsync_v2((host + half) as *mut _, bench.pages.addr, n, stream.0)),
            });
            flat.push(total / seconds);
            for (i, world) in worlds.iter().enumerate() {
                let mut transfer = None;
                let seconds = timed(&stream, &events, || {
                    transfer = Some(world.engine.submit_many(&requests[i]).unwrap())
                });
                let transfer = transfer.unwrap();
                strategy[i] = transfer.strategy();
                transfer.wait().unwrap();
                if round > 0 {
                    rates[i].push(total / seconds);
                }
            }
        }
        let flat = median(&mut flat[1..]);
        for (i, (engine, _)) in ENGINES.into_iter().enumerate() {
            let (rate, strategy) = (median(&mut rates[i]), strategy[i]);
            let (p, l, ratio) = (profile.name, profile.order, rate / flat);
            println!("{p:<17} {l:<17} {dir:>4} {engine:<9} {strategy:<12} {rate:6.1} {flat:6.1}  {ratio:.3}");
            writeln!(
                csv,
                "throughput,{p},{l},{dir},{engine},{strategy},{half},{rate:.2},GB/s,{flat:.2},{ratio:.4}"
            )
            .unwrap();
        }
    }
}

/// CPU time of one `submit` of 256 host slots, the stream idle before, beside a bare launch.
fn submit_cost(gpu: &Gpu, csv: &mut String) {
    let stream = Stream::new();
    let profile = PROFILES.iter().find(|p| p.name == "qwen2.5-32b-tp8").unwrap();
    let bench = Bench::new(gpu, profile, 16_000_000, false);
    let memory = slabs(gpu, &bench);
    println!(
        "\nCPU time of one submit, {TOKENS} host slots, microseconds (median of 1000, stream idle before)"
    );
    for (name, config) in ENGINES {
        let world = World::new(gpu, &bench, profile, config, &memory);
        for (direction, dir) in ["H2D", "D2H"].into_iter().enumerate() {
            let requests = world.requests(&bench, direction, &stream);
            let (mut bare, mut submit) = (Vec::new(), Vec::new());
            for round in 0..1100 {
                let start = Instant::now();
                gpu.stall(&stream, 0, 0, 0, 0);
                let launch = start.elapsed().as_secs_f64() * 1e6;
                stream.wait();
                let start = Instant::now();
                let transfer = world.engine.submit(&requests[0]).unwrap();
                let took = start.elapsed().as_secs_f64() * 1e6;
                transfer.wait().unwrap();
                if round >= 100 {
                    bare.push(launch);
                    submit.push(took);
                }
            }
            let (bare, submit) = (median(&mut bare), median(&mut submit));
            println!("  {name:<9} {dir} {submit:6.2}  bare launch {bare:5.2}  over {:6.2}", submit - bare);
            writeln!(
                csv,
                "submit,{},{},{dir},{name},,{},{submit:.3},us,{bare:.3},{:.4}",
                profile.name,
                profile.order,
                bench.slab_bytes,
                submit / bare
            )
            .unwrap();
        }
    }
}
