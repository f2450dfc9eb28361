//! Compute in a loop on one stream, transfers in a loop from another thread.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::gpu::Stream;
use crate::loads::Load;
use crate::movers::{Mover, World};
use crate::stats::{Moved, Track};
use crate::timeline::{Event, urgent_stream};

/// Compute is queued this far ahead: longer than any hiccup of the host is likely to be.
const AHEAD_MS: f64 = 15.0;

/// How a mover is kept busy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Feed {
    pub(crate) in_flight: usize,
    /// Batches take turns on as many streams as may be in flight, so that one need not end before the next
    /// begins.
    pub(crate) turns: bool,
}

/// Computes for some time. The device is never left without work, and the host waits for nothing but the
/// chunk that it is ahead of.
pub(crate) fn compute(load: &Load<'_>, origin: &Event, seconds: f64) -> Track {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most some thousand")]
    let depth = (AHEAD_MS / (load.iteration_ms * load.per_chunk as f64)).ceil().clamp(3.0, 64.0) as usize;
    let mut events = vec![Event::new()];
    let mut starved = 0;
    events[0].record(&load.stream);
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < seconds {
        let queued = events.len() - 1;
        if queued >= depth {
            events[queued + 1 - depth].wait();
        }
        if queued > 0 && events[queued].is_over() {
            starved += 1;
        }
        load.chunk();
        let end = Event::new();
        end.record(&load.stream);
        events.push(end);
    }
    load.stream.wait();
    let mut times = events.iter().map(|event| event.since(origin));
    Track { start: times.next().unwrap_or(0.0), ends: times.collect(), starved }
}

/// Runs `body` while a mover moves, from before its beginning to after its end.
pub(crate) fn beside<R>(
    world: &World<'_>,
    mover: &Mover,
    direction: usize,
    feed: Feed,
    origin: &Event,
    body: impl FnOnce() -> R,
) -> (R, Moved) {
    let (moving, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let thread = scope.spawn(|| feed_until(world, mover, direction, feed, &moving, &stop));
        // Also where the body panics: the scope waits for the thread.
        let stopping = SetOnDrop(&stop);
        while !moving.load(Ordering::Acquire) && !thread.is_finished() {
            thread::sleep(Duration::from_micros(100));
        }
        let result = body();
        drop(stopping);
        let (events, starved) = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        let ends = events.iter().map(|event| event.since(origin)).collect();
        (result, Moved { ends, batch_bytes: world.bench.total() as f64, starved })
    })
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Submits batch after batch; returns the end of each.
fn feed_until(
    world: &World<'_>,
    mover: &Mover,
    direction: usize,
    feed: Feed,
    moving: &AtomicBool,
    stop: &AtomicBool,
) -> (Vec<Event>, usize) {
    world.gpu.bind();
    let lanes = if feed.turns { feed.in_flight } else { 1 };
    let streams: Vec<Stream> = (0..lanes).map(|_| urgent_stream()).collect();
    let mut ends: Vec<Event> = Vec::new();
    let mut starved = 0;
    while !stop.load(Ordering::Acquire) {
        if let Some(oldest) = ends.len().checked_sub(feed.in_flight) {
            ends[oldest].wait();
            // One batch is over, more are under way.
            moving.store(true, Ordering::Release);
        }
        if ends.last().is_some_and(Event::is_over) {
            starved += 1;
        }
        let stream = &streams[ends.len() % lanes];
        world.submit(mover, direction, stream);
        let end = Event::new();
        end.record(stream);
        ends.push(end);
    }
    streams.iter().for_each(Stream::wait);
    (ends, starved)
}
