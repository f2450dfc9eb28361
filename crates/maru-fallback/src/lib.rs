//! Per-layer copies without any kernel of ours, on the host and on the device.
