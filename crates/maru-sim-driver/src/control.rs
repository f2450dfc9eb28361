//! What tests say to the simulator and ask of it.

use std::ffi::{CStr, CString, c_char};

use crate::SimError;
use crate::library::Loaded;

/// Objects that live in the driver. Equal before and after means that nothing leaked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Census {
    /// Allocations of device memory.
    pub allocations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Allocations of pinned host memory.
    pub pinned: u64,
    /// Registrations of host memory.
    pub registrations: u64,
    /// Events.
    pub events: u64,
    /// Streams, default ones left out.
    pub streams: u64,
    /// Loaded modules.
    pub modules: u64,
    /// Captured graphs.
    pub graphs: u64,
    /// Graphs made ready to run.
    pub graph_execs: u64,
    /// Contexts in use.
    pub contexts: u64,
    /// Objects that nobody destroyed before their context went away.
    pub lost: u64,
}

/// What moved bytes, and between what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyKind {
    /// A copy from host to device memory.
    HostToDevice,
    /// A copy from device to host memory.
    DeviceToHost,
    /// A copy inside device memory.
    DeviceToDevice,
    /// A copy inside host memory.
    HostToHost,
    /// A kernel launch.
    Kernel,
    /// A memory set.
    Set,
}

/// Something that was queued.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// The driver function, or the kernel's entry.
    pub function: String,
    /// What it is.
    pub kind: CopyKind,
    /// Whether the source is pageable memory.
    pub pageable_source: bool,
    /// Whether the destination is pageable memory.
    pub pageable_destination: bool,
    /// Bytes of a copy or set; threads of a block of a kernel.
    pub bytes: u64,
    /// Rows of a copy or set; thread blocks of a kernel.
    pub rows: u64,
    /// Address copied from.
    pub source: u64,
    /// Address copied to or set.
    pub destination: u64,
    /// Handle of the stream, 0 for a default stream.
    pub stream: u64,
}

/// `sim::Record`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawRecord {
    function: [c_char; 40],
    kind: u32,
    pageable: u32,
    bytes: u64,
    rows: u64,
    source: u64,
    destination: u64,
    stream: u64,
}

const EMPTY: RawRecord = RawRecord {
    function: [0; 40],
    kind: 0,
    pageable: 0,
    bytes: 0,
    rows: 0,
    source: 0,
    destination: 0,
    stream: 0,
};

