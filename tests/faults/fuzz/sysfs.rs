//! What sysfs says of a device.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use maru::cxl::{DaxDevice, MapOptions, Mapping};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestCaseResult;

use super::common::{accept, scratch, worded};

/// A made-up sysfs in which `/dev/zero` is `dax0.0`.
pub(crate) struct Sysfs {
    dir: tempfile::TempDir,
}

/// Size, alignment and two nodes; the driver; the two ends of a physical range.
pub(crate) type Attributes = ([Option<String>; 4], Option<String>, (String, String));

/// Numbers, and texts that are none.
pub(crate) fn inputs() -> impl Strategy<Value = Attributes> {
    let text = || {
        prop_oneof![
            4 => select(&[
                "67108864", "2097152", "4096", "1073741824", "0", "-1", "abc", "", " 2097152 ", "2097152\n\n",
                "0x200000", "18446744073709551615", "18446744073709551616", "9223372036854775808",
                "9223372036854775807", "2097153", "3", "1", "+4096", "4096 4096", "4_096", "1e9", "٤٠٩٦",
            ][..]).prop_map(str::to_owned),
            1 => any::<u64>().prop_map(|n| n.to_string()),
            1 => any::<i64>().prop_map(|n| n.to_string()),
            1 => (0u32..64).prop_map(|n| (1u64 << n).to_string()),
            1 => "\\PC{0,12}",
        ]
    };
    let optional = move || prop::option::weighted(0.9, text());
    let driver = prop::option::weighted(
        0.9,
        prop_oneof![
            6 => Just("device_dax".to_owned()),
            1 => Just("kmem".to_owned()),
            1 => "[a-z_]{1,12}",
        ],
    );
    let numbers = prop_oneof![
        4 => Just((67_108_864u64, 2_097_152u64)),
        2 => (0u32..40, 0u32..40).prop_map(|(a, b)| (1 << a, 1 << b)),
    ]
    .prop_map(|(a, b)| (Some(a.to_string()), Some(b.to_string())));
    let sizes = prop_oneof![1 => numbers, 2 => (optional(), optional())];
    let range = || prop_oneof!["0x[0-9a-f]{1,18}", "\\PC{0,10}", "[0-9]{1,22}"];
    (sizes, optional(), optional(), driver, (range(), range())).prop_map(
        |((size, align), numa, target, driver, ranges)| ([size, align, numa, target], driver, ranges),
    )
}

impl Sysfs {
    pub(crate) fn new() -> Self {
        let dir = scratch();
        let device = dir.path().join("devices/dax0.0");
        for dir in [device.join("mapping0"), dir.path().join("dev/char"), dir.path().join("bus/dax/devices")]
        {
            fs::create_dir_all(dir).unwrap();
        }
        symlink("../../bus/dax", device.join("subsystem")).unwrap();
        symlink(&device, dir.path().join("dev/char/1:5")).unwrap();
        symlink(&device, dir.path().join("bus/dax/devices/dax0.0")).unwrap();
        fs::create_dir_all(dir.path().join("nodes")).unwrap();
        symlink("/dev/zero", dir.path().join("nodes/dax0.0")).unwrap();
        Sysfs { dir }
    }

    /// Opens the device that is so described, scans for it and maps parts of it.
    pub(crate) fn check(&self, (texts, driver, ranges): &Attributes) -> TestCaseResult {
        let root = self.dir.path();
        let device = root.join("devices/dax0.0");
        for (name, text) in ["size", "align", "numa_node", "target_node"].iter().zip(texts) {
            write_or_remove(&device.join(name), text.as_deref());
        }
        write_or_remove(&device.join("mapping0/start"), Some(&ranges.0));
        write_or_remove(&device.join("mapping0/end"), Some(&ranges.1));
        let link = device.join("driver");
        let _ = fs::remove_file(&link);
        if let Some(driver) = driver {
            symlink(format!("../../bus/dax/drivers/{driver}"), &link).unwrap();
        }
        for info in DaxDevice::scan_with_roots(root, root.join("nodes")).into_iter().flatten() {
            let _ = format!("{info:?}");
        }
        let opened = match DaxDevice::open_with_sysfs("/dev/zero", root) {
            Ok(device) => device,
            Err(e) => {
                // No size of -1 as an unsigned number, unless somebody wrote it so.
                let wrapped = |text: &str| text.contains("18446744073709551615");
                let said = texts.iter().chain([driver]).flatten().any(|text| wrapped(text));
                prop_assert!(said || !wrapped(&e.to_string()), "{}", e);
                return worded(&e.to_string(), e.kind());
            }
        };
        accept();
        prop_assert_eq!(driver.as_deref(), Some("device_dax"));
        let (len, align) = (opened.len(), opened.align());
        prop_assert!(align >= 4096 && align.is_power_of_two(), "alignment {}", align);
        prop_assert!(len >= align && len.is_multiple_of(align) && i64::try_from(len).is_ok(), "{}", len);
        let stated = texts[0].as_deref().map(str::trim).and_then(|t| t.parse::<u64>().ok());
        prop_assert!(stated.is_some_and(|stated| len <= stated));
        for (offset, wanted) in
            [(0, len), (align, 1), (len, 1), (1, 1), (u64::MAX - align + 1, align), (0, u64::MAX)]
        {
            let options = MapOptions { offset, len: wanted, prefault: false, ..MapOptions::default() };
            // Whole devices of many gigabytes are address space only.
            match Mapping::map(&opened, &options) {
                Ok(map) => {
                    prop_assert!(map.len() <= len - offset && map.len() >= wanted);
                    prop_assert!(map.len().is_multiple_of(align));
                }
                Err(e) => worded(&e.to_string(), e.kind())?,
            }
        }
        Ok(())
    }
}

fn write_or_remove(path: &Path, text: Option<&str>) {
    match text {
        Some(text) => fs::write(path, text).unwrap(),
        None => drop(fs::remove_file(path)),
    }
}
