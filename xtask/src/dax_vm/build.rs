//! Static programs for the machine, which has no libraries.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Outcome, workspace};

/// Naming the target keeps the flags below away from build scripts and procedural macros.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const FLAGS: &str = "-C target-feature=+crt-static -C strip=debuginfo";

/// A program to be run inside.
#[derive(Debug, Clone)]
pub(super) struct Program {
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) is_test: bool,
}

/// Every test program of `maru-cxl`.
pub(super) fn tests(work: &Path) -> Outcome<Vec<Program>> {
    let programs = cargo(work, &["test", "--no-run", "--package", "maru-cxl", "--lib", "--tests"], true)?;
    if !programs.iter().any(|program| program.name == "dax_device") {
        return Err("maru-cxl has no test program dax_device".into());
    }
    Ok(programs)
}

/// The program `maru`.
pub(super) fn command_line(work: &Path) -> Outcome<Program> {
    let programs = cargo(work, &["build", "--package", "maru-cli", "--bin", "maru"], false)?;
    programs
        .into_iter()
        .find(|program| program.name == "maru")
        .ok_or_else(|| "maru-cli built no program maru".into())
}

fn cargo(work: &Path, args: &[&str], is_test: bool) -> Outcome<Vec<Program>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(args)
        .args(["--target", TARGET, "--message-format", "json-render-diagnostics"])
        .env("RUSTFLAGS", FLAGS)
        .env("CARGO_TARGET_DIR", work.join("build"))
        .current_dir(workspace())
        .stderr(Stdio::inherit())
        .output()?;
    if !output.status.success() {
        return Err(format!("cargo {} failed", args.join(" ")).into());
    }
    let mut programs = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else { continue };
        if let (Some(path), Some(name)) = (message["executable"].as_str(), message["target"]["name"].as_str())
        {
            programs.push(Program { name: name.to_owned(), path: path.into(), is_test });
        }
    }
    Ok(programs)
}
