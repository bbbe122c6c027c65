/* Connections that were handed over, and what Python hears of them.
 *
 * Everything of this header may be called from any thread: one lock a pump. Time is nanoseconds of
 * CLOCK_MONOTONIC. With dp_pump_listen and dp_pump_start (loop.h) a thread of its own, which never
 * needs the interpreter, does the packets; without it the pump is sans-IO: datagrams are put in
 * with dp_pump_inject and taken out with dp_pump_build, as clients and tests do.
 *
 * Connections are named by handles that are never used twice; a call with one that is over does
 * nothing and says 0 (or the stated failure). This header is also a cdef. */
#ifndef DP_PUMP_H
#define DP_PUMP_H

#include "../quic/hand_over.h"
#include "../region.h"

#define DP_EVENT_TAKE  262144 /* bytes that every event fits in, and what Python takes at once */
#define DP_EVENT_BYTES 48     /* of struct dp_pump_event; what belongs to it follows, padded to 8 */

/* What Python is told, in the order in which it happened on each connection. */
enum dp_event_kind {
    /* A datagram that is not a handed-over connection's 1-RTT packet. `number` says which socket.
     * Then struct dp_path and the bytes. */
    DP_EVENT_DATAGRAM = 1,
    /* Frames of the control plane, or (none) a packet on another path. `number` is the packet
     * number, `flags` whether it may not move the connection, `stream` the bytes of its datagram.
     * Then struct dp_path, the connection ID that it came to (host_cid_bytes), and the frames. */
    DP_EVENT_CONTROL = 2,
    /* The fate of what dp_pump_control sent: `number` is its token, `flags` 1 acknowledged, 0 lost.
     */
    DP_EVENT_DELIVERED = 3,
    /* The peer broke the protocol. `number` is the transport error, `stream` the frame type; then
     * the reason. */
    DP_EVENT_FAILED = 4,
    /* In-order bytes of a stream; `flags` 1: its end. */
    DP_EVENT_DATA = 5,
    /* The peer broke its half off, or does not want the other half: `number` is the code. */
    DP_EVENT_RESET = 6,
    DP_EVENT_STOPPED = 7,
    /* A stream is over on both halves. */
    DP_EVENT_CLOSED = 8,
    /* The raw front gave a request up, which is to be refused in words: then struct
     * dp_refused (raw.h). `flags` 1: the request's end had come. */
    DP_EVENT_REFUSED = 9,
    /* The runtime broke a rule; then the text. */
    DP_EVENT_BROKEN = 10,
    /* The device left the raw front unanswered, and is given up. (11 and 12 are load.h's.) */
    DP_EVENT_STUCK = 13,
};

struct dp_pump_event {
    uint32_t size; /* of what follows, before padding */
    uint16_t kind;
    uint16_t flags;
    uint64_t connection;
    uint64_t stream;
    uint64_t number;
    int64_t at_ns; /* CLOCK_REALTIME: the kernel's receive time */
    uint64_t reserved;
};

struct dp_pump_sending {
    uint64_t connection, stream;
    uint32_t size, fin;
};

/* Who reads a connection's streams. */
enum dp_front {
    DP_FRONT_EVENTS = 0, /* Python, by events */
    DP_FRONT_RAW = 1,    /* the raw server (raw.h); what it does not handle comes as events */
    DP_FRONT_LOAD = 2,   /* the load generator (load.h) */
    DP_FRONT_QUIET =
        3, /* Python, which hears of a stream's end (CLOSED) only if one side stopped it */
};

struct dp_pump;

struct dp_pump *dp_pump_new(void);
/* Stops the thread, if there is one, and frees all. */
void dp_pump_free(struct dp_pump *pump);

/* Events ----------------------------------------------------------------------------------------
 */

/* Copy events into `to`, whole ones, as many as fit: how many bytes. A DATA event is cut to fit.
 * Copying bytes of a stream consumes them: that is when credit goes back to the peer. */
uint32_t dp_pump_take(struct dp_pump *pump, uint8_t *to, uint32_t room);
/* An eventfd that is readable while there are events (in the threaded form). */
int dp_pump_fd(struct dp_pump *pump);

/* Connections -----------------------------------------------------------------------------------
 */

