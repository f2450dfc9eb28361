//! Jobs that are checked together, beside the same requests checked one by one and beside sets of slots.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod common;

use std::collections::HashSet;
use std::sync::Arc;

use maru_layout::{
    CopyJob, CopyPlan, Direction, JobBatch, JobRequest, JobSlots, LayoutError, PagedLayout, SlabLayout,
    SlabSpan, SlotMapping,
};
use proptest::prelude::*;

use common::{bf16, blocks_of};

const TOKENS: u64 = 16;

fn plan(blocks: i64) -> Arc<CopyPlan> {
    plan_for(blocks, TOKENS)
}

fn plan_for(blocks: i64, tokens: u64) -> Arc<CopyPlan> {
    let paged = PagedLayout::detect(&bf16(&[blocks, 2, 4, 1, 8]), &blocks_of(4)).unwrap();
    let slab = SlabLayout::of_cache(&paged, 2, 1, tokens).unwrap();
    let base = 1 << 40;
    let bases = vec![base, base + paged.plane_offset(1, 0).unwrap()];
    Arc::new(CopyPlan::new(&paged, &slab, bases).unwrap())
}

fn request(direction: Direction, slots: Vec<i64>, skip: u64) -> JobRequest {
    JobRequest {
        direction,
        slab: SlabSpan { host: Some(1 << 20), device: Some(1 << 30), len: 1 << 21 },
        slots: SlotMapping::from_slots(slots),
        skip_tokens: skip,
        partial: true,
        layers: None,
    }
}

fn load(slots: impl IntoIterator<Item = i64>) -> JobRequest {
    request(Direction::Scatter, slots.into_iter().collect(), 0)
}

/// Everything about a job but which others it knows of.
fn facts(job: &CopyJob) -> impl PartialEq + std::fmt::Debug {
    (job.direction(), job.slots().clone(), job.skip(), job.tokens(), job.bytes(), job.slab())
}

/// Slots that a job moves.
fn moved(job: &CopyJob) -> Vec<u64> {
    let JobSlots::Host { slots, .. } = job.slots() else { return Vec::new() };
    slots.iter().skip(job.skip() as usize).filter(|s| **s >= 0).map(|s| *s as u64).collect()
}

/// How many of the first jobs are loads with slots of their own, by a set.
fn apart(jobs: &[CopyJob]) -> usize {
    let mut seen = HashSet::new();
    let own =
        |job: &&CopyJob| job.direction() == Direction::Scatter && moved(job).iter().all(|s| seen.insert(*s));
    jobs.iter().take_while(own).count().max(jobs.len().min(1))
}

proptest! {
    #[test]
    fn a_batch_is_its_requests_one_by_one(
        requests in prop::collection::vec(
            (
                prop::bool::weighted(0.8),
                prop_oneof![
                    // Runs, which are mostly apart; and anything, out of range and twice too.
                    (0i64..390, 0i64..17).prop_map(|(first, len)| (first..first + len).collect::<Vec<i64>>()),
                    prop::collection::vec(-2i64..402, 0..10),
                    prop::collection::vec(-1i64..400, 0..3),
                ],
                0u64..4,
            ),
            0..24,
        ),
        room in 0usize..30,
        chosen in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let plan = plan(100);
        let mut batch = JobBatch::with_capacity(room);
        let mut singles = Vec::new();
        for (scatter, slots, skip) in requests {
            let direction = if scatter { Direction::Scatter } else { Direction::Gather };
            let request = request(direction, slots, skip);
            let single = CopyJob::new(plan.clone(), request.clone());
            prop_assert_eq!(batch.push(&plan, request).err(), single.as_ref().err().cloned());
            singles.extend(single);
        }
        let jobs = batch.finish();
        prop_assert_eq!(
            jobs.iter().map(facts).collect::<Vec<_>>(),
            singles.iter().map(facts).collect::<Vec<_>>()
        );
        for from in 0..jobs.len() {
            // A store in front counts, and nothing behind it.
            prop_assert_eq!(JobBatch::apart(&jobs[from..]), apart(&jobs[from..]));
            prop_assert_eq!(JobBatch::apart(&singles[from..]), apart(&singles[from..]));
        }
        if !jobs.is_empty() {
            // In any order, also twice, and from both.
            let both = [&jobs[..], &singles[..]].concat();
            let chosen: Vec<CopyJob> = chosen.iter().map(|at| both[at.index(both.len())].clone()).collect();
            prop_assert_eq!(JobBatch::apart(&chosen), apart(&chosen));
        }
    }
}

#[test]
fn nothing_is_apart_from_nothing() {
    assert_eq!(JobBatch::apart(&JobBatch::with_capacity(0).finish()), 0);
}

#[test]
fn a_job_and_its_copy_are_not_apart() {
    let plan = plan(100);
    let mut batch = JobBatch::with_capacity(2);
    batch.push(&plan, load(0..8)).unwrap();
    batch.push(&plan, load(8..16)).unwrap();
    let jobs = batch.finish();
    assert_eq!(JobBatch::apart(&jobs), 2);
    for [a, b] in [[0, 0], [1, 1]] {
        assert_eq!(JobBatch::apart(&[jobs[a].clone(), jobs[b].clone()]), 1);
    }
    assert_eq!(JobBatch::apart(&[jobs[1].clone(), jobs[0].clone()]), 2);
}

