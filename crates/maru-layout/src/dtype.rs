//! Element types as tags: movers see bytes, only `resolve` compares them.

use std::fmt;
use std::str::FromStr;

use crate::LayoutError;

/// The element type of a cache or slab.
///
/// Two types of the same width are still different types (bf16 read as fp16 is fluent nonsense); the `raw`
/// types declare that the bytes carry no type and match any type of whole elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
    /// 8-bit float, 4 exponent bits.
    Fp8E4m3,
    /// 8-bit float, 5 exponent bits.
    Fp8E5m2,
    /// Untyped elements of 1 byte.
    Raw8,
    /// Untyped elements of 2 bytes.
    Raw16,
    /// Untyped elements of 4 bytes.
    Raw32,
    /// Untyped elements of 8 bytes.
    Raw64,
}

impl DType {
    /// Every type, in the order of the documentation.
    pub const ALL: [DType; 11] = [
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::U8,
        DType::I8,
        DType::Fp8E4m3,
        DType::Fp8E5m2,
        DType::Raw8,
        DType::Raw16,
        DType::Raw32,
        DType::Raw64,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            DType::U8 | DType::I8 | DType::Fp8E4m3 | DType::Fp8E5m2 | DType::Raw8 => 1,
            DType::F16 | DType::Bf16 | DType::Raw16 => 2,
            DType::F32 | DType::Raw32 => 4,
            DType::Raw64 => 8,
        }
    }

    /// The name used in configuration, on the command line and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::Fp8E4m3 => "fp8_e4m3",
            DType::Fp8E5m2 => "fp8_e5m2",
            DType::Raw8 => "raw8",
            DType::Raw16 => "raw16",
            DType::Raw32 => "raw32",
            DType::Raw64 => "raw64",
        }
    }

    /// Declared to carry no type.
    pub const fn is_raw(self) -> bool {
        matches!(self, DType::Raw8 | DType::Raw16 | DType::Raw32 | DType::Raw64)
    }

    /// Whether bytes of `self` may be moved as `other`: the same type, or one side declared raw.
    pub fn moves_as(self, other: DType) -> bool {
        self == other || self.is_raw() || other.is_raw()
    }

    /// The stable number that enters fingerprints.
    pub(crate) const fn code(self) -> u64 {
        match self {
            DType::F32 => 1,
            DType::F16 => 2,
            DType::Bf16 => 3,
            DType::U8 => 4,
            DType::I8 => 5,
            DType::Fp8E4m3 => 6,
            DType::Fp8E5m2 => 7,
            DType::Raw8 => 8,
            DType::Raw16 => 9,
            DType::Raw32 => 10,
            DType::Raw64 => 11,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        DType::ALL.into_iter().find(|d| d.name() == text).ok_or_else(|| LayoutError::UnknownDtype {
            found: text.to_owned(),
            allowed: DType::ALL.map(DType::name).join(" "),
        })
    }
}
