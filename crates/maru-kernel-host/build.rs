//! Compiles `cuda/paged_copy.cu` of maru-kernel-cuda as C++ for the host. Without a C++ compiler the crate
//! still builds, and its tests say that they were left out; `MARU_REQUIRE_CXX=1` makes that an error.

use std::env;
use std::fs;
use std::path::PathBuf;

const KERNEL: &str = "../maru-kernel-cuda/cuda";

fn main() {
    println!("cargo::rustc-check-cfg=cfg(maru_cxx)");
    println!("cargo::rerun-if-changed={KERNEL}");
    println!("cargo::rerun-if-changed=host");
    println!("cargo::rerun-if-env-changed=MARU_REQUIRE_CXX");
    let required = env::var("MARU_REQUIRE_CXX").is_ok_and(|v| !v.is_empty() && v != "0");
    let built = cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .include(KERNEL)
        .include("host")
        .file("host/host.cpp")
        .warnings(true)
        .flag_if_supported("-Wno-unknown-pragmas")
        .try_compile("maru_kernel_host");
    let built = built.map_err(|error| error.to_string()).and_then(|()| stand_in_driver());
    match built {
        Ok(folder) => {
            println!("cargo::rustc-cfg=maru_cxx");
            println!("cargo::rustc-env=MARU_STAND_IN_DRIVER={}", folder.display());
        }
        Err(error) if required => println!("cargo::error=MARU_REQUIRE_CXX is set, but {error}"),
        Err(error) => {
            println!("cargo::rustc-env=MARU_NO_CXX={}", error.replace('\n', " "));
        }
    }
}

/// Builds the stand-in for the driver library; returns its folder. There it has both of its names, and in the
/// subfolder `so1` only `libcuda.so.1`.
fn stand_in_driver() -> Result<PathBuf, String> {
    let folder = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?).join("driver");
    fs::create_dir_all(folder.join("so1")).map_err(|error| error.to_string())?;
    let tool = cc::Build::new().cpp(true).std("c++17").opt_level(2).get_compiler();
    let library = folder.join("libcuda.so");
    let mut command = tool.to_command();
    command.args(["-shared", "-fPIC", "-fvisibility=hidden", "-Wno-unknown-pragmas"]);
    command.args(["-I", KERNEL, "-I", "host", "host/fake_driver.cpp", "-o"]).arg(&library);
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr)));
    }
    for copy in ["libcuda.so.1", "so1/libcuda.so.1"] {
        fs::copy(&library, folder.join(copy)).map_err(|error| error.to_string())?;
    }
    Ok(folder)
}
