//! Facade crate.
pub use maru_cxl as cxl;
pub use maru_layout as layout;
