// What tests say to the simulator, and the driver's functions about itself.
#include "sim.h"

#include <cstdlib>
#include <dlfcn.h>
#include <sstream>

namespace sim {
namespace {

struct Entry {
    const char *name;
    u64 initial;
    std::atomic<u64> value;
};

// In the order of Setting.
Entry table[] = {
    {"devices", 2, {2}},
    {"cc_major", 9, {9}},
    {"cc_minor", 0, {0}},
    {"driver_version", 13000, {13000}},
    {"memory_bytes", u64{16} << 30, {u64{16} << 30}},
    {"shift", 0, {0}},
    {"delay_us", 0, {0}},
    {"word_us", 0, {0}},
    {"reject_disk_files", 1, {1}},
    {"register_limit", u64{512} << 30, {u64{512} << 30}},
    {"pageable_lazy", 0, {0}},
    {"read_only_register", 0, {0}},
    {"accept_fatbin", 1, {1}},
    {"descending", 0, {0}},
    {"hold_seconds", 20, {20}},
    {"uuid", 0, {0}},
};
static_assert(sizeof table / sizeof *table == static_cast<std::size_t>(Setting::Count), "one entry per setting");

Entry *find(const char *name) {
    for (Entry &entry : table) {
        if (std::strcmp(entry.name, name) == 0) return &entry;
    }
    return nullptr;
}

void add_fault(const std::string &function, u64 nth, Result code, bool all, bool later) {
    const Lock lock(state().mutex);
    state().faults.push_back(Fault{function, nth == 0 ? 1 : nth, code, all, later});
}

// MARU_SIM_CUDA="devices=1;shift=1;fail=cuMemAlloc:3:2;fail_all=cuEventQuery:1:700", for other processes.
// Handled elsewhere: `missing=`.
__attribute__((constructor)) void from_environment() {
    const char *const text = std::getenv("MARU_SIM_CUDA");
    if (!text) return;
    std::istringstream words(text);
    for (std::string word; std::getline(words, word, ';');) {
        const std::size_t equals = word.find('=');
        if (equals == std::string::npos) continue;
        const std::string name = word.substr(0, equals), value = word.substr(equals + 1);
        if (name == "fail" || name == "fail_all" || name == "fail_later") {
            std::istringstream parts(value);
            std::string function, nth, code;
            std::getline(parts, function, ':');
            std::getline(parts, nth, ':');
            std::getline(parts, code, ':');
            add_fault(function, std::strtoull(nth.c_str(), nullptr, 0), std::atoi(code.c_str()), name == "fail_all",
                      name == "fail_later");
        } else if (Entry *const entry = find(name.c_str())) {
            entry->value = std::strtoull(value.c_str(), nullptr, 0);
        }
    }
}

}  // namespace

u64 setting(Setting which) { return table[static_cast<std::size_t>(which)].value; }

}  // namespace sim

using namespace sim;

// 1: there is no such setting.
SIM_CONTROL u32 maru_sim_set(const char *name, u64 value) {
    Entry *const entry = find(name);
    if (!entry) return 1;
    entry->value = value;
    return 0;
}

SIM_CONTROL u64 maru_sim_get(const char *name) {
    Entry *const entry = find(name);
    return entry ? entry->value.load() : 0;
}

// `how`: 1 this call and all later ones, 2 not the call but its work.
SIM_CONTROL void maru_sim_fail(const char *function, u64 nth, i32 code, u32 how) {
    add_fault(function, nth, code, (how & 1) != 0, (how & 2) != 0);
}

SIM_CONTROL void maru_sim_clear_faults() {
    const Lock lock(state().mutex);
    state().faults.clear();
}

// Scripted faults that have not struck.
SIM_CONTROL u64 maru_sim_faults_left() {
    const Lock lock(state().mutex);
    u64 left = 0;
    for (const Fault &fault : state().faults) left += fault.nth > 0 && !fault.all;
    return left;
}

SIM_CONTROL u64 maru_sim_calls(const char *function) {
    const Lock lock(state().mutex);
    u64 calls = 0;
    const std::string name(function);
    for (const auto &[called, count] : state().calls) {
        if (called == name || called.compare(0, name.size() + 2, name + "_v") == 0) calls += count;
    }
    return calls;
}

// Settings, faults, counts and records as at the start; waits for work in flight. Live objects stay, and so
// do contexts that have failed. 1: something is stuck.
SIM_CONTROL u32 maru_sim_reset() {
    State &s = state();
    Lock lock(s.mutex);
    s.holds = 0;
    s.changed.notify_all();
    const bool idle = wait_all(lock);
    for (Entry &entry : table) entry.value = entry.initial;
    s.faults.clear();
    s.calls.clear();
    s.log.clear();
    s.executed = 0;
    s.lost_with_context = 0;
    s.holds_expired = 0;
    return idle ? 0 : 1;
}

