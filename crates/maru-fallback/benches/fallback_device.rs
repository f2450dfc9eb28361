//! The device fallback beside one flat copy of the same bytes, in one run, by profile, layout, direction, order
//! of the blocks and spacing of the layers.
//!
//! `fallback_device [--csv FILE] [--quick] [--probe]`. Correctness is checked before anything is timed; a
//! mismatch ends the run. `--probe` also measures single kinds of copies, the figures that the planner's cost
//! model is made of.
#![allow(clippy::unwrap_used, reason = "a program for people who want to see it fail loudly")]

#[path = "../../maru-kernel-cuda/tests/common/cases.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod cases;
#[path = "../tests/device/gpu.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod gpu;
#[path = "fallback_device/probe.rs"]
mod probe;
#[path = "fallback_device/setting.rs"]
mod setting;
#[path = "fallback_device/timing.rs"]
mod timing;

use std::fmt::Write as _;

use maru_fallback::{DeviceMover, DeviceOptions};
use maru_layout::{DType, Direction};

use gpu::{Pinned, Stream};
use setting::{Blocks, Layers, Profile, Setting};
use timing::{Clock, median};

const fn profile(name: &'static str, order: &'static str, shape: [u64; 4], dtype: DType) -> Profile {
    let [layers, heads, head_size, block_size] = shape;
    Profile { name, order, layers, heads, head_size, block_size, dtype }
}

const PROFILES: [Profile; 9] = [
    profile("qwen2.5-32b", "blocks_first_nhd", [64, 8, 128, 16], DType::Bf16),
    profile("qwen2.5-32b", "kv_first_nhd", [64, 8, 128, 16], DType::Bf16),
    profile("qwen2.5-32b", "blocks_first_hnd", [64, 8, 128, 16], DType::Bf16),
    profile("qwen2.5-32b", "fused_lbnhc", [64, 8, 128, 16], DType::Bf16),
    profile("qwen2.5-32b-tp8", "blocks_first_nhd", [64, 1, 128, 16], DType::Bf16),
    profile("qwen2.5-32b-tp8", "fused_lbnhc", [64, 1, 128, 16], DType::Bf16),
    profile("llama-3.1-8b-fp8", "blocks_first_nhd", [32, 8, 128, 16], DType::Fp8E4m3),
    profile("llama-3.1-8b-fp8", "fused_lbnhc", [32, 8, 128, 16], DType::Fp8E4m3),
    profile("deepseek-v3-mla", "mla", [61, 1, 576, 64], DType::Bf16),
];

/// What is to be reached of the flat copy where runs are 32 KiB: blocks and layers anywhere, or either of
/// them in a row.
const TARGETS: [f64; 2] = [0.50, 0.75];

struct Report {
    csv: String,
    missed: Vec<String>,
}

fn main() {
    let mut args = std::env::args().skip(1);
    let (mut csv_path, mut bytes, mut repeats, mut probes) = (None, 512_000_000u64, 5, false);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--csv" => csv_path = args.next(),
            "--quick" => (bytes, repeats) = (64_000_000, 3),
            "--probe" => probes = true,
            // What cargo passes.
            "--bench" => {}
            other => panic!("unknown argument {other:?}; fallback_device [--csv FILE] [--quick] [--probe]"),
        }
    }
    let context = match gpu::open(0) {
        Ok(context) => context,
        Err(reason) => return println!("not available: {reason}"),
    };
    context.bind_to_thread().unwrap();
    println!("device: {}", context.name().unwrap());
    let mover = DeviceMover::open(context, DeviceOptions::default().with_stable_slabs(true)).unwrap();
    let mut report = Report { csv: String::new(), missed: Vec::new() };
    report.csv.push_str(
        "profile,layout,blocks,layers,slab,direction,bytes,gbps,flat_gbps,ratio,gbps_min,gbps_max,submit_us_per_slab\n",
    );
    println!(
        "{:<17} {:<17} {:<11} {:<9} {:<10} {:>4} {:>6} {:>6} {:>6} {:>10}",
        "profile", "layout", "blocks", "layers", "slab", "dir", "GB/s", "flat", "ratio", "submit us"
    );
    for profile in &PROFILES {
        for layers in [Layers::Even, Layers::Anywhere] {
            for blocks in [Blocks::Random, Blocks::Consecutive] {
                measure(&mover, profile, (blocks, layers), false, bytes, repeats, &mut report);
            }
        }
    }
    measure(&mover, &PROFILES[0], (Blocks::Random, Layers::Anywhere), true, bytes / 4, repeats, &mut report);
    if probes {
        probe::run(&mut report.csv);
    }
    if let Some(path) = csv_path {
        std::fs::write(&path, &report.csv).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    match report.missed.is_empty() {
        true => println!("targets {TARGETS:?} of the flat copy reached wherever runs are 32 KiB"),
        false => println!("below {TARGETS:?} of the flat copy: {}", report.missed.join("; ")),
    }
}

