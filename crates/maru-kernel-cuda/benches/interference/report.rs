//! The table and the rows of the CSV file.

use std::fs::File;
use std::io::Write as _;

use crate::grid::{LoadKind, MoverKind};
use crate::loads::Load;
use crate::stats::{Slowdown, TARGET, is_doubtful, reaches};

const HEADER: &str = "load,layout,direction,mover,bytes,slowdown,slowdown_median,slowdown_p99,iteration_us,base_us,\
                      base_drift,compute,compute_unit,gbps,flat_gbps,ratio,chunks,compute_starved,mover_starved";

/// One load beside one mover. Without a load only what was moved.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cell {
    pub(crate) slowdown: Option<Slowdown>,
    pub(crate) iteration_ms: f64,
    pub(crate) base_ms: f64,
    pub(crate) chunks: usize,
    pub(crate) gbps: f64,
    pub(crate) compute_starved: usize,
    pub(crate) mover_starved: usize,
}

pub(crate) struct Report {
    layout: &'static str,
    bytes: usize,
    csv: Option<(String, File)>,
    /// The flat copy's slowdown of the load and direction under way.
    flat: f64,
    reached: Vec<String>,
    doubtful: usize,
}

impl Report {
    pub(crate) fn new(layout: &'static str, bytes: usize, csv: Option<String>) -> Result<Self, String> {
        let open = |path: String| match File::create(&path) {
            Ok(file) => Ok((path, file)),
            Err(error) => Err(format!("{path}: {error}")),
        };
        let csv = csv.map(open).transpose()?;
        let mut report = Report { layout, bytes, csv, flat: 0.0, reached: Vec::new(), doubtful: 0 };
        report.row(HEADER)?;
        println!(
            "{:<9} {:>3} {:<17} | {:>6} {:>6} {:>6} | {:>6} {:>6} | {:>15} alone | starved",
            "load", "dir", "mover", "slow", "median", "p99", "GB/s", "/flat", "compute"
        );
        Ok(report)
    }

    pub(crate) fn add(
        &mut self,
        load: &Load<'_>,
        mover: MoverKind,
        direction: usize,
        flat_gbps: f64,
        cell: &Cell,
    ) -> Result<(), String> {
        let (kind, dir, mover_name) = (load.kind.name(), ["H2D", "D2H"][direction], mover.to_string());
        let ratio = cell.gbps / flat_gbps;
        let moved = format!("{:6.1} {ratio:6.3}", cell.gbps);
        let (layout, bytes, gbps) = (self.layout, self.bytes, cell.gbps);
        let (starved, dry) = (cell.compute_starved, cell.mover_starved);
        let Some(s) = cell.slowdown else {
            println!("{kind:<9} {dir} {mover_name:<17} | {:>20} | {moved} | {:>22}| {dry:>8}", "", "");
            return self.row(&format!(
                "{kind},{layout},{dir},{mover_name},{bytes},,,,,,,,,{gbps:.2},{flat_gbps:.2},{ratio:.4},,,{dry}"
            ));
        };
        let doubtful = is_doubtful(starved, cell.chunks);
        self.doubtful += usize::from(doubtful);
        let (rate, unit) = load.rate(cell.iteration_ms);
        let (base_rate, _) = load.rate(cell.base_ms);
        if mover == MoverKind::Flat {
            self.flat = s.mean;
        } else if load.kind != LoadKind::Stall && !doubtful && reaches(s.mean, self.flat, ratio) {
            self.reached.push(format!("{kind} {dir} {mover_name}: {:.3} at {gbps:.1}", s.mean));
        }
        println!(
            "{kind:<9} {dir} {mover_name:<17} | {:6.3} {:6.3} {:6.2} | {moved} | {rate:7.2} {unit:<7} {base_rate:6.2}| {starved:>3} {dry:>4}{}",
            s.mean,
            s.median,
            s.p99,
            if doubtful { " ?" } else { "" }
        );
        self.row(&format!(
            "{kind},{layout},{dir},{mover_name},{bytes},{:.4},{:.4},{:.4},{:.3},{:.3},{:.4},{rate:.3},{unit},{gbps:.2},\
             {flat_gbps:.2},{ratio:.4},{},{starved},{dry}",
            s.mean,
            s.median,
            s.p99,
            cell.iteration_ms * 1e3,
            cell.base_ms * 1e3,
            s.drift,
            cell.chunks
        ))
    }

    /// Names what is good enough.
    pub(crate) fn close(&self) {
        let (slower, share) = TARGET;
        println!("\nat most {slower} slower than beside the flat copy, at {share} of its rate or more:");
        match self.reached.is_empty() {
            true => println!("  nothing"),
            false => self.reached.iter().for_each(|line| println!("  {line}")),
        }
        if self.doubtful > 0 {
            println!(
                "{} rows with a question mark: the host did not keep the compute's stream filled, so that some of \
                 the slowdown is the host's",
                self.doubtful
            );
        }
    }

    /// Written at once: what a run has measured is kept if it ends early.
    fn row(&mut self, row: &str) -> Result<(), String> {
        match &mut self.csv {
            Some((path, file)) => writeln!(file, "{row}").map_err(|error| format!("{path}: {error}")),
            None => Ok(()),
        }
    }
}
