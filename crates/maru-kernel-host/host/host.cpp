// The kernel's own source, run on the host one thread after the other.
#include "shim.h"

#include "paged_copy.cu"

thread_local HostIndex gridDim, blockDim, blockIdx, threadIdx;
thread_local unsigned long long host_misaligned, host_accesses;
thread_local bool host_grouped;

namespace {

// Threads in ascending order, or descending: the outcome must not depend on it.
template <class Run>
void for_each_thread(unsigned int blocks, unsigned int threads, bool descending, Run run) {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    host_grouped = !descending;
    for (unsigned int b = 0; b < blocks; ++b) {
        for (unsigned int t = 0; t < threads; ++t) {
            blockIdx = {descending ? blocks - 1 - b : b, 0, 0};
            threadIdx = {descending ? threads - 1 - t : t, 0, 0};
            run();
        }
    }
}

using Device = void (*)(PagedCopyArgs);
using Inline = void (*)(PagedCopyInlineArgs);
using OfBatch = void (*)(PagedCopyBatchArgs);

constexpr Device kDevice[] = {
    maru_gather_1_device,  maru_gather_2_device,  maru_gather_4_device,  maru_gather_8_device,
    maru_gather_16_device, maru_scatter_1_device, maru_scatter_2_device, maru_scatter_4_device,
    maru_scatter_8_device, maru_scatter_16_device,
};
constexpr Inline kInline[] = {
    maru_gather_1_inline,  maru_gather_2_inline,  maru_gather_4_inline,  maru_gather_8_inline,
    maru_gather_16_inline, maru_scatter_1_inline, maru_scatter_2_inline, maru_scatter_4_inline,
    maru_scatter_8_inline, maru_scatter_16_inline,
};

constexpr OfBatch kBatch[] = {maru_gather_16_batch, maru_scatter_16_batch};

}  // namespace

// `entry` counts as Entry::index does. Returns the number of misaligned accesses; `accesses` gets all.
extern "C" unsigned long long maru_host_launch(unsigned int entry, unsigned int blocks, unsigned int threads,
                                               bool descending, const void *args,
                                               unsigned long long *accesses) {
    host_misaligned = 0;
    host_accesses = 0;
    const unsigned int pair = entry / 2;
    if (entry == 23) {
        const auto &layers = *static_cast<const PagedCopyLayersInlineArgs *>(args);
        for_each_thread(blocks, threads, descending, [&] { maru_scatter_16_layers_inline(layers); });
    } else if (entry == 22) {
        const auto &layers = *static_cast<const PagedCopyLayersArgs *>(args);
        for_each_thread(blocks, threads, descending, [&] { maru_scatter_16_layers(layers); });
    } else if (entry >= 20) {
        const auto &batch = *static_cast<const PagedCopyBatchArgs *>(args);
        for_each_thread(blocks, threads, descending, [&] { kBatch[entry - 20](batch); });
    } else if (entry % 2 == 0) {
        const auto &device = *static_cast<const PagedCopyArgs *>(args);
        for_each_thread(blocks, threads, descending, [&] { kDevice[pair](device); });
    } else {
        const auto &with_slots = *static_cast<const PagedCopyInlineArgs *>(args);
        for_each_thread(blocks, threads, descending, [&] { kInline[pair](with_slots); });
    }
    *accesses = host_accesses;
    return host_misaligned;
}
