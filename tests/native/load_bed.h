/* What the load generator's test programs share: connections that are stand-ins, and a pump without
 * packets on top of them. */
#ifndef LOAD_BED_H
#define LOAD_BED_H

#include "harness.h"

#include "pump/inside.h"
#include "pump/load.h"

#define LINKS        8
#define STREAMS_MOST 4096
#define REQUEST      "the request"
#define INGRESS      77

/* The stand-ins ------------------------------------------------------------------------------ */

struct dp_conn {
    struct dp_stream *streams[STREAMS_MOST];
    uint32_t count;
    bool over;
    uint32_t stops;
};

static int64_t clock_ns;
static uint32_t events, flushes;

int64_t dp_monotonic_ns(void) {
    return clock_ns;
}

void dp_events_push(struct dp_pump *pump, uint16_t kind, uint16_t flags, uint64_t connection,
                    uint64_t stream, uint64_t number, const void *bytes, size_t size) {
    (void)pump, (void)flags, (void)connection, (void)stream, (void)number, (void)bytes;
    CHECK(kind == DP_EVENT_LOAD && size == 0);
    events++;
}

void dp_pump_lock_slowly(struct dp_pump *pump) {
    pthread_mutex_lock(&pump->lock);
}

void dp_pump_flush(struct dp_pump *pump) {
    (void)pump;
    flushes++;
}

struct dp_stream *dp_conn_open(struct dp_conn *conn, bool uni) {
    CHECK(!uni);
    if (conn->over)
        return NULL;
    CHECK(conn->count < STREAMS_MOST);
    struct dp_stream *stream = calloc(1, sizeof *stream);
    CHECK(stream);
    stream->id = 4 * (uint64_t)conn->count;
    conn->streams[conn->count++] = stream;
    return stream;
}

bool dp_conn_send_lent(struct dp_conn *conn, struct dp_stream *stream, const uint8_t *bytes,
                       size_t length) {
    (void)stream;
    CHECK(length == strlen(REQUEST) && memcmp(bytes, REQUEST, length) == 0);
    return !conn->over;
}

void dp_conn_stop(struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    (void)stream, (void)code;
    conn->stops++;
}

struct dp_stream *dp_conn_each(struct dp_conn *conn, uint32_t *at) {
    return *at < conn->count ? conn->streams[(*at)++] : NULL;
}

/* A load under test --------------------------------------------------------------------------- */

struct bed {
    struct dp_pump pump;
    struct dp_entry entries[LINKS];
    struct dp_conn conns[LINKS];
    uint32_t links;
    struct dp_load_run run;
};

static inline struct bed *make_bed(uint32_t links, uint32_t protocol) {
    struct bed *bed = calloc(1, sizeof *bed);
    CHECK(bed);
    pthread_mutex_init(&bed->pump.lock, NULL);
    bed->pump.pool = dp_pool_new();
    bed->links = links;
    CHECK(dp_load_request(&bed->pump, (const uint8_t *)REQUEST, strlen(REQUEST), protocol) == 0);
    for (uint32_t i = 0; i < links; i++) {
        bed->entries[i] = (struct dp_entry){.handle = i + 1, .conn = &bed->conns[i]};
        CHECK(dp_load_join(&bed->pump, &bed->entries[i]));
    }
    return bed;
}

static inline void leave(struct bed *bed, uint32_t i) {
    dp_front_load.left(&bed->pump, &bed->entries[i]);
    bed->conns[i].over = true;
}

static inline void begin(struct bed *bed, uint64_t requests, uint32_t streams, double interval_ns) {
    free(bed->run.verdict_ns);
    free(bed->run.total_ns);
    free(bed->run.ingress_us);
    free(bed->run.status);
    bed->run = (struct dp_load_run){
        .requests = requests,
        .streams = streams,
        .interval_ns = interval_ns,
        .stall_ns = 10000,
        .verdict_ns = calloc(requests, sizeof(int64_t)),
        .total_ns = calloc(requests, sizeof(int64_t)),
        .ingress_us = calloc(requests, sizeof(uint32_t)),
        .status = calloc(requests, sizeof(uint16_t)),
    };
    CHECK(dp_load_begin(&bed->pump, &bed->run) == 0);
}

static inline void free_bed(struct bed *bed) {
    for (uint32_t i = 0; i < bed->links; i++) {
        if (bed->entries[i].own)
            leave(bed, i);
        for (uint32_t k = 0; k < bed->conns[i].count; k++)
            free(bed->conns[i].streams[k]);
    }
    dp_load_free(&bed->pump);
    if (dp_pool_out(bed->pump.pool))
        fail("%zu bytes were not given back", dp_pool_out(bed->pump.pool));
    dp_pool_free(bed->pump.pool);
    pthread_mutex_destroy(&bed->pump.lock);
    free(bed->run.verdict_ns);
    free(bed->run.total_ns);
    free(bed->run.ingress_us);
    free(bed->run.status);
    free(bed);
}

/* Offer bytes of a stream; how many are taken. */
static inline size_t offer(struct bed *bed, uint32_t i, struct dp_stream *stream,
                           const uint8_t *bytes, size_t length, bool fin) {
    bed->pump.now = clock_ns;
    /* A copy of the very length, so that reading beyond it is noticed. */
    uint8_t *copy = malloc(length + 1);
    CHECK(copy);
    memcpy(copy, bytes, length);
    uint8_t *exact = length ? realloc(copy, length) : copy;
    size_t taken = dp_front_load.data(&bed->pump, &bed->entries[i], stream, exact, length, fin);
    free(exact);
    return taken;
}

static inline void pass(struct bed *bed) {
    bed->pump.now = clock_ns;
    dp_load_pass(&bed->pump);
}

/* Answers ------------------------------------------------------------------------------------ */

static inline uint8_t *put_u32(uint8_t *to, uint32_t value) {
    for (int i = 0; i < 4; i++)
        *to++ = (uint8_t)(value >> 8 * i);
    return to;
}

/* What follows the verdict of a 200. */
static inline size_t put_body(uint8_t *to, uint32_t ids, uint32_t counted) {
    uint8_t *at = to;
    for (uint32_t i = 0; i < ids; i++)
        at = put_u32(at, i);
    at = put_u32(at, 0xffffffff);
    at = put_u32(put_u32(at, 1), 3);
    at = put_u32(put_u32(at, counted), 0);
    return (size_t)(at - to);
}

static inline void expect(const char *what, uint64_t wanted, uint64_t found) {
    if (wanted != found)
        fail("%s: expected %lu, found %lu", what, wanted, found);
}

#endif
