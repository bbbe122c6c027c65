/* One stream's two halves: what came and where it lies, what is to be sent and what became of it
 * (RFC 9000 sections 2 to 4). Sans-IO; packets and connection-wide limits are conn.h's. Not a cdef.
 */
#ifndef DP_STREAMS_H
#define DP_STREAMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ranges.h"

#define DP_NO_SIZE          UINT64_MAX
#define DP_STREAM_RANGES    1024 /* gaps that a stream may have: a window's worth of lost packets */
#define DP_STREAM_IS_SERVER 1    /* bits of a stream's id (section 2.1) */
#define DP_STREAM_IS_UNI    2

/* Receiving half. In-order bytes are offered to the application (conn.h, `data`); what it leaves,
 * and what came out of order, lies in `buffer`, which begins at `consumed`. While a *place* is set,
 * bytes [place_from, place_to) of the stream lie there instead: they are written once, by the AEAD
 * itself where that is possible. What comes behind a place is not kept: one byte that means nothing
 * is offered for it, since whoever set a place did not expect any. */
struct dp_receiving {
    uint64_t consumed; /* handed to the application */
    uint64_t frontier; /* all of [0, frontier) came */
    uint64_t highest;  /* one behind the last byte that came: what flow control counts */
    uint64_t final_size;
    uint64_t limit; /* what the peer was told it may send */
    uint64_t window;
    struct dp_ranges beyond; /* what came beyond the frontier */
    uint8_t *buffer;
    size_t room;
    uint8_t *place;
    uint64_t place_from, place_to;
    uint64_t stop_code;
    bool discard;     /* nothing is kept: the application does not read on */
    bool fin_offered; /* the application was told of the end */
    bool was_reset;
    bool done;
};

/* Sending half. `buffer` holds [base, stop), of which [start, stop) is not acknowledged. */
struct dp_sending {
    uint64_t base, start, stop;
    uint64_t next;          /* the first byte that was never sent */
    uint64_t limit;         /* what the peer allows */
    struct dp_ranges acked; /* beyond `start` */
    struct dp_ranges lost;  /* to be sent again */
    uint8_t *buffer;        /* or borrowed, see dp_stream_lend */
    size_t room;            /* 0: borrowed */
    uint64_t reset_code;
    bool fin, fin_sent, fin_acked;
    bool is_reset;
    bool done;
};

enum dp_stream_pending {
    DP_PENDING_LIMIT = 1, /* MAX_STREAM_DATA */
    DP_PENDING_RESET = 2,
    DP_PENDING_STOP = 4,
};

struct dp_stream {
    uint64_t id;
    struct dp_receiving in;
    struct dp_sending out;
    uint8_t pending;        /* control frames of its own that are due */
    bool queued;            /* in the connection's list of those with something to send */
    bool waiting;           /* the peer has not allowed so many streams yet */
    struct dp_stream *next; /* in that list */
    /* The application's own. */
    void *app;
    uint64_t app_number;
    uint32_t app_state, app_index;
    struct dp_stream *app_next, *app_previous;
    int64_t app_at_ns[2];
};

/* Give back all memory of a stream's halves. */
void dp_stream_clear(struct dp_stream *stream, struct dp_pool *pool);

/* What came ----------------------------------------------------------------------------------- */

/* Whether bytes [offset, offset + length) can be kept when so many others were before: gaps are
 * bounded, and an offer that cannot be kept must not be acknowledged. */
bool dp_stream_accepts(const struct dp_stream *stream, uint64_t offset, size_t length,
                       uint32_t before);
/* Where those bytes can be decrypted to: their place, when all of them belong there and none came
 * before; else NULL. */
uint8_t *dp_stream_target(const struct dp_stream *stream, uint64_t offset, size_t length);
/* Keep bytes that came at `offset`; what came before of them is skipped, never overwritten. `bytes`
 * may be what dp_stream_target said. Moves the frontier. False: no memory. */
bool dp_stream_keep(struct dp_stream *stream, struct dp_pool *pool, uint64_t offset,
                    const uint8_t *bytes, size_t length);
/* In-order bytes that the application has not consumed: *length of them. */
const uint8_t *dp_stream_readable(const struct dp_stream *stream, size_t *length);
/* The application is through with so many of them. */
void dp_stream_consume(struct dp_stream *stream, struct dp_pool *pool, size_t length);
/* From now on bytes [from, to) of the stream, which lie at or beyond `consumed`, belong to `place`;
 * those that are kept already are copied. What the caller is being offered at this moment it stores
 * itself, or leaves unconsumed; it consumes at least up to `from`. */
void dp_stream_set_place(struct dp_stream *stream, struct dp_pool *pool, uint8_t *place,
                         uint64_t from, uint64_t to);
/* The place is not to be written any more (the slot was given back): what comes is discarded. */
void dp_stream_discard(struct dp_stream *stream, struct dp_pool *pool);

/* What is sent -------------------------------------------------------------------------------- */

/* Append a copy. False: no memory. */
bool dp_stream_write(struct dp_stream *stream, struct dp_pool *pool, const uint8_t *bytes,
                     size_t length, bool fin);
/* Send from the caller's memory, which stays as it is until the stream is closed; only for a stream
 * on which nothing was written. Sets FIN. */
void dp_stream_lend(struct dp_stream *stream, const uint8_t *bytes, size_t length);
/* What to send next, at most `room` bytes and within the peer's limit for the stream and `allowed`
 * new bytes of the connection: lost bytes first. False: nothing. *bytes points into the buffer. */
bool dp_stream_next(struct dp_stream *stream, size_t room, uint64_t allowed, uint64_t *offset,
                    const uint8_t **bytes, size_t *length, bool *fin, bool *is_new);
/* Take note that this was sent. */
void dp_stream_sent(struct dp_stream *stream, struct dp_pool *pool, uint64_t offset, size_t length,
                    bool fin);
void dp_stream_acked(struct dp_stream *stream, struct dp_pool *pool, uint64_t offset, size_t length,
                     bool fin);
void dp_stream_lost(struct dp_stream *stream, struct dp_pool *pool, uint64_t offset, size_t length,
                    bool fin);
/* Whether dp_stream_next would find something with enough room and credit. */
bool dp_stream_has_data(const struct dp_stream *stream);
/* Break off: nothing is sent or repeated any more. */
void dp_stream_reset(struct dp_stream *stream, struct dp_pool *pool, uint64_t code);
/* Bytes that are kept because they are not acknowledged. */
uint64_t dp_stream_unacked(const struct dp_stream *stream);

#endif
