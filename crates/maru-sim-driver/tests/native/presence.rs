//! What is said where something is missing.

use std::path::Path;
use std::process::Command;

use maru_kernel_cuda::{KernelError, PagedCopyKernel, availability, open_context};
use maru_sim_driver::{Session, write_library};

use crate::common::{Test, context};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        no_device,
        a_device_out_of_range,
        an_image_that_the_driver_refuses,
        no_memory,
        no_library,
        a_library_of_the_other_name,
        a_library_that_lacks_a_function,
    ]
}

/// Set in a process that is to say what it finds.
const PROBE: &str = "MARU_TEST_PROBE";

fn says(outcome: Result<(), KernelError>, expected: &str) {
    let found = outcome.map_or_else(|e| format!("{}: {e}", e.kind()), |()| "ok".to_owned());
    assert!(found.starts_with(expected), "{found}");
}

fn no_device(session: &Session) {
    session.set("devices", 0);
    says(availability(0), "not_available: the NVIDIA driver reports no usable GPU (CUDA_ERROR_NO_DEVICE)");
}

fn a_device_out_of_range(session: &Session) {
    session.set("devices", 1);
    says(availability(3), "invalid_argument: device cuda:3 does not exist; this machine has 1");
}

fn an_image_that_the_driver_refuses(session: &Session) {
    let context = context(0);
    session.fail_from("cuModuleLoadData", 1, 200);
    let loaded = PagedCopyKernel::load(context.clone()).map(drop);
    says(loaded, "not_available: the kernel's portable PTX did not load: CUDA_ERROR_INVALID_IMAGE (200)");
}

fn no_memory(session: &Session) {
    let context = context(0);
    session.fail("cuMemHostAlloc", 1, 2);
    let loaded = PagedCopyKernel::load(context.clone()).map(drop);
    says(loaded, "out_of_memory: cuMemHostAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
}

/// Runs what [`probe`] does in a process that looks for the library in one folder.
fn elsewhere(folder: &Path) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.env(PROBE, "1").env("LD_LIBRARY_PATH", folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(output.status.success(), "{text}; {}", String::from_utf8_lossy(&output.stderr));
    text
}

fn no_library(_: &Session) {
    let found = elsewhere(Path::new("/nonexistent"));
    // A real driver may be installed here.
    let expected = "not_available: no NVIDIA driver: neither libcuda.so nor libcuda.so.1";
    assert!(found.starts_with(expected) || found == "ok", "{found}");
}

fn a_library_of_the_other_name(_: &Session) {
    let folder = tempfile::tempdir().unwrap();
    let library = write_library(folder.path(), &[]).unwrap();
    std::fs::rename(library, folder.path().join("libcuda.so.1")).unwrap();
    assert_eq!(elsewhere(folder.path()), "ok");
}

fn a_library_that_lacks_a_function(_: &Session) {
    let folder = tempfile::tempdir().unwrap();
    write_library(folder.path(), &["cuThreadExchangeStreamCaptureMode"]).unwrap();
    let found = elsewhere(folder.path());
    let expected = "not_available: the NVIDIA driver is too old: its library has no \
                    cuThreadExchangeStreamCaptureMode; driver 525 or later is needed";
    assert_eq!(found, expected);
}

/// In a process that was started for it: prints `ok` or kind and text of the error. Whether it was.
pub(crate) fn probe() -> bool {
    if std::env::var_os(PROBE).is_none() {
        return false;
    }
    match open_context(0).and_then(PagedCopyKernel::load) {
        Ok(_) => println!("ok"),
        Err(error) => println!("{}: {error}", error.kind()),
    }
    true
}
