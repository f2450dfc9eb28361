//! Ctrl-C and SIGTERM end a run in order: nothing of it stays behind.

use std::sync::mpsc::{Receiver, channel};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::error::CliError;

/// From here on the signals are messages.
pub(crate) fn receive() -> Result<Receiver<i32>, CliError> {
    let (sender, inbox) = channel();
    let mut signals =
        Signals::new([SIGINT, SIGTERM]).map_err(|e| CliError::io("installing signal handlers", e))?;
    let work = move || {
        for signal in signals.forever() {
            if sender.send(signal).is_err() {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(work);
    thread.map_err(|e| CliError::io("starting a thread", e))?;
    Ok(inbox)
}

/// The error that a signal is.
pub(crate) fn interrupted(number: i32) -> CliError {
    let name = match number {
        SIGINT => "SIGINT (Ctrl-C)",
        SIGTERM => "SIGTERM",
        _ => "a signal",
    };
    CliError::Interrupted { name, signal: u8::try_from(number).unwrap_or(0) }
}
