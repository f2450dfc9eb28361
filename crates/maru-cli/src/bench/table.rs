//! The numbers for people.

use crate::bench::{Results, Row};
use crate::output::{Line, human_bytes};

pub(super) fn lines(results: &Results) -> Vec<Line> {
    let mut out = Vec::new();
    let mut last = None;
    for row in &results.rows {
        let case = (&row.profile, row.layout, &row.device, row.tokens);
        if last != Some(case) {
            if last.is_some() {
                out.push(Line::plain(""));
            }
            last = Some(case);
            out.push(Line::Title(format!(
                "{} {} on {}: {} tokens, {}",
                row.profile,
                row.layout,
                row.device,
                row.tokens,
                human_bytes(row.bytes)
            )));
            out.push(Line::plain(format!(
                "  {:<8} {:<24} {:>10} {:>9} {:>9} {:>7} {:>7}",
                "", "mover", "median", "GB/s", "flat", "ratio", "rounds"
            )));
        }
        out.push(Line::plain(line(row)));
    }
    if !results.rows.is_empty() {
        out.push(Line::plain(""));
        out.push(Line::plain(
            "gather stores, scatter loads; flat: one copy of the same bytes, on the host one memcpy of one thread",
        ));
    }
    for skip in &results.skipped {
        out.push(Line::plain(format!("skipped: {}: {}", skip.what, skip.reason)));
    }
    if results.rows.is_empty() && results.failures.is_empty() {
        out.push(Line::Verdict("Nothing was timed".to_owned(), false));
    }
    for f in &results.failures {
        out.push(Line::Verdict(
            format!(
                "wrong: {} {} on {}, {} tokens, {} by {}: {}",
                f.profile, f.layout, f.device, f.tokens, f.direction, f.mover, f.what
            ),
            false,
        ));
    }
    out
}

fn line(row: &Row) -> String {
    let how = match row.threads {
        Some(threads) if threads > 1 => format!("{} ({threads})", row.mover),
        _ if row.mover.ends_with(row.strategy) || row.strategy == "host" => row.mover.clone(),
        _ => format!("{} ({})", row.mover, row.strategy),
    };
    format!(
        "  {:<8} {how:<24} {:>10} {:>9.2} {:>9.2} {:>7.3} {:>7}",
        row.direction,
        duration(row.seconds),
        row.gbps,
        row.flat_gbps,
        row.ratio,
        row.rounds
    )
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}
