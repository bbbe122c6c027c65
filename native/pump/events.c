/* What Python is told, in the order in which it happened on each connection.
 *
 * Each connection has a queue of nodes out of the pool. Bytes of streams are not copied into nodes:
 * a node that only names the stream stands in their place, and what lies in the stream when Python
 * comes is copied straight to it. So a peer's bytes are bounded by the credit that it has, which
 * grows only as Python takes them. Only datagrams may be lost: they come from anybody. */
#include <string.h>

#include "inside.h"

#define DATAGRAMS_MAX      1024
#define DATAGRAM_BYTES_MAX (2 << 20)
/* A peer can cause these without end, so that one who does so faster than Python reads is cut off:
 * frames of the control plane, and streams that are opened and broken off. */
#define CONTROLS_MAX 256
#define NODES_MAX    65536
/* Bytes of streams that were broken off, which Python had not read yet. Beyond it they are lost, as
 * they may be (RFC 9000 section 3.2). */
#define COPIED_MAX (1 << 20)
/* Of one event, so that a take (DP_EVENT_TAKE) has room for it. */
#define PIECE (DP_EVENT_TAKE / 4)
/* What Python takes at once is answered at once, so a take is short, and a connection has a few
 * events of it before the next one's turn: one that asks without end, or a thousand refusals, makes
 * nobody wait long. */
#define TURN  4
#define TURNS 64
/* Of a take, for datagrams, while connections have something to tell. */
#define DATAGRAMS_ROOM (DP_EVENT_TAKE / 8)

/* Bits of dp_stream.app_state, which leaves the lower ones to the front that had it before. While
 * QUEUED, `app` is the stream's node. */
#define HAS      0x80000000u /* it is Python's */
#define QUEUED   0x40000000u
#define FIN_TOLD 0x20000000u
#define STOPPED  0x10000000u /* by one side: Python waits for its end */

struct dp_event_node {
    struct dp_event_node *next, *previous;
    struct dp_told *told;
    struct dp_stream *stream; /* in place of its bytes; else NULL */
    size_t room;
    struct dp_pump_event event;
    uint8_t bytes[];
};

struct dp_events {
    struct dp_pool *pool;
    struct dp_told *first, *last; /* those with something to tell, in turns */
    struct dp_told own;           /* what is of no connection */
    struct dp_told datagrams;     /* not among them */
};

struct dp_events *dp_events_new(struct dp_pool *pool) {
    struct dp_events *events = dp_pool_take(pool, sizeof *events, NULL);
    if (events)
        *events = (struct dp_events){.pool = pool};
    return events;
}

/* The queues ---------------------------------------------------------------------------------- */

static void add_to_turns(struct dp_events *events, struct dp_told *told) {
    told->next = NULL;
    told->previous = events->last;
    *(events->last ? &events->last->next : &events->first) = told;
    events->last = told;
}

static void leave_turns(struct dp_events *events, struct dp_told *told) {
    *(told->previous ? &told->previous->next : &events->first) = told->next;
    *(told->next ? &told->next->previous : &events->last) = told->previous;
}

static struct dp_event_node *new_node(struct dp_events *events, size_t size) {
    size_t room;
    struct dp_event_node *node = dp_pool_take(events->pool, sizeof *node + size, &room);
    if (node) {
        memset(node, 0, sizeof *node);
        node->room = room;
        node->event.size = (uint32_t)size;
    }
    return node;
}

/* Put a node behind `before`, or first of all without one. */
static void insert(struct dp_events *events, struct dp_told *told, struct dp_event_node *before,
                   struct dp_event_node *node) {
    if (!told->first && told != &events->datagrams)
        add_to_turns(events, told);
    node->told = told;
    node->previous = before;
    node->next = before ? before->next : told->first;
    *(node->next ? &node->next->previous : &told->last) = node;
    *(before ? &before->next : &told->first) = node;
    told->count++;
    told->controls += node->event.kind == DP_EVENT_CONTROL;
    told->bytes += node->event.size;
}

