//! A device for tests and benches: memory, streams, graphs and a kernel that takes its time. Every failure of
//! the driver is a panic with the call's name.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use maru_kernel_cuda::{KernelError, PagedCopyKernel, open_context};

pub(crate) fn ok(what: &str, result: sys::CUresult) {
    assert!(result == sys::CUresult::CUDA_SUCCESS, "{what}: {result:?}");
}

/// Calls a driver function and panics with its name if it fails.
macro_rules! cu {
    ($name:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: a test that passes handles and memory it owns, of the sizes it states.
        let result = unsafe { cudarc::driver::sys::$name($($arg),*) };
        $crate::gpu::ok(stringify!($name), result)
    }};
}
pub(crate) use cu;

/// A context made current on the calling thread, the kernel, and the stalling kernel.
pub(crate) struct Gpu {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) kernel: PagedCopyKernel,
    stall: sys::CUfunction,
}

// SAFETY: handles that any thread may use with the context current.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl Gpu {
    pub(crate) fn open() -> Result<Self, KernelError> {
        let context = open_context(0)?;
        let kernel = PagedCopyKernel::load(context.clone())?;
        context.bind_to_thread().expect("the context becomes current");
        let image = concat!(include_str!("../../ptx/stall.ptx"), "\0");
        let (mut module, mut stall) = (std::ptr::null_mut(), std::ptr::null_mut());
        cu!(cuModuleLoadData(&mut module, image.as_ptr().cast()));
        cu!(cuModuleGetFunction(&mut stall, module, c"maru_test_stall".as_ptr()));
        Ok(Gpu { context, kernel, stall })
    }

    /// Makes the context current on this thread: tests run on threads of their own.
    pub(crate) fn bind(&self) {
        self.context.bind_to_thread().expect("the context becomes current");
    }

    /// Queues a kernel that waits, then copies `words` 8-byte words.
    pub(crate) fn stall(&self, stream: &Stream, milliseconds: u64, to: u64, from: u64, words: u32) {
        let (mut to, mut from, mut words, mut time) = (to, from, words, milliseconds * 1_000_000);
        let mut params: [*mut c_void; 4] =
            [(&raw mut to).cast(), (&raw mut from).cast(), (&raw mut words).cast(), (&raw mut time).cast()];
        let (f, s) = (self.stall, stream.0);
        cu!(cuLaunchKernel(f, 1, 1, 1, 256, 1, 1, 0, s, params.as_mut_ptr(), std::ptr::null_mut()));
    }
}

pub(crate) struct Stream(pub(crate) sys::CUstream);

impl Stream {
    /// A stream that does not synchronise with the default one.
    pub(crate) fn new() -> Self {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        cu!(cuStreamCreate(&mut stream, flags));
        Stream(stream)
    }

    pub(crate) fn wait(&self) {
        cu!(cuStreamSynchronize(self.0));
    }

    /// Whether nothing queued is left.
    pub(crate) fn idle(&self) -> bool {
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => false,
            result => {
                ok("cuStreamQuery", result);
                true
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// Device memory.
pub(crate) struct Device {
    pub(crate) addr: u64,
    pub(crate) len: usize,
}

impl Device {
    pub(crate) fn new(len: usize) -> Self {
        let mut addr = 0;
        cu!(cuMemAlloc_v2(&mut addr, len.max(1)));
        Device { addr, len }
    }

    pub(crate) fn holding(bytes: &[u8]) -> Self {
        let new = Device::new(bytes.len());
        new.write(0, bytes);
        new
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        if !bytes.is_empty() {
            cu!(cuMemcpyHtoD_v2(self.addr + at as u64, bytes.as_ptr().cast(), bytes.len()));
            // The copy of pageable memory may return before it has arrived.
            cu!(cuCtxSynchronize());
        }
    }

    pub(crate) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut bytes = vec![0; len];
        if len > 0 {
            cu!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.addr + at as u64, len));
        }
        bytes
    }

    pub(crate) fn fill(&self, byte: u8) {
        cu!(cuMemsetD8_v2(self.addr, byte, self.len));
        cu!(cuCtxSynchronize());
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        let _ = unsafe { sys::cuMemFree_v2(self.addr) };
    }
}

/// Pinned host memory.
pub(crate) struct Pinned {
    host: *mut u8,
    pub(crate) addr: u64,
    len: usize,
}

// SAFETY: plain memory behind `&self`/`&mut self`.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(len: usize) -> Self {
        let (mut host, mut addr) = (std::ptr::null_mut(), 0);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        cu!(cuMemHostAlloc(&mut host, len.max(1), flags));
        cu!(cuMemHostGetDevicePointer_v2(&mut addr, host, 0));
        Pinned { host: host.cast(), addr, len }
    }

    /// The bytes; nothing that writes them may be in flight.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the allocation, borrowed for as long as the slice.
        unsafe { std::slice::from_raw_parts_mut(self.host, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.host.cast()) };
    }
}

/// A captured and instantiated graph.
pub(crate) struct Graph(sys::CUgraph, sys::CUgraphExec);

impl Graph {
    pub(crate) fn capture(stream: &Stream, queue: impl FnOnce()) -> Self {
        // As PyTorch does: other threads that call the driver carelessly break it.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        cu!(cuStreamBeginCapture_v2(stream.0, mode));
        queue();
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        cu!(cuStreamEndCapture(stream.0, &mut graph));
        cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        Graph(graph, exec)
    }

    /// What was queued breaks the capture; what it returned.
    pub(crate) fn broken<T>(stream: &Stream, queue: impl FnOnce() -> T) -> T {
        cu!(cuStreamBeginCapture_v2(stream.0, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED));
        let outcome = queue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the out pointer is valid; the stream is alive.
        let ended = unsafe { sys::cuStreamEndCapture(stream.0, &raw mut graph) };
        assert_ne!(ended, sys::CUresult::CUDA_SUCCESS, "the capture is whole");
        outcome
    }

    pub(crate) fn launch(&self, stream: &Stream) {
        cu!(cuGraphLaunch(self.1, stream.0));
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `capture`, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.1) };
        // SAFETY: as above.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// Slots as bytes, for device memory.
pub(crate) fn slot_bytes(slots: &[i64]) -> Vec<u8> {
    slots.iter().flat_map(|slot| slot.to_ne_bytes()).collect()
}
