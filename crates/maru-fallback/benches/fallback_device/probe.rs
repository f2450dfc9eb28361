//! Single kinds of copies in a loop, for the cost model and for what the planner does not do yet.

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
    println!("{:<52} {:>7} {:>7} {:>9}", "copies", "load", "store", "us each");
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
        println!("{name:<52} {:>7.1} {:>7.1} {us:>9.2}", rates[0], rates[1]);
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
    for (width, rows, layers, pitch, layer) in
        [(256usize, 128usize, 64usize, 512usize, 8usize << 20), (256, 16, 64, 256, 8 << 20)]
    {
        let name = format!("3-D {layers} layers {layer} apart of {rows} rows of {width}, {pitch} apart");
        report(&name, ends, width * rows * layers, &|to, from, n| {
            three_d(&stream, (to, from), (device.addr, pitch, layer), (width, rows, layers), n);
        });
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

fn three_d(
    stream: &Stream,
    (to, from): (u64, u64),
    (cache, pitch, layer): (u64, usize, usize),
    (width, rows, layers): (usize, usize, usize),
    n: usize,
) {
    let cache_at = place(n, pitch * rows, layer * layers);
    let packed_at = (n * width * rows * layers) as u64;
    // Address, pitch, rows from slice to slice.
    let side = |addr| match addr == cache {
        true => (addr + cache_at, pitch, layer / pitch),
        false => (addr + packed_at, width, rows),
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
        Depth: layers,
    };
    cu!(cuMemcpy3DAsync_v2(&copy, stream.0));
}
