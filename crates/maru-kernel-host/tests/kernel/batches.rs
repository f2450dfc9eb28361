//! Many slabs in one launch.

use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use maru_kernel_cuda::geometry::Limits;
use maru_kernel_host::{Layers, Options, Ran, run, run_batch, run_layers};
use maru_layout::{CopyJob, CopyPlan, DType, Direction, JobRequest, SlabSpan, SlotMapping};

use crate::cases::{Cache, Dims, Images, ORDERS, Rng, compare, job, random_slots};
use crate::memory::Guarded;
use crate::text;

const BOTH: [Direction; 2] = [Direction::Gather, Direction::Scatter];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = ORDERS
        .iter()
        .map(|order| Trial::test(format!("batch::{}", order.name), move || every_slab(order)))
        .collect();
    let layers = |order| Trial::test(format!("layers::{}", order_name(order)), move || every_layer(order));
    trials.extend(ORDERS.iter().map(layers));
    trials.push(Trial::test("batch::what_cannot_share_a_launch", refused));
    trials.push(Trial::test("layers::random_ranges", random_ranges));
    trials.push(Trial::test("layers::slots_by_value", slots_by_value));
    trials.push(Trial::test("layers::what_cannot_share_a_launch", refused_by_layer));
    trials
}

fn order_name(order: &crate::cases::Order) -> &'static str {
    order.name
}

/// `n` slabs of 6 tokens with slots of their own, holes among them.
struct Setup {
    cache: Cache,
    pages: Guarded,
    slabs: Guarded,
    before: [Vec<u8>; 2],
    lists: Vec<Vec<i64>>,
    plan: Arc<CopyPlan>,
}

const TOKENS: u64 = 6;

impl Setup {
    fn new(order: &crate::cases::Order, n: usize, layers: u64) -> Result<Self, Failed> {
        let dims =
            Dims { layers, blocks: 12, block_size: 4, heads: 3, head_size: 8, dtype: DType::Bf16, pad: 8 };
        let cache = Cache::new(order, dims).map_err(text)?;
        let mut rng = Rng::new(50);
        let before =
            [rng.bytes(usize::try_from(cache.bytes).unwrap()), rng.bytes(n * cache.slab_bytes(TOKENS))];
        let (mut pages, slabs) = (Guarded::new(&before[0], 0), Guarded::new(&before[1], 0));
        let slots = random_slots(&mut rng, cache.layout.num_slots(), n * 6, 7);
        let lists: Vec<Vec<i64>> = slots.chunks(6).map(<[i64]>::to_vec).collect();
        let plan = cache.plan(pages.addr(), TOKENS).map_err(text)?;
        Ok(Setup { cache, pages, slabs, before, lists, plan })
    }

    fn jobs(&mut self, direction: Direction, skip: u64) -> Vec<CopyJob> {
        let bytes = self.cache.slab_bytes(TOKENS) as u64;
        let start = self.slabs.addr();
        let jobs = (0u64..).zip(&self.lists).map(|(i, list)| {
            let slots = SlotMapping::from_slots(list.as_slice());
            job(&self.plan, direction, start + i * bytes, slots, skip).unwrap()
        });
        jobs.collect()
    }

    /// Both sides are what the oracle makes of the jobs one after the other.
    fn check(&mut self, direction: Direction, skip: u64, jobs: usize) -> Result<(), Failed> {
        let [mut pages, mut slabs] = self.before.clone();
        let bytes = self.cache.slab_bytes(TOKENS);
        for (list, slab) in self.lists.iter().zip(slabs.chunks_mut(bytes)).take(jobs) {
            self.cache.reference.copy(direction, &mut pages, slab, TOKENS, list, skip);
        }
        compare("cache", &self.pages.check("cache")?, &pages)?;
        compare("slabs", &self.slabs.check("slabs")?, &slabs)?;
        Ok(())
    }
}

