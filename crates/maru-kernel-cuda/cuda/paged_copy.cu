// Moves tokens between the planes of a paged cache and one contiguous slab: all layers, K and V, in one
// launch. Layouts are strides; there is no format here. The slab may be host memory that the device can
// address, the planes usually are device memory, and the kernel does not care which is which.
//
// A launch is a flat range of accesses, slab order: plane, token, byte. Thread i takes accesses i, i + step,
// i + 2 step, ...; neighbours in a warp touch neighbouring bytes on the slab and, within a row, on the page.
// Each thread keeps several loads in flight before the first store: what limits the copy is the latency of
// the link, and bytes in flight are what hides it.
#include "paged_copy.h"

namespace {

// Loads a thread issues before it stores.
constexpr int kInFlight = 4;

// n / d, see PagedCopyArgs.
__device__ __forceinline__ maru_u32 divided(maru_u32 n, maru_u32 magic, maru_u32 shift) {
    return __umulhi(n << 1, magic) >> shift;
}

__device__ __forceinline__ maru_u64 divided(maru_u64 n, maru_u64 magic, maru_u32 shift) {
    return __umul64hi(n << 1, magic) >> shift;
}

// Where a launch finds its slabs and slots. `slab_of` and `planes` split the planes of a batch by slab.

// One slab, slots in device memory, read through the read-only cache.
struct DeviceSlots {
    const PagedCopyArgs &args;
    __device__ __forceinline__ maru_u32 slab_of(maru_u32) const { return 0; }
    __device__ __forceinline__ maru_u32 planes() const { return 0; }
    __device__ __forceinline__ maru_u64 slab(maru_u32) const { return args.slab; }
    __device__ __forceinline__ maru_i64 slot(maru_u32, maru_i64 token) const {
        return __ldg(reinterpret_cast<const maru_i64 *>(args.slots) + token);
    }
};

// One slab, slots in the arguments, which the host has checked.
struct InlineSlots {
    const PagedCopyInlineArgs &args;
    __device__ __forceinline__ maru_u32 slab_of(maru_u32) const { return 0; }
    __device__ __forceinline__ maru_u32 planes() const { return 0; }
    __device__ __forceinline__ maru_u64 slab(maru_u32) const { return args.copy.slab; }
    __device__ __forceinline__ maru_i64 slot(maru_u32, maru_u32 token) const { return args.slots[token]; }
};

// Many slabs, slots in device memory, which the host has checked.
struct Batch {
    const PagedCopyBatchArgs &args;
    __device__ __forceinline__ maru_u32 slab_of(maru_u32 plane) const {
        return divided(plane, args.planes_magic, args.planes_shift);
    }
    __device__ __forceinline__ maru_u32 planes() const { return args.planes; }
    __device__ __forceinline__ maru_u64 slab(maru_u32 which) const { return args.slabs[which].slab; }
    __device__ __forceinline__ maru_i64 slot(maru_u32 which, maru_u32 token) const {
        return __ldg(reinterpret_cast<const maru_i64 *>(args.slabs[which].slots) + token);
    }
};

// Neither -1 (skip) nor inside the cache.
__device__ __forceinline__ bool bad(maru_i64 slot, maru_u64 num_slots) {
    return slot != -1 && static_cast<maru_u64>(slot) >= num_slots;
}

// Reports the first bad slot of the transfer. Each token is looked at by one thread of one launch, which
// reports it only if no earlier token of the transfer is bad: exactly one thread writes, hence no atomics
// (the record lies in host memory, where few systems have them). `raised` is written last.
__device__ __forceinline__ void report(const PagedCopyArgs &args, const DeviceSlots slots, maru_u32 step) {
    for (maru_u32 token = blockIdx.x * blockDim.x + threadIdx.x; token < args.tokens; token += step) {
        if (!bad(slots.slot(0, token), args.num_slots)) continue;
        for (maru_i64 earlier = -static_cast<maru_i64>(args.earlier); earlier < token; ++earlier) {
            if (bad(slots.slot(0, earlier), args.num_slots)) return;
        }
        volatile PagedCopyError *record = reinterpret_cast<PagedCopyError *>(args.error);
        record->token = args.first_token + token;
        record->slot = slots.slot(0, token);
        __threadfence_system();
        record->raised = 1;
        return;
    }
}

// Other slots have been checked on the host.
template <class Source>
__device__ __forceinline__ void report(const PagedCopyArgs &, const Source, maru_u32) {}

template <class Word, bool kScatter, class Source>
__device__ __forceinline__ void paged_copy(const PagedCopyArgs &args, const Source source) {
    const maru_u64 *planes = reinterpret_cast<const maru_u64 *>(args.planes);
    const maru_u32 step = gridDim.x * blockDim.x;
    if (args.error != 0) report(args, source, step);
    // The host keeps units + 2 * kInFlight * step below 2^32.
    for (maru_u32 first = blockIdx.x * blockDim.x + threadIdx.x; first < args.units;
         first += kInFlight * step) {
        maru_u64 paged[kInFlight];
        maru_u64 slab[kInFlight];
        bool live[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            // Past the end: the last access again, without effect, so that the loads here need no branch.
            const maru_u32 wanted = first + k * step;
            const maru_u32 unit = wanted < args.units ? wanted : args.units - 1;
            const maru_u32 row_of_plane = divided(unit, args.token_magic, args.token_shift);
            const maru_u32 within = unit - row_of_plane * args.token_units;
            const maru_u32 any_plane = divided(row_of_plane, args.tokens_magic, args.tokens_shift);
            const maru_u32 token = row_of_plane - any_plane * args.tokens;
            const maru_u32 which = source.slab_of(any_plane);
            const maru_u32 plane = any_plane - which * source.planes();
            const maru_u32 kv = plane >= args.layers ? 1 : 0;
            const maru_u32 layer = plane - kv * args.layers;
            const maru_u32 row = divided(within, args.row_magic, args.row_shift);
            const maru_u32 column = within - row * args.row_units;

            const maru_u64 slot = static_cast<maru_u64>(source.slot(which, token));
            const maru_u64 base = __ldg(planes + (static_cast<maru_u64>(kv) * args.plane_pitch + layer));
            const maru_u64 block = divided(slot, args.block_magic, args.block_shift);
            const maru_u64 offset = slot - block * args.block_size;
            paged[k] = base + block * args.block_stride + offset * args.token_stride +
                       row * args.row_stride + static_cast<maru_u64>(column) * sizeof(Word);
            slab[k] = source.slab(which) + kv * args.slab_kv_stride + layer * args.slab_layer_stride +
                      token * args.slab_token_stride + static_cast<maru_u64>(within) * sizeof(Word);
            // -1 and bad slots are huge as unsigned numbers.
            live[k] = wanted < args.units && slot < args.num_slots;
        }
        Word words[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (live[k]) words[k] = __ldcs(reinterpret_cast<const Word *>(kScatter ? slab[k] : paged[k]));
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (live[k]) __stcs(reinterpret_cast<Word *>(kScatter ? paged[k] : slab[k]), words[k]);
        }
    }
}

}  // namespace

