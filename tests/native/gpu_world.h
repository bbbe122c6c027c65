/* The world of gpu_traffic.cpp: a region, its words as a device has them, the kernels on host
 * threads, and what a request's ids have to be. */
#ifndef GPU_WORLD_H
#define GPU_WORLD_H

#include "host_cuda.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#ifdef MUTANT
#include "gpu_mutants.h"
#endif
#include "gpu_driver.cpp"
#include "gpu_host.cpp"

extern "C" {
#include "admission_loop.h"
#include "commands.h"
#include "tokens.h"
#include "turn.h"
}

#define LISTENERS 2
#define SLOTS     2
#define TOKENS    40
#define PIECE     7 /* ids that a model emits in a turn */
#ifndef LIMIT_MS
#define LIMIT_MS 10000 /* a verdict or an answer that takes so long is lost */
#endif

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fflush(stdout);                                                                        \
            fprintf(stderr, "FAILED: %s:%d: %s\n", __FILE__, __LINE__, #condition);                \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

namespace {

uint64_t random_next(uint64_t *seed) {
    uint64_t z = *seed += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

uint32_t random_below(uint64_t *seed, uint32_t bound) {
    return (uint32_t)(random_next(seed) % bound);
}

int64_t now_ms() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Flags between the threads of this program: relaxed, so that they order nothing. */
struct Flag {
    uint32_t value = 0;
    void set() { __atomic_store_n(&value, 1, __ATOMIC_RELAXED); }
    bool is_set() const { return __atomic_load_n(&value, __ATOMIC_RELAXED); }
};

struct World {
    dp_region *region;
    dp_device *device;
    Flag stop;
    bool has_clock;       /* an admission thread keeps the device's clock with the host's */
    uint32_t engine_took; /* by the engine of the host's, which alone writes it */
    /* Who holds a slot, written by its holder alone: a slot held twice is a race on it. */
    uint32_t holders[SLOTS];
};

World make_world(uint32_t slots) {
    dp_geometry geometry = {DP_TABLE_DEVICE, slots, TOKENS, TOKENS, 50000, LISTENERS};
    int fd;
    World world{};
    world.region = dp_region_create(&geometry, 1, UINT64_C(0xFFFFFFFFF0), &fd);
    CHECK(world.region);
    close(fd);
    world.region->doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    for (int i = 0; i < LISTENERS; i++)
        world.region->outputs[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    world.device = (dp_device *)calloc(1, dp_device_bytes(world.region));
    dp_device_image(world.region, (uint64_t)world.region->base, (uint64_t)world.device,
                    world.device);
    return world;
}

void end_world(World *world) {
    close(world->region->doorbell);
    for (int i = 0; i < LISTENERS; i++)
        close(world->region->outputs[i]);
    free(world->device);
    dp_region_close(world->region);
}

uint32_t length_of(uint64_t request) {
    return 1 + request * 7 % TOKENS;
}

uint32_t nth_id(uint64_t request, uint32_t n) {
    return (request * 2654435761u + n * 40503u) % 50000;
}

void all_free(World *world) {
    for (int i = 0; i < 1000; i++) {
        bool free = true;
        for (uint32_t slot = 0; slot < world->region->geometry.slots; slot++)
            free &= dp_word_state(dp_gpu_load_acquire(&world->device->words[slot])) == DP_FREE &&
                    dp_word_state(dp_word_now(world->region, slot)) == DP_FREE;
        if (free)
            return;
        usleep(2000);
    }
    CHECK(!"every slot is free in the end, in the device and in the mirrors");
}

} // namespace

#endif
