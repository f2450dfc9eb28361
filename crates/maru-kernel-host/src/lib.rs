//! Development only: the CUDA kernel's own source, compiled for the host and driven by the launch geometry
//! that drives it on a device. A machine without a GPU tests the real address arithmetic this way.
//!
//! Only qualifiers, thread indices and intrinsics are replaced (`host/shim.h`). Threads run one after the
//! other: in ascending order, in warps and blocks as on a device, or in descending order, each on its own.

use maru_kernel_cuda::KernelError;
use maru_kernel_cuda::abi::{PagedCopyArgs, PagedCopyError, PagedCopyInlineArgs, RUNS};
use maru_kernel_cuda::geometry::{
    Addresses, BatchLaunch, Launch, Launches, LayersLaunch, Limits, SlotSource,
};
use maru_layout::{CopyJob, JobSlots};

/// Why the kernel cannot be run here, if it cannot.
pub const MISSING: Option<&str> = option_env!("MARU_NO_CXX");

/// How to run a job.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Thread blocks and accesses of a launch.
    pub limits: Limits,
    /// Pass host slots as if they had been uploaded to device memory, in pieces of this many.
    pub upload: Option<u32>,
    /// Run the threads in descending order.
    pub descending: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { limits: Limits::blocks(4), upload: None, descending: false }
    }
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// Launches.
    pub launches: u64,
    /// Accesses to cache and slab, reads and writes.
    pub accesses: u64,
    /// Accesses that a device would have refused for their alignment.
    pub misaligned: u64,
    /// Launches that did not tell that they were over, or left their counter at another value than 0.
    pub untold: u64,
    /// What the kernel reported.
    pub error: PagedCopyError,
}

/// Runs a job on memory of this process: the slab's device address, the planes and device slots are addresses
/// of it.
///
/// # Errors
/// As planning the launches.
///
/// # Safety
/// Every byte that the job names is memory of this process, writable where it is written, and nobody else
/// uses it meanwhile.
pub unsafe fn run(job: &CopyJob, options: Options) -> Result<Ran, KernelError> {
    let mut ran = Ran::default();
    let bases = job.plan().bases();
    let mut error = PagedCopyError::default();
    let addresses = Addresses { planes: bases.as_ptr() as u64, error: std::ptr::from_mut(&mut error) as u64 };
    let (host, source): (&[i64], _) = match job.slots() {
        JobSlots::Device { addr, .. } => (&[], SlotSource::Device { addr: *addr }),
        JobSlots::Host { slots, .. } => match options.upload {
            Some(capacity) => (slots, SlotSource::Uploaded { capacity }),
            None => (slots, SlotSource::Inline),
        },
        _ => (&[], SlotSource::Inline),
    };
    for mut launch in Launches::new(job, source, addresses, options.limits)? {
        let slots = launch.slots(host);
        if source == SlotSource::Inline {
            for (piece, slots) in launch.inline_pieces(slots) {
                let mut args = PagedCopyInlineArgs { copy: piece.args, slots: [0; _] };
                args.slots[..slots.len()].copy_from_slice(slots);
                let mut told = Told::default();
                told.by(&mut args.copy);
                // SAFETY: the caller's promise; the entry takes these arguments.
                unsafe { start(&piece, &args, options.descending, &mut ran) };
                told.count(&mut ran);
            }
        } else {
            if let SlotSource::Uploaded { .. } = source {
                launch.args.slots = slots.as_ptr() as u64;
            }
            let mut args: PagedCopyArgs = launch.args;
            let mut told = Told::default();
            told.by(&mut args);
            // SAFETY: as above.
            unsafe { start(&launch, &args, options.descending, &mut ran) };
            told.count(&mut ran);
        }
    }
    // The kernel wrote it through its address.
    // SAFETY: a local variable.
    ran.error = unsafe { std::ptr::from_ref(&error).read_volatile() };
    Ok(ran)
}

/// Runs the longest beginning of `jobs` that can share a launch; returns how many that is, 0 for none.
///
/// # Safety
/// As [`run`], for every job.
pub unsafe fn run_batch(jobs: &[CopyJob], options: Options, ran: &mut Ran) -> usize {
    let Some(first) = jobs.first() else { return 0 };
    let planes = first.plan().bases().as_ptr() as u64;
    let capacity = options.upload.unwrap_or(16 * 1024);
    let Some(mut batch) = BatchLaunch::new(jobs, planes, options.limits, capacity) else { return 0 };
    let _lists = upload_slots(&mut batch, jobs);
    let shape = (batch.entry.index(), batch.blocks, batch.threads);
    let mut told = Told::default();
    told.by(&mut batch.args.copy);
    // SAFETY: the caller's promise; the entry takes these arguments.
    unsafe { start_entry(shape, &batch.args, options.descending, ran) };
    told.count(ran);
    batch.jobs
}

