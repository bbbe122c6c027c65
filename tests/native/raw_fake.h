/* What the raw front stands on, as far as its test needs it: connections whose streams record what
 * is sent, stopped, reset and placed, and events that are kept to be looked at. What comes lies in
 * the real receiving half (quic/streams.c), and is offered as quic/conn_frames.c does it; what lies
 * in no place is offered out of memory of just its size, so AddressSanitizer sees a byte too many.
 */
#ifndef RAW_FAKE_H
#define RAW_FAKE_H

#include "harness.h"
#include "pump/inside.h"
#include "pump/prompt1.h"
#include "pump/raw.h"
#include "quic/pool.h"

#define STREAMS_MAX 40
#define CONNS       2
#define SENT_MAX    1024
#define EVENTS_MAX  64

struct fake_stream {
    struct dp_stream stream; /* the first member: one is cast to the other */
    struct dp_conn *conn;
    uint8_t sent[SENT_MAX];
    size_t sent_bytes;
    uint32_t sends, resets, stops;
    uint64_t reset_code, stop_code;
    bool fin;    /* of what is sent */
    bool handed; /* Python's */
    uint32_t told_data, told_reset, told_stopped, told_closed;
};

struct dp_conn {
    struct dp_entry entry;
    int64_t at_ns;
    uint64_t unacked;
    uint32_t count;
    struct fake_stream streams[STREAMS_MAX];
};

struct fake_event {
    uint16_t kind, flags;
    uint64_t connection, stream, number;
    union {
        struct dp_refused refused;
        char text[200];
    } with;
};

static struct dp_pool *pool;
static struct dp_pump pump;
static struct dp_conn conns[CONNS];
static struct fake_event events[EVENTS_MAX];
static uint32_t event_count;
static struct dp_region *region;

static inline struct fake_stream *fake(struct dp_stream *stream) {
    return (struct fake_stream *)stream;
}

/* What raw*.c calls --------------------------------------------------------------------------- */

int64_t dp_conn_at_ns(const struct dp_conn *conn) {
    return conn->at_ns;
}

bool dp_conn_send(struct dp_conn *conn, struct dp_stream *stream, const uint8_t *bytes,
                  size_t length, bool fin) {
    struct fake_stream *to = fake(stream);
    CHECK(to->conn == conn && !to->handed && !to->fin);
    if (to->resets)
        return false;
    CHECK(length <= SENT_MAX - to->sent_bytes);
    memcpy(to->sent + to->sent_bytes, bytes, length);
    to->sent_bytes += length;
    to->sends++;
    to->fin = fin;
    conn->unacked += length;
    return true;
}

void dp_conn_reset(struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    struct fake_stream *of = fake(stream);
    CHECK(of->conn == conn && !of->handed);
    of->resets++;
    of->reset_code = code;
}

static inline bool lies_in(const uint8_t *place, uint32_t slot) {
    const uint8_t *prompt = (const uint8_t *)dp_prompt(region, slot);
    return place >= prompt && place < prompt + region->layout.prompt_stride;
}

/* Nothing may be written any more; a place is left while its slot is held, never afterwards. */
static inline void end_reading(struct dp_stream *stream) {
    struct dp_receiving *in = &stream->in;
    if (in->discard)
        return;
    for (uint32_t slot = 0; in->place && slot < region->geometry.slots; slot++)
        if (lies_in(in->place, slot))
            CHECK(state_at(region, slot) == DP_WRITING);
    dp_stream_discard(stream, pool);
    in->consumed = in->frontier = in->highest;
}

void dp_conn_stop(struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    struct fake_stream *of = fake(stream);
    CHECK(of->conn == conn);
    of->stops++;
    of->stop_code = code;
    end_reading(stream);
}

void dp_conn_leave_place(struct dp_conn *conn, struct dp_stream *stream) {
    CHECK(fake(stream)->conn == conn);
    end_reading(stream);
}

void dp_conn_set_place(struct dp_conn *conn, struct dp_stream *stream, uint8_t *place,
                       uint64_t from, uint64_t to) {
    CHECK(fake(stream)->conn == conn && !stream->in.place && !stream->in.discard);
    CHECK(from >= stream->in.consumed && from < to);
    dp_stream_set_place(stream, pool, place, from, to);
}

