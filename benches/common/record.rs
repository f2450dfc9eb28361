//! A CSV file whose rows are in it as soon as they are measured, so that a run that is cut off keeps them, and
//! progress for who waits.

use std::fmt::{Arguments, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

pub(crate) struct Record {
    file: Option<(String, File)>,
    begun: Instant,
}

impl Record {
    /// Opens the file, if one is wanted, before anything is measured. Lines with `#` say what made it: the
    /// device and the command.
    pub(crate) fn create(path: Option<String>, device: Option<&str>, head: &str) -> Result<Record, String> {
        let file = match path {
            Some(path) => match File::create(&path) {
                Ok(file) => Some((path, file)),
                Err(error) => return Err(format!("{path}: {error}")),
            },
            None => None,
        };
        let mut record = Record { file, begun: Instant::now() };
        if let Some(device) = device {
            record.row(format_args!("# device: {device}"))?;
        }
        record.row(format_args!("# command: {}", command(std::env::args())))?;
        record.row(format_args!("{head}"))?;
        Ok(record)
    }

    /// Writes one row, in one call to the system.
    pub(crate) fn row(&mut self, row: Arguments<'_>) -> Result<(), String> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let mut line = String::new();
        // Writing into a String cannot fail.
        let _ = writeln!(line, "{row}");
        file.write_all(line.as_bytes()).map_err(|error| format!("{path}: {error}"))
    }

    /// Says on standard error what is measured next.
    pub(crate) fn progress(&self, what: Arguments<'_>) {
        eprintln!("[{:6.1} s] {what}", self.begun.elapsed().as_secs_f64());
    }
}

/// The program's name and its arguments, without where it lies, the hash that cargo adds and what cargo passes.
fn command(mut args: impl Iterator<Item = String>) -> String {
    let program = args.next().unwrap_or_default();
    let name = Path::new(&program).file_name().map(|name| name.to_string_lossy().into_owned());
    let name = name.unwrap_or_default();
    let bare = match name.rsplit_once('-') {
        Some((bare, hash)) if hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit()) => bare,
        _ => &name,
    };
    std::iter::once(bare.to_owned()).chain(args.filter(|arg| arg != "--bench")).collect::<Vec<_>>().join(" ")
}
