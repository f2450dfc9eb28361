//! What launches in flight report and tell, kept with the events that say when they are over.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaContext;
use maru_driver::{DeviceBuffer, DriverError, PinnedBuffer};

use crate::abi::{PagedCopyArgs, PagedCopyError, RUNS};

/// Tickets made at once. The first batch is made when the kernel is loaded; more only if more launches are
/// in flight than ever before.
const BATCH: usize = 256;

/// Tickets that can tell. Their counters are made when the kernel is loaded: device memory is not to be had while others
/// launch.
const TELLING: usize = 64 * BATCH;

/// Loads in flight that tell of their layers.
const LAYERED: usize = 64;

/// An event, and the memory of its launch.
pub(crate) type Ticket = maru_driver::Ticket<Record>;

/// Where a launch reports a bad slot and tells how far it is. It has one owner at a time: that of its ticket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    /// In pinned host memory, as the host addresses it.
    host: *mut PagedCopyError,
    /// The same as the device addresses it.
    pub(crate) device: u64,
    /// `None` for tickets beyond [`TELLING`].
    words: Option<Words>,
    /// Whether it tells of layers, and belongs to their pool.
    layered: bool,
}

/// Words of a ticket: one, or [`RUNS`] if it tells of layers.
#[derive(Clone, Copy, Debug)]
struct Words {
    /// In pinned host memory, written by the device.
    host: *const AtomicU64,
    /// The same as the device addresses them.
    seen: u64,
    /// As many in device memory, if it tells of layers.
    device: u64,
    /// As many 32-bit counters in device memory.
    counters: u64,
    count: usize,
    /// The last value that a launch was given; the host's alone.
    issued: *const AtomicU64,
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
        // SAFETY: as for the record.
        let issued = unsafe { &*words.issued };
        // No value comes twice. The last one also stands in the word, which the device wrote: slow to read.
        Some(Told { words, value: issued.fetch_add(1, Ordering::Relaxed) + 1 })
    }
}

impl Words {
    fn get(&self, run: usize) -> u64 {
        let word = self.host.wrapping_add(run.min(self.count - 1));
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
    launches: maru_driver::Tickets<Record>,
    layered: maru_driver::Tickets<Record>,
    memory: Mutex<Memory>,
    /// A counter for each of [`TELLING`] launches, then words and counters of [`LAYERED`] loads.
    device: DeviceBuffer,
    context: maru_driver::Context,
}

/// What holds the records. Never shrinks, as the pools.
#[derive(Debug, Default)]
struct Memory {
    /// Vectors, not boxes: records point into them, and a box that moves claims what it holds for itself.
    held: Vec<(PinnedBuffer, Vec<AtomicU64>)>,
    /// Launches' records made so far.
    made: usize,
}

const ERROR: usize = size_of::<PagedCopyError>();
const WORD: usize = size_of::<u64>();
const COUNTER: usize = size_of::<u32>();

impl Tickets {
    /// Both pools with their first batch. For set-up: it waits. The context is current.
    pub(crate) fn new(context: &maru_driver::Context) -> Result<Self, DriverError> {
        let pool = |batch| maru_driver::Tickets::new(context.get(), batch);
        let zeros = vec![0; TELLING * COUNTER + LAYERED * RUNS * (WORD + COUNTER)];
        let device = DeviceBuffer::holding(context.get(), &zeros)?;
        let (launches, layered, context) = (pool(BATCH), pool(LAYERED), context.clone());
        let tickets = Tickets { launches, layered, memory: Mutex::default(), device, context };
        tickets.give_back(tickets.take()?, true);
        tickets.give_back(tickets.layered.take(|count| tickets.layered_records(count))?, true);
        Ok(tickets)
    }

    /// A ticket whose event and record nobody uses. The context is current.
    pub(crate) fn take(&self) -> Result<Ticket, DriverError> {
        self.launches.take(|count| self.records(count))
    }

    /// One for a load that tells of its layers, if there is one left. The context is current.
    pub(crate) fn take_layered(&self) -> Result<Option<Ticket>, DriverError> {
        self.layered.take_unused()
    }

    /// Gives a ticket back. `complete`: its launch is known to be over.
    pub(crate) fn give_back(&self, ticket: Ticket, complete: bool) {
        let pool = if ticket.payload.layered { &self.layered } else { &self.launches };
        pool.give_back(ticket, complete);
    }

    fn records(&self, count: usize) -> Result<Vec<Record>, DriverError> {
        let (memory, issued) = self.zeroed(count * (ERROR + WORD), count)?;
        let mut state = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let words = |i: usize| {
            let counter = state.made + i;
            (counter < TELLING).then(|| Words {
                host: memory.host().wrapping_add(count * ERROR + i * WORD).cast::<AtomicU64>(),
                seen: memory.device() + (count * ERROR + i * WORD) as u64,
                device: 0,
                counters: self.device.addr() + (counter * COUNTER) as u64,
                count: 1,
                issued: &raw const issued[i],
            })
        };
        let records = (0..count).map(|i| Record {
            host: memory.host().wrapping_add(i * ERROR).cast::<PagedCopyError>(),
            device: memory.device() + (i * ERROR) as u64,
            words: words(i),
            layered: false,
        });
        let records = records.collect();
        state.made += count;
        state.held.push((memory, issued));
        Ok(records)
    }

    /// Made once, for at most [`LAYERED`] loads.
    fn layered_records(&self, count: usize) -> Result<Vec<Record>, DriverError> {
        let (memory, issued) = self.zeroed(ERROR + LAYERED * RUNS * WORD, LAYERED)?;
        let words = |i: usize| {
            let (word, counter) = (i * RUNS * WORD, (LAYERED * WORD + i * COUNTER) * RUNS);
            let device = self.device.addr() + (TELLING * COUNTER) as u64;
            Words {
                host: memory.host().wrapping_add(ERROR + word).cast::<AtomicU64>(),
                seen: memory.device() + (ERROR + word) as u64,
                device: device + word as u64,
                counters: device + counter as u64,
                count: RUNS,
                issued: &raw const issued[i],
            }
        };
        // Their slots are on the host, so that they report nothing.
        let (host, device) = (memory.host().cast::<PagedCopyError>(), memory.device());
        let record = |i| Record { host, device, words: Some(words(i)), layered: true };
        let records = (0..count.min(LAYERED)).map(record).collect();
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).held.push((memory, issued));
        Ok(records)
    }

    fn zeroed(&self, bytes: usize, records: usize) -> Result<(PinnedBuffer, Vec<AtomicU64>), DriverError> {
        let context: &Arc<CudaContext> = self.context.get();
        let memory = PinnedBuffer::new(context, bytes)?;
        // SAFETY: the memory has that length, and nobody else knows it yet.
        unsafe { memory.host().write_bytes(0, memory.len()) };
        Ok((memory, (0..records).map(|_| AtomicU64::new(0)).collect()))
    }
}
