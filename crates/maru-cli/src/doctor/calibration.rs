//! What `strategy = "auto"` goes by on each GPU.

use maru::Config;
use maru::layout::Direction;
use maru::transfer::backend::NativeBackend;
use maru::transfer::calibration::{Calibration, RUNS, Row, Sample, Source, cache_dir};
use maru::transfer::config::{BackendChoice, StrategyChoice, TransferConfig};
use serde::Serialize;

use crate::doctor::Findings;
use crate::doctor::cuda::{Cuda, Gpu};
use crate::output::human_bytes;

/// One GPU's calibration.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Device {
    pub(crate) device: u32,
    /// `cached`, `measured` (just now), `defaults`, `disabled` (by `calibrate = false`), `not_used` where the
    /// configuration leaves nothing to choose, or `unavailable` where the native backend cannot.
    pub(crate) state: &'static str,
    /// Why nothing was measured.
    pub(crate) reason: Option<String>,
    /// Where it is kept.
    pub(crate) file: Option<String>,
    /// How long measuring took.
    pub(crate) seconds: Option<f64>,
    /// When it was measured, in seconds since 1970.
    pub(crate) measured_at: Option<u64>,
    pub(crate) ring_bytes: u64,
    pub(crate) sm_budget: u32,
    /// One per direction and run length; empty where there is nothing to choose.
    pub(crate) rows: Vec<Rule>,
}

/// What holds for one direction and run length.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Rule {
    /// `load` or `store`.
    pub(crate) direction: &'static str,
    pub(crate) run_bytes: u64,
    /// Bytes of a batch from which it is staged; null: never.
    pub(crate) staged_from_bytes: Option<u64>,
    /// First and last size of batches that driver copies move, where layers are evenly spaced.
    pub(crate) copy_engine_bytes: Option<[u64; 2]>,
    pub(crate) samples: Vec<Medians>,
}

/// Medians of one batch size in microseconds; null where it was not measured.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Medians {
    pub(crate) bytes: u64,
    pub(crate) flat_us: f64,
    pub(crate) direct_us: f64,
    pub(crate) staged_us: Option<f64>,
    pub(crate) copy_engine_us: Option<f64>,
}

impl From<&Sample> for Medians {
    fn from(sample: &Sample) -> Self {
        Medians {
            bytes: sample.bytes,
            flat_us: sample.flat_us,
            direct_us: sample.direct_us,
            staged_us: sample.staged_us,
            copy_engine_us: sample.copy_engine_us,
        }
    }
}

/// With `probe` each GPU is opened and, unless that was done before, measured, as an engine would. Else only files
/// are read.
pub(crate) fn look(
    cuda: &Cuda,
    probe: bool,
    config: Option<&Config>,
    findings: &mut Findings,
) -> Vec<Device> {
    let transfer = config.map_or_else(TransferConfig::default, |c| c.transfer.clone());
    cuda.gpus.iter().map(|gpu| device(gpu, probe, &transfer, findings)).collect()
}

fn device(gpu: &Gpu, probe: bool, transfer: &TransferConfig, findings: &mut Findings) -> Device {
    let mut report = Device {
        device: gpu.device,
        state: "not_used",
        reason: None,
        file: None,
        seconds: None,
        measured_at: None,
        ring_bytes: transfer.staging_bytes,
        sm_budget: transfer.sm_budget,
        rows: Vec::new(),
    };
    if let Some(reason) = not_used(transfer) {
        report.reason = Some(reason);
        return report;
    }
    if gpu.native_kernel.as_ref().is_some_and(|kernel| !kernel.loads) {
        report.state = "unavailable";
        report.reason = Some("the native kernel does not load".to_owned());
        return report;
    }
    let calibration = match probe {
        false => Ok(Calibration::look_up(gpu.device, transfer, cache_dir().as_deref())),
        true => opened(gpu.device, transfer),
    };
    match calibration {
        Ok(calibration) => describe(&mut report, &calibration, transfer, findings),
        Err(reason) => {
            report.state = "unavailable";
            report.reason = Some(reason);
        }
    }
    report
}

/// Why there is nothing to choose, if so.
fn not_used(transfer: &TransferConfig) -> Option<String> {
    match transfer.strategy {
        _ if transfer.backend == BackendChoice::Fallback => Some("backend = \"fallback\"".to_owned()),
        StrategyChoice::Auto if transfer.staging_bytes == 0 => Some("staging_bytes = 0".to_owned()),
        StrategyChoice::Auto => None,
        other => Some(format!("strategy = \"{other}\"")),
    }
}

