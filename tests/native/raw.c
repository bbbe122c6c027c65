/* The raw front, request by request, on connections that only record (raw_fake.h) and with a
 * runtime that does what it is told: every way through pump/raw*.c, every split of a request, and
 * what goes wrong at each point, with canaries around the slots.
 *
 * usage: raw [ROUNDS [SEED]], or raw ROUNDS SEED cost: what a request costs */
#include "raw_fake.h"
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

static void put(uint8_t *to, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++)
        to[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t get(const uint8_t *from, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)from[i] << 8 * i;
    return value;
}

static void put_float(uint8_t *to, float value) {
    memcpy(to, &value, 4);
}

/* A request with `n` ids; its wire can be changed before it arrives. */
static struct request request_of(uint32_t n, uint32_t width, uint32_t header) {
    struct request request = {.header = header, .width = width, .n = n, .id = 77};
    for (uint32_t i = 0; i < n; i++)
        request.ids[i] = (n * 7919 + i * 104729) % VOCAB;
    return request;
}

static void encode(struct request *request) {
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

static struct request encoded(uint32_t n, uint32_t width, uint32_t header) {
    struct request request = request_of(n, width, header);
    encode(&request);
    return request;
}

/* Serving ------------------------------------------------------------------------------------- */

static struct dp_raw_config config(void) {
    return (struct dp_raw_config){
        .owner = OWNER, .count = SLOTS, .max_writing = SLOTS, .body_timeout = TIMEOUT};
}

static void plant_canaries(void) {
    memset(dp_prompt(region, 0), CANARY, SLOTS * region->layout.prompt_stride);
}

/* Nothing of any slot was touched but the first n ids of `slot`. */
static void check_canaries(uint32_t slot, uint32_t n) {
    const uint8_t *prompts = (const uint8_t *)dp_prompt(region, 0);
    const size_t stride = region->layout.prompt_stride;
    for (size_t i = 0; i < SLOTS * stride; i++)
        if (i < slot * stride || i >= slot * stride + (size_t)n * 4)
            CHECK(prompts[i] == CANARY);
}

/* The region serves one case after another, as long as nobody but its holders wrote into it. */
static void begin_with(struct dp_raw_config with) {
    make_pump();
    if (!region)
        region = region_new(SLOTS, TOKENS, OWNER);
    CHECK(dp_raw_attach(&pump, region, &with, BUSY) == 0);
    plant_canaries();
}

static void begin(void) {
    begin_with(config());
}

static void begin_null(void) {
    struct dp_raw_config with = config();
    with.null = 1;
    begin_with(with);
}

static void leave_all(void) {
    for (uint32_t i = 0; i < CONNS; i++)
        dp_front_raw.left(&pump, &conns[i].entry);
}

static void drop_region(void) {
    region_delete(region);
    region = NULL;
}

/* Everybody leaves, and nothing may be left of it. */
static void end(void) {
    leave_all();
    CHECK(dp_raw_in_flight(&pump) == 0);
    dp_raw_detach(&pump, 1);
    for (uint32_t slot = 0; region && slot < SLOTS; slot++) {
        CHECK(state_at(region, slot) == DP_FREE || state_at(region, slot) == DP_CANCELLING);
        free_slot(region, slot);
    }
    free_pump();
}

static void expect_stats(uint64_t claimed, uint64_t completed, uint64_t cancelled,
                         uint64_t failed) {
    struct dp_raw_stats stats = dp_raw_stats(&pump);
    if (stats.claimed != claimed || stats.completed != completed || stats.cancelled != cancelled ||
        stats.failed != failed)
        fail("claimed, completed, cancelled, failed: %lu %lu %lu %lu, not %lu %lu %lu %lu",
             stats.claimed, stats.completed, stats.cancelled, stats.failed, claimed, completed,
             cancelled, failed);
}

static uint64_t counted(uint32_t series) {
    uint64_t within[DP_LATENCY_BOUNDS + 1];
    dp_latency_total(dp_raw_latency(&pump), series, within);
    return within[DP_LATENCY_BOUNDS];
}

static struct fake_stream *send_whole(uint32_t conn, const struct request *request) {
    struct fake_stream *stream = open_stream(conn, 0);
    arrive(stream, request->wire, 0, request->size, true);
    return stream;
}

/* The first `bytes` of it, without an end. */
static struct fake_stream *send_part(uint32_t conn, const struct request *request, size_t bytes) {
    struct fake_stream *stream = open_stream(conn, 0);
    arrive(stream, request->wire, 0, bytes, false);
    return stream;
}

static uint32_t taken_slots(void) {
    return SLOTS - dp_count_free(region, 0, SLOTS);
}

/* What is answered ------------------------------------------------------------------------------
 */

static void expect_verdict(const struct fake_stream *stream, uint32_t status, uint32_t slot,
                           uint64_t id) {
    const uint8_t *sent = stream->sent;
    CHECK(stream->sent_bytes >= 32 && memcmp(sent, "DPV1", 4) == 0);
    CHECK(get(sent + 4, 2) == status && get(sent + 6, 2) == slot && get(sent + 8, 8) == id);
}

static void expect_end(const struct fake_stream *stream, uint32_t reason, uint32_t prompt,
                       uint32_t output) {
    CHECK(stream->fin && stream->sent_bytes == 32 + (size_t)output * 4 + 20);
    const uint8_t *end = stream->sent + stream->sent_bytes - 20;
    CHECK(get(end, 4) == 0xFFFFFFFF && get(end + 4, 4) == reason && get(end + 8, 4) == prompt &&
          get(end + 12, 4) == output && get(end + 16, 4) == 0);
}

static const struct dp_refused *expect_refused(const struct fake_stream *stream, uint32_t why,
                                               uint32_t a, uint32_t b, bool ended) {
    CHECK(event_count >= 1 && stream->handed && stream->sends == 0 && stream->stream.in.discard);
    const struct fake_event *event = &events[event_count - 1];
    const struct dp_refused *refused = &event->with.refused;
    CHECK(event->kind == DP_EVENT_REFUSED && event->flags == ended);
    CHECK(event->stream == stream->stream.id && event->connection == stream->conn->entry.handle);
    if (refused->why != why || refused->a != a || refused->b != b)
        fail("refused for %u (%u, %u), not %u (%u, %u)", refused->why, refused->a, refused->b, why,
             a, b);
    CHECK(refused->padding == 0 && !stream->stream.in.place);
    return refused;
}

static void expect_broken(const char *text) {
    CHECK(event_count >= 1 && events[event_count - 1].kind == DP_EVENT_BROKEN);
    if (strcmp(events[event_count - 1].with.text, text) != 0)
        fail("the broken rule is \"%s\", not \"%s\"", events[event_count - 1].with.text, text);
}

/* Ids that the runtime emits, and whether they are what was sent behind the verdict. */
static int32_t nth_output(uint32_t n) {
    return (int32_t)((n * 31337 + 5) % VOCAB);
}

static void emit(uint32_t slot, uint64_t generation, uint32_t from, uint32_t to) {
    int32_t ids[TOKENS];
    for (uint32_t i = from; i < to; i++)
        ids[i - from] = nth_output(i);
    CHECK(dp_emit(region, slot, generation, ids, to - from) == DP_OK);
}

static void expect_output(const struct fake_stream *stream, uint32_t count) {
    CHECK(stream->sent_bytes >= 32 + (size_t)count * 4);
    for (uint32_t i = 0; i < count; i++)
        CHECK(get(stream->sent + 32 + (size_t)i * 4, 4) == (uint64_t)nth_output(i));
}

/* A request that the runtime took. */
static struct fake_stream *send_taken(uint32_t conn, uint32_t slot, uint64_t *generation) {
    struct request request = request_of(3, 4, 48);
    request.affinity = slot + SLOTS;
    encode(&request);
    struct fake_stream *stream = send_whole(conn, &request);
    CHECK(dp_take(region, slot, generation) == DP_RUNNING);
    return stream;
}

/* Whole requests ------------------------------------------------------------------------------ */

static void test_null(void) {
    begin_null();
    struct request request = encoded(5, 4, 48);
    for (uint32_t i = 0; i < 6; i++) {
        conns[0].at_ns = dp_realtime_ns() - 50000;
        struct fake_stream *stream = send_whole(0, &request);
        CHECK(stream->sends == 1 && stream->stops == 0 && stream->resets == 0);
        expect_verdict(stream, 200, i % SLOTS, 77); /* the probe goes round */
        expect_end(stream, 1, 5, 0);
        CHECK(get(stream->sent + 16, 4) >= 50 && get(stream->sent + 20, 4) >= 50);
        CHECK(get(stream->sent + 24, 4) == 0 && get(stream->sent + 28, 4) == SLOTS - 1);
        CHECK(taken_slots() == 0 && conns[0].entry.writing == 0);
        close_stream(stream);
    }
    expect_stats(6, 6, 0, 0);
    struct dp_raw_stats stats = dp_raw_stats(&pump);
    CHECK(stats.ok == 6 && stats.busy == 0 && stats.negative == 0 && stats.hold_s == 0);
    CHECK(counted(0) == 6 && counted(1) == 6 && counted(2) == 0 && event_count == 0);
    end();
}

static void test_ids_of_the_daemon(void) {
    begin_null();
    struct request request = request_of(1, 4, 48);
    request.id = 0;
    encode(&request);
    uint64_t first = get(send_whole(0, &request)->sent + 8, 8);
    CHECK(first != 0 && first >> 63 == 0);
    CHECK(get(send_whole(0, &request)->sent + 8, 8) == first + 1);
    end();
}

static void test_a_clock_that_went_back(void) {
    begin_null();
    struct request request = encoded(2, 4, 48);
    conns[0].at_ns = dp_realtime_ns() + 3600 * SECOND;
    struct fake_stream *stream = send_whole(0, &request);
    CHECK(get(stream->sent + 16, 4) == 0 && get(stream->sent + 20, 4) == 0);
    CHECK(dp_raw_stats(&pump).negative == 2 && counted(0) == 0 && counted(1) == 0);
    end();
}

/* What the slot says before the runtime takes it. */
static void check_published(const struct request *request, uint32_t slot) {
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

static void serve_and_check(struct fake_stream *stream, const struct request *request,
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

/* Every cut of a request in two, its end with the second part or behind it. */
static void test_every_cut(uint32_t width, uint32_t header) {
    struct request request = encoded(6, width, header);
    for (size_t cut = 0; cut <= request.size; cut++) {
        for (int apart = 0; apart < 2; apart++) {
            begin();
            struct fake_stream *stream = open_stream(0, 0);
            arrive(stream, request.wire, 0, cut, false);
            CHECK(conns[0].entry.writing == (cut >= header));
            arrive(stream, request.wire, cut, request.size, !apart);
            if (apart) {
                CHECK(state_at(region, 0) == DP_WRITING);
                CHECK(region->writers[0].written == 6);
                arrive(stream, request.wire, request.size, request.size, true);
            }
            CHECK(conns[0].entry.writing == 0);
            serve_and_check(stream, &request, 0);
            expect_stats(1, 1, 0, 0);
            end();
        }
    }
}

static void test_byte_by_byte(uint32_t width, uint32_t header) {
    struct request request = encoded(9, width, header);
    begin();
    struct fake_stream *stream = open_stream(0, 0);
    for (size_t i = 0; i < request.size; i++)
        arrive(stream, request.wire, i, i + 1, i + 1 == request.size);
    serve_and_check(stream, &request, 0);
    end();
}

/* Parts in any order, some of them twice. Behind the header's they are decrypted into the slot. */
static void test_any_order(uint64_t *seed) {
    uint32_t width = random_below(seed, 4) ? 4 : 2, header = random_below(seed, 2) ? 48 : 53;
    struct request request = encoded(1 + random_below(seed, TOKENS), width, header);
    size_t cuts[12] = {0}, count = 2 + random_below(seed, 10);
    for (size_t i = 1; i < count; i++)
        cuts[i] = random_below(seed, (uint32_t)request.size + 1);
    cuts[count] = request.size;
    for (size_t i = 1; i < count; i++) /* in ascending order */
        for (size_t j = i; j > 1 && cuts[j] < cuts[j - 1]; j--) {
            size_t swap = cuts[j];
            cuts[j] = cuts[j - 1];
            cuts[j - 1] = swap;
        }
    uint32_t order[12];
    for (uint32_t i = 0; i < count; i++)
        order[i] = i;
    for (uint32_t i = (uint32_t)count; i > 1; i--) {
        uint32_t other = random_below(seed, i), swap = order[other];
        order[other] = order[i - 1];
        order[i - 1] = swap;
    }
    begin();
    struct fake_stream *stream = open_stream(0, 0);
    for (uint32_t i = 0; i < count; i++) {
        if (stream->stream.in.frontier < request.size)
            CHECK(taken_slots() == 0 || state_at(region, 0) == DP_WRITING);
        for (uint32_t times = 1 + !random_below(seed, 3); times--;)
            if (!stream->stream.in.discard)
                arrive(stream, request.wire, cuts[order[i]], cuts[order[i] + 1],
                       cuts[order[i] + 1] == request.size);
    }
    serve_and_check(stream, &request, 0);
    end();
}

/* A packet that is decrypted into the slot before its tag turns out to be forged. */
static void test_forged_bytes_count_for_nothing(void) {
    begin();
    struct request request = encoded(40, 4, 48);
    struct fake_stream *stream = send_part(0, &request, 48 + 10 * 4 + 2);
    const struct dp_writer *writer = &region->writers[0];
    for (uint32_t round = 0; round < 4; round++) {
        size_t from = 48 + 10 * 4 + 2 + round * 3, length = request.size - from;
        uint8_t *target = dp_stream_target(&stream->stream, from, length);
        CHECK(target);
        memset(target, 0xFF, length);
        CHECK(dp_stream_target(&stream->stream, from - 3, length) == NULL);
        CHECK(dp_stream_target(&stream->stream, from, length + 1) == NULL);
        offer_all(stream);
        dp_raw_pass(&pump);
        CHECK(state_at(region, 0) == DP_WRITING && event_count == 0);
        CHECK(writer->written == (48 + 10 * 4 + 2 + round * 3 - 48) / 4);
        arrive(stream, request.wire, from, from + 3, false);
    }
    size_t rest = 48 + 10 * 4 + 2 + 4 * 3;
    arrive(stream, request.wire, rest, request.size, true);
    serve_and_check(stream, &request, 0);
    end();
}

static void test_affinity(void) {
    begin_null();
    struct request request = request_of(1, 4, 48);
    for (uint32_t affinity = 1; affinity < 3 * SLOTS; affinity++) {
        request.affinity = affinity;
        request.flags = affinity % 2;
        encode(&request);
        expect_verdict(send_whole(0, &request), 200, affinity % SLOTS, 77);
    }
    request.affinity = 0; /* these did not move the probe */
    request.flags = 0;
    encode(&request);
    expect_verdict(send_whole(0, &request), 200, 0, 77);
    end();
}

/* A range of slots that does not begin with the first one. */
static void test_range(void) {
    struct dp_raw_config with = config();
    with.first = 1;
    with.count = 2;
    with.null = 1;
    begin_with(with);
    struct request request = encoded(1, 4, 48);
    for (uint32_t i = 0; i < 4; i++)
        expect_verdict(send_whole(0, &request), 200, 1 + i % 2, 77);
    end();
}

/* What is left to Python ---------------------------------------------------------------------- */

static void expect_handed(struct fake_stream *stream) {
    CHECK(stream->handed && stream->stream.in.consumed == 0 && stream->sends == 0);
    CHECK(stream->stops == 0 && stream->resets == 0 && !stream->stream.in.discard);
    CHECK(taken_slots() == 0 && dp_raw_stats(&pump).claimed == 0 && event_count == 0);
    uint32_t told = stream->told_data;
    bool more = !stream->stream.in.fin_offered;
    offer_all(stream);
    CHECK(stream->told_data == told + more);
    peer_stops(stream);
    peer_resets(stream);
    close_stream(stream);
    CHECK(stream->told_stopped == 1 && stream->told_reset == 1 && stream->told_closed == 1);
}

static void hand_over_changed(size_t at, uint64_t value, int bytes) {
    struct request request = encoded(4, 4, 48);
    put(request.wire + at, value, bytes);
    begin();
    expect_handed(send_whole(0, &request));
    end();
}

static void hand_over_float(size_t at, float value) {
    uint8_t bytes[4];
    put_float(bytes, value);
    hand_over_changed(at, get(bytes, 4), 4);
}

static void test_malformed_headers(void) {
    for (int i = 0; i < 4; i++)
        hand_over_changed((size_t)i, 'X', 1);
    hand_over_changed(4, 47, 2);
    hand_over_changed(4, 4097, 2);
    hand_over_changed(4, 0, 2);
    for (uint32_t width = 0; width < 256; width++)
        if (width != 2 && width != 4)
            hand_over_changed(6, width, 1);
    hand_over_changed(7, 2, 1);
    hand_over_changed(7, 0x81, 1);
    hand_over_changed(8, 0, 4);
    hand_over_changed(8, TOKENS + 1, 4);
    hand_over_changed(8, UINT32_MAX, 4);
    hand_over_changed(12, TOKENS + 1, 4);
    hand_over_changed(12, UINT32_MAX, 4);
    hand_over_changed(28, 0x7FC00000, 4); /* NaN */
    hand_over_changed(28, 0x7F800000, 4); /* infinite */
    hand_over_float(28, -0.001f);
    hand_over_float(28, 100.001f);
    hand_over_changed(32, 0x7FC00000, 4);
    hand_over_float(32, -1);
    hand_over_float(32, 1.001f);
}

/* The bounds themselves are in order. */
static void test_bounds(void) {
    begin_null();
    struct request request = request_of(TOKENS, 4, 48);
    request.max_output = TOKENS;
    encode(&request);
    put_float(request.wire + 28, 100);
    put_float(request.wire + 32, 1);
    expect_verdict(send_whole(0, &request), 200, 0, 77);
    struct request smallest = encoded(1, 2, 48);
    put_float(smallest.wire + 28, -0.0f);
    put_float(smallest.wire + 32, 0);
    expect_verdict(send_whole(0, &smallest), 200, 1, 77);
    end();
}

static struct fake_stream *send_extension(uint32_t header, uint32_t says) {
    struct request request = encoded(1, 4, header);
    if (header >= 52)
        put(request.wire + 50, says, 2);
    return send_whole(0, &request);
}

static void test_extensions(void) {
    for (uint32_t header = 49; header < 52; header++) {
        begin();
        expect_handed(send_extension(header, 0));
        end();
    }
    for (uint32_t says = 0; says < 16; says++) {
        begin_null();
        /* It fills the header; behind a shorter one stands another that says it is longer. */
        CHECK(send_extension(60, says)->handed == (says != 8));
        end();
    }
    begin_null();
    struct request request = encoded(1, 4, 68); /* three, the second one an API key */
    static const uint8_t three[] = {9,   0, 0, 0, 1, 0, 3, 0, 'k', 'e',
                                    'y', 2, 1, 5, 0, 1, 2, 3, 4,   5};
    memcpy(request.wire + 48, three, sizeof three);
    expect_verdict(send_whole(0, &request), 200, 0, 77);
    end();
}

/* What can be told of a beginning is told at once; what cannot is waited for. */
static void test_beginnings(void) {
    struct request request = encoded(4, 4, 60);
    for (size_t have = 1; have < request.header; have++) {
        begin();
        struct fake_stream *stream = send_part(0, &request, have);
        CHECK(!stream->handed && stream->stream.in.consumed == 0 && taken_slots() == 0);
        CHECK(dp_raw_timer(&pump) == pump.now + TIMEOUT / 20);
        arrive(stream, request.wire, have, have, true); /* it ends inside the header */
        expect_handed(stream);
        end();

        begin();
        struct request bad = request; /* in its magic, or in the upper half of its length */
        bad.wire[have <= 4 ? have - 1 : 5] ^= 0x55;
        stream = send_part(0, &bad, have);
        CHECK(stream->handed == (have != 5));
        end();
    }
    begin();
    struct request wide = encoded(4, 4, 60);
    put(wide.wire + 6, 3, 1);
    expect_handed(send_part(0, &wide, 48)); /* though its extensions have not come */
    end();
    begin();
    struct fake_stream *empty = open_stream(0, 0);
    arrive(empty, request.wire, 0, 0, true);
    expect_handed(empty);
    end();
}

static void test_nobody_serves(void) {
    struct request request = encoded(4, 4, 48);
    begin();
    dp_raw_drain(&pump);
    expect_handed(send_whole(0, &request));
    expect_handed(send_part(0, &request, 1));
    end();
    begin();
    struct fake_stream *uni = open_stream(0, 2);
    arrive(uni, request.wire, 0, request.size, true);
    expect_handed(uni);
    uni = open_stream(0, 2);
    peer_resets(uni);
    CHECK(uni->resets == 0 && !uni->handed);
    end();
    /* Before there is anything, and after it is gone. */
    begin();
    struct fake_stream *waiting = send_part(0, &request, 20);
    dp_raw_detach(&pump, 1);
    expect_handed(send_whole(0, &request));
    arrive(waiting, request.wire, 20, 30, false);
    expect_handed(waiting);
    CHECK(dp_raw_fd(&pump) == -1 && dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    dp_raw_pass(&pump);
    end();
    make_pump();
    expect_handed(send_whole(0, &request));
    CHECK(!pump.raw && dp_raw_timer(&pump) == INT64_MAX && dp_raw_fd(&pump) == -1);
    dp_raw_pass(&pump);
    dp_raw_on_timer(&pump);
    dp_raw_detach(&pump, 1);
    dp_raw_end_all(&pump, 1);
    leave_all();
    free_pump();
}

static void test_cap(void) {
    struct dp_raw_config with = config();
    with.max_writing = 0; /* half of them */
    begin_with(with);
    struct request request = encoded(4, 4, 48);
    struct fake_stream *first = send_part(0, &request, 50), *second = send_part(0, &request, 60);
    CHECK(conns[0].entry.writing == 2 && taken_slots() == 2);
    CHECK(dp_raw_writing(&pump, 1) == 2 && dp_raw_writing(&pump, 2) == 0);
    struct fake_stream *third = send_whole(0, &request);
    CHECK(third->handed && third->stream.in.consumed == 0 && taken_slots() == 2);
    CHECK(!send_whole(1, &request)->handed); /* another connection has a cap of its own */
    arrive(first, request.wire, 50, request.size, true);
    CHECK(conns[0].entry.writing == 1 && !second->handed);
    CHECK(!send_part(0, &request, 48)->handed);
    end();
}

/* Refused in C -------------------------------------------------------------------------------- */

static void expect_busy(const struct fake_stream *stream, uint32_t retry_ms, bool stopped) {
    CHECK(stream->sends == 1 && stream->fin && !stream->handed && stream->resets == 0);
    expect_verdict(stream, 429, 0xFFFF, 77);
    CHECK(get(stream->sent + 20, 4) == 0 && get(stream->sent + 28, 4) == 0);
    if (get(stream->sent + 24, 4) != retry_ms)
        fail("retry after %lu ms, not %u", get(stream->sent + 24, 4), retry_ms);
    CHECK(stream->sent_bytes == 32 + strlen(BUSY) &&
          memcmp(stream->sent + 32, BUSY, strlen(BUSY)) == 0);
    CHECK(stream->stops == stopped && stream->stop_code == 0);
}

static void test_busy(void) {
    begin();
    struct request request = encoded(4, 4, 48);
    for (uint32_t i = 0; i < SLOTS; i++)
        CHECK(!send_part(i % 2, &request, 48)->handed);
    conns[0].at_ns = dp_realtime_ns() - 90000;
    struct fake_stream *whole = send_whole(0, &request);
    expect_busy(whole, 1000, false);
    CHECK(get(whole->sent + 16, 4) >= 90);
    expect_busy(send_part(0, &request, 48), 1000, true);
    expect_busy(send_part(0, &request, 55), 1000, true);
    CHECK(dp_raw_stats(&pump).busy == 3 && dp_raw_stats(&pump).ok == 0 && counted(0) == 3);
    expect_stats(SLOTS, 0, 0, 0);
    peer_resets(whole); /* what was answered after its end is broken off, as any other */
    CHECK(whole->resets == 1);
    end();
}

static void test_strict_affinity(void) {
    begin();
    struct request request = request_of(4, 4, 48);
    request.affinity = 2;
    encode(&request);
    send_part(0, &request, 48);
    struct fake_stream *loose = send_part(0, &request, 48);
    CHECK(loose->stops == 0 && state_at(region, 3) == DP_WRITING);
    request.flags = 1;
    encode(&request);
    expect_busy(send_whole(0, &request), 1000, false);
    CHECK(taken_slots() == 2);
    end();
}

/* Held for some ms each, over four slots; halves are rounded to even. */
static void test_retry_after(void) {
    static const struct {
        int64_t held_us;
        uint32_t retry_ms;
    } cases[] = {{0, 1000},         {1, 1},           {3000, 1},         {9000, 2},
                 {10000, 2},        {10001, 3},       {14000, 4},        {400000, 100},
                 {39998001, 10000}, {39900000, 9975}, {400000000, 10000}};
    struct request request = encoded(4, 4, 48);
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin();
        struct fake_stream *stream = send_part(0, &request, 48);
        pump.now += cases[i].held_us * 1000;
        peer_resets(stream);
        for (uint32_t j = 0; j < SLOTS; j++)
            send_part(0, &request, 48);
        expect_busy(send_whole(1, &request), cases[i].retry_ms, false);
        end();
    }
}

/* Bad bodies ---------------------------------------------------------------------------------- */

/* A slot was given back in order, and goes to the next one. */
static void expect_given_back(uint64_t failed) {
    CHECK(taken_slots() == 0 && conns[0].entry.writing == 0);
    expect_stats(failed, 0, 0, failed);
    CHECK(counted(0) == failed && counted(1) == 0);
}

static void test_bad_tokens(uint32_t width) {
    for (uint32_t position = 0; position < 5; position++) {
        struct request request = request_of(5, width, 48);
        uint32_t bad = width == 2 ? 0xFFFF : position % 2 ? VOCAB : UINT32_MAX;
        request.ids[position] = bad;
        request.ids[4] = bad;
        encode(&request);
        for (size_t cut = 0; cut <= request.size; cut++) {
            begin();
            struct fake_stream *stream = open_stream(0, 0);
            arrive(stream, request.wire, 0, cut, false);
            bool there = cut >= 48 + (size_t)(position + 1) * width;
            CHECK(event_count == there);
            if (!there)
                arrive(stream, request.wire, cut, request.size, true);
            const struct dp_refused *refused =
                expect_refused(stream, DP_WHY_BAD_TOKEN, position, bad, !there);
            CHECK(refused->request_id == 77 && refused->n_tokens == 5);
            arrive(stream, request.wire, 48, request.size, true); /* it is not read */
            CHECK(event_count == 1);
            expect_given_back(1);
            check_canaries(0, 5);
            end();
        }
    }
}

static void test_too_long(uint32_t width) {
    struct request request = encoded(5, width, 48);
    for (size_t excess = 1; excess <= 5; excess++) {
        for (size_t cut = 0; cut <= request.size + excess; cut++) {
            begin();
            struct fake_stream *stream = open_stream(0, 0);
            arrive(stream, request.wire, 0, cut, false);
            CHECK(event_count == (cut > request.size));
            if (cut <= request.size)
                arrive(stream, request.wire, cut, request.size + excess, excess % 2);
            expect_refused(stream, DP_WHY_OVERFLOW, 0, 0, cut <= request.size && excess % 2);
            expect_given_back(1);
            check_canaries(0, 5);
            end();
        }
    }
    /* That it is too long is said before what is in it, when both came at once. */
    request.ids[4] = VOCAB + 1;
    if (width == 4)
        encode(&request);
    for (size_t cut = 0; cut < request.size - 4; cut++) {
        begin();
        struct fake_stream *stream = open_stream(0, 0);
        arrive(stream, request.wire, 0, cut, false);
        arrive(stream, request.wire, cut, request.size + 1, true);
        expect_refused(stream, DP_WHY_OVERFLOW, 0, 0, true);
        end();
    }
}

static void test_too_short(uint32_t width) {
    struct request request = encoded(5, width, 48);
    for (size_t size = 48; size < request.size; size++) {
        for (size_t cut = 0; cut <= size; cut++) {
            begin();
            struct fake_stream *stream = open_stream(0, 0);
            arrive(stream, request.wire, 0, cut, false);
            arrive(stream, request.wire, cut, size, true);
            uint32_t body = (uint32_t)(size - 48);
            expect_refused(stream, DP_WHY_SHORT, body / width, body % width, true);
            expect_given_back(1);
            check_canaries(0, body / width + 1);
            end();
        }
    }
}

/* Time ---------------------------------------------------------------------------------------- */

static void pass_time(int64_t until) {
    while (dp_raw_timer(&pump) <= until) {
        int64_t due = dp_raw_timer(&pump);
        if (due > pump.now)
            pump.now = due;
        dp_raw_on_timer(&pump);
        dp_raw_pass(&pump);
    }
    pump.now = until;
}

static void test_late_headers(void) {
    begin();
    int64_t start = pump.now;
    struct request request = encoded(4, 4, 60);
    struct fake_stream *first = send_part(0, &request, 7);
    pump.now += SECOND;
    struct fake_stream *second = send_part(1, &request, 59), *third = send_part(0, &request, 20);
    struct fake_stream *whole = send_part(0, &request, 20);
    arrive(whole, request.wire, 20, request.size, true);
    CHECK(state_at(region, 0) == DP_READY);
    pass_time(start + TIMEOUT - 1);
    CHECK(event_count == 0);
    pass_time(start + TIMEOUT + TIMEOUT / 20);
    CHECK(event_count == 1);
    const struct dp_refused *refused = expect_refused(first, DP_WHY_HEADER_LATE, 7, 0, false);
    CHECK(refused->request_id == 0 && refused->n_tokens == 0);
    peer_resets(third);
    CHECK(third->resets == 1 && third->reset_code == 0);
    pass_time(start + TIMEOUT * 3);
    CHECK(event_count == 2);
    expect_refused(second, DP_WHY_HEADER_LATE, 59, 0, false);
    CHECK(dp_raw_timer(&pump) == INT64_MAX);
    end();
}

static void test_late_bodies(uint32_t width) {
    for (size_t body = 0; body <= 5 * width; body++) {
        begin();
        int64_t start = pump.now;
        struct request request = encoded(5, width, 48);
        struct fake_stream *stream = send_part(0, &request, 48);
        pump.now += 3 * SECOND;
        arrive(stream, request.wire, 48, 48 + body, false);
        pass_time(start + TIMEOUT - 1);
        CHECK(event_count == 0 && taken_slots() == 1);
        pass_time(start + TIMEOUT + TIMEOUT / 20);
        expect_refused(stream, DP_WHY_LATE, (uint32_t)(body / width), 0, false);
        expect_given_back(1);
        arrive(stream, request.wire, 48 + body, request.size, true);
        check_canaries(0, (uint32_t)(body / width) + 1);
        CHECK(dp_raw_timer(&pump) == INT64_MAX);
        end();
    }
}

/* It counts from the arrival, which was two seconds before the header was looked at. */
static void test_deadline_before_publish(void) {
    begin();
    int64_t start = pump.now;
    struct request request = request_of(5, 4, 48);
    request.deadline_ms = 3000;
    encode(&request);
    conns[0].at_ns = dp_realtime_ns() - 2 * SECOND;
    struct fake_stream *stream = send_part(0, &request, 61);
    int64_t due = dp_raw_timer(&pump);
    CHECK(due == start + TIMEOUT / 20);
    pass_time(start + SECOND - SECOND / 10);
    CHECK(event_count == 0);
    pass_time(start + SECOND);
    expect_refused(stream, DP_WHY_LATE, 3, 0, false);
    expect_given_back(1);
    end();
}

static struct fake_stream *send_with_deadline(uint32_t ms) {
    struct request request = request_of(3, 4, 48);
    request.deadline_ms = ms;
    request.affinity = SLOTS;
    encode(&request);
    struct fake_stream *stream = send_whole(0, &request);
    CHECK(state_at(region, 0) == DP_READY && dp_raw_timer(&pump) <= pump.now + ms * 1000000);
    return stream;
}

static void test_deadline_in_ready(void) {
    for (int answered = 0; answered < 2; answered++) {
        begin();
        struct fake_stream *stream = send_with_deadline(10);
        if (answered)
            dp_raw_pass(&pump);
        pass_time(pump.now + SECOND / 100);
        CHECK(state_at(region, 0) == DP_FREE && stream->sends == (answered ? 2 : 1));
        expect_verdict(stream, 200, 0, 77);
        expect_end(stream, 3, 3, 0);
        expect_stats(1, 1, 0, 0);
        CHECK(counted(2) == 0 && counted(4) == 1);
        end();
    }
}

static void test_deadline_in_running(void) {
    for (uint32_t before = 0; before < 3; before++) {
        begin();
        uint64_t generation;
        struct fake_stream *stream = send_with_deadline(10);
        CHECK(dp_take(region, 0, &generation) == DP_RUNNING);
        emit(0, generation, 0, before);
        if (before != 1)
            dp_raw_pass(&pump);
        uint32_t out = before == 1 ? 1 : before + 2;
        emit(0, generation, before, out);
        pump.now += SECOND;
        dp_raw_on_timer(&pump);
        CHECK(state_at(region, 0) == DP_CANCELLING);
        expect_verdict(stream, 200, 0, 77);
        expect_output(stream, out);
        expect_end(stream, 3, 3, out);
        expect_stats(1, 1, 0, 0);
        CHECK(counted(2) == 1 && counted(3) == 1 && counted(4) == 1);
        dp_raw_pass(&pump);
        CHECK(dp_finish(region, 0, generation, DP_FINISH_STOP) == DP_FREE);
        end();
    }
}

/* The runtime was done before the deadline: its own reason counts. */
static void test_deadline_loses(void) {
    begin();
    uint64_t generation;
    struct fake_stream *stream = send_with_deadline(10);
    CHECK(dp_take(region, 0, &generation) == DP_RUNNING);
    emit(0, generation, 0, 4);
    CHECK(dp_finish(region, 0, generation, DP_FINISH_LENGTH) == DP_DONE);
    pump.now += SECOND;
    dp_raw_on_timer(&pump);
    CHECK(stream->sends == 0 && dp_raw_timer(&pump) == INT64_MAX);
    dp_raw_pass(&pump);
    expect_output(stream, 4);
    expect_end(stream, 2, 3, 4);
    end();
}

static void test_deadline_of_a_slow_reader(void) {
    begin();
    uint64_t generation;
    struct fake_stream *stream = send_with_deadline(10);
    CHECK(dp_take(region, 0, &generation) == DP_RUNNING);
    dp_raw_pass(&pump);
    conns[0].unacked = LIMIT + 1;
    emit(0, generation, 0, 4);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1);
    pump.now += SECOND;
    dp_raw_on_timer(&pump);
    CHECK(stream->resets == 1 && stream->reset_code == 3 && stream->sends == 1);
    CHECK(state_at(region, 0) == DP_CANCELLING);
    expect_stats(1, 0, 0, 1);
    CHECK(dp_raw_timer(&pump) == INT64_MAX);
    end();
}

/* The client leaves --------------------------------------------------------------------------- */

enum phase { HEADER, BODY, PLACED, NARROW, READY, ANSWERED_READY, RUNNING, DONE, PHASES };

static struct fake_stream *bring_to(enum phase phase, uint64_t *generation) {
    struct request request = encoded(5, phase == NARROW ? 2 : 4, 48);
    struct fake_stream *stream;
    switch (phase) {
    case HEADER:
        return send_part(0, &request, 30);
    case BODY:
        return send_part(0, &request, request.size);
    case PLACED:
        stream = send_part(0, &request, 48 + 6);
        CHECK(stream->stream.in.place);
        return stream;
    case NARROW:
        return send_part(0, &request, 48 + 3);
    default:
        stream = send_whole(0, &request);
    }
    if (phase >= ANSWERED_READY)
        dp_raw_pass(&pump);
    if (phase >= RUNNING)
        CHECK(dp_take(region, 0, generation) == DP_RUNNING);
    if (phase == DONE) {
        emit(0, *generation, 0, 2);
        CHECK(dp_finish(region, 0, *generation, DP_FINISH_STOP) == DP_DONE);
    }
    return stream;
}

static bool holds_a_slot(enum phase phase) {
    return phase != HEADER;
}

static void expect_cancelled(enum phase phase) {
    CHECK(state_at(region, 0) == (phase == RUNNING ? DP_CANCELLING : DP_FREE));
    CHECK(conns[0].entry.writing == 0 && event_count == 0);
    expect_stats(holds_a_slot(phase), 0, holds_a_slot(phase), 0);
    CHECK(counted(0) == holds_a_slot(phase));
}

/* Nothing comes of it any more, whatever arrives and passes. */
static void expect_silence(struct fake_stream *stream) {
    struct request request = encoded(5, 4, 48);
    uint32_t sends = stream->sends, resets = stream->resets, told = event_count;
    arrive(stream, request.wire, stream->stream.in.highest, request.size, true);
    pass_time(pump.now + 10 * TIMEOUT);
    dp_raw_pass(&pump);
    CHECK(stream->sends == sends && stream->resets == resets && event_count == told);
    CHECK(!stream->handed);
}

static void test_resets(void) {
    for (enum phase phase = HEADER; phase < PHASES; phase++) {
        uint64_t generation;
        begin();
        struct fake_stream *stream = bring_to(phase, &generation);
        peer_resets(stream);
        CHECK(stream->resets == 1 && stream->reset_code == 0 && stream->stops == 0);
        expect_cancelled(phase);
        CHECK(!stream->stream.in.place);
        dp_raw_pass(&pump);
        close_stream(stream);
        end();
    }
    begin(); /* before anything came */
    struct fake_stream *stream = open_stream(0, 0);
    peer_resets(stream);
    CHECK(stream->resets == 1 && stream->reset_code == 0);
    end();
}

static void test_stops(void) {
    for (enum phase phase = HEADER; phase < PHASES; phase++) {
        uint64_t generation;
        begin();
        struct fake_stream *stream = bring_to(phase, &generation);
        peer_stops(stream);
        CHECK(stream->resets == 0 && stream->stops == (phase < READY) && stream->stop_code == 0);
        expect_cancelled(phase);
        peer_stops(stream);
        CHECK(stream->stops == (phase < READY));
        if (phase < READY)
            expect_silence(stream);
        close_stream(stream);
        end();
    }
    begin(); /* before anything came: what comes then is not read */
    struct fake_stream *stream = open_stream(0, 0);
    peer_stops(stream);
    CHECK(stream->resets == 0 && stream->stops == 0);
    expect_silence(stream);
    expect_stats(0, 0, 0, 0);
    end();
}

static void test_leaves(void) {
    for (enum phase phase = HEADER; phase < PHASES; phase++) {
        uint64_t generation;
        begin();
        struct fake_stream *stream = bring_to(phase, &generation);
        dp_front_raw.left(&pump, &conns[0].entry);
        CHECK(stream->resets == 0 && stream->stops == 0);
        expect_cancelled(phase);
        if (phase < READY)
            expect_silence(stream);
        end();
    }
}

static void test_unread(void) {
    for (enum phase phase = HEADER; phase < PHASES; phase++) {
        uint64_t generation;
        begin();
        struct fake_stream *stream = bring_to(phase, &generation);
        CHECK(dp_raw_unread(&pump, 1, stream->stream.id, 3) == 1);
        CHECK(stream->resets == 1 && stream->reset_code == 3 && stream->stops == (phase < READY));
        expect_cancelled(phase);
        if (phase < READY)
            expect_silence(stream);
        CHECK(dp_raw_unread(&pump, 1, 4000, 3) == 0 && dp_raw_unread(&pump, 9, 0, 3) == 0);
        end();
    }
    begin(); /* an answer that is complete, but not read */
    uint64_t generation;
    struct fake_stream *stream = bring_to(DONE, &generation);
    dp_raw_pass(&pump);
    CHECK(stream->fin && dp_raw_unread(&pump, 1, stream->stream.id, 3) == 1);
    CHECK(stream->resets == 1 && stream->reset_code == 3);
    expect_stats(1, 1, 0, 0);
    struct request bad = encoded(1, 4, 48);
    bad.wire[0] = 0;
    stream = send_whole(0, &bad);
    CHECK(stream->handed && dp_raw_unread(&pump, 1, stream->stream.id, 3) == 0);
    end();
}

/* The runtime --------------------------------------------------------------------------------- */

static void test_output(void) {
    begin();
    uint64_t generation;
    struct fake_stream *stream = send_taken(0, 2, &generation);
    emit(2, generation, 0, 3); /* before the 200 went out: they go together */
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1 && stream->sent_bytes == 32 + 12);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1);
    for (uint32_t out = 3; out < TOKENS; out++) {
        emit(2, generation, out, out + 1);
        dp_raw_pass(&pump);
        CHECK(stream->sends == out - 1);
    }
    CHECK(counted(2) == 1 && counted(3) == 1 && counted(4) == 0);
    CHECK(dp_finish(region, 2, generation, DP_FINISH_STOP) == DP_DONE);
    pump.now += SECOND;
    dp_raw_pass(&pump);
    expect_output(stream, TOKENS);
    expect_end(stream, 1, 3, TOKENS);
    CHECK(counted(4) == 1 && dp_raw_stats(&pump).hold_s == 1.0);
    expect_stats(1, 1, 0, 0);
    end();
}

