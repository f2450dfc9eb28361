// Devices and contexts.
#include "sim.h"

#include <cstdio>

namespace sim {

namespace {

// A thread's contexts, the current one last; null entries are "none".
thread_local std::vector<ContextPtr> stack;

bool exists(int device) { return device >= 0 && static_cast<u64>(device) < setting(Setting::Devices); }

ContextPtr primary(State &s, int device) {
    while (s.primaries.size() <= static_cast<std::size_t>(device)) {
        auto context = std::make_shared<Context>();
        context->device = static_cast<int>(s.primaries.size());
        context->primary = true;
        context->handle = s.handle();
        s.contexts.live[context->handle] = context;
        s.primaries.push_back(context);
    }
    return s.primaries[static_cast<std::size_t>(device)];
}

void activate(const ContextPtr &context) {
    context->active = true;
    context->sticky = kSuccess;
    context->null_stream = new_stream(context, 0, 0);
}

}  // namespace

ContextPtr current() { return stack.empty() ? nullptr : stack.back(); }

void tear_down(Context &context) {
    State &s = state();
    const auto mine = [&](const ContextPtr &other) { return other.get() == &context; };
    const auto drop = [&](auto &table, auto owner) {
        for (auto at = table.live.begin(); at != table.live.end();) {
            if (owner(*at->second)) {
                at = table.live.erase(at);
                s.lost_with_context += 1;
            } else {
                ++at;
            }
        }
    };
    for (const StreamPtr &stream : context.streams) {
        stream->closed = true;
        s.lost_with_context += stream->handle != 0;
        s.streams.live.erase(stream->handle);
    }
    s.changed.notify_all();
    drop(s.events, [&](const Event &event) { return mine(event.context); });
    drop(s.modules, [&](const Module &module) { return mine(module.context); });
    drop(s.execs, [&](const GraphExec &exec) { return mine(exec.context); });
    for (auto at = s.functions.live.begin(); at != s.functions.live.end();) {
        at = mine(at->second->module->context) ? s.functions.live.erase(at) : std::next(at);
    }
    std::vector<RangePtr> ranges;
    for (const auto &[address, range] : s.by_device) {
        if (mine(range->context)) ranges.push_back(range);
    }
    for (const RangePtr &range : ranges) {
        release_range(range);
        s.lost_with_context += 1;
    }
    context.streams.clear();
    context.null_stream = nullptr;
    context.peers.clear();
    context.active = false;
}

}  // namespace sim

using namespace sim;

SIM_API cuInit(u32 flags) {
    SIM_ENTER(kNothing);
    if (flags != 0) return kInvalidValue;
    if (setting(Setting::Devices) == 0) return kNoDevice;
    const Lock lock(state().mutex);
    state().initialized = true;
    return kSuccess;
}

SIM_API cuDriverGetVersion(int *version) {
    SIM_ENTER(kNothing);
    if (!version) return kInvalidValue;
    *version = static_cast<int>(setting(Setting::DriverVersion));
    return kSuccess;
}

SIM_API cuDeviceGet(int *device, int ordinal) {
    SIM_ENTER(kInit);
    if (!device) return kInvalidValue;
    if (!exists(ordinal)) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
}

SIM_API cuDeviceGetCount(int *count) {
    SIM_ENTER(kInit);
    if (!count) return kInvalidValue;
    *count = static_cast<int>(setting(Setting::Devices));
    return kSuccess;
}

SIM_API cuDeviceGetName(char *name, int length, int device) {
    SIM_ENTER(kInit);
    if (!name || length <= 0) return kInvalidValue;
    if (!exists(device)) return kInvalidDevice;
    std::snprintf(name, static_cast<std::size_t>(length), "Simulated GPU %d", device);
    return kSuccess;
}

static Result uuid(u8 *bytes, int device) {
    if (!bytes) return kInvalidValue;
    if (!exists(device)) return kInvalidDevice;
    if (setting(Setting::Uuid) == 0) return kNotSupported;
    std::memset(bytes, static_cast<int>(setting(Setting::Uuid) & 0xff), 16);
    bytes[15] = static_cast<u8>(device);
    return kSuccess;
}
SIM_API cuDeviceGetUuid(u8 *bytes, int device) {
    SIM_ENTER(kInit);
    return uuid(bytes, device);
}
SIM_API cuDeviceGetUuid_v2(u8 *bytes, int device) {
    SIM_ENTER(kInit);
    return uuid(bytes, device);
}

SIM_API cuDeviceGetPCIBusId(char *id, int length, int device) {
    SIM_ENTER(kInit);
    if (!id || length <= 0) return kInvalidValue;
    if (!exists(device)) return kInvalidDevice;
    std::snprintf(id, static_cast<std::size_t>(length), "0000:%02X:00.0", 0x51 + device);
    return kSuccess;
}

