//! What this process holds for all calls: engines, transfers in flight, and the difference a fork makes.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaContext;
use maru_transfer::config::{Config, DeviceChoice};
use maru_transfer::{Place, Transfer, TransferEngine};
use pyo3::prelude::*;
use smallvec::SmallVec;

use crate::errors::Fault;
use crate::legacy::Registrations;
use crate::memory::Memory;
use crate::waiting::Waiters;

/// Transfers that nobody holds before it is asked which of them are over, and most that are given back at once: a
/// call's cost must not depend on the queue's length.
const REAPED_AT: usize = 4;

/// Takes a lock whose data is valid at every step, so that a panic elsewhere does not spread.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Everything that belongs to one process. A forked child gets a new one: threads and locks of the parent's
/// do not exist there.
pub(crate) struct Process {
    pid: u32,
    engines: Mutex<Vec<(Place, TransferEngine)>>,
    contexts: Mutex<Vec<(u32, Arc<CudaContext>)>>,
    in_flight: Mutex<VecDeque<Box<InFlight>>>,
    failed: Mutex<Option<Fault>>,
    pub(crate) memory: Memory,
    pub(crate) registrations: Registrations,
    pub(crate) waiters: Waiters,
}

/// A transfer with what must live until it is over. In a box from first to last: it goes through more hands than would
/// be worth copying it for.
pub(crate) struct InFlight {
    pub(crate) transfer: Transfer,
    pub(crate) keep: Keep,
}

/// Objects that a transfer keeps alive: most often a cache, a slab and its slots.
pub(crate) type Keep = SmallVec<[Py<PyAny>; 3]>;

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
/// The process that initialised CUDA through us; the driver does not survive a fork.
static CUDA_OWNER: AtomicU32 = AtomicU32::new(0);

/// This process's id, kept so that asking costs no system call.
static PID: AtomicU32 = AtomicU32::new(0);

/// Notes every fork from now on. Called once, when the module is made.
pub(crate) fn watch_forks() {
    unsafe extern "C" fn in_child() {
        PID.store(std::process::id(), Ordering::Release);
    }
    PID.store(std::process::id(), Ordering::Release);
    // SAFETY: the handler only stores a number, which is safe in a forked child, and is never unloaded, as
    // Python does not unload extension modules.
    let code = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if code != 0 {
        tracing::warn!(code, "forks of this process will not be noticed");
    }
}

/// The id of the process that asks.
pub(crate) fn pid() -> u32 {
    PID.load(Ordering::Acquire)
}

/// This process's state.
pub(crate) fn process() -> &'static Process {
    let pid = pid();
    loop {
        let at = PROCESS.load(Ordering::Acquire);
        // SAFETY: null or a leaked box, which is never freed.
        if let Some(process) = unsafe { at.as_ref() }
            && process.pid == pid
        {
            return process;
        }
        let new = Box::into_raw(Box::new(Process::new(pid)));
        if PROCESS.compare_exchange(at, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: nobody else has seen it.
            drop(unsafe { Box::from_raw(new) });
        }
    }
}

