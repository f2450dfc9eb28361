//! Regular files standing in for a device: creating, opening, mapping.

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use common::{map, new_file_region, options, scratch};
use maru_cxl::{
    CreateOptions, CxlError, DaxDevice, DeviceKind, MapOptions, Mapping, PoolExtent, Region, SlabPool,
    check_pool_overlaps,
};

const MIB: u64 = 1 << 20;

fn create(path: &std::path::Path, len: u64) -> Result<DaxDevice, CxlError> {
    DaxDevice::create_file(path, len, CreateOptions::default())
}

#[test]
fn a_created_file_is_private_and_fully_allocated() {
    let dir = scratch();
    let path = dir.path().join("pool");
    let device = create(&path, 4 * MIB).unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o7777, 0o600);
    assert_eq!(metadata.len(), 4 * MIB);
    assert!(metadata.blocks() * 512 >= 4 * MIB, "the space is not reserved");
    assert_eq!((device.kind(), device.len(), device.align()), (DeviceKind::File, 4 * MIB, 4096));
    assert_eq!(device.path(), path);
}

#[test]
fn an_existing_file_is_not_touched() {
    let dir = scratch();
    let path = dir.path().join("pool");
    fs::write(&path, b"precious").unwrap();
    let error = create(&path, MIB).unwrap_err();
    assert!(matches!(error, CxlError::FileExists { .. }), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"precious");
}

#[test]
fn replace_makes_a_new_file() {
    let dir = scratch();
    let path = dir.path().join("pool");
    fs::write(&path, b"old").unwrap();
    let before = fs::metadata(&path).unwrap().ino();
    let device = DaxDevice::create_file(&path, MIB, CreateOptions { replace: true }).unwrap();
    assert_eq!(device.len(), MIB);
    assert!(fs::read(&path).unwrap().iter().all(|&byte| byte == 0));
    // tmpfs may reuse the number at once only if the old file is gone, which is as good.
    let _ = before;
}

#[test]
fn a_symbolic_link_is_followed_by_neither_create_nor_replace_nor_open() {
    let dir = scratch();
    let (target, link) = (dir.path().join("target"), dir.path().join("link"));
    fs::write(&target, vec![7; 8192]).unwrap();
    symlink(&target, &link).unwrap();
    assert!(create(&link, MIB).is_err());
    let error = DaxDevice::create_file(&link, MIB, CreateOptions { replace: true }).unwrap_err();
    assert!(matches!(error, CxlError::WrongFileType { found: "a symbolic link", .. }), "{error}");
    let error = DaxDevice::open(&link).unwrap_err();
    assert!(matches!(error, CxlError::WrongFileType { found: "a symbolic link", .. }), "{error}");
    assert_eq!(fs::read(&target).unwrap(), vec![7; 8192]);
}

#[test]
fn a_dangling_link_does_not_become_a_file() {
    let dir = scratch();
    let (target, link) = (dir.path().join("target"), dir.path().join("link"));
    symlink(&target, &link).unwrap();
    assert!(create(&link, MIB).is_err());
    assert!(!target.exists());
}

/// Case C22: a directory as path.
#[test]
fn c22_a_directory_is_refused_by_name() {
    let dir = scratch();
    let error = DaxDevice::open(dir.path()).unwrap_err();
    assert!(error.to_string().contains("a directory"), "{error}");
    let error = DaxDevice::create_file(dir.path(), MIB, CreateOptions { replace: true }).unwrap_err();
    assert!(error.to_string().contains("a directory"), "{error}");
}

#[test]
fn what_is_neither_file_nor_dax_device_is_refused() {
    for path in ["/dev/null", "/dev/zero"] {
        let error = DaxDevice::open(path).unwrap_err();
        assert!(matches!(error, CxlError::WrongFileType { .. }), "{error}");
    }
}

#[test]
fn a_missing_path_is_not_found() {
    let error = DaxDevice::open("/dev/shm/there-is-no-such-pool").unwrap_err();
    assert_eq!(error.kind(), "not_found");
    assert_eq!(create("/there-is-no-such-directory/pool".as_ref(), MIB).unwrap_err().kind(), "not_found");
}

#[test]
fn more_than_the_file_system_has_is_an_error_with_numbers_and_leaves_nothing() {
    let dir = scratch();
    let path = dir.path().join("pool");
    let wanted = 1 << 50;
    match create(&path, wanted).unwrap_err() {
        CxlError::NoSpace { wanted: said, free, .. } => {
            assert_eq!(said, wanted);
            assert!(free > 0 && free < wanted);
        }
        other => panic!("{other}"),
    }
    assert!(!path.exists());
}