fn every_slab(order: &crate::cases::Order) -> Result<(), Failed> {
    // Opaque blocks have a slot a block.
    let n = if order.name == "opaque_blocks" { 2 } else { 7 };
    for direction in BOTH {
        for (skip, layers, descending) in [(0, 2, false), (2, 3, true), (5, 1, false)] {
            let mut setup = Setup::new(order, n, layers)?;
            let jobs = setup.jobs(direction, skip);
            let options = Options { limits: Limits::blocks(3), upload: None, descending };
            let mut ran = Ran::default();
            // SAFETY: the set-up's memory, as large as its plan says.
            let taken = unsafe { run_batch(&jobs, options, &mut ran) };
            if (taken, ran.launches, ran.misaligned, ran.untold) != (n, 1, 0, 0) {
                return Err(format!("{taken} of {n} jobs, {ran:?}").into());
            }
            setup.check(direction, skip, n)?;
        }
    }
    Ok(())
}

fn every_layer(order: &crate::cases::Order) -> Result<(), Failed> {
    let most = if order.name == "opaque_blocks" { 2 } else { 7 };
    // Slabs, layers, layers of a run, runs.
    for (n, layers, per_run, runs) in [(1, 5, 1, 5), (most, 5, 2, 3), (most, 3, 1, 3), (most, 2, 9, 1)] {
        for (skip, blocks, descending) in [(0, 1, false), (2, 3, true), (5, 4, false)] {
            let mut setup = Setup::new(order, n, layers)?;
            let jobs = setup.jobs(Direction::Scatter, skip);
            let options = Options { limits: Limits::blocks(blocks), upload: None, descending };
            let mut ran = Ran::default();
            // SAFETY: the set-up's memory, as large as its plan says.
            let told = unsafe { run_layers(&jobs, per_run, 7, options, &mut ran) };
            let Layers { runs: found, words, counters } = told.ok_or("not one launch")?;
            if (found, ran.launches, ran.misaligned) != (runs, 1, 0) {
                return Err(format!("{found} of {runs} runs, {ran:?}").into());
            }
            // The device is not told of the last run: it has the event of the launch.
            for (words, runs) in words.iter().zip([runs - 1, runs]) {
                let wanted = |i| if i < runs { 7 } else { 0 };
                if let Some(i) = (0..words.len()).find(|i| words[*i] != wanted(*i)) {
                    return Err(format!("word {i} of {runs} is {}", words[i]).into());
                }
            }
            if counters.iter().any(|counter| *counter != 0) {
                return Err(format!("counters are left at {counters:?}").into());
            }
            setup.check(Direction::Scatter, skip, n)?;
        }
    }
    Ok(())
}

