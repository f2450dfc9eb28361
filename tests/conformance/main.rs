//! Every backend against the oracle: backend × layout × sizes × direction, through the public engine.
//!
//! A trial moves random bytes several ways (whole slab, some slots −1, a skipped prefix, fewer tokens than the
//! slab holds), compares the *whole* memory of both sides with the oracle's, so that a byte written anywhere
//! else shows, and asserts which backend and strategy did it. Backends that cannot run here show as ignored.
#![allow(clippy::cast_possible_truncation, reason = "test sizes are small")]

mod layouts;
mod memory;

use layouts::{Built, Dims, Kind, LAYOUTS, Layout};
use libtest_mimic::{Arguments, Failed, Trial};
use maru::layout::oracle::Reference;
use maru::{
    CacheTensor, Config, DType, Direction, PagedCache, Place, SlotMapping, Tensors, TransferEngine,
    TransferRequest,
};
use memory::Arena;

/// Sizes: heads and block size differ, are equal, one head, and an odd row.
const SIZES: &[(&str, Dims, DType, u64, u64)] = &[
    ("bf16", dims(3, 7, 16, 3, 8), DType::Bf16, 0, 0),
    ("fp8_padded", dims(2, 6, 16, 2, 32), DType::Fp8E4m3, 64, 0),
    ("equal_heads_and_tokens", dims(2, 5, 4, 4, 16), DType::Bf16, 0, 0),
    ("one_head", dims(2, 5, 16, 1, 64), DType::F16, 0, 0),
    ("odd_row", dims(2, 4, 16, 1, 23), DType::Bf16, 0, 0),
    ("misaligned", dims(2, 5, 12, 3, 16), DType::U8, 3, 1),
    ("f32_one_token_blocks", dims(2, 33, 1, 2, 4), DType::F32, 0, 0),
];

const fn dims(layers: u64, blocks: u64, block_size: u64, heads: u64, head_size: u64) -> Dims {
    Dims { layers, blocks, block_size, heads, head_size }
}

/// A backend as the engine is asked for it.
#[derive(Clone, Copy, Debug)]
struct Mover {
    name: &'static str,
    config: &'static str,
    /// What transfers must report.
    reports: (&'static str, &'static str),
    gpu: bool,
}

const MOVERS: &[Mover] = &[
    Mover {
        name: "fallback::host_threads_1",
        config: "[transfer]\ndevice = \"host\"\nhost_threads = 1",
        reports: ("fallback", "host"),
        gpu: false,
    },
    Mover {
        name: "fallback::host_threads_3",
        config: "[transfer]\ndevice = \"host\"\nhost_threads = 3",
        reports: ("fallback", "host"),
        gpu: false,
    },
    Mover {
        name: "fallback::copy_engine",
        config: "[transfer]\ndevice = \"cuda:0\"\nbackend = \"fallback\"",
        reports: ("fallback", "copy_engine"),
        gpu: true,
    },
    Mover {
        name: "native::direct",
        config: "[transfer]\ndevice = \"cuda:0\"\nbackend = \"native\"\nstrategy = \"direct\"",
        reports: ("native", "direct"),
        gpu: true,
    },
    Mover {
        name: "native::staged",
        config: "[transfer]\ndevice = \"cuda:0\"\nbackend = \"native\"\nstrategy = \"staged\"\nstaging_bytes = \"1MiB\"",
        reports: ("native", "staged"),
        gpu: true,
    },
    Mover {
        name: "native::fused_load",
        config: "[transfer]\ndevice = \"cuda:0\"\nstrategy = \"direct\"\nenable_fused_load = true",
        reports: ("native", "direct"),
        gpu: true,
    },
];

/// Where a mover's trials run, and why not.
struct Stage {
    suffix: &'static str,
    ignored: Option<String>,
}

