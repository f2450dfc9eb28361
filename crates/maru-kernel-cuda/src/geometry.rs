//! From a [`CopyJob`] to launches: pure arithmetic, the same for the device and for the tests that run the
//! kernel's source on the host.

mod batch;
mod layers;

use maru_layout::{CopyJob, Geometry};

pub use self::batch::BatchLaunch;
pub use self::layers::LayersLaunch;
use crate::KernelError;
use crate::abi::{Entry, INLINE_SLOTS, PagedCopyArgs};

/// Threads of a block.
pub const MAX_THREADS: u32 = 1024;

/// Most blocks of a launch; far more than any device has multiprocessors.
pub const MAX_BLOCKS: u32 = 1024;

/// Most accesses of a launch. The kernel counts in 32 bits and steps past the end by up to four steps of
/// `MAX_BLOCKS * MAX_THREADS`; both together stay well below 2^31.
pub const MAX_UNITS: u32 = 1 << 30;

/// Bounds of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most thread blocks at once.
    pub blocks: u32,
    /// Most accesses of a launch, [`MAX_UNITS`] unless a test wants many launches.
    pub units: u32,
}

impl Limits {
    /// Launches of at most `blocks` thread blocks (0 counts as 1).
    pub fn blocks(blocks: u32) -> Self {
        Limits { blocks: blocks.clamp(1, MAX_BLOCKS), units: MAX_UNITS }
    }

    /// Blocks and threads for so many accesses.
    pub(crate) fn shape(self, units: u32) -> (u32, u32) {
        let threads = units.div_ceil(32).saturating_mul(32).clamp(32, MAX_THREADS);
        (units.div_ceil(threads).clamp(1, self.blocks.clamp(1, MAX_BLOCKS)), threads)
    }
}

/// Where the kernel finds the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotSource {
    /// In the arguments, at most [`INLINE_SLOTS`] a launch.
    Inline,
    /// In a buffer that the caller fills for each launch and whose address it puts in the arguments; at most
    /// `capacity` a launch.
    Uploaded {
        /// Slots the buffer has room for.
        capacity: u32,
    },
    /// The caller's own list in device memory.
    Device {
        /// Address of token 0's slot.
        addr: u64,
    },
}

/// One launch of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Which kernel.
    pub entry: Entry,
    /// Thread blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// First token, the skipped prefix counted.
    pub first_token: u64,
    /// Its arguments; `slots` is left 0 unless the source is [`SlotSource::Device`].
    pub args: PagedCopyArgs,
}

impl Launch {
    /// Its part of a job's host slots.
    pub fn slots<'a>(&self, all: &'a [i64]) -> &'a [i64] {
        window(all, self.first_token, self.args.tokens)
    }

    /// Sets the number of tokens, and what follows from it.
    fn size(&mut self, kv_planes: u64, tokens: u64, limits: Limits) {
        let args = &mut self.args;
        args.tokens = narrow(tokens);
        (args.tokens_magic, args.tokens_shift) = division(args.tokens);
        args.units = narrow(kv_planes * u64::from(args.layers) * tokens * u64::from(args.token_units));
        // A short copy rather spreads over threads than keeps several loads in one.
        (self.blocks, self.threads) = limits.shape(args.units);
    }

    /// The same work with the slots (those of this launch) in the arguments: as many launches as that takes.
    pub fn inline_pieces<'a>(&self, slots: &'a [i64]) -> impl Iterator<Item = (Launch, &'a [i64])> {
        let whole = *self;
        let token_units = u64::from(whole.args.tokens) * u64::from(whole.args.token_units);
        let planes = u64::from(whole.args.units) / token_units.max(1) / u64::from(whole.args.layers).max(1);
        slots.chunks(INLINE_SLOTS).scan(0u64, move |done, slots| {
            let mut piece = whole;
            piece.entry = whole.entry.inline();
            piece.first_token += *done;
            piece.args.first_token += *done;
            piece.args.slab += *done * whole.args.slab_token_stride;
            piece.args.slots = 0;
            piece.size(planes, slots.len() as u64, Limits::blocks(whole.blocks));
            *done += slots.len() as u64;
            Some((piece, slots))
        })
    }
}

/// The addresses of a launch that a job does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// The table of plane addresses (`[kv][layer]`, all layers of the cache), as the kernel reads it.
    pub planes: u64,
    /// Where to report a bad slot, 0 for nowhere.
    pub error: u64,
}

/// The launches of a job, in stream order. Nearly always one.
#[derive(Clone, Debug)]
pub struct Launches {
    geometry: Geometry,
    limits: Limits,
    source: SlotSource,
    template: Launch,
    /// Table and slab at the first layer moved.
    planes: u64,
    slab: u64,
    error: u64,
    skip: u64,
    tokens: u64,
    layers: u64,
    layers_per_launch: u64,
    tokens_per_launch: u64,
    next_layer: u64,
    next_token: u64,
}