/// Some layers of a cache in runs of any length, by several blocks that go round more than once: the pages are those of
/// one transfer after the other, every run told once, and the runs are those that end before a layer that the length
/// divides.
fn random_ranges() -> Result<(), Failed> {
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let order = &ORDERS[usize::try_from(rng.below(ORDERS.len() as u64)).unwrap()];
        let most = if order.name == "opaque_blocks" { 2 } else { 6 };
        let layers = 1 + rng.below(9);
        let (first, n) = (rng.below(layers), 1 + rng.below(most));
        let count = 1 + rng.below(layers - first);
        let per_run =
            if rng.below(8) == 0 { u32::MAX } else { u32::try_from(1 + rng.below(layers + 1)).unwrap() };
        let dims = Dims {
            layers,
            blocks: 12,
            block_size: 4,
            heads: 2,
            head_size: [8, 64, 512][usize::try_from(rng.below(3)).unwrap()],
            dtype: DType::Bf16,
            pad: 8,
        };
        let options = Options {
            limits: Limits::blocks(u32::try_from(1 + rng.below(4)).unwrap()),
            upload: None,
            descending: rng.below(3) == 0,
        };
        let skip = rng.below(6);
        let what = format!(
            "seed {seed}: {} {dims:?} {n} slabs, {first} + {count}, {per_run}, {options:?}",
            order.name
        );
        let cache = Cache::new(order, dims).map_err(text)?;
        let bytes = cache.slab_bytes(TOKENS);
        let tokens = usize::try_from(n * TOKENS).unwrap();
        let slots = random_slots(&mut rng, cache.layout.num_slots(), tokens, tokens / 4);
        let before = rng.bytes(usize::try_from(cache.bytes).unwrap());
        let mut slabs = Guarded::new(&rng.bytes(bytes * usize::try_from(n).unwrap()), 0);
        let mut outcomes = Vec::new();
        for together in [true, false] {
            let mut pages = Guarded::new(&before, 0);
            let plan = cache.plan(pages.addr(), TOKENS).map_err(text)?;
            let start = slabs.addr();
            let job = |(i, list): (u64, &[i64])| {
                let addr = Some(start + i * bytes as u64);
                let request = JobRequest {
                    direction: Direction::Scatter,
                    slab: SlabSpan { host: addr, device: addr, len: plan.slab().bytes() },
                    slots: SlotMapping::from_slots(list),
                    skip_tokens: skip,
                    partial: true,
                    layers: Some((u32::try_from(first).unwrap(), u32::try_from(count).unwrap())),
                };
                CopyJob::new(plan.clone(), request).unwrap()
            };
            let lists = slots.chunks(usize::try_from(TOKENS).unwrap());
            let mut jobs: Vec<CopyJob> = (0u64..).zip(lists).map(job).collect();
            jobs.retain(|job| !job.is_empty());
            if jobs.is_empty() {
                continue;
            }
            if together {
                // SAFETY: the memory of this function, as large as its plan says.
                let told = unsafe { run_layers(&jobs, per_run, 7, options, &mut Ran::default()) };
                let Layers { runs, words, counters } =
                    told.ok_or_else(|| format!("not one launch: {what}"))?;
                let per_run = u64::from(per_run);
                let ends = (first..first + count).filter(|l| *l == first || l % per_run == 0).count();
                let all = |(words, told): (&Vec<u64>, usize)| {
                    words.iter().enumerate().all(|(i, word)| *word == if i < told { 7 } else { 0 })
                };
                if runs != ends
                    || !words.iter().zip([ends - 1, ends]).all(all)
                    || counters.iter().any(|c| *c != 0)
                {
                    return Err(format!("{runs} runs for {ends}: {what}").into());
                }
            } else {
                for job in &jobs {
                    // SAFETY: as above.
                    let ran = unsafe { run(job, options) }.map_err(text)?;
                    if ran.untold != 0 {
                        return Err(format!("{} launches told nothing: {what}", ran.untold).into());
                    }
                }
            }
            outcomes.push(pages.check("cache")?);
        }
        if let [by_layer, one_by_one] = &outcomes[..] {
            compare(&what, by_layer, one_by_one)?;
        }
    }
    Ok(())
}

/// One slab, around the number of slots that go by value, whole and without its first tokens.
fn slots_by_value() -> Result<(), Failed> {
    for (order, tokens) in ORDERS.iter().flat_map(|order| [1, 255, 256, 257, 300].map(|n| (order, n))) {
        let opaque = order.name == "opaque_blocks";
        let blocks = if opaque { 300 } else { 75 };
        let dims =
            Dims { layers: 3, blocks, block_size: 4, heads: 2, head_size: 8, dtype: DType::Bf16, pad: 8 };
        let cache = Cache::new(order, dims).map_err(text)?;
        let mut rng = Rng::new(tokens);
        let slots = random_slots(&mut rng, 300, usize::try_from(tokens).unwrap(), 7);
        for (skip, blocks) in [(0, 1), (tokens.saturating_sub(256), 3), (tokens / 2, 2)] {
            let images = Images::new(&cache, Direction::Scatter, tokens, &slots, skip, &mut rng);
            let (mut pages, mut slab) = (Guarded::new(&images.cache, 0), Guarded::new(&images.slab, 0));
            let plan = cache.plan(pages.addr(), tokens).map_err(text)?;
            let mapping = SlotMapping::from_slots(slots.as_slice());
            let job = job(&plan, Direction::Scatter, slab.addr(), mapping, skip).map_err(text)?;
            let options = Options { limits: Limits::blocks(blocks), upload: None, descending: blocks == 2 };
            let mut ran = Ran::default();
            // SAFETY: the memory of this function, as large as its plan says.
            let told = unsafe { run_layers(&[job], 2, 7, options, &mut ran) }.ok_or("not one launch")?;
            if (told.runs, ran.misaligned) != (2, 0) || told.words[1][..2] != [7, 7] {
                return Err(format!("{}: {tokens} tokens, {skip} skipped: {told:?}", order.name).into());
            }
            compare("cache", &pages.check("cache")?, &images.cache_after)?;
            compare("slab", &slab.check("slab")?, &images.slab)?;
        }
    }
    Ok(())
}

