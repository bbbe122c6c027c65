/* What the test programs of the raw front share, on the stand-ins of raw_fake.h: requests and what
 * is expected of their answers, and a runtime that does what it is told, with canaries around the
 * slots. */
#ifndef RAW_BED_H
#define RAW_BED_H

#include "raw_fake.h"

#include "keys.h"
#include "tokens.h"

#include <malloc.h>

#define SLOTS   4
#define TOKENS  130 /* a prompt's stride holds 192 */
#define VOCAB   50000
#define OWNER   2
#define CANARY  0xC5
#define WIRE    1024
#define SECOND  INT64_C(1000000000)
#define TIMEOUT (5 * SECOND)
#define BUSY    "every slot is taken"
#define LIMIT   (4 << 20)

/* Requests, written down as contract 3 says and not by the code under test ----------------------
 */

struct request {
    uint32_t header, width, flags, n, max_output, affinity, deadline_ms;
    uint64_t id;
    uint32_t ids[TOKENS + 4];
    uint8_t wire[WIRE];
    size_t size;
};

static inline void put(uint8_t *to, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++)
        to[i] = (uint8_t)(value >> 8 * i);
}

static inline uint64_t get(const uint8_t *from, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)from[i] << 8 * i;
    return value;
}

static inline void put_float(uint8_t *to, float value) {
    memcpy(to, &value, 4);
}

/* A request with `n` ids; its wire can be changed before it arrives. */
static inline struct request request_of(uint32_t n, uint32_t width, uint32_t header) {
    struct request request = {.header = header, .width = width, .n = n, .id = 77};
    for (uint32_t i = 0; i < n; i++)
        request.ids[i] = (n * 7919 + i * 104729) % VOCAB;
    return request;
}

static inline void encode(struct request *request) {
    uint8_t *wire = request->wire;
    memset(wire, 0, WIRE);
    memcpy(wire, "DPQ1", 4);
    put(wire + 4, request->header, 2);
    put(wire + 6, request->width, 1);
    put(wire + 7, request->flags, 1);
    put(wire + 8, request->n, 4);
    put(wire + 12, request->max_output, 4);
    put(wire + 16, request->id, 8);
    put(wire + 24, request->affinity, 4);
    put_float(wire + 28, 0.5f);
    put_float(wire + 32, 0.25f);
    put(wire + 36, 40, 4);
    put(wire + 40, 123, 4);
    put(wire + 44, request->deadline_ms, 4);
    if (request->header >= 52) { /* an extension of a type that nobody knows fills it */
        put(wire + 48, 0x4142, 2);
        put(wire + 50, request->header - 52, 2);
        memset(wire + 52, 0xEE, request->header - 52);
    }
    for (uint32_t i = 0; i < request->n; i++)
        put(wire + request->header + (size_t)i * request->width, request->ids[i],
            (int)request->width);
    request->size = request->header + (size_t)request->n * request->width;
}

static inline struct request encoded(uint32_t n, uint32_t width, uint32_t header) {
    struct request request = request_of(n, width, header);
    encode(&request);
    return request;
}

/* Keys ---------------------------------------------------------------------------------------- */

#define BETA 5 /* partitions need not be dense */

/* SHA-256 of "alpha" and "beta", as `printf %s alpha | sha256sum` says. */
static const char alpha_hash[] = "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8";
static const char beta_hash[] = "f44e64e75f3948e9f73f8dfa94721c4ce8cbb4f265c4790c702b2d41cfbf2753";

static inline void read_hash(const char *hash, uint8_t *to) {
    for (int i = 0; i < DP_KEY_DIGEST; i++) {
        unsigned byte;
        CHECK(sscanf(hash + 2 * (size_t)i, "%2x", &byte) == 1);
        to[i] = (uint8_t)byte;
    }
}

static inline int set_keys(uint32_t beta) {
    uint8_t digests[2 * DP_KEY_DIGEST];
    read_hash(alpha_hash, digests);
    read_hash(beta_hash, digests + DP_KEY_DIGEST);
    return dp_raw_set_keys(&pump, digests, (uint32_t[]){0, beta}, 2);
}

/* A request with the header's extensions: for each key one, "" for one that is empty. */
static inline struct request keyed(uint32_t n, const char *const *keys, uint32_t count) {
    uint32_t header = 48;
    for (uint32_t i = 0; i < count; i++)
        header += 4 + (uint32_t)strlen(keys[i]);
    struct request request = encoded(n, 4, header);
    uint8_t *at = request.wire + 48;
    for (uint32_t i = 0; i < count; i++) {
        put(at, 1, 2);
        put(at + 2, strlen(keys[i]), 2);
        memcpy(at + 4, keys[i], strlen(keys[i]));
        at += 4 + strlen(keys[i]);
    }
    return request;
}

static inline struct request with_key(uint32_t n, const char *key) {
    return keyed(n, &key, 1);
}

