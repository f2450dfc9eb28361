//! Against a real device-dax node, named by `MARU_DAX_DEV`. Everything on it is overwritten.
//!
//! Without one every case shows as ignored; `MARU_REQUIRE_DAX=1` makes that a failure. `MARU_DAX_THROWAWAY=1`
//! (a virtual machine) adds the cases that unbind the device or mount file systems. With `MARU_DAX_PEER=0` and `=1`
//! two machines over one memory run the "two hosts" case instead. `MARU_DAX_PLANT_FAILURE=1` adds a case that fails.

#![allow(clippy::unwrap_used, reason = "a test program, where a failure is a panic")]

mod common;
#[path = "dax_device/hosts.rs"]
mod hosts;
#[path = "dax_device/kernel.rs"]
mod kernel;
#[path = "dax_device/library.rs"]
mod library;
#[path = "dax_device/throwaway.rs"]
mod throwaway;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libtest_mimic::{Arguments, Failed, Trial};
use maru_cxl::{DaxDevice, DeviceKind};

/// One case: a name, and what to run with the open device.
type Case = (&'static str, fn(&DaxDevice));

/// A case that begins with the device closed.
type ClosedCase = (&'static str, fn(&Path));

/// Cases share one device, so they take turns.
static TURN: Mutex<()> = Mutex::new(());

fn main() -> ExitCode {
    if let Some(code) = library::child() {
        return code;
    }
    let args = Arguments::from_args();
    let device = std::env::var_os("MARU_DAX_DEV").map(PathBuf::from);
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
    let peer = std::env::var("MARU_DAX_PEER").ok();
    if device.is_none() && set("MARU_REQUIRE_DAX") && !args.list {
        eprintln!("MARU_REQUIRE_DAX=1, but MARU_DAX_DEV names no device");
        return ExitCode::FAILURE;
    }
    let mut trials = Vec::new();
    let open =
        [(kernel::CASES, peer.is_none()), (library::CASES, peer.is_none()), (hosts::CASES, peer.is_some())];
    for (cases, available) in open {
        for &(name, run) in cases {
            let path = device.clone();
            let trial = Trial::test(name, move || {
                let (_turn, device) = take_turn(path)?;
                run(&device);
                Ok(())
            });
            trials.push(trial.with_ignored_flag(!available || device.is_none()));
        }
    }
    let available = device.is_some() && peer.is_none() && set("MARU_DAX_THROWAWAY");
    for &(name, run) in throwaway::CASES {
        let path = device.clone();
        let trial = Trial::test(name, move || {
            let (_turn, device) = take_turn(path)?;
            let path = device.path().to_owned();
            drop(device);
            run(&path);
            Ok(())
        });
        trials.push(trial.with_ignored_flag(!available));
    }
    if set("MARU_DAX_PLANT_FAILURE") {
        // Shows that a failing case fails whatever runs these.
        trials.push(Trial::test("planted::this_case_fails", || Err("planted".into())));
    }
    libtest_mimic::run(&args, trials).exit_code()
}

/// Waits for the device, opens it, and insists that it is one.
fn take_turn(path: Option<PathBuf>) -> Result<(MutexGuard<'static, ()>, DaxDevice), Failed> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let path = path.ok_or("MARU_DAX_DEV is not set")?;
    let device = DaxDevice::open(&path).map_err(|error| error.to_string())?;
    if device.kind() != DeviceKind::Device {
        return Err(format!("{} is no character device; these cases are about one", path.display()).into());
    }
    Ok((turn, device))
}
