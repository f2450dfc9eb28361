// The kernel's own source as this device's code: the host compilation of maru-kernel-host, with accesses that
// go through the simulator's memory.
#include "sim.h"

#include <tuple>
#include <utility>

#include "shim.h"

namespace sim {
namespace {

struct Fault {
    Result code;
};

// What the running kernel may touch, the ranges it used last at hand.
struct Running {
    const Context *context = nullptr;
    double started = 0;  // milliseconds
    RangePtr known[4];
    std::size_t next = 0;
};
thread_local Running running;

bool holds(const Range &range, u64 at, u64 bytes) {
    const u64 offset = at - range.device;
    return offset < range.size && bytes <= range.size - offset && range.alive;
}

bool reaches(const Context &context, const Range &range) {
    if (range.context.get() == &context || (range.kind != Kind::Device && range.portable())) return true;
    return range.context->device == context.device || context.peers.count(range.context->device) != 0;
}

u8 *access(u64 at, u64 bytes, bool write) {
    for (const RangePtr &range : running.known) {
        if (range && holds(*range, at, bytes) && !(write && range->read_only())) return range->bytes + (at - range->device);
    }
    RangePtr range = range_at(at);
    if (!range || !holds(*range, at, bytes) || !reaches(*running.context, *range) || (write && range->read_only())) {
        throw Fault{kIllegalAddress};
    }
    u8 *const bytes_at = range->bytes + (at - range->device);
    running.known[running.next++ % 4] = std::move(range);
    return bytes_at;
}

template <class Word>
u8 *word(const Word *at, bool write) {
    const u64 address = reinterpret_cast<u64>(at);
    if (address % sizeof(Word) != 0) throw Fault{kMisalignedAddress};
    return access(address, sizeof(Word), write);
}

}  // namespace
}  // namespace sim

template <class Word>
static inline Word sim_load(const Word *at) {
    Word value;
    std::memcpy(static_cast<void *>(&value), sim::word(at, false), sizeof value);
    return value;
}
template <class Word>
static inline void sim_store(Word *at, Word value) {
    std::memcpy(sim::word(at, true), static_cast<void *>(&value), sizeof value);
}

static inline unsigned int sim_increment(unsigned int *at, unsigned int most) {
    const unsigned int before = sim_load(at);
    sim_store(at, before >= most ? 0 : before + 1);
    return before;
}
// Others poll it while the kernel runs.
static inline void sim_publish(u64 word, u64 value) {
    u8 *const at = sim::word(reinterpret_cast<const u64 *>(word), true);
    __atomic_store_n(reinterpret_cast<u64 *>(at), value, __ATOMIC_RELEASE);
    if (const u64 pause = sim::setting(sim::Setting::WordUs)) {
        std::this_thread::sleep_for(std::chrono::microseconds(pause));
    }
}

#define atomicInc sim_increment
#define maru_publish sim_publish
#define __ldcs sim_load
#define __ldg sim_load
#define __stcs sim_store
#include "host.cpp"
#undef atomicInc
#undef maru_publish
#undef __ldcs
#undef __ldg
#undef __stcs

// The kernel of maru-kernel-cuda's device tests that takes its time, then copies words (cuda/stall.cu).
static void maru_test_stall(u64 *to, const u64 *from, u32 words, u64 nanoseconds) {
    const double until = sim::running.started + static_cast<double>(nanoseconds) / 1e6;
    while (sim::now_ms() < until) std::this_thread::sleep_for(std::chrono::microseconds(50));
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) sim_store(to + i, sim_load(from + i));
}

namespace sim {

struct Kernel {
    const char *name;
    std::size_t parameters;
    std::function<Result()> (*bind)(const ContextPtr &, LaunchShape, void **);
};

namespace {

// The error record is written through its address; the kernel gets one that the host can use.
struct Report {
    u8 *record = nullptr;
    PagedCopyError nowhere{};
    bool missing = false;

    void redirect(PagedCopyArgs &args) {
        if (args.error == 0) return;
        try {
            record = access(args.error, sizeof(PagedCopyError), true);
        } catch (const Fault &) {
            missing = true;
            record = reinterpret_cast<u8 *>(&nowhere);
        }
        args.error = reinterpret_cast<u64>(record);
    }
    void redirect(PagedCopyInlineArgs &args) { redirect(args.copy); }
    template <class Other>
    void redirect(Other &) {}
};

template <class Call>
void all_threads(const LaunchShape &shape, bool descending, Call call) {
    gridDim = {shape.blocks[0], shape.blocks[1], shape.blocks[2]};
    blockDim = {shape.threads[0], shape.threads[1], shape.threads[2]};
    const u64 blocks = u64{shape.blocks[0]} * shape.blocks[1] * shape.blocks[2];
    const u64 threads = u64{shape.threads[0]} * shape.threads[1] * shape.threads[2];
    const auto index = [](u64 i, const u32 *of) {
        return HostIndex{static_cast<u32>(i % of[0]), static_cast<u32>(i / of[0] % of[1]),
                         static_cast<u32>(i / of[0] / of[1])};
    };
    for (u64 b = 0; b < blocks; ++b) {
        blockIdx = index(descending ? blocks - 1 - b : b, shape.blocks);
        for (u64 t = 0; t < threads; ++t) {
            threadIdx = index(descending ? threads - 1 - t : t, shape.threads);
            call();
        }
    }
}

template <auto F>
struct Entry;

template <class... Args, void (*F)(Args...)>
struct Entry<F> {
    using Values = std::tuple<std::remove_cv_t<std::remove_reference_t<Args>>...>;

    template <std::size_t... I>
    static Values read(void **parameters, std::index_sequence<I...>) {
        return Values{*static_cast<const std::tuple_element_t<I, Values> *>(parameters[I])...};
    }

    static std::function<Result()> bind(const ContextPtr &context, LaunchShape shape, void **parameters) {
        auto values = std::make_shared<const Values>(read(parameters, std::index_sequence_for<Args...>{}));
        return [values, context, shape]() -> Result {
            running = Running{};
            running.context = context.get();
            running.started = now_ms();
            Values own = *values;
            Report report;
            Result code = kSuccess;
            try {
                std::apply([&](auto &...each) { (report.redirect(each), ...); }, own);
                all_threads(shape, setting(Setting::Descending) != 0, [&] { std::apply(F, own); });
                if (report.missing && report.nowhere.raised != 0) code = kIllegalAddress;
            } catch (const Fault &fault) {
                code = fault.code;
            }
            running = Running{};
            return code;
        };
    }
    static constexpr std::size_t kParameters = sizeof...(Args);
};

constexpr Kernel kKernels[] = {
#define MARU_SIM_KERNEL(name) {#name, Entry<name>::kParameters, Entry<name>::bind},
#include "entries.inc"
    MARU_SIM_KERNEL(maru_test_stall)
#undef MARU_SIM_KERNEL
};

}  // namespace

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const Kernel &kernel : kKernels) names.emplace_back(kernel.name);
    return names;
}

const Kernel *find_kernel(const std::string &name) {
    for (const Kernel &kernel : kKernels) {
        if (name == kernel.name) return &kernel;
    }
    return nullptr;
}

std::size_t kernel_parameters(const Kernel &kernel) { return kernel.parameters; }

std::function<Result()> bind_kernel(const Kernel &kernel, const ContextPtr &context, LaunchShape shape,
                                    void **parameters) {
    return kernel.bind(context, shape, parameters);
}

}  // namespace sim