SIM_API cuDeviceTotalMem_v2(std::size_t *bytes, int device) {
    SIM_ENTER(kInit);
    if (!bytes) return kInvalidValue;
    if (!exists(device)) return kInvalidDevice;
    *bytes = setting(Setting::MemoryBytes);
    return kSuccess;
}

SIM_API cuDeviceGetAttribute(int *value, int attribute, int device) {
    SIM_ENTER(kInit);
    if (!value || attribute < 1) return kInvalidValue;
    if (!exists(device)) return kInvalidDevice;
    switch (attribute) {
        case 1: *value = 1024; break;     // threads of a block
        case 2: case 3: *value = 1024; break;
        case 4: *value = 64; break;
        case 5: *value = 0x7fffffff; break;  // grid x
        case 6: case 7: *value = 65535; break;
        case 8: *value = 48 << 10; break;    // shared memory of a block
        case 10: *value = 32; break;         // warp
        case 11: *value = 0x7fffffff; break; // pitch of a copy
        case 15: *value = 1; break;          // copies beside kernels
        case 16: *value = 132; break;        // multiprocessors
        case 19: *value = 1; break;          // can map host memory
        case 31: *value = 1; break;          // concurrent kernels
        case 33: *value = 0x51 + device; break;  // PCI bus
        case 34: case 50: *value = 0; break;     // PCI device, domain
        case 39: *value = 2048; break;       // threads of a multiprocessor
        case 40: *value = 3; break;          // copy engines
        case 41: *value = 1; break;          // unified addressing
        case 75: *value = static_cast<int>(setting(Setting::CcMajor)); break;
        case 76: *value = static_cast<int>(setting(Setting::CcMinor)); break;
        case 78: *value = 1; break;          // stream priorities
        case 81: *value = 228 << 10; break;
        case 82: *value = 65536; break;
        case 91: *value = setting(Setting::Shift) == 0; break;  // host pointer of registered memory
        case 92: case 93: case 122: *value = 1; break;  // stream memory operations, 64 bits
        case 97: *value = 227 << 10; break;
        case 99: *value = 1; break;          // host memory can be registered
        case 113: *value = setting(Setting::ReadOnlyRegister) != 0; break;
        default: *value = 0; break;          // memory pools, managed memory and so on: not here
    }
    return kSuccess;
}

SIM_API cuDeviceCanAccessPeer(int *can, int device, int peer) {
    SIM_ENTER(kInit);
    if (!can) return kInvalidValue;
    if (!exists(device) || !exists(peer)) return kInvalidDevice;
    *can = device != peer;
    return kSuccess;
}

SIM_API cuDevicePrimaryCtxRetain(Handle *context, int device) {
    SIM_ENTER(kInit);
    if (!context) return kInvalidValue;
    if (!exists(device)) return kInvalidDevice;
    State &s = state();
    const Lock lock(s.mutex);
    const ContextPtr found = primary(s, device);
    if (found->references++ == 0) activate(found);
    *context = reinterpret_cast<Handle>(found->handle);
    return kSuccess;
}

SIM_API cuDevicePrimaryCtxRelease_v2(int device) {
    SIM_ENTER(kInit);
    if (!exists(device)) return kInvalidDevice;
    State &s = state();
    Lock lock(s.mutex);
    const ContextPtr found = primary(s, device);
    if (found->references == 0) return kInvalidContext;
    if (--found->references == 0) {
        wait(lock, *found);
        if (found->references == 0) tear_down(*found);
    }
    return kSuccess;
}

SIM_API cuDevicePrimaryCtxGetState(int device, u32 *flags, int *active) {
    SIM_ENTER(kInit);
    if (!flags || !active) return kInvalidValue;
    if (!exists(device)) return kInvalidDevice;
    State &s = state();
    const Lock lock(s.mutex);
    const ContextPtr found = primary(s, device);
    *flags = found->flags;
    *active = found->active;
    return kSuccess;
}

SIM_API cuDevicePrimaryCtxSetFlags_v2(int device, u32 flags) {
    SIM_ENTER(kInit);
    if (!exists(device)) return kInvalidDevice;
    State &s = state();
    const Lock lock(s.mutex);
    primary(s, device)->flags = flags;
    return kSuccess;
}

