//! What one side of the main job is told, and what follows from it.

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use maru::Config;
use maru::layout::SlotMapping;
use maru::transfer::profile::Profile;
use maru::transfer::{ChunkKey, ChunkKeys};
use serde::{Deserialize, Serialize};

use crate::args::CacheLayout;
use crate::error::CliError;
use crate::p2p::cache::Cache;
use crate::p2p::content::{Prompt, shuffled};
use crate::p2p::shape::Shape;

/// Which side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    Producer,
    Consumer,
}

/// The orders of one side. A consumer's say nothing of blocks, slabs or content but the pool and the prompt.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) role: Role,
    pub(crate) pool: PathBuf,
    pub(crate) offset: u64,
    pub(crate) size: u64,
    /// The pool's file was made for this run and has no pool yet.
    pub(crate) fresh: bool,
    pub(crate) force: bool,
    pub(crate) profile: String,
    pub(crate) tokens: u64,
    pub(crate) prompt: String,
    /// The configuration as TOML.
    pub(crate) config: String,
    pub(crate) layout: CacheLayout,
    pub(crate) corrupt: bool,
    /// Wait for chunks that are not there yet.
    pub(crate) wait: bool,
    pub(crate) timeout_secs: u64,
    pub(crate) pause_ms: u64,
}

impl Job {
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_secs)
    }
}

/// A built-in profile, or a file's where the name is a path.
pub(crate) fn read_profile(name: &str) -> Result<Profile, CliError> {
    let is_path = name.contains('/') || name.ends_with(".toml");
    Ok(if is_path { Profile::from_file(name)? } else { Profile::builtin(name)? })
}

/// One chunk of the prompt.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    pub(crate) tokens: Range<u64>,
    pub(crate) slots: SlotMapping,
}

/// What both sides work out for themselves.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) config: Config,
    pub(crate) shape: Shape,
    pub(crate) prompt: Prompt,
    pub(crate) chunks: Vec<Chunk>,
    /// This process's own order of blocks.
    pub(crate) blocks: Vec<u64>,
    namespace: String,
}

impl Plan {
    pub(crate) fn new(job: &Job, seed: u64) -> Result<Self, CliError> {
        let config = Config::from_toml_str(&job.config, "the configuration passed on")?;
        let profile = read_profile(&job.profile)?;
        let shape = Shape::new(&profile, job.tokens, job.layout)?;
        let prompt = Prompt::new(&job.prompt, job.tokens);
        let used = usize::try_from(job.tokens.div_ceil(shape.block_size)).unwrap_or(usize::MAX);
        let mut blocks = shuffled(shape.num_blocks, seed);
        blocks.truncate(used);
        let ids: Vec<i64> = blocks.iter().map(|b| i64::try_from(*b).unwrap_or(-1)).collect();
        let chunk = u64::from(config.transfer.kv_chunk_tokens);
        let mut chunks = Vec::new();
        let mut start = 0;
        while start < job.tokens {
            let tokens = start..(start + chunk).min(job.tokens);
            start = tokens.end;
            let slots = SlotMapping::from_blocks(&ids, shape.block_size, tokens.clone())?;
            chunks.push(Chunk { tokens, slots });
        }
        let namespace = format!("maru-p2p/1 {} {}", profile.model, profile.tensor_parallel);
        Ok(Plan { config, shape, prompt, chunks, blocks, namespace })
    }

    /// The key of each chunk. Geometry enters through a full chunk's slab.
    pub(crate) fn keys(&self, cache: &Cache) -> Result<Vec<ChunkKey>, CliError> {
        let geometry = cache.slab_layout(self.config.transfer.kv_chunk_tokens.into())?.fingerprint();
        let mut keys = ChunkKeys::new(&self.namespace, geometry);
        let key = |chunk: &Chunk| {
            let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
            let range = index(chunk.tokens.start)..index(chunk.tokens.end);
            keys.chunk(self.prompt.tokens().get(range).unwrap_or(&[]))
        };
        Ok(self.chunks.iter().map(key).collect())
    }

    /// Bytes of the largest slab: a full chunk's, or the only one's.
    pub(crate) fn slab_bytes(&self) -> u64 {
        let most = self.chunks.iter().map(|c| c.tokens.end - c.tokens.start).max().unwrap_or(0);
        slab_bytes(&self.shape, most)
    }
}

/// Bytes of a slab of `tokens` tokens.
pub(crate) fn slab_bytes(shape: &Shape, tokens: u64) -> u64 {
    // The tokens fit a cache of this shape, whose bytes fit 63 bits.
    tokens * shape.layers * shape.planes * shape.heads * shape.head_bytes
}

/// Bytes from the start of a pool's file that hold `count` slabs of `slab_bytes` and everything before them.
pub(crate) fn pool_bytes(slab_bytes: u64, count: u64) -> Option<u64> {
    const PAGE: u64 = 4096;
    // The pool's directory takes two to four entries of 128 bytes a slab behind two pages of headers, as many as
    // if its own bytes were slabs too: a fifth one allows for that.
    let directory = count.checked_mul(5 * 128)?.checked_add(8 * PAGE)?.checked_next_multiple_of(PAGE)?;
    let data = slab_bytes.checked_next_multiple_of(PAGE)?.checked_mul(count)?;
    data.checked_add(directory).filter(|n| *n <= i64::MAX.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use maru::cxl::{CreateOptions, DaxDevice, MapOptions, Mapping, PoolOptions, Region, SlabPool};

    #[test]
    fn a_pool_file_holds_the_slabs_it_was_sized_for() {
        let dir = tempfile::tempdir().unwrap();
        for (slab_bytes, count) in [
            (1, 1),
            (4096, 1),
            (4097, 3),
            (64, 1000),
            (1, 1023),
            (1, 1025),
            (5000, 511),
            (4096, 5000),
            (100_000, 33),
            (1 << 20, 7),
        ] {
            let path = dir.path().join("pool");
            let bytes = pool_bytes(slab_bytes, count).unwrap();
            let device = DaxDevice::create_file(&path, bytes, CreateOptions { replace: true }).unwrap();
            let region = Region::new(Mapping::map(&device, &MapOptions::default()).unwrap());
            let pool =
                SlabPool::create(region, PoolOptions { slab_bytes, ..PoolOptions::default() }).unwrap();
            assert!(pool.slab_count() >= count, "{slab_bytes} x {count}: {}", pool.slab_count());
        }
    }

    #[test]
    fn sizes_beyond_63_bits_are_none() {
        assert_eq!(pool_bytes(u64::MAX, 1), None);
        assert_eq!(pool_bytes(1 << 62, 2), None);
        assert_eq!(pool_bytes(4096, u64::MAX / 4096), None);
    }
}
