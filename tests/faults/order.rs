//! Kind: work that must wait for other work (C10).

use std::ptr;

use cudarc::driver::sys;
use maru::cxl::{Region, Slab};
use maru::{SlotMapping, Stream, TransferRequest};

use crate::harness::Test;
use crate::memory::Arena;
use crate::rig::{Cache, Random, Rig, View, read};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        on_device:
            c10_a_load_waits_for_readers_of_its_blocks,
            c10_a_store_waits_for_writers_of_its_blocks,
            c10_later_work_of_the_stream_waits_for_a_load,
            c10_later_writers_wait_for_a_store,
            c10_another_stream_waits_where_it_is_told_to,
            loads_of_the_same_blocks_keep_their_order,
            a_dropped_transfer_has_arrived;
    ]
}

/// A driver call that must succeed; the rig's context is current.
macro_rules! ok {
    ($function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: handles and addresses are of live objects, sizes are theirs.
        let code = unsafe { sys::$function($($arg),*) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS, stringify!($function));
    }};
}

/// A stream of the caller's own, which does not wait for the default one.
struct Own(sys::CUstream);

impl Own {
    fn new(rig: &Rig) -> Own {
        rig.context.as_ref().unwrap().bind_to_thread().unwrap();
        let mut stream = ptr::null_mut();
        ok!(cuStreamCreate(&mut stream, 1));
        Own(stream)
    }

    fn stream(&self) -> Stream {
        // SAFETY: the stream lives until its tests' transfers are done.
        unsafe { Stream::cuda(self.0.expose_provenance()) }
    }

    fn copy(&self, to: u64, from: u64, len: usize) {
        ok!(cuMemcpyDtoDAsync_v2(to, from, len, self.0));
    }

    fn wait(&self) {
        ok!(cuStreamSynchronize(self.0));
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        ok!(cuStreamDestroy_v2(self.0));
    }
}

/// All of a cache's slots in some order, and slabs: registered, and where the mover takes it not registered.
struct Scene<'a> {
    rig: &'a Rig,
    cache: Cache<'a>,
    slots: Vec<i64>,
    slabs: Vec<Slab>,
    /// As large as the cache.
    other: Arena,
}

