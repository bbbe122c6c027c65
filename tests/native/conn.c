/* Two connections on a bad link: every stream arrives whole, once and in order, whatever is lost,
 * repeated, reordered or damaged; bytes with a place are written nowhere else.
 *
 * Arguments: streams in all, seed. */
#include "pair.h"

#define PLACE   24000
#define ANSWER  64
#define ANSWERS 0x5555 /* what an answer's bytes are drawn from, beside the id */
/* Where the place of a placed stream begins: behind a header. */
#define HEADER 48

struct side {
    struct pair *pair;
    int number;
    uint64_t got, resets, stops, closed, delivered;
    bool failed;
    /* One stream's place at a time, with canaries around it. */
    uint64_t placed_id;
    bool has_place;
    uint8_t place[64 + PLACE + 64];
};

static uint8_t byte_of(uint64_t id, uint64_t offset) {
    uint64_t z = id * 0x9E3779B97F4A7C15ULL + offset * 0xBF58476D1CE4E5B9ULL;
    return (uint8_t)(z >> 29);
}

static uint32_t size_of(uint64_t id) {
    uint64_t seed = id * 77 + 5;
    uint32_t kind = random_below(&seed, 10);
    return kind == 0 ? 0 : kind < 6 ? random_below(&seed, 900) : random_below(&seed, 40000);
}

/* The client's own: the answer to a stream. */
static void take_answer(struct dp_stream *stream, const uint8_t *bytes, size_t length, bool fin) {
    for (size_t i = 0; i < length; i++)
        CHECK(bytes[i] == byte_of(stream->id ^ ANSWERS, stream->in.consumed + i));
    CHECK(!fin || stream->in.consumed + length == ANSWER);
}

static void answer(struct dp_conn *conn, struct dp_stream *stream) {
    uint8_t bytes[ANSWER];
    for (uint32_t i = 0; i < ANSWER; i++)
        bytes[i] = byte_of(stream->id ^ ANSWERS, i);
    CHECK(dp_conn_send(conn, stream, bytes, ANSWER, true));
}

static size_t on_data(void *self, struct dp_conn *conn, struct dp_stream *stream,
                      const uint8_t *bytes, size_t length, bool fin) {
    struct side *side = self;
    uint64_t from = stream->in.consumed;
    if (side->number == 0) {
        take_answer(stream, bytes, length, fin);
        return length;
    }
    for (size_t i = 0; i < length; i++)
        if (bytes[i] != byte_of(stream->id, from + i))
            fail("stream %lu differs at byte %lu", stream->id, from + i);
    if (from == 0 && length > 3 && !fin && !side->has_place && length <= HEADER)
        return 0; /* not enough yet: it is offered again */
    if (from == 0 && length > HEADER && !fin && !side->has_place && size_of(stream->id) <= PLACE) {
        memset(side->place, 0xA5, sizeof side->place);
        side->has_place = true;
        side->placed_id = stream->id;
        /* All but the last three bytes are taken; those are offered again, out of the place. */
        length -= length > HEADER + 3 ? 3 : 0;
        memcpy(side->place + 64, bytes + HEADER, length - HEADER);
        dp_conn_set_place(conn, stream, side->place + 64, HEADER, size_of(stream->id));
    }
    side->got += length;
    if (fin) {
        CHECK(from + length == size_of(stream->id));
        if (!(stream->id & DP_STREAM_IS_UNI))
            answer(conn, stream);
    }
    return length;
}

static void on_reset(void *self, struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    (void)conn, (void)stream, (void)code;
    ((struct side *)self)->resets++;
}

static void on_stopped(void *self, struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    (void)conn, (void)stream, (void)code;
    ((struct side *)self)->stops++;
}

static void on_closed(void *self, struct dp_conn *conn, struct dp_stream *stream) {
    struct side *side = self;
    (void)conn;
    side->closed++;
    if (!side->has_place || side->placed_id != stream->id)
        return;
    uint32_t size = size_of(stream->id);
    for (uint32_t i = HEADER; i < size; i++)
        if (side->place[64 + i - HEADER] != byte_of(stream->id, i))
            fail("the place of stream %lu differs at %u", stream->id, i);
    for (int i = 0; i < 64; i++)
        CHECK(side->place[i] == 0xA5);
    for (size_t i = 64 + size - HEADER; i < sizeof side->place; i++)
        CHECK(side->place[i] == 0xA5);
    side->has_place = false;
}