static void drop(struct dp_events *events, struct dp_event_node *node) {
    struct dp_told *told = node->told;
    *(node->previous ? &node->previous->next : &told->first) = node->next;
    *(node->next ? &node->next->previous : &told->last) = node->previous;
    told->count--;
    told->controls -= node->event.kind == DP_EVENT_CONTROL;
    told->bytes -= node->event.size;
    if (!told->first && told != &events->datagrams)
        leave_turns(events, told);
    if (node->stream) {
        node->stream->app = NULL;
        node->stream->app_state &= ~QUEUED;
    }
    dp_pool_give(events->pool, node, node->room);
}

static void drop_all(struct dp_events *events, struct dp_told *told) {
    while (told->first)
        drop(events, told->first);
}

void dp_events_free(struct dp_events *events) {
    if (!events)
        return;
    drop_all(events, &events->own);
    drop_all(events, &events->datagrams);
    dp_pool_give(events->pool, events, sizeof *events);
}

bool dp_events_waiting(const struct dp_events *events) {
    return events->first || events->datagrams.first;
}

void dp_events_forget(struct dp_pump *pump, struct dp_entry *entry) {
    drop_all(pump->events, &entry->told);
}

void dp_events_forget_data(struct dp_pump *pump, struct dp_entry *entry) {
    struct dp_event_node *next;
    for (struct dp_event_node *node = entry->told.first; node; node = next) {
        next = node->next;
        if (node->stream)
            drop(pump->events, node);
    }
}

void dp_events_forget_stream(struct dp_pump *pump, struct dp_stream *stream) {
    if (stream->app_state & QUEUED)
        drop(pump->events, stream->app);
}

/* Telling ------------------------------------------------------------------------------------- */

/* A node at the end of a queue, its bytes for the caller to fill. NULL: the connection cannot go on
 * (the last it tells is why). */
static struct dp_event_node *push(struct dp_pump *pump, struct dp_told *told, uint16_t kind,
                                  size_t size) {
    struct dp_entry *entry = told->entry;
    bool last_word = kind == DP_EVENT_FAILED;
    if (!last_word && told->count >= NODES_MAX) {
        dp_pump_fail(pump, entry, "too much happens at once");
        return NULL;
    }
    struct dp_event_node *node = new_node(pump->events, size);
    if (!node) {
        if (entry && !last_word)
            dp_pump_fail(pump, entry, "no memory");
        return NULL;
    }
    node->event.kind = kind;
    if (entry) {
        node->event.connection = entry->handle;
        node->event.at_ns = dp_conn_at_ns(entry->conn);
    }
    insert(pump->events, told, told->last, node);
    return node;
}

void dp_events_push(struct dp_pump *pump, uint16_t kind, uint16_t flags, uint64_t connection,
                    uint64_t stream, uint64_t number, const void *bytes, size_t size) {
    struct dp_told *told = &pump->events->own;
    if (connection) {
        struct dp_entry *entry = dp_pump_entry(pump, connection);
        if (!entry)
            return;
        told = &entry->told;
    } else if (told->count >= NODES_MAX) {
        return;
    }
    struct dp_event_node *node = push(pump, told, kind, size);
    if (!node)
        return;
    node->event.flags = flags;
    node->event.stream = stream;
    node->event.number = number;
    if (size)
        memcpy(node->bytes, bytes, size);
}

bool dp_events_datagram(struct dp_pump *pump, uint32_t socket, const uint8_t *datagram, size_t size,
                        const struct dp_path *path, int64_t at_ns) {
    struct dp_events *events = pump->events;
    struct dp_told *told = &events->datagrams;
    size_t whole = sizeof *path + size;
    if (told->count >= DATAGRAMS_MAX || told->bytes + whole > DATAGRAM_BYTES_MAX)
        return false;
    struct dp_event_node *node = new_node(events, whole);
    if (!node)
        return false;
    node->event.kind = DP_EVENT_DATAGRAM;
    node->event.number = socket;
    node->event.at_ns = at_ns;
    memcpy(node->bytes, path, sizeof *path);
    memcpy(node->bytes + sizeof *path, datagram, size);
    insert(events, told, told->last, node);
    return true;
}

