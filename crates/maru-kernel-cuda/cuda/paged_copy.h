// Arguments of the paged-copy kernel. Mirrored field by field in src/abi.rs; both sides assert size and
// offsets. Addresses are integers: the same struct is filled on a host whose pointers mean nothing to the
// device, and by tests that run the kernel's source on the host.
//
// This header and the kernel include nothing, so that nvcc, NVRTC and a plain C++ compiler all take them.
#pragma once

typedef unsigned long long maru_u64;
typedef long long maru_i64;
typedef unsigned int maru_u32;

// Slots that travel inside the kernel arguments.
#define MARU_INLINE_SLOTS 256

// Slabs of a batch.
#define MARU_BATCH_SLABS 128

// Runs of layers that a launch can tell of.
#define MARU_RUNS 128

// Where the first bad slot of a launch with slots in device memory is reported.
struct PagedCopyError {
    maru_u64 raised;  // 0 until written, then 1
    maru_u64 token;   // index of the first bad token, the skipped prefix counted
    maru_i64 slot;    // its slot
    maru_u64 unused;
};

// Division of n by d without a divide: (2n * magic) >> word >> shift, exact for every n below half the word's
// range. magic = 0 yields 0.
//
// Byte address of access u of token t (of this launch) in plane kv of layer l, in words of W bytes:
//   paged  planes[kv * plane_pitch + l] + (s / block_size) * block_stride + (s % block_size) * token_stride
//          + (u / row_units) * row_stride + (u % row_units) * W           with s = slots[t]
//   slab   slab + kv * slab_kv_stride + l * slab_layer_stride + t * slab_token_stride + u * W
struct PagedCopyArgs {
    maru_u64 planes;             // table of plane addresses, at the first layer moved
    maru_u64 slab;               // slab, at the first layer and token of this launch
    maru_u64 slots;              // slots in device memory, at the first token of this launch
    maru_u64 error;              // PagedCopyError to report to, 0: none
    maru_u64 num_slots;          // slots of the cache
    maru_u64 block_magic;        // 64-bit division by block_size; 0 where slots are evenly spaced
    maru_u64 block_size;         // tokens of a block
    maru_u64 block_stride;       // bytes
    maru_u64 token_stride;       // bytes
    maru_u64 row_stride;         // bytes
    maru_u64 slab_kv_stride;     // bytes
    maru_u64 slab_layer_stride;  // bytes
    maru_u64 slab_token_stride;  // bytes
    maru_u64 first_token;        // index of this launch's first token in the transfer
    maru_u64 earlier;            // tokens of the transfer's earlier launches, just before `slots`
    maru_u64 counters;           // 32-bit counters in device memory, zero between launches; 0: nobody is told
    maru_u64 seen;               // 64-bit words in host memory, as the device addresses it
    maru_u64 value;              // what is written there when it is over, more than ever before
    maru_u32 block_shift;
    maru_u32 units;              // accesses of this launch: planes * layers * tokens * token_units
    maru_u32 token_units;        // accesses of one token in one plane
    maru_u32 token_magic;
    maru_u32 token_shift;
    maru_u32 tokens;             // tokens of this launch
    maru_u32 tokens_magic;
    maru_u32 tokens_shift;
    maru_u32 row_units;          // accesses of one row
    maru_u32 row_magic;
    maru_u32 row_shift;
    maru_u32 layers;             // layers moved
    maru_u32 plane_pitch;        // layers of the table
    maru_u32 unused;
};

// When all accesses of a launch are done, the first word of `seen` becomes `value`: whoever counts the last of the
// first counter's arrivals writes it, and leaves the counter zero.

// The same with the slots by value.
struct PagedCopyInlineArgs {
    PagedCopyArgs copy;
    maru_i64 slots[MARU_INLINE_SLOTS];
};

// One slab of a batch.
struct PagedCopySlab {
    maru_u64 slab;   // at the first layer and token of this launch
    maru_u64 slots;  // in device memory, checked on the host, at the first token of this launch
};

// Slabs of one geometry, moved alike: the same tokens of the same layers. `copy` has what they share; its
// `slab`, `slots` and `error` are not used, and its `units` count all slabs.
struct PagedCopyBatchArgs {
    PagedCopyArgs copy;
    maru_u32 planes;  // planes of one slab: planes * layers
    maru_u32 planes_magic;
    maru_u32 planes_shift;
    maru_u32 unused;
    PagedCopySlab slabs[MARU_BATCH_SLABS];
};

// A launch in the order of its layers tells of them in runs: word r of `seen` becomes `value` when run r is there, by
// counter r; so does word r of `words`, the last run's excepted.
struct PagedCopyRuns {
    maru_u64 words;        // 64-bit words in device memory
    maru_u32 count;        // at most MARU_RUNS
    maru_u32 first_units;  // accesses of the first run
    maru_u32 units;        // of every other, the last excepted
    maru_u32 pair;         // 1 if a layer has K and V, else 0
};

