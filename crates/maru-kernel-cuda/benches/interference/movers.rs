//! What moves bytes beside a load, and whether it moved the right ones.

use maru_fallback::{DeviceMover, DeviceOptions};
use maru_kernel_cuda::{StagedMover, StagedOptions};
use maru_layout::Pieces;

use crate::common::{Bench, Profile};
use crate::gpu::{Device, Gpu, Stream, cu};
use crate::grid::MoverKind;

/// Memory that everything moves: the bench's pages and slabs, and a buffer for the flat copy, so that what
/// it moves can be compared as well.
pub(crate) struct World<'g> {
    pub(crate) gpu: &'g Gpu,
    pub(crate) bench: Bench,
    flat: Device,
}

/// A mover, ready to submit batches.
pub(crate) enum Mover {
    Flat,
    Direct(u32),
    Staged(StagedMover, [Vec<Pieces>; 2]),
    Fallback(DeviceMover),
}

impl<'g> World<'g> {
    /// Fills the slabs that are loaded and checks the kernel.
    pub(crate) fn new(gpu: &'g Gpu, profile: &Profile, bytes: u64) -> Self {
        let mut bench = Bench::new(gpu, profile, bytes, false);
        bench.check(gpu, &Stream::new());
        let flat = Device::new(bench.total());
        World { gpu, bench, flat }
    }

    pub(crate) fn mover(&self, kind: MoverKind) -> Mover {
        match kind {
            MoverKind::Flat => Mover::Flat,
            MoverKind::Direct(blocks) => Mover::Direct(blocks),
            MoverKind::Staged(ring, buffers, blocks) => {
                let options =
                    StagedOptions::with_ring_bytes(ring << 20).with_buffers(buffers).with_blocks(blocks);
                let mover = StagedMover::new(&self.gpu.kernel, options).unwrap();
                let pieces = [0, 1].map(|direction| {
                    self.bench.jobs[direction].iter().map(|job| mover.pieces(job).unwrap()).collect()
                });
                Mover::Staged(mover, pieces)
            }
            MoverKind::Fallback => {
                let context = self.gpu.context.clone();
                Mover::Fallback(DeviceMover::open(context, DeviceOptions::default()).unwrap())
            }
        }
    }

    /// Queues all slabs once.
    pub(crate) fn submit(&self, mover: &Mover, direction: usize, stream: &Stream) {
        let bench = &self.bench;
        match mover {
            Mover::Flat => {
                let (host, device, n) = (bench.slab[direction].addr, self.flat.addr, self.flat.len);
                match direction {
                    0 => cu!(cuMemcpyHtoDAsync_v2(device, host as *const _, n, stream.0)),
                    _ => cu!(cuMemcpyDtoHAsync_v2(host as *mut _, device, n, stream.0)),
                }
            }
            Mover::Direct(blocks) => bench.launch_batch(self.gpu, stream, direction, *blocks),
            Mover::Staged(mover, pieces) => {
                // SAFETY: pages and slabs belong to the bench; whoever submits waits before it touches them.
                drop(unsafe { mover.launch(&pieces[direction], &bench.planes, stream.0) }.unwrap());
            }
            Mover::Fallback(mover) => {
                for job in &bench.jobs[direction] {
                    // SAFETY: as above.
                    drop(unsafe { mover.copy_on(job, stream.0) }.unwrap());
                }
            }
        }
    }

    /// Loads into poisoned pages, stores from them into poisoned slabs, and compares every byte: each with the
    /// kernel on the other side, which was checked before.
    pub(crate) fn check(&mut self, kind: MoverKind) {
        let stream = Stream::new();
        let mover = self.mover(kind);
        let flat = kind == MoverKind::Flat;
        for own in [0, 1] {
            self.bench.slab[1].bytes().fill(0x5a);
            if own == 0 {
                self.bench.pages.fill(0xa5);
                self.flat.fill(0xa5);
            }
            for direction in [0, 1] {
                // The second time pages are right already.
                match own == direction || flat {
                    true => self.submit(&mover, direction, &stream),
                    false if direction == 1 => self.bench.launch_batch(self.gpu, &stream, 1, 4),
                    false => {}
                }
            }
            stream.wait();
            let [loaded, stored] = &mut self.bench.slab;
            assert!(loaded.bytes() == stored.bytes(), "{kind}: what was stored differs from what was loaded");
        }
    }

    /// Spoils what a mover is about to write of one slab.
    pub(crate) fn poison(&mut self, direction: usize) {
        match direction {
            0 => {
                self.bench.pages.fill(0xa5);
                self.flat.fill(0xa5);
            }
            _ => self.probed(1).fill(0x5a),
        }
    }

    /// That slab is what it ought to be again, moved beside a load.
    pub(crate) fn verify(&mut self, kind: MoverKind, direction: usize) {
        let at = self.probe() * self.bench.slab_bytes;
        let n = self.bench.slab_bytes;
        if direction == 0 {
            if kind == MoverKind::Flat {
                let found = self.flat.read(at, n);
                assert!(found == self.probed(0), "{kind}: loaded wrong bytes beside the load");
                return;
            }
            let stream = Stream::new();
            self.probed(1).fill(0x5a);
            self.bench.launch_one(self.gpu, &stream, &self.bench.jobs[1][self.probe()], 4);
            stream.wait();
        }
        let expected = self.probed(0).to_vec();
        let what = ["loaded", "stored"][direction];
        assert!(self.probed(1) == expected, "{kind}: {what} wrong bytes beside the load");
    }

    /// Pages and the flat copy's buffer hold what the slabs do: before stores are measured.
    pub(crate) fn fill(&self) {
        let stream = Stream::new();
        self.bench.launch_batch(self.gpu, &stream, 0, 4);
        self.submit(&Mover::Flat, 0, &stream);
        stream.wait();
    }

    /// The slab that is looked at after a measurement.
    fn probe(&self) -> usize {
        self.bench.lists.len() / 2
    }

    fn probed(&mut self, region: usize) -> &mut [u8] {
        let (at, n) = (self.probe() * self.bench.slab_bytes, self.bench.slab_bytes);
        &mut self.bench.slab[region].bytes()[at..at + n]
    }
}
