#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub use maru_cxl as cxl;
pub use maru_fallback as fallback;
pub use maru_kernel_cuda as kernel;
pub use maru_layout as layout;
pub use maru_transfer as transfer;

pub use maru_layout::{
    Axis, CacheSpec, DType, Direction, Fingerprint, LayoutError, PagedLayout, SlabLayout, SlotMapping,
    TensorDesc,
};
pub use maru_transfer::config::Config;
pub use maru_transfer::{
    CacheTensor, PagedCache, Place, RegisteredCache, Stream, Tensors, Transfer, TransferEngine,
    TransferError, TransferRequest,
};