impl<'a> Scene<'a> {
    fn new(rig: &'a Rig) -> Scene<'a> {
        let view = View::new(&[4, 2, 8, 2, 8], "block,kv,token,head,dim").at(&[0, 4096]);
        let cache = rig.cache(&view);
        let slots = Random(17).shuffled(32);
        let content = Random(19).bytes(cache.slab_bytes(32) as usize);
        let mut slabs = vec![rig.slab(&content)];
        if rig.mover.strategy == "copy_engine" {
            let len = content.len() as u64;
            let pageable = Region::anonymous(len).unwrap().slab(0, len).unwrap();
            pageable.write_at(0, &content).unwrap();
            slabs.push(pageable);
        }
        let other = Arena::new(rig.context.as_ref(), &vec![0x77; cache.len]).unwrap();
        if let Some(session) = &rig.session {
            session.set("delay_us", 400);
        }
        Scene { rig, cache, slots, slabs, other }
    }

    fn load(&self, slab: &Slab) -> TransferRequest {
        let mapping = SlotMapping::from_slots(&self.slots[..]);
        TransferRequest::scatter(&self.cache.registered, mapping, slab).slab_tokens(32)
    }

    fn store(&self, slab: &Slab) -> TransferRequest {
        let mapping = SlotMapping::from_slots(&self.slots[..]);
        TransferRequest::gather(&self.cache.registered, mapping, slab).slab_tokens(32)
    }

    /// The first row of layer 0's K of a token, as the cache has it.
    fn row(&self, cache: &[u8], token: usize) -> Vec<u8> {
        let r = &self.cache.reference;
        let at = r.paged_offset(0, 0, self.slots[token] as u64, 0) as usize;
        cache[at..at + r.row_bytes() as usize].to_vec()
    }

    fn arrived(&self, cache: &[u8], slab: &[u8]) {
        let row = self.cache.reference.row_bytes() as usize;
        for token in 0..32 {
            assert_eq!(self.row(cache, token), slab[token * row..][..row], "token {token}");
        }
    }

    fn addr(&self) -> u64 {
        self.cache.arena.addr()
    }
}

/// The reader sees the old blocks, the blocks then hold the new bytes.
fn c10_a_load_waits_for_readers_of_its_blocks(rig: &Rig) {
    let scene = Scene::new(rig);
    for slab in &scene.slabs {
        let (own, old) = (Own::new(rig), scene.cache.bytes());
        (0..3).for_each(|_| own.copy(scene.other.addr(), scene.addr(), scene.cache.len));
        rig.engine.submit(&scene.load(slab).on(own.stream())).unwrap().wait().unwrap();
        assert_eq!(scene.other.read(old.len()).unwrap(), old, "the reader saw later bytes");
        scene.arrived(&scene.cache.bytes(), &read(slab));
    }
}

fn c10_a_store_waits_for_writers_of_its_blocks(rig: &Rig) {
    let scene = Scene::new(rig);
    for slab in &scene.slabs {
        let own = Own::new(rig);
        ok!(cuMemsetD8Async(scene.addr(), 0x31, scene.cache.len, own.0));
        own.copy(scene.addr(), scene.other.addr(), scene.cache.len);
        rig.engine.submit(&scene.store(slab).on(own.stream())).unwrap().wait().unwrap();
        assert!(read(slab).iter().all(|b| *b == 0x77), "the store read earlier bytes");
        slab.write_at(0, &vec![1; slab.len() as usize]).unwrap();
    }
}

fn c10_later_work_of_the_stream_waits_for_a_load(rig: &Rig) {
    let scene = Scene::new(rig);
    for slab in &scene.slabs {
        let own = Own::new(rig);
        let transfer = rig.engine.submit(&scene.load(slab).on(own.stream())).unwrap();
        own.copy(scene.other.addr(), scene.addr(), scene.cache.len);
        own.wait();
        scene.arrived(&scene.other.read(scene.cache.len).unwrap(), &read(slab));
        transfer.wait().unwrap();
    }
}

/// The engine reuses the blocks right after a store was submitted.
fn c10_later_writers_wait_for_a_store(rig: &Rig) {
    let scene = Scene::new(rig);
    for slab in &scene.slabs {
        let (own, old) = (Own::new(rig), scene.cache.bytes());
        let transfer = rig.engine.submit(&scene.store(slab).on(own.stream())).unwrap();
        ok!(cuMemsetD8Async(scene.addr(), 0xee, scene.cache.len, own.0));
        transfer.wait().unwrap();
        own.wait();
        scene.arrived(&old, &read(slab));
        assert!(scene.cache.bytes().iter().all(|b| *b == 0xee));
    }
}

fn c10_another_stream_waits_where_it_is_told_to(rig: &Rig) {
    let scene = Scene::new(rig);
    for slab in &scene.slabs {
        let (own, other) = (Own::new(rig), Own::new(rig));
        let mut transfer = rig.engine.submit(&scene.load(slab).on(own.stream())).unwrap();
        transfer.order_before(other.stream()).unwrap();
        other.copy(scene.other.addr(), scene.addr(), scene.cache.len);
        other.wait();
        scene.arrived(&scene.other.read(scene.cache.len).unwrap(), &read(slab));
        transfer.wait().unwrap();
    }
}

fn loads_of_the_same_blocks_keep_their_order(rig: &Rig) {
    let scene = Scene::new(rig);
    let own = Own::new(rig);
    let slabs: Vec<Slab> = (0..4u8).map(|n| rig.slab(&vec![n; scene.slabs[0].len() as usize])).collect();
    let transfers: Vec<_> =
        slabs.iter().map(|s| rig.engine.submit(&scene.load(s).on(own.stream())).unwrap()).collect();
    transfers.into_iter().for_each(|t| t.wait().unwrap());
    scene.arrived(&scene.cache.bytes(), &read(&slabs[3]));
}

fn a_dropped_transfer_has_arrived(rig: &Rig) {
    let scene = Scene::new(rig);
    for slab in &scene.slabs {
        let own = Own::new(rig);
        drop(rig.engine.submit(&scene.load(slab).on(own.stream())).unwrap());
        scene.arrived(&scene.cache.bytes(), &read(slab));
        let content = vec![9; slab.len() as usize];
        slab.write_at(0, &content).unwrap();
        drop(rig.engine.submit(&scene.load(slab).on(own.stream())).unwrap());
        scene.arrived(&scene.cache.bytes(), &content);
    }
    assert_eq!(scene.rig.session.as_ref().map_or(0, |s| s.holds_expired()), 0);
}
