//! Slabs: bounds-checked spans that keep their memory alive.

use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::Advice;

use crate::coherence::{self, Effect};
use crate::error::CxlError;
use crate::num::{check_range, to_usize};
use crate::pool::Lease;
use crate::prefault;
use crate::raw;
use crate::region::Region;

/// A span of a region. Cheap to clone; keeps the region (and, if a pool handed it out, its place in the pool)
/// until the last clone is gone.
#[derive(Debug, Clone)]
pub struct Slab {
    region: Region,
    offset: u64,
    len: u64,
    lease: Option<Arc<Lease>>,
}

impl Slab {
    /// The caller has checked the bounds.
    pub(crate) fn new(region: Region, offset: u64, len: u64) -> Self {
        Self { region, offset, len, lease: None }
    }

    pub(crate) fn with_lease(mut self, lease: Arc<Lease>) -> Self {
        self.lease = Some(lease);
        self
    }

    /// First byte. Read and write it with raw accesses only: others may be writing it too. Not writable when
    /// [`Slab::is_read_only`].
    pub fn addr(&self) -> NonNull<u8> {
        // SAFETY: `offset` is at most the region's length (checked where the slab was made), and the region is
        // one mapped range.
        unsafe { self.region.base().add(to_usize(self.offset)) }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Offset of the first byte in the region.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The region it is part of.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Address by which the registered device reaches the first byte; `None` unless the whole slab lies in one
    /// registered piece. Never assume that the host address works on the device.
    pub fn device_addr(&self) -> Option<u64> {
        self.region.device_address(self.offset, self.len)
    }

    /// Whether the whole slab is registered and in one piece.
    pub fn is_registered(&self) -> bool {
        self.region.is_registered() && !self.region.straddles_pieces(self.offset, self.len)
    }

    /// Whether writing is refused.
    pub fn is_read_only(&self) -> bool {
        self.region.is_read_only()
    }

    /// Part of this slab, which it keeps alive all the same.
    ///
    /// # Errors
    /// [`CxlError::OutOfBounds`].
    pub fn span(&self, offset: u64, len: u64) -> Result<Self, CxlError> {
        check_range("span of the slab", offset, len, self.len)?;
        Ok(Self { region: self.region.clone(), offset: self.offset + offset, len, lease: self.lease.clone() })
    }

    /// Copies bytes out. A concurrent writer can make them a mixture of old and new.
    ///
    /// # Errors
    /// [`CxlError::OutOfBounds`]. A page that the file or device does not have (any more) is a SIGBUS here; see
    /// [`Slab::probe`].
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), CxlError> {
        let from = self.checked("read of the slab", offset, bytes.len() as u64)?;
        // SAFETY: the range was checked, and a `&mut` slice cannot overlap memory that safe code has no
        // reference to.
        unsafe { raw::copy(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`CxlError::OutOfBounds`]; [`CxlError::ReadOnly`] for a read-only mapping.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), CxlError> {
        if self.is_read_only() {
            return Err(CxlError::ReadOnly { wanted: "write slabs" });
        }
        let to = self.checked("write to the slab", offset, bytes.len() as u64)?;
        // SAFETY: the range was checked, and a slice cannot overlap memory that safe code has no reference to.
        unsafe { raw::copy(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Asks the kernel whether every page is there, without touching one: a truncated file, a device that went
    /// away or a page known to be poisoned is an error here where an access would be a SIGBUS. A fault that
    /// happens later, or poison the kernel has not met yet, is not foreseen.
    ///
    /// # Errors
    /// [`CxlError::MemoryFault`].
    pub fn probe(&self) -> Result<(), CxlError> {
        if self.len == 0 {
            return Ok(());
        }
        // SAFETY: the slab's range lies in the region, which is mapped as long as `self.region` lives.
        unsafe {
            prefault::populate_range(self.region.base(), self.offset, self.len, Advice::LinuxPopulateRead)
        }
    }

    /// [`coherence::flush`] of the whole slab.
    pub fn flush(&self) -> Effect {
        // SAFETY: the slab's range is mapped as long as `self.region` lives.
        unsafe { coherence::flush(self.addr(), to_usize(self.len)) }
    }

    /// [`coherence::invalidate`] of the whole slab.
    pub fn invalidate(&self) -> Effect {
        // SAFETY: the slab's range is mapped as long as `self.region` lives.
        unsafe { coherence::invalidate(self.addr(), to_usize(self.len)) }
    }

    fn checked(&self, what: &'static str, offset: u64, len: u64) -> Result<NonNull<u8>, CxlError> {
        check_range(what, offset, len, self.len)?;
        // SAFETY: `offset <= self.len`, so the address is inside the region or one past its end.
        Ok(unsafe { self.addr().add(to_usize(offset)) })
    }
}
