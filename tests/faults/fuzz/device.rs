//! The bytes of a pool as a device gives them: header, directory, data.

use std::fs;

use maru::cxl::{
    CreateOptions, DaxDevice, DeviceHeader, MapOptions, Mapping, OpenOptions, PoolOptions, Region, SlabPool,
};
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::common::{accept, edge, scratch, worded};

/// A pool file with two published slabs, as it was made.
pub(crate) struct Bytes {
    dir: tempfile::TempDir,
    image: Vec<u8>,
}

const HEADER: usize = 4096;

/// What is done to the bytes: random ones somewhere, and numbers in the fields; then the checks are made good.
#[derive(Clone, Debug)]
pub(crate) struct Edit {
    pub(crate) numbers: Vec<(usize, u64)>,
    pub(crate) entry_numbers: Vec<(usize, u64)>,
    pub(crate) bytes: Vec<(usize, Vec<u8>)>,
    pub(crate) mend: bool,
    pub(crate) truncate: Option<usize>,
}

/// Edits of a few fields, bytes and lengths.
pub(crate) fn inputs() -> impl Strategy<Value = Edit> {
    let number = || prop_oneof![2 => edge().prop_map(|n| n as u64), 1 => any::<u64>(), 2 => (0u64..20).prop_map(|n| n * 4096)];
    (
        prop::collection::vec((0usize..32, number()), 0..4),
        prop::collection::vec((0usize..32, number()), 0..4),
        prop::collection::vec(
            (prop_oneof![3 => 0usize..9000, 1 => 0usize..65_536], prop::collection::vec(any::<u8>(), 1..40)),
            0..3,
        ),
        prop::bool::weighted(0.8),
        prop::option::weighted(0.1, 0usize..65_536),
    )
        .prop_map(|(numbers, entry_numbers, bytes, mend, truncate)| Edit {
            numbers,
            entry_numbers,
            bytes,
            mend,
            truncate,
        })
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

fn put(image: &mut [u8], at: usize, number: u64) {
    if let Some(place) = image.get_mut(at..at + 8) {
        place.copy_from_slice(&number.to_le_bytes());
    }
}

impl Bytes {
    pub(crate) fn new() -> Self {
        let dir = scratch();
        let path = dir.path().join("pool");
        let device = DaxDevice::create_file(&path, 64 << 10, CreateOptions::default()).unwrap();
        let region = Region::new(Mapping::map(&device, &MapOptions::default()).unwrap());
        let options = PoolOptions { slab_bytes: 8192, entries: 8, ..PoolOptions::default() };
        let pool = SlabPool::create(region, options).unwrap();
        for n in [1u8, 2] {
            let slab = pool.alloc().unwrap().unwrap();
            slab.write_at(0, &[n; 8192]).unwrap();
            pool.publish(&slab, &[n; 32], 8000, 7, None).unwrap();
        }
        drop(pool);
        let image = fs::read(&path).unwrap();
        Bytes { dir, image }
    }

    /// Opens the edited pool, as a reader, a reader by force and a writer.
    pub(crate) fn check(&self, edit: &Edit) -> TestCaseResult {
        let mut image = self.image.clone();
        for (at, bytes) in &edit.bytes {
            let end = (at + bytes.len()).min(image.len());
            image[*at..end].copy_from_slice(&bytes[..end - at]);
        }
        for (field, number) in &edit.numbers {
            put(&mut image, HEADER + field * 8, *number);
        }
        // The entry that was published first, wherever it lies.
        let entries = HEADER + 4096;
        for index in 0..8 {
            let at = entries + index * 128;
            if image[at + 16..at + 48] == [1; 32] {
                for (field, number) in &edit.entry_numbers {
                    put(&mut image, at + field * 8 % 120, *number);
                }
                if edit.mend {
                    let check = fnv1a(&image[at..at + 120]);
                    put(&mut image, at + 120, check);
                }
            }
        }
        if edit.mend {
            let check = fnv1a(&image[HEADER..HEADER + 248]);
            put(&mut image, HEADER + 248, check);
        }
        if let Some(len) = edit.truncate {
            image.truncate(len);
        }
        let path = self.dir.path().join("edited");
        fs::write(&path, &image).unwrap();
        let device = match DaxDevice::open(&path) {
            Ok(device) => device,
            Err(e) => return worded(&e.to_string(), e.kind()),
        };
        let region = match Mapping::map(&device, &MapOptions::default()) {
            Ok(mapping) => Region::new(mapping),
            Err(e) => return worded(&e.to_string(), e.kind()),
        };
        let _ = DeviceHeader::read(&region);
        for (writable, force) in [(false, false), (false, true), (true, true)] {
            let options = OpenOptions { writable, force, ..OpenOptions::default() };
            match SlabPool::open(region.clone(), options) {
                Ok(pool) => looked_at(&pool)?,
                Err(e) => worded(&e.to_string(), e.kind())?,
            }
        }
        Ok(())
    }
}

/// Whatever the directory says, no slab reaches beyond the region, and none that is published is given out.
fn looked_at(pool: &SlabPool) -> TestCaseResult {
    accept();
    let len = pool.region().len();
    let inside = |offset: u64, bytes: u64| offset.checked_add(bytes).is_some_and(|end| end <= len);
    let mut taken = Vec::new();
    for entry in pool.entries().take(1000) {
        if let Ok(Some(found)) = pool.resolve(entry) {
            let slab = found.slab();
            prop_assert!(inside(slab.offset(), slab.len()), "{:?}", entry);
            prop_assert!(slab.offset() >= pool.info().data_offset);
            let mut byte = [0];
            slab.read_at(slab.len() - 1, &mut byte).map_err(|e| TestCaseError::fail(e.to_string()))?;
            taken.push(entry.slab);
        }
    }
    let _ = pool.lookup(&[1; 32]).map_err(|e| e.to_string());
    let _ = pool.directory().get(u64::MAX);
    if pool.is_writable() {
        let mut held = Vec::new();
        while let Ok(Some(slab)) = pool.alloc() {
            prop_assert!(inside(slab.offset(), slab.len()));
            prop_assert!(!taken.contains(&slab.index()), "slab {} is published and given out", slab.index());
            slab.write_at(slab.len() - 1, &[9]).map_err(|e| TestCaseError::fail(e.to_string()))?;
            held.push(slab);
            prop_assert!(held.len() <= 64);
        }
        if let Some(slab) = held.first() {
            let _ = pool.publish(slab, &[3; 32], 1, 0, None).map_err(|e| e.to_string());
        }
    }
    Ok(())
}
