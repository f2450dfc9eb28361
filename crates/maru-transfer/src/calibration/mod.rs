//! Which strategy for which transfer: measured once per device, driver and configuration, and remembered.
//!
//! `strategy = "auto"` asks a [`Calibration`] for every batch. It is made when the native backend is opened:
//!
//! 1. With `calibrate = false` nothing is read, measured or written: [`STAGE_FROM`] holds.
//! 2. Otherwise a file of an earlier run is looked for in the cache directory ([`cache_dir`]). It counts if it
//!    is of the same device, driver, kernel image, version, ring and `sm_budget` ([`Identity`]) and holds
//!    sensible times. Anything else is as if it were not there.
//! 3. Without one, a few transfers of [`SIZES`] bytes are timed between a cache and a slab made for it, and the
//!    medians are written down. That takes a fraction of a second, see [`Effort`].
//!
//! What is kept are times ([`Sample`]); what follows from them ([`Row::staged_from`], [`Row::copy_engine`]) is
//! worked out anew each time, so a file cannot contradict itself. Nothing here fails an engine: what cannot be
//! read, measured or written costs a line in the log. Only a lost context is an error, because no mover can work
//! there.

mod batch;
mod decide;
mod file;
mod identity;
mod measure;
mod rig;
#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use maru_kernel_cuda::{LaunchOptions, PagedCopyKernel, StagedMover};
use maru_layout::Direction;

pub use decide::{Row, Sample};
pub use file::{Stored, Unusable};
pub use identity::Identity;
pub use measure::Effort;

use crate::TransferError;
use crate::config::{StrategyChoice, TransferConfig};

/// Bytes of a batch from which it is staged where nothing was measured: below, one launch is over before the
/// copy engine and a second launch would be. See docs/performance.md.
pub const STAGE_FROM: u64 = 16 << 20;

/// Bytes of the batches that are timed, and how often.
pub const SIZES: [(u64, u32); 6] =
    [(1 << 20, 9), (4 << 20, 9), (8 << 20, 7), (16 << 20, 5), (32 << 20, 3), (64 << 20, 3)];

/// The run lengths that are timed, in bytes: one KV head, where heads lie apart, and a block of 16 tokens of
/// eight heads.
pub const RUNS: [u64; 2] = [256, 32 << 10];

/// Runs from this length on go by the figures of the long ones.
const LONG: u64 = 2 << 10;

/// How a batch is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Choice {
    /// One launch of the kernel, which touches the slab over the link.
    Direct,
    /// The copy engine and a ring on the device.
    Staged,
    /// Copies by the driver only.
    CopyEngine,
}

/// Where a calibration comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// Nothing was measured, for this reason.
    BuiltIn {
        /// Why.
        reason: String,
    },
    /// A file of an earlier run.
    Cached {
        /// The file.
        path: PathBuf,
    },
    /// Measured when the backend was opened.
    Measured {
        /// Where it was written, if it could be.
        path: Option<PathBuf>,
        /// How long it took.
        took: Duration,
    },
}

/// Whether `strategy = "auto"` moves a batch directly, staged or by driver copies. Cheap to clone.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration(Arc<Found>);

#[derive(Debug, PartialEq)]
struct Found {
    source: Source,
    stored: Option<Stored>,
    rules: Rules,
}

/// What follows from the measurements, by direction and run length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rules([[Rule; 2]; 2]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    staged_from: u64,
    /// First and last.
    copy_engine: Option<(u64, u64)>,
}

const BUILT_IN: Rule = Rule { staged_from: STAGE_FROM, copy_engine: None };

/// One measurement at a time in this process; others would be in its way.
static TURN: Mutex<()> = Mutex::new(());

impl Calibration {
    /// The defaults, and why they hold.
    pub fn built_in(reason: impl Into<String>) -> Self {
        let source = Source::BuiltIn { reason: reason.into() };
        Calibration(Arc::new(Found { source, stored: None, rules: Rules([[BUILT_IN; 2]; 2]) }))
    }

    fn of(source: Source, stored: Stored) -> Self {
        let mut rules = Rules([[BUILT_IN; 2]; 2]);
        for row in &stored.rows {
            *rules.of_mut(row.direction(), row.run_bytes) =
                Rule { staged_from: row.staged_from(), copy_engine: row.copy_engine() };
        }
        Calibration(Arc::new(Found { source, stored: Some(stored), rules }))
    }

    /// Measurements of one's own, for [`Calibration::choose`].
    pub fn of_rows(identity: Identity, rows: Vec<Row>) -> Self {
        let source = Source::Measured { path: None, took: Duration::ZERO };
        Self::of(source, Stored::new(identity, rows))
    }

    /// What holds for a kernel and a ring of `config`: from a file in `dir`, else measured and written there.
    /// Without a directory it is measured each time.
    ///
    /// # Errors
    /// [`TransferError::Kernel`] of the kind `context_lost` only.
    pub fn obtain(
        kernel: &PagedCopyKernel,
        ring: &StagedMover,
        config: &TransferConfig,
        dir: Option<&Path>,
    ) -> Result<Self, TransferError> {
        Self::obtain_with(kernel, ring, config, dir, Effort::default())
    }

