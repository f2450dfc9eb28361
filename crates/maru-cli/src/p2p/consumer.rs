//! The side that knows only the pool and the prompt.

use std::sync::Arc;
use std::time::{Duration, Instant};

use maru::cxl::{CxlError, Published, SlabPool};
use maru::transfer::config::ChecksumKind;
use maru::transfer::{ChunkKey, TransferEngine};

use crate::error::CliError;
use crate::p2p::cache::Cache;
use crate::p2p::content;
use crate::p2p::image::{Image, Stray};
use crate::p2p::job::{Job, Plan};
use crate::p2p::pool;
use crate::p2p::producer::Tally;
use crate::p2p::protocol::{Loaded, Phase, Reporter};

/// Finds the prompt's chunks, loads them and checks every byte of the cache.
pub(crate) fn run(job: &Job, reporter: &Arc<Reporter>) -> Result<Loaded, CliError> {
    let plan = Plan::new(job, content::random_seed())?;
    let engine = TransferEngine::open(&plan.config)?;
    let mut cache = Cache::new(engine.clone(), &plan.shape)?;
    let keys = plan.keys(&cache)?;
    let image = Image::new(&plan.shape, &plan.prompt, &plan.blocks, content::random_seed());
    for layer in 0..plan.shape.layers {
        reporter.progress(Phase::Filling, layer, plan.shape.layers);
        image.write(&mut cache, layer, false)?;
    }

    let chunks = keys.len() as u64;
    let found = find(job, &engine, &keys, reporter)?;
    let mut loaded = Loaded {
        found: found.len() as u64,
        chunks,
        transfers: None,
        first_difference: None,
        device: cache.place().to_string(),
        backend: cache.backend().to_owned(),
    };
    if loaded.found < chunks {
        return Ok(loaded);
    }

    let mut tally = Tally::default();
    for (i, (chunk, published)) in plan.chunks.iter().zip(&found).enumerate() {
        reporter.progress(Phase::Loading, i as u64, chunks);
        std::thread::sleep(Duration::from_millis(job.pause_ms));
        check_sum(&plan, i, published)?;
        let begun = Instant::now();
        let moved = cache.load(chunk.slots.clone(), published.slab(), published.fingerprint())?;
        tally.add(moved, begun.elapsed());
        if !published.still_valid() {
            return Err(CliError::Mismatch(format!("chunk {i} was withdrawn while it was being loaded")));
        }
    }
    loaded.transfers = Some(tally.transfers(&cache));
    loaded.first_difference = check(&plan, &image, &cache, reporter)?;
    Ok(loaded)
}

/// The first wrong byte of the prompt's tokens. Bytes changed elsewhere are an error of their own.
fn check(
    plan: &Plan,
    image: &Image<'_>,
    cache: &Cache,
    reporter: &Reporter,
) -> Result<Option<crate::p2p::image::Difference>, CliError> {
    let (mut first, mut stray) = (None, None);
    for layer in 0..plan.shape.layers {
        reporter.progress(Phase::Checking, layer, plan.shape.layers);
        let (difference, outside) = image.check(cache, layer)?;
        first = first.or(difference);
        stray = stray.or(outside);
    }
    if let Some(difference) = first {
        tracing::warn!(
            ?difference,
            block = image.block_of(difference.token),
            "the first byte that is not what the producer stored"
        );
    }
    match (first, stray) {
        (None, Some(Stray { layer, byte })) => Err(CliError::Mismatch(format!(
            "the load changed byte {byte} of layer {layer}, which is outside the prompt's slots"
        ))),
        _ => Ok(first),
    }
}

/// Looks the chunks up until all are there, or for one missing chunk if that is all there is time for.
///
/// Returns the leading chunks that were found.
fn find(
    job: &Job,
    engine: &TransferEngine,
    keys: &[ChunkKey],
    reporter: &Arc<Reporter>,
) -> Result<Vec<Published>, CliError> {
    let mut most = 0;
    let mut since = Instant::now();
    let mut pause = Duration::from_millis(5);
    loop {
        // The pool is opened anew each time: whoever makes it may replace it.
        let outcome =
            pool::open_for_reading(engine, job, false, |_, _| {}).and_then(|pool| lookup(&pool, keys));
        let waited = since.elapsed() >= job.timeout() || !job.wait;
        match outcome {
            Ok(found) if found.len() == keys.len() => break,
            Ok(found) if waited => return Ok(found),
            Ok(found) if found.len() > most => {
                most = found.len();
                since = Instant::now();
            }
            Ok(_) => {}
            Err(error) if !may_pass(&error) || !job.wait => return Err(error),
            Err(error) if waited => {
                return Err(CliError::Timeout(format!(
                    "no pool to read within {} s: {error}",
                    job.timeout().as_secs()
                )));
            }
            Err(_) => {}
        }
        reporter.progress(Phase::Waiting, most as u64, keys.len() as u64);
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(200));
    }
    // Once more with every page present, so that the transfers are timed and not the page faults.
    let mapping = Arc::clone(reporter);
    let mapped = move |done, total| mapping.progress(Phase::Mapping, done, total);
    let pool = pool::open_for_reading(engine, job, true, mapped)?;
    lookup(&pool, keys)
}

fn lookup(pool: &SlabPool, keys: &[ChunkKey]) -> Result<Vec<Published>, CliError> {
    let mut found = Vec::with_capacity(keys.len());
    for key in keys {
        match pool.lookup(&key.0)? {
            Some(published) => found.push(published),
            None => break,
        }
    }
    Ok(found)
}

/// Whether an error is what a pool looks like that is only just being made.
fn may_pass(error: &CliError) -> bool {
    matches!(
        error,
        CliError::Cxl(
            CxlError::NotFound { .. }
                | CxlError::NotAPool { .. }
                | CxlError::BadAttribute { .. }
                | CxlError::SizeUnknown { .. }
                | CxlError::OutOfBounds { .. }
                | CxlError::MemoryFault { .. }
        )
    )
}

fn check_sum(plan: &Plan, chunk: usize, published: &Published) -> Result<(), CliError> {
    let Some(wanted) = published.checksum() else {
        if plan.config.transfer.checksum != ChecksumKind::None {
            tracing::warn!(chunk, "the chunk was published without a checksum");
        }
        return Ok(());
    };
    let found = maru::transfer::checksum(published.slab())?;
    match found == wanted {
        true => Ok(()),
        false => Err(CliError::Mismatch(format!(
            "chunk {chunk} was not loaded: its bytes have checksum {found:016x}, it was published with {wanted:016x}"
        ))),
    }
}
