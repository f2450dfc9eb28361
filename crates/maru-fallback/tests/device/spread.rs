//! Layers where a test wants them, each in memory of its own.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use maru_fallback::{DeviceMover, DeviceOptions};
use maru_layout::{CopyJob, CopyPlan, Direction, JobRequest, SlabLayout, SlotMapping};

use crate::cases::{Cache, Dims, Images, Rng, compare};
use crate::gpu::{Device, Stream, cu, mover};
use crate::rig::{DIMS, DIRECTIONS, SLABS, SlabIn, SlabMemory, order};
use crate::trials::Outcome;

/// 256 tokens in blocks of 16.
const WHOLE: Dims = Dims { layers: 6, blocks: 16, block_size: 16, heads: 2, head_size: 64, pad: 0, ..DIMS };

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Makes a transfer with the n-th layer at the n-th address, and compares.
fn transfer(
    mover: &DeviceMover,
    stream: &Stream,
    cache: &Cache,
    layers: &[u64],
    (direction, place): (Direction, SlabIn),
    rng: &mut Rng,
) -> Outcome {
    let span = usize::try_from(cache.layout.span_bytes()).map_err(text)?;
    let mut bases = Vec::new();
    for kv in 0..2 {
        let inside = cache.layout.plane_offset(kv, 0).map_err(text)?;
        bases.extend(layers.iter().map(|addr| addr + inside));
    }
    // Whole blocks in an order of their own.
    let slots: Vec<i64> = (0..16).map(|b| b * 7 % 16).flat_map(|b| b * 16..(b + 1) * 16).collect();
    let images = Images::new(cache, direction, 256, &slots, 0, rng);
    let of = |image: &[u8], layer: usize| {
        let at = usize::try_from(cache.reference.tensors[layer]).unwrap_or(usize::MAX);
        image[at..at + span].to_vec()
    };
    for (layer, addr) in layers.iter().enumerate() {
        cu!(cuMemcpyHtoD_v2(*addr, of(&images.cache, layer).as_ptr().cast(), span));
    }
    // The copy of pageable memory may return before it has arrived.
    cu!(cuCtxSynchronize());
    let mut slab = SlabMemory::holding(&images.slab, place);
    let count = layers.len() as u64;
    let layout = SlabLayout::of_cache(&cache.layout, 2, count, 256).map_err(text)?;
    let plan = CopyPlan::new(&cache.layout, &layout, bases).map_err(text)?;
    let request = JobRequest {
        direction,
        slab: slab.span(),
        slots: SlotMapping::from_slots(slots),
        skip_tokens: 0,
        partial: false,
        layers: None,
    };
    let job = CopyJob::new(Arc::new(plan), request).map_err(text)?;
    // SAFETY: everything is alive until the wait.
    unsafe { mover.copy_on(&job, stream.0) }.map_err(text)?.wait().map_err(text)?;
    for (layer, addr) in layers.iter().enumerate() {
        let mut found = vec![0; span];
        cu!(cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), *addr, span));
        compare(&format!("layer {layer}"), &found, &of(&images.cache_after, layer))?;
    }
    compare("slab", &slab.read(), &images.slab_after)
}

/// Layers in allocations of their own, which are often evenly spaced: then layers are rows or slices, unless
/// the driver refuses copies that leave an allocation.
pub(crate) fn own_allocations(context: &Arc<CudaContext>) -> Outcome {
    let (stream, mut rng) = (Stream::new(), Rng::new(35));
    let mover = mover(context, DeviceOptions::default().with_bounce_bytes(0));
    for name in ["blocks_first_nhd", "fused_lbnhc", "blocks_first_hnd"] {
        let cache = Cache::new(order(name), WHOLE).map_err(text)?;
        let span = usize::try_from(cache.layout.span_bytes()).map_err(text)?;
        let memory: Vec<Device> =
            (0..WHOLE.layers).map(|_| Device::new(span.next_multiple_of(2 << 20))).collect();
        let mut layers: Vec<u64> = memory.iter().map(|m| m.addr).collect();
        layers.sort_unstable();
        for _ in 0..2 {
            for ends in DIRECTIONS.iter().flat_map(|d| SLABS.map(|p| (*d, p))) {
                transfer(&mover, &stream, &cache, &layers, ends, &mut rng)
                    .map_err(|e| format!("{name} {ends:?}: {e}"))?;
            }
            layers.reverse();
        }
    }
    Ok(())
}

/// Layers of a large cache: further apart than a pitch can be, and than 32 bits count.
pub(crate) fn gigabytes_apart(context: &Arc<CudaContext>) -> Outcome {
    let (stream, mut rng) = (Stream::new(), Rng::new(39));
    // Without batches, which few layers are better off with.
    let mover = mover(context, DeviceOptions::default().with_bounce_bytes(0).with_batched(false));
    for apart in [3u64 << 30, (5 << 30) + (6 << 20)] {
        let len = usize::try_from(2 * apart + (8 << 20)).map_err(text)?;
        let (mut free, mut total) = (0, 0);
        cu!(cuMemGetInfo_v2(&mut free, &mut total));
        if free < len + (64 << 20) {
            eprintln!("{free} bytes of device memory are free: layers {apart} bytes apart were not tried");
            continue;
        }
        let memory = Device::new(len);
        let layers: Vec<u64> = (0..3).map(|l| memory.addr + l * apart).collect();
        for name in ["blocks_first_nhd", "fused_lbnhc", "blocks_first_hnd"] {
            let cache = Cache::new(order(name), Dims { layers: 3, ..WHOLE }).map_err(text)?;
            for ends in DIRECTIONS.iter().flat_map(|d| SLABS.map(|p| (*d, p))) {
                transfer(&mover, &stream, &cache, &layers, ends, &mut rng)
                    .map_err(|e| format!("{name} {apart} {ends:?}: {e}"))?;
            }
        }
    }
    Ok(())
}
