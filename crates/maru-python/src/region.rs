//! `Region` and `Slab`: shared memory, and spans of it that other libraries can look at.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use maru_cxl::{
    CreateOptions, CudaRegistrar, DaxDevice, MapOptions, Mapping, PooledSlab, Region, RegisterOptions, Slab,
};
use maru_layout::DType;
use maru_transfer::Place;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use pyo3::{ffi, intern};
use smallvec::smallvec;

use crate::args;
use crate::dtype::Element;
use crate::errors::{Fault, detached, guard};
use crate::memory::Tracked;
use crate::process::{claim_cuda, cuda_allowed};
use crate::tensor::{Tensor, export_dlpack};

/// The error of everything that holds addresses of this process.
pub(crate) fn no_pickle(py: Python<'_>, what: &str, instead: &str) -> PyErr {
    let message =
        format!("{what} holds addresses of this process and cannot be pickled or copied; {instead}");
    Fault::wrong_type(message).into_py(py)
}

/// Mapped memory: a window of a dax device or of a file, or private memory.
#[pyclass(module = "maru_kv_ops", name = "Region", frozen)]
pub(crate) struct PyRegion {
    tracked: Arc<Tracked>,
    path: Option<PathBuf>,
}

impl PyRegion {
    fn region(&self) -> &Region {
        &self.tracked.0
    }
}

#[pymethods]
impl PyRegion {
    /// Maps `size` bytes (0 = all) at `offset` of a dax device or file. `create` makes a file of `size` bytes.
    #[staticmethod]
    #[pyo3(signature = (path, *, offset=None, size=None, create=false, read_only=false, prefault=true))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        offset: Option<&Bound<'_, PyAny>>,
        size: Option<&Bound<'_, PyAny>>,
        create: bool,
        read_only: bool,
        prefault: bool,
    ) -> PyResult<Self> {
        guard(py, || {
            let offset = offset.map_or(Ok(0), |o| args::count(o, "offset"))?;
            let size = size.map_or(Ok(0), |s| args::count(s, "size"))?;
            if create && size == 0 {
                return Err(Fault::value("size is 0; a file that is created needs its size in bytes").into());
            }
            let place = path.clone();
            let region = detached(py, move || {
                let device = match create {
                    true => {
                        let len = offset
                            .checked_add(size)
                            .ok_or_else(|| Fault::overflow("offset + size does not fit 64 bits"))?;
                        DaxDevice::create_file(&place, len, CreateOptions { replace: false })?
                    }
                    false => DaxDevice::open(&place)?,
                };
                let options = MapOptions { offset, len: size, prefault, read_only, ..MapOptions::default() };
                Ok(Region::new(Mapping::map(&device, &options)?))
            })?;
            Ok(PyRegion { tracked: Tracked::new(region), path: Some(path) })
        })
    }

    /// Private memory, zeroed: slabs of one process, and tests.
    #[staticmethod]
    fn anonymous(py: Python<'_>, size: &Bound<'_, PyAny>) -> PyResult<Self> {
        guard(py, || {
            let size = args::positive(size, "size")?;
            let region = detached(py, || Ok(Region::anonymous(size)?))?;
            Ok(PyRegion { tracked: Tracked::new(region), path: None })
        })
    }

    /// The bytes `[offset, offset + nbytes)`.
    fn slab(&self, py: Python<'_>, offset: &Bound<'_, PyAny>, nbytes: &Bound<'_, PyAny>) -> PyResult<PySlab> {
        guard(py, || {
            let (offset, nbytes) = (args::count(offset, "offset")?, args::positive(nbytes, "nbytes")?);
            Ok(PySlab::new(self.region().slab(offset, nbytes)?, Arc::clone(&self.tracked), None))
        })
    }

    /// Registers the memory with a CUDA device, so that its kernels reach it. Returns whether that worked; with
    /// `required` a refusal is an error.
    #[pyo3(signature = (device=None, *, required=true))]
    fn register(&self, py: Python<'_>, device: Option<&Bound<'_, PyAny>>, required: bool) -> PyResult<bool> {
        guard(py, || {
            let device = match device.map(|d| crate::tensor::place_of(d, "device")).transpose()? {
                None => 0,
                Some(Place::Cuda(n)) => n,
                Some(other) => {
                    return Err(Fault::value(format!("device is {other}; a cuda device is needed")).into());
                }
            };
            let region = self.region().clone();
            Ok(detached(py, move || {
                cuda_allowed()?;
                let registrar = CudaRegistrar::open(usize::try_from(device).unwrap_or(usize::MAX))?;
                claim_cuda();
                let options = RegisterOptions { required, ..RegisterOptions::default() };
                Ok(region.register(Arc::new(registrar), options)?.is_registered())
            })?)
        })
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.region().len()
    }

    /// Whether a CUDA device reaches it.
    #[getter]
    fn is_registered(&self) -> bool {
        self.region().is_registered()
    }

    /// Whether it may not be written.
    #[getter]
    fn read_only(&self) -> bool {
        self.region().is_read_only()
    }

    /// What was opened; `None` for private memory.
    #[getter]
    fn path(&self) -> Option<String> {
        self.path.as_ref().map(|p| p.display().to_string())
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.region().len()).unwrap_or(usize::MAX)
    }

    fn __repr__(&self) -> String {
        let region = self.region();
        format!(
            "Region({}, nbytes={}, registered={})",
            region.backing(),
            region.len(),
            region.is_registered()
        )
    }

    fn __reduce__(&self, py: Python<'_>) -> PyResult<()> {
        Err(no_pickle(py, "Region", "open its path again in the other process"))
    }
}

