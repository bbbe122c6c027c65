/* Every frame of a 1-RTT packet, whole, cut everywhere, and with more behind it; what must be
 * refused, and with which error; ACK ranges; and the writers against the parser. */
#include "harness.h"

#include "frame_vectors.h"
#include "quic/frames.h"
#include "quic/varint.h"

/* Table 3 of RFC 9000 section 12.4, and RFC 9221 section 5: N, a packet of these alone elicits no
 * acknowledgement; P, these alone probe a path. X: the control plane's. */
static const char *const properties[] = {
    [0x00] = "NP", [0x01] = "",  [0x02] = "N",  [0x03] = "N",  [0x04] = "",   [0x05] = "",
    [0x06] = "X",  [0x07] = "X", [0x08] = "",   [0x09] = "",   [0x0a] = "",   [0x0b] = "",
    [0x0c] = "",   [0x0d] = "",  [0x0e] = "",   [0x0f] = "",   [0x10] = "",   [0x11] = "",
    [0x12] = "",   [0x13] = "",  [0x14] = "",   [0x15] = "",   [0x16] = "",   [0x17] = "",
    [0x18] = "PX", [0x19] = "X", [0x1a] = "PX", [0x1b] = "PX", [0x1c] = "NX", [0x1d] = "NX",
    [0x1e] = "X",  [0x30] = "X", [0x31] = "X",
};
#define TYPES (sizeof properties / sizeof *properties)

/* What is being judged, for the message of a check that fails. */
static const char *judged = "";

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition))                                                                          \
            fail("%s:%d: %s: expected %s", __FILE__, __LINE__, judged, #condition);                \
    } while (0)

static size_t from_hex(const char *hex, uint8_t *to) {
    size_t size = 0;
    for (unsigned byte; *hex; hex += strspn(hex, " ")) {
        CHECK(size < BYTES_MAX && sscanf(hex, "%2x", &byte) == 1);
        to[size++] = (uint8_t)byte;
        hex += 2;
    }
    return size;
}

/* A heap block of exactly these bytes: a sanitizer sees the first byte read behind it. */
static uint8_t *exactly(const uint8_t *bytes, size_t size) {
    uint8_t *block = malloc(size ? size : 1);
    CHECK(block != NULL);
    memcpy(block, bytes, size);
    return block;
}

static void expect_fields(const struct vector *vector, const struct dp_frame *frame, size_t size) {
    const uint64_t *want = vector->fields;
    switch (vector->type) {
    case DP_FRAME_ACK:
    case DP_FRAME_ACK_ECN:
        EXPECT(frame->ack.largest == want[0] && frame->ack.delay == want[1]);
        EXPECT(frame->ack.count == want[2] && frame->ack.first == want[3]);
        break;
    case DP_FRAME_STREAM:
        EXPECT(frame->stream.id == want[0] && frame->stream.offset == want[1]);
        EXPECT(frame->stream.length == (vector->open ? size - want[4] : want[2]));
        EXPECT(frame->stream.fin == (want[3] == 1));
        EXPECT(frame->stream.data == frame->start + want[4]);
        break;
    case DP_FRAME_RESET_STREAM:
    case DP_FRAME_STOP_SENDING:
        EXPECT(frame->reset.id == want[0] && frame->reset.code == want[1]);
        EXPECT(frame->reset.final_size == want[2]);
        break;
    default:
        if (vector->type >= DP_FRAME_MAX_DATA && vector->type <= DP_FRAME_STREAMS_BLOCKED_UNI)
            EXPECT(frame->limit.id == want[0] && frame->limit.value == want[1]);
    }
}

static void expect_parsed(const struct vector *vector, const uint8_t *bytes, size_t room,
                          size_t size) {
    struct dp_frame frame;
    memset(&frame, 0xa5, sizeof frame);
    uint8_t *at = exactly(bytes, room);
    EXPECT(dp_frame_parse(at, at + room, &frame) == 0);
    EXPECT(frame.type == vector->type);
    EXPECT(frame.start == at && frame.size == size);
    expect_fields(vector, &frame, size);
    free(at);
}

