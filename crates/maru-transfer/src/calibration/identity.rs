//! What a measurement holds for.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys;
use maru_driver::{DriverError, check};
use serde::{Deserialize, Serialize};

use crate::TransferError;
use crate::config::TransferConfig;

/// What the device is asked.
const NEEDED: &[&str] =
    &["cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid_v2", "cuDriverGetVersion"];

/// Everything that times depend on. A measurement with another identity is not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Identity {
    /// The device's name.
    pub device: String,
    /// Its UUID, such as `GPU-6f7b9c0e-…`; of a slice of a device, the slice's.
    pub uuid: String,
    /// Version of the driver: of CUDA, and of the kernel module where that can be read.
    pub driver: String,
    /// Version of this library.
    pub library: String,
    /// The kernel image and how it was built; empty for "whichever".
    pub kernel: String,
    /// Bytes of the ring.
    pub ring_bytes: u64,
    /// Most thread blocks of a direct launch.
    pub sm_budget: u32,
}

impl Identity {
    /// Of a device with the ring and blocks of a configuration. Makes no context.
    ///
    /// # Errors
    /// [`TransferError::NotAvailable`] where the driver cannot tell.
    pub fn of_device(
        ordinal: usize,
        kernel: Option<&str>,
        config: &TransferConfig,
    ) -> Result<Self, TransferError> {
        let unknown = |reason: String| TransferError::not_available("the device's identity", reason);
        maru_driver::require(NEEDED).map_err(|e| unknown(e.to_string()))?;
        let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let (device, uuid, version) = ask(ordinal).map_err(|e| unknown(e.to_string()))?;
        let cuda = format!("{}.{}", version / 1000, version % 1000 / 10);
        let module = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
        let driver = match module.as_deref().and_then(module_version) {
            Some(module) => format!("{cuda}-{module}"),
            None => cuda,
        };
        Ok(Identity {
            device,
            uuid,
            driver,
            library: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: kernel.unwrap_or_default().to_owned(),
            ring_bytes: config.staging_bytes,
            sm_budget: config.sm_budget,
        })
    }

    /// The name of its file: device, driver, ring and thread blocks, so that none overwrites another's.
    pub fn file_name(&self) -> String {
        let plain = |text: &str| -> String {
            let keep = |c: char| if c.is_ascii_alphanumeric() || "-.".contains(c) { c } else { '_' };
            text.chars().take(80).map(keep).collect()
        };
        let (uuid, driver) = (plain(&self.uuid), plain(&self.driver));
        format!("calibration-{uuid}-cuda{driver}-ring{}-sm{}.toml", self.ring_bytes, self.sm_budget)
    }

    /// Whether a measurement of `other` holds here.
    pub(super) fn covers(&self, other: &Identity) -> bool {
        let whichever = Identity { kernel: String::new(), ..other.clone() };
        *self == *other || *self == whichever
    }
}

/// Name, UUID, CUDA version of the driver.
fn ask(ordinal: c_int) -> Result<(String, String, c_int), DriverError> {
    // SAFETY: the function exists, as checked before; it takes no pointers.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    let mut device = 0;
    // SAFETY: the out pointer is valid; the driver checks the ordinal.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
    let mut name: [c_char; 256] = [0; 256];
    // SAFETY: the buffer is longer than the length given, and the driver ends what it writes with a zero.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 255, device) })?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the out pointer is valid.
    check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) })?;
    let mut version = 0;
    // SAFETY: as above.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    let name: Vec<u8> = name.iter().map(|c| c.to_ne_bytes()[0]).collect();
    let name = CStr::from_bytes_until_nul(&name).map(|n| n.to_string_lossy().into_owned());
    Ok((name.unwrap_or_default(), uuid_text(uuid.bytes.map(|c| c.to_ne_bytes()[0])), version))
}

/// As the vendor's tools print it.
fn uuid_text(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The version in a line such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Release Build`.
fn module_version(text: &str) -> Option<&str> {
    let is_version = |word: &&str| {
        word.contains('.')
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_version_is_found_in_its_line() {
        for (text, version) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
                Some("535.104.05"),
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2.0",
                Some("580.95.05"),
            ),
            ("GCC\nNVRM 1.2", None),
            ("v1.2 1..2 .5 12", None),
            ("", None),
        ] {
            assert_eq!(module_version(text), version, "{text}");
        }
    }

    #[test]
    fn a_uuid_reads_as_the_vendor_prints_it() {
        let bytes = std::array::from_fn(|i| u8::try_from(i * 16 + i).unwrap());
        assert_eq!(uuid_text(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