/* All in one: taken, put out and finished between two passes. */
static void test_answer_at_once(void) {
    begin();
    uint64_t generation;
    for (uint32_t count = 0; count < 3; count++) {
        struct fake_stream *stream = send_taken(0, 1, &generation);
        emit(1, generation, 0, count);
        CHECK(dp_finish(region, 1, generation, DP_FINISH_STOP) == DP_DONE);
        dp_raw_pass(&pump);
        CHECK(stream->sends == 1);
        expect_output(stream, count);
        expect_end(stream, 1, 3, count);
        CHECK(counted(2) == count + 1 && counted(3) == count);
    }
    end();
}

/* Several slots, which end in another order than they began: the watch moves. */
static void test_many(uint64_t *seed) {
    begin();
    struct fake_stream *streams[SLOTS] = {NULL};
    uint64_t generations[SLOTS];
    uint32_t out[SLOTS] = {0};
    for (uint32_t turn = 0; turn < 40;) {
        uint32_t slot = random_below(seed, SLOTS);
        if (!streams[slot]) {
            if (conns[turn % 2].count == STREAMS_MAX)
                break;
            streams[slot] = send_taken(turn++ % 2, slot, &generations[slot]);
            out[slot] = 0;
        } else if (random_below(seed, 3)) {
            emit(slot, generations[slot], out[slot], out[slot] + 1);
            out[slot]++;
        } else {
            CHECK(dp_finish(region, slot, generations[slot], DP_FINISH_STOP) == DP_DONE);
        }
        if (random_below(seed, 2) || (streams[slot] && state_at(region, slot) == DP_DONE)) {
            dp_raw_pass(&pump);
            for (uint32_t i = 0; i < SLOTS; i++)
                if (streams[i])
                    expect_output(streams[i], out[i]);
        }
        if (streams[slot] && streams[slot]->fin) {
            expect_end(streams[slot], 1, 3, out[slot]);
            streams[slot] = NULL;
        }
    }
    end();
}

