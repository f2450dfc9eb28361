//! `maru p2p`: the main job, end to end.
//!
//! A producer fills a paged cache and publishes every chunk of a prompt in a pool; a consumer that knows only the
//! pool and the prompt finds the chunks by their keys, loads them into blocks of its own choosing and compares
//! every byte.

mod cache;
mod child;
mod consumer;
pub(crate) mod content;
mod image;
pub(crate) mod job;
mod parent;
mod pool;
mod producer;
mod protocol;
mod report;
mod shape;
mod signals;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use maru::Config;
use maru::cxl::DaxDevice;
use maru::transfer::config::{BackendChoice, DeviceChoice};

use crate::args::{P2pArgs, RoleArg};
use crate::error::CliError;
use crate::movers;
use crate::output::{Outcome, Output};
use crate::p2p::job::{Job, Role};
use crate::p2p::pool::OwnFile;
use crate::p2p::producer::Producer;
use crate::p2p::protocol::Reporter;
use crate::p2p::report::Report;

pub(crate) use child::run as run_child;

/// What a single role says when nothing else is asked for.
const FIXED_PROMPT: &str = "maru p2p";

/// The run's settings after arguments and configuration file were put together.
#[derive(Debug)]
struct Setup {
    config: Config,
    pool: Option<PathBuf>,
    offset: u64,
    size: u64,
    prompt: String,
}

pub(crate) fn run(args: &P2pArgs, output: &Output) -> Result<Outcome, CliError> {
    let setup = setup(args)?;
    // Everything that both sides would refuse is refused before anything is made.
    let mut job = job(args, &setup)?;
    let plan = job::Plan::new(&job, 0)?;
    movers::open(&plan.config)?;
    let chunks = plan.chunks.len() as u64;
    let too_large = || CliError::invalid("the pool for so many tokens of this profile is too large");
    let bytes = job::pool_bytes(plan.slab_bytes(), chunks).ok_or_else(too_large)?;
    drop(plan);

    let signals = signals::receive()?;
    match args.role {
        RoleArg::Both => {
            let (device, file) = open_or_make(&mut job, setup.pool.as_deref(), bytes)?;
            let consumer = consumer_job(args, &job, false);
            let done = parent::run(&job, &consumer, signals);
            drop((device, file));
            let (stored, loaded) = done?;
            Ok(Report { job: &job, stored: Some(stored), loaded: Some(loaded) }.outcome())
        }
        RoleArg::Producer => {
            let cleanup = Cleanup::on_signal(signals, output.json())?;
            let (device, file) = open_or_make(&mut job, setup.pool.as_deref(), bytes)?;
            cleanup.remove_on_signal(file.is_some().then(|| device.clone()));
            let producer = Producer::run(&job, &device, &Arc::new(Reporter::to_bar()))?;
            cleanup.remove_on_signal(None);
            if let Some(file) = file {
                file.keep();
            }
            Ok(Report { job: &job, stored: Some(producer.stored.clone()), loaded: None }.outcome())
        }
        RoleArg::Consumer => {
            let _cleanup = Cleanup::on_signal(signals, output.json())?;
            let consumer = consumer_job(args, &job, !args.miss);
            let loaded = consumer::run(&consumer, &Arc::new(Reporter::to_bar()))?;
            Ok(Report { job: &consumer, stored: None, loaded: Some(loaded) }.outcome())
        }
    }
}

