//! Many slabs in one launch.

use std::sync::Arc;

use libtest_mimic::{Failed, Trial};
use maru_kernel_cuda::geometry::Limits;
use maru_kernel_host::{Layers, Options, Ran, run_batch, run_layers};
use maru_layout::{CopyJob, CopyPlan, DType, Direction, SlotMapping};

use crate::cases::{Cache, Dims, ORDERS, Rng, compare, job, random_slots};
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
            if (taken, ran.launches, ran.misaligned) != (n, 1, 0) {
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
            for words in &words {
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
        // Two that write the same memory have an order.
        let twice = [jobs[0].clone(), jobs[1].clone(), jobs[0].clone()];
        assert_eq!(taken(&twice, options), 0);
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
