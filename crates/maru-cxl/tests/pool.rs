//! Slab pools: allocating, publishing, looking up, sharing between mappings.

mod common;

use std::sync::Arc;

use common::{anonymous_pool, key, map, map_read_only, new_file_region, options, scratch, writable};
use maru_cxl::{
    Coherence, CreateOptions, CxlError, DaxDevice, DeviceHeader, HeaderState, Liveness, MapOptions, Mapping,
    OpenOptions, PoolOptions, Region, SlabPool, Uuid,
};

const MIB: u64 = 1 << 20;

#[test]
fn geometry_is_as_documented() {
    let dir = scratch();
    let (_path, region) = new_file_region(&dir, MIB);
    let pool = SlabPool::create(region, options(10_000)).unwrap();
    let info = *pool.info();
    assert_eq!((info.slab_bytes, info.slab_stride), (10_000, 12_288));
    assert_eq!(info.directory_offset, 4096);
    assert_eq!(info.data_offset % 4096, 0);
    assert!(info.data_offset >= 8192 + info.entry_count * 128);
    assert!(info.entry_count >= info.slab_count);
    assert!(info.data_offset + info.slab_count * info.slab_stride <= MIB);
    assert!(info.data_offset + (info.slab_count + 1) * info.slab_stride > MIB, "room for one more");
}

#[test]
fn slabs_are_page_aligned_disjoint_and_inside() {
    let pool = anonymous_pool(8);
    let mut offsets: Vec<u64> = Vec::new();
    let mut slabs = Vec::new();
    while let Some(slab) = pool.alloc().unwrap() {
        assert_eq!(slab.addr().addr().get() % 4096, 0);
        assert_eq!(slab.len(), 4096);
        offsets.push(slab.offset());
        slabs.push(slab);
    }
    offsets.sort_unstable();
    offsets.dedup();
    assert_eq!(offsets.len() as u64, pool.slab_count());
    assert!(offsets.windows(2).all(|pair| pair[1] - pair[0] >= 4096));
}

#[test]
fn exhaustion_is_a_value() {
    let pool = anonymous_pool(2);
    let held: Vec<_> = std::iter::from_fn(|| pool.alloc().unwrap()).collect();
    assert_eq!(held.len() as u64, pool.slab_count());
    assert!(pool.alloc().unwrap().is_none());
    drop(held);
    assert!(pool.alloc().unwrap().is_some());
}

#[test]
fn slabs_are_reused_first_in_first_out() {
    let pool = anonymous_pool(3);
    let take = || pool.alloc().unwrap().unwrap();
    let (a, b, c) = (take(), take(), take());
    let order = [b.index(), a.index(), c.index()];
    pool.free(b).unwrap();
    pool.free(a).unwrap();
    pool.free(c).unwrap();
    let again = [take(), take(), take()];
    assert_eq!(again.map(|slab| slab.index()), order);
}

#[test]
fn double_and_foreign_frees_are_refused() {
    let (pool, other) = (anonymous_pool(2), anonymous_pool(2));
    let slab = pool.alloc().unwrap().unwrap();
    let twin = slab.clone();
    let error = other.free(slab.clone()).unwrap_err();
    assert!(matches!(error, CxlError::ForeignSlab { .. }), "{error}");
    pool.free(slab).unwrap();
    let error = pool.free(twin).unwrap_err();
    assert!(matches!(error, CxlError::DoubleFree { .. }), "{error}");
    assert_eq!(pool.stats().free, pool.slab_count());
}

#[test]
fn a_freed_slab_is_not_handed_out_while_somebody_holds_it() {
    let pool = anonymous_pool(1);
    let slab = pool.alloc().unwrap().unwrap();
    let in_flight = slab.slab().span(0, 16).unwrap();
    pool.free(slab).unwrap();
    let others: Vec<_> = std::iter::from_fn(|| pool.alloc().unwrap()).collect();
    assert!(others.iter().all(|other| other.offset() != in_flight.offset()));
    drop(in_flight);
    assert!(pool.alloc().unwrap().is_some());
}

#[test]
fn a_dropped_slab_returns_to_the_pool() {
    let pool = anonymous_pool(1);
    for _ in 0..10 {
        drop(pool.alloc().unwrap().unwrap());
    }
    assert_eq!(pool.stats().held, 0);
}

