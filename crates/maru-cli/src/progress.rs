//! A bar on stderr for work that takes longer than a second; nothing where stderr is no terminal.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    started: Instant,
    shown: bool,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::hidden();
        if let Ok(style) = ProgressStyle::with_template("{msg:<32} {bar:30} {percent:>3}%") {
            bar.set_style(style);
        }
        Progress { bar, state: Mutex::new(State { started: Instant::now(), shown: false }) }
    }

    /// What `message` says is at `done` of `total`.
    pub(crate) fn show(&self, message: String, done: u64, total: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.shown && state.started.elapsed() > PATIENCE {
            state.shown = true;
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        drop(state);
        self.bar.set_length(total.max(1));
        self.bar.set_position(done);
        self.bar.set_message(message);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