/// As an engine does it.
fn opened(device: u32, transfer: &TransferConfig) -> Result<Calibration, String> {
    let backend = NativeBackend::open(device, transfer).map_err(|e| e.to_string())?;
    backend.calibration().cloned().ok_or_else(|| "there is no memory for the ring".to_owned())
}

fn describe(
    report: &mut Device,
    calibration: &Calibration,
    transfer: &TransferConfig,
    findings: &mut Findings,
) {
    let name = format!("cuda:{}", report.device);
    match calibration.source() {
        Source::BuiltIn { .. } if !transfer.calibrate => report.state = "disabled",
        Source::BuiltIn { reason } => {
            report.state = "defaults";
            report.reason = Some(reason.clone());
        }
        Source::Cached { path } => {
            report.state = "cached";
            report.file = Some(path.display().to_string());
        }
        Source::Measured { path, took } => {
            report.state = "measured";
            report.file = path.as_ref().map(|path| path.display().to_string());
            report.seconds = Some(took.as_secs_f64());
            if path.is_none() {
                findings.note(
                    format!("{name}: its calibration cannot be kept and is measured at every start"),
                    "make ~/.cache/maru writable, let XDG_CACHE_HOME name a directory that is, or set calibrate = false",
                );
            }
        }
        _ => {}
    }
    let rows: &[Row] = calibration.stored().map_or(&[], |stored| &stored.rows);
    report.measured_at = calibration.stored().map(|stored| stored.measured_at);
    for direction in [Direction::Scatter, Direction::Gather] {
        for run_bytes in RUNS {
            let row = rows.iter().find(|row| row.direction() == direction && row.run_bytes == run_bytes);
            let from = calibration.staged_from(direction, run_bytes);
            report.rows.push(Rule {
                direction: if direction == Direction::Scatter { "load" } else { "store" },
                run_bytes,
                staged_from_bytes: (from != u64::MAX).then_some(from),
                copy_engine_bytes: row.and_then(Row::copy_engine).map(|(first, last)| [first, last]),
                samples: row.map_or_else(Vec::new, |row| row.samples.iter().map(Medians::from).collect()),
            });
        }
    }
}

/// The report for people.
pub(crate) fn lines(devices: &[Device]) -> Vec<String> {
    devices.iter().flat_map(device_lines).collect()
}

fn device_lines(device: &Device) -> Vec<String> {
    let why = device.reason.as_deref().unwrap_or("?");
    let took = device.seconds.map_or_else(String::new, |s| format!(" in {:.0} ms", s * 1e3));
    let kept = device.file.as_ref().map_or_else(|| "not kept".to_owned(), |file| format!("kept in {file}"));
    let state = match device.state {
        "cached" => format!("measured before, {kept}"),
        "measured" => format!("measured now{took}, {kept}"),
        "disabled" => "switched off by calibrate = false; the defaults hold".to_owned(),
        "defaults" => format!("the defaults hold: {why}"),
        "unavailable" => format!("nothing to choose between: {why}"),
        _ => format!("not used: {why}"),
    };
    let mut lines = vec![format!("cuda:{} {state}", device.device)];
    if !device.rows.is_empty() {
        lines.push(format!(
            "  for a ring of {} and {} thread blocks",
            human_bytes(device.ring_bytes),
            device.sm_budget
        ));
    }
    for rule in &device.rows {
        lines.extend(rule_lines(rule));
    }
    lines
}

fn rule_lines(rule: &Rule) -> Vec<String> {
    let staged = rule
        .staged_from_bytes
        .map_or_else(|| "never staged".to_owned(), |from| format!("staged from {}", human_bytes(from)));
    let copies = rule.copy_engine_bytes.map_or_else(String::new, |[first, last]| {
        format!(", driver copies from {} to {}", human_bytes(first), human_bytes(last))
    });
    let mut lines =
        vec![format!("  {}, runs of {}: {staged}{copies}", rule.direction, human_bytes(rule.run_bytes))];
    if !rule.samples.is_empty() {
        lines.push(format!(
            "    {:>10} {:>10} {:>10} {:>10} {:>13}",
            "batch", "flat copy", "direct", "staged", "driver copies"
        ));
    }
    let us = |time: Option<f64>| time.map_or_else(|| "-".to_owned(), |us| format!("{us:.1} us"));
    for sample in &rule.samples {
        lines.push(format!(
            "    {:>10} {:>10} {:>10} {:>10} {:>13}",
            human_bytes(sample.bytes),
            us(Some(sample.flat_us)),
            us(Some(sample.direct_us)),
            us(sample.staged_us),
            us(sample.copy_engine_us)
        ));
    }
    lines
}
