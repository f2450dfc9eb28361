//! The one error type of this crate.

use std::io;
use std::path::PathBuf;

use crate::registration::DriverFailure;

/// Everything that can go wrong with shared memory, with the numbers an operator needs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CxlError {
    /// There is nothing at this path.
    #[error("{path}: no such file or device", path = path.display())]
    NotFound {
        /// What was opened.
        path: PathBuf,
    },

    /// The path is there, but this user may not open it.
    #[error("{path}: permission denied; {hint}", path = path.display())]
    PermissionDenied {
        /// What was opened.
        path: PathBuf,
        /// What to do about it.
        hint: &'static str,
    },

    /// The device node exists but the kernel uses the memory as ordinary RAM, or no driver is bound.
    #[error(
        "{path}: the device is {state}, so it cannot be mapped; make it a device-dax with \
         `daxctl reconfigure-device --mode=devdax {name}` (add --force if its memory is online)",
        path = path.display()
    )]
    NotDevDax {
        /// What was opened.
        path: PathBuf,
        /// The device's name, as daxctl wants it.
        name: String,
        /// "in system-ram mode", "not bound to a driver", ...
        state: String,
    },

    /// Somebody else has the device exclusively.
    #[error("{path}: the device is busy; another process or kernel driver holds it exclusively", path = path.display())]
    DeviceBusy {
        /// What was opened.
        path: PathBuf,
    },

    /// Neither a regular file nor a device-dax node.
    #[error("{path} is {found}; expected a regular file or a device-dax node (/dev/daxX.Y)", path = path.display())]
    WrongFileType {
        /// What was opened.
        path: PathBuf,
        /// What it is: "a directory", "a symbolic link", ...
        found: &'static str,
    },

    /// A size or alignment that sysfs or stat gives makes no sense.
    #[error("{source_path}: {what} is {found:?}; {expected}", source_path = source_path.display())]
    BadAttribute {
        /// The file the value was read from.
        source_path: PathBuf,
        /// Which attribute.
        what: &'static str,
        /// Its text, as found.
        found: String,
        /// What would be right.
        expected: &'static str,
    },

    /// The size of a device could not be learned.
    #[error(
        "{path}: the size of the device is unknown: cannot read {attribute}: {source}",
        path = path.display(),
        attribute = attribute.display()
    )]
    SizeUnknown {
        /// The device.
        path: PathBuf,
        /// The sysfs file.
        attribute: PathBuf,
        /// Why it could not be read.
        source: io::Error,
    },

    /// The file exists and the caller did not ask to replace it.
    #[error("{path} exists already; choose another path, or ask to replace it", path = path.display())]
    FileExists {
        /// The file.
        path: PathBuf,
    },

    /// The file system cannot hold the file.
    #[error("{path}: {wanted} bytes are wanted but the file system has {free} bytes free", path = path.display())]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Bytes the file needs.
        wanted: u64,
        /// Bytes an ordinary user may still allocate there.
        free: u64,
    },

    /// A system call failed for a reason that has no variant of its own.
    #[error("{path}: {op} failed: {source}", path = path.display())]
    Io {
        /// The system call or step.
        op: &'static str,
        /// What it was applied to.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },

    /// An argument is outside what is allowed.
    #[error("{what} is {found}; {allowed}")]
    InvalidArgument {
        /// Which argument.
        what: &'static str,
        /// Its value.
        found: u64,
        /// What is allowed.
        allowed: String,
    },

    /// An offset that must be a multiple of the alignment is not.
    #[error("{what} {value} is not a multiple of the alignment {align}")]
    Misaligned {
        /// Which number.
        what: &'static str,
        /// Its value in bytes.
        value: u64,
        /// The alignment in bytes.
        align: u64,
    },

    /// A range runs past the end of what holds it (or past 2^64).
    #[error("{what}: offset {offset} + length {len} does not fit into {size} bytes")]
    OutOfBounds {
        /// What was addressed.
        what: &'static str,
        /// First byte of the range.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
        /// Bytes there are.
        size: u64,
    },

    /// Two pools claim the same bytes of one device.
    #[error(
        "pools overlap on {path}: [{first_offset}, +{first_len}) and [{second_offset}, +{second_len})",
        path = path.display()
    )]
    Overlap {
        /// The device or file.
        path: PathBuf,
        /// Offset of the one in bytes.
        first_offset: u64,
        /// Length of the one in bytes.
        first_len: u64,
        /// Offset of the other in bytes.
        second_offset: u64,
        /// Length of the other in bytes.
        second_len: u64,
    },

    /// Transparent huge pages are switched off for this process, and the device maps in huge units.
    #[error(
        "{path} maps in units of {align} bytes but transparent huge pages are disabled for this process \
         (prctl PR_SET_THP_DISABLE), so every access would be a SIGBUS; start it without that setting",
        path = path.display()
    )]
    HugePagesDisabled {
        /// The device.
        path: PathBuf,
        /// Its alignment in bytes.
        align: u64,
    },

    /// A page could not be made present: past the end of a truncated file, device gone, memory error.
    #[error("memory at offset {offset} (+{len}) cannot be accessed: {source}; {hint}")]
    MemoryFault {
        /// Offset in the region, in bytes.
        offset: u64,
        /// Length of the range that was tried, in bytes.
        len: u64,
        /// The system's answer.
        source: io::Error,
        /// What it usually means.
        hint: &'static str,
    },

    /// The memory was mapped read-only.
    #[error("the region is mapped read-only; map it with write access to {wanted}")]
    ReadOnly {
        /// What the caller tried.
        wanted: &'static str,
    },

    /// The driver refused to register host memory.
    #[error(
        "registering [{address:#x}, +{len}) of {backing} with the driver failed (piece {piece} of {pieces}): \
         {failure}; {hint}"
    )]
    Registration {
        /// Host address of the piece.
        address: u64,
        /// Length of the piece in bytes.
        len: u64,
        /// Which piece failed, from 1.
        piece: usize,
        /// How many pieces there are.
        pieces: usize,
        /// What the memory is.
        backing: String,
        /// The driver's answer.
        failure: DriverFailure,
        /// What usually helps.
        hint: &'static str,
    },

    /// The range crosses one that is registered already.
    #[error(
        "cannot register [{address:#x}, +{len}): it overlaps the registered range [{other_address:#x}, \
         +{other_len}) without being the same"
    )]
    RegistrationOverlap {
        /// Host address asked for.
        address: u64,
        /// Length asked for, in bytes.
        len: u64,
        /// Host address of the existing registration.
        other_address: u64,
        /// Its length in bytes.
        other_len: u64,
    },

    /// A second device sees the registered memory at another address than the first.
    #[error(
        "the memory at {address:#x} has device address {first:#x} on the first device and {second:#x} on this \
         one; register it from a mapping of its own"
    )]
    DeviceAddressDiffers {
        /// Host address.
        address: u64,
        /// Device address on the first device.
        first: u64,
        /// Device address on the second device.
        second: u64,
    },

    /// CUDA cannot be used here.
    #[error("CUDA is not available: {reason}")]
    CudaUnavailable {
        /// Why.
        reason: String,
    },

    /// A CUDA call failed.
    #[error("{op} failed: {failure}")]
    Cuda {
        /// The driver call.
        op: &'static str,
        /// The driver's answer.
        failure: DriverFailure,
    },

    /// The device header is of no version known here; only raised where a known one is needed.
    #[error("{path}: device header has version {found}, this program knows {known}", path = path.display())]
    HeaderVersion {
        /// The device.
        path: PathBuf,
        /// The version found.
        found: u32,
        /// The version known.
        known: u32,
    },

    /// The first bytes of the device are somebody else's.
    #[error(
        "{backing}: the header unit holds data that is not a maru device header (first bytes {found}); \
         it may belong to another program. Force creation only if its content may be destroyed"
    )]
    ForeignHeader {
        /// What the memory is.
        backing: String,
        /// First bytes, in hexadecimal.
        found: String,
    },

    /// The place of the slab directory holds something else, or a damaged directory.
    #[error("{backing}: no usable slab directory at offset {offset}: {reason}")]
    NotAPool {
        /// What the memory is.
        backing: String,
        /// Where the directory would be, in bytes from the start of the region.
        offset: u64,
        /// What is wrong with it.
        reason: String,
    },

    /// There is a pool already.
    #[error(
        "{backing} already holds a pool (id {uuid}, created by process {creator_pid}, {liveness}); \
         open it, or force its replacement"
    )]
    PoolExists {
        /// What the memory is.
        backing: String,
        /// Id of the pool that is there.
        uuid: String,
        /// Process that created it.
        creator_pid: u32,
        /// What is known of that process.
        liveness: &'static str,
    },

    /// Another process has the pool open for writing.
    #[error("{backing}: another writer has the pool open{}; a pool has one writer at a time", holder_text(*holder))]
    PoolLocked {
        /// What the memory is.
        backing: String,
        /// Process id of the holder, where it is known.
        holder: Option<u32>,
    },

    /// The region is too small for one slab and its directory.
    #[error("the region has {len} bytes, a pool of one slab of {slab_bytes} bytes needs {needed}")]
    PoolTooSmall {
        /// Length of the region in bytes.
        len: u64,
        /// Slab size asked for.
        slab_bytes: u64,
        /// Bytes that would do.
        needed: u64,
    },

    /// The pool was opened for reading only.
    #[error("the pool is open for reading; open it for writing to {wanted}")]
    NotWriter {
        /// What the caller tried.
        wanted: &'static str,
    },

    /// A slab was given back twice.
    #[error("slab {index} was freed already")]
    DoubleFree {
        /// The slab's index in its pool.
        index: u64,
    },

    /// The slab belongs to another pool.
    #[error("slab {index} belongs to another pool")]
    ForeignSlab {
        /// The slab's index in its own pool.
        index: u64,
    },

    /// The slab is published; readers may be using it.
    #[error("slab {index} is published; withdraw its key first")]
    SlabPublished {
        /// The slab's index in the pool.
        index: u64,
    },

    /// The key has an entry already.
    #[error("the key {key} is published already (slab {index})")]
    KeyExists {
        /// The key, in hexadecimal.
        key: String,
        /// The slab it names.
        index: u64,
    },

    /// Every directory entry is in use.
    #[error("the slab directory is full: all {entries} entries are published")]
    DirectoryFull {
        /// Number of entries.
        entries: u64,
    },
}

