//! Slabs in memory that somebody else allocated, and whether addresses are memory at all.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

use maru_cxl::{Access, CxlError, DriverFailure, HostRegistrar, Region, RegisterOptions, Slab};
use maru_transfer::Place;
use pyo3::prelude::*;
use rustix::mm::MsyncFlags;

use crate::driver;
use crate::errors::Fault;
use crate::process::{lock, process};

/// Allocations of the driver's remembered with their region; older ones are forgotten first.
const MOST_ALLOCATIONS: usize = 64;
/// A region of foreign memory is one piece: just under what the registration takes.
const ONE_PIECE: u64 = (512 << 30) - 1;

/// A region that Python knows, found again by address.
#[derive(Debug)]
pub(crate) struct Tracked(pub(crate) Region);

impl Tracked {
    pub(crate) fn new(region: Region) -> Arc<Self> {
        let tracked = Arc::new(Tracked(region));
        let mut known = lock(&process().memory.regions);
        known.retain(|other| other.strong_count() > 0);
        known.push(Arc::downgrade(&tracked));
        tracked
    }
}

/// A range of the driver's, as a region stands for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Allocation {
    start: u64,
    len: u64,
    id: u64,
    ordinal: Option<u32>,
}

impl Allocation {
    fn of(known: &driver::Known) -> Self {
        Allocation { start: known.start, len: known.len, id: known.id, ordinal: known.ordinal }
    }
}

/// A slab as a tensor or an address gives it.
pub(crate) struct Foreign {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// Whether it may be memory of the host that no driver knows.
    pub(crate) on_host: bool,
    /// Whether it is surely mapped, see [`crate::tensor::Tensor::owned`].
    pub(crate) owned: bool,
    /// Kept alive by the slab of a transfer on the host.
    pub(crate) owner: Option<Py<PyAny>>,
}

/// The memory this process has met.
#[derive(Default)]
pub(crate) struct Memory {
    regions: Mutex<Vec<Weak<Tracked>>>,
    allocations: Mutex<Vec<(Allocation, Region)>>,
}

impl Memory {
    /// The slab of a transfer in `place`. Memory of the host that a device does not reach becomes a slab without
    /// device address, which only the fallback takes.
    ///
    /// On a device, whoever submits a transfer of it keeps the memory alive.
    pub(crate) fn slab(&self, place: Place, foreign: Foreign) -> Result<Slab, Fault> {
        match place {
            Place::Cuda(device) => match self.in_known_region(foreign.addr, foreign.len)? {
                Some(slab) => Ok(slab),
                None => with_context(place, || self.device_slab(foreign, device)),
            },
            _ => self.host_slab(foreign),
        }
    }

    fn host_slab(&self, foreign: Foreign) -> Result<Slab, Fault> {
        let Foreign { addr, len, owned, owner, .. } = foreign;
        if !owned {
            mapped(addr, len)?;
        }
        if let Some(slab) = self.in_known_region(addr, len)? {
            return Ok(slab);
        }
        Ok(foreign_region(addr, len, Box::new(owner))?.slab(0, len)?)
    }

    /// Memory that a device shall reach, in no region that is known: its own, or pinned host memory. The device's context
    /// is current.
    fn device_slab(&self, foreign: Foreign, device: u32) -> Result<Slab, Fault> {
        let Foreign { addr, len, .. } = foreign;
        if let Some(slab) = self.in_known_allocation(addr, len, device)? {
            return Ok(slab);
        }
        let Some(known) = driver::known(addr) else {
            if foreign.on_host {
                return self.host_slab(foreign);
            }
            return Err(Fault::value(format!(
                "{addr:#x} is no memory that the driver of cuda:{device} knows"
            )));
        };
        if let Some(other) = known.ordinal.filter(|n| *n != device) {
            return Err(Fault::value(format!(
                "the slab is on cuda:{other}, the paged cache is on cuda:{device}"
            )));
        }
        let end = addr
            .checked_add(len)
            .ok_or_else(|| Fault::overflow("the slab's last address does not fit 64 bits"))?;
        let mut range = Allocation::of(&known);
        if range.start > addr || addr - range.start >= ONE_PIECE || range.len > ONE_PIECE {
            range = Allocation {
                start: addr,
                len: known.len.saturating_sub(addr.saturating_sub(known.start)),
                ..range
            };
        }
        if range.start.saturating_add(range.len) < end {
            // Adjacent ranges of one allocation (expandable segments) count as one.
            let reached = driver::known_end(addr, end);
            if reached < end {
                return Err(Fault::value(format!(
                    "the slab at {addr:#x} needs {len} bytes, its allocation has {} from there",
                    reached - addr
                )));
            }
            range.len = end - range.start;
        }
        let region = self.region_of(range, known.device.wrapping_sub(addr - range.start))?;
        Ok(region.slab(addr - range.start, len)?)
    }

