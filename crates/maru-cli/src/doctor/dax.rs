//! The dax devices: everything the kernel says of them, and what is wrong with each.

use maru::cxl::{CxlError, DaxDevice, DaxInfo, HeaderState, Mode};
use serde::Serialize;

use crate::doctor::{Findings, Roots};

/// One device, as it is printed.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) path: String,
    /// `devdax`, `system_ram`, `fsdax`, `unbound`, or the driver's name.
    pub(crate) mode: String,
    pub(crate) size: Option<u64>,
    pub(crate) align: Option<u64>,
    pub(crate) numa_node: Option<i32>,
    pub(crate) target_node: Option<i32>,
    pub(crate) ranges: Vec<Range>,
    pub(crate) header: Option<Header>,
    pub(crate) usable: bool,
    pub(crate) problems: Vec<String>,
}

/// A physical range, both ends inclusive.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Range {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// What the first bytes say.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Header {
    /// `maru`, `blank` or `foreign`.
    pub(crate) state: &'static str,
    pub(crate) version: Option<u32>,
    pub(crate) uuid: Option<String>,
    /// The first bytes in hexadecimal, where they are foreign.
    pub(crate) first_bytes: Option<String>,
}

pub(crate) fn look(roots: &Roots, findings: &mut Findings) -> Vec<Device> {
    match DaxDevice::scan_with_roots(&roots.sys, &roots.dev) {
        Ok(found) => {
            if found.is_empty() {
                findings.note(
                    "there is no dax device: pools can be files, which only this host shares",
                    "for CXL memory check that the expander is enabled in firmware, that the kernel lists it \
                     (`cxl list`, `daxctl list`) and that device_dax is loaded (`modprobe device_dax`)",
                );
            }
            found.iter().map(|info| device(info, findings)).collect()
        }
        Err(error) => {
            let remedy = "check that /sys is mounted and readable by this user";
            findings.error(format!("the dax devices cannot be listed: {error}"), remedy);
            Vec::new()
        }
    }
}

fn device(info: &DaxInfo, findings: &mut Findings) -> Device {
    for problem in &info.problems {
        findings.error(problem.clone(), remedy(info));
    }
    if let Some(HeaderState::Foreign(_)) = info.header {
        findings.warning(
            format!("{}: its first bytes are neither blank nor a maru header", info.path.display()),
            "make sure that no other program uses the device; making a pool there needs force and destroys them",
        );
    }
    if let Some(HeaderState::Present(header)) = info.header
        && !header.is_known_version()
    {
        findings.warning(
            format!("{}: its header has version {}, unknown here", info.path.display(), header.version),
            "use a maru of the version that wrote it; only the UUID is used",
        );
    }
    Device {
        name: info.name.clone(),
        path: info.path.display().to_string(),
        mode: mode(&info.mode),
        size: info.size,
        align: info.align,
        numa_node: info.numa_node,
        target_node: info.target_node,
        ranges: info.ranges.iter().map(|r| Range { start: r.start, end: r.end }).collect(),
        header: info.header.as_ref().map(header),
        usable: info.problems.is_empty(),
        problems: info.problems.clone(),
    }
}

fn mode(mode: &Mode) -> String {
    match mode {
        Mode::DevDax => "devdax",
        Mode::SystemRam => "system_ram",
        Mode::FsDax => "fsdax",
        Mode::Unbound => "unbound",
        Mode::Other(driver) => driver,
        _ => "unknown",
    }
    .to_owned()
}

pub(crate) fn header(state: &HeaderState) -> Header {
    let of = |state| Header { state, version: None, uuid: None, first_bytes: None };
    match state {
        HeaderState::Blank => of("blank"),
        HeaderState::Present(header) => {
            Header { version: Some(header.version), uuid: Some(header.uuid.to_string()), ..of("maru") }
        }
        HeaderState::Foreign(bytes) => {
            let text = bytes.iter().map(|b| format!("{b:02x}")).collect();
            Header { first_bytes: Some(text), ..of("foreign") }
        }
    }
}

/// What usually helps, by what the kernel says of the device.
fn remedy(info: &DaxInfo) -> String {
    let reconfigure = format!("daxctl reconfigure-device --mode=devdax {}", info.name);
    match &info.mode {
        Mode::SystemRam => format!(
            "{reconfigure} (add --force if its memory is online; if it stays busy, keep the kernel from onlining it: \
             memhp_default_state=offline)"
        ),
        Mode::DevDax if info.size.is_none() || info.align.is_none() => {
            "the kernel's attributes make no sense: check dmesg, and the expander's firmware".to_owned()
        }
        Mode::DevDax if !info.path.exists() => {
            "the node is missing: start udev, or pass the device into the container (--device)".to_owned()
        }
        Mode::DevDax => format!(
            "give this user access by a udev rule, for example SUBSYSTEM==\"dax\", GROUP=\"maru\", MODE=\"0660\", and see \
             who holds the device: `fuser -v {}`",
            info.path.display()
        ),
        _ => format!("{reconfigure}; see that device_dax is loaded (`modprobe device_dax`)"),
    }
}

/// What usually helps against an error of opening or mapping a pool.
pub(crate) fn remedy_of(error: &CxlError) -> &'static str {
    match error.kind() {
        "not_found" => "create it, or correct the path in the configuration",
        "permission_denied" => {
            "give this user read and write access (udev rule for a device, owner and mode for a file)"
        }
        "not_available" => "see the device's own finding",
        "busy" => "find the holder with `fuser -v`",
        _ => "correct offset, size or path in the configuration",
    }
}