fn measure(
    mover: &DeviceMover,
    profile: &Profile,
    (blocks, layers): (Blocks, Layers),
    pageable: bool,
    bytes: u64,
    repeats: usize,
    report: &mut Report,
) {
    let mut setting = Setting::new(profile, blocks, layers, pageable, bytes);
    let (stream, clock) = (Stream::new(), Clock::new());
    for direction in [Direction::Scatter, Direction::Gather] {
        setting.check(mover, direction, &stream);
        let jobs = setting.jobs(direction);
        let submit = |at: &dyn Fn(f64)| {
            let start = std::time::Instant::now();
            for job in &jobs {
                // SAFETY: cache and slabs live until the stream has been waited for.
                let copy = unsafe { mover.copy_on(job, stream.0) }.unwrap();
                drop(copy);
            }
            at(start.elapsed().as_secs_f64());
        };
        let moved: u64 = jobs.iter().map(maru_layout::CopyJob::bytes).sum();
        let submitted = std::cell::RefCell::new(Vec::new());
        let mut times: Vec<f64> = Vec::new();
        for _ in 0..=repeats {
            times.push(clock.time(&stream, || submit(&|s| submitted.borrow_mut().push(s))));
            // What takes long is precise after fewer.
            if times.len() >= 3 && times[0] > 0.2 {
                break;
            }
        }
        // The first warms up.
        times.remove(0);
        let flat = flat(&setting, direction, &stream, &clock, repeats);
        let rate = |seconds: f64| moved as f64 / seconds / 1e9;
        let (gbps, flat) = (rate(median(&mut times)), flat);
        let ratio = gbps / flat;
        let us = median(&mut submitted.borrow_mut()) / jobs.len() as f64 * 1e6;
        let dir = if direction == Direction::Scatter { "load" } else { "store" };
        let slab = if pageable { "pageable" } else { "registered" };
        println!(
            "{:<17} {:<17} {:<11} {:<9} {:<10} {:>5} {:>6.1} {:>6.1} {:>6.2} {:>10.0}",
            profile.name,
            profile.order,
            blocks.name(),
            layers.name(),
            slab,
            dir,
            gbps,
            flat,
            ratio,
            us
        );
        let (fastest, slowest) = (times[0], times[times.len() - 1]);
        writeln!(
            report.csv,
            "{},{},{},{},{slab},{dir},{moved},{gbps:.2},{flat:.2},{ratio:.3},{:.2},{:.2},{us:.1}",
            profile.name,
            profile.order,
            blocks.name(),
            layers.name(),
            rate(slowest),
            rate(fastest)
        )
        .unwrap();
        let orderly = blocks == Blocks::Consecutive || layers == Layers::Even;
        let target = TARGETS[usize::from(orderly)];
        if profile.name == "qwen2.5-32b" && profile.order.ends_with("nhd") && !pageable && ratio < target {
            report.missed.push(format!(
                "{} {} blocks, {} layers, {dir}: {ratio:.2} < {target:.2}",
                profile.order,
                blocks.name(),
                layers.name()
            ));
        }
    }
}

/// GB/s of one copy per slab between pinned and device memory.
fn flat(setting: &Setting, direction: Direction, stream: &Stream, clock: &Clock, repeats: usize) -> f64 {
    let bytes = setting.slab_bytes;
    // Pinning takes long: the slabs themselves where they are pinned. What they hold is checked by now.
    let slabs = setting.pinned_slabs();
    let own = slabs.is_none().then(|| Pinned::new(bytes * setting.slabs));
    let host = slabs.or(own.as_ref().map(|memory| memory.addr)).unwrap();
    let mut times: Vec<f64> = (0..=repeats)
        .map(|_| {
            clock.time(stream, || {
                for i in 0..setting.slabs {
                    let (device, host) = (setting.pages.addr + (i * bytes) as u64, host + (i * bytes) as u64);
                    let (to, from) = match direction {
                        Direction::Scatter => (device, host),
                        Direction::Gather => (host, device),
                    };
                    gpu::cu!(cuMemcpyAsync(to, from, bytes, stream.0));
                }
            })
        })
        .collect();
    times.remove(0);
    (bytes * setting.slabs) as f64 / median(&mut times) / 1e9
}