/// A value with threads or driver handles in it, which only the process that made it may use or drop.
#[derive(Debug)]
pub(crate) struct Owned<T> {
    pid: u32,
    value: ManuallyDrop<T>,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Owned { pid: pid(), value: ManuallyDrop::new(value) }
    }

    pub(crate) fn get(&self, what: &str) -> Result<&T, Fault> {
        match self.pid == pid() {
            true => Ok(&self.value),
            false => Err(Fault::state(format!(
                "this {what} was made in process {} and does not work in its forked child {}; make a new one here, \
                 or start workers with multiprocessing's spawn method",
                self.pid,
                pid()
            ))),
        }
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.pid == pid() {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    /// For attributes that need neither threads nor driver.
    fn deref(&self) -> &T {
        &self.value
    }
}

impl Process {
    fn new(pid: u32) -> Self {
        Process {
            pid,
            engines: Mutex::default(),
            contexts: Mutex::default(),
            in_flight: Mutex::default(),
            failed: Mutex::default(),
            memory: Memory::default(),
            registrations: Registrations::default(),
            waiters: Waiters::default(),
        }
    }

    /// The engine that serves calls without one of their own. Blocks when it is opened.
    pub(crate) fn engine(&self, place: Place) -> Result<TransferEngine, Fault> {
        let mut engines = lock(&self.engines);
        if let Some((_, engine)) = engines.iter().find(|(p, _)| *p == place) {
            return Ok(engine.clone());
        }
        let mut config = Config::default();
        config.transfer.device = match place {
            Place::Cuda(n) => {
                cuda_allowed()?;
                DeviceChoice::Cuda(n)
            }
            _ => DeviceChoice::Host,
        };
        let engine = TransferEngine::open(&config)?;
        if matches!(place, Place::Cuda(_)) {
            claim_cuda();
        }
        engines.push((place, engine.clone()));
        Ok(engine)
    }

    /// The primary context of a device, for questions to the driver.
    pub(crate) fn context(&self, device: u32) -> Result<Arc<CudaContext>, Fault> {
        let mut contexts = lock(&self.contexts);
        if let Some((_, context)) = contexts.iter().find(|(n, _)| *n == device) {
            return Ok(Arc::clone(context));
        }
        cuda_allowed()?;
        let ordinal = usize::try_from(device).unwrap_or(usize::MAX);
        let context = maru_kernel_cuda::open_context(ordinal)
            .map_err(|e| Fault { kind: e.kind(), message: format!("cuda:{device} cannot be used: {e}") })?;
        claim_cuda();
        contexts.push((device, Arc::clone(&context)));
        Ok(context)
    }

    /// Keeps a transfer of a cache in `place` and its objects until it is over. Whether it is, is asked later, by
    /// [`Process::reap`]: once a transfer and not twice. On the host, and in a graph, it is over now.
    pub(crate) fn park(&self, place: Place, flight: Box<InFlight>) {
        if place == Place::Host || flight.transfer.captured() {
            return;
        }
        lock(&self.in_flight).push_back(flight);
    }

    /// Gives back what finished transfers held, now and then: asking for the oldest of a few finds it over, where
    /// asking for the newest would be in vain. The GIL is held, so that objects can be dropped.
    pub(crate) fn reap(&self, py: Python<'_>) {
        self.reap_of(py, REAPED_AT);
    }

    /// The same whatever their number.
    pub(crate) fn reap_some(&self, py: Python<'_>) {
        self.reap_of(py, 1);
    }

    /// The same if there are so many.
    fn reap_of(&self, _py: Python<'_>, least: usize) {
        let mut over = SmallVec::<[Box<InFlight>; REAPED_AT]>::new();
        {
            let mut queue = lock(&self.in_flight);
            if queue.len() < least {
                return;
            }
            while over.len() < REAPED_AT {
                match queue.front_mut().map(|first| first.transfer.is_done()) {
                    Some(Ok(false)) | None => break,
                    Some(outcome) => {
                        if let Err(e) = outcome {
                            self.note(e.into());
                        }
                        over.extend(queue.pop_front());
                    }
                }
            }
        }
        // Outside the lock: an object's finaliser may make a call of ours.
        drop(over);
    }

    /// Waits for everything in flight that nobody holds. Blocks; the objects come back to be dropped with the
    /// GIL held.
    pub(crate) fn drain(&self) -> (Vec<Py<PyAny>>, Result<(), Fault>) {
        let queue = std::mem::take(&mut *lock(&self.in_flight));
        let mut kept = Vec::new();
        for flight in queue {
            let InFlight { transfer, keep } = *flight;
            if let Err(e) = transfer.wait() {
                self.note(e.into());
            }
            kept.extend(keep);
        }
        let failed = lock(&self.failed).take();
        (kept, failed.map_or(Ok(()), Err))
    }

    /// A failure of a transfer that nobody holds: logged, and told by the next `synchronize()`.
    fn note(&self, fault: Fault) {
        tracing::error!(error = %fault.message, "a transfer failed in flight");
        lock(&self.failed).get_or_insert(fault);
    }
}

/// Refuses the driver in a child of a process that used it.
pub(crate) fn cuda_allowed() -> Result<(), Fault> {
    let owner = CUDA_OWNER.load(Ordering::Acquire);
    match owner == 0 || owner == pid() {
        true => Ok(()),
        false => Err(Fault::state(format!(
            "process {owner} used CUDA before it forked this one ({}); CUDA does not survive a fork: start workers \
             with multiprocessing's spawn method",
            pid()
        ))),
    }
}

pub(crate) fn claim_cuda() {
    CUDA_OWNER.store(pid(), Ordering::Release);
}
