//! Two engines, one pool file: the second finds by key what the first stored. In life they are two servers.
//! Run with `cargo run --example 03-share-a-pool`.

use maru::transfer::config::PoolConfig;
use maru::transfer::{ChunkKeys, checksum};
use maru::{Config, DType, Fingerprint, SlabLayout, TransferEngine};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::temp_dir().join(format!("maru-example-{}", std::process::id()));
    std::fs::create_dir(&directory)?;
    let outcome = share(&directory.join("pool"));
    std::fs::remove_dir_all(&directory)?;
    outcome
}

fn share(path: &std::path::Path) -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::from_toml_str("[transfer]\ndevice = \"host\"", "example")?;
    let pool = PoolConfig::new(path).with_size(16 << 20);
    let geometry = SlabLayout::packed(2, 4, 256, 128, DType::Bf16)?;
    let prompt: Vec<u32> = (0..512).collect();
    let keys = || ChunkKeys::new("example-model", geometry.fingerprint());

    let writer = TransferEngine::open(&config)?.create_pool(&pool, geometry.bytes(), false)?;
    let mut key = keys();
    for chunk in prompt.chunks(256) {
        let slab = writer.alloc()?.ok_or("the pool is full")?;
        slab.write_at(0, &[chunk[0].to_le_bytes()[1]; 64])?; // a gather would fill it
        let sum = checksum(slab.slab())?;
        writer.publish(&slab, &key.chunk(chunk).0, geometry.bytes(), geometry.fingerprint().0, Some(sum))?;
    }

    let reader = TransferEngine::open(&config)?.open_pool(&pool, false)?;
    let mut key = keys();
    for chunk in prompt.chunks(256) {
        let key = key.chunk(chunk);
        let found = reader.lookup(&key.0)?.ok_or("not there")?;
        assert_eq!(Fingerprint(found.fingerprint()), geometry.fingerprint());
        assert_eq!(found.checksum(), Some(checksum(found.slab())?));
        println!("{key}: {} bytes, verified", found.len());
    }
    println!("{:?}", reader.stats());
    Ok(())
}
