//! The keys that take one word out of a few.

use std::fmt;
use std::str::FromStr;

use super::error::ConfigError;

/// A value with a fixed, small vocabulary.
pub(super) trait Words: Sized {
    /// What may be written, for messages.
    const ALLOWED: &'static str;
    /// The value a word stands for.
    fn from_word(word: &str) -> Option<Self>;
}

macro_rules! words {
    (
        $(#[$meta:meta])*
        $name:ident ($key:literal) {
            $($(#[$doc:meta])* $variant:ident = $word:literal,)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$doc])* $variant,)+
        }

        impl $name {
            /// Every value.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The word used in configurations.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)+
                }
            }
        }

        impl Words for $name {
            const ALLOWED: &'static str = words!(@list $($word),+);
            fn from_word(word: &str) -> Option<Self> {
                match word {
                    $($word => Some($name::$variant),)+
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = ConfigError;
            fn from_str(word: &str) -> Result<Self, ConfigError> {
                Self::from_word(word)
                    .ok_or_else(|| ConfigError::invalid($key, super::node::quoted(word), Self::ALLOWED))
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(self.as_str())
            }
        }
    };
    (@list $first:literal $(, $rest:literal)*) => {
        concat!("\"", $first, "\"" $(, " | \"", $rest, "\"")*)
    };
}

words! {
    /// Which mover to use (`transfer.backend`).
    BackendChoice ("backend") {
        /// The native kernel where it can run, else the fallback with the reason logged once.
        Auto = "auto",
        /// The native kernel; an error where it cannot run.
        Native = "native",
        /// Per-layer copies without a kernel of ours; the native kernel is never loaded.
        Fallback = "fallback",
    }
}

words! {
    /// How the native backend moves bytes (`transfer.strategy`).
    StrategyChoice ("strategy") {
        /// By size, direction, registration and calibration.
        Auto = "auto",
        /// The kernel reads and writes host memory over the link itself.
        Direct = "direct",
        /// Copy engine between slab and a device ring, kernel between ring and pages.
        Staged = "staged",
    }
}

words! {
    /// Which checksum, if any, a published slab carries (`transfer.checksum`).
    ChecksumKind ("checksum") {
        /// None.
        None = "none",
        /// 64-bit XXH3 over the slab's bytes.
        Xxh3 = "xxh3",
    }
}

words! {
    /// What keeps CPU caches and the device in step (`cxl.coherence`).
    CoherenceKind ("coherence") {
        /// Nothing: the hardware does, or one host only.
        None = "none",
        /// CPU lines are written back before publishing and invalidated before reading.
        Flush = "flush",
    }
}

#[allow(clippy::derivable_impls)] // the macro derives; a #[default] would be in its way
impl Default for KernelSource {
    fn default() -> Self {
        KernelSource::Maru
    }
}

words! {
    /// Whose kernels a Python connector gets (`maru_kernel_source`, dict form only).
    KernelSource ("maru_kernel_source") {
        /// Ours.
        Maru = "maru",
        /// What an installed LMCache offers, for comparison during a rollout.
        Lmcache = "lmcache",
    }
}

/// Where the paged cache lives (`transfer.device`): `auto`, `host` or `cuda:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The first CUDA device where there is a usable one, else the host.
    Auto,
    /// Host memory.
    Host,
    /// The CUDA device with this ordinal.
    Cuda(u32),
}

impl Words for DeviceChoice {
    const ALLOWED: &'static str = "\"auto\" | \"host\" | \"cuda:N\" with N from 0 to 1023";

    fn from_word(word: &str) -> Option<Self> {
        match word {
            "auto" => Some(DeviceChoice::Auto),
            "host" => Some(DeviceChoice::Host),
            _ => {
                let digits = word.strip_prefix("cuda:")?;
                // u32's own parser takes "+1" and "01", which nobody means.
                let plain =
                    digits.bytes().all(|b| b.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
                let ordinal = digits.parse().ok().filter(|_| plain)?;
                (ordinal <= MAX_ORDINAL).then_some(DeviceChoice::Cuda(ordinal))
            }
        }
    }
}

/// No host has more devices; the bound keeps ordinals far inside the driver's 32-bit int.
pub(super) const MAX_ORDINAL: u32 = 1023;

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.pad("auto"),
            DeviceChoice::Host => f.pad("host"),
            DeviceChoice::Cuda(ordinal) => f.pad(&format!("cuda:{ordinal}")),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = ConfigError;
    fn from_str(word: &str) -> Result<Self, ConfigError> {
        Self::from_word(word)
            .ok_or_else(|| ConfigError::invalid("device", super::node::quoted(word), Self::ALLOWED))
    }
}

impl serde::Serialize for DeviceChoice {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}
