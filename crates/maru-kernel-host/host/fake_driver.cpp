// A stand-in for libcuda.so with one device, for tests of the code around the kernel: what is allocated,
// queued, ordered, captured, refused, leaked. The paged-copy kernel is the real source, run on the host.
//
// Work is queued and runs as late as it may: when something waits for it, and one operation at a time when
// something asks whether it is done. Pinned memory has two addresses, one for the host and one for the device,
// and a kernel that touches anything but device memory and device addresses of pinned memory loses the context,
// as does a misaligned access. Any function can be told to fail.
#define MARU_CHECK_ACCESS
#include "shim.h"

#include "paged_copy.cu"

#include <cerrno>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

thread_local HostIndex gridDim, blockDim, blockIdx, threadIdx;
thread_local unsigned long long host_misaligned, host_accesses;

namespace {

enum Result {
    kOk = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidContext = 201,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kIllegalAddress = 700,
    kAlreadyRegistered = 712,
    kMisaligned = 716,
    kStreamCapture = 900,
};

using Operation = std::function<void()>;

struct Stream {
    std::deque<Operation> queue;
    unsigned long long queued = 0, done = 0;
    std::vector<Operation> *capture = nullptr;
    bool global_capture = false;
};
using StreamRef = std::shared_ptr<Stream>;

struct Event {
    StreamRef stream;
    unsigned long long at = 0;
};

struct Pinned {
    void *host;
    void *device;
    size_t size;
};

struct Fault {
    std::string name;
    long calls;  // until it fails
    int code;
};

struct Driver {
    std::recursive_mutex lock;
    int devices = 1, capability = 90, lost = 0;
    long contexts = 0, modules = 0, waits = 0, global_captures = 0;
    std::vector<Fault> faults;
    std::map<uintptr_t, size_t> addressable;  // what a kernel may touch
    std::map<void *, Pinned> pinned;          // by host address
    std::map<Stream *, StreamRef> streams;
    std::set<Event *> events;
    std::set<std::vector<Operation> *> graphs;
    StreamRef legacy = std::make_shared<Stream>();
};

Driver &driver() {
    static Driver *driver = new Driver;
    return *driver;
}

thread_local std::vector<void *> current;
thread_local int capture_mode = 0;  // global, thread-local, relaxed

// Calls that break a capture of another thread, unless a thread says that it knows.
bool unsafe_while_capturing(const char *name) {
    for (const char *other : {"cuEventQuery", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostAlloc", "cuStreamQuery"}) {
        if (!std::strcmp(name, other)) return true;
    }
    return false;
}

// Every function begins with one: takes the lock, and says if the call is to fail.
struct Call {
    std::unique_lock<std::recursive_mutex> guard{driver().lock};
    int error = kOk;
    explicit Call(const char *name, bool needs_context = true) {
        Driver &d = driver();
        for (auto fault = d.faults.begin(); fault != d.faults.end(); ++fault) {
            if (fault->name == name && --fault->calls == 0) {
                error = fault->code;
                d.faults.erase(fault);
                if (error >= kIllegalAddress && error < 720) d.lost = error;
                return;
            }
        }
        if (needs_context && (current.empty() || current.back() == nullptr)) error = kInvalidContext;
        if (needs_context && d.lost) error = d.lost;
        if (d.global_captures > 0 && capture_mode == 0 && unsafe_while_capturing(name)) error = kStreamCapture;
    }
};

#define ENTER(name)  \
    Call call(name); \
    if (call.error) return call.error
#define ENTER_WITHOUT_CONTEXT(name) \
    Call call(name, false);         \
    if (call.error) return call.error

StreamRef stream_of(void *handle) {
    if (!handle) return driver().legacy;
    auto found = driver().streams.find(static_cast<Stream *>(handle));
    return found == driver().streams.end() ? nullptr : found->second;
}

void step(Stream &stream) {
    Operation operation = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (!driver().lost) operation();
    stream.done += 1;
}

void run_until(Stream &stream, unsigned long long at) {
    while (stream.done < at && !stream.queue.empty()) step(stream);
}

void drain_all() {
    for (auto &entry : driver().streams) run_until(*entry.second, entry.second->queued);
    run_until(*driver().legacy, driver().legacy->queued);
}

int enqueue(void *handle, Operation operation) {
    StreamRef stream = stream_of(handle);
    if (!stream) return kInvalidHandle;
    if (stream->capture) {
        stream->capture->push_back(std::move(operation));
        return kOk;
    }
    stream->queue.push_back(std::move(operation));
    stream->queued += 1;
    return kOk;
}

}  // namespace

bool host_may_access(const void *at, size_t size) {
    auto start = reinterpret_cast<uintptr_t>(at);
    auto next = driver().addressable.upper_bound(start);
    if (next != driver().addressable.begin()) {
        --next;
        if (start + size <= next->first + next->second) return true;
    }
    driver().lost = kIllegalAddress;
    return false;
}

namespace {

struct Entry {
    const char *name;
    size_t size;
    void (*run)(const void *);
};

#define DEVICE(name) \
    Entry{#name, sizeof(PagedCopyArgs), [](const void *a) { name(*static_cast<const PagedCopyArgs *>(a)); }}
#define INLINE(name)                            \
    Entry{#name, sizeof(PagedCopyInlineArgs), \
          [](const void *a) { name(*static_cast<const PagedCopyInlineArgs *>(a)); }}
#define BATCH(name) \
    Entry{#name, sizeof(PagedCopyBatchArgs), [](const void *a) { name(*static_cast<const PagedCopyBatchArgs *>(a)); }}
#define WIDTH(direction, bytes) DEVICE(maru_##direction##_##bytes##_device), INLINE(maru_##direction##_##bytes##_inline)
#define WIDTHS(direction) \
    WIDTH(direction, 1), WIDTH(direction, 2), WIDTH(direction, 4), WIDTH(direction, 8), WIDTH(direction, 16)

const Entry kEntries[] = {WIDTHS(gather), WIDTHS(scatter), BATCH(maru_gather_16_batch),
                          BATCH(maru_scatter_16_batch), {"maru_test_stall", 0, nullptr}};

struct StallArgs {
    unsigned long long to, from;
    unsigned int words;
};

void run_kernel(const Entry &entry, unsigned blocks, unsigned threads, const std::vector<char> &args) {
    host_misaligned = 0;
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (unsigned b = 0; b < blocks; ++b) {
        for (unsigned t = 0; t < threads; ++t) {
            blockIdx = {b, 0, 0};
            threadIdx = {t, 0, 0};
            entry.run(args.data());
        }
    }
    if (host_misaligned) driver().lost = kMisaligned;
}

void *map_anonymous(size_t size) {
    void *at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int

// ---- For the tests --------------------------------------------------------------------------------------

// The n-th call from now of `name` fails with `code`.
API maru_fake_fault(const char *name, long n, int code) {
    Call call("", false);
    driver().faults.push_back({name, n, code});
    return kOk;
}

// Faults that have not struck yet; forgets them, and heals a lost context.
API maru_fake_heal() {
    Call call("", false);
    int left = static_cast<int>(driver().faults.size());
    driver().faults.clear();
    driver().lost = 0;
    return left;
}

API maru_fake_device(int devices, int capability) {
    Call call("", false);
    driver().devices = devices;
    driver().capability = capability;
    return kOk;
}

// Everything that has been made and not given back: memory, streams, events, graphs, modules.
API maru_fake_live() {
    Call call("", false);
    Driver &d = driver();
    return static_cast<int>(d.addressable.size() + d.streams.size() + d.events.size() + d.graphs.size()) +
           static_cast<int>(d.modules);
}

// Calls so far in which the host waited for the device.
API maru_fake_waits() {
    Call call("", false);
    return static_cast<int>(driver().waits);
}

// ---- Devices and contexts -------------------------------------------------------------------------------

API cuInit(unsigned) {
    ENTER_WITHOUT_CONTEXT("cuInit");
    return driver().devices > 0 ? kOk : kNoDevice;
}
API cuDriverGetVersion(int *version) {
    *version = 12000;
    return kOk;
}
API cuDeviceGetCount(int *count) {
    ENTER_WITHOUT_CONTEXT("cuDeviceGetCount");
    *count = driver().devices;
    return kOk;
}
API cuDeviceGet(int *device, int ordinal) {
    ENTER_WITHOUT_CONTEXT("cuDeviceGet");
    *device = ordinal;
    return ordinal < driver().devices ? kOk : kInvalidDevice;
}
API cuDeviceGetName(char *name, int length, int) {
    std::strncpy(name, "stand-in", static_cast<size_t>(length));
    return kOk;
}
API cuDeviceGetAttribute(int *value, int attribute, int) {
    ENTER_WITHOUT_CONTEXT("cuDeviceGetAttribute");
    *value = attribute == 75 ? driver().capability / 10 : attribute == 76 ? driver().capability % 10 : 1;
    return kOk;
}
API cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER_WITHOUT_CONTEXT("cuDevicePrimaryCtxRetain");
    *context = reinterpret_cast<void *>(0x1000L * (device + 1));
    driver().contexts += 1;
    return kOk;
}
API cuDevicePrimaryCtxRelease_v2(int) {
    driver().contexts -= 1;
    return kOk;
}
API cuCtxCreate_v2(void **context, unsigned, int) {
    *context = reinterpret_cast<void *>(0x9000L);
    current.push_back(*context);
    return kOk;
}
API cuCtxDestroy_v2(void *context) {
    for (auto &entry : current) {
        if (entry == context) entry = nullptr;
    }
    return kOk;
}
API cuCtxGetCurrent(void **context) {
    ENTER_WITHOUT_CONTEXT("cuCtxGetCurrent");
    *context = current.empty() ? nullptr : current.back();
    return kOk;
}
API cuCtxSetCurrent(void *context) {
    ENTER_WITHOUT_CONTEXT("cuCtxSetCurrent");
    if (current.empty()) current.push_back(nullptr);
    current.back() = context;
    return kOk;
}
API cuCtxPushCurrent_v2(void *context) {
    ENTER_WITHOUT_CONTEXT("cuCtxPushCurrent_v2");
    current.push_back(context);
    return kOk;
}
API cuCtxPopCurrent_v2(void **context) {
    if (current.empty()) return kInvalidContext;
    *context = current.back();
    current.pop_back();
    return kOk;
}
API cuCtxSynchronize() {
    ENTER("cuCtxSynchronize");
    driver().waits += 1;
    drain_all();
    return driver().lost;
}
API cuGetErrorName(int code, const char **name) {
    switch (code) {
        case kOutOfMemory: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return kOk;
        case kNoDevice: *name = "CUDA_ERROR_NO_DEVICE"; return kOk;
        case kIllegalAddress: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return kOk;
        default: *name = "CUDA_ERROR_OTHER"; return kOk;
    }
}
API cuGetErrorString(int code, const char **text) { return cuGetErrorName(code, text); }

// ---- Modules --------------------------------------------------------------------------------------------

API cuModuleLoadData(void **module, const void *) {
    ENTER("cuModuleLoadData");
    driver().modules += 1;
    *module = reinterpret_cast<void *>(0x77L);
    return kOk;
}
API cuModuleUnload(void *) {
    ENTER("cuModuleUnload");
    drain_all();
    driver().modules -= 1;
    return kOk;
}
API cuModuleGetFunction(void **function, void *, const char *name) {
    ENTER("cuModuleGetFunction");
    for (const Entry &entry : kEntries) {
        if (!std::strcmp(entry.name, name)) {
            *function = const_cast<Entry *>(&entry);
            return kOk;
        }
    }
    return kNotFound;
}
API cuFuncGetAttribute(int *value, int, void *) {
    *value = 0;
    return kOk;
}
API cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                   unsigned, void *stream, void **params, void **) {
    ENTER("cuLaunchKernel");
    if (x == 0 || y != 1 || z != 1 || threads == 0 || threads > 1024) return kInvalidValue;
    const Entry &entry = *static_cast<const Entry *>(function);
    if (!entry.run) {
        StallArgs args;
        std::memcpy(&args.to, params[0], 8);
        std::memcpy(&args.from, params[1], 8);
        std::memcpy(&args.words, params[2], 4);
        return enqueue(stream, [args] {
            std::memmove(reinterpret_cast<void *>(args.to), reinterpret_cast<void *>(args.from), 8UL * args.words);
        });
    }
    const char *bytes = static_cast<const char *>(params[0]);
    std::vector<char> args(bytes, bytes + entry.size);
    return enqueue(stream, [&entry, x, threads, args] { run_kernel(entry, x, threads, args); });
}

// ---- Memory ---------------------------------------------------------------------------------------------

API cuMemAlloc_v2(uintptr_t *addr, size_t size) {
    ENTER("cuMemAlloc_v2");
    void *at = map_anonymous(size);
    if (!at) return kOutOfMemory;
    driver().addressable[reinterpret_cast<uintptr_t>(at)] = size;
    *addr = reinterpret_cast<uintptr_t>(at);
    return kOk;
}
API cuMemFree_v2(uintptr_t addr) {
    ENTER("cuMemFree_v2");
    auto found = driver().addressable.find(addr);
    if (found == driver().addressable.end()) return kInvalidValue;
    drain_all();
    munmap(reinterpret_cast<void *>(addr), found->second);
    driver().addressable.erase(found);
    return kOk;
}
API cuMemHostAlloc(void **host, size_t size, unsigned) {
    ENTER("cuMemHostAlloc");
    int file = memfd_create("pinned", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return kOutOfMemory;
    void *one = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    void *two = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (one == MAP_FAILED || two == MAP_FAILED) return kOutOfMemory;
    driver().pinned[one] = {one, two, size};
    driver().addressable[reinterpret_cast<uintptr_t>(two)] = size;
    *host = one;
    return kOk;
}
API cuMemFreeHost(void *host) {
    ENTER("cuMemFreeHost");
    auto found = driver().pinned.find(host);
    if (found == driver().pinned.end()) return kInvalidValue;
    drain_all();
    driver().addressable.erase(reinterpret_cast<uintptr_t>(found->second.device));
    munmap(found->second.host, found->second.size);
    munmap(found->second.device, found->second.size);
    driver().pinned.erase(found);
    return kOk;
}
API cuMemHostRegister_v2(void *host, size_t size, unsigned) {
    ENTER("cuMemHostRegister_v2");
    if (!driver().pinned.insert({host, {host, host, size}}).second) return kAlreadyRegistered;
    driver().addressable[reinterpret_cast<uintptr_t>(host)] = size;
    return kOk;
}
API cuMemHostUnregister(void *host) {
    ENTER("cuMemHostUnregister");
    driver().addressable.erase(reinterpret_cast<uintptr_t>(host));
    return driver().pinned.erase(host) ? kOk : kInvalidValue;
}
API cuMemHostGetDevicePointer_v2(uintptr_t *addr, void *host, unsigned) {
    ENTER("cuMemHostGetDevicePointer_v2");
    auto found = driver().pinned.find(host);
    if (found == driver().pinned.end()) return kInvalidValue;
    *addr = reinterpret_cast<uintptr_t>(found->second.device);
    return kOk;
}
API cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t size) {
    ENTER("cuMemcpyHtoD_v2");
    std::memcpy(reinterpret_cast<void *>(to), from, size);
    return kOk;
}
API cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t size) {
    ENTER("cuMemcpyDtoH_v2");
    std::memcpy(to, reinterpret_cast<const void *>(from), size);
    return kOk;
}
API cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, void *stream) {
    ENTER("cuMemcpyHtoDAsync_v2");
    return enqueue(stream, [=] { std::memcpy(reinterpret_cast<void *>(to), from, size); });
}
API cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, void *stream) {
    ENTER("cuMemcpyDtoHAsync_v2");
    return enqueue(stream, [=] { std::memcpy(to, reinterpret_cast<const void *>(from), size); });
}

