/* The input is what a peer sends to a connection: a row of packets, each a kind, a length (u16,
 * little-endian) and its payload. They are sealed as a peer would seal them, forged, repeated or
 * given as they are.
 *
 * Whatever comes: nothing is written outside of the place that a stream was given (canaries), what
 * had come is never overwritten, a forged packet changes no byte that counts, the application's
 * bytes come in order and once, and all memory is back at the end. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quic/conn_inside.h"

#define CANARY 32
#define PLACE  512
#define HEADER 4

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "FAILED: %s:%d: %s\n", __FILE__, __LINE__, #condition);                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum kind { SEALED = 0, JUMPED = 1, GIVEN = 2, FORGED = 3, REPEATED = 4, UPDATED = 5, KINDS = 6 };

struct peer {
    struct dp_sealer *sealer;
    uint64_t pn;
    uint8_t last[2048];
    size_t last_size;
};

struct app {
    uint8_t place[CANARY + PLACE + CANARY];
    uint8_t came[PLACE]; /* the bytes that count, as they were when they came */
    bool counts[PLACE];
    struct dp_stream *placed;
    bool failed;
    uint64_t next_offset; /* of the placed stream */
};

static size_t on_data(void *self, struct dp_conn *conn, struct dp_stream *stream,
                      const uint8_t *bytes, size_t length, bool fin) {
    struct app *app = self;
    static volatile uint8_t seen;
    for (size_t i = 0; i < length; i++)
        seen = bytes[i];
    CHECK(!length || seen == bytes[length - 1]);
    if (stream == app->placed) {
        CHECK(stream->in.consumed == app->next_offset);
        app->next_offset += length;
        if (fin)
            dp_conn_send(conn, stream, bytes, length, true);
        return length;
    }
    if (!app->placed && stream->in.consumed == 0 && length >= HEADER && !fin &&
        !(stream->id & DP_STREAM_IS_UNI)) {
        app->placed = stream;
        memset(app->counts, 0, sizeof app->counts);
        app->next_offset = HEADER;
        dp_conn_set_place(conn, stream, app->place + CANARY, HEADER, HEADER + PLACE);
        return HEADER;
    }
    if (stream->id % 16 == 4)
        dp_conn_stop(conn, stream, 7);
    else if (stream->id % 16 == 8)
        return length / 2;
    if (fin && !(stream->id & DP_STREAM_IS_UNI))
        dp_conn_send(conn, stream, bytes, length, true);
    return length;
}

static void on_reset(void *self, struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    (void)self;
    dp_conn_reset(conn, stream, code);
}

static void on_stopped(void *self, struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    (void)self;
    dp_conn_stop(conn, stream, code);
}

static void on_closed(void *self, struct dp_conn *conn, struct dp_stream *stream) {
    struct app *app = self;
    (void)conn;
    if (app->placed == stream)
        app->placed = NULL;
}

static void on_control(void *self, struct dp_conn *conn, const struct dp_path *path,
                       const uint8_t *cid, uint64_t pn, bool probing, const uint8_t *frames,
                       size_t size) {
    (void)self, (void)path, (void)cid, (void)pn, (void)probing;
    if (size)
        dp_conn_control(conn, frames, size < 100 ? size : 100, pn, true, NULL);
}

static void on_delivered(void *self, struct dp_conn *conn, uint64_t token, bool acked) {
    (void)self, (void)conn, (void)token, (void)acked;
}

static void on_failed(void *self, struct dp_conn *conn, uint64_t code, uint64_t type,
                      const char *reason) {
    struct app *app = self;
    (void)conn, (void)type;
    CHECK(!app->failed && code && reason);
    app->failed = true;
}

static void on_touched(void *self, struct dp_conn *conn) {
    (void)self, (void)conn;
}

static const struct dp_conn_owner owner = {on_data,    on_reset,     on_stopped, on_closed,
                                           on_control, on_delivered, on_failed,  on_touched};

/* What came is as it was when it came; what came now, from what the connection says, is noted. */
static void check_place(struct app *app) {
    const struct dp_receiving *in = &app->placed->in;
    for (uint64_t i = 0; i < PLACE; i++) {
        uint64_t offset = HEADER + i;
        bool came = offset < in->frontier || dp_ranges_have(&in->beyond, offset);
        CHECK(came || !app->counts[i]);
        if (app->counts[i])
            CHECK(app->came[i] == app->place[CANARY + i]);
        app->counts[i] = came;
        app->came[i] = app->place[CANARY + i];
    }
}

static void check_canaries(const struct app *app) {
    for (size_t i = 0; i < CANARY; i++)
        CHECK(app->place[i] == 0xA5 && app->place[CANARY + PLACE + i] == 0xA5);
}

