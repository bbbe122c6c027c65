/* What CUDA C++ needs to run on host threads: included before a .cu file, it makes a C++ compiler
 * take it as it is, and ThreadSanitizer see it. A block is that many threads; blocks run one after
 * the other, which kernels that work for each other across blocks must not rely on anyway. */
#ifndef DP_HOST_CUDA_H
#define DP_HOST_CUDA_H

#include <sched.h>
#include <stdint.h>
#include <time.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__         inline
#define __launch_bounds__(most) /* a hint to the compiler of the device */

struct dp_host_dim {
    unsigned x = 1, y = 1, z = 1;
};

inline thread_local dp_host_dim threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;
inline thread_local std::barrier<> *dp_host_block;

inline void __syncthreads() {
    dp_host_block->arrive_and_wait();
}

inline void __nanosleep(unsigned) {
    sched_yield();
}

/* The device's timer: so much ahead of CLOCK_MONOTONIC, and so many millionths faster. */
inline std::atomic<int64_t> dp_host_timer_ahead_ns, dp_host_timer_ppm;

inline int64_t dp_host_timer_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    return ns + dp_host_timer_ahead_ns + ns / 1000 * dp_host_timer_ppm / 1000;
}

/* kernel<<<blocks, threads>>>(arguments...), and wait for its end. */
template <class Kernel, class... Arguments>
void dp_host_launch(unsigned blocks, unsigned threads, Kernel kernel, Arguments... arguments) {
    for (unsigned block = 0; block < blocks; block++) {
        std::barrier<> together(threads);
        std::vector<std::thread> running;
        for (unsigned thread = 0; thread < threads; thread++)
            running.emplace_back([&, thread] {
                threadIdx.x = thread;
                blockIdx.x = block;
                blockDim.x = threads;
                gridDim.x = blocks;
                dp_host_block = &together;
                kernel(arguments...);
                together.arrive_and_drop();
            });
        for (auto &one : running)
            one.join();
    }
}

#endif