fn holder_text(holder: Option<u32>) -> String {
    holder.map_or_else(String::new, |pid| format!(" (process {pid})"))
}

impl CxlError {
    /// Stable snake_case name of the kind of error, for machine-readable output.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "not_found",
            Self::PermissionDenied { .. } => "permission_denied",
            Self::NotDevDax { .. } | Self::HugePagesDisabled { .. } | Self::CudaUnavailable { .. } => {
                "not_available"
            }
            Self::DeviceBusy { .. } | Self::PoolLocked { .. } => "busy",
            Self::WrongFileType { .. }
            | Self::InvalidArgument { .. }
            | Self::Misaligned { .. }
            | Self::OutOfBounds { .. }
            | Self::Overlap { .. }
            | Self::ReadOnly { .. }
            | Self::RegistrationOverlap { .. }
            | Self::PoolTooSmall { .. }
            | Self::NotWriter { .. }
            | Self::DoubleFree { .. }
            | Self::ForeignSlab { .. }
            | Self::SlabPublished { .. } => "invalid_argument",
            Self::BadAttribute { .. } | Self::SizeUnknown { .. } => "bad_device",
            Self::FileExists { .. } | Self::PoolExists { .. } | Self::KeyExists { .. } => "already_exists",
            Self::NoSpace { .. } | Self::DirectoryFull { .. } => "no_space",
            Self::Io { .. } => "io",
            Self::MemoryFault { .. } => "memory_fault",
            Self::Registration { .. } | Self::DeviceAddressDiffers { .. } => "registration",
            Self::Cuda { .. } => "cuda",
            Self::HeaderVersion { .. } | Self::ForeignHeader { .. } | Self::NotAPool { .. } => "not_a_pool",
        }
    }
}

/// Builds an [`CxlError::Io`] from a rustix error.
pub(crate) fn io_error(op: &'static str, path: &std::path::Path, source: impl Into<io::Error>) -> CxlError {
    CxlError::Io { op, path: path.to_owned(), source: source.into() }
}
