//! The library's log, handed to Python's `logging`.
//!
//! A record can be made by a thread that holds one of our locks and not the GIL; taking the GIL there could
//! deadlock with a thread that holds it and waits for the lock. So records are queued here and handed over by
//! the next call that holds the GIL anyway.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// Records kept while nobody fetches them; older ones are dropped first.
const MOST_QUEUED: usize = 256;

static QUEUED: AtomicBool = AtomicBool::new(false);
static QUEUE: Mutex<VecDeque<(Level, String)>> = Mutex::new(VecDeque::new());

/// Sends the library's log to the queue, unless the process has another subscriber for it.
pub(crate) fn install() {
    let subscriber = tracing_subscriber::registry().with(Queue);
    // This module's copy of `tracing` is its own; an error means that it was set up already.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Hands what is queued to `logging.getLogger("maru_kv_ops")`.
pub(crate) fn drain(py: Python<'_>) {
    // A load first: an exchange costs each call what the rest of this does not.
    if !QUEUED.load(Ordering::Acquire) || !QUEUED.swap(false, Ordering::AcqRel) {
        return;
    }
    let records = std::mem::take(&mut *QUEUE.lock().unwrap_or_else(PoisonError::into_inner));
    // An exception of the log's handler is no reason to fail a transfer that was done.
    let sent = || -> PyResult<()> {
        let logger = py.import("logging")?.call_method1("getLogger", ("maru_kv_ops",))?;
        for (level, text) in records {
            logger.call_method1("log", (python_level(level), "%s", text))?;
        }
        Ok(())
    };
    // An exception may be on its way already (from a warning turned into an error): it is put back.
    if let Err(error) = sent() {
        error.write_unraisable(py, None);
    }
}

fn python_level(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        _ => 10,
    }
}

struct Queue;

impl<S: Subscriber> Layer<S> for Queue {
    fn enabled(&self, metadata: &tracing::Metadata<'_>, _: Context<'_, S>) -> bool {
        *metadata.level() <= Level::INFO && metadata.target().starts_with("maru")
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text::default();
        event.record(&mut text);
        let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.len() == MOST_QUEUED {
            queue.pop_front();
        }
        queue.push_back((*event.metadata().level(), text.message + &text.fields));
        QUEUED.store(true, Ordering::Release);
    }
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
