//! A cache with its mover: chosen once, with the plans of the slab geometries it meets.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use maru_layout::{CopyPlan, SlabLayout};

use crate::backend::{Backend, Prepared, TransferBackend};
use crate::{PagedCache, TransferError};

/// Most slab geometries remembered per cache; more are planned anew each time.
const MOST_PLANS: usize = 64;

/// A [`PagedCache`] registered with an engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RegisteredCache(Arc<Registered>);

#[derive(Debug)]
struct Registered {
    paged: PagedCache,
    engine: u64,
    mover: Mover,
    /// Takes slabs that the mover cannot, under `backend = "auto"`.
    second: Option<Mover>,
    /// Whether it was said that slabs go to the second mover.
    warned: AtomicBool,
    default_plan: Arc<CopyPlan>,
    plans: RwLock<Vec<Arc<CopyPlan>>>,
    /// Those of packed slabs, by their tokens: found without working out the geometry that they are of.
    packed: RwLock<Vec<(u64, Arc<CopyPlan>)>>,
}

/// A mover and what it made of the cache.
#[derive(Clone, Debug)]
pub(crate) struct Mover {
    pub(crate) backend: Arc<Backend>,
    pub(crate) prepared: Prepared,
}

impl Mover {
    pub(crate) fn of(backend: &Arc<Backend>, cache: &PagedCache) -> Result<Self, TransferError> {
        Ok(Mover { backend: Arc::clone(backend), prepared: backend.prepare(cache)? })
    }
}

impl RegisteredCache {
    pub(crate) fn new(
        paged: PagedCache,
        engine: u64,
        mover: Mover,
        second: Option<Mover>,
        chunk_tokens: u64,
    ) -> Result<Self, TransferError> {
        let slab = paged.slab_layout(chunk_tokens)?;
        let default_plan = Arc::new(CopyPlan::new(paged.layout(), &slab, Arc::clone(paged.bases()))?);
        Ok(RegisteredCache(Arc::new(Registered {
            paged,
            engine,
            mover,
            second,
            warned: AtomicBool::new(false),
            default_plan,
            plans: RwLock::default(),
            packed: RwLock::default(),
        })))
    }

    /// What was registered.
    pub fn paged(&self) -> &PagedCache {
        &self.0.paged
    }

    /// The mover that takes its transfers.
    pub fn backend(&self) -> &'static str {
        self.0.mover.backend.name()
    }

    /// Packed slab of the engine's chunk size.
    pub fn slab_layout(&self) -> &SlabLayout {
        self.0.default_plan.slab()
    }

    pub(crate) fn engine(&self) -> u64 {
        self.0.engine
    }

    pub(crate) fn mover(&self) -> &Mover {
        &self.0.mover
    }

    pub(crate) fn second(&self) -> Option<&Mover> {
        self.0.second.as_ref()
    }

    /// True the first time only.
    pub(crate) fn first_warning(&self) -> bool {
        !self.0.warned.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn is(&self, other: &RegisteredCache) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn default_plan(&self) -> Arc<CopyPlan> {
        Arc::clone(&self.0.default_plan)
    }

    /// The plan for a packed slab of that many tokens.
    pub(crate) fn chunk_plan(&self, tokens: u64) -> Result<Arc<CopyPlan>, TransferError> {
        if self.0.default_plan.slab().tokens() == tokens {
            return Ok(self.default_plan());
        }
        let known = self.0.packed.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plan)) = known.iter().find(|(n, _)| *n == tokens) {
            return Ok(Arc::clone(plan));
        }
        drop(known);
        let plan = self.plan(&self.0.paged.slab_layout(tokens)?)?;
        let mut packed = self.0.packed.write().unwrap_or_else(PoisonError::into_inner);
        if packed.len() < MOST_PLANS {
            packed.push((tokens, Arc::clone(&plan)));
        }
        Ok(plan)
    }

    /// The plan for a slab geometry, made when first asked for.
    pub(crate) fn plan(&self, slab: &SlabLayout) -> Result<Arc<CopyPlan>, TransferError> {
        if self.0.default_plan.slab() == slab {
            return Ok(self.default_plan());
        }
        // A poisoned lock guards a list that is valid at every step.
        let known = self.0.plans.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = known.iter().find(|p| p.slab() == slab) {
            return Ok(Arc::clone(plan));
        }
        drop(known);
        let plan = Arc::new(CopyPlan::new(self.0.paged.layout(), slab, Arc::clone(self.0.paged.bases()))?);
        let mut plans = self.0.plans.write().unwrap_or_else(PoisonError::into_inner);
        if plans.len() < MOST_PLANS {
            plans.push(Arc::clone(&plan));
        }
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use maru_layout::{CacheSpec, DType, TensorDesc};

    use super::*;
    use crate::config::{Config, DeviceChoice};
    use crate::{CacheTensor, Place, Tensors, TransferEngine};

    #[test]
    fn plans_by_tokens_are_those_by_geometry_and_made_once() {
        let mut config = Config::default();
        config.transfer.device = DeviceChoice::Host;
        let engine = TransferEngine::open(&config).expect("a host engine");
        let memory = vec![0u16; 2 * 4 * 8 * 2 * 16];
        let desc = TensorDesc::contiguous(&[2, 4, 8, 2, 16], DType::F16).expect("a description");
        let addr = memory.as_ptr().expose_provenance() as u64;
        let tensors = Tensors::PerLayer(vec![CacheTensor { addr, len: desc.span_bytes(), desc }]);
        let spec = CacheSpec { block_size: Some(8), num_kv_heads: Some(2), ..CacheSpec::default() };
        // SAFETY: the tensor is the vector above, which outlives the cache and is not touched.
        let paged = unsafe { PagedCache::new(&tensors, &spec, Place::Host, Some(1)) }.expect("a cache");
        let cache = engine.register(paged).expect("registered");
        let most = u64::try_from(MOST_PLANS).expect("small");
        for tokens in 1..=most + 8 {
            let slab = cache.paged().slab_layout(tokens).expect("a slab");
            let plan = cache.chunk_plan(tokens).expect("a plan");
            assert_eq!((plan.slab(), plan.slab().tokens()), (&slab, tokens));
            let (again, by_slab) = (cache.chunk_plan(tokens), cache.plan(&slab));
            assert_eq!(Arc::ptr_eq(&plan, &again.expect("again")), tokens <= most, "{tokens} tokens");
            assert_eq!(Arc::ptr_eq(&plan, &by_slab.expect("by its slab")), tokens <= most, "{tokens} tokens");
        }
        assert!(cache.chunk_plan(0).is_err());
        let chunk = cache.slab_layout().tokens();
        assert!(Arc::ptr_eq(&cache.chunk_plan(chunk).expect("a plan"), &cache.default_plan()));
        drop(memory);
    }
}
