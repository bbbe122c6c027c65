/* Frames that parse and frames that must be refused, written out by hand after RFC 9000 section 19
 * and RFC 9221 section 4. */
#ifndef FRAME_VECTORS_H
#define FRAME_VECTORS_H

#include <stddef.h>
#include <stdint.h>

#include "quic/frames.h"

#define BYTES_MAX  256
#define FIELDS_MAX 5

/* A frame that parses. `open` says after how many bytes it may end anywhere, 0: it has one end. */
struct vector {
    const char *name;
    const char *hex;
    uint64_t type;
    size_t open;
    uint64_t fields[FIELDS_MAX];
};

#define V62 0x3fffffffffffffff

static const struct vector good[] = {
    {"PADDING", "00", 0x00, 1, {0}},
    {"PADDING, a run", "00 00 00 00 00 00 00 00 00 00 00", 0x00, 1, {0}},
    {"PING", "01", 0x01, 0, {0}},
    /* largest, delay, count, first */
    {"ACK", "02 43e8 19 00 0a", 0x02, 0, {1000, 25, 0, 10}},
    {"ACK of 0", "02 00 00 00 00", 0x02, 0, {0, 0, 0, 0}},
    {"ACK of all", "02 0a 7fff 00 0a", 0x02, 0, {10, 16383, 0, 10}},
    {"ACK, two ranges more", "02 43e8 00 02 0a 00 05 4064 8000000a", 0x02, 0, {1000, 0, 2, 10}},
    {"ACK, ranges down to 0", "02 0a 00 02 02 01 03 00 00", 0x02, 0, {10, 0, 2, 2}},
    {"ACK, the greatest",
     "02 ffffffffffffffff ffffffffffffffff 00 ffffffffffffffff",
     0x02,
     0,
     {V62, V62, 0, V62}},
    {"ACK_ECN", "03 43e8 19 00 0a 09 00 80011170", 0x03, 0, {1000, 25, 0, 10}},
    {"ACK_ECN, one range more",
     "03 43e8 19 01 0a 02 04 09 ffffffffffffffff 00",
     0x03,
     0,
     {1000, 25, 1, 10}},
    /* id, code, final size */
    {"RESET_STREAM", "04 04 4100 80011170", 0x04, 0, {4, 256, 70000}},
    {"RESET_STREAM, the greatest",
     "04 ffffffffffffffff ffffffffffffffff ffffffffffffffff",
     0x04,
     0,
     {V62, V62, V62}},
    {"STOP_SENDING", "05 05 ffffffffffffffff", 0x05, 0, {5, V62, 0}},
    {"CRYPTO", "06 80010000 03 616263", 0x06, 0, {0}},
    {"CRYPTO, empty", "06 00 00", 0x06, 0, {0}},
    {"CRYPTO, as far as can be", "06 fffffffffffffffe 01 61", 0x06, 0, {0}},
    {"NEW_TOKEN", "07 03 616263", 0x07, 0, {0}},
    /* id, offset, length, fin, bytes of the header */
    {"STREAM to the end", "08 04 61 62 63", 0x08, 2, {4, 0, 3, 0, 2}},
    {"STREAM to the end, empty", "08 04", 0x08, 2, {4, 0, 0, 0, 2}},
    {"STREAM to the end, fin", "09 04 61", 0x08, 2, {4, 0, 1, 1, 2}},
    {"STREAM", "0a 04 02 6162", 0x08, 0, {4, 0, 2, 0, 3}},
    {"STREAM, fin", "0b 4404 02 6162", 0x08, 0, {0x404, 0, 2, 1, 4}},
    {"STREAM, fin alone", "0b 04 00", 0x08, 0, {4, 0, 0, 1, 3}},
    {"STREAM at an offset, to the end", "0c 04 80011170 61", 0x08, 6, {4, 70000, 1, 0, 6}},
    {"STREAM at an offset, to the end, fin", "0d 04 4100", 0x08, 4, {4, 256, 0, 1, 4}},
    {"STREAM at an offset", "0e 04 4100 02 6162", 0x08, 0, {4, 256, 2, 0, 5}},
    {"STREAM at an offset, fin", "0f 04 4100 02 6162", 0x08, 0, {4, 256, 2, 1, 5}},
    {"STREAM at offset 0 that is said", "0f 04 00 01 61", 0x08, 0, {4, 0, 1, 1, 4}},
    {"STREAM, longer fields than need be",
     "0f c000000000000004 80000100 4001 61",
     0x08,
     0,
     {4, 256, 1, 1, 15}},
    {"STREAM as far as can be",
     "0f ffffffffffffffff fffffffffffffffe 01 61",
     0x08,
     0,
     {V62, V62 - 1, 1, 1, 18}},
    {"STREAM as far as can be, empty", "0f 04 ffffffffffffffff 00", 0x08, 0, {4, V62, 0, 1, 11}},
    /* id, value */
    {"MAX_DATA", "10 80100000", 0x10, 0, {0, 0x100000}},
    {"MAX_DATA, the greatest", "10 ffffffffffffffff", 0x10, 0, {0, V62}},
    {"MAX_STREAM_DATA", "11 04 80100000", 0x11, 0, {4, 0x100000}},
    {"MAX_STREAM_DATA, the greatest", "11 ffffffffffffffff ffffffffffffffff", 0x11, 0, {V62, V62}},
    {"MAX_STREAMS, bidirectional", "12 4064", 0x12, 0, {0, 100}},
    {"MAX_STREAMS, bidirectional, most", "12 d000000000000000", 0x12, 0, {0, 1ULL << 60}},
    {"MAX_STREAMS, unidirectional", "13 00", 0x13, 0, {0, 0}},
    {"MAX_STREAMS, unidirectional, most", "13 d000000000000000", 0x13, 0, {0, 1ULL << 60}},
    {"DATA_BLOCKED", "14 ffffffffffffffff", 0x14, 0, {0, V62}},
    {"STREAM_DATA_BLOCKED", "15 08 ffffffffffffffff", 0x15, 0, {8, V62}},
    {"STREAMS_BLOCKED, bidirectional", "16 d000000000000000", 0x16, 0, {0, 1ULL << 60}},
    {"STREAMS_BLOCKED, unidirectional", "17 d000000000000000", 0x17, 0, {0, 1ULL << 60}},
    {"NEW_CONNECTION_ID",
     "18 07 03 08 0001020304050607 000102030405060708090a0b0c0d0e0f",
     0x18,
     0,
     {0}},
    {"NEW_CONNECTION_ID, shortest",
     "18 07 07 01 00 000102030405060708090a0b0c0d0e0f",
     0x18,
     0,
     {0}},
    {"NEW_CONNECTION_ID, longest",
     "18 4100 00 14 000102030405060708090a0b0c0d0e0f10111213 000102030405060708090a0b0c0d0e0f",
     0x18,
     0,
     {0}},
    {"RETIRE_CONNECTION_ID", "19 4100", 0x19, 0, {0}},
    {"PATH_CHALLENGE", "1a 0001020304050607", 0x1a, 0, {0}},
    {"PATH_RESPONSE", "1b fffefdfcfbfaf9f8", 0x1b, 0, {0}},
    {"CONNECTION_CLOSE", "1c 07 06 04 6f6f7073", 0x1c, 0, {0}},
    {"CONNECTION_CLOSE, no reason", "1c 4100 7fff 00", 0x1c, 0, {0}},
    {"CONNECTION_CLOSE of the application", "1d 4100 03 627965", 0x1d, 0, {0}},
    {"HANDSHAKE_DONE", "1e", 0x1e, 0, {0}},
    {"DATAGRAM to the end", "30 616263", 0x30, 1, {0}},
    {"DATAGRAM", "31 03 616263", 0x31, 0, {0}},
    {"DATAGRAM, empty", "31 00", 0x31, 0, {0}},
};

