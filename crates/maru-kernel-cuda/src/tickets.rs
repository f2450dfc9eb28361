//! Error records of launches in flight, kept with the events that say when the launches are over.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaContext;
use maru_driver::{DriverError, PinnedBuffer};

use crate::abi::PagedCopyError;

/// Tickets made at once. The first batch is made when the kernel is loaded; more only if more launches are
/// in flight than ever before.
const BATCH: usize = 256;

/// An event and the record of its launch.
pub(crate) type Ticket = maru_driver::Ticket<Record>;

/// Where a launch reports a bad slot. It has one owner at a time: that of its ticket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    /// In pinned host memory, as the host addresses it.
    host: *mut PagedCopyError,
    /// The same as the device addresses it.
    pub(crate) device: u64,
}

// SAFETY: an address, whose record its owner alone touches.
unsafe impl Send for Record {}
// SAFETY: as above; it is read by volatile loads.
unsafe impl Sync for Record {}

impl Record {
    /// What the kernel reported so far.
    pub(crate) fn read(&self) -> PagedCopyError {
        // SAFETY: the record lives as long as the pool, which the owner of the ticket keeps alive; the device
        // may write it meanwhile, hence volatile.
        unsafe { self.host.read_volatile() }
    }

    /// Forgets what was reported.
    pub(crate) fn clear(&self) {
        // SAFETY: as above; no launch that could write the record is in flight for its ticket.
        unsafe { self.host.write_volatile(PagedCopyError::default()) };
    }
}

/// All tickets of a kernel.
#[derive(Debug)]
pub(crate) struct Tickets {
    pool: maru_driver::Tickets<Record>,
    /// Holds the records. Never shrinks, as the pool.
    memory: Mutex<Vec<PinnedBuffer>>,
    context: maru_driver::Context,
}

impl Tickets {
    /// An empty pool; the first ticket taken makes the first batch.
    pub(crate) fn new(context: &maru_driver::Context) -> Self {
        let pool = maru_driver::Tickets::new(context.get(), BATCH);
        Tickets { pool, memory: Mutex::default(), context: context.clone() }
    }

    /// A ticket whose event and record nobody uses. The context is current.
    pub(crate) fn take(&self) -> Result<Ticket, DriverError> {
        self.pool.take(|count| self.records(count))
    }

    /// Gives a ticket back. `complete`: its launch is known to be over.
    pub(crate) fn give_back(&self, ticket: Ticket, complete: bool) {
        self.pool.give_back(ticket, complete);
    }

    fn records(&self, count: usize) -> Result<Vec<Record>, DriverError> {
        const SIZE: usize = size_of::<PagedCopyError>();
        let context: &Arc<CudaContext> = self.context.get();
        let memory = PinnedBuffer::new(context, count * SIZE)?;
        let records = (0..count).map(|i| {
            let host = memory.host().wrapping_add(i * SIZE).cast::<PagedCopyError>();
            let record = Record { host, device: memory.device() + (i * SIZE) as u64 };
            record.clear();
            record
        });
        let records = records.collect();
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        Ok(records)
    }
}