static void test_errors(void) {
    begin();
    uint64_t generation;
    struct fake_stream *stream = send_taken(0, 0, &generation);
    emit(0, generation, 0, 2);
    CHECK(dp_finish(region, 0, generation, DP_FINISH_ERROR) == DP_DONE);
    dp_raw_pass(&pump); /* the 200 first: a reset would take it along */
    CHECK(stream->sends == 1 && stream->resets == 0 && !stream->fin);
    expect_output(stream, 2);
    CHECK(!dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1 && stream->resets == 1 && stream->reset_code == 2);
    CHECK(state_at(region, 0) == DP_FREE);
    expect_stats(1, 0, 0, 1);
    stream = send_taken(0, 0, &generation); /* after the 200 it is reset at once */
    dp_raw_pass(&pump);
    CHECK(dp_finish(region, 0, generation, DP_FINISH_ERROR) == DP_DONE);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1 && stream->resets == 1 && stream->reset_code == 2);
    end();
}

/* What a runtime does that breaks a rule, after it put two ids out. */
static void set_progress(uint64_t generation, uint32_t count) {
    dp_store_release(&region->progress[1], generation << 24 | count);
}

static void set_state(uint64_t generation, uint32_t state) {
    dp_store_release(&region->states[1], generation << 24 | OWNER << 8 | state);
}