#[test]
fn jobs_of_two_batches_are_compared() {
    let plan = plan(100);
    let batch = |first: i64| {
        let mut batch = JobBatch::with_capacity(1);
        batch.push(&plan, load(first..first + 8)).unwrap();
        batch.finish()
    };
    let [a, b, c] = [0, 8, 15].map(batch);
    assert_eq!(JobBatch::apart(&[&a[..], &b[..], &c[..]].concat()), 2);
}

#[test]
fn a_refused_request_leaves_the_batch_as_it_was() {
    let plan = plan(100);
    let mut batch = JobBatch::with_capacity(4);
    batch.push(&plan, load(0..8)).unwrap();
    let twice = batch.push(&plan, load([40, 41, 40])).unwrap_err();
    assert_eq!(twice, LayoutError::DuplicateSlot { slot: 40, first: 0, second: 2 });
    let outside = batch.push(&plan, load([50, 51, 400])).unwrap_err();
    assert_eq!(outside, LayoutError::SlotOutOfRange { token: 2, slot: 400, num_slots: 400 });
    // What they named is no one's.
    batch.push(&plan, load([40, 50])).unwrap();
    batch.push(&plan, load([9, 41])).unwrap();
    let jobs = batch.finish();
    assert_eq!(jobs.iter().map(moved).collect::<Vec<_>>(), [(0..8).collect(), vec![40, 50], vec![9, 41]]);
    assert_eq!(JobBatch::apart(&jobs), 3);
}

#[test]
fn caches_of_different_sizes_share_a_batch() {
    let plans = [plan(4), plan(4000), plan(1_000_000)];
    let mut batch = JobBatch::with_capacity(4);
    batch.push(&plans[0], load(0..16)).unwrap();
    batch.push(&plans[1], load(15_990..16_000)).unwrap();
    batch.push(&plans[2], load(3_999_990..4_000_000)).unwrap();
    batch.push(&plans[0], load(15..16)).unwrap();
    let jobs = batch.finish();
    assert_eq!(JobBatch::apart(&jobs), 3);
    assert_eq!(JobBatch::apart(&jobs[1..]), 3);
}

#[test]
fn many_slots_without_neighbours_are_compared_as_far_as_memory_goes() {
    let plan = plan(1_000_000);
    let far = |job: i64| load((0..16).map(move |t| (job * 16 + t) * 65));
    let mut batch = JobBatch::with_capacity(3000);
    for job in 0..3000 {
        batch.push(&plan, far(job)).unwrap();
    }

    let jobs = batch.finish();
    let mut rest = &jobs[..];
    let mut pieces = 0;
    while !rest.is_empty() {
        let n = JobBatch::apart(rest);
        // Batches of 64 slabs stay whole but where a set was full.
        assert!(n > 0);
        rest = &rest[n..];
        pieces += 1;
    }
    assert!(pieces < 8, "{pieces} pieces");
}

#[test]
fn a_job_of_more_slots_than_are_remembered_is_checked_all_the_same() {
    let plan = plan_for(1_200_000, 40_000);
    let apart = |t: i64| t * 113;
    let mut batch = JobBatch::with_capacity(3);
    batch.push(&plan, load([1, 2])).unwrap();
    let job = batch.push(&plan, load((0..40_000).map(apart)));
    assert_eq!(job, Ok(()));
    let twice = || load((0..40_000).map(|t| apart(if t == 39_000 { 123 } else { t })));
    let expect = LayoutError::DuplicateSlot { slot: 123 * 113, first: 123, second: 39_000 };
    assert_eq!(batch.push(&plan, twice()).unwrap_err(), expect);
    assert_eq!(CopyJob::new(plan.clone(), twice()).unwrap_err(), expect);
    batch.push(&plan, load([3, 4])).unwrap();
    let jobs = batch.finish();
    assert_eq!(jobs.iter().map(|job| moved(job).len()).collect::<Vec<_>>(), [2, 40_000, 2]);
    // Nothing is said of it.
    assert_eq!(JobBatch::apart(&jobs), 1);
}

#[test]
fn threads_check_at_once_and_batches_on_one_thread_too() {
    let plan = plan(1000);
    let check = |seed: i64| {
        let mut outer = JobBatch::with_capacity(4);
        for i in 0..40 {
            let first = (seed + i * 16) % 900;
            outer.push(&plan, load(first..first + 16)).unwrap();
            let mut inner = JobBatch::with_capacity(2);
            inner.push(&plan, load(first..first + 8)).unwrap();
            inner.push(&plan, load(first + 7..first + 9)).unwrap();
            let twice = CopyJob::new(plan.clone(), load([first, 1, first])).unwrap_err();
            assert_eq!(twice.kind(), "duplicate_slot");
            assert_eq!(JobBatch::apart(&inner.finish()), 1);
        }
        let jobs = outer.finish();
        assert_eq!(JobBatch::apart(&jobs), apart(&jobs));
        assert_eq!(jobs.iter().map(moved).map(|slots| slots.len()).sum::<usize>(), 640);
    };
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let check = &check;
            scope.spawn(move || (0..50).for_each(|round| check(thread * 100 + round)));
        }
    });
}
