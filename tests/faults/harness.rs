//! Which tests can run here, and once per what.

use libtest_mimic::{Arguments, Failed, Trial};
use maru_sim_driver::Session;

use crate::rig::{MOVERS, Mover, Rig};

/// A named test and what it needs.
#[derive(Debug)]
pub(crate) struct Test {
    name: &'static str,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// No device.
    Plain(fn()),
    /// Every mover.
    Moved(fn(&Rig)),
    /// Every mover of a device.
    OnDevice(fn(&Rig)),
    /// Devices, this many of them; opens engines of its own, one after the other.
    Devices(usize, fn()),
    /// The simulated driver, and to tell it what to do.
    Simulated(fn(&Session)),
}

impl Test {
    pub(crate) const fn plain(name: &'static str, run: fn()) -> Test {
        Test { name, kind: Kind::Plain(run) }
    }
    pub(crate) const fn moved(name: &'static str, run: fn(&Rig)) -> Test {
        Test { name, kind: Kind::Moved(run) }
    }
    pub(crate) const fn on_device(name: &'static str, run: fn(&Rig)) -> Test {
        Test { name, kind: Kind::OnDevice(run) }
    }
    pub(crate) const fn device(name: &'static str, run: fn()) -> Test {
        Test { name, kind: Kind::Devices(1, run) }
    }
    pub(crate) const fn two_devices(name: &'static str, run: fn()) -> Test {
        Test { name, kind: Kind::Devices(2, run) }
    }
    pub(crate) const fn simulated(name: &'static str, run: fn(&Session)) -> Test {
        Test { name, kind: Kind::Simulated(run) }
    }
}

/// A list of test functions, named after themselves, by what they need.
macro_rules! tests {
    ($($kind:ident: $($name:ident),+ $(,)?;)+) => {
        vec![$($($crate::harness::Test::$kind(stringify!($name), $name)),+),+]
    };
}

/// Where device tests run.
#[derive(Clone, Debug)]
enum Stage {
    Gpu,
    Simulated,
    Nowhere(String),
}

fn stage() -> Stage {
    let required = |variable| std::env::var_os(variable).is_some();
    let Err(no_gpu) = maru::kernel::availability(0) else { return Stage::Gpu };
    if required("MARU_REQUIRE_GPU") {
        return Stage::Gpu;
    }
    match maru_sim_driver::install() {
        Ok(_) => Stage::Simulated,
        Err(_) if required("MARU_REQUIRE_CXX") => Stage::Simulated,
        Err(no_simulator) => Stage::Nowhere(format!("no GPU: {no_gpu}; no simulator: {no_simulator}")),
    }
}

pub(crate) fn run(tests: impl Iterator<Item = Test>) {
    let args = Arguments::from_args();
    let stage = stage();
    let mut trials = Vec::new();
    for Test { name, kind } in tests {
        match kind {
            Kind::Plain(run) => trials.push(Trial::test(name, move || {
                run();
                Ok(())
            })),
            Kind::Moved(run) => trials.extend(MOVERS.iter().map(|mover| moved(name, run, mover, &stage))),
            Kind::OnDevice(run) => {
                let movers = MOVERS.iter().filter(|m| m.device);
                trials.extend(movers.map(|mover| moved(name, run, mover, &stage)));
            }
            Kind::Devices(count, run) => trials.push(devices(name, count, run, &stage)),
            Kind::Simulated(run) => trials.push(simulated(name, run, &stage)),
        }
    }
    libtest_mimic::run(&args, trials).exit();
}

fn moved(name: &str, run: fn(&Rig), mover: &'static Mover, stage: &Stage) -> Trial {
    let simulate = mover.device && matches!(stage, Stage::Simulated);
    let trial = Trial::test(format!("{name}::{}", mover.name), move || {
        let session = simulate.then(session).transpose()?;
        run(&Rig::open(mover, session));
        Ok(())
    });
    match stage {
        Stage::Nowhere(reason) if mover.device => trial.with_kind(reason.clone()).with_ignored_flag(true),
        _ => trial,
    }
}

fn devices(name: &str, count: usize, run: fn(), stage: &Stage) -> Trial {
    let simulate = matches!(stage, Stage::Simulated);
    let trial = Trial::test(name, move || {
        let _turn = simulate.then(session).transpose()?;
        run();
        Ok(())
    });
    match stage {
        Stage::Nowhere(reason) => trial.with_kind(reason.clone()).with_ignored_flag(true),
        // One device is what MARU_REQUIRE_GPU asks for.
        Stage::Gpu => match maru::kernel::device_count() {
            Ok(found) if found < count => {
                trial.with_kind(format!("needs {count} GPUs, here is {found}")).with_ignored_flag(true)
            }
            _ => trial,
        },
        Stage::Simulated => trial,
    }
}

fn simulated(name: &str, run: fn(&Session), stage: &Stage) -> Trial {
    let trial = Trial::test(name, move || {
        run(&session()?);
        Ok(())
    });
    match stage {
        Stage::Simulated => trial,
        Stage::Gpu => trial.with_kind("tells the simulated driver what to do").with_ignored_flag(true),
        Stage::Nowhere(reason) => trial.with_kind(reason.clone()).with_ignored_flag(true),
    }
}

fn session() -> Result<Session, Failed> {
    maru_sim_driver::session().map_err(|e| Failed::from(e.to_string()))
}