/// The host for host movers. For device movers a GPU, and, where there is none, a simulated driver that runs
/// the kernel's own source: it proves everything but the hardware.
fn stages(mover: &Mover, no_gpu: Option<&str>, no_simulator: Option<&str>) -> Vec<Stage> {
    if !mover.gpu {
        return vec![Stage { suffix: "", ignored: None }];
    }
    let required = |variable| std::env::var_os(variable).is_some();
    let gpu = no_gpu.filter(|_| !required("MARU_REQUIRE_GPU")).map(|reason| format!("no GPU: {reason}"));
    let mut stages = vec![Stage { suffix: "", ignored: gpu }];
    if no_gpu.is_some() && !required("MARU_REQUIRE_GPU") {
        let reason = no_simulator.filter(|_| !required("MARU_REQUIRE_CXX"));
        stages.push(Stage { suffix: "::simulated", ignored: reason.map(|r| format!("no simulator: {r}")) });
    }
    stages
}

fn main() {
    let args = Arguments::from_args();
    let no_gpu = maru::kernel::availability(0).err().map(|e| e.to_string());
    // The simulator takes the place of a driver that is not there, or has nothing to drive.
    let simulator = no_gpu.as_ref().map(|_| maru_sim_driver::install());
    let no_simulator = simulator.and_then(|s| s.err()).map(|e| e.to_string());
    let mut trials = Vec::new();
    for mover in MOVERS {
        for Stage { suffix, ignored } in stages(mover, no_gpu.as_deref(), no_simulator.as_deref()) {
            for layout in LAYOUTS {
                for (size, dims, dtype, pad, shift) in SIZES.iter().copied().filter(|s| layout.fits(s.1)) {
                    for direction in [Direction::Gather, Direction::Scatter] {
                        let name = format!("{}{suffix}::{}::{size}::{direction:?}", mover.name, layout.name);
                        let run = move || conforms(layout, dims, dtype, (pad, shift), direction, mover);
                        let trial = Trial::test(name, run);
                        trials.push(match &ignored {
                            Some(reason) => trial.with_kind(reason.clone()).with_ignored_flag(true),
                            None => trial,
                        });
                    }
                }
            }
        }
    }
    libtest_mimic::run(&args, trials).exit();
}

/// A small generator: the trials must be the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next().to_le_bytes()[3]).collect()
    }

    fn slots(&mut self, slots: u64, n: usize) -> Vec<i64> {
        let mut all: Vec<i64> = (0..slots as i64).collect();
        for i in (1..all.len()).rev() {
            all.swap(i, self.below(i as u64 + 1) as usize);
        }
        all.truncate(n);
        all
    }
}

fn conforms(
    layout: &Layout,
    dims: Dims,
    dtype: DType,
    (pad, shift): (u64, u64),
    direction: Direction,
    mover: &Mover,
) -> Result<(), Failed> {
    let built = layout.build(dims, dtype, pad, shift);
    let mut random = Random(0x1234_5678_9abc_def1 ^ built.arena);
    let tokens = (built.slots.min(20)) as usize;
    let full = random.slots(built.slots, tokens);
    let mut holes = full.clone();
    holes.iter_mut().step_by(3).for_each(|s| *s = -1);
    let run: Vec<i64> = (0..tokens as i64).collect();
    let ways: [(&str, &[i64], u64); 6] = [
        ("whole slab", &full, 0),
        ("consecutive slots", &run, 0),
        ("every third skipped", &holes, 0),
        ("prefix skipped", &full, tokens as u64 / 3),
        ("all skipped", &full, tokens as u64),
        ("fewer tokens", &full[..tokens / 2], 0),
    ];
    for (way, slots, skip) in ways {
        one(&built, direction, slots, skip, tokens as u64, mover, &mut random)
            .map_err(|e| Failed::from(format!("{way}: {e}")))?;
    }
    Ok(())
}

