//! The table for people.

use crate::layouts::Layout;
use crate::movers::Skipped;
use crate::output::Line;
use crate::verify::{Column, Failure};

/// Failures that are printed in words; the others are counted in the table, and all of them are in the JSON.
const MOST: usize = 20;

/// Of a column: as wide as the longest name of a mover.
const WIDTH: usize = 27;

pub(super) fn lines(
    layouts: &[Layout],
    columns: &[Column],
    skipped: &[Skipped],
    failures: &[Failure],
    (passed, failed): (u64, u64),
) -> Vec<Line> {
    let names: Vec<String> = columns.iter().map(|c| format!("{} {}", c.device, c.mover)).collect();
    let mut head = format!("{:<20}", "layout");
    names.iter().for_each(|name| head.push_str(&format!("  {name:>WIDTH$}")));
    let mut out = vec![Line::Title(head)];
    for (i, layout) in layouts.iter().enumerate() {
        let mut line = format!("{:<20}", layout.name);
        let mut good = true;
        for column in columns {
            let tally = column.tallies.get(i).copied().unwrap_or_default();
            good &= tally.failed == 0;
            let cell = match (tally.passed, tally.failed) {
                (0, 0) => "-".to_owned(),
                (passed, 0) => format!("ok {passed}"),
                (passed, failed) => format!("FAIL {failed} of {}", passed + failed),
            };
            line.push_str(&format!("  {cell:>WIDTH$}"));
        }
        out.push(if good { Line::plain(line) } else { Line::Verdict(line, false) });
    }
    out.push(Line::plain(""));
    for skip in skipped {
        out.push(Line::plain(format!("skipped: {}: {}", skip.what, skip.reason)));
    }
    for f in failures.iter().take(MOST) {
        out.push(Line::Verdict(
            format!("{} {} {} {} {}: {}", f.device, f.mover, f.layout, f.size, f.direction, f.what),
            false,
        ));
    }
    if failures.len() > MOST {
        out.push(Line::plain(format!("and {} more (--json lists all)", failures.len() - MOST)));
    }
    out.push(match failed {
        0 if passed > 0 => Line::Verdict(format!("Verified: {passed} trials, no byte differs"), true),
        0 => Line::Verdict("Nothing was tried".to_owned(), false),
        _ => Line::Verdict(format!("Not verified: {failed} of {} trials failed", passed + failed), false),
    });
    out
}
