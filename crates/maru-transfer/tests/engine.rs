//! The engine through its public API: registration, checks, a mover of the user's own.
#![allow(clippy::cast_possible_truncation, reason = "test sizes are small")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use maru_cxl::{Region, Slab};
use maru_layout::{CacheSpec, CopyJob, DType, Fingerprint, SlabLayout, SlotMapping, TensorDesc};
use maru_transfer::config::{BackendChoice, Config, DeviceChoice};
use maru_transfer::{
    CacheTensor, Capabilities, Completion, Enqueued, PagedCache, Pending, Place, Prepared, RegisteredCache,
    Stream, Tensors, TransferBackend, TransferEngine, TransferError, TransferRequest,
};

const LAYERS: usize = 3;
const SHAPE: [i64; 5] = [4, 2, 16, 2, 8];
const TOKENS: u64 = 32;

fn config() -> Config {
    let mut config = Config::default();
    config.transfer.device = DeviceChoice::Host;
    config.transfer.kv_chunk_tokens = 32;
    config
}

fn spec() -> CacheSpec {
    CacheSpec { block_size: Some(16), ..CacheSpec::default() }
}

fn memory(len: u64) -> Slab {
    Region::anonymous(len).expect("anonymous memory").slab(0, len).expect("the whole region")
}

fn addr(slab: &Slab) -> u64 {
    slab.addr().as_ptr().expose_provenance() as u64
}

fn tensors(memory: &Slab) -> Vec<CacheTensor> {
    let desc = TensorDesc::contiguous(&SHAPE, DType::Bf16).expect("a sound tensor");
    let each = desc.span_bytes();
    (0..LAYERS as u64)
        .map(|l| CacheTensor { addr: addr(memory) + l * each, len: each, desc: desc.clone() })
        .collect()
}

fn cache_bytes() -> u64 {
    LAYERS as u64 * SHAPE.iter().product::<i64>() as u64 * 2
}

fn paged(tensors: Vec<CacheTensor>) -> Result<PagedCache, TransferError> {
    // SAFETY: tests hand over memory that lives as long as the cache, or descriptions that are refused.
    unsafe { PagedCache::new(&Tensors::PerLayer(tensors), &spec(), Place::Host, Some(LAYERS)) }
}

fn registered(engine: &TransferEngine, memory: &Slab) -> RegisteredCache {
    let cache = paged(tensors(memory)).expect("a sound cache");
    engine.register(cache).expect("registers")
}

fn slab_of(cache: &RegisteredCache) -> Slab {
    memory(cache.slab_layout().bytes())
}

fn slots(n: i64) -> SlotMapping {
    SlotMapping::from_slots((0..n).collect::<Vec<_>>())
}

fn content(slab: &Slab) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(slab.len()).expect("small")];
    slab.read_at(0, &mut bytes).expect("readable");
    bytes
}

fn fill(slab: &Slab, seed: u8) {
    let bytes: Vec<u8> = (0..slab.len()).map(|i| (i.wrapping_mul(31) >> 3) as u8 ^ seed).collect();
    slab.write_at(0, &bytes).expect("writable");
}

#[test]
fn store_then_load_into_other_slots_is_the_identity() {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let (a, b) = (memory(cache_bytes()), memory(cache_bytes()));
    fill(&a, 1);
    let (from, to) = (registered(&engine, &a), registered(&engine, &b));
    let slab = slab_of(&from);
    engine.submit(&TransferRequest::gather(&from, slots(32), &slab)).expect("stores").wait().expect("done");
    let other: Vec<i64> = (0..32).map(|t| 63 - t).collect();
    let load = TransferRequest::scatter(&to, SlotMapping::from_slots(other.clone()), &slab);
    engine.submit(&load).expect("loads").wait().expect("done");
    let again = slab_of(&to);
    engine
        .submit(&TransferRequest::gather(&to, SlotMapping::from_slots(other), &again))
        .expect("stores")
        .wait()
        .expect("done");
    assert_eq!(content(&slab), content(&again));
    assert!(content(&slab).iter().any(|b| *b != 0));
}

