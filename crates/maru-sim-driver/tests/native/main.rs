//! The native kernel, unchanged, on the simulated driver.
#![allow(clippy::unwrap_used, reason = "tests")]

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

#[path = "../../../maru-kernel-cuda/tests/common/cases.rs"]
mod cases;

use maru_kernel_cuda::{LaunchOptions, PagedCopyKernel};
use maru_layout::{DType, Direction, SlotMapping};
use maru_sim_driver::Session;

use cases::{Cache, Dims, Images, ORDERS, Rng, compare, job, random_slots};
use common::{Device, Pinned, context};

fn main() {
    common::main(tests![bytes_move_through_the_native_kernel]);
}

fn bytes_move_through_the_native_kernel(session: &Session) {
    let context = context(0);
    let kernel = PagedCopyKernel::load(context.clone()).unwrap();
    let mut rng = Rng::new(1);
    let dims =
        Dims { layers: 2, blocks: 5, block_size: 4, heads: 3, head_size: 8, dtype: DType::Bf16, pad: 0 };
    let cache = Cache::new(&ORDERS[0], dims).unwrap();
    let slots = random_slots(&mut rng, 20, 19, 5);
    for direction in [Direction::Gather, Direction::Scatter] {
        let images = Images::new(&cache, direction, 20, &slots, 1, &mut rng);
        let paged = Device::of(session, &images.cache);
        let slab = Pinned::new(&images.slab);
        let plan = cache.plan(paged.addr, 20).unwrap();
        let planes = kernel.register(&plan).unwrap();
        let job = job(&plan, direction, slab.device, SlotMapping::from_slots(slots.clone()), 1).unwrap();
        // SAFETY: cache and slab live until the transfer is over.
        let launched =
            unsafe { kernel.launch(&job, &planes, std::ptr::null_mut(), LaunchOptions::default()) }.unwrap();
        launched.wait().unwrap();
        compare("cache", &paged.read(session), &images.cache_after).unwrap();
        compare("slab", &slab.read(), &images.slab_after).unwrap();
    }
}
