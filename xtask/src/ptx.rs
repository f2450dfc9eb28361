//! The portable image of the CUDA kernel: `crates/maru-kernel-cuda/ptx/*.ptx`, made by a pinned NVRTC.
//!
//! The compiler comes as a Python wheel that is fetched into the target directory, checked by its hash and
//! unpacked there. Nothing is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

type Error = Box<dyn std::error::Error>;

/// PTX ISA 8.0: drivers from 525 on.
const WHEEL: &str = "nvidia-cuda-nvrtc-cu12==12.0.140";
const SHA256: &str = "8e94e991d85c422de4da87bdc7472fdc1364367bd4aace7000b559cd33122071";
/// The oldest architecture of the image; later ones run it too.
const ARCH: &str = "compute_70";

/// Source, headers, image; relative to the kernel crate.
const IMAGES: [(&str, &[&str], &str); 2] = [
    ("cuda/paged_copy.cu", &["cuda/paged_copy.h"], "ptx/paged_copy.ptx"),
    ("cuda/stall.cu", &[], "ptx/stall.ptx"),
];

/// `ptx` compiles the images anew; `ptx --check` compiles and compares them, byte for byte.
pub(crate) fn run(args: &[String]) -> Result<(), Error> {
    let check = match args {
        [] => false,
        [flag] if flag == "--check" => true,
        other => return Err(format!("ptx takes --check or nothing, not {other:?}").into()),
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask has no parent folder")?;
    let kernel = root.join("crates/maru-kernel-cuda");
    let work = target_dir(root).join("nvrtc-12.0.140");
    let library = fetch(&work)?;
    let mut stale = Vec::new();
    for (source, headers, image) in IMAGES {
        let made = work.join("image.ptx");
        let mut command = Command::new("python3");
        command.args(["-c", include_str!("nvrtc.py")]).arg(&library).arg(&made).arg(ARCH);
        command.arg(kernel.join(source));
        command.args(headers.iter().map(|header| kernel.join(header)));
        execute(&mut command, "the compiler")?;
        let image = kernel.join(image);
        let made = fs::read(&made)?;
        match check {
            true if fs::read(&image).ok().as_ref() == Some(&made) => {
                println!("{} is current", image.display());
            }
            true => stale.push(image.display().to_string()),
            false => {
                fs::write(&image, made)?;
                println!("wrote {}", image.display());
            }
        }
    }
    match stale.is_empty() {
        true => Ok(()),
        false => Err(format!("stale, run `cargo xtask ptx`: {}", stale.join(", ")).into()),
    }
}

/// Where cargo puts what it builds.
pub(crate) fn target_dir(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// The compiler's library, fetched unless it is there already.
fn fetch(work: &Path) -> Result<PathBuf, Error> {
    let library = work.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    if library.is_file() {
        return Ok(library);
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("the pinned compiler exists for Linux on x86-64 only".into());
    }
    fs::create_dir_all(work)?;
    let requirements = work.join("requirements.txt");
    fs::write(&requirements, format!("{WHEEL} --hash=sha256:{SHA256}\n"))?;
    let mut download = Command::new("python3");
    download.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    download.args(["--only-binary=:all:", "--require-hashes", "-d"]).arg(work).arg("-r").arg(requirements);
    execute(&mut download, "fetching the compiler's wheel")?;
    let wheel = fs::read_dir(work)?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .ok_or("pip left no wheel")?;
    let mut unpack = Command::new("python3");
    unpack.args(["-m", "zipfile", "-e"]).arg(wheel).arg(work);
    execute(&mut unpack, "unpacking the compiler's wheel")?;
    match library.is_file() {
        true => Ok(library),
        false => Err(format!("the wheel has no {}", library.display()).into()),
    }
}

fn execute(command: &mut Command, what: &str) -> Result<(), Error> {
    let output = command.output().map_err(|error| format!("{what}: python3 cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{what} failed:\n{}", String::from_utf8_lossy(&output.stderr).trim()).into())
}
