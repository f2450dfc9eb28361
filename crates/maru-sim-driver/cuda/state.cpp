// Entering a driver function: counting, scripted faults, the checks that all functions share.
#include "sim.h"

#include <time.h>

namespace sim {

State &state() {
    static State *const only = new State;
    return *only;
}

double now_ms() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

namespace {

thread_local Result later_fault = kSuccess;

// "cuMemAlloc" names every version of the function.
bool names(const std::string &scripted, const char *function) {
    if (scripted == function) return true;
    const std::size_t length = scripted.size();
    return std::strncmp(scripted.c_str(), function, length) == 0 && std::strncmp(function + length, "_v", 2) == 0;
}

Result scripted(State &s, const char *function) {
    Result code = kSuccess;
    for (Fault &fault : s.faults) {
        if (!names(fault.function, function)) continue;
        if (fault.nth > 1) {
            fault.nth -= 1;
            continue;
        }
        if (fault.nth == 0) continue;
        if (!fault.all) fault.nth = 0;
        (fault.later ? later_fault : code) = fault.code;
    }
    return code;
}

}  // namespace

// The mode of calls that might disturb a capture.
thread_local u32 capture_mode = 0;

Result enter(const char *function, u32 needs) {
    State &s = state();
    const Lock lock(s.mutex);
    s.calls[function] += 1;
    later_fault = kSuccess;
    if (const Result code = scripted(s, function)) return code;
    if ((needs & kInit) != 0 && !s.initialized) return kNotInitialized;
    if ((needs & kCurrent) != 0) {
        const ContextPtr context = current();
        if (!context) return kInvalidContext;
        if (!context->active) return kContextIsDestroyed;
        if (context->sticky != kSuccess) return context->sticky;
    }
    if ((needs & kUnsafe) != 0 && capture_mode != 2) {
        bool disturbed = false;
        for (const auto &weak : s.captures) {
            const auto capture = weak.lock();
            if (!capture || !capture->active || capture->mode == 2) continue;
            if (capture->mode == 0 || capture->thread == std::this_thread::get_id()) {
                if (capture->mode == 0 && capture_mode == 1 && capture->thread != std::this_thread::get_id()) continue;
                invalidate(*capture);
                disturbed = true;
            }
        }
        if (disturbed) return kCaptureUnsupported;
    }
    return kSuccess;
}

Result take_later_fault() {
    const Result code = later_fault;
    later_fault = kSuccess;
    return code;
}

void log(Record record, const char *function) {
    std::strncpy(record.function, function, sizeof record.function - 1);
    state().log.push_back(record);
}

}  // namespace sim
