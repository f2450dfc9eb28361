//! Two machines over one memory: machine 0 stores and publishes, machine 1 looks up, loads and verifies.
//!
//! Machine 1 answers through the last unit of the device, which belongs to no slab: a line written by one host is
//! never written by the other.

use std::time::{Duration, Instant};

use maru_cxl::{
    Coherence, DaxDevice, MapOptions, Mapping, OpenOptions, PoolOptions, Region, Slab, SlabPool, coherence,
};

use crate::Case;
use crate::common::key;

pub(crate) const CASES: &[Case] = &[("hosts::what_one_machine_stores_the_other_loads", exchange)];

const SLABS: u8 = 24;
const SLAB_BYTES: usize = 256 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

fn exchange(device: &DaxDevice) {
    let pool_len = device.len() - device.align();
    let part = |offset, len| {
        let options = MapOptions { offset, len, ..MapOptions::default() };
        Region::new(Mapping::map(device, &options).unwrap())
    };
    let answers = part(pool_len, 0).slab(0, 4096).unwrap();
    match std::env::var("MARU_DAX_PEER").as_deref() {
        Ok("0") => store(part(0, pool_len), &answers),
        Ok("1") => load(&part(0, pool_len), &answers),
        other => panic!("MARU_DAX_PEER is {other:?}; 0 or 1 is expected"),
    }
}

fn content(n: u8) -> Vec<u8> {
    (0..SLAB_BYTES).map(|at| (at.wrapping_mul(31) ^ at >> 9).to_le_bytes()[0] ^ n).collect()
}

/// Rounds: publish, wait for the answer, withdraw, publish other bytes in the same slabs.
fn store(region: Region, answers: &Slab) {
    let options = PoolOptions {
        slab_bytes: SLAB_BYTES as u64,
        coherence: Coherence::Flush,
        force: true,
        ..PoolOptions::default()
    };
    let pool = SlabPool::create(region, options).unwrap();
    for round in 1..=3_u8 {
        for n in 0..SLABS {
            let slab = pool.alloc().unwrap().unwrap();
            slab.write_at(0, &content(n ^ round << 6)).unwrap();
            pool.publish(&slab, &name(round, n), SLAB_BYTES as u64, n.into(), None).unwrap();
        }
        wait(|| (answer(answers) == round).then_some(()), "the answer of machine 1");
        for n in 0..SLABS {
            assert!(pool.withdraw(&name(round, n)).unwrap());
        }
    }
    println!(
        "machine 0: {} slabs of {SLAB_BYTES} bytes stored and verified by machine 1",
        3 * u32::from(SLABS)
    );
}

fn load(region: &Region, answers: &Slab) {
    let open = OpenOptions { coherence: Coherence::Flush, ..OpenOptions::default() };
    let pool = wait(|| SlabPool::open(region.clone(), open).ok(), "the pool of machine 0");
    for round in 1..=3_u8 {
        for n in 0..SLABS {
            let found = wait(|| pool.lookup(&name(round, n)).unwrap(), "a key of machine 0");
            let mut bytes = vec![0; SLAB_BYTES];
            found.slab().read_at(0, &mut bytes).unwrap();
            assert!(found.still_valid(), "withdrawn before it was answered");
            assert!(bytes == content(n ^ round << 6), "slab {n} of round {round} differs");
            assert_eq!(found.fingerprint(), u64::from(n));
        }
        answers.write_at(0, &[round]).unwrap();
        answers.flush();
        coherence::publish();
    }
    println!("machine 1: {} slabs of {SLAB_BYTES} bytes loaded and verified", 3 * u32::from(SLABS));
}

fn name(round: u8, n: u8) -> [u8; 32] {
    key(u64::from(round) << 8 | u64::from(n))
}

fn answer(answers: &Slab) -> u8 {
    answers.invalidate();
    let mut byte = [0];
    answers.read_at(0, &mut byte).unwrap();
    byte[0]
}

fn wait<T>(mut ready: impl FnMut() -> Option<T>, what: &str) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "{what} did not come within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