/// A span of a region. Other libraries see its bytes through the buffer protocol, `__array_interface__` and
/// DLPack; it keeps the region alive.
#[pyclass(module = "maru_kv_ops", name = "Slab", frozen)]
pub(crate) struct PySlab {
    slab: Slab,
    tracked: Arc<Tracked>,
    /// Its place in a pool, where it has one.
    pooled: Option<PooledSlab>,
}

impl PySlab {
    pub(crate) fn new(slab: Slab, tracked: Arc<Tracked>, pooled: Option<PooledSlab>) -> Self {
        PySlab { slab, tracked, pooled }
    }

    pub(crate) fn slab(&self) -> &Slab {
        &self.slab
    }

    pub(crate) fn pooled(&self) -> Option<&PooledSlab> {
        self.pooled.as_ref()
    }

    fn host_addr(&self) -> usize {
        self.slab.addr().as_ptr().expose_provenance()
    }

    fn signed_len(&self) -> i64 {
        // A region is shorter than 2^63 bytes.
        i64::try_from(self.slab.len()).unwrap_or(i64::MAX)
    }

    /// As an array of untyped bytes.
    pub(crate) fn tensor(&self, object: &Bound<'_, PyAny>) -> Tensor {
        Tensor {
            addr: self.host_addr() as u64,
            shape: smallvec![self.signed_len()],
            strides: smallvec![1],
            element: Element::Kv(DType::Raw8),
            place: Place::Host,
            read_only: self.slab.is_read_only(),
            torch: false,
            owned: true,
            owner: object.clone().unbind(),
        }
    }
}

