//! The trials and the device they run on.

use std::sync::{Arc, OnceLock};

use libtest_mimic::{Failed, Trial};

use crate::gpu::Gpu;
use crate::{edges, layers, layouts, ordering, runtime};

pub(crate) type Body = fn(&Gpu) -> Result<(), Failed>;

/// The device, opened once and never dropped: what is left goes with the process.
static GPU: OnceLock<Arc<Gpu>> = OnceLock::new();

/// Every trial, to be run one at a time: there is one device, and some look at timing.
pub(crate) fn trials() -> Vec<Trial> {
    let groups =
        edges::TRIALS.into_iter().chain(ordering::TRIALS).chain(runtime::TRIALS).chain(layers::TRIALS);
    let mut trials: Vec<Trial> = groups.map(|(name, body)| trial(name.into(), body)).collect();
    trials.extend(layouts::trials());
    trials.extend(layers::trials());
    trials
}

/// Gives the trials their device.
pub(crate) fn run_on(gpu: Gpu) {
    let _ = GPU.set(Arc::new(gpu));
}

pub(crate) fn trial(name: String, body: impl FnOnce(&Gpu) -> Result<(), Failed> + Send + 'static) -> Trial {
    Trial::test(name, move || {
        let gpu = GPU.get().ok_or("no device")?;
        gpu.bind();
        body(gpu)
    })
}

pub(crate) fn text(error: impl std::fmt::Display) -> Failed {
    Failed::from(error.to_string())
}