    fn in_known_region(&self, addr: u64, len: u64) -> Result<Option<Slab>, Fault> {
        for tracked in lock(&self.regions).iter().filter_map(Weak::upgrade) {
            let base = tracked.0.base().addr().get() as u64;
            let Some(offset) = addr.checked_sub(base) else { continue };
            if offset.checked_add(len).is_some_and(|end| end <= tracked.0.len()) {
                return Ok(Some(tracked.0.slab(offset, len)?));
            }
        }
        Ok(None)
    }

    /// In an allocation that was met before and is the same still, as its number says. That is one question to the
    /// driver instead of six.
    fn in_known_allocation(&self, addr: u64, len: u64, device: u32) -> Result<Option<Slab>, Fault> {
        let holds = |(range, _): &&(Allocation, Region)| {
            let offset = addr.checked_sub(range.start);
            let end = offset.and_then(|offset| offset.checked_add(len));
            range.id != 0
                && range.ordinal.is_none_or(|n| n == device)
                && end.is_some_and(|end| end <= range.len)
        };
        let slab = |(range, region): &(Allocation, Region)| (range.id, region.slab(addr - range.start, len));
        let found = lock(&self.allocations).iter().find(holds).map(slab);
        match found {
            Some((id, slab)) if driver::buffer_id(addr) == Some(id) => Ok(Some(slab?)),
            _ => Ok(None),
        }
    }

    fn region_of(&self, range: Allocation, device: u64) -> Result<Region, Fault> {
        let mut kept = Vec::new();
        let region = self.region_or_make(range, device, &mut kept);
        if !kept.is_empty() {
            // Not under the lock: what is finalised may ask for a region itself.
            Python::attach(|_| drop(kept));
        }
        region
    }

    /// `kept`: what transfers kept alive that had to be waited for.
    fn region_or_make(
        &self,
        range: Allocation,
        device: u64,
        kept: &mut Vec<Py<PyAny>>,
    ) -> Result<Region, Fault> {
        let mut allocations = lock(&self.allocations);
        let holds = |old: &Allocation| {
            old.start <= range.start && old.id == range.id && range.start + range.len <= old.start + old.len
        };
        if let Some((old, region)) = allocations.iter().find(|(old, _)| holds(old))
            && old.start == range.start
        {
            return Ok(region.clone());
        }
        // What overlaps is out of date, or grew.
        allocations
            .retain(|(old, _)| old.start + old.len <= range.start || range.start + range.len <= old.start);
        if allocations.len() >= MOST_ALLOCATIONS {
            allocations.remove(0);
        }
        let registrar = Arc::new(Reachable { device });
        let options =
            RegisterOptions { piece_limit: ONE_PIECE, required: true, ..RegisterOptions::default() };
        let make = || -> Result<Region, CxlError> {
            let region = foreign_region(range.start, range.len, Box::new(()))?;
            region.register(Arc::clone(&registrar) as Arc<dyn HostRegistrar>, options)?;
            Ok(region)
        };
        let region = match make() {
            // An earlier shape of the same memory is still in flight.
            Err(CxlError::RegistrationOverlap { .. }) => {
                let (over, outcome) = process().drain();
                kept.extend(over);
                outcome?;
                make()?
            }
            made => made?,
        };
        allocations.push((range, region.clone()));
        Ok(region)
    }
}

/// Memory that the driver knows already: nothing is registered and nothing undone.
#[derive(Debug)]
struct Reachable {
    device: u64,
}

impl HostRegistrar for Reachable {
    fn register(&self, _: NonNull<u8>, _: usize, _: Access) -> Result<(), DriverFailure> {
        Ok(())
    }

    fn unregister(&self, _: NonNull<u8>) -> Result<(), DriverFailure> {
        Ok(())
    }

    fn device_pointer(&self, _: NonNull<u8>) -> Result<u64, DriverFailure> {
        Ok(self.device)
    }

