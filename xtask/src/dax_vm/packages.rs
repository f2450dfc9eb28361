//! Kernel, emulator and shell, from the distribution's packages, unpacked and never installed.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Outcome;

const KERNEL: &str = "linux-image-cloud-amd64";

/// What was unpacked.
#[derive(Debug)]
pub(super) struct Tools {
    /// The kernel's image.
    pub(super) kernel: PathBuf,
    /// Its modules, in the order in which they are loaded.
    pub(super) modules: Vec<PathBuf>,
    /// A static busybox.
    pub(super) busybox: PathBuf,
    /// Where QEMU was unpacked; `None` for the one that is installed.
    qemu: Option<PathBuf>,
}

/// Fetches what is missing.
pub(super) fn fetch(work: &Path, offline: bool) -> Outcome<Tools> {
    let done = work.join("packages.done");
    if !done.exists() {
        if offline {
            return Err(
                "the packages for the virtual machine are not there; run `cargo xtask dax-vm --fetch-only` \
                        on a machine with network access"
                    .into(),
            );
        }
        let _ = fs::remove_dir_all(work.join("packages"));
        if output(Command::new("apt-cache").args(["show", KERNEL])).is_err() {
            output(Command::new("apt-get").args(["-qq", "update"]))?;
        }
        unpack(work, "kernel", &[kernel_package()?])?;
        unpack(work, "busybox", &["busybox-static".to_owned()])?;
        if !qemu_is_installed() {
            unpack(work, "qemu", &qemu_packages()?)?;
        }
        fs::write(&done, "")?;
    }
    find(work)
}

/// The package that the metapackage stands for today.
fn kernel_package() -> Outcome<String> {
    let text = output(Command::new("apt-cache").args(["depends", KERNEL]))?;
    let depends = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let image = depends.map(str::trim).find(|name| name.starts_with("linux-image-"));
    Ok(image.ok_or_else(|| format!("{KERNEL} depends on no kernel image"))?.to_owned())
}

/// QEMU and those of its libraries that this machine lacks.
fn qemu_packages() -> Outcome<Vec<String>> {
    let simulation = ["install", "--simulate", "--no-install-recommends", "qemu-system-x86"];
    let text = output(Command::new("apt-get").args(simulation))?;
    let names = text.lines().filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next());
    Ok(names.map(str::to_owned).collect())
}

fn qemu_is_installed() -> bool {
    output(Command::new("qemu-system-x86_64").arg("--version")).is_ok()
}

fn unpack(work: &Path, name: &str, packages: &[String]) -> Outcome {
    let archives = work.join("packages").join(format!("{name}.debs"));
    let root = work.join("packages").join(name);
    fs::create_dir_all(&archives)?;
    fs::create_dir_all(&root)?;
    // Without this apt complains that its unprivileged user cannot reach the folder.
    let download = ["-qq", "-o", "APT::Sandbox::User=root", "download"];
    output(Command::new("apt-get").args(download).args(packages).current_dir(&archives))?;
    for archive in fs::read_dir(&archives)? {
        output(Command::new("dpkg").arg("-x").arg(archive?.path()).arg(&root))?;
    }
    fs::remove_dir_all(&archives)?;
    Ok(())
}

fn find(work: &Path) -> Outcome<Tools> {
    let packages = work.join("packages");
    let boot = packages.join("kernel/boot");
    let kernel = fs::read_dir(&boot)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")))
        .ok_or_else(|| format!("no kernel in {}", boot.display()))?;
    let modules = ["dax_hmem", "device_dax"].map(|name| module(&packages.join("kernel/lib/modules"), name));
    let modules = modules.into_iter().collect::<Outcome<Vec<_>>>()?;
    let qemu = packages.join("qemu");
    let qemu = qemu.join("usr/bin/qemu-system-x86_64").exists().then_some(qemu);
    Ok(Tools { kernel, modules, busybox: packages.join("busybox/bin/busybox"), qemu })
}

/// A module by name; newer kernels pack them, and busybox wants them plain.
fn module(dir: &Path, name: &str) -> Outcome<PathBuf> {
    let found = walk(dir)?.into_iter().find(|path| {
        let file = path.file_name().map(|file| file.to_string_lossy().into_owned()).unwrap_or_default();
        file == format!("{name}.ko") || file == format!("{name}.ko.xz")
    });
    let found = found.ok_or_else(|| format!("the kernel package has no module {name}"))?;
    if found.extension().is_some_and(|extension| extension == "xz") {
        output(Command::new("xz").arg("-dk").arg(&found))?;
        return Ok(found.with_extension(""));
    }
    Ok(found)
}

fn walk(dir: &Path) -> Outcome<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(walk(&entry.path())?);
        } else {
            found.push(entry.path());
        }
    }
    Ok(found)
}

impl Tools {
    /// QEMU, ready for its arguments.
    pub(super) fn qemu(&self) -> Command {
        let Some(root) = &self.qemu else { return Command::new("qemu-system-x86_64") };
        let mut command = Command::new(root.join("usr/bin/qemu-system-x86_64"));
        let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|dir| root.join(dir));
        let path = std::env::join_paths(libraries).unwrap_or_else(|_| OsString::new());
        command.env("LD_LIBRARY_PATH", path);
        for firmware in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(root.join(firmware));
        }
        command
    }
}

/// Runs a program and returns what it printed.
pub(super) fn output(command: &mut Command) -> Outcome<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{program}: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{program} failed ({}): {}", output.status, text.trim()).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
