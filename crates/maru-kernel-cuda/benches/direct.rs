//! The direct strategy beside one flat copy of the same bytes, in one run: throughput by profile, layout,
//! direction and thread blocks, and the CPU time of a launch beside a bare one.
//!
//! `direct [--csv FILE] [--quick]`. Correctness is checked before anything is timed; a mismatch ends the run.
#![allow(clippy::unwrap_used, reason = "a program for people who want to see it fail loudly")]

#[path = "../tests/common/cases.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod cases;
#[path = "../tests/common/gpu.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod gpu;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys;
use maru_kernel_cuda::{LaunchOptions, PlaneTable};
use maru_layout::{CopyJob, DType, Direction, SlotMapping};

use cases::{Cache, Dims, ORDERS, Rng, job, random_slots};
use gpu::{Device, Gpu, Pinned, Stream, cu, slot_bytes};

const TOKENS: u64 = 256;
const BLOCKS: [u32; 4] = [1, 2, 4, 8];
/// Of the flat copy, with at most four blocks: load, store.
const TARGET: [f64; 2] = [0.89, 0.92];

struct Profile {
    name: &'static str,
    order: &'static str,
    layers: u64,
    heads: u64,
    head_size: u64,
    dtype: DType,
    block_size: u64,
}

const fn profile(name: &'static str, order: &'static str, shape: [u64; 4], dtype: DType) -> Profile {
    let [layers, heads, head_size, block_size] = shape;
    Profile { name, order, layers, heads, head_size, dtype, block_size }
}

const PROFILES: [Profile; 9] = [
    profile("qwen2.5-32b", "blocks_first_nhd", [64, 8, 128, 16], DType::Bf16),
    profile("qwen2.5-32b", "blocks_first_hnd", [64, 8, 128, 16], DType::Bf16),
    profile("qwen2.5-32b", "fused_lbnhc", [64, 8, 128, 16], DType::Bf16),
    profile("qwen2.5-32b-tp8", "blocks_first_nhd", [64, 1, 128, 16], DType::Bf16),
    profile("qwen2.5-32b-tp8", "fused_lbnhc", [64, 1, 128, 16], DType::Bf16),
    profile("llama-3.1-8b-fp8", "blocks_first_nhd", [32, 8, 128, 16], DType::Fp8E4m3),
    profile("llama-3.1-8b-fp8", "blocks_first_hnd", [32, 8, 128, 16], DType::Fp8E4m3),
    profile("llama-3.1-8b-fp8", "fused_lbnhc", [32, 8, 128, 16], DType::Fp8E4m3),
    profile("deepseek-v3-mla", "mla", [61, 1, 576, 64], DType::Bf16),
];

fn main() {
    let mut args = std::env::args().skip(1);
    let (mut csv_path, mut bytes, mut repeats) = (None, 512_000_000u64, 5);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--csv" => csv_path = args.next(),
            "--quick" => (bytes, repeats) = (64_000_000, 3),
            // What cargo passes.
            "--bench" => {}
            other => panic!("unknown argument {other:?}; direct [--csv FILE] [--quick]"),
        }
    }
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(error) => return println!("not available: {error}"),
    };
    println!("device: {}, image: {}", gpu.context.name().unwrap(), gpu.kernel.image());
    let mut csv = String::from(
        "profile,layout,slab_bytes,slabs,bytes,direction,slots,blocks,gbps,flat_gbps,ratio,gbps_min,gbps_max\n",
    );
    println!(
        "{:<17} {:<17} {:>4}  {:>5} |{}",
        "profile",
        "layout",
        "dir",
        "flat",
        BLOCKS.map(|b| format!(" {b:>2} blk  ratio")).concat()
    );
    let mut missed = Vec::new();
    for profile in &PROFILES {
        run(&gpu, profile, bytes, repeats, &mut csv, &mut missed);
    }
    cpu_time(&gpu, &mut csv);
    if let Some(path) = csv_path {
        std::fs::write(&path, csv).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    match missed.is_empty() {
        true => println!("every profile reaches {TARGET:?} of the flat copy with at most 4 blocks"),
        false => println!("below {TARGET:?} of the flat copy with 4 blocks: {}", missed.join(", ")),
    }
}

