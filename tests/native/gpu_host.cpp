/* The kernels as a shared library on host threads, for the tests in Python: launches that run
 * beside their caller, and the runtime's verbs one by one. */
#include "host_cuda.h"

#include <string.h>

#include <atomic>
#include <string>

#include "kernels.cu"

struct uint4 {
    unsigned x, y, z, w;
};
#include "../../bench/gpu_kernels.cu"

namespace {

struct Launch {
    std::atomic<bool> done{false};
    std::thread thread;
};

/* Arguments as they come from Python: addresses and numbers. */
void run(const char *name, unsigned blocks, unsigned threads, const uint64_t *arguments) {
    auto *device = reinterpret_cast<dp_device *>(arguments[0]);
    if (!strcmp(name, "dp_admission_tick"))
        dp_host_launch(1, threads, dp_admission_tick, device, (unsigned)arguments[1]);
    else if (!strcmp(name, "dp_admission_resident"))
        dp_host_launch(1, threads, dp_admission_resident, device, (unsigned)arguments[1],
                       (unsigned)arguments[2]);
    else if (!strcmp(name, "dp_echo"))
        dp_host_launch(blocks, threads, dp_echo, (const dp_device *)device,
                       reinterpret_cast<dp_echo_job *>(arguments[1]), (unsigned)arguments[2],
                       (unsigned)arguments[3]);
    else if (!strcmp(name, "dp_engine_turn"))
        dp_host_launch(1, threads, dp_engine_turn, (const dp_device *)device,
                       reinterpret_cast<dp_turn *>(arguments[1]));
    else if (!strcmp(name, "dp_bench_pong"))
        dp_host_launch(1, 1, dp_bench_pong, reinterpret_cast<uint64_t *>(arguments[0]),
                       (unsigned)arguments[1], (unsigned)arguments[2]);
    else if (!strcmp(name, "dp_bench_read"))
        dp_host_launch(blocks, threads, dp_bench_read,
                       reinterpret_cast<const uint32_t *>(arguments[0]),
                       reinterpret_cast<uint32_t *>(arguments[1]), (unsigned)arguments[2]);
}

} // namespace

extern "C" {

int host_knows(const char *name) {
    return !strcmp(name, "dp_admission_tick") || !strcmp(name, "dp_admission_resident") ||
           !strcmp(name, "dp_echo") || !strcmp(name, "dp_engine_turn") ||
           !strcmp(name, "dp_bench_pong") || !strcmp(name, "dp_bench_read");
}

void *host_launch(const char *name, unsigned blocks, unsigned threads, const uint64_t *arguments) {
    auto *launch = new Launch;
    uint64_t copy[4];
    memcpy(copy, arguments, sizeof copy);
    launch->thread = std::thread([=, kernel = std::string(name)] {
        run(kernel.c_str(), blocks, threads, copy);
        launch->done.store(true, std::memory_order_release);
    });
    return launch;
}

int host_done(void *launch) {
    return static_cast<Launch *>(launch)->done.load(std::memory_order_acquire);
}

void host_wait(void *launch) {
    static_cast<Launch *>(launch)->thread.join();
    delete static_cast<Launch *>(launch);
}

/* How the device's timer runs from now on. */
void host_set_timer(int64_t ahead_ns, int64_t ppm) {
    dp_host_timer_ahead_ns = ahead_ns;
    dp_host_timer_ppm = ppm;
}

size_t host_echo_job_bytes() {
    return sizeof(dp_echo_job);
}

int host_take(const dp_device *device, uint32_t slot, uint64_t *generation) {
    return dp_slot_take(device, slot, generation);
}

int host_emit(const dp_device *device, uint32_t slot, uint64_t generation, const int32_t *ids,
              uint32_t count) {
    return dp_slot_emit(device, slot, generation, ids, count);
}

int host_is_cancelled(const dp_device *device, uint32_t slot, uint64_t generation) {
    return dp_slot_is_cancelled(device, slot, generation);
}

int host_finish(const dp_device *device, uint32_t slot, uint64_t generation, uint32_t reason) {
    return dp_slot_finish(device, slot, generation, reason);
}
}