#[test]
fn impossible_lengths_are_refused() {
    let dir = scratch();
    let path = dir.path().join("pool");
    for len in [0, u64::MAX, 1 << 63] {
        assert_eq!(create(&path, len).unwrap_err().kind(), "invalid_argument");
    }
}

#[test]
fn a_length_that_could_not_be_mapped_whole_is_refused_and_leaves_nothing() {
    let dir = scratch();
    let path = dir.path().join("pool");
    for (len, next) in [(1, 4096), (100, 4096), (4095, 4096), (4097, 8192), (MIB + 1, MIB + 4096)] {
        let error = create(&path, len).unwrap_err();
        assert_eq!(error.kind(), "invalid_argument", "{error}");
        let text = error.to_string();
        assert!(text.contains(&len.to_string()) && text.contains("4096"), "{text}");
        assert!(text.contains(&next.to_string()), "{text}");
        assert!(!path.exists(), "{len}");
    }
    // Neither is a file that is there taken away for one that cannot be.
    fs::write(&path, "old").unwrap();
    DaxDevice::create_file(&path, 5000, CreateOptions { replace: true }).unwrap_err();
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn a_window_that_does_not_fit_is_named_as_it_was_asked_for() {
    let dir = scratch();
    let device = create(&dir.path().join("pool"), MIB).unwrap();
    let wanted = MIB + 1;
    let error = Mapping::map(&device, &MapOptions { len: wanted, ..MapOptions::default() }).unwrap_err();
    assert!(matches!(error, CxlError::OutOfBounds { len, .. } if len == wanted), "{error}");
}

#[test]
fn opening_a_sparse_file_reserves_its_space() {
    let dir = scratch();
    let path = dir.path().join("pool");
    fs::File::create(&path).unwrap().set_len(8 * MIB).unwrap();
    assert!(fs::metadata(&path).unwrap().blocks() * 512 < 8 * MIB);
    DaxDevice::open(&path).unwrap();
    assert!(fs::metadata(&path).unwrap().blocks() * 512 >= 8 * MIB);
}

#[test]
fn a_sparse_file_larger_than_the_file_system_is_no_space() {
    let dir = scratch();
    let path = dir.path().join("pool");
    fs::File::create(&path).unwrap().set_len(1 << 42).unwrap();
    let error = DaxDevice::open(&path).unwrap_err();
    assert_eq!(error.kind(), "no_space", "{error}");
}

#[test]
fn files_map_in_pages_and_the_rounded_length_is_reported() {
    let dir = scratch();
    let device = create(&dir.path().join("pool"), MIB).unwrap();
    let mapping =
        Mapping::map(&device, &MapOptions { offset: 4096, len: 5000, ..MapOptions::default() }).unwrap();
    assert_eq!((mapping.offset(), mapping.len()), (4096, 8192));
    assert_eq!(mapping.base().addr().get() % 4096, 0);
}

#[test]
fn ranges_outside_the_file_are_refused_by_us() {
    let dir = scratch();
    let device = create(&dir.path().join("pool"), MIB).unwrap();
    let map = |offset, len| Mapping::map(&device, &MapOptions { offset, len, ..MapOptions::default() });
    assert!(matches!(map(100, 4096), Err(CxlError::Misaligned { value: 100, align: 4096, .. })));
    for (offset, len) in [(MIB, 0), (0, MIB + 1), (MIB - 4096, 8192), (u64::MAX - 4095, 4096), (0, u64::MAX)]
    {
        assert!(matches!(map(offset, len), Err(CxlError::OutOfBounds { size: MIB, .. })), "{offset} {len}");
    }
}

#[test]
fn a_file_that_ends_in_part_of_a_page_is_mapped_without_that_part() {
    let dir = scratch();
    let path = dir.path().join("pool");
    fs::write(&path, vec![1; 10_000]).unwrap();
    let device = DaxDevice::open(&path).unwrap();
    assert_eq!(Mapping::map(&device, &MapOptions::default()).unwrap().len(), 8192);
}

#[test]
fn two_mappings_see_each_others_stores() {
    let dir = scratch();
    let (path, first) = new_file_region(&dir, MIB);
    let second = map(&path);
    first.slab(70_000, 5).unwrap().write_at(0, b"there").unwrap();
    let mut bytes = [0; 5];
    second.slab(70_000, 5).unwrap().read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"there");
}

#[test]
fn a_read_only_mapping_refuses_writes_and_pools() {
    let dir = scratch();
    let (path, _first) = new_file_region(&dir, MIB);
    let region = common::map_read_only(&path);
    let slab = region.slab(0, 16).unwrap();
    assert!(matches!(slab.write_at(0, b"x"), Err(CxlError::ReadOnly { .. })));
    let error = SlabPool::create(region, options(4096)).unwrap_err();
    assert!(matches!(error, CxlError::ReadOnly { .. }), "{error}");
}

