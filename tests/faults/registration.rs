//! Kind: host memory that the driver takes in part, elsewhere, or not at all (C07, C15, C20). The driver's side
//! of it is tested call by call in `crates/maru-cxl/tests/registration.rs` and on the simulated driver.

use std::sync::Arc;

use maru::cxl::{Call, CudaRegistrar, Region, RegisterOptions, RegistrationState, ScriptedRegistrar, Slab};
use maru::transfer::config::PoolConfig;
use maru::{Config, Direction, SlotMapping, TransferError, TransferRequest};
use maru_sim_driver::Session;

use crate::harness::Test;
use crate::rig::{MOVERS, Random, Rig, View, read, slots};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        plain:
            c07_a_refused_piece_gives_the_others_back,
            c07_pieces_of_any_size_end_on_slab_borders,
            c15_the_device_address_is_never_the_hosts,
            c20_a_refusal_says_what_and_why;
        on_device:
            c07_slabs_of_a_registered_pool_all_move;
        simulated:
            c07_after_a_refusal_the_next_launch_succeeds,
            c15_kernel_and_copies_reach_memory_at_another_address,
            c15_without_a_device_address_no_kernel_is_launched,
            c20_unregistered_memory_is_copied_and_said_to_be;
    ]
}

const MIB: u64 = 1 << 20;

fn required(piece_limit: u64, slab_stride: u64) -> RegisterOptions {
    RegisterOptions { piece_limit, slab_stride, data_offset: 0, required: true }
}

fn address(region: &Region) -> u64 {
    region.base().addr().get() as u64
}

fn c07_a_refused_piece_gives_the_others_back() {
    for (fails, undone) in [(1, vec![]), (2, vec![0]), (3, vec![3, 0]), (4, vec![6, 3, 0])] {
        let region = Region::anonymous(10 * MIB).unwrap();
        let driver = Arc::new(ScriptedRegistrar::new().failing_at(fails));
        let error = region.register(driver.clone(), required(4 * MIB, 3 * MIB)).unwrap_err();
        assert_eq!(error.kind(), "registration");
        let base = address(&region);
        let text = error.to_string();
        let at = format!("{:#x}", base + (fails as u64 - 1) * 3 * MIB);
        for part in ["code 1", &at, &format!("piece {fails} of 4"), "anonymous memory"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
        let calls: Vec<Call> = driver.calls().into_iter().skip(fails).collect();
        let undone: Vec<Call> = undone.into_iter().map(|at| Call::Unregister(base + at * MIB)).collect();
        assert_eq!(calls, undone);
        assert!(driver.registered().is_empty() && !region.is_registered());
    }
}

fn c07_pieces_of_any_size_end_on_slab_borders() {
    for (len, limit, stride) in [
        (10 * MIB, 4 * MIB, 3 * MIB),
        (10 * MIB, 10 * MIB, 3 * MIB),
        (10 * MIB, 3 * MIB, 3 * MIB),
        (64 * 4096, 7 * 4096, 4096),
        (64 * 4096, 7 * 4096, 2 * 4096),
        (4096, 4096, 4096),
    ] {
        let region = Region::anonymous(len).unwrap();
        let driver = Arc::new(ScriptedRegistrar::new());
        region.register(driver.clone(), required(limit, stride)).unwrap();
        let pieces = driver.registered();
        assert_eq!(pieces.iter().map(|p| p.1).sum::<u64>(), len);
        assert!(pieces.iter().all(|p| p.1 <= limit && (p.0 - address(&region)).is_multiple_of(stride)));
        for i in 0..len / stride {
            assert!(region.slab(i * stride, stride).unwrap().device_addr().is_some(), "slab {i}");
        }
    }
    // A slab larger than a piece may be, and limits that no driver takes.
    let region = Region::anonymous(10 * MIB).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new());
    for (limit, stride) in [(2 * MIB, 3 * MIB), (1, 0), (1 << 39, 0), (u64::MAX, 0), (4 * MIB, 1000)] {
        let error = region.register(driver.clone(), required(limit, stride)).unwrap_err();
        assert_eq!(error.kind(), "invalid_argument", "{limit} {stride}: {error}");
    }
    assert!(driver.calls().is_empty());
}