fn one(
    built: &Built,
    direction: Direction,
    slots: &[i64],
    skip: u64,
    tokens: u64,
    mover: &Mover,
    random: &mut Random,
) -> Result<(), String> {
    let config = Config::from_toml_str(mover.config, mover.name).map_err(|e| e.to_string())?;
    let engine = TransferEngine::open(&config).map_err(|e| e.to_string())?;
    let context = match engine.place() {
        Place::Cuda(n) => Some(maru::kernel::open_context(n as usize).map_err(|e| e.to_string())?),
        _ => None,
    };

    // The cache in its own memory, aligned so that `shift` alone decides the alignment.
    let mut expected_cache = random.bytes(built.arena as usize);
    let arena = Arena::new(context.as_ref(), &expected_cache)?;
    let base = arena.addr();
    let tensor = |offset: u64| CacheTensor {
        addr: base + offset,
        len: built.arena - offset,
        desc: built.tensor.clone(),
    };
    let list: Vec<CacheTensor> = built.offsets.iter().map(|o| tensor(*o)).collect();
    let tensors = match built.kind {
        Kind::PerLayer => Tensors::PerLayer(list),
        Kind::CrossLayer => Tensors::CrossLayer(list[0].clone()),
        Kind::Split => {
            let (k, v) = list.split_at(list.len() / 2);
            Tensors::Split { k: k.to_vec(), v: v.to_vec() }
        }
    };
    // SAFETY: the tensors lie in `memory`, which outlives the cache and is touched by this thread only.
    let cache =
        unsafe { PagedCache::new(&tensors, &built.spec, engine.place(), None) }.map_err(|e| e.to_string())?;
    let layers = cache.layers();
    let cache = engine.register(cache).map_err(|e| e.to_string())?;

    let reference = Reference {
        tensor: built.tensor.clone(),
        axes: built.axes.clone(),
        block_size: built.block_size,
        planes: built.planes,
        layers,
        tensors: built.offsets.clone(),
    };
    // A slab with room behind it, which must stay as it is.
    let slab_bytes = built.planes * layers * tokens * reference.row_bytes();
    let mut expected_slab = random.bytes((slab_bytes + 64) as usize);
    let slab = memory::slab(context.as_ref(), &expected_slab)?;

    let written = reference.copy(direction, &mut expected_cache, &mut expected_slab, tokens, slots, skip);
    let moved = slots.iter().skip(skip as usize).filter(|s| **s >= 0).count() as u64;
    if written != moved * built.planes * layers * reference.row_bytes() {
        return Err(format!("the reference moved {written} bytes for {moved} tokens"));
    }

    let mapping = SlotMapping::from_slots(slots);
    let request = match direction {
        Direction::Gather => TransferRequest::gather(&cache, mapping, &slab),
        Direction::Scatter => TransferRequest::scatter(&cache, mapping, &slab),
    };
    let request = request.slab_tokens(tokens).skip_tokens(skip).partial(true);
    let transfer = engine.submit(&request).map_err(|e| e.to_string())?;
    // A store that leaves tokens out cannot go through the ring, which would write over them.
    let holes = moved != slots.len() as u64 - skip;
    let strategy = match mover.reports.1 {
        _ if moved == 0 => "none",
        "staged" if holes && direction == Direction::Gather => "direct",
        strategy => strategy,
    };
    if (transfer.backend(), transfer.strategy()) != (mover.reports.0, strategy) {
        return Err(format!("moved by {} / {}", transfer.backend(), transfer.strategy()));
    }
    if transfer.bytes() != written {
        return Err(format!("reports {} bytes where {written} were to be moved", transfer.bytes()));
    }
    transfer.wait().map_err(|e| e.to_string())?;

    same("cache", &arena.read(expected_cache.len())?, &expected_cache)?;
    let mut found = vec![0u8; expected_slab.len()];
    slab.read_at(0, &mut found).map_err(|e| e.to_string())?;
    same("slab", &found, &expected_slab)
}

fn same(what: &str, found: &[u8], expected: &[u8]) -> Result<(), String> {
    match found.iter().zip(expected).position(|(f, e)| f != e) {
        None => Ok(()),
        Some(i) => Err(format!("{what} byte {i} is {:#04x}, the oracle has {:#04x}", found[i], expected[i])),
    }
}
