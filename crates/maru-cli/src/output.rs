//! One place for text or JSON, colours, logging and exit codes.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use serde_json::{Value, json};
use tracing_subscriber::EnvFilter;

use crate::error::CliError;

/// What a command has to say when it ran to its end, be the answer good or bad.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The object that `--json` prints.
    pub(crate) json: Value,
    /// The lines for a human.
    pub(crate) human: Vec<Line>,
    /// Whether the answer is a good one: exit 0, else 1.
    pub(crate) success: bool,
}

/// A line of human output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Line {
    /// As it is.
    Plain(String),
    /// Stands out.
    Title(String),
    /// A question answered well or badly.
    Verdict(String, bool),
}

impl Line {
    pub(crate) fn plain(text: impl Into<String>) -> Self {
        Line::Plain(text.into())
    }

    fn render(&self, colour: bool) -> String {
        match (self, colour) {
            (Line::Plain(text), _) => text.clone(),
            (Line::Title(text) | Line::Verdict(text, _), false) => text.clone(),
            (Line::Title(text), true) => format!("\x1b[1m{text}\x1b[0m"),
            (Line::Verdict(text, true), true) => format!("\x1b[32m{text}\x1b[0m"),
            (Line::Verdict(text, false), true) => format!("\x1b[31m{text}\x1b[0m"),
        }
    }
}

/// How this run talks.
#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Output { json }
    }

    pub(crate) fn json(&self) -> bool {
        self.json
    }

    /// Prints the end of the run and says how to exit.
    pub(crate) fn finish(&self, result: Result<Outcome, CliError>) -> ExitCode {
        let (printed, code) = match result {
            Ok(outcome) => (self.print(&outcome), u8::from(!outcome.success)),
            Err(error) => (self.print_error(&error), error.exit_code()),
        };
        match printed {
            Ok(()) => ExitCode::from(code),
            // Nobody reads stdout any more (a closed pipe, a full disk): the answer did not arrive.
            Err(error) => {
                let _ = writeln!(io::stderr(), "error: writing the answer: {error}");
                ExitCode::from(code.max(1))
            }
        }
    }

    fn print(&self, outcome: &Outcome) -> io::Result<()> {
        let text = match self.json {
            true => format!("{}\n", outcome.json),
            false => {
                let colour = colours(&io::stdout());
                outcome.human.iter().map(|line| line.render(colour) + "\n").collect()
            }
        };
        write_all(&text)
    }

    /// Prints an error the way it is wanted.
    pub(crate) fn print_error(&self, error: &CliError) -> io::Result<()> {
        if self.json {
            let object = json!({"error": {"kind": error.kind(), "message": error.to_string()}});
            return write_all(&format!("{object}\n"));
        }
        let mark = if colours(&io::stderr()) { "\x1b[1;31merror:\x1b[0m" } else { "error:" };
        // Without stderr there is nobody to tell; the exit code speaks.
        let _ = writeln!(io::stderr(), "{mark} {error}");
        Ok(())
    }
}

fn write_all(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Colours only on a terminal that is not told otherwise.
fn colours(stream: &impl IsTerminal) -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    stream.is_terminal() && !refused
}

/// Logs to stderr: warnings, or what RUST_LOG asks for.
pub(crate) fn init_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let logger = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_target(false);
    // Only a second call could fail, and there is none.
    let _ = logger.with_ansi(colours(&io::stderr())).try_init();
}

/// Bytes for people.
pub(crate) fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} bytes");
    }
    let (mut value, mut unit) = (bytes as f64 / 1024.0, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_coloured_only_when_asked() {
        let line = Line::Verdict("Cache Hit: Yes".into(), true);
        assert_eq!(line.render(false), "Cache Hit: Yes");
        assert_eq!(line.render(true), "\x1b[32mCache Hit: Yes\x1b[0m");
        assert!(Line::Verdict("x".into(), false).render(true).starts_with("\x1b[31m"));
    }

    #[test]
    fn bytes_for_people() {
        assert_eq!(human_bytes(0), "0 bytes");
        assert_eq!(human_bytes(1023), "1023 bytes");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(128 << 20), "128.0 MiB");
        assert_eq!(human_bytes(u64::MAX), "16.0 EiB");
    }
}
