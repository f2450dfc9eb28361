//! The direct strategy beside one flat copy of the same bytes, in one run: throughput by profile, layout,
//! direction and thread blocks, and the CPU time of a launch beside a bare one.
//!
//! `direct [--csv FILE] [--quick] [--cpu]`; `--cpu`: only the CPU times. Correctness is checked before anything is timed; a mismatch ends the run.
#![allow(clippy::unwrap_used, reason = "a program for people who want to see it fail loudly")]

#[path = "../tests/common/cases.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod cases;
#[allow(dead_code, reason = "the other benches use the rest")]
mod common;
#[path = "../tests/common/gpu.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod gpu;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys;
use maru_kernel_cuda::LaunchOptions;
use maru_layout::{CopyJob, Direction, SlotMapping};

use cases::job;
use common::{Bench, PROFILES, Profile, events, median, timed};
use gpu::{Gpu, Stream, cu};

/// Thread blocks, and whether small slabs share a launch (as the engine's batches do) or each has its own.
const VARIANTS: [(u32, bool); 5] = [(1, true), (2, true), (4, true), (8, true), (4, false)];
/// Of the flat copy, with at most four blocks: load, store.
const TARGET: [f64; 2] = [0.89, 0.92];

fn main() {
    let mut args = std::env::args().skip(1);
    let (mut csv_path, mut bytes, mut repeats) = (None, 512_000_000u64, 5);
    let mut profiles: &[Profile] = &PROFILES;
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--csv" => csv_path = args.next(),
            "--quick" => (bytes, repeats) = (64_000_000, 3),
            "--cpu" => profiles = &[],
            // What cargo passes.
            "--bench" => {}
            other => panic!("unknown argument {other:?}; direct [--csv FILE] [--quick] [--cpu]"),
        }
    }
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(error) => return println!("not available: {error}"),
    };
    println!("device: {}, image: {}", gpu.context.name().unwrap(), gpu.kernel.image());
    let mut csv = String::from(
        "profile,layout,slab_bytes,slabs,bytes,direction,slots,blocks,launch,gbps,flat_gbps,ratio,gbps_min,gbps_max\n",
    );
    println!(
        "{:<17} {:<17} {:>4}  {:>5} |{}",
        "profile",
        "layout",
        "dir",
        "flat",
        VARIANTS.map(|(b, batch)| format!(" {b:>2} {} ratio", if batch { "blk" } else { "own" })).concat()
    );
    let mut missed = Vec::new();
    for profile in profiles {
        run(&gpu, profile, bytes, repeats, &mut csv, &mut missed);
    }
    cpu_time(&gpu, &mut csv, 120 * repeats);
    if let Some(path) = csv_path {
        std::fs::write(&path, csv).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    match missed.is_empty() {
        true if profiles.is_empty() => {}
        true => println!("every profile reaches {TARGET:?} of the flat copy with at most 4 blocks"),
        false => println!("below {TARGET:?} of the flat copy with 4 blocks: {}", missed.join(", ")),
    }
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
        let mut direct = vec![Vec::new(); VARIANTS.len()];
        // One round to warm up, then everything in turn, so that drift meets all alike.
        for round in 0..=repeats {
            let seconds = timed(stream, events, || bench.flat(stream, direction));
            if round > 0 {
                flat.push(total / seconds);
            }
            for ((blocks, batch), rates) in VARIANTS.iter().zip(&mut direct) {
                let seconds = timed(stream, events, || match batch {
                    true => bench.launch_batch(gpu, stream, direction, *blocks),
                    false => bench.launch_all(gpu, stream, direction, *blocks),
                });
                if round > 0 {
                    rates.push(total / seconds);
                }
            }
        }
        let flat = median(&mut flat);
        let mut line = format!("{:<17} {:<17} {name:>4}  {flat:5.1} |", profile.name, profile.order);
        for ((blocks, batch), rates) in VARIANTS.iter().zip(&mut direct) {
            let rate = median(rates);
            let ratio = rate / flat;
            write!(line, " {rate:6.1} {ratio:6.3}").unwrap();
            writeln!(
                csv,
                "{},{},{},{},{},{name},{slots},{blocks},{},{rate:.2},{flat:.2},{ratio:.4},{:.2},{:.2}",
                profile.name,
                profile.order,
                bench.slab_bytes,
                bench.lists.len(),
                bench.total(),
                if *batch { "batch" } else { "own" },
                rates[0],
                rates[rates.len() - 1]
            )
            .unwrap();
            if *blocks == 4 && *batch && ratio < TARGET[direction] {
                missed.push(format!("{} {} {name} {slots} {ratio:.3}", profile.name, profile.order));
            }
        }
        println!("{line}{}", if slots == "device" { "  (device slots)" } else { "" });
    }
}

/// CPU time of a launch with 256 host slots, of its parts, and of a bare launch, in turn, each with the stream
/// idle before.
fn cpu_time(gpu: &Gpu, csv: &mut String, rounds: usize) {
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
    for round in 0..rounds {
        for ((_, step), times) in steps.iter().zip(&mut times) {
            let start = Instant::now();
            step();
            let took = start.elapsed().as_secs_f64() * 1e6;
            stream.wait();
            if round >= rounds / 6 {
                times.push(took);
            }
        }
    }
    println!("\nCPU time, microseconds (median of {}, stream idle before)", rounds - rounds / 6);
    let mut bare = 0.0;
    for (i, ((name, _), times)) in steps.iter().zip(&mut times).enumerate() {
        let middle = median(times);
        if i == 0 {
            bare = middle;
        }
        println!("  {name:<36} {middle:6.2}  over bare {:6.2}", middle - bare);
        writeln!(
            csv,
            "cpu,{name},,,,,,,,{middle:.3},{bare:.3},,{:.3},{:.3}",
            times[0],
            times[times.len() - 1]
        )
        .unwrap();
    }
}
