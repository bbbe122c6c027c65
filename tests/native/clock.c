/* The offset of a device's clock (native/gpu/clock.h), against two clocks of which all is known: a
 * device's timer that runs too fast or too slow, launches and looks that take as long as chance has
 * it, pauses of days, and a CLOCK_REALTIME that is set.
 *
 * Usage: clock STAMPS SEED */
#include "harness.h"

#include "gpu/clock.h"

#define US   INT64_C(1000)
#define MS   INT64_C(1000000)
#define S    INT64_C(1000000000)
#define DAY  (86400 * S)
#define LATE 64 /* looks that the bound is worked out from */

struct look {
    int64_t at_ns, took_ns; /* when the stamp was made, and how long ago that was at the look */
};

struct world {
    struct dp_clock clock;
    int64_t now_ns, set_ns, epoch_ns;
    int64_t ppm; /* the timer's, against CLOCK_REALTIME */
    uint64_t seed;
    struct look looks[LATE];
    uint32_t n_looks;
};

/* What such a rate makes of so long a time. */
static int64_t drift_ns(int64_t ns, int64_t ppm) {
    return ns / 1000000 * ppm + ns % 1000000 * ppm / 1000000;
}

static int64_t realtime(const struct world *world) {
    return 1700000000 * S + world->now_ns + world->set_ns;
}

static int64_t timer(const struct world *world) {
    return world->epoch_ns + world->now_ns + drift_ns(world->now_ns, world->ppm);
}

static int64_t offset(const struct world *world) {
    return realtime(world) - timer(world);
}

static int64_t between(struct world *world, int64_t least, int64_t most) {
    return least + (int64_t)(random_next(&world->seed) % (uint64_t)(most - least + 1));
}

static void forget_looks(struct world *world) {
    world->n_looks = 0;
}

/* A kernel from its launch to the look at its stamp. */
static void stamp(struct world *world, int64_t launch_ns, int64_t back_ns) {
    int64_t before = realtime(world);
    world->now_ns += launch_ns;
    int64_t at = world->now_ns, reading = timer(world);
    world->now_ns += back_ns;
    dp_clock_see(&world->clock, before, reading, realtime(world));
    world->looks[world->n_looks++ % LATE] = (struct look){at, back_ns};
}

/* Mostly quick, sometimes an interrupt, now and then a thread that had to wait for its turn. */
static int64_t way_back(struct world *world) {
    uint32_t chance = random_below(&world->seed, 100);
    return chance < 80   ? between(world, 1 * US, 5 * US)
           : chance < 98 ? between(world, 5 * US, 80 * US)
                         : between(world, 1 * MS, 30 * MS);
}

/* How late a time may be told now: the rule's own words. */
static int64_t latest(const struct world *world) {
    int64_t actual = llabs(world->ppm), most = INT64_MAX;
    for (uint32_t i = 0; i < LATE && i < world->n_looks; i++) {
        const struct look *look = &world->looks[i];
        int64_t age = world->now_ns - look->at_ns;
        bool last = world->looks[(world->n_looks - 1) % LATE].at_ns == look->at_ns;
        if (!last && age >= DP_CLOCK_MEMORY_NS)
            continue;
        /* What is kept grows by the rule's drift from stamp to stamp, and by none since. */
        int64_t late = look->took_ns + (last ? 0 : drift_ns(age, DP_CLOCK_DRIFT_PPM)) +
                       drift_ns(age, actual) + LATE;
        most = late < most ? late : most;
    }
    return most;
}

static void check_now(const struct world *world, const char *when) {
    int64_t error = world->clock.offset_ns - offset(world);
    int64_t since = world->now_ns - world->looks[(world->n_looks - 1) % LATE].at_ns;
    int64_t early = 1 + (world->ppm < 0 ? drift_ns(since, -world->ppm) : 0);
    if (error < -early || error > latest(world))
        fail("%s, timer %+ld ppm: a time is told %ld ns late; allowed is -%ld to %ld", when,
             (long)world->ppm, (long)error, (long)early, (long)latest(world));
}

static struct world make_world(int64_t ppm, int64_t epoch_ns, uint64_t seed) {
    return (struct world){.ppm = ppm, .epoch_ns = epoch_ns, .seed = seed};
}

static const int64_t rates[] = {0, 10, -10, 100, -100, 200, -200, 500, -500};