static void break_rule(uint32_t number, uint64_t generation) {
    static const uint32_t reasons[] = {0, 3, UINT32_MAX};
    switch (number) {
    case 0:
        set_progress(generation, TOKENS + 1);
        break;
    case 1:
        set_progress(generation, 0xFFFFFF);
        break;
    case 2:
        set_progress(generation, 1);
        break;
    case 3:
        dp_output(region, 1)[2] = VOCAB;
        set_progress(generation, 3);
        break;
    case 4:
    case 5:
    case 6:
        CHECK(dp_finish(region, 1, generation, reasons[number - 4]) == DP_DONE);
        break;
    case 7:
        set_state(generation + 1, DP_RUNNING);
        break;
    case 8:
        set_state(generation - 1, DP_DONE);
        break;
    case 9:
        set_state(generation, DP_FREE);
        break;
    case 10:
        set_state(generation, DP_WRITING);
        break;
    case 11:
        set_state(generation, DP_CANCELLING);
        break;
    default:
        set_state(generation, 6 + number);
    }
}

static const char *const rules[] = {
    "slot 1: 131 output ids, 130 allowed",
    "slot 1: 16777215 output ids, 130 allowed",
    "slot 1: the output count went back from 2 to 1",
    "slot 1: output id 50000 is outside the vocabulary",
    "slot 1: finish reason 0",
    "slot 1: finish reason 3",
    "slot 1: finish reason 4294967295",
};
#define LEFT_HANDS "slot 1: the state word left this listener's hands"

