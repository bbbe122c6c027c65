/* One connection's established traffic: 1-RTT packets in and out, streams, flow control, recovery.
 *
 * Sans-IO and single-threaded: datagrams and `now` (monotonic ns) come in, calls on the owner and
 * datagrams go out. The handshake, connection IDs, paths and the close are the control plane's
 * (aioquic): its frames pass through here unread, both ways. Not a cdef, apart from what
 * hand_over.h declares. */
#ifndef DP_CONN_H
#define DP_CONN_H

#include "../udp.h"
#include "frames.h"
#include "hand_over.h"
#include "streams.h"

struct dp_conn;
struct dp_pool;

/* What a connection tells whoever owns it, from inside dp_conn_receive and dp_conn_on_timer. No
 * call may free the connection or build a datagram; all others of this header may be made. */
struct dp_conn_owner {
    /* In-order bytes [consumed, consumed + length) of a stream; with `fin` nothing comes behind
     * them. How many are consumed; the rest is offered again with what comes. With length 0, only
     * the end is new. A stream's first offer is the first that is heard of it. */
    size_t (*data)(void *self, struct dp_conn *conn, struct dp_stream *stream, const uint8_t *bytes,
                   size_t length, bool fin);
    /* The peer broke its half off; nothing more is offered. */
    void (*reset)(void *self, struct dp_conn *conn, struct dp_stream *stream, uint64_t code);
    /* The peer does not want what this side sends: that half was reset in answer. */
    void (*stopped)(void *self, struct dp_conn *conn, struct dp_stream *stream, uint64_t code);
    /* Both halves are over: the last moment at which the stream may be looked at. */
    void (*closed)(void *self, struct dp_conn *conn, struct dp_stream *stream);
    /* Frames that are the control plane's, or (size 0) a packet on another path than this
     * connection's. `cid` is the connection ID that the packet came to, `probing` that it may not
     * move the connection: it only probes, or is not the newest (RFC 9000 sections 9.1 and 9.3). */
    void (*control)(void *self, struct dp_conn *conn, const struct dp_path *path,
                    const uint8_t *cid, uint64_t pn, bool probing, const uint8_t *frames,
                    size_t size);
    /* A control packet's fate. */
    void (*delivered)(void *self, struct dp_conn *conn, uint64_t token, bool acked);
    /* The peer broke the protocol (or memory ran out): close with this transport error. Told once;
     * what still comes is not read. `reason` is a static text. */
    void (*failed)(void *self, struct dp_conn *conn, uint64_t code, uint64_t frame_type,
                   const char *reason);
    /* Something is to be sent, or the timer moved: told once until dp_conn_build said 0. */
    void (*touched)(void *self, struct dp_conn *conn);
};

/* Take a connection over. NULL: unknown suite or version, or no memory. */
struct dp_conn *dp_conn_new(struct dp_pool *pool, const struct dp_hand_over *from,
                            const struct dp_conn_owner *owner, void *self, int64_t now);
void dp_conn_free(struct dp_conn *conn);

/* In ------------------------------------------------------------------------------------------ */

/* Take one 1-RTT packet, a whole datagram, which is opened in place: `datagram` is of no use
 * afterwards. `at_ns` is the kernel's receive time (dp_conn_at_ns gives it to the owner's calls).
 * The answer is for counting and tests: nothing but DP_TAKEN has any effect. */
enum dp_taken_as {
    DP_TAKEN = 0,
    DP_TOO_SHORT = 1,
    DP_FORGED = 2, /* or damaged, or for other keys */
    DP_DUPLICATE = 3,
    DP_NOT_KEPT = 4, /* it would take more memory than it may: not acknowledged */
    DP_BROKEN = 5,   /* it broke the protocol: `failed` was called */
    DP_CLOSED = 6,   /* the connection is over */
};
int dp_conn_receive(struct dp_conn *conn, uint8_t *datagram, size_t size,
                    const struct dp_path *path, int64_t now, int64_t at_ns);
int64_t dp_conn_at_ns(const struct dp_conn *conn);
/* Within a call of `control`: the bytes of the datagram that it came in. */
size_t dp_conn_control_datagram(const struct dp_conn *conn);
/* When a packet was last taken (monotonic ns). */
int64_t dp_conn_last_received(const struct dp_conn *conn);

/* Streams -------------------------------------------------------------------------------------- */