impl Launches {
    /// Plans a job.
    ///
    /// # Errors
    /// [`KernelError::SlabNotAddressable`] for a slab without a device address,
    /// [`KernelError::TokenTooLarge`] for a token of one layer with more accesses than a launch may have.
    pub fn new(
        job: &CopyJob,
        source: SlotSource,
        addresses: Addresses,
        limits: Limits,
    ) -> Result<Self, KernelError> {
        let g = *job.plan().geometry();
        let slab = job.slab().device.ok_or(KernelError::SlabNotAddressable)?;
        let width = job.access_bytes();
        let (token_units, row_units) = (g.token_bytes() / width, g.row_bytes / width);
        let limit = u64::from(limits.units.clamp(1, MAX_UNITS));
        let too_large = KernelError::TokenTooLarge { units: token_units, limit };
        let token_units_all = token_units.checked_mul(g.kv_planes).filter(|n| *n <= limit);
        let per_layer = token_units_all.ok_or(too_large)?.max(1);
        let layers = u64::from(job.layer_count());
        let layers_per_launch = (limit / per_layer).clamp(1, layers.max(1));
        let room = match source {
            SlotSource::Inline => INLINE_SLOTS as u64,
            SlotSource::Uploaded { capacity } => u64::from(capacity),
            SlotSource::Device { .. } => u64::MAX,
        };
        let tokens_per_launch = (limit / (per_layer * layers_per_launch)).clamp(1, room.max(1));
        // Narrowing is safe: both are at most `limit`.
        let (token_magic, token_shift) = division(narrow(token_units));
        let (row_magic, row_shift) = division(narrow(row_units));
        let (block_magic, block_shift, block_size, block_stride, token_stride) = match g.linear_slots {
            true => (0, 0, 0, 0, g.slot_stride()),
            false => {
                let (magic, shift) = wide_division(g.block_size);
                (magic, shift, g.block_size, g.block_stride, g.token_stride)
            }
        };
        let args = PagedCopyArgs {
            num_slots: g.num_slots,
            block_magic,
            block_size,
            block_stride,
            token_stride,
            row_stride: g.row_stride,
            slab_kv_stride: g.slab_kv_stride,
            slab_layer_stride: g.slab_layer_stride,
            slab_token_stride: g.slab_token_stride,
            block_shift,
            token_units: narrow(token_units),
            token_magic,
            token_shift,
            row_units: narrow(row_units),
            row_magic,
            row_shift,
            plane_pitch: narrow(g.layers),
            ..PagedCopyArgs::default()
        };
        let inline = source == SlotSource::Inline;
        let entry = Entry::new(job.direction(), width, inline);
        let template = Launch { entry, blocks: 1, threads: MAX_THREADS, first_token: 0, args };
        // Nothing to move: no launch at all.
        let next_token = if job.is_empty() { job.tokens() } else { job.skip() };
        Ok(Launches {
            geometry: g,
            limits,
            source,
            template,
            planes: addresses.planes + 8 * u64::from(job.first_layer()),
            slab,
            error: addresses.error,
            skip: job.skip(),
            tokens: job.tokens(),
            layers,
            layers_per_launch,
            tokens_per_launch,
            next_layer: 0,
            next_token,
        })
    }
}

impl Launches {
    /// Whether there is nothing (more) to launch.
    pub fn is_empty(&self) -> bool {
        self.next_token >= self.tokens || self.next_layer >= self.layers
    }

    /// Where to report a bad slot, instead of the address given to [`Launches::new`].
    pub fn report_to(&mut self, error: u64) {
        self.error = error;
    }

    /// Whether the caller has to upload slots for each launch.
    pub fn source_is_uploaded(&self) -> bool {
        matches!(self.source, SlotSource::Uploaded { .. })
    }
}

impl Iterator for Launches {
    type Item = Launch;

    fn next(&mut self) -> Option<Launch> {
        if self.is_empty() {
            return None;
        }
        let g = &self.geometry;
        let (layer, token) = (self.next_layer, self.next_token);
        let layers = self.layers_per_launch.min(self.layers - layer);
        let tokens = self.tokens_per_launch.min(self.tokens - token);
        self.next_layer += layers;
        if self.next_layer >= self.layers {
            self.next_layer = 0;
            self.next_token += tokens;
        }
        let mut launch = self.template;
        launch.first_token = token;
        let args = &mut launch.args;
        args.planes = self.planes + 8 * layer;
        args.slab = self.slab + layer * g.slab_layer_stride + token * g.slab_token_stride;
        if let SlotSource::Device { addr } = self.source {
            args.slots = addr + 8 * token;
            // The launch of the first layers reports for all.
            args.error = if layer == 0 { self.error } else { 0 };
            args.earlier = token - self.skip;
        }
        args.first_token = token;
        args.layers = narrow(layers);
        launch.size(g.kv_planes, tokens, self.limits);
        Some(launch)
    }
}

fn window(slots: &[i64], first: u64, tokens: u32) -> &[i64] {
    let first = usize::try_from(first).unwrap_or(usize::MAX).min(slots.len());
    let end = first.saturating_add(tokens as usize).min(slots.len());
    &slots[first..end]
}

/// Counts of a launch are at most [`MAX_UNITS`] by construction.
fn narrow(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// `(magic, shift)` such that `((2n * magic) >> 32) >> shift == n / d` for every `n < 2^31`, `0 < d <= 2^31`.
///
/// With `l = ceil(log2 d)` and `magic = ceil(2^(31+l) / d)`, the product is `n/d` plus less than `1/d`.
pub fn division(d: u32) -> (u32, u32) {
    let d = d.max(1);
    let shift = d.next_power_of_two().trailing_zeros();
    let magic = (1u64 << (31 + shift)).div_ceil(d.into());
    (narrow(magic), shift)
}

/// The same for `n < 2^63` and `0 < d <= 2^63` in 64 bits.
pub fn wide_division(d: u64) -> (u64, u32) {
    let d = d.max(1);
    if d.is_power_of_two() {
        return (1 << 63, d.trailing_zeros());
    }
    let shift = d.next_power_of_two().trailing_zeros();
    let magic = (1u128 << (63 + shift)).div_ceil(d.into());
    (u64::try_from(magic).unwrap_or(u64::MAX), shift)
}

#[cfg(test)]
pub(crate) mod tests;