void dp_events_control(struct dp_pump *pump, struct dp_entry *entry, const struct dp_path *path,
                       const uint8_t *cid, uint64_t pn, bool probing, const uint8_t *frames,
                       size_t size) {
    if (entry->told.controls >= CONTROLS_MAX) {
        dp_pump_fail(pump, entry, "too many frames of the control plane");
        return;
    }
    size_t cid_bytes = entry->host_cid_bytes;
    struct dp_event_node *node =
        push(pump, &entry->told, DP_EVENT_CONTROL, sizeof *path + cid_bytes + size);
    if (!node)
        return;
    node->event.flags = probing;
    node->event.stream = dp_conn_control_datagram(entry->conn);
    node->event.number = pn;
    uint8_t *at = node->bytes;
    memcpy(at, path, sizeof *path);
    memcpy(at += sizeof *path, cid, cid_bytes);
    if (size)
        memcpy(at + cid_bytes, frames, size);
}

/* Streams ------------------------------------------------------------------------------------- */

/* What lies in a stream, and whether its end comes behind that and is still to be told. Looked at
 * late: bytes that are being offered lie there only once the offer was declined. */
static const uint8_t *look(const struct dp_stream *stream, size_t *length, bool *fin) {
    const struct dp_receiving *in = &stream->in;
    const uint8_t *bytes = dp_stream_readable(stream, length);
    *fin = !in->discard && !in->was_reset && !(stream->app_state & FIN_TOLD) &&
           in->consumed + *length == in->final_size;
    return bytes;
}

static void mark(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream) {
    stream->app_state |= HAS;
    if (!(stream->app_state & QUEUED)) {
        struct dp_event_node *node = push(pump, &entry->told, DP_EVENT_DATA, 0);
        if (!node)
            return;
        node->event.stream = stream->id;
        node->stream = stream;
        stream->app = node;
        stream->app_state |= QUEUED;
    }
    struct dp_event_node *node = stream->app;
    node->event.at_ns = dp_conn_at_ns(entry->conn);
}

/* A copy of bytes that Python has not read, behind `before`. NULL: no memory. */
static struct dp_event_node *copy(struct dp_pump *pump, struct dp_event_node *before,
                                  const struct dp_pump_event *event, const uint8_t *bytes,
                                  size_t size) {
    struct dp_event_node *node = new_node(pump->events, size);
    if (!node)
        return NULL;
    node->event = *event;
    node->event.size = (uint32_t)size;
    if (size)
        memcpy(node->bytes, bytes, size);
    insert(pump->events, before->told, before, node);
    return node;
}

/* The stream is not there much longer: keep what Python has not read of it, in its place, in pieces
 * that a take has room for. */
static void keep(struct dp_pump *pump, struct dp_stream *stream) {
    if (!(stream->app_state & QUEUED))
        return;
    struct dp_event_node *mark = stream->app, *last = mark;
    size_t length;
    bool fin;
    const uint8_t *bytes = look(stream, &length, &fin);
    if ((length || fin) && mark->told->bytes + length <= COPIED_MAX) {
        struct dp_pump_event event = mark->event;
        for (size_t at = 0; last && (at < length || (fin && !length && at == 0));) {
            size_t piece = length - at < PIECE ? length - at : PIECE;
            event.flags = fin && at + piece == length;
            last = copy(pump, last, &event, bytes + at, piece);
            at += piece ? piece : 1;
        }
    }
    drop(pump->events, mark);
}

void dp_events_hand_over(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream) {
    if (!(stream->app_state & HAS))
        mark(pump, entry, stream);
}

void dp_events_stopped(struct dp_stream *stream) {
    stream->app_state |= STOPPED;
}

bool dp_events_has(const struct dp_stream *stream) {
    return stream->app_state & HAS;
}

static size_t on_data(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                      const uint8_t *bytes, size_t length, bool fin) {
    (void)bytes;
    (void)length;
    (void)fin;
    mark(pump, entry, stream);
    return 0;
}

static void on_reset(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                     uint64_t code) {
    keep(pump, stream);
    dp_events_push(pump, DP_EVENT_RESET, 0, entry->handle, stream->id, code, NULL, 0);
}

