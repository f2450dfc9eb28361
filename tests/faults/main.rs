//! Faults others met, through the public API: every case and the rest of its kind.
//!
//! One file per kind; `docs/faults.md` is the index. Tests that move bytes run once per mover: on the host, and
//! on the device as the kernel's direct launch, staged through the ring, and by the copy engine – on a GPU, or
//! else on the simulated driver, which runs the kernel's own source. What cannot run here shows as ignored.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests of small sizes")]
#![allow(clippy::cast_sign_loss, clippy::cast_possible_wrap, reason = "tests of small sizes")]

mod fuzz;

use libtest_mimic::{Arguments, Trial};

/// A named test.
pub(crate) struct Test {
    name: String,
    run: Box<dyn FnOnce() + Send>,
}

/// A test that needs no device.
pub(crate) fn plain(name: &str, run: impl FnOnce() + Send + 'static) -> Test {
    Test { name: name.to_owned(), run: Box::new(run) }
}

fn main() {
    let args = Arguments::from_args();
    let mut trials = Vec::new();
    for test in [fuzz::tests()].into_iter().flatten() {
        trials.push(Trial::test(test.name, move || {
            (test.run)();
            Ok(())
        }));
    }
    libtest_mimic::run(&args, trials).exit();
}
