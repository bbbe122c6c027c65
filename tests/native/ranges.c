/* The pool and the range sets of the packet pump: each against a plain model, under random use.
 *
 * Usage: ranges STEPS SEED */
#include "harness.h"

#include "quic/pool.h"
#include "quic/ranges.h"

/* Range sets: the model is one flag for each number ---------------------------------------------
 */

#define NUMBERS 300

struct model {
    bool has[NUMBERS];
};

static uint32_t count_runs(const struct model *model) {
    uint32_t runs = 0;
    for (uint32_t i = 0; i < NUMBERS; i++)
        runs += model->has[i] && (i == 0 || !model->has[i - 1]);
    return runs;
}

static void compare(const struct dp_ranges *ranges, const struct model *model) {
    struct model seen = {0};
    for (uint32_t i = 0; i < ranges->count; i++) {
        const struct dp_range *range = &ranges->range[i];
        if (range->from >= range->to || range->to > NUMBERS)
            fail("range %u is [%lu, %lu)", i, range->from, range->to);
        if (i && range->from <= range[-1].to)
            fail("ranges %u and %u touch at %lu", i - 1, i, range->from);
        memset(seen.has + range->from, 1, range->to - range->from);
    }
    for (uint32_t i = 0; i < NUMBERS; i++) {
        if (seen.has[i] != model->has[i])
            fail("number %u: expected %d, the ranges say %d", i, model->has[i], seen.has[i]);
        if (dp_ranges_have(ranges, i) != model->has[i])
            fail("dp_ranges_have(%u): expected %d", i, model->has[i]);
    }
}

static void check_add(struct dp_ranges *ranges, struct dp_pool *pool, struct model *model,
                      uint32_t limit, uint32_t from, uint32_t to, bool value) {
    struct model wanted = *model;
    bool touches = false;
    for (uint32_t i = from; i < to; i++) {
        touches |= model->has[i];
        wanted.has[i] = value;
    }
    CHECK(dp_ranges_touch(ranges, from, to) == touches);
    uint32_t before = count_runs(model), after = count_runs(&wanted);
    /* More than the limit is refused, unless the set does not grow by it. */
    bool fits = after <= limit || after <= before;
    bool done;
    if (value) {
        CHECK(dp_ranges_fits(ranges, limit, from, to) == fits);
        done = dp_ranges_add(ranges, pool, limit, from, to);
    } else {
        done = dp_ranges_remove(ranges, pool, limit, from, to);
    }
    if (done != fits)
        fail("%s [%u, %u) with %u of %u ranges: expected %d", value ? "add" : "remove", from, to,
             before, limit, fits);
    if (done)
        *model = wanted;
}

static void step(struct dp_ranges *ranges, struct dp_pool *pool, struct model *model,
                 uint64_t *seed) {
    uint32_t limit = 1 + random_below(seed, 40);
    uint32_t from = random_below(seed, NUMBERS);
    uint32_t most = random_below(seed, 16) ? 8 : NUMBERS;
    uint32_t to = from + random_below(seed, most);
    to = to > NUMBERS ? NUMBERS : to;
    uint32_t what = random_below(seed, 100);
    if (what < 70) {
        check_add(ranges, pool, model, limit, from, to, true);
    } else if (what < 95) {
        check_add(ranges, pool, model, limit, from, to, false);
    } else if (what < 98) {
        from = random_below(seed, NUMBERS / 4);
        dp_ranges_trim(ranges, from);
        memset(model->has, 0, from);
    } else {
        dp_ranges_drop_lowest(ranges);
        uint32_t i = 0;
        while (i < NUMBERS && !model->has[i])
            i++;
        while (i < NUMBERS && model->has[i])
            model->has[i++] = false;
    }
}

static void random_ranges(uint32_t steps, uint64_t seed) {
    struct dp_pool *pool = dp_pool_new();
    struct dp_ranges ranges = {0};
    struct model model = {0};
    for (uint32_t i = 0; i < steps; i++) {
        step(&ranges, pool, &model, &seed);
        compare(&ranges, &model);
    }
    dp_ranges_free(&ranges, pool);
    CHECK(ranges.count == 0 && ranges.room == 0);
    CHECK(dp_pool_out(pool) == 0);
    dp_pool_free(pool);
}

static void edges_of_ranges(void) {
    struct dp_pool *pool = dp_pool_new();
    struct dp_ranges ranges = {0};
    /* An empty set answers, and gives nothing back. */
    CHECK(!dp_ranges_have(&ranges, 0) && !dp_ranges_touch(&ranges, 0, UINT64_MAX));
    CHECK(dp_ranges_remove(&ranges, pool, 0, 0, UINT64_MAX));
    dp_ranges_trim(&ranges, 5);
    dp_ranges_drop_lowest(&ranges);
    CHECK(!dp_ranges_add(&ranges, pool, 0, 1, 2) && dp_pool_out(pool) == 0);
    /* What is empty is added by doing nothing. */
    CHECK(dp_ranges_add(&ranges, pool, 0, 2, 2) && ranges.count == 0);
    CHECK(dp_ranges_add(&ranges, pool, 1, 7, UINT64_MAX));
    CHECK(dp_ranges_have(&ranges, UINT64_MAX - 1) && !dp_ranges_have(&ranges, UINT64_MAX));
    CHECK(!dp_ranges_touch(&ranges, 0, 7) && dp_ranges_touch(&ranges, 0, 8));
    /* At the limit: one that touches still fits, and one apart does not. */
    CHECK(dp_ranges_add(&ranges, pool, 1, 6, 7) && !dp_ranges_add(&ranges, pool, 1, 3, 5));
    CHECK(ranges.count == 1 && ranges.range[0].from == 6);
    dp_ranges_free(&ranges, pool);
    dp_pool_free(pool);
}

