/* Probe time-outs: each control packet's fate is told once, and a peer that keeps acknowledgements
 * back cannot have all that is outstanding walked through as often as it sends something.
 *
 * Argument: control packets. */
#include "pair.h"

/* How far a walk came is not told to anybody outside. */
#include "quic/conn_inside.h"

#define CONTROLS_MAX 1000
#define LOOKS_MAX    64 /* of a walk that a packet of the peer's causes */

struct fates {
    uint32_t acked[CONTROLS_MAX], lost[CONTROLS_MAX];
};

static size_t on_data(void *self, struct dp_conn *conn, struct dp_stream *stream,
                      const uint8_t *bytes, size_t length, bool fin) {
    (void)self, (void)conn, (void)stream, (void)bytes, (void)fin;
    return length;
}

static void on_reset(void *self, struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    (void)self, (void)conn, (void)stream, (void)code;
}

static void on_closed(void *self, struct dp_conn *conn, struct dp_stream *stream) {
    (void)self, (void)conn, (void)stream;
}

static void on_control(void *self, struct dp_conn *conn, const struct dp_path *path,
                       const uint8_t *cid, uint64_t pn, bool probing, const uint8_t *frames,
                       size_t size) {
    (void)self, (void)conn, (void)path, (void)cid, (void)pn, (void)probing, (void)frames;
    (void)size;
}

static void on_delivered(void *self, struct dp_conn *conn, uint64_t token, bool acked) {
    struct fates *fates = self;
    (void)conn;
    (acked ? fates->acked : fates->lost)[token]++;
}

static void on_failed(void *self, struct dp_conn *conn, uint64_t code, uint64_t type,
                      const char *reason) {
    (void)self, (void)conn;
    fail("failed: %lx in frame %lx: %s", code, type, reason);
}

static void on_touched(void *self, struct dp_conn *conn) {
    (void)self, (void)conn;
}

static const struct dp_conn_owner owner = {on_data,    on_reset,     on_reset,  on_closed,
                                           on_control, on_delivered, on_failed, on_touched};
static const struct dp_path path = {.family = 2};

/* Have all that one side has to send reach the other, or nobody. */
static void carry(struct pair *pair, int from, bool arrives) {
    uint8_t datagram[DP_UDP_DATAGRAM];
    struct dp_path to;
    size_t size;
    while ((size = dp_conn_build(pair->conn[from], pair->link.now, datagram, &to)) > 0)
        if (arrives)
            dp_conn_receive(pair->conn[!from], datagram, size, &path, pair->link.now, 1);
}

static void time_out(struct pair *pair) {
    uint32_t before = pair->conn[1]->recovery.pto_count;
    while (pair->conn[1]->recovery.pto_count == before) {
        int64_t due = dp_conn_timer(pair->conn[1]);
        CHECK(due != DP_NEVER);
        pair->link.now = due > pair->link.now ? due : pair->link.now;
        dp_conn_on_timer(pair->conn[1], pair->link.now);
    }
}

/* Fates ----------------------------------------------------------------------------------------*/

/* The packets arrived, and what says so comes after the time-out. */
static void test_fates_are_told_once(uint32_t controls) {
    static struct fates fates;
    struct pair pair;
    const uint8_t done = 0x1e;
    memset(&fates, 0, sizeof fates);
    pair_open(&pair, &owner, NULL, &fates, 0x1301, 1);
    for (uint32_t token = 0; token < controls; token++) {
        CHECK(dp_conn_control(pair.conn[1], &done, 1, token, true, NULL));
        carry(&pair, 1, true);
    }
    time_out(&pair);
    carry(&pair, 1, true);
    for (uint32_t token = 0; token < controls; token++)
        CHECK(fates.lost[token] == 1 && fates.acked[token] == 0);
    time_out(&pair);
    carry(&pair, 0, true);
    CHECK(pair.conn[1]->recovery.pto_count == 0);
    for (int i = 0; i < 3; i++) {
        pair.link.now += 10 * 1000 * MS;
        for (int side = 0; side < 2; side++) {
            dp_conn_on_timer(pair.conn[side], pair.link.now);
            carry(&pair, side, true);
        }
    }
    for (uint32_t token = 0; token < controls; token++)
        CHECK(fates.lost[token] == 1 && fates.acked[token] == 0);
    pair_close(&pair);
}

