//! The slab directory: format, torn and foreign entries, concurrent readers, random histories.

#![allow(clippy::unwrap_used, reason = "helpers of tests, where a failure is a panic")]
#![allow(clippy::cast_possible_truncation, reason = "the crate is for 64-bit targets only")]

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{anonymous_pool, key, map, new_file_region, options, scratch, writable};
use maru_cxl::{CxlError, DIRECTORY_MAGIC, ENTRY_BYTES, OpenOptions, PoolOptions, Region, SlabPool};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn bytes_at(region: &Region, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.slab(offset, len as u64).unwrap().read_at(0, &mut bytes).unwrap();
    bytes
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The offsets written down in the documentation, read by somebody who knows nothing but them.
#[test]
fn the_bytes_are_where_the_documentation_says() {
    let region = Region::anonymous(MIB).unwrap();
    let pool = SlabPool::create(region.clone(), options(5000)).unwrap();
    let slab = pool.alloc().unwrap().unwrap();
    let entry = pool.publish(&slab, &key(77), 4321, 0x1111, Some(0x2222)).unwrap();
    let info = pool.info();

    let header = bytes_at(&region, 0, 256);
    assert_eq!(header[..8], DIRECTORY_MAGIC);
    assert_eq!(u32::from_le_bytes(header[8..12].try_into().unwrap()), 1);
    assert_eq!(u32::from_le_bytes(header[12..16].try_into().unwrap()), 128);
    assert_eq!(&header[16..32], info.uuid.as_bytes());
    let expected =
        [5000, 8192, info.slab_count, info.data_offset, info.entry_count, MIB, info.created_unix_ns, 0];
    for (n, value) in expected.into_iter().enumerate() {
        assert_eq!(u64_at(&header, 32 + 8 * n), value, "field {n}");
    }
    assert_eq!(u32::from_le_bytes(header[136..140].try_into().unwrap()), std::process::id());
    assert_eq!(u64_at(&header, 248), fnv1a(&header[..248]));

    let bytes = bytes_at(&region, 4096 + entry.index * 128, 128);
    assert_eq!(u64_at(&bytes, 0), entry.sequence);
    assert_eq!(entry.sequence % 2, 0);
    assert_eq!(bytes[8..16], [1, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(bytes[16..48], key(77));
    assert_eq!(u64_at(&bytes, 48), slab.index());
    assert_eq!(u64_at(&bytes, 56), 4321);
    assert_eq!((u64_at(&bytes, 64), u64_at(&bytes, 72)), (0x1111, 0x2222));
    assert_eq!(&bytes[80..96], info.uuid.as_bytes());
    assert_eq!(u64_at(&bytes, 120), fnv1a(&bytes[..120]));
    assert_eq!(region.base().addr().get() % 64, 0, "entries start on cache lines");
    assert_eq!(ENTRY_BYTES % 64, 0);
}

/// Whichever byte of an entry is changed, the entry is not returned.
#[test]
fn a_changed_byte_anywhere_hides_an_entry() {
    let pool = anonymous_pool(2);
    let entry = pool.publish(&pool.alloc().unwrap().unwrap(), &key(1), 9, 3, Some(4)).unwrap();
    let place = pool.region().slab(pool.info().directory_offset + 4096 + entry.index * 128, 128).unwrap();
    for at in 0..128 {
        let mut byte = [0];
        place.read_at(at, &mut byte).unwrap();
        for bit in 0..8 {
            place.write_at(at, &[byte[0] ^ 1 << bit]).unwrap();
            assert!(pool.directory().get(entry.index).is_none(), "byte {at} bit {bit}");
            assert!(pool.lookup(&key(1)).unwrap().is_none());
        }
        place.write_at(at, &byte).unwrap();
    }
    assert!(pool.lookup(&key(1)).unwrap().is_some());
}

#[test]
fn a_half_old_half_new_entry_is_never_returned() {
    let pool = anonymous_pool(2);
    let entry = pool.publish(&pool.alloc().unwrap().unwrap(), &key(1), 9, 3, None).unwrap();
    let place = pool.region().slab(pool.info().directory_offset + 4096 + entry.index * 128, 128).unwrap();
    let mut old = [0; 128];
    place.read_at(0, &mut old).unwrap();
    pool.withdraw(&key(1)).unwrap();
    let again = pool.publish(&pool.alloc().unwrap().unwrap(), &key(1), 10, 4, None).unwrap();
    assert_eq!(again.index, entry.index);
    let mut new = [0; 128];
    place.read_at(0, &mut new).unwrap();
    // The two cache lines of an entry as another host may see them: one old, one new.
    place.write_at(64, &old[64..]).unwrap();
    assert!(pool.directory().get(entry.index).is_none());
    place.write_at(64, &new[64..]).unwrap();
    place.write_at(0, &old[..64]).unwrap();
    assert!(pool.directory().get(entry.index).is_none());
    place.write_at(0, &new[..64]).unwrap();
    assert_eq!(pool.directory().get(entry.index).unwrap().len, 10);
}

#[test]
fn an_entry_of_another_pool_is_foreign() {
    let (mine, other) = (anonymous_pool(2), anonymous_pool(2));
    let entry = other.publish(&other.alloc().unwrap().unwrap(), &key(1), 9, 0, None).unwrap();
    let offset = other.info().directory_offset + 4096 + entry.index * 128;
    let bytes = bytes_at(other.region(), offset, 128);
    mine.region().slab(offset, 128).unwrap().write_at(0, &bytes).unwrap();
    assert!(mine.directory().get(entry.index).is_none());
    assert!(mine.lookup(&key(1)).unwrap().is_none());
    assert_eq!(mine.entries().count(), 0);
}

#[test]
fn a_writer_that_died_while_writing_costs_one_entry() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    let pool = SlabPool::create(region, options(4096)).unwrap();
    let torn = pool.publish(&pool.alloc().unwrap().unwrap(), &key(1), 9, 0, None).unwrap();
    pool.publish(&pool.alloc().unwrap().unwrap(), &key(2), 9, 0, None).unwrap();
    let total = pool.slab_count();
    // As the writer leaves it between its first and its last store.
    let place = pool.region().slab(pool.info().directory_offset + 4096 + torn.index * 128, 128).unwrap();
    place.write_at(0, &(torn.sequence + 1).to_le_bytes()).unwrap();
    drop((pool, place));

    let reader = SlabPool::open(map(&path), OpenOptions::default()).unwrap();
    assert!(reader.lookup(&key(1)).unwrap().is_none());
    assert!(reader.lookup(&key(2)).unwrap().is_some());
    let writer = SlabPool::open(map(&path), writable()).unwrap();
    assert_eq!((writer.stats().published, writer.stats().free), (1, total - 1));
    writer.publish(&writer.alloc().unwrap().unwrap(), &key(1), 5, 0, None).unwrap();
    assert_eq!(reader.lookup(&key(1)).unwrap().unwrap().len(), 5);
}

#[test]
fn two_entries_that_claim_one_slab_are_settled_by_the_next_writer() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    let pool = SlabPool::create(region.clone(), options(4096)).unwrap();
    let first = pool.publish(&pool.alloc().unwrap().unwrap(), &key(1), 9, 0, None).unwrap();
    let second = pool.publish(&pool.alloc().unwrap().unwrap(), &key(2), 9, 0, None).unwrap();
    let offset = |index| pool.info().directory_offset + 4096 + index * 128;
    let mut forged = bytes_at(&region, offset(second.index), 128);
    forged[48..56].copy_from_slice(&first.slab.to_le_bytes());
    let check = fnv1a(&forged[..120]);
    forged[120..].copy_from_slice(&check.to_le_bytes());
    region.slab(offset(second.index), 128).unwrap().write_at(0, &forged).unwrap();
    drop(pool);
    let writer = SlabPool::open(map(&path), writable()).unwrap();
    assert_eq!(writer.stats().published, 1);
    assert_eq!(writer.entries().count(), 1);
}

#[test]
fn impossible_entries_with_a_right_check_word_are_refused() {
    let pool = anonymous_pool(2);
    let entry = pool.publish(&pool.alloc().unwrap().unwrap(), &key(1), 9, 0, None).unwrap();
    let offset = pool.info().directory_offset + 4096 + entry.index * 128;
    let good = bytes_at(pool.region(), offset, 128);
    let forge = |at: usize, value: u64| {
        let mut bytes = good.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let check = fnv1a(&bytes[..120]);
        bytes[120..].copy_from_slice(&check.to_le_bytes());
        pool.region().slab(offset, 128).unwrap().write_at(0, &bytes).unwrap();
        pool.directory().get(entry.index).is_some()
    };
    assert!(forge(56, 4096));
    for (at, value) in [(48, pool.slab_count()), (48, u64::MAX), (56, 0), (56, 4097), (56, u64::MAX), (8, 3)]
    {
        assert!(!forge(at, value), "{value} at {at}");
    }
}

/// Whatever happens to its header, opening a pool is an error and never a pool with an impossible geometry.
#[test]
fn a_changed_byte_in_the_header_is_not_a_pool() {
    let region = Region::anonymous(MIB).unwrap();
    drop(SlabPool::create(region.clone(), options(4096)).unwrap());
    let header = region.slab(0, 256).unwrap();
    for at in 0..256 {
        let mut byte = [0];
        header.read_at(at, &mut byte).unwrap();
        header.write_at(at, &[byte[0] ^ 0x40]).unwrap();
        let error = SlabPool::open(region.clone(), writable()).unwrap_err();
        assert!(matches!(error, CxlError::NotAPool { .. }), "{error}");
        header.write_at(at, &byte).unwrap();
    }
    SlabPool::open(region, writable()).unwrap();
}

#[test]
fn impossible_geometries_with_a_right_checksum_are_refused() {
    let region = Region::anonymous(MIB).unwrap();
    drop(SlabPool::create(region.clone(), options(4096)).unwrap());
    let good = bytes_at(&region, 0, 256);
    let open = |at: usize, value: u64| {
        let mut bytes = good.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let check = fnv1a(&bytes[..248]);
        bytes[248..].copy_from_slice(&check.to_le_bytes());
        region.slab(0, 256).unwrap().write_at(0, &bytes).unwrap();
        SlabPool::open(region.clone(), OpenOptions::default())
    };
    open(80, 1).unwrap();
    for at in [32, 40, 48, 56, 64, 72] {
        for value in [0, 1, 4097, u64::MAX, u64::MAX / 4096, 1 << 63] {
            let opened = open(at, value);
            // Fewer entries or slabs than there were, and a slab size that rounds to the same stride, are possible.
            let possible = matches!((at, value), (48 | 64, 1) | (32, 1));
            assert_eq!(opened.is_ok(), possible, "{value} at {at}");
        }
    }
    assert!(open(8, 2).unwrap_err().to_string().contains("version 2"));
}

#[test]
fn keys_that_share_a_home_are_all_found_and_the_rest_survives_withdrawal() {
    let region = Region::anonymous(MIB).unwrap();
    // Few entries, so that chains wrap around and run into each other.
    let pool = SlabPool::create(region, PoolOptions { entries: 16, ..options(4096) }).unwrap();
    for n in 0..16 {
        pool.publish(&pool.alloc().unwrap().unwrap(), &key(n), n + 1, 0, None).unwrap();
    }
    for gone in [3, 0, 15, 7, 8] {
        assert!(pool.withdraw(&key(gone)).unwrap());
    }
    for n in 0..16 {
        let found = pool.lookup(&key(n)).unwrap();
        assert_eq!(found.map(|found| found.len()), (![3, 0, 15, 7, 8].contains(&n)).then_some(n + 1));
    }
    for n in 0..16 {
        pool.withdraw(&key(n)).unwrap();
    }
    // All entries are empty again, so a search ends at once.
    let first = pool.region().slab(pool.info().directory_offset + 4096, 16 * 128).unwrap();
    let mut bytes = [0; 16 * 128];
    first.read_at(0, &mut bytes).unwrap();
    assert!(bytes.chunks(128).all(|entry| entry[8..12] == [0; 4]), "no withdrawn entry is left");
}

/// A reader beside a writer that reuses slabs as fast as it can: what passes `still_valid` is never a mixture.
#[test]
fn a_reader_never_accepts_bytes_of_another_publication() {
    const SLAB: usize = 4096;
    let dir = scratch();
    let (path, region) = new_file_region(&dir, 64 << 10);
    let writer = SlabPool::create(region, options(SLAB as u64)).unwrap();
    let stop = AtomicBool::new(false);
    let accepted = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let reader =
                        SlabPool::open(common::map_read_only(&path), OpenOptions::default()).unwrap();
                    let (mut accepted, mut bytes) = (0_u64, vec![0; SLAB]);
                    let mut n = 0;
                    while !stop.load(Ordering::Relaxed) {
                        n = (n + 1) % 3;
                        let Some(found) = reader.lookup(&key(n)).unwrap() else { continue };
                        found.slab().read_at(0, &mut bytes[..found.slab().len() as usize]).unwrap();
                        if found.still_valid() {
                            accepted += 1;
                            let words = bytes[..found.slab().len() as usize].chunks_exact(8);
                            for word in words {
                                assert_eq!(u64_at(word, 0), found.fingerprint(), "a torn slab was accepted");
                            }
                        }
                    }
                    accepted
                })
            })
            .collect();
        for round in 1..20_000_u64 {
            let slab = writer.alloc().unwrap().unwrap();
            slab.write_at(0, &round.to_le_bytes().repeat(SLAB / 8)).unwrap();
            writer.withdraw(&key(round % 3)).unwrap();
            writer.publish(&slab, &key(round % 3), SLAB as u64, round, None).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        readers.into_iter().map(|reader| reader.join().unwrap()).sum::<u64>()
    });
    assert!(accepted > 0, "the readers never saw anything");
}

