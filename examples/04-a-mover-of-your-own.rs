//! A mover of your own behind the same engine. Run with `cargo run --example 04-a-mover-of-your-own`.
//!
//! This one hands every job to the host mover and counts bytes; yours might drive another accelerator.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use maru::cxl::Region;
use maru::fallback::HostMover;
use maru::layout::CopyJob;
use maru::transfer::{Capabilities, Completion, Enqueued, Prepared, TransferBackend};
use maru::{
    CacheSpec, CacheTensor, Config, DType, PagedCache, Place, SlotMapping, Stream, TensorDesc, Tensors,
};
use maru::{TransferEngine, TransferError, TransferRequest};

#[derive(Debug)]
struct Metered {
    mover: HostMover,
    bytes: Arc<AtomicU64>,
}

impl TransferBackend for Metered {
    fn name(&self) -> &'static str {
        "metered"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new().with_unregistered_slab(true)
    }

    fn prepare(&self, _cache: &PagedCache) -> Result<Prepared, TransferError> {
        Ok(None)
    }

    unsafe fn enqueue(&self, _: &Prepared, jobs: &[CopyJob], _: Stream) -> Result<Enqueued, TransferError> {
        for job in jobs {
            // SAFETY: the caller's promise about the job's memory is passed on; it is host memory, because the
            // engine below is one for `Place::Host`.
            unsafe { self.mover.copy(job) }?;
            self.bytes.fetch_add(job.bytes(), Ordering::Relaxed);
        }
        Ok(Enqueued { completion: Completion::Done, strategy: "host" })
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let bytes = Arc::new(AtomicU64::new(0));
    let mover = Metered { mover: HostMover::new(1)?, bytes: Arc::clone(&bytes) };
    let engine = TransferEngine::with_backend(&Config::default(), Place::Host, Box::new(mover))?;

    let tensor = TensorDesc::contiguous(&[16, 64, 576], DType::Bf16)?;
    let memory = Region::anonymous(tensor.span_bytes())?.slab(0, tensor.span_bytes())?;
    let addr = memory.addr().as_ptr().expose_provenance() as u64;
    let list = vec![CacheTensor { addr, len: memory.len(), desc: tensor }];
    let spec = CacheSpec { block_size: Some(64), mla: true, ..CacheSpec::default() };
    // SAFETY: the tensor lies in `memory`, which lives to the end of main and is touched by this thread only.
    let cache =
        engine.register(unsafe { PagedCache::new(&Tensors::PerLayer(list), &spec, Place::Host, None) }?)?;

    let slab = Region::anonymous(cache.slab_layout().bytes())?.slab(0, cache.slab_layout().bytes())?;
    let slots = SlotMapping::from_blocks(&[3, 1, 4, 15], 64, 0..256)?;
    let transfer = engine.submit(&TransferRequest::gather(&cache, slots, &slab))?;
    println!("moved by {}: {} bytes", transfer.backend(), bytes.load(Ordering::Relaxed));
    Ok(transfer.wait()?)
}