static void test_broken_rules(void) {
    struct request request = encoded(4, 4, 48);
    for (uint32_t number = 0; number < 14; number++) {
        begin();
        uint64_t generation, other;
        struct fake_stream *half = send_part(0, &request, 60); /* in slot 0 */
        struct fake_stream *victim = send_taken(0, 1, &generation);
        struct fake_stream *bystander = send_taken(0, 2, &other);
        emit(1, generation, 0, 2);
        emit(2, other, 0, 2);
        dp_raw_pass(&pump);
        CHECK(victim->sent_bytes == 40 && bystander->sent_bytes == 40);
        break_rule(number, generation);
        dp_raw_pass(&pump);
        expect_broken(number < 7 ? rules[number] : LEFT_HANDS);
        CHECK(events[0].connection == 0 && event_count == 1);
        /* Nothing is served until Python detached it. */
        struct fake_stream *after = send_whole(1, &request);
        CHECK(after->handed && after->stream.in.consumed == 0);
        arrive(half, request.wire, 60, request.size, true);
        emit(2, other, 2, 3);
        dp_raw_pass(&pump);
        pump.now += TIMEOUT;
        CHECK(dp_raw_sleep(&pump));
        dp_raw_wake(&pump);
        CHECK(victim->sends == 1 && bystander->sends == 1 && event_count == 1 && !half->handed);
        dp_raw_detach(&pump, 1);
        CHECK(victim->resets == 1 && victim->reset_code == 1);
        CHECK(bystander->resets == 1 && bystander->reset_code == 1);
        CHECK(half->handed && event_count == 2);
        expect_refused(half, DP_WHY_LOST, 0, 0, true);
        expect_stats(3, 0, 0, 3);
        drop_region();
        end();
    }
}

