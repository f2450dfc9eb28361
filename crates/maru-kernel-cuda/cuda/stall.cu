// For tests and benches only: a kernel that takes its time, then copies words. As a producer it writes what a
// transfer must not read too early, as a reader it reads what a transfer must not overwrite too early; with
// nothing to do it is a bare launch.

extern "C" __global__ void maru_test_stall(unsigned long long *to, const unsigned long long *from,
                                           unsigned int words, unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
    for (unsigned int i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}