uint64_t dp_conn_unacked(const struct dp_conn *conn) {
    return conn->unacked;
}

struct dp_stream *dp_conn_stream(struct dp_conn *conn, uint64_t id) {
    for (uint32_t i = 0; i < conn->count; i++)
        if (conn->streams[i].stream.id == id)
            return &conn->streams[i].stream;
    return NULL;
}

struct dp_stream *dp_conn_each(struct dp_conn *conn, uint32_t *at) {
    return *at < conn->count ? &conn->streams[(*at)++].stream : NULL;
}

struct dp_entry *dp_pump_entry(struct dp_pump *of, uint64_t handle) {
    CHECK(of == &pump);
    return handle >= 1 && handle <= CONNS ? &conns[handle - 1].entry : NULL;
}

void dp_pump_lock_slowly(struct dp_pump *of) {
    (void)of;
    fail("the lock was held already");
}

void dp_pump_ring(struct dp_pump *of) {
    CHECK(of == &pump);
}

void dp_events_push(struct dp_pump *of, uint16_t kind, uint16_t flags, uint64_t connection,
                    uint64_t stream, uint64_t number, const void *bytes, size_t size) {
    CHECK(of == &pump && event_count < EVENTS_MAX);
    struct fake_event *event = &events[event_count++];
    *event = (struct fake_event){
        .kind = kind, .flags = flags, .connection = connection, .stream = stream, .number = number};
    CHECK(kind == DP_EVENT_REFUSED ? size == sizeof event->with.refused
                                   : size < sizeof event->with.text);
    if (size)
        memcpy(&event->with, bytes, size);
}

void dp_events_hand_over(struct dp_pump *of, struct dp_entry *entry, struct dp_stream *stream) {
    CHECK(of == &pump && entry->conn == fake(stream)->conn);
    CHECK(!stream->app && !stream->app_state && !stream->app_next && !stream->app_previous);
    fake(stream)->handed = true;
}

bool dp_events_has(const struct dp_stream *stream) {
    return ((const struct fake_stream *)stream)->handed;
}

static inline size_t told_data(struct dp_pump *of, struct dp_entry *entry, struct dp_stream *stream,
                               const uint8_t *bytes, size_t length, bool fin) {
    (void)of, (void)entry, (void)bytes, (void)length, (void)fin;
    fake(stream)->told_data++;
    return 0;
}

static inline void told_reset(struct dp_pump *of, struct dp_entry *entry, struct dp_stream *stream,
                              uint64_t code) {
    (void)of, (void)entry, (void)code;
    fake(stream)->told_reset++;
}

static inline void told_stopped(struct dp_pump *of, struct dp_entry *entry,
                                struct dp_stream *stream, uint64_t code) {
    (void)of, (void)entry, (void)code;
    fake(stream)->told_stopped++;
}

static inline void told_closed(struct dp_pump *of, struct dp_entry *entry,
                               struct dp_stream *stream) {
    (void)of, (void)entry;
    fake(stream)->told_closed++;
}

static inline void told_left(struct dp_pump *of, struct dp_entry *entry) {
    (void)of, (void)entry;
}

const struct dp_front_calls dp_front_events = {.data = told_data,
                                               .reset = told_reset,
                                               .stopped = told_stopped,
                                               .closed = told_closed,
                                               .left = told_left};

/* What the peer does -------------------------------------------------------------------------- */

/* A new stream; the last ones of a connection are given back when it has too many. */
static inline struct fake_stream *open_stream(uint32_t conn, uint64_t id_bits) {
    struct dp_conn *of = &conns[conn];
    CHECK(of->count < STREAMS_MAX);
    struct fake_stream *stream = &of->streams[of->count];
    memset(stream, 0, sizeof *stream);
    stream->conn = of;
    stream->stream.id = (uint64_t)of->count++ << 2 | id_bits;
    stream->stream.in.final_size = DP_NO_SIZE;
    return stream;
}

