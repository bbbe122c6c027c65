/* See latency.h. A slice is emptied by the first value that falls into its place a turn later, so
 * recording allocates and sweeps nothing.
 *
 * What is counted is written by one thread: its counters need no read-modify-write, only stores
 * that another thread may load at any time. */
#include "latency.h"

#include <stdlib.h>
#include <string.h>

#include "atomics.h"

#define HALF_BITS                                                                                  \
    10 /* three digits: 2048 sub-buckets, of which each bucket but the first uses half */
#define HALF (1u << HALF_BITS)

#define SHORT_SLICES 11 /* of 1 s: ten whole ones and the one being filled */
#define LONG_SLICES  31 /* of 10 s */
#define LONG_S       10

struct slice {
    uint64_t turn; /* which second, or ten seconds, this is; 0: none yet */
    uint32_t top;  /* one past the highest bucket in use */
    uint32_t counts[DP_LATENCY_BUCKETS];
};

struct series {
    uint64_t within[DP_LATENCY_BOUNDS + 1]; /* since the start; the last: beyond every bound */
    uint64_t sum_us;
    struct slice short_slices[SHORT_SLICES];
    struct slice long_slices[LONG_SLICES];
};

struct dp_latency {
    uint32_t count;
    struct series series[];
};

const uint32_t dp_latency_bounds_us[DP_LATENCY_BOUNDS] = {
    10,    25,     50,     100,    250,     500,     1000,    2500,     5000,     10000,    25000,
    50000, 100000, 250000, 500000, 1000000, 2500000, 5000000, 10000000, 30000000, 60000000,
};

struct dp_latency *dp_latency_new(uint32_t series) {
    struct dp_latency *latency =
        calloc(1, sizeof *latency + (size_t)series * sizeof(struct series));
    if (latency)
        latency->count = series;
    return latency;
}

void dp_latency_free(struct dp_latency *latency) {
    free(latency);
}

uint32_t dp_latency_bucket(int64_t value_us) {
    uint64_t value = value_us < 0 ? 0 : (uint64_t)value_us;
    if (value > DP_LATENCY_MAX_US)
        value = DP_LATENCY_MAX_US;
    uint32_t bucket = 63u - (uint32_t)__builtin_clzll(value | (2 * HALF - 1)) - HALF_BITS;
    return (uint32_t)(((bucket + 1) << HALF_BITS) + (value >> bucket)) - HALF;
}

int64_t dp_latency_bucket_high(uint32_t index) {
    uint32_t bucket = index >> HALF_BITS;
    uint64_t sub = index & (HALF - 1);
    if (bucket == 0)
        return (int64_t)sub;
    bucket--;
    return (int64_t)((((sub + HALF) + 1) << bucket) - 1);
}

/* The writer's own loads need no order; whatever it read it wrote itself. */
static void add(uint64_t *sum, uint64_t value) {
    dp_store_relaxed(sum, dp_load_relaxed(sum) + value);
}

/* Nobody's while it is emptied. The turn is released last, to the acquire in dp_latency_window: who
 * sees it does not see counts of the turn before. */
static void empty(struct slice *slice, uint64_t turn) {
    uint32_t top = dp_load_flag(&slice->top);
    dp_store_relaxed(&slice->turn, 0);
    dp_store_flag(&slice->top, 0);
    for (uint32_t bucket = 0; bucket < top; bucket++)
        dp_store_flag(&slice->counts[bucket], 0);
    dp_store_release(&slice->turn, turn);
}

static void count_in(struct slice *slice, uint64_t turn, uint32_t bucket) {
    if (dp_load_relaxed(&slice->turn) != turn)
        empty(slice, turn);
    dp_store_flag(&slice->counts[bucket], dp_load_flag(&slice->counts[bucket]) + 1);
    if (bucket >= dp_load_flag(&slice->top))
        dp_store_flag(&slice->top, bucket + 1);
}

void dp_latency_record(struct dp_latency *latency, uint32_t series, int64_t value_us,
                       uint64_t now_s) {
    if (series >= latency->count)
        return;
    struct series *of = &latency->series[series];
    uint64_t value = value_us < 0 ? 0 : (uint64_t)value_us;
    uint32_t bucket = dp_latency_bucket(value_us), bound = 0;
    /* Turns count from 1, so that a slice of zeros is nobody's. */
    uint64_t turn = now_s + 1, long_turn = now_s / LONG_S + 1;
    count_in(&of->short_slices[turn % SHORT_SLICES], turn, bucket);
    count_in(&of->long_slices[long_turn % LONG_SLICES], long_turn, bucket);
    while (bound < DP_LATENCY_BOUNDS && value > dp_latency_bounds_us[bound])
        bound++;
    add(&of->within[bound], 1);
    add(&of->sum_us, value);
}

void dp_latency_record_pair(struct dp_latency *latency, uint32_t series, int64_t first_us,
                            int64_t second_us, uint64_t now_s) {
    dp_latency_record(latency, series, first_us, now_s);
    dp_latency_record(latency, series + 1, second_us, now_s);
}

uint32_t dp_latency_window(struct dp_latency *latency, uint32_t series, uint32_t window_s,
                           uint64_t now_s, uint64_t *counts) {
    if (series >= latency->count)
        return 0;
    const struct slice *slices = latency->series[series].short_slices, *in[LONG_SLICES];
    uint32_t n = SHORT_SLICES, back = window_s, found = 0, top = 0, tops[LONG_SLICES];
    uint64_t turn = now_s + 1;
    if (window_s > SHORT_SLICES - 1) {
        slices = latency->series[series].long_slices;
        n = LONG_SLICES;
        back = (window_s + LONG_S - 1) / LONG_S;
        turn = now_s / LONG_S + 1;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint64_t of = dp_load_acquire(&slices[i].turn);
        if (!of || of > turn || of + back < turn)
            continue;
        in[found] = &slices[i];
        tops[found] = dp_load_flag(&slices[i].top);
        if (tops[found] > top)
            top = tops[found];
        found++;
    }
    memset(counts, 0, top * sizeof counts[0]);
    for (uint32_t i = 0; i < found; i++)
        for (uint32_t bucket = 0; bucket < tops[i]; bucket++)
            counts[bucket] += dp_load_flag(&in[i]->counts[bucket]);
    return top;
}

uint64_t dp_latency_total(struct dp_latency *latency, uint32_t series, uint64_t *within) {
    uint64_t total = 0;
    memset(within, 0, (DP_LATENCY_BOUNDS + 1) * sizeof within[0]);
    if (series >= latency->count)
        return 0;
    const struct series *of = &latency->series[series];
    for (uint32_t i = 0; i <= DP_LATENCY_BOUNDS; i++)
        within[i] = total += dp_load_relaxed(&of->within[i]);
    return dp_load_relaxed(&of->sum_us);
}
