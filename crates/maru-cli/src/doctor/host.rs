//! The host: CPUs, caches, NUMA nodes, memory and the limits on it.

use maru::Config;
use maru::cxl::coherence::{self, Instruction};
use maru::transfer::config::CoherenceKind;
use rustix::process::{Resource, getrlimit};
use rustix::thread::transparent_huge_pages_are_disabled;
use serde::Serialize;

use crate::doctor::dax::Device;
use crate::doctor::system::{chosen, field, names, number, text};
use crate::doctor::{Findings, Roots};

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Host {
    pub(crate) kernel: Option<String>,
    /// CPUs that this process may use.
    pub(crate) cpus: Option<usize>,
    pub(crate) cache_line_bytes: usize,
    /// Writes lines back (`clwb`, `clflushopt`, `clflush`, `dc_cvac`), or `none`.
    pub(crate) flush_instruction: &'static str,
    pub(crate) invalidate_instruction: &'static str,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) available_bytes: Option<u64>,
    pub(crate) huge_page_bytes: Option<u64>,
    pub(crate) huge_pages_total: Option<u64>,
    pub(crate) huge_pages_free: Option<u64>,
    /// `always`, `madvise` or `never`.
    pub(crate) transparent_huge_pages: Option<String>,
    pub(crate) shmem_huge_pages: Option<String>,
    /// prctl PR_SET_THP_DISABLE of this process, inherited from whoever started it.
    pub(crate) thp_disabled: Option<bool>,
    /// null: unlimited.
    pub(crate) memlock_soft_bytes: Option<u64>,
    pub(crate) memlock_hard_bytes: Option<u64>,
    pub(crate) numa_nodes: Vec<Node>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Node {
    pub(crate) node: i32,
    pub(crate) cpus: String,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) free_bytes: Option<u64>,
    /// To each node that is online, in their order.
    pub(crate) distances: Vec<u32>,
}

impl Host {
    /// The kernel's distance between two nodes; 10 is local.
    pub(crate) fn distance(&self, from: i32, to: i32) -> Option<u32> {
        let index = self.numa_nodes.iter().position(|n| n.node == to)?;
        self.numa_nodes.iter().find(|n| n.node == from)?.distances.get(index).copied()
    }
}

pub(crate) fn look(
    roots: &Roots,
    config: Option<&Config>,
    devices: &[Device],
    findings: &mut Findings,
) -> Host {
    let memory = text(&roots.proc.join("meminfo")).unwrap_or_default();
    let locked = getrlimit(Resource::Memlock);
    let thp = roots.sys.join("kernel/mm/transparent_hugepage");
    let host = Host {
        kernel: text(&roots.proc.join("sys/kernel/osrelease")),
        cpus: std::thread::available_parallelism().ok().map(|n| n.get()),
        cache_line_bytes: coherence::line_bytes(),
        flush_instruction: word(coherence::flush_instruction()),
        invalidate_instruction: word(coherence::invalidate_instruction()),
        memory_bytes: field(&memory, "MemTotal"),
        available_bytes: field(&memory, "MemAvailable"),
        huge_page_bytes: field(&memory, "Hugepagesize"),
        huge_pages_total: field(&memory, "HugePages_Total"),
        huge_pages_free: field(&memory, "HugePages_Free"),
        transparent_huge_pages: chosen(&thp.join("enabled")),
        shmem_huge_pages: chosen(&thp.join("shmem_enabled")),
        thp_disabled: transparent_huge_pages_are_disabled().ok(),
        memlock_soft_bytes: locked.current,
        memlock_hard_bytes: locked.maximum,
        numa_nodes: numa_nodes(roots),
    };
    judge(&host, config, devices, findings);
    host
}

fn judge(host: &Host, config: Option<&Config>, devices: &[Device], findings: &mut Findings) {
    let huge = devices.iter().find(|d| d.align.is_some_and(|align| align > 4096));
    if let (Some(true), Some(device)) = (host.thp_disabled, huge) {
        findings.error(
            format!(
                "transparent huge pages are disabled for this process (prctl PR_SET_THP_DISABLE): every access to {} \
                 would be a SIGBUS",
                device.name
            ),
            "start the server without that setting; some container run-times and launchers set it",
        );
    }
    let flushes = config.is_some_and(|c| c.cxl.coherence == CoherenceKind::Flush);
    match host.flush_instruction {
        "none" if flushes => findings.error(
            "coherence = \"flush\" is configured and this CPU has no instruction to write cache lines back",
            "share the memory within one host only, with coherence = \"none\"",
        ),
        "clflush" => findings.warning(
            "this CPU writes cache lines back with clflush, one at a time: publishing under coherence = \"flush\" is slow",
            "use a CPU with clwb or clflushopt (Skylake, Zen and later; virtual machines must be given the flag)",
        ),
        _ => {}
    }
    let memory_only: Vec<String> = host
        .numa_nodes
        .iter()
        .filter(|n| n.cpus.is_empty() && n.memory_bytes.is_some_and(|b| b > 0))
        .map(|n| n.node.to_string())
        .collect();
    if !memory_only.is_empty() {
        findings.note(
            format!(
                "NUMA node {} has memory and no CPUs: an expander may be in use as ordinary memory",
                memory_only.join(", ")
            ),
            "to share it between servers, put it into devdax mode (`daxctl reconfigure-device --mode=devdax`)",
        );
    }
}

fn numa_nodes(roots: &Roots) -> Vec<Node> {
    let dir = roots.sys.join("devices/system/node");
    let mut nodes: Vec<Node> = names(&dir)
        .iter()
        .filter_map(|name| {
            let node: i32 = name.strip_prefix("node")?.parse().ok()?;
            let dir = dir.join(name);
            let memory = text(&dir.join("meminfo")).unwrap_or_default();
            let distances = text(&dir.join("distance")).unwrap_or_default();
            Some(Node {
                node,
                cpus: text(&dir.join("cpulist")).unwrap_or_default(),
                memory_bytes: field(&memory, "MemTotal"),
                free_bytes: field(&memory, "MemFree"),
                distances: distances.split_whitespace().filter_map(|d| d.parse().ok()).collect(),
            })
        })
        .collect();
    nodes.sort_by_key(|n| n.node);
    nodes
}

/// The kernel's NUMA node of a device directory; absent where it knows none (it says -1).
pub(crate) fn node_of(dir: &std::path::Path) -> Option<i32> {
    number(&dir.join("numa_node")).filter(|node| *node >= 0)
}

fn word(instruction: Instruction) -> &'static str {
    match instruction {
        Instruction::Clwb => "clwb",
        Instruction::Clflushopt => "clflushopt",
        Instruction::Clflush => "clflush",
        Instruction::DcCvac => "dc_cvac",
        Instruction::DcCivac => "dc_civac",
        _ => "none",
    }
}
