//! `cargo xtask dax-vm`: runs the tests of `maru-cxl` against a real device-dax node, in a throw-away virtual
//! machine, and the main job across two of them that share one memory.
//!
//! Nothing is installed: kernel, QEMU and busybox are Debian packages downloaded with apt and unpacked under
//! `target/dax-vm`. The memory of the device is a file, given to the machine as an NVDIMM it never looks at; a
//! `memmap=` parameter marks that physical range "soft reserved", for which the kernel's `dax_hmem` driver makes
//! `/dev/dax0.0`. Emulated processors have no caches, so a missing flush cannot be caught this way; everything else
//! about the node is the kernel's own code.
//!
//! The verdict is the last line, `DAXVM: PASS` or `DAXVM: FAIL`. It is PASS only if every machine reached its end,
//! every program in it succeeded, the cases that insist on a character device ran, the kernel complained about
//! nothing, and the bytes the tests wrote are in the memory's file.

mod build;
mod image;
mod machine;
mod packages;

use std::error::Error;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use self::build::Program;
use self::machine::{Machine, Report};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const USAGE: &str = "\
cargo xtask dax-vm [OPTIONS]: the tests of maru-cxl, and the main job, on a real device-dax node in virtual machines

  --machines 1|2|all   one machine, two over one memory, or one after the other (default)
  --plant-failure      add a case that fails; the verdict must then be FAIL
  --no-p2p             leave the main job out
  --fetch-only         download and unpack the packages, then stop
  --offline            fail if packages are missing instead of downloading them
  help                 this text";

/// What to do.
#[derive(Debug, Clone, Copy)]
struct Options {
    one: bool,
    two: bool,
    plant_failure: bool,
    fetch_only: bool,
    offline: bool,
    p2p: bool,
}

impl Options {
    fn parse(args: &[String]) -> Outcome<Self> {
        let mut options =
            Self { one: true, two: true, plant_failure: false, fetch_only: false, offline: false, p2p: true };
        let mut args = args.iter().map(String::as_str);
        while let Some(arg) = args.next() {
            match arg {
                "--machines" => {
                    (options.one, options.two) = match args.next() {
                        Some("1") => (true, false),
                        Some("2") => (false, true),
                        Some("all") => (true, true),
                        other => {
                            return Err(format!("--machines is {other:?}; 1, 2 or all are allowed").into());
                        }
                    }
                }
                "--plant-failure" => options.plant_failure = true,
                "--fetch-only" => options.fetch_only = true,
                "--offline" => options.offline = true,
                "--no-p2p" => options.p2p = false,
                other => {
                    return Err(format!("unknown argument {other:?}; see cargo xtask dax-vm help").into());
                }
            }
        }
        Ok(options)
    }
}

/// Runs the task. The error of a run whose verdict is FAIL says so.
pub(crate) fn run(args: &[String]) -> Outcome {
    if args.iter().any(|arg| matches!(arg.as_str(), "--help" | "-h" | "help")) {
        println!("{USAGE}");
        return Ok(());
    }
    let options = Options::parse(args)?;
    let work = work_dir()?;
    let start = Instant::now();
    let tools = packages::fetch(&work, options.offline)?;
    println!("dax-vm: packages ready after {:.1} s, in {}", start.elapsed().as_secs_f64(), work.display());
    if options.fetch_only {
        return Ok(());
    }
    let start = Instant::now();
    let mut programs = build::tests(&work)?;
    if options.p2p {
        programs.push(build::command_line(&work)?);
    }
    println!("dax-vm: {} static programs built in {:.1} s", programs.len(), start.elapsed().as_secs_f64());

    let start = Instant::now();
    let mut reports = Vec::new();
    if options.one {
        reports.extend(one_machine(&work, &tools, &programs, options)?);
    }
    if options.two {
        reports.extend(two_machines(&work, &tools, &programs, options)?);
    }
    let passed: u64 = reports.iter().map(|report| report.passed).sum();
    let failed: u64 = reports.iter().map(|report| report.failed).sum();
    let on_device: u64 = reports.iter().map(|report| report.on_device).sum();
    let problems: Vec<&String> = reports.iter().flat_map(|report| &report.problems).collect();
    for problem in &problems {
        println!("dax-vm: {problem}");
    }
    println!(
        "dax-vm: {passed} tests passed and {failed} failed in {} machine(s), {on_device} of them against the device \
         node, in {:.1} s",
        reports.len(),
        start.elapsed().as_secs_f64()
    );
    let good = problems.is_empty() && failed == 0 && on_device > 0;
    println!("DAXVM: {}", if good { "PASS" } else { "FAIL" });
    if good { Ok(()) } else { Err("the tests in the virtual machine failed".into()) }
}

