//! The maru-native CUDA kernel: one launch per slab, strides as plain arguments.
