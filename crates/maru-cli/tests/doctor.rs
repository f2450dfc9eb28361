//! `maru doctor`: on trees that play /sys, /dev and /proc, with a simulated driver and without one.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use common::{Run, command, end, maru, start};
use serde_json::Value;
use tempfile::TempDir;

/// A machine of files.
struct Machine {
    root: TempDir,
}

impl Machine {
    fn new() -> Self {
        let machine = Machine { root: tempfile::tempdir().expect("a temporary directory") };
        for dir in ["sys", "dev", "proc", "lib"] {
            fs::create_dir(machine.path(dir)).expect("mkdir");
        }
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn file(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("mkdir");
        fs::write(path, text).expect("write");
    }

    /// A dax device with a driver, if any; a regular file plays its node when `node` is set.
    fn dax(&self, name: &str, driver: Option<&str>, attributes: &[(&str, &str)]) {
        let dir = format!("sys/devices/{name}");
        for (attribute, text) in attributes {
            self.file(&format!("{dir}/{attribute}"), text);
        }
        symlink("../../bus/dax", self.path(&dir).join("subsystem")).expect("symlink");
        if let Some(driver) = driver {
            symlink(format!("../../bus/dax/drivers/{driver}"), self.path(&dir).join("driver"))
                .expect("symlink");
        }
        fs::create_dir_all(self.path("sys/bus/dax/devices")).expect("mkdir");
        symlink(self.path(&dir), self.path("sys/bus/dax/devices").join(name)).expect("symlink");
    }

    fn node(&self, number: u32, cpus: &str, distances: &str, kib: u64) {
        let dir = format!("sys/devices/system/node/node{number}");
        self.file(&format!("{dir}/cpulist"), cpus);
        self.file(&format!("{dir}/distance"), distances);
        self.file(
            &format!("{dir}/meminfo"),
            &format!("Node {number} MemTotal: {kib} kB\nNode {number} MemFree: 4 kB\n"),
        );
    }

    fn doctor(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Run {
        let mut command = command(&["doctor"]);
        command.args(arguments);
        for root in ["sys", "dev", "proc"] {
            command.arg(format!("--{root}")).arg(self.path(root));
        }
        command.env("LD_LIBRARY_PATH", self.path("lib")).env_remove(maru_sim_driver::VARIABLE);
        command.env("XDG_CACHE_HOME", self.path("cache"));
        command.envs(environment.iter().copied());
        end(start(&mut command))
    }

    /// The report; it is one whatever was found.
    fn report(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Value {
        let run = self.doctor(&[arguments, &["--json"]].concat(), environment);
        assert_eq!(run.code, Some(0), "{run:?}");
        assert!(!run.err.contains("panicked"), "{run:?}");
        let report = run.json();
        for finding in list(&report["findings"]) {
            let severity = finding["severity"].as_str().expect("a severity");
            assert!(["error", "warning", "note"].contains(&severity), "{finding}");
            assert!(!finding["what"].as_str().expect("what").is_empty(), "{finding}");
            assert!(!finding["remedy"].as_str().expect("remedy").is_empty(), "{finding}");
        }
        report
    }

    /// Puts the simulated driver in; false (with the reason printed) where it could not be built.
    fn driver(&self, missing: &[&str]) -> bool {
        match maru_sim_driver::write_library(&self.path("lib"), missing) {
            Ok(_) => true,
            Err(error) if std::env::var_os("MARU_REQUIRE_CXX").is_none() => {
                println!("ignored: {error}");
                false
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// A library that is no driver hides the real one, so that a machine with a GPU answers the same.
    fn no_driver(&self) {
        for name in ["libcuda.so", "libcuda.so.1"] {
            self.file(&format!("lib/{name}"), "no library");
        }
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

/// The severities of the findings that say something.
fn severities(report: &Value, text: &str) -> Vec<String> {
    let says = |f: &&Value| f["what"].as_str().is_some_and(|what| what.contains(text));
    list(&report["findings"])
        .iter()
        .filter(says)
        .map(|f| f["severity"].as_str().unwrap_or("?").to_owned())
        .collect()
}

fn remedies(report: &Value, text: &str) -> String {
    list(&report["findings"])
        .iter()
        .filter(|f| f["what"].as_str().is_some_and(|what| what.contains(text)))
        .map(|f| f["remedy"].as_str().unwrap_or("?"))
        .collect()
}

#[test]
fn an_empty_machine_is_described_too() {
    let machine = Machine::new();
    machine.no_driver();
    let report = machine.report(&[], &[]);
    let keys: Vec<&String> = report.as_object().expect("an object").keys().collect();
    assert_eq!(keys, ["version", "dax", "pools", "rooms", "host", "cuda", "calibration", "findings"]);
    assert!(list(&report["dax"]).is_empty() && list(&report["pools"]).is_empty());
    assert_eq!(severities(&report, "no dax device"), ["note"]);
    assert_eq!(severities(&report, "/shm cannot be used"), ["warning"]);
    assert_eq!(severities(&report, "no usable GPU"), ["note"]);
    assert_eq!(report["cuda"]["available"], false);
    assert!(list(&report["calibration"]).is_empty());
    assert!(report["host"]["kernel"].is_null() && report["host"]["memory_bytes"].is_null());
    assert!(report["host"]["cache_line_bytes"].as_u64().expect("a number") >= 16);
}

#[test]
fn the_report_for_people_has_a_remedy_under_each_finding() {
    let machine = Machine::new();
    machine.no_driver();
    let run = machine.doctor(&[], &[]);
    assert_eq!(run.code, Some(0), "{run:?}");
    for title in ["Host", "CUDA", "Dax devices", "Findings"] {
        assert!(run.out.lines().any(|line| line == title), "{title}: {}", run.out);
    }
    let lines: Vec<&str> = run.out.lines().collect();
    let at = lines.iter().position(|l| l.contains("note: there is no dax device")).expect("the finding");
    assert!(lines[at + 1].contains("->") && lines[at + 1].contains("device_dax"), "{}", lines[at + 1]);
}

#[test]
fn devices_are_listed_with_what_is_wrong_with_each() {
    let machine = Machine::new();
    machine.no_driver();
    let good = [("size", "536870912"), ("align", "2097152"), ("numa_node", "0"), ("target_node", "2")];
    machine.dax("dax0.0", Some("kmem"), &good);
    machine.dax("dax1.0", Some("device_dax"), &[("size", "abc"), ("align", "2097152")]);
    machine.dax("dax2.0", None, &good);
    machine.dax("dax10.0", Some("device_dax"), &good);
    let report = machine.report(&[], &[]);
    let names: Vec<&str> = list(&report["dax"]).iter().filter_map(|d| d["name"].as_str()).collect();
    assert_eq!(names, ["dax0.0", "dax1.0", "dax2.0", "dax10.0"]);
    let modes: Vec<&str> = list(&report["dax"]).iter().filter_map(|d| d["mode"].as_str()).collect();
    assert_eq!(modes, ["system_ram", "devdax", "unbound", "devdax"]);
    let first = &report["dax"][0];
    assert_eq!((first["size"].as_u64(), first["align"].as_u64()), (Some(512 << 20), Some(2 << 20)));
    assert_eq!((first["numa_node"].as_i64(), first["target_node"].as_i64()), (Some(0), Some(2)));
    assert!(list(&report["dax"]).iter().all(|d| d["usable"] == false), "none of them is a device");
    assert!(report["dax"][1]["size"].is_null());
    assert_eq!(severities(&report, "system-ram mode"), ["error"]);
    assert!(remedies(&report, "system-ram mode").contains("--mode=devdax dax0.0"));
    assert_eq!(severities(&report, "\"abc\""), ["error"]);
    assert_eq!(severities(&report, "dax10.0: no such file"), ["error"]);
    assert!(remedies(&report, "dax10.0: no such file").contains("--device"));
}

#[test]
fn numa_nodes_and_memory_without_cpus_are_seen() {
    let machine = Machine::new();
    machine.no_driver();
    machine.node(0, "0-7", "10 21 14\n", 1024);
    machine.node(1, "8-15", "21 10 24\n", 1024);
    machine.node(2, "\n", "14 24 10\n", 4096);
    machine.file("proc/meminfo", "MemTotal: 8 kB\nMemAvailable: 4 kB\nHugepagesize: 2048 kB\n");
    machine.file("proc/sys/kernel/osrelease", "6.1.0-test\n");
    machine.file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    let report = machine.report(&[], &[]);
    let host = &report["host"];
    assert_eq!((host["kernel"].as_str(), host["memory_bytes"].as_u64()), (Some("6.1.0-test"), Some(8192)));
    assert_eq!(host["transparent_huge_pages"], "madvise");
    assert_eq!(host["huge_page_bytes"].as_u64(), Some(2 << 20));
    let nodes = list(&host["numa_nodes"]);
    assert_eq!(nodes.len(), 3);
    assert_eq!(nodes[1]["distances"], serde_json::json!([21, 10, 24]));
    assert_eq!((nodes[2]["cpus"].as_str(), nodes[2]["memory_bytes"].as_u64()), (Some(""), Some(4 << 20)));
    assert_eq!(severities(&report, "NUMA node 2 has memory and no CPUs"), ["note"]);
}

#[test]
fn boards_without_a_driver_and_modules_without_a_library_are_errors() {
    let machine = Machine::new();
    machine.no_driver();
    machine.file("sys/bus/pci/devices/0000:51:00.0/vendor", "0x10de\n");
    machine.file("sys/bus/pci/devices/0000:51:00.0/class", "0x030200\n");
    let report = machine.report(&[], &[]);
    assert_eq!(severities(&report, "NVIDIA devices (0000:51:00.0) and no driver"), ["error"]);
    machine.file("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX 580.1\nGCC\n");
    let report = machine.report(&[], &[]);
    assert_eq!(report["cuda"]["module"], "NVRM version: NVIDIA UNIX 580.1");
    assert_eq!(severities(&report, "kernel module is loaded"), ["error"]);
}

#[test]
fn configured_pools_are_looked_at_and_not_changed() {
    let machine = Machine::new();
    machine.no_driver();
    let (whole, sparse, short) = (machine.path("whole"), machine.path("sparse"), machine.path("short"));
    fs::write(&whole, vec![0; 1 << 20]).expect("write");
    fs::File::create(&sparse).and_then(|f| f.set_len(1 << 20)).expect("a sparse file");
    fs::write(&short, vec![0; 8192]).expect("write");
    let pool = |path: &Path, size: &str| format!("[[cxl.pool]]\npath = {:?}\nsize = {size:?}\n", path);
    let text = [
        pool(&whole, "1MiB"),
        pool(&sparse, "1MiB"),
        pool(&short, "1MiB"),
        pool(&machine.path("absent"), "1MiB"),
    ]
    .concat();
    machine.file("maru.toml", &text);
    let before = fs::metadata(&sparse).map(|m| std::os::unix::fs::MetadataExt::blocks(&m)).expect("stat");
    let config = machine.path("maru.toml");
    let report = machine.report(&["--config", config.to_str().expect("UTF-8")], &[]);
    let pools = list(&report["pools"]);
    assert_eq!(pools.len(), 4);
    assert_eq!((pools[0]["kind"].as_str(), pools[0]["bytes"].as_u64()), (Some("file"), Some(1 << 20)));
    assert!(pools[0]["problem"].is_null() && pools[0]["contents"].is_null(), "{}", pools[0]);
    assert_eq!(severities(&report, "sparse is a sparse file"), ["note"]);
    assert!(pools[2]["problem"].as_str().expect("a problem").contains("8192"), "{}", pools[2]);
    assert_eq!(severities(&report, "absent does not exist"), ["note"]);
    let after = fs::metadata(&sparse).map(|m| std::os::unix::fs::MetadataExt::blocks(&m)).expect("stat");
    assert_eq!(before, after);
    assert!(!machine.path("absent").exists());
}

#[test]
fn what_a_pool_holds_is_shown() {
    let place = common::Place::new();
    let machine = Machine::new();
    machine.no_driver();
    let pool = place.path("pool");
    let run = place.run(&["--role", "producer", "--pool", &pool, "--tokens", "600", "--json"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let config = place.file("maru.toml", &format!("[[cxl.pool]]\npath = {pool:?}\nsize = 0\n"));
    let report = machine.report(&["--config", &config], &[]);
    assert_eq!(report["pools"][0]["contents"]["published"], 3, "{}", report["pools"]);
}

#[test]
fn bad_arguments_and_configurations_are_refused() {
    let (kind, message) = maru(&["doctor", "--json", "--nonsense"]).error(2);
    assert_eq!(kind, "invalid_argument", "{message}");
    let place = common::Place::new();
    let config = place.file("bad.toml", "[transfer]\nbackends = 1\n");
    assert_eq!(maru(&["doctor", "--json", "--config", &config]).error(2).0, "config");
    assert_eq!(maru(&["doctor", "--json", "--config", &place.path("absent")]).code, Some(2));
}

#[test]
fn the_real_machine_answers() {
    let run = maru(&["doctor", "--json"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    assert!(report["host"]["kernel"].is_string() && !report["host"]["thp_disabled"].is_null(), "{report}");
}

/// A machine with one GPU behind a narrow port, on the other socket than its expander.
fn with_gpu(missing: &[&str]) -> Option<Machine> {
    let machine = Machine::new();
    if !machine.driver(missing) {
        return None;
    }
    fs::create_dir(machine.path("dev/shm")).expect("mkdir");
    let gpu = "sys/devices/pci0000:50/0000:50:01.0/0000:51:00.0";
    for (dir, speed) in [("sys/devices/pci0000:50/0000:50:01.0", "16.0 GT/s PCIe"), (gpu, "32.0 GT/s PCIe")] {
        machine.file(&format!("{dir}/max_link_speed"), speed);
        machine.file(&format!("{dir}/max_link_width"), "16");
    }
    machine.file(&format!("{gpu}/current_link_speed"), "2.5 GT/s PCIe");
    machine.file(&format!("{gpu}/current_link_width"), "8");
    machine.file(&format!("{gpu}/numa_node"), "1");
    fs::create_dir_all(machine.path("sys/bus/pci/devices")).expect("mkdir");
    symlink(machine.path(gpu), machine.path("sys/bus/pci/devices/0000:51:00.0")).expect("symlink");
    machine.node(0, "0-7", "10 21", 1024);
    machine.node(1, "8-15", "21 10", 1024);
    machine.dax("dax0.0", Some("kmem"), &[("size", "536870912"), ("align", "4096"), ("numa_node", "0")]);
    Some(machine)
}

#[test]
fn a_gpu_is_described_and_tried() {
    let Some(machine) = with_gpu(&[]) else { return };
    let report = machine.report(&[], &[("MARU_SIM_CUDA", "devices=1;memory_bytes=1073741824")]);
    let cuda = &report["cuda"];
    assert_eq!((cuda["available"].as_bool(), cuda["driver_cuda"].as_str()), (Some(true), Some("13.0")));
    assert_eq!(cuda["registration_limit_bytes"].as_u64(), Some(512 << 30));
    assert!(list(&cuda["kernel_images"]).iter().any(|i| i["kind"] == "portable_ptx"), "{cuda}");
    let gpu = &cuda["gpus"][0];
    assert_eq!(gpu["name"], "Simulated GPU 0");
    assert_eq!(
        (gpu["compute_capability"].as_str(), gpu["memory_bytes"].as_u64()),
        (Some("9.0"), Some(1 << 30))
    );
    assert_eq!((gpu["pci"].as_str(), gpu["numa_node"].as_i64()), (Some("0000:51:00.0"), Some(1)));
    let link = &gpu["link"];
    assert_eq!((link["generation"].as_u64(), link["max_generation"].as_u64()), (Some(1), Some(5)));
    assert_eq!((link["width"].as_u64(), link["max_width"].as_u64()), (Some(8), Some(16)));
    assert_eq!(severities(&report, "8 lanes of 16"), ["warning"]);
    assert_eq!(severities(&report, "generation 1 of 5"), ["note"]);
    assert_eq!(severities(&report, "port 0000:50:01.0"), ["warning"]);
    assert_eq!(severities(&report, "transfers cross the link between sockets"), ["warning"]);
    assert_eq!(gpu["native_kernel"]["loads"], true, "{gpu}");
    assert!(gpu["native_kernel"]["image"].as_str().is_some_and(|i| !i.is_empty()), "{gpu}");
    assert_eq!((gpu["registration"]["works"].as_bool(), gpu["registration"]["bytes"].as_u64()), {
        (Some(true), Some(64 << 20))
    });
    assert_eq!(fs::read_dir(machine.path("dev/shm")).expect("readable").count(), 0, "the probe left a file");
}

#[test]
fn without_probing_no_gpu_is_opened() {
    let Some(machine) = with_gpu(&[]) else { return };
    let never = "devices=1;fail_all=cuDevicePrimaryCtxRetain:1:2;fail_all=cuMemHostRegister:1:2";
    let report = machine.report(&["--no-probe"], &[("MARU_SIM_CUDA", never)]);
    let gpu = &report["cuda"]["gpus"][0];
    assert!(gpu["native_kernel"].is_null() && gpu["registration"].is_null(), "{gpu}");
    assert!(severities(&report, "does not load").is_empty() && severities(&report, "registering").is_empty());
}

#[test]
fn what_does_not_work_on_a_gpu_is_found() {
    for (script, text, severity) in [
        ("devices=1;cc_major=6", "the native kernel does not load", "error"),
        ("devices=1;fail_all=cuMemHostRegister:1:2", "registering 67108864 bytes of", "warning"),
        ("devices=1;fail_all=cuDevicePrimaryCtxRetain:1:2", "the native kernel does not load", "error"),
        ("devices=1;fail=cuDeviceGetName:1:999", "cuda:0 does not answer", "error"),
        ("devices=0", "no usable GPU", "note"),
        ("devices=1;fail_all=cuInit:1:999", "no usable GPU", "note"),
        ("devices=1;fail_all=cuDeviceGetCount:1:3", "no usable GPU", "note"),
    ] {
        let Some(machine) = with_gpu(&[]) else { return };
        let report = machine.report(&[], &[("MARU_SIM_CUDA", script)]);
        assert!(severities(&report, text).iter().any(|s| s == severity), "{script}: {report}");
    }
}

#[test]
fn drivers_that_lack_functions_are_no_panic() {
    for missing in
        ["cuDeviceGetPCIBusId", "cuMemHostRegister_v2", "cuModuleLoadData", "cuStreamBeginCapture_v2"]
    {
        let Some(machine) = with_gpu(&[missing]) else { return };
        let run = machine.doctor(&["--json"], &[("MARU_SIM_CUDA", "devices=1")]);
        assert_eq!(run.code, Some(0), "{missing}: {run:?}");
        assert!(!run.err.contains("panicked"), "{missing}: {run:?}");
    }
}

/// One simulated device that says which it is, and so can be measured.
const KNOWN: &str = "devices=1;uuid=9";

/// A calibration as it may have been left behind by an earlier run.
fn calibration(report: &Value) -> &Value {
    &list(&report["calibration"])[0]
}

#[test]
fn a_gpu_is_measured_once_and_its_calibration_shown() {
    let Some(machine) = with_gpu(&[]) else { return };
    let looked = machine.report(&["--no-probe"], &[("MARU_SIM_CUDA", KNOWN)]);
    let looked = calibration(&looked);
    assert_eq!(
        (looked["state"].as_str(), looked["reason"].as_str()),
        (Some("defaults"), Some("not measured yet"))
    );
    assert!(!machine.path("cache").exists());

    let first = machine.report(&[], &[("MARU_SIM_CUDA", KNOWN)]);
    let first = calibration(&first);
    // The simulator may be too slow for the time there is.
    if first["state"] == "defaults" {
        assert!(first["reason"].as_str().is_some_and(|r| r.contains("longer than it may")), "{first}");
        assert!(!machine.path("cache").exists());
        return;
    }
    assert_eq!((first["state"].as_str(), first["device"].as_u64()), (Some("measured"), Some(0)), "{first}");
    assert!(first["seconds"].as_f64().is_some_and(|s| s > 0.0));
    let file = first["file"].as_str().expect("a file").to_owned();
    assert!(Path::new(&file).starts_with(machine.path("cache/maru")) && Path::new(&file).is_file(), "{file}");
    let rows = list(&first["rows"]);
    let kinds: Vec<_> = rows.iter().map(|r| (r["direction"].as_str(), r["run_bytes"].as_u64())).collect();
    let [short, long] = [Some(256), Some(32 << 10)];
    let (load, store) = (Some("load"), Some("store"));
    assert_eq!(kinds, [(load, short), (load, long), (store, short), (store, long)]);
    assert!(rows.iter().any(|row| !list(&row["samples"]).is_empty()), "{first}");

    for arguments in [&[][..], &["--no-probe"]] {
        let again = machine.report(arguments, &[("MARU_SIM_CUDA", KNOWN)]);
        let again = calibration(&again);
        assert_eq!((again["state"].as_str(), again["file"].as_str()), (Some("cached"), Some(file.as_str())));
        assert_eq!(again["rows"], first["rows"]);
    }
    let run = machine.doctor(&[], &[("MARU_SIM_CUDA", KNOWN)]);
    assert!(run.out.contains(&format!("cuda:0 measured before, kept in {file}")), "{}", run.out);
    assert!(run.out.contains("load, runs of 32.0 KiB: ") && run.out.contains("flat copy"), "{}", run.out);
}

#[test]
fn several_processes_may_measure_at_once() {
    let Some(machine) = with_gpu(&[]) else { return };
    let reports: Vec<Value> = std::thread::scope(|scope| {
        let one = || machine.report(&[], &[("MARU_SIM_CUDA", KNOWN)]);
        let all: Vec<_> = (0..3).map(|_| scope.spawn(one)).collect();
        all.into_iter().map(|thread| thread.join().expect("a report")).collect()
    });
    for report in &reports {
        let found = calibration(report);
        // Too slow together, perhaps; never anything else.
        let slow = found["reason"].as_str().is_some_and(|r| r.contains("longer than it may"));
        assert!(slow || ["measured", "cached"].contains(&found["state"].as_str().unwrap_or("?")), "{found}");
    }
    let kept = fs::read_dir(machine.path("cache/maru")).map_or(0, |files| files.count());
    let measured = reports.iter().filter(|r| calibration(r)["state"] == "measured").count();
    assert_eq!(kept, measured.min(1), "one file, and nothing unfinished");
}

#[test]
fn a_configuration_may_leave_nothing_to_measure() {
    let Some(machine) = with_gpu(&[]) else { return };
    for (text, state, reason) in [
        ("calibrate = false", "disabled", None),
        ("strategy = \"direct\"", "not_used", Some("strategy = \"direct\"")),
        ("staging_bytes = 0", "not_used", Some("staging_bytes = 0")),
        ("backend = \"fallback\"", "not_used", Some("backend = \"fallback\"")),
    ] {
        machine.file("maru.toml", &format!("[transfer]\n{text}\n"));
        let config = machine.path("maru.toml");
        let config = config.to_str().expect("UTF-8");
        for arguments in [&["--config", config][..], &["--config", config, "--no-probe"]] {
            let report = machine.report(arguments, &[("MARU_SIM_CUDA", KNOWN)]);
            let found = calibration(&report);
            assert_eq!((found["state"].as_str(), found["reason"].as_str()), (Some(state), reason), "{found}");
            assert!(found["file"].is_null() && found["seconds"].is_null(), "{found}");
            for row in list(&found["rows"]) {
                assert_eq!(row["staged_from_bytes"].as_u64(), Some(16 << 20), "{found}");
                assert!(list(&row["samples"]).is_empty() && row["copy_engine_bytes"].is_null(), "{found}");
            }
        }
    }
    assert!(!machine.path("cache").exists(), "something was measured");
}

#[test]
fn a_calibration_that_cannot_be_made_or_kept_is_no_failure() {
    let Some(machine) = with_gpu(&[]) else { return };
    for (script, reason) in [
        ("devices=1", "which it is"),
        ("devices=1;uuid=9;memory_bytes=167772160", "measuring failed"),
        ("devices=1;uuid=9;cc_major=6", "does not load"),
        ("devices=1;uuid=9;fail_all=cuDevicePrimaryCtxRetain:1:2", "does not load"),
    ] {
        let report = machine.report(&[], &[("MARU_SIM_CUDA", script)]);
        let found = calibration(&report);
        assert!(found["reason"].as_str().is_some_and(|r| r.contains(reason)), "{script}: {found}");
    }
    machine.file("cache", "no directory");
    let report = machine.report(&[], &[("MARU_SIM_CUDA", KNOWN)]);
    let found = calibration(&report);
    if found["state"] == "measured" {
        assert!(found["file"].is_null(), "{found}");
        assert_eq!(severities(&report, "calibration cannot be kept"), ["note"]);
    }
}
