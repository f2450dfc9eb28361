//! Single kinds of copies in a loop: what the planner's cost model is made of.

use std::fmt::Write as _;

use cudarc::driver::sys::{self, CUmemorytype};

use crate::gpu::{Device, Pinned, Stream, cu};
use crate::timing::{Clock, median};

const TOTAL: usize = 128 << 20;

/// Prints GB/s from and to the device of each kind.
pub(crate) fn run(csv: &mut String) {
    let (stream, clock) = (Stream::new(), Clock::new());
    let device = Device::new(1 << 30);
    let other = Device::new(1 << 30);
    let host = Pinned::new(TOTAL);
    println!("{:<60} {:>7} {:>7} {:>9}", "copies", "load", "store", "us each");
    let mut report = |name: &str, sides: [u64; 2], each: usize, copy: &dyn Fn(u64, u64, usize)| {
        let count = TOTAL / each;
        let mut rates = [0.0; 2];
        let mut us = 0.0;
        for (i, rate) in rates.iter_mut().enumerate() {
            let (device, packed) = (sides[0], sides[1]);
            let mut times: Vec<f64> = (0..4)
                .map(|_| {
                    clock.time(&stream, || {
                        for n in 0..count {
                            match i {
                                0 => copy(device, packed, n),
                                _ => copy(packed, device, n),
                            }
                        }
                    })
                })
                .collect();
            let time = median(&mut times);
            *rate = TOTAL as f64 / time / 1e9;
            us = time / count as f64 * 1e6;
        }
        println!("{name:<60} {:>7.1} {:>7.1} {us:>9.2}", rates[0], rates[1]);
        writeln!(csv, "probe,{name},,,,,{TOTAL},{:.2},{:.2},,,,{us:.2}", rates[0], rates[1]).unwrap();
    };
    let ends = [device.addr, host.addr];
    for kib in [4usize, 32, 256, 1024] {
        let bytes = kib << 10;
        report(&format!("1-D {kib} KiB, a call each"), ends, bytes, &|to, from, n| {
            let at = (n * bytes) as u64;
            cu!(cuMemcpyAsync(to + at, from + at, bytes, stream.0));
        });
    }
    // Rows of `width` bytes, `pitch` apart in the cache, packed in the slab.
    for (width, rows, pitch) in [
        (256usize, 128usize, 512usize),
        (256, 2048, 512),
        (256, 16, 4096),
        (2048, 16, 4096),
        (4096, 64, 8 << 20),
        (32 << 10, 16, 64 << 10),
        (32 << 10, 64, 8 << 20),
        (32 << 10, 64, 2 << 20),
        (32 << 10, 64, 256 << 10),
    ] {
        report(&format!("2-D {rows} rows of {width}, {pitch} apart"), ends, width * rows, &|to, from, n| {
            two_d(&stream, (to, from), (device.addr, pitch), (width, rows), n);
        });
    }
    for shape in SHAPES {
        report(&format!("3-D {}", shape.name()), ends, shape.bytes(), &|to, from, n| {
            three_d(&stream, (to, from), device.addr, &shape, n);
        });
    }
    let batch = Batch::look_up();
    for kib in [4usize, 16, 32, 64, 256, 512] {
        let Some(batch) = &batch else {
            println!("batched copies: the driver has no cuMemcpyBatchAsync");
            break;
        };
        let bytes = kib << 10;
        for entries in [128, 16] {
            let name = format!("batches of {entries} entries of {kib} KiB");
            report(&name, ends, bytes * entries, &|to, from, n| {
                batch.copy(&stream, (to, from), bytes, entries, n)
            });
        }
    }
    let inside = [device.addr, other.addr];
    for kib in [32usize, 64] {
        let bytes = kib << 10;
        report(&format!("1-D {kib} KiB inside the device, a call each"), inside, bytes, &|to, from, n| {
            let at = (n * bytes) as u64;
            cu!(cuMemcpyAsync(to + at, from + at, bytes, stream.0));
        });
    }
    report("2-D 128 rows of 256, 512 apart, inside the device", inside, 256 * 128, &|to, from, n| {
        two_d(&stream, (to, from), (device.addr, 512), (256, 128), n);
    });
    report("2-D 2048 rows of 256, 512 apart, inside the device", inside, 256 * 2048, &|to, from, n| {
        two_d(&stream, (to, from), (device.addr, 512), (256, 2048), n);
    });
    for shape in &SHAPES[1..3] {
        report(&format!("3-D {}, inside the device", shape.name()), inside, shape.bytes(), &|to, from, n| {
            three_d(&stream, (to, from), device.addr, shape, n);
        });
    }
}

/// Slices of rows as they lie in a cache and in slabs, of which a command moves a part.
struct Shape {
    width: usize,
    rows: usize,
    slices: usize,
    /// Bytes from row to row and from slice to slice.
    cache: [usize; 2],
    slab: [usize; 2],
    /// How often what distance in a slab: from command to command, innermost first.
    steps: [(usize, usize); 3],
}

