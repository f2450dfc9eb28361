//! One test at a time has the simulator.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{SimError, Simulator, install};

static TURN: Mutex<()> = Mutex::new(());

/// A turn with the simulator, which is in its initial state. Dropping it waits for work in flight and resets.
#[derive(Debug)]
pub struct Session {
    simulator: &'static Simulator,
    _turn: MutexGuard<'static, ()>,
}

/// Waits for its turn.
///
/// # Errors
/// As [`install`].
pub fn session() -> Result<Session, SimError> {
    let simulator = install()?;
    // A test that panicked leaves nothing that the reset does not put right.
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    simulator.reset();
    simulator.mend();
    Ok(Session { simulator, _turn: turn })
}

impl Session {
    /// Nothing that is queued begins until the returned value is dropped. What waits for held work goes on
    /// after `hold_seconds`, and [`Simulator::holds_expired`] tells.
    pub fn hold(&self) -> Hold {
        self.simulator.hold_work();
        Hold { simulator: self.simulator }
    }
}

impl Deref for Session {
    type Target = Simulator;

    fn deref(&self) -> &Simulator {
        self.simulator
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.simulator.reset();
        self.simulator.mend();
    }
}

/// Work is held back until this is dropped.
#[derive(Debug)]
#[must_use = "dropping it lets the work go on"]
pub struct Hold {
    simulator: &'static Simulator,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.simulator.release_work();
    }
}

impl Simulator {
    /// Contexts that failed work again.
    fn mend(&self) {
        for device in 0..8 {
            self.poison(device, 0);
        }
    }
}
