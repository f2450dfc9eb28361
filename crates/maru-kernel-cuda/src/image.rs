//! The kernel's compiled images, embedded in the binary.

use std::fmt;

/// Portable PTX for every device from compute capability 7.0 on, made by NVRTC 12.0 from
/// `cuda/paged_copy.cu` and kept in the repository (`cargo xtask ptx`).
pub(crate) const PORTABLE_PTX: &str = concat!(include_str!("../ptx/paged_copy.ptx"), "\0");

/// PTX version that [`PORTABLE_PTX`] declares; drivers of CUDA 12.0 (525) and later know it.
pub(crate) const PORTABLE_PTX_VERSION: &str = "8.0";

include!(concat!(env!("OUT_DIR"), "/image.rs"));

/// Which of the embedded images is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Image {
    /// Machine code for known architectures, made by nvcc when this library was built.
    Fatbin,
    /// PTX kept in the repository, compiled by the driver when it is loaded.
    PortablePtx,
}

impl Image {
    /// How the image was made, for reports.
    pub fn built_by(self) -> &'static str {
        match self {
            Image::Fatbin => FATBIN_BUILT_BY,
            Image::PortablePtx => "NVRTC 12.0.140, compute_70, PTX ISA 8.0",
        }
    }

    /// The images this binary holds, in the order they are tried.
    pub fn embedded() -> impl Iterator<Item = Image> {
        FATBIN.map(|_| Image::Fatbin).into_iter().chain([Image::PortablePtx])
    }

    /// The bytes handed to the driver.
    pub(crate) fn bytes(self) -> &'static [u8] {
        match self {
            Image::Fatbin => FATBIN.unwrap_or_default(),
            Image::PortablePtx => PORTABLE_PTX.as_bytes(),
        }
    }

    pub(crate) fn label(self) -> &'static str {
        match self {
            Image::Fatbin => "fat binary",
            Image::PortablePtx => "portable PTX",
        }
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.label(), self.built_by())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Entry;

    #[test]
    fn the_portable_image_is_last_and_declares_what_old_drivers_know() {
        assert_eq!(Image::embedded().last(), Some(Image::PortablePtx));
        assert!(PORTABLE_PTX.contains(&format!("\n.version {PORTABLE_PTX_VERSION}\n")));
        assert!(PORTABLE_PTX.contains("\n.target sm_70\n"));
    }

    #[test]
    fn the_portable_image_has_every_entry_and_ends_in_one_zero() {
        for entry in Entry::all() {
            let declared = format!(".entry {}(", entry.name().to_str().unwrap());
            assert!(PORTABLE_PTX.contains(&declared), "{declared}");
        }
        assert_eq!(PORTABLE_PTX.find('\0'), Some(PORTABLE_PTX.len() - 1));
    }

    #[test]
    fn an_embedded_fat_binary_looks_like_one() {
        // Absent unless nvcc was found at build time, hence no assertion on presence.
        if let Some(image) = FATBIN {
            assert_eq!(image.get(..4), Some(&[0x50, 0xed, 0x55, 0xba][..]));
        }
    }
}