static void expect_error(const uint8_t *bytes, size_t size, int error) {
    struct dp_frame frame;
    uint8_t *at = exactly(bytes, size);
    int got = dp_frame_parse(at, at + size, &frame);
    if (got != error)
        fail("%s: expected error %d of %zu bytes, got %d", judged, error, size, got);
    EXPECT(!dp_frame_peek_stream(at, at + size, 0, &frame));
    free(at);
}

/* Whole; with PINGs behind it, few and many; and cut behind each byte. */
static void check_good(const struct vector *vector) {
    uint8_t bytes[2 * BYTES_MAX];
    size_t size = from_hex(vector->hex, bytes);
    memset(bytes + size, DP_FRAME_PING, 20);
    bool takes_all = vector->open && vector->type != DP_FRAME_PADDING;
    for (size_t more = 0; more <= 20; more++)
        expect_parsed(vector, bytes, size + more, takes_all ? size + more : size);
    for (size_t cut = 0; cut < size; cut++)
        if (vector->open && cut >= vector->open)
            expect_parsed(vector, bytes, cut, cut);
        else
            expect_error(bytes, cut, DP_FRAME_ENCODING_ERROR);
}

static void check_vectors(void) {
    bool seen[TYPES] = {false};
    uint8_t bytes[BYTES_MAX];
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        judged = good[i].name;
        check_good(&good[i]);
        from_hex(good[i].hex, bytes);
        seen[bytes[0]] = true;
    }
    for (size_t type = 0; type < TYPES; type++)
        if (properties[type] && !seen[type])
            fail("no vector is of type 0x%zx", type);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        judged = bad[i].name;
        expect_error(bytes, from_hex(bad[i].hex, bytes), bad[i].error);
    }
}

/* Every type that is known, in every length but its own, and every type that is not. */
static void check_types(void) {
    for (uint64_t type = 0; type < 0x100; type++) {
        const char *has = type < TYPES ? properties[type] : NULL;
        char name[32];
        judged = name;
        snprintf(name, sizeof name, "type 0x%x", (unsigned)type);
        EXPECT(dp_frame_is_foreign(type) == (has && strchr(has, 'X')));
        EXPECT(dp_frame_probes(type) == (has && strchr(has, 'P')));
        EXPECT(dp_frame_elicits(type) == !(has && strchr(has, 'N')));
        uint8_t bytes[8 + 64] = {0};
        for (unsigned power = 1; power < 4; power++) {
            size_t size = (size_t)1 << power;
            dp_put_be(bytes, type, size);
            bytes[0] |= (uint8_t)(power << 6);
            bool shortest = dp_varint_size(type) == size;
            expect_error(bytes, sizeof bytes,
                         shortest ? DP_FRAME_ENCODING_ERROR : DP_PROTOCOL_VIOLATION);
        }
        memset(bytes, 0, sizeof bytes);
        bytes[0] = (uint8_t)type;
        if (!has && type < 0x40)
            expect_error(bytes, sizeof bytes, DP_FRAME_ENCODING_ERROR);
    }
    judged = "types that are far beyond";
    EXPECT(!dp_frame_is_foreign(64 + DP_FRAME_CRYPTO) && !dp_frame_probes(V62));
}

/* Padding that is long, with each length of it behind a frame and before one. */
static void check_packet(void) {
    judged = "a packet of several frames";
    uint8_t bytes[BYTES_MAX];
    for (size_t padding = 1; padding < 100; padding++) {
        size_t size = from_hex("01 0a 04 02 6162", bytes), frames = 0;
        memset(bytes + size, 0, padding);
        size += padding;
        bytes[size++] = DP_FRAME_HANDSHAKE_DONE;
        static const uint64_t types[] = {1, 8, 0, 0x1e};
        const size_t sizes[] = {1, 5, padding, 1};
        uint8_t *block = exactly(bytes, size);
        struct dp_frame frame;
        for (uint8_t *at = block; at < block + size; at += frame.size, frames++) {
            EXPECT(frames < 4 && dp_frame_parse(at, block + size, &frame) == 0);
            EXPECT(frame.type == types[frames] && frame.size == sizes[frames]);
        }
        EXPECT(frames == 4);
        free(block);
    }
}

