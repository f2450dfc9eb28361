//! What transfers cost a busy GPU: compute in a loop on one stream, each mover in a loop on another, and how
//! much slower the compute becomes; beside one flat copy of the same bytes, in one run.
//!
//! `interference --list`, or see [`options::USAGE`]. The loads need cuBLAS, which is loaded at run time. What is
//! moved is compared before anything is timed, and once more beside each load; a mismatch ends the run.
#![allow(clippy::unwrap_used, reason = "a program for people who want to see it fail loudly")]

#[path = "interference/blas.rs"]
mod blas;
#[path = "../tests/common/cases.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod cases;
#[allow(dead_code, reason = "the other benches use the rest")]
mod common;
#[path = "interference/find.rs"]
mod find;
#[path = "../tests/common/gpu.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod gpu;
#[path = "interference/grid.rs"]
mod grid;
#[path = "interference/loads.rs"]
mod loads;
#[path = "interference/measure.rs"]
mod measure;
#[path = "interference/movers.rs"]
mod movers;
#[path = "interference/options.rs"]
mod options;
#[path = "interference/report.rs"]
mod report;
#[path = "interference/stats.rs"]
mod stats;
#[path = "interference/timeline.rs"]
mod timeline;

use std::process::ExitCode;
use std::time::Duration;

use cases::ORDERS;
use common::profile;
use gpu::{Gpu, Stream};
use grid::{LoadKind, MoverKind, chosen};
use loads::Load;
use maru_layout::DType;
use measure::{Feed, beside, compute};
use movers::World;
use options::{Options, USAGE};
use report::{Cell, Report};
use stats::{Pace, Slowdown, Track};
use timeline::Event;

/// Left out at the beginning of everything timed: clocks and queues settle.
const WARM: f64 = 0.08;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if options.list {
        println!("loads: {}", LoadKind::ALL.map(LoadKind::name).join(", "));
        chosen(&options.only).iter().for_each(|mover| println!("{mover}"));
        return ExitCode::SUCCESS;
    }
    let Some(order) = ORDERS.iter().find(|order| order.name == options.layout) else {
        let names: Vec<&str> = ORDERS.iter().map(|order| order.name).collect();
        eprintln!("there is no layout {:?}; there are {}", options.layout, names.join(", "));
        return ExitCode::from(2);
    };
    let gpu = match Gpu::open() {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("not available: {error}");
            return ExitCode::SUCCESS;
        }
    };
    match run(&gpu, order.name, &options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(gpu: &Gpu, layout: &'static str, options: &Options) -> Result<(), String> {
    println!("device: {}, image: {}", gpu.context.name().unwrap(), gpu.kernel.image());
    let named = options.cublas.clone().or_else(|| std::env::var("MARU_CUBLAS").ok());
    let load = |kind| Load::new(gpu, kind, named.as_deref(), options.graph);
    // Before the rest takes its time.
    if let Some(kind) = options.loads.iter().find(|kind| kind.needs_blas()) {
        println!("{}", load(*kind)?.library().unwrap_or_default());
    }
    let mut world =
        World::new(gpu, &profile("qwen2.5-32b", layout, [64, 8, 128, 16], DType::Bf16), options.bytes);
    let kinds = chosen(&options.only);
    kinds.iter().for_each(|kind| world.check(*kind));
    println!(
        "layout {layout}, batches of {} slabs, {} bytes, at most {} in flight; all {} movers move the right bytes",
        world.bench.lists.len(),
        world.bench.total(),
        options.in_flight,
        kinds.len()
    );
    let mut report = Report::new(layout, world.bench.total(), options.csv.clone())?;
    world.fill();
    // The best of some, each with streams of its own: which copy engine a stream gets makes a difference.
    let flat = [0, 1].map(|direction| match options.directions.contains(&direction) {
        true => (0..3).map(|_| alone(&world, MoverKind::Flat, direction, options).1).fold(0.0, f64::max),
        false => 0.0,
    });
    for kind in &options.loads {
        let load = load(*kind)?;
        // Until clocks and temperature have found their level.
        if load.kind != LoadKind::None {
            compute(&load, &origin(), 2.0 * options.seconds.min(1.0));
        }
        for direction in &options.directions {
            world.fill();
            let mut base = None;
            for mover in &kinds {
                world.poison(*direction);
                let cell = measure(&world, &load, *mover, *direction, &mut base, options)?;
                world.verify(*mover, *direction);
                report.add(&load, *mover, *direction, flat[*direction], &cell)?;
            }
        }
    }
    report.close();
    Ok(())
}

/// One load beside one mover, between two measurements of the load alone; the second serves the next mover.
fn measure(
    world: &World<'_>,
    load: &Load<'_>,
    kind: MoverKind,
    direction: usize,
    base: &mut Option<Pace>,
    options: &Options,
) -> Result<Cell, String> {
    if load.kind == LoadKind::None {
        let (moved, gbps) = alone(world, kind, direction, options);
        return Ok(Cell { gbps, mover_starved: moved, ..Cell::default() });
    }
    let pace = |track: &Track| {
        let error = || format!("{} beside {kind}: too few iterations; give more --seconds", load.kind.name());
        track.pace(WARM * 1e3).ok_or_else(error)
    };
    let alone = || pace(&compute(load, &origin(), WARM + (options.seconds * 0.4).max(0.2)));
    let before = match base.take() {
        Some(before) => before,
        None => alone()?,
    };
    let mover = world.mover(kind);
    let origin = origin();
    let (track, moved) = beside(world, &mover, direction, feed(kind, options), &origin, || {
        compute(load, &origin, WARM + options.seconds)
    });
    drop(mover);
    let busy = pace(&track)?;
    let after = alone()?;
    *base = Some(after);
    Ok(Cell {
        slowdown: Some(Slowdown::of(&busy, &before, &after)),
        iteration_ms: busy.mean / load.per_chunk as f64,
        base_ms: (before.mean + after.mean) / 2.0 / load.per_chunk as f64,
        chunks: busy.chunks,
        gbps: moved.rate(busy.window),
        compute_starved: track.starved,
        mover_starved: moved.starved,
    })
}

/// A mover with the device to itself: times it ran dry, GB/s.
fn alone(world: &World<'_>, kind: MoverKind, direction: usize, options: &Options) -> (usize, f64) {
    let mover = world.mover(kind);
    let sleep = || std::thread::sleep(Duration::from_secs_f64(options.seconds.min(0.5)));
    let moved = beside(world, &mover, direction, feed(kind, options), &origin(), sleep).1;
    (moved.starved, moved.rate(moved.window()))
}

/// Only a ring gains from batches on several streams; elsewhere they would run side by side.
fn feed(kind: MoverKind, options: &Options) -> Feed {
    let turns = matches!(kind, MoverKind::Staged(..)) && !options.one_stream;
    Feed { in_flight: options.in_flight, turns }
}

/// The beginning of a time line.
fn origin() -> Event {
    let (stream, event) = (Stream::new(), Event::new());
    event.record(&stream);
    stream.wait();
    event
}
