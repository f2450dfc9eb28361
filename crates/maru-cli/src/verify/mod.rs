//! `maru verify`: every layout, mover and direction on this machine, byte by byte against the oracle.

mod print;
mod trial;

use maru::layout::Direction;
use maru::{Config, DType};
use serde::Serialize;
use serde_json::json;

use crate::args::VerifyArgs;
use crate::error::CliError;
use crate::layouts::{self, Dims, Layout};
use crate::movers::{self, Group, Mover, Skipped, Wanted};
use crate::output::Outcome;
use crate::progress::Progress;

/// One size of a cache.
#[derive(Debug, Clone, Copy)]
struct Size {
    name: &'static str,
    dims: Dims,
    dtype: DType,
    /// Elements added to each block.
    pad: u64,
    /// Bytes added to the first address.
    shift: u64,
}

const fn size(name: &'static str, dims: [u64; 5], dtype: DType, pad: u64, shift: u64) -> Size {
    let [layers, blocks, block_size, heads, head_size] = dims;
    Size { name, dims: Dims { layers, blocks, block_size, heads, head_size }, dtype, pad, shift }
}

/// Heads and block size that differ and that are equal, one head, rows of odd length, odd addresses.
const SIZES: &[Size] = &[
    size("bf16", [3, 7, 16, 3, 8], DType::Bf16, 0, 0),
    size("fp8_padded", [2, 6, 16, 2, 32], DType::Fp8E4m3, 64, 0),
    size("equal_heads_and_tokens", [2, 5, 4, 4, 16], DType::Bf16, 0, 0),
    size("one_head", [2, 5, 16, 1, 64], DType::F16, 0, 0),
    size("odd_row", [2, 4, 16, 1, 23], DType::Bf16, 0, 0),
    size("misaligned", [2, 5, 12, 3, 16], DType::U8, 3, 1),
    size("one_token_blocks", [2, 33, 1, 2, 4], DType::F32, 0, 0),
    size("large", [8, 40, 16, 4, 64], DType::Bf16, 0, 0),
    size("large_one_head", [8, 40, 16, 1, 256], DType::Bf16, 0, 0),
];

/// Slots from which on a cache is checked by rows and moved once, for it is there to keep several threads and a
/// whole ring busy.
const LARGE: u64 = 300;

/// A trial that went wrong.
#[derive(Debug, Clone, Serialize)]
struct Failure {
    device: String,
    mover: String,
    layout: &'static str,
    size: &'static str,
    direction: &'static str,
    what: String,
}

/// Trials of one mover and layout.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    passed: u64,
    failed: u64,
}

/// One mover's column of the table.
#[derive(Debug)]
struct Column {
    device: String,
    mover: String,
    /// One for each layout, in their order.
    tallies: Vec<Tally>,
}

pub(crate) fn run(args: &VerifyArgs) -> Result<Outcome, CliError> {
    let layouts = layouts::select(&args.layout, |_| true)?;
    let wanted = Wanted::parse(args.device.as_deref(), args.backend.as_deref())?;
    let mut config = Config::default();
    // Small, so that the large trials go round the ring; a plane of them fits a part of it.
    config.transfer.staging_bytes = 4 << 20;
    let mut skipped = Vec::new();
    let groups = movers::find(wanted, &config, &mut skipped)?;

    let progress = Progress::new();
    let total = groups.iter().map(|g| g.movers.len()).sum::<usize>() * layouts.len();
    let (mut columns, mut failures, mut done) = (Vec::new(), Vec::new(), 0);
    for group in &groups {
        for mover in &group.movers {
            let mut column =
                Column { device: group.place.to_string(), mover: mover.name.clone(), tallies: Vec::new() };
            for layout in &layouts {
                progress.show(format!("{} {}", column.device, column.mover), done, total as u64);
                column.tallies.push(all_sizes(args, group, mover, layout, &mut failures));
                done += 1;
            }
            columns.push(column);
        }
    }
    drop(progress);
    Ok(outcome(args, &layouts, &columns, &skipped, &failures))
}

fn all_sizes(
    args: &VerifyArgs,
    group: &Group,
    mover: &Mover,
    layout: &Layout,
    failures: &mut Vec<Failure>,
) -> Tally {
    let mut tally = Tally::default();
    // One large cache is enough: that of one head is for layouts that have no more.
    let twice = |size: &Size| !layout.mla && size.name == "large_one_head";
    for size in SIZES.iter().filter(|size| layout.fits(size.dims) && !twice(size)) {
        for direction in [Direction::Gather, Direction::Scatter] {
            let planted = args.test_fault.as_deref() == Some(layout.name);
            match trial::conforms(mover, layout, size, direction, args.seed, planted) {
                Ok(()) => tally.passed += 1,
                Err(what) => {
                    tally.failed += 1;
                    failures.push(Failure {
                        device: group.place.to_string(),
                        mover: mover.name.clone(),
                        layout: layout.name,
                        size: size.name,
                        direction: word(direction),
                        what,
                    });
                }
            }
        }
    }
    tally
}

fn word(direction: Direction) -> &'static str {
    match direction {
        Direction::Gather => "gather",
        Direction::Scatter => "scatter",
    }
}

fn outcome(
    args: &VerifyArgs,
    layouts: &[Layout],
    columns: &[Column],
    skipped: &[Skipped],
    failures: &[Failure],
) -> Outcome {
    let sum = |f: fn(&Tally) -> u64| columns.iter().flat_map(|c| &c.tallies).map(f).sum::<u64>();
    let (passed, failed) = (sum(|t| t.passed), sum(|t| t.failed));
    let movers: Vec<_> = columns.iter().map(|c| json!({"device": c.device, "mover": c.mover})).collect();
    let json = json!({
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "failures": failures,
        "movers": movers,
        "layouts": layouts.iter().map(|l| l.name).collect::<Vec<_>>(),
        "seed": args.seed,
    });
    Outcome {
        json,
        human: print::lines(layouts, columns, skipped, failures, (passed, failed)),
        // Nothing tried is nothing verified.
        success: failed == 0 && passed > 0,
    }
}
