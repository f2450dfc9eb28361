// A CUDA driver without a GPU: what all of its parts share.
//
// Device memory is host memory that only the simulator can reach: a device address lies in a reserved range
// without access rights, so that a host that touches it crashes as it would beside a real device. Work runs on
// one thread per stream, in order, later than the call that queued it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using Result = int;
using Handle = void *;

#define SIM_API extern "C" __attribute__((visibility("default"))) Result
#define SIM_CONTROL extern "C" __attribute__((visibility("default")))

namespace sim {

enum : Result {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidImage = 200,
    kInvalidContext = 201,
    kNoBinaryForGpu = 209,
    kInvalidPtx = 218,
    kUnsupportedPtxVersion = 222,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kIllegalAddress = 700,
    kLaunchTimeout = 702,
    kPeerAccessAlreadyEnabled = 704,
    kContextIsDestroyed = 709,
    kHostMemoryAlreadyRegistered = 712,
    kHostMemoryNotRegistered = 713,
    kMisalignedAddress = 716,
    kLaunchFailed = 719,
    kNotPermitted = 800,
    kNotSupported = 801,
    kCaptureUnsupported = 900,
    kCaptureInvalidated = 901,
    kCaptureMerge = 902,
    kCaptureUnmatched = 903,
    kCaptureUnjoined = 904,
    kCaptureIsolation = 905,
    kCaptureImplicit = 906,
    kCapturedEvent = 907,
    kCaptureWrongThread = 908,
};

// What tests set, by name. The order is that of the table in control.cpp.
enum class Setting : std::size_t {
    Devices,
    CcMajor,
    CcMinor,
    DriverVersion,
    MemoryBytes,
    Shift,              // registered memory has another address on the device
    DelayUs,            // before each operation of a stream
    WordUs,             // after each word that a kernel tells
    RejectDiskFiles,    // registering a shared mapping of a file on a disk fails, as observed
    RegisterLimit,      // one registration of this many bytes or more fails
    PageableLazy,       // asynchronous copies touch pageable memory when they run, not during the call
    ReadOnlyRegister,   // the device can register read-only memory
    AcceptFatbin,       // fat binaries hold code for this device
    Descending,         // kernels run their threads in descending order
    HoldSeconds,        // a hold that lasts longer is released, and counted
    Uuid,               // what makes up the UUIDs of devices; 0: they have none
    Count
};
u64 setting(Setting which);

struct Context;
struct Stream;

// One operation's end.
struct Completion {
    bool done = false;  // under State::mutex
    double at = 0;      // milliseconds
};
using Done = std::shared_ptr<Completion>;

struct Op {
    std::function<Result()> run;
    std::vector<Done> after;
    Done done;
};

struct Node {
    std::function<Result()> run;
    std::vector<std::size_t> after;
};

struct Capture {
    u32 mode = 0;
    std::thread::id thread;
    bool active = true;
    bool invalid = false;
    u64 id = 0;
    std::shared_ptr<Stream> origin;
    std::vector<std::weak_ptr<Stream>> streams;
    std::vector<Node> nodes;
};

struct Stream {
    u64 handle = 0;  // 0 for a default stream
    std::shared_ptr<Context> context;
    u32 flags = 0;
    i32 priority = 0;
    std::deque<Op> queue;
    Done last;
    bool closed = false;
    bool started = false;
    std::shared_ptr<Capture> capture;
    std::vector<std::size_t> tail;  // nodes that the next one comes after

    bool non_blocking() const { return (flags & 1) != 0; }
};
using StreamPtr = std::shared_ptr<Stream>;

struct Event {
    std::shared_ptr<Context> context;
    u32 flags = 0;
    Done record;  // null until recorded
    std::shared_ptr<Capture> capture;
    std::vector<std::size_t> nodes;
};
using EventPtr = std::shared_ptr<Event>;

struct Context {
    u64 handle = 0;
    int device = 0;
    bool primary = false;
    bool active = false;
    u32 flags = 0;
    u64 references = 0;
    Result sticky = kSuccess;
    u64 bytes = 0;  // of device memory
    StreamPtr null_stream;
    std::set<StreamPtr> streams;  // all, the default one included
    std::set<int> peers;
};
using ContextPtr = std::shared_ptr<Context>;

enum class Kind { Device, HostAlloc, Registered };

struct Range {
    Kind kind = Kind::Device;
    u64 device = 0;   // address on the device
    u64 host = 0;     // address for the host, 0 if it has none
    u64 size = 0;
    u8 *bytes = nullptr;  // where the simulator reaches them
    ContextPtr context;
    u32 flags = 0;
    u64 id = 0;
    std::atomic<bool> alive{true};

