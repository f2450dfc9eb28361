//! Kind: everything at once. Random geometries, orders of the axes in memory, pads, addresses, slots and skips, by
//! every mover, compared with the oracle.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use maru::{CacheSpec, DType};

use crate::harness::Test;
use crate::rig::{Random, Rig, View, slots};

pub(crate) fn tests() -> Vec<Test> {
    tests![moved: c12_layers_on_other_borders, random_caches_move_exactly;]
}

/// The width of an access is one for all layers: the first may not decide it.
fn c12_layers_on_other_borders(rig: &Rig) {
    let tensor = View::new(&[3, 2, 4, 2, 32], "block,kv,token,head,dim");
    for offsets in
        [[0, 8193, 16_384], [1, 8192, 16_384], [0, 8192, 16_392], [0, 8194, 16_388], [15, 8207, 16_399]]
    {
        let hnd = tensor.clone().strides(&[512, 256, 64, 32, 1]);
        let planes = View::new(&[3, 4, 2, 32], "block,token,head,dim").told(CacheSpec {
            split_kv: true,
            block_size: Some(4),
            ..CacheSpec::default()
        });
        let [a, b, c] = offsets;
        for view in [tensor.clone().at(&offsets), hnd.at(&offsets), planes.split().at(&[a, b, c, c + 8192])] {
            let cache = rig.cache(&view);
            cache.exact(&slots(&[11, 0, 1, 2, 3, 7]));
            cache.exact(&slots(&[4, 5, 6, 7, 8, 9, 10, 11]).slab_shift(4));
        }
    }
}

const ORDERS: [&str; 9] = [
    "block,kv,token,head,dim",
    "kv,block,token,head,dim",
    "block,kv,head,token,dim",
    "block,head,token,kv_dim",
    "block,token,head,content",
    "block,token,dim",
    "block,token,head,dim",
    "block,layer,kv,token,head,dim",
    "slot,head,dim",
];

fn below(random: &mut Random, n: u64) -> u64 {
    (random.next() >> 16) % n
}

/// A cache's tensors; no two positions share memory.
fn view(random: &mut Random) -> View {
    let words = ORDERS[below(random, ORDERS.len() as u64) as usize];
    let tokens = [1, 2, 3, 4, 5, 7, 16][below(random, 7) as usize];
    let blocks = 1 + below(random, 5) as i64;
    // One plane in a tensor of several heads is K or V.
    let split = matches!(words, "block,token,head,dim" | "slot,head,dim");
    let names: Vec<&str> = words.split(',').collect();
    let shape: Vec<i64> = names
        .iter()
        .map(|word| match *word {
            "block" => blocks,
            "token" => tokens,
            "slot" => blocks * tokens,
            "kv" => 2,
            "head" | "layer" => 1 + below(random, 4) as i64,
            "kv_dim" => 2 * (1 + below(random, 20) as i64),
            _ => 1 + below(random, 40) as i64,
        })
        .collect();
    let last = shape.len() - 1;
    let (mut strides, mut step) = (vec![1; shape.len()], shape[last]);
    for axis in random.shuffled(last as i64) {
        strides[axis as usize] = step;
        step *= shape[axis as usize];
        if below(random, 3) == 0 {
            step += below(random, 5) as i64;
        }
    }
    let dtype = [DType::U8, DType::Bf16, DType::F32, DType::Raw64][below(random, 4) as usize];
    let layers = (1 + below(random, 3)) * if split { 2 } else { 1 };
    let (mut offsets, mut at) = (Vec::new(), below(random, 17));
    for _ in 0..layers {
        offsets.push(at);
        at += step as u64 * dtype.size() + if below(random, 2) == 0 { 0 } else { below(random, 40) };
    }
    let spec = CacheSpec { block_size: Some(tokens as u64), split_kv: split, ..CacheSpec::default() };
    let view = View::new(&shape, words).strides(&strides).dtype(dtype).told(spec).named().at(&offsets);
    if split { view.split() } else { view }
}

/// Some, always the same; `MARU_FUZZ_SECONDS` of them if asked for.
fn random_caches_move_exactly(rig: &Rig) {
    let seconds = std::env::var("MARU_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok());
    let (begun, mut caches) = (Instant::now(), 0u64);
    // A campaign has a seed of its own, printed for the case that it finds something.
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |t| t.as_nanos() as u64);
    let seed = seconds.map_or(0x0123_4567_89ab_cdef, |_: u64| now() | 1);
    println!("seed {seed:#x}");
    let mut random = Random(seed);
    while seconds.map_or(caches < 200, |s| begun.elapsed() < Duration::from_secs(s)) {
        let view = view(&mut random);
        let cache = match rig.try_cache(&view) {
            Ok(cache) => cache,
            Err(error) => panic!("{view:?}: {error}"),
        };
        caches += 1;
        let count = cache.registered.paged().num_slots() as i64;
        for _ in 0..2 {
            // Runs of slots, some of them holes.
            let mut list: Vec<i64> = match below(&mut random, 2) {
                0 => random.shuffled(count),
                _ => {
                    let first = below(&mut random, count as u64) as i64;
                    (0..count).map(|i| (first + i) % count).collect()
                }
            };
            list.truncate(1 + below(&mut random, count as u64) as usize);
            if below(&mut random, 2) == 0 {
                list.iter_mut().filter(|_| below(&mut random, 4) == 0).for_each(|slot| *slot = -1);
            }
            let mut way = slots(&list).slab_shift(below(&mut random, 17));
            way.tokens += below(&mut random, 3);
            if below(&mut random, 2) == 0 {
                way.skip = below(&mut random, list.len() as u64 + 1);
            }
            if below(&mut random, 3) == 0 {
                let first = below(&mut random, cache.reference.layers) as u32;
                way = way
                    .layers(first, below(&mut random, cache.reference.layers - u64::from(first) + 1) as u32);
            }
            cache.exact(&way);
        }
    }
    if seconds.is_some() {
        eprintln!(
            "fuzz: moves by {}: {caches} caches in {} s, no finding",
            rig.mover.name,
            begun.elapsed().as_secs()
        );
    }
}