/* Stamps in all rhythms, for days. */
static void drifts(uint32_t stamps, uint64_t seed) {
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
        struct world world = make_world(rates[i], i % 2 ? 5 * S : -7 * DAY, seed + i);
        for (uint32_t n = 0; n < stamps; n++) {
            stamp(&world, between(&world, 3 * US, 40 * US), way_back(&world));
            check_now(&world, "after a stamp");
            uint32_t chance = random_below(&world.seed, 1000);
            world.now_ns += chance < 900   ? between(&world, 1 * US, 2 * MS)
                            : chance < 995 ? between(&world, 2 * MS, 3 * S)
                                           : between(&world, 1 * S, 2 * 3600 * S);
            check_now(&world, "before the next one");
        }
    }
}

/* A look that came late does not show while one of late was quick. */
static void remembers_the_quick(void) {
    struct world world = make_world(10, 0, 1);
    stamp(&world, 10 * US, 1 * US);
    for (int i = 0; i < 10; i++) {
        world.now_ns += 10 * MS;
        stamp(&world, 10 * US, 5 * MS);
    }
    int64_t error = world.clock.offset_ns - offset(&world);
    if (error < 0 || error > 120 * US)
        fail("151 ms after a quick look a time is told %ld ns late", (long)error);
}

/* After a pause the next look counts, however late it is: the drift may have made more. */
static void forgets_after_a_pause(void) {
    for (int64_t pause = 61 * S; pause < 400 * DAY; pause *= 3) {
        for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
            struct world world = make_world(rates[i], 3 * DAY, 1);
            stamp(&world, 10 * US, 1 * US);
            world.now_ns += pause;
            stamp(&world, 10 * US, 20 * US);
            int64_t error = world.clock.offset_ns - offset(&world);
            if (error < -1 * US || error > 21 * US)
                fail("after %ld s at %+ld ppm a time is told %ld ns late", (long)(pause / S),
                     (long)rates[i], (long)error);
        }
    }
}

/* The next look after CLOCK_REALTIME was set is right at once, however it was set. */
static void follows_a_clock_that_is_set(void) {
    const int64_t steps[] = {50 * US, 1 * MS, 7 * MS, 1 * S, 3600 * S, 365 * DAY};
    for (size_t i = 0; i < 2 * sizeof steps / sizeof *steps; i++) {
        struct world world = make_world(-100, DAY, 1);
        int64_t step = i % 2 ? -steps[i / 2] : steps[i / 2];
        for (int n = 0; n < 20; n++, world.now_ns += 5 * MS)
            stamp(&world, 10 * US, way_back(&world));
        world.set_ns += step;
        forget_looks(&world);
        stamp(&world, 10 * US, 30 * US);
        check_now(&world, "after the clock was set");
        for (int n = 0; n < 20; n++, world.now_ns += 5 * MS) {
            stamp(&world, 10 * US, way_back(&world));
            check_now(&world, "later");
        }
    }
}

/* Set between a kernel's launch and its look: at most one stamp is told wrongly. */
static void follows_a_clock_that_is_set_meanwhile(void) {
    for (int64_t step = -10 * S; step <= 10 * S; step += 20 * S) {
        struct world world = make_world(0, 0, 1);
        stamp(&world, 10 * US, 2 * US);
        world.now_ns += MS;
        int64_t before = realtime(&world);
        world.now_ns += 10 * US;
        int64_t reading = timer(&world);
        world.set_ns += step;
        world.now_ns += 2 * US;
        dp_clock_see(&world.clock, before, reading, realtime(&world));
        world.now_ns += MS;
        forget_looks(&world);
        stamp(&world, 10 * US, 2 * US);
        check_now(&world, "the stamp after the one in which the clock was set");
    }
}

/* Where nothing was known, or the timer went back, the look alone counts, also when what stood
 * there before is within its bounds. */
static void keeps_nothing_that_it_does_not_know(void) {
    struct dp_clock first = {.timer_ns = 999}, back = {.timer_ns = 1001, .known = true};
    dp_clock_see(&first, 1000 - 8, 1000, 1000 + 8);
    dp_clock_see(&back, 1000 - 8, 1000, 1000 + 8);
    CHECK(first.offset_ns == 8 && first.timer_ns == 1000 && first.known);
    CHECK(back.offset_ns == 8 && back.timer_ns == 1000);
}

int main(int argc, char **argv) {
    uint32_t stamps = argument(argc, argv, 1, 20000);
    drifts(stamps, argument(argc, argv, 2, 1));
    keeps_nothing_that_it_does_not_know();
    remembers_the_quick();
    forgets_after_a_pause();
    follows_a_clock_that_is_set();
    follows_a_clock_that_is_set_meanwhile();
    printf("clock: %u stamps at each rate of the timer\n", stamps);
    return 0;
}
