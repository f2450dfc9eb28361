//! The registered ranges of this process. A driver's registration is process-wide, so is this list.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::{Access, HostRegistrar, hint, pieces};
use crate::error::CxlError;
use crate::num::{overlaps, to_usize};
use crate::registration::RegisterOptions;

/// What is to be registered.
pub(crate) struct Range<'a> {
    pub(crate) base: NonNull<u8>,
    pub(crate) len: u64,
    pub(crate) access: Access,
    pub(crate) backing: &'a str,
}

/// One driver registration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    offset: u64,
    len: u64,
    device: Option<u64>,
}

/// A registered range: all of its pieces, and every device that uses it.
pub(crate) struct Registration {
    base: NonNull<u8>,
    pieces: Vec<Piece>,
    /// The first one registered the memory and will unregister it; all are quiesced before.
    registrars: Mutex<Vec<Arc<dyn HostRegistrar>>>,
}

// SAFETY: the base pointer is only handed to driver calls, under the lock of the list.
unsafe impl Send for Registration {}
// SAFETY: as for Send; the rest is behind a mutex or never changes.
unsafe impl Sync for Registration {}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("base", &self.base)
            .field("pieces", &self.pieces)
            .finish_non_exhaustive()
    }
}

impl Registration {
    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    fn piece_of(&self, offset: u64, len: u64) -> Option<&Piece> {
        let after = self.pieces.partition_point(|piece| piece.offset <= offset);
        let piece = self.pieces.get(after.checked_sub(1)?)?;
        (offset.checked_add(len)? <= piece.offset + piece.len).then_some(piece)
    }

    pub(crate) fn in_one_piece(&self, offset: u64, len: u64) -> bool {
        self.piece_of(offset, len).is_some()
    }

    pub(crate) fn device_address(&self, offset: u64, len: u64) -> Option<u64> {
        let piece = self.piece_of(offset, len)?;
        piece.device?.checked_add(offset - piece.offset)
    }

    fn address(&self, piece: &Piece) -> NonNull<u8> {
        address(self.base, piece.offset)
    }

    fn registrars(&self) -> MutexGuard<'_, Vec<Arc<dyn HostRegistrar>>> {
        self.registrars.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a registrar, which must see every piece at the address the first one does.
    fn add(&self, registrar: Arc<dyn HostRegistrar>) -> Result<(), CxlError> {
        let mut registrars = self.registrars();
        if registrars.iter().any(|known| Arc::ptr_eq(known, &registrar)) {
            return Ok(());
        }
        for piece in &self.pieces {
            let host = self.address(piece);
            let theirs = registrar.device_pointer(host).ok();
            if theirs != piece.device {
                return Err(CxlError::DeviceAddressDiffers {
                    address: host.addr().get() as u64,
                    first: piece.device.unwrap_or(0),
                    second: theirs.unwrap_or(0),
                });
            }
        }
        registrars.push(registrar);
        Ok(())
    }

    /// Waits for every device, then unregisters in reverse order. An error means that the memory must stay.
    fn tear_down(&self, backing: &str) -> Result<(), ()> {
        let registrars = self.registrars();
        for registrar in registrars.iter() {
            if let Err(failure) = registrar.quiesce() {
                tracing::error!(backing, %failure, "the device did not come to rest; its memory stays registered");
                return Err(());
            }
        }
        let Some(first) = registrars.first() else { return Ok(()) };
        let mut result = Ok(());
        for piece in self.pieces.iter().rev() {
            let host = self.address(piece);
            if let Err(failure) = first.unregister(host) {
                tracing::error!(backing, address = ?host, bytes = piece.len, %failure, "could not unregister");
                result = Err(());
            }
        }
        result
    }
}

fn address(base: NonNull<u8>, offset: u64) -> NonNull<u8> {
    // Only an address for the driver, never dereferenced; `offset` lies inside the range.
    base.map_addr(|addr| addr.saturating_add(to_usize(offset)))
}

struct Entry {
    base: u64,
    len: u64,
    /// Dangling when the teardown failed: such a range stays taken.
    registration: Weak<Registration>,
}

static RANGES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

fn ranges() -> MutexGuard<'static, Vec<Entry>> {
    RANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A registration that failed.
