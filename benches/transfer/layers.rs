//! When the layers of a load are there, submitted layer by layer, beside the same load submitted whole.

use std::fmt::Write as _;
use std::time::Instant;

use crate::common::{Bench, PROFILES, median};
use crate::gpu::{Gpu, Stream};
use crate::{ENGINES, World, slabs};

/// Slabs of a load.
const SLABS: [usize; 3] = [1, 8, 32];

pub(crate) fn layers(gpu: &Gpu, repeats: usize, csv: &mut String) {
    let stream = Stream::new();
    println!("\nlayer by layer, host clock in microseconds (median of {})", 4 * repeats);
    for profile in PROFILES.iter().filter(|p| p.name != "qwen2.5-32b-tp8") {
        let slab = profile.layers * profile.heads * profile.head_size * 256 * 4;
        let bench = Bench::new(gpu, profile, slab * SLABS[2] as u64, false);
        let memory = slabs(gpu, &bench);
        for (engine, config) in ENGINES {
            let world = World::new(gpu, &bench, profile, config, &memory);
            for slabs in SLABS {
                let requests: Vec<_> = world.requests(&bench, 0, &stream).into_iter().take(slabs).collect();
                let half = (profile.layers / 2) as u32;
                let mut times: [Vec<f64>; 5] = Default::default();
                let mut word = "";
                for round in 0..4 * repeats + 2 {
                    let start = Instant::now();
                    world.engine.submit_many(&requests).unwrap().wait().unwrap();
                    let whole = start.elapsed();
                    let start = Instant::now();
                    let mut transfer = world.engine.submit_by_layer(&requests, &[]).unwrap();
                    let submitted = start.elapsed();
                    transfer.wait_layer(0).unwrap();
                    let first = start.elapsed();
                    transfer.wait_layer(half).unwrap();
                    let middle = start.elapsed();
                    word = transfer.strategy();
                    transfer.wait().unwrap();
                    let all = start.elapsed();
                    if round >= 2 {
                        let taken = [whole, submitted, first, middle, all];
                        times.iter_mut().zip(taken).for_each(|(t, d)| t.push(d.as_secs_f64() * 1e6));
                    }
                }
                let [whole, submitted, first, middle, all] = times.each_mut().map(|t| median(t));
                // Of L layers the first may take 3 / L of the time.
                let share = first / all * profile.layers as f64;
                let (p, l, bytes) = (profile.name, profile.order, slabs * bench.slab_bytes);
                println!(
                    "{p:<17} {l:<17} {engine:<9} {word:<12} {slabs:>3} slabs: whole {whole:.0}, by layer {all:.0} \
                     ({:.3}), layer 0 after {first:.0} = {share:.2}/L, layer {half} after {middle:.0}, submit {submitted:.0}",
                    all / whole
                );
                for (what, time) in [
                    ("whole", whole),
                    ("all", all),
                    ("first", first),
                    ("middle", middle),
                    ("submit", submitted),
                ] {
                    writeln!(
                        csv,
                        "layers {what},{p},{l},H2D,{engine},{word},{bytes},{time:.2},us,{whole:.2},{:.4}",
                        time / whole
                    )
                    .unwrap();
                }
            }
        }
    }
}
