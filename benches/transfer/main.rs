//! The engine on a device beside one flat copy of the same bytes, in one run: latency and throughput by size; the
//! CPU time of one `submit` beside a bare launch; when the layers of a load are there; every strategy and the
//! fallback by profile and layout, stores and loads.
//!
//! `transfer [--csv FILE] [--quick] [--only sizes,cpu,layers,throughput] [--profile TEXT] [--layout TEXT]`.
//! `--profile` and `--layout` keep, of the layers' and the throughput's cases, those whose names contain the text.
//! Correctness is checked before anything is timed; a mismatch ends the run. Every row is in the file as soon as it
//! is measured.
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
#[path = "../common/record.rs"]
mod record;

mod cpu;
mod layers;
mod sizes;
mod throughput;

use std::sync::Arc;

use maru::cxl::{CudaRegistrar, Region, RegisterOptions, Slab};
use maru::{
    CacheSpec, CacheTensor, Config, PagedCache, RegisteredCache, SlotMapping, Stream as Order, Tensors,
    TransferEngine, TransferRequest,
};

use maru::transfer::profile::Profile as Shipped;

use common::{Bench, Profile};
use gpu::{Gpu, Stream};
use record::Record;

/// Engines by configuration.
const ENGINES: [(&str, &str); 4] = [
    ("direct", "backend = \"native\"\nstrategy = \"direct\""),
    ("staged", "backend = \"native\"\nstrategy = \"staged\""),
    ("auto", "backend = \"auto\""),
    ("fallback", "backend = \"fallback\""),
];

/// Layouts of caches with K and V that profiles are timed in.
const ORDERS: [&str; 4] = ["blocks_first_nhd", "blocks_first_hnd", "fused_lbnhc", "fused_blhnc"];

/// The parts, in the order in which they run: the short ones first.
const PARTS: [&str; 4] = ["sizes", "cpu", "layers", "throughput"];

const USAGE: &str = "transfer [--csv FILE] [--quick] [--only PARTS] [--profile TEXT] [--layout TEXT]; parts, with \
                     commas between: sizes,cpu,layers,throughput";

/// What the arguments ask for.
struct Options {
    csv: Option<String>,
    /// Bytes of a throughput.
    bytes: u64,
    repeats: usize,
    only: Vec<String>,
    profile: String,
    layout: String,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options {
            csv: None,
            bytes: 512_000_000,
            repeats: 5,
            only: Vec::new(),
            profile: String::new(),
            layout: String::new(),
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value; {USAGE}"));
            match arg.as_str() {
                "--csv" => options.csv = Some(value()?),
                "--quick" => (options.bytes, options.repeats) = (128_000_000, 3),
                "--only" => options.only = value()?.split(',').map(str::to_owned).collect(),
                "--profile" => options.profile = value()?,
                "--layout" => options.layout = value()?,
                // What cargo passes.
                "--bench" => {}
                other => return Err(format!("unknown argument {other:?}; {USAGE}")),
            }
        }
        match options.only.iter().find(|part| !PARTS.contains(&part.as_str())) {
            Some(part) => Err(format!("--only: there is no part {part:?}; {USAGE}")),
            None => Ok(options),
        }
    }

    fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == part)
    }

    /// Every shipped profile in every layout, as far as the names contain what was asked for.
    fn cases(&self) -> Vec<Profile> {
        let mut cases = Vec::new();
        for name in Shipped::names().filter(|name| name.contains(&self.profile)) {
            let shipped = Shipped::builtin(name).unwrap();
            let orders: &[&'static str] = if shipped.mla { &["mla"] } else { &ORDERS };
            cases.extend(orders.iter().filter(|order| order.contains(&self.layout)).map(|order| Profile {
                name,
                order,
                layers: shipped.layers.into(),
                heads: shipped.kv_heads.into(),
                head_size: shipped.head_size.into(),
                dtype: shipped.dtype,
                block_size: shipped.block_size.into(),
            }));
        }
        cases
    }
}

fn main() {
    let fail = |message: String| -> ! {
        eprintln!("{message}");
        std::process::exit(2)
    };
    let options = Options::parse(std::env::args().skip(1)).unwrap_or_else(|message| fail(message));
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(error) => return println!("not available: {error}"),
    };
    let device = format!("{}, image: {}", gpu.context.name().unwrap(), gpu.kernel.image());
    println!("device: {device}");
    let head = "what,profile,layout,direction,engine,strategy,bytes,value,unit,flat,ratio";
    let record = Record::create(options.csv.clone(), Some(&device), head);
    let mut record = record.unwrap_or_else(|message| fail(message));
    for part in PARTS.into_iter().filter(|part| options.wants(part)) {
        let measured = match part {
            "sizes" => sizes::sizes(&gpu, &options, &mut record),
            "cpu" => cpu::submit_cost(&gpu, &options, &mut record),
            "layers" => layers::layers(&gpu, &options, &mut record),
            _ => throughput::throughputs(&gpu, &options, &mut record),
        };
        measured.unwrap_or_else(|message| fail(message));
    }
    record.progress(format_args!("done"));
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
