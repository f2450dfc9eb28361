//! CPU time of one `submit` beside a bare launch.

use std::time::Instant;

use crate::common::{Bench, PROFILES, TOKENS, median};
use crate::gpu::{Gpu, Stream};
use crate::record::Record;
use crate::{ENGINES, Options, World, slabs};

/// CPU time of one `submit` of 256 host slots, the stream idle before, beside a bare launch.
pub(crate) fn submit_cost(gpu: &Gpu, options: &Options, record: &mut Record) -> Result<(), String> {
    let stream = Stream::new();
    let profile = PROFILES.iter().find(|p| p.name == "qwen2.5-32b-tp8").unwrap();
    let bench = Bench::new(gpu, profile, 16_000_000, false);
    let memory = slabs(gpu, &bench);
    let rounds = 200 * options.repeats;
    println!(
        "\nCPU time of one submit, {TOKENS} host slots, microseconds (median of {rounds}, stream idle before)"
    );
    for (name, config) in ENGINES {
        record.progress(format_args!("CPU time of a submit: {name}"));
        let world = World::new(gpu, &bench, profile, config, &memory);
        for (direction, dir) in ["H2D", "D2H"].into_iter().enumerate() {
            let requests = world.requests(&bench, direction, &stream);
            let (mut bare, mut submit) = (Vec::new(), Vec::new());
            for round in 0..rounds + rounds / 10 {
                let start = Instant::now();
                gpu.stall(&stream, 0, 0, 0, 0);
                let launch = start.elapsed().as_secs_f64() * 1e6;
                stream.wait();
                let start = Instant::now();
                let transfer = world.engine.submit(&requests[0]).unwrap();
                let took = start.elapsed().as_secs_f64() * 1e6;
                transfer.wait().unwrap();
                if round >= rounds / 10 {
                    bare.push(launch);
                    submit.push(took);
                }
            }
            let (bare, submit) = (median(&mut bare), median(&mut submit));
            println!("  {name:<9} {dir} {submit:6.2}  bare launch {bare:5.2}  over {:6.2}", submit - bare);
            let (p, l, n) = (profile.name, profile.order, bench.slab_bytes);
            record.row(format_args!(
                "submit,{p},{l},{dir},{name},,{n},{submit:.3},us,{bare:.3},{:.4}",
                submit / bare
            ))?;
        }
    }
    Ok(())
}
