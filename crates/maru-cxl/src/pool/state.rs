//! Which slabs of a pool are free, and the lease that gives one back.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::lock::WriterLock;
use crate::error::CxlError;

/// The writer's view of its slabs.
#[derive(Debug)]
pub(super) struct Ledger {
    state: Mutex<State>,
    count: u64,
}

#[derive(Debug)]
pub(super) struct State {
    /// Oldest first: a slab rests as long as possible before it is used again.
    pub(super) free: VecDeque<u64>,
    /// Published slabs by index, each with the entry that names it.
    pub(super) published: HashMap<u64, (Arc<Lease>, u64)>,
    /// Slabs that cross a border of registered pieces; never handed out.
    pub(super) unusable: u64,
}

impl Ledger {
    pub(super) fn new(count: u64, published: HashMap<u64, (Arc<Lease>, u64)>) -> Self {
        let free = (0..count).filter(|index| !published.contains_key(index)).collect();
        Self { state: Mutex::new(State { free, published, unusable: 0 }), count }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }
}

const HELD: u8 = 0;
const FREED: u8 = 1;
const PUBLISHED: u8 = 2;

/// A slab's place in its pool, shared by all handles to the slab. The slab becomes free when the last one is
/// gone, so freeing it while a transfer still runs cannot hand it to somebody else.
#[derive(Debug)]
pub(crate) struct Lease {
    ledger: Weak<Ledger>,
    /// Keeps the writer's lock while anything of this process may still write to the slab.
    _lock: Arc<WriterLock>,
    index: u64,
    status: AtomicU8,
}

impl Lease {
    pub(super) fn held(ledger: &Arc<Ledger>, lock: &Arc<WriterLock>, index: u64) -> Self {
        Self::with_status(Arc::downgrade(ledger), lock, index, HELD)
    }

    pub(super) fn published(ledger: Weak<Ledger>, lock: &Arc<WriterLock>, index: u64) -> Self {
        Self::with_status(ledger, lock, index, PUBLISHED)
    }

    fn with_status(ledger: Weak<Ledger>, lock: &Arc<WriterLock>, index: u64, status: u8) -> Self {
        Self { ledger, _lock: Arc::clone(lock), index, status: AtomicU8::new(status) }
    }

    pub(super) fn index(&self) -> u64 {
        self.index
    }

    pub(super) fn is_of(&self, ledger: &Arc<Ledger>) -> bool {
        std::ptr::eq(self.ledger.as_ptr(), Arc::as_ptr(ledger))
    }

    /// Held -> freed.
    pub(super) fn free(&self) -> Result<(), CxlError> {
        self.change(FREED)
    }

    /// Held -> published.
    pub(super) fn publish(&self) -> Result<(), CxlError> {
        self.change(PUBLISHED)
    }

    fn change(&self, to: u8) -> Result<(), CxlError> {
        match self.status.compare_exchange(HELD, to, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(PUBLISHED) => Err(CxlError::SlabPublished { index: self.index }),
            Err(_) => Err(CxlError::DoubleFree { index: self.index }),
        }
    }

    /// Published -> freed: the key was withdrawn.
    pub(super) fn withdrawn(&self) {
        self.status.store(FREED, Ordering::Release);
    }

    /// Published -> held: publishing failed after all.
    pub(super) fn unpublish(&self) {
        self.status.store(HELD, Ordering::Release);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A published slab loses its lease only when the pool itself goes; then there is no ledger any more.
        if *self.status.get_mut() == PUBLISHED {
            return;
        }
        if let Some(ledger) = self.ledger.upgrade() {
            ledger.lock().free.push_back(self.index);
        }
    }
}
