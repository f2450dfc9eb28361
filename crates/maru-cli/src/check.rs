//! Checks a transfer of any size: memory is filled with bytes that follow from their place, so that what should be
//! where can be computed and needs no second copy of everything.
//!
//! Places come from the oracle's own formula; only the bytes of one head in one token, which every layout of the
//! table keeps together, are taken at once.

use maru::layout::Direction;

use crate::error::CliError;
use crate::p2p::content::{canary, mix};
use crate::rig::{Rig, Work};

/// Bytes filled or compared at a time.
const CHUNK: usize = 4 << 20;

/// Fills cache and slabs.
pub(crate) fn fill(rig: &mut Rig, seed: u64) -> Result<(), CliError> {
    let (cache, slabs) = (rig.built().bytes, rig.slabs_len());
    chunks(cache, |at, chunk| {
        canary(seed, at, chunk);
        rig.write_cache(at, chunk)
    })?;
    chunks(slabs, |at, chunk| {
        canary(mix(seed), at, chunk);
        rig.write_slabs(at, chunk)
    })
}

/// Compares both sides, wholly, with what they should hold after [`fill`] and one transfer of `work`, in which
/// every slot is to be moved and none is named twice. `Err` in the inner result: what differs.
pub(crate) fn check(
    rig: &Rig,
    direction: Direction,
    work: &[Work],
    seed: u64,
) -> Result<Result<(), String>, CliError> {
    let (mut cache, mut slabs) = (image(rig.built().bytes), image(rig.slabs_len()));
    rig.read_cache(&mut cache)?;
    rig.read_slabs(0, &mut slabs)?;
    // The rows that were written are compared, then turned back into what was there before; after that both
    // sides must be as they were filled.
    let (from, to) = match direction {
        Direction::Gather => (seed, mix(seed)),
        Direction::Scatter => (mix(seed), seed),
    };
    let reference = &rig.built().reference;
    let row = reference.row_bytes();
    let heads = rig.built().heads();
    let piece = row / heads;
    let mut wanted = image(piece);
    for work in work {
        for (kv, layer) in (0..reference.planes).flat_map(|kv| (0..reference.layers).map(move |l| (kv, l))) {
            for (token, slot) in (0..).zip(&work.slots) {
                let Ok(slot) = u64::try_from(*slot) else { continue };
                for head in 0..heads {
                    let paged = reference.paged_offset(kv, layer, slot, head * piece);
                    let strip = (kv * reference.layers + layer) * work.tokens + token;
                    let packed = work.offset + strip * row + head * piece;
                    let (source, place, side) = match direction {
                        Direction::Gather => (paged, packed, &mut slabs),
                        Direction::Scatter => (packed, paged, &mut cache),
                    };
                    canary(from, source, &mut wanted);
                    let start = usize::try_from(place).unwrap_or(usize::MAX);
                    let found = side.get_mut(start..start.saturating_add(wanted.len()));
                    if found.as_deref() != Some(&wanted[..]) {
                        return Ok(Err(format!(
                            "layer {layer}, {}, token {token} of the slab at {}, head {head} is wrong",
                            if kv == 0 { "K" } else { "V" },
                            work.offset
                        )));
                    }
                    if let Some(found) = found {
                        canary(to, place, found);
                    }
                }
            }
        }
    }
    Ok(untouched("cache", &cache, seed).and_then(|()| untouched("slab", &slabs, mix(seed))))
}

fn untouched(what: &str, bytes: &[u8], seed: u64) -> Result<(), String> {
    let mut wanted = image(CHUNK as u64);
    for (at, found) in (0..).step_by(CHUNK).zip(bytes.chunks(CHUNK)) {
        let wanted = wanted.get_mut(..found.len()).unwrap_or_default();
        canary(seed, at, wanted);
        if let Some(i) = found.iter().zip(wanted.iter()).position(|(f, w)| f != w) {
            return Err(format!(
                "{what} byte {} was changed and is in no slot that was moved",
                at + i as u64
            ));
        }
    }
    Ok(())
}

fn chunks(len: u64, mut each: impl FnMut(u64, &mut [u8]) -> Result<(), CliError>) -> Result<(), CliError> {
    let mut chunk = image(len.min(CHUNK as u64));
    for at in (0..len).step_by(CHUNK) {
        let n = usize::try_from(len - at).unwrap_or(CHUNK).min(CHUNK);
        each(at, chunk.get_mut(..n).unwrap_or_default())?;
    }
    Ok(())
}

fn image(len: u64) -> Vec<u8> {
    vec![0; usize::try_from(len).unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layouts::{Dims, LAYOUTS};
    use maru::cxl::Region;
    use maru::transfer::TransferEngine;
    use maru::transfer::config::DeviceChoice;
    use maru::{Config, DType};

    /// What the byte-by-byte oracle moves is right, and any other byte is not.
    #[test]
    fn it_agrees_with_the_oracle_and_sees_every_flipped_byte() {
        let mut config = Config::default();
        config.transfer.device = DeviceChoice::Host;
        let engine = TransferEngine::open(&config).unwrap();
        let dims = Dims { layers: 2, blocks: 3, block_size: 4, heads: 2, head_size: 3 };
        for layout in LAYOUTS {
            let dims = if layout.mla { Dims { heads: 1, ..dims } } else { dims };
            for direction in [Direction::Gather, Direction::Scatter] {
                let built = layout.build(dims, DType::Bf16, 1, 0).unwrap();
                let r = built.reference.clone();
                let slab_bytes = r.planes * r.layers * 2 * r.row_bytes();
                let slabs = Region::anonymous(slab_bytes + 9).unwrap();
                let mut rig = Rig::new(std::slice::from_ref(&engine), built, slabs).unwrap();
                let work = [Work { slots: vec![2, 0], offset: 3, tokens: 2, skip: 0 }];
                fill(&mut rig, 5).unwrap();
                let (mut cache, mut slab) = (image(rig.built().bytes), image(slab_bytes + 9));
                rig.read_cache(&mut cache).unwrap();
                rig.read_slabs(0, &mut slab).unwrap();
                r.copy(direction, &mut cache, &mut slab[3..], 2, &[2, 0], 0);
                rig.write_cache(0, &cache).unwrap();
                rig.write_slabs(0, &slab).unwrap();
                assert_eq!(check(&rig, direction, &work, 5).unwrap(), Ok(()), "{}", layout.name);
                for at in (0..rig.built().bytes).step_by(7) {
                    let byte = cache[usize::try_from(at).unwrap()];
                    rig.write_cache(at, &[!byte]).unwrap();
                    assert!(check(&rig, direction, &work, 5).unwrap().is_err(), "{} {at}", layout.name);
                    rig.write_cache(at, &[byte]).unwrap();
                }
                for at in (0..slab_bytes + 9).step_by(7) {
                    let byte = slab[usize::try_from(at).unwrap()];
                    rig.write_slabs(at, &[!byte]).unwrap();
                    assert!(check(&rig, direction, &work, 5).unwrap().is_err(), "{} {at}", layout.name);
                    rig.write_slabs(at, &[byte]).unwrap();
                }
            }
        }
    }
}