/* A peer that acknowledges nothing ------------------------------------------------------------ */

/* Its packets are sealed here, since a connection would acknowledge, or wait for it. */
struct mute {
    struct dp_sealer *sealer;
    uint64_t pn;
};

static struct mute mute_new(void) {
    struct dp_hand_over client, server;
    hand_over_pair(&client, &server, 0x1301);
    struct dp_secret secret = {.version = 1, .suite = 0x1301, .bytes = client.secret_bytes};
    memcpy(secret.secret, client.send_secret, secret.bytes);
    struct mute mute = {.sealer = dp_sealer_new(&secret)};
    CHECK(mute.sealer);
    return mute;
}

static void ping(struct mute *mute, struct pair *pair) {
    enum { CID = 8, NUMBER = 4, HEADER = 1 + CID + NUMBER, FRAMES = 4 };
    uint8_t datagram[HEADER + FRAMES + DP_TAG_BYTES] = {0x40 | (NUMBER - 1)};
    memset(datagram + 1, 0x5e, CID);
    for (int i = 0; i < NUMBER; i++)
        datagram[1 + CID + i] = (uint8_t)(mute->pn >> 8 * (NUMBER - 1 - i));
    datagram[HEADER] = DP_FRAME_PING;
    dp_sealer_seal(mute->sealer, mute->pn++, datagram, HEADER, datagram + HEADER, FRAMES);
    uint8_t mask[5];
    dp_sealer_mask(mute->sealer, datagram + 1 + CID + 4, mask);
    datagram[0] ^= mask[0] & 0x1f;
    for (int i = 0; i < NUMBER; i++)
        datagram[1 + CID + i] ^= mask[1 + i];
    CHECK(dp_conn_receive(pair->conn[1], datagram, sizeof datagram, &path, pair->link.now, 1) ==
          DP_TAKEN);
}

/* Packets go out beyond counting, all of which are outstanding, and nothing in them is worth
 * repeating: every walk is for nothing. */
static void test_walks_are_short(void) {
    struct mute mute = mute_new();
    struct pair pair;
    pair_open(&pair, &owner, NULL, NULL, 0x1301, 1);
    const struct dp_conn *conn = pair.conn[1];
    for (int i = 0; i < 3000; i++) {
        ping(&mute, &pair);
        carry(&pair, 1, false);
    }
    time_out(&pair);
    carry(&pair, 1, false);
    CHECK(conn->repeat_end > 1000);
    uint64_t walked = 0;
    for (int i = 0; i < 500; i++) {
        uint64_t before = conn->repeat_from;
        ping(&mute, &pair);
        carry(&pair, 1, false);
        uint64_t moved = conn->repeat_from - before;
        if (conn->repeat_from < before) /* round the end */
            moved = conn->repeat_from - conn->recovery.oldest + conn->repeat_end - before;
        CHECK(moved <= LOOKS_MAX);
        walked += moved;
    }
    CHECK(walked > conn->repeat_end); /* and yet they come round */
    dp_sealer_free(mute.sealer);
    pair_close(&pair);
}

int main(int argc, char **argv) {
    int controls = argc > 1 ? atoi(argv[1]) : 10;
    test_fates_are_told_once(controls < CONTROLS_MAX ? (uint32_t)controls : CONTROLS_MAX);
    test_walks_are_short();
    printf("fates told once, %u packets looked at for one that comes\n", LOOKS_MAX);
    return 0;
}