#[test]
fn published_slabs_are_found_with_everything_said_of_them() {
    let pool = anonymous_pool(4);
    let slab = pool.alloc().unwrap().unwrap();
    slab.write_at(0, &[9; 100]).unwrap();
    let entry = pool.publish(&slab, &key(1), 100, 0xfeed, Some(0xc0de)).unwrap();
    let found = pool.lookup(&key(1)).unwrap().unwrap();
    assert_eq!((found.len(), found.fingerprint(), found.checksum()), (100, 0xfeed, Some(0xc0de)));
    assert_eq!(found.sequence(), entry.sequence);
    assert_eq!(found.entry(), &entry);
    let mut bytes = [0; 100];
    found.slab().read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 100]);
    assert!(found.slab().read_at(1, &mut bytes).is_err(), "the slab found has the published length");
    assert!(found.still_valid());
    assert!(pool.lookup(&key(2)).unwrap().is_none());
}

#[test]
fn a_missing_checksum_stays_missing() {
    let pool = anonymous_pool(2);
    let slab = pool.alloc().unwrap().unwrap();
    pool.publish(&slab, &key(1), 1, 0, None).unwrap();
    assert_eq!(pool.lookup(&key(1)).unwrap().unwrap().checksum(), None);
}

#[test]
fn a_key_is_published_once() {
    let pool = anonymous_pool(4);
    let (a, b) = (pool.alloc().unwrap().unwrap(), pool.alloc().unwrap().unwrap());
    pool.publish(&a, &key(1), 1, 0, None).unwrap();
    let error = pool.publish(&b, &key(1), 1, 0, None).unwrap_err();
    assert_eq!(error.kind(), "already_exists");
    // The slab stays allocated and can be published under another key.
    pool.publish(&b, &key(2), 1, 0, None).unwrap();
}

#[test]
fn a_published_slab_can_be_neither_freed_nor_published_again() {
    let pool = anonymous_pool(2);
    let slab = pool.alloc().unwrap().unwrap();
    pool.publish(&slab, &key(1), 1, 0, None).unwrap();
    assert!(matches!(pool.publish(&slab, &key(2), 1, 0, None), Err(CxlError::SlabPublished { .. })));
    assert!(matches!(pool.free(slab), Err(CxlError::SlabPublished { .. })));
    assert!(pool.lookup(&key(2)).unwrap().is_none());
}

#[test]
fn lengths_of_zero_or_more_than_a_slab_cannot_be_published() {
    let pool = anonymous_pool(2);
    let slab = pool.alloc().unwrap().unwrap();
    for len in [0, 4097, u64::MAX] {
        assert_eq!(pool.publish(&slab, &key(1), len, 0, None).unwrap_err().kind(), "invalid_argument");
    }
    pool.publish(&slab, &key(1), 4096, 0, None).unwrap();
}

#[test]
fn withdrawing_frees_the_slab_and_invalidates_readers() {
    let pool = anonymous_pool(1);
    let slab = pool.alloc().unwrap().unwrap();
    pool.publish(&slab, &key(1), 10, 0, None).unwrap();
    drop(slab);
    let found = pool.lookup(&key(1)).unwrap().unwrap();
    assert!(pool.withdraw(&key(1)).unwrap());
    assert!(!pool.withdraw(&key(1)).unwrap());
    assert!(!found.still_valid());
    assert!(pool.lookup(&key(1)).unwrap().is_none());
    // A reader of this process still holds the slab.
    let before = pool.stats();
    drop(found);
    assert_eq!(pool.stats().free, before.free + 1);
}

#[test]
fn a_full_directory_is_an_error_and_the_slab_stays_usable() {
    let region = Region::anonymous(MIB).unwrap();
    let pool = SlabPool::create(region, PoolOptions { entries: 3, ..options(4096) }).unwrap();
    for n in 0..3 {
        pool.publish(&pool.alloc().unwrap().unwrap(), &key(n), 1, 0, None).unwrap();
    }
    let slab = pool.alloc().unwrap().unwrap();
    assert!(matches!(pool.publish(&slab, &key(9), 1, 0, None), Err(CxlError::DirectoryFull { entries: 3 })));
    assert!(pool.withdraw(&key(1)).unwrap());
    pool.publish(&slab, &key(9), 1, 0, None).unwrap();
    for n in [0, 2, 9] {
        assert!(pool.lookup(&key(n)).unwrap().is_some(), "{n}");
    }
}