static void test_slots_that_are_not_ours(void) {
    struct request request = encoded(4, 4, 48);
    begin(); /* freed by somebody while it is written, and given out once more */
    struct fake_stream *stream = send_part(0, &request, 60);
    dp_store_release(&region->states[0], generation_at(region, 0) << 24 | DP_FREE);
    request.affinity = SLOTS;
    encode(&request);
    struct fake_stream *second = send_part(1, &request, 60);
    expect_broken("slot 0: it was given out twice");
    CHECK(second->handed && second->stream.in.consumed == 0 && !stream->handed);
    dp_raw_detach(&pump, 1);
    expect_refused(stream, DP_WHY_LOST, 0, 0, false);
    drop_region();
    end();
    begin(); /* gone before it is published */
    stream = send_part(0, &request, request.size);
    uint64_t word = generation_at(region, 0) << 24 | OWNER << 8;
    dp_store_release(&region->states[0], word | DP_RUNNING);
    arrive(stream, request.wire, request.size, request.size, true);
    expect_broken("slot 0: it left WRITING under its listener");
    CHECK(!stream->handed && stream->sends == 0);
    dp_raw_detach(&pump, 1);
    expect_refused(stream, DP_WHY_LOST, 0, 0, true);
    drop_region();
    end();
}

/* A reader that is behind --------------------------------------------------------------------- */

