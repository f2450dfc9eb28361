//! The range of a numeric key, and how to say it.

use super::error::ConfigError;
use super::size::human;

/// Values from `min` to `max`, and perhaps 0 with a meaning of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) min: u64,
    pub(crate) max: u64,
    /// What 0 means, where it is allowed apart from the range.
    pub(crate) zero: Option<&'static str>,
    /// Whether the number counts bytes.
    pub(crate) bytes: bool,
}

impl Limit {
    pub(crate) const fn count(min: u64, max: u64) -> Self {
        Limit { min, max, zero: None, bytes: false }
    }

    pub(crate) const fn bytes(min: u64, max: u64) -> Self {
        Limit { min, max, zero: None, bytes: true }
    }

    pub(crate) const fn or_zero(mut self, meaning: &'static str) -> Self {
        self.zero = Some(meaning);
        self
    }

    pub(crate) fn holds(&self, value: u64) -> bool {
        (self.min..=self.max).contains(&value) || value == 0 && self.zero.is_some()
    }

    /// "an integer from 1 to 1024", "0 (disables it), or a size from … to … bytes".
    pub(crate) fn allowed(&self) -> String {
        let range = if self.bytes {
            format!("a size from {} to {}", human(self.min), human(self.max))
        } else {
            format!("an integer from {} to {}", self.min, self.max)
        };
        match self.zero {
            Some(meaning) => format!("0 ({meaning}), or {range}"),
            None => range,
        }
    }

    /// The check for values that were set in code.
    pub(crate) fn check(&self, key: &str, value: u64) -> Result<(), ConfigError> {
        if self.holds(value) {
            return Ok(());
        }
        let found = if self.bytes { human(value) } else { value.to_string() };
        Err(ConfigError::invalid(key, found, self.allowed()))
    }
}
