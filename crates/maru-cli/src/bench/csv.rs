//! The numbers as comma-separated values.

use std::fmt::Write as _;
use std::path::Path;

use crate::bench::Row;
use crate::error::CliError;

const HEAD: &str = "profile,layout,device,tokens,bytes,direction,mover,backend,strategy,threads,rounds,seconds,gbps,\
                    flat_seconds,flat_gbps,ratio";

pub(super) fn write(path: &Path, rows: &[Row]) -> Result<(), CliError> {
    let text = text(rows);
    std::fs::write(path, text).map_err(|e| CliError::io(format!("writing {}", path.display()), e))
}

fn text(rows: &[Row]) -> String {
    let mut text = format!("{HEAD}\n");
    for r in rows {
        // Writing into a String cannot fail.
        let _ = writeln!(
            text,
            "{},{},{},{},{},{},{},{},{},{},{},{:.9},{:.4},{:.9},{:.4},{:.4}",
            field(&r.profile),
            r.layout,
            r.device,
            r.tokens,
            r.bytes,
            r.direction,
            field(&r.mover),
            r.backend,
            r.strategy,
            r.threads.map_or_else(String::new, |n| n.to_string()),
            r.rounds,
            r.seconds,
            r.gbps,
            r.flat_seconds,
            r.flat_gbps,
            r.ratio
        );
    }
    text
}

/// Names come from files too: quoted where they need it.
fn field(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        return format!("\"{}\"", text.replace('"', "\"\""));
    }
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_where_they_must_be() {
        assert_eq!(field("llama-3.1-8b"), "llama-3.1-8b");
        assert_eq!(field("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
