//! Store a chunk's KV into a slab and load it into other blocks. Run with `cargo run --example 02-store-and-load`.

use maru::cxl::Region;
use maru::{CacheSpec, CacheTensor, Config, DType, PagedCache, Place, SlotMapping, TensorDesc, Tensors};
use maru::{TransferEngine, TransferRequest};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::from_toml_str("[transfer]\ndevice = \"host\"\nkv_chunk_tokens = 32", "example")?;
    let engine = TransferEngine::open(&config)?;

    // What an engine would register: one (blocks, 2, tokens, heads, dim) tensor per layer.
    let tensor = TensorDesc::contiguous(&[8, 2, 16, 2, 64], DType::Bf16)?;
    let (layers, each) = (4, tensor.span_bytes());
    let memory = Region::anonymous(layers * each)?.slab(0, layers * each)?;
    let base = memory.addr().as_ptr().expose_provenance() as u64;
    let list =
        (0..layers).map(|l| CacheTensor { addr: base + l * each, len: each, desc: tensor.clone() }).collect();
    let spec = CacheSpec { block_size: Some(16), ..CacheSpec::default() };
    // SAFETY: the tensors lie in `memory`, which lives to the end of main and is touched by this thread only.
    let cache = unsafe { PagedCache::new(&Tensors::PerLayer(list), &spec, Place::Host, Some(4)) }?;
    let cache = engine.register(cache)?;
    memory.write_at(0, &(0..layers * each).map(|i| (i % 251) as u8).collect::<Vec<_>>())?;

    // Tokens 0..32 of a request that holds blocks 5 and 2, into a slab.
    let slab_bytes = cache.slab_layout().bytes();
    let slab = Region::anonymous(slab_bytes)?.slab(0, slab_bytes)?;
    let stored = SlotMapping::from_blocks(&[5, 2], 16, 0..32)?;
    let transfer = engine.submit(&TransferRequest::gather(&cache, stored, &slab))?;
    println!("stored {} bytes by {} / {}", transfer.bytes(), transfer.backend(), transfer.strategy());
    transfer.wait()?;

    // Into blocks 0 and 7 of another request.
    let loaded = SlotMapping::from_blocks(&[0, 7], 16, 0..32)?;
    engine.submit(&TransferRequest::scatter(&cache, loaded, &slab))?.wait()?;
    let block = |b: u64| {
        let mut bytes = vec![0; 2 * 16 * 2 * 64 * 2];
        memory.read_at(b * bytes.len() as u64, &mut bytes).map(|()| bytes)
    };
    assert_eq!((block(5)?, block(2)?), (block(0)?, block(7)?));
    println!("blocks 5 and 2 are now also in blocks 0 and 7");
    Ok(())
}
