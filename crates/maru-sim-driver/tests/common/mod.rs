//! What the tests share: the harness that tells when there is no simulator, raw driver calls, memory.
#![allow(dead_code, reason = "each test uses its part")]

pub(crate) mod log;

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use libtest_mimic::{Arguments, Failed, Trial};
use maru_kernel_cuda::open_context;
use maru_sim_driver::{Census, Session, Simulator, session};

/// A test and its name.
pub(crate) type Test = (&'static str, fn(&Session));

/// Runs the tests one after the other, each in a session of its own. Without a C++ compiler all show as
/// ignored, with the reason; `MARU_REQUIRE_CXX=1` makes that a failure already when the crate is built.
pub(crate) fn main(tests: Vec<Test>) {
    let mut arguments = Arguments::from_args();
    // They share one driver.
    arguments.test_threads = Some(1);
    let missing = maru_sim_driver::library().err();
    if let Some(reason) = &missing {
        eprintln!("left out: {reason}");
    }
    let trials = tests
        .into_iter()
        .map(|(name, test)| {
            Trial::test(name, move || {
                let session = session().map_err(|e| Failed::from(e.to_string()))?;
                test(&session);
                match session.holds_expired() {
                    0 => Ok(()),
                    _ => Err(Failed::from("something waited for work that was held back")),
                }
            })
            .with_ignored_flag(missing.is_some())
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit();
}

/// Lets each call of a driver function that `run` makes fail in turn (not supported, 801), until it makes no such call any
/// more, and looks at the outcomes.
pub(crate) fn each_failing_call<E: std::fmt::Debug>(
    session: &Session,
    function: &str,
    run: impl Fn() -> Result<(), E>,
    look: impl Fn(u64, Result<(), E>),
) {
    for nth in 1.. {
        // A transfer is seen to be over before the event behind it is.
        while session.queued() > 0 {
            std::thread::yield_now();
        }
        session.fail(function, nth, 801);
        let outcome = run();
        let reached = session.faults_left() == 0;
        session.clear_faults();
        if !reached {
            return outcome.unwrap();
        }
        look(nth, outcome);
    }
}

/// A table of test functions, named after themselves.
macro_rules! tests {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        vec![$((stringify!($name), $name as fn(&maru_sim_driver::Session))),*]
    };
}

/// A driver call that must succeed.
macro_rules! ok {
    ($function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the simulator checks its arguments; out pointers are of locals.
        let result = unsafe { cudarc::driver::sys::$function($($arg),*) };
        assert_eq!(result, cudarc::driver::sys::CUresult::CUDA_SUCCESS, stringify!($function));
    }};
}

/// The code of a driver call.
#[allow(unused_macros, reason = "not every test asks for codes")]
macro_rules! code {
    ($function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: as for `ok`.
        let result = unsafe { cudarc::driver::sys::$function($($arg),*) };
        result as u32
    }};
}

/// A context, made current.
pub(crate) fn context(device: usize) -> Arc<CudaContext> {
    let context = open_context(device).expect("the simulator has two devices");
    context.bind_to_thread().expect("can be made current");
    context
}

pub(crate) fn unbind() {
    ok!(cuCtxSetCurrent(std::ptr::null_mut()));
}

pub(crate) fn current() -> usize {
    let mut context = std::ptr::null_mut();
    ok!(cuCtxGetCurrent(&mut context));
    context.addr()
}

/// Device memory, freed when dropped.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) addr: u64,
    pub(crate) len: usize,
}

impl Device {
    pub(crate) fn new(len: usize) -> Device {
        let mut addr = 0;
        ok!(cuMemAlloc_v2(&mut addr, len));
        Device { addr, len }
    }

    pub(crate) fn of(session: &Session, bytes: &[u8]) -> Device {
        let device = Device::new(bytes.len().max(1));
        assert!(bytes.is_empty() || session.poke(device.addr, bytes));
        device
    }

    pub(crate) fn read(&self, session: &Session) -> Vec<u8> {
        self.read_with(session)
    }

    /// The same for other threads, which cannot have the session.
    pub(crate) fn read_with(&self, simulator: &Simulator) -> Vec<u8> {
        simulator.peek(self.addr, self.len).expect("memory of the device")
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        let _ = unsafe { sys::cuMemFree_v2(self.addr) };
    }
}

/// Pinned host memory, freed when dropped.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) host: NonNull<u8>,
    pub(crate) device: u64,
    pub(crate) len: usize,
}

// SAFETY: an address; tests see to who touches the bytes.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(bytes: &[u8]) -> Pinned {
        let mut host = std::ptr::null_mut();
        ok!(cuMemHostAlloc(&mut host, bytes.len(), 0));
        let mut device = 0;
        ok!(cuMemHostGetDevicePointer_v2(&mut device, host, 0));
        let host = NonNull::new(host.cast::<u8>()).expect("an address");
        // SAFETY: as many bytes were just allocated.
        unsafe { host.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Pinned { host, device, len: bytes.len() }
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        // SAFETY: allocated with that length; tests read when nothing is in flight or to see that it is.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), self.len) }.to_vec()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        let _ = unsafe { sys::cuMemFreeHost(self.host.as_ptr().cast()) };
    }
}

/// A stream, destroyed when dropped.
#[derive(Debug)]
pub(crate) struct Stream(pub(crate) sys::CUstream);

impl Stream {
    pub(crate) fn new(non_blocking: bool) -> Stream {
        let mut stream = std::ptr::null_mut();
        ok!(cuStreamCreate(&mut stream, u32::from(non_blocking)));
        Stream(stream)
    }

    pub(crate) fn wait(&self) {
        ok!(cuStreamSynchronize(self.0));
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// An event, destroyed when dropped.
#[derive(Debug)]
pub(crate) struct Event(pub(crate) sys::CUevent);

impl Event {
    pub(crate) fn new() -> Event {
        let mut event = std::ptr::null_mut();
        ok!(cuEventCreate(&mut event, 0));
        Event(event)
    }

    /// Whether what it was recorded behind is over.
    pub(crate) fn is_over(&self) -> bool {
        // SAFETY: the event is alive.
        unsafe { sys::cuEventQuery(self.0) == sys::CUresult::CUDA_SUCCESS }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// What a stream recorded, ready to run; destroyed when dropped.
#[derive(Debug)]
pub(crate) struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

impl Graph {
    /// Captures what `record` puts on the stream.
    pub(crate) fn capture<T>(stream: &Stream, record: impl FnOnce() -> T) -> (T, Graph) {
        ok!(cuStreamBeginCapture_v2(stream.0, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
        let recorded = record();
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        ok!(cuStreamEndCapture(stream.0, &mut graph));
        ok!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        (recorded, Graph { graph, exec })
    }

    /// Runs it and waits.
    pub(crate) fn replay(&self, stream: &Stream) {
        ok!(cuGraphLaunch(self.exec, stream.0));
        stream.wait();
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `capture`, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        // SAFETY: as above.
        let _ = unsafe { sys::cuGraphDestroy(self.graph) };
    }
}

/// Runs something that must leave nothing behind.
pub(crate) fn leaves_nothing(session: &Session, run: impl FnOnce()) -> Census {
    let before = session.census();
    run();
    let after = session.census();
    assert_eq!(before, after, "something leaked");
    after
}

/// Bytes that differ from their neighbours.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(151) >> 2).to_le_bytes()[0] ^ seed).collect()
}
