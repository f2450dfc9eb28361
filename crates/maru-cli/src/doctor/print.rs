//! The report for people.

use crate::doctor::calibration;
use crate::doctor::cuda::{Cuda, Gpu};
use crate::doctor::dax::{Device, Header};
use crate::doctor::host::Host;
use crate::doctor::pools::Pool;
use crate::doctor::rooms::Room;
use crate::doctor::{Finding, Severity};
use crate::output::{Line, human_bytes};

pub(crate) fn lines(
    devices: &[Device],
    pools: &[Pool],
    rooms: &[Room],
    host: &Host,
    cuda: &Cuda,
    calibration: &[calibration::Device],
    findings: &[Finding],
) -> Vec<Line> {
    let mut out = Vec::new();
    section(&mut out, "Host", host_lines(host));
    section(&mut out, "CUDA", cuda_lines(cuda));
    if !calibration.is_empty() {
        section(&mut out, "Calibration of strategy = \"auto\"", calibration::lines(calibration));
    }
    section(&mut out, "Dax devices", or_none(devices.iter().flat_map(device_lines).collect()));
    if !pools.is_empty() {
        section(&mut out, "Configured pools", pools.iter().map(pool_line).collect());
    }
    section(&mut out, "Room for pools that are files", rooms.iter().map(room_line).collect());
    out.push(Line::Title("Findings".to_owned()));
    if findings.is_empty() {
        out.push(Line::Verdict("  nothing to complain of".to_owned(), true));
    }
    for finding in findings {
        let (word, good) = match finding.severity {
            Severity::Error => ("error", Some(false)),
            Severity::Warning => ("warning", Some(false)),
            Severity::Note => ("note", None),
        };
        let text = format!("  {word}: {}", finding.what);
        out.push(good.map_or_else(|| Line::plain(text.clone()), |good| Line::Verdict(text.clone(), good)));
        out.push(Line::plain(format!("    -> {}", finding.remedy)));
    }
    out
}

fn section(out: &mut Vec<Line>, title: &str, lines: Vec<String>) {
    out.push(Line::Title(title.to_owned()));
    out.extend(lines.into_iter().map(|line| Line::plain(format!("  {line}"))));
    out.push(Line::plain(""));
}

fn or_none(lines: Vec<String>) -> Vec<String> {
    if lines.is_empty() { vec!["none".to_owned()] } else { lines }
}

fn bytes(n: Option<u64>) -> String {
    n.map_or_else(|| "?".to_owned(), human_bytes)
}

fn word<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "?".to_owned(), |v| v.to_string())
}

fn host_lines(host: &Host) -> Vec<String> {
    let limit = |n: Option<u64>| n.map_or_else(|| "unlimited".to_owned(), human_bytes);
    let mut lines = vec![
        format!("kernel {}, {} CPUs for this process", word(host.kernel.as_ref()), word(host.cpus)),
        format!(
            "cache lines of {} bytes, written back with {}, dropped with {}",
            host.cache_line_bytes, host.flush_instruction, host.invalidate_instruction
        ),
        format!("memory {}, {} available", bytes(host.memory_bytes), bytes(host.available_bytes)),
        format!(
            "huge pages: {} of {} free, {} each; transparent: {}, for shared memory: {}{}",
            word(host.huge_pages_free),
            word(host.huge_pages_total),
            bytes(host.huge_page_bytes),
            word(host.transparent_huge_pages.as_ref()),
            word(host.shmem_huge_pages.as_ref()),
            if host.thp_disabled == Some(true) { "; disabled for this process" } else { "" }
        ),
        format!(
            "locked memory: at most {} (could be raised to {})",
            limit(host.memlock_soft_bytes),
            limit(host.memlock_hard_bytes)
        ),
    ];
    for node in &host.numa_nodes {
        let distances: Vec<String> = node.distances.iter().map(u32::to_string).collect();
        let cpus = if node.cpus.is_empty() { "none" } else { &node.cpus };
        lines.push(format!(
            "NUMA node {}: CPUs {cpus}, {}, distances {}",
            node.node,
            bytes(node.memory_bytes),
            distances.join(" ")
        ));
    }
    lines
}

