//! Every layout × direction × place of the slots, each at every access width, padded and not, whole and in
//! many launches.

use libtest_mimic::{Failed, Trial};
use maru_kernel_cuda::geometry::Limits;
use maru_kernel_host::Options;
use maru_layout::{DType, Direction};

use crate::cases::{Cache, Dims, Images, ORDERS, Order, Rng, random_slots};
use crate::memory::{Case, Source};
use crate::text;

/// Bytes behind a 16-byte boundary of cache and slab, and the access width that leaves.
const SHIFTS: [([usize; 2], u64); 6] =
    [([0, 0], 16), ([8, 0], 8), ([0, 8], 8), ([4, 0], 4), ([0, 2], 2), ([1, 1], 1)];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for order in ORDERS {
        for direction in [Direction::Gather, Direction::Scatter] {
            for source in Source::ALL {
                let name = format!("layout::{}::{direction:?}::{source:?}", order.name);
                trials.push(Trial::test(name, move || check(&order, direction, source)));
            }
        }
    }
    trials
}

fn check(order: &Order, direction: Direction, source: Source) -> Result<(), Failed> {
    let seed = order
        .name
        .bytes()
        .fold(u64::from(direction == Direction::Gather), |a, b| a.wrapping_mul(31) + u64::from(b));
    let mut rng = Rng::new(seed);
    // Head count and block size differ in the first, are equal in the second; the last has one of each.
    for (block_size, heads, layers, pad) in [(4, 3, 2, 0), (4, 3, 3, 8), (4, 4, 2, 16), (1, 1, 1, 0)] {
        let dims = Dims { layers, blocks: 5, block_size, heads, head_size: 8, dtype: DType::Bf16, pad };
        let cache = Cache::new(order, dims).map_err(text)?;
        let num_slots = cache.layout.num_slots();
        let tokens = num_slots;
        let slots = random_slots(&mut rng, num_slots, usize::try_from(num_slots).unwrap() - 1, 5);
        let skip = 2;
        let images = Images::new(&cache, direction, tokens, &slots, skip, &mut rng);
        for (shifts, expected) in SHIFTS {
            for (units, descending) in [(1 << 30, false), (37 * 16, true)] {
                let limits = Limits { units, ..Limits::blocks(2) };
                let options = Options { limits, upload: None, descending };
                let case =
                    Case { cache: &cache, direction, tokens, slots: &slots, skip, shifts, source, options };
                let (ran, width) = case.check(&images).map_err(|e| format!("{case:?}: {e}"))?;
                if width != expected {
                    return Err(format!("{case:?}: width {width}, expected {expected}").into());
                }
                if ran.launches == 0 || ran.error.raised != 0 {
                    return Err(format!("{case:?}: {ran:?}").into());
                }
            }
        }
    }
    Ok(())
}
