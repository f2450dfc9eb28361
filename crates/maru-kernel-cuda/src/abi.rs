//! The kernel's arguments and entry points, as `cuda/paged_copy.h` and `cuda/paged_copy.cu` have them.
//!
//! Public so that the kernel's source can be driven on the host by tests; not a stable interface.

use std::ffi::CStr;
use std::mem::{offset_of, size_of};

use maru_layout::Direction;

/// Slots that travel inside the kernel arguments.
pub const INLINE_SLOTS: usize = 256;

/// Slabs of a batch.
pub const BATCH_SLABS: usize = 128;

/// Runs of layers that a launch can tell of.
pub const RUNS: usize = 128;

/// Where a launch reports the first bad slot it met.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagedCopyError {
    /// 0 until written, then 1.
    pub raised: u64,
    /// Index of the first bad token, the skipped prefix counted.
    pub token: u64,
    /// Its slot.
    pub slot: i64,
    /// Zero.
    pub unused: u64,
}

/// Arguments of one launch; the header documents the fields and the address formula.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagedCopyArgs {
    /// Table of plane addresses, at the first layer moved.
    pub planes: u64,
    /// Slab, at the first layer and token of this launch.
    pub slab: u64,
    /// Slots in device memory, at the first token of this launch.
    pub slots: u64,
    /// Address of a [`PagedCopyError`], 0 for none.
    pub error: u64,
    /// Slots of the cache.
    pub num_slots: u64,
    /// 64-bit division by `block_size`; 0 where slots are evenly spaced.
    pub block_magic: u64,
    /// Tokens of a block.
    pub block_size: u64,
    /// Bytes from block to block.
    pub block_stride: u64,
    /// Bytes from token to token.
    pub token_stride: u64,
    /// Bytes from row to row of a token, paged side.
    pub row_stride: u64,
    /// Bytes from plane to plane in the slab.
    pub slab_kv_stride: u64,
    /// Bytes from layer to layer in the slab.
    pub slab_layer_stride: u64,
    /// Bytes from token to token in the slab.
    pub slab_token_stride: u64,
    /// Index of this launch's first token in the transfer.
    pub first_token: u64,
    /// Tokens of the transfer's earlier launches, just before `slots`.
    pub earlier: u64,
    /// Counters in device memory, 0 to tell nobody.
    pub counters: u64,
    /// Words in host memory, as the device addresses it.
    pub seen: u64,
    /// What is written there when it is over.
    pub value: u64,
    /// Shift of the division by `block_size`.
    pub block_shift: u32,
    /// Accesses of this launch.
    pub units: u32,
    /// Accesses of one token in one plane.
    pub token_units: u32,
    /// Division by `token_units`.
    pub token_magic: u32,
    /// Division by `token_units`.
    pub token_shift: u32,
    /// Tokens of this launch.
    pub tokens: u32,
    /// Division by `tokens`.
    pub tokens_magic: u32,
    /// Division by `tokens`.
    pub tokens_shift: u32,
    /// Accesses of one row.
    pub row_units: u32,
    /// Division by `row_units`.
    pub row_magic: u32,
    /// Division by `row_units`.
    pub row_shift: u32,
    /// Layers moved.
    pub layers: u32,
    /// Layers of the table.
    pub plane_pitch: u32,
    /// Zero.
    pub unused: u32,
}

/// The same with the slots by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedCopyInlineArgs {
    /// Everything else; its `slots` is not used.
    pub copy: PagedCopyArgs,
    /// One slot per token of the launch; the rest is not read.
    pub slots: [i64; INLINE_SLOTS],
}

/// One slab of a batch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagedCopySlab {
    /// Its address, at the first layer and token of the launch.
    pub slab: u64,
    /// Its slots in device memory, at the first token of the launch.
    pub slots: u64,
}

/// Slabs of one geometry, moved alike.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedCopyBatchArgs {
    /// What they share; its `slab`, `slots` and `error` are not used, its `units` count all slabs.
    pub copy: PagedCopyArgs,
    /// Planes of one slab.
    pub planes: u32,
    /// Division by `planes`.
    pub planes_magic: u32,
    /// Division by `planes`.
    pub planes_shift: u32,
    /// Zero.
    pub unused: u32,
    /// The slabs; the rest is not read.
    pub slabs: [PagedCopySlab; BATCH_SLABS],
}

