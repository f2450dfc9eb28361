//! The measurement: short, interleaved, bounded.

use std::time::{Duration, Instant};

use maru_kernel_cuda::{LaunchOptions, PagedCopyKernel, StagedMover};
use maru_layout::Direction;

use super::rig::{Batch, Mover, Rig, Stop};
use super::{RUNS, Row, SIZES, Sample};
use crate::TransferError;

/// How long a measurement may take.
///
/// The default is a budget of 250 ms, of which a PCIe 5 link needs about 150, and the time for 64 MiB of
/// page-locked and as much device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Effort {
    /// No transfer is begun after this. Sizes that were not reached keep the defaults.
    pub budget: Duration,
    /// A transfer that takes longer than this ends the measurement: the device is busy with something else.
    pub patience: Duration,
    /// Larger batches are not timed.
    pub largest: u64,
    /// No batch is timed more often.
    pub rounds: u32,
}

impl Default for Effort {
    fn default() -> Self {
        Effort {
            budget: Duration::from_millis(250),
            patience: Duration::from_secs(1),
            largest: u64::MAX,
            rounds: u32::MAX,
        }
    }
}

impl Effort {
    /// Another budget.
    #[must_use]
    pub fn with_budget(mut self, budget: Duration) -> Self {
        self.budget = budget;
        self
    }

    /// Another patience.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Nothing larger than so many bytes.
    #[must_use]
    pub fn with_largest(mut self, bytes: u64) -> Self {
        self.largest = bytes;
        self
    }

    /// At most so many rounds.
    #[must_use]
    pub fn with_rounds(mut self, rounds: u32) -> Self {
        self.rounds = rounds;
        self
    }
}

/// A median of fewer samples than this counts only where each took so long that little disturbs it.
const FEW: usize = 3;
const LONG_US: f64 = 2000.0;

/// Traffic before the first measurement.
const WAKE: Duration = Duration::from_millis(10);

const DIRECTIONS: [Direction; 2] = [Direction::Scatter, Direction::Gather];

/// What is compared with each other: one direction, run length and size.
struct Cell {
    direction: Direction,
    run: u64,
    bytes: u64,
    rounds: usize,
    batch: Batch,
    /// Microseconds by mover, of whole rounds only.
    times: [Vec<f64>; 4],
}

const FLAT: usize = 3;
const MOVERS: [Mover; 3] = [Mover::Direct, Mover::Staged, Mover::CopyEngine];

/// Times everything, as far as the budget goes. The memory is given back before this returns, or, if something is
/// stuck on the device, by a thread that waits for it.
pub(super) fn rows(
    kernel: &PagedCopyKernel,
    ring: &StagedMover,
    options: LaunchOptions,
    effort: Effort,
) -> Result<Vec<Row>, TransferError> {
    let mut rig = Rig::new(kernel, ring, options, effort.patience)?;
    let mut cells = Vec::new();
    for (bytes, rounds) in SIZES.into_iter().filter(|(bytes, _)| *bytes <= effort.largest) {
        for direction in DIRECTIONS {
            for run in RUNS {
                let batch = rig.batch(bytes, run, direction)?;
                let rounds = usize::try_from(rounds.min(effort.rounds)).unwrap_or(usize::MAX);
                cells.push(Cell { direction, run, bytes, rounds, batch, times: Default::default() });
            }
        }
    }
    match all_rounds(&mut rig, &mut cells, effort.budget) {
        Ok(()) => Ok(to_rows(&cells)),
        Err(Stop::Failed(error)) => Err(error),
        Err(Stop::Stuck) => {
            // Freeing memory that is in use would wait here for as long as the device is busy.
            let give_back = std::thread::Builder::new().name("maru-calibration".to_owned());
            if let Err(error) = give_back.spawn(move || drop(rig)) {
                tracing::debug!(%error, "no thread to give the calibration's memory back; it was waited for");
            }
            let reason = format!("a transfer was not over after {:?}: the device is busy", effort.patience);
            Err(TransferError::not_available("a calibration", reason))
        }
    }
}

