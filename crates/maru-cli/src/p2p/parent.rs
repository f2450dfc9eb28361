//! Both sides as two child processes: started, watched, and ended whatever happens.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::error::CliError;
use crate::p2p::job::{Job, Role};
use crate::p2p::protocol::{Event, Loaded, Order, Stored};
use crate::p2p::signals;
use crate::progress::Progress;

/// What reaches the parent.
#[derive(Debug)]
enum Message {
    Event(Role, Event),
    /// Something that is no event.
    Nonsense(Role, String),
    /// The child closed its stdout.
    Ended(Role),
    Signal(i32),
}

/// Runs both sides to their end.
pub(crate) fn run(
    producer: &Job,
    consumer: &Job,
    signals: Receiver<i32>,
) -> Result<(Stored, Loaded), CliError> {
    let (sender, inbox) = channel();
    forward_signals(signals, sender.clone())?;
    let mut watch = Watch { inbox, timeout: producer.timeout(), progress: Progress::new() };

    let mut first = Side::start(producer, &sender)?;
    let stored = watch.wait(&mut [&mut first], |event| match event {
        Event::Stored(stored) => Some(stored),
        _ => None,
    })?;
    let mut second = Side::start(consumer, &sender)?;
    let loaded = watch.wait(&mut [&mut second, &mut first], |event| match event {
        Event::Loaded(loaded) => Some(loaded),
        _ => None,
    })?;
    for side in [&mut second, &mut first] {
        side.finish(watch.timeout)?;
    }
    Ok((stored, loaded))
}

fn forward_signals(signals: Receiver<i32>, sender: Sender<Message>) -> Result<(), CliError> {
    let forward = move || {
        while let Ok(signal) = signals.recv() {
            if sender.send(Message::Signal(signal)).is_err() {
                return;
            }
        }
    };
    spawn("signals", forward)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), CliError> {
    let builder = std::thread::Builder::new().name(name.to_owned());
    builder.spawn(work).map(drop).map_err(|e| CliError::io("starting a thread", e))
}

/// Waits for events, and for everything that must not be waited through.
#[derive(Debug)]
struct Watch {
    inbox: Receiver<Message>,
    timeout: Duration,
    progress: Progress,
}

impl Watch {
    /// Waits until an event is the one wanted. `sides` are those alive, the one that is waited for first.
    fn wait<T>(
        &mut self,
        sides: &mut [&mut Side],
        wanted: impl Fn(Event) -> Option<T>,
    ) -> Result<T, CliError> {
        let mut doing = "starting".to_owned();
        let mut heard = Instant::now();
        loop {
            let left = self.timeout.saturating_sub(heard.elapsed());
            let message = match self.inbox.recv_timeout(left) {
                Ok(message) => message,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    let who = sides.first().map_or("process", |s| s.name());
                    return Err(CliError::Timeout(format!(
                        "the {who} said nothing for {} s ({doing}); both processes were stopped",
                        self.timeout.as_secs()
                    )));
                }
            };
            match message {
                Message::Signal(number) => return Err(signals::interrupted(number)),
                Message::Event(role, Event::Failed { kind, message, code }) => {
                    return Err(CliError::Child { who: name_of(role), kind, message, code });
                }
                Message::Event(role, Event::Progress { phase, done, total }) => {
                    doing = format!("{}, {done} of {total}", phase.words());
                    if sides.first().is_some_and(|s| s.role == role) {
                        heard = Instant::now();
                    }
                    let doing = format!("{}: {}", name_of(role), phase.words());
                    self.progress.show(doing, done, total);
                }
                Message::Event(_, event) => {
                    if let Some(value) = wanted(event) {
                        return Ok(value);
                    }
                }
                Message::Nonsense(role, line) => {
                    return Err(CliError::Process(format!(
                        "the {} said something that is no event: {line:?}",
                        name_of(role)
                    )));
                }
                Message::Ended(role) => {
                    let status = sides.iter_mut().find(|s| s.role == role).and_then(|s| s.ended());
                    return Err(CliError::Process(format!(
                        "the {} ended before the work was done: {} ({doing})",
                        name_of(role),
                        describe(status)
                    )));
                }
            }
        }
    }
}

