//! The few functions of cuBLAS that are needed, from whatever library is there at run time.

use std::error::Error as _;
use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};

use cudarc::driver::sys::CUstream;
use libloading::Library;

use crate::find::{candidates, companion};
use crate::gpu::{Device, Stream};

type Handle = *mut c_void;

// Values of the enums in cublas_api.h and library_types.h.
const OP_N: c_int = 0;
const OP_T: c_int = 1;
const R_16BF: c_int = 14;
const COMPUTE_32F: c_int = 68;
const ALGO_DEFAULT: c_int = -1;

/// What NVIDIA advises for Hopper. A workspace of our own, since the library's would be allocated while a
/// graph is captured.
const WORKSPACE: usize = 64 << 20;

type Create = unsafe extern "C" fn(*mut Handle) -> c_int;
type Destroy = unsafe extern "C" fn(Handle) -> c_int;
type GetVersion = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
type SetStream = unsafe extern "C" fn(Handle, CUstream) -> c_int;
type SetWorkspace = unsafe extern "C" fn(Handle, *mut c_void, usize) -> c_int;
type Saxpy = unsafe extern "C" fn(Handle, c_int, *const f32, *const f32, c_int, *mut f32, c_int) -> c_int;
type GemmEx = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// cuBLAS, loaded and with a handle on one stream.
pub(crate) struct Blas {
    handle: Handle,
    destroy: Destroy,
    saxpy: Saxpy,
    gemm_ex: GemmEx,
    pub(crate) version: c_int,
    pub(crate) path: PathBuf,
    _workspace: Device,
}

/// A product of bf16 matrices, all in columns: `c (m x n) = a (m x k) b (k x n)`.
pub(crate) struct Product {
    pub(crate) m: c_int,
    pub(crate) n: c_int,
    pub(crate) k: c_int,
    /// `a` lies transposed in memory, as the weights of a linear layer do.
    pub(crate) transposed: bool,
}

impl Blas {
    /// A library that can be loaded, with its functions on `stream`. The context is current.
    pub(crate) fn open(given: Option<&str>, stream: &Stream) -> Result<Self, String> {
        let (library, path) = load(given)?;
        // CUDA libraries do not like to be unloaded.
        let library: &'static Library = Box::leak(Box::new(library));
        let named = |error| format!("{}: {error}", path.display());
        // SAFETY: the types are those of cublas_api.h, of versions 12 and 13.
        let create: Create = unsafe { symbol(library, "cublasCreate_v2") }.map_err(named)?;
        // SAFETY: as above.
        let destroy: Destroy = unsafe { symbol(library, "cublasDestroy_v2") }.map_err(named)?;
        // SAFETY: as above.
        let get_version: GetVersion = unsafe { symbol(library, "cublasGetVersion_v2") }.map_err(named)?;
        // SAFETY: as above.
        let set_stream: SetStream = unsafe { symbol(library, "cublasSetStream_v2") }.map_err(named)?;
        // SAFETY: as above.
        let set_workspace: SetWorkspace =
            unsafe { symbol(library, "cublasSetWorkspace_v2") }.map_err(named)?;
        // SAFETY: as above.
        let saxpy: Saxpy = unsafe { symbol(library, "cublasSaxpy_v2") }.map_err(named)?;
        // SAFETY: as above.
        let gemm_ex: GemmEx = unsafe { symbol(library, "cublasGemmEx") }.map_err(named)?;
        let checked = |what: &str, status: c_int| match status {
            0 => Ok(()),
            _ => Err(format!("{}: {what} returned status {status}", path.display())),
        };
        let workspace = Device::new(WORKSPACE);
        let (mut handle, mut version) = (std::ptr::null_mut(), 0);
        // SAFETY: the out pointer is valid; the context is current.
        checked("cublasCreate", unsafe { create(&raw mut handle) })?;
        // SAFETY: the handle was made; the out pointer is valid.
        checked("cublasGetVersion", unsafe { get_version(handle, &raw mut version) })?;
        // SAFETY: handle and stream are alive.
        checked("cublasSetStream", unsafe { set_stream(handle, stream.0) })?;
        // Setting the stream resets the workspace, so it comes after.
        // SAFETY: the workspace lives as long as the handle.
        checked("cublasSetWorkspace", unsafe {
            set_workspace(handle, workspace.addr as *mut c_void, workspace.len)
        })?;
        Ok(Blas { handle, destroy, saxpy, gemm_ex, version, path, _workspace: workspace })
    }