#[test]
fn another_engine_sees_published_slabs_as_taken() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    let pool = SlabPool::create(region, options(64 << 10)).unwrap();
    let total = pool.slab_count();
    let taken: Vec<u64> = (0..3_u8)
        .map(|n| {
            let slab = pool.alloc().unwrap().unwrap();
            slab.write_at(0, &[n + 1; 64]).unwrap();
            pool.publish(&slab, &key(n.into()), 64, n.into(), None).unwrap();
            slab.index()
        })
        .collect();
    drop(pool);
    let pool = SlabPool::open(map(&path), writable()).unwrap();
    assert_eq!(pool.stats().published, 3);
    let free: Vec<_> = std::iter::from_fn(|| pool.alloc().unwrap()).collect();
    assert_eq!(free.len() as u64, total - 3);
    assert!(free.iter().all(|slab| !taken.contains(&slab.index())));
    // They are readable, and can be withdrawn by the new writer.
    let found = pool.lookup(&key(1)).unwrap().unwrap();
    let mut bytes = [0; 64];
    found.slab().read_at(0, &mut bytes).unwrap();
    assert_eq!((bytes, found.fingerprint()), ([2; 64], 1));
    drop(found);
    assert!(pool.withdraw(&key(1)).unwrap());
    assert_eq!(pool.alloc().unwrap().unwrap().index(), taken[1]);
}

#[test]
fn readers_need_no_lock_and_follow_the_writer() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    let pool = SlabPool::create(region, options(4096)).unwrap();
    let reader = SlabPool::open(map_read_only(&path), OpenOptions::default()).unwrap();
    assert!(reader.lookup(&key(5)).unwrap().is_none());
    pool.publish(&pool.alloc().unwrap().unwrap(), &key(5), 7, 0, None).unwrap();
    let found = reader.lookup(&key(5)).unwrap().unwrap();
    assert!(found.still_valid());
    pool.withdraw(&key(5)).unwrap();
    assert!(!found.still_valid());
    for error in [
        reader.alloc().map(drop).unwrap_err(),
        reader.withdraw(&key(5)).map(drop).unwrap_err(),
        reader.publish(&pool.alloc().unwrap().unwrap(), &key(6), 1, 0, None).map(drop).unwrap_err(),
    ] {
        assert!(matches!(error, CxlError::NotWriter { .. }), "{error}");
    }
}

#[test]
fn a_second_writer_is_refused_and_told_who_holds_the_pool() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    let pool = SlabPool::create(region, options(4096)).unwrap();
    for attempt in [
        SlabPool::open(map(&path), writable()),
        SlabPool::create(map(&path), PoolOptions { force: true, ..options(4096) }),
    ] {
        match attempt.unwrap_err() {
            CxlError::PoolLocked { holder, .. } => assert_eq!(holder, Some(std::process::id())),
            other => panic!("{other}"),
        }
    }
    let error = DaxDevice::create_file(&path, MIB, CreateOptions { replace: true }).unwrap_err();
    assert!(matches!(error, CxlError::PoolLocked { .. }), "{error}");
    drop(pool);
    SlabPool::open(map(&path), writable()).unwrap();
}

#[test]
fn a_slab_in_use_keeps_the_writers_lock() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    let pool = SlabPool::create(region, options(4096)).unwrap();
    let slab = pool.alloc().unwrap().unwrap();
    drop(pool);
    assert!(matches!(SlabPool::open(map(&path), writable()), Err(CxlError::PoolLocked { .. })));
    slab.write_at(0, b"still mine").unwrap();
    drop(slab);
    SlabPool::open(map(&path), writable()).unwrap();
}

#[test]
fn two_pools_of_one_file_have_a_writer_each() {
    let dir = scratch();
    let path = dir.path().join("pool");
    let device = DaxDevice::create_file(&path, 4 * MIB, CreateOptions::default()).unwrap();
    let part = |offset| {
        let options = MapOptions { offset, len: 2 * MIB, ..MapOptions::default() };
        Region::new(Mapping::map(&device, &options).unwrap())
    };
    let first = SlabPool::create(part(0), options(4096)).unwrap();
    let second = SlabPool::create(part(2 * MIB), options(4096)).unwrap();
    assert_eq!(first.info().directory_offset, 4096);
    assert_eq!(second.info().directory_offset, 0, "no device header at an offset");
    assert!(second.info().device_uuid == Uuid::default());
    // A pool across both is refused while they live.
    let error = SlabPool::create(map(&path), PoolOptions { force: true, ..options(4096) }).unwrap_err();
    assert!(matches!(error, CxlError::PoolLocked { .. }), "{error}");
    drop(second);
    assert!(SlabPool::open(part(2 * MIB), writable()).is_ok());
}

