//! One trial: random bytes, several ways to move them, and the whole memory of both sides compared with what the
//! oracle makes of it, so that a byte written anywhere else shows.

use maru::cxl::Region;
use maru::layout::Direction;

use crate::check;
use crate::error::CliError;
use crate::layouts::{Layout, TAIL};
use crate::movers::Mover;
use crate::p2p::content::{canary, mix, shuffled};
use crate::rig::{Rig, Work};
use crate::verify::{LARGE, Size};

/// Tokens of a slab, unless the cache has fewer slots.
const TOKENS: u64 = 20;

/// Slots of one slab, and how many of its first tokens are skipped.
type Job<'a> = (&'a [i64], u64);

/// Runs every way; what went wrong first, in words.
pub(super) fn conforms(
    mover: &Mover,
    layout: &Layout,
    size: &Size,
    direction: Direction,
    seed: u64,
    planted: bool,
) -> Result<(), String> {
    let text = |e: CliError| e.to_string();
    if size.dims.blocks * size.dims.block_size >= LARGE {
        return large(mover, layout, size, direction, seed, planted).map_err(text)?;
    }
    Trial::new(mover, layout, size, seed).map_err(text)?.run(direction, planted)
}

/// Most of a cache's slots in one slab of some megabytes.
fn large(
    mover: &Mover,
    layout: &Layout,
    size: &Size,
    direction: Direction,
    seed: u64,
    planted: bool,
) -> Result<Result<(), String>, CliError> {
    let built = layout.build(size.dims, size.dtype, size.pad, size.shift)?;
    let tokens = built.slots - built.slots / 8;
    let bytes = built.reference.planes * built.reference.layers * tokens * built.reference.row_bytes();
    let slots = shuffled(built.slots, seed).into_iter().map(|slot| i64::try_from(slot).unwrap_or(-1));
    let slots = slots.take(usize::try_from(tokens).unwrap_or(0)).collect();
    let work = [Work { slots, offset: 0, tokens, skip: 0 }];
    let slabs = Region::anonymous(bytes + TAIL)?;
    let mut rig = Rig::new(std::slice::from_ref(&mover.engine), built, slabs)?;
    check::fill(&mut rig, seed)?;
    let requests = rig.requests(0, direction, &work)?;
    let report = rig.submit(0, &requests)?;
    drop(requests);
    if (report.backend, report.strategy, report.bytes) != (mover.backend, mover.strategy, bytes) {
        return Ok(Err(format!(
            "it reports {} bytes by {}/{}",
            report.bytes, report.backend, report.strategy
        )));
    }
    if planted {
        rig.write_slabs(bytes, &[0; 8])?;
    }
    check::check(&rig, direction, &work, seed)
}

struct Trial<'a> {
    mover: &'a Mover,
    rig: Rig,
    tokens: u64,
    slab_bytes: u64,
    seed: u64,
}

impl<'a> Trial<'a> {
    fn new(mover: &'a Mover, layout: &Layout, size: &Size, seed: u64) -> Result<Self, CliError> {
        let built = layout.build(size.dims, size.dtype, size.pad, size.shift)?;
        let tokens = TOKENS.min(built.slots);
        let slab_bytes =
            built.reference.planes * built.reference.layers * tokens * built.reference.row_bytes();
        // Two slabs, each with room behind it that must stay as it is.
        let slabs = Region::anonymous(2 * (slab_bytes + TAIL))?;
        let rig = Rig::new(std::slice::from_ref(&mover.engine), built, slabs)?;
        let seed = mix(seed ^ mix(slab_bytes) ^ layout.name.len() as u64);
        Ok(Trial { mover, rig, tokens, slab_bytes, seed })
    }

