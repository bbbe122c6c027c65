/* The host's half of what bench/gpu.py measures: loops that the interpreter would blur, with their
 * times in ns. A library; bench/gpu.py compiles it. */
#include <errno.h>
#include <stdint.h>
#include <time.h>

#include "gpu/commands.h"

enum { WORDS = 8, LATE = -100, TORN = -101 };

/* Below this a pause spins: a sleep would take longer. */
enum { SHORTEST_SLEEP_NS = 200000 };

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void rest(int64_t ns) {
    int64_t until = now_ns() + ns;
    struct timespec left = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    if (ns >= SHORTEST_SLEEP_NS)
        while (nanosleep(&left, &left) && errno == EINTR)
            ;
    while (now_ns() < until)
        ;
}

/* Seven words and a flag there, and as many back, `rounds` times; dp_bench_pong is the other side.
 * 0, LATE past the time limit, or TORN when a flag came before its words. */
int bench_pong(uint64_t *lines, uint32_t rounds, int64_t limit_ns, uint32_t *times_ns) {
    uint64_t *ping = lines, *pong = lines + WORDS;
    int64_t until = now_ns() + limit_ns;
    for (uint64_t round = 1; round <= rounds; round++) {
        int64_t start = now_ns();
        for (uint64_t i = 0; i < WORDS - 1; i++)
            ping[i] = round * WORDS + i;
        __atomic_store_n(&ping[WORDS - 1], round, __ATOMIC_RELEASE);
        for (uint32_t looks = 1; __atomic_load_n(&pong[WORDS - 1], __ATOMIC_ACQUIRE) != round;)
            if (++looks % 4096 == 0 && now_ns() > until)
                return LATE;
        int64_t end = now_ns();
        for (uint64_t i = 0; i < WORDS - 1; i++)
            if (pong[i] != round * WORDS + i + 1)
                return TORN;
        times_ns[round - 1] = (uint32_t)(end - start);
    }
    return 0;
}

typedef int admit_fn(struct dp_commands *, uint32_t, uint32_t, uint32_t, uint32_t, uint64_t,
                     uint32_t, uint32_t, uint32_t, float, float, uint32_t, uint32_t,
                     struct dp_claimed *);
typedef int let_go_fn(struct dp_commands *, uint32_t, uint64_t);
typedef int pending_fn(struct dp_region *);

/* The verbs, which are another library's. */
struct verbs {
    admit_fn *admit;
    let_go_fn *let_go;
    pending_fn *pending;
};

/* Claims a slot and lets it go, `count` times; the claim alone is timed, and begins `pause_ns`
 * after the device has carried out what came before. 0, or the status of the claim that failed. */
int bench_claims(const struct verbs *verbs, struct dp_commands *commands, struct dp_region *region,
                 uint32_t slots, uint32_t count, int64_t pause_ns, int64_t limit_ns,
                 uint32_t *times_ns) {
    int64_t until = now_ns() + limit_ns;
    struct dp_claimed claimed;
    for (uint32_t i = 0; i < count; i++) {
        int64_t start = now_ns();
        int status =
            verbs->admit(commands, 0, slots, i % slots, slots, i, 1, 4, 1, 0, 0, 0, 0, &claimed);
        times_ns[i] = (uint32_t)(now_ns() - start);
        if (status < 0)
            return status;
        if (verbs->let_go(commands, claimed.slot, claimed.generation) < 0)
            return DP_ILLEGAL;
        while (verbs->pending(region))
            if (now_ns() > until)
                return LATE;
        rest(pause_ns);
    }
    return 0;
}