fn name_of(role: Role) -> &'static str {
    match role {
        Role::Producer => "producer",
        Role::Consumer => "consumer",
    }
}

fn describe(status: Option<ExitStatus>) -> String {
    let Some(status) = status else {
        return "it does not say how".to_owned();
    };
    match (status.signal(), status.code()) {
        (Some(9), _) => "it was killed by SIGKILL (by hand, or for want of memory)".to_owned(),
        (Some(n), _) => format!("it was ended by signal {n}"),
        (None, Some(code)) => format!("it exited with code {code}"),
        (None, None) => format!("{status}"),
    }
}

/// A child process. Dropping it ends it.
#[derive(Debug)]
struct Side {
    role: Role,
    child: Child,
    orders: Option<ChildStdin>,
}

impl Side {
    fn start(job: &Job, sender: &Sender<Message>) -> Result<Self, CliError> {
        let role = job.role;
        let exe = std::env::current_exe().map_err(|e| CliError::io("finding this program's own file", e))?;
        let mut command = Command::new(exe);
        command.arg("p2p-child").stdin(Stdio::piped()).stdout(Stdio::piped());
        // A Ctrl-C at the terminal reaches the parent alone, which then ends both in order.
        command.process_group(0);
        let mut child =
            command.spawn().map_err(|e| CliError::io(format!("starting the {}", name_of(role)), e))?;
        let (orders, events) = (child.stdin.take(), child.stdout.take());
        let mut side = Side { role, child, orders };
        let events = events.ok_or_else(|| CliError::Process("the child has no stdout".to_owned()))?;
        let sender = sender.clone();
        spawn("events", move || {
            for line in BufReader::new(events).lines() {
                let Ok(line) = line else { break };
                let message = match serde_json::from_str(&line) {
                    Ok(event) => Message::Event(role, event),
                    Err(_) => Message::Nonsense(role, line),
                };
                if sender.send(message).is_err() {
                    return;
                }
            }
            // Nobody listens any more when the parent has its answer.
            let _ = sender.send(Message::Ended(role));
        })?;
        // A child that ended already is reported by its closed stdout, better than by this.
        if let Err(error) = side.order(&Order::Begin { job: Box::new(job.clone()) }) {
            tracing::debug!(%error, role = name_of(role), "the first order did not arrive");
        }
        Ok(side)
    }

    fn name(&self) -> &'static str {
        name_of(self.role)
    }

    fn order(&mut self, order: &Order) -> Result<(), CliError> {
        let failed = |e: std::io::Error| CliError::io("giving orders to a child process", e);
        let mut line = serde_json::to_string(order).map_err(|e| failed(e.into()))?;
        line.push('\n');
        match &mut self.orders {
            Some(orders) => orders.write_all(line.as_bytes()).and_then(|()| orders.flush()).map_err(failed),
            None => Ok(()),
        }
    }

    /// How it ended, given a moment to do so.
    fn ended(&mut self) -> Option<ExitStatus> {
        self.wait_for(Duration::from_secs(2))
    }

    fn wait_for(&mut self, patience: Duration) -> Option<ExitStatus> {
        let begun = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if begun.elapsed() < patience => std::thread::sleep(Duration::from_millis(2)),
                _ => return None,
            }
        }
    }

    /// Lets it tidy up and end.
    fn finish(&mut self, timeout: Duration) -> Result<(), CliError> {
        // If it is gone already its status says more.
        let _ = self.order(&Order::Finish);
        match self.wait_for(timeout) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(CliError::Process(format!(
                "the {} failed while tidying up: {}",
                self.name(),
                describe(Some(status))
            ))),
            None => Err(CliError::Timeout(format!(
                "the {} did not end within {} s and was stopped",
                self.name(),
                timeout.as_secs()
            ))),
        }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Err(error) = self.child.kill() {
            tracing::error!(%error, role = self.name(), "could not end a child process");
        }
        // After SIGKILL this is a matter of the kernel only.
        if let Err(error) = self.child.wait() {
            tracing::error!(%error, role = self.name(), "could not wait for a child process");
        }
    }
}
