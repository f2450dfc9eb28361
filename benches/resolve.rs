//! What a transfer costs before anything moves: the checks that make a request a job.
//!
//! A cache of 100,000 blocks of 16 tokens, blocks in random order. Targets: 3 µs for the 256 slots of a chunk,
//! 100 µs for 32,768.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use maru_layout::{
    CacheSpec, CopyJob, CopyPlan, DType, Direction, JobRequest, LayoutError, PagedLayout, SlabLayout,
    SlabSpan, SlotMapping, TensorDesc,
};

const BLOCKS: u64 = 100_000;
const BLOCK_SIZE: u64 = 16;
const LAYERS: u64 = 64;

/// `n` different blocks in an order that depends on nothing outside.
fn random_blocks(n: u64) -> Vec<i64> {
    let mut blocks: Vec<i64> = (0..100_000).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for i in (1..blocks.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let j = usize::try_from(state >> 33).unwrap_or(0) % (i + 1);
        blocks.swap(i, j);
    }
    blocks.truncate(usize::try_from(n).unwrap_or(0));
    blocks
}

fn plan(tokens: u64) -> Result<Arc<CopyPlan>, LayoutError> {
    let tensor = TensorDesc::contiguous(&[100_000, 2, 16, 8, 128], DType::Bf16)?;
    let spec = CacheSpec { block_size: Some(BLOCK_SIZE), ..CacheSpec::default() };
    let layout = PagedLayout::detect(&tensor, &spec)?;
    let mut bases = Vec::new();
    for kv in 0..2 {
        for layer in 0..LAYERS {
            bases.push((1 << 40) + layer * layout.span_bytes() + layout.plane_offset(kv, 0)?);
        }
    }
    let slab = SlabLayout::of_cache(&layout, 2, LAYERS, tokens)?;
    Ok(Arc::new(CopyPlan::new(&layout, &slab, bases)?))
}

fn resolve(c: &mut Criterion) {
    run(c).expect("the benchmark's own numbers are sound");
}

fn run(c: &mut Criterion) -> Result<(), LayoutError> {
    let mut group = c.benchmark_group("resolve");
    for tokens in [256, 32768] {
        let plan = plan(tokens)?;
        let slots = SlotMapping::from_blocks(&random_blocks(tokens / BLOCK_SIZE), BLOCK_SIZE, 0..tokens)?;
        for direction in [Direction::Gather, Direction::Scatter] {
            let request = JobRequest {
                direction,
                slab: SlabSpan { host: Some(1 << 32), device: None, len: plan.slab().bytes() },
                slots: slots.clone(),
                skip_tokens: 0,
                partial: false,
                layers: None,
            };
            let job = CopyJob::new(plan.clone(), request.clone())?;
            assert_eq!(job.bytes(), plan.slab().bytes());
            assert_eq!(plan.geometry().num_slots, BLOCKS * BLOCK_SIZE);
            group.throughput(Throughput::Elements(tokens));
            group.bench_function(BenchmarkId::new(format!("{direction:?}"), tokens), |b| {
                b.iter(|| black_box(CopyJob::new(plan.clone(), black_box(&request).clone())));
            });
        }
    }
    group.finish();
    Ok(())
}

criterion_group!(benches, resolve);
criterion_main!(benches);