fn all_rounds(rig: &mut Rig, cells: &mut [Cell], budget: Duration) -> Result<(), Stop> {
    let deadline = Instant::now() + budget;
    warm_up(rig, cells)?;
    // What is needed first, size by size, so that a slow link loses the large sizes only.
    for same_size in cells.chunk_by_mut(|a, b| a.bytes == b.bytes) {
        for round in 0..FEW {
            for cell in same_size.iter_mut().filter(|cell| !cell.is_enough()) {
                if Instant::now() >= deadline {
                    return Ok(());
                }
                one_round(rig, cell, round)?;
            }
        }
    }
    let most = cells.iter().map(|cell| cell.rounds).max().unwrap_or(0);
    for round in FEW..most {
        for cell in cells.iter_mut().filter(|cell| round < cell.rounds) {
            if Instant::now() >= deadline {
                return Ok(());
            }
            one_round(rig, cell, round)?;
        }
    }
    Ok(())
}

/// The first use of everything is slow, and an idle link takes some traffic to wake up.
fn warm_up(rig: &mut Rig, cells: &[Cell]) -> Result<(), Stop> {
    let smallest = SIZES[0].0;
    let begun = Instant::now();
    while begun.elapsed() < WAKE {
        for direction in DIRECTIONS {
            rig.time_flat(4 * smallest, direction)?;
        }
    }
    for cell in cells.iter().filter(|cell| cell.bytes == smallest) {
        for mover in MOVERS {
            time(rig, cell, mover)?;
        }
    }
    Ok(())
}

/// All movers once, each round beginning with another one.
fn one_round(rig: &mut Rig, cell: &mut Cell, round: usize) -> Result<(), Stop> {
    let mut times = [None; 4];
    for i in 0..4 {
        let at = (round + i) % 4;
        times[at] = match MOVERS.get(at) {
            Some(mover) => time(rig, cell, *mover)?,
            None => Some(rig.time_flat(cell.bytes, cell.direction)?),
        };
    }
    for (all, time) in cell.times.iter_mut().zip(times) {
        all.extend(time);
    }
    Ok(())
}

/// One transfer. Driver copies are timed where they are of use; if they fail, the others are still measured.
fn time(rig: &mut Rig, cell: &Cell, mover: Mover) -> Result<Option<f64>, Stop> {
    if mover == Mover::CopyEngine && (cell.run < RUNS[1] || !rig.has_copies()) {
        return Ok(None);
    }
    match rig.time(&cell.batch, mover) {
        Err(Stop::Failed(error)) if mover == Mover::CopyEngine && error.kind() != "context_lost" => {
            tracing::debug!(%error, "driver copies are not timed");
            rig.without_copies();
            Ok(None)
        }
        outcome => outcome,
    }
}

fn to_rows(cells: &[Cell]) -> Vec<Row> {
    let mut rows = Vec::new();
    for direction in DIRECTIONS {
        for run in RUNS {
            let of_row = cells.iter().filter(|cell| cell.direction == direction && cell.run == run);
            // Up to the first size that there was no time for: what is larger says nothing without it.
            let samples = of_row.map_while(Cell::sample).collect();
            rows.push(Row::new(direction, run, samples));
        }
    }
    rows
}

impl Cell {
    /// Whether its medians say something.
    fn is_enough(&self) -> bool {
        let rounds = self.times[FLAT].len();
        rounds >= FEW.min(self.rounds) || median(&self.times[FLAT]).is_some_and(|us| us >= LONG_US)
    }

    fn sample(&self) -> Option<Sample> {
        if !self.is_enough() {
            return None;
        }
        let median = |at: usize| median(&self.times[at]);
        // A mover that dropped out half-way has fewer times than the others.
        let whole = |at: usize| median(at).filter(|_| self.times[at].len() == self.times[FLAT].len());
        Some(Sample::new(self.bytes, median(FLAT)?, median(0)?, whole(1), whole(2)))
    }
}

/// Rounded to the hundredth of a microsecond, so that a file holds what was decided with.
fn median(times: &[f64]) -> Option<f64> {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let value = match sorted.len() {
        0 => return None,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    };
    Some((value * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_of_the_middle() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 100.0]), Some(3.0));
        assert_eq!(median(&[1.234_567]), Some(1.23));
    }
}
