//! A cache, a slab, and a transfer between them with what the oracle makes of it.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUstream;
use maru_kernel_cuda::{
    KernelError, LaunchOptions, Launched, PagedCopyKernel, PlaneTable, StagedLaunch, StagedMover,
    StagedOptions,
};
use maru_layout::{CopyJob, CopyPlan, DType, Direction, JobRequest, SlabSpan, SlotMapping};
use maru_sim_driver::Session;

use crate::cases::{Cache, Dims, Images, ORDERS, Rng, compare, random_slots};
use crate::common::{Device, Pinned, Stream, context};

pub(crate) const DIMS: Dims =
    Dims { layers: 2, blocks: 6, block_size: 4, heads: 3, head_size: 8, dtype: DType::Bf16, pad: 8 };

/// One transfer's memory.
pub(crate) struct Setup {
    pub(crate) images: Images,
    pub(crate) paged: Device,
    pub(crate) slab: Pinned,
    pub(crate) plan: Arc<CopyPlan>,
    pub(crate) direction: Direction,
    pub(crate) slots: Vec<i64>,
    skip: u64,
}

/// How a transfer is put on the stream.
#[derive(Clone, Copy)]
pub(crate) enum Way<'a> {
    Direct,
    Staged(&'a StagedMover),
}

/// A kernel, a ring and a stream on device 0, whose context is current.
pub(crate) struct Rig {
    pub(crate) stream: Stream,
    mover: StagedMover,
    pub(crate) kernel: PagedCopyKernel,
    _context: Arc<CudaContext>,
}

impl Rig {
    pub(crate) fn new() -> Rig {
        let context = context(0);
        let kernel = PagedCopyKernel::load(context.clone()).unwrap();
        // A small ring: transfers go round it.
        let mover = StagedMover::new(&kernel, StagedOptions::with_ring_bytes(4 * 4096)).unwrap();
        Rig { stream: Stream::new(true), mover, kernel, _context: context }
    }

    pub(crate) fn way(&self, staged: bool) -> Way<'_> {
        if staged { Way::Staged(&self.mover) } else { Way::Direct }
    }

    /// A transfer of its own with the plane table of its cache.
    pub(crate) fn setup(&self, session: &Session, direction: Direction) -> (Setup, PlaneTable) {
        let setup = Setup::new(session, 0, direction, 3);
        let planes = self.kernel.register(&setup.plan).unwrap();
        (setup, planes)
    }
}

/// Something in flight.
pub(crate) enum Flight {
    Direct(Launched),
    Staged(StagedLaunch),
}

impl Flight {
    pub(crate) fn wait(&self) -> Result<(), KernelError> {
        match self {
            Flight::Direct(launched) => launched.wait(),
            Flight::Staged(launched) => launched.wait(),
        }
    }

    pub(crate) fn is_complete(&self) -> Result<bool, KernelError> {
        match self {
            Flight::Direct(launched) => launched.is_complete(),
            Flight::Staged(launched) => launched.is_complete(),
        }
    }
}

impl Setup {
    /// `order` of the table of layouts, random contents and slots. The current context's device holds the cache.
    pub(crate) fn new(session: &Session, order: usize, direction: Direction, seed: u64) -> Setup {
        let cache = Cache::new(&ORDERS[order], DIMS).unwrap();
        let mut rng = Rng::new(seed);
        let tokens = cache.layout.num_slots();
        let count = usize::try_from(tokens).unwrap();
        // A store through the ring leaves no tokens out.
        let hole = if direction == Direction::Scatter { 5 } else { 0 };
        let slots = random_slots(&mut rng, tokens, count, hole);
        Self::with(session, &cache, direction, slots, 0, &mut rng)
    }

    pub(crate) fn with(
        session: &Session,
        cache: &Cache,
        direction: Direction,
        slots: Vec<i64>,
        skip: u64,
        rng: &mut Rng,
    ) -> Setup {
        let tokens = slots.len() as u64;
        let followed: Vec<i64> = slots
            .iter()
            .map(|s| if u64::try_from(*s).is_ok_and(|s| s < cache.layout.num_slots()) { *s } else { -1 })
            .collect();
        let images = Images::new(cache, direction, tokens, &followed, skip, rng);
        let paged = Device::of(session, &images.cache);
        let slab = Pinned::new(&images.slab);
        let plan = cache.plan(paged.addr, tokens).unwrap();
        Setup { images, paged, slab, plan, direction, slots, skip }
    }

    pub(crate) fn job(&self, slots: SlotMapping) -> CopyJob {
        self.job_of(&self.plan, slots)
    }

    /// The same with the pages of another plan.
    pub(crate) fn job_of(&self, plan: &Arc<CopyPlan>, slots: SlotMapping) -> CopyJob {
        let host = Some(self.slab.host.addr().get() as u64);
        let slab = SlabSpan { host, device: Some(self.slab.device), len: self.slab.len as u64 };
        let request = JobRequest {
            direction: self.direction,
            slab,
            slots,
            skip_tokens: self.skip,
            partial: true,
            layers: None,
        };
        CopyJob::new(plan.clone(), request).unwrap()
    }

    pub(crate) fn host_slots(&self) -> SlotMapping {
        SlotMapping::from_slots(self.slots.clone())
    }

    /// Puts the transfer on the stream.
    pub(crate) fn launch(
        &self,
        kernel: &PagedCopyKernel,
        planes: &PlaneTable,
        slots: SlotMapping,
        stream: CUstream,
        way: Way<'_>,
    ) -> Result<Flight, KernelError> {
        let job = self.job(slots);
        match way {
            Way::Direct => {
                // SAFETY: cache, slab and device slots live until the transfer is over.
                unsafe { kernel.launch(&job, planes, stream, LaunchOptions::default()) }.map(Flight::Direct)
            }
            Way::Staged(mover) => {
                let pieces = mover.pieces(&job).expect("this job can be staged");
                // SAFETY: as above, and the slab is pinned.
                unsafe { mover.launch(&[pieces], planes, stream) }.map(Flight::Staged)
            }
        }
    }

    /// The whole of it: registers, launches, waits, compares.
    pub(crate) fn run(
        &self,
        session: &Session,
        kernel: &PagedCopyKernel,
        stream: CUstream,
        way: Way<'_>,
    ) -> Result<(), KernelError> {
        let planes = kernel.register(&self.plan)?;
        self.launch(kernel, &planes, self.host_slots(), stream, way)?.wait()?;
        self.check(session);
        Ok(())
    }

    /// Every byte of both sides.
    pub(crate) fn check(&self, session: &Session) {
        compare("cache", &self.paged.read(session), &self.images.cache_after).unwrap();
        compare("slab", &self.slab.read(), &self.images.slab_after).unwrap();
    }

    /// Both sides are as they were.
    pub(crate) fn untouched(&self, session: &Session) -> bool {
        self.paged.read(session) == self.images.cache && self.slab.read() == self.images.slab
    }

    /// Puts both sides back.
    pub(crate) fn restore(&self, session: &Session) {
        assert!(session.poke(self.paged.addr, &self.images.cache));
        assert!(session.poke(self.slab.device, &self.images.slab));
    }
}
