//! Compiles `cuda/paged_copy.cu` of maru-kernel-cuda as C++ for the host. Without a C++ compiler the crate
//! still builds, and its tests say that they were left out; `MARU_REQUIRE_CXX=1` makes that an error.

use std::env;

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
    match built {
        Ok(()) => println!("cargo::rustc-cfg=maru_cxx"),
        Err(error) if required => println!("cargo::error=MARU_REQUIRE_CXX is set, but {error}"),
        Err(error) => {
            println!("cargo::rustc-env=MARU_NO_CXX={}", error.to_string().replace('\n', " "));
        }
    }
}
