//! A driver that does as it is told: for tests here and in the crates above.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Access, DriverFailure, HostRegistrar};

/// One call a [`ScriptedRegistrar`] received, addresses as numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `register(addr, len)`.
    Register(u64, u64),
    /// `unregister(addr)`.
    Unregister(u64),
    /// `quiesce()`.
    Quiesce,
}

/// A [`HostRegistrar`] without a driver: it records every call, keeps the book a driver would keep, and fails
/// where it was told to.
#[derive(Debug)]
pub struct ScriptedRegistrar {
    state: Mutex<State>,
    device_shift: Option<u64>,
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<Call>,
    registered: BTreeMap<u64, u64>,
    attempts: usize,
    fail_attempt: Option<usize>,
    fail_from_len: Option<u64>,
    fail_unregister: bool,
    fail_quiesce: bool,
}

impl Default for ScriptedRegistrar {
    fn default() -> Self {
        Self { state: Mutex::default(), device_shift: Some(0) }
    }
}

impl ScriptedRegistrar {
    /// A driver that takes everything; device addresses equal host addresses.
    pub fn new() -> Self {
        Self::default()
    }

    /// Device addresses are host addresses plus `shift`; with `None` the device has none.
    #[must_use]
    pub fn with_device_shift(mut self, shift: Option<u64>) -> Self {
        self.device_shift = shift;
        self
    }

    /// Fails the `n`-th call of `register`, counted from 1.
    #[must_use]
    pub fn failing_at(self, n: usize) -> Self {
        self.state().fail_attempt = Some(n);
        self
    }

    /// Fails `register` for this many bytes and more, as a driver's table limit does.
    #[must_use]
    pub fn failing_from_len(self, bytes: u64) -> Self {
        self.state().fail_from_len = Some(bytes);
        self
    }

    /// Whether `unregister` fails from now on.
    pub fn set_fail_unregister(&self, fail: bool) {
        self.state().fail_unregister = fail;
    }

    /// Whether `quiesce` fails from now on.
    pub fn set_fail_quiesce(&self, fail: bool) {
        self.state().fail_quiesce = fail;
    }

    /// Every call so far.
    pub fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    /// What is registered now: address and length.
    pub fn registered(&self) -> Vec<(u64, u64)> {
        self.state().registered.iter().map(|(&addr, &len)| (addr, len)).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failure(code: u32, text: &str) -> Result<(), DriverFailure> {
    Err(DriverFailure { code, text: text.to_owned() })
}

impl HostRegistrar for ScriptedRegistrar {
    fn register(&self, addr: NonNull<u8>, len: usize, _access: Access) -> Result<(), DriverFailure> {
        let (addr, len) = (addr.addr().get() as u64, len as u64);
        let mut state = self.state();
        state.calls.push(Call::Register(addr, len));
        state.attempts += 1;
        if state.fail_attempt == Some(state.attempts) {
            return failure(1, "CUDA_ERROR_INVALID_VALUE: scripted");
        }
        if state.fail_from_len.is_some_and(|limit| len >= limit) {
            return failure(2, "CUDA_ERROR_OUT_OF_MEMORY: scripted");
        }
        if state.registered.iter().any(|(&other, &size)| addr < other + size && other < addr + len) {
            return failure(712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: scripted");
        }
        state.registered.insert(addr, len);
        Ok(())
    }

    fn unregister(&self, addr: NonNull<u8>) -> Result<(), DriverFailure> {
        let addr = addr.addr().get() as u64;
        let mut state = self.state();
        state.calls.push(Call::Unregister(addr));
        if state.fail_unregister {
            return failure(999, "CUDA_ERROR_UNKNOWN: scripted");
        }
        match state.registered.remove(&addr) {
            Some(_) => Ok(()),
            None => failure(713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: scripted"),
        }
    }

    fn device_pointer(&self, addr: NonNull<u8>) -> Result<u64, DriverFailure> {
        let addr = addr.addr().get() as u64;
        match self.device_shift.and_then(|shift| addr.checked_add(shift)) {
            Some(device) => Ok(device),
            None => Err(DriverFailure { code: 801, text: "CUDA_ERROR_NOT_SUPPORTED: scripted".to_owned() }),
        }
    }

    fn quiesce(&self) -> Result<(), DriverFailure> {
        let mut state = self.state();
        state.calls.push(Call::Quiesce);
        if state.fail_quiesce { failure(700, "CUDA_ERROR_ILLEGAL_ADDRESS: scripted") } else { Ok(()) }
    }
}