static void test_slow_reader(void) {
    begin();
    uint64_t generation, other;
    struct fake_stream *slow = send_taken(0, 0, &generation);
    struct fake_stream *quick = send_taken(1, 1, &other);
    dp_raw_pass(&pump);
    conns[0].unacked = LIMIT + 1;
    for (uint32_t out = 0; out < 5; out++) {
        emit(0, generation, out, out + 1);
        emit(1, other, out, out + 1);
        CHECK(!dp_raw_sleep(&pump));
        dp_raw_wake(&pump);
        dp_raw_pass(&pump);
        CHECK(slow->sends == 1 && quick->sends == out + 2);
        CHECK(dp_raw_sleep(&pump)); /* what nobody takes keeps nobody awake */
        dp_raw_wake(&pump);
    }
    CHECK(dp_raw_timer(&pump) == INT64_MAX); /* a running one is not timed */
    pump.now += 10 * SECOND;
    dp_raw_pass(&pump);
    CHECK(slow->sends == 1 && slow->resets == 0);
    conns[0].unacked = LIMIT;
    dp_raw_pass(&pump);
    CHECK(slow->sends == 2);
    expect_output(slow, 5);
    emit(0, generation, 5, 6); /* what was sent on took the room */
    dp_raw_pass(&pump);
    CHECK(slow->sends == 2);
    conns[0].unacked = 0;
    dp_raw_pass(&pump);
    expect_output(slow, 6);
    end();
}

static void test_finished_answer_of_a_slow_reader(void) {
    for (int drains = 0; drains < 2; drains++) {
        begin();
        uint64_t generation;
        struct fake_stream *slow = send_taken(0, 0, &generation);
        dp_raw_pass(&pump);
        conns[0].unacked = LIMIT + 1;
        emit(0, generation, 0, 5);
        dp_raw_pass(&pump); /* held while it is running, then done */
        CHECK(dp_finish(region, 0, generation, DP_FINISH_STOP) == DP_DONE);
        dp_raw_pass(&pump);
        int64_t due = pump.now + 2 * SECOND;
        CHECK(dp_raw_timer(&pump) == due && state_at(region, 0) == DP_DONE);
        pump.now = due - 1;
        dp_raw_pass(&pump);
        CHECK(slow->sends == 1 && slow->resets == 0 && state_at(region, 0) == DP_DONE);
        if (drains) {
            conns[0].unacked = 0;
            dp_raw_pass(&pump);
            expect_output(slow, 5);
            expect_end(slow, 1, 3, 5);
            expect_stats(1, 1, 0, 0);
        } else {
            pass_time(due);
            CHECK(slow->sends == 1 && slow->resets == 1 && slow->reset_code == 3);
            expect_stats(1, 0, 0, 1);
        }
        CHECK(state_at(region, 0) == DP_FREE && dp_raw_timer(&pump) == INT64_MAX);
        end();
    }
}

/* Three finished answers of one connection; the first one's output takes the room from the others,
 * which are held anew rather than given up: their reader reads. */
static void test_held_in_turns(void) {
    begin();
    uint64_t generations[3];
    struct fake_stream *streams[3];
    for (uint32_t i = 0; i < 3; i++)
        streams[i] = send_taken(0, i, &generations[i]);
    dp_raw_pass(&pump);
    conns[0].unacked = LIMIT + 1;
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t slot = 2 - i; /* this one is held first */
        emit(slot, generations[slot], 0, 4);
        CHECK(dp_finish(region, slot, generations[slot], DP_FINISH_STOP) == DP_DONE);
        dp_raw_pass(&pump);
        pump.now += SECOND / 2;
    }
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t slot = 2 - i;
        conns[0].unacked = LIMIT; /* room for one */
        pump.now += 3 * SECOND / 2;
        dp_raw_pass(&pump);
        for (uint32_t j = 0; j < 3; j++)
            CHECK(streams[j]->fin == (j >= slot) && streams[j]->resets == 0);
        if (i < 2)
            CHECK(dp_raw_timer(&pump) == pump.now + 2 * SECOND);
    }
    expect_stats(3, 3, 0, 0);
    end();
}

static void test_held_one_leaves(void) {
    begin();
    uint64_t generations[3];
    struct fake_stream *streams[3];
    for (uint32_t i = 0; i < 3; i++) {
        streams[i] = send_taken(0, i, &generations[i]);
        emit(i, generations[i], 0, 4);
    }
    conns[0].unacked = LIMIT + 1;
    dp_raw_pass(&pump);
    /* A 200 does not wait for the room that output waits for. */
    CHECK(streams[0]->sends == 1 && streams[0]->sent_bytes == 32);
    peer_resets(streams[1]);
    CHECK(state_at(region, 1) == DP_CANCELLING);
    conns[0].unacked = 0;
    dp_raw_pass(&pump);
    expect_output(streams[0], 4);
    expect_output(streams[2], 4);
    CHECK(streams[1]->sent_bytes == 32);
    end();
}

/* The attachment ends ------------------------------------------------------------------------- */

static void test_detach_with_all_in_flight(void) {
    begin();
    struct request request = encoded(5, 4, 48);
    uint64_t generation;
    struct fake_stream *header = send_part(0, &request, 30);
    struct fake_stream *placed = send_part(0, &request, 58);      /* slot 0 */
    struct fake_stream *answered = send_taken(0, 1, &generation); /* slot 1 */
    dp_raw_pass(&pump);
    struct fake_stream *ready = send_whole(1, &request);   /* slot 2, its 200 not written */
    struct fake_stream *body = send_part(1, &request, 68); /* slot 3, all but the end */
    CHECK(state_at(region, 1) == DP_RUNNING && state_at(region, 2) == DP_READY);
    CHECK(placed->stream.in.place && dp_raw_in_flight(&pump) == 4);
    emit(1, generation, 0, 1);
    dp_raw_detach(&pump, 1);
    CHECK(answered->resets == 1 && answered->reset_code == 1 && answered->sends == 1);
    CHECK(event_count == 3 && dp_raw_in_flight(&pump) == 0);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(events[i].kind == DP_EVENT_REFUSED && events[i].with.refused.why == DP_WHY_LOST &&
              events[i].flags == (events[i].connection == 2 && events[i].stream == 0));
    CHECK(placed->handed && ready->handed && body->handed && !header->handed);
    for (uint32_t i = 0; i < CONNS; i++)
        for (uint32_t j = 0; j < conns[i].count; j++)
            CHECK(!conns[i].streams[j].stream.in.place);
    expect_stats(4, 0, 0, 4);
    drop_region(); /* from here on a look at it is one too many */
    arrive(placed, request.wire, 58, request.size, true);
    arrive(body, request.wire, 68, request.size, true);
    arrive(header, request.wire, 30, request.size, true);
    CHECK(header->handed && header->stream.in.consumed == 0);
    peer_stops(answered);
    dp_raw_pass(&pump);
    pass_time(pump.now + 10 * TIMEOUT);
    /* Counters outlive it, and another one is served. */
    region = region_new(SLOTS, TOKENS, OWNER);
    struct dp_raw_config with = config();
    CHECK(dp_raw_attach(&pump, region, &with, BUSY) == 0);
    CHECK(dp_raw_attach(&pump, region, &with, BUSY) == -1); /* one at a time */
    plant_canaries();
    struct fake_stream *next = send_whole(1, &request);
    event_count = 0;
    serve_and_check(next, &request, 0);
    expect_stats(5, 1, 0, 4);
    end();
}

