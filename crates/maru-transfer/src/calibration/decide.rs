//! What follows from measured times. Pure.

use maru_layout::Direction;
use serde::{Deserialize, Serialize};

use super::{SIZES, STAGE_FROM};

/// Staged may take this much of the direct time and is still chosen: it keeps the link's writes away from a busy
/// GPU's multiprocessors, see docs/performance.md.
const STILL_AS_FAST: f64 = 1.02;
/// The same from [`STAGE_FROM`] on: large transfers are what a busy GPU feels, and are timed too few times to tell less.
const LARGE_STILL_AS_FAST: f64 = 1.05;

/// No time of a batch of at most 64 MiB is longer, in microseconds.
const LONGEST: f64 = 60e6;

/// Medians of one batch size, in microseconds from the call until it is over.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Sample {
    /// Bytes of the batch.
    pub bytes: u64,
    /// One copy of as many bytes between contiguous memory on both sides.
    pub flat_us: f64,
    /// The direct strategy.
    pub direct_us: f64,
    /// The staged strategy; nothing where the ring is too small for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staged_us: Option<f64>,
    /// Copies by the driver; timed for long runs only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_engine_us: Option<f64>,
}

impl Sample {
    /// Times of a batch.
    pub fn new(
        bytes: u64,
        flat_us: f64,
        direct_us: f64,
        staged_us: Option<f64>,
        copy_engine_us: Option<f64>,
    ) -> Self {
        Sample { bytes, flat_us, direct_us, staged_us, copy_engine_us }
    }

    fn staged_is_as_fast(&self) -> bool {
        let most = if self.bytes < STAGE_FROM { STILL_AS_FAST } else { LARGE_STILL_AS_FAST };
        self.staged_us.is_some_and(|staged| staged <= self.direct_us * most)
    }

    fn copy_engine_is_ahead(&self) -> bool {
        let others = self.staged_us.map_or(self.direct_us, |staged| staged.min(self.direct_us));
        self.copy_engine_us.is_some_and(|copies| copies <= others)
    }

    fn is_sensible(&self) -> bool {
        let times = [Some(self.flat_us), Some(self.direct_us), self.staged_us, self.copy_engine_us];
        let mut times = times.into_iter().flatten();
        times.all(|us| us.is_finite() && us > 0.0 && us <= LONGEST)
    }
}

/// Which way bytes go, in the words of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Way {
    Load,
    Store,
}

/// Everything measured for one direction and run length, by size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Row {
    direction: Way,
    /// Bytes contiguous on both sides, one of [`super::RUNS`].
    pub run_bytes: u64,
    /// Sizes that there was time for, ascending.
    #[serde(rename = "sample", default)]
    pub samples: Vec<Sample>,
}

impl Row {
    /// Measurements of one direction and run length; `samples` ascend in size.
    pub fn new(direction: Direction, run_bytes: u64, samples: Vec<Sample>) -> Self {
        let direction = match direction {
            Direction::Scatter => Way::Load,
            Direction::Gather => Way::Store,
        };
        Row { direction, run_bytes, samples }
    }

    /// Loads ([`Direction::Scatter`]) or stores ([`Direction::Gather`]).
    pub fn direction(&self) -> Direction {
        match self.direction {
            Way::Load => Direction::Scatter,
            Way::Store => Direction::Gather,
        }
    }

    /// The smallest size from which staged was as fast as direct, within 2 % (5 % from [`STAGE_FROM`] on) there and at
    /// every larger size;
    /// [`u64::MAX`] if it was not at the largest ones. The largest alone, timed least often, says nothing against the one
    /// below it: what staging costs more than direct does not grow with the size.
    ///
    /// Where the measurement ended early, the sizes it did not reach are staged from [`STAGE_FROM`] on.
    pub fn staged_from(&self) -> u64 {
        let mut from =
            match SIZES.iter().find(|(bytes, _)| self.samples.last().is_none_or(|s| s.bytes < *bytes)) {
                Some((first_missing, _)) => STAGE_FROM.max(*first_missing),
                None => u64::MAX,
            };
        let mut falling = self.samples.iter().rev();
        if let [.., below, _] = &self.samples[..]
            && below.staged_is_as_fast()
        {
            falling.next();
        }
        for sample in falling.take_while(|sample| sample.staged_is_as_fast()) {
            from = sample.bytes;
        }
        from
    }

    /// First and last of the most neighbouring sizes at which driver copies were as fast as both others, if any.
    /// Nothing is concluded for smaller or larger batches.
    pub fn copy_engine(&self) -> Option<(u64, u64)> {
        let wins = self.samples.chunk_by(|a, b| a.copy_engine_is_ahead() == b.copy_engine_is_ahead());
        let wins = wins.filter(|run| run.first().is_some_and(Sample::copy_engine_is_ahead));
        // The first of equals.
        let longest = wins.rev().max_by_key(|run| run.len())?;
        Some((longest.first()?.bytes, longest.last()?.bytes))
    }

    /// Whether it could have been measured: known run length, the sizes from the smallest on, times that are times.
    pub(super) fn is_sensible(&self) -> bool {
        super::RUNS.contains(&self.run_bytes)
            && self.samples.iter().all(Sample::is_sensible)
            && self.samples.len() <= SIZES.len()
            && self.samples.iter().zip(SIZES).all(|(sample, (bytes, _))| sample.bytes == bytes)
    }

    pub(super) fn key(&self) -> (Direction, u64) {
        (self.direction(), self.run_bytes)
    }
}
