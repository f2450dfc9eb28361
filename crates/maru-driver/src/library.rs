//! Is the driver library there, and does it have what is going to be called?

use std::sync::OnceLock;

use cudarc::driver::sys;

/// Why the driver cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// No library.
    #[error("no NVIDIA driver: neither libcuda.so nor libcuda.so.1 can be loaded")]
    NoDriver,
    /// A library that lacks a function.
    #[error("the NVIDIA driver is too old: its library has no {symbol}; driver 525 or later is needed")]
    TooOld {
        /// The missing function.
        symbol: String,
    },
}

/// Whether the driver library can be loaded. To be asked before anything else: without the library every
/// other call into it would panic. Remembered once it was found.
pub fn is_present() -> bool {
    static FOUND: OnceLock<()> = OnceLock::new();
    if FOUND.get().is_some() {
        return true;
    }
    // SAFETY: loads the driver library if it is there, whose constructors have no preconditions.
    let found = unsafe { sys::is_culib_present() };
    if found {
        let _ = FOUND.set(());
    }
    found
}

/// Checks that the library is there and has every function named, without initialising it. A function that
/// is missing would panic when it is called.
///
/// # Errors
/// [`Unavailable`] with the reason.
pub fn require(symbols: &[&str]) -> Result<(), Unavailable> {
    if !is_present() {
        return Err(Unavailable::NoDriver);
    }
    for symbol in symbols {
        // SAFETY: only looked up, never called through this type.
        if unsafe { self::symbol::<unsafe extern "C" fn()>(symbol) }.is_none() {
            return Err(Unavailable::TooOld { symbol: (*symbol).to_owned() });
        }
    }
    Ok(())
}

/// A function of the driver by the name the library exports (version suffix included), if it has it: for
/// functions that only some drivers have.
///
/// # Safety
/// `F` is the function pointer type of that function.
pub unsafe fn symbol<F: Copy>(name: &str) -> Option<F> {
    if !is_present() {
        return None;
    }
    // SAFETY: the library is present, as just seen.
    let library = unsafe { sys::culib() };
    // SAFETY: the type is the caller's promise. The library is never unloaded, so the pointer stays valid.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|found| *found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_or_function_is_named() {
        match require(&["cuNoSuchFunction"]) {
            Err(Unavailable::NoDriver) => assert!(!is_present()),
            Err(Unavailable::TooOld { symbol }) => assert_eq!(symbol, "cuNoSuchFunction"),
            Ok(()) => panic!("a function that does not exist was found"),
        }
        // SAFETY: there is no such function.
        assert!(unsafe { symbol::<unsafe extern "C" fn()>("cuNoSuchFunction") }.is_none());
    }
}