static void test_end_all(void) {
    begin();
    struct request request = encoded(5, 4, 48);
    uint64_t generation;
    struct fake_stream *placed = send_part(0, &request, 58);
    struct fake_stream *answered = send_taken(0, 1, &generation);
    dp_raw_pass(&pump);
    struct fake_stream *ready = send_whole(0, &request);
    dp_raw_end_all(&pump, 4);
    CHECK(answered->resets == 1 && answered->reset_code == 4);
    CHECK(placed->handed && ready->handed && event_count == 2 && taken_slots() == 1);
    CHECK(dp_finish(region, 1, generation, DP_FINISH_STOP) == DP_FREE);
    event_count = 0;
    plant_canaries();
    request.affinity = 2; /* the slot whose 200 was due when it ended */
    encode(&request);
    serve_and_check(send_whole(0, &request), &request, 2);
    end();
}

static void test_attach_checks(void) {
    make_pump();
    CHECK(region); /* that of the cases before */
    char reason[300] = {0};
    for (uint32_t i = 0; i < 8; i++) {
        struct dp_raw_config with = config();
        with.owner = i == 0 ? 0 : i == 1 ? OWNER + 1 : OWNER;
        with.count = i == 2 ? 0 : i == 3 ? SLOTS + 1 : i == 4 ? UINT32_MAX : SLOTS;
        with.first = i == 5 ? 1 : i == 6 ? SLOTS : 0;
        memset(reason, 'x', i == 7 ? 257 : 256);
        CHECK(dp_raw_attach(&pump, region, &with, reason) == -1);
    }
    reason[256] = 0;
    struct dp_raw_config with = config();
    region->geometry.table = DP_TABLE_DEVICE; /* whose verbs are others */
    CHECK(dp_raw_attach(&pump, region, &with, reason) == -1);
    region->geometry.table = DP_TABLE_HOST;
    CHECK(dp_raw_attach(&pump, region, &with, reason) == 0);
    CHECK(dp_raw_fd(&pump) == region->outputs[OWNER - 1]);
    end();
}

/* The runtime rings only while the listener says that it sleeps. */
static void test_sleep_and_wake(void) {
    begin();
    uint64_t generation, rung;
    struct fake_stream *stream = send_taken(0, 0, &generation);
    dp_raw_pass(&pump);
    emit(0, generation, 0, 1);
    CHECK(read(dp_raw_fd(&pump), &rung, sizeof rung) < 0);
    CHECK(!dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    dp_raw_pass(&pump);
    CHECK(dp_raw_sleep(&pump));
    emit(0, generation, 1, 2);
    CHECK(read(dp_raw_fd(&pump), &rung, sizeof rung) == sizeof rung);
    dp_raw_wake(&pump);
    dp_raw_pass(&pump);
    expect_output(stream, 2);
    end();
}

/* What it costs ------------------------------------------------------------------------------- */

static double null_ns(uint32_t n, size_t cut, uint32_t rounds) {
    static struct request request;
    int64_t best = INT64_MAX;
    request = encoded(n, 4, 48);
    struct fake_stream *stream = open_stream(0, 0);
    struct dp_stream *of = &stream->stream;
    for (uint32_t i = 0; i < 5; i++) {
        int64_t start = monotonic_ns();
        for (uint32_t j = 0; j < rounds; j++) {
            of->app_state = 0;
            stream->sent_bytes = 0;
            stream->fin = false;
            if (cut) {
                of->in.consumed = of->in.frontier = 0;
                of->in.place = NULL;
                of->in.discard = false;
                size_t used =
                    dp_front_raw.data(&pump, &conns[0].entry, of, request.wire, cut, false);
                memcpy(of->in.place, request.wire + used, request.size - used);
                of->in.consumed = used;
                dp_front_raw.data(&pump, &conns[0].entry, of, of->in.place, request.size - used,
                                  true);
            } else {
                dp_front_raw.data(&pump, &conns[0].entry, of, request.wire, request.size, true);
            }
        }
        int64_t took = monotonic_ns() - start;
        best = took < best ? took : best;
    }
    CHECK(stream->fin && event_count == 0);
    return (double)best / rounds;
}

static void print_cost(uint32_t rounds) {
    begin_null();
    double whole = null_ns(128, 0, rounds), placed = null_ns(128, 120, rounds);
    int64_t start = monotonic_ns();
    for (uint32_t i = 0; i < rounds; i++)
        dp_realtime_ns();
    double clock_ns = (double)(monotonic_ns() - start) / rounds;
    end();
    printf("128 tokens, null: %.0f ns in one offer, %.0f in two (placed); two of its clock reads "
           "are %.0f\n",
           whole, placed, 2 * clock_ns);
}

static void run_random(uint32_t rounds, uint64_t *seed) {
    for (uint32_t i = 0; i < rounds; i++)
        test_any_order(seed);
    for (uint32_t i = 0; i < rounds / 10 + 1; i++)
        test_many(seed);
}

static void run_shapes(void) {
    static const uint32_t headers[] = {48, 52, 53, 55};
    for (uint32_t width = 2; width <= 4; width += 2) {
        for (uint32_t i = 0; i < 4; i++) {
            test_every_cut(width, headers[i]);
            test_byte_by_byte(width, headers[i]);
        }
        test_bad_tokens(width);
        test_too_long(width);
        test_too_short(width);
        test_late_bodies(width);
    }
}

int main(int argc, char **argv) {
    static void (*const tests[])(void) = {
        test_null,
        test_ids_of_the_daemon,
        test_a_clock_that_went_back,
        test_forged_bytes_count_for_nothing,
        test_affinity,
        test_range,
        test_malformed_headers,
        test_bounds,
        test_extensions,
        test_beginnings,
        test_nobody_serves,
        test_cap,
        test_busy,
        test_strict_affinity,
        test_retry_after,
        test_late_headers,
        test_deadline_before_publish,
        test_deadline_in_ready,
        test_deadline_in_running,
        test_deadline_loses,
        test_deadline_of_a_slow_reader,
        test_resets,
        test_stops,
        test_leaves,
        test_unread,
        test_output,
        test_answer_at_once,
        test_errors,
        test_broken_rules,
        test_slots_that_are_not_ours,
        test_slow_reader,
        test_finished_answer_of_a_slow_reader,
        test_held_in_turns,
        test_held_one_leaves,
        test_detach_with_all_in_flight,
        test_end_all,
        test_attach_checks,
        test_sleep_and_wake,
    };
    uint32_t rounds = argument(argc, argv, 1, 200);
    uint64_t seed = argument(argc, argv, 2, 1);
    /* Each case has histograms of its own: from the system they come as zeros, and untouched. */
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    if (argc > 3) {
        print_cost(rounds);
        return 0;
    }
    for (uint32_t i = 0; i < sizeof tests / sizeof *tests; i++)
        tests[i]();
    run_shapes();
    run_random(rounds, &seed);
    drop_region();
    printf("raw: %zu cases, every cut of a request, %u in any order\n",
           sizeof tests / sizeof *tests, rounds);
    return 0;
}
