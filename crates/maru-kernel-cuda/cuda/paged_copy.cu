// Moves tokens between the planes of a paged cache and one contiguous slab: all layers, K and V, in one
// launch. Layouts are strides; there is no format here. The slab may be host memory that the device can
// address, the planes usually are device memory, and the kernel does not care which is which.
//
// A launch is a flat range of accesses, slab order: plane, token, byte. Thread i takes accesses i, i + step,
// i + 2 step, ...; neighbours in a warp touch neighbouring bytes on the slab and, within a row, on the page.
// Each thread keeps several loads in flight before the first store: what limits the copy is the latency of
// the link, and bytes in flight are what hides it.
#include "paged_copy.h"

// Tests run this source on the host, one thread after the other, and define these otherwise: each thread is then its
// own warp and block.
#ifndef MARU_LANE
#define MARU_LANE (threadIdx.x % 32)
#define MARU_LAST_OF_WARP (threadIdx.x % 32 == 31)
#define MARU_WARPS (gridDim.x * (blockDim.x / 32))
#define MARU_FIRST_OF_BLOCK (threadIdx.x == 0)
#define MARU_BLOCKS gridDim.x
// A word that the host polls or a stream waits for.
static __device__ __forceinline__ void maru_publish(maru_u64 word, maru_u64 value) {
    *reinterpret_cast<volatile maru_u64 *>(word) = value;
}
#endif

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

// The parts of an access that do not depend on the token.
struct Plane {
    maru_u32 slab, kv, layer;
};

// A plane in slab order: K of all layers, then V.
__device__ __forceinline__ Plane in_slab_order(maru_u32 slab, maru_u32 plane, maru_u32 layers) {
    const maru_u32 kv = plane >= layers ? 1 : 0;
    return {slab, kv, plane - kv * layers};
}

// Where a launch finds its slabs and slots, in which order it takes the planes, and whom it tells. A warp's threads go
// round the loop together where `kTogether`, and say how far they are.

// One slab, slots in device memory, read through the read-only cache.
struct DeviceSlots {
    static constexpr bool kTogether = false;
    const PagedCopyArgs &args;
    __device__ __forceinline__ Plane plane(maru_u32 index) const { return in_slab_order(0, index, args.layers); }
    __device__ __forceinline__ maru_u64 slab(maru_u32) const { return args.slab; }
    __device__ __forceinline__ maru_i64 slot(maru_u32, maru_i64 token) const {
        return __ldg(reinterpret_cast<const maru_i64 *>(args.slots) + token);
    }
};

// One slab, slots in the arguments, which the host has checked.
struct InlineSlots {
    static constexpr bool kTogether = false;
    const PagedCopyInlineArgs &args;
    __device__ __forceinline__ Plane plane(maru_u32 index) const {
        return in_slab_order(0, index, args.copy.layers);
    }
    __device__ __forceinline__ maru_u64 slab(maru_u32) const { return args.copy.slab; }
    __device__ __forceinline__ maru_i64 slot(maru_u32, maru_u32 token) const { return args.slots[token]; }
};

// Many slabs, slots in device memory, which the host has checked.
struct Batch {
    static constexpr bool kTogether = false;
    const PagedCopyBatchArgs &args;
    __device__ __forceinline__ Plane plane(maru_u32 index) const {
        const maru_u32 slab = divided(index, args.planes_magic, args.planes_shift);
        return in_slab_order(slab, index - slab * args.planes, args.copy.layers);
    }
    __device__ __forceinline__ maru_u64 slab(maru_u32 which) const { return args.slabs[which].slab; }
    __device__ __forceinline__ maru_i64 slot(maru_u32 which, maru_u32 token) const {
        return __ldg(reinterpret_cast<const maru_i64 *>(args.slabs[which].slots) + token);
    }
};

// The same layer by layer, for those that follow: a run of layers is there when every warp is past it.
struct ByLayer {
    static constexpr bool kTogether = true;
    const PagedCopyArgs &args;
    const PagedCopyRuns &runs;
    maru_u32 run, end;  // the run this warp is in, and where it ends

    __device__ __forceinline__ ByLayer(const PagedCopyArgs &args, const PagedCopyRuns &runs)
        : args(args), runs(runs), run(0), end(runs.first_units) {}
};

// Many slabs: K and V of the first layer of all slabs, then of the next.
struct Layers : ByLayer {
    const PagedCopyBatchArgs &batch;
    __device__ __forceinline__ explicit Layers(const PagedCopyLayersArgs &args)
        : ByLayer(args.batch.copy, args.runs), batch(args.batch) {}
    __device__ __forceinline__ Plane plane(maru_u32 index) const {
        const maru_u32 layer = divided(index, batch.planes_magic, batch.planes_shift);
        const maru_u32 within = index - layer * batch.planes;
        return {within >> runs.pair, within & runs.pair, layer};
    }
    __device__ __forceinline__ maru_u64 slab(maru_u32 which) const { return batch.slabs[which].slab; }
    __device__ __forceinline__ maru_i64 slot(maru_u32 which, maru_u32 token) const {
        return __ldg(reinterpret_cast<const maru_i64 *>(batch.slabs[which].slots) + token);
    }
};

