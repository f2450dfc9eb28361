//! Booting a machine and reading its serial console.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::packages::Tools;
use super::{DEVICE_BYTES, Outcome, first_bytes};

/// A machine that takes longer is dead.
const LIMIT: Duration = Duration::from_secs(240);

/// Physical address of the device: above the machine's ordinary memory and the hole below 4 GiB.
const ADDRESS: u64 = 1 << 32;

/// e820 type of "soft reserved" memory.
const SOFT_RESERVED: u32 = 0xefff_ffff;

/// What to boot.
pub(super) struct Machine<'a> {
    pub(super) tools: &'a Tools,
    pub(super) image: &'a Path,
    pub(super) memory: &'a Path,
    /// Passed to the first process through the kernel's command line.
    pub(super) variables: &'a [&'a str],
}

/// A machine that runs.
pub(super) struct Running {
    qemu: Child,
    log: PathBuf,
    start: Instant,
}

impl Machine<'_> {
    /// Starts it; its console goes to `log`.
    pub(super) fn boot(&self, log: &Path) -> Outcome<Running> {
        let memory = self.memory.display();
        let mut command = self.tools.qemu();
        command
            .args(["-accel", "tcg", "-machine", "q35,nvdimm=on"])
            // QEMU 7.2 leaves garbage in the flags after cmpxchg16b, of which newer kernels die; without the
            // feature they do not use it.
            .args(["-cpu", "max,-cx16", "-smp", "1", "-m", "1G,slots=2,maxmem=64G"])
            .arg("-object")
            .arg(format!("memory-backend-file,id=dax,share=on,size={DEVICE_BYTES},mem-path={memory}"))
            .args(["-device", &format!("nvdimm,id=dax0,memdev=dax,addr={ADDRESS:#x}")])
            .args(["-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"])
            .arg("-kernel")
            .arg(&self.tools.kernel)
            .arg("-initrd")
            .arg(self.image)
            .arg("-append")
            .arg(format!(
                "console=ttyS0 quiet panic=-1 oops=panic memmap={DEVICE_BYTES:#x}%{ADDRESS:#x}+{SOFT_RESERVED:#x} {}",
                self.variables.join(" ")
            ))
            .stdin(Stdio::null())
            .stdout(File::create(log)?)
            .stderr(File::options().append(true).open(log)?);
        Ok(Running { qemu: command.spawn()?, log: log.to_owned(), start: Instant::now() })
    }
}

impl Running {
    /// Waits for its end (or ends it after the limit) and reads what it said.
    pub(super) fn finish(mut self) -> Outcome<Report> {
        let ended = loop {
            if let Some(status) = self.qemu.try_wait()? {
                break Some(status);
            }
            if self.start.elapsed() > LIMIT {
                self.qemu.kill()?;
                self.qemu.wait()?;
                break None;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let console = String::from_utf8_lossy(&fs::read(&self.log)?).replace('\r', "");
        print!("{console}");
        let mut report = Report::read(console);
        let seconds = self.start.elapsed().as_secs_f64();
        match ended {
            Some(status) if status.success() => println!("dax-vm: the machine ran for {seconds:.1} s"),
            Some(status) => report.problems.push(format!("QEMU ended with {status}")),
            None => report.problems.push(format!("the machine did not end within {} s", LIMIT.as_secs())),
        }
        Ok(report)
    }
}

/// What a machine said.
#[derive(Debug, Default)]
pub(super) struct Report {
    console: String,
    pub(super) passed: u64,
    pub(super) failed: u64,
    /// Tests passed by the program that insists on a character device.
    pub(super) on_device: u64,
    pub(super) problems: Vec<String>,
}

impl Report {
    fn read(console: String) -> Self {
        let mut report = Self::default();
        let (mut current, mut done) = (None, false);
        for line in console.lines() {
            if let Some(name) = line.strip_prefix("DAXVM-BEGIN: ") {
                current = Some(name.to_owned());
            } else if let Some(end) = line.strip_prefix("DAXVM-END: ") {
                current = None;
                if !end.ends_with(" 0") {
                    report.problems.push(format!("a program failed: {end}"));
                }
            } else if let Some((passed, failed)) = counts(line) {
                report.passed += passed;
                report.failed += failed;
                if current.as_deref() == Some("dax_device") {
                    report.on_device += passed;
                }
            } else if let Some(complaint) = line.strip_prefix("DAXVM-KERNEL: ") {
                report.problems.push(format!("the kernel complained: {complaint}"));
            } else if line.starts_with("DAXVM-DONE: ") {
                done = true;
            }
        }
        if let Some(name) = current {
            report.problems.push(format!("{name} began and did not end"));
        }
        if !done {
            report.problems.push("the machine did not reach its end".to_owned());
        }
        report.console = console;
        report
    }

    /// The named program must have run to its end.
    pub(super) fn expect(&mut self, name: &str) {
        if !self.console.lines().any(|line| line == format!("DAXVM-END: {name} 0")) {
            self.problems.push(format!("{name} did not succeed"));
        }
        if self.on_device == 0 {
            self.problems.push("no test ran against the device node".to_owned());
        }
    }

    /// The line must be on the console.
    pub(super) fn expect_line(&mut self, text: &str) {
        if !self.console.lines().any(|line| line.contains(text)) {
            self.problems.push(format!("the console does not say {text:?}"));
        }
    }

    /// The tests write a device header; it must be in the file behind the device.
    pub(super) fn check_memory(&mut self, memory: &Path) -> Outcome {
        let found = first_bytes(memory)?;
        if found != *b"MARUDEV\0" {
            self.problems.push(format!("the memory's file begins with {found:?}, not with a device header"));
        }
        Ok(())
    }
}

/// Passed and failed, of a line `test result: ok. 3 passed; 0 failed; ...`.
fn counts(line: &str) -> Option<(u64, u64)> {
    let text = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let mut numbers =
        text.split("; ").map(|part| part.split(' ').next().and_then(|number| number.parse().ok()));
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "DAXVM-BEGIN: dax_device\ntest result: ok. 31 passed; 0 failed; 1 ignored; 0 measured\n\
                        DAXVM-END: dax_device 0\nDAXVM-DONE: 3.2\n";

    #[test]
    fn a_good_console_is_read_as_such() {
        let mut report = Report::read(GOOD.to_owned());
        report.expect("dax_device");
        assert_eq!((report.passed, report.failed, report.on_device), (31, 0, 31));
        assert!(report.problems.is_empty());
    }

    #[test]
    fn whatever_is_missing_is_a_problem() {
        for (from, to) in [
            ("dax_device 0", "dax_device 101"),
            ("DAXVM-DONE", "x"),
            ("DAXVM-END: dax_device 0\n", ""),
            ("31 passed", "0 passed"),
            ("DAXVM-DONE", "DAXVM-KERNEL: BUG: unable\nDAXVM-DONE"),
        ] {
            let mut report = Report::read(GOOD.replace(from, to));
            report.expect("dax_device");
            assert!(!report.problems.is_empty(), "{from}");
        }
    }

    #[test]
    fn result_lines_are_counted() {
        assert_eq!(counts("test result: FAILED. 2 passed; 7 failed; 0 ignored"), Some((2, 7)));
        assert_eq!(counts("test something ... ok"), None);
    }
}