#[test]
fn the_host_engine_reports_backend_strategy_and_bytes() {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let mem = memory(cache_bytes());
    let cache = registered(&engine, &mem);
    let slab = slab_of(&cache);
    let transfer = engine.submit(&TransferRequest::gather(&cache, slots(32), &slab)).expect("stores");
    assert_eq!((transfer.backend(), transfer.strategy(), transfer.bytes()), ("fallback", "host", slab.len()));
    assert_eq!((engine.backend(), engine.place(), cache.backend()), ("fallback", Place::Host, "fallback"));
}

#[test]
fn explicit_native_that_cannot_run_is_an_error_with_the_reason() {
    let mut config = config();
    config.transfer.backend = BackendChoice::Native;
    let error = TransferEngine::open(&config).expect_err("no native kernel for host memory");
    assert_eq!(error.kind(), "not_available");
    assert!(error.to_string().contains("device = \"host\""), "{error}");
}

#[test]
fn a_cuda_device_that_is_not_there_is_not_available() {
    if std::env::var_os("MARU_REQUIRE_GPU").is_some() {
        return;
    }
    let mut config = config();
    config.transfer.device = DeviceChoice::Cuda(977);
    let error = TransferEngine::open(&config).expect_err("no such device");
    assert_eq!(error.kind(), "not_available");
}

#[test]
fn layers_that_differ_are_named() {
    let mem = memory(cache_bytes());
    let mut list = tensors(&mem);
    list[2].desc = TensorDesc::contiguous(&[4, 2, 16, 1, 16], DType::Bf16).expect("sound");
    let error = paged(list).expect_err("layer 2 differs");
    assert_eq!(error.kind(), "layout_mismatch");
    assert!(error.to_string().contains("layer 2 has shape"), "{error}");
}

#[test]
fn layers_of_another_dtype_are_named() {
    let mem = memory(cache_bytes());
    let mut list = tensors(&mem);
    list[1].desc = TensorDesc::contiguous(&SHAPE, DType::F16).expect("sound");
    let error = paged(list).expect_err("layer 1 differs").to_string();
    assert!(error.contains("layer 1 has dtype f16, layer 0 has bf16"), "{error}");
}

#[test]
fn a_wrong_number_of_layers_is_refused_at_registration() {
    let mem = memory(cache_bytes());
    let mut list = tensors(&mem);
    list.pop();
    let error = paged(list).expect_err("2 of 3 layers");
    assert!(error.to_string().contains("2 layer(s) were registered where the model has 3"), "{error}");
}

#[test]
fn no_tensors_is_an_error() {
    assert!(matches!(paged(Vec::new()), Err(TransferError::NoTensors)));
}

