//! One measurement: a profile in a layout, some tokens, the movers of one place.

use std::path::Path;
use std::time::{Duration, Instant};

use maru::cxl::{CxlError, Region};
use maru::layout::Direction;
use maru::transfer::TransferRequest;
use maru::transfer::profile::Profile;

use crate::args::BenchArgs;
use crate::bench::{Failure, Results, Row};
use crate::check;
use crate::doctor::system;
use crate::error::CliError;
use crate::layouts::{Built, Dims, Layout};
use crate::memory::shared_file;
use crate::movers::{Group, Skipped};
use crate::p2p::content::shuffled;
use crate::rig::{Rig, Work};

/// Time given to the rounds of one direction.
const BUDGET: Duration = Duration::from_millis(500);
const LEAST_ROUNDS: u64 = 5;
const MOST_ROUNDS: u64 = 2000;
const SEED: u64 = 7;

#[derive(Debug)]
pub(super) struct Case<'a> {
    pub(super) profile: &'a Profile,
    pub(super) layout: &'a Layout,
    pub(super) tokens: u64,
    pub(super) group: &'a Group,
    /// Tokens of a slab.
    pub(super) chunk: u64,
}

impl Case<'_> {
    pub(super) fn run(&self, args: &BenchArgs, results: &mut Results) -> Result<(), CliError> {
        let blocks = self.tokens.div_ceil(u64::from(self.profile.block_size));
        let dims = Dims {
            layers: self.profile.layers.into(),
            // A quarter more, so that blocks lie as they do in a cache in use; two blocks could be taken for K and V.
            blocks: blocks + blocks / 4 + 2,
            block_size: self.profile.block_size.into(),
            heads: self.profile.kv_heads.into(),
            head_size: self.profile.head_size.into(),
        };
        let built = self.layout.build(dims, self.profile.dtype, 0, 0)?;
        let reference = &built.reference;
        let token_bytes = reference.planes * reference.layers * reference.row_bytes();
        let too_large = || CliError::invalid(format!("{} tokens of this profile are too large", self.tokens));
        let bytes = self.tokens.checked_mul(token_bytes).ok_or_else(too_large)?;
        if let Some(reason) = no_room(&built, bytes) {
            results.skipped.push(Skipped { what: self.name(), reason });
            return Ok(());
        }
        let work = self.work(dims, token_bytes);
        let engines: Vec<_> = self.group.movers.iter().map(|mover| mover.engine.clone()).collect();
        let slabs = match shared_file(Path::new("/dev/shm"), bytes) {
            Ok(region) => region,
            Err(error @ CxlError::NoSpace { .. }) => {
                tracing::warn!(%error, "slabs in private memory instead");
                Region::anonymous(bytes)?
            }
            Err(_) => Region::anonymous(bytes)?,
        };
        let mut rig = Rig::new(&engines, built, slabs)?;
        for direction in [Direction::Gather, Direction::Scatter] {
            let mut good = Vec::new();
            for (lane, mover) in self.group.movers.iter().enumerate() {
                match self.checked(&mut rig, lane, direction, &work, bytes, args.test_fault)? {
                    Ok(strategy) => good.push((lane, strategy)),
                    Err(what) => results.failures.push(Failure {
                        profile: self.profile.name.clone(),
                        layout: self.layout.name,
                        device: self.group.place.to_string(),
                        tokens: self.tokens,
                        direction: word(direction),
                        mover: mover.name.clone(),
                        what,
                    }),
                }
            }
            let times = time(&mut rig, direction, &work, bytes, &good, args.rounds)?;
            results.rows.extend(self.rows(direction, bytes, &good, &times));
        }
        Ok(())
    }

    fn name(&self) -> String {
        format!("{} {} {} tokens {}", self.profile.name, self.layout.name, self.tokens, self.group.place)
    }

    /// The prompt's slabs: whole blocks in a random order, as a scheduler gives them out.
    fn work(&self, dims: Dims, token_bytes: u64) -> Vec<Work> {
        let blocks = shuffled(dims.blocks, SEED);
        let slot = |token: u64| {
            let block = usize::try_from(token / dims.block_size).ok().and_then(|i| blocks.get(i)).copied();
            let slot = block.map(|block| block * dims.block_size + token % dims.block_size);
            slot.and_then(|slot| i64::try_from(slot).ok()).unwrap_or(-1)
        };
        let starts = (0..self.tokens).step_by(usize::try_from(self.chunk).unwrap_or(usize::MAX));
        starts
            .map(|start| {
                let end = start.saturating_add(self.chunk).min(self.tokens);
                Work {
                    slots: (start..end).map(slot).collect(),
                    offset: start * token_bytes,
                    tokens: end - start,
                    skip: 0,
                }
            })
            .collect()
    }

    /// One transfer of random bytes, compared; the strategy that moved it.
    fn checked(
        &self,
        rig: &mut Rig,
        lane: usize,
        direction: Direction,
        work: &[Work],
        bytes: u64,
        planted: bool,
    ) -> Result<Result<&'static str, String>, CliError> {
        let Some(mover) = self.group.movers.get(lane) else {
            return Ok(Err("there is no such mover".into()));
        };
        check::fill(rig, SEED)?;
        let requests = rig.requests(lane, direction, work)?;
        let moved = rig.submit(lane, &requests)?;
        if planted {
            rig.write_slabs(0, &[0x5a; 16])?;
        }
        if (moved.backend, moved.bytes) != (mover.backend, bytes) {
            return Ok(Err(format!(
                "{} bytes were moved by {}/{}",
                moved.bytes, moved.backend, moved.strategy
            )));
        }
        Ok(check::check(rig, direction, work, SEED)?.map(|()| moved.strategy))
    }

    fn rows(
        &self,
        direction: Direction,
        bytes: u64,
        good: &[(usize, &'static str)],
        times: &Times,
    ) -> Vec<Row> {
        let flat_seconds = median(times.flat.clone());
        let gbps = |seconds: f64| if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 };
        let row = |((lane, strategy), seconds): (&(usize, &'static str), &Vec<f64>)| {
            let mover = self.group.movers.get(*lane)?;
            let ratios = times.flat.iter().zip(seconds).filter(|(_, s)| **s > 0.0).map(|(f, s)| f / s);
            let median_seconds = median(seconds.clone());
            Some(Row {
                profile: self.profile.name.clone(),
                layout: self.layout.name,
                device: self.group.place.to_string(),
                tokens: self.tokens,
                bytes,
                direction: word(direction),
                mover: mover.name.clone(),
                backend: mover.backend,
                strategy,
                threads: mover.threads,
                rounds: seconds.len() as u64,
                seconds: median_seconds,
                gbps: gbps(median_seconds),
                flat_seconds,
                flat_gbps: gbps(flat_seconds),
                ratio: median(ratios.collect()),
            })
        };
        good.iter().zip(&times.movers).filter_map(row).collect()
    }
}

pub(super) fn word(direction: Direction) -> &'static str {
    match direction {
        Direction::Gather => "gather",
        Direction::Scatter => "scatter",
    }
}

