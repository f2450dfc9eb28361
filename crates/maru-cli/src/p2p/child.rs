//! A child process of `maru p2p`: one side, its orders on stdin.

use std::io::{BufRead as _, Stdin};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use maru::cxl::DaxDevice;

use crate::error::CliError;
use crate::p2p::consumer;
use crate::p2p::job::{Job, Role};
use crate::p2p::pool;
use crate::p2p::producer::Producer;
use crate::p2p::protocol::{Event, Order, Reporter, send};

/// Plays the side that the first line of stdin says and ends the process; what it came to is said in events.
/// Returns only when there is nobody to say it to.
pub(crate) fn run() -> CliError {
    let job = match first_order(&std::io::stdin()) {
        Ok(job) => job,
        Err(error) => return error,
    };
    let Err(error) = play(&job) else {
        std::process::exit(0);
    };
    let (kind, message, code) = (error.kind().to_owned(), error.to_string(), error.exit_code());
    match send(&Event::Failed { kind, message, code }) {
        Ok(()) => std::process::exit(code.into()),
        Err(_) => error,
    }
}

fn first_order(stdin: &Stdin) -> Result<Job, CliError> {
    let mut line = String::new();
    stdin.lock().read_line(&mut line).map_err(|e| CliError::io("reading the first order", e))?;
    match serde_json::from_str(&line) {
        Ok(Order::Begin { job }) => Ok(*job),
        _ => Err(CliError::invalid("this command is started by `maru p2p` and not by hand")),
    }
}

fn play(job: &Job) -> Result<(), CliError> {
    let reporter = Arc::new(Reporter::to_parent());
    match job.role {
        Role::Producer => {
            let device = DaxDevice::open(&job.pool)?;
            let finish = watch_parent(job.fresh.then(|| device.clone()))?;
            let producer = Producer::run(job, &device, &reporter)?;
            send(&Event::Stored(producer.stored.clone()))?;
            // An end of the channel is the end of the process, see below.
            let _ = finish.recv();
            if !job.fresh {
                producer.withdraw()?;
            }
            Ok(())
        }
        Role::Consumer => {
            let finish = watch_parent(None)?;
            let loaded = consumer::run(job, &reporter)?;
            send(&Event::Loaded(loaded))?;
            let _ = finish.recv();
            Ok(())
        }
    }
}

/// Ends this process when the parent dies (its end of the pipe closes without a last order), and removes the
/// run's own file then, for nobody else is left to do it.
fn watch_parent(own: Option<DaxDevice>) -> Result<Receiver<()>, CliError> {
    let (sender, finish) = channel();
    let watch = move || {
        let mut line = String::new();
        let read = std::io::stdin().lock().read_line(&mut line);
        match (read, serde_json::from_str(&line)) {
            (Ok(n), Ok(Order::Finish)) if n > 0 => {
                // The main thread may have failed meanwhile and be on its way out.
                let _ = sender.send(());
            }
            _ => {
                if let Some(device) = &own {
                    pool::remove(device);
                }
                std::process::exit(1);
            }
        }
    };
    let thread = std::thread::Builder::new().name("parent".to_owned()).spawn(watch);
    thread.map_err(|e| CliError::io("starting a thread", e))?;
    Ok(finish)
}