const LAYER: usize = 8 << 20;
const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Layers as slices of: fused rows packed in the slab; fused rows of 8 heads, and of one, of 256-token slabs;
/// tokens of one head of 8; whole blocks as slices of one row (layers too far apart for a pitch). Then two
/// layers only, K and V only, and consecutive blocks.
const SHAPES: [Shape; 8] = [
    shape(256, 128, 64, [512, LAYER], [256, 32 * KIB], [(64, 2 * MIB), (1, 0), (1, 0)]),
    shape(256, 128, 64, [512, LAYER], [256, 512 * KIB], [(16, 32 * KIB), (4, 32 * MIB), (1, 0)]),
    shape(256, 16, 64, [512, LAYER], [256, 64 * KIB], [(16, 4 * KIB), (32, 4 * MIB), (1, 0)]),
    shape(256, 16, 64, [256, LAYER], [2 * KIB, 512 * KIB], [(8, 256), (16, 32 * KIB), (4, 32 * MIB)]),
    shape(
        32 * KIB,
        1,
        64,
        [LAYER / 4, LAYER],
        [512 * KIB, 512 * KIB],
        [(16, 32 * KIB), (4, 32 * MIB), (1, 0)],
    ),
    shape(256, 128, 2, [512, LAYER], [256, 512 * KIB], [(16, 32 * KIB), (128, MIB), (1, 0)]),
    shape(256, 16, 2, [256, 32 * KIB], [2 * KIB, 32 * MIB], [(8, 256), (1024, 32 * KIB), (2, 64 * MIB)]),
    shape(256, 16, 16, [256, 64 * KIB], [2 * KIB, 32 * KIB], [(8, 256), (256, 512 * KIB), (1, 0)]),
];

const fn shape(
    width: usize,
    rows: usize,
    slices: usize,
    cache: [usize; 2],
    slab: [usize; 2],
    steps: [(usize, usize); 3],
) -> Shape {
    Shape { width, rows, slices, cache, slab, steps }
}

impl Shape {
    fn bytes(&self) -> usize {
        self.width * self.rows * self.slices
    }

    fn name(&self) -> String {
        let ([pitch, slice], [slab_pitch, slab_slice]) = (self.cache, self.slab);
        let Shape { width, rows, slices, .. } = self;
        format!("{slices} x {rows} x {width}, {slice}/{slab_slice}, {pitch}/{slab_pitch}")
    }

    /// Where the n-th command begins in the slabs.
    fn slab_at(&self, n: usize) -> usize {
        let mut left = n;
        let mut at = 0;
        for (count, distance) in self.steps {
            at += left % count * distance;
            left /= count;
        }
        at
    }
}

type BatchCall = unsafe extern "C" fn(
    *mut sys::CUdeviceptr,
    *mut sys::CUdeviceptr,
    *mut usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    sys::CUstream,
) -> sys::CUresult;

struct Batch(BatchCall);

impl Batch {
    fn look_up() -> Option<Batch> {
        // SAFETY: the type is that of the function in the headers of CUDA 12.8.
        unsafe { maru_driver::symbol("cuMemcpyBatchAsync") }.map(Batch)
    }

    /// The n-th batch of entries that follow each other on both sides.
    fn copy(&self, stream: &Stream, (to, from): (u64, u64), bytes: usize, entries: usize, n: usize) {
        let at = |base: u64| (0..entries).map(|i| base + ((n * entries + i) * bytes) as u64).collect();
        let (mut to, mut from): (Vec<u64>, Vec<u64>) = (at(to), at(from));
        let mut sizes = vec![bytes; entries];
        let nowhere =
            sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let (mut first, mut failed) = (0usize, 0usize);
        // SAFETY: three arrays of `entries`, one set of attributes; memory that lives until the stream was
        // waited for.
        let result = unsafe {
            (self.0)(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                entries,
                &raw mut attributes,
                &raw mut first,
                1,
                &raw mut failed,
                stream.0,
            )
        };
        crate::gpu::ok("cuMemcpyBatchAsync", result);
    }
}

/// The n-th place of `span` bytes inside a GiB.
fn place(n: usize, step: usize, span: usize) -> u64 {
    (n * step % ((1 << 30) - span) / 256 * 256) as u64
}

fn two_d(
    stream: &Stream,
    (to, from): (u64, u64),
    (cache, pitch): (u64, usize),
    (width, rows): (usize, usize),
    n: usize,
) {
    let cache_at = place(n, (width * rows).max(pitch * rows.min(4)), pitch * rows);
    let packed_at = (n * width * rows) as u64;
    let side = |addr| if addr == cache { (addr + cache_at, pitch) } else { (addr + packed_at, width) };
    let ((to, to_pitch), (from, from_pitch)) = (side(to), side(from));
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        srcHost: std::ptr::null(),
        srcDevice: from,
        srcArray: std::ptr::null_mut(),
        srcPitch: from_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        dstHost: std::ptr::null_mut(),
        dstDevice: to,
        dstArray: std::ptr::null_mut(),
        dstPitch: to_pitch,
        WidthInBytes: width,
        Height: rows,
    };
    cu!(cuMemcpy2DAsync_v2(&copy, stream.0));
}

fn three_d(stream: &Stream, (to, from): (u64, u64), cache: u64, shape: &Shape, n: usize) {
    let Shape { width, rows, slices, cache: [pitch, slice], slab: [slab_pitch, slab_slice], .. } = *shape;
    let cache_at = place(n, pitch * rows, slice * slices);
    let packed_at = shape.slab_at(n) as u64;
    // Address, pitch, rows from slice to slice.
    let side = |addr| match addr == cache {
        true => (addr + cache_at, pitch, slice / pitch),
        false => (addr + packed_at, slab_pitch, slab_slice / slab_pitch),
    };
    let ((to, to_pitch, to_height), (from, from_pitch, from_height)) = (side(to), side(from));
    let copy = sys::CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        srcHost: std::ptr::null(),
        srcDevice: from,
        srcArray: std::ptr::null_mut(),
        reserved0: std::ptr::null_mut(),
        srcPitch: from_pitch,
        srcHeight: from_height,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        dstHost: std::ptr::null_mut(),
        dstDevice: to,
        dstArray: std::ptr::null_mut(),
        reserved1: std::ptr::null_mut(),
        dstPitch: to_pitch,
        dstHeight: to_height,
        WidthInBytes: width,
        Height: rows,
        Depth: slices,
    };
    cu!(cuMemcpy3DAsync_v2(&copy, stream.0));
}
