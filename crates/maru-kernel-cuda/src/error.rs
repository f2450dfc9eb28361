//! What can go wrong here.

use maru_driver::{DriverError, Unavailable};
use maru_layout::LayoutError;

/// Errors of the native kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// No driver that the kernel can use.
    #[error(transparent)]
    NoDriver(#[from] Unavailable),
    /// The driver sees no GPU.
    #[error("the NVIDIA driver reports no usable GPU ({reason})")]
    NoDevice {
        /// What the driver said.
        reason: String,
    },
    /// A device number that does not exist.
    #[error("device cuda:{device} does not exist; this machine has {count} (0 to {})", count.saturating_sub(1))]
    DeviceOutOfRange {
        /// The number asked for.
        device: usize,
        /// Devices there are.
        count: usize,
    },
    /// A GPU older than the kernel's image.
    #[error("device cuda:{device} has compute capability {major}.{minor}; the kernel needs 7.0 or later")]
    DeviceTooOld {
        /// The device.
        device: usize,
        /// Its compute capability.
        major: i32,
        /// Its compute capability.
        minor: i32,
    },
    /// The driver cannot compile the portable image.
    #[error(
        "the driver does not know the image's PTX version {ptx_version} (driver supports CUDA {}.{}); \
         driver 525 or later is needed", cuda_version / 1000, cuda_version % 1000 / 10
    )]
    UnsupportedPtx {
        /// PTX version of the image.
        ptx_version: &'static str,
        /// CUDA version of the driver, as `1000 * major + 10 * minor`.
        cuda_version: i32,
    },
    /// The image did not load for another reason.
    #[error("the kernel's {image} did not load: {name} ({code})")]
    ModuleLoad {
        /// Which image.
        image: &'static str,
        /// The driver's name of the error.
        name: String,
        /// The driver's error code.
        code: u32,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Pieces that are not of their transfer.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The kernel was asked to touch memory that the device cannot address.
    #[error(
        "the slab has no device address: its region is not registered with CUDA, so no kernel may touch it"
    )]
    SlabNotAddressable,
    /// A token too large for one launch.
    #[error(
        "a token of {units} accesses in one plane is more than a launch can take ({limit} over all planes of a layer)"
    )]
    TokenTooLarge {
        /// Accesses of a token in one plane.
        units: u64,
        /// What is allowed.
        limit: u64,
    },
    /// A job of one cache with the plane table of another.
    #[error("the plane table was made for another cache than the transfer")]
    WrongPlanes,
    /// A slot in device memory that is outside the cache.
    #[error(
        "slot {slot} of token {token} is outside the cache (-1 skips, else 0 to {}); the token was left out",
        num_slots.saturating_sub(1)
    )]
    SlotOutOfRange {
        /// Index of the token.
        token: u64,
        /// Its slot.
        slot: i64,
        /// Slots of the cache.
        num_slots: u64,
    },
}

impl KernelError {
    /// The stable snake_case kind that the command line and Python report.
    pub fn kind(&self) -> &'static str {
        match self {
            KernelError::NoDriver(_)
            | KernelError::NoDevice { .. }
            | KernelError::DeviceTooOld { .. }
            | KernelError::UnsupportedPtx { .. }
            | KernelError::ModuleLoad { .. }
            | KernelError::SlabNotAddressable => "not_available",
            KernelError::Driver(error) => error.kind(),
            KernelError::Layout(error) => error.kind(),
            KernelError::SlotOutOfRange { .. } => "slot_out_of_range",
            KernelError::DeviceOutOfRange { .. }
            | KernelError::TokenTooLarge { .. }
            | KernelError::WrongPlanes => "invalid_argument",
        }
    }
}