struct dp_stream *dp_conn_stream(struct dp_conn *conn, uint64_t id);
/* Open a stream of this side's. It waits when the peer does not allow so many yet. NULL: no memory
 * or the connection is over. */
struct dp_stream *dp_conn_open(struct dp_conn *conn, bool uni);
/* Append to a stream. False: it is reset or ended already, or there is no memory. */
bool dp_conn_send(struct dp_conn *conn, struct dp_stream *stream, const uint8_t *bytes,
                  size_t length, bool fin);
/* Send all of it and FIN, out of the caller's memory, which stays until the stream is closed. */
bool dp_conn_send_lent(struct dp_conn *conn, struct dp_stream *stream, const uint8_t *bytes,
                       size_t length);
/* RESET_STREAM and STOP_SENDING. After dp_conn_stop nothing more is offered. */
void dp_conn_reset(struct dp_conn *conn, struct dp_stream *stream, uint64_t code);
void dp_conn_stop(struct dp_conn *conn, struct dp_stream *stream, uint64_t code);
/* Bytes that wait, sent or not, for acknowledgement, on all streams. */
uint64_t dp_conn_unacked(const struct dp_conn *conn);
/* The application consumed in-order bytes outside of its `data` call: credit goes back. */
void dp_conn_consume(struct dp_conn *conn, struct dp_stream *stream, size_t length);
/* Offer once more what an offer left, though nothing came; not from inside the owner's calls. The
 * stream may be closed then. */
void dp_conn_offer(struct dp_conn *conn, struct dp_stream *stream);
/* Bytes [from, to) of the stream belong to `place` until dp_conn_stop, dp_conn_leave_place or the
 * stream's end. */
void dp_conn_set_place(struct dp_conn *conn, struct dp_stream *stream, uint8_t *place,
                       uint64_t from, uint64_t to);
/* The place is not to be written any more; what still comes of the stream is discarded. */
void dp_conn_leave_place(struct dp_conn *conn, struct dp_stream *stream);
/* Walk over the streams: begin with *at = 0; NULL at the end. Streams may not come or go
 * meanwhile. */
struct dp_stream *dp_conn_each(struct dp_conn *conn, uint32_t *at);

/* The control plane's ---------------------------------------------------------------------------
 */

/* Send frames of the control plane, at most what fits one packet, as a packet of the same space.
 * `token` comes back with its fate when `elicits`. `path` NULL: the connection's own. False: no
 * memory, or over. */
bool dp_conn_control(struct dp_conn *conn, const uint8_t *frames, size_t size, uint64_t token,
                     bool elicits, const struct dp_path *path);
/* Go over to another path and peer connection ID. Until it is validated no more than three times
 * what comes on it is sent (RFC 9000 section 8.1). `is_new` begins congestion control anew. */
void dp_conn_set_path(struct dp_conn *conn, const struct dp_path *path, bool validated,
                      bool is_new);
void dp_conn_set_peer_cid(struct dp_conn *conn, const uint8_t *cid, size_t bytes);
const struct dp_path *dp_conn_path(const struct dp_conn *conn);
/* Send a CONNECTION_CLOSE frame, and again in answer to what still comes (RFC 9000 section 10.2.1);
 * everything else is over. With size 0 only the latter: draining. */
void dp_conn_close(struct dp_conn *conn, const uint8_t *frames, size_t size);
bool dp_conn_is_over(const struct dp_conn *conn);
/* A probe for the peer: PING. */
void dp_conn_ping(struct dp_conn *conn);
/* Update the sending keys after every so many packets (0: when the AEAD asks for it). */
void dp_conn_update_keys_every(struct dp_conn *conn, uint64_t packets);

/* Out ------------------------------------------------------------------------------------------ */

/* Build the next datagram in `datagram`, which has room for dp_conn_datagram bytes: its size, and
 * where it goes; 0: nothing may leave now. */
size_t dp_conn_build(struct dp_conn *conn, int64_t now, uint8_t *datagram, struct dp_path *path);
size_t dp_conn_datagram(const struct dp_conn *conn);
/* When dp_conn_on_timer is due, DP_NEVER (recovery.h) for not at all. */
int64_t dp_conn_timer(const struct dp_conn *conn);
void dp_conn_on_timer(struct dp_conn *conn, int64_t now);

/* For pages and tests. */
struct dp_conn_stats dp_conn_stats(const struct dp_conn *conn);

#endif
