/* Kernels that only measure the bus (bench/gpu.py); the daemon's own are in native/gpu. */
#include "gpu/words.cuh"

#define WORDS            8 /* of a line; the last one is the flag */
#define LOOKS_A_DEADLINE 1024

/* Answers `rounds` lines of the host with lines of its own: the first is the host's, the second
 * this side's, each seven words and behind them the number of the round. Ends at the time limit
 * however silent the host is. */
extern "C" __global__ void dp_bench_pong(uint64_t *lines, unsigned rounds, unsigned limit_ms) {
    uint64_t *ping = lines, *pong = lines + WORDS;
    int64_t until = dp_timer_ns() + (int64_t)limit_ms * 1000000;
    for (uint64_t round = 1; round <= rounds; round++) {
        unsigned looks = 0;
        /* Acquires the seven words. */
        while (dp_sys_load_acquire(&ping[WORDS - 1]) != round)
            if (++looks % LOOKS_A_DEADLINE == 0 && dp_timer_ns() > until)
                return;
        for (int i = 0; i < WORDS - 1; i++)
            pong[i] = ping[i] + 1;
        dp_sys_store_release(&pong[WORDS - 1], round);
    }
}

/* Reads `words` words, a multiple of four, by ordinary loads of sixteen bytes, as a prompt is read;
 * each thread leaves the sum of its own, so that no load can be left out. */
extern "C" __global__ void __launch_bounds__(256)
    dp_bench_read(const uint32_t *from, uint32_t *sums, unsigned words) {
    const uint4 *quads = (const uint4 *)from;
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t sum = 0;
    for (unsigned i = thread; i < words / 4; i += gridDim.x * blockDim.x) {
        uint4 quad = quads[i];
        sum += quad.x + quad.y + quad.z + quad.w;
    }
    sums[thread] = sum;
}
