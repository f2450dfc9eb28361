//! Open-ended inputs: whatever is typed, read from a device or found in sysfs, the answer is right or an error.
//!
//! Each target runs a few hundred inputs as an ordinary test. `MARU_FUZZ_SECONDS=600` makes it go on for so long
//! with ever new seeds; the number of inputs is printed.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use maru::cxl::{
    CreateOptions, DaxDevice, DeviceHeader, MapOptions, Mapping, OpenOptions, PoolOptions, Region, SlabPool,
};
use maru::layout::{
    CopyJob, CopyPlan, JobRequest, JobSlots, PagedLayout, RowKind, SlabLayout, SlabSpan, StridedSpec,
};
use maru::{Axis, CacheSpec, Config, DType, Direction, SlotMapping, TensorDesc};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config as Budget, TestCaseResult, TestError, TestRunner};

use crate::harness::Test;

pub(crate) fn tests() -> Vec<Test> {
    tests![plain: fuzz_detection, fuzz_plan_and_job, fuzz_configuration, fuzz_device_bytes, fuzz_sysfs;]
}

fn fuzz_detection() {
    campaign("detection", &tensors(), detect);
}

fn fuzz_plan_and_job() {
    campaign("plan and job", &jobs(), job);
}

fn fuzz_configuration() {
    campaign("configuration", &configurations(), configuration);
}

fn fuzz_device_bytes() {
    let pool = Bytes::new();
    campaign("device header and directory", &edits(), |edit| pool.opened(&edit));
}

fn fuzz_sysfs() {
    let sysfs = Sysfs::new();
    campaign("sysfs", &attributes(), |texts| sysfs.opened(&texts));
}

thread_local! {
    /// Inputs of this thread's target that were accepted and looked into; a target that accepts none tests little.
    static ACCEPTED: Cell<u64> = const { Cell::new(0) };
}

fn accepted() {
    ACCEPTED.set(ACCEPTED.get() + 1);
}

/// Runs a target for the time asked for, at least once.
fn campaign<S: Strategy>(name: &str, inputs: &S, target: impl Fn(S::Value) -> TestCaseResult) {
    let seconds = std::env::var("MARU_FUZZ_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(0);
    let (begun, executions) = (Instant::now(), AtomicU64::new(0));
    loop {
        let budget = Budget { cases: 300, failure_persistence: None, ..Budget::default() };
        let outcome = TestRunner::new(budget).run(inputs, |input| {
            executions.fetch_add(1, Ordering::Relaxed);
            target(input)
        });
        match outcome {
            Ok(()) => {}
            Err(TestError::Fail(reason, input)) => panic!("{name}: {reason}\n{input:#?}"),
            Err(TestError::Abort(reason)) => panic!("{name}: {reason}"),
        }
        if begun.elapsed() >= Duration::from_secs(seconds) {
            break;
        }
    }
    assert!(ACCEPTED.get() > 0, "{name}: no input was accepted");
    if seconds > 0 {
        let (all, accepted) = (executions.load(Ordering::Relaxed), ACCEPTED.get());
        let seconds = begun.elapsed().as_secs();
        eprintln!("fuzz: {name}: {all} inputs ({accepted} accepted) in {seconds} s, no finding");
    }
}

/// Numbers where things go wrong.
fn edge() -> impl Strategy<Value = i64> {
    let edges = [
        0,
        -1,
        i64::MIN,
        i64::MAX,
        i64::MAX - 1,
        1 << 31,
        (1 << 31) - 1,
        (1 << 31) + 1,
        1 << 32,
        (1 << 32) - 1,
        1 << 40,
        1 << 52,
        1 << 61,
        1 << 62,
        4096,
        4095,
    ];
    prop_oneof![
        10 => 1i64..5,
        4 => select(&[8i64, 16, 32, 64, 128, 256, 576][..]),
        3 => 1i64..300,
        2 => select(edges.to_vec()),
        1 => any::<i64>(),
    ]
}

fn fact() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![8 => Just(None), 3 => edge().prop_map(|n| Some(n.unsigned_abs()))]
}

