/* Frames of 1-RTT packets, parsed strictly (RFC 9000 sections 12.4 and 19). Not a cdef.
 *
 * The parser reads, judges, and points into the packet: it keeps nothing and copies nothing. */
#ifndef DP_FRAMES_H
#define DP_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum dp_frame_type {
    DP_FRAME_PADDING = 0x00,
    DP_FRAME_PING = 0x01,
    DP_FRAME_ACK = 0x02,
    DP_FRAME_ACK_ECN = 0x03,
    DP_FRAME_RESET_STREAM = 0x04,
    DP_FRAME_STOP_SENDING = 0x05,
    DP_FRAME_CRYPTO = 0x06,
    DP_FRAME_NEW_TOKEN = 0x07,
    DP_FRAME_STREAM = 0x08, /* to 0x0f: bit 0 FIN, bit 1 length, bit 2 offset */
    DP_FRAME_MAX_DATA = 0x10,
    DP_FRAME_MAX_STREAM_DATA = 0x11,
    DP_FRAME_MAX_STREAMS_BIDI = 0x12,
    DP_FRAME_MAX_STREAMS_UNI = 0x13,
    DP_FRAME_DATA_BLOCKED = 0x14,
    DP_FRAME_STREAM_DATA_BLOCKED = 0x15,
    DP_FRAME_STREAMS_BLOCKED_BIDI = 0x16,
    DP_FRAME_STREAMS_BLOCKED_UNI = 0x17,
    DP_FRAME_NEW_CONNECTION_ID = 0x18,
    DP_FRAME_RETIRE_CONNECTION_ID = 0x19,
    DP_FRAME_PATH_CHALLENGE = 0x1a,
    DP_FRAME_PATH_RESPONSE = 0x1b,
    DP_FRAME_CONNECTION_CLOSE = 0x1c,
    DP_FRAME_CONNECTION_CLOSE_APP = 0x1d,
    DP_FRAME_HANDSHAKE_DONE = 0x1e,
    DP_FRAME_DATAGRAM = 0x30, /* and 0x31, with a length: parsed, since aioquic owns them */
};

/* Transport error codes (RFC 9000 section 20.1) that the data plane itself may close with. */
enum dp_transport_error {
    DP_NO_ERROR = 0x0,
    DP_INTERNAL_ERROR = 0x1,
    DP_FLOW_CONTROL_ERROR = 0x3,
    DP_STREAM_LIMIT_ERROR = 0x4,
    DP_STREAM_STATE_ERROR = 0x5,
    DP_FINAL_SIZE_ERROR = 0x6,
    DP_FRAME_ENCODING_ERROR = 0x7,
    DP_PROTOCOL_VIOLATION = 0xa,
    DP_KEY_UPDATE_ERROR = 0xe,
    DP_AEAD_LIMIT_REACHED = 0xf,
};

/* One frame. `type` of a STREAM frame is DP_FRAME_STREAM whatever its bits. */
struct dp_frame {
    uint64_t type;
    const uint8_t *start; /* the whole frame: [start, start + size) */
    size_t size;
    union {
        struct {
            uint64_t largest, delay; /* the delay as on the wire, not shifted yet */
            uint64_t count;          /* further ranges */
            uint64_t first;
            const uint8_t *ranges; /* `count` pairs of varints, checked not to go below 0 */
        } ack;
        struct {
            uint64_t id, offset;
            const uint8_t *data;
            size_t length;
            bool fin;
        } stream;
        struct {
            uint64_t id, code, final_size; /* final_size: RESET_STREAM alone */
        } reset;                           /* and STOP_SENDING */
        struct {
            uint64_t id, value; /* id: MAX_STREAM_DATA and STREAM_DATA_BLOCKED alone */
        } limit;
    };
};

/* Parse the frame at [at, end) of a 1-RTT packet; a run of PADDING is one frame. 0 and *frame, or
 * the transport error to close with, *frame then being undefined: FRAME_ENCODING_ERROR, for a type
 * that is unknown too, but PROTOCOL_VIOLATION for a type that is not in its shortest encoding. An
 * empty payload, also a PROTOCOL_VIOLATION, is for the caller to see. Frames that are not the data
 * plane's (CRYPTO, NEW_TOKEN, NEW_CONNECTION_ID, RETIRE_CONNECTION_ID, PATH_*, CONNECTION_CLOSE*,
 * HANDSHAKE_DONE, DATAGRAM) are measured strictly, so that `start` and `size` are right, and not
 * read further. */
int dp_frame_parse(const uint8_t *at, const uint8_t *end, struct dp_frame *frame);

/* The frame whose beginning is at [at, end), where the packet goes on behind `end` for `beyond`
 * bytes: true and *frame when it is a STREAM frame whose header is whole and whose length fits,
 * `data` then pointing to where its data begins (perhaps beyond `end`). For a look ahead before the
 * rest is decrypted. */
bool dp_frame_peek_stream(const uint8_t *at, const uint8_t *end, size_t beyond,
                          struct dp_frame *frame);

/* Whether a type belongs to the control plane. */
bool dp_frame_is_foreign(uint64_t type);
/* Whether a packet with such a frame has to be acknowledged (section 13.2). */
bool dp_frame_elicits(uint64_t type);
/* Whether a packet of such frames alone is no more than a probe of a path (section 9.1). */
bool dp_frame_probes(uint64_t type);

/* Walk an ACK frame's ranges from the highest down: begin with *at = NULL; true and the inclusive
 * bounds, or false at the end. *index and *low are what the next call goes on from, so leave them.
 * At the end *at is behind the ranges: where an ACK_ECN frame has its three counts. */
bool dp_ack_next(const struct dp_frame *frame, const uint8_t **at, uint64_t *index, uint64_t *low,
                 uint64_t *high);

/* Writers: each writes at `to`, which has room, and returns where it ends. */
uint8_t *dp_put_stream_header(uint8_t *to, uint64_t id, uint64_t offset, bool with_length,
                              uint64_t length, bool fin);
size_t dp_stream_header_size(uint64_t id, uint64_t offset, bool with_length, uint64_t length);
uint8_t *dp_put_limit(uint8_t *to, uint64_t type, uint64_t value);
uint8_t *dp_put_stream_limit(uint8_t *to, uint64_t type, uint64_t id, uint64_t value);
uint8_t *dp_put_reset(uint8_t *to, uint64_t id, uint64_t code, uint64_t final_size);
uint8_t *dp_put_stop(uint8_t *to, uint64_t id, uint64_t code);

#endif
