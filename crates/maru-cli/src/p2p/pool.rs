//! The pool's file or device: made, opened, and removed again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use maru::Config;
use maru::Place;
use maru::cxl::{
    Coherence, CreateOptions, CudaRegistrar, CxlError, DaxDevice, MapOptions, Mapping, OpenOptions,
    PoolOptions, Region, SlabPool, Uuid,
};
use maru::transfer::config::CoherenceKind;

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

/// Maps the pool for the producer and opens it for writing; makes one where the memory is blank.
pub(crate) fn open_for_writing(
    device: &DaxDevice,
    job: &Job,
    config: &Config,
    slab_bytes: u64,
    place: Place,
    progress: impl Fn(u64, u64) + Send + Sync + 'static,
) -> Result<SlabPool, CliError> {
    let region = map(device, job, config, false, config.cxl.prefault, progress)?;
    let coherence = coherence(config);
    let create = PoolOptions { slab_bytes, entries: 0, force: job.force, coherence };
    if job.fresh || job.force {
        return registered(SlabPool::create(region, create)?, config, place);
    }
    let open = OpenOptions { writable: true, force: false, coherence };
    let pool = match SlabPool::open(region.clone(), open) {
        Ok(pool) => pool,
        // Blank memory becomes a pool; anything else that is none is refused there, with the reason.
        Err(CxlError::NotAPool { .. }) => SlabPool::create(region, create)?,
        Err(error) => return Err(error.into()),
    };
    let found = pool.slab_bytes();
    if found < slab_bytes {
        return Err(CliError::invalid(format!(
            "{}: the pool there has slabs of {found} bytes, this profile needs {slab_bytes}; choose another path, or \
             --force to replace the pool and all that is published in it",
            job.pool.display()
        )));
    }
    registered(pool, config, place)
}

/// Registers the pool with the device of the caches, if they are on one.
pub(crate) fn registered(pool: SlabPool, config: &Config, place: Place) -> Result<SlabPool, CliError> {
    if let (Place::Cuda(device), true) = (place, config.cxl.register) {
        let registrar = CudaRegistrar::open(usize::try_from(device).unwrap_or(usize::MAX))?;
        pool.register(Arc::new(registrar), config.cxl.register_piece, config.cxl.require_registration)?;
    }
    Ok(pool)
}

/// Maps the pool for the consumer, which cannot change it (where its device can work so).
pub(crate) fn open_for_reading(
    job: &Job,
    config: &Config,
    prefault: bool,
    place: Place,
    progress: impl Fn(u64, u64) + Send + Sync + 'static,
) -> Result<SlabPool, CliError> {
    let device = DaxDevice::open(&job.pool)?;
    // Not every driver registers memory that is mapped for reading only.
    let read_only = place == Place::Host;
    let region = map(&device, job, config, read_only, prefault, progress)?;
    let open = OpenOptions { writable: false, force: false, coherence: coherence(config) };
    Ok(SlabPool::open(region, open)?)
}

fn map(
    device: &DaxDevice,
    job: &Job,
    config: &Config,
    read_only: bool,
    prefault: bool,
    progress: impl Fn(u64, u64) + Send + Sync + 'static,
) -> Result<Region, CliError> {
    let options = MapOptions {
        offset: job.offset,
        len: job.size,
        prefault,
        prefault_threads: usize::try_from(config.cxl.prefault_threads).unwrap_or(0),
        progress: Some(Arc::new(progress)),
        read_only,
    };
    Ok(Region::new(Mapping::map(device, &options)?))
}

fn coherence(config: &Config) -> Coherence {
    match config.cxl.coherence {
        CoherenceKind::Flush => Coherence::Flush,
        _ => Coherence::None,
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
