//! The device mover on the simulated driver: everything that holds on a GPU, and what happens when driver
//! calls fail. Without a C++ compiler every trial shows as ignored and the reason is printed;
//! `MARU_REQUIRE_CXX=1` makes that a failure when the simulator is built.
#![allow(clippy::unwrap_used, dead_code, reason = "tests; shared modules are used in part")]

#[path = "../../maru-kernel-cuda/tests/common/cases.rs"]
mod cases;
#[path = "device/faults.rs"]
mod faults;
#[path = "device/gpu.rs"]
mod gpu;
#[path = "device/rig.rs"]
mod rig;
#[path = "device/spread.rs"]
mod spread;
#[path = "device/trials.rs"]
mod trials;

use libtest_mimic::{Arguments, Failed, Trial};
use maru_sim_driver::session;

fn main() {
    let mut arguments = Arguments::from_args();
    // They share one driver.
    arguments.test_threads = Some(1);
    let missing = maru_sim_driver::library().err();
    if let Some(reason) = &missing {
        eprintln!("left out: {reason}");
    }
    let general = trials::all().into_iter().map(|(name, body)| {
        Trial::test(name, move || {
            let session = session().map_err(|e| Failed::from(e.to_string()))?;
            let context = gpu::open(0)?;
            // Other addresses on the device, and copies as late as they may be.
            for (shift, lazy) in [(0, 0), (1, 1)] {
                session.set("shift", shift);
                session.set("pageable_lazy", lazy);
                context.bind_to_thread().map_err(|e| Failed::from(e.to_string()))?;
                let before = session.census();
                body(&context).map_err(Failed::from)?;
                assert_eq!(session.census(), before, "something leaked");
            }
            Ok(())
        })
    });
    let faults = faults::TRIALS.into_iter().map(|(name, body)| {
        Trial::test(name, move || {
            let session = session().map_err(|e| Failed::from(e.to_string()))?;
            let context = gpu::open(0)?;
            context.bind_to_thread().map_err(|e| Failed::from(e.to_string()))?;
            body(&session, &context).map_err(Failed::from)
        })
    });
    let trials = general.chain(faults).map(|trial| trial.with_ignored_flag(missing.is_some())).collect();
    libtest_mimic::run(&arguments, trials).exit();
}