static const struct {
    const char *name;
    const char *hex;
    int error;
} bad[] = {
    {"nothing", "", DP_FRAME_ENCODING_ERROR},
    {"ACK, the first range goes below 0", "02 0a 00 00 0b", DP_FRAME_ENCODING_ERROR},
    {"ACK, a gap goes below 0", "02 0a 00 01 0a 00 00", DP_FRAME_ENCODING_ERROR},
    {"ACK, a gap of one goes below 0", "02 0a 00 01 09 00 00", DP_FRAME_ENCODING_ERROR},
    {"ACK, a range goes below 0", "02 0a 00 01 02 01 06", DP_FRAME_ENCODING_ERROR},
    {"ACK, the last range goes below 0", "02 0a 00 02 02 01 03 00 01", DP_FRAME_ENCODING_ERROR},
    {"ACK, the greatest gap", "02 0a 00 01 00 ffffffffffffffff 00", DP_FRAME_ENCODING_ERROR},
    {"ACK, the greatest range", "02 0a 00 01 00 00 ffffffffffffffff", DP_FRAME_ENCODING_ERROR},
    {"ACK, both the greatest", "02 ffffffffffffffff 00 01 00 ffffffffffffffff ffffffffffffffff",
     DP_FRAME_ENCODING_ERROR},
    {"ACK, more ranges than there are", "02 43e8 00 03 0a 00 05 00 05", DP_FRAME_ENCODING_ERROR},
    {"ACK, 2^62 - 1 ranges", "02 43e8 00 ffffffffffffffff 00 00 00", DP_FRAME_ENCODING_ERROR},
    {"ACK_ECN, two counts", "03 0a 00 00 00 01 02", DP_FRAME_ENCODING_ERROR},
    {"ACK_ECN that goes below 0", "03 0a 00 00 0b 00 00 00", DP_FRAME_ENCODING_ERROR},
    {"CRYPTO beyond 2^62 - 1", "06 ffffffffffffffff 01 61", DP_FRAME_ENCODING_ERROR},
    {"CRYPTO, longer than the packet", "06 00 04 616263", DP_FRAME_ENCODING_ERROR},
    {"NEW_TOKEN, empty", "07 00", DP_FRAME_ENCODING_ERROR},
    {"NEW_TOKEN, empty, and a PING", "07 00 01", DP_FRAME_ENCODING_ERROR},
    {"STREAM beyond 2^62 - 1", "0e 04 ffffffffffffffff 01 61", DP_FRAME_ENCODING_ERROR},
    {"STREAM to the end beyond 2^62 - 1", "0c 04 ffffffffffffffff 61", DP_FRAME_ENCODING_ERROR},
    {"STREAM, longer than the packet", "0a 04 03 6162", DP_FRAME_ENCODING_ERROR},
    {"STREAM, 2^62 - 1 bytes long", "0a 04 ffffffffffffffff 6162", DP_FRAME_ENCODING_ERROR},
    {"MAX_STREAMS, bidirectional, too many", "12 d000000000000001", DP_FRAME_ENCODING_ERROR},
    {"MAX_STREAMS, unidirectional, too many", "13 d000000000000001", DP_FRAME_ENCODING_ERROR},
    {"STREAMS_BLOCKED, bidirectional, too many", "16 d000000000000001", DP_FRAME_ENCODING_ERROR},
    {"STREAMS_BLOCKED, unidirectional, too many", "17 ffffffffffffffff", DP_FRAME_ENCODING_ERROR},
    {"NEW_CONNECTION_ID, no id", "18 07 03 00 000102030405060708090a0b0c0d0e0f",
     DP_FRAME_ENCODING_ERROR},
    {"NEW_CONNECTION_ID, an id of 21 bytes",
     "18 07 03 15 000102030405060708090a0b0c0d0e0f1011121314 000102030405060708090a0b0c0d0e0f",
     DP_FRAME_ENCODING_ERROR},
    {"NEW_CONNECTION_ID that retires itself",
     "18 03 04 08 0001020304050607 000102030405060708090a0b0c0d0e0f", DP_FRAME_ENCODING_ERROR},
    {"DATAGRAM, longer than the packet", "31 04 616263", DP_FRAME_ENCODING_ERROR},
    {"a type that is unknown", "1f", DP_FRAME_ENCODING_ERROR},
    {"a type of two bytes that is unknown", "4040", DP_FRAME_ENCODING_ERROR},
    {"a type of four bytes that is unknown", "80004000", DP_FRAME_ENCODING_ERROR},
    {"a type of eight bytes that is unknown", "c000000040000000", DP_FRAME_ENCODING_ERROR},
    {"the greatest type", "ffffffffffffffff", DP_FRAME_ENCODING_ERROR},
    {"a type that is cut off", "40", DP_FRAME_ENCODING_ERROR},
    {"a type that is cut off, of eight bytes", "c0000000000000", DP_FRAME_ENCODING_ERROR},
    {"an unknown type that is not as short as it could be", "8000003f", DP_PROTOCOL_VIOLATION},
    {"a type of two bytes in four", "80003fff", DP_PROTOCOL_VIOLATION},
    {"a type of four bytes in eight", "c00000003fffffff", DP_PROTOCOL_VIOLATION},
};

#endif
