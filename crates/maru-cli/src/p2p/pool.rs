//! The pool's file or device: made, opened, and removed again.

use std::path::{Path, PathBuf};

use maru::Config;
use maru::cxl::{
    Coherence, CreateOptions, CxlError, DaxDevice, MapOptions, Mapping, OpenOptions, PoolOptions, Region, SlabPool,
    Uuid,
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
    let name = format!("maru-p2p-{}-{}.pool", std::process::id(), Uuid::random()?);
    let shared = Path::new("/dev/shm").join(&name);
    match DaxDevice::create_file(&shared, len, CreateOptions::default()) {
        Ok(device) => Ok((device, shared)),
        Err(in_memory) => {
            let path = std::env::temp_dir().join(&name);
            tracing::warn!(error = %in_memory, instead = %path.display(), "no room in /dev/shm");
            match DaxDevice::create_file(&path, len, CreateOptions::default()) {
                Ok(device) => Ok((device, path)),
                // Of two shortages the one of the place that was meant is the better message.
                Err(error) => Err(if matches!(in_memory, CxlError::NoSpace { .. }) { in_memory } else { error }.into()),
            }
        }
    }
}

/// Opens what the user named, or makes a file of that name.
pub(crate) fn named_file(path: &Path, offset: u64, len: u64) -> Result<(DaxDevice, bool), CliError> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let bytes = offset.checked_add(len).unwrap_or(u64::MAX);
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
    progress: impl Fn(u64, u64) + Send + Sync + 'static,
) -> Result<SlabPool, CliError> {
    let region = map(device, job, config, false, config.cxl.prefault, progress)?;
    let coherence = coherence(config);
    let create = PoolOptions { slab_bytes, entries: 0, force: job.force, coherence };
    if job.fresh || job.force {
        return Ok(SlabPool::create(region, create)?);
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
    Ok(pool)
}

/// Maps the pool for the consumer, which cannot change it.
pub(crate) fn open_for_reading(job: &Job, config: &Config, prefault: bool) -> Result<SlabPool, CliError> {
    let device = DaxDevice::open(&job.pool)?;
    let region = map(&device, job, config, true, prefault, |_, _| {})?;
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
        progress: Some(std::sync::Arc::new(progress)),
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
