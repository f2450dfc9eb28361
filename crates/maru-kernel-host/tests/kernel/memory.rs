//! Memory for the kernel with guards around it.

use maru_kernel_host::{Options, Ran, run};
use maru_layout::{Direction, SlotMapping};

use crate::cases::{Cache, Images, compare, job};

const GUARD: usize = 256;

/// Bytes at an address of a chosen alignment, between guards.
pub(crate) struct Guarded {
    memory: Vec<u128>,
    shift: usize,
    len: usize,
}

impl Guarded {
    /// `bytes`, `shift` (less than 64) behind a 64-byte boundary.
    pub(crate) fn new(bytes: &[u8], shift: usize) -> Self {
        let total = bytes.len() + 2 * GUARD + 128;
        let mut new = Guarded { memory: vec![0; total.div_ceil(16)], shift: 0, len: bytes.len() };
        let start = new.memory.as_ptr() as usize;
        new.shift = start.next_multiple_of(64) - start + shift;
        let (at, len) = (new.shift + GUARD, new.len);
        let all = new.all();
        all.fill(0xa5);
        all[at..at + len].copy_from_slice(bytes);
        new
    }

    fn all(&mut self) -> &mut [u8] {
        let len = self.memory.len() * 16;
        // SAFETY: the vector's own memory as bytes.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), len) }
    }

    pub(crate) fn addr(&mut self) -> u64 {
        let at = self.shift + GUARD;
        self.all()[at..].as_mut_ptr() as u64
    }

    /// The bytes, after a look at the guards.
    pub(crate) fn check(&mut self, what: &str) -> Result<Vec<u8>, String> {
        let (at, len) = (self.shift + GUARD, self.len);
        let all = self.all();
        let guard = |part: &[u8]| part.iter().all(|b| *b == 0xa5);
        match guard(&all[..at]) && guard(&all[at + len..]) {
            true => Ok(all[at..at + len].to_vec()),
            false => Err(format!("{what}: bytes outside it were written")),
        }
    }
}

/// Where the slots of a trial are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Inline,
    Uploaded,
    Device,
}

impl Source {
    pub(crate) const ALL: [Source; 3] = [Source::Inline, Source::Uploaded, Source::Device];
}

/// One transfer.
#[derive(Clone, Debug)]
pub(crate) struct Case<'a> {
    pub(crate) cache: &'a Cache,
    pub(crate) direction: Direction,
    pub(crate) tokens: u64,
    pub(crate) slots: &'a [i64],
    pub(crate) skip: u64,
    pub(crate) shifts: [usize; 2],
    pub(crate) source: Source,
    pub(crate) options: Options,
}

impl Case<'_> {
    /// Runs it, compares both sides with the oracle and the guards, and returns what the kernel did and its
    /// access width.
    pub(crate) fn check(&self, images: &Images) -> Result<(Ran, u64), String> {
        let mut cache = Guarded::new(&images.cache, self.shifts[0]);
        let mut slab = Guarded::new(&images.slab, self.shifts[1]);
        let plan = self.cache.plan(cache.addr(), self.tokens).map_err(|e| e.to_string())?;
        let mut options = self.options;
        let mapping = match self.source {
            Source::Device => {
                SlotMapping::Device { addr: self.slots.as_ptr() as u64, len: self.slots.len() as u64 }
            }
            Source::Inline => SlotMapping::from_slots(self.slots),
            Source::Uploaded => {
                options.upload = Some(options.upload.unwrap_or(100));
                SlotMapping::from_slots(self.slots)
            }
        };
        let job = job(&plan, self.direction, slab.addr(), mapping, self.skip).map_err(|e| e.to_string())?;
        // SAFETY: cache, slab and slots are this function's memory, as large as the plan says.
        let ran = unsafe { run(&job, options) }.map_err(|e| e.to_string())?;
        compare("cache", &cache.check("cache")?, &images.cache_after)?;
        compare("slab", &slab.check("slab")?, &images.slab_after)?;
        let width = job.access_bytes();
        if ran.misaligned != 0 {
            return Err(format!(
                "{} of {} accesses of {width} bytes misaligned",
                ran.misaligned, ran.accesses
            ));
        }
        if ran.untold != 0 {
            return Err(format!(
                "{} of {} launches did not tell that they were over",
                ran.untold, ran.launches
            ));
        }
        let moved = self.slots.iter().skip(usize::try_from(self.skip).unwrap());
        let good = moved.filter(|s| (0..self.cache.layout.num_slots() as i64).contains(*s)).count() as u64;
        let r = &self.cache.reference;
        let expected = 2 * good * r.planes * r.layers * r.row_bytes() / width;
        match ran.accesses == expected {
            true => Ok((ran, width)),
            false => Err(format!("{} accesses where {expected} move every byte once", ran.accesses)),
        }
    }
}