#[test]
fn a_tensor_beyond_its_memory_is_refused_with_both_sizes() {
    let mem = memory(cache_bytes());
    let mut list = tensors(&mem);
    let needed = list[1].len;
    list[1].len -= 1;
    match paged(list) {
        Err(TransferError::TensorTooSmall { layer: 1, found, needed: n }) => {
            assert_eq!((found, n), (needed - 1, needed));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_null_tensor_is_refused() {
    let mem = memory(cache_bytes());
    let mut list = tensors(&mem);
    list[0].addr = 0;
    assert!(matches!(paged(list), Err(TransferError::BadAddress { layer: 0, addr: 0, .. })));
}

#[test]
fn a_layer_registered_twice_is_refused() {
    let mem = memory(cache_bytes());
    let mut list = tensors(&mem);
    list[2] = list[0].clone();
    let error = paged(list).expect_err("layer 2 is layer 0").to_string();
    assert!(error.contains("layer 0 plane 0") && error.contains("layer 2 plane 0"), "{error}");
}

#[test]
fn k_and_v_lists_must_be_of_one_length() {
    let mem = memory(cache_bytes());
    let desc = TensorDesc::contiguous(&[64, 2, 8], DType::Bf16).expect("sound");
    let t = |i: u64| CacheTensor { addr: addr(&mem) + i * 2048, len: 2048, desc: desc.clone() };
    let split = Tensors::Split { k: vec![t(0), t(1)], v: vec![t(2)] };
    // SAFETY: the description is refused.
    let error = unsafe { PagedCache::new(&split, &spec(), Place::Host, None) }.expect_err("2 and 1");
    assert!(matches!(error, TransferError::SplitCount { k: 2, v: 1 }));
}

#[test]
fn a_cache_in_other_memory_is_refused() {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let mem = memory(cache_bytes());
    // SAFETY: the cache is refused before anything touches it.
    let cache = unsafe { PagedCache::new(&Tensors::PerLayer(tensors(&mem)), &spec(), Place::Cuda(0), None) };
    let error = engine.register(cache.expect("a sound cache")).expect_err("not on the host");
    assert!(error.to_string().contains("cuda:0") && error.to_string().contains("host"), "{error}");
}

#[test]
fn a_cache_of_another_engine_is_refused() {
    let (a, b) = (TransferEngine::open(&config()).expect("a"), TransferEngine::open(&config()).expect("b"));
    let mem = memory(cache_bytes());
    let cache = registered(&a, &mem);
    let slab = slab_of(&cache);
    let error = b.submit(&TransferRequest::gather(&cache, slots(32), &slab)).expect_err("a's cache");
    assert!(matches!(error, TransferError::ForeignCache));
}

fn refused(change: impl Fn(TransferRequest, &RegisteredCache) -> TransferRequest) -> TransferError {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let mem = memory(cache_bytes());
    fill(&mem, 3);
    let cache = registered(&engine, &mem);
    let slab = slab_of(&cache);
    fill(&slab, 5);
    let before = (content(&mem), content(&slab));
    let mut errors = Vec::new();
    for request in [
        TransferRequest::gather(&cache, slots(32), &slab),
        TransferRequest::scatter(&cache, slots(32), &slab),
    ] {
        errors.push(engine.submit(&change(request, &cache)).expect_err("must be refused"));
    }
    assert!((content(&mem), content(&slab)) == before, "a refused request changed memory");
    errors.swap_remove(0)
}

#[test]
fn a_slab_of_another_geometry_is_refused_by_fingerprint() {
    let error = refused(|r, _| r.stored_as(Fingerprint(1)));
    assert_eq!(error.kind(), "layout_mismatch");
}

#[test]
fn the_right_fingerprint_passes() {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let mem = memory(cache_bytes());
    let cache = registered(&engine, &mem);
    let slab = slab_of(&cache);
    let fingerprint = cache.slab_layout().fingerprint();
    engine
        .submit(&TransferRequest::gather(&cache, slots(32), &slab).stored_as(fingerprint))
        .expect("passes")
        .wait()
        .expect("done");
}

#[test]
fn a_slab_too_small_for_the_geometry_is_refused() {
    let error = refused(|r, _| r.slab_tokens(33).partial(true));
    assert!(error.to_string().contains("bytes where its layout needs"), "{error}");
}

#[test]
fn more_layers_than_the_cache_has_are_refused() {
    assert!(refused(|r, _| r.layers(2, 2)).to_string().contains("layers 2..4"));
}

#[test]
fn skipping_more_than_there_is_is_refused() {
    assert!(refused(|r, _| r.skip_tokens(33)).to_string().contains("skip_tokens is 33"));
}

#[test]
fn a_slab_of_another_dtype_is_refused() {
    let error = refused(|r, c| {
        let s = c.slab_layout();
        r.slab_layout(SlabLayout::packed(2, 3, 32, s.row_bytes() / 2, DType::F16).expect("sound"))
    });
    assert_eq!(error.kind(), "dtype_mismatch");
}

#[test]
fn a_slab_inside_the_cache_is_refused() {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let region = Region::anonymous(2 * cache_bytes()).expect("memory");
    let mem = region.slab(0, cache_bytes()).expect("first half");
    let cache = registered(&engine, &mem);
    let slab =
        region.slab(cache_bytes() / 2, cache.slab_layout().bytes()).expect("straddles the cache's end");
    let error = engine.submit(&TransferRequest::gather(&cache, slots(32), &slab)).expect_err("overlaps");
    assert!(matches!(error, TransferError::SlabInCache { .. }), "{error}");
}

#[test]
fn single_layers_add_up_to_the_whole_slab() {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let mem = memory(cache_bytes());
    fill(&mem, 9);
    let cache = registered(&engine, &mem);
    let (whole, parts) = (slab_of(&cache), slab_of(&cache));
    engine.submit(&TransferRequest::gather(&cache, slots(32), &whole)).expect("whole").wait().expect("done");
    for layer in 0..LAYERS as u32 {
        let one = TransferRequest::gather(&cache, slots(32), &parts).layers(layer, 1);
        let transfer = engine.submit(&one).expect("one layer");
        assert_eq!(transfer.bytes() * LAYERS as u64, whole.len());
        transfer.wait().expect("done");
    }
    assert_eq!(content(&whole), content(&parts));
}

#[test]
fn a_batch_is_checked_before_the_first_slab_moves() {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let mem = memory(cache_bytes());
    fill(&mem, 2);
    let cache = registered(&engine, &mem);
    let slab = slab_of(&cache);
    let before = content(&slab);
    let batch = [
        TransferRequest::gather(&cache, slots(32), &slab),
        TransferRequest::gather(&cache, SlotMapping::from_slots(vec![64]), &slab).partial(true),
    ];
    let error = engine.submit_many(&batch).expect_err("slot 64 of 64");
    assert_eq!(error.kind(), "slot_out_of_range");
    assert_eq!(content(&slab), before);
}

#[test]
fn a_batch_of_two_caches_is_refused() {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let (a, b) = (memory(cache_bytes()), memory(cache_bytes()));
    let (a, b) = (registered(&engine, &a), registered(&engine, &b));
    let slab = slab_of(&a);
    let batch =
        [TransferRequest::gather(&a, slots(32), &slab), TransferRequest::gather(&b, slots(32), &slab)];
    assert!(matches!(engine.submit_many(&batch), Err(TransferError::MixedBatch { index: 1 })));
}

#[test]
fn an_empty_batch_is_a_no_op() {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let transfer = engine.submit_many(&[]).expect("nothing to do");
    assert_eq!(transfer.bytes(), 0);
    transfer.wait().expect("done");
}

/// A mover of the user's own: counts, and finishes only when waited for.
#[derive(Debug, Default)]
struct Counting {
    enqueued: Arc<AtomicUsize>,
    waited: Arc<AtomicUsize>,
    fail_at: Option<usize>,
}

#[derive(Debug)]
struct CountWait(Arc<AtomicUsize>);

impl Pending for CountWait {
    fn is_done(&mut self) -> Result<bool, TransferError> {
        Ok(false)
    }
    fn wait(&mut self) -> Result<(), TransferError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn order_before(&mut self, _: Stream) -> Result<(), TransferError> {
        Ok(())
    }
}

impl TransferBackend for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::new().with_unregistered_slab(true).with_asynchronous(true)
    }
    fn prepare(&self, cache: &PagedCache) -> Result<Prepared, TransferError> {
        match cache.layers() {
            3 => Ok(None),
            n => Err(TransferError::Mover { mover: "counting".into(), message: format!("{n} layers") }),
        }
    }
    unsafe fn enqueue(&self, _: &Prepared, jobs: &[CopyJob], _: Stream) -> Result<Enqueued, TransferError> {
        assert!(jobs.iter().all(|job| !job.is_empty()));
        let n = self.enqueued.fetch_add(jobs.len(), Ordering::SeqCst);
        if self.fail_at == Some(n) {
            return Err(TransferError::Mover { mover: "counting".into(), message: "as told".into() });
        }
        let completion = Completion::Pending(Box::new(CountWait(Arc::clone(&self.waited))));
        Ok(Enqueued { completion, strategy: "tally" })
    }
}

fn own(fail_at: Option<usize>) -> (TransferEngine, Arc<AtomicUsize>, Arc<AtomicUsize>) {
    let mover = Counting { fail_at, ..Counting::default() };
    let (enqueued, waited) = (Arc::clone(&mover.enqueued), Arc::clone(&mover.waited));
    let engine = TransferEngine::with_backend(&config(), Place::Host, Box::new(mover)).expect("own mover");
    (engine, enqueued, waited)
}

#[test]
fn a_mover_of_the_users_own_is_used_and_named() {
    let (engine, enqueued, waited) = own(None);
    let mem = memory(cache_bytes());
    let cache = registered(&engine, &mem);
    let slab = slab_of(&cache);
    let batch = vec![TransferRequest::gather(&cache, slots(32), &slab); 3];
    let mut transfer = engine.submit_many(&batch).expect("queued");
    assert_eq!((transfer.backend(), transfer.strategy()), ("counting", "tally"));
    assert_eq!((enqueued.load(Ordering::SeqCst), waited.load(Ordering::SeqCst)), (3, 0));
    assert!(!transfer.is_done().expect("no error"));
    transfer.wait().expect("done");
    assert_eq!(waited.load(Ordering::SeqCst), 1);
}

#[test]
fn empty_work_never_reaches_the_mover() {
    let (engine, enqueued, _) = own(None);
    let mem = memory(cache_bytes());
    let cache = registered(&engine, &mem);
    let slab = slab_of(&cache);
    let all_skipped = SlotMapping::from_slots(vec![-1; 32]);
    for request in [
        TransferRequest::gather(&cache, all_skipped, &slab),
        TransferRequest::gather(&cache, slots(32), &slab).skip_tokens(32),
        TransferRequest::gather(&cache, slots(0), &slab).partial(true),
    ] {
        engine.submit(&request).expect("a no-op").wait().expect("done");
    }
    assert_eq!(enqueued.load(Ordering::SeqCst), 0);
}

#[test]
fn a_movers_error_is_passed_on_and_the_next_transfer_works() {
    let (engine, ..) = own(Some(0));
    let mem = memory(cache_bytes());
    let cache = registered(&engine, &mem);
    let slab = slab_of(&cache);
    let request = TransferRequest::gather(&cache, slots(32), &slab);
    assert_eq!(engine.submit(&request).expect_err("the first fails").to_string(), "counting: as told");
    engine.submit(&request).expect("the second works").wait().expect("done");
}

#[test]
fn a_batch_on_two_streams_is_refused() {
    let (engine, ..) = own(None);
    let mem = memory(cache_bytes());
    let cache = registered(&engine, &mem);
    let slab = slab_of(&cache);
    let request = TransferRequest::gather(&cache, slots(32), &slab);
    // SAFETY: the batch is refused before the handle is used.
    let other = request.clone().on(unsafe { Stream::cuda(1) });
    assert!(matches!(engine.submit_many(&[request, other]), Err(TransferError::MixedStreams { index: 1 })));
}

#[test]
fn a_dropped_transfer_is_waited_for() {
    let (engine, _, waited) = own(None);
    let mem = memory(cache_bytes());
    let cache = registered(&engine, &mem);
    let slab = slab_of(&cache);
    drop(engine.submit(&TransferRequest::gather(&cache, slots(32), &slab)).expect("queued"));
    assert_eq!(waited.load(Ordering::SeqCst), 1);
}

#[test]
fn a_mover_can_refuse_a_cache() {
    let (engine, ..) = own(None);
    let mem = memory(cache_bytes());
    let two: Vec<_> = tensors(&mem).into_iter().take(2).collect();
    // SAFETY: the cache is refused before anything touches it.
    let cache =
        unsafe { PagedCache::new(&Tensors::PerLayer(two), &spec(), Place::Host, None) }.expect("sound");
    assert_eq!(engine.register(cache).expect_err("2 layers").to_string(), "counting: 2 layers");
}

#[test]
fn threads_store_side_by_side() {
    let engine = TransferEngine::open(&config()).expect("host engine");
    let mem = memory(cache_bytes());
    fill(&mem, 7);
    let cache = registered(&engine, &mem);
    let expected = slab_of(&cache);
    engine
        .submit(&TransferRequest::gather(&cache, slots(32), &expected))
        .expect("stores")
        .wait()
        .expect("done");
    let region = Region::anonymous(4 * expected.len()).expect("memory");
    std::thread::scope(|scope| {
        for i in 0..4 {
            let slab = region.slab(i * expected.len(), expected.len()).expect("a quarter");
            let (engine, cache) = (&engine, &cache);
            scope.spawn(move || {
                for _ in 0..20 {
                    engine
                        .submit(&TransferRequest::gather(cache, slots(32), &slab))
                        .expect("stores")
                        .wait()
                        .expect("done");
                }
            });
        }
    });
    for i in 0..4 {
        let slab = region.slab(i * expected.len(), expected.len()).expect("a quarter");
        assert_eq!(content(&slab), content(&expected));
    }
    assert_eq!(TOKENS, cache.slab_layout().tokens());
}