// CUDA_MEMCPY2D.
struct Copy2D {
    size_t from_x, from_y;
    unsigned from_type;
    const char *from_host;
    uintptr_t from_device;
    void *from_array;
    size_t from_pitch;
    size_t to_x, to_y;
    unsigned to_type;
    char *to_host;
    uintptr_t to_device;
    void *to_array;
    size_t to_pitch;
    size_t width, height;
};
API cuMemcpy2DAsync_v2(const Copy2D *copy, void *stream) {
    ENTER("cuMemcpy2DAsync_v2");
    const unsigned host = 1, array = 3;
    if (copy->from_type == array || copy->to_type == array) return kInvalidValue;
    const char *from = copy->from_type == host ? copy->from_host : reinterpret_cast<const char *>(copy->from_device);
    char *to = copy->to_type == host ? copy->to_host : reinterpret_cast<char *>(copy->to_device);
    from += copy->from_y * copy->from_pitch + copy->from_x;
    to += copy->to_y * copy->to_pitch + copy->to_x;
    Copy2D c = *copy;
    return enqueue(stream, [=] {
        for (size_t row = 0; row < c.height; ++row) {
            std::memcpy(to + row * c.to_pitch, from + row * c.from_pitch, c.width);
        }
    });
}
API cuMemsetD8_v2(uintptr_t to, unsigned char byte, size_t size) {
    ENTER("cuMemsetD8_v2");
    std::memset(reinterpret_cast<void *>(to), byte, size);
    return kOk;
}

