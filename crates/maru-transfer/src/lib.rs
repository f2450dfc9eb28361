//! The transfer engine: one trait, the movers behind it, and their configuration.

pub mod config;
pub mod profile;