/// A cache, slabs in pinned memory, and jobs between them.
struct Bench {
    cache: Cache,
    pages: Device,
    slab: [Pinned; 2],
    planes: PlaneTable,
    /// By direction; loads read the first pinned region, stores write the second.
    jobs: [Vec<CopyJob>; 2],
    lists: Vec<Vec<i64>>,
    slab_bytes: usize,
    /// Slots in device memory, for the jobs that use them.
    _device_slots: Device,
}

impl Bench {
    fn new(gpu: &Gpu, profile: &Profile, bytes: u64, device_slots: bool) -> Self {
        let order = ORDERS.iter().find(|o| o.name == profile.order).unwrap();
        let mut dims = Dims {
            layers: profile.layers,
            blocks: 2,
            block_size: profile.block_size,
            heads: profile.heads,
            head_size: profile.head_size,
            dtype: profile.dtype,
            pad: 0,
        };
        let slab_bytes = Cache::new(order, dims).unwrap().slab_bytes(TOKENS);
        let slabs = usize::try_from(bytes).unwrap().div_ceil(slab_bytes);
        // Blocks to spare, all in random order.
        dims.blocks = (slabs as u64 * TOKENS / profile.block_size) * 5 / 4;
        let cache = Cache::new(order, dims).unwrap();
        let pages = Device::new(usize::try_from(cache.bytes).unwrap());
        let plan = cache.plan(pages.addr, TOKENS).unwrap();
        let planes = gpu.kernel.register(&plan).unwrap();
        let slab = [Pinned::new(slabs * slab_bytes), Pinned::new(slabs * slab_bytes)];
        let blocks = random_slots(
            &mut Rng::new(1),
            dims.blocks,
            slabs * 256 / usize::try_from(dims.block_size).unwrap(),
            0,
        );
        let slots: Vec<i64> = blocks
            .iter()
            .flat_map(|b| (0..dims.block_size as i64).map(move |o| b * dims.block_size as i64 + o))
            .collect();
        let on_device = Device::holding(&slot_bytes(&slots));
        let lists: Vec<Vec<i64>> = slots.chunks(256).map(<[i64]>::to_vec).collect();
        let make = |direction: Direction, region: &Pinned| -> Vec<CopyJob> {
            let jobs = lists.iter().enumerate().map(|(i, list)| {
                let mapping = match device_slots {
                    true => SlotMapping::Device { addr: on_device.addr + (i * 2048) as u64, len: TOKENS },
                    false => SlotMapping::from_slots(list.as_slice()),
                };
                job(&plan, direction, region.addr + (i * slab_bytes) as u64, mapping, 0).unwrap()
            });
            jobs.collect()
        };
        let jobs = [make(Direction::Scatter, &slab[0]), make(Direction::Gather, &slab[1])];
        Bench { cache, pages, slab, planes, jobs, lists, slab_bytes, _device_slots: on_device }
    }

    fn total(&self) -> usize {
        self.lists.len() * self.slab_bytes
    }

    fn launch_all(&self, gpu: &Gpu, stream: &Stream, direction: usize, blocks: u32) {
        let options = LaunchOptions::default().with_sm_budget(blocks);
        for job in &self.jobs[direction] {
            // SAFETY: pages and slabs belong to the bench, which waits before it touches them.
            drop(unsafe { gpu.kernel.launch(job, &self.planes, stream.0, options) }.unwrap());
        }
    }

    fn flat(&self, stream: &Stream, direction: usize) {
        let n = self.total().min(self.pages.len);
        let (host, device) = (self.slab[direction].addr, self.pages.addr);
        match direction {
            0 => cu!(cuMemcpyHtoDAsync_v2(device, host as *const _, n, stream.0)),
            _ => cu!(cuMemcpyDtoHAsync_v2(host as *mut _, device, n, stream.0)),
        }
    }

