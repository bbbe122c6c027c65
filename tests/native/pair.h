/* Two connections back to back on a simulated link with a clock of its own: packets are lost,
 * repeated, reordered, damaged, as a seed says. */
#ifndef PAIR_H
#define PAIR_H

#include "harness.h"
#include "quic/conn.h"
#include "quic/pool.h"
#include "quic/recovery.h"

#define MS         1000000LL
#define IN_TRANSIT 4096

struct transit {
    int64_t at;
    uint32_t size;
    int to; /* 0 client, 1 server, -1: free */
    uint8_t data[DP_UDP_DATAGRAM];
};

struct link {
    uint64_t seed;
    uint32_t lost, repeated, reordered, damaged; /* in a thousand */
    int64_t delay;
    int64_t now;
    struct transit *transit;
    uint64_t sent[2], dropped;
};

struct pair {
    struct dp_pool *pool;
    struct dp_conn *conn[2];
    struct link link;
    bool touched[2];
};

static inline void hand_over_pair(struct dp_hand_over *client, struct dp_hand_over *server,
                                  uint16_t suite) {
    struct dp_hand_over base = {
        .version = 1,
        .suite = suite,
        .secret_bytes = suite == 0x1302 ? 48 : 32,
        .host_cid_bytes = 8,
        .peer_cid_bytes = 8,
        .max_datagram = 1200,
        .local_max_data = 1 << 20,
        .local_max_stream_data_bidi_local = 1 << 20,
        .local_max_stream_data_bidi_remote = 1 << 20,
        .local_max_stream_data_uni = 1 << 20,
        .local_max_streams_bidi = 128,
        .local_max_streams_uni = 128,
        .remote_max_data = 1 << 20,
        .remote_max_stream_data_bidi_local = 1 << 20,
        .remote_max_stream_data_bidi_remote = 1 << 20,
        .remote_max_stream_data_uni = 1 << 20,
        .remote_max_streams_bidi = 128,
        .remote_max_streams_uni = 128,
        .peer_ack_delay_exponent = 3,
        .peer_max_ack_delay = 25 * MS,
        .local_max_ack_delay = 25 * MS,
    };
    *client = *server = base;
    client->is_client = 1;
    client->next_bidi = 0;
    client->next_uni = 2;
    server->next_bidi = 1;
    server->next_uni = 3;
    for (int i = 0; i < 48; i++) {
        client->send_secret[i] = server->receive_secret[i] = (uint8_t)(i * 7 + 1);
        client->receive_secret[i] = server->send_secret[i] = (uint8_t)(i * 5 + 3);
    }
    memset(client->peer_cid, 0xc1, 8);
    memset(server->peer_cid, 0x5e, 8);
    client->path.family = server->path.family = 2;
}

static inline void put_in_transit(struct pair *pair, int to, const uint8_t *data, size_t size) {
    struct link *link = &pair->link;
    int64_t at = link->now + link->delay;
    if (random_below(&link->seed, 1000) < link->reordered)
        at += (int64_t)random_below(&link->seed, (uint32_t)(2 * link->delay + 1));
    for (int i = 0; i < IN_TRANSIT; i++) {
        struct transit *one = &link->transit[i];
        if (one->to >= 0)
            continue;
        *one = (struct transit){.at = at, .size = (uint32_t)size, .to = to};
        memcpy(one->data, data, size);
        if (random_below(&link->seed, 1000) < link->damaged)
            one->data[random_below(&link->seed, (uint32_t)size)] ^=
                (uint8_t)(1 + random_below(&link->seed, 255));
        return;
    }
    link->dropped++;
}

static inline void transmit(struct pair *pair, int side) {
    uint8_t datagram[DP_UDP_DATAGRAM];
    struct dp_path path;
    size_t size;
    pair->touched[side] = false;
    while ((size = dp_conn_build(pair->conn[side], pair->link.now, datagram, &path)) > 0) {
        CHECK(size <= dp_conn_datagram(pair->conn[side]));
        pair->link.sent[side]++;
        if (random_below(&pair->link.seed, 1000) < pair->link.lost) {
            pair->link.dropped++;
            continue;
        }
        put_in_transit(pair, !side, datagram, size);
        if (random_below(&pair->link.seed, 1000) < pair->link.repeated)
            put_in_transit(pair, !side, datagram, size);
    }
}

/* Everything that is due at this moment; then the clock moves on to the next event, if there is one
 * before `until`. False: nothing will happen any more. */
static inline bool step(struct pair *pair, int64_t until) {
    struct link *link = &pair->link;
    static const struct dp_path path = {.family = 2};
    int64_t next = INT64_MAX;
    for (int side = 0; side < 2; side++)
        if (dp_conn_timer(pair->conn[side]) <= link->now)
            dp_conn_on_timer(pair->conn[side], link->now);
    for (;;) {
        int first = -1;
        for (int i = 0; i < IN_TRANSIT; i++)
            if (link->transit[i].to >= 0 && link->transit[i].at <= link->now &&
                (first < 0 || link->transit[i].at < link->transit[first].at))
                first = i;
        if (first < 0)
            break;
        struct transit *one = &link->transit[first];
        int to = one->to;
        /* An exact block of its own, so that a sanitizer sees a byte too far. */
        uint8_t *copy = malloc(one->size);
        memcpy(copy, one->data, one->size);
        one->to = -1;
        dp_conn_receive(pair->conn[to], copy, one->size, &path, link->now, 1);
        free(copy);
    }
    transmit(pair, 0);
    transmit(pair, 1);
    for (int side = 0; side < 2; side++)
        if (dp_conn_timer(pair->conn[side]) < next)
            next = dp_conn_timer(pair->conn[side]);
    for (int i = 0; i < IN_TRANSIT; i++)
        if (link->transit[i].to >= 0 && link->transit[i].at < next)
            next = link->transit[i].at;
    if (next >= until)
        return false;
    link->now = next > link->now ? next : link->now + 1;
    return true;
}

static inline void pair_open(struct pair *pair, const struct dp_conn_owner *owner, void *client,
                             void *server, uint16_t suite, uint64_t seed) {
    struct dp_hand_over from[2];
    memset(pair, 0, sizeof *pair);
    hand_over_pair(&from[0], &from[1], suite);
    pair->pool = dp_pool_new();
    pair->link.seed = seed;
    pair->link.delay = 5 * MS;
    pair->link.now = 1000 * MS;
    pair->link.transit = calloc(IN_TRANSIT, sizeof *pair->link.transit);
    for (int i = 0; i < IN_TRANSIT; i++)
        pair->link.transit[i].to = -1;
    pair->conn[0] = dp_conn_new(pair->pool, &from[0], owner, client, pair->link.now);
    pair->conn[1] = dp_conn_new(pair->pool, &from[1], owner, server, pair->link.now);
    CHECK(pair->conn[0] && pair->conn[1]);
}

static inline void pair_close(struct pair *pair) {
    dp_conn_free(pair->conn[0]);
    dp_conn_free(pair->conn[1]);
    CHECK(dp_pool_out(pair->pool) == 0);
    dp_pool_free(pair->pool);
    free(pair->link.transit);
}

#endif