/* Take a connection over; its packets go out by socket number `socket`. 0: it cannot be. */
uint64_t dp_pump_adopt(struct dp_pump *pump, const struct dp_hand_over *from, uint32_t front,
                       uint32_t socket, int64_t now);
/* Forget it at once; nothing is sent. */
void dp_pump_forget(struct dp_pump *pump, uint64_t connection);
/* Route 1-RTT packets with this connection ID to it; `connection` 0: to Python again. 0, -1: no
 * memory. */
int dp_pump_route(struct dp_pump *pump, const uint8_t *cid, uint32_t bytes, uint64_t connection);
/* Hand it a datagram that begins with a 1-RTT packet. The bytes are copied. */
int dp_pump_inject(struct dp_pump *pump, uint64_t connection, const uint8_t *datagram,
                   uint32_t size, const uint8_t *path, int64_t now, int64_t at_ns);

/* Control plane (conn.h has the meaning). */
int dp_pump_control(struct dp_pump *pump, uint64_t connection, const uint8_t *frames, uint32_t size,
                    uint64_t token, int elicits, const uint8_t *path);
void dp_pump_set_path(struct dp_pump *pump, uint64_t connection, const uint8_t *path, int validated,
                      int is_new);
void dp_pump_set_peer_cid(struct dp_pump *pump, uint64_t connection, const uint8_t *cid,
                          uint32_t bytes);
void dp_pump_close(struct dp_pump *pump, uint64_t connection, const uint8_t *frames, uint32_t size);
void dp_pump_ping(struct dp_pump *pump, uint64_t connection);
void dp_pump_update_keys_every(struct dp_pump *pump, uint64_t connection, uint64_t packets);
/* When a packet was last taken; 0: never, or no such connection. */
int64_t dp_pump_last_received(struct dp_pump *pump, uint64_t connection);
/* 1 and *out, or 0. */
int dp_pump_conn_stats(struct dp_pump *pump, uint64_t connection, struct dp_conn_stats *out);

/* Streams. Data: 0, or -1 when the stream is reset, ended, not there, or there is no memory. */
int dp_pump_send(struct dp_pump *pump, uint64_t connection, uint64_t stream, const uint8_t *bytes,
                 uint32_t size, int fin);
/* Many of them at once: a struct dp_pump_sending and its bytes, unpadded, after the other. Those
 * that cannot be are left out. */
void dp_pump_send_many(struct dp_pump *pump, const uint8_t *sendings, size_t size);
/* The id of a new stream, or -1. */
int64_t dp_pump_open(struct dp_pump *pump, uint64_t connection, int uni);
void dp_pump_reset(struct dp_pump *pump, uint64_t connection, uint64_t stream, uint64_t code);
void dp_pump_stop(struct dp_pump *pump, uint64_t connection, uint64_t stream, uint64_t code);
/* 1: it waits for the peer to allow more streams; 0: it does not; -1: no such stream. */
int dp_pump_is_waiting(struct dp_pump *pump, uint64_t connection, uint64_t stream);
/* Bytes that wait for acknowledgement, on all streams of a connection. */
uint64_t dp_pump_unacked(struct dp_pump *pump, uint64_t connection);
/* The streams that have such bytes, at most `max`: ids, and up to where each is acknowledged. */
uint32_t dp_pump_progress(struct dp_pump *pump, uint64_t connection, uint64_t *streams,
                          uint64_t *acked, uint32_t max);

/* Out -------------------------------------------------------------------------------------------
 */

/* Sans-IO: the next datagram of a connection, at most DP_UDP_DATAGRAM bytes: its size or 0. */
uint32_t dp_pump_build(struct dp_pump *pump, uint64_t connection, int64_t now, uint8_t *datagram,
                       uint8_t *path);
/* When dp_pump_on_timer is due for it; INT64_MAX: not at all. */
int64_t dp_pump_timer(struct dp_pump *pump, uint64_t connection);
void dp_pump_on_timer(struct dp_pump *pump, uint64_t connection, int64_t now);
/* Threaded: build and send whatever is due on every connection that was touched. Called once at the
 * end of each pass of Python's. */
void dp_pump_flush(struct dp_pump *pump);

#endif