    fn run(mut self, direction: Direction, planted: bool) -> Result<(), String> {
        let order: Vec<i64> = shuffled(self.rig.built().slots, self.seed)
            .into_iter()
            .map(|slot| i64::try_from(slot).unwrap_or(-1))
            .collect();
        let n = usize::try_from(self.tokens).unwrap_or(0);
        let full = order.get(..n).unwrap_or(&order);
        let rest = order.get(n..).unwrap_or(&[]);
        let mut holes = full.to_vec();
        holes.iter_mut().step_by(3).for_each(|slot| *slot = -1);
        let run: Vec<i64> = (0..).take(n).collect();
        let half = full.get(..n / 2).unwrap_or(full);
        let second = rest.get(..n.min(rest.len())).unwrap_or(rest);
        let ways: [(&str, Vec<Job<'_>>); 7] = [
            ("whole slab", vec![(full, 0)]),
            ("consecutive slots", vec![(&run, 0)]),
            ("every third token left out", vec![(&holes, 0)]),
            ("a prefix skipped", vec![(full, self.tokens / 3)]),
            ("everything skipped", vec![(full, self.tokens)]),
            ("fewer tokens than the slab holds", vec![(half, 0)]),
            ("two slabs at once", vec![(full, 0), (second, 0)]),
        ];
        for (way, jobs) in ways {
            self.one(direction, &jobs, planted).map_err(|e| format!("{way}: {e}"))?;
        }
        Ok(())
    }

    fn one(&mut self, direction: Direction, jobs: &[Job<'_>], planted: bool) -> Result<(), String> {
        let text = |e: CliError| e.to_string();
        self.seed = mix(self.seed);
        let mut cache = random(self.seed, self.rig.built().bytes);
        let mut slabs = random(mix(self.seed), 2 * (self.slab_bytes + TAIL));
        self.rig.write_cache(0, &cache).map_err(text)?;
        self.rig.write_slabs(0, &slabs).map_err(text)?;

        let (mut expected, mut moved, mut given, mut work) = (0, 0, 0, Vec::new());
        for (i, (slots, skip)) in (0..).zip(jobs) {
            let offset = i * (self.slab_bytes + TAIL);
            work.push(Work { slots: slots.to_vec(), offset, tokens: self.tokens, skip: *skip });
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            let slab = slabs.get_mut(start..).unwrap_or_default();
            let reference = &self.rig.built().reference;
            expected += reference.copy(direction, &mut cache, slab, self.tokens, slots, *skip);
            let from = usize::try_from(*skip).unwrap_or(usize::MAX).min(slots.len());
            moved += slots.iter().skip(from).filter(|slot| **slot >= 0).count();
            given += slots.len() - from;
        }
        let requests = self.rig.requests(0, direction, &work).map_err(text)?;
        let report = self.rig.submit(0, &requests).map_err(text)?;
        drop(requests);

        // A staged transfer cannot leave tokens out; it may then go directly.
        let strategy = match self.mover.strategy {
            _ if moved == 0 => "none",
            "staged" if moved != given && report.strategy == "direct" => "direct",
            strategy => strategy,
        };
        if (report.backend, report.strategy) != (self.mover.backend, strategy) {
            return Err(format!(
                "it was moved by {}/{} and not by {}/{strategy}",
                report.backend, report.strategy, self.mover.backend
            ));
        }
        if report.bytes != expected {
            return Err(format!("it reports {} bytes, the oracle moved {expected}", report.bytes));
        }
        if planted {
            let first = slabs.first().copied().unwrap_or(0);
            self.rig.write_slabs(0, &[!first]).map_err(text)?;
        }
        let mut found = vec![0; cache.len()];
        self.rig.read_cache(&mut found).map_err(text)?;
        same("cache", &found, &cache)?;
        let mut found = vec![0; slabs.len()];
        self.rig.read_slabs(0, &mut found).map_err(text)?;
        same("slab", &found, &slabs)
    }
}

fn random(seed: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    canary(seed, 0, &mut bytes);
    bytes
}

fn same(what: &str, found: &[u8], expected: &[u8]) -> Result<(), String> {
    match found.iter().zip(expected).position(|(f, e)| f != e) {
        None => Ok(()),
        Some(i) => {
            let byte = |bytes: &[u8]| bytes.get(i).copied().unwrap_or(0);
            Err(format!("{what} byte {i} is {:#04x}, the oracle has {:#04x}", byte(found), byte(expected)))
        }
    }
}