#[test]
fn a_left_over_pool_is_never_mistaken_for_fresh_memory() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    let pool = SlabPool::create(region, options(4096)).unwrap();
    pool.publish(&pool.alloc().unwrap().unwrap(), &key(1), 1, 0, None).unwrap();
    let old = pool.info().uuid;
    drop(pool);
    match SlabPool::create(map(&path), options(4096)).unwrap_err() {
        CxlError::PoolExists { uuid, creator_pid, .. } => {
            assert_eq!(uuid, old.to_string());
            assert_eq!(creator_pid, std::process::id());
        }
        other => panic!("{other}"),
    }
    let reader = SlabPool::open(map(&path), OpenOptions::default()).unwrap();
    assert_eq!(reader.creator_liveness(), Liveness::Alive);
    let found = reader.lookup(&key(1)).unwrap().unwrap();
    let new = SlabPool::create(map(&path), PoolOptions { force: true, ..options(4096) }).unwrap();
    assert_ne!(new.info().uuid, old);
    assert!(new.lookup(&key(1)).unwrap().is_none());
    // A reader of the old pool notices, also when the same entry is used again.
    assert!(!found.still_valid());
    new.publish(&new.alloc().unwrap().unwrap(), &key(1), 1, 0, None).unwrap();
    assert!(!found.still_valid());
    assert!(reader.lookup(&key(1)).unwrap().is_none());
}

#[test]
fn foreign_bytes_in_the_header_unit_are_refused_unless_forced() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    region.slab(0, 8).unwrap().write_at(0, b"FAMFSsup").unwrap();
    let error = SlabPool::create(region, options(4096)).unwrap_err();
    assert!(matches!(error, CxlError::ForeignHeader { .. }), "{error}");
    assert!(error.to_string().contains("46414d4653"), "{error}");
    let pool = SlabPool::create(map(&path), PoolOptions { force: true, ..options(4096) }).unwrap();
    assert!(matches!(DeviceHeader::read(pool.region()).unwrap(), HeaderState::Present(_)));
}

#[test]
fn foreign_bytes_where_the_directory_goes_are_refused_unless_forced() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    region.slab(4096, 8).unwrap().write_at(0, b"somebody").unwrap();
    let error = SlabPool::create(region, options(4096)).unwrap_err();
    assert!(matches!(error, CxlError::NotAPool { offset: 4096, .. }), "{error}");
    SlabPool::create(map(&path), PoolOptions { force: true, ..options(4096) }).unwrap();
}

#[test]
fn a_device_header_that_is_there_is_kept() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    let uuid = Uuid::random().unwrap();
    DeviceHeader { version: 1, uuid }.write(&region).unwrap();
    let pool = SlabPool::create(region, options(4096)).unwrap();
    assert_eq!(pool.info().device_uuid, uuid);
    let HeaderState::Present(header) = DeviceHeader::read(&map(&path)).unwrap() else { panic!() };
    assert_eq!(header.uuid, uuid);
}

#[test]
fn an_unknown_header_version_still_yields_its_uuid() {
    let dir = scratch();
    let (_path, region) = new_file_region(&dir, MIB);
    let header = DeviceHeader { version: 7, uuid: Uuid::from_bytes([3; 16]) };
    assert!(header.write(&region).is_err(), "only the known version is ever written");
    region.slab(0, 32).unwrap().write_at(0, &header.to_bytes()).unwrap();
    let pool = SlabPool::create(region.clone(), options(4096)).unwrap();
    assert_eq!(pool.info().device_uuid, header.uuid);
    assert_eq!(DeviceHeader::read(&region).unwrap(), HeaderState::Present(header), "and is not overwritten");
}

#[test]
fn opening_asks_for_a_header_that_belongs_to_the_pool() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    drop(SlabPool::create(region.clone(), options(4096)).unwrap());
    // Labelled anew by a resource manager: the pool is left over.
    DeviceHeader { version: 1, uuid: Uuid::random().unwrap() }.write(&region).unwrap();
    let error = SlabPool::open(map(&path), OpenOptions::default()).unwrap_err();
    assert!(matches!(error, CxlError::NotAPool { .. }), "{error}");
    region.slab(0, 32).unwrap().write_at(0, &[0; 32]).unwrap();
    assert!(SlabPool::open(map(&path), writable()).is_err());
    SlabPool::open(map(&path), OpenOptions { force: true, ..OpenOptions::default() }).unwrap();
}

#[test]
fn a_blank_region_is_not_a_pool() {
    let error = SlabPool::open(Region::anonymous(MIB).unwrap(), writable()).unwrap_err();
    assert_eq!(error.kind(), "not_a_pool", "{error}");
    let error = SlabPool::open(Region::anonymous(100).unwrap(), writable()).unwrap_err();
    assert_eq!(error.kind(), "not_a_pool", "{error}");
}

#[test]
fn a_pool_needs_all_of_the_region_it_was_made_in() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    drop(SlabPool::create(region, options(4096)).unwrap());
    let device = DaxDevice::open(&path).unwrap();
    let half = MapOptions { len: MIB / 2, ..MapOptions::default() };
    let error = SlabPool::open(Region::new(Mapping::map(&device, &half).unwrap()), writable()).unwrap_err();
    assert!(error.to_string().contains("1048576"), "{error}");
}

