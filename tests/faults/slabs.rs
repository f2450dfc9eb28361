//! Kind: the slab side – memory that may not be written, pools that cannot be, pools that share bytes – and who
//! outlives whom.

use std::fs;

use maru::cxl::{DaxDevice, MapOptions, Mapping, Region, Slab};
use maru::transfer::config::PoolConfig;
use maru::{Config, Direction, SlotMapping, TransferEngine, TransferRequest};

use crate::harness::Test;
use crate::rig::{BOTH, Cache, MOVERS, Random, Rig, View, read};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        plain:
            a_slab_that_may_not_be_written_is_not_stored_into,
            pools_that_cannot_be_leave_nothing_behind,
            c14_pools_of_two_names_for_one_file;
        moved:
            a_batch_with_one_bad_request_moves_nothing,
            transfers_outlive_their_engine_and_cache,
            threads_share_an_engine_and_a_cache;
    ]
}

const MIB: u64 = 1 << 20;
const SHAPE: [i64; 5] = [8, 2, 4, 2, 8];
const AXES: &str = "block,kv,token,head,dim";

fn host() -> Rig {
    Rig::open(&MOVERS[0], None)
}

fn request(cache: &Cache<'_>, direction: Direction, slots: &[i64], slab: &Slab) -> TransferRequest {
    let mapping = SlotMapping::from_slots(slots);
    match direction {
        Direction::Gather => TransferRequest::gather(&cache.registered, mapping, slab),
        _ => TransferRequest::scatter(&cache.registered, mapping, slab),
    }
    .slab_tokens(slots.len() as u64)
}

/// Loading from it is fine.
fn a_slab_that_may_not_be_written_is_not_stored_into() {
    let rig = host();
    let cache = rig.cache(&View::new(&SHAPE, AXES));
    let dir = tempfile::tempdir().unwrap();
    let (path, len) = (dir.path().join("pool"), cache.slab_bytes(4));
    let content = Random(5).bytes(MIB as usize);
    fs::write(&path, &content).unwrap();
    let device = DaxDevice::open(&path).unwrap();
    let options = MapOptions { read_only: true, prefault: false, ..MapOptions::default() };
    let slab = Region::new(Mapping::map(&device, &options).unwrap()).slab(8192, len).unwrap();
    let error = rig.engine.submit(&request(&cache, Direction::Gather, &[9, 2, 30, 31], &slab)).unwrap_err();
    assert_eq!(error.kind(), "invalid_argument");
    assert!(error.to_string().contains("read-only"), "{error}");
    assert!(fs::read(&path).unwrap() == content);
    rig.engine.submit(&request(&cache, Direction::Scatter, &[9, 2, 30, 31], &slab)).unwrap().wait().unwrap();
    let at = cache.reference.paged_offset(0, 0, 9, 0) as usize;
    let row = cache.reference.row_bytes() as usize;
    assert_eq!(cache.bytes()[at..at + row], content[8192..8192 + row]);
}

fn pools_that_cannot_be_leave_nothing_behind() {
    let engine = host().engine;
    let dir = tempfile::tempdir().unwrap();
    for (offset, size, slab_bytes) in [
        (0, MIB, 0),
        (0, MIB, u64::MAX),
        (0, MIB, 1 << 63),
        (0, MIB, MIB),
        (0, 4096, 4096),
        (0, 8192, 1),
        (0, MIB + 1, 4096),
        (0, 5000, 4096),
        (1, MIB - 1, 4096),
        (512, MIB, 4096),
        (4095, 4097, 4096),
        (0, 1 << 62, 4096),
        (1 << 62, 1 << 62, 4096),
        (u64::MAX, 4096, 4096),
        (u64::MAX - 4095, 4096, 4096),
        (0, u64::MAX, 4096),
        (0, 0, 4096),
    ] {
        for replace in [false, true] {
            let mut pool = PoolConfig::new(dir.path().join("pool"));
            (pool.offset, pool.size) = (offset, size);
            let error = engine.create_pool(&pool, slab_bytes, replace).unwrap_err();
            assert!(["invalid_argument", "no_space"].contains(&error.kind()), "{}: {error}", error.kind());
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{offset} {size} {slab_bytes}: {error}");
        }
    }
    for path in ["", "/", ".", "/dev/null", "/proc/pool", "/dev/shm"] {
        let mut pool = PoolConfig::new(path);
        pool.size = MIB;
        engine.create_pool(&pool, 4096, true).unwrap_err();
    }
}

/// No comparison of paths tells; the writers' locks do.
fn c14_pools_of_two_names_for_one_file() {
    let engine = host().engine;
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    fs::write(&one, vec![0; 16 * MIB as usize]).unwrap();
    fs::hard_link(&one, &two).unwrap();
    let pool = |path, offset, size| {
        let mut pool = PoolConfig::new(path);
        (pool.offset, pool.size) = (offset * MIB, size * MIB);
        pool
    };
    let first = engine.create_pool(&pool(&one, 0, 8), 4096, true).unwrap();
    let key = [7; 32];
    let slab = first.alloc().unwrap().unwrap();
    slab.write_at(0, &[1; 4096]).unwrap();
    first.publish(&slab, &key, 4096, 0, None).unwrap();
    for (offset, size) in [(4, 8), (0, 8), (0, 16), (7, 1)] {
        let error = engine.create_pool(&pool(&two, offset, size), 4096, true).unwrap_err();
        assert_eq!(error.kind(), "busy", "[{offset}, +{size}): {error}");
    }
    // Neighbours do not meet.
    let second = engine.create_pool(&pool(&two, 8, 8), 4096, true).unwrap();
    assert_eq!(read(first.lookup(&key).unwrap().unwrap().slab()), [1; 4096]);
    drop((first, second));
    let device = [&one, &two].map(|path| DaxDevice::open(path).unwrap().id());
    assert_eq!(device[0], device[1]);
}

