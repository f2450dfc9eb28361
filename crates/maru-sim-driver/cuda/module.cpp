// Modules, functions and launches.
#include "sim.h"

#include <cstdlib>

namespace sim {
namespace {

// PTX versions that drivers know, as 10 * PTX version by CUDA version.
u64 newest_ptx(u64 cuda) {
    if (cuda >= 13000) return 90 + (cuda - 13000) / 10;
    if (cuda >= 12090) return 88;
    if (cuda >= 12080) return 87;
    if (cuda >= 12070) return 86;
    if (cuda >= 12050) return 85;
    if (cuda >= 12000) return 80 + (cuda - 12000) / 10;
    if (cuda >= 11000) return 70 + (cuda - 11000) / 10;
    return 65;
}

// The number after a directive, "8.0" as 80 and "sm_70" as 70.
bool directive(const std::string &text, const char *name, u64 &value) {
    std::size_t at = text.find(name);
    if (at == std::string::npos) return false;
    at = text.find_first_of("0123456789", at);
    if (at == std::string::npos) return false;
    value = 0;
    for (; at < text.size() && (text[at] == '.' || (text[at] >= '0' && text[at] <= '9')); ++at) {
        if (text[at] != '.') value = value * 10 + static_cast<u64>(text[at] - '0');
    }
    return true;
}

Result load_ptx(const char *image, Module &module) {
    const std::string text(image);
    u64 version = 0, target = 0;
    if (!directive(text, "\n.version", version) || !directive(text, "\n.target sm_", target)) return kInvalidPtx;
    if (version > newest_ptx(setting(Setting::DriverVersion))) return kUnsupportedPtxVersion;
    if (target > setting(Setting::CcMajor) * 10 + setting(Setting::CcMinor)) return kNoBinaryForGpu;
    for (std::size_t at = text.find(".entry "); at != std::string::npos; at = text.find(".entry ", at)) {
        at += 7;
        const std::size_t end = text.find_first_of("( \n\t", at);
        if (end == std::string::npos) return kInvalidPtx;
        module.entries.insert(text.substr(at, end - at));
    }
    return kSuccess;
}

Result load(Handle *out, const void *image) {
    if (!out || !image) return kInvalidValue;
    auto module = std::make_shared<Module>();
    u32 magic = 0;
    std::memcpy(&magic, image, 1);
    const char *const text = static_cast<const char *>(image);
    if ((magic & 0xff) == 0x50) {
        std::memcpy(&magic, image, sizeof magic);
        if (magic != 0xba55ed50) return kInvalidImage;
        if (setting(Setting::AcceptFatbin) == 0) return kNoBinaryForGpu;
        for (const std::string &name : kernel_names()) module->entries.insert(name);
    } else if (text[0] == '/' || text[0] == '.' || text[0] == '\n') {
        if (const Result code = load_ptx(text, *module)) return code;
    } else {
        return kInvalidImage;
    }
    State &s = state();
    const Lock lock(s.mutex);
    module->context = current();
    const u64 handle = s.handle();
    s.modules.live[handle] = module;
    *out = reinterpret_cast<Handle>(handle);
    return kSuccess;
}

Result launch(Handle function_handle, LaunchShape shape, u32 shared, Handle handle,
              void **parameters, void **extra) {
    Lock lock(state().mutex);
    const auto function = state().functions.find(function_handle);
    StreamPtr stream;
    if (!function) return kInvalidHandle;
    if (const Result code = stream_for_work(lock, handle, stream)) return code;
    if (function->module->context != stream->context) return kInvalidHandle;
    const u64 threads = u64{shape.threads[0]} * shape.threads[1] * shape.threads[2];
    const bool grid = shape.blocks[0] > 0 && shape.blocks[0] <= 0x7fffffff && shape.blocks[1] > 0 &&
                      shape.blocks[1] <= 65535 && shape.blocks[2] > 0 && shape.blocks[2] <= 65535;
    if (!grid || threads == 0 || threads > 1024 || shape.threads[2] > 64 || shared > 48u << 10) return kInvalidValue;
    if (extra || (!parameters && kernel_parameters(*function->kernel) > 0)) return kInvalidValue;
    Record record{};
    record.kind = 4;
    record.rows = u64{shape.blocks[0]} * shape.blocks[1] * shape.blocks[2];
    record.bytes = threads;
    record.stream = stream->handle;
    log(record, function->name.c_str());

    return enqueue(lock, stream, bind_kernel(*function->kernel, stream->context, shape, parameters));
}

}  // namespace
}  // namespace sim