const ORDERS: [&str; 12] = [
    "block,kv,token,head,dim",
    "kv,block,token,head,dim",
    "block,kv,head,token,dim",
    "block,head,token,kv_dim",
    "block,token,head,content",
    "kv,block,token,heads_dim",
    "block,token,dim",
    "slot,head,dim",
    "block,content",
    "block,layer,kv,token,head,dim",
    "layer,kv,block,head,token,dim",
    "kv,slot,head,content",
];

type Tensor = (Vec<i64>, Vec<i64>, DType, CacheSpec);

fn tensors() -> impl Strategy<Value = Tensor> {
    let axes = prop_oneof![
        8 => Just(None),
        4 => select(ORDERS.to_vec()).prop_map(Axis::parse_list).prop_map(|axes| axes.ok()),
        2 => select(ORDERS.to_vec()).prop_map(|text| Axis::parse_list(text).unwrap()).prop_shuffle().prop_map(Some),
        1 => prop::collection::vec(select(&Axis::ALL[..]), 0..9).prop_map(Some),
    ];
    let facts = (fact(), fact(), fact(), fact(), fact(), any::<bool>(), prop::bool::weighted(0.2), axes);
    let len = || prop_oneof![8 => 1i64..6, 4 => Just(2i64), 3 => select(&[8i64, 16, 64, 128][..])];
    let shape = prop_oneof![
        8 => prop::collection::vec(len(), 2..7),
        2 => prop::collection::vec(prop_oneof![6 => len(), 1 => edge()], 1..8),
        1 => prop::collection::vec(edge(), 0..10),
    ];
    let strides = prop_oneof![
        // Dense in some order of the axes, with pads; and anything.
        9 => (prop::collection::vec(0i64..6, 10), any::<u64>()).prop_map(|(pads, seed)| (true, pads, seed)),
        1 => (prop::collection::vec(edge(), 10), any::<u64>()).prop_map(|(s, seed)| (false, s, seed)),
    ];
    (shape, strides, select(&DType::ALL[..]), facts).prop_map(|(shape, strides, dtype, facts)| {
        let (dense, numbers, seed) = strides;
        let strides =
            if dense { dense_strides(&shape, &numbers, seed) } else { numbers[..shape.len()].to_vec() };
        let (block_size, num_kv_heads, head_size, backend_head_size, num_blocks, mla, split_kv, axes) = facts;
        // Mostly what is stated is found in the tensor.
        let of = |stated: Option<u64>, at: u64| match (stated, seed >> at & 3) {
            (Some(_), 1..) if !shape.is_empty() => {
                shape.get((seed >> (at + 8)) as usize % shape.len()).map(|n| n.unsigned_abs())
            }
            (stated, _) => stated,
        };
        let spec = CacheSpec {
            block_size: of(block_size, 1),
            num_kv_heads: of(num_kv_heads, 2),
            head_size: of(head_size, 3),
            backend_head_size: of(backend_head_size, 4),
            num_blocks: of(num_blocks, 5),
            mla: mla && seed & 0x30 == 0,
            split_kv,
            axes,
        };
        (shape, strides, dtype, spec)
    })
}

fn dense_strides(shape: &[i64], pads: &[i64], seed: u64) -> Vec<i64> {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    for i in (1..order.len().saturating_sub(1)).rev() {
        order.swap(i, (seed >> (3 * i)) as usize % (i + 1));
    }
    let mut strides = vec![1i64; shape.len()];
    let mut step = 1i64;
    for &axis in order.iter().rev() {
        strides[axis] = step;
        step = step.wrapping_mul(shape[axis].max(1)).wrapping_add(pads[axis] * i64::from(seed & 7 == 0));
    }
    strides
}

