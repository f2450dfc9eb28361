//! Regions: memory that slabs are cut from, with or without registration.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use memmap2::MmapRaw;

use crate::error::{CxlError, io_error};
use crate::mapping::Mapping;
use crate::num::{check_range, to_usize};
use crate::registration::{
    self, Access, HostRegistrar, Range, Refused, RegisterOptions, RegisterOutcome, Registration,
    RegistrationState,
};
use crate::slab::Slab;

/// Mapped memory, registered with a device's driver or not. Cheap to clone; the memory is given back when the
/// last clone and the last [`Slab`] of it are gone.
///
/// Teardown waits for the device ([`HostRegistrar::quiesce`]), unregisters, then unmaps. If a driver call fails
/// the mapping is leaked and the failure logged, because the device might still write there.
#[derive(Clone)]
pub struct Region {
    inner: Arc<Inner>,
}

struct Inner {
    base: NonNull<u8>,
    len: u64,
    read_only: bool,
    header_unit: u64,
    device_offset: u64,
    backing: String,
    /// Guards against two writers of one region in this process.
    writer: AtomicBool,
    /// Set when a driver call failed and the memory must stay for ever.
    leak: AtomicBool,
    state: Mutex<RegistrationState>,
    /// What the state says when it is registered; apart from it so that reading never waits for a driver call.
    active: RwLock<Option<Arc<Registration>>>,
    memory: ManuallyDrop<Memory>,
}

// SAFETY: the base pointer is an address of memory that `memory` owns; all access to it is raw or atomic and
// bounds-checked, and sharing between threads is what the type is for.
unsafe impl Send for Inner {}
// SAFETY: as for Send.
unsafe impl Sync for Inner {}

/// What owns the bytes.
enum Memory {
    Mapped(Mapping),
    Anonymous { _mapping: MmapRaw },
    Foreign { _owner: Box<dyn Any + Send + Sync> },
}

impl Region {
    /// Takes over a mapping.
    pub fn new(mapping: Mapping) -> Self {
        let device = mapping.device();
        let header_unit = if mapping.offset() == 0 { device.align() } else { 0 };
        let (base, len, offset) = (mapping.base(), mapping.len(), mapping.offset());
        let (read_only, backing) = (mapping.is_read_only(), device.backing());
        Self::build(base, len, read_only, header_unit, offset, backing, Memory::Mapped(mapping))
    }

    /// Page-aligned private memory of `len` bytes, zeroed: host slabs and tests.
    ///
    /// # Errors
    /// [`CxlError::InvalidArgument`] for zero or 2^63 bytes and more, [`CxlError::Io`] when there is no memory.
    pub fn anonymous(len: u64) -> Result<Self, CxlError> {
        if len == 0 || i64::try_from(len).is_err() {
            return Err(CxlError::InvalidArgument {
                what: "region length",
                found: len,
                allowed: "1 to 2^63-1 bytes are allowed".to_owned(),
            });
        }
        let mapping = memmap2::MmapOptions::new()
            .len(to_usize(len))
            .map_anon()
            .map(MmapRaw::from)
            .map_err(|error| io_error("mmap", "anonymous memory".as_ref(), error))?;
        let base = NonNull::new(mapping.as_mut_ptr()).unwrap_or(NonNull::dangling());
        let memory = Memory::Anonymous { _mapping: mapping };
        Ok(Self::build(base, len, false, 0, 0, "anonymous memory".to_owned(), memory))
    }

