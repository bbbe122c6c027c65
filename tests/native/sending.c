/* The sending half of a stream against a model: whatever is acknowledged or lost in whatever order,
 * what goes out is what was written, nothing below the acknowledged front is touched, and once the
 * peer has everything, nothing is left.
 *
 * Arguments: rounds, seed. */
#include "harness.h"
#include "quic/pool.h"
#include "quic/streams.h"

#define SIZE    60000
#define PACKETS 40000

struct sent {
    uint64_t offset;
    size_t length;
    bool fin;
};

static struct sent sent[PACKETS];

static uint8_t byte_of(uint64_t offset) {
    return (uint8_t)(offset * 131 + (offset >> 8) * 7);
}

static void check_invariants(const struct dp_stream *stream) {
    const struct dp_sending *out = &stream->out;
    CHECK(out->base <= out->start && out->start <= out->next && out->next <= out->stop);
    CHECK(!out->lost.count || out->lost.range[0].from >= out->start);
    CHECK(!out->lost.count || out->lost.range[out->lost.count - 1].to <= out->next);
    CHECK(!out->acked.count || out->acked.range[0].from > out->start);
}

/* Send what there is, in frames of at most `room` bytes; how many are out now. */
static uint32_t send_some(struct dp_stream *stream, struct dp_pool *pool, size_t room,
                          uint32_t count, uint32_t most) {
    uint64_t offset;
    const uint8_t *bytes;
    size_t length;
    bool fin, is_new;
    while (count < most &&
           dp_stream_next(stream, room, SIZE, &offset, &bytes, &length, &fin, &is_new)) {
        for (size_t i = 0; i < length; i++)
            CHECK(bytes[i] == byte_of(offset + i));
        CHECK(length || fin);
        dp_stream_sent(stream, pool, offset, length, fin);
        sent[count++] = (struct sent){offset, length, fin};
        check_invariants(stream);
    }
    return count;
}

static void settle(struct dp_stream *stream, struct dp_pool *pool, const struct sent *one,
                   bool acked) {
    (acked ? dp_stream_acked : dp_stream_lost)(stream, pool, one->offset, one->length, one->fin);
    check_invariants(stream);
}

static void write_all(struct dp_stream *stream, struct dp_pool *pool, uint64_t *seed) {
    static uint8_t bytes[SIZE];
    for (uint64_t i = 0; i < SIZE; i++)
        bytes[i] = byte_of(i);
    for (uint64_t at = 0; at < SIZE;) {
        size_t length = 1 + random_below(seed, 9000);
        length = length < SIZE - at ? length : SIZE - at;
        CHECK(dp_stream_write(stream, pool, bytes + at, length, at + length == SIZE));
        at += length;
    }
}

static struct dp_stream *new_stream(void) {
    struct dp_stream *stream = calloc(1, sizeof *stream);
    stream->out.limit = SIZE;
    stream->in.final_size = DP_NO_SIZE;
    return stream;
}

static void finish(struct dp_stream *stream, struct dp_pool *pool) {
    CHECK(stream->out.done && !dp_stream_unacked(stream) && !dp_stream_has_data(stream));
    dp_stream_clear(stream, pool);
    free(stream);
    CHECK(dp_pool_out(pool) == 0);
    dp_pool_free(pool);
}

static void at_random(uint64_t seed) {
    struct dp_pool *pool = dp_pool_new();
    struct dp_stream *stream = new_stream();
    write_all(stream, pool, &seed);
    size_t room = 1 + random_below(&seed, 1200);
    uint32_t bad = random_below(&seed, 60), count = 0;
    for (uint32_t rounds = 0; !stream->out.done; rounds++) {
        count = send_some(stream, pool, room, count, 1 + random_below(&seed, PACKETS));
        CHECK(count && rounds < 10 * PACKETS);
        for (uint32_t i = random_below(&seed, count + 1); i < count;) {
            uint32_t which = random_below(&seed, count);
            struct sent one = sent[which];
            sent[which] = sent[--count];
            settle(stream, pool, &one, random_below(&seed, 100) >= bad);
        }
        if (!dp_stream_has_data(stream) && count) {
            struct sent one = sent[--count];
            settle(stream, pool, &one, true);
        }
    }
    finish(stream, pool);
}

/* Every second frame is acknowledged, the others are lost or acknowledged later: more ranges than
 * are kept. */
static void alternating(bool lost, uint64_t seed) {
    struct dp_pool *pool = dp_pool_new();
    struct dp_stream *stream = new_stream();
    write_all(stream, pool, &seed);
    uint32_t count = send_some(stream, pool, 4, 0, PACKETS);
    CHECK(count > 4 * DP_STREAM_RANGES);
    for (uint32_t i = 1; i < count; i += 2)
        settle(stream, pool, &sent[i], true);
    for (uint32_t i = 0; i < count; i += 2)
        settle(stream, pool, &sent[i], !lost);
    for (uint32_t rounds = 0; !stream->out.done; rounds++) {
        count = send_some(stream, pool, 1200, 0, PACKETS);
        CHECK(count && rounds < 100);
        for (uint32_t i = 0; i < count; i++)
            settle(stream, pool, &sent[i], true);
    }
    finish(stream, pool);
}

int main(int argc, char **argv) {
    uint32_t rounds = argc > 1 ? (uint32_t)atoi(argv[1]) : 50;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    alternating(true, seed);
    alternating(false, seed);
    for (uint32_t i = 0; i < rounds; i++)
        at_random(seed * 1000 + i);
    printf("sending: %u rounds at random, and with more ranges than are kept\n", rounds);
    return 0;
}