/* ACK ranges ------------------------------------------------------------ */

#define RANGES_MAX 40

struct bounds {
    uint64_t low, high;
};

/* A number that takes any length as a varint, up to `bound`. */
static uint64_t any_up_to(uint64_t *seed, uint64_t bound) {
    uint64_t value = random_next(seed) >> random_below(seed, 64);
    return bound == UINT64_MAX ? value : value % (bound + 1);
}

/* Write an ACK of ranges that end at `count`, or sooner where the numbers do; how many it has. */
static uint32_t draw_ack(uint64_t *seed, struct bounds *ranges, uint32_t count) {
    uint64_t top = any_up_to(seed, DP_VARINT_MAX);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t low = top - any_up_to(seed, random_below(seed, 8) ? top / 2 : top);
        ranges[i] = (struct bounds){low, top};
        if (low < 2)
            return i + 1;
        top = low - 2 - any_up_to(seed, random_below(seed, 4) ? (low - 2) / 2 : 0);
    }
    return count;
}

static uint8_t *write_ack(uint8_t *to, const struct bounds *ranges, uint32_t count, bool ecn) {
    *to++ = ecn ? DP_FRAME_ACK_ECN : DP_FRAME_ACK;
    to = dp_put_varint(to, ranges[0].high);
    to = dp_put_varint(to, 7);
    to = dp_put_varint(to, count - 1);
    to = dp_put_varint(to, ranges[0].high - ranges[0].low);
    for (uint32_t i = 1; i < count; i++) {
        to = dp_put_varint(to, ranges[i - 1].low - ranges[i].high - 2);
        to = dp_put_varint(to, ranges[i].high - ranges[i].low);
    }
    for (uint64_t i = 0; ecn && i < 3; i++)
        to = dp_put_varint(to, 100 * i);
    return to;
}

static void expect_walk(const struct dp_frame *frame, const struct bounds *ranges, uint32_t count) {
    const uint8_t *at = NULL, *end = frame->start + frame->size;
    uint64_t index, low, high, ecn;
    for (uint32_t i = 0; i < count; i++) {
        EXPECT(dp_ack_next(frame, &at, &index, &low, &high));
        if (low != ranges[i].low || high != ranges[i].high)
            fail("%s: range %u: expected [%llu, %llu], got [%llu, %llu]", judged, i,
                 (unsigned long long)ranges[i].low, (unsigned long long)ranges[i].high,
                 (unsigned long long)low, (unsigned long long)high);
    }
    EXPECT(!dp_ack_next(frame, &at, &index, &low, &high));
    EXPECT(!dp_ack_next(frame, &at, &index, &low, &high)); /* and it stays at the end */
    for (uint64_t i = 0; frame->type == DP_FRAME_ACK_ECN && i < 3; i++) {
        EXPECT((at = dp_get_varint(at, end, &ecn)) != NULL);
        EXPECT(ecn == 100 * i);
    }
    EXPECT(at == end);
}

/* A range that goes one number below 0, or, where there is no room for it at all, begins there. */
static struct bounds below_zero(uint64_t above) {
    return above < 2 ? (struct bounds){above - 2, above - 2}
                     : (struct bounds){UINT64_MAX, above - 2};
}