/* Serving ------------------------------------------------------------------------------------- */

static inline struct dp_raw_config config(void) {
    return (struct dp_raw_config){
        .owner = OWNER, .count = SLOTS, .max_writing = SLOTS, .body_timeout = TIMEOUT};
}

static inline void plant_canaries(void) {
    memset(dp_prompt(region, 0), CANARY, SLOTS * region->layout.prompt_stride);
}

/* Nothing of any slot was touched but the first n ids of `slot`. */
static inline void check_canaries(uint32_t slot, uint32_t n) {
    const uint8_t *prompts = (const uint8_t *)dp_prompt(region, 0);
    const size_t stride = region->layout.prompt_stride;
    for (size_t i = 0; i < SLOTS * stride; i++)
        if (i < slot * stride || i >= slot * stride + (size_t)n * 4)
            CHECK(prompts[i] == CANARY);
}

/* The region serves one case after another, as long as nobody but its holders wrote into it. */
static inline void begin_with(struct dp_raw_config with) {
    make_pump();
    if (!region)
        region = region_new(SLOTS, TOKENS, OWNER);
    CHECK(dp_raw_attach(&pump, region, &with, BUSY) == 0);
    plant_canaries();
}

static inline void begin(void) {
    begin_with(config());
}

static inline void begin_null(void) {
    struct dp_raw_config with = config();
    with.null = 1;
    begin_with(with);
}

static inline void leave_all(void) {
    for (uint32_t i = 0; i < CONNS; i++)
        dp_front_raw.left(&pump, &conns[i].entry);
}

static inline void drop_region(void) {
    region_delete(region);
    region = NULL;
}

/* Everybody leaves, and nothing may be left of it. */
static inline void end(void) {
    leave_all();
    CHECK(dp_raw_in_flight(&pump) == 0);
    dp_raw_detach(&pump, 0, 1);
    for (uint32_t slot = 0; region && slot < SLOTS; slot++) {
        CHECK(state_at(region, slot) == DP_FREE || state_at(region, slot) == DP_CANCELLING);
        free_slot(region, slot);
    }
    free_pump();
}

static inline void expect_stats(uint64_t claimed, uint64_t completed, uint64_t cancelled,
                                uint64_t failed) {
    struct dp_raw_stats stats = dp_raw_stats(&pump);
    if (stats.claimed != claimed || stats.completed != completed || stats.cancelled != cancelled ||
        stats.failed != failed)
        fail("claimed, completed, cancelled, failed: %lu %lu %lu %lu, not %lu %lu %lu %lu",
             stats.claimed, stats.completed, stats.cancelled, stats.failed, claimed, completed,
             cancelled, failed);
}

static inline uint64_t counted(uint32_t series) {
    uint64_t within[DP_LATENCY_BOUNDS + 1];
    dp_latency_total(dp_raw_latency(&pump), series, within);
    return within[DP_LATENCY_BOUNDS];
}

static inline struct fake_stream *send_whole(uint32_t conn, const struct request *request) {
    struct fake_stream *stream = open_stream(conn, 0);
    arrive(stream, request->wire, 0, request->size, true);
    return stream;
}

/* The first `bytes` of it, without an end. */
static inline struct fake_stream *send_part(uint32_t conn, const struct request *request,
                                            size_t bytes) {
    struct fake_stream *stream = open_stream(conn, 0);
    arrive(stream, request->wire, 0, bytes, false);
    return stream;
}

static inline uint32_t taken_slots(void) {
    return SLOTS - dp_count_free(region, 0, SLOTS);
}

/* What is answered ------------------------------------------------------------------------------
 */

static inline void expect_verdict(const struct fake_stream *stream, uint32_t status, uint32_t slot,
                                  uint64_t id) {
    const uint8_t *sent = stream->sent;
    CHECK(stream->sent_bytes >= 32 && memcmp(sent, "DPV1", 4) == 0);
    CHECK(get(sent + 4, 2) == status && get(sent + 6, 2) == slot && get(sent + 8, 8) == id);
}

static inline void expect_end(const struct fake_stream *stream, uint32_t reason, uint32_t prompt,
                              uint32_t output) {
    CHECK(stream->fin && stream->sent_bytes == 32 + (size_t)output * 4 + 20);
    const uint8_t *end = stream->sent + stream->sent_bytes - 20;
    CHECK(get(end, 4) == 0xFFFFFFFF && get(end + 4, 4) == reason && get(end + 8, 4) == prompt &&
          get(end + 12, 4) == output && get(end + 16, 4) == 0);
}

