/* CUDA's driver on host threads, in one library with gpu_host.cpp: what native/gpu/driver.h calls,
 * so that the admission thread runs as it is, and what the tests have of a device: kernels that
 * never end, calls that fail, and a count of what was launched. A context is a device here. */
#include <string.h>
#include <time.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>

extern "C" {
#include "driver.h"

void *host_launch(const char *name, unsigned blocks, unsigned threads, const uint64_t *arguments);
int host_done(void *launch);
void host_wait(void *launch);
}

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, CAPTURE_UNSUPPORTED = 900, MOST_ARGUMENTS = 8 };

struct CUctx_st {
    std::atomic<bool> stuck{false};
    std::atomic<bool> capturing{false}; /* some thread does, in the mode that is the default */
    std::mutex lock;
    std::map<std::string, int> failures;
    std::map<std::string, unsigned> calls, launched;
};

struct CUstream_st {
    CUctx_st *gpu;
    void *running = nullptr;
    std::mutex lock{}; /* held by whoever waits for what runs, or puts another in its place */
};

/* A kernel and the types of its arguments: an address or a number of 32 bits. */
struct CUfunc_st {
    const char *name;
    const char *arguments;
};

namespace {

thread_local CUctx_st *current;
thread_local int capture_mode; /* 0: this thread has a part in every capture */

CUfunc_st functions[] = {
    {"dp_admission_tick", "an"},
    {"dp_admission_resident", "ann"},
};

/* Counts a call; what it is to fail with. */
int called(CUctx_st *gpu, const char *name) {
    if (!gpu)
        return 0;
    std::lock_guard<std::mutex> locked(gpu->lock);
    gpu->calls[name]++;
    if (gpu->capturing && !capture_mode && !strncmp(name, "cuStream", strlen("cuStream")))
        return CAPTURE_UNSUPPORTED;
    auto failure = gpu->failures.find(name);
    return failure == gpu->failures.end() ? 0 : failure->second;
}

/* The stream's lock is held. */
void end_running(CUstream stream) {
    if (stream->running)
        host_wait(stream->running);
    stream->running = nullptr;
}

bool is_done(CUstream stream) {
    std::unique_lock<std::mutex> locked(stream->lock, std::try_to_lock);
    if (!locked)
        return false;
    if (stream->running && host_done(stream->running))
        end_running(stream);
    return !stream->running && !stream->gpu->stuck;
}

void wait_for_running(CUstream stream) {
    std::lock_guard<std::mutex> locked(stream->lock);
    end_running(stream);
}

void wait_for(CUstream stream) {
    const timespec nap = {0, 1000000};
    wait_for_running(stream);
    while (stream->gpu->stuck)
        nanosleep(&nap, nullptr);
}

} // namespace

extern "C" {

/* The driver ------------------------------------------------------------------------------------
 */

int cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return called(current, "cuCtxGetCurrent");
}

int cuCtxSetCurrent(CUcontext context) {
    current = context;
    return called(context, "cuCtxSetCurrent");
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    if (int failure = called(current, "cuThreadExchangeStreamCaptureMode"))
        return failure;
    std::swap(*mode, capture_mode);
    return 0;
}

/* Launches that run one after the other, beside their caller. */
void host_stream_launch(CUstream stream, const char *name, unsigned blocks, unsigned threads,
                        const uint64_t *arguments) {
    {
        std::lock_guard<std::mutex> locked(stream->gpu->lock);
        stream->gpu->launched[name]++;
    }
    if (stream->gpu->stuck)
        return;
    std::lock_guard<std::mutex> locked(stream->lock);
    end_running(stream);
    stream->running = host_launch(name, blocks, threads, arguments);
}

int cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned, unsigned, unsigned block_x,
                   unsigned, unsigned, unsigned, CUstream stream, void **arguments, void **) {
    if (stream->gpu != current)
        return INVALID_CONTEXT;
    if (int failure = called(current, "cuLaunchKernel"))
        return failure;
    uint64_t numbers[MOST_ARGUMENTS] = {};
    for (size_t i = 0; function->arguments[i]; i++)
        numbers[i] = function->arguments[i] == 'a' ? *static_cast<uint64_t *>(arguments[i])
                                                   : *static_cast<uint32_t *>(arguments[i]);
    host_stream_launch(stream, function->name, grid_x, block_x, numbers);
    return 0;
}

int cuStreamQuery(CUstream stream) {
    if (int failure = called(stream->gpu, "cuStreamQuery")) {
        wait_for_running(stream); /* the error is a kernel's that is over */
        return failure;
    }
    return is_done(stream) ? 0 : DP_CUDA_NOT_READY;
}

int cuStreamSynchronize(CUstream stream) {
    if (int failure = called(stream->gpu, "cuStreamSynchronize")) {
        wait_for_running(stream);
        return failure;
    }
    wait_for(stream);
    return 0;
}

int cuGetErrorName(int result, const char **text) {
    *text = result == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr;
    return *text ? 0 : INVALID_VALUE;
}

int cuGetErrorString(int result, const char **text) {
    *text = result == 719 ? "unspecified launch failure" : nullptr;
    return *text ? 0 : INVALID_VALUE;
}

/* What the tests have of it ---------------------------------------------------------------------
 */

CUcontext host_gpu() {
    return new CUctx_st;
}

CUstream host_stream(CUcontext gpu) {
    return new CUstream_st{gpu};
}

CUfunction host_function(const char *name) {
    for (auto &one : functions)
        if (!strcmp(one.name, name))
            return &one;
    return nullptr;
}

void host_make_current(CUcontext gpu) {
    current = gpu;
}

int host_stream_done(CUstream stream) {
    return is_done(stream);
}

void host_stream_wait(CUstream stream) {
    wait_for(stream);
}

/* While it is stuck, no kernel ends. */
void host_stuck(CUcontext gpu, int stuck) {
    gpu->stuck = stuck;
}

/* Have a thread that is none of those here capture a graph, or end that. */
void host_capture(CUcontext gpu, int capturing) {
    gpu->capturing = capturing;
}

/* Have a call of the driver fail from now on; with 0, no more. */
void host_fail(CUcontext gpu, const char *call, int result) {
    std::lock_guard<std::mutex> locked(gpu->lock);
    gpu->failures[call] = result;
}

/* How often a call of the driver was made. */
unsigned host_calls(CUcontext gpu, const char *call) {
    std::lock_guard<std::mutex> locked(gpu->lock);
    return gpu->calls[call];
}

/* How often a kernel was launched. */
unsigned host_launched(CUcontext gpu, const char *kernel) {
    std::lock_guard<std::mutex> locked(gpu->lock);
    return gpu->launched[kernel];
}
}