static Result create(Handle *context, u32 flags, int device) {
    if (!context) return kInvalidValue;
    if (!exists(device)) return kInvalidDevice;
    State &s = state();
    const Lock lock(s.mutex);
    auto made = std::make_shared<Context>();
    made->device = device;
    made->flags = flags;
    made->handle = s.handle();
    s.contexts.live[made->handle] = made;
    activate(made);
    stack.push_back(made);
    *context = reinterpret_cast<Handle>(made->handle);
    return kSuccess;
}
SIM_API cuCtxCreate_v2(Handle *context, u32 flags, int device) {
    SIM_ENTER(kInit);
    return create(context, flags, device);
}
SIM_API cuCtxCreate_v3(Handle *context, void *, int, u32 flags, int device) {
    SIM_ENTER(kInit);
    return create(context, flags, device);
}
SIM_API cuCtxCreate_v4(Handle *context, void *, u32 flags, int device) {
    SIM_ENTER(kInit);
    return create(context, flags, device);
}

SIM_API cuCtxDestroy_v2(Handle context) {
    SIM_ENTER(kInit);
    State &s = state();
    Lock lock(s.mutex);
    const ContextPtr found = s.contexts.find(context);
    if (!found || found->primary) return kInvalidContext;
    wait(lock, *found);
    tear_down(*found);
    s.contexts.live.erase(found->handle);
    if (current() == found) stack.pop_back();
    return kSuccess;
}

// A destroyed primary context can be made current; using it is what fails.
static Result settable(Handle context, ContextPtr &found) {
    const Lock lock(state().mutex);
    found = state().contexts.find(context);
    return found ? kSuccess : kInvalidContext;
}

SIM_API cuCtxSetCurrent(Handle context) {
    SIM_ENTER(kInit);
    ContextPtr found;
    if (context) {
        if (const Result code = settable(context, found)) return code;
    }
    if (!stack.empty()) stack.pop_back();
    if (found) stack.push_back(found);
    return kSuccess;
}

SIM_API cuCtxGetCurrent(Handle *context) {
    SIM_ENTER(kInit);
    if (!context) return kInvalidValue;
    const ContextPtr found = current();
    *context = found ? reinterpret_cast<Handle>(found->handle) : nullptr;
    return kSuccess;
}

SIM_API cuCtxPushCurrent_v2(Handle context) {
    SIM_ENTER(kInit);
    ContextPtr found;
    if (const Result code = settable(context, found)) return code;
    stack.push_back(found);
    return kSuccess;
}

SIM_API cuCtxPopCurrent_v2(Handle *context) {
    SIM_ENTER(kInit);
    if (stack.empty()) return kInvalidContext;
    if (context) *context = reinterpret_cast<Handle>(stack.back()->handle);
    stack.pop_back();
    return kSuccess;
}

SIM_API cuCtxGetDevice(int *device) {
    SIM_ENTER(kInit);
    if (!device) return kInvalidValue;
    const ContextPtr found = current();
    if (!found) return kInvalidContext;
    *device = found->device;
    return kSuccess;
}

SIM_API cuCtxGetId(Handle context, u64 *id) {
    SIM_ENTER(kInit);
    if (!id) return kInvalidValue;
    ContextPtr found = current();
    if (context) {
        if (const Result code = settable(context, found)) return code;
    }
    if (!found) return kInvalidContext;
    *id = found->handle;
    return kSuccess;
}

SIM_API cuCtxGetApiVersion(Handle, u32 *version) {
    SIM_ENTER(kInit);
    if (!version) return kInvalidValue;
    *version = 3020;
    return kSuccess;
}

SIM_API cuCtxGetFlags(u32 *flags) {
    SIM_ENTER(kInit | kCurrent);
    if (!flags) return kInvalidValue;
    *flags = current()->flags;
    return kSuccess;
}
SIM_API cuCtxSetFlags(u32 flags) {
    SIM_ENTER(kInit | kCurrent);
    current()->flags = flags;
    return kSuccess;
}

SIM_API cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    SIM_ENTER(kInit | kCurrent);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return kSuccess;
}

SIM_API cuCtxGetLimit(std::size_t *value, int) {
    SIM_ENTER(kInit | kCurrent);
    if (!value) return kInvalidValue;
    *value = 1024;
    return kSuccess;
}
SIM_API cuCtxSetLimit(int, std::size_t) {
    SIM_ENTER(kInit | kCurrent);
    return kSuccess;
}

SIM_API cuCtxSynchronize() {
    SIM_ENTER(kInit | kCurrent);
    const ContextPtr found = current();
    Lock lock(state().mutex);
    for (const StreamPtr &stream : found->streams) {
        if (capturing(*stream)) {
            invalidate(*stream->capture);
            return kCaptureUnsupported;
        }
    }
    wait(lock, *found);
    return found->sticky;
}

SIM_API cuCtxEnablePeerAccess(Handle peer, u32 flags) {
    SIM_ENTER(kInit | kCurrent);
    ContextPtr found;
    if (flags != 0) return kInvalidValue;
    if (const Result code = settable(peer, found)) return code;
    const Lock lock(state().mutex);
    return current()->peers.insert(found->device).second ? kSuccess : kPeerAccessAlreadyEnabled;
}