static void on_control(void *self, struct dp_conn *conn, const struct dp_path *path,
                       const uint8_t *cid, uint64_t pn, bool probing, const uint8_t *frames,
                       size_t size) {
    (void)conn, (void)path, (void)cid, (void)pn, (void)probing;
    struct side *side = self;
    CHECK(size == 1 && frames[0] == 0x1e && side->number == 0);
}

static void on_delivered(void *self, struct dp_conn *conn, uint64_t token, bool acked) {
    struct side *side = self;
    const uint8_t done = 0x1e;
    if (acked)
        side->delivered++;
    else
        CHECK(dp_conn_control(conn, &done, 1, token, true, NULL));
}

static void on_failed(void *self, struct dp_conn *conn, uint64_t code, uint64_t type,
                      const char *reason) {
    (void)conn;
    fail("side %d failed: %lx in frame %lx: %s", ((struct side *)self)->number, code, type, reason);
}

static void on_touched(void *self, struct dp_conn *conn) {
    (void)conn;
    struct side *side = self;
    side->pair->touched[side->number] = true;
}

static const struct dp_conn_owner owner = {on_data,    on_reset,     on_stopped, on_closed,
                                           on_control, on_delivered, on_failed,  on_touched};

static void run(uint32_t streams, uint64_t seed, uint16_t suite, uint32_t bad, uint64_t update) {
    struct pair pair;
    static struct side sides[2];
    memset(sides, 0, sizeof sides);
    for (int i = 0; i < 2; i++)
        sides[i].pair = &pair, sides[i].number = i;
    pair_open(&pair, &owner, &sides[0], &sides[1], suite, seed);
    pair.link.lost = pair.link.repeated = pair.link.reordered = bad;
    pair.link.damaged = bad / 3;
    dp_conn_update_keys_every(pair.conn[0], update);
    dp_conn_update_keys_every(pair.conn[1], update ? update * 2 : 0);
    const uint8_t done = 0x1e;
    CHECK(dp_conn_control(pair.conn[1], &done, 1, 7, true, NULL));

    static uint8_t bytes[40000];
    uint64_t expected = 0;
    uint32_t begun = 0, answers = 0;
    int64_t until = pair.link.now + 600 * 1000 * MS;
    while (sides[1].closed < streams || sides[0].closed < streams) {
        while (begun < streams && begun < sides[0].closed + 20) {
            bool uni = begun % 5 == 4;
            struct dp_stream *stream = dp_conn_open(pair.conn[0], uni);
            CHECK(stream);
            uint32_t size = size_of(stream->id);
            for (uint32_t i = 0; i < size; i++)
                bytes[i] = byte_of(stream->id, i);
            /* In two writes, to have a FIN of its own now and then. */
            uint32_t half = random_below(&pair.link.seed, size + 1);
            CHECK(dp_conn_send(pair.conn[0], stream, bytes, half, false));
            CHECK(dp_conn_send(pair.conn[0], stream, bytes + half, size - half, true));
            expected += size;
            answers += !uni;
            begun++;
        }
        if (!step(&pair, until))
            break;
    }
    (void)answers;
    struct dp_conn_stats stats = dp_conn_stats(pair.conn[0]);
    if (sides[1].closed < streams || sides[0].closed < streams)
        fail("stuck: %lu and %lu of %u streams closed, %lu bytes of %lu", sides[0].closed,
             sides[1].closed, streams, sides[1].got, expected);
    CHECK(sides[1].delivered == 1);
    CHECK(dp_conn_unacked(pair.conn[0]) == 0);
    if (update)
        CHECK(stats.key_updates > 1);
    printf(
        "suite %x, %u in a thousand bad: %u streams, %lu bytes in %.2f s, %lu packets, %lu lost, "
        "%lu key updates, %lu forged\n",
        suite, bad, streams, sides[1].got, (double)(pair.link.now - 1000 * MS) / 1e9,
        stats.packets_out, stats.lost, stats.key_updates, dp_conn_stats(pair.conn[1]).forged);
    pair_close(&pair);
}

int main(int argc, char **argv) {
    uint32_t streams = argc > 1 ? (uint32_t)atoi(argv[1]) : 100;
    uint64_t seed = argc > 2 ? (uint64_t)atoll(argv[2]) : 1;
    run(streams, seed, 0x1301, 0, 0);
    run(streams, seed + 1, 0x1301, 20, 100);
    run(streams, seed + 2, 0x1302, 100, 100);
    run(streams / 2 + 1, seed + 3, 0x1303, 300, 50);
    return 0;
}
