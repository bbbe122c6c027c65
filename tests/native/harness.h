/* What the native test programs share: a seeded generator, a region with its eventfds, and races:
 * two sides that start together, again and again, and a list of the outcomes that are allowed.
 *
 * Nothing here orders what the two sides do to each other within a round, so ThreadSanitizer judges
 * the orderings of the code under test and not those of the test. */
#ifndef HARNESS_H
#define HARNESS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "atomics.h"
#include "region.h"

#define OUTCOMES_MAX 6

/* A wake-up that takes so long was lost. Mutants are told to be less patient. */
#ifndef LOST_MS
#define LOST_MS 10000
#endif

__attribute__((noreturn, format(printf, 1, 2))) static inline void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fputs("FAILED: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    _exit(1);
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            fail("%s:%d: %s", __FILE__, __LINE__, #condition);                                     \
    } while (0)

/* splitmix64: the same numbers from the same seed everywhere. */
static inline uint64_t random_next(uint64_t *seed) {
    uint64_t z = *seed += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

static inline uint32_t random_below(uint64_t *seed, uint32_t bound) {
    return (uint32_t)(random_next(seed) % bound);
}

/* The region and its words, unpacked as contract 1 says and not by the code's own macros ------- */

static inline uint64_t word_at(struct dp_region *region, uint32_t slot) {
    return dp_load_acquire(&region->states[slot]);
}

static inline int state_at(struct dp_region *region, uint32_t slot) {
    return (int)(word_at(region, slot) & 0xFF);
}

static inline uint32_t owner_at(struct dp_region *region, uint32_t slot) {
    return word_at(region, slot) >> 8 & 0xFFFF;
}

static inline uint64_t generation_at(struct dp_region *region, uint32_t slot) {
    return word_at(region, slot) >> 24;
}

static inline struct dp_region *region_new(uint32_t slots, uint32_t tokens, uint32_t listeners) {
    struct dp_geometry geometry = {.table = DP_TABLE_HOST,
                                   .slots = slots,
                                   .context = tokens,
                                   .max_output = tokens,
                                   .vocab_size = 50000,
                                   .listeners = listeners};
    int fd;
    struct dp_region *region = dp_region_create(&geometry, 1, UINT64_C(0xFFFFFFFFF0), &fd);
    CHECK(region);
    close(fd);
    region->doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    for (uint32_t i = 0; i < listeners; i++)
        region->outputs[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return region;
}

static inline void region_delete(struct dp_region *region) {
    close(region->doorbell);
    for (uint32_t i = 0; i < region->geometry.listeners; i++)
        close(region->outputs[i]);
    dp_region_close(region);
}

/* Brings a slot to FREE by legal verbs alone, whatever a round left it in. */
static inline void free_slot(struct dp_region *region, uint32_t slot) {
    static const int way_out[] = {[DP_WRITING] = DP_ABORT,
                                  [DP_READY] = DP_REVOKE,
                                  [DP_RUNNING] = DP_FINISH,
                                  [DP_CANCELLING] = DP_FINISH,
                                  [DP_DONE] = DP_RELEASE};
    while (state_at(region, slot) != DP_FREE)
        CHECK(dp_apply(region, slot, generation_at(region, slot),
                       way_out[state_at(region, slot)]) >= 0);
}

/* Claims the first free slot for `owner` and brings it to `state`, by legal verbs alone. */
static inline struct dp_claimed held_slot(struct dp_region *region, uint32_t owner, int state) {
    static const int way_in[] = {[DP_WRITING] = DP_PUBLISH,
                                 [DP_READY] = DP_TAKE,
                                 [DP_RUNNING] = DP_CANCEL,
                                 [DP_CANCELLING] = -1,
                                 [DP_DONE] = -1};
    struct dp_claimed claimed;
    uint32_t slots = region->geometry.slots;
    CHECK(dp_claim(region, owner, 0, slots, 0, slots, &claimed) == DP_OK);
    dp_describe(region, claimed.slot, 7, 1, region->geometry.max_output, 0, 0, 0, 0);
    int now = DP_WRITING;
    while (now != state) {
        int event = state == DP_DONE && now == DP_RUNNING ? DP_FINISH : way_in[now];
        now = dp_apply(region, claimed.slot, claimed.generation, event);
        CHECK(now >= 0);
    }
    return claimed;
}

/* Threads that start together ------------------------------------------------------------ */

struct gate {
    uint64_t arrived;
};

/* Returns once `n` threads are here, each time. */
static inline void gate_pass(struct gate *gate, uint64_t n) {
    uint64_t mine = __atomic_fetch_add(&gate->arrived, 1, __ATOMIC_ACQ_REL);
    uint64_t all_here = (mine / n + 1) * n;
    for (unsigned spin = 0; dp_load_acquire(&gate->arrived) < all_here; spin++) {
        if (spin % 256 == 255)
            sched_yield();
        dp_cpu_relax();
    }
}

/* Gives each side a processor of its own where there are two: on a shared one nothing races. */
static inline void pin(int side) {
    cpu_set_t allowed, mine;
    if (sched_getaffinity(0, sizeof allowed, &allowed) < 0 || CPU_COUNT(&allowed) < 2)
        return;
    int cpu = 0;
    for (int nth = -1; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && ++nth == side)
            break;
    CPU_ZERO(&mine);
    CPU_SET(cpu, &mine);
    pthread_setaffinity_np(pthread_self(), sizeof mine, &mine);
}

static inline int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Races ------------------------------------------------------------ */

/* What the sides of one round see. `got[side]` is theirs to fill; everything else was there before.
 */
struct round {
    struct dp_region *region;
    struct dp_claimed held;
    uint64_t seed;
    int got[2];
    int then[2];
    struct dp_claimed claimed[2];
};

struct race {
    const char *name;
    void (*prepare)(struct round *round);
    void (*side[2])(struct round *round);
    /* Which outcome this was (an index into `outcomes`), or -1: one that is not allowed. */
    int (*judge)(struct round *round);
    const char *outcomes[OUTCOMES_MAX];
    uint32_t slots;
};

struct match {
    const struct race *race;
    struct round *round;
    struct gate gate;
    uint32_t rounds;
    int64_t start_ns;
    uint64_t seed[2];
};

/* Both sides aim at the same moment, each a little late by chance, now by few nanoseconds and now
 * by the length of a side. */
static inline void race_step(struct match *match, int side) {
    gate_pass(&match->gate, 2);
    uint32_t late = random_below(&match->seed[side], 60);
    late <<= random_below(&match->seed[side], 6);
    while (monotonic_ns() < match->start_ns + late)
        dp_cpu_relax();
    match->race->side[side](match->round);
    gate_pass(&match->gate, 2);
}

static inline void *other_side(void *argument) {
    struct match *match = argument;
    pin(1);
    for (uint32_t i = 0; i < match->rounds; i++)
        race_step(match, 1);
    return NULL;
}

/* Runs a race for so many rounds, and prints how often each outcome was seen. */
static inline void run_race(const struct race *race, uint32_t rounds, uint64_t seed) {
    struct round round = {.region = region_new(race->slots, 64, 2), .seed = seed};
    struct match match = {race, &round, {0}, rounds, 0, {seed + 1, seed + 2}};
    uint32_t seen[OUTCOMES_MAX] = {0};
    pthread_t other;
    cpu_set_t everywhere;
    sched_getaffinity(0, sizeof everywhere, &everywhere);
    CHECK(pthread_create(&other, NULL, other_side, &match) == 0);
    pin(0);
    for (uint32_t i = 0; i < rounds; i++) {
        for (uint32_t slot = 0; slot < race->slots; slot++)
            free_slot(round.region, slot);
        race->prepare(&round);
        match.start_ns = monotonic_ns() + 1500;
        race_step(&match, 0);
        int outcome = race->judge(&round);
        if (outcome < 0)
            fail("%s: round %u of seed %llu: sides got %d, %d, then %d, %d; word %#llx", race->name,
                 i, (unsigned long long)seed, round.got[0], round.got[1], round.then[0],
                 round.then[1], (unsigned long long)word_at(round.region, 0));
        seen[outcome]++;
    }
    pthread_join(other, NULL);
    sched_setaffinity(0, sizeof everywhere, &everywhere);
    printf("%s:", race->name);
    for (int i = 0; i < OUTCOMES_MAX && race->outcomes[i]; i++)
        printf("%s %s %u", i ? "," : "", race->outcomes[i], seen[i]);
    printf("\n");
    region_delete(round.region);
}

static inline uint32_t argument(int argc, char **argv, int index, uint32_t otherwise) {
    return argc > index ? (uint32_t)strtoul(argv[index], NULL, 10) : otherwise;
}

#endif