#[test]
fn a_region_too_small_for_a_slab_is_refused_with_the_size_that_would_do() {
    for slab_bytes in [4096, 1 << 40, u64::MAX, u64::MAX - 4095] {
        let error = SlabPool::create(Region::anonymous(8192).unwrap(), options(slab_bytes)).unwrap_err();
        let CxlError::PoolTooSmall { len: 8192, needed, .. } = error else { panic!("{error}") };
        if slab_bytes == 4096 {
            SlabPool::create(Region::anonymous(needed).unwrap(), options(slab_bytes)).unwrap();
            assert!(SlabPool::create(Region::anonymous(needed - 1).unwrap(), options(slab_bytes)).is_err());
        }
    }
    let many = PoolOptions { entries: u64::MAX / 2, ..options(4096) };
    assert!(SlabPool::create(Region::anonymous(MIB).unwrap(), many).is_err());
    assert_eq!(
        SlabPool::create(Region::anonymous(MIB).unwrap(), options(0)).unwrap_err().kind(),
        "invalid_argument"
    );
}

#[test]
fn the_flush_policy_gives_the_same_results() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    let pool =
        SlabPool::create(region, PoolOptions { coherence: Coherence::Flush, ..options(20_000) }).unwrap();
    let reader =
        SlabPool::open(map(&path), OpenOptions { coherence: Coherence::Flush, ..OpenOptions::default() })
            .unwrap();
    for n in 0..5_u8 {
        let slab = pool.alloc().unwrap().unwrap();
        slab.write_at(0, &vec![n; 20_000]).unwrap();
        pool.publish(&slab, &key(n.into()), 20_000, n.into(), None).unwrap();
        let found = reader.lookup(&key(n.into())).unwrap().unwrap();
        let mut bytes = vec![0xff; 20_000];
        found.slab().read_at(0, &mut bytes).unwrap();
        assert!(found.still_valid());
        assert!(bytes.iter().all(|&byte| byte == n));
    }
    assert!(pool.withdraw(&key(3)).unwrap());
    assert!(reader.lookup(&key(3)).unwrap().is_none());
}

#[test]
fn threads_share_a_pool_without_sharing_slabs() {
    let pool = anonymous_pool(8);
    let total = pool.slab_count();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..500_u64 {
                    let Some(slab) = pool.alloc().unwrap() else { continue };
                    let mark = thread << 32 | round;
                    slab.write_at(0, &mark.to_le_bytes()).unwrap();
                    std::thread::yield_now();
                    let mut bytes = [0; 8];
                    slab.read_at(0, &mut bytes).unwrap();
                    assert_eq!(u64::from_le_bytes(bytes), mark, "two threads had one slab");
                    if round % 3 == 0 {
                        pool.publish(&slab, &key(mark), 8, 0, None).unwrap();
                        let found = pool.lookup(&key(mark)).unwrap().unwrap();
                        assert!(found.still_valid());
                        assert!(pool.withdraw(&key(mark)).unwrap());
                    } else if round % 3 == 1 {
                        pool.free(slab).unwrap();
                    }
                }
            });
        }
    });
    let stats = pool.stats();
    assert_eq!((stats.free, stats.held, stats.published), (total, 0, 0));
}

#[test]
fn pool_and_slabs_may_go_in_any_order() {
    let owner = Arc::new(());
    let watch = Arc::downgrade(&owner);
    let bytes: &'static mut [u64] = vec![0_u64; 4 * 4096].leak();
    let start = std::ptr::NonNull::from(bytes).cast::<u8>();
    // SAFETY: leaked memory lives for ever, and nothing else refers to it.
    let region = unsafe { Region::from_raw_parts(start, 8 * 4 * 4096, Box::new(owner)) }.unwrap();
    let pool = SlabPool::create(region, options(4096)).unwrap();
    let slab = pool.alloc().unwrap().unwrap();
    let published = pool.alloc().unwrap().unwrap();
    pool.publish(&published, &key(1), 1, 0, None).unwrap();
    let found = pool.lookup(&key(1)).unwrap().unwrap();
    drop(published);
    drop(pool);
    assert!(watch.upgrade().is_some());
    slab.write_at(0, b"alive").unwrap();
    assert!(found.still_valid());
    drop(slab);
    assert!(watch.upgrade().is_some());
    drop(found);
    assert!(watch.upgrade().is_none(), "the memory's owner is dropped with the last handle");
}