fn cuda_lines(cuda: &Cuda) -> Vec<String> {
    let mut lines = Vec::new();
    match (&cuda.reason, &cuda.driver_cuda) {
        (Some(reason), _) => lines.push(format!("not usable: {reason}")),
        (None, version) => lines.push(format!("driver for CUDA {}", word(version.as_ref()))),
    }
    lines.extend(cuda.module.iter().cloned());
    for image in &cuda.kernel_images {
        lines.push(format!("native kernel in this program: {} by {}", image.kind, image.built_by));
    }
    for gpu in &cuda.gpus {
        lines.extend(gpu_lines(gpu));
    }
    lines
}

fn gpu_lines(gpu: &Gpu) -> Vec<String> {
    let mut lines = vec![format!(
        "cuda:{} {}, compute capability {}, {}, {} multiprocessors, {} copy engines",
        gpu.device,
        gpu.name,
        gpu.compute_capability,
        human_bytes(gpu.memory_bytes),
        word(gpu.multiprocessors),
        word(gpu.copy_engines)
    )];
    let link = &gpu.link;
    lines.push(format!(
        "  at {}, NUMA node {}, link generation {} of {}, {} of {} lanes{}",
        word(gpu.pci.as_ref()),
        word(gpu.numa_node),
        word(link.generation),
        word(link.max_generation),
        word(link.width),
        word(link.max_width),
        link.max_gbps.map_or_else(String::new, |gbps| format!(", {gbps} GB/s each way at best"))
    ));
    let took = |seconds: Option<f64>| seconds.map_or_else(String::new, |s| format!(" in {:.0} ms", s * 1e3));
    if let Some(kernel) = &gpu.native_kernel {
        lines.push(match (&kernel.image, &kernel.reason) {
            (Some(image), _) => format!("  native kernel: loads{}, {image}", took(kernel.seconds)),
            (None, reason) => format!("  native kernel: {}", word(reason.as_ref())),
        });
    }
    if let Some(trial) = &gpu.registration {
        lines.push(match &trial.reason {
            None => format!(
                "  registering host memory: {} of {}{}",
                human_bytes(trial.bytes),
                trial.memory,
                took(trial.seconds)
            ),
            Some(reason) => format!("  registering host memory: {reason}"),
        });
    }
    lines
}

fn device_lines(device: &Device) -> Vec<String> {
    let mut lines = vec![format!(
        "{} {}, {}, alignment {}, NUMA node {}, as RAM node {}, {}",
        device.path,
        device.mode,
        bytes(device.size),
        bytes(device.align),
        word(device.numa_node),
        word(device.target_node),
        header(device.header.as_ref())
    )];
    for range in &device.ranges {
        lines.push(format!("  physical {:#x}..={:#x}", range.start, range.end));
    }
    lines.extend(device.problems.iter().map(|problem| format!("  {problem}")));
    lines
}

fn header(header: Option<&Header>) -> String {
    let Some(header) = header else { return "header not read".to_owned() };
    match (&header.uuid, &header.first_bytes) {
        (Some(uuid), _) => format!("header of version {}, id {uuid}", word(header.version)),
        (None, Some(found)) => format!("foreign first bytes {found}"),
        (None, None) => "blank".to_owned(),
    }
}

fn pool_line(pool: &Pool) -> String {
    let size = if pool.size == 0 { "all".to_owned() } else { human_bytes(pool.size) };
    let contents = match (&pool.problem, &pool.contents) {
        (Some(problem), _) => problem.clone(),
        (None, Some(c)) => {
            format!("{} slabs of {}, {} published", c.slabs, human_bytes(c.slab_bytes), c.published)
        }
        (None, None) => "no pool yet".to_owned(),
    };
    format!("{} ({}, {} from offset {}): {contents}", pool.path, word(pool.kind), size, pool.offset)
}

fn room_line(room: &Room) -> String {
    let registrable = match room.registrable {
        Some(true) => "CUDA can register it",
        Some(false) => "CUDA cannot register it",
        None => "whether CUDA can register it is unknown",
    };
    match &room.file_system {
        Some(name) => format!(
            "{} ({name}): {} free of {}, {registrable}",
            room.path,
            bytes(room.free),
            bytes(room.size)
        ),
        None => format!("{}: not there", room.path),
    }
}