/// The runs of layers that a launch in their order tells of.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedCopyRuns {
    /// Words in device memory.
    pub words: u64,
    /// At most [`RUNS`].
    pub count: u32,
    /// Accesses of the first run.
    pub first_units: u32,
    /// Accesses of every other, the last excepted.
    pub units: u32,
    /// 1 if a layer has K and V, else 0.
    pub pair: u32,
}

/// A batch in the order of its layers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedCopyLayersArgs {
    /// What is moved; its `planes` are those of one layer of all slabs.
    pub batch: PagedCopyBatchArgs,
    /// What is told.
    pub runs: PagedCopyRuns,
}

/// One slab in the order of its layers, slots by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedCopyLayersInlineArgs {
    /// What is moved.
    pub slab: PagedCopyInlineArgs,
    /// What is told.
    pub runs: PagedCopyRuns,
}

const _: () = {
    const BATCH: usize = 216 + 16 * BATCH_SLABS;
    const INLINE: usize = 200 + 8 * INLINE_SLOTS;
    assert!(size_of::<PagedCopyRuns>() == 24);
    assert!(offset_of!(PagedCopyRuns, count) == 8);
    assert!(offset_of!(PagedCopyRuns, first_units) == 12);
    assert!(offset_of!(PagedCopyRuns, units) == 16);
    assert!(offset_of!(PagedCopyRuns, pair) == 20);
    assert!(size_of::<PagedCopyLayersArgs>() == BATCH + 24);
    assert!(size_of::<PagedCopyLayersArgs>() <= 4096);
    assert!(offset_of!(PagedCopyLayersArgs, runs) == BATCH);
    assert!(size_of::<PagedCopyLayersInlineArgs>() == INLINE + 24);
    assert!(size_of::<PagedCopyLayersInlineArgs>() <= 4096);
    assert!(offset_of!(PagedCopyLayersInlineArgs, runs) == INLINE);
    assert!(size_of::<PagedCopySlab>() == 16);
    assert!(size_of::<PagedCopyBatchArgs>() == BATCH);
    assert!(size_of::<PagedCopyBatchArgs>() <= 4096);
    assert!(offset_of!(PagedCopySlab, slots) == 8);
    assert!(offset_of!(PagedCopyBatchArgs, planes) == 200);
    assert!(offset_of!(PagedCopyBatchArgs, planes_magic) == 204);
    assert!(offset_of!(PagedCopyBatchArgs, planes_shift) == 208);
    assert!(offset_of!(PagedCopyBatchArgs, slabs) == 216);
    assert!(size_of::<PagedCopyError>() == 32);
    assert!(size_of::<PagedCopyArgs>() == 200);
    assert!(size_of::<PagedCopyInlineArgs>() == INLINE);
    assert!(size_of::<PagedCopyInlineArgs>() <= 4096);
    assert!(offset_of!(PagedCopyError, token) == 8);
    assert!(offset_of!(PagedCopyError, slot) == 16);
    assert!(offset_of!(PagedCopyArgs, planes) == 0);
    assert!(offset_of!(PagedCopyArgs, slab) == 8);
    assert!(offset_of!(PagedCopyArgs, slots) == 16);
    assert!(offset_of!(PagedCopyArgs, error) == 24);
    assert!(offset_of!(PagedCopyArgs, num_slots) == 32);
    assert!(offset_of!(PagedCopyArgs, block_magic) == 40);
    assert!(offset_of!(PagedCopyArgs, block_size) == 48);
    assert!(offset_of!(PagedCopyArgs, block_stride) == 56);
    assert!(offset_of!(PagedCopyArgs, token_stride) == 64);
    assert!(offset_of!(PagedCopyArgs, row_stride) == 72);
    assert!(offset_of!(PagedCopyArgs, slab_kv_stride) == 80);
    assert!(offset_of!(PagedCopyArgs, slab_layer_stride) == 88);
    assert!(offset_of!(PagedCopyArgs, slab_token_stride) == 96);
    assert!(offset_of!(PagedCopyArgs, first_token) == 104);
    assert!(offset_of!(PagedCopyArgs, earlier) == 112);
    assert!(offset_of!(PagedCopyArgs, counters) == 120);
    assert!(offset_of!(PagedCopyArgs, seen) == 128);
    assert!(offset_of!(PagedCopyArgs, value) == 136);
    assert!(offset_of!(PagedCopyArgs, block_shift) == 144);
    assert!(offset_of!(PagedCopyArgs, units) == 148);
    assert!(offset_of!(PagedCopyArgs, token_units) == 152);
    assert!(offset_of!(PagedCopyArgs, token_magic) == 156);
    assert!(offset_of!(PagedCopyArgs, token_shift) == 160);
    assert!(offset_of!(PagedCopyArgs, tokens) == 164);
    assert!(offset_of!(PagedCopyArgs, tokens_magic) == 168);
    assert!(offset_of!(PagedCopyArgs, tokens_shift) == 172);
    assert!(offset_of!(PagedCopyArgs, row_units) == 176);
    assert!(offset_of!(PagedCopyArgs, row_magic) == 180);
    assert!(offset_of!(PagedCopyArgs, row_shift) == 184);
    assert!(offset_of!(PagedCopyArgs, layers) == 188);
    assert!(offset_of!(PagedCopyArgs, plane_pitch) == 192);
    assert!(offset_of!(PagedCopyInlineArgs, slots) == 200);
};