    /// Queues `y += 1e-6 x` over as many floats as both have.
    pub(crate) fn saxpy(&self, x: &Device, y: &Device) {
        let n = c_int::try_from(x.len.min(y.len) / 4).unwrap();
        let alpha = 1e-6f32;
        // SAFETY: both buffers hold `n` floats and outlive the work; `alpha` is read during the call.
        let status = unsafe {
            (self.saxpy)(self.handle, n, &raw const alpha, x.addr as *const f32, 1, y.addr as *mut f32, 1)
        };
        assert!(status == 0, "cublasSaxpy returned status {status}");
    }

    /// Queues a product.
    pub(crate) fn product(&self, shape: &Product, a: &Device, b: &Device, c: &Device) {
        let Product { m, n, k, transposed } = *shape;
        let bytes = |rows: c_int, columns: c_int| 2 * i64::from(rows) * i64::from(columns);
        for (buffer, needed) in [(a, bytes(m, k)), (b, bytes(k, n)), (c, bytes(m, n))] {
            assert!(i64::try_from(buffer.len).unwrap() >= needed);
        }
        let (alpha, beta) = (1f32, 0f32);
        let (op, lda) = if transposed { (OP_T, k) } else { (OP_N, m) };
        let (alpha, beta) = ((&raw const alpha).cast(), (&raw const beta).cast());
        let (a, b, c) = (a.addr as *const c_void, b.addr as *const c_void, c.addr as *mut c_void);
        // SAFETY: the buffers hold the matrices, see above, and outlive the work; the scalars are read during
        // the call.
        let status = unsafe {
            (self.gemm_ex)(
                self.handle,
                op,
                OP_N,
                m,
                n,
                k,
                alpha,
                a,
                R_16BF,
                lda,
                b,
                R_16BF,
                k,
                beta,
                c,
                R_16BF,
                m,
                COMPUTE_32F,
                ALGO_DEFAULT,
            )
        };
        assert!(status == 0, "cublasGemmEx returned status {status}");
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: made by `open`, destroyed once; its work is over or reads the workspace, which goes later.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

/// The first candidate that loads.
fn load(given: Option<&str>) -> Result<(Library, PathBuf), String> {
    let paths = candidates(given.map(Path::new), Path::is_file);
    let mut reasons = Vec::new();
    for path in paths {
        if let Some(companion) = companion(&path) {
            // SAFETY: a library of NVIDIA's, whose initialisers are meant to run like this.
            if let Ok(library) = unsafe { Library::new(&companion) } {
                Box::leak(Box::new(library));
            }
        }
        // SAFETY: as above, or what the user named.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok((library, path)),
            // What the loader said is one level down.
            Err(error) => reasons.push(error.source().unwrap_or(&error).to_string()),
        }
    }
    let why = match (given, reasons.is_empty()) {
        (Some(given), true) => format!("there is none at {given:?}"),
        _ => reasons.join("; "),
    };
    Err(format!(
        "cuBLAS cannot be loaded: {why}. Name it by --cublas or MARU_CUBLAS: the library, its folder, or the \
         site-packages folder of a Python that has PyTorch or nvidia-cublas; or measure without it: --load stall"
    ))
}

/// # Safety
/// `F` is the type of the function.
unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|f| *f).map_err(|error| error.to_string())
}