#[derive(Debug, Clone)]
enum Step {
    Publish(u64, u64),
    Withdraw(u64),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..20_u64, 1..4096_u64).prop_map(|(key, len)| Step::Publish(key, len)),
        4 => (0..20_u64).prop_map(Step::Withdraw),
        1 => Just(Step::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// A pool behaves like a map from keys to what was published, over any history and reopening.
    #[test]
    fn a_pool_is_a_map(steps in proptest::collection::vec(step(), 1..120), entries in 1..24_u64) {
        let region = Region::anonymous(4096 * 16).unwrap();
        let mut pool = SlabPool::create(region.clone(), PoolOptions { entries, ..options(4096) }).unwrap();
        let slabs = pool.slab_count();
        let mut model: HashMap<u64, u64> = HashMap::new();
        for step in steps {
            match step {
                Step::Publish(n, len) => match pool.alloc().unwrap() {
                    None => prop_assert_eq!(model.len() as u64, slabs),
                    Some(slab) => match pool.publish(&slab, &key(n), len, n, Some(len)) {
                        Ok(_) => prop_assert!(model.insert(n, len).is_none()),
                        Err(CxlError::KeyExists { .. }) => prop_assert!(model.contains_key(&n)),
                        Err(CxlError::DirectoryFull { .. }) => prop_assert_eq!(model.len() as u64, entries),
                        Err(other) => return Err(TestCaseError::fail(other.to_string())),
                    },
                },
                Step::Withdraw(n) => prop_assert_eq!(pool.withdraw(&key(n)).unwrap(), model.remove(&n).is_some()),
                Step::Reopen => {
                    drop(pool);
                    pool = SlabPool::open(region.clone(), writable()).unwrap();
                }
            }
            let stats = pool.stats();
            prop_assert_eq!(stats.published, model.len() as u64);
            prop_assert_eq!(stats.free + stats.published, slabs);
        }
        for n in 0..20 {
            let found = pool.lookup(&key(n)).unwrap().map(|found| (found.len(), found.checksum()));
            prop_assert_eq!(found, model.get(&n).map(|&len| (len, Some(len))));
        }
        let mut listed: Vec<_> = pool.entries().map(|entry| (entry.fingerprint, entry.len)).collect();
        let mut expected: Vec<_> = model.into_iter().collect();
        listed.sort_unstable();
        expected.sort_unstable();
        prop_assert_eq!(listed, expected);
    }

    /// Random bytes where a pool would be are never one, and opening never reaches outside the region.
    #[test]
    fn random_bytes_are_no_pool(bytes in proptest::collection::vec(any::<u8>(), 256), with_magic in any::<bool>()) {
        let region = Region::anonymous(64 << 10).unwrap();
        let mut bytes = bytes;
        if with_magic {
            bytes[..8].copy_from_slice(&DIRECTORY_MAGIC);
            bytes[8..16].copy_from_slice(&[1, 0, 0, 0, 128, 0, 0, 0]);
            let check = fnv1a(&bytes[..248]);
            bytes[248..].copy_from_slice(&check.to_le_bytes());
        }
        region.slab(0, 256).unwrap().write_at(0, &bytes).unwrap();
        prop_assert!(SlabPool::open(region, writable()).is_err());
    }
}
