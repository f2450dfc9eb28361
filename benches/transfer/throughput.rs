//! Throughput of every engine beside the flat copy, by profile and layout.

use crate::common::{Bench, Profile, events, median, timed};
use crate::gpu::{Gpu, Stream, cu};
use crate::record::Record;
use crate::{ENGINES, Options, World, slabs};

pub(crate) fn throughputs(gpu: &Gpu, options: &Options, record: &mut Record) -> Result<(), String> {
    println!(
        "\n{:<20} {:<17} {:>4} {:<9} {:<12} {:>6} {:>6}  ratio",
        "profile", "layout", "dir", "engine", "strategy", "GB/s", "flat"
    );
    let cases = options.cases();
    for (i, profile) in cases.iter().enumerate() {
        let (name, order) = (profile.name, profile.order);
        record.progress(format_args!("throughput {} of {}: {name} {order}", i + 1, cases.len()));
        throughput(gpu, profile, options, record)?;
    }
    Ok(())
}

fn throughput(gpu: &Gpu, profile: &Profile, options: &Options, record: &mut Record) -> Result<(), String> {
    let (stream, events) = (Stream::new(), events());
    let bench = Bench::new(gpu, profile, options.bytes, false);
    let memory = slabs(gpu, &bench);
    let worlds: Vec<World> = ENGINES.iter().map(|e| World::new(gpu, &bench, profile, e.1, &memory)).collect();
    let half = bench.total() as u64;
    for (world, (name, _)) in worlds.iter().zip(ENGINES) {
        bench.pages.fill(0xa5);
        for direction in [0, 1] {
            let transfer = world.engine.submit_many(&world.requests(&bench, direction, &stream)).unwrap();
            transfer.wait().unwrap();
        }
        let (mut loaded, mut stored) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        for at in (0..half).step_by(1 << 20) {
            let n = (half - at).min(1 << 20) as usize;
            memory.read_at(at, &mut loaded[..n]).unwrap();
            memory.read_at(half + at, &mut stored[..n]).unwrap();
            assert!(loaded[..n] == stored[..n], "{name}: what was stored differs from what was loaded");
        }
        memory.write_at(half, &vec![0; 1 << 20]).unwrap();
    }
    let total = half as f64 / 1e9;
    let host = memory.addr().as_ptr() as u64;
    for (direction, dir) in ["H2D", "D2H"].into_iter().enumerate() {
        let requests: Vec<_> = worlds.iter().map(|w| w.requests(&bench, direction, &stream)).collect();
        let (mut flat, mut rates, mut strategy) =
            (Vec::new(), vec![Vec::new(); worlds.len()], vec![""; worlds.len()]);
        for round in 0..=options.repeats {
            let n = (half as usize).min(bench.pages.len);
            let seconds = timed(&stream, &events, || match direction {
                0 => cu!(cuMemcpyHtoDAsync_v2(bench.pages.addr, host as *const _, n, stream.0)),
                _ => cu!(cuMemcpyDtoHAsync_v2((host + half) as *mut _, bench.pages.addr, n, stream.0)),
            });
            flat.push(total / seconds);
            for (i, world) in worlds.iter().enumerate() {
                let mut transfer = None;
                let seconds = timed(&stream, &events, || {
                    transfer = Some(world.engine.submit_many(&requests[i]).unwrap())
                });
                let transfer = transfer.unwrap();
                strategy[i] = transfer.strategy();
                transfer.wait().unwrap();
                if round > 0 {
                    rates[i].push(total / seconds);
                }
            }
        }
        let flat = median(&mut flat[1..]);
        for (i, (engine, _)) in ENGINES.into_iter().enumerate() {
            let (rate, strategy) = (median(&mut rates[i]), strategy[i]);
            let (p, l, ratio) = (profile.name, profile.order, rate / flat);
            println!("{p:<20} {l:<17} {dir:>4} {engine:<9} {strategy:<12} {rate:6.1} {flat:6.1}  {ratio:.3}");
            record.row(format_args!(
                "throughput,{p},{l},{dir},{engine},{strategy},{half},{rate:.2},GB/s,{flat:.2},{ratio:.4}"
            ))?;
        }
    }
    Ok(())
}