// One slab, slots in the arguments.
struct InlineLayers : ByLayer {
    const PagedCopyInlineArgs &one;
    __device__ __forceinline__ explicit InlineLayers(const PagedCopyLayersInlineArgs &args)
        : ByLayer(args.slab.copy, args.runs), one(args.slab) {}
    __device__ __forceinline__ Plane plane(maru_u32 index) const {
        return {0, index & runs.pair, index >> runs.pair};
    }
    __device__ __forceinline__ maru_u64 slab(maru_u32) const { return one.copy.slab; }
    __device__ __forceinline__ maru_i64 slot(maru_u32, maru_u32 token) const { return one.slots[token]; }
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

// Counts one of `all` arrivals, of the threads that did what a word tells; the last one tells it. The fence before
// the count makes what the others of its block or warp did visible first; `kFar` where that is not device memory.
template <bool kFar>
__device__ __forceinline__ bool last_to_arrive(maru_u64 counter, maru_u32 all) {
    if (kFar) {
        __threadfence_system();
    } else {
        __threadfence();
    }
    if (atomicInc(reinterpret_cast<maru_u32 *>(counter), all - 1) != all - 1) return false;
    __threadfence_system();
    return true;
}

// Every run whose end this warp has reached is there, as far as it is concerned. `next`: its next access.
__device__ __forceinline__ void reached(ByLayer &layers, maru_u32 next) {
    const PagedCopyRuns &runs = layers.runs;
    if (next < layers.end || layers.run == runs.count) return;
    const PagedCopyArgs &args = layers.args;
    __syncwarp();
    do {
        if (MARU_LAST_OF_WARP && last_to_arrive<false>(args.counters + 4 * layers.run, MARU_WARPS)) {
            // Streams wait for the last run by the event of the launch. Whoever sees its word may let another launch
            // tell by the same words, which this one must be done with.
            if (layers.run + 1 < runs.count) maru_publish(runs.words + 8 * layers.run, args.value);
            maru_publish(args.seen + 8 * layers.run, args.value);
        }
        layers.run += 1;
        layers.end += runs.units;
    } while (layers.run < runs.count && next >= layers.end);
}

template <class Source>
__device__ __forceinline__ void pass(Source &source, maru_u32 next) {
    if constexpr (Source::kTogether) reached(source, next);
}

// The launch is over.
template <bool kFar, class Source>
__device__ __forceinline__ void tell(const PagedCopyArgs &args, Source &source) {
    if constexpr (Source::kTogether) {
        reached(source, 0xffffffffu);
    } else if (args.counters != 0) {
        __syncthreads();
        if (MARU_FIRST_OF_BLOCK && last_to_arrive<kFar>(args.counters, MARU_BLOCKS)) {
            maru_publish(args.seen, args.value);
        }
    }
}

template <class Word, bool kScatter, class Source>
__device__ __forceinline__ void paged_copy(const PagedCopyArgs &args, Source source) {
    const maru_u64 *planes = reinterpret_cast<const maru_u64 *>(args.planes);
    const maru_u32 step = gridDim.x * blockDim.x;
    if (args.error != 0) report(args, source, step);
    const maru_u32 lane = Source::kTogether ? MARU_LANE : 0;
    // The host keeps units + 2 * kInFlight * step below 2^32.
    for (maru_u32 first = blockIdx.x * blockDim.x + threadIdx.x; first - lane < args.units;
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
            const Plane plane = source.plane(any_plane);
            const maru_u32 row = divided(within, args.row_magic, args.row_shift);
            const maru_u32 column = within - row * args.row_units;

            const maru_u64 slot = static_cast<maru_u64>(source.slot(plane.slab, token));
            const maru_u64 base = __ldg(planes + (static_cast<maru_u64>(plane.kv) * args.plane_pitch + plane.layer));
            const maru_u64 block = divided(slot, args.block_magic, args.block_shift);
            const maru_u64 offset = slot - block * args.block_size;
            paged[k] = base + block * args.block_stride + offset * args.token_stride +
                       row * args.row_stride + static_cast<maru_u64>(column) * sizeof(Word);
            slab[k] = source.slab(plane.slab) + plane.kv * args.slab_kv_stride + plane.layer * args.slab_layer_stride +
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
        pass(source, first - lane + kInFlight * step);
    }
    tell<!kScatter>(args, source);
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

// For loads: of a store no layer is worth telling alone, its other end is the whole slab.
extern "C" __global__ void __launch_bounds__(1024)
    maru_scatter_16_layers(const __grid_constant__ PagedCopyLayersArgs args) {
    paged_copy<uint4, true>(args.batch.copy, Layers{args});
}
extern "C" __global__ void __launch_bounds__(1024)
    maru_scatter_16_layers_inline(const __grid_constant__ PagedCopyLayersInlineArgs args) {
    paged_copy<uint4, true>(args.slab.copy, InlineLayers{args});
}
