//! Faults others met, through the public API: every case and the rest of its kind.
//!
//! One file per kind; `docs/faults.md` is the index. Tests that move bytes run once per mover: on the host, and
//! on the device as the kernel's direct launch, staged through the ring, and by the copy engine – on a GPU, or
//! else on the simulated driver, which runs the kernel's own source. What cannot run here shows as ignored.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests of small sizes")]
#![allow(clippy::cast_sign_loss, clippy::cast_possible_wrap, reason = "tests of small sizes")]

#[macro_use]
mod harness;
#[path = "../conformance/memory.rs"]
mod memory;
mod rig;

mod axes;
mod config;
mod contexts;
mod devices;
mod fuzz;
mod layers;
mod moves;
mod order;
mod registration;
mod sizes;
mod slabs;
mod slots;
mod types;

fn main() {
    harness::run(
        [
            axes::tests(),
            config::tests(),
            contexts::tests(),
            devices::tests(),
            fuzz::tests(),
            layers::tests(),
            moves::tests(),
            order::tests(),
            registration::tests(),
            sizes::tests(),
            slabs::tests(),
            slots::tests(),
            types::tests(),
        ]
        .into_iter()
        .flatten(),
    );
}
