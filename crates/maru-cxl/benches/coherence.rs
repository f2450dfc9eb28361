//! GB/s of writing cache lines back and dropping them, beside a plain copy and a plain read of the same bytes.
//!
//! `cargo bench -p maru-cxl`; arguments: size in MiB (default 256) and a path to map (default: anonymous memory). As a
//! test (without `--bench`) it runs once over a small buffer.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, reason = "a measuring program")]

use std::hint::black_box;
use std::time::Instant;

use maru_cxl::{DaxDevice, MapOptions, Mapping, Region, Slab, coherence};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let measuring = args.iter().any(|arg| arg == "--bench");
    let mut plain = args.iter().filter(|arg| !arg.starts_with("--"));
    let mib = plain.next().map_or(if measuring { 256 } else { 1 }, |text| text.parse().unwrap());
    let bytes = mib << 20;
    let region = match plain.next() {
        None => Region::anonymous(bytes).unwrap(),
        Some(path) => {
            let options = MapOptions { len: bytes, ..MapOptions::default() };
            Region::new(Mapping::map(&DaxDevice::open(path).unwrap(), &options).unwrap())
        }
    };
    let slab = region.slab(0, bytes).unwrap();
    let rounds = if measuring { 7 } else { 1 };
    println!(
        "{mib} MiB of {}, {} byte lines, flush by {:?}, invalidate by {:?}, median of {rounds}",
        region.backing(),
        coherence::line_bytes(),
        coherence::flush_instruction(),
        coherence::invalidate_instruction()
    );
    let source = vec![0x5a_u8; 1 << 20];
    let fill = || chunks(&slab, |part| part.write_at(0, &source).unwrap());
    let read = || {
        let mut buffer = vec![0_u8; 1 << 20];
        chunks(&slab, |part| part.read_at(0, &mut buffer).unwrap());
        black_box(buffer);
    };
    let nothing = || {};
    let row = |name: &str, before: &dyn Fn(), run: &dyn Fn()| {
        let mut times: Vec<f64> = (0..rounds)
            .map(|_| {
                before();
                let start = Instant::now();
                run();
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{name:<44} {:>8.2} GB/s", bytes as f64 / times[times.len() / 2] / 1e9);
    };
    row("write (rep movsb from a hot 1 MiB)", &nothing, &fill);
    row("read (to a hot 1 MiB)", &nothing, &read);
    row("flush, lines just written", &fill, &|| {
        slab.flush();
    });
    row("flush, nothing dirty", &nothing, &|| {
        slab.flush();
    });
    row("invalidate, lines just read", &read, &|| {
        slab.invalidate();
    });
    row("invalidate, nothing cached", &nothing, &|| {
        slab.invalidate();
    });
    // What a publisher pays per byte, and what a reader pays, under `Coherence::Flush`.
    row("write and flush", &nothing, &|| {
        fill();
        slab.flush();
    });
    row("invalidate and read", &nothing, &|| {
        slab.invalidate();
        read();
    });
}

fn chunks(slab: &Slab, mut run: impl FnMut(&Slab)) {
    for at in (0..slab.len()).step_by(1 << 20) {
        run(&slab.span(at, (slab.len() - at).min(1 << 20)).unwrap());
    }
}
