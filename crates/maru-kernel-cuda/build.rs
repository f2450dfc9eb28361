//! Compiles the kernel to a fat binary where nvcc is found. Without it the library embeds the portable PTX
//! of the repository only, and needs no CUDA toolkit, no network and no C++ compiler to build.
//!
//! `MARU_NVCC` names the compiler; else `$CUDA_HOME/bin`, `$CUDA_PATH/bin`, `PATH` and `/usr/local/cuda/bin`
//! are searched. `MARU_REQUIRE_NVCC=1` makes a missing or failing nvcc an error.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Architectures of the fat binary, of which those that the compiler knows are built. PTX of the newest one
/// is embedded as well, for devices yet to come.
const ARCHITECTURES: [u32; 6] = [80, 86, 89, 90, 100, 120];

/// Built unless `MARU_CUDA_ARCHS` says otherwise: A100 and H100/H200.
const DEFAULT: [u32; 2] = [80, 90];

fn main() {
    println!("cargo::rerun-if-changed=cuda");
    println!("cargo::rerun-if-changed=ptx/paged_copy.ptx");
    println!("cargo::rerun-if-changed=build.rs");
    // Not PATH, which differs between ways to start cargo and would rebuild everything each time.
    for name in ["MARU_NVCC", "MARU_REQUIRE_NVCC", "MARU_CUDA_ARCHS", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let image = out.join("paged_copy.fatbin");
    let required = env::var("MARU_REQUIRE_NVCC").is_ok_and(|v| !v.is_empty() && v != "0");
    let built =
        find_nvcc().ok_or_else(|| "nvcc was not found".to_owned()).and_then(|nvcc| compile(&nvcc, &image));
    let source = match built {
        Ok(by) => {
            format!(
                "/// Made by nvcc.\npub(crate) const FATBIN: Option<&[u8]> = Some(include_bytes!({:?}));\n\
                 const FATBIN_BUILT_BY: &str = {by:?};\n",
                image
            )
        }
        Err(why) if required => {
            println!("cargo::error=MARU_REQUIRE_NVCC is set, but {why}");
            return;
        }
        Err(why) => {
            if env::var_os("MARU_NVCC").is_some() || !why.contains("not found") {
                println!("cargo::warning={why}; only the portable PTX image is embedded");
            }
            "/// nvcc was not used.\npub(crate) const FATBIN: Option<&[u8]> = None;\n\
             const FATBIN_BUILT_BY: &str = \"not built\";\n"
                .to_owned()
        }
    };
    fs::write(out.join("image.rs"), source).expect("OUT_DIR is writable");
}

fn find_nvcc() -> Option<PathBuf> {
    if let Some(stated) = env::var_os("MARU_NVCC").filter(|v| !v.is_empty()) {
        return Some(stated.into());
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let mut places: Vec<PathBuf> = homes.map(|home| Path::new(&home).join("bin")).collect();
    places.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    places.push("/usr/local/cuda/bin".into());
    places.into_iter().map(|dir| dir.join("nvcc")).find(|file| file.is_file())
}

/// Builds the fat binary; returns how, for reports.
fn compile(nvcc: &Path, image: &Path) -> Result<String, String> {
    let known = run(Command::new(nvcc).arg("--list-gpu-arch"))?;
    let wanted: Vec<u32> = match env::var("MARU_CUDA_ARCHS") {
        Ok(list) if !list.trim().is_empty() => list
            .split([',', ' '])
            .filter(|word| !word.is_empty())
            .map(|word| {
                let number = word.parse().ok().filter(|a| ARCHITECTURES.contains(a));
                number.ok_or(format!("MARU_CUDA_ARCHS has {word:?}; allowed: {ARCHITECTURES:?}"))
            })
            .collect::<Result<_, _>>()?,
        _ => DEFAULT.to_vec(),
    };
    let known = |arch: &u32| known.lines().any(|line| line.trim() == format!("compute_{arch}"));
    let archs: Vec<u32> = wanted.into_iter().filter(known).collect();
    let newest =
        *archs.iter().max().ok_or(format!("{} knows none of the architectures wanted", nvcc.display()))?;
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "--fatbin", "-o"]).arg(image).arg("cuda/paged_copy.cu");
    for arch in &archs {
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    command.arg(format!("-gencode=arch=compute_{newest},code=compute_{newest}"));
    run(&mut command)?;
    let version = run(Command::new(nvcc).arg("--version"))?;
    let release = version.split("release ").nth(1).and_then(|rest| rest.split(',').next()).unwrap_or("?");
    let names: Vec<String> = archs.iter().map(|arch| format!("sm_{arch}")).collect();
    Ok(format!("nvcc {release}, {}, PTX compute_{newest}", names.join(" ")))
}

fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?} cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!(
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr).trim().replace('\n', " | ")
    ))
}
