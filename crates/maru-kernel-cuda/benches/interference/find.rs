//! Where cuBLAS may be.

use std::path::{Path, PathBuf};

/// By what it is called: the newest first.
const NAMES: [&str; 3] = ["libcublas.so.13", "libcublas.so.12", "libcublas.so"];

/// Folders below the one that was named: itself, a toolkit's, the Python wheels' below site-packages.
const FOLDERS: [&str; 5] = ["", "lib64", "lib", "nvidia/cu13/lib", "nvidia/cublas/lib"];

/// What to load, in this order. With a path only what is there (a file, or a folder that has it somewhere);
/// without one the loader searches its own places, `LD_LIBRARY_PATH` among them.
pub(crate) fn candidates(given: Option<&Path>, is_file: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let Some(given) = given else { return NAMES.map(PathBuf::from).to_vec() };
    if is_file(given) {
        return vec![given.to_owned()];
    }
    let all = FOLDERS.iter().flat_map(|folder| NAMES.map(|name| given.join(folder).join(name)));
    all.filter(|path| is_file(path)).collect()
}

/// The library that cuBLAS needs: loaded before, it is found wherever cuBLAS was.
pub(crate) fn companion(cublas: &Path) -> Option<PathBuf> {
    let name = cublas.file_name()?.to_str()?;
    let version = name.strip_prefix("libcublas.so")?;
    Some(cublas.with_file_name(format!("libcublasLt.so{version}")))
}