/// Puts arguments and configuration together.
fn setup(args: &P2pArgs) -> Result<Setup, CliError> {
    let mut config = match &args.config {
        Some(path) => Config::from_file(path)?,
        None => Config::default(),
    };
    if let Some(backend) = &args.backend {
        config.transfer.backend = backend.parse::<BackendChoice>().map_err(|e| option("--backend", &e))?;
    }
    if let Some(device) = &args.device {
        config.transfer.device = device.parse::<DeviceChoice>().map_err(|e| option("--device", &e))?;
    }
    let config = config.checked()?;
    let (pool, offset, size) = match (&args.pool, config.cxl.pools.first()) {
        (Some(path), _) => (Some(path.clone()), 0, 0),
        (None, Some(pool)) => (Some(pool.path.clone()), pool.offset, pool.size),
        (None, None) => (None, 0, 0),
    };
    let single = args.role != RoleArg::Both;
    if single && pool.is_none() {
        return Err(CliError::invalid(
            "a single --role needs --pool PATH (or a pool in --config): the other side must find it",
        ));
    }
    let fits = match args.role {
        RoleArg::Both => true,
        RoleArg::Producer => !args.miss,
        RoleArg::Consumer => !args.corrupt && !args.force,
    };
    if !fits {
        return Err(CliError::invalid(
            "--miss is for the consumer, --corrupt and --force are for the producer; leave them out on the other side",
        ));
    }
    let prompt = match (&args.prompt, single) {
        (Some(text), _) => text.clone(),
        (None, true) => FIXED_PROMPT.to_owned(),
        // A prompt of this run alone: chunks that an earlier run left behind can never be taken for its own.
        (None, false) => {
            format!("{FIXED_PROMPT} {:016x}{:016x}", content::random_seed(), content::random_seed())
        }
    };
    Ok(Setup { config, pool, offset, size, prompt })
}

fn option(name: &str, error: &dyn std::error::Error) -> CliError {
    CliError::invalid(format!("{name}: {error}"))
}

fn job(args: &P2pArgs, setup: &Setup) -> Result<Job, CliError> {
    let pool = setup.pool.clone().unwrap_or_default();
    if pool.to_str().is_none() {
        return Err(CliError::invalid(format!("--pool {} is not UTF-8 text", pool.display())));
    }
    Ok(Job {
        role: Role::Producer,
        pool,
        offset: setup.offset,
        size: setup.size,
        fresh: false,
        force: args.force,
        profile: args.profile.clone(),
        tokens: args.tokens,
        prompt: setup.prompt.clone(),
        config: setup.config.to_toml()?,
        layout: args.layout,
        corrupt: args.corrupt,
        wait: false,
        timeout_secs: args.timeout,
        pause_ms: args.test_pause,
    })
}

fn consumer_job(args: &P2pArgs, producer: &Job, wait: bool) -> Job {
    let prompt = match args.miss {
        true => format!("{} (another one)", producer.prompt),
        false => producer.prompt.clone(),
    };
    Job { role: Role::Consumer, prompt, wait, fresh: false, force: false, corrupt: false, ..producer.clone() }
}

/// The pool's file or device, opened or made; the file made by this run, if one was.
fn open_or_make(
    job: &mut Job,
    named: Option<&std::path::Path>,
    bytes: u64,
) -> Result<(DaxDevice, Option<OwnFile>), CliError> {
    let (device, made) = match named {
        Some(path) => pool::named_file(path, job.offset, bytes.max(job.size))?,
        None => {
            let (device, path) = pool::own_file(bytes)?;
            job.pool = path;
            (device, true)
        }
    };
    job.fresh = made;
    let file = made.then(|| OwnFile::from(device.clone()));
    Ok((device, file))
}

/// What a signal does to a role that runs in this process: remove the unfinished file, say so, end.
struct Cleanup(Arc<Mutex<Option<DaxDevice>>>);

impl Cleanup {
    fn on_signal(signals: std::sync::mpsc::Receiver<i32>, json: bool) -> Result<Self, CliError> {
        let file = Arc::new(Mutex::new(None::<DaxDevice>));
        let ours = Arc::clone(&file);
        let work = move || {
            let Ok(number) = signals.recv() else { return };
            let mut file = ours.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(device) = file.take() {
                pool::remove(&device);
            }
            let error = signals::interrupted(number);
            // With nobody listening the exit code is all there is to say.
            let _ = Output::new(json).print_error(&error);
            std::process::exit(error.exit_code().into());
        };
        let thread = std::thread::Builder::new().name("interrupt".to_owned()).spawn(work);
        thread.map_err(|e| CliError::io("starting a thread", e))?;
        Ok(Cleanup(file))
    }

    fn remove_on_signal(&self, device: Option<DaxDevice>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = device;
    }
}
