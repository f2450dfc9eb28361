//! The staged strategy beside one flat copy and the direct strategy, in one run: rings, buffers and blocks;
//! throughput of many slabs, latency of one transfer by size.
//!
//! `staged [--csv FILE] [--quick]`. Correctness is checked before anything is timed; a mismatch ends the run.
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
use std::time::Instant;

use maru_kernel_cuda::{StagedMover, StagedOptions};
use maru_layout::{CopyJob, Direction, SlotMapping};

use cases::job;
use common::{Bench, PROFILES, TOKENS, events, median, timed};
use gpu::{Gpu, Stream, cu};

/// Ring in MiB, buffers, blocks (0 = half as many as multiprocessors).
const RINGS: [(u64, u64, u32); 9] = [
    (128, 4, 0),
    (128, 2, 0),
    (128, 8, 0),
    (128, 16, 0),
    (64, 4, 0),
    (64, 8, 0),
    (32, 4, 0),
    (32, 8, 0),
    (128, 4, 32),
];

/// Tokens of one transfer, for latencies.
const SIZES: [u64; 6] = [1, 4, 16, 32, 64, 256];

fn main() {
    let mut args = std::env::args().skip(1);
    let (mut csv_path, mut bytes, mut repeats) = (None, 512_000_000u64, 5);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--csv" => csv_path = args.next(),
            "--quick" => (bytes, repeats) = (128_000_000, 3),
            // What cargo passes.
            "--bench" => {}
            other => panic!("unknown argument {other:?}; staged [--csv FILE] [--quick]"),
        }
    }
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(error) => return println!("not available: {error}"),
    };
    println!("device: {}, image: {}", gpu.context.name().unwrap(), gpu.kernel.image());
    let mut csv = String::from("what,profile,layout,direction,mover,bytes,value,unit,flat,ratio\n");
    throughput(&gpu, bytes, repeats, &mut csv);
    latency(&gpu, repeats * 40, &mut csv);
    if let Some(path) = csv_path {
        std::fs::write(&path, csv).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

fn staged(mover: &StagedMover, bench: &Bench, jobs: &[CopyJob], stream: &Stream) {
    let pieces: Vec<_> = jobs.iter().map(|job| mover.pieces(job).unwrap()).collect();
    // SAFETY: pages and slabs belong to the bench, which waits before it touches them.
    drop(unsafe { mover.launch(&pieces, &bench.planes, stream.0) }.unwrap());
}

fn throughput(gpu: &Gpu, bytes: u64, repeats: usize, csv: &mut String) {
    let (stream, events) = (Stream::new(), events());
    println!(
        "{:<17} {:<17} {:>4} {:<22} {:>6}  {:>6}  ratio",
        "profile", "layout", "dir", "mover", "GB/s", "flat"
    );
    for (i, profile) in PROFILES.iter().enumerate() {
        let mut bench = Bench::new(gpu, profile, bytes, false);
        bench.check(gpu, &stream);
        // Every ring on the first profile, the default one on all.
        let rings = if i == 0 { &RINGS[..] } else { &RINGS[..1] };
        let movers: Vec<StagedMover> = rings
            .iter()
            .map(|&(ring, buffers, blocks)| {
                let options =
                    StagedOptions::with_ring_bytes(ring << 20).with_buffers(buffers).with_blocks(blocks);
                StagedMover::new(&gpu.kernel, options).unwrap()
            })
            .collect();
        for mover in &movers {
            bench.slab[1].bytes().fill(0);
            bench.pages.fill(0);
            staged(mover, &bench, &bench.jobs[0], &stream);
            staged(mover, &bench, &bench.jobs[1], &stream);
            stream.wait();
            let [loaded, stored] = &mut bench.slab;
            assert!(loaded.bytes() == stored.bytes(), "staged: what was stored differs from what was loaded");
        }
        let total = bench.total() as f64 / 1e9;
        for (direction, name) in ["H2D", "D2H"].into_iter().enumerate() {
            let mut flat = Vec::new();
            let mut direct = Vec::new();
            let mut rates = vec![Vec::new(); movers.len()];
            for round in 0..=repeats {
                let f = total / timed(&stream, &events, || bench.flat(&stream, direction));
                let d = total / timed(&stream, &events, || bench.launch_all(gpu, &stream, direction, 4));
                let s: Vec<f64> = movers
                    .iter()
                    .map(|m| {
                        total / timed(&stream, &events, || staged(m, &bench, &bench.jobs[direction], &stream))
                    })
                    .collect();
                if round > 0 {
                    flat.push(f);
                    direct.push(d);
                    rates.iter_mut().zip(s).for_each(|(rates, s)| rates.push(s));
                }
            }
            let flat = median(&mut flat);
            let mut line = |mover: String, rate: f64| {
                let (profile, layout, ratio) = (profile.name, profile.order, rate / flat);
                println!(
                    "{profile:<17} {layout:<17} {name:>4} {mover:<22} {rate:6.1}  {flat:6.1}  {ratio:.3}"
                );
                writeln!(
                    csv,
                    "throughput,{profile},{layout},{name},{mover},{},{rate:.2},GB/s,{flat:.2},{ratio:.4}",
                    bench.total()
                )
                .unwrap();
            };
            line("direct 4 blocks".into(), median(&mut direct));
            for ((ring, buffers, blocks), rates) in rings.iter().zip(&mut rates) {
                line(format!("staged {ring}M/{buffers} b{blocks}"), median(rates));
            }
        }
    }
}

/// Host time from call to synchronised, one transfer of the first tokens of a slab.
fn latency(gpu: &Gpu, repeats: usize, csv: &mut String) {
    let stream = Stream::new();
    let profile = &PROFILES[0];
    let mut bench = Bench::new(gpu, profile, 64_000_000, false);
    bench.check(gpu, &stream);
    let movers: Vec<(String, StagedMover)> = [(128u64, 4u64), (128, 16), (128, 64), (32, 16)]
        .into_iter()
        .map(|(ring, buffers)| {
            let options = StagedOptions::with_ring_bytes(ring << 20).with_buffers(buffers);
            (format!("staged {ring}M/{buffers}"), StagedMover::new(&gpu.kernel, options).unwrap())
        })
        .collect();
    println!("\nlatency, microseconds (median of {repeats})");
    for tokens in SIZES {
        for (direction, name) in [Direction::Scatter, Direction::Gather].into_iter().enumerate() {
            let (jname, plan) =
                (["H2D", "D2H"][direction], bench.cache.plan(bench.pages.addr, tokens).unwrap());
            let list = bench.lists[0][..usize::try_from(tokens).unwrap()].to_vec();
            let job = job(&plan, name, bench.slab[direction].addr, SlotMapping::from_slots(list), 0).unwrap();
            let n = bench.slab_bytes * usize::try_from(tokens).unwrap() / usize::try_from(TOKENS).unwrap();
            let (host, device) = (bench.slab[direction].addr, bench.pages.addr);
            let mut times = vec![Vec::new(); 2 + movers.len()];
            for _ in 0..repeats {
                let start = Instant::now();
                match direction {
                    0 => cu!(cuMemcpyHtoDAsync_v2(device, host as *const _, n, stream.0)),
                    _ => cu!(cuMemcpyDtoHAsync_v2(host as *mut _, device, n, stream.0)),
                }
                stream.wait();
                times[0].push(start.elapsed().as_secs_f64() * 1e6);
                let start = Instant::now();
                bench.launch_one(gpu, &stream, &job, 4);
                stream.wait();
                times[1].push(start.elapsed().as_secs_f64() * 1e6);
                for ((_, mover), times) in movers.iter().zip(&mut times[2..]) {
                    let start = Instant::now();
                    staged(mover, &bench, std::slice::from_ref(&job), &stream);
                    stream.wait();
                    times.push(start.elapsed().as_secs_f64() * 1e6);
                }
            }
            let flat = median(&mut times[0]);
            let names = ["flat copy", "direct 4 blocks"].into_iter().map(str::to_owned);
            let names = names.chain(movers.iter().map(|m| m.0.clone()));
            let mut line = format!("{tokens:>4} tokens {n:>9} bytes {jname} |");
            for (mover, times) in names.zip(&mut times) {
                let time = median(times);
                write!(line, " {mover} {time:.1} ({:.2})", time / flat).unwrap();
                writeln!(
                    csv,
                    "latency,{},{},{jname},{mover},{n},{time:.2},us,{flat:.2},{:.4}",
                    profile.name,
                    profile.order,
                    time / flat
                )
                .unwrap();
            }
            println!("{line}");
        }
    }
}