/// One compiled kernel: direction, access width, place of the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry(u8);

const NAMES: [&CStr; Entry::COUNT] = [
    c"maru_gather_1_device",
    c"maru_gather_1_inline",
    c"maru_gather_2_device",
    c"maru_gather_2_inline",
    c"maru_gather_4_device",
    c"maru_gather_4_inline",
    c"maru_gather_8_device",
    c"maru_gather_8_inline",
    c"maru_gather_16_device",
    c"maru_gather_16_inline",
    c"maru_scatter_1_device",
    c"maru_scatter_1_inline",
    c"maru_scatter_2_device",
    c"maru_scatter_2_inline",
    c"maru_scatter_4_device",
    c"maru_scatter_4_inline",
    c"maru_scatter_8_device",
    c"maru_scatter_8_inline",
    c"maru_scatter_16_device",
    c"maru_scatter_16_inline",
    c"maru_gather_16_batch",
    c"maru_scatter_16_batch",
    c"maru_scatter_16_layers",
    c"maru_scatter_16_layers_inline",
];

impl Entry {
    /// Entry points of the image.
    pub const COUNT: usize = 24;

    /// The entry for a direction, an access width (a power of two, at most 16; anything else is taken as
    /// the next lower one) and slots by value or in device memory.
    pub fn new(direction: Direction, access_bytes: u64, inline: bool) -> Self {
        let width = match access_bytes {
            16.. => 4,
            8.. => 3,
            4.. => 2,
            2.. => 1,
            _ => 0,
        };
        let first = match direction {
            Direction::Gather => 0,
            Direction::Scatter => 10,
        };
        Entry(first + 2 * width + u8::from(inline))
    }

    /// The same kernel with its slots by value.
    pub fn inline(self) -> Self {
        Entry(self.0 | 1)
    }

    /// The entry for many slabs, full width.
    pub fn batch(direction: Direction) -> Self {
        match direction {
            Direction::Gather => Entry(20),
            Direction::Scatter => Entry(21),
        }
    }

    /// The entry for slabs whose layers are told of as they come, full width; loads only. `inline`: for one slab, its
    /// slots by value.
    pub fn layers(inline: bool) -> Self {
        Entry(22 + u8::from(inline))
    }

    /// Every entry point.
    pub fn all() -> impl Iterator<Item = Entry> {
        (0..24).map(Entry)
    }

    /// Position in [`Entry::all`].
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// Symbol in the image.
    pub fn name(self) -> &'static CStr {
        NAMES[self.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_names_say_what_they_are() {
        for (direction, word) in [(Direction::Gather, "gather"), (Direction::Scatter, "scatter")] {
            for bytes in [1u64, 2, 4, 8, 16] {
                for (inline, place) in [(false, "device"), (true, "inline")] {
                    let name = Entry::new(direction, bytes, inline).name();
                    assert_eq!(name.to_str().unwrap(), format!("maru_{word}_{bytes}_{place}"));
                }
            }
        }
        assert_eq!(Entry::batch(Direction::Gather).name(), c"maru_gather_16_batch");
        assert_eq!(Entry::batch(Direction::Scatter).name(), c"maru_scatter_16_batch");
        assert_eq!(Entry::layers(false).name(), c"maru_scatter_16_layers");
        assert_eq!(Entry::layers(true).name(), c"maru_scatter_16_layers_inline");
        assert_eq!(Entry::all().count(), Entry::COUNT);
        assert!(Entry::all().enumerate().all(|(i, e)| e.index() == i));
    }
}
