//! A device for tests and benches, the real one or the simulated: memory, streams, graphs. Every failure of
//! the driver is a panic with the call's name.

use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use maru_fallback::{DeviceMover, DeviceOptions};

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

/// The `ordinal`-th device's context, or why there is none.
pub(crate) fn open(ordinal: usize) -> Result<Arc<CudaContext>, String> {
    if !maru_driver::is_present() {
        return Err(maru_driver::Unavailable::NoDriver.to_string());
    }
    // SAFETY: the library is there.
    match unsafe { sys::cuInit(0) } {
        sys::CUresult::CUDA_SUCCESS => {}
        error => return Err(format!("cuInit: {error:?}")),
    }
    let context = CudaContext::new(ordinal).map_err(|e| format!("device {ordinal}: {e}"))?;
    // SAFETY: no slice of cudarc's is made here, which is all that its event tracking serves.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

pub(crate) fn mover(context: &Arc<CudaContext>, options: DeviceOptions) -> DeviceMover {
    DeviceMover::open(context.clone(), options).expect("a mover")
}

/// The thread's current context.
pub(crate) fn current() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    cu!(cuCtxGetCurrent(&mut context));
    context
}

pub(crate) fn make_current(context: sys::CUcontext) {
    cu!(cuCtxSetCurrent(context));
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
    len: usize,
}

impl Device {
    pub(crate) fn new(len: usize) -> Self {
        let mut addr = 0;
        cu!(cuMemAlloc_v2(&mut addr, len.max(1)));
        Device { addr, len }
    }

    pub(crate) fn holding(bytes: &[u8]) -> Self {
        let new = Device::new(bytes.len());
        new.write(bytes);
        new
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len);
        if !bytes.is_empty() {
            cu!(cuMemcpyHtoD_v2(self.addr, bytes.as_ptr().cast(), bytes.len()));
            // The copy of pageable memory may return before it has arrived.
            cu!(cuCtxSynchronize());
        }
    }

    pub(crate) fn read(&self, len: usize) -> Vec<u8> {
        assert!(len <= self.len);
        let mut bytes = vec![0; len];
        if len > 0 {
            cu!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.addr, len));
        }
        bytes
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

impl Pinned {
    pub(crate) fn new(len: usize) -> Self {
        let (mut host, mut addr) = (std::ptr::null_mut(), 0);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        cu!(cuMemHostAlloc(&mut host, len.max(1), flags));
        cu!(cuMemHostGetDevicePointer_v2(&mut addr, host, 0));
        Pinned { host: host.cast(), addr, len }
    }

    pub(crate) fn host_addr(&self) -> u64 {
        self.host.expose_provenance() as u64
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
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        cu!(cuStreamBeginCapture_v2(stream.0, mode));
        queue();
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        cu!(cuStreamEndCapture(stream.0, &mut graph));
        cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        Graph(graph, exec)
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
