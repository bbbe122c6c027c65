/* The frames of 1-RTT packets. What a frame may be wrong in is all FRAME_ENCODING_ERROR, so every
 * reader below says where the frame ends, or NULL; only the type itself has an error of its own. */
#include "frames.h"

#include <string.h>

#include "varint.h"

/* A stream count beyond this would name a stream whose id is no varint (RFC 9000 section 19.11). */
#define STREAMS_MAX (1ULL << 60)
#define CID_MAX     20
#define TOKEN_BYTES 16
#define PATH_BYTES  8

#define STREAM_FIN    0x01
#define STREAM_LENGTH 0x02
#define STREAM_OFFSET 0x04

/* Apart, so that what is rare does not fill each place that reads a field. */
__attribute__((noinline)) static const uint8_t *take_near_end(const uint8_t *at, const uint8_t *end,
                                                              uint64_t *value) {
    return dp_get_varint(at, end, value);
}

/* Read a varint. NULL in is NULL out, so that a row of fields is checked once, behind the last.
 * Where eight bytes can be read, which is nearly everywhere, no length is branched on. */
static inline const uint8_t *take(const uint8_t *at, const uint8_t *end, uint64_t *value) {
    *value = 0;
    if (!at)
        return NULL;
    if (end - at < 8)
        return take_near_end(at, end, value);
    uint64_t word;
    memcpy(&word, at, 8);
    if (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
        word = __builtin_bswap64(word);
    unsigned bits = 8U << (word >> 62);
    *value = (word << 2) >> (66 - bits);
    return at + bits / 8;
}

static const uint8_t *skip(const uint8_t *at, const uint8_t *end, uint64_t bytes) {
    return at && bytes <= (size_t)(end - at) ? at + bytes : NULL;
}

/* The ranges are walked here once for their sums, so that dp_ack_next need not doubt them. Each
 * takes two bytes or more, so a count that is a lie ends with the packet. */
static const uint8_t *read_ack(const uint8_t *at, const uint8_t *end, struct dp_frame *frame) {
    at = take(at, end, &frame->ack.largest);
    at = take(at, end, &frame->ack.delay);
    at = take(at, end, &frame->ack.count);
    at = take(at, end, &frame->ack.first);
    if (!at || frame->ack.first > frame->ack.largest)
        return NULL;
    frame->ack.ranges = at;
    uint64_t low = frame->ack.largest - frame->ack.first, gap, length;
    for (uint64_t i = 0; i < frame->ack.count; i++) {
        at = take(at, end, &gap);
        at = take(at, end, &length);
        /* A range is at least two below the one above it (section 19.3.1); no sum here wraps. */
        if (!at || gap + 2 + length > low)
            return NULL;
        low -= gap + 2 + length;
    }
    uint64_t counts;
    for (int i = 0; frame->type == DP_FRAME_ACK_ECN && i < 3; i++)
        at = take(at, end, &counts);
    return at;
}

/* The data may go on for `beyond` bytes behind `end`. Whether the whole frame is sound; its header
 * ends where `data` begins. */
static bool read_stream(const uint8_t *at, const uint8_t *end, size_t beyond,
                        struct dp_frame *frame) {
    uint64_t offset = 0, length = 0;
    uint8_t bits = *at;
    at = take(at + 1, end, &frame->stream.id);
    if (bits & STREAM_OFFSET)
        at = take(at, end, &offset);
    if (bits & STREAM_LENGTH)
        at = take(at, end, &length);
    if (!at)
        return false;
    size_t room = (size_t)(end - at) + beyond;
    if (!(bits & STREAM_LENGTH))
        length = room;
    if (length > room || length > DP_VARINT_MAX - offset)
        return false;
    frame->type = DP_FRAME_STREAM;
    frame->stream.offset = offset;
    frame->stream.data = at;
    frame->stream.length = (size_t)length;
    frame->stream.fin = bits & STREAM_FIN;
    frame->size = (size_t)(at - frame->start) + (size_t)length;
    return true;
}

static const uint8_t *read_reset(const uint8_t *at, const uint8_t *end, struct dp_frame *frame) {
    at = take(at, end, &frame->reset.id);
    at = take(at, end, &frame->reset.code);
    frame->reset.final_size = 0;
    return frame->type == DP_FRAME_RESET_STREAM ? take(at, end, &frame->reset.final_size) : at;
}

static const uint8_t *read_limit(const uint8_t *at, const uint8_t *end, struct dp_frame *frame) {
    uint64_t type = frame->type;
    frame->limit.id = 0;
    if (type == DP_FRAME_MAX_STREAM_DATA || type == DP_FRAME_STREAM_DATA_BLOCKED)
        at = take(at, end, &frame->limit.id);
    at = take(at, end, &frame->limit.value);
    bool streams = type == DP_FRAME_MAX_STREAMS_BIDI || type == DP_FRAME_MAX_STREAMS_UNI ||
                   type == DP_FRAME_STREAMS_BLOCKED_BIDI || type == DP_FRAME_STREAMS_BLOCKED_UNI;
    return streams && frame->limit.value > STREAMS_MAX ? NULL : at;
}

static const uint8_t *read_new_connection_id(const uint8_t *at, const uint8_t *end) {
    uint64_t sequence, retire;
    at = take(at, end, &sequence);
    at = take(at, end, &retire);
    if (!at || at == end || retire > sequence || *at < 1 || *at > CID_MAX)
        return NULL;
    return skip(at + 1, end, (uint64_t)*at + TOKEN_BYTES);
}

/* `fields` varints, and then as many bytes as one more varint says. */
static const uint8_t *skip_counted(const uint8_t *at, const uint8_t *end, int fields) {
    uint64_t value;
    for (int i = 0; i <= fields; i++)
        at = take(at, end, &value);
    return skip(at, end, value);
}

/* CRYPTO data are a stream too, and reach no further than one (section 19.6). */
static const uint8_t *read_crypto(const uint8_t *at, const uint8_t *end) {
    uint64_t offset, length;
    at = take(at, end, &offset);
    at = take(at, end, &length);
    return offset + length > DP_VARINT_MAX ? NULL : skip(at, end, length);
}

/* What is the control plane's: where it ends. */
static const uint8_t *measure_foreign(const uint8_t *at, const uint8_t *end, uint64_t type) {
    uint64_t value;
    switch (type) {
    case DP_FRAME_CRYPTO:
        return read_crypto(at, end);
    case DP_FRAME_NEW_TOKEN:
        at = take(at, end, &value);
        return value ? skip(at, end, value) : NULL; /* a token is not empty (section 19.7) */
    case DP_FRAME_NEW_CONNECTION_ID:
        return read_new_connection_id(at, end);
    case DP_FRAME_RETIRE_CONNECTION_ID:
        return take(at, end, &value);
    case DP_FRAME_PATH_CHALLENGE:
    case DP_FRAME_PATH_RESPONSE:
        return skip(at, end, PATH_BYTES);
    case DP_FRAME_CONNECTION_CLOSE:
        return skip_counted(at, end, 2); /* the code, and the type of the frame to blame */
    case DP_FRAME_CONNECTION_CLOSE_APP:
        return skip_counted(at, end, 1);
    case DP_FRAME_HANDSHAKE_DONE:
        return at;
    case DP_FRAME_DATAGRAM:
        return end;
    case DP_FRAME_DATAGRAM + 1:
        return skip_counted(at, end, 0);
    default:
        return NULL;
    }
}

static const uint8_t *skip_padding(const uint8_t *at, const uint8_t *end) {
    while (at < end && *at == DP_FRAME_PADDING)
        at++;
    return at;
}

static const uint8_t *read_other(const uint8_t *at, const uint8_t *end, struct dp_frame *frame) {
    switch (frame->type) {
    case DP_FRAME_PADDING:
        return skip_padding(at, end);
    case DP_FRAME_PING:
        return at;
    case DP_FRAME_RESET_STREAM:
    case DP_FRAME_STOP_SENDING:
        return read_reset(at, end, frame);
    case DP_FRAME_MAX_DATA:
    case DP_FRAME_MAX_STREAM_DATA:
    case DP_FRAME_MAX_STREAMS_BIDI:
    case DP_FRAME_MAX_STREAMS_UNI:
    case DP_FRAME_DATA_BLOCKED:
    case DP_FRAME_STREAM_DATA_BLOCKED:
    case DP_FRAME_STREAMS_BLOCKED_BIDI:
    case DP_FRAME_STREAMS_BLOCKED_UNI:
        return read_limit(at, end, frame);
    default:
        return measure_foreign(at, end, frame->type);
    }
}

/* Every type that is known takes one byte, so a longer one is unknown, or is not as short as it
 * could be, which the RFC lets us take for a PROTOCOL_VIOLATION (section 12.4). */
static int judge_long_type(const uint8_t *at, const uint8_t *end) {
    uint64_t type;
    const uint8_t *after = dp_get_varint(at, end, &type);
    if (after && dp_varint_size(type) < (size_t)(after - at))
        return DP_PROTOCOL_VIOLATION;
    return DP_FRAME_ENCODING_ERROR;
}

static bool is_stream(uint8_t type) {
    return (type & ~(STREAM_FIN | STREAM_LENGTH | STREAM_OFFSET)) == DP_FRAME_STREAM;
}

int dp_frame_parse(const uint8_t *at, const uint8_t *end, struct dp_frame *frame) {
    if (at >= end)
        return DP_FRAME_ENCODING_ERROR;
    frame->start = at;
    if (is_stream(*at))
        return read_stream(at, end, 0, frame) ? 0 : DP_FRAME_ENCODING_ERROR;
    if (*at >= 0x40)
        return judge_long_type(at, end);
    frame->type = *at;
    const uint8_t *after = frame->type == DP_FRAME_ACK || frame->type == DP_FRAME_ACK_ECN
                               ? read_ack(at + 1, end, frame)
                               : read_other(at + 1, end, frame);
    if (!after)
        return DP_FRAME_ENCODING_ERROR;
    frame->size = (size_t)(after - at);
    return 0;
}

bool dp_frame_peek_stream(const uint8_t *at, const uint8_t *end, size_t beyond,
                          struct dp_frame *frame) {
    if (at >= end || !is_stream(*at))
        return false;
    frame->start = at;
    return read_stream(at, end, beyond, frame);
}

/* Sets of types, one bit each: all of them are below 64. */
#define BIT(type) (1ULL << (type))
#define CLOSES    (BIT(DP_FRAME_CONNECTION_CLOSE) | BIT(DP_FRAME_CONNECTION_CLOSE_APP))
#define PATHS     (BIT(DP_FRAME_PATH_CHALLENGE) | BIT(DP_FRAME_PATH_RESPONSE))
#define ACKS      (BIT(DP_FRAME_ACK) | BIT(DP_FRAME_ACK_ECN))

static bool is_among(uint64_t type, uint64_t set) {
    return type < 64 && (set & BIT(type)) != 0;
}

bool dp_frame_is_foreign(uint64_t type) {
    return is_among(type, BIT(DP_FRAME_CRYPTO) | BIT(DP_FRAME_NEW_TOKEN) |
                              BIT(DP_FRAME_NEW_CONNECTION_ID) | BIT(DP_FRAME_RETIRE_CONNECTION_ID) |
                              PATHS | CLOSES | BIT(DP_FRAME_HANDSHAKE_DONE) |
                              BIT(DP_FRAME_DATAGRAM) | BIT(DP_FRAME_DATAGRAM + 1));
}

bool dp_frame_elicits(uint64_t type) {
    return !is_among(type, BIT(DP_FRAME_PADDING) | ACKS | CLOSES);
}

bool dp_frame_probes(uint64_t type) {
    return is_among(type, BIT(DP_FRAME_PADDING) | PATHS | BIT(DP_FRAME_NEW_CONNECTION_ID));
}

bool dp_ack_next(const struct dp_frame *frame, const uint8_t **at, uint64_t *index, uint64_t *low,
                 uint64_t *high) {
    if (!*at) {
        *at = frame->ack.ranges;
        *index = 0;
        *high = frame->ack.largest;
        *low = frame->ack.largest - frame->ack.first;
        return true;
    }
    if (*index == frame->ack.count)
        return false;
    const uint8_t *end = frame->start + frame->size;
    uint64_t gap, length;
    *at = take(*at, end, &gap);
    *at = take(*at, end, &length);
    ++*index;
    *high = *low - gap - 2;
    *low = *high - length;
    return true;
}

/* Writers. None gives an offset of 0, which says nothing that its absence does not. */

uint8_t *dp_put_stream_header(uint8_t *to, uint64_t id, uint64_t offset, bool with_length,
                              uint64_t length, bool fin) {
    *to++ = (uint8_t)(DP_FRAME_STREAM | (offset ? STREAM_OFFSET : 0) |
                      (with_length ? STREAM_LENGTH : 0) | (fin ? STREAM_FIN : 0));
    to = dp_put_varint(to, id);
    if (offset)
        to = dp_put_varint(to, offset);
    return with_length ? dp_put_varint(to, length) : to;
}

size_t dp_stream_header_size(uint64_t id, uint64_t offset, bool with_length, uint64_t length) {
    return 1 + dp_varint_size(id) + (offset ? dp_varint_size(offset) : 0) +
           (with_length ? dp_varint_size(length) : 0);
}

uint8_t *dp_put_limit(uint8_t *to, uint64_t type, uint64_t value) {
    return dp_put_varint(dp_put_varint(to, type), value);
}

uint8_t *dp_put_stream_limit(uint8_t *to, uint64_t type, uint64_t id, uint64_t value) {
    return dp_put_varint(dp_put_limit(to, type, id), value);
}

uint8_t *dp_put_reset(uint8_t *to, uint64_t id, uint64_t code, uint64_t final_size) {
    return dp_put_varint(dp_put_stream_limit(to, DP_FRAME_RESET_STREAM, id, code), final_size);
}

uint8_t *dp_put_stop(uint8_t *to, uint64_t id, uint64_t code) {
    return dp_put_stream_limit(to, DP_FRAME_STOP_SENDING, id, code);
}