/// Whatever the tensor, detection ends with a layout whose numbers hold together, or with an error in words.
fn detect((shape, strides, dtype, spec): Tensor) -> TestCaseResult {
    let _ = TensorDesc::contiguous(&shape, dtype);
    let tensor = match TensorDesc::strided(&shape, &strides, dtype) {
        Ok(tensor) => tensor,
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    let layout = match PagedLayout::detect(&tensor, &spec) {
        Ok(layout) => layout,
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    accepted();
    // Nothing is addressed beyond the tensor, and as many bytes as it has.
    prop_assert!(layout.span_bytes() <= tensor.span_bytes());
    let elements = shape.iter().fold(1u128, |n, len| n * u128::from(len.unsigned_abs()));
    let found = u128::from(layout.num_slots())
        * u128::from(layout.token_bytes())
        * u128::from(layout.kv_planes())
        * u128::from(layout.layers());
    prop_assert_eq!(found, elements * u128::from(dtype.size()));
    prop_assert!(!(spec.mla && layout.kv_planes() != 1));
    for (stated, found) in [(spec.num_kv_heads, layout.num_heads()), (spec.head_size, layout.head_size())] {
        if layout.row_kind() == RowKind::Plain {
            prop_assert!(stated.is_none_or(|n| n == found));
        }
    }
    if let (Some(size), true) = (spec.block_size, layout.row_kind() != RowKind::OpaqueBlocks) {
        prop_assert!(size.is_multiple_of(layout.block_size()));
    }
    prop_assert!(matches!(layout.access_bytes(0), 1 | 2 | 4 | 8 | 16));
    prop_assert!(layout.row_bytes().is_multiple_of(dtype.size()));
    let _ = layout.kernel_limits();
    let _ = layout.byte_strides();
    // The numbers alone give the same layout again.
    let again = PagedLayout::from_strides(layout.spec());
    prop_assert_eq!(again.map(|l| l.span_bytes()), Ok(layout.span_bytes()));
    Ok(())
}

fn worded(text: &str, kind: &str) -> TestCaseResult {
    prop_assert!(!text.is_empty() && text.len() < 20_000, "{} bytes of text", text.len());
    prop_assert!(!kind.is_empty() && kind.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'));
    Ok(())
}

#[derive(Clone, Debug)]
struct Job {
    spec: StridedSpec,
    base: u64,
    layers: u64,
    slab: ([u64; 3], [u64; 3], DType, bool),
    span: SlabSpan,
    slots: SlotMapping,
    skip: u64,
    partial: bool,
    range: Option<(u32, u32)>,
    direction: Direction,
}

fn count() -> impl Strategy<Value = u64> {
    prop_oneof![60 => 1u64..6, 6 => 1u64..70, 1 => edge().prop_map(i64::unsigned_abs)]
}

fn jobs() -> impl Strategy<Value = Job> {
    let dtype = || select(&DType::ALL[..]);
    let number = || edge().prop_map(i64::unsigned_abs);
    let geometry = (
        count(),
        count(),
        count(),
        count(),
        count(),
        prop::array::uniform5(number()),
        prop::bool::weighted(0.9),
        0u64..4,
    );
    let slots = prop_oneof![
        3 => prop::collection::vec(prop_oneof![40 => -1i64..16, 1 => edge()], 0..40).prop_map(SlotMapping::from_slots),
        3 => Just((-3i64..12).map(|s| s.max(-1)).collect::<Vec<_>>()).prop_shuffle().prop_flat_map(|all| {
            (0..all.len()).prop_map(move |n| SlotMapping::from_slots(all[..n].to_vec()))
        }),
        2 => (-1i64..8, 0i64..24).prop_map(|(s, n)| SlotMapping::from_slots((s..s + n).collect::<Vec<_>>())),
        1 => (number(), number()).prop_map(|(addr, len)| SlotMapping::Device { addr, len }),
    ];
    let address = || prop_oneof![1 => Just(None), 1 => number().prop_map(Some), 6 => (0u64..9).prop_map(|n| Some((1 << 20) + n))];
    let span = (address(), address(), prop_oneof![9 => Just(1u64 << 40), 1 => number()]);
    let tokens = prop_oneof![9 => 8u64..64, 1 => number()];
    let slab = (
        (tokens, number(), number()).prop_map(|(t, a, b)| [t, a, b]),
        prop::array::uniform3(number()),
        dtype(),
        prop::bool::weighted(0.8),
    );
    let range = prop_oneof![
        9 => Just(None),
        4 => (0u32..3, 0u32..3).prop_map(Some),
        1 => any::<(u32, u32)>().prop_map(Some)
    ];
    let base = prop_oneof![12 => 0x1000u64..0x1010, 1 => any::<u64>()];
    let skip = prop_oneof![12 => 0u64..4, 1 => any::<u64>()];
    let rest = (skip, prop::bool::weighted(0.9), range, any::<bool>());
    (geometry, dtype(), base, slab, span, slots, rest).prop_map(
        |(g, dtype, base, slab, span, slots, (skip, partial, range, gather))| {
            let (num_blocks, block_size, num_heads, head_size, layers, free, dense, pad) = g;
            let [mut block_stride, mut token_stride, mut head_stride, mut kv_stride, layer_stride] = free;
            if dense {
                head_stride = head_size.wrapping_mul(dtype.size());
                token_stride = head_stride.wrapping_mul(num_heads).wrapping_add(pad);
                block_stride = token_stride.wrapping_mul(block_size).wrapping_add(pad);
                kv_stride = block_stride.wrapping_mul(num_blocks);
            }
            let spec = StridedSpec {
                dtype,
                row_kind: RowKind::Plain,
                kv_planes: 1 + pad % 2,
                kv_stride,
                layers: 1,
                layer_stride,
                num_blocks,
                block_size,
                num_heads,
                head_size,
                block_stride,
                token_stride,
                head_stride,
            };
            let direction = if gather { Direction::Gather } else { Direction::Scatter };
            let span = SlabSpan { host: span.0, device: span.1, len: span.2 };
            Job { spec, base, layers, slab, span, slots, skip, partial, range, direction }
        },
    )
}

/// A job that is made stays inside its planes and its slab, whatever was asked.
fn job(input: Job) -> TestCaseResult {
    let layout = match PagedLayout::from_strides(&input.spec) {
        Ok(layout) => layout,
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    let planes = layout.kv_planes();
    let layers = input.layers.min(8);
    let ([tokens, a, b], strides, dtype, packed) = input.slab;
    let slab = match packed {
        true => SlabLayout::of_cache(&layout, planes, layers, tokens.min(1 << 20)),
        false => SlabLayout::strided([1 + a % 2, 1 + b % 8, tokens], layout.token_bytes(), strides, dtype),
    };
    let slab = match slab {
        Ok(slab) => slab,
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    let step = layout.span_bytes();
    let bases: Vec<u64> =
        (0..planes * layers).map(|i| input.base.wrapping_add(i.wrapping_mul(step))).collect();
    let plan = match CopyPlan::new(&layout, &slab, bases.clone()) {
        Ok(plan) => Arc::new(plan),
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    let request = JobRequest {
        direction: input.direction,
        slab: input.span,
        slots: input.slots.clone(),
        skip_tokens: input.skip,
        partial: input.partial,
        layers: input.range,
    };
    let job = match CopyJob::new(plan, request) {
        Ok(job) => job,
        Err(e) => return worded(&e.to_string(), e.kind()),
    };
    accepted();
    let g = *job.plan().geometry();
    let wide = |n: u64| u128::from(n);
    prop_assert!(u64::from(job.first_layer()) + u64::from(job.layer_count()) <= g.layers);
    prop_assert!(job.skip() <= job.tokens() && job.tokens() <= g.slab_tokens);
    // The last byte of the slab that any mover computes.
    if job.layer_count() > 0 {
        let last = wide(g.kv_planes - 1) * wide(g.slab_kv_stride)
            + wide(u64::from(job.layer_count()) - 1) * wide(g.slab_layer_stride)
            + wide(g.slab_tokens - 1) * wide(g.slab_token_stride)
            + wide(g.token_bytes());
        prop_assert!(last <= wide(job.slab().len), "{} of {}", last, job.slab().len);
        for (addr, given) in [(job.slab().host, input.span.host), (job.slab().device, input.span.device)] {
            prop_assert_eq!(addr.is_some(), given.is_some());
            if let (Some(addr), Some(given)) = (addr, given) {
                prop_assert!(addr >= given && wide(addr) + last <= wide(given) + wide(input.span.len));
            }
        }
    }
    if let JobSlots::Host { slots, runs } = job.slots() {
        let mut named = Vec::new();
        for run in runs {
            prop_assert!(run.token >= job.skip() && run.token + run.len <= job.tokens());
            prop_assert!(run.len > 0 && run.slot + run.len <= g.num_slots);
            for i in 0..run.len {
                prop_assert_eq!(slots[(run.token + i) as usize], (run.slot + i) as i64);
            }
            named.extend(run.slot..run.slot + run.len);
            let last = run.slot + run.len - 1;
            let at = wide(last / g.block_size) * wide(g.block_stride)
                + wide(last % g.block_size) * wide(g.token_stride)
                + wide(g.rows - 1) * wide(g.row_stride)
                + wide(g.row_bytes);
            prop_assert!(at <= wide(job.plan().plane_bytes()));
        }
        let wanted = slots.iter().skip(job.skip() as usize).filter(|s| **s != -1).count();
        prop_assert_eq!(named.len(), wanted);
        if input.direction == Direction::Scatter {
            named.sort_unstable();
            prop_assert!(named.windows(2).all(|w| w[0] != w[1]), "a slot is written twice");
        }
    }
    for kv in 0..g.kv_planes {
        for l in 0..u64::from(job.layer_count()) {
            let base = job.base(kv, l);
            prop_assert_eq!(base, bases[(kv * g.layers + u64::from(job.first_layer()) + l) as usize]);
            prop_assert!(base.is_multiple_of(job.access_bytes()));
        }
    }
    prop_assert_eq!(job.single_layers().count(), job.layer_count() as usize);
    let _ = (job.bytes(), job.is_empty(), g.kernel_limits());
    Ok(())
}

const WORDS: &str = "transfer cxl cxl.pool index path size offset backend device strategy kv_chunk_tokens \
    sm_budget staging_bytes host_threads calibrate checksum enable_fused_load maru_use_lmcache_kernels \
    maru_use_native_kernels prefault prefault_threads register require_registration register_piece coherence \
    auto native fallback host cuda:0 cuda:-1 cuda:4294967296 direct staged none xxh3 flush true false 0 1 -1 256 \
    9223372036854775807 18446744073709551616 1e3 0x10 nan 4GiB 1.5gib 0.1 512GiB 99999999999E -1K 4 /dev/dax0.0 \
    /tmp/p ../p é \\u0000 chunk_sise prefalt pool";

fn configurations() -> impl Strategy<Value = String> {
    let words: Vec<String> = WORDS.split_whitespace().map(str::to_owned).collect();
    let word = move || prop_oneof![9 => select(words.clone()), 1 => "\\PC{0,6}"];
    let value = {
        let word = word.clone();
        move || {
            prop_oneof![
                3 => word(),
                3 => word().prop_map(|w| format!("\"{w}\"")),
                1 => (word(), word()).prop_map(|(a, b)| format!("[{a}, \"{b}\"]")),
                1 => (word(), word()).prop_map(|(a, b)| format!("{{ {a} = \"{b}\" }}")),
            ]
        }
    };
    let line = prop_oneof![
        6 => (word(), value()).prop_map(|(k, v)| format!("{k} = {v}")),
        2 => word().prop_map(|w| format!("[{w}]")),
        2 => word().prop_map(|w| format!("[[{w}]]")),
        1 => "\\PC{0,30}",
    ];
    // Whole sections in the right place, and heaps of lines.
    prop_oneof![
        2 => prop::collection::vec(line, 0..12).prop_map(|lines| lines.join("\n")),
        1 => (select(&["transfer", "cxl", "index"][..]), prop::collection::vec((word(), value()), 0..4)).prop_map(
            |(section, keys)| {
                let keys: Vec<_> = keys.into_iter().map(|(k, v)| format!("{k} = {v}")).collect();
                format!("[{section}]\n{}", keys.join("\n"))
            }
        ),
        1 => "(?s).{0,80}",
    ]
}

/// What is accepted is in range and stays what it is; what is refused says where.
fn configuration(text: String) -> TestCaseResult {
    match Config::from_toml_str(&text, "some/maru.toml") {
        Ok(config) => {
            accepted();
            prop_assert!(config.validate().is_ok());
            let written = config.to_toml().map_err(|e| TestCaseError::fail(e.to_string()))?;
            let again = Config::from_toml_str(&written, "again")
                .map_err(|e| TestCaseError::fail(format!("{e}\nfrom\n{written}")))?;
            prop_assert_eq!(&again.transfer, &config.transfer);
            prop_assert_eq!(&again.cxl, &config.cxl);
            prop_assert_eq!(&again.index, &config.index);
        }
        Err(e) => {
            prop_assert_eq!(e.kind(), "config");
            prop_assert!(e.to_string().contains("some/maru.toml"), "{}", e);
        }
    }
    if let Ok(table) = text.parse::<toml::Table>() {
        let _ = Config::from_dict(&table).map_err(|e| e.to_string());
    }
    Ok(())
}

/// A pool file with two published slabs, as it was made.
struct Bytes {
    dir: tempfile::TempDir,
    image: Vec<u8>,
}

const HEADER: usize = 4096;

/// What is done to the bytes: random ones somewhere, and numbers in the fields; then the checks are made good.
#[derive(Clone, Debug)]
struct Edit {
    numbers: Vec<(usize, u64)>,
    entry_numbers: Vec<(usize, u64)>,
    bytes: Vec<(usize, Vec<u8>)>,
    mend: bool,
    truncate: Option<usize>,
}

fn edits() -> impl Strategy<Value = Edit> {
    let number = || prop_oneof![2 => edge().prop_map(|n| n as u64), 1 => any::<u64>(), 2 => (0u64..20).prop_map(|n| n * 4096)];
    (
        prop::collection::vec((0usize..32, number()), 0..4),
        prop::collection::vec((0usize..32, number()), 0..4),
        prop::collection::vec(
            (prop_oneof![3 => 0usize..9000, 1 => 0usize..65_536], prop::collection::vec(any::<u8>(), 1..40)),
            0..3,
        ),
        prop::bool::weighted(0.8),
        prop::option::weighted(0.1, 0usize..65_536),
    )
        .prop_map(|(numbers, entry_numbers, bytes, mend, truncate)| Edit {
            numbers,
            entry_numbers,
            bytes,
            mend,
            truncate,
        })
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

fn put(image: &mut [u8], at: usize, number: u64) {
    if let Some(place) = image.get_mut(at..at + 8) {
        place.copy_from_slice(&number.to_le_bytes());
    }
}

impl Bytes {
    fn new() -> Self {
        let dir = scratch();
        let path = dir.path().join("pool");
        let device = DaxDevice::create_file(&path, 64 << 10, CreateOptions::default()).unwrap();
        let region = Region::new(Mapping::map(&device, &MapOptions::default()).unwrap());
        let options = PoolOptions { slab_bytes: 8192, entries: 8, ..PoolOptions::default() };
        let pool = SlabPool::create(region, options).unwrap();
        for n in [1u8, 2] {
            let slab = pool.alloc().unwrap().unwrap();
            slab.write_at(0, &[n; 8192]).unwrap();
            pool.publish(&slab, &[n; 32], 8000, 7, None).unwrap();
        }
        drop(pool);
        let image = fs::read(&path).unwrap();
        Bytes { dir, image }
    }

    fn opened(&self, edit: &Edit) -> TestCaseResult {
        let mut image = self.image.clone();
        for (at, bytes) in &edit.bytes {
            let end = (at + bytes.len()).min(image.len());
            image[*at..end].copy_from_slice(&bytes[..end - at]);
        }
        for (field, number) in &edit.numbers {
            put(&mut image, HEADER + field * 8, *number);
        }
        // The entry that was published first, wherever it lies.
        let entries = HEADER + 4096;
        for index in 0..8 {
            let at = entries + index * 128;
            if image[at + 16..at + 48] == [1; 32] {
                for (field, number) in &edit.entry_numbers {
                    put(&mut image, at + field * 8 % 120, *number);
                }
                if edit.mend {
                    let check = fnv1a(&image[at..at + 120]);
                    put(&mut image, at + 120, check);
                }
            }
        }
        if edit.mend {
            let check = fnv1a(&image[HEADER..HEADER + 248]);
            put(&mut image, HEADER + 248, check);
        }
        if let Some(len) = edit.truncate {
            image.truncate(len);
        }
        let path = self.dir.path().join("edited");
        fs::write(&path, &image).unwrap();
        let device = match DaxDevice::open(&path) {
            Ok(device) => device,
            Err(e) => return worded(&e.to_string(), e.kind()),
        };
        let region = match Mapping::map(&device, &MapOptions::default()) {
            Ok(mapping) => Region::new(mapping),
            Err(e) => return worded(&e.to_string(), e.kind()),
        };
        let _ = DeviceHeader::read(&region);
        for (writable, force) in [(false, false), (false, true), (true, true)] {
            let options = OpenOptions { writable, force, ..OpenOptions::default() };
            match SlabPool::open(region.clone(), options) {
                Ok(pool) => looked_at(&pool)?,
                Err(e) => worded(&e.to_string(), e.kind())?,
            }
        }
        Ok(())
    }
}

/// Whatever the directory says, no slab reaches beyond the region, and none that is published is given out.
fn looked_at(pool: &SlabPool) -> TestCaseResult {
    accepted();
    let len = pool.region().len();
    let inside = |offset: u64, bytes: u64| offset.checked_add(bytes).is_some_and(|end| end <= len);
    let mut taken = Vec::new();
    for entry in pool.entries().take(1000) {
        if let Ok(Some(found)) = pool.resolve(entry) {
            let slab = found.slab();
            prop_assert!(inside(slab.offset(), slab.len()), "{:?}", entry);
            prop_assert!(slab.offset() >= pool.info().data_offset);
            let mut byte = [0];
            slab.read_at(slab.len() - 1, &mut byte).map_err(|e| TestCaseError::fail(e.to_string()))?;
            taken.push(entry.slab);
        }
    }
    let _ = pool.lookup(&[1; 32]).map_err(|e| e.to_string());
    let _ = pool.directory().get(u64::MAX);
    if pool.is_writable() {
        let mut held = Vec::new();
        while let Ok(Some(slab)) = pool.alloc() {
            prop_assert!(inside(slab.offset(), slab.len()));
            prop_assert!(!taken.contains(&slab.index()), "slab {} is published and given out", slab.index());
            slab.write_at(slab.len() - 1, &[9]).map_err(|e| TestCaseError::fail(e.to_string()))?;
            held.push(slab);
            prop_assert!(held.len() <= 64);
        }
        if let Some(slab) = held.first() {
            let _ = pool.publish(slab, &[3; 32], 1, 0, None).map_err(|e| e.to_string());
        }
    }
    Ok(())
}

/// A made-up sysfs in which `/dev/zero` is `dax0.0`.
struct Sysfs {
    dir: tempfile::TempDir,
}

type Attributes = ([Option<String>; 4], Option<String>, (String, String));

fn attributes() -> impl Strategy<Value = Attributes> {
    let text = || {
        prop_oneof![
            4 => select(&[
                "67108864", "2097152", "4096", "1073741824", "0", "-1", "abc", "", " 2097152 ", "2097152\n\n",
                "0x200000", "18446744073709551615", "18446744073709551616", "9223372036854775808",
                "9223372036854775807", "2097153", "3", "1", "+4096", "4096 4096", "4_096", "1e9", "٤٠٩٦",
            ][..]).prop_map(str::to_owned),
            1 => any::<u64>().prop_map(|n| n.to_string()),
            1 => any::<i64>().prop_map(|n| n.to_string()),
            1 => (0u32..64).prop_map(|n| (1u64 << n).to_string()),
            1 => "\\PC{0,12}",
        ]
    };
    let optional = move || prop::option::weighted(0.9, text());
    let driver = prop::option::weighted(
        0.9,
        prop_oneof![
            6 => Just("device_dax".to_owned()),
            1 => Just("kmem".to_owned()),
            1 => "[a-z_]{1,12}",
        ],
    );
    let numbers = prop_oneof![
        4 => Just((67_108_864u64, 2_097_152u64)),
        2 => (0u32..40, 0u32..40).prop_map(|(a, b)| (1 << a, 1 << b)),
    ]
    .prop_map(|(a, b)| (Some(a.to_string()), Some(b.to_string())));
    let sizes = prop_oneof![1 => numbers, 2 => (optional(), optional())];
    let range = || prop_oneof!["0x[0-9a-f]{1,18}", "\\PC{0,10}", "[0-9]{1,22}"];
    (sizes, optional(), optional(), driver, (range(), range())).prop_map(
        |((size, align), numa, target, driver, ranges)| ([size, align, numa, target], driver, ranges),
    )
}

impl Sysfs {
    fn new() -> Self {
        let dir = scratch();
        let device = dir.path().join("devices/dax0.0");
        for dir in [device.join("mapping0"), dir.path().join("dev/char"), dir.path().join("bus/dax/devices")]
        {
            fs::create_dir_all(dir).unwrap();
        }
        symlink("../../bus/dax", device.join("subsystem")).unwrap();
        symlink(&device, dir.path().join("dev/char/1:5")).unwrap();
        symlink(&device, dir.path().join("bus/dax/devices/dax0.0")).unwrap();
        fs::create_dir_all(dir.path().join("nodes")).unwrap();
        symlink("/dev/zero", dir.path().join("nodes/dax0.0")).unwrap();
        Sysfs { dir }
    }

    fn opened(&self, (texts, driver, ranges): &Attributes) -> TestCaseResult {
        let root = self.dir.path();
        let device = root.join("devices/dax0.0");
        for (name, text) in ["size", "align", "numa_node", "target_node"].iter().zip(texts) {
            write_or_remove(&device.join(name), text.as_deref());
        }
        write_or_remove(&device.join("mapping0/start"), Some(&ranges.0));
        write_or_remove(&device.join("mapping0/end"), Some(&ranges.1));
        let link = device.join("driver");
        let _ = fs::remove_file(&link);
        if let Some(driver) = driver {
            symlink(format!("../../bus/dax/drivers/{driver}"), &link).unwrap();
        }
        for info in DaxDevice::scan_with_roots(root, root.join("nodes")).into_iter().flatten() {
            let _ = format!("{info:?}");
        }
        let opened = match DaxDevice::open_with_sysfs("/dev/zero", root) {
            Ok(device) => device,
            Err(e) => {
                prop_assert!(
                    !e.to_string().contains("18446744073709551615")
                        || texts.iter().flatten().any(|t| t.contains("18446744073709551615")),
                    "{}",
                    e
                );
                return worded(&e.to_string(), e.kind());
            }
        };
        accepted();
        prop_assert_eq!(driver.as_deref(), Some("device_dax"));
        let (len, align) = (opened.len(), opened.align());
        prop_assert!(align >= 4096 && align.is_power_of_two(), "alignment {}", align);
        prop_assert!(len >= align && len.is_multiple_of(align) && i64::try_from(len).is_ok(), "{}", len);
        let stated = texts[0].as_deref().map(str::trim).and_then(|t| t.parse::<u64>().ok());
        prop_assert!(stated.is_some_and(|stated| len <= stated));
        for (offset, wanted) in
            [(0, len), (align, 1), (len, 1), (1, 1), (u64::MAX - align + 1, align), (0, u64::MAX)]
        {
            let options = MapOptions { offset, len: wanted, prefault: false, ..MapOptions::default() };
            // Whole devices of many gigabytes are address space only.
            match Mapping::map(&opened, &options) {
                Ok(map) => {
                    prop_assert!(map.len() <= len - offset && map.len() >= wanted);
                    prop_assert!(map.len().is_multiple_of(align));
                }
                Err(e) => worded(&e.to_string(), e.kind())?,
            }
        }
        Ok(())
    }
}

fn write_or_remove(path: &Path, text: Option<&str>) {
    match text {
        Some(text) => fs::write(path, text).unwrap(),
        None => drop(fs::remove_file(path)),
    }
}

/// A directory in memory where there is one.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}