/// The bad one comes last, when the others could have been queued.
fn a_batch_with_one_bad_request_moves_nothing(rig: &Rig) {
    let cache = rig.cache(&View::new(&SHAPE, AXES));
    let content = Random(3).bytes(cache.slab_bytes(2) as usize);
    let slabs: Vec<Slab> = (0..3).map(|_| rig.slab(&content)).collect();
    let short = slabs[2].span(0, 8).unwrap();
    for direction in BOTH {
        let good = |i: usize| request(&cache, direction, &[i as i64, i as i64 + 8], &slabs[i]);
        for bad in [
            request(&cache, direction, &[5, 32], &slabs[2]),
            request(&cache, direction, &[i64::MIN, 1], &slabs[2]),
            request(&cache, direction, &[5, 1 << 32], &slabs[2]),
            request(&cache, direction, &[5, 6], &short),
            request(&cache, direction, &[5, 6], &slabs[2]).skip_tokens(3),
            request(&cache, direction, &[5, 6], &slabs[2]).layers(0, 2),
            request(&cache, direction, &[5, 6], &slabs[2]).layers(u32::MAX, u32::MAX),
            request(&cache, direction, &[5, 6], &slabs[2]).slab_tokens(u64::MAX),
            request(&cache, direction, &[5, 6], &slabs[2]).slab_tokens(1),
        ] {
            let memory = || (cache.bytes(), slabs.iter().map(read).collect::<Vec<_>>());
            let before = memory();
            let error = rig.engine.submit_many(&[good(0), good(1), bad]).unwrap_err();
            assert!(memory() == before, "{direction:?}: {error}");
        }
        rig.engine.submit_many(&[good(0), good(1)]).unwrap().wait().unwrap();
    }
}

/// A transfer needs nobody any more who made it.
fn transfers_outlive_their_engine_and_cache(rig: &Rig) {
    let content = Random(11).bytes(4 << 20);
    for _ in 0..3 {
        let engine = TransferEngine::open(&Config::from_toml_str(rig.mover.config, "x").unwrap()).unwrap();
        let (stored, loaded) = (rig.slab(&content), rig.slab(&vec![0; content.len()]));
        let own = Rig { engine, context: rig.context.clone(), mover: rig.mover, session: None };
        let cache = own.cache(&View::new(&[512, 2, 16, 4, 64], AXES));
        let tokens = content.len() as u64 / (2 * cache.reference.row_bytes());
        let slots = Random(13).shuffled(512 * 16)[..tokens as usize].to_vec();
        let load = request(&cache, Direction::Scatter, &slots, &stored);
        let store = request(&cache, Direction::Gather, &slots, &loaded);
        let transfers = [own.engine.submit(&load).unwrap(), own.engine.submit(&store).unwrap()];
        drop((load, store, stored));
        // The memory of the cache stays: that is the caller's promise.
        let Cache { arena, registered, .. } = cache;
        drop(registered);
        drop(own.engine);
        transfers.into_iter().for_each(|transfer| transfer.wait().unwrap());
        assert!(read(&loaded) == content);
        drop(arena);
    }
}

fn threads_share_an_engine_and_a_cache(rig: &Rig) {
    let cache = rig.cache(&View::new(&SHAPE, AXES).at(&[0, 4096]));
    let (row, tokens) = (cache.reference.row_bytes() as usize, 8);
    let contents: Vec<Vec<u8>> =
        (0..4).map(|i| Random(17 + i).bytes(cache.slab_bytes(tokens) as usize)).collect();
    let order = Random(19).shuffled(32);
    let parts: Vec<(&[i64], Slab, Slab)> = order
        .chunks(tokens as usize)
        .zip(&contents)
        .map(|(slots, content)| (slots, rig.slab(content), rig.slab(&vec![0; content.len()])))
        .collect();
    let requests: Vec<[TransferRequest; 2]> = parts
        .iter()
        .map(|(slots, full, empty)| {
            [
                request(&cache, Direction::Scatter, slots, full),
                request(&cache, Direction::Gather, slots, empty),
            ]
        })
        .collect();
    std::thread::scope(|scope| {
        for pair in &requests {
            scope.spawn(|| {
                for _ in 0..10 {
                    pair.iter().for_each(|r| rig.engine.submit(r).unwrap().wait().unwrap());
                }
            });
        }
    });
    for ((slots, _, stored), content) in parts.iter().zip(&contents) {
        assert!(read(stored) == *content);
        let at = cache.reference.paged_offset(1, 1, slots[7] as u64, 0) as usize;
        assert_eq!(cache.bytes()[at..at + row], content[content.len() - row..]);
    }
}
