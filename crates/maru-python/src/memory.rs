//! Slabs in memory that somebody else allocated, and whether addresses are memory at all.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

use maru_cxl::{Access, CxlError, DriverFailure, HostRegistrar, Region, RegisterOptions, Slab};
use maru_transfer::Place;
use pyo3::prelude::*;
use rustix::mm::MsyncFlags;

use crate::driver::{self, Current};
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
}

/// The memory this process has met.
#[derive(Default)]
pub(crate) struct Memory {
    regions: Mutex<Vec<Weak<Tracked>>>,
    allocations: Mutex<Vec<(Allocation, Region)>>,
}

impl Memory {
    /// Host memory of `len` bytes at `addr` as a slab that keeps `owner` alive.
    pub(crate) fn host_slab(&self, addr: u64, len: u64, owner: Option<Py<PyAny>>) -> Result<Slab, Fault> {
        mapped(addr, len)?;
        if let Some(slab) = self.in_known_region(addr, len)? {
            return Ok(slab);
        }
        let region = foreign(addr, len, owner)?;
        Ok(region.slab(0, len)?)
    }

    /// The same for memory that a device shall reach: its own, or pinned host memory. Memory of the host that
    /// is not pinned becomes a slab without device address, which only the fallback takes.
    ///
    /// Whoever submits a transfer of it keeps the memory alive. The device's context is current.
    pub(crate) fn device_slab(&self, addr: u64, len: u64, device: u32, on_host: bool) -> Result<Slab, Fault> {
        let Some(known) = driver::known(addr) else {
            if on_host {
                return self.host_slab(addr, len, None);
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
        if known.ordinal.is_none()
            && let Some(slab) = self.in_known_region(addr, len)?
        {
            return Ok(slab);
        }
        let end = addr
            .checked_add(len)
            .ok_or_else(|| Fault::overflow("the slab's last address does not fit 64 bits"))?;
        let mut range = Allocation { start: known.start, len: known.len, id: known.id };
        if range.start > addr || addr - range.start >= ONE_PIECE || range.len > ONE_PIECE {
            range = Allocation {
                start: addr,
                len: known.len.saturating_sub(addr.saturating_sub(known.start)),
                id: known.id,
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

    fn region_of(&self, range: Allocation, device: u64) -> Result<Region, Fault> {
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
                let (kept, outcome) = process().drain();
                Python::attach(|_| drop(kept));
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

fn foreign(addr: u64, len: u64, owner: Option<Py<PyAny>>) -> Result<Region, Fault> {
    Ok(foreign_region(addr, len, Box::new(owner))?)
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
    match ends_readable(addr, end - 1) {
        true => Ok(()),
        // Address space of a device's memory looks like this.
        false => Err(not(&"the process may not read it")),
    }
}

/// Whether the first and the last byte can be read: mapped memory need not be accessible. True where the system
/// does not say.
fn ends_readable(first: u64, last: u64) -> bool {
    let mut bytes = [0u8; 2];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 2 };
    let one = |addr: u64| libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap_or(0)),
        iov_len: 1,
    };
    let remote = [one(first), one(last)];
    let own = libc::pid_t::try_from(std::process::id()).unwrap_or(0);
    // SAFETY: the kernel copies two bytes into the local array, or says that it cannot.
    let copied = unsafe { libc::process_vm_readv(own, &raw const local, 1, remote.as_ptr(), 2, 0) };
    // One byte copied: the second one failed. Another error than EFAULT: the call is not allowed here.
    copied == 2 || (copied < 0 && std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT))
}

/// Runs a body with the device's context current, or as it is for host memory.
pub(crate) fn with_context<T>(place: Place, body: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    match place {
        Place::Cuda(device) => {
            let context = process().context(device)?;
            let _current = Current::enter(&context)?;
            body()
        }
        _ => body(),
    }
}
