//! `PagedCache`: the engine's tensors, read once.

use std::borrow::Cow;
use std::sync::{Mutex, OnceLock};

use maru_layout::{Axis, CacheSpec, DType};
use maru_transfer::{CacheTensor, PagedCache, Place, RegisteredCache, Tensors, TransferEngine};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyString, PyTuple};

use crate::args;
use crate::dtype;
use crate::errors::{Error, Fault, Result, detached, guard};
use crate::legacy::planes_on_device;
use crate::memory::{mapped, with_context};
use crate::process::lock;
use crate::region::no_pickle;
use crate::tensor::Tensor;

/// Engines a cache remembers its registration with, besides the first.
const MOST_ENGINES: usize = 8;

/// The KV tensors of one group of layers, with what was detected. Keeps them alive.
#[pyclass(module = "maru_kv_ops", name = "PagedCache", frozen)]
pub(crate) struct PyPagedCache {
    paged: PagedCache,
    /// Registrations by their engine's number. The first is found without a lock: few caches have more.
    first: OnceLock<(u64, RegisteredCache)>,
    others: Mutex<Vec<(u64, RegisteredCache)>>,
    read_only: bool,
    torch: bool,
    tensors: Py<PyTuple>,
}

/// A cache's tensors as they came.
struct List {
    tensors: Vec<Tensor>,
    /// One tensor for all layers.
    single: bool,
}

impl List {
    /// A sequence or a mapping of tensors, or one tensor with a layer axis.
    fn of(object: &Bound<'_, PyAny>, name: &str) -> Result<List> {
        let items = if let Ok(mapping) = object.cast::<PyMapping>() {
            mapping.values()?.into_any()
        } else if object.is_instance_of::<PyString>() {
            return Err(Fault::wrong_type(format!("{name} is text; tensors are needed")).into());
        } else if let Some(tensor) = Tensor::try_of(object, name)? {
            return Ok(List { tensors: vec![tensor], single: true });
        } else {
            object.clone()
        };
        let iterator = items.try_iter().map_err(|_| {
            let found = args::a(&args::type_name(object));
            Fault::wrong_type(format!("{name} is {found}; a list of tensors, one a layer, is needed"))
        })?;
        let mut tensors = Vec::new();
        for (layer, item) in iterator.enumerate() {
            tensors.push(Tensor::of(&item?, &format!("{name}[{layer}] (layer {layer})"))?);
        }
        Ok(List { tensors, single: false })
    }
}

impl PyPagedCache {
    pub(crate) fn paged(&self) -> &PagedCache {
        &self.paged
    }

    pub(crate) fn is_torch(&self) -> bool {
        self.torch
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The cache as an engine knows it; registered with it when first used there.
    pub(crate) fn registered(
        &self,
        id: u64,
        engine: &TransferEngine,
    ) -> std::result::Result<Cow<'_, RegisteredCache>, Fault> {
        let first = || self.first.get().filter(|(known, _)| *known == id).map(|(_, cache)| cache);
        if let Some(cache) = first() {
            return Ok(Cow::Borrowed(cache));
        }
        let mut others = lock(&self.others);
        // Somebody else may have done it meanwhile.
        if let Some(cache) = first() {
            return Ok(Cow::Borrowed(cache));
        }
        if let Some((_, cache)) = others.iter().find(|(known, _)| *known == id) {
            return Ok(Cow::Owned(cache.clone()));
        }
        let cache = engine.register(self.paged.clone())?;
        if self.first.set((id, cache.clone())).is_err() {
            if others.len() >= MOST_ENGINES {
                others.remove(0);
            }
            others.push((id, cache.clone()));
        }
        Ok(Cow::Owned(cache))
    }
}

fn cache_tensors(list: &[Tensor], name: &str, stated: Option<DType>) -> Result<Vec<CacheTensor>> {
    let read = |(layer, tensor): (usize, &Tensor)| -> Result<CacheTensor> {
        let here = || format!("{name}[{layer}]");
        let found = tensor.element.kv();
        let dtype = match (stated, found) {
            (None, found) => found.map_err(|e| e.of(here()))?,
            (Some(stated), Ok(found)) if stated != found && !found.is_raw() && !stated.is_raw() => {
                let message = format!(
                    "{}: holds {found}, dtype states {stated}; only untyped elements take another type",
                    here()
                );
                return Err(Fault { kind: "dtype_mismatch", message }.into());
            }
            (Some(stated), _) => stated,
        };
        if dtype.size() != tensor.element.size() {
            let message = format!(
                "{}: elements of {} bytes, dtype {dtype} has {}",
                here(),
                tensor.element.size(),
                dtype.size()
            );
            return Err(Fault { kind: "dtype_mismatch", message }.into());
        }
        let desc = tensor.desc(dtype).map_err(|e| Fault::from(e).of(here()))?;
        if tensor.place == Place::Host {
            mapped(tensor.addr, desc.span_bytes()).map_err(|e| e.of(here()))?;
        }
        Ok(CacheTensor { addr: tensor.addr, len: desc.span_bytes(), desc })
    };
    list.iter().enumerate().map(read).collect()
}

