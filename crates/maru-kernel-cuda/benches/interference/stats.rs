//! From times of events to what is reported. Times are milliseconds on one time line.

/// Chunks of compute: when the first began, when each ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Track {
    pub(crate) start: f64,
    pub(crate) ends: Vec<f64>,
    /// Chunks that were queued when everything before was over: the device may have idled.
    pub(crate) starved: usize,
}

/// How fast chunks went by, milliseconds a chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pace {
    pub(crate) mean: f64,
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) chunks: usize,
    /// From when to when.
    pub(crate) window: (f64, f64),
}

impl Track {
    /// What happened after the first `warm` milliseconds. `None` if less than two chunks are left.
    pub(crate) fn pace(&self, warm: f64) -> Option<Pace> {
        let first = self.ends.iter().position(|end| *end >= self.start + warm)?;
        let ends = &self.ends[first..];
        if ends.len() < 3 {
            return None;
        }
        let mut times: Vec<f64> = ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
        times.sort_by(f64::total_cmp);
        let window = (ends[0], ends[ends.len() - 1]);
        Some(Pace {
            mean: (window.1 - window.0) / times.len() as f64,
            median: quantile(&times, 0.5),
            p99: quantile(&times, 0.99),
            chunks: times.len(),
            window,
        })
    }
}

/// The value below which this part of the sorted ones lies (nearest rank); 0 of nothing.
pub(crate) fn quantile(sorted: &[f64], part: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the list, or clamped")]
    let rank = (sorted.len() as f64 * part).ceil() as usize;
    sorted[rank.saturating_sub(1).min(last)]
}

/// Batches of equal size: when each was over.
#[derive(Clone, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) ends: Vec<f64>,
    pub(crate) batch_bytes: f64,
    /// Batches that were submitted when everything before was over: the link may have idled.
    pub(crate) starved: usize,
}

impl Moved {
    /// Bytes moved by a point in time since the first batch was over: evenly between two ends.
    fn by(&self, time: f64) -> f64 {
        let after = self.ends.partition_point(|end| *end <= time);
        let (Some(before), Some(end)) = (after.checked_sub(1), self.ends.get(after)) else {
            return self.ends.len().saturating_sub(1).min(after) as f64 * self.batch_bytes;
        };
        let part = (time - self.ends[before]) / (end - self.ends[before]);
        (before as f64 + part) * self.batch_bytes
    }

    /// GB/s in a window.
    pub(crate) fn rate(&self, (from, to): (f64, f64)) -> f64 {
        match to > from {
            true => (self.by(to) - self.by(from)) / (to - from) / 1e6,
            false => 0.0,
        }
    }

    /// From the end of the first batch to that of the last.
    pub(crate) fn window(&self) -> (f64, f64) {
        match (self.ends.first(), self.ends.last()) {
            (Some(first), Some(last)) => (*first, *last),
            _ => (0.0, 0.0),
        }
    }
}

/// Compute beside transfers, over compute alone measured before and after.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slowdown {
    /// By the time of all chunks: the share of throughput lost.
    pub(crate) mean: f64,
    /// By the median chunk.
    pub(crate) median: f64,
    /// The slowest chunk of a hundred, over the median one alone.
    pub(crate) p99: f64,
    /// Compute alone after, over before.
    pub(crate) drift: f64,
}

impl Slowdown {
    pub(crate) fn of(busy: &Pace, before: &Pace, after: &Pace) -> Self {
        let base = |value: fn(&Pace) -> f64| (value(before) + value(after)) / 2.0;
        Slowdown {
            mean: busy.mean / base(|p| p.mean),
            median: busy.median / base(|p| p.median),
            p99: busy.p99 / base(|p| p.median),
            drift: after.mean / before.mean,
        }
    }
}

/// What a mover may slow the compute beyond what the flat copy does, and what it is to reach of its rate.
pub(crate) const TARGET: (f64, f64) = (0.03, 0.90);

/// Whether a mover is good enough: its slowdown beside the flat copy's, and its rate over the flat copy's.
pub(crate) fn reaches(slowdown: f64, flat: f64, ratio: f64) -> bool {
    slowdown <= flat + TARGET.0 && ratio >= TARGET.1
}

/// The host did not keep up too often for a slowdown to say anything about the device.
pub(crate) fn is_doubtful(starved: usize, chunks: usize) -> bool {
    starved * 50 > chunks
}