// A fatal error of every context of a device, as another user of it would cause; 0 forgives one.
SIM_CONTROL void maru_sim_poison(i32 device, i32 code) {
    State &s = state();
    const Lock lock(s.mutex);
    for (const auto &[handle, context] : s.contexts.live) {
        if (context->device == device && context->active) context->sticky = code;
    }
}

SIM_CONTROL void maru_sim_census(u64 *out) {
    State &s = state();
    const Lock lock(s.mutex);
    const std::shared_lock<std::shared_mutex> ranges(s.ranges_mutex);
    u64 kinds[3] = {}, bytes = 0;
    for (const auto &[address, range] : s.by_device) {
        kinds[static_cast<std::size_t>(range->kind)] += 1;
        if (range->kind == Kind::Device) bytes += range->size;
    }
    u64 contexts = 0;
    for (const auto &[handle, context] : s.contexts.live) contexts += context->active;
    const u64 values[] = {kinds[0], bytes, kinds[1], kinds[2], s.events.live.size(), s.streams.live.size(),
                          s.modules.live.size(), s.graphs.live.size(), s.execs.live.size(), contexts,
                          s.lost_with_context};
    std::memcpy(out, values, sizeof values);
}

SIM_CONTROL u64 maru_sim_log(Record *out, u64 room) {
    const Lock lock(state().mutex);
    const u64 count = state().log.size();
    for (u64 i = 0; i < count && i < room; ++i) out[i] = state().log[i];
    return count;
}
SIM_CONTROL void maru_sim_clear_log() {
    const Lock lock(state().mutex);
    state().log.clear();
}

// Nothing that is queued begins until the hold is released.
SIM_CONTROL void maru_sim_hold() {
    State &s = state();
    const Lock lock(s.mutex);
    s.holds += 1;
    s.hold_deadline = now_ms() + static_cast<double>(setting(Setting::HoldSeconds)) * 1e3;
}
SIM_CONTROL void maru_sim_release() {
    State &s = state();
    const Lock lock(s.mutex);
    if (s.holds > 0) s.holds -= 1;
    s.changed.notify_all();
}
SIM_CONTROL u64 maru_sim_holds_expired() {
    const Lock lock(state().mutex);
    return state().holds_expired;
}
SIM_CONTROL u64 maru_sim_queued() {
    const Lock lock(state().mutex);
    return state().queued;
}
SIM_CONTROL u64 maru_sim_executed() {
    const Lock lock(state().mutex);
    return state().executed;
}

// Memory as the device sees it at this moment, whatever is in flight. 1: not memory of the device.
SIM_CONTROL u32 maru_sim_peek(u64 address, u8 *to, u64 bytes) {
    Span span;
    if (locate(address, bytes, span) != kSuccess || !span.range) return 1;
    return copy_bytes(to, span.bytes, bytes) ? 0 : 1;
}
SIM_CONTROL u32 maru_sim_poke(u64 address, const u8 *from, u64 bytes) {
    Span span;
    if (locate(address, bytes, span) != kSuccess || !span.range) return 1;
    return copy_bytes(span.bytes, from, bytes) ? 0 : 1;
}

// The library that this code lies in.
static void *self() {
    static void *const handle = [] {
        Dl_info info{};
        return dladdr(reinterpret_cast<void *>(&maru_sim_reset), &info) != 0
                   ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)
                   : nullptr;
    }();
    return handle;
}

static Result address_of(const char *symbol, void **out, int cuda) {
    if (!symbol || !out) return kInvalidValue;
    const std::string name(symbol);
    *out = nullptr;
    const bool batch = name == "cuMemcpyBatchAsync";
    for (const char *version : {"_v2", ""}) {
        if (batch && cuda < 13000 && *version != 0) continue;
        if ((*out = dlsym(self(), (name + version).c_str()))) return kSuccess;
    }
    return kNotFound;
}
SIM_API cuGetProcAddress(const char *symbol, void **out, int cuda, u64) {
    SIM_ENTER(kNothing);
    return address_of(symbol, out, cuda);
}
SIM_API cuGetProcAddress_v2(const char *symbol, void **out, int cuda, u64, u32 *status) {
    SIM_ENTER(kNothing);
    const Result code = address_of(symbol, out, cuda);
    if (status) *status = code == kSuccess ? 0 : 1;
    return code == kNotFound && status ? kSuccess : code;
}