fn c15_the_device_address_is_never_the_hosts() {
    let region = Region::anonymous(MIB).unwrap();
    let driver = Arc::new(ScriptedRegistrar::new().with_device_shift(Some(1 << 40)));
    region.register(driver.clone(), required(MIB, 0)).unwrap();
    let slab = region.slab(4096, 4096).unwrap();
    assert_eq!(slab.device_addr(), Some(address(&region) + 4096 + (1 << 40)));
    assert!(region.unregister());
    assert_eq!(driver.calls().last(), Some(&Call::Unregister(address(&region))));
    // No address, and one that would wrap.
    for shift in [None, Some(u64::MAX)] {
        let region = Region::anonymous(MIB).unwrap();
        region
            .register(Arc::new(ScriptedRegistrar::new().with_device_shift(shift)), required(MIB, 0))
            .unwrap();
        let slab = region.slab(0, MIB).unwrap();
        assert!(slab.is_registered());
        assert_eq!(slab.device_addr(), None);
    }
}

fn c20_a_refusal_says_what_and_why() {
    let region = Region::anonymous(MIB).unwrap();
    let driver = || Arc::new(ScriptedRegistrar::new().failing_at(1));
    let text = region.register(driver(), required(MIB, 0)).unwrap_err().to_string();
    for part in ["code 1", "1048576", "anonymous memory", &format!("{:#x}", address(&region)), "devdax"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    let out_of_memory = Arc::new(ScriptedRegistrar::new().failing_from_len(4096));
    let text = region.register(out_of_memory, required(MIB, 0)).unwrap_err().to_string();
    assert!(text.contains("ulimit -l"), "{text}");
    // Allowed to fail: the state says so.
    let outcome = region.register(driver(), RegisterOptions::default()).unwrap();
    assert!(!outcome.is_registered());
    assert!(matches!(region.registration(), RegistrationState::Failed { .. }));
    assert_eq!(region.slab(0, 1).unwrap().device_addr(), None);
    for len in [0, u64::MAX, 1 << 63] {
        assert_eq!(Region::anonymous(len).unwrap_err().kind(), "invalid_argument");
    }
}

/// The real run of C07: pieces of at most 4 MiB, slabs of 3 MiB, each moved both ways by every mover.
fn c07_slabs_of_a_registered_pool_all_move(on: &Rig) {
    let mover = on.mover;
    let mut config = Config::from_toml_str(mover.config, "x").unwrap();
    config.cxl.register_piece = 4 * MIB;
    config.cxl.require_registration = true;
    let rig = Rig::with(&config, mover, None);
    // A slab of 3 MiB is 96 tokens of 32 KiB.
    let cache = rig.cache(&View::new(&[12, 2, 16, 4, 2048], "block,kv,token,head,dim"));
    assert_eq!(cache.slab_bytes(96), 3 * MIB);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut pool = PoolConfig::new(dir.path().join("pool"));
    pool.size = 10 * MIB;
    let slabs = rig.engine.create_pool(&pool, 3 * MIB, false).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| slabs.alloc().unwrap()).collect();
    assert_eq!(all.len(), 3);
    let order = Random(23).shuffled(192);
    for (i, slab) in all.iter().enumerate() {
        assert!(slab.device_addr().is_some());
        let list = || SlotMapping::from_slots(&order[i * 48..i * 48 + 96]);
        let content = Random(29 + i as u64).bytes(3 * MIB as usize);
        slab.write_at(0, &content).unwrap();
        for direction in [Direction::Scatter, Direction::Gather] {
            let request = match direction {
                Direction::Gather => TransferRequest::gather(&cache.registered, list(), slab),
                _ => TransferRequest::scatter(&cache.registered, list(), slab),
            };
            let transfer = rig.engine.submit(&request.slab_tokens(96)).unwrap();
            assert_eq!((transfer.backend(), transfer.strategy()), (mover.backend, mover.strategy));
            transfer.wait().unwrap();
            if direction == Direction::Scatter {
                slab.write_at(0, &vec![0; 3 * MIB as usize]).unwrap();
            }
        }
        assert!(read(slab) == content, "slab {i} by {}", mover.name);
    }
}

fn c07_after_a_refusal_the_next_launch_succeeds(session: &Session) {
    for mover in MOVERS.iter().filter(|m| m.device) {
        let rig = Rig::open(mover, None);
        let cache = rig.cache(&View::new(&[4, 2, 16, 2, 8], "block,kv,token,head,dim"));
        let before = session.census();
        for (call, code) in [("cuMemHostRegister", 1), ("cuMemHostRegister", 2), ("cuMemHostRegister", 801)] {
            session.fail(call, 1, code);
            let region = Region::anonymous(MIB).unwrap();
            let registrar = Arc::new(CudaRegistrar::open(0).unwrap());
            region.register(registrar, required(MIB, 0)).unwrap_err();
            assert_eq!(session.faults_left(), 0);
            cache.exact(&slots(&[1, 2, 63]));
        }
        assert_eq!(session.census().registrations, before.registrations);
    }
}