static void check_acks(uint32_t amount, uint64_t *seed) {
    judged = "ACK ranges";
    for (uint32_t n = 0; n < amount; n++) {
        struct bounds ranges[RANGES_MAX + 1];
        uint8_t bytes[(RANGES_MAX + 1) * 16 + 64];
        uint32_t count = draw_ack(seed, ranges, 1 + random_below(seed, RANGES_MAX));
        bool ecn = random_below(seed, 2);
        size_t size = (size_t)(write_ack(bytes, ranges, count, ecn) - bytes);
        uint8_t *block = exactly(bytes, size);
        struct dp_frame frame;
        EXPECT(dp_frame_parse(block, block + size, &frame) == 0);
        EXPECT(frame.size == size && frame.ack.count == count - 1 && frame.ack.delay == 7);
        expect_walk(&frame, ranges, count);
        free(block);
        expect_error(bytes, random_below(seed, (uint32_t)size), DP_FRAME_ENCODING_ERROR);
        ranges[count] = below_zero(ranges[count - 1].low);
        size = (size_t)(write_ack(bytes, ranges, count + 1, ecn) - bytes);
        expect_error(bytes, size, DP_FRAME_ENCODING_ERROR);
    }
}

/* The look ahead ------------------------------------------------------------ */

static void check_peek(const struct vector *vector) {
    uint8_t bytes[BYTES_MAX];
    size_t size = from_hex(vector->hex, bytes), header = vector->fields[4];
    bool stream = vector->type == DP_FRAME_STREAM;
    for (size_t cut = 0; cut <= size; cut++) {
        uint8_t *at = exactly(bytes, cut);
        struct dp_frame frame;
        for (size_t more = 0; more < 3; more++) {
            bool whole = dp_frame_peek_stream(at, at + cut, size - cut + more, &frame);
            EXPECT(whole == (stream && cut >= header));
            if (!whole)
                continue;
            EXPECT(frame.type == DP_FRAME_STREAM && frame.start == at);
            EXPECT(frame.size == (vector->open ? size + more : size));
            expect_fields(vector, &frame, frame.size);
        }
        if (stream && !vector->open && cut < size)
            EXPECT(!dp_frame_peek_stream(at, at + cut, size - cut - 1, &frame));
        free(at);
    }
}

static void check_peeks(void) {
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        judged = good[i].name;
        check_peek(&good[i]);
    }
    judged = "a look ahead beyond 2^62 - 1";
    uint8_t bytes[BYTES_MAX];
    struct dp_frame frame;
    const uint8_t *end = bytes + from_hex("0c 04 fffffffffffffffe", bytes);
    EXPECT(dp_frame_peek_stream(bytes, end, 1, &frame) && frame.stream.length == 1);
    EXPECT(!dp_frame_peek_stream(bytes, end, 2, &frame));
    end = bytes + from_hex("0e 04 fffffffffffffffe 02", bytes);
    EXPECT(!dp_frame_peek_stream(bytes, end, 1000, &frame));
    judged = "a look ahead at a type that is too long";
    end = bytes + from_hex("400a 04 02 6162", bytes);
    EXPECT(!dp_frame_peek_stream(bytes, end, 0, &frame));
}

/* Writers ------------------------------------------------------------ */

static void expect_written(const uint8_t *bytes, const uint8_t *end, const char *hex) {
    uint8_t want[BYTES_MAX];
    size_t size = from_hex(hex, want);
    EXPECT((size_t)(end - bytes) == size && memcmp(bytes, want, size) == 0);
}

static void check_written_bytes(void) {
    uint8_t to[64];
    judged = "what the writers write";
    expect_written(to, dp_put_stream_header(to, 4, 0, false, 9, false), "08 04");
    expect_written(to, dp_put_stream_header(to, 4, 0, false, 9, true), "09 04");
    expect_written(to, dp_put_stream_header(to, 4, 0, true, 64, false), "0a 04 4040");
    expect_written(to, dp_put_stream_header(to, 4, 256, true, 9, true), "0f 04 4100 09");
    expect_written(to, dp_put_stream_header(to, 4, 256, false, 9, false), "0c 04 4100");
    expect_written(to, dp_put_limit(to, DP_FRAME_MAX_DATA, 70000), "10 80011170");
    expect_written(to, dp_put_limit(to, DP_FRAME_STREAMS_BLOCKED_UNI, 1), "17 01");
    expect_written(to, dp_put_stream_limit(to, DP_FRAME_MAX_STREAM_DATA, 4, 256), "11 04 4100");
    expect_written(to, dp_put_reset(to, 4, 256, 70000), "04 04 4100 80011170");
    expect_written(to, dp_put_stop(to, 5, V62), "05 05 ffffffffffffffff");
}

