//! Maps shared CXL memory and hands it out as slabs.
//!
//! | Type | What it is |
//! | --- | --- |
//! | [`DaxDevice`] | an open device-dax node, or a regular file standing in for one; knows its size and alignment |
//! | [`Mapping`] | a checked, shared mapping of part of a device |
//! | [`Region`] | a mapping (or other memory) that can be registered with a device's driver, in pieces |
//! | [`Slab`] | a bounds-checked span that keeps its region alive |
//! | [`SlabPool`] | a region cut into equal slabs, with a writer that allocates and publishes |
//! | [`SlabDirectory`] | what the pool says of itself in its own memory, for any process or host to read |
//! | [`coherence`] | write back and drop CPU cache lines, for memory that several hosts share |
//!
//! ```
//! use maru_cxl::{CreateOptions, DaxDevice, Mapping, MapOptions, PoolOptions, Region, SlabPool};
//!
//! # fn main() -> Result<(), maru_cxl::CxlError> {
//! # let dir = tempfile::tempdir().unwrap();
//! let path = dir.path().join("pool");
//! let device = DaxDevice::create_file(&path, 1 << 20, CreateOptions::default())?;
//! let region = Region::new(Mapping::map(&device, &MapOptions::default())?);
//! let pool = SlabPool::create(region, PoolOptions { slab_bytes: 64 << 10, ..PoolOptions::default() })?;
//!
//! let slab = pool.alloc()?.expect("a new pool has free slabs");
//! slab.write_at(0, b"hello")?;
//! pool.publish(&slab, &[1; 32], 5, 0, None)?;
//!
//! let found = pool.lookup(&[1; 32])?.expect("published");
//! let mut bytes = [0; 5];
//! found.slab().read_at(0, &mut bytes)?;
//! assert!(found.still_valid());
//! assert_eq!(&bytes, b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! # Rules
//!
//! * **No slice over shared memory, ever.** Another process, host or device writes there; access is raw or atomic.
//! * **Teardown order**: wait for the device, unregister, unmap. If a driver call fails the mapping is leaked and
//!   that is logged, because the device may still write to it.
//! * **Memory errors.** Prefaulting ([`MapOptions::prefault`]) and [`Slab::probe`] ask the kernel for every page, so
//!   that a truncated file, a device that went away or a page known to be poisoned is a
//!   [`CxlError::MemoryFault`]. What happens to a page *after* that – somebody truncates the file, a device is
//!   unbound, an uncorrectable error is met for the first time – is a SIGBUS at the access, which this library
//!   does not catch: a handler belongs to the program, not to a library in it.
//! * Space of files is reserved before a page is touched, so a full file system is an error and not a SIGBUS.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("maru-cxl needs a 64-bit target: devices are larger than 32-bit addresses");
#[cfg(not(target_os = "linux"))]
compile_error!("maru-cxl needs Linux");

pub mod coherence;
mod device;
mod directory;
mod error;
mod header;
mod mapping;
mod num;
mod pool;
mod prefault;
mod raw;
mod region;
mod registration;
mod slab;

pub use coherence::Coherence;
pub use device::{
    CreateOptions, DaxDevice, DaxInfo, DeviceId, DeviceKind, Mode, PhysicalRange, PoolExtent,
    check_pool_overlaps,
};
pub use directory::{
    Creator, DIRECTORY_HEADER_BYTES, DIRECTORY_MAGIC, DIRECTORY_VERSION, ENTRY_BYTES, Entry, PoolInfo,
    SlabDirectory,
};
pub use error::CxlError;
pub use header::{DEVICE_HEADER_BYTES, DEVICE_MAGIC, DEVICE_VERSION, DeviceHeader, HeaderState, Uuid};
pub use mapping::{MapOptions, Mapping, Progress};
pub use pool::{Liveness, OpenOptions, PoolOptions, PoolStats, PooledSlab, Published, SlabPool};
pub use region::Region;
pub use registration::{
    Access, Call, CudaRegistrar, DriverFailure, HostRegistrar, RegisterOptions, RegisterOutcome,
    RegistrationState, ScriptedRegistrar,
};
pub use slab::Slab;