#[pymethods]
impl PySlab {
    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.slab.len()
    }

    /// Offset of the first byte in its region.
    #[getter]
    fn offset(&self) -> u64 {
        self.slab.offset()
    }

    /// Whether it may not be written.
    #[getter]
    fn read_only(&self) -> bool {
        self.slab.is_read_only()
    }

    /// Whether a CUDA device reaches all of it.
    #[getter]
    fn is_registered(&self) -> bool {
        self.slab.is_registered()
    }

    /// Host address of the first byte, for calls that take one.
    fn data_ptr(&self) -> usize {
        self.host_addr()
    }

    /// Part of it.
    fn span(&self, py: Python<'_>, offset: &Bound<'_, PyAny>, nbytes: &Bound<'_, PyAny>) -> PyResult<PySlab> {
        guard(py, || {
            let (offset, nbytes) = (args::count(offset, "offset")?, args::positive(nbytes, "nbytes")?);
            Ok(PySlab::new(self.slab.span(offset, nbytes)?, Arc::clone(&self.tracked), self.pooled.clone()))
        })
    }

    /// A copy of `nbytes` bytes (all that is left, if not given) from `offset` on.
    #[pyo3(signature = (offset=None, nbytes=None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: Option<&Bound<'py, PyAny>>,
        nbytes: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        guard(py, || {
            let offset = offset.map_or(Ok(0), |o| args::count(o, "offset"))?;
            let rest = self.slab.len().saturating_sub(offset);
            let nbytes = nbytes.filter(|n| !n.is_none()).map_or(Ok(rest), |n| args::count(n, "nbytes"))?;
            // The bounds are checked before memory is asked for.
            self.slab.span(offset, nbytes)?;
            let len =
                usize::try_from(nbytes).map_err(|_| Fault::overflow("nbytes does not fit an address"))?;
            let mut bytes = vec![0u8; len];
            detached(py, || Ok(self.slab.read_at(offset, &mut bytes)?))?;
            Ok(PyBytes::new(py, &bytes))
        })
    }

    /// Copies bytes in at `offset`.
    #[pyo3(signature = (data, offset=None))]
    fn write(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        offset: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        guard(py, || {
            let offset = offset.map_or(Ok(0), |o| args::count(o, "offset"))?;
            let found = || format!("data is {}, bytes are needed", args::a(&args::type_name(data)));
            let data = PyBuffer::<u8>::get(data).map_err(|_| Fault::wrong_type(found()))?.to_vec(py)?;
            Ok(detached(py, || Ok(self.slab.write_at(offset, &data)?))?)
        })
    }

    /// XXH3-64 of all its bytes.
    fn checksum(&self, py: Python<'_>) -> PyResult<u64> {
        guard(py, || Ok(detached(py, || Ok(maru_transfer::checksum(&self.slab)?))?))
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.slab.len()).unwrap_or(usize::MAX)
    }

    #[getter(__array_interface__)]
    fn array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item(intern!(py, "version"), 3)?;
        interface.set_item(intern!(py, "shape"), (self.slab.len(),))?;
        interface.set_item(intern!(py, "typestr"), "|u1")?;
        interface.set_item(intern!(py, "data"), (self.host_addr(), self.slab.is_read_only()))?;
        Ok(interface)
    }

    #[pyo3(signature = (**_kwargs))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        _kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        if this.slab.is_read_only() {
            return Err(PyBufferError::new_err("a read-only slab cannot be exported through DLPack"));
        }
        export_dlpack(slf.py(), this.host_addr(), this.signed_len(), slf.clone().into_any().unbind())
    }

    fn __dlpack_device__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, [1, 0])
    }

    /// # Safety
    /// Called by Python with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let read_only = c_int::from(this.slab.is_read_only());
        let len =
            isize::try_from(this.slab.len()).map_err(|_| PyBufferError::new_err("too long for a buffer"))?;
        let bytes = this.slab.addr().as_ptr().cast::<c_void>();
        // SAFETY: `view` is Python's to fill; the bytes stay mapped while the view holds its reference to the
        // slab, which this call takes.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), bytes, len, read_only, flags) };
        match filled {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }

    /// # Safety
    /// Called by Python with a view that `__getbuffer__` filled.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {}

    fn __repr__(&self) -> String {
        let pooled = self.pooled.as_ref().map(|p| format!(", pool slab {}", p.index())).unwrap_or_default();
        format!(
            "Slab(offset={}, nbytes={}, registered={}{pooled})",
            self.slab.offset(),
            self.slab.len(),
            self.slab.is_registered()
        )
    }

    fn __reduce__(&self, py: Python<'_>) -> PyResult<()> {
        Err(no_pickle(py, "Slab", "send the region's path and the slab's offset and length"))
    }
}
