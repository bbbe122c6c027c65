/* See latency.h. A slice is emptied by the first value that falls into its place a turn later, so
 * recording allocates and sweeps nothing. */
#include "latency.h"

#include <stdlib.h>
#include <string.h>

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

struct dp_latency {
    uint32_t series;
    struct slice slices[]; /* [series][SHORT_SLICES + LONG_SLICES] */
};

struct dp_latency *dp_latency_new(uint32_t series) {
    size_t slices = (size_t)series * (SHORT_SLICES + LONG_SLICES);
    struct dp_latency *latency = calloc(1, sizeof *latency + slices * sizeof(struct slice));
    if (latency)
        latency->series = series;
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

static void count_in(struct slice *slice, uint64_t turn, uint32_t bucket) {
    if (slice->turn != turn) {
        memset(slice->counts, 0, slice->top * sizeof slice->counts[0]);
        slice->turn = turn;
        slice->top = 0;
    }
    slice->counts[bucket]++;
    if (bucket >= slice->top)
        slice->top = bucket + 1;
}

void dp_latency_record(struct dp_latency *latency, uint32_t series, int64_t value_us,
                       uint64_t now_s) {
    struct slice *slices = &latency->slices[series * (SHORT_SLICES + LONG_SLICES)];
    uint32_t bucket = dp_latency_bucket(value_us);
    /* Turns count from 1, so that a slice of zeros is nobody's. */
    uint64_t turn = now_s + 1, long_turn = now_s / LONG_S + 1;
    count_in(&slices[turn % SHORT_SLICES], turn, bucket);
    count_in(&slices[SHORT_SLICES + long_turn % LONG_SLICES], long_turn, bucket);
}

void dp_latency_record_pair(struct dp_latency *latency, uint32_t series, int64_t first_us,
                            int64_t second_us, uint64_t now_s) {
    dp_latency_record(latency, series, first_us, now_s);
    dp_latency_record(latency, series + 1, second_us, now_s);
}

static uint64_t add(const struct slice *slice, uint64_t *counts) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < slice->top; i++) {
        counts[i] += slice->counts[i];
        total += slice->counts[i];
    }
    return total;
}

uint64_t dp_latency_window(struct dp_latency *latency, uint32_t series, uint32_t window_s,
                           uint64_t now_s, uint64_t *counts) {
    const struct slice *slices = &latency->slices[series * (SHORT_SLICES + LONG_SLICES)];
    uint32_t n = SHORT_SLICES, back = window_s;
    uint64_t turn = now_s + 1, total = 0;
    if (window_s > SHORT_SLICES - 1) {
        slices += SHORT_SLICES;
        n = LONG_SLICES;
        back = (window_s + LONG_S - 1) / LONG_S;
        turn = now_s / LONG_S + 1;
    }
    memset(counts, 0, DP_LATENCY_BUCKETS * sizeof counts[0]);
    for (uint32_t i = 0; i < n; i++)
        if (slices[i].turn && slices[i].turn <= turn && slices[i].turn + back >= turn)
            total += add(&slices[i], counts);
    return total;
}