#[test]
fn prefault_reports_progress_to_the_end() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    let dir = scratch();
    let device = create(&dir.path().join("pool"), 160 * MIB).unwrap();
    let most = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&most);
    let options = MapOptions {
        prefault_threads: 2,
        progress: Some(Arc::new(move |done, total| {
            assert!(done <= total && total == 160 * MIB);
            seen.fetch_max(done, Ordering::Relaxed);
        })),
        ..MapOptions::default()
    };
    Mapping::map(&device, &options).unwrap();
    assert_eq!(most.load(Ordering::Relaxed), 160 * MIB);
}

#[test]
fn a_file_truncated_before_mapping_is_a_memory_fault_not_a_signal() {
    let dir = scratch();
    let path = dir.path().join("pool");
    let device = create(&path, MIB).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    match Mapping::map(&device, &MapOptions::default()).unwrap_err() {
        CxlError::MemoryFault { hint, .. } => assert!(hint.contains("truncated")),
        other => panic!("{other}"),
    }
}

#[test]
fn probing_finds_a_file_truncated_under_a_mapping() {
    let dir = scratch();
    let (path, region) = new_file_region(&dir, MIB);
    let (first, last) = (region.slab(0, 4096).unwrap(), region.slab(MIB - 4096, 4096).unwrap());
    last.probe().unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    first.probe().unwrap();
    assert_eq!(last.probe().unwrap_err().kind(), "memory_fault");
    // Opening a pool in it is an error too, although the directory's pages may be gone.
    assert!(SlabPool::open(region, common::writable()).is_err());
}

#[test]
fn remove_file_spares_a_successor_of_the_same_name() {
    let dir = scratch();
    let path = dir.path().join("pool");
    let device = create(&path, MIB).unwrap();
    fs::rename(&path, dir.path().join("moved")).unwrap();
    fs::write(&path, b"another").unwrap();
    device.remove_file().unwrap();
    assert!(path.exists());
    let other = DaxDevice::open(dir.path().join("moved")).unwrap();
    other.remove_file().unwrap();
    assert!(!dir.path().join("moved").exists());
    other.remove_file().unwrap();
}

/// Case C14: two pools of one configuration on the same bytes.
#[test]
fn c14_overlapping_pools_are_refused_whatever_path_names_them() {
    let dir = scratch();
    let path = dir.path().join("pool");
    let device = create(&path, 16 * MIB).unwrap();
    fs::hard_link(&path, dir.path().join("other-name")).unwrap();
    let other = DaxDevice::open(dir.path().join("other-name")).unwrap();
    let extent = |device: &DaxDevice, offset, len| PoolExtent {
        id: device.id(),
        path: device.path().to_owned(),
        offset: offset * MIB,
        len: len * MIB,
    };
    let error = check_pool_overlaps(&[extent(&device, 0, 8), extent(&other, 4, 8)]).unwrap_err();
    assert!(
        matches!(error, CxlError::Overlap { first_offset: 0, second_offset, .. } if second_offset == 4 * MIB)
    );
    check_pool_overlaps(&[extent(&device, 0, 8), extent(&other, 8, 8)]).unwrap();
}

#[test]
fn slabs_of_a_region_are_bounds_checked() {
    let region = Region::anonymous(10_000).unwrap();
    assert_eq!(region.slab(9_000, 1_000).unwrap().len(), 1_000);
    for (offset, len) in [(9_000, 1_001), (10_001, 0), (u64::MAX, 2), (2, u64::MAX)] {
        assert!(matches!(region.slab(offset, len), Err(CxlError::OutOfBounds { size: 10_000, .. })));
    }
    let slab = region.slab(100, 50).unwrap();
    assert!(slab.write_at(49, b"xy").is_err());
    assert!(slab.read_at(u64::MAX, &mut [0; 2]).is_err());
    assert!(slab.span(50, 1).is_err());
    slab.span(10, 5).unwrap().write_at(0, b"12345").unwrap();
    let mut bytes = [0; 5];
    region.slab(110, 5).unwrap().read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"12345");
}

#[test]
fn anonymous_regions_of_impossible_length_are_refused() {
    assert_eq!(Region::anonymous(0).unwrap_err().kind(), "invalid_argument");
    assert_eq!(Region::anonymous(u64::MAX).unwrap_err().kind(), "invalid_argument");
    assert_eq!(Region::anonymous(1 << 62).unwrap_err().kind(), "io");
}
