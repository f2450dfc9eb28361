//! Whether a context still works.

use std::sync::OnceLock;

use crate::DriverError;

/// Remembers the first error that a context cannot recover from, so that every later call says so instead
/// of waiting for work that will never run.
#[derive(Debug, Default)]
pub struct Health {
    lost: OnceLock<DriverError>,
}

impl Health {
    /// Fine so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// The error that lost the context, if one did.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<(), DriverError> {
        match self.lost.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Passes an error on and remembers it if the context is lost by it.
    pub fn note(&self, error: DriverError) -> DriverError {
        if error.is_context_lost() {
            let _ = self.lost.set(error.clone());
        }
        error
    }

    /// [`Health::note`] for a result.
    ///
    /// # Errors
    /// The result's.
    pub fn noted<T>(&self, result: Result<T, DriverError>) -> Result<T, DriverError> {
        result.map_err(|error| self.note(error))
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::*;

    #[test]
    fn only_fatal_errors_are_remembered_and_the_first_one_stays() {
        let health = Health::new();
        health.note(DriverError::new("a", CUresult::CUDA_ERROR_INVALID_VALUE));
        assert_eq!(health.check(), Ok(()));
        health.note(DriverError::new("b", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        health.note(DriverError::new("c", CUresult::CUDA_ERROR_LAUNCH_FAILED));
        assert_eq!(health.check().map_err(|e| e.op), Err("b"));
    }
}
