//! What parent and children say to each other: one JSON object a line, orders on stdin, events on stdout.

use std::io::Write as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::CliError;
use crate::p2p::image::Difference;
use crate::p2p::job::Job;
use crate::progress::Progress;

/// Parent to child.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub(crate) enum Order {
    /// The first line: what to do.
    Begin {
        /// Boxed because the other order is empty.
        job: Box<Job>,
    },
    /// The other side is done; tidy up and end. Until it comes, the end of stdin means that the parent died.
    Finish,
}

/// Child to parent.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub(crate) enum Event {
    /// Still at it.
    Progress {
        /// What is being done.
        phase: Phase,
        /// How much of it is done.
        done: u64,
        /// Of how much.
        total: u64,
    },
    /// The producer has published every chunk.
    Stored(Stored),
    /// The consumer has an answer.
    Loaded(Loaded),
    /// It failed.
    Failed {
        /// Stable kind.
        kind: String,
        /// For a human.
        message: String,
        /// Exit code that goes with it.
        code: u8,
    },
}

/// What takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    Mapping,
    Filling,
    Storing,
    Waiting,
    Loading,
    Checking,
}

impl Phase {
    pub(crate) fn words(self) -> &'static str {
        match self {
            Phase::Mapping => "mapping the pool",
            Phase::Filling => "filling the cache",
            Phase::Storing => "storing chunks",
            Phase::Waiting => "waiting for chunks",
            Phase::Loading => "loading chunks",
            Phase::Checking => "checking bytes",
        }
    }
}

/// How one side's transfers went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Transfers {
    /// Slab bytes moved.
    pub(crate) bytes: u64,
    /// Seconds spent in the mover.
    pub(crate) seconds: f64,
    pub(crate) backend: String,
    pub(crate) strategy: String,
    pub(crate) device: String,
}

/// The producer's result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stored {
    pub(crate) chunks: u64,
    pub(crate) transfers: Transfers,
}

/// The consumer's result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Loaded {
    /// Chunks of the prompt found, and how many it has.
    pub(crate) found: u64,
    pub(crate) chunks: u64,
    /// `None` when chunks were missing: nothing was loaded.
    pub(crate) transfers: Option<Transfers>,
    /// The first wrong byte.
    pub(crate) first_difference: Option<Difference>,
    pub(crate) device: String,
    pub(crate) backend: String,
}

/// Where one side's progress goes: to the parent, or to a bar of its own.
#[derive(Debug)]
pub(crate) struct Reporter {
    bar: Option<Progress>,
    last: Mutex<Option<Instant>>,
}

/// Progress is reported no more often than this.
const PERIOD: Duration = Duration::from_millis(50);

impl Reporter {
    /// Events on stdout.
    pub(crate) fn to_parent() -> Self {
        Reporter { bar: None, last: Mutex::new(None) }
    }

    /// A bar on stderr.
    pub(crate) fn to_bar() -> Self {
        Reporter { bar: Some(Progress::new()), last: Mutex::new(None) }
    }

    /// `done` of `total` is done.
    pub(crate) fn progress(&self, phase: Phase, done: u64, total: u64) {
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let now = Instant::now();
        if last.is_some_and(|last| now.duration_since(last) < PERIOD) && done != 0 && done != total {
            return;
        }
        *last = Some(now);
        match &self.bar {
            Some(bar) => bar.show(phase.words().to_owned(), done, total),
            // A parent that is gone is noticed at the other end of this process, by its stdin.
            None => {
                let _ = send(&Event::Progress { phase, done, total });
            }
        }
    }
}

/// Writes an event to stdout.
pub(crate) fn send(event: &Event) -> Result<(), CliError> {
    let failed = |e: std::io::Error| CliError::io("reporting to the parent process", e);
    let mut line = serde_json::to_string(event).map_err(|e| failed(e.into()))?;
    line.push('\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_the_pipe() {
        let loaded = Loaded {
            found: 1,
            chunks: 2,
            transfers: None,
            first_difference: Some(Difference { layer: 1, kv: 0, token: 3, head: 4, byte: 5 }),
            device: "host".into(),
            backend: "fallback".into(),
        };
        let line = serde_json::to_string(&Event::Loaded(loaded.clone())).unwrap();
        assert!(!line.contains('\n'));
        match serde_json::from_str(&line).unwrap() {
            Event::Loaded(read) => assert_eq!(read, loaded),
            other => panic!("{other:?}"),
        }
    }
}
