//! Finding and loading the library.

use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs};

use crate::{SimError, Simulator};

/// The environment variable that scripts the simulator when it is loaded: words separated by `;`.
///
/// * a setting: `devices=1`, `shift=1`, `delay_us=200`, …
/// * `fail=FUNCTION:NTH:CODE` – the nth call fails; `fail_all=…` – and all later ones; `fail_later=…` – the
///   call succeeds, its work fails
/// * `missing=FUNCTION+FUNCTION` – the library lacks these symbols ([`install`] only; a process that finds the
///   library by its search path gets a copy made by [`write_library`])
pub const VARIABLE: &str = "MARU_SIM_CUDA";

/// The library as it was built.
///
/// # Errors
/// [`SimError::NotBuilt`] with the reason.
pub fn library() -> Result<&'static Path, SimError> {
    match (option_env!("MARU_SIM_LIBRARY"), option_env!("MARU_SIM_MISSING")) {
        (Some(path), _) => Ok(Path::new(path)),
        (None, reason) => Err(SimError::NotBuilt { reason: reason.unwrap_or("unknown").to_owned() }),
    }
}

/// Loads the simulated driver into this process, once. Whoever loads `libcuda.so` afterwards gets it.
///
/// # Errors
/// [`SimError`]: not built, not loadable, or a real driver was loaded before.
pub fn install() -> Result<&'static Simulator, SimError> {
    static INSTALLED: OnceLock<Result<Simulator, SimError>> = OnceLock::new();
    INSTALLED.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Writes the library as `libcuda.so` into a directory, without the named functions: for other processes,
/// which find it through `LD_LIBRARY_PATH`.
///
/// # Errors
/// [`SimError`]: not built, no such function, not writable.
pub fn write_library(directory: &Path, missing: &[&str]) -> Result<PathBuf, SimError> {
    let source = library()?;
    let image = fs::read(source)
        .map_err(|e| SimError::NotLoaded { path: source.to_owned(), reason: e.to_string() })?;
    let path = directory.join("libcuda.so");
    fs::write(&path, without(image, missing)?)
        .map_err(|e| SimError::NotWritten { path: path.clone(), reason: e.to_string() })?;
    Ok(path)
}

fn load() -> Result<Simulator, SimError> {
    let built = library()?;
    // SAFETY: looks for a library that is loaded already, loads none.
    if !unsafe { libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }.is_null() {
        return Err(SimError::AnotherDriver);
    }
    let script = env::var(VARIABLE).unwrap_or_default();
    let missing: Vec<&str> = script
        .split(';')
        .filter_map(|word| word.strip_prefix("missing="))
        .flat_map(|names| names.split('+'))
        .filter(|name| !name.is_empty())
        .collect();
    if missing.is_empty() {
        return open(built).and_then(Simulator::new);
    }
    // The copy is needed until it is loaded only.
    let directory = env::temp_dir().join(format!("maru-sim-{}", std::process::id()));
    fs::create_dir_all(&directory)
        .map_err(|e| SimError::NotWritten { path: directory.clone(), reason: e.to_string() })?;
    let opened = write_library(&directory, &missing).and_then(|path| open(&path));
    if let Err(error) = fs::remove_dir_all(&directory) {
        eprintln!("{} stays behind: {error}", directory.display());
    }
    opened.and_then(Simulator::new)
}

/// A loaded library; never unloaded, its threads run until the process ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loaded(*mut c_void);

// SAFETY: a handle for `dlsym`, which any thread may call.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Loaded {
    pub(crate) fn symbol(self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is of a library that stays loaded; the name is a C string.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }
}

fn open(path: &Path) -> Result<Loaded, SimError> {
    let failed = |reason: String| SimError::NotLoaded { path: path.to_owned(), reason };
    let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|e| failed(e.to_string()))?;
    // SAFETY: the library is ours; its only constructor reads an environment variable.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !handle.is_null() {
        return Ok(Loaded(handle));
    }
    // SAFETY: no other call of the loader on this thread lies between.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return Err(failed("unknown reason".to_owned()));
    }
    // SAFETY: the loader's message is a C string until its next call on this thread.
    let text = unsafe { CStr::from_ptr(text) };
    Err(failed(text.to_string_lossy().into_owned()))
}

/// Renames the functions in the string tables: a look-up then finds the hash, compares names and fails.
fn without(mut image: Vec<u8>, missing: &[&str]) -> Result<Vec<u8>, SimError> {
    for function in missing {
        let mut wanted = vec![0];
        wanted.extend_from_slice(function.as_bytes());
        wanted.push(0);
        let mut from = 0;
        let mut found = false;
        while let Some(at) =
            image.get(from..).and_then(|rest| rest.windows(wanted.len()).position(|window| window == wanted))
        {
            if let Some(first) = image.get_mut(from + at + 1) {
                *first = b'X';
            }
            from += at + 1;
            found = true;
        }
        if !found {
            return Err(SimError::NoSuchFunction { function: (*function).to_owned() });
        }
    }
    Ok(image)
}
