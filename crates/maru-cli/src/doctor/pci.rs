//! The PCI Express link of a device, as sysfs describes it, and the narrowest one on its way to the CPU.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::doctor::system::{names, number, text};

/// A device's link now and at best. Absent where the kernel does not say, as in most virtual machines.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Link {
    pub(crate) generation: Option<u32>,
    pub(crate) width: Option<u32>,
    pub(crate) max_generation: Option<u32>,
    pub(crate) max_width: Option<u32>,
    /// What the link can carry each way at its best, in 10^9 bytes a second before packet headers.
    pub(crate) max_gbps: Option<f64>,
    /// The port above the device that carries less than the device could.
    pub(crate) limited_by: Option<Port>,
}

/// A bridge's port.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Port {
    pub(crate) pci: String,
    pub(crate) max_gbps: f64,
}

/// The directory of a PCI device by its address, such as 0000:51:00.0.
pub(crate) fn dir(sys: &Path, address: &str) -> PathBuf {
    sys.join("bus/pci/devices").join(address.to_ascii_lowercase())
}

pub(crate) fn link(sys: &Path, address: &str) -> Link {
    let dir = dir(sys, address);
    let max_gbps = gbps(&dir, "max_link_speed", "max_link_width");
    let real = std::fs::canonicalize(&dir).unwrap_or_else(|_| dir.clone());
    let narrowest = real
        .ancestors()
        .skip(1)
        .take_while(|above| is_address(above))
        .filter_map(|above| {
            let gbps = gbps(above, "max_link_speed", "max_link_width")?;
            Some(Port { pci: above.file_name()?.to_string_lossy().into_owned(), max_gbps: gbps })
        })
        .min_by(|a, b| a.max_gbps.total_cmp(&b.max_gbps));
    Link {
        generation: speed(&dir, "current_link_speed").and_then(generation),
        width: width(&dir, "current_link_width"),
        max_generation: speed(&dir, "max_link_speed").and_then(generation),
        max_width: width(&dir, "max_link_width"),
        max_gbps,
        limited_by: narrowest.filter(|port| max_gbps.is_some_and(|own| port.max_gbps < own)),
    }
}

/// Addresses of NVIDIA's display and 3D controllers, driver or not.
pub(crate) fn nvidia_devices(sys: &Path) -> Vec<String> {
    let all = sys.join("bus/pci/devices");
    let is = |name: &str, file: &str, start: &str| {
        text(&all.join(name).join(file)).is_some_and(|text| text.starts_with(start))
    };
    let mut found = names(&all);
    found.retain(|name| is(name, "vendor", "0x10de") && is(name, "class", "0x03"));
    found
}

fn is_address(dir: &Path) -> bool {
    let Some(name) = dir.file_name().and_then(|n| n.to_str()) else { return false };
    let parts: Vec<&str> = name.split([':', '.']).collect();
    parts.len() == 4 && parts.iter().all(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// GT/s of a text such as "32.0 GT/s PCIe".
fn speed(dir: &Path, file: &str) -> Option<f64> {
    let text = text(&dir.join(file))?;
    text.split_whitespace().next()?.parse().ok().filter(|speed: &f64| speed.is_finite() && *speed > 0.0)
}

/// Lanes; a link that is down has 0, and some devices say 255.
fn width(dir: &Path, file: &str) -> Option<u32> {
    number(&dir.join(file)).filter(|width| (1..=32).contains(width))
}

fn generation(speed: f64) -> Option<u32> {
    let known = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 128.0];
    (1..).zip(known).find(|(_, known)| (known - speed).abs() < 0.1).map(|(generation, _)| generation)
}

/// What a link carries: its rate less the line code.
fn gbps(dir: &Path, speed_file: &str, width_file: &str) -> Option<f64> {
    let (speed, width) = (speed(dir, speed_file)?, width(dir, width_file)?);
    let code = match generation(speed)? {
        1 | 2 => 0.8,
        3..=5 => 128.0 / 130.0,
        _ => 242.0 / 256.0,
    };
    Some((speed * f64::from(width) * code / 8.0 * 10.0).round() / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn port(dir: &Path, current: (&str, &str), max: (&str, &str)) {
        fs::create_dir_all(dir).unwrap();
        for (file, text) in [
            ("current_link_speed", current.0),
            ("current_link_width", current.1),
            ("max_link_speed", max.0),
            ("max_link_width", max.1),
        ] {
            fs::write(dir.join(file), format!("{text}\n")).unwrap();
        }
    }

    #[test]
    fn a_slower_port_above_is_named() {
        let root = tempfile::tempdir().unwrap();
        let bridge = root.path().join("devices/pci0000:50/0000:50:01.0");
        let gpu = bridge.join("0000:51:00.0");
        port(&bridge, ("16.0 GT/s PCIe", "16"), ("16.0 GT/s PCIe", "16"));
        port(&gpu, ("2.5 GT/s PCIe", "16"), ("32.0 GT/s PCIe", "16"));
        fs::create_dir_all(root.path().join("bus/pci/devices")).unwrap();
        std::os::unix::fs::symlink(&gpu, root.path().join("bus/pci/devices/0000:51:00.0")).unwrap();
        let link = link(root.path(), "0000:51:00.0");
        assert_eq!((link.generation, link.width), (Some(1), Some(16)));
        assert_eq!((link.max_generation, link.max_width), (Some(5), Some(16)));
        assert_eq!(link.max_gbps, Some(63.0));
        let port = link.limited_by.unwrap();
        assert_eq!((port.pci.as_str(), port.max_gbps), ("0000:50:01.0", 31.5));
    }

    #[test]
    fn what_the_kernel_does_not_know_is_absent() {
        let root = tempfile::tempdir().unwrap();
        let gpu = root.path().join("bus/pci/devices/0000:00:05.0");
        port(&gpu, ("Unknown", "0"), ("Unknown", "255"));
        for address in ["0000:00:05.0", "0000:00:06.0"] {
            let link = link(root.path(), address);
            assert!(
                link.generation.is_none() && link.width.is_none() && link.max_width.is_none(),
                "{link:?}"
            );
            assert!(link.max_gbps.is_none() && link.limited_by.is_none(), "{link:?}");
        }
    }

    #[test]
    fn only_nvidias_controllers_are_listed() {
        let root = tempfile::tempdir().unwrap();
        for (name, vendor, class) in [
            ("0000:51:00.0", "0x10de", "0x030200"),
            ("0000:51:00.1", "0x10de", "0x040300"),
            ("0000:00:02.0", "0x8086", "0x030000"),
        ] {
            let dir = root.path().join("bus/pci/devices").join(name);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("vendor"), vendor).unwrap();
            fs::write(dir.join("class"), class).unwrap();
        }
        assert_eq!(nvidia_devices(root.path()), ["0000:51:00.0"]);
    }
}