macro_rules! functions {
    ($($field:ident: $symbol:literal, fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        #[derive(Clone, Copy, Debug)]
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Functions {
            fn find(loaded: Loaded) -> Result<Self, SimError> {
                Ok(Functions {
                    $($field: {
                        let found = loaded.symbol($symbol).ok_or_else(|| SimError::NotLoaded {
                            path: "libcuda.so".into(),
                            reason: format!("{:?} is missing", $symbol),
                        })?;
                        // SAFETY: the symbol is this function, see cuda/control.cpp.
                        unsafe {
                            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(found)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    set: c"maru_sim_set", fn(*const c_char, u64) -> u32;
    get: c"maru_sim_get", fn(*const c_char) -> u64;
    fail: c"maru_sim_fail", fn(*const c_char, u64, i32, u32);
    clear_faults: c"maru_sim_clear_faults", fn();
    faults_left: c"maru_sim_faults_left", fn() -> u64;
    calls: c"maru_sim_calls", fn(*const c_char) -> u64;
    reset: c"maru_sim_reset", fn() -> u32;
    poison: c"maru_sim_poison", fn(i32, i32);
    census: c"maru_sim_census", fn(*mut u64);
    log: c"maru_sim_log", fn(*mut RawRecord, u64) -> u64;
    clear_log: c"maru_sim_clear_log", fn();
    hold: c"maru_sim_hold", fn();
    release: c"maru_sim_release", fn();
    holds_expired: c"maru_sim_holds_expired", fn() -> u64;
    queued: c"maru_sim_queued", fn() -> u64;
    executed: c"maru_sim_executed", fn() -> u64;
    peek: c"maru_sim_peek", fn(u64, *mut u8, u64) -> u32;
    poke: c"maru_sim_poke", fn(u64, *const u8, u64) -> u32;
}

/// The simulated driver of this process. Its state is global: use a [`crate::session`] in tests.
#[derive(Clone, Copy, Debug)]
pub struct Simulator {
    loaded: Loaded,
    functions: Functions,
}

impl Simulator {
    pub(crate) fn new(loaded: Loaded) -> Result<Self, SimError> {
        Ok(Simulator { loaded, functions: Functions::find(loaded)? })
    }

    /// Whether the library has a function.
    pub fn has(&self, function: &str) -> bool {
        self.loaded.symbol(&name(function)).is_some()
    }

    /// Changes a setting: `devices`, `cc_major`, `cc_minor`, `driver_version`, `memory_bytes`, `shift`
    /// (registered memory has another address on the device), `delay_us` (before every operation), `word_us` (after every word that a kernel tells),
    /// `reject_disk_files`, `register_limit`, `pageable_lazy` (asynchronous copies touch pageable memory when
    /// they run), `read_only_register`, `accept_fatbin`, `descending` (order of threads), `hold_seconds`,
    /// `uuid` (of devices; 0, the default: they have none, and engines then measure nothing on them).
    ///
    /// # Panics
    /// If there is no such setting.
    pub fn set(&self, setting: &str, value: u64) {
        // SAFETY: the name is a C string.
        let unknown = unsafe { (self.functions.set)(name(setting).as_ptr(), value) };
        assert_eq!(unknown, 0, "the simulator has no setting {setting:?}");
    }

    /// A setting's value; 0 if there is no such setting.
    pub fn get(&self, setting: &str) -> u64 {
        // SAFETY: the name is a C string.
        unsafe { (self.functions.get)(name(setting).as_ptr()) }
    }

    /// The `nth` call from now on (1: the next) returns `code` and does nothing. A name without `_v2` means
    /// every version of the function.
    pub fn fail(&self, function: &str, nth: u64, code: u32) {
        self.script(function, nth, code, 0);
    }

    /// As [`Simulator::fail`], and so does every later call.
    pub fn fail_from(&self, function: &str, nth: u64, code: u32) {
        self.script(function, nth, code, 1);
    }

    /// The `nth` call succeeds, and what it queues fails with `code` when its turn comes. The context is then
    /// of no more use.
    pub fn fail_later(&self, function: &str, nth: u64, code: u32) {
        self.script(function, nth, code, 2);
    }

    fn script(&self, function: &str, nth: u64, code: u32, how: u32) {
        let code = i32::try_from(code).unwrap_or(i32::MAX);
        // SAFETY: the name is a C string.
        unsafe { (self.functions.fail)(name(function).as_ptr(), nth, code, how) }
    }

    /// Forgets all scripted faults.
    pub fn clear_faults(&self) {
        // SAFETY: no preconditions.
        unsafe { (self.functions.clear_faults)() }
    }

    /// Faults that have not struck yet, those for all calls left out. A test whose fault never struck tested
    /// nothing.
    pub fn faults_left(&self) -> u64 {
        // SAFETY: no preconditions.
        unsafe { (self.functions.faults_left)() }
    }

    /// Calls of a function since the last reset. A name without `_v2` counts every version.
    pub fn calls(&self, function: &str) -> u64 {
        // SAFETY: the name is a C string.
        unsafe { (self.functions.calls)(name(function).as_ptr()) }
    }

    /// Waits for work in flight and puts settings, faults, counts and records back. Live objects stay.
    /// Whether everything came to rest.
    pub fn reset(&self) -> bool {
        // SAFETY: no preconditions.
        unsafe { (self.functions.reset)() == 0 }
    }

    /// Breaks every context of a device with a fatal error, as other work on it would; 0 mends them.
    pub fn poison(&self, device: u32, code: u32) {
        let number = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        // SAFETY: no preconditions.
        unsafe { (self.functions.poison)(number(device), number(code)) }
    }

    /// What lives.
    pub fn census(&self) -> Census {
        let mut n = [0u64; 11];
        // SAFETY: the function writes eleven numbers.
        unsafe { (self.functions.census)(n.as_mut_ptr()) };
        Census {
            allocations: n[0],
            bytes: n[1],
            pinned: n[2],
            registrations: n[3],
            events: n[4],
            streams: n[5],
            modules: n[6],
            graphs: n[7],
            graph_execs: n[8],
            contexts: n[9],
            lost: n[10],
        }
    }

    /// Copies, sets and kernels queued since the last reset, in order.
    pub fn records(&self) -> Vec<Record> {
        // SAFETY: with no room nothing is written.
        let mut count = unsafe { (self.functions.log)(std::ptr::null_mut(), 0) };
        let mut raw = vec![EMPTY; usize::try_from(count).unwrap_or(0)];
        // SAFETY: there is room for that many; fewer are written if there are fewer.
        count = count.min(unsafe { (self.functions.log)(raw.as_mut_ptr(), count) });
        raw.truncate(usize::try_from(count).unwrap_or(0));
        raw.iter().map(Record::from).collect()
    }

    /// Forgets the records.
    pub fn clear_records(&self) {
        // SAFETY: no preconditions.
        unsafe { (self.functions.clear_log)() }
    }

    pub(crate) fn hold_work(&self) {
        // SAFETY: no preconditions.
        unsafe { (self.functions.hold)() }
    }

    pub(crate) fn release_work(&self) {
        // SAFETY: no preconditions.
        unsafe { (self.functions.release)() }
    }

    /// Holds that lasted too long, because something waited for held work.
    pub fn holds_expired(&self) -> u64 {
        // SAFETY: no preconditions.
        unsafe { (self.functions.holds_expired)() }
    }

    /// Operations queued and not over.
    pub fn queued(&self) -> u64 {
        // SAFETY: no preconditions.
        unsafe { (self.functions.queued)() }
    }

    /// Operations that were run since the last reset.
    pub fn executed(&self) -> u64 {
        // SAFETY: no preconditions.
        unsafe { (self.functions.executed)() }
    }

    /// Memory as the device sees it at this moment, whatever is in flight; `None` if it is not the device's.
    pub fn peek(&self, address: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        // SAFETY: there is room for `len` bytes; the simulator checks the address.
        let failed = unsafe { (self.functions.peek)(address, bytes.as_mut_ptr(), len as u64) };
        (failed == 0).then_some(bytes)
    }

    /// Writes memory of the device at once, whatever is in flight. Whether it is the device's.
    pub fn poke(&self, address: u64, bytes: &[u8]) -> bool {
        // SAFETY: that many bytes can be read; the simulator checks the address.
        unsafe { (self.functions.poke)(address, bytes.as_ptr(), bytes.len() as u64) == 0 }
    }
}

/// Names with a zero inside are nobody's.
fn name(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

impl From<&RawRecord> for Record {
    fn from(raw: &RawRecord) -> Self {
        // SAFETY: the simulator leaves the last byte zero.
        let function = unsafe { CStr::from_ptr(raw.function.as_ptr()) };
        Record {
            function: function.to_string_lossy().into_owned(),
            kind: match raw.kind {
                0 => CopyKind::HostToDevice,
                1 => CopyKind::DeviceToHost,
                2 => CopyKind::DeviceToDevice,
                3 => CopyKind::HostToHost,
                4 => CopyKind::Kernel,
                _ => CopyKind::Set,
            },
            pageable_source: raw.pageable & 1 != 0,
            pageable_destination: raw.pageable & 2 != 0,
            bytes: raw.bytes,
            rows: raw.rows,
            source: raw.source,
            destination: raw.destination,
            stream: raw.stream,
        }
    }
}
