/* The input is the payload of a 1-RTT packet: every frame of it is parsed, and what the parser says
 * of each must hold together with the bytes, with the writers, and with a look ahead. */
#include "quic/frames.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quic/varint.h"

#define HEADER_MAX 32 /* a STREAM header has up to 25 bytes */

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "FAILED: %s:%d: %s\n", __FILE__, __LINE__, #condition);                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static void check_ack(const struct dp_frame *frame) {
    const uint8_t *at = NULL, *end = frame->start + frame->size;
    uint64_t index, low, high, ranges = 0, above = 0;
    while (dp_ack_next(frame, &at, &index, &low, &high)) {
        CHECK(low <= high && high <= DP_VARINT_MAX);
        CHECK(ranges ? high + 1 < above : high == frame->ack.largest);
        CHECK(at > frame->start && at <= end);
        above = low;
        ranges++;
    }
    CHECK(ranges == frame->ack.count + 1);
    uint64_t count;
    for (int i = 0; frame->type == DP_FRAME_ACK_ECN && i < 3; i++)
        CHECK((at = dp_get_varint(at, end, &count)) != NULL);
    CHECK(at == end);
}

static bool same_stream(const struct dp_frame *a, const struct dp_frame *b) {
    return a->type == DP_FRAME_STREAM && b->type == DP_FRAME_STREAM &&
           a->stream.id == b->stream.id && a->stream.offset == b->stream.offset &&
           a->stream.length == b->stream.length && a->stream.fin == b->stream.fin;
}

/* What is written anew is read the same, and is the same where it is as long. */
static void check_stream_writer(const struct dp_frame *frame, size_t header) {
    uint8_t written[HEADER_MAX];
    struct dp_frame again;
    bool counted = *frame->start & 2;
    size_t length = frame->stream.length;
    uint8_t *end = dp_put_stream_header(written, frame->stream.id, frame->stream.offset, counted,
                                        length, frame->stream.fin);
    size_t size = (size_t)(end - written);
    CHECK(size == dp_stream_header_size(frame->stream.id, frame->stream.offset, counted, length));
    CHECK(size <= header);
    if (size == header)
        CHECK(memcmp(written, frame->start, size) == 0);
    CHECK(dp_frame_peek_stream(written, end, length, &again));
    CHECK(same_stream(frame, &again) && again.stream.data == end && again.size == size + length);
}

/* Each cut of the header lies at the end of `edge`, so that a sanitizer sees a read behind it. */
static void check_peek(const struct dp_frame *frame, size_t header, uint8_t *edge) {
    struct dp_frame ahead;
    for (size_t cut = 0; cut <= smaller(frame->size, HEADER_MAX); cut++) {
        uint8_t *at = edge + HEADER_MAX - cut;
        memcpy(at, frame->start, cut);
        bool whole = dp_frame_peek_stream(at, edge + HEADER_MAX, frame->size - cut, &ahead);
        CHECK(whole == (cut >= header));
        if (!whole)
            continue;
        CHECK(same_stream(frame, &ahead) && ahead.start == at && ahead.size == frame->size);
        CHECK(ahead.stream.data == at + header);
        if (frame->stream.length && *at & 2) /* and one byte less does not hold it */
            CHECK(!dp_frame_peek_stream(at, edge + HEADER_MAX, frame->size - cut - 1, &ahead));
    }
}

static void check_stream(const struct dp_frame *frame, uint8_t *edge) {
    const uint8_t *end = frame->start + frame->size;
    CHECK(frame->stream.data > frame->start && frame->stream.data <= end);
    CHECK(frame->stream.length == (size_t)(end - frame->stream.data));
    CHECK(frame->stream.offset + frame->stream.length <= DP_VARINT_MAX);
    size_t header = (size_t)(frame->stream.data - frame->start);
    check_stream_writer(frame, header);
    check_peek(frame, header, edge);
}

static bool has_id(uint64_t type) {
    return type == DP_FRAME_MAX_STREAM_DATA || type == DP_FRAME_STREAM_DATA_BLOCKED;
}

static bool is_limit(uint64_t type) {
    return type >= DP_FRAME_MAX_DATA && type <= DP_FRAME_STREAMS_BLOCKED_UNI;
}

static uint8_t *write_again(uint8_t *to, const struct dp_frame *frame) {
    if (frame->type == DP_FRAME_RESET_STREAM)
        return dp_put_reset(to, frame->reset.id, frame->reset.code, frame->reset.final_size);
    if (frame->type == DP_FRAME_STOP_SENDING)
        return dp_put_stop(to, frame->reset.id, frame->reset.code);
    if (has_id(frame->type))
        return dp_put_stream_limit(to, frame->type, frame->limit.id, frame->limit.value);
    return dp_put_limit(to, frame->type, frame->limit.value);
}

static void check_fields(const struct dp_frame *frame) {
    uint8_t written[HEADER_MAX];
    struct dp_frame again;
    uint8_t *end = write_again(written, frame);
    size_t size = (size_t)(end - written);
    CHECK(size <= frame->size);
    if (size == frame->size)
        CHECK(memcmp(written, frame->start, size) == 0);
    CHECK(dp_frame_parse(written, end, &again) == 0);
    CHECK(again.type == frame->type && again.size == size);
    if (is_limit(frame->type))
        CHECK(again.limit.id == frame->limit.id && again.limit.value == frame->limit.value);
    else
        CHECK(again.reset.id == frame->reset.id && again.reset.code == frame->reset.code &&
              again.reset.final_size == frame->reset.final_size);
}

static void check_frame(const struct dp_frame *frame, const uint8_t *at, const uint8_t *end,
                        uint8_t *edge) {
    struct dp_frame ahead;
    CHECK(frame->start == at && frame->size > 0 && frame->size <= (size_t)(end - at));
    CHECK(*at < 0x40);
    bool stream = frame->type == DP_FRAME_STREAM;
    CHECK(stream ? (*at & ~7) == DP_FRAME_STREAM : frame->type == *at);
    CHECK(dp_frame_peek_stream(at, end, 0, &ahead) == stream);
    if (stream)
        check_stream(frame, edge);
    else if (frame->type == DP_FRAME_ACK || frame->type == DP_FRAME_ACK_ECN)
        check_ack(frame);
    else if (frame->type == DP_FRAME_RESET_STREAM || frame->type == DP_FRAME_STOP_SENDING ||
             is_limit(frame->type))
        check_fields(frame);
    else
        CHECK(frame->type <= DP_FRAME_PING || dp_frame_is_foreign(frame->type));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *end = data + size;
    uint8_t *edge = malloc(HEADER_MAX);
    CHECK(edge != NULL);
    for (const uint8_t *at = data; at < end;) {
        struct dp_frame frame;
        int error = dp_frame_parse(at, end, &frame);
        if (error) {
            CHECK(error == DP_FRAME_ENCODING_ERROR ||
                  (error == DP_PROTOCOL_VIOLATION && *at >= 0x40));
            CHECK(!dp_frame_peek_stream(at, end, 0, &frame));
            break;
        }
        check_frame(&frame, at, end, edge);
        at += frame.size;
    }
    free(edge);
    return 0;
}
