//! The transfer engine: one trait, the movers behind it, and their configuration.
//!
//! Register the engine's KV tensors once ([`PagedCache`], [`TransferEngine::register`]); then each
//! [`TransferRequest`] is resolved into a bounds-checked job and put to the cache's mover.

pub mod backend;
mod cache;
pub mod calibration;
pub mod config;
mod engine;
mod error;
mod key;
mod layers;
mod place;
mod pools;
pub mod profile;
mod registered;
mod request;
mod stream;
mod transfer;

pub use backend::{Backend, Capabilities, Enqueued, Prepared, Step, TransferBackend};
pub use cache::{CacheTensor, PagedCache, Tensors};
pub use calibration::Calibration;
pub use engine::TransferEngine;
pub use error::TransferError;
pub use key::{ChunkKey, ChunkKeys};
pub use place::Place;
pub use pools::{PoolAccess, checksum};
pub use registered::RegisteredCache;
pub use request::TransferRequest;
pub use stream::{Event, Stream};
pub use transfer::{Completion, Pending, Transfer};