    bool portable() const { return (flags & 1) != 0; }
    bool read_only() const { return kind == Kind::Registered && (flags & 8) != 0; }
};
using RangePtr = std::shared_ptr<Range>;

struct Module {
    ContextPtr context;
    std::set<std::string> entries;
};

struct Kernel;  // a host-compiled entry, see kernels.cpp
struct Func {
    std::shared_ptr<Module> module;
    const Kernel *kernel = nullptr;
    std::string name;
};

struct Graph {
    std::vector<Node> nodes;
};
struct GraphExec {
    std::vector<Node> nodes;
    ContextPtr context;
    Done last;
};

// What was asked of the device, for tests. Mirrored in src/control.rs.
struct Record {
    char function[40];
    u32 kind;  // 0 host to device, 1 device to host, 2 device to device, 3 host to host, 4 kernel, 5 set
    u32 pageable;  // 1: source, 2: destination
    u64 bytes;
    u64 rows;     // of a copy; thread blocks of a kernel
    u64 source;
    u64 destination;
    u64 stream;
};

template <class T>
struct Table {
    std::map<u64, std::shared_ptr<T>> live;

    std::shared_ptr<T> find(Handle handle) const {
        const auto at = live.find(reinterpret_cast<u64>(handle));
        return at == live.end() ? nullptr : at->second;
    }
    std::shared_ptr<T> take(Handle handle) {
        const auto at = live.find(reinterpret_cast<u64>(handle));
        if (at == live.end()) return nullptr;
        auto value = at->second;
        live.erase(at);
        return value;
    }
};

struct Fault {
    std::string function;
    u64 nth;  // calls left until it strikes
    Result code;
    bool all;   // and ever after
    bool later;  // the call succeeds, its work fails
};

// Lives for ever: threads of streams use it until the process ends.
struct State {
    std::mutex mutex;
    std::condition_variable changed;  // an operation ended, was queued, or a hold was released
    bool initialized = false;
    u64 next_handle = 0x5100000000000000;
    std::vector<ContextPtr> primaries;
    Table<Context> contexts;
    Table<Stream> streams;
    Table<Event> events;
    Table<Module> modules;
    Table<Func> functions;
    Table<Graph> graphs;
    Table<GraphExec> execs;
    std::vector<std::weak_ptr<Capture>> captures;
    std::vector<Fault> faults;
    std::map<std::string, u64> calls;
    std::vector<Record> log;
    u64 executed = 0;
    u64 queued = 0;
    u64 lost_with_context = 0;
    u32 holds = 0;
    double hold_deadline = 0;
    u64 holds_expired = 0;

    std::shared_mutex ranges_mutex;
    std::map<u64, RangePtr> by_device;  // by first address
    std::map<u64, RangePtr> by_host;

    u64 handle() { return next_handle += 64; }
};
State &state();
double now_ms();

using Lock = std::unique_lock<std::mutex>;

// What a driver function needs before it does anything.
enum : u32 {
    kNothing = 0,
    kInit = 1,       // cuInit was called
    kCurrent = 2,    // a live current context without a pending error
    kUnsafe = 4,     // not while something is captured, unless relaxed
};
// Counts the call, plays scripted faults, checks.
Result enter(const char *function, u32 needs);
#define SIM_ENTER(needs)                                                       \
    do {                                                                       \
        if (const Result code_ = sim::enter(__func__, (needs))) return code_;  \
    } while (0)

// The work of the call that is being made is to fail with this code when it runs.
Result take_later_fault();

ContextPtr current();
// Destroys everything that lives in a context. Under the lock, work is over.
void tear_down(Context &context);

// Streams.
StreamPtr new_stream(const ContextPtr &context, u32 flags, i32 priority);
// The stream of a handle; default streams belong to the current context. Null if there is none.
StreamPtr find_stream(Handle handle);
// Queues, or records while the stream is captured.
Result enqueue(Lock &lock, const StreamPtr &stream, std::function<Result()> run, std::vector<Done> after = {},
               Done *done = nullptr);
// For calls that queue on a stream of the current context.
Result stream_for_work(Lock &lock, Handle handle, StreamPtr &stream);
void wait(Lock &lock, const Done &done);
void wait(Lock &lock, Context &context);
bool wait_all(Lock &lock);
void invalidate(Capture &capture);
bool capturing(const Stream &stream);

// Memory.
enum class Place { Pageable, Host, Device };
struct Span {
    Place place = Place::Pageable;
    RangePtr range;  // null for pageable memory
    u64 address = 0;
    u8 *bytes = nullptr;
};
// Where `size` bytes at an address are. kInvalidValue if they begin in memory of the driver and leave it.
Result locate(u64 address, u64 size, Span &span);
RangePtr range_at(u64 device_address);
RangePtr host_range_at(u64 host_address);
void release_range(const RangePtr &range);
// Copies although either side may not be there any more.
bool copy_bytes(u8 *to, const u8 *from, std::size_t bytes);

// Kernels.
struct LaunchShape {
    u32 blocks[3];
    u32 threads[3];
};
std::vector<std::string> kernel_names();
const Kernel *find_kernel(const std::string &name);
std::size_t kernel_parameters(const Kernel &kernel);
// Copies the parameters and returns what runs the kernel in the context.
std::function<Result()> bind_kernel(const Kernel &kernel, const ContextPtr &context, LaunchShape shape,
                                    void **parameters);

void log(Record record, const char *function);

}  // namespace sim
