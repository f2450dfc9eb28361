//! Every mover that can be had here, and why the others cannot.

use maru::Config;
use maru::transfer::config::{BackendChoice, DeviceChoice, StrategyChoice};
use maru::transfer::{Place, TransferEngine, TransferError};
use serde::Serialize;

use crate::error::CliError;

/// A mover by name: a backend with a strategy or a number of threads.
#[derive(Debug, Clone)]
pub(crate) struct Mover {
    /// Such as `native/direct`.
    pub(crate) name: String,
    pub(crate) engine: TransferEngine,
    /// What its transfers must report; a silent fallback to another one is a failure.
    pub(crate) backend: &'static str,
    pub(crate) strategy: &'static str,
    /// Threads of a host mover.
    pub(crate) threads: Option<usize>,
}

/// All that share a place.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) place: Place,
    pub(crate) movers: Vec<Mover>,
}

/// Something that could not be tried.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Skipped {
    pub(crate) what: String,
    pub(crate) reason: String,
}

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// `None`: the host and every GPU.
    pub(crate) device: Option<DeviceChoice>,
    /// `Auto`: every one.
    pub(crate) backend: BackendChoice,
    /// Also the native backend's own choice of strategy, which reports another one from case to case.
    pub(crate) own_choice: bool,
}

impl Wanted {
    pub(crate) fn parse(device: Option<&str>, backend: Option<&str>) -> Result<Self, CliError> {
        let option = |name: &str, e: &dyn std::error::Error| CliError::invalid(format!("{name}: {e}"));
        let device = match device {
            None => None,
            Some(word) => match word.parse().map_err(|e| option("--device", &e))? {
                DeviceChoice::Auto => None,
                device => Some(device),
            },
        };
        let backend =
            backend.map_or(Ok(BackendChoice::Auto), str::parse).map_err(|e| option("--backend", &e))?;
        if (device, backend) == (Some(DeviceChoice::Host), BackendChoice::Native) {
            return Err(CliError::invalid("the native backend moves GPU memory; use --device cuda:N"));
        }
        Ok(Wanted { device, backend, own_choice: false })
    }
}

/// An engine, or why there is none: of a GPU that was asked for by number, in words about that GPU.
pub(crate) fn open(config: &Config) -> Result<TransferEngine, CliError> {
    let error = match TransferEngine::open(config) {
        Ok(engine) => return Ok(engine),
        Err(error) => error,
    };
    let (DeviceChoice::Cuda(gpu), TransferError::NotAvailable { what, reason }) =
        (config.transfer.device, &error)
    else {
        return Err(error.into());
    };
    let gpus = maru::kernel::device_count().ok().and_then(|count| u32::try_from(count).ok());
    let reason = match gpus.filter(|count| *count <= gpu) {
        Some(0) => "the driver shows no GPU".to_owned(),
        Some(1) => "the only GPU is cuda:0".to_owned(),
        Some(count) => format!("the GPUs are cuda:0 to cuda:{}", count - 1),
        None => reason.clone(),
    };
    // Under `auto` the backend that was tried last would stand for all.
    let auto = config.transfer.backend == BackendChoice::Auto;
    let what =
        if auto || gpus.is_some_and(|count| count <= gpu) { format!("cuda:{gpu}") } else { what.clone() };
    Err(CliError::Transfer(TransferError::NotAvailable { what, reason }))
}

/// The movers of every place that is wanted; what cannot run is added to `skipped`, unless it was asked for by name.
pub(crate) fn find(
    wanted: Wanted,
    base: &Config,
    skipped: &mut Vec<Skipped>,
) -> Result<Vec<Group>, CliError> {
    let mut groups = Vec::new();
    let host =
        !matches!(wanted.device, Some(DeviceChoice::Cuda(_))) && wanted.backend != BackendChoice::Native;
    if host {
        groups.push(host_group(base)?);
    }
    let gpus: Vec<u32> = match wanted.device {
        Some(DeviceChoice::Cuda(n)) => vec![n],
        None => match maru::kernel::device_count() {
            Ok(count) => (0..u32::try_from(count).unwrap_or(0)).collect(),
            Err(error) => {
                skipped.push(Skipped { what: "GPUs".to_owned(), reason: error.to_string() });
                Vec::new()
            }
        },
        Some(_) => Vec::new(),
    };
    for gpu in gpus {
        let group = gpu_group(gpu, wanted, base, skipped);
        if group.movers.is_empty() && wanted.device.is_some() {
            // It was asked for by name, so it is an error and not something left out.
            let mut config = base.clone();
            (config.transfer.device, config.transfer.backend) = (DeviceChoice::Cuda(gpu), wanted.backend);
            open(&config)?;
        }
        if !group.movers.is_empty() {
            groups.push(group);
        }
    }
    if groups.is_empty() {
        let reasons: Vec<String> = skipped.iter().map(|s| format!("{}: {}", s.what, s.reason)).collect();
        return Err(CliError::Transfer(TransferError::NotAvailable {
            what: format!("the {} backend", wanted.backend),
            reason: reasons.join("; "),
        }));
    }
    Ok(groups)
}

fn host_group(base: &Config) -> Result<Group, CliError> {
    let most = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut movers = Vec::new();
    for threads in [1, 0] {
        let mut config = base.clone();
        config.transfer.device = DeviceChoice::Host;
        config.transfer.backend = BackendChoice::Fallback;
        config.transfer.host_threads = threads;
        let engine = TransferEngine::open(&config)?;
        let (name, threads) = match threads {
            0 => ("fallback/threads".to_owned(), most),
            n => (format!("fallback/{n}"), 1),
        };
        movers.push(Mover { name, engine, backend: "fallback", strategy: "host", threads: Some(threads) });
    }
    Ok(Group { place: Place::Host, movers })
}

fn gpu_group(gpu: u32, wanted: Wanted, base: &Config, skipped: &mut Vec<Skipped>) -> Group {
    use BackendChoice::{Fallback, Native};
    let kinds = [
        ("native/direct", Native, StrategyChoice::Direct, "direct"),
        ("native/staged", Native, StrategyChoice::Staged, "staged"),
        ("native/auto", Native, StrategyChoice::Auto, "auto"),
        ("fallback/copy_engine", Fallback, StrategyChoice::Auto, "copy_engine"),
    ];
    let mut movers = Vec::new();
    for (name, backend, strategy, reported) in kinds {
        let asked = wanted.backend == BackendChoice::Auto || wanted.backend == backend;
        if !asked || reported == "auto" && !wanted.own_choice {
            continue;
        }
        let mut config = base.clone();
        config.transfer.device = DeviceChoice::Cuda(gpu);
        config.transfer.backend = backend;
        config.transfer.strategy = strategy;
        match TransferEngine::open(&config) {
            Ok(engine) => movers.push(Mover {
                name: name.to_owned(),
                engine,
                backend: backend.as_str(),
                strategy: reported,
                threads: None,
            }),
            Err(error) => {
                skipped.push(Skipped { what: format!("cuda:{gpu} {name}"), reason: error.to_string() });
            }
        }
    }
    Group { place: Place::Cuda(gpu), movers }
}