fn refused_by_layer() -> Result<(), Failed> {
    let order = &ORDERS[0];
    let told = |jobs: &[CopyJob], per_run: u32, options: Options| {
        // SAFETY: every job's memory lives in this function's set-ups.
        unsafe { run_layers(jobs, per_run, 1, options, &mut Ran::default()) }.is_some()
    };
    let options = Options::default();
    let mut setup = Setup::new(order, 7, 2)?;
    let jobs = setup.jobs(Direction::Scatter, 0);
    assert!(told(&jobs, 1, options));
    // None; runs of no layers; stores; another prefix to skip; too many accesses; two that write the same pages.
    assert!(!told(&[], 1, options) && !told(&jobs, 0, options));
    assert!(!told(&setup.jobs(Direction::Gather, 0), 1, options));
    let mixed = [setup.jobs(Direction::Scatter, 0).remove(0), setup.jobs(Direction::Scatter, 1).remove(1)];
    assert!(!told(&mixed, 1, options));
    let limits = Limits { units: 7 * 2 * 2 * 6 * 3 - 1, ..Limits::blocks(4) };
    assert!(!told(&jobs, 1, Options { limits, ..options }));
    let twice = [jobs[0].clone(), jobs[1].clone(), jobs[0].clone()];
    assert!(!told(&twice, 1, options));
    // Narrow accesses, device slots.
    let odd =
        job(&setup.plan, Direction::Scatter, setup.slabs.addr() + 2, SlotMapping::from_slots(vec![1]), 0);
    assert!(!told(&[odd.map_err(text)?], 1, options));
    let slots = SlotMapping::Device { addr: setup.lists[0].as_ptr() as u64, len: TOKENS };
    let device = job(&setup.plan, Direction::Scatter, setup.slabs.addr(), slots, 0).map_err(text)?;
    assert!(!told(&[device], 1, options));
    // More runs than words, unless they are longer; more slabs than a launch takes.
    let mut deep = Setup::new(order, 1, 129)?;
    let jobs = deep.jobs(Direction::Scatter, 0);
    assert!(!told(&jobs, 1, options) && told(&jobs, 2, options));
    Ok(())
}

fn refused() -> Result<(), Failed> {
    let order = &ORDERS[0];
    let options = Options::default();
    let taken = |jobs: &[CopyJob], options: Options| {
        // SAFETY: every job's memory lives in this function's set-ups.
        unsafe { run_batch(jobs, options, &mut Ran::default()) }
    };
    for direction in BOTH {
        let mut setup = Setup::new(order, 7, 2)?;
        let jobs = setup.jobs(direction, 0);
        // One job; none; another prefix to skip from the fourth on; room for the slots of two.
        assert_eq!(taken(&jobs[..1], options), 0);
        assert_eq!(taken(&[], options), 0);
        let mixed: Vec<CopyJob> =
            setup.jobs(direction, 0).into_iter().take(3).chain(setup.jobs(direction, 1)).collect();
        assert_eq!(taken(&mixed, options), 3);
        assert_eq!(taken(&jobs, Options { upload: Some(17), ..options }), 2);
        let limits = Limits { units: 2 * 2 * 2 * 6 * 3, ..Limits::blocks(4) };
        assert_eq!(taken(&jobs, Options { limits, ..options }), 2);
        // Two that write the same memory have an order: of loads those before the second go together.
        let twice = [jobs[0].clone(), jobs[1].clone(), jobs[0].clone()];
        assert_eq!(taken(&twice, options), if direction == Direction::Scatter { 2 } else { 0 });
        // Narrow accesses, device slots, another direction.
        let odd = job(&setup.plan, direction, setup.slabs.addr() + 2, SlotMapping::from_slots(vec![1; 1]), 0);
        let odd = odd.map_err(text)?;
        assert_eq!(taken(&[odd.clone(), odd], options), 0);
        let slots = SlotMapping::Device { addr: setup.lists[0].as_ptr() as u64, len: TOKENS };
        let device = job(&setup.plan, direction, setup.slabs.addr(), slots, 0).map_err(text)?;
        assert_eq!(taken(&[device.clone(), device], options), 0);
    }
    let mut setup = Setup::new(order, 2, 2)?;
    let both = [setup.jobs(Direction::Gather, 0).remove(0), setup.jobs(Direction::Scatter, 0).remove(1)];
    assert_eq!(taken(&both, options), 0);
    Ok(())
}