static inline const struct dp_refused *
expect_refused(const struct fake_stream *stream, uint32_t why, uint32_t a, uint32_t b, bool ended) {
    CHECK(event_count >= 1 && stream->handed && stream->sends == 0 && stream->stream.in.discard);
    const struct fake_event *event = &events[event_count - 1];
    const struct dp_refused *refused = &event->with.refused;
    CHECK(event->kind == DP_EVENT_REFUSED && event->flags == ended);
    CHECK(event->stream == stream->stream.id && event->connection == stream->conn->entry.handle);
    if (refused->why != why || refused->a != a || refused->b != b)
        fail("refused for %u (%u, %u), not %u (%u, %u)", refused->why, refused->a, refused->b, why,
             a, b);
    CHECK(refused->partition == 0 && !stream->stream.in.place);
    return refused;
}

static inline void expect_broken(const char *text) {
    CHECK(event_count >= 1 && events[event_count - 1].kind == DP_EVENT_BROKEN);
    if (strcmp(events[event_count - 1].with.text, text) != 0)
        fail("the broken rule is \"%s\", not \"%s\"", events[event_count - 1].with.text, text);
}

/* Ids that the runtime emits, and whether they are what was sent behind the verdict. */
static inline int32_t nth_output(uint32_t n) {
    return (int32_t)((n * 31337 + 5) % VOCAB);
}

static inline void emit(uint32_t slot, uint64_t generation, uint32_t from, uint32_t to) {
    int32_t ids[TOKENS];
    for (uint32_t i = from; i < to; i++)
        ids[i - from] = nth_output(i);
    CHECK(dp_emit(region, slot, generation, ids, to - from) == DP_OK);
}

static inline void expect_output(const struct fake_stream *stream, uint32_t count) {
    CHECK(stream->sent_bytes >= 32 + (size_t)count * 4);
    for (uint32_t i = 0; i < count; i++)
        CHECK(get(stream->sent + 32 + (size_t)i * 4, 4) == (uint64_t)nth_output(i));
}

/* A request that the runtime took. */
static inline struct fake_stream *send_taken(uint32_t conn, uint32_t slot, uint64_t *generation) {
    struct request request = request_of(3, 4, 48);
    request.affinity = slot + SLOTS;
    encode(&request);
    struct fake_stream *stream = send_whole(conn, &request);
    CHECK(dp_take(region, slot, generation) == DP_RUNNING);
    return stream;
}

static inline void check_published(const struct request *request, uint32_t slot) {
    const struct dp_request *said = &region->requests[slot];
    CHECK(state_at(region, slot) == DP_READY && owner_at(region, slot) == OWNER);
    CHECK(said->request_id == request->id && said->n_tokens == request->n);
    CHECK(said->max_output == (request->max_output ? request->max_output : TOKENS));
    CHECK(said->temperature == 0.5f && said->top_p == 0.25f && said->top_k == 40 &&
          said->seed == 123);
    for (uint32_t i = 0; i < request->n; i++)
        if ((uint32_t)dp_prompt(region, slot)[i] != request->ids[i])
            fail("id %u of %u is %d, not %u", i, request->n, dp_prompt(region, slot)[i],
                 request->ids[i]);
    check_canaries(slot, request->n);
}

/* What the slot says before the runtime takes it. */
static inline void serve_and_check(struct fake_stream *stream, const struct request *request,
                                   uint32_t slot) {
    uint64_t generation;
    check_published(request, slot);
    CHECK(stream->sends == 0 && !stream->stream.in.place);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1 && stream->sent_bytes == 32 && !stream->fin);
    expect_verdict(stream, 200, slot, request->id);
    CHECK(dp_take(region, slot, &generation) == DP_RUNNING);
    emit(slot, generation, 0, 2);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 2);
    emit(slot, generation, 2, 3);
    CHECK(dp_finish(region, slot, generation, DP_FINISH_LENGTH) == DP_DONE);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 3 && state_at(region, slot) == DP_FREE);
    expect_output(stream, 3);
    expect_end(stream, 2, request->n, 3);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 3 && event_count == 0);
}

/* A slot was given back in order, and goes to the next one. */
static inline void expect_given_back(uint64_t failed) {
    CHECK(taken_slots() == 0 && conns[0].entry.writing == 0);
    expect_stats(failed, 0, 0, failed);
    CHECK(counted(0) == failed && counted(1) == 0);
}

/* Time ---------------------------------------------------------------------------------------- */

static inline void pass_time(int64_t until) {
    while (dp_raw_timer(&pump) <= until) {
        int64_t due = dp_raw_timer(&pump);
        if (due > pump.now)
            pump.now = due;
        dp_raw_on_timer(&pump);
        dp_raw_pass(&pump);
    }
    pump.now = until;
}

/* Cases --------------------------------------------------------------------------------------- */

typedef void (*test_case)(void);

/* Each case has histograms of its own: from the system they come as zeros, and untouched. */
static inline void run_cases(const test_case *cases, size_t count) {
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    for (size_t i = 0; i < count; i++)
        cases[i]();
}

#define RUN(...)                                                                                   \
    do {                                                                                           \
        static const test_case cases[] = {__VA_ARGS__};                                            \
        run_cases(cases, sizeof cases / sizeof *cases);                                            \
    } while (0)

#endif
