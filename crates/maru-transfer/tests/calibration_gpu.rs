//! The measurement on a real device: short, whole, and remembered. Without a GPU its tests show as ignored;
//! `MARU_REQUIRE_GPU=1` makes that a failure.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use maru_kernel_cuda::{PagedCopyKernel, StagedMover, StagedOptions, availability, open_context};
use maru_layout::Direction;
use maru_transfer::calibration::{Calibration, RUNS, SIZES, Source};
use maru_transfer::config::TransferConfig;

fn main() {
    let arguments = Arguments::from_args();
    let missing = availability(0).err().filter(|_| std::env::var_os("MARU_REQUIRE_GPU").is_none());
    if let Some(reason) = &missing {
        eprintln!("left out: {reason}");
    }
    let run = || measure().map_err(Failed::from);
    let trial = Trial::test("a_measurement_is_short_and_whole_and_remembered", run);
    libtest_mimic::run(&arguments, vec![trial.with_ignored_flag(missing.is_some())]).exit();
}

fn measure() -> Result<(), String> {
    let kernel = open_context(0).and_then(PagedCopyKernel::load).map_err(|e| e.to_string())?;
    let config = TransferConfig::default();
    let options = StagedOptions::with_ring_bytes(config.staging_bytes);
    let ring = StagedMover::new(&kernel, options).map_err(|e| e.to_string())?;
    let dir = tempfile::tempdir().unwrap();
    let obtain = || {
        let begun = Instant::now();
        let found = Calibration::obtain(&kernel, &ring, &config, Some(dir.path()));
        found.map(|found| (found, begun.elapsed())).map_err(|e| e.to_string())
    };
    let (first, took) = obtain()?;
    let Source::Measured { path: Some(_), .. } = first.source() else {
        // A simulated device has no UUID, and its times would say nothing.
        return match first.source() {
            Source::BuiltIn { reason } if reason.contains("which it is") => Ok(()),
            other => Err(format!("{other:?}")),
        };
    };
    println!("measured in {took:?}");
    let stored = first.stored().ok_or("nothing was measured")?;
    for row in &stored.rows {
        let (direction, run) = (row.direction(), row.run_bytes);
        println!("{direction:?}, runs of {run}: staged from {}", first.staged_from(direction, run));
        println!("  driver copies: {:?}", row.copy_engine());
        for sample in &row.samples {
            println!("  {sample:?}");
            let movers = [Some(sample.direct_us), sample.staged_us, sample.copy_engine_us];
            for time in movers.into_iter().flatten() {
                // Nothing is much faster than one copy, and what is ten times as slow is broken.
                if time < 0.8 * sample.flat_us || time > 10.0 * sample.flat_us + 1000.0 {
                    return Err(format!("{direction:?} {run}: {sample:?}"));
                }
            }
        }
        // A slow link has no time for the largest.
        if row.samples.len() + 2 < SIZES.len() {
            return Err(format!("{direction:?} {run}: {} of {} sizes", row.samples.len(), SIZES.len()));
        }
    }
    let kinds: Vec<_> = stored.rows.iter().map(|row| (row.direction(), row.run_bytes)).collect();
    let [load, store] = [Direction::Scatter, Direction::Gather];
    assert_eq!(kinds, [(load, RUNS[0]), (load, RUNS[1]), (store, RUNS[0]), (store, RUNS[1])]);
    if took > Duration::from_secs(1) {
        return Err(format!("measuring took {took:?}"));
    }
    let (second, took) = obtain()?;
    println!("read in {took:?}");
    assert!(matches!(second.source(), Source::Cached { .. }), "{:?}", second.source());
    assert_eq!(second.stored(), first.stored());
    if took > Duration::from_millis(50) { Err(format!("reading took {took:?}")) } else { Ok(()) }
}
