//! Compiles the simulated driver to `libcuda.so`. Without a C++ compiler the crate still builds, and what
//! depends on it says that it was left out; `MARU_REQUIRE_CXX=1` makes that an error.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// The kernel's source, and its compilation for the host.
const KERNEL: &str = "../maru-kernel-cuda";
const HOST: &str = "../maru-kernel-host/host";

const PARTS: [&str; 11] = [
    "state", "control", "errors", "context", "stream", "graph", "memory", "copy", "kernels", "module",
    "values",
];

fn main() {
    println!("cargo::rerun-if-changed=cuda");
    println!("cargo::rerun-if-changed={KERNEL}/cuda");
    println!("cargo::rerun-if-changed={KERNEL}/ptx/paged_copy.ptx");
    println!("cargo::rerun-if-changed={HOST}");
    println!("cargo::rerun-if-env-changed=MARU_REQUIRE_CXX");
    let required = env::var("MARU_REQUIRE_CXX").is_ok_and(|v| !v.is_empty() && v != "0");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    match build(&out) {
        Ok(library) => println!("cargo::rustc-env=MARU_SIM_LIBRARY={}", library.display()),
        Err(why) if required => println!("cargo::error=MARU_REQUIRE_CXX is set, but {why}"),
        Err(why) => {
            println!("cargo::warning=the simulated driver was not built: {why}");
            println!("cargo::rustc-env=MARU_SIM_MISSING={}", why.replace('\n', " "));
        }
    }
}

fn build(out: &Path) -> Result<PathBuf, String> {
    entries(out)?;
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .opt_level(1)
        .debug(false)
        .pic(true)
        .warnings(true)
        .extra_warnings(true)
        .include(format!("{KERNEL}/cuda"))
        .include(HOST)
        .include(out)
        .flag("-fvisibility=hidden")
        .flag("-pthread")
        .flag_if_supported("-Wno-unknown-pragmas");
    for part in PARTS {
        build.file(format!("cuda/{part}.cpp"));
    }
    let compiler = build.try_get_compiler().map_err(|e| e.to_string())?;
    let objects = build.try_compile_intermediates().map_err(|e| e.to_string())?;
    let library = out.join("libcuda.so");
    let mut link = compiler.to_command();
    link.args(["-shared", "-pthread", "-Wl,-soname,libcuda.so", "-Wl,-z,defs", "-o"]).arg(&library);
    link.args(&objects).arg("-ldl");
    let output = link.output().map_err(|e| format!("{link:?} cannot be run: {e}"))?;
    match output.status.success() {
        true => Ok(library),
        false => Err(format!("linking failed: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// The kernel's entries by name, from its portable image, so that a new one needs nothing here.
fn entries(out: &Path) -> Result<(), String> {
    let path = format!("{KERNEL}/ptx/paged_copy.ptx");
    let ptx = fs::read_to_string(&path).map_err(|e| format!("{path} cannot be read: {e}"))?;
    let mut list = String::new();
    for part in ptx.split(".entry ").skip(1) {
        let name = part.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default();
        writeln!(list, "MARU_SIM_KERNEL({name})").map_err(|e| e.to_string())?;
    }
    fs::write(out.join("entries.inc"), list).map_err(|e| format!("OUT_DIR cannot be written: {e}"))
}
