//! Miri over the pure parts and over the host mover on heap memory. `docs/faults.md` says what that covers.
//!
//! The toolchain is a dated nightly, so that a new one changes nothing here until this file says so.

use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Output};
use std::thread;

use crate::ptx::target_dir;

type Error = Box<dyn std::error::Error>;

const TOOLCHAIN: &str = "nightly-2026-05-20";

/// Exit status where Miri cannot be had, as test harnesses have it for "skipped".
pub(crate) const UNAVAILABLE: u8 = 77;

/// A package, its test binaries, Miri's flags and what the binaries are told.
type Run = (&'static str, &'static [&'static str], &'static str, &'static [&'static str]);

/// Slots and slabs are addresses in numbers, so the mover's pointers come from exposed ones.
const NUMBERS: &str = "-Zmiri-permissive-provenance";
/// What is pure has no need of that.
const PURE: &str = "-Zmiri-strict-provenance";
/// The thread pool's dependency crossbeam-epoch is at odds with Stacked Borrows, and its threads outlive `main`.
const POOL: &str = "-Zmiri-permissive-provenance -Zmiri-tree-borrows -Zmiri-ignore-leaks";

/// Two lanes of about the same length; the runs of a lane come one after the other.
const LANES: [&[Run]; 2] = [
    &[("maru-layout", &["detect", "detect_stated", "layouts", "pieces"], PURE, &[])],
    &[
        ("maru-fallback", &["miri"], NUMBERS, &[]),
        ("maru-fallback", &["miri"], POOL, &["--ignored"]),
        ("maru-layout", &["jobs"], PURE, &[]),
    ],
];

/// Why Miri did not run.
pub(crate) enum Failure {
    /// It cannot be installed; `MARU_REQUIRE_MIRI` is not set.
    Unavailable(String),
    /// It can, and something is wrong.
    Failed(Error),
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(e: E) -> Self {
        Failure::Failed(e.into())
    }
}

/// Installs the toolchain where it is missing, and runs everything.
pub(crate) fn run() -> Result<(), Failure> {
    if let Err(reason) = install() {
        return match std::env::var_os("MARU_REQUIRE_MIRI") {
            Some(_) => Err(format!("MARU_REQUIRE_MIRI is set: {reason}").into()),
            None => Err(Failure::Unavailable(reason)),
        };
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask has no parent folder")?;
    said(&miri(root, PURE, &["setup"]).output()?, "building the standard library for Miri")?;
    for run in LANES.concat() {
        said(&test(root, &run, &["--no-run"]).output()?, &format!("building the tests of {}", run.0))?;
    }
    let outputs = thread::scope(|scope| {
        let lane = |runs: &'static [Run]| move || runs.iter().map(|run| test(root, run, &[]).output());
        let lanes = LANES.map(|runs| scope.spawn(move || lane(runs)().collect::<Vec<_>>()));
        lanes.map(|lane| lane.join().map_err(|_| "a thread of xtask panicked"))
    });
    let mut failed = Vec::new();
    for (runs, outputs) in LANES.iter().zip(outputs) {
        for ((package, tests, flags, _), output) in runs.iter().zip(outputs?) {
            let what = format!("{package} {} with {flags}", tests.join(" "));
            println!("-- {what}");
            if said(&output?, &what).is_err() {
                failed.push(what);
            }
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("Miri failed: {}", failed.join("; ")).into()),
    }
}

/// Makes sure of the toolchain, or says why it cannot be had.
fn install() -> Result<(), String> {
    let components = ["--profile", "minimal", "--component", "miri", "--component", "rust-src"];
    let mut command = Command::new("rustup");
    command.args(["toolchain", "install", TOOLCHAIN, "--no-self-update"]).args(components);
    match command.output() {
        Err(e) => Err(format!("rustup, which installs {TOOLCHAIN}, did not start: {e}")),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            let reason = text.lines().filter(|line| !line.starts_with("info:")).collect::<Vec<_>>().join(" ");
            Err(format!("rustup cannot install {TOOLCHAIN}: {}", reason.trim()))
        }
    }
}

fn miri(root: &Path, flags: &str, args: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", TOOLCHAIN, "cargo", "miri"]).args(args).current_dir(root);
    // What the cargo that runs this task left there is about another toolchain.
    for variable in ["RUSTUP_TOOLCHAIN", "CARGO", "RUSTC", "RUSTDOC", "RUSTFLAGS"] {
        command.env_remove(variable);
    }
    command.env("MIRIFLAGS", flags).env("CARGO_TARGET_DIR", target_dir(root));
    command
}

fn test(root: &Path, (package, tests, flags, told): &Run, cargo: &[&str]) -> Command {
    let mut command = miri(root, flags, &["test", "--quiet", "--package", package]);
    for test in *tests {
        command.args(["--test", test]);
    }
    command.args(cargo).arg("--").args(*told);
    command
}

/// Prints what a command wrote if it tests something or fails.
fn said(output: &Output, what: &str) -> Result<(), Error> {
    let quiet = output.status.success() && output.stdout.is_empty();
    if !quiet {
        io::stdout().write_all(&output.stdout)?;
    }
    match output.status.success() {
        true => Ok(()),
        false => {
            io::stderr().write_all(&output.stderr)?;
            Err(format!("{what} failed ({})", output.status).into())
        }
    }
}