/* The pool --------------------------------------------------------------------------------------
 */

#define HELD 400

struct held {
    uint8_t *memory;
    size_t asked, room;
    uint8_t fill;
};

static size_t class_of(size_t bytes) {
    size_t class = 64;
    while (class < bytes)
        class *= 2;
    return bytes > 1048576 ? bytes : class;
}

static void take(struct dp_pool *pool, struct held *held, uint64_t *seed, size_t *out) {
    size_t asked = 1 + random_below(seed, 1U << (1 + random_below(seed, 22)));
    held->asked = asked;
    held->memory = dp_pool_take(pool, asked, random_below(seed, 2) ? &held->room : NULL);
    CHECK(held->memory && (uintptr_t)held->memory % 16 == 0);
    if (held->room && held->room != class_of(asked))
        fail("%zu bytes: expected room for %zu, got %zu", asked, class_of(asked), held->room);
    *out += class_of(asked);
    held->fill = (uint8_t)random_next(seed);
    memset(held->memory, held->fill, held->room ? held->room : asked);
}

static void give(struct dp_pool *pool, struct held *held, size_t *out) {
    size_t bytes = held->room ? held->room : held->asked;
    for (size_t i = 0; i < bytes; i++)
        if (held->memory[i] != held->fill)
            fail("byte %zu of %zu was overwritten by another holder", i, bytes);
    dp_pool_give(pool, held->memory, bytes);
    *out -= class_of(held->asked);
    *held = (struct held){0};
}

static void random_pool(uint32_t steps, uint64_t seed) {
    struct dp_pool *pool = dp_pool_new();
    struct held held[HELD] = {0};
    size_t out = 0;
    for (uint32_t i = 0; i < steps; i++) {
        struct held *one = &held[random_below(&seed, HELD)];
        if (one->memory)
            give(pool, one, &out);
        else
            take(pool, one, &seed, &out);
        if (dp_pool_out(pool) != out)
            fail("step %u: expected %zu bytes out, got %zu", i, out, dp_pool_out(pool));
    }
    for (uint32_t i = 0; i < HELD; i++)
        if (held[i].memory)
            give(pool, &held[i], &out);
    CHECK(dp_pool_out(pool) == 0);
    dp_pool_free(pool);
}

static void keeps_what_it_has(void) {
    static void *memory[1000];
    struct dp_pool *pool = dp_pool_new();
    uint64_t before = 0;
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 1000; i++)
            CHECK((memory[i] = dp_pool_take(pool, 64 << i % 8, NULL)));
        for (uint32_t i = 0; i < 1000; i++)
            dp_pool_give(pool, memory[i], 64 << i % 8);
        if (round && dp_pool_allocations(pool) != before)
            fail("a second round of the same sizes allocated: %lu calls, expected %lu",
                 dp_pool_allocations(pool), before);
        before = dp_pool_allocations(pool);
    }
    /* 125 of 8 KiB are calls of their own; 875 of up to 4 KiB, 1,016,000 bytes, are chunks. */
    if (before > 125 + 20)
        fail("a thousand objects were %lu allocations, expected at most 145", before);
    /* Beyond the largest class it is the allocator's own memory, to the byte. */
    void *large = dp_pool_take(pool, 1048577, NULL);
    CHECK(large && dp_pool_out(pool) == 1048577);
    CHECK(dp_pool_allocations(pool) == before + 1);
    dp_pool_give(pool, large, 1048577);
    dp_pool_give(pool, NULL, 64);
    CHECK(dp_pool_out(pool) == 0);
    dp_pool_free(pool);
}

/* The end of a chunk that is too small for what is wanted is not lost. */
static void wastes_no_chunk(void) {
    void *memory[32];
    struct dp_pool *pool = dp_pool_new();
    /* Fifteen of 4 KiB fill a chunk of 64 KiB, up to something more than 2 KiB. */
    for (int i = 0; i < 32; i++)
        CHECK((memory[i] = dp_pool_take(pool, i < 30 ? 4096 : 2048, NULL)));
    if (dp_pool_allocations(pool) != 2)
        fail("expected 2 chunks for 124 KiB, got %lu", dp_pool_allocations(pool));
    for (int i = 0; i < 32; i++)
        dp_pool_give(pool, memory[i], i < 30 ? 4096 : 2048);
    CHECK(dp_pool_out(pool) == 0);
    dp_pool_free(pool);
}

int main(int argc, char **argv) {
    uint32_t steps = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 20000;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    edges_of_ranges();
    random_ranges(steps, seed);
    keeps_what_it_has();
    wastes_no_chunk();
    random_pool(steps, seed);
    printf("ranges: %u steps against a plain set\n", steps);
    return 0;
}
