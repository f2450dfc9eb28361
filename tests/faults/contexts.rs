//! Kind: several devices, contexts and threads in one process (C17).

use std::ptr;

use cudarc::driver::sys;
use maru::{
    CacheTensor, Config, DType, PagedCache, Place, SlotMapping, Stream, TensorDesc, Tensors, TransferEngine,
    TransferError, TransferRequest,
};

use crate::harness::Test;
use crate::memory::{self, Arena};
use crate::rig::{MOVERS, Mover, Random, Rig, View, block_size, read, slots};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        two_devices:
            c17_two_devices_alternate_in_one_thread,
            c17_two_ranks_register_the_same_layers,
            c17_a_slab_registered_with_the_other_device,
            c17_a_stream_of_another_device_is_an_error;
        on_device:
            c17_a_thread_without_a_context,
            c17_the_current_context_is_what_it_was;
        plain:
            c17_a_cache_belongs_to_its_engine;
    ]
}

fn current() -> usize {
    let mut context = ptr::null_mut();
    // SAFETY: the out pointer is valid.
    let code = unsafe { sys::cuCtxGetCurrent(&mut context) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    context.addr()
}

fn unbind() {
    // SAFETY: null takes the current context away.
    let code = unsafe { sys::cuCtxSetCurrent(ptr::null_mut()) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// A mover's engine on a device of its own.
fn on(mover: &'static Mover, device: u32) -> Rig {
    let config = mover.config.replace("cuda:0", &format!("cuda:{device}"));
    Rig::with(&Config::from_toml_str(&config, mover.name).unwrap(), mover, None)
}

fn device_movers() -> impl Iterator<Item = &'static Mover> {
    MOVERS.iter().filter(|m| m.device)
}

const SHAPE: [i64; 5] = [4, 2, 16, 2, 8];
const AXES: &str = "block,kv,token,head,dim";

fn c17_two_devices_alternate_in_one_thread() {
    for mover in device_movers() {
        let rigs = [on(mover, 0), on(mover, 1)];
        let caches = rigs.each_ref().map(|rig| rig.cache(&View::new(&SHAPE, AXES)));
        for i in 0..10 {
            // The other device is current.
            rigs[(i + 1) % 2].context.as_ref().unwrap().bind_to_thread().unwrap();
            caches[i % 2].exact(&slots(&[63, i as i64, 17]));
        }
    }
}

/// Every rank has a `layer_0`; nothing here is known by a name.
fn c17_two_ranks_register_the_same_layers() {
    for mover in device_movers() {
        let rigs = [on(mover, 0), on(mover, 1), on(mover, 0)];
        for rig in &rigs {
            rig.cache(&View::new(&SHAPE, AXES)).exact(&slots(&[1, 2]));
        }
        // A cache of the other device is refused.
        let error = foreign_place(&rigs[1].engine, Place::Cuda(0));
        assert!(matches!(error, TransferError::WrongPlace { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("cuda:0") && text.contains("cuda:1"), "{text}");
    }
}

/// Memory is registered once, for every device; the engine of another one takes it as its own.
fn c17_a_slab_registered_with_the_other_device() {
    for mover in device_movers() {
        let rigs = [on(mover, 0), on(mover, 1)];
        for (mine, other) in [(0, 1), (1, 0)] {
            let cache = rigs[mine].cache(&View::new(&SHAPE, AXES));
            let content = Random(mine as u64 + 3).bytes(cache.slab_bytes(3) as usize);
            let (full, empty) = (rigs[other].slab(&content), rigs[other].slab(&vec![0; content.len()]));
            let mapping = || SlotMapping::from_slots([9, 63, 2]);
            let load = TransferRequest::scatter(&cache.registered, mapping(), &full).slab_tokens(3);
            let store = TransferRequest::gather(&cache.registered, mapping(), &empty).slab_tokens(3);
            for request in [load, store] {
                let transfer = rigs[mine].engine.submit(&request).unwrap();
                assert_eq!((transfer.backend(), transfer.strategy()), (mover.backend, mover.strategy));
                transfer.wait().unwrap();
            }
            assert!(read(&empty) == content, "{} on device {mine}", mover.name);
        }
    }
}

fn foreign_place(engine: &TransferEngine, place: Place) -> TransferError {
    let desc = TensorDesc::contiguous(&SHAPE, DType::Bf16).unwrap();
    let tensor = CacheTensor { addr: 1 << 40, len: desc.span_bytes(), desc };
    // SAFETY: nothing is transferred.
    let cache = unsafe { PagedCache::new(&Tensors::PerLayer(vec![tensor]), &block_size(16), place, None) };
    engine.register(cache.unwrap()).unwrap_err()
}

fn c17_a_cache_belongs_to_its_engine() {
    let rigs = [0, 1].map(|_| Rig::open(&MOVERS[0], None));
    let caches = rigs.each_ref().map(|rig| rig.cache(&View::new(&SHAPE, AXES)));
    let slab = rigs[0].slab(&[0; 1024]);
    let request = |i: usize| {
        TransferRequest::gather(&caches[i].registered, SlotMapping::from_slots([0]), &slab).slab_tokens(1)
    };
    let error = rigs[0].engine.submit(&request(1)).unwrap_err();
    assert!(matches!(error, TransferError::ForeignCache), "{error}");
    let second = rigs[0].cache(&View::new(&SHAPE, AXES));
    let other =
        TransferRequest::gather(&second.registered, SlotMapping::from_slots([0]), &slab).slab_tokens(1);
    let error = rigs[0].engine.submit_many(&[request(0), other]).unwrap_err();
    assert!(matches!(error, TransferError::MixedBatch { index: 1 }), "{error}");
    for place in [Place::Cuda(0), Place::Cuda(u32::MAX)] {
        let error = foreign_place(&rigs[0].engine, place);
        assert!(error.to_string().contains("host"), "{error}");
    }
    // A slab inside the cache it is to be filled from.
    let Arena::Host(memory) = &caches[0].arena else { panic!("a host cache") };
    for at in [0, 64, 4000] {
        let inside = memory.span(at, 96).unwrap();
        let request = TransferRequest::gather(&caches[0].registered, SlotMapping::from_slots([0]), &inside);
        let error = rigs[0].engine.submit(&request.slab_tokens(1)).unwrap_err();
        assert!(matches!(error, TransferError::SlabInCache { .. }), "{error}");
    }
}

fn c17_a_thread_without_a_context(rig: &Rig) {
    let cache = rig.cache(&View::new(&SHAPE, AXES));
    let slab = rig.slab(&vec![5; cache.slab_bytes(3) as usize]);
    let mapping = SlotMapping::from_slots([3, 9, 60]);
    let load = TransferRequest::scatter(&cache.registered, mapping, &slab).slab_tokens(3);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            unbind();
            let mut transfer = rig.engine.submit(&load).unwrap();
            while !transfer.is_done().unwrap() {
                std::thread::yield_now();
            }
            assert_eq!(current(), 0, "submit and is_done leave no context");
            transfer.wait().unwrap();
            drop(rig.engine.submit(&load).unwrap());
            assert_eq!(current(), 0, "wait and drop leave no context");
        });
    });
    let row = cache.reference.row_bytes() as usize;
    for slot in [3, 9, 60] {
        let at = cache.reference.paged_offset(1, 0, slot, 0) as usize;
        assert_eq!(cache.bytes()[at..at + row], vec![5; row]);
    }
}