using namespace sim;

SIM_API cuModuleLoadData(Handle *module, const void *image) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    return load(module, image);
}
SIM_API cuModuleLoadDataEx(Handle *module, const void *image, u32, u32 *, void **) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    return load(module, image);
}
SIM_API cuModuleLoadFatBinary(Handle *module, const void *image) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    return load(module, image);
}

SIM_API cuModuleUnload(Handle handle) {
    SIM_ENTER(kInit | kCurrent | kUnsafe);
    State &s = state();
    Lock lock(s.mutex);
    const auto module = s.modules.find(handle);
    if (!module) return kInvalidHandle;
    wait(lock, *module->context);
    if (!s.modules.take(handle)) return kInvalidHandle;
    for (auto at = s.functions.live.begin(); at != s.functions.live.end();) {
        at = at->second->module == module ? s.functions.live.erase(at) : std::next(at);
    }
    return kSuccess;
}

SIM_API cuModuleGetFunction(Handle *function, Handle handle, const char *name) {
    SIM_ENTER(kInit | kCurrent);
    if (!function || !name) return kInvalidValue;
    State &s = state();
    const Lock lock(s.mutex);
    const auto module = s.modules.find(handle);
    if (!module) return kInvalidHandle;
    const Kernel *const kernel = find_kernel(name);
    if (!kernel || module->entries.count(name) == 0) return kNotFound;
    for (const auto &[known, other] : s.functions.live) {
        if (other->module == module && other->kernel == kernel) {
            *function = reinterpret_cast<Handle>(known);
            return kSuccess;
        }
    }
    auto made = std::make_shared<Func>();
    made->module = module;
    made->kernel = kernel;
    made->name = name;
    const u64 number = s.handle();
    s.functions.live[number] = made;
    *function = reinterpret_cast<Handle>(number);
    return kSuccess;
}

SIM_API cuModuleGetGlobal_v2(u64 *, std::size_t *, Handle, const char *) {
    SIM_ENTER(kInit | kCurrent);
    return kNotFound;
}

SIM_API cuFuncGetAttribute(int *value, int attribute, Handle handle) {
    SIM_ENTER(kInit | kCurrent);
    const Lock lock(state().mutex);
    if (!value || attribute < 0 || attribute > 16) return kInvalidValue;
    if (!state().functions.find(handle)) return kInvalidHandle;
    switch (attribute) {
        case 0: *value = 1024; break;  // threads of a block
        case 4: *value = 32; break;    // registers
        case 5: case 6: *value = static_cast<int>(setting(Setting::CcMajor) * 10 + setting(Setting::CcMinor)); break;
        case 8: *value = 48 << 10; break;
        default: *value = 0; break;
    }
    return kSuccess;
}
SIM_API cuFuncSetAttribute(Handle handle, int, int) {
    SIM_ENTER(kInit | kCurrent);
    const Lock lock(state().mutex);
    return state().functions.find(handle) ? kSuccess : kInvalidHandle;
}

SIM_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Handle handle, int threads, std::size_t) {
    SIM_ENTER(kInit | kCurrent);
    const Lock lock(state().mutex);
    if (!blocks || threads <= 0) return kInvalidValue;
    if (!state().functions.find(handle)) return kInvalidHandle;
    *blocks = threads > 1024 ? 0 : 2048 / threads;
    return kSuccess;
}

SIM_API cuLaunchKernel(Handle function, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, Handle stream,
                       void **parameters, void **extra) {
    SIM_ENTER(kInit | kCurrent);
    return launch(function, LaunchShape{{gx, gy, gz}, {bx, by, bz}}, shared, stream, parameters, extra);
}

namespace {
struct LaunchConfig {
    u32 grid[3], block[3], shared;
    Handle stream;
    void *attributes;
    u32 count;
};
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig");
}  // namespace

SIM_API cuLaunchKernelEx(const LaunchConfig *config, Handle function, void **parameters, void **extra) {
    SIM_ENTER(kInit | kCurrent);
    if (!config) return kInvalidValue;
    const LaunchShape shape{{config->grid[0], config->grid[1], config->grid[2]},
                            {config->block[0], config->block[1], config->block[2]}};
    return launch(function, shape, config->shared, config->stream, parameters, extra);
}
