//! When the layers of a load are there, submitted layer by layer, beside the same load submitted whole.

use std::time::{Duration, Instant};

use maru::TransferRequest;

use crate::common::{Bench, Profile, median};
use crate::gpu::{Gpu, Stream};
use crate::record::Record;
use crate::{ENGINES, Options, World, slabs};

/// Slabs of a load.
const SLABS: [usize; 3] = [1, 8, 32];

/// Rounds of one number take no longer than this, unless there would be fewer than the least.
const BUDGET: Duration = Duration::from_secs(2);
const LEAST: usize = 5;

/// Unless others are asked for: one model in every layout, one of another width, one of latent rows.
fn cases(options: &Options) -> Vec<Profile> {
    let mut cases = options.cases();
    if options.profile.is_empty() {
        cases.retain(|case| match case.name {
            "qwen2.5-32b" | "deepseek-v3-mla" => true,
            "llama-3.1-8b-fp8" => case.order == "blocks_first_nhd",
            _ => false,
        });
    }
    cases
}

pub(crate) fn layers(gpu: &Gpu, options: &Options, record: &mut Record) -> Result<(), String> {
    let stream = Stream::new();
    println!("\nlayer by layer, host clock in microseconds (medians)");
    for profile in &cases(options) {
        let (p, l) = (profile.name, profile.order);
        let planes = if l == "mla" { 1 } else { 2 };
        let slab = planes * profile.layers * profile.heads * profile.head_size * profile.dtype.size() * 256;
        let bench = Bench::new(gpu, profile, slab * SLABS[2] as u64, false);
        let memory = slabs(gpu, &bench);
        for (engine, config) in ENGINES {
            let world = World::new(gpu, &bench, profile, config, &memory);
            for slabs in SLABS {
                record.progress(format_args!("layers: {p} {l} {engine}, {slabs} slabs"));
                let requests: Vec<_> = world.requests(&bench, 0, &stream).into_iter().take(slabs).collect();
                let times = measure(&world, &requests, profile.layers as usize, 4 * options.repeats);
                // Of L layers the first may take 3 / L of the time.
                let share = times.first / times.all * profile.layers as f64;
                let (word, whole, bytes) = (times.strategy, times.whole, slabs * bench.slab_bytes);
                println!(
                    "{p:<17} {l:<17} {engine:<9} {word:<12} {slabs:>3} slabs: whole {whole:.0}, by layer {:.0} \
                     ({:.3}), layer 0 after {:.0} = {share:.2}/L, layer {} after {:.0}, submit {:.0}",
                    times.all,
                    times.all / whole,
                    times.first,
                    profile.layers / 2,
                    times.middle,
                    times.submit
                );
                let totals = [
                    ("whole", whole),
                    ("all", times.all),
                    ("first", times.first),
                    ("middle", times.middle),
                    ("submit", times.submit),
                ];
                let totals = totals.map(|(what, time)| (what.to_owned(), time));
                let each =
                    times.each.iter().enumerate().map(|(layer, time)| (format!("ready {layer}"), *time));
                for (what, time) in totals.into_iter().chain(each) {
                    record.row(format_args!(
                        "layers {what},{p},{l},H2D,{engine},{word},{bytes},{time:.2},us,{whole:.2},{:.4}",
                        time / whole
                    ))?;
                }
            }
        }
    }
    Ok(())
}

/// Medians in microseconds from the call on.
#[derive(Default)]
struct Times {
    strategy: &'static str,
    /// The same load submitted whole.
    whole: f64,
    /// Until the call by layer returned, and layer 0, the middle one, all were seen to be there.
    submit: f64,
    first: f64,
    middle: f64,
    all: f64,
    /// Of every layer, waited for one after the other in rounds of their own.
    each: Vec<f64>,
}

fn measure(world: &World, requests: &[TransferRequest], layers: usize, rounds: usize) -> Times {
    let half = (layers / 2) as u32;
    let mut times: [Vec<f64>; 5] = Default::default();
    let mut strategy = "";
    repeat(rounds, |keep| {
        let start = Instant::now();
        world.engine.submit_many(requests).unwrap().wait().unwrap();
        let whole = start.elapsed();
        let start = Instant::now();
        let mut transfer = world.engine.submit_by_layer(requests, &[]).unwrap();
        let submitted = start.elapsed();
        transfer.wait_layer(0).unwrap();
        let first = start.elapsed();
        transfer.wait_layer(half).unwrap();
        let middle = start.elapsed();
        strategy = transfer.strategy();
        transfer.wait().unwrap();
        let all = start.elapsed();
        if keep {
            let taken = [whole, submitted, first, middle, all];
            times.iter_mut().zip(taken).for_each(|(t, d)| t.push(microseconds(d)));
        }
    });
    let mut each = vec![Vec::new(); layers];
    repeat(rounds / 2, |keep| {
        let start = Instant::now();
        let mut transfer = world.engine.submit_by_layer(requests, &[]).unwrap();
        for (layer, times) in each.iter_mut().enumerate() {
            transfer.wait_layer(layer as u32).unwrap();
            if keep {
                times.push(microseconds(start.elapsed()));
            }
        }
        transfer.wait().unwrap();
    });
    let [whole, submit, first, middle, all] = times.each_mut().map(|t| median(t));
    let each = each.iter_mut().map(|t| median(t)).collect();
    Times { strategy, whole, submit, first, middle, all, each }
}

/// Two rounds that do not count, then `rounds`, or fewer if they take too long.
fn repeat(rounds: usize, mut round: impl FnMut(bool)) {
    for _ in 0..2 {
        round(false);
    }
    let begun = Instant::now();
    for done in 0..rounds.max(LEAST) {
        if done >= LEAST && begun.elapsed() > BUDGET {
            break;
        }
        round(true);
    }
}

fn microseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}