static size_t seal(struct peer *peer, uint8_t *to, const uint8_t *payload, size_t size) {
    const size_t header = 1 + 8 + 4;
    to[0] = (uint8_t)(0x43 | dp_sealer_phase(peer->sealer) << 2);
    memset(to + 1, 0xc1, 8);
    dp_put_be(to + 9, peer->pn, 4);
    memcpy(to + header, payload, size);
    dp_sealer_seal(peer->sealer, peer->pn, to, header, to + header, size);
    uint8_t mask[5];
    dp_sealer_mask(peer->sealer, to + 9 + 4, mask);
    to[0] ^= mask[0] & 0x1f;
    for (int i = 0; i < 4; i++)
        to[9 + i] ^= mask[1 + i];
    return header + size + DP_TAG_BYTES;
}

static int give(struct dp_conn *conn, const uint8_t *packet, size_t size, int64_t now) {
    static const struct dp_path path = {.family = 2};
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, packet, size);
    int taken = dp_conn_receive(conn, copy, size, &path, now, 1);
    free(copy);
    return taken;
}

static void one_packet(struct peer *peer, struct app *app, struct dp_conn *conn, uint8_t kind,
                       const uint8_t *payload, size_t size, int64_t now) {
    uint8_t packet[2048];
    switch (kind % KINDS) {
    case GIVEN:
        packet[0] = 0x40;
        memcpy(packet + 1, payload, size);
        CHECK(give(conn, packet, size + 1, now) != DP_TAKEN);
        break;
    case REPEATED:
        if (peer->last_size)
            CHECK(give(conn, peer->last, peer->last_size, now) != DP_TAKEN);
        break;
    case FORGED: {
        size_t sealed = seal(peer, packet, payload, size);
        packet[sealed - 1 - kind % DP_TAG_BYTES] ^= 1;
        int taken = give(conn, packet, sealed, now);
        /* In a short packet the tag is part of the sample, and another number comes out. */
        CHECK(taken == DP_FORGED || taken == DP_CLOSED || taken == DP_DUPLICATE);
        break;
    }
    default:
        if (kind % KINDS == UPDATED)
            dp_sealer_update(peer->sealer);
        peer->pn += kind % KINDS == JUMPED ? kind / KINDS : 0;
        peer->last_size = seal(peer, peer->last, payload, size);
        peer->pn++;
        give(conn, peer->last, peer->last_size, now);
    }
    check_canaries(app);
    if (app->placed && !app->placed->in.discard)
        check_place(app);
}

static void drain(struct dp_conn *conn, int64_t now) {
    uint8_t datagram[DP_UDP_DATAGRAM];
    struct dp_path path;
    size_t size;
    for (int i = 0; i < 1000 && (size = dp_conn_build(conn, now, datagram, &path)) > 0; i++)
        CHECK(size <= dp_conn_datagram(conn));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct dp_hand_over from = {.version = 1,
                                .suite = DP_SUITE_AES_128_GCM,
                                .secret_bytes = 32,
                                .host_cid_bytes = 8,
                                .peer_cid_bytes = 8,
                                .max_datagram = 1200,
                                .local_max_data = 4096,
                                .local_max_stream_data_bidi_local = 2048,
                                .local_max_stream_data_bidi_remote = 2048,
                                .local_max_stream_data_uni = 1024,
                                .local_max_streams_bidi = 8,
                                .local_max_streams_uni = 4,
                                .remote_max_data = 4096,
                                .remote_max_stream_data_bidi_remote = 1024,
                                .remote_max_stream_data_bidi_local = 1024,
                                .remote_max_streams_bidi = 4,
                                .next_bidi = 1,
                                .next_uni = 3,
                                .peer_ack_delay_exponent = 3,
                                .path = {.family = 2}};
    struct dp_secret secret = {.version = 1, .suite = DP_SUITE_AES_128_GCM, .bytes = 32};
    struct dp_pool *pool = dp_pool_new();
    struct app app = {0};
    memset(app.place, 0xA5, sizeof app.place);
    struct peer peer = {.sealer = dp_sealer_new(&secret)};
    int64_t now = 1000000000;
    struct dp_conn *conn = dp_conn_new(pool, &from, &owner, &app, now);
    CHECK(conn && peer.sealer);
    struct dp_stream *own = dp_conn_open(conn, false);
    dp_conn_send(conn, own, data, size < 100 ? size : 100, true);
    drain(conn, now);
    while (size >= 3) {
        uint8_t kind = data[0];
        size_t length = (size_t)(data[1] | data[2] << 8);
        data += 3;
        size -= 3;
        length = length < size ? length : size;
        length = length < 1400 ? length : 1400;
        one_packet(&peer, &app, conn, kind, data, length, now);
        data += length;
        size -= length;
        now += 1000000;
        if (dp_conn_timer(conn) <= now)
            dp_conn_on_timer(conn, now);
        drain(conn, now);
    }
    now += 10000000000;
    dp_conn_on_timer(conn, now);
    drain(conn, now);
    dp_conn_free(conn);
    dp_sealer_free(peer.sealer);
    CHECK(dp_pool_out(pool) == 0);
    dp_pool_free(pool);
    return 0;
}
