//! The side that has the prompt's KV cache and shares it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use maru::cxl::{DaxDevice, PooledSlab, SlabPool};
use maru::transfer::{ChunkKey, TransferEngine};

use crate::error::CliError;
use crate::p2p::cache::{Cache, Moved};
use crate::p2p::content;
use crate::p2p::image::Image;
use crate::p2p::job::{Job, Plan, slab_bytes};
use crate::p2p::pool;
use crate::p2p::protocol::{Phase, Reporter, Stored, Transfers};

/// A prompt that is stored. Holds the pool open for writing.
#[derive(Debug)]
pub(crate) struct Producer {
    pool: SlabPool,
    keys: Vec<ChunkKey>,
    pub(crate) stored: Stored,
}

impl Producer {
    /// Fills a cache and publishes every chunk of it.
    pub(crate) fn run(job: &Job, device: &DaxDevice, reporter: &Arc<Reporter>) -> Result<Self, CliError> {
        let plan = Plan::new(job, content::random_seed())?;
        let engine = TransferEngine::open(&plan.config)?;
        let mut cache = Cache::new(engine.clone(), &plan.shape)?;
        let keys = plan.keys(&cache)?;

        let mapping = Arc::clone(reporter);
        let mapped = move |done, total| mapping.progress(Phase::Mapping, done, total);
        let pool = pool::open_for_writing(&engine, device, job, plan.slab_bytes(), mapped)?;
        make_room(&pool, &keys, job)?;

        let image = Image::new(&plan.shape, &plan.prompt, &plan.blocks, content::random_seed());
        for layer in 0..plan.shape.layers {
            reporter.progress(Phase::Filling, layer, plan.shape.layers);
            image.write(&mut cache, layer, true)?;
        }

        let mut tally = Tally::default();
        let mut slabs = Vec::with_capacity(plan.chunks.len());
        for (i, (chunk, key)) in plan.chunks.iter().zip(&keys).enumerate() {
            reporter.progress(Phase::Storing, i as u64, plan.chunks.len() as u64);
            std::thread::sleep(Duration::from_millis(job.pause_ms));
            let Some(slab) = pool.alloc()? else {
                return Err(no_room(&pool, keys.len() - i, job));
            };
            let tokens = chunk.tokens.end - chunk.tokens.start;
            let len = slab_bytes(&plan.shape, tokens);
            let span = slab.span(0, len)?;
            let begun = Instant::now();
            let moved = cache.store(chunk.slots.clone(), &span)?;
            tally.add(moved, begun.elapsed());
            let checksum = engine.checksum(&span)?;
            let fingerprint = cache.slab_layout(tokens)?.fingerprint();
            pool.publish(&slab, &key.0, len, fingerprint.0, checksum)?;
            slabs.push((slab, len));
        }
        if job.corrupt {
            corrupt(&slabs)?;
        }
        let transfers = tally.transfers(&cache);
        Ok(Producer { pool, keys, stored: Stored { chunks: plan.chunks.len() as u64, transfers } })
    }

    /// Takes every chunk back.
    pub(crate) fn withdraw(&self) -> Result<(), CliError> {
        for key in &self.keys {
            self.pool.withdraw(&key.0)?;
        }
        Ok(())
    }
}

/// Chunks of an earlier run of the same prompt make room for those of this one.
fn make_room(pool: &SlabPool, keys: &[ChunkKey], job: &Job) -> Result<(), CliError> {
    for key in keys {
        pool.withdraw(&key.0)?;
    }
    match pool.stats().free >= keys.len() as u64 {
        true => Ok(()),
        false => Err(no_room(pool, keys.len(), job)),
    }
}

fn no_room(pool: &SlabPool, wanted: usize, job: &Job) -> CliError {
    let stats = pool.stats();
    CliError::NoSpace(format!(
        "{}: {wanted} more slabs are needed, {} of the pool's {} are free ({} are published); use fewer --tokens, a \
         larger pool, or --force to start an empty one",
        job.pool.display(),
        stats.free,
        stats.slabs,
        stats.published
    ))
}

/// Flips one bit somewhere in the middle of what was published.
fn corrupt(slabs: &[(PooledSlab, u64)]) -> Result<(), CliError> {
    if let Some((slab, len)) = slabs.get(slabs.len() / 2) {
        let at = len / 2 + len / 7;
        let mut byte = [0];
        slab.read_at(at, &mut byte)?;
        slab.write_at(at, &[byte[0] ^ 0x10])?;
        slab.flush();
        maru::cxl::coherence::publish();
    }
    Ok(())
}

/// Sums up transfers.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    bytes: u64,
    time: Duration,
    last: Option<Moved>,
}

impl Tally {
    pub(crate) fn add(&mut self, moved: Moved, time: Duration) {
        self.bytes += moved.bytes;
        self.time += time;
        self.last = Some(moved);
    }

    pub(crate) fn transfers(&self, cache: &Cache) -> Transfers {
        Transfers {
            bytes: self.bytes,
            seconds: self.time.as_secs_f64(),
            backend: self.last.map_or("none", |m| m.backend).to_owned(),
            strategy: self.last.map_or("none", |m| m.strategy).to_owned(),
            device: cache.place().to_string(),
        }
    }
}
