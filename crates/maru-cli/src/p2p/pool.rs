//! The pool's file or device: made, opened, and removed again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use maru::Place;
use maru::cxl::{CreateOptions, CxlError, DaxDevice, SlabPool, Uuid};
use maru::transfer::config::PoolConfig;
use maru::transfer::{TransferEngine, TransferError};

use crate::error::CliError;
use crate::p2p::job::Job;

/// A file that this run made. It is removed when this is dropped, unless it is told to stay.
#[derive(Debug)]
pub(crate) struct OwnFile(Option<DaxDevice>);

impl OwnFile {
    /// Leaves the file where it is.
    pub(crate) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if let Some(device) = self.0.take() {
            remove(&device);
        }
    }
}

/// Removes a file, if its name is still that of the file that was opened.
pub(crate) fn remove(device: &DaxDevice) {
    if let Err(error) = device.remove_file() {
        tracing::error!(path = %device.path().display(), %error, "could not remove the pool's file");
    }
}

/// Makes a file of this run's own: in /dev/shm (which CUDA can register), else in $TMPDIR.
pub(crate) fn own_file(len: u64) -> Result<(DaxDevice, PathBuf), CliError> {
    own_file_in(Path::new("/dev/shm"), &std::env::temp_dir(), len)
}

fn own_file_in(first: &Path, second: &Path, len: u64) -> Result<(DaxDevice, PathBuf), CliError> {
    let name = format!("maru-p2p-{}-{}.pool", std::process::id(), Uuid::random()?);
    let shared = first.join(&name);
    match DaxDevice::create_file(&shared, len, CreateOptions::default()) {
        Ok(device) => Ok((device, shared)),
        Err(in_memory) => {
            let path = second.join(&name);
            tracing::warn!(error = %in_memory, instead = %path.display(), "the pool's file goes elsewhere");
            match DaxDevice::create_file(&path, len, CreateOptions::default()) {
                Ok(device) => Ok((device, path)),
                // Of two shortages the one of the place that was meant is the better message.
                Err(error) => {
                    Err(if matches!(in_memory, CxlError::NoSpace { .. }) { in_memory } else { error }.into())
                }
            }
        }
    }
}

/// Opens what the user named, or makes a file of that name.
pub(crate) fn named_file(path: &Path, offset: u64, len: u64) -> Result<(DaxDevice, bool), CliError> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let bytes = offset.saturating_add(len);
            Ok((DaxDevice::create_file(path, bytes, CreateOptions::default())?, true))
        }
        // Whatever else is wrong with it, opening says so.
        _ => Ok((DaxDevice::open(path)?, false)),
    }
}

impl From<DaxDevice> for OwnFile {
    fn from(device: DaxDevice) -> Self {
        OwnFile(Some(device))
    }
}

/// Opens the producer's pool for writing; makes one where the memory is blank.
pub(crate) fn open_for_writing(
    engine: &TransferEngine,
    device: &DaxDevice,
    job: &Job,
    slab_bytes: u64,
    progress: impl Fn(u64, u64) + Send + Sync + 'static,
) -> Result<SlabPool, CliError> {
    let window = window(job);
    let mut access = engine.pool_access();
    access.progress = Some(Arc::new(progress));
    let blank = || {
        let mut look = engine.pool_access();
        (look.read_only, look.prefault, look.register) = (true, false, false);
        match engine.open_pool_on(device, &window, false, &look).map_err(plain) {
            Ok(_) => Ok(false),
            Err(CliError::Cxl(CxlError::NotAPool { .. })) => Ok(true),
            Err(error) => Err(error),
        }
    };
    if job.fresh || job.force || blank()? {
        // Blank memory becomes a pool; anything else that is none is refused there, with the reason.
        return engine.create_pool_on(device, &window, slab_bytes, job.force, &access).map_err(plain);
    }
    let pool = engine.open_pool_on(device, &window, true, &access).map_err(plain)?;
    let found = pool.slab_bytes();
    if found < slab_bytes {
        return Err(CliError::invalid(format!(
            "{}: the pool there has slabs of {found} bytes, this profile needs {slab_bytes}; choose another path, or \
             --force to replace the pool and all that is published in it",
            job.pool.display()
        )));
    }
    Ok(pool)
}

/// Opens the consumer's pool, which it cannot change (where its device can work so). Only a pool that is to be
/// `used`, and not just looked into, is prefaulted and registered.
pub(crate) fn open_for_reading(
    engine: &TransferEngine,
    job: &Job,
    used: bool,
    progress: impl Fn(u64, u64) + Send + Sync + 'static,
) -> Result<SlabPool, CliError> {
    let device = DaxDevice::open(&job.pool)?;
    let mut access = engine.pool_access();
    // Not every driver registers memory that is mapped for reading only.
    access.read_only = engine.place() == Place::Host;
    access.prefault &= used;
    access.register &= used;
    access.progress = Some(Arc::new(progress));
    engine.open_pool_on(&device, &window(job), false, &access).map_err(plain)
}

fn window(job: &Job) -> PoolConfig {
    PoolConfig::new(&job.pool).with_offset(job.offset).with_size(job.size)
}

/// Errors of memory and pools as what they are, for those who look at them.
fn plain(error: TransferError) -> CliError {
    match error {
        TransferError::Cxl(error) => CliError::Cxl(error),
        other => CliError::Transfer(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn an_own_file_is_private_and_goes_with_its_guard() {
        let dir = tempfile::tempdir().unwrap();
        let (device, path) = own_file_in(dir.path(), Path::new("/nowhere"), 8192).unwrap();
        let metadata = path.metadata().unwrap();
        assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (8192, 0o600));
        drop(OwnFile::from(device));
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_kept_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (device, path) = own_file_in(dir.path(), Path::new("/nowhere"), 8192).unwrap();
        OwnFile::from(device).keep();
        assert!(path.exists());
    }

    #[test]
    fn the_second_place_is_used_when_the_first_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (_, path) = own_file_in(Path::new("/nowhere"), dir.path(), 4096).unwrap();
        assert!(path.starts_with(dir.path()));
    }

    #[test]
    fn a_shortage_names_wanted_and_free_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let error = own_file_in(dir.path(), dir.path(), 1 << 60).unwrap_err();
        assert_eq!((error.kind(), error.exit_code()), ("no_space", 1));
        assert!(error.to_string().contains("1152921504606846976 bytes are wanted"), "{error}");
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn a_file_of_another_owner_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool");
        let (device, made) = named_file(&path, 0, 4096).unwrap();
        assert!(made);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "somebody else's").unwrap();
        drop(OwnFile::from(device));
        assert!(path.exists());
    }
}
