//! `maru bench`: backends and strategies beside one flat copy of the same bytes, in one run.

mod case;
mod csv;
mod plot;
mod table;

use maru::Config;
use serde::Serialize;
use serde_json::json;

use crate::args::BenchArgs;
use crate::bench::case::Case;
use crate::bench::csv::Csv;
use crate::error::CliError;
use crate::layouts::{self, Layout};
use crate::movers::{self, Skipped, Wanted};
use crate::output::Outcome;
use crate::p2p::job::read_profile;
use crate::progress::Progress;

/// What is timed unless a profile is named.
const DEFAULT_PROFILE: &str = "llama-3.1-8b";

/// One mover's time in one case and direction.
#[derive(Debug, Clone, Serialize)]
struct Row {
    profile: String,
    layout: &'static str,
    device: String,
    tokens: u64,
    bytes: u64,
    /// `gather` (store) or `scatter` (load).
    direction: &'static str,
    mover: String,
    backend: &'static str,
    strategy: &'static str,
    /// Threads of a host mover.
    threads: Option<usize>,
    rounds: u64,
    seconds: f64,
    gbps: f64,
    flat_seconds: f64,
    flat_gbps: f64,
    /// Throughput over that of the flat copy.
    ratio: f64,
}

/// A transfer that was wrong.
#[derive(Debug, Clone, Serialize)]
struct Failure {
    profile: String,
    layout: &'static str,
    device: String,
    tokens: u64,
    direction: &'static str,
    mover: String,
    what: String,
}

/// All that was measured.
#[derive(Debug, Default)]
struct Results {
    rows: Vec<Row>,
    failures: Vec<Failure>,
    skipped: Vec<Skipped>,
}

/// Why a profile is not timed in a layout.
fn misfit(mla: bool, layout: &Layout) -> &'static str {
    match (layout.opaque_blocks(), mla) {
        (true, _) => "its slots are whole blocks, not tokens; `maru verify` covers it",
        (_, true) => "the profile has one latent row per token (MLA), the layout has K and V of heads",
        (_, false) => {
            "the layout has one latent row per token (MLA); a profile such as deepseek-v3-mla has, too"
        }
    }
}

pub(crate) fn run(args: &BenchArgs) -> Result<Outcome, CliError> {
    let names = match args.profile.as_slice() {
        [] => vec![DEFAULT_PROFILE.to_owned()],
        names => names.to_vec(),
    };
    let profiles = names.iter().map(|name| read_profile(name)).collect::<Result<Vec<_>, _>>()?;
    let layouts = layouts::select(&args.layout, |layout| layout.usual)?;
    let mut wanted = Wanted::parse(args.device.as_deref(), args.backend.as_deref())?;
    wanted.own_choice = true;
    let config = Config::default();
    let mut results = Results::default();
    let groups = movers::find(wanted, &config, &mut results.skipped)?;
    if let Some(path) = args.plot.as_ref().filter(|path| path.extension().is_none_or(|e| e != "svg")) {
        let path = path.display();
        return Err(CliError::invalid(format!(
            "--plot draws SVG, so the file's name ends with .svg; found {path}"
        )));
    }
    // Before the work, so that it is not lost to a misspelt path.
    let mut csv = args.csv.as_deref().map(Csv::create).transpose()?;
    if let Some(path) = &args.plot {
        std::fs::write(path, "").map_err(|e| CliError::io(format!("writing {}", path.display()), e))?;
    }

    let mut cases = Vec::new();
    for profile in &profiles {
        for layout in &layouts {
            // One that was named and does not fit is said to be left out; of the usual ones nobody asked for it.
            let fits = layout.mla == profile.mla && !layout.opaque_blocks();
            for tokens in args.tokens.iter().filter(|_| fits) {
                cases.extend(groups.iter().map(|group| (profile, layout, *tokens, group)));
            }
            if !fits && !args.layout.is_empty() {
                results.skipped.push(Skipped {
                    what: format!("{} as {}", profile.name, layout.name),
                    reason: misfit(profile.mla, layout).to_owned(),
                });
            }
        }
    }
    let progress = Progress::new();
    for (i, (profile, layout, tokens, group)) in cases.iter().enumerate() {
        progress.show(
            format!("{} {} {tokens} {}", profile.name, layout.name, group.place),
            i as u64,
            cases.len() as u64,
        );
        Case { profile, layout, tokens: *tokens, group, chunk: config.transfer.kv_chunk_tokens.into() }
            .run(args, &mut results)?;
        if let Some(csv) = &mut csv {
            csv.update(&results.rows)?;
        }
    }
    drop(progress);
    if let Some(path) = &args.plot {
        plot::draw(path, &results.rows)?;
    }
    let json = json!({
        "rows": results.rows,
        "failures": results.failures,
        "skipped": results.skipped,
    });
    let success = results.failures.is_empty() && !results.rows.is_empty();
    Ok(Outcome { json, human: table::lines(&results), success })
}
