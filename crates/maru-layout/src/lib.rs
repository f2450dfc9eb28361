//! Paged KV cache and slab layouts, copy plans and jobs: pure addressing, no memory access.