    /// Loads random slabs into poisoned pages, looks at some addresses, stores them into poisoned slabs and
    /// compares every byte.
    fn check(&mut self, gpu: &Gpu, stream: &Stream) {
        fill_random(self.slab[0].bytes());
        self.slab[1].bytes().fill(0x5a);
        self.pages.fill(0xa5);
        self.launch_all(gpu, stream, 0, 4);
        stream.wait();
        let r = &self.cache.reference;
        let row = r.row_bytes();
        let head = self.cache.layout.head_bytes();
        for (kv, layer, token) in [(0, 0, 0u64), (r.planes - 1, r.layers - 1, 255), (0, r.layers / 2, 17)] {
            let (index, list) = (self.lists.len() - 1, self.lists.last().unwrap());
            let slot = u64::try_from(list[usize::try_from(token).unwrap()]).unwrap();
            for n in 0..row / head {
                let at = usize::try_from(r.paged_offset(kv, layer, slot, n * head)).unwrap();
                let found = self.pages.read(at, usize::try_from(head).unwrap());
                let packed = ((kv * r.layers + layer) * TOKENS + token) * row + n * head;
                let from = index * self.slab_bytes + usize::try_from(packed).unwrap();
                assert!(found == self.slab[0].bytes()[from..][..found.len()], "loaded to a wrong place");
            }
        }
        self.launch_all(gpu, stream, 1, 4);
        stream.wait();
        let [loaded, stored] = &mut self.slab;
        assert!(loaded.bytes() == stored.bytes(), "what was stored differs from what was loaded");
    }
}

