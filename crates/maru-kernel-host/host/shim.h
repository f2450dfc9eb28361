// What the kernel's source needs of CUDA, for a host compiler: qualifiers, thread indices, vector words and
// the handful of intrinsics it uses. Addresses are left alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct HostIndex {
    unsigned int x, y, z;
};
extern thread_local HostIndex gridDim, blockDim, blockIdx, threadIdx;

struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

// Accesses that a device would refuse for their alignment, and accesses in all.
extern thread_local unsigned long long host_misaligned, host_accesses;

template <class Word>
inline void host_count(const Word *at) {
    host_accesses += 1;
    host_misaligned += reinterpret_cast<std::uintptr_t>(at) % sizeof(Word) != 0;
}

template <class Word>
inline Word __ldcs(const Word *at) {
    host_count(at);
    Word word;
    std::memcpy(static_cast<void *>(&word), at, sizeof word);
    return word;
}

template <class Word>
inline void __stcs(Word *at, Word word) {
    host_count(at);
    std::memcpy(static_cast<void *>(at), &word, sizeof word);
}

template <class Word>
inline Word __ldg(const Word *at) {
    return *at;
}

inline unsigned int __umulhi(unsigned int a, unsigned int b) {
    return static_cast<unsigned int>((static_cast<unsigned long long>(a) * b) >> 32);
}

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    __extension__ typedef unsigned __int128 Wide;
    return static_cast<unsigned long long>((static_cast<Wide>(a) * b) >> 64);
}

inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Threads run one after the other. In descending order each is its own warp and block; in ascending order they are
// grouped as on a device, where those that count arrivals must be as many as are waited for.
extern thread_local bool host_grouped;
#define MARU_LANE (host_grouped ? threadIdx.x % 32 : 0u)
#define MARU_LAST_OF_WARP (!host_grouped || threadIdx.x % 32 == 31)
#define MARU_WARPS (gridDim.x * (host_grouped ? blockDim.x / 32 : blockDim.x))
#define MARU_FIRST_OF_BLOCK (!host_grouped || threadIdx.x == 0)
#define MARU_BLOCKS (gridDim.x * (host_grouped ? 1 : blockDim.x))
inline void __syncthreads() {}
inline void __syncwarp() {}

inline unsigned int atomicInc(unsigned int *at, unsigned int most) {
    const unsigned int before = *at;
    *at = before >= most ? 0 : before + 1;
    return before;
}

inline void maru_publish(unsigned long long word, unsigned long long value) {
    __atomic_store_n(reinterpret_cast<unsigned long long *>(word), value, __ATOMIC_RELEASE);
}