/// All tests, and the main job, in one machine.
fn one_machine(
    work: &Path,
    tools: &packages::Tools,
    programs: &[Program],
    options: Options,
) -> Outcome<Vec<Report>> {
    let mut steps = String::new();
    for program in programs.iter().filter(|program| program.is_test) {
        steps.push_str(&image::step(&program.name, &format!("/bin/{} --color never", program.name)));
    }
    if options.p2p {
        steps.push_str(&image::step("blank", "MARU_CXL_TEST_CHILD=blank /bin/dax_device"));
        steps.push_str(&image::step("p2p", &format!("/bin/maru p2p --role both {P2P}")));
    }
    let image = image::write(work, "one", tools, programs, &steps)?;
    let memory = fresh_memory(work, "one")?;
    let mut variables = vec!["MARU_DAX_THROWAWAY=1"];
    if options.plant_failure {
        variables.push("MARU_DAX_PLANT_FAILURE=1");
    }
    let machine = Machine { tools, image: &image, memory: &memory, variables: &variables };
    let mut report = machine.boot(&work.join("one.log"))?.finish()?;
    report.expect("dax_device");
    if options.p2p {
        report.expect_line("Cache Hit: Yes");
        report.expect_line("Output verified: Yes");
    }
    report.check_memory(&memory)?;
    Ok(vec![report])
}

/// One machine stores, the other loads, over the same memory.
fn two_machines(
    work: &Path,
    tools: &packages::Tools,
    programs: &[Program],
    options: Options,
) -> Outcome<Vec<Report>> {
    let mut steps = image::step("dax_device", "/bin/dax_device --color never");
    if options.p2p {
        // Two hosts need the caches flushed. The tests have left a pool, which the producer replaces.
        steps.push_str("printf '[cxl]\\ncoherence = \"flush\"\\n' > /tmp/maru.toml\n");
        steps.push_str("force=; [ \"$MARU_P2P_ROLE\" = producer ] && force=--force\n");
        let command =
            format!("/bin/maru p2p --role $MARU_P2P_ROLE $force --config /tmp/maru.toml --timeout 90 {P2P}");
        steps.push_str(&image::step("p2p", &command));
    }
    let image = image::write(work, "two", tools, programs, &steps)?;
    let memory = fresh_memory(work, "two")?;
    let mut running = Vec::new();
    for (peer, role) in
        [("MARU_DAX_PEER=0", "MARU_P2P_ROLE=producer"), ("MARU_DAX_PEER=1", "MARU_P2P_ROLE=consumer")]
    {
        let variables = [peer, role];
        let machine = Machine { tools, image: &image, memory: &memory, variables: &variables };
        running.push(machine.boot(&work.join(format!("two-{}.log", running.len())))?);
    }
    let mut reports = running.into_iter().map(machine::Running::finish).collect::<Outcome<Vec<_>>>()?;
    for report in &mut reports {
        report.expect("dax_device");
    }
    if options.p2p
        && let Some(consumer) = reports.last_mut()
    {
        consumer.expect_line("Cache Hit: Yes");
        consumer.expect_line("Output verified: Yes");
    }
    reports[0].check_memory(&memory)?;
    Ok(reports)
}

/// The main job, small enough for an emulated machine.
const P2P: &str = "--pool /dev/dax0.0 --device host --profile qwen2.5-32b-tp8 --tokens 512";

/// Size of the device in bytes.
const DEVICE_BYTES: u64 = 256 << 20;

/// A new, empty file for the device's memory.
fn fresh_memory(work: &Path, name: &str) -> Outcome<PathBuf> {
    let path = work.join(format!("{name}.mem"));
    let _ = fs::remove_file(&path);
    File::create(&path)?.set_len(DEVICE_BYTES)?;
    Ok(path)
}

/// The first bytes of a file.
fn first_bytes(path: &Path) -> Outcome<[u8; 8]> {
    let mut bytes = [0; 8];
    File::open(path)?.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn work_dir() -> Outcome<PathBuf> {
    let root = workspace();
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let work = target.join("dax-vm");
    fs::create_dir_all(&work)?;
    Ok(fs::canonicalize(work)?)
}

/// The workspace's root.
fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Outcome<Options> {
        Options::parse(&args.iter().map(|&arg| arg.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_understood_or_refused() {
        let all = parse(&[]).unwrap();
        assert!(all.one && all.two && all.p2p && !all.plant_failure);
        assert!(!parse(&["--machines", "2"]).unwrap().one);
        assert!(parse(&["--plant-failure"]).unwrap().plant_failure);
        for wrong in [&["--machines"][..], &["--machines", "3"], &["--what"]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