// ---- Streams, events, graphs ----------------------------------------------------------------------------

API cuStreamCreate(void **handle, unsigned) {
    ENTER("cuStreamCreate");
    StreamRef stream = std::make_shared<Stream>();
    driver().streams[stream.get()] = stream;
    *handle = stream.get();
    return kOk;
}
API cuStreamCreateWithPriority(void **handle, unsigned flags, int) { return cuStreamCreate(handle, flags); }
API cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER("cuCtxGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return kOk;
}
API cuStreamDestroy_v2(void *handle) {
    ENTER("cuStreamDestroy_v2");
    StreamRef stream = stream_of(handle);
    if (!stream || !handle) return kInvalidHandle;
    run_until(*stream, stream->queued);
    driver().streams.erase(stream.get());
    return kOk;
}
API cuStreamSynchronize(void *handle) {
    ENTER("cuStreamSynchronize");
    StreamRef stream = stream_of(handle);
    if (!stream) return kInvalidHandle;
    if (stream->capture) return kStreamCapture;
    driver().waits += 1;
    run_until(*stream, stream->queued);
    return driver().lost;
}
API cuStreamQuery(void *handle) {
    ENTER("cuStreamQuery");
    StreamRef stream = stream_of(handle);
    if (!stream) return kInvalidHandle;
    if (!stream->queue.empty()) step(*stream);
    return driver().lost ? driver().lost : stream->queue.empty() ? kOk : kNotReady;
}
API cuStreamWaitEvent(void *handle, void *event, unsigned) {
    ENTER("cuStreamWaitEvent");
    Event awaited = *static_cast<Event *>(event);
    return enqueue(handle, [awaited] {
        if (awaited.stream) run_until(*awaited.stream, awaited.at);
    });
}
API cuStreamIsCapturing(void *handle, int *status) {
    ENTER("cuStreamIsCapturing");
    StreamRef stream = stream_of(handle);
    if (!stream) return kInvalidHandle;
    *status = stream->capture ? 1 : 0;
    return kOk;
}
API cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER_WITHOUT_CONTEXT("cuThreadExchangeStreamCaptureMode");
    std::swap(*mode, capture_mode);
    return kOk;
}
API cuStreamBeginCapture_v2(void *handle, int mode) {
    ENTER("cuStreamBeginCapture_v2");
    StreamRef stream = stream_of(handle);
    if (!stream || stream->capture) return kInvalidHandle;
    stream->capture = new std::vector<Operation>;
    stream->global_capture = mode == 0;
    driver().global_captures += mode == 0;
    driver().graphs.insert(stream->capture);
    return kOk;
}
API cuStreamEndCapture(void *handle, void **graph) {
    ENTER("cuStreamEndCapture");
    StreamRef stream = stream_of(handle);
    if (!stream || !stream->capture) return kInvalidHandle;
    *graph = stream->capture;
    stream->capture = nullptr;
    driver().global_captures -= stream->global_capture;
    return kOk;
}
API cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long) {
    ENTER("cuGraphInstantiateWithFlags");
    auto *copy = new std::vector<Operation>(*static_cast<std::vector<Operation> *>(graph));
    driver().graphs.insert(copy);
    *exec = copy;
    return kOk;
}
API cuGraphLaunch(void *exec, void *stream) {
    ENTER("cuGraphLaunch");
    for (const Operation &operation : *static_cast<std::vector<Operation> *>(exec)) {
        if (int error = enqueue(stream, operation)) return error;
    }
    return kOk;
}
API cuGraphDestroy(void *graph) {
    ENTER("cuGraphDestroy");
    auto *operations = static_cast<std::vector<Operation> *>(graph);
    driver().graphs.erase(operations);
    delete operations;
    return kOk;
}
API cuGraphExecDestroy(void *exec) { return cuGraphDestroy(exec); }
API cuEventCreate(void **event, unsigned) {
    ENTER("cuEventCreate");
    Event *made = new Event;
    driver().events.insert(made);
    *event = made;
    return kOk;
}
API cuEventDestroy_v2(void *event) {
    ENTER("cuEventDestroy_v2");
    if (!driver().events.erase(static_cast<Event *>(event))) return kInvalidHandle;
    delete static_cast<Event *>(event);
    return kOk;
}
API cuEventRecord(void *event, void *handle) {
    ENTER("cuEventRecord");
    StreamRef stream = stream_of(handle);
    if (!stream) return kInvalidHandle;
    // As a node of a graph it can be neither queried nor waited for; here it is simply refused.
    if (stream->capture) return kStreamCapture;
    enqueue(handle, [] {});
    *static_cast<Event *>(event) = {stream, stream->queued};
    return kOk;
}
API cuEventQuery(void *event) {
    ENTER("cuEventQuery");
    Event &asked = *static_cast<Event *>(event);
    if (!asked.stream || asked.stream->done >= asked.at) return kOk;
    step(*asked.stream);
    return driver().lost ? driver().lost : kNotReady;
}
API cuEventSynchronize(void *event) {
    ENTER("cuEventSynchronize");
    Event &asked = *static_cast<Event *>(event);
    driver().waits += 1;
    if (asked.stream) run_until(*asked.stream, asked.at);
    return driver().lost;
}
// Time means nothing here.
API cuEventElapsedTime_v2(float *milliseconds, void *, void *) {
    *milliseconds = 1;
    return kOk;
}