static const struct dp_frame *read_back(const uint8_t *bytes, const uint8_t *end, uint64_t type) {
    static struct dp_frame frame;
    EXPECT(dp_frame_parse(bytes, end, &frame) == 0);
    EXPECT(frame.type == type && frame.size == (size_t)(end - bytes));
    return &frame;
}

static void write_stream(uint64_t *seed) {
    judged = "a STREAM frame that was written";
    uint8_t bytes[BYTES_MAX + 32];
    size_t length = random_below(seed, BYTES_MAX);
    uint64_t id = any_up_to(seed, DP_VARINT_MAX), offset = any_up_to(seed, DP_VARINT_MAX - length);
    bool counted = random_below(seed, 2), fin = random_below(seed, 2);
    uint8_t *data = dp_put_stream_header(bytes, id, offset, counted, length, fin);
    EXPECT((size_t)(data - bytes) == dp_stream_header_size(id, offset, counted, length));
    memset(data, 0, length);
    const struct dp_frame *frame = read_back(bytes, data + length, DP_FRAME_STREAM);
    EXPECT(frame->stream.id == id && frame->stream.offset == offset && frame->stream.fin == fin);
    EXPECT(frame->stream.data == data && frame->stream.length == length);
}

static void write_limits(uint64_t *seed) {
    judged = "a frame of a limit that was written";
    uint8_t bytes[64];
    for (uint64_t type = DP_FRAME_MAX_DATA; type <= DP_FRAME_STREAMS_BLOCKED_UNI; type++) {
        bool stream = type == DP_FRAME_MAX_STREAM_DATA || type == DP_FRAME_STREAM_DATA_BLOCKED;
        bool bytes_limit = stream || type == DP_FRAME_MAX_DATA || type == DP_FRAME_DATA_BLOCKED;
        uint64_t value = any_up_to(seed, bytes_limit ? DP_VARINT_MAX : 1ULL << 60);
        uint64_t id = stream ? any_up_to(seed, DP_VARINT_MAX) : 0;
        uint8_t *end =
            stream ? dp_put_stream_limit(bytes, type, id, value) : dp_put_limit(bytes, type, value);
        const struct dp_frame *frame = read_back(bytes, end, type);
        EXPECT(frame->limit.value == value && frame->limit.id == id);
    }
}

static void write_resets(uint64_t *seed) {
    judged = "a reset that was written";
    uint8_t bytes[64];
    uint64_t id = any_up_to(seed, DP_VARINT_MAX), code = any_up_to(seed, DP_VARINT_MAX);
    uint64_t size = any_up_to(seed, DP_VARINT_MAX);
    const struct dp_frame *frame =
        read_back(bytes, dp_put_reset(bytes, id, code, size), DP_FRAME_RESET_STREAM);
    EXPECT(frame->reset.id == id && frame->reset.code == code && frame->reset.final_size == size);
    frame = read_back(bytes, dp_put_stop(bytes, id, code), DP_FRAME_STOP_SENDING);
    EXPECT(frame->reset.id == id && frame->reset.code == code && frame->reset.final_size == 0);
}

int main(int argc, char **argv) {
    uint32_t amount = argument(argc, argv, 1, 10000);
    uint64_t seed = argument(argc, argv, 2, 1);
    check_vectors();
    check_types();
    check_packet();
    check_acks(amount, &seed);
    check_peeks();
    check_written_bytes();
    for (uint32_t i = 0; i < amount; i++) {
        write_stream(&seed);
        write_limits(&seed);
        write_resets(&seed);
    }
    printf("frames: %zu that parse, each cut everywhere, %zu that are refused, %u drawn\n",
           sizeof good / sizeof *good, sizeof bad / sizeof *bad, amount);
    return 0;
}