/// Puts the slots of the jobs that share a launch where it reads them: into copies, as on a device, so that a read beyond
/// a list is one beyond an allocation. They stay where they are until it has run.
fn upload_slots(batch: &mut BatchLaunch, jobs: &[CopyJob]) -> Vec<Vec<i64>> {
    let lists: Vec<Vec<i64>> = jobs[..batch.jobs].iter().map(|job| batch.slots(job).to_vec()).collect();
    for (i, list) in lists.iter().enumerate() {
        batch.set_slots(i, list.as_ptr() as u64);
    }
    lists
}

/// What a launch tells when it is over.
#[derive(Default)]
struct Told {
    counter: u32,
    word: u64,
}

impl Told {
    const VALUE: u64 = 5;

    /// Lets a launch tell; this value stays where it is until it has run.
    fn by(&mut self, args: &mut PagedCopyArgs) {
        args.counters = std::ptr::from_mut(&mut self.counter) as u64;
        args.seen = std::ptr::from_mut(&mut self.word) as u64;
        args.value = Self::VALUE;
    }

    fn count(&self, ran: &mut Ran) {
        // The kernel wrote them through their addresses.
        // SAFETY: a field of this value.
        let counter = unsafe { std::ptr::from_ref(&self.counter).read_volatile() };
        // SAFETY: as above.
        let word = unsafe { std::ptr::from_ref(&self.word).read_volatile() };
        ran.untold += u64::from((counter, word) != (0, Self::VALUE));
    }
}

/// Whom a launch in the order of its layers told, and what it left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layers {
    /// Runs of layers.
    pub runs: usize,
    /// Words for the device, which is not told of the last run, then words for the host.
    pub words: [Vec<u64>; 2],
    /// Counters, which count from 0 again.
    pub counters: Vec<u32>,
}

/// Runs `jobs` in the order of their layers, as one launch that writes `value` to the word of each run; `None` where
/// one launch cannot do that.
///
/// # Safety
/// As [`run`], for every job.
pub unsafe fn run_layers(
    jobs: &[CopyJob],
    layers_per_run: u32,
    value: u64,
    options: Options,
    ran: &mut Ran,
) -> Option<Layers> {
    let planes = jobs.first()?.plan().bases().as_ptr() as u64;
    let mut launch = LayersLaunch::new(jobs, planes, options.limits, layers_per_run)?;
    let _lists = upload_slots(&mut launch.batch, jobs);
    let runs = launch.runs as usize;
    let mut told = Layers { runs, words: [vec![0; RUNS], vec![0; RUNS]], counters: vec![0; RUNS] };
    let copy = &mut launch.batch.args.copy;
    copy.counters = told.counters.as_mut_ptr() as u64;
    copy.seen = told.words[1].as_mut_ptr() as u64;
    copy.value = value;
    let words = told.words[0].as_mut_ptr() as u64;
    let shape = (launch.batch.entry.index(), launch.batch.blocks, launch.batch.threads);
    if launch.is_inline() {
        let args = launch.inline_args(words, launch.batch.slots(jobs.first()?));
        // SAFETY: the caller's promise; the entry takes these arguments, and the words live until it has run.
        unsafe { start_entry(shape, &args, options.descending, ran) };
    } else {
        // SAFETY: as above.
        unsafe { start_entry(shape, &launch.args(words), options.descending, ran) };
    }
    Some(told)
}

/// # Safety
/// `args` is what the entry takes, and all memory it names may be used.
unsafe fn start<T>(launch: &Launch, args: &T, descending: bool, ran: &mut Ran) {
    let shape = (launch.entry.index(), launch.blocks, launch.threads);
    // SAFETY: the caller's promise.
    unsafe { start_entry(shape, args, descending, ran) };
}

/// The same for entry number, blocks, threads.
///
/// # Safety
/// As [`start`].
unsafe fn start_entry<T>(
    (entry, blocks, threads): (usize, u32, u32),
    args: &T,
    descending: bool,
    ran: &mut Ran,
) {
    ran.launches += 1;
    let args = std::ptr::from_ref(args).cast();
    let entry = u32::try_from(entry).unwrap_or(u32::MAX);
    let mut accesses = 0;
    // SAFETY: the caller's promise; entry numbers come from `Entry`.
    ran.misaligned += unsafe { host_launch(entry, blocks, threads, descending, args, &mut accesses) };
    ran.accesses += accesses;
}

#[cfg(maru_cxx)]
use compiled::maru_host_launch as host_launch;

#[cfg(maru_cxx)]
mod compiled {
    unsafe extern "C" {
        pub(crate) fn maru_host_launch(
            entry: u32,
            blocks: u32,
            threads: u32,
            descending: bool,
            args: *const core::ffi::c_void,
            accesses: *mut u64,
        ) -> u64;
    }
}

/// Stands in where there was no C++ compiler. Tests ask [`MISSING`] first; a caller that does not gets
/// nothing moved and every comparison wrong, never a false success.
#[cfg(not(maru_cxx))]
unsafe fn host_launch(
    _entry: u32,
    _blocks: u32,
    _threads: u32,
    _descending: bool,
    _args: *const core::ffi::c_void,
    _accesses: &mut u64,
) -> u64 {
    u64::MAX
}