fn axis_list(axes: &Bound<'_, PyAny>) -> Result<Vec<Axis>> {
    if let Ok(text) = axes.extract::<String>() {
        return Ok(Axis::parse_list(&text)?);
    }
    let words = args::texts(Some(axes), "axes")?;
    words.iter().map(|word| word.parse::<Axis>().map_err(Error::from)).collect()
}

#[pymethods]
impl PyPagedCache {
    /// Reads the layout of the engine's tensors: one tensor a layer (a list, or a dict as vLLM registers it), a K
    /// list with `v_tensors`, or one tensor with a layer axis.
    #[new]
    #[pyo3(signature = (tensors, *, v_tensors=None, block_size=None, num_kv_heads=None, head_size=None, axes=None,
        mla=false, num_layers=None, num_blocks=None, backend_head_size=None, dtype=None))]
    #[allow(clippy::too_many_arguments, reason = "what an engine may know of its cache, by keyword")]
    fn new(
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        v_tensors: Option<&Bound<'_, PyAny>>,
        block_size: Option<&Bound<'_, PyAny>>,
        num_kv_heads: Option<&Bound<'_, PyAny>>,
        head_size: Option<&Bound<'_, PyAny>>,
        axes: Option<&Bound<'_, PyAny>>,
        mla: bool,
        num_layers: Option<&Bound<'_, PyAny>>,
        num_blocks: Option<&Bound<'_, PyAny>>,
        backend_head_size: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        guard(py, || {
            let spec = CacheSpec {
                block_size: args::optional(block_size, "block_size")?,
                num_kv_heads: args::optional(num_kv_heads, "num_kv_heads")?,
                head_size: args::optional(head_size, "head_size")?,
                backend_head_size: args::optional(backend_head_size, "backend_head_size")?,
                num_blocks: args::optional(num_blocks, "num_blocks")?,
                mla,
                split_kv: v_tensors.is_some(),
                axes: axes.filter(|a| !a.is_none()).map(axis_list).transpose()?,
            };
            let num_layers = args::optional(num_layers, "num_layers")?;
            let num_layers = num_layers.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
            let stated = dtype.filter(|d| !d.is_none()).map(dtype::stated).transpose()?;
            let first = List::of(tensors, "tensors")?;
            let second = v_tensors.filter(|v| !v.is_none()).map(|v| List::of(v, "v_tensors")).transpose()?;
            let k = cache_tensors(&first.tensors, "tensors", stated)?;
            let described = match &second {
                Some(v) => Tensors::Split { k, v: cache_tensors(&v.tensors, "v_tensors", stated)? },
                None if first.single => {
                    let layered =
                        spec.axes.as_ref().map_or(first.tensors[0].rank() == 6, |a| a.contains(&Axis::Layer));
                    match (layered, k.into_iter().next()) {
                        (true, Some(one)) => Tensors::CrossLayer(one),
                        (false, Some(one)) => Tensors::PerLayer(vec![one]),
                        (_, None) => Tensors::PerLayer(Vec::new()),
                    }
                }
                None => Tensors::PerLayer(k),
            };
            let all: Vec<Tensor> =
                first.tensors.into_iter().chain(second.into_iter().flat_map(|v| v.tensors)).collect();
            let place = all.first().map_or(Place::Host, |t| t.place);
            if let Some((layer, other)) = all.iter().enumerate().find(|(_, t)| t.place != place) {
                let message = format!(
                    "tensor {layer} is on {}, tensor 0 on {place}; a cache is on one device",
                    other.place
                );
                return Err(Fault::value(message).into());
            }
            let paged = detached(py, || {
                // SAFETY: the tensors are kept by this object, which every transfer of it keeps in turn; host
                // memory was seen to be mapped, device memory is looked up next.
                let paged = unsafe { PagedCache::new(&described, &spec, place, num_layers) }?;
                if let Place::Cuda(device) = place {
                    with_context(place, || planes_on_device(&paged, device))?;
                }
                Ok(paged)
            })?;
            let read_only = all.iter().any(|t| t.read_only);
            let torch = all.iter().any(|t| t.torch);
            let tensors = PyTuple::new(py, all.into_iter().map(|t| t.owner))?.unbind();
            Ok(PyPagedCache {
                paged,
                first: OnceLock::new(),
                others: Mutex::default(),
                read_only,
                torch,
                tensors,
            })
        })
    }

    /// Layers.
    #[getter]
    fn num_layers(&self) -> u64 {
        self.paged.layers()
    }

    /// Planes of a layer: 2 (K, V) or 1.
    #[getter]
    fn kv_planes(&self) -> u64 {
        self.paged.planes()
    }

    /// Blocks, as the tensors have them.
    #[getter]
    fn num_blocks(&self) -> u64 {
        self.paged.layout().num_blocks()
    }

    /// Tokens of a block, as the tensors have them.
    #[getter]
    fn block_size(&self) -> u64 {
        self.paged.layout().block_size()
    }

    /// Slots: valid are 0 to one less, and -1 to skip a token.
    #[getter]
    fn num_slots(&self) -> u64 {
        self.paged.num_slots()
    }

    /// KV heads; 1 where a row has none.
    #[getter]
    fn num_kv_heads(&self) -> u64 {
        self.paged.layout().num_heads()
    }

    /// Elements of a head in one plane.
    #[getter]
    fn head_size(&self) -> u64 {
        self.paged.layout().head_size()
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.paged.layout().dtype().name()
    }

    /// `host` or `cuda:N`.
    #[getter]
    fn device(&self) -> String {
        self.paged.place().to_string()
    }

    /// The axes in the tensors' order.
    #[getter]
    fn axes(&self) -> Vec<&'static str> {
        self.paged.layout().axes().iter().map(|a| a.name()).collect()
    }

    /// Bytes of one token in a slab, all layers and planes.
    #[getter]
    fn token_bytes(&self) -> u64 {
        self.paged
            .layout()
            .token_bytes()
            .saturating_mul(self.paged.planes())
            .saturating_mul(self.paged.layers())
    }

    /// The tensors that this keeps alive.
    #[getter]
    fn tensors(&self, py: Python<'_>) -> Py<PyTuple> {
        self.tensors.clone_ref(py)
    }

    /// Byte strides `kv`, `block`, `token`, `head`; `None` where an axis does not exist or has length 1.
    #[getter]
    fn byte_strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let strides = self.paged.layout().byte_strides();
        let dict = PyDict::new(py);
        for (name, value) in
            [("kv", strides.kv), ("block", strides.block), ("token", strides.token), ("head", strides.head)]
        {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// Bytes of a slab of `tokens` tokens.
    fn slab_bytes(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<u64> {
        guard(py, || Ok(self.paged.slab_layout(args::positive(tokens, "tokens")?)?.bytes()))
    }

    /// Shape `(planes, layers, tokens, row)` of a slab of `tokens` tokens, in elements.
    fn slab_shape(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<(u64, u64, u64, u64)> {
        guard(py, || {
            let slab = self.paged.slab_layout(args::positive(tokens, "tokens")?)?;
            Ok((slab.planes(), slab.layers(), slab.tokens(), slab.row_bytes() / slab.dtype().size()))
        })
    }

    /// The fingerprint of a slab of `tokens` tokens: what a key must be tied to.
    fn fingerprint(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<u64> {
        guard(py, || Ok(self.paged.slab_layout(args::positive(tokens, "tokens")?)?.fingerprint().0))
    }

    fn __repr__(&self) -> String {
        let layout = self.paged.layout();
        format!(
            "PagedCache({} layer(s) of {} plane(s), {} blocks of {} tokens, {} head(s) of {} {}, axes {}, {})",
            self.paged.layers(),
            self.paged.planes(),
            layout.num_blocks(),
            layout.block_size(),
            layout.num_heads(),
            layout.head_size(),
            layout.dtype(),
            Axis::join(layout.axes()),
            self.paged.place()
        )
    }

    fn __reduce__(&self, py: Python<'_>) -> PyResult<()> {
        Err(no_pickle(py, "PagedCache", "register the tensors of the other process there"))
    }
}