    /// Memory that somebody else allocated. `owner` is dropped with the region and keeps the bytes alive.
    ///
    /// # Errors
    /// [`CxlError::InvalidArgument`] when the length is zero or the range would wrap.
    ///
    /// # Safety
    /// `ptr` must be valid for reads and writes of `len` bytes until `owner` is dropped, no Rust reference to
    /// those bytes may be used meanwhile, and dropping `owner` on any thread must be fine.
    pub unsafe fn from_raw_parts(
        ptr: NonNull<u8>,
        len: u64,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, CxlError> {
        let end = (ptr.addr().get() as u64).checked_add(len);
        if len == 0 || i64::try_from(len).is_err() || end.is_none() {
            return Err(CxlError::InvalidArgument {
                what: "region length",
                found: len,
                allowed: "1 to 2^63-1 bytes that end inside the address space are allowed".to_owned(),
            });
        }
        let memory = Memory::Foreign { _owner: owner };
        Ok(Self::build(ptr, len, false, 0, 0, "memory of the caller".to_owned(), memory))
    }

    fn build(
        base: NonNull<u8>,
        len: u64,
        read_only: bool,
        header_unit: u64,
        device_offset: u64,
        backing: String,
        memory: Memory,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                base,
                len,
                read_only,
                header_unit,
                device_offset,
                backing,
                writer: AtomicBool::new(false),
                leak: AtomicBool::new(false),
                state: Mutex::new(RegistrationState::Unregistered),
                active: RwLock::new(None),
                memory: ManuallyDrop::new(memory),
            }),
        }
    }

    /// First byte.
    pub fn base(&self) -> NonNull<u8> {
        self.inner.base
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.inner.len
    }

    /// Whether it may not be written.
    pub fn is_read_only(&self) -> bool {
        self.inner.read_only
    }

    /// Bytes at the start that belong to the device header: the device's alignment when the region starts at
    /// device offset 0, else 0.
    pub fn header_unit(&self) -> u64 {
        self.inner.header_unit
    }

    /// Offset of the first byte in the device or file; 0 for other memory.
    pub fn device_offset(&self) -> u64 {
        self.inner.device_offset
    }

    /// What the memory is, for messages: path and kind of device or file system.
    pub fn backing(&self) -> &str {
        &self.inner.backing
    }

    /// The mapping behind it, if it is one of a device or file.
    pub fn mapping(&self) -> Option<&Mapping> {
        match &*self.inner.memory {
            Memory::Mapped(mapping) => Some(mapping),
            _ => None,
        }
    }

    /// The bytes `[offset, offset + len)` as a slab.
    ///
    /// # Errors
    /// [`CxlError::OutOfBounds`].
    pub fn slab(&self, offset: u64, len: u64) -> Result<Slab, CxlError> {
        check_range("slab of the region", offset, len, self.len())?;
        Ok(Slab::new(self.clone(), offset, len))
    }

    /// Registers the whole region with a device's driver, in pieces of at most `options.piece_limit` bytes that
    /// end on slab borders. All or nothing: when a piece fails the earlier ones are unregistered in reverse.
    ///
    /// Registering a region again is counted; each call wants its [`Region::unregister`], or the region's end.
    /// Two threads doing it at once give one registration. A second registrar (another device) joins the
    /// existing registration, provided it sees the memory at the same addresses.
    ///
    /// # Errors
    /// [`CxlError::InvalidArgument`] for options that cannot work and [`CxlError::RegistrationOverlap`], always;
    /// [`CxlError::Registration`] and [`CxlError::DeviceAddressDiffers`] only when `options.required`, otherwise
    /// they are logged and returned inside [`RegisterOutcome::Unregistered`], and the region works on without.
    pub fn register(
        &self,
        registrar: Arc<dyn HostRegistrar>,
        options: RegisterOptions,
    ) -> Result<RegisterOutcome, CxlError> {
        let mut state = self.state();
        let access = if self.inner.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let range =
            Range { base: self.inner.base, len: self.inner.len, access, backing: &self.inner.backing };
        let result = match &mut *state {
            RegistrationState::Registered { count, .. } => {
                let active = self.active();
                let joined = active.as_ref().map_or(Ok(()), |active| registration::join(active, registrar));
                joined.map(|()| {
                    *count += 1;
                    active
                })
            }
            _ => registration::acquire(&range, registrar, &options).map(Some).map_err(
                |Refused { error, leak }| {
                    self.inner.leak.fetch_or(leak, Ordering::Relaxed);
                    error
                },
            ),
        };
        match result {
            Ok(Some(active)) => {
                let outcome =
                    RegisterOutcome::Registered { pieces: active.pieces().len(), bytes: self.inner.len };
                if !state.is_registered() {
                    *state = RegistrationState::Registered { pieces: active.pieces().len(), count: 1 };
                    *self.inner.active.write().unwrap_or_else(PoisonError::into_inner) = Some(active);
                }
                Ok(outcome)
            }
            Ok(None) => Ok(RegisterOutcome::Registered { pieces: 0, bytes: 0 }),
            Err(error) if options.required || !registration::is_driver_failure(&error) => Err(error),
            Err(error) => {
                tracing::warn!(backing = %self.inner.backing, %error, "the region stays unregistered");
                if !state.is_registered() {
                    *state = RegistrationState::Failed { reason: error.to_string() };
                }
                Ok(RegisterOutcome::Unregistered { reason: error })
            }
        }
    }

    /// Undoes one [`Region::register`]; the last one waits for the device and unregisters. Returns whether the
    /// region is unregistered now.
    ///
    /// If a driver call fails this is logged and the memory will never be unmapped.
    pub fn unregister(&self) -> bool {
        let mut state = self.state();
        match &mut *state {
            RegistrationState::Registered { count, .. } if *count > 1 => {
                *count -= 1;
                false
            }
            RegistrationState::Registered { .. } => {
                *state = RegistrationState::Unregistered;
                let active = self.inner.active.write().unwrap_or_else(PoisonError::into_inner).take();
                self.inner.release(active);
                true
            }
            _ => true,
        }
    }

    /// Whether the region is registered.
    pub fn is_registered(&self) -> bool {
        self.inner.active.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// How registration stands, with the reason when it failed.
    pub fn registration(&self) -> RegistrationState {
        self.state().clone()
    }

    /// Address by which the device reaches the range; `None` unless all of it lies in one registered piece that
    /// the driver gave an address for.
    pub fn device_address(&self, offset: u64, len: u64) -> Option<u64> {
        let active = self.inner.active.read().unwrap_or_else(PoisonError::into_inner);
        active.as_ref()?.device_address(offset, len)
    }

    /// Whether the range crosses the border of two registered pieces, so that no single device copy may touch
    /// all of it.
    pub fn straddles_pieces(&self, offset: u64, len: u64) -> bool {
        let active = self.inner.active.read().unwrap_or_else(PoisonError::into_inner);
        active.as_ref().is_some_and(|active| !active.in_one_piece(offset, len))
    }

    /// Whether two handles are of the same region.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Claims the right to write a pool in this process; `false` when somebody has it.
    pub(crate) fn claim_writer(&self) -> bool {
        !self.inner.writer.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn release_writer(&self) {
        self.inner.writer.store(false, Ordering::Release);
    }

    fn state(&self) -> MutexGuard<'_, RegistrationState> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn active(&self) -> Option<Arc<Registration>> {
        self.inner.active.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Inner {
    fn release(&self, active: Option<Arc<Registration>>) {
        if let Some(active) = active
            && registration::release(active, &self.backing).is_err()
        {
            self.leak.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let active = self.active.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        self.release(active);
        if *self.leak.get_mut() {
            tracing::error!(
                backing = %self.backing,
                bytes = self.len,
                "leaking a mapping: the driver may still use it"
            );
            return;
        }
        // SAFETY: this is the only place that drops the field, and the value is not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("base", &self.inner.base)
            .field("len", &self.inner.len)
            .field("backing", &self.inner.backing)
            .field("read_only", &self.inner.read_only)
            .field("registered", &self.is_registered())
            .finish_non_exhaustive()
    }
}