pub(crate) struct Refused {
    pub(crate) error: CxlError,
    /// The roll-back failed as well: part of the range is still registered and must never be unmapped.
    pub(crate) leak: bool,
}

impl From<CxlError> for Refused {
    fn from(error: CxlError) -> Self {
        Self { error, leak: false }
    }
}

/// Registers a range, or joins the registration of the very same range.
pub(crate) fn acquire(
    range: &Range<'_>,
    registrar: Arc<dyn HostRegistrar>,
    options: &RegisterOptions,
) -> Result<Arc<Registration>, Refused> {
    let base = range.base.addr().get() as u64;
    // Held over the driver calls: two threads with one range make one registration, and drivers take their own
    // process-wide lock anyway.
    let mut ranges = ranges();
    if let Some(entry) = ranges.iter().find(|entry| overlaps(entry.base, entry.len, base, range.len)) {
        let same = (entry.base, entry.len) == (base, range.len);
        if let Some(existing) = entry.registration.upgrade().filter(|_| same) {
            existing.add(registrar)?;
            return Ok(existing);
        }
        let (other_address, other_len) = (entry.base, entry.len);
        return Err(CxlError::RegistrationOverlap {
            address: base,
            len: range.len,
            other_address,
            other_len,
        }
        .into());
    }
    let pieces = register_pieces(range, registrar.as_ref(), options).inspect_err(|refused| {
        if refused.leak {
            // Whoever tries this range again is told that it is taken.
            ranges.push(Entry { base, len: range.len, registration: Weak::new() });
        }
    })?;
    let registration =
        Arc::new(Registration { base: range.base, pieces, registrars: Mutex::new(vec![registrar]) });
    ranges.push(Entry { base, len: range.len, registration: Arc::downgrade(&registration) });
    Ok(registration)
}

/// Adds a registrar to a registration that the caller holds.
pub(crate) fn join(registration: &Registration, registrar: Arc<dyn HostRegistrar>) -> Result<(), CxlError> {
    let _ranges = ranges();
    registration.add(registrar)
}

/// Gives up one hold; the last one tears the registration down. An error means that the memory must never be
/// unmapped.
pub(crate) fn release(registration: Arc<Registration>, backing: &str) -> Result<(), ()> {
    let mut ranges = ranges();
    // Holds are only taken under the lock of the list, so this cannot race with an `upgrade`.
    let Some(registration) = Arc::into_inner(registration) else { return Ok(()) };
    let base = registration.base.addr().get() as u64;
    registration.tear_down(backing)?;
    ranges.retain(|entry| entry.base != base || entry.registration.strong_count() > 0);
    Ok(())
}

fn register_pieces(
    range: &Range<'_>,
    registrar: &dyn HostRegistrar,
    options: &RegisterOptions,
) -> Result<Vec<Piece>, Refused> {
    let cuts = pieces::cut(range.base.addr().get() as u64, range.len, options)?;
    let count = cuts.len();
    let mut done: Vec<Piece> = Vec::with_capacity(count);
    for (index, (offset, len)) in cuts.into_iter().enumerate() {
        let host = address(range.base, offset);
        if let Err(failure) = registrar.register(host, to_usize(len), range.access) {
            let leak = roll_back(range, registrar, &done).is_err();
            let hint = hint(failure.code, range.access, range.backing);
            let error = CxlError::Registration {
                address: host.addr().get() as u64,
                len,
                piece: index + 1,
                pieces: count,
                backing: range.backing.to_owned(),
                failure,
                hint,
            };
            return Err(Refused { error, leak });
        }
        // The host address may not be valid on the device, so it is asked for and never assumed.
        let device = registrar
            .device_pointer(host)
            .inspect_err(|failure| {
                tracing::warn!(backing = range.backing, %failure, "registered, but the device has no address for it");
            })
            .ok();
        done.push(Piece { offset, len, device });
    }
    Ok(done)
}

fn roll_back(range: &Range<'_>, registrar: &dyn HostRegistrar, done: &[Piece]) -> Result<(), ()> {
    let mut result = Ok(());
    for piece in done.iter().rev() {
        if let Err(failure) = registrar.unregister(address(range.base, piece.offset)) {
            tracing::error!(backing = range.backing, bytes = piece.len, %failure, "could not roll back a registration");
            result = Err(());
        }
    }
    result
}