/// Seconds of every round.
#[derive(Debug)]
struct Times {
    flat: Vec<f64>,
    movers: Vec<Vec<f64>>,
}

/// Interleaved rounds after one that does not count; who is first changes from round to round.
fn time(
    rig: &mut Rig,
    direction: Direction,
    work: &[Work],
    bytes: u64,
    good: &[(usize, &'static str)],
    rounds: Option<u64>,
) -> Result<Times, CliError> {
    let requests: Vec<Vec<TransferRequest>> =
        good.iter().map(|(lane, _)| rig.requests(*lane, direction, work)).collect::<Result<_, _>>()?;
    let contenders = good.len() + 1;
    let mut times = Times { flat: Vec::new(), movers: vec![Vec::new(); good.len()] };
    let mut begun = Instant::now();
    for round in 0.. {
        if round == 1 {
            begun = Instant::now();
        }
        let done = u64::try_from(round).unwrap_or(u64::MAX).saturating_sub(1);
        let enough = match rounds {
            Some(rounds) => done >= rounds,
            None => done >= MOST_ROUNDS || done >= LEAST_ROUNDS && begun.elapsed() >= BUDGET,
        };
        if round > 0 && enough {
            break;
        }
        for turn in 0..contenders {
            let who = (turn + round) % contenders;
            let start = Instant::now();
            match who.checked_sub(1) {
                None => rig.flat(direction, bytes)?,
                Some(i) => {
                    let (Some((lane, _)), Some(requests)) = (good.get(i), requests.get(i)) else { continue };
                    rig.submit(*lane, requests)?;
                }
            }
            let seconds = start.elapsed().as_secs_f64();
            match who.checked_sub(1) {
                _ if round == 0 => {}
                None => times.flat.push(seconds),
                Some(i) => times.movers.get_mut(i).into_iter().for_each(|t| t.push(seconds)),
            }
        }
    }
    Ok(times)
}

/// Why a case would not fit into memory, if the kernel says how much there is.
fn no_room(built: &Built, slabs: u64) -> Option<String> {
    let available = system::field(&system::text(Path::new("/proc/meminfo"))?, "MemAvailable")?;
    // Cache and slabs, and a copy of each to check.
    let wanted = built.bytes.saturating_add(slabs).saturating_mul(2);
    (wanted > available).then(|| format!("it takes {wanted} bytes of memory, {available} are available"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle), values.len() % 2) {
        (Some(upper), 0) => (upper + values.get(middle.wrapping_sub(1)).unwrap_or(upper)) / 2.0,
        (Some(value), _) => *value,
        (None, _) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!((median(vec![7.0]), median(vec![])), (7.0, 0.0));
    }
}