// A batch in the order: layer, slab, plane of the layer, token, byte.
struct PagedCopyLayersArgs {
    PagedCopyBatchArgs batch;  // but `planes` are those of one layer of all slabs
    PagedCopyRuns runs;
};

// One slab in the same order, slots by value.
struct PagedCopyLayersInlineArgs {
    PagedCopyInlineArgs slab;
    PagedCopyRuns runs;
};

// NVRTC has no offsetof in any spelling; nvcc and the host compiler check the same file.
#ifdef __CUDACC_RTC__
#define MARU_AT(type, field, offset) static_assert(true, "")
#else
#define MARU_AT(type, field, offset) \
    static_assert(__builtin_offsetof(type, field) == (offset), #type "." #field)
#endif
static_assert(sizeof(PagedCopyError) == 32, "PagedCopyError");
static_assert(sizeof(PagedCopyArgs) == 200, "PagedCopyArgs");
static_assert(sizeof(PagedCopyInlineArgs) == 200 + 8 * MARU_INLINE_SLOTS, "PagedCopyInlineArgs");
static_assert(sizeof(PagedCopySlab) == 16, "PagedCopySlab");
static_assert(sizeof(PagedCopyBatchArgs) == 216 + 16 * MARU_BATCH_SLABS, "PagedCopyBatchArgs");
static_assert(sizeof(PagedCopyRuns) == 24, "PagedCopyRuns");
static_assert(sizeof(PagedCopyLayersArgs) == 216 + 16 * MARU_BATCH_SLABS + 24, "PagedCopyLayersArgs");
static_assert(sizeof(PagedCopyLayersInlineArgs) == 200 + 8 * MARU_INLINE_SLOTS + 24, "PagedCopyLayersInlineArgs");
static_assert(sizeof(PagedCopyLayersArgs) <= 4096 && sizeof(PagedCopyLayersInlineArgs) <= 4096, "kernel parameters of PTX before 8.1 end at 4 KiB");
MARU_AT(PagedCopyError, token, 8);
MARU_AT(PagedCopyError, slot, 16);
MARU_AT(PagedCopyArgs, planes, 0);
MARU_AT(PagedCopyArgs, slab, 8);
MARU_AT(PagedCopyArgs, slots, 16);
MARU_AT(PagedCopyArgs, error, 24);
MARU_AT(PagedCopyArgs, num_slots, 32);
MARU_AT(PagedCopyArgs, block_magic, 40);
MARU_AT(PagedCopyArgs, block_size, 48);
MARU_AT(PagedCopyArgs, block_stride, 56);
MARU_AT(PagedCopyArgs, token_stride, 64);
MARU_AT(PagedCopyArgs, row_stride, 72);
MARU_AT(PagedCopyArgs, slab_kv_stride, 80);
MARU_AT(PagedCopyArgs, slab_layer_stride, 88);
MARU_AT(PagedCopyArgs, slab_token_stride, 96);
MARU_AT(PagedCopyArgs, first_token, 104);
MARU_AT(PagedCopyArgs, earlier, 112);
MARU_AT(PagedCopyArgs, counters, 120);
MARU_AT(PagedCopyArgs, seen, 128);
MARU_AT(PagedCopyArgs, value, 136);
MARU_AT(PagedCopyArgs, block_shift, 144);
MARU_AT(PagedCopyArgs, units, 148);
MARU_AT(PagedCopyArgs, token_units, 152);
MARU_AT(PagedCopyArgs, token_magic, 156);
MARU_AT(PagedCopyArgs, token_shift, 160);
MARU_AT(PagedCopyArgs, tokens, 164);
MARU_AT(PagedCopyArgs, tokens_magic, 168);
MARU_AT(PagedCopyArgs, tokens_shift, 172);
MARU_AT(PagedCopyArgs, row_units, 176);
MARU_AT(PagedCopyArgs, row_magic, 180);
MARU_AT(PagedCopyArgs, row_shift, 184);
MARU_AT(PagedCopyArgs, layers, 188);
MARU_AT(PagedCopyArgs, plane_pitch, 192);
MARU_AT(PagedCopyInlineArgs, slots, 200);
MARU_AT(PagedCopySlab, slots, 8);
MARU_AT(PagedCopyBatchArgs, planes, 200);
MARU_AT(PagedCopyBatchArgs, planes_magic, 204);
MARU_AT(PagedCopyBatchArgs, planes_shift, 208);
MARU_AT(PagedCopyBatchArgs, slabs, 216);
MARU_AT(PagedCopyRuns, count, 8);
MARU_AT(PagedCopyRuns, first_units, 12);
MARU_AT(PagedCopyRuns, units, 16);
MARU_AT(PagedCopyRuns, pair, 20);
MARU_AT(PagedCopyLayersArgs, runs, 2264);
MARU_AT(PagedCopyLayersInlineArgs, runs, 2248);
