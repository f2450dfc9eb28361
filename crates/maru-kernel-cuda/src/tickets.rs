//! What launches in flight report and tell, kept with the events that say when they are over.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaContext;
use maru_driver::{DeviceBuffer, DriverError, PinnedBuffer};

use crate::abi::{PagedCopyArgs, PagedCopyError, RUNS};

/// Tickets made at once. The first batch is made when the kernel is loaded; more only if more launches are
/// in flight than ever before.
const BATCH: usize = 256;

/// An event, and the memory of its launch.
pub(crate) type Ticket = maru_driver::Ticket<Record>;

/// Where a launch reports a bad slot and tells how far it is. It has one owner at a time: that of its ticket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    /// In pinned host memory, as the host addresses it.
    host: *mut PagedCopyError,
    /// The same as the device addresses it.
    pub(crate) device: u64,
    /// `None` for tickets that were made after the first batch: making these words takes device memory, which is
    /// not to be had while others launch.
    words: Option<Words>,
}

/// Words of a ticket's runs.
#[derive(Clone, Copy, Debug)]
struct Words {
    /// [`RUNS`] words in pinned host memory, which the device writes.
    host: *const AtomicU64,
    /// The same as the device addresses them.
    seen: u64,
    /// As many in device memory.
    device: u64,
    /// As many 32-bit counters in device memory.
    counters: u64,
}

// SAFETY: addresses, whose record its owner alone touches.
unsafe impl Send for Record {}
// SAFETY: as above; it is read by volatile and atomic loads.
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

    /// How the next launch tells; to be asked once a launch, before it.
    pub(crate) fn next(&self) -> Option<Told> {
        let words = self.words?;
        // The first word is written by every launch that tells anything, so that no value comes twice.
        Some(Told { words, value: words.get(0) + 1 })
    }
}

impl Words {
    fn get(&self, run: usize) -> u64 {
        let word = self.host.wrapping_add(run.min(RUNS - 1));
        // SAFETY: one of the words, which live as long as the pool, which the owner of the ticket keeps alive.
        let word = unsafe { &*word };
        // What the device wrote before is there once its word is.
        word.load(Ordering::Acquire)
    }
}

/// What a launch tells: word `run` becomes `value` when that run is there. A launch without runs has one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    words: Words,
    value: u64,
}

// SAFETY: as for `Record`.
unsafe impl Send for Told {}
// SAFETY: as for `Record`.
unsafe impl Sync for Told {}

impl Told {
    /// Whether a run is there. Asks no driver.
    pub(crate) fn is_there(&self, run: usize) -> bool {
        self.words.get(run) >= self.value
    }

    /// Lets a launch tell.
    pub(crate) fn by(&self, args: &mut PagedCopyArgs) {
        (args.counters, args.seen, args.value) = (self.words.counters, self.words.seen, self.value);
    }

    /// The words in device memory.
    pub(crate) fn device(&self) -> u64 {
        self.words.device
    }

    /// A word in device memory and what it becomes.
    pub(crate) fn device_word(&self, run: usize) -> (u64, u64) {
        (self.words.device + 8 * run as u64, self.value)
    }
}

/// All tickets of a kernel.
#[derive(Debug)]
pub(crate) struct Tickets {
    pool: maru_driver::Tickets<Record>,
    /// Holds the records. Never shrinks, as the pool.
    memory: Mutex<Vec<PinnedBuffer>>,
    /// Holds words and counters of the first batch.
    words: DeviceBuffer,
    context: maru_driver::Context,
}

impl Tickets {
    /// A pool with its first batch to be made when the first ticket is taken. For set-up: it waits.
    pub(crate) fn new(context: &maru_driver::Context) -> Result<Self, DriverError> {
        let pool = maru_driver::Tickets::new(context.get(), BATCH);
        let words = DeviceBuffer::holding(context.get(), &vec![0; BATCH * RUNS * (8 + 4)])?;
        Ok(Tickets { pool, memory: Mutex::default(), words, context: context.clone() })
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
        const ERROR: usize = size_of::<PagedCopyError>();
        const WORDS: usize = RUNS * size_of::<u64>();
        let context: &Arc<CudaContext> = self.context.get();
        let mut held = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let first = held.is_empty() && count <= BATCH;
        let memory = PinnedBuffer::new(context, count * if first { ERROR + WORDS } else { ERROR })?;
        // SAFETY: the memory has that length, and nobody else knows it yet.
        unsafe { memory.host().write_bytes(0, memory.len()) };
        let words = |i: usize| {
            let (at, counter) = (count * ERROR + i * WORDS, BATCH * WORDS + i * RUNS * size_of::<u32>());
            Words {
                host: memory.host().wrapping_add(at).cast::<AtomicU64>(),
                seen: memory.device() + at as u64,
                device: self.words.addr() + (i * WORDS) as u64,
                counters: self.words.addr() + counter as u64,
            }
        };
        let records = (0..count).map(|i| Record {
            host: memory.host().wrapping_add(i * ERROR).cast::<PagedCopyError>(),
            device: memory.device() + (i * ERROR) as u64,
            words: first.then(|| words(i)),
        });
        let records = records.collect();
        held.push(memory);
        Ok(records)
    }
}
