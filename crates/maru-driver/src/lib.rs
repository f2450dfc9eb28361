//! What every crate that talks to the CUDA driver needs, once: is the library there and new enough
//! ([`require`], [`symbol`]), errors with the call's name and a stable kind ([`check`], [`DriverError`]), the
//! caller's current context left as it was ([`Current`], [`Context`]), whether a context still works
//! ([`Health`]), events used again and again ([`Tickets`]), memory ([`PinnedBuffer`], [`DeviceBuffer`]), streams
//! of our own and questions to borrowed ones ([`stream`]).
//!
//! The library is loaded at run time: this crate builds and its tests pass on a machine without CUDA.

mod context;
mod error;
mod health;
mod library;
mod memory;
pub mod stream;
mod tickets;

pub use context::{Context, Current};
pub use error::{DriverError, check};
pub use health::Health;
pub use library::{Unavailable, is_present, require, symbol};
pub use memory::{DeviceBuffer, PinnedBuffer};
pub use tickets::{Ticket, Tickets};
