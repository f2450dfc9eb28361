//! The numbers as comma-separated values.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::bench::Row;
use crate::error::CliError;

const HEAD: &str = "profile,layout,device,tokens,bytes,direction,mover,backend,strategy,threads,rounds,seconds,gbps,\
                    flat_seconds,flat_gbps,ratio";

/// A file that has every row as soon as it is measured: a run that is cut off keeps what it has.
#[derive(Debug)]
pub(super) struct Csv {
    path: PathBuf,
    file: File,
    written: usize,
}

impl Csv {
    pub(super) fn create(path: &Path) -> Result<Csv, CliError> {
        let failed = |e| CliError::io(format!("writing {}", path.display()), e);
        let mut file = File::create(path).map_err(failed)?;
        file.write_all(format!("{HEAD}\n").as_bytes()).map_err(failed)?;
        Ok(Csv { path: path.to_owned(), file, written: 0 })
    }

    /// Adds those of all rows so far that are not there yet.
    pub(super) fn update(&mut self, rows: &[Row]) -> Result<(), CliError> {
        let text = text(rows.get(self.written..).unwrap_or_default());
        let written = self.file.write_all(text.as_bytes());
        written.map_err(|e| CliError::io(format!("writing {}", self.path.display()), e))?;
        self.written = rows.len();
        Ok(())
    }
}

fn text(rows: &[Row]) -> String {
    let mut text = String::new();
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
    #[test]
    fn rows_are_in_the_file_as_they_come() {
        let row = Row {
            profile: "p".into(),
            layout: "mla",
            device: "host".into(),
            tokens: 16,
            bytes: 1024,
            direction: "gather",
            mover: "m".into(),
            backend: "fallback",
            strategy: "host",
            threads: Some(2),
            rounds: 5,
            seconds: 1e-6,
            gbps: 1.024,
            flat_seconds: 1e-6,
            flat_gbps: 1.024,
            ratio: 1.0,
        };
        let path = std::env::temp_dir().join(format!("maru-csv-{}.csv", std::process::id()));
        let mut csv = Csv::create(&path).unwrap();
        let lines = || std::fs::read_to_string(&path).unwrap().lines().count();
        assert_eq!(lines(), 1);
        let mut rows = vec![row.clone()];
        csv.update(&rows).unwrap();
        assert_eq!(lines(), 2);
        rows.extend([row.clone(), row]);
        csv.update(&rows).unwrap();
        csv.update(&rows).unwrap();
        assert_eq!(lines(), 4);
        std::fs::remove_file(path).unwrap();
    }
}