/// Nothing current, then another context current: both are so after every call.
fn c17_the_current_context_is_what_it_was(rig: &Rig) {
    let config = Config::from_toml_str(rig.mover.config, "x").unwrap();
    let own = rig.context.as_ref().unwrap();
    for bound in [false, true] {
        let set = || match bound {
            true => own.bind_to_thread().unwrap(),
            false => unbind(),
        };
        set();
        let before = current();
        let engine = TransferEngine::open(&config).unwrap();
        assert_eq!(current(), before, "open");
        let desc = TensorDesc::contiguous(&SHAPE, DType::Bf16).unwrap();
        let arena = Arena::new(Some(own), &vec![1; desc.span_bytes() as usize]).unwrap();
        let slab = memory::slab(Some(own), &[0; 4096]).unwrap();
        let tensor = CacheTensor { addr: arena.addr(), len: desc.span_bytes(), desc };
        set();
        // SAFETY: the memory outlives the cache.
        let cache = unsafe {
            PagedCache::new(&Tensors::PerLayer(vec![tensor]), &block_size(16), engine.place(), None)
        };
        let cache = engine.register(cache.unwrap()).unwrap();
        assert_eq!(current(), before, "register");
        let request =
            |n| TransferRequest::gather(&cache, SlotMapping::from_slots(vec![n]), &slab).slab_tokens(1);
        engine.submit(&request(64)).unwrap_err();
        assert_eq!(current(), before, "a refused submit");
        let mut transfer = engine.submit(&request(3)).unwrap();
        assert_eq!(current(), before, "submit");
        transfer.is_done().unwrap();
        assert_eq!(current(), before, "is_done");
        transfer.order_before(Stream::none()).unwrap();
        assert_eq!(current(), before, "order_before");
        transfer.wait().unwrap();
        assert_eq!(current(), before, "wait");
        drop((request(3), cache));
        assert_eq!(current(), before, "drop of the cache");
        drop(engine);
        assert_eq!(current(), before, "drop of the engine");
    }
}

fn c17_a_stream_of_another_device_is_an_error() {
    for mover in device_movers() {
        let (rig, other) = (on(mover, 0), on(mover, 1));
        let cache = rig.cache(&View::new(&SHAPE, AXES));
        let slab = rig.slab(&vec![5; cache.slab_bytes(1) as usize]);
        other.context.as_ref().unwrap().bind_to_thread().unwrap();
        let mut stream = ptr::null_mut();
        // SAFETY: a context is current, the out pointer valid.
        assert_eq!(unsafe { sys::cuStreamCreate(&mut stream, 1) }, sys::CUresult::CUDA_SUCCESS);
        let before = cache.bytes();
        // SAFETY: it is a live stream, of the wrong device, which is what is tested.
        let foreign = unsafe { Stream::cuda(stream.expose_provenance()) };
        let request = TransferRequest::scatter(&cache.registered, SlotMapping::from_slots([0]), &slab);
        let error = rig.engine.submit(&request.slab_tokens(1).on(foreign)).unwrap_err();
        assert!(!error.to_string().is_empty());
        assert_eq!(cache.bytes(), before);
        // SAFETY: created above, destroyed once.
        assert_eq!(unsafe { sys::cuStreamDestroy_v2(stream) }, sys::CUresult::CUDA_SUCCESS);
        cache.exact(&slots(&[5]));
    }
}