    fn quiesce(&self) -> Result<(), DriverFailure> {
        // The memory is its owner's, who is kept alive by the transfers of it.
        Ok(())
    }
}

fn foreign_region(
    addr: u64,
    len: u64,
    owner: Box<dyn std::any::Any + Send + Sync>,
) -> Result<Region, CxlError> {
    let pointer =
        usize::try_from(addr).ok().map(std::ptr::with_exposed_provenance_mut::<u8>).and_then(NonNull::new);
    let pointer = pointer.ok_or_else(|| CxlError::InvalidArgument {
        what: "slab address",
        found: addr,
        allowed: "an address of memory is needed".to_owned(),
    })?;
    // SAFETY: the memory is the caller's array (kept alive by `owner`, or by the caller of the transfer), whose
    // bytes Rust holds no reference to; dropping a Python reference is fine on any thread.
    unsafe { Region::from_raw_parts(pointer, len, owner) }
}

/// Whether host addresses are mapped, so that a wrong or freed pointer is an error and not a crash. What is
/// mapped but belongs to something else cannot be told apart.
pub(crate) fn mapped(addr: u64, len: u64) -> Result<(), Fault> {
    const PAGE: u64 = 4096;
    let not = |why: &dyn fmt::Display| {
        Fault::value(format!("{len} bytes at address {addr:#x} are no memory ({why})"))
    };
    if len == 0 {
        return Ok(());
    }
    let end = addr.checked_add(len).filter(|end| i64::try_from(*end).is_ok());
    let (Some(end), true) = (end, addr != 0) else { return Err(not(&"not an address")) };
    let start = addr / PAGE * PAGE;
    let bytes = usize::try_from(end - start).map_err(|_| not(&"not an address"))?;
    let pointer = usize::try_from(start)
        .map(std::ptr::with_exposed_provenance_mut)
        .map_err(|_| not(&"not an address"))?;
    // SAFETY: with MS_ASYNC the kernel only walks its list of mappings; no byte is read or written.
    unsafe { rustix::mm::msync(pointer, bytes, MsyncFlags::ASYNC) }.map_err(|e| not(&e))?;
    match first_unreadable(&[(addr, end - 1)]) {
        None => Ok(()),
        // Address space of a device's memory looks like this.
        Some(_) => Err(not(&"the process may not read it")),
    }
}

/// Whether ranges that were mapped when they were first met are there still, in one system call: what is given back to
/// the system can be read no more. The number of the first that is not.
pub(crate) fn still_mapped(starts: &[u64], len: u64) -> Result<(), usize> {
    let ends: Vec<(u64, u64)> =
        starts.iter().map(|at| (*at, at.saturating_add(len.saturating_sub(1)))).collect();
    first_unreadable(&ends).map_or(Ok(()), Err)
}

/// The number of the first range whose first or last byte cannot be read: mapped memory need not be accessible. None
/// where the system does not say.
fn first_unreadable(ranges: &[(u64, u64)]) -> Option<usize> {
    /// The system takes 1024 addresses at once.
    const AT_ONCE: usize = 512;
    let own = libc::pid_t::try_from(std::process::id()).unwrap_or(0);
    let mut bytes = [0u8; 2 * AT_ONCE];
    let mut before = 0;
    for some in ranges.chunks(AT_ONCE) {
        let one = |addr: u64| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap_or(0)),
            iov_len: 1,
        };
        let remote: Vec<libc::iovec> =
            some.iter().flat_map(|(first, last)| [one(*first), one(*last)]).collect();
        let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: remote.len() };
        let count = libc::c_ulong::try_from(remote.len()).unwrap_or(0);
        // SAFETY: the kernel copies as many bytes into the local array, which has room, or says that it cannot.
        let copied = unsafe { libc::process_vm_readv(own, &raw const local, 1, remote.as_ptr(), count, 0) };
        match usize::try_from(copied) {
            Ok(copied) if copied == remote.len() => {}
            // The byte behind those failed.
            Ok(copied) => return Some(before + copied / 2),
            Err(_) => match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EFAULT) => return Some(before),
                // The call is not allowed here.
                _ => return None,
            },
        }
        before += some.len();
    }
    None
}

/// Runs a body with the device's context current, or as it is for host memory.
pub(crate) fn with_context<T>(place: Place, body: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    match place {
        Place::Cuda(device) => {
            let context = process().context(device)?;
            let _current = maru_driver::Current::enter(&context)?;
            body()
        }
        _ => body(),
    }
}