fn fill_random(bytes: &mut [u8]) {
    let mut rng = Rng::new(7);
    for chunk in bytes.chunks_mut(8) {
        let word = rng.next().to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// Time of what `queue` queues, by events, in seconds.
fn timed(stream: &Stream, events: &[sys::CUevent; 2], queue: impl FnOnce()) -> f64 {
    let mut milliseconds = 0.0f32;
    cu!(cuEventRecord(events[0], stream.0));
    queue();
    cu!(cuEventRecord(events[1], stream.0));
    cu!(cuEventSynchronize(events[1]));
    cu!(cuEventElapsedTime_v2(&mut milliseconds, events[0], events[1]));
    f64::from(milliseconds) / 1e3
}

fn events() -> [sys::CUevent; 2] {
    let mut events = [std::ptr::null_mut(); 2];
    for event in &mut events {
        cu!(cuEventCreate(event, 0));
    }
    events
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn run(gpu: &Gpu, profile: &Profile, bytes: u64, repeats: usize, csv: &mut String, missed: &mut Vec<String>) {
    let stream = Stream::new();
    let events = events();
    let mut bench = Bench::new(gpu, profile, bytes, false);
    bench.check(gpu, &stream);
    let on_device = profile.order == "blocks_first_nhd" && profile.name == "qwen2.5-32b";
    report(profile, &bench, "host", gpu, &stream, &events, repeats, csv, missed);
    drop(bench);
    if on_device {
        let mut bench = Bench::new(gpu, profile, bytes, true);
        bench.check(gpu, &stream);
        report(profile, &bench, "device", gpu, &stream, &events, repeats, csv, missed);
    }
}

#[allow(clippy::too_many_arguments, reason = "one table")]
fn report(
    profile: &Profile,
    bench: &Bench,
    slots: &str,
    gpu: &Gpu,
    stream: &Stream,
    events: &[sys::CUevent; 2],
    repeats: usize,
    csv: &mut String,
    missed: &mut Vec<String>,
) {
    let total = bench.total() as f64 / 1e9;
    for (direction, name) in ["H2D", "D2H"].into_iter().enumerate() {
        let mut flat = Vec::new();
        let mut direct = vec![Vec::new(); BLOCKS.len()];
        // One round to warm up, then everything in turn, so that drift meets all alike.
        for round in 0..=repeats {
            let seconds = timed(stream, events, || bench.flat(stream, direction));
            if round > 0 {
                flat.push(total / seconds);
            }
            for (blocks, rates) in BLOCKS.iter().zip(&mut direct) {
                let seconds = timed(stream, events, || bench.launch_all(gpu, stream, direction, *blocks));
                if round > 0 {
                    rates.push(total / seconds);
                }
            }
        }
        let flat = median(&mut flat);
        let mut line = format!("{:<17} {:<17} {name:>4}  {flat:5.1} |", profile.name, profile.order);
        for (blocks, rates) in BLOCKS.iter().zip(&mut direct) {
            let rate = median(rates);
            let ratio = rate / flat;
            write!(line, " {rate:6.1} {ratio:6.3}").unwrap();
            writeln!(
                csv,
                "{},{},{},{},{},{name},{slots},{blocks},{rate:.2},{flat:.2},{ratio:.4},{:.2},{:.2}",
                profile.name,
                profile.order,
                bench.slab_bytes,
                bench.lists.len(),
                bench.total(),
                rates[0],
                rates[rates.len() - 1]
            )
            .unwrap();
            if *blocks == 4 && ratio < TARGET[direction] {
                missed.push(format!("{} {} {name} {slots} {ratio:.3}", profile.name, profile.order));
            }
        }
        println!("{line}{}", if slots == "device" { "  (device slots)" } else { "" });
    }
}

/// CPU time of a launch with 256 host slots, of its parts, and of a bare launch, in turn, each with the stream
/// idle before.
fn cpu_time(gpu: &Gpu, csv: &mut String) {
    let profile = &PROFILES[3];
    let bench = Bench::new(gpu, profile, 16_000_000, false);
    let with_device = Bench::new(gpu, profile, 16_000_000, true);
    let stream = Stream::new();
    let events = events();
    let plan = bench.jobs[0][0].plan().clone();
    let list: Arc<[i64]> = bench.lists[0].as_slice().into();
    let slab = bench.slab[0].addr;
    let options = LaunchOptions::default();
    let launch = |bench: &Bench, job: &CopyJob| {
        // SAFETY: the bench's memory; waited for after each call.
        drop(unsafe { gpu.kernel.launch(job, &bench.planes, stream.0, options) }.unwrap());
    };
    type Step<'a> = (&'static str, Box<dyn Fn() + 'a>);
    let steps: [Step<'_>; 6] = [
        ("bare cuLaunchKernel", Box::new(|| gpu.stall(&stream, 0, 0, 0, 0))),
        (
            "bare cuLaunchKernel + cuEventRecord",
            Box::new(|| {
                gpu.stall(&stream, 0, 0, 0, 0);
                cu!(cuEventRecord(events[0], stream.0));
            }),
        ),
        ("launch, 256 host slots", Box::new(|| launch(&bench, &bench.jobs[0][0]))),
        (
            "check + launch, 256 host slots",
            Box::new(|| {
                let slots = SlotMapping::Host(list.clone());
                launch(&bench, &job(&plan, Direction::Scatter, slab, slots, 0).unwrap());
            }),
        ),
        (
            "check only, 256 host slots",
            Box::new(|| {
                let slots = SlotMapping::Host(list.clone());
                drop(job(&plan, Direction::Scatter, slab, slots, 0).unwrap());
            }),
        ),
        ("launch, 256 device slots", Box::new(|| launch(&with_device, &with_device.jobs[0][0]))),
    ];
    let mut times = vec![Vec::new(); steps.len()];
    for round in 0..600 {
        for ((_, step), times) in steps.iter().zip(&mut times) {
            let start = Instant::now();
            step();
            let took = start.elapsed().as_secs_f64() * 1e6;
            stream.wait();
            if round >= 100 {
                times.push(took);
            }
        }
    }
    println!("\nCPU time, microseconds (median of 500, stream idle before)");
    let mut bare = 0.0;
    for (i, ((name, _), times)) in steps.iter().zip(&mut times).enumerate() {
        let middle = median(times);
        if i == 0 {
            bare = middle;
        }
        println!("  {name:<36} {middle:6.2}  over bare {:6.2}", middle - bare);
        writeln!(
            csv,
            "cpu,{name},,,,,,,{middle:.3},{bare:.3},,{:.3},{:.3}",
            times[0],
            times[times.len() - 1]
        )
        .unwrap();
    }
}
