//! The file that remembers a measurement.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::{Identity, Row};

/// Changes whenever what is measured or how does.
const FORMAT: u32 = 1;

/// Far more than a file of ours takes.
const MOST: u64 = 64 << 10;

const HEAD: &str = "# Times measured by the maru data plane, in microseconds. Delete this file to have them measured again.\n";

/// The last line: half a file may read as a whole one.
const TAIL: &str = "\n# end\n";

/// A measurement with what it holds for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Stored {
    format: u32,
    /// When, in seconds since 1970.
    pub measured_at: u64,
    /// What it holds for.
    pub identity: Identity,
    /// What was measured.
    #[serde(rename = "row", default)]
    pub rows: Vec<Row>,
}

/// Why a file is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// Not ours, damaged, or of a version that had other keys.
    #[error("it cannot be read: {reason}")]
    Unreadable {
        /// What the reader says.
        reason: String,
    },
    /// Of a version that measured something else.
    #[error("it has format {found}, this version writes {FORMAT}")]
    Format {
        /// What it says.
        found: u32,
    },
    /// Of another device, driver, version or configuration.
    #[error("it is of another device, driver, version or configuration")]
    Foreign,
    /// Times that cannot be, or sizes that were not measured.
    #[error("its numbers make no sense")]
    Nonsense,
}

impl Stored {
    /// A measurement made now.
    pub fn new(identity: Identity, rows: Vec<Row>) -> Self {
        let measured_at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Stored { format: FORMAT, measured_at, identity, rows }
    }

    /// Reads what [`Stored::to_toml`] wrote.
    ///
    /// # Errors
    /// [`Unusable`] for anything that this version would not have written for `wanted`. An empty
    /// [`Identity::kernel`] in `wanted` takes any.
    pub fn from_toml(text: &str, wanted: &Identity) -> Result<Self, Unusable> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let unreadable = |error: toml::de::Error| Unusable::Unreadable { reason: error.message().to_owned() };
        // First of all, as the rest may look different in another version.
        let Version { format } = toml::from_str(text).map_err(unreadable)?;
        if format != FORMAT {
            return Err(Unusable::Format { found: format });
        }
        if !text.ends_with(TAIL) {
            return Err(Unusable::Unreadable { reason: "it has no end".to_owned() });
        }
        let stored: Stored = toml::from_str(text).map_err(unreadable)?;
        if !wanted.covers(&stored.identity) {
            return Err(Unusable::Foreign);
        }
        let twice = |at: usize, row: &Row| stored.rows[..at].iter().any(|other| other.key() == row.key());
        let sensible = |(at, row): (usize, &Row)| row.is_sensible() && !twice(at, row);
        let measured = stored.rows.iter().any(|row| !row.samples.is_empty());
        match measured && stored.rows.iter().enumerate().all(sensible) {
            true => Ok(stored),
            false => Err(Unusable::Nonsense),
        }
    }

    /// As text for a file.
    ///
    /// # Errors
    /// [`Unusable::Unreadable`] where TOML has no way to write it, such as a size beyond 63 bits.
    pub fn to_toml(&self) -> Result<String, Unusable> {
        let text =
            toml::to_string(self).map_err(|error| Unusable::Unreadable { reason: error.to_string() })?;
        Ok(format!("{HEAD}{text}{TAIL}"))
    }
}

/// The measurement in a file, if there is one that can be used.
pub(super) fn load(path: &Path, wanted: &Identity) -> Option<Stored> {
    let text = match read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "a calibration cannot be read");
            return None;
        }
    };
    match Stored::from_toml(&text, wanted) {
        Ok(stored) => Some(stored),
        Err(reason) => {
            tracing::warn!(path = %path.display(), %reason, "a calibration is not used");
            None
        }
    }
}

fn read(path: &Path) -> io::Result<String> {
    // Opening a pipe would wait for a writer.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    let mut text = String::new();
    if File::open(path)?.take(MOST + 1).read_to_string(&mut text)? as u64 > MOST {
        return Err(io::Error::other(format!("it is larger than {MOST} bytes")));
    }
    Ok(text)
}

/// Writes a measurement; whether that worked. A reader sees the whole file or none, and of several writers the
/// last one's.
pub(super) fn store(path: &Path, stored: &Stored) -> bool {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let written = stored.to_toml().map_err(io::Error::other).and_then(|text| write(path, &text));
    let Err(error) = written else { return true };
    if WARNED.swap(true, Ordering::Relaxed) {
        tracing::debug!(path = %path.display(), %error, "the calibration cannot be kept");
    } else {
        tracing::warn!(
            path = %path.display(),
            %error,
            "the calibration cannot be kept and is measured at every start: make the directory writable, let \
             XDG_CACHE_HOME name one that is, or set calibrate = false"
        );
    }
    false
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::other("it has no directory"));
    };
    fs::create_dir_all(dir)?;
    // Processes of several containers may share a directory and a process id.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
    let serial = NEXT.fetch_add(1, Ordering::Relaxed);
    let temporary = dir.join(format!(".{}.{}.{now}.{serial}", name.to_string_lossy(), std::process::id()));
    let mut file = OpenOptions::new().write(true).create_new(true).open(&temporary)?;
    let outcome = file.write_all(text.as_bytes()).and_then(|()| fs::rename(&temporary, path));
    if outcome.is_err()
        && let Err(error) = fs::remove_file(&temporary)
    {
        tracing::debug!(path = %temporary.display(), %error, "an unfinished calibration stays behind");
    }
    outcome
}
