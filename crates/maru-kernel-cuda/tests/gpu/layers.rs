//! Loads whose layers come one after the other out of one launch, and what launches tell by words.

use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use maru_kernel_cuda::{LaunchOptions, LaunchedRun, PlaneTable};
use maru_layout::{CopyJob, CopyPlan, DType, Direction, SlotMapping};

use crate::cases::{Cache, Dims, ORDERS, Order, Rng, compare, job, random_slots};
use crate::gpu::{Device, Gpu, Graph, Pinned, Stream};
use crate::harness::{Body, text, trial};

pub(crate) const TRIALS: [(&str, Body); 4] = [
    ("layers::other_streams_wait_for_one_layer_each", other_streams),
    ("layers::in_a_graph_there_is_nothing_to_tell", captured),
    ("layers::a_capturing_stream_is_not_let_through_by_a_word", capturing),
    ("words::more_loads_in_flight_than_have_words", many_in_flight),
];

pub(crate) fn trials() -> Vec<Trial> {
    let one = |order: &Order| {
        let order = *order;
        trial(format!("layers::{}", order.name), move |gpu| every_layer(gpu, &order))
    };
    ORDERS.iter().map(one).collect()
}

/// `n` slabs to be loaded.
struct Loads {
    cache: Cache,
    pages: Device,
    slabs: Pinned,
    /// What is in them.
    filling: Vec<u8>,
    planes: PlaneTable,
    plan: Arc<CopyPlan>,
    lists: Vec<Vec<i64>>,
    tokens: u64,
    expected: Vec<u8>,
}

impl Loads {
    fn new(gpu: &Gpu, order: &Order, dims: Dims, n: usize, tokens: u64) -> Result<Self, Failed> {
        let cache = Cache::new(order, dims).map_err(text)?;
        let mut rng = Rng::new(60);
        let expected = rng.bytes(usize::try_from(cache.bytes).unwrap());
        let pages = Device::holding(&expected);
        let bytes = cache.slab_bytes(tokens);
        let mut slabs = Pinned::new(n * bytes);
        let filling = rng.bytes(n * bytes);
        slabs.bytes().copy_from_slice(&filling);
        let per_slab = usize::try_from(tokens).unwrap();
        let hole = if per_slab > 5 { 5 } else { 0 };
        let slots = random_slots(&mut rng, cache.layout.num_slots(), n * per_slab, hole);
        let lists: Vec<Vec<i64>> = slots.chunks(per_slab).map(<[i64]>::to_vec).collect();
        let plan = cache.plan(pages.addr, tokens).map_err(text)?;
        let planes = gpu.kernel.register(&plan).map_err(text)?;
        let before = expected.clone();
        let mut loads = Loads { cache, pages, slabs, filling, planes, plan, lists, tokens, expected };
        loads.expected = loads.over(before);
        Ok(loads)
    }

    /// What the loads make of these pages.
    fn over(&self, mut pages: Vec<u8>) -> Vec<u8> {
        let mut filling = self.filling.clone();
        for (list, slab) in self.lists.iter().zip(filling.chunks_mut(self.cache.slab_bytes(self.tokens))) {
            self.cache.reference.copy(Direction::Scatter, &mut pages, slab, self.tokens, list, 0);
        }
        pages
    }

    fn jobs(&self) -> Result<Vec<CopyJob>, Failed> {
        let bytes = self.cache.slab_bytes(self.tokens) as u64;
        let one = |(i, list): (u64, &Vec<i64>)| {
            let slots = SlotMapping::from_slots(list.as_slice());
            job(&self.plan, Direction::Scatter, self.slabs.addr + i * bytes, slots, 0).map_err(text)
        };
        (0u64..).zip(&self.lists).map(one).collect()
    }

    fn launch(&self, gpu: &Gpu, stream: &Stream, per_run: u32) -> Result<Option<Vec<LaunchedRun>>, Failed> {
        let (jobs, options) = (self.jobs()?, LaunchOptions::default());
        // SAFETY: the set-up's memory lives until every trial has waited for its launches.
        let launched = unsafe { gpu.kernel.launch_by_layer(&jobs, &self.planes, stream.0, options, per_run) };
        launched.map_err(text)
    }

    fn check(&self) -> Result<(), Failed> {
        Ok(compare("cache", &self.pages.read(0, self.pages.len), &self.expected)?)
    }
}

/// Layers of 384 KiB, one behind the other in memory.
const LARGE: Dims =
    Dims { layers: 8, blocks: 16, block_size: 4, heads: 3, head_size: 512, dtype: DType::Bf16, pad: 0 };

fn large(gpu: &Gpu) -> Result<Loads, Failed> {
    let order = ORDERS.iter().find(|order| order.name == "blocks_first_nhd").unwrap();
    Loads::new(gpu, order, LARGE, 1, 64)
}

