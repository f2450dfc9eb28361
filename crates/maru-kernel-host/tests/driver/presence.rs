//! What `availability` says where something is missing. Each in a process of its own, as the driver library is
//! loaded once.

use std::process::{Command, ExitCode};

use libtest_mimic::{Failed, Trial};
use maru_kernel_cuda::{KernelError, PagedCopyKernel, availability, open_context};

use crate::faults::{device, fault};

/// Names the probe that a process is to run.
pub(crate) const PROBE: &str = "MARU_TEST_PROBE";

pub(crate) fn trials() -> Vec<Trial> {
    let probes = [
        ("no_driver_library", "", "not_available: no NVIDIA driver: neither libcuda.so nor libcuda.so.1"),
        ("only_libcuda_so_1", "so1", "ok"),
        ("no_device", ".", "not_available: the NVIDIA driver reports no usable GPU (CUDA_ERROR_NO_DEVICE)"),
        (
            "device_too_old",
            ".",
            "not_available: device cuda:0 has compute capability 6.1; the kernel needs 7.0",
        ),
        ("unknown_ptx_version", ".", "not_available: the driver does not know the image's PTX version 8.0"),
        ("unloadable_image", ".", "not_available: the kernel's portable PTX did not load"),
        ("out_of_memory", ".", "out_of_memory: cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ("device_out_of_range", ".", "invalid_argument: device cuda:3 does not exist; this machine has 1"),
    ];
    let trial = |(name, folder, expected)| {
        Trial::test(format!("presence::{name}"), move || run(name, folder, expected))
    };
    probes.into_iter().map(trial).collect()
}

fn run(name: &str, folder: &str, expected: &str) -> Result<(), Failed> {
    let libraries = match folder {
        "" => "/nonexistent".to_owned(),
        folder => format!("{}/{folder}", crate::STAND_IN.ok_or("no stand-in")?),
    };
    let mut probe = Command::new(std::env::current_exe()?);
    let output = probe.env(PROBE, name).env("LD_LIBRARY_PATH", libraries).output()?;
    let found = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let panicked = String::from_utf8_lossy(&output.stderr).into_owned();
    // A real driver may be installed beside the stand-in.
    let real = folder != "." && found.starts_with("ok");
    match found.starts_with(expected) || real {
        true => Ok(()),
        false => Err(format!("{found:?}, expected {expected:?}; {panicked}").into()),
    }
}

/// Runs in a process whose library path a trial has chosen; prints `ok` or the kind and text of the error.
pub(crate) fn probe(what: &str) -> ExitCode {
    let outcome = match what {
        "no_device" => {
            device(0, 90);
            availability(0)
        }
        "device_too_old" => {
            device(1, 61);
            availability(0)
        }
        "device_out_of_range" => availability(3),
        "unknown_ptx_version" | "unloadable_image" => load_with(
            "cuModuleLoadData",
            if what.starts_with("un") && what.ends_with("image") { 200 } else { 222 },
        ),
        "out_of_memory" => load_with("cuMemHostAlloc", 2),
        _ => availability(0).and_then(|()| open_context(0)).and_then(PagedCopyKernel::load).map(drop),
    };
    match outcome {
        Ok(()) => println!("ok"),
        Err(error) => println!("{}: {error}", error.kind()),
    }
    ExitCode::SUCCESS
}

fn load_with(function: &str, code: i32) -> Result<(), KernelError> {
    // Once per embedded image.
    (0..4).for_each(|_| fault(function, 1, code));
    PagedCopyKernel::load(open_context(0)?).map(drop)
}
