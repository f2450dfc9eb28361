//! The device mover: per-layer copies by the driver, no kernel of ours.
mod plan;