fn every_layer(gpu: &Gpu, order: &Order) -> Result<(), Failed> {
    let stream = Stream::new();
    let most = if order.name == "opaque_blocks" { 2 } else { 7 };
    for (n, layers, per_run, runs) in [(1, 5, 1, 5), (most, 5, 2, 3), (most, 3, 1, 3), (1, 2, 9, 1)] {
        let dims =
            Dims { layers, blocks: 12, block_size: 4, heads: 3, head_size: 8, dtype: DType::Bf16, pad: 8 };
        let loads = Loads::new(gpu, order, dims, n, 6)?;
        // Twice: words are used again.
        for _ in 0..2 {
            let launched = loads.launch(gpu, &stream, per_run)?.ok_or("not one launch")?;
            if launched.len() != runs {
                return Err(format!("{} runs instead of {runs}", launched.len()).into());
            }
            for (i, run) in launched.iter().enumerate() {
                run.wait().map_err(text)?;
                if !launched[..=i].iter().all(|run| run.is_complete() == Ok(true)) {
                    return Err(format!("run {i} is there before an earlier one").into());
                }
            }
            loads.check()?;
            loads.pages.fill(0x5a);
            let launched = loads.launch(gpu, &stream, per_run)?.ok_or("not one launch")?;
            launched.last().ok_or("no run")?.wait().map_err(text)?;
            drop(launched);
            // Every byte that was loaded is there again.
            let expected = loads.over(vec![0x5a; loads.pages.len]);
            compare("cache", &loads.pages.read(0, loads.pages.len), &expected)?;
            loads.pages.write(0, &loads.expected);
        }
    }
    Ok(())
}

fn other_streams(gpu: &Gpu) -> Result<(), Failed> {
    let loads = large(gpu)?;
    let layer = loads.pages.len / 8;
    let (stream, others) = (Stream::new(), [(); 8].map(|()| Stream::new()));
    let seen = Device::new(loads.pages.len);
    for _ in 0..2 {
        loads.pages.fill(0);
        gpu.stall(&stream, 30, 0, 0, 0);
        let launched = loads.launch(gpu, &stream, 1)?.ok_or("not one launch")?;
        for (i, (run, other)) in launched.iter().zip(&others).enumerate() {
            // SAFETY: the stream is alive.
            unsafe { run.order_before(other.0) }.map_err(text)?;
            let at = (i * layer) as u64;
            gpu.stall(other, 0, seen.addr + at, loads.pages.addr + at, u32::try_from(layer / 8).unwrap());
        }
        others.iter().for_each(Stream::wait);
        let expected = loads.over(vec![0; loads.pages.len]);
        compare("what the other streams saw", &seen.read(0, seen.len), &expected)?;
        launched.iter().try_for_each(LaunchedRun::wait).map_err(text)?;
        // What is there holds nobody up.
        // SAFETY: the stream is alive.
        unsafe { launched[3].order_before(others[0].0) }.map_err(text)?;
    }
    Ok(())
}

fn captured(gpu: &Gpu) -> Result<(), Failed> {
    let loads = large(gpu)?;
    let stream = Stream::new();
    let mut launched = Some(Vec::new());
    let graph = Graph::capture(&stream, || launched = loads.launch(gpu, &stream, 1).unwrap());
    drop(graph);
    match launched {
        None => Ok(()),
        Some(_) => Err("a graph would tell of its layers once and never again".into()),
    }
}

/// Its replays would find the word as it is, so the driver is asked, which refuses.
fn capturing(gpu: &Gpu) -> Result<(), Failed> {
    let loads = large(gpu)?;
    let (stream, other) = (Stream::new(), Stream::new());
    gpu.stall(&stream, 30, 0, 0, 0);
    let launched = loads.launch(gpu, &stream, 1)?.ok_or("not one launch")?;
    let outcome = Graph::broken(&other, || {
        // SAFETY: the stream is alive.
        unsafe { launched[0].order_before(other.0) }
    });
    if outcome.is_ok() {
        return Err("a captured stream was let through".into());
    }
    launched.iter().try_for_each(LaunchedRun::wait).map_err(text)
}

/// Words for layers are limited; without them a load goes another way, and launches in any number go on telling.
fn many_in_flight(gpu: &Gpu) -> Result<(), Failed> {
    let dims = Dims { head_size: 8, ..LARGE };
    let loads = Loads::new(gpu, &ORDERS[0], dims, 1, 64)?;
    let stream = Stream::new();
    let jobs = loads.jobs()?;
    gpu.stall(&stream, 100, 0, 0, 0);
    let (mut layered, mut held) = (Vec::new(), Vec::new());
    for _ in 0..70 {
        layered.extend(loads.launch(gpu, &stream, 1)?);
    }
    for _ in 0..300 {
        // SAFETY: the set-up's memory lives until the waits below.
        let launched =
            unsafe { gpu.kernel.launch(&jobs[0], &loads.planes, stream.0, LaunchOptions::default()) };
        held.push(launched.map_err(text)?);
    }
    let last = held.last().ok_or("none")?;
    if stream.idle() || last.is_complete().map_err(text)? || layered.len() != 64 {
        return Err(format!("{} loads by layer behind a stall that is over or not", layered.len()).into());
    }
    last.wait().map_err(text)?;
    if !held.iter().all(|launched| launched.is_complete() == Ok(true))
        || !layered.iter().flatten().all(|run| run.is_complete() == Ok(true))
    {
        return Err("the last is over, an earlier one is not".into());
    }
    loads.check()?;
    drop((held, layered));
    loads.pages.fill(0);
    let launched = loads.launch(gpu, &stream, 1)?.ok_or("no words left")?;
    launched.iter().try_for_each(LaunchedRun::wait).map_err(text)?;
    Ok(compare("cache", &loads.pages.read(0, loads.pages.len), &loads.over(vec![0; loads.pages.len]))?)
}
