//! What keeps the device busy, in chunks of a millisecond or two.

use crate::blas::{Blas, Product};
use crate::cases::Rng;
use crate::common::{events, timed};
use crate::gpu::{Device, Gpu, Graph, Stream};
use crate::grid::LoadKind;

/// A chunk takes about this long: events between chunks cost nothing then, and one is short enough to show a
/// burst of a mover.
const CHUNK_MS: f64 = 1.5;
/// Of one buffer of the memory-bound load.
const VECTOR: usize = 1 << 30;
const PRODUCT: Product = Product { m: 8192, n: 8192, k: 8192, transposed: false };
const SKINNY: Product = Product { m: 16384, n: 8, k: 8192, transposed: true };

/// A load on a stream of its own.
pub(crate) struct Load<'g> {
    pub(crate) kind: LoadKind,
    pub(crate) stream: Stream,
    /// Iterations of a chunk.
    pub(crate) per_chunk: usize,
    /// What one iteration takes alone, milliseconds, roughly.
    pub(crate) iteration_ms: f64,
    graph: Option<Graph>,
    blas: Option<Blas>,
    buffers: Vec<Device>,
    gpu: &'g Gpu,
}

impl<'g> Load<'g> {
    pub(crate) fn new(
        gpu: &'g Gpu,
        kind: LoadKind,
        cublas: Option<&str>,
        graph: bool,
    ) -> Result<Self, String> {
        let stream = Stream::new();
        let blas = if kind.needs_blas() { Some(Blas::open(cublas, &stream)?) } else { None };
        let mut load = Load {
            kind,
            stream,
            per_chunk: 1,
            iteration_ms: 1.0,
            graph: None,
            blas,
            buffers: buffers(kind),
            gpu,
        };
        if kind == LoadKind::None {
            return Ok(load);
        }
        let events = events();
        // The library loads its kernels when they are first called.
        timed(&load.stream, &events, || (0..3).for_each(|_| load.iterate()));
        load.iteration_ms = timed(&load.stream, &events, || (0..10).for_each(|_| load.iterate())) * 100.0;
        load.per_chunk = chunk(load.iteration_ms);
        if graph {
            load.graph =
                Some(Graph::capture(&load.stream, || (0..load.per_chunk).for_each(|_| load.iterate())));
        }
        Ok(load)
    }

    /// Where cuBLAS came from.
    pub(crate) fn library(&self) -> Option<String> {
        self.blas.as_ref().map(|blas| format!("cuBLAS {} from {}", blas.version, blas.path.display()))
    }

    /// Queues a chunk.
    pub(crate) fn chunk(&self) {
        match &self.graph {
            Some(graph) => graph.launch(&self.stream),
            None => (0..self.per_chunk).for_each(|_| self.iterate()),
        }
    }

    fn iterate(&self) {
        match (self.kind, &self.blas, &self.buffers[..]) {
            (LoadKind::Products, Some(blas), [a, b, c]) => blas.product(&PRODUCT, a, b, c),
            (LoadKind::Decode, Some(blas), [a, b, c]) => blas.product(&SKINNY, a, b, c),
            (LoadKind::Memory, Some(blas), [x, y]) => blas.saxpy(x, y),
            (LoadKind::Stall, ..) => self.gpu.stall(&self.stream, 1, 0, 0, 0),
            _ => {}
        }
    }

    /// What is computed at this time per iteration, with its unit.
    pub(crate) fn rate(&self, iteration_ms: f64) -> (f64, &'static str) {
        let seconds = iteration_ms / 1e3;
        match self.kind {
            LoadKind::Products => (2.0 * 8192f64.powi(3) / seconds / 1e12, "TFLOP/s"),
            // Reads two, writes one.
            LoadKind::Memory => (3.0 * VECTOR as f64 / seconds / 1e12, "TB/s"),
            LoadKind::Decode => (2.0 * 16384.0 * 8192.0 / seconds / 1e12, "TB/s"),
            LoadKind::Stall | LoadKind::None => (1.0 / seconds, "1/s"),
        }
    }
}

fn buffers(kind: LoadKind) -> Vec<Device> {
    let product = |p: &Product| {
        let bytes =
            |rows: i32, columns: i32| 2 * usize::try_from(i64::from(rows) * i64::from(columns)).unwrap();
        vec![random_bf16(bytes(p.m, p.k)), random_bf16(bytes(p.k, p.n)), random_bf16(bytes(p.m, p.n))]
    };
    match kind {
        LoadKind::Products => product(&PRODUCT),
        LoadKind::Decode => product(&SKINNY),
        // Pairs of bf16 are floats of the same size.
        LoadKind::Memory => vec![random_bf16(VECTOR), random_bf16(VECTOR)],
        LoadKind::Stall | LoadKind::None => Vec::new(),
    }
}

/// Numbers of a size between a quarter and one and either sign: zeros would cost less power, and with it
/// leave higher clocks, than what is computed in earnest.
fn random_bf16(len: usize) -> Device {
    let mut rng = Rng::new(11);
    let mut bytes = vec![0u8; len.min(16 << 20)];
    for four in bytes.chunks_exact_mut(8) {
        let random = rng.next();
        for (i, pair) in four.chunks_exact_mut(2).enumerate() {
            let word = (random >> (16 * i)) & 0xffff;
            let [low, high, ..] = (0x3e80 + (word & 0xff) + ((word & 0x100) << 7)).to_le_bytes();
            pair.copy_from_slice(&[low, high]);
        }
    }
    let device = Device::new(len);
    for at in (0..len).step_by(bytes.len()) {
        device.write(at, &bytes[..bytes.len().min(len - at)]);
    }
    device
}

fn chunk(iteration_ms: f64) -> usize {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
    let iterations = (CHUNK_MS / iteration_ms.max(1e-3)).round().clamp(1.0, 1000.0) as usize;
    iterations
}
