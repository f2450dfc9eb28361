//! By size: host time from the call to synchronised, beside a flat copy of the same bytes; CPU time of a batch.

use std::fmt::Write as _;
use std::time::Instant;

use maru::TransferRequest;

use crate::common::{Bench, PROFILES, Profile, TOKENS, median};
use crate::gpu::{Gpu, Stream, cu};
use crate::record::Record;
use crate::{ENGINES, Options, World, slabs};

/// What rows are called, a profile, tokens of a transfer: part of a slab, then whole slabs. 64 KiB a token, and 256 KiB.
const SIZES: [(&str, &str, &[u64]); 2] = [
    ("size", "llama-3.1-8b-fp8", &[1, 4, 16, 64, 256, 1024, 4096, 32768]),
    ("small", "qwen2.5-32b", &[1, 16]),
];

pub(crate) fn sizes(gpu: &Gpu, options: &Options, record: &mut Record) -> Result<(), String> {
    for (what, name, tokens) in SIZES {
        let profile = PROFILES.iter().find(|p| p.name == name).unwrap();
        of_profile(gpu, what, (profile, tokens), options, record)?;
    }
    Ok(())
}

fn of_profile(
    gpu: &Gpu,
    what: &str,
    (profile, sizes): (&Profile, &[u64]),
    options: &Options,
    record: &mut Record,
) -> Result<(), String> {
    let (stream, repeats) = (Stream::new(), options.repeats);
    let token_bytes = profile.layers * profile.heads * profile.head_size * 2 * profile.dtype.size();
    let bench = Bench::new(gpu, profile, sizes.iter().max().unwrap() * token_bytes, false);
    let memory = slabs(gpu, &bench);
    let worlds: Vec<World> = ENGINES.iter().map(|e| World::new(gpu, &bench, profile, e.1, &memory)).collect();
    let (host, half) = (memory.addr().as_ptr() as u64, bench.total() as u64);
    println!(
        "\nby size, {} {}: microseconds from call to synchronised, ratio to the flat copy",
        profile.name, profile.order
    );
    for &tokens in sizes {
        record.progress(format_args!("sizes: {}, {tokens} tokens", profile.name));
        let n = usize::try_from(tokens * token_bytes).unwrap();
        let rounds = if tokens <= 256 { 200 * repeats } else { 4 * repeats + 8 };
        for (direction, dir) in ["H2D", "D2H"].into_iter().enumerate() {
            let requests: Vec<Vec<TransferRequest>> =
                worlds.iter().map(|world| world.first_tokens(&bench, direction, &stream, tokens)).collect();
            let (mut flat, mut whole) = (Vec::new(), vec![Vec::new(); worlds.len()]);
            let (mut cpu, mut words) = (vec![Vec::new(); worlds.len()], vec![""; worlds.len()]);
            for round in 0..rounds + rounds / 10 + 1 {
                let keep = round > rounds / 10;
                let start = Instant::now();
                match direction {
                    0 => cu!(cuMemcpyHtoDAsync_v2(bench.pages.addr, host as *const _, n, stream.0)),
                    _ => cu!(cuMemcpyDtoHAsync_v2((host + half) as *mut _, bench.pages.addr, n, stream.0)),
                }
                stream.wait();
                if keep {
                    flat.push(start.elapsed().as_secs_f64() * 1e6);
                }
                for (i, world) in worlds.iter().enumerate() {
                    let start = Instant::now();
                    let transfer = world.engine.submit_many(&requests[i]).unwrap();
                    let submitted = start.elapsed().as_secs_f64() * 1e6;
                    words[i] = transfer.strategy();
                    transfer.wait().unwrap();
                    if keep {
                        whole[i].push(start.elapsed().as_secs_f64() * 1e6);
                        cpu[i].push(submitted);
                    }
                }
            }
            let flat = median(&mut flat);
            let mut line = format!("{tokens:>6} tokens {n:>10} bytes {dir} | flat {flat:.1}");
            for (i, (engine, _)) in ENGINES.into_iter().enumerate() {
                let (time, cpu, word) = (median(&mut whole[i]), median(&mut cpu[i]), words[i]);
                let ratio = time / flat;
                write!(line, " | {engine} ({word}) {time:.1} {ratio:.3} cpu {cpu:.1}").unwrap();
                let (p, l) = (profile.name, profile.order);
                record.row(format_args!(
                    "{what},{p},{l},{dir},{engine},{word},{n},{time:.2},us,{flat:.2},{ratio:.4}"
                ))?;
                record.row(format_args!("{what} cpu,{p},{l},{dir},{engine},{word},{n},{cpu:.2},us,,"))?;
            }
            println!("{line}");
        }
    }
    Ok(())
}

impl World {
    /// Requests for the first tokens of the slabs.
    fn first_tokens(
        &self,
        bench: &Bench,
        direction: usize,
        stream: &Stream,
        tokens: u64,
    ) -> Vec<TransferRequest> {
        let whole = self.requests(bench, direction, stream);
        match tokens < TOKENS {
            true => vec![self.part_of_a_slab(bench, direction, stream, tokens)],
            false => whole.into_iter().take(usize::try_from(tokens / TOKENS).unwrap()).collect(),
        }
    }
}
