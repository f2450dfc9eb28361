//! Registering host memory with a device's driver, so that the device reaches it at full speed.

mod cuda;
mod pieces;
mod ranges;
mod scripted;

use std::fmt;
use std::ptr::NonNull;

pub use self::cuda::CudaRegistrar;
pub use self::pieces::RegisterOptions;
pub(crate) use self::ranges::{Range, Refused, Registration, acquire, join, release};
pub use self::scripted::{Call, ScriptedRegistrar};

use crate::error::CxlError;

/// A driver's refusal: its code and its own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverFailure {
    /// The driver's error code.
    pub code: u32,
    /// Name and text of the code.
    pub text: String,
}

impl fmt::Display for DriverFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.text, self.code)
    }
}

impl std::error::Error for DriverFailure {}

/// What the device may do with the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and write.
    ReadWrite,
    /// Read only, because the mapping is.
    ReadOnly,
}

/// The driver calls that registration needs. [`CudaRegistrar`] makes them; [`ScriptedRegistrar`] plays a driver.
///
/// An implementation must leave the calling thread as it found it: the same current context, no pending error.
/// It must not register or unregister regions from inside a call.
pub trait HostRegistrar: Send + Sync + fmt::Debug {
    /// Registers `len` bytes at `addr`.
    ///
    /// # Errors
    /// The driver's code; then nothing is registered.
    fn register(&self, addr: NonNull<u8>, len: usize, access: Access) -> Result<(), DriverFailure>;

    /// Undoes the registration that began at the host address `addr`.
    ///
    /// # Errors
    /// The driver's code; the memory must then stay mapped for ever.
    fn unregister(&self, addr: NonNull<u8>) -> Result<(), DriverFailure>;

    /// The address by which the device reaches registered memory.
    ///
    /// # Errors
    /// The driver's code when it has none; the memory can then be used by copies, not by kernels.
    fn device_pointer(&self, addr: NonNull<u8>) -> Result<u64, DriverFailure>;

    /// Waits until the device does nothing any more that could touch registered memory.
    ///
    /// # Errors
    /// The driver's code.
    fn quiesce(&self) -> Result<(), DriverFailure>;
}

/// What became of [`Region::register`](crate::Region::register).
#[derive(Debug)]
pub enum RegisterOutcome {
    /// Registered.
    Registered {
        /// Number of driver registrations.
        pieces: usize,
        /// Bytes registered.
        bytes: u64,
    },
    /// Not registered, and the options allow that.
    Unregistered {
        /// Why.
        reason: CxlError,
    },
}

impl RegisterOutcome {
    /// Whether the region is registered.
    pub fn is_registered(&self) -> bool {
        matches!(self, Self::Registered { .. })
    }
}

/// How the registration of a region stands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegistrationState {
    /// Nobody asked for it, or it was undone.
    Unregistered,
    /// It was tried and failed; the region works without.
    Failed {
        /// Why, in words.
        reason: String,
    },
    /// It is registered.
    Registered {
        /// Number of driver registrations.
        pieces: usize,
        /// Calls of `register` that have not been undone.
        count: usize,
    },
}

impl RegistrationState {
    /// Whether the region is registered.
    pub fn is_registered(&self) -> bool {
        matches!(self, Self::Registered { .. })
    }
}

/// Whether the error is the driver's doing, so that the region may go on unregistered.
pub(crate) fn is_driver_failure(error: &CxlError) -> bool {
    matches!(error, CxlError::Registration { .. } | CxlError::DeviceAddressDiffers { .. })
}

/// What usually helps against a code of `cuMemHostRegister`.
pub(crate) fn hint(code: u32, access: Access, backing: &str) -> &'static str {
    const INVALID_VALUE: u32 = 1;
    const OUT_OF_MEMORY: u32 = 2;
    const ALREADY_REGISTERED: u32 = 712;
    const NOT_PERMITTED: u32 = 800;
    const NOT_SUPPORTED: u32 = 801;
    let disk = backing.contains("(a file on ")
        && !backing.contains("(a file on tmpfs")
        && !backing.contains("(a file on hugetlbfs");
    match code {
        INVALID_VALUE if disk => {
            "a file on a disk file system cannot be registered: use tmpfs (/dev/shm), hugetlbfs or a device-dax node"
        }
        INVALID_VALUE | NOT_SUPPORTED if access == Access::ReadOnly => {
            "the mapping is read-only and this device cannot register such memory: map it writable"
        }
        INVALID_VALUE => {
            "the driver refuses this kind of memory: check the driver version and that the device is in devdax mode"
        }
        OUT_OF_MEMORY => "raise the locked-memory limit (ulimit -l) or lower register_piece",
        ALREADY_REGISTERED => "something else in this process has registered part of it",
        NOT_PERMITTED => "raise the locked-memory limit (ulimit -l) or grant CAP_IPC_LOCK",
        _ => "see the driver's log (dmesg)",
    }
}