fn c15_kernel_and_copies_reach_memory_at_another_address(session: &Session) {
    session.set("shift", 1);
    for mover in MOVERS.iter().filter(|m| m.device) {
        let rig = Rig::open(mover, None);
        let cache = rig.cache(&View::new(&[4, 2, 16, 2, 8], "block,kv,token,head,dim"));
        let slab = rig.slab(&[0; 64]);
        assert_ne!(slab.device_addr(), Some(slab.addr().addr().get() as u64));
        cache.exact(&slots(&[60, 3, -1, 17]));
        cache.exact(&slots(&(0..64).collect::<Vec<_>>()));
    }
}

/// Registered, but the device has no address for it: copies go on, the kernel is told by name.
fn c15_without_a_device_address_no_kernel_is_launched(session: &Session) {
    for (backend, expected) in [("native", None), ("auto", Some("fallback")), ("fallback", Some("fallback"))]
    {
        let text = format!("[transfer]\ndevice = \"cuda:0\"\nbackend = \"{backend}\"");
        let rig = Rig::with(&Config::from_toml_str(&text, "x").unwrap(), &MOVERS[1], None);
        let cache = rig.cache(&View::new(&[4, 2, 16, 2, 8], "block,kv,token,head,dim"));
        session.fail_from("cuMemHostGetDevicePointer", 1, 801);
        let slab = rig.slab(&vec![3; cache.slab_bytes(2) as usize]);
        session.clear_faults();
        assert!(slab.is_registered() && slab.device_addr().is_none());
        moves_or_not(session, &rig, &cache, &slab, expected);
    }
}

fn c20_unregistered_memory_is_copied_and_said_to_be(session: &Session) {
    for (backend, expected) in [("native", None), ("auto", Some("fallback")), ("fallback", Some("fallback"))]
    {
        let text = format!("[transfer]\ndevice = \"cuda:0\"\nbackend = \"{backend}\"");
        let rig = Rig::with(&Config::from_toml_str(&text, "x").unwrap(), &MOVERS[1], None);
        let cache = rig.cache(&View::new(&[4, 2, 16, 2, 8], "block,kv,token,head,dim"));
        let len = cache.slab_bytes(2);
        let region = Region::anonymous(len).unwrap();
        session.fail("cuMemHostRegister", 1, 1);
        let registrar = Arc::new(CudaRegistrar::open(0).unwrap());
        let outcome = region.register(registrar, RegisterOptions::default()).unwrap();
        assert!(!outcome.is_registered());
        let slab = region.slab(0, len).unwrap();
        slab.write_at(0, &vec![3; len as usize]).unwrap();
        moves_or_not(session, &rig, &cache, &slab, expected);
    }
}

/// Both directions: by the mover expected and without a kernel, or an error and not a byte.
fn moves_or_not(
    session: &Session,
    rig: &Rig,
    cache: &crate::rig::Cache<'_>,
    slab: &Slab,
    expected: Option<&str>,
) {
    let mapping = || SlotMapping::from_slots([9, 33]);
    let before = cache.bytes();
    session.clear_records();
    for direction in [Direction::Scatter, Direction::Gather] {
        let request = match direction {
            Direction::Gather => TransferRequest::gather(&cache.registered, mapping(), slab),
            _ => TransferRequest::scatter(&cache.registered, mapping(), slab),
        };
        match (rig.engine.submit(&request.slab_tokens(2)), expected) {
            (Ok(transfer), Some(backend)) => {
                assert_eq!(transfer.backend(), backend);
                transfer.wait().unwrap();
            }
            (Err(error), None) => {
                assert_eq!(error.kind(), "not_available", "{error}");
                assert!(matches!(error, TransferError::NotAvailable { .. }));
                assert!(error.to_string().contains("not registered"), "{error}");
            }
            (other, _) => panic!("{other:?}"),
        }
    }
    let kernels = session.records().iter().filter(|r| r.kind == maru_sim_driver::CopyKind::Kernel).count();
    assert_eq!(kernels, 0, "a kernel was launched on memory it may not touch");
    assert_eq!(cache.bytes() == before, expected.is_none());
    assert!(read(slab).iter().all(|b| *b == 3));
}