static void on_stopped(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                       uint64_t code) {
    stream->app_state |= STOPPED;
    dp_events_push(pump, DP_EVENT_STOPPED, 0, entry->handle, stream->id, code, NULL, 0);
}

static void on_closed(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream) {
    keep(pump, stream);
    if (entry->quiet && !(stream->app_state & STOPPED))
        return;
    dp_events_push(pump, DP_EVENT_CLOSED, 0, entry->handle, stream->id, 0, NULL, 0);
}

static void on_left(struct dp_pump *pump, struct dp_entry *entry) {
    (void)pump;
    (void)entry; /* What happened is still to be told. */
}

const struct dp_front_calls dp_front_events = {.data = on_data,
                                               .reset = on_reset,
                                               .stopped = on_stopped,
                                               .closed = on_closed,
                                               .left = on_left};

/* Taking -------------------------------------------------------------------------------------- */

struct room {
    uint8_t *at;
    size_t left;
};

/* Write an event, its bytes and what pads them. False: there is no room for it. */
static bool write_event(struct room *to, const struct dp_pump_event *event, const uint8_t *bytes) {
    size_t size = event->size, padded = (size + 7) & ~(size_t)7;
    if (to->left < sizeof *event + padded)
        return false;
    memcpy(to->at, event, sizeof *event);
    if (size)
        memcpy(to->at + sizeof *event, bytes, size);
    memset(to->at + sizeof *event + size, 0, padded - size);
    to->at += sizeof *event + padded;
    to->left -= sizeof *event + padded;
    return true;
}

/* Copy what lies in a stream. False: there is no room for all of it. */
static bool take_data(struct dp_pump *pump, struct dp_event_node *node, struct room *to) {
    struct dp_stream *stream = node->stream;
    struct dp_conn *conn = node->told->entry->conn;
    size_t length;
    bool fin;
    const uint8_t *bytes = look(stream, &length, &fin);
    if (!length && !fin) {
        drop(pump->events, node);
        return true;
    }
    if (to->left < sizeof node->event + (length ? 8 : 0))
        return false;
    size_t room = (to->left - sizeof node->event) & ~(size_t)7;
    size_t taken = length < room ? length : room;
    bool all = taken == length;
    struct dp_pump_event event = node->event;
    event.size = (uint32_t)taken;
    event.flags = all && fin;
    write_event(to, &event, bytes);
    if (event.flags)
        stream->app_state |= FIN_TOLD;
    if (all)
        drop(pump->events, node);
    if (taken)
        dp_conn_consume(conn, stream, taken); /* which may close the stream */
    return all;
}

/* A connection's turn. False: there is no room for all of it. */
static bool take_told(struct dp_pump *pump, struct dp_told *told, struct room *to) {
    struct dp_event_node *node;
    for (int taken = 0; taken < TURN && (node = told->first); taken++) {
        if (node->stream) {
            if (!take_data(pump, node, to))
                return false;
            continue;
        }
        if (!write_event(to, &node->event, node->bytes))
            return false;
        drop(pump->events, node);
    }
    return true;
}

static void take_datagrams(struct dp_events *events, struct room *to, size_t leave) {
    struct dp_event_node *node;
    while (to->left > leave && (node = events->datagrams.first) &&
           write_event(to, &node->event, node->bytes))
        drop(events, node);
}

uint32_t dp_events_take(struct dp_pump *pump, uint8_t *to, uint32_t room) {
    struct dp_events *events = pump->events;
    struct room rest = {to, room};
    struct dp_told *told;
    bool has_room = true;
    /* Datagrams may not crowd out what connections have to tell. */
    uint32_t leave = room > DATAGRAMS_ROOM ? room - DATAGRAMS_ROOM : room / 2;
    take_datagrams(events, &rest, events->first ? leave : 0);
    for (int turn = 0; has_room && turn < TURNS && (told = events->first); turn++) {
        has_room = take_told(pump, told, &rest);
        if (told->first) {
            leave_turns(events, told);
            add_to_turns(events, told);
        }
    }
    if (!events->first)
        take_datagrams(events, &rest, 0);
    return (uint32_t)(rest.at - to);
}