    /// The same with less patience, or more.
    ///
    /// # Errors
    /// As [`Calibration::obtain`].
    pub fn obtain_with(
        kernel: &PagedCopyKernel,
        ring: &StagedMover,
        config: &TransferConfig,
        dir: Option<&Path>,
        effort: Effort,
    ) -> Result<Self, TransferError> {
        if let Some(reason) = not_wanted(config) {
            return Ok(Self::built_in(reason));
        }
        let device = kernel.context().ordinal();
        let identity = match Identity::of_device(device, Some(&kernel.image().to_string()), config) {
            Ok(identity) => identity,
            Err(error) => {
                // What cannot be recognised again is not worth measuring.
                tracing::debug!(device, %error, "the device has no identity; nothing is measured");
                return Ok(Self::built_in(format!("the device does not say which it is: {error}")));
            }
        };
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let path = dir.map(|dir| dir.join(identity.file_name()));
        if let Some(path) = &path
            && let Some(stored) = file::load(path, &identity)
        {
            return Ok(Self::of(Source::Cached { path: path.clone() }, stored));
        }
        let begun = Instant::now();
        let options = LaunchOptions::default().with_sm_budget(config.sm_budget);
        let rows = match measure::rows(kernel, ring, options, effort) {
            Ok(rows) if rows.iter().any(|row| !row.samples.is_empty()) => rows,
            Ok(_) => {
                tracing::warn!(device, budget = ?effort.budget, "calibration was too slow for its time; defaults hold");
                return Ok(Self::built_in("measuring took longer than it may"));
            }
            Err(error) if error.kind() == "context_lost" => return Err(error),
            Err(error) => {
                tracing::warn!(device, %error, "calibration failed; defaults hold");
                return Ok(Self::built_in(format!("measuring failed: {error}")));
            }
        };
        let took = begun.elapsed();
        let stored = Stored::new(identity, rows);
        let path = path.filter(|path| file::store(path, &stored));
        tracing::info!(device, ?took, path = ?path, "measured which strategy is faster");
        Ok(Self::of(Source::Measured { path, took }, stored))
    }

    /// What a file in `dir` says of a device, without opening it: nothing is measured or written.
    pub fn look_up(device: u32, config: &TransferConfig, dir: Option<&Path>) -> Self {
        if let Some(reason) = not_wanted(config) {
            return Self::built_in(reason);
        }
        let ordinal = usize::try_from(device).unwrap_or(usize::MAX);
        // Which image the driver takes is known once it is loaded.
        let identity = match Identity::of_device(ordinal, None, config) {
            Ok(identity) => identity,
            Err(error) => return Self::built_in(format!("the device does not say which it is: {error}")),
        };
        let Some(dir) = dir else { return Self::built_in("there is no cache directory") };
        let path = dir.join(identity.file_name());
        match file::load(&path, &identity) {
            Some(stored) => Self::of(Source::Cached { path }, stored),
            None => Self::built_in("not measured yet"),
        }
    }

    /// How to move a batch.
    ///
    /// * `bytes`: of the batch, one way.
    /// * `run_bytes`: contiguous on both sides, as one driver copy of one layer would move it.
    /// * `evenly_spaced`: the layers are, and their runs are enough for a copy of all layers at once to be worth
    ///   its call; without it the driver's copies are never chosen.
    pub fn choose(&self, bytes: u64, run_bytes: u64, direction: Direction, evenly_spaced: bool) -> Choice {
        let rule = self.0.rules.of(direction, run_bytes);
        match rule.copy_engine {
            Some((first, last))
                if evenly_spaced && run_bytes >= RUNS[1] && (first..=last).contains(&bytes) =>
            {
                Choice::CopyEngine
            }
            _ if bytes >= rule.staged_from => Choice::Staged,
            _ => Choice::Direct,
        }
    }

    /// Bytes of a batch from which it is staged; [`u64::MAX`] for never.
    pub fn staged_from(&self, direction: Direction, run_bytes: u64) -> u64 {
        self.0.rules.of(direction, run_bytes).staged_from
    }

    /// Whether driver copies are ever chosen.
    pub fn uses_copy_engine(&self) -> bool {
        self.0.rules.0.iter().flatten().any(|rule| rule.copy_engine.is_some())
    }

    /// Where it comes from.
    pub fn source(&self) -> &Source {
        &self.0.source
    }

    /// What was measured, and of what; nothing for defaults.
    pub fn stored(&self) -> Option<&Stored> {
        self.0.stored.as_ref()
    }
}

impl Rules {
    fn of(&self, direction: Direction, run_bytes: u64) -> Rule {
        self.0[usize::from(direction == Direction::Gather)][usize::from(run_bytes >= LONG)]
    }

    fn of_mut(&mut self, direction: Direction, run_bytes: u64) -> &mut Rule {
        &mut self.0[usize::from(direction == Direction::Gather)][usize::from(run_bytes >= LONG)]
    }
}

/// Why there is nothing to choose or measure, if so.
fn not_wanted(config: &TransferConfig) -> Option<&'static str> {
    match config.strategy {
        _ if !config.calibrate => Some("calibrate = false"),
        StrategyChoice::Auto if config.staging_bytes > 0 => None,
        StrategyChoice::Auto => Some("staging_bytes = 0: everything goes directly"),
        _ => Some("the configuration names a strategy"),
    }
}

/// The user's cache directory for this: `$XDG_CACHE_HOME/maru`, else `$HOME/.cache/maru`; nothing where neither
/// is an absolute path.
pub fn cache_dir() -> Option<PathBuf> {
    let (xdg, home) = (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"));
    cache_dir_of(xdg.as_deref(), home.as_deref())
}

/// [`cache_dir`] for given values of the two variables. A relative path does not count, as the XDG base directory
/// specification demands.
pub fn cache_dir_of(xdg_cache_home: Option<&OsStr>, home: Option<&OsStr>) -> Option<PathBuf> {
    let absolute = |value: Option<&OsStr>| value.map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute(xdg_cache_home).or_else(|| absolute(home).map(|home| home.join(".cache")));
    base.map(|base| base.join("maru"))
}