// One entry per direction, access width and place of the slots; names and order as in src/abi.rs.
#define MARU_ENTRY(direction, scatter, bytes, Word)                                                          \
    extern "C" __global__ void __launch_bounds__(1024)                                                       \
        maru_##direction##_##bytes##_device(const __grid_constant__ PagedCopyArgs args) {                    \
        paged_copy<Word, scatter>(args, DeviceSlots{args});                                                  \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(1024)                                                       \
        maru_##direction##_##bytes##_inline(const __grid_constant__ PagedCopyInlineArgs args) {              \
        paged_copy<Word, scatter>(args.copy, InlineSlots{args});                                             \
    }

#define MARU_ENTRIES(direction, scatter)                \
    MARU_ENTRY(direction, scatter, 1, unsigned char)    \
    MARU_ENTRY(direction, scatter, 2, unsigned short)   \
    MARU_ENTRY(direction, scatter, 4, unsigned int)     \
    MARU_ENTRY(direction, scatter, 8, uint2)            \
    MARU_ENTRY(direction, scatter, 16, uint4)

MARU_ENTRIES(gather, false)
MARU_ENTRIES(scatter, true)

// Batches are worth an entry at full width only.
#define MARU_BATCH_ENTRY(direction, scatter)                                            \
    extern "C" __global__ void __launch_bounds__(1024)                                  \
        maru_##direction##_16_batch(const __grid_constant__ PagedCopyBatchArgs args) {  \
        paged_copy<uint4, scatter>(args.copy, Batch{args});                             \
    }

MARU_BATCH_ENTRY(gather, false)
MARU_BATCH_ENTRY(scatter, true)
