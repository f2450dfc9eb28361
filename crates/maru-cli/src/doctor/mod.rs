//! `maru doctor`: what this machine has, what will be slow or will not work, and what to do about it.
//!
//! Each part looks at one thing, gives its facts as JSON and adds to the findings. Nothing here fails because
//! something is absent: that is what it is asked to find out.

mod calibration;
mod cuda;
mod dax;
mod host;
mod pci;
mod pools;
mod print;
mod probe;
mod rooms;
pub(crate) mod system;

use std::path::PathBuf;

use maru::Config;
use serde::Serialize;
use serde_json::json;

use crate::args::DoctorArgs;
use crate::error::CliError;
use crate::output::Outcome;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// It does not work.
    Error,
    /// It works, slowly.
    Warning,
    /// Worth knowing.
    Note,
}

/// Something to know, with what to do about it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    pub(crate) what: String,
    pub(crate) remedy: String,
}

/// What was found so far.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Finding>);

impl Findings {
    pub(crate) fn error(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Error, what, remedy);
    }

    pub(crate) fn warning(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Warning, what, remedy);
    }

    pub(crate) fn note(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Note, what, remedy);
    }

    fn add(&mut self, severity: Severity, what: impl Into<String>, remedy: impl Into<String>) {
        self.0.push(Finding { severity, what: what.into(), remedy: remedy.into() });
    }

    /// The worst first, otherwise as they were found.
    fn sorted(mut self) -> Vec<Finding> {
        self.0.sort_by_key(|finding| finding.severity);
        self.0
    }
}

/// Where the kernel's files are; elsewhere in tests.
#[derive(Debug, Clone)]
pub(crate) struct Roots {
    pub(crate) sys: PathBuf,
    pub(crate) dev: PathBuf,
    pub(crate) proc: PathBuf,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<Outcome, CliError> {
    let config = args.config.as_ref().map(Config::from_file).transpose()?;
    let roots = Roots { sys: args.sys.clone(), dev: args.dev.clone(), proc: args.proc.clone() };
    let mut findings = Findings::default();

    let devices = dax::look(&roots, &mut findings);
    let rooms = rooms::look(&roots, &mut findings);
    let pools = config.as_ref().map_or_else(Vec::new, |c| pools::look(&c.cxl, &roots, &mut findings));
    let host = host::look(&roots, config.as_ref(), &devices, &mut findings);
    let cuda = cuda::look(&roots, !args.no_probe, config.as_ref(), &mut findings);
    let calibration = calibration::look(&cuda, !args.no_probe, config.as_ref(), &mut findings);
    distances(&devices, &cuda, &host, &mut findings);
    locked_memory(&host, &cuda, &mut findings);

    let findings = findings.sorted();
    let human = print::lines(&devices, &pools, &rooms, &host, &cuda, &calibration, &findings);
    let json = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "dax": devices,
        "pools": pools,
        "rooms": rooms,
        "host": host,
        "cuda": cuda,
        "calibration": calibration,
        "findings": findings,
    });
    Ok(Outcome { json, human, success: true })
}

/// GPU and memory on different sides of the machine.
fn distances(devices: &[dax::Device], cuda: &cuda::Cuda, host: &host::Host, findings: &mut Findings) {
    for gpu in &cuda.gpus {
        let Some(near) = gpu.numa_node() else { continue };
        for device in devices {
            // The memory's own node if the kernel gives it one with distances, else the one it hangs off.
            let ends = [device.target_node, device.numa_node];
            let Some(far) = ends.into_iter().flatten().find(|n| host.distance(near, *n).is_some()) else {
                continue;
            };
            let others = ends.contains(&Some(near));
            let (Some(distance), Some(local)) = (host.distance(near, far), host.distance(near, near)) else {
                continue;
            };
            if device.numa_node.is_some_and(|n| n != near) && !others {
                findings.warning(
                    format!(
                        "cuda:{} is at NUMA node {near} and {} at node {far} (distance {distance}, local {local}): \
                         transfers cross the link between sockets",
                        gpu.device, device.name
                    ),
                    "serve this pool with a GPU of its own socket, or plug the expander into the GPU's socket",
                );
            }
        }
    }
}

/// A limit that may be the reason why registration fails.
fn locked_memory(host: &host::Host, cuda: &cuda::Cuda, findings: &mut Findings) {
    let Some(limit) = host.memlock_soft_bytes else { return };
    let failed = cuda.gpus.iter().any(|g| g.registration.as_ref().is_some_and(|r| !r.works));
    let unknown = cuda.gpus.iter().any(|g| g.registration.is_none());
    let remedy = "raise it for the server: `ulimit -l unlimited`, LimitMEMLOCK=infinity in its systemd unit, or \
                  --ulimit memlock=-1 for a container";
    if failed {
        findings.warning(format!("the locked-memory limit is {limit} bytes and registration fails"), remedy);
    } else if unknown {
        findings.note(
            format!("the locked-memory limit is {limit} bytes; some drivers apply it to registered memory"),
            remedy,
        );
    }
}