static inline size_t offer(struct fake_stream *stream, const uint8_t *bytes, size_t length,
                           bool fin) {
    struct dp_entry *entry = &stream->conn->entry;
    if (stream->stream.in.place)
        return dp_front_raw.data(&pump, entry, &stream->stream, bytes, length, fin);
    uint8_t *copy = malloc(length + !length);
    CHECK(copy);
    if (length)
        memcpy(copy, bytes, length);
    size_t used =
        dp_front_raw.data(&pump, entry, &stream->stream, length ? copy : NULL, length, fin);
    free(copy);
    return used;
}

/* As dp_conn_deliver. */
static inline void offer_all(struct fake_stream *stream) {
    struct dp_receiving *in = &stream->stream.in;
    while (!in->discard && !in->fin_offered) {
        size_t length;
        const uint8_t *bytes = dp_stream_readable(&stream->stream, &length);
        bool fin = in->consumed + length == in->final_size;
        if (!length && !fin)
            return;
        size_t used = offer(stream, bytes, length, fin);
        if (in->discard) {
            dp_stream_consume(&stream->stream, pool, 0);
            return;
        }
        CHECK(used <= length);
        in->fin_offered = fin && used == length;
        if (used)
            dp_stream_consume(&stream->stream, pool, used);
        if (used < length)
            return;
    }
}

/* Bytes [from, to) of a request arrive in a packet, with FIN behind them or not. Where they belong
 * to a place they are decrypted there. */
static inline void arrive(struct fake_stream *stream, const uint8_t *wire, size_t from, size_t to,
                          bool fin) {
    struct dp_receiving *in = &stream->stream.in;
    if (fin)
        in->final_size = to;
    if (in->highest < to)
        in->highest = to;
    const uint8_t *bytes = wire + from;
    uint8_t *target = from < to ? dp_stream_target(&stream->stream, from, to - from) : NULL;
    if (target) {
        memcpy(target, bytes, to - from);
        bytes = target;
    }
    if (from < to)
        CHECK(dp_stream_keep(&stream->stream, pool, from, bytes, to - from));
    offer_all(stream);
}

void dp_conn_offer(struct dp_conn *conn, struct dp_stream *stream) {
    CHECK(fake(stream)->conn == conn);
    offer_all(fake(stream));
}

static inline void peer_resets(struct fake_stream *stream) {
    stream->stream.in.was_reset = true;
    dp_front_raw.reset(&pump, &stream->conn->entry, &stream->stream, 7);
}

static inline void peer_stops(struct fake_stream *stream) {
    dp_front_raw.stopped(&pump, &stream->conn->entry, &stream->stream, 7);
}

static inline void close_stream(struct fake_stream *stream) {
    dp_front_raw.closed(&pump, &stream->conn->entry, &stream->stream);
}

/* Before and after ---------------------------------------------------------------------------- */

static inline void forget_streams(void) {
    for (uint32_t i = 0; i < CONNS; i++) {
        for (uint32_t j = 0; j < conns[i].count; j++) {
            CHECK(conns[i].streams[j].stream.app_state == 0 || !conns[i].streams[j].stream.app);
            dp_stream_clear(&conns[i].streams[j].stream, pool);
        }
        CHECK(conns[i].entry.writing == 0);
        memset(&conns[i], 0, sizeof conns[i]);
        conns[i].entry = (struct dp_entry){
            .pump = &pump, .handle = i + 1, .conn = &conns[i], .front = &dp_front_raw};
        conns[i].at_ns = dp_realtime_ns();
    }
    event_count = 0;
}

static inline void make_pump(void) {
    memset(&pump, 0, sizeof pump);
    pthread_mutex_init(&pump.lock, NULL);
    pump.now = INT64_C(1000) * 1000000000;
    pool = dp_pool_new();
    CHECK(pool);
    forget_streams();
}

static inline void free_pump(void) {
    forget_streams();
    dp_raw_free(&pump);
    CHECK(!pump.raw);
    pthread_mutex_destroy(&pump.lock);
    CHECK(dp_pool_out(pool) == 0);
    dp_pool_free(pool);
}

#endif
