/* The streams of a connection: the table that they are found in, their credit, and what the owner
 * does with them. */
#include <string.h>

#include "conn_inside.h"

/* The table of streams: open addressing, by the id's index and kind. --------------------------- */

static uint32_t home(const struct dp_conn *conn, uint64_t id) {
    return (uint32_t)((id * 0x9e3779b97f4a7c15ULL) >> 32) & (conn->table_room - 1);
}

static uint32_t find(const struct dp_conn *conn, uint64_t id) {
    uint32_t at = home(conn, id);
    while (conn->table[at] && conn->table[at]->id != id)
        at = (at + 1) & (conn->table_room - 1);
    return at;
}

struct dp_stream *dp_conn_stream(struct dp_conn *conn, uint64_t id) {
    return conn->table[find(conn, id)];
}

static bool make_room(struct dp_conn *conn) {
    if ((conn->streams + 1) * 4 <= conn->table_room * 3)
        return true;
    uint32_t old_room = conn->table_room;
    struct dp_stream **old = conn->table;
    struct dp_stream **bigger = dp_pool_take(conn->pool, old_room * 2 * sizeof *old, NULL);
    if (!bigger)
        return false;
    memset(bigger, 0, old_room * 2 * sizeof *old);
    conn->table = bigger;
    conn->table_room = old_room * 2;
    for (uint32_t i = 0; i < old_room; i++)
        if (old[i])
            conn->table[find(conn, old[i]->id)] = old[i];
    dp_pool_give(conn->pool, old, old_room * sizeof *old);
    return true;
}

static void take_out(struct dp_conn *conn, uint64_t id) {
    uint32_t mask = conn->table_room - 1, hole = find(conn, id), at = hole;
    for (;;) {
        at = (at + 1) & mask;
        if (!conn->table[at])
            break;
        uint32_t wanted = home(conn, conn->table[at]->id);
        if (((at - wanted) & mask) >= ((at - hole) & mask)) {
            conn->table[hole] = conn->table[at];
            hole = at;
        }
    }
    conn->table[hole] = NULL;
    conn->streams--;
}

struct dp_stream *dp_conn_each(struct dp_conn *conn, uint32_t *at) {
    while (*at < conn->table_room)
        if (conn->table[(*at)++])
            return conn->table[*at - 1];
    return NULL;
}

struct dp_stream *dp_conn_add_stream(struct dp_conn *conn, uint64_t id) {
    struct dp_stream *stream =
        make_room(conn) ? dp_pool_take(conn->pool, sizeof *stream, NULL) : NULL;
    if (!stream)
        return NULL;
    memset(stream, 0, sizeof *stream);
    stream->id = id;
    stream->in.final_size = DP_NO_SIZE;
    bool ours = dp_is_ours(conn, id);
    if (dp_is_uni(id)) {
        stream->in.limit = ours ? 0 : conn->local_uni;
        stream->out.limit = ours ? conn->remote_uni : 0;
        stream->in.done = ours;
        stream->out.done = !ours;
    } else {
        stream->in.limit = ours ? conn->local_bidi_local : conn->local_bidi_remote;
        /* What the peer calls remote is ours. */
        stream->out.limit = ours ? conn->remote_bidi_remote : conn->remote_bidi_local;
    }
    stream->in.window = stream->in.limit;
    conn->table[find(conn, id)] = stream;
    conn->streams++;
    return stream;
}

/* Streams ------------------------------------------------------------------------------------- */

void dp_conn_queue(struct dp_conn *conn, struct dp_stream *stream) {
    if (stream->queued || stream->waiting)
        return;
    stream->queued = true;
    stream->next = NULL;
    if (conn->last_queued)
        conn->last_queued->next = stream;
    else
        conn->first_queued = stream;
    conn->last_queued = stream;
    dp_conn_touch(conn);
}

static void unqueue(struct dp_conn *conn, struct dp_stream *stream) {
    if (!stream->queued)
        return;
    struct dp_stream *before = NULL, *at = conn->first_queued;
    while (at != stream) {
        before = at;
        at = at->next;
    }
    if (before)
        before->next = stream->next;
    else
        conn->first_queued = stream->next;
    if (conn->last_queued == stream)
        conn->last_queued = before;
    stream->queued = false;
}

void dp_conn_settle(struct dp_conn *conn, struct dp_stream *stream) {
    if (!stream->in.done || !stream->out.done)
        return;
    if (conn->depth) {
        conn->sweep = true;
        return;
    }
    conn->depth++;
    conn->owner->closed(conn->self, conn, stream);
    conn->depth--;
    unqueue(conn, stream);
    if (stream->in.place)
        conn->places--;
    uint64_t id = stream->id;
    take_out(conn, id);
    dp_stream_clear(stream, conn->pool);
    dp_pool_give(conn->pool, stream, sizeof *stream);
    if (dp_is_ours(conn, id))
        return;
    int uni = dp_is_uni(id);
    conn->closed[uni]++;
    uint64_t limit = conn->closed[uni] + conn->stream_window[uni];
    if (limit - conn->stream_limit[uni] >= (conn->stream_window[uni] + 1) / 2) {
        conn->stream_limit[uni] = limit;
        conn->due |= uni ? DP_DUE_STREAMS_UNI : DP_DUE_STREAMS_BIDI;
        dp_conn_touch(conn);
    }
}

void dp_conn_sweep(struct dp_conn *conn) {
    while (conn->sweep && !conn->depth) {
        conn->sweep = false;
        for (uint32_t at = 0; at < conn->table_room; at++) {
            struct dp_stream *stream = conn->table[at];
            if (stream && stream->in.done && stream->out.done) {
                dp_conn_settle(conn, stream);
                conn->sweep = true; /* others moved in the table */
                break;
            }
        }
    }
}

static bool may_open(const struct dp_conn *conn, uint64_t id) {
    return id >> 2 < conn->remote_stream_limit[dp_is_uni(id)];
}

struct dp_stream *dp_conn_open(struct dp_conn *conn, bool uni) {
    if (conn->over || conn->failed)
        return NULL;
    struct dp_stream *stream = dp_conn_add_stream(conn, conn->next_id[uni]);
    if (!stream)
        return NULL;
    conn->next_id[uni] += 4;
    stream->waiting = !may_open(conn, stream->id);
    return stream;
}

static bool takes_data(const struct dp_conn *conn, const struct dp_stream *stream) {
    return !conn->over && !conn->failed && !stream->out.is_reset && !stream->out.fin &&
           !stream->out.done;
}

bool dp_conn_send(struct dp_conn *conn, struct dp_stream *stream, const uint8_t *bytes,
                  size_t length, bool fin) {
    if (!takes_data(conn, stream) || !dp_stream_write(stream, conn->pool, bytes, length, fin))
        return false;
    conn->stats.unacked += length;
    dp_conn_queue(conn, stream);
    return true;
}

bool dp_conn_send_lent(struct dp_conn *conn, struct dp_stream *stream, const uint8_t *bytes,
                       size_t length) {
    if (!takes_data(conn, stream) || stream->out.stop)
        return false;
    dp_stream_lend(stream, bytes, length);
    conn->stats.unacked += length;
    dp_conn_queue(conn, stream);
    return true;
}

void dp_conn_reset(struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    struct dp_sending *out = &stream->out;
    if (out->is_reset || out->done || conn->over)
        return;
    conn->stats.unacked -= dp_stream_unacked(stream);
    dp_stream_reset(stream, conn->pool, code);
    stream->pending |= DP_PENDING_RESET;
    dp_conn_queue(conn, stream);
}

/* Nothing more is offered. The half is over once its size is known: what is missing matters to
 * nobody. */
static void end_reading(struct dp_conn *conn, struct dp_stream *stream) {
    struct dp_receiving *in = &stream->in;
    if (in->discard)
        return;
    if (in->place)
        conn->places--;
    dp_stream_discard(stream, conn->pool);
    dp_conn_credit(conn, stream, in->highest - in->consumed);
    in->consumed = in->frontier = in->highest;
    if (in->final_size != DP_NO_SIZE) {
        in->done = true;
        dp_conn_settle(conn, stream);
    }
}

void dp_conn_stop(struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    struct dp_receiving *in = &stream->in;
    if (in->done || conn->over)
        return;
    bool ended = in->final_size != DP_NO_SIZE;
    if (!ended) {
        in->stop_code = code;
        stream->pending |= DP_PENDING_STOP;
        stream->pending &= (uint8_t)~DP_PENDING_LIMIT;
        dp_conn_queue(conn, stream);
    }
    end_reading(conn, stream);
}

void dp_conn_leave_place(struct dp_conn *conn, struct dp_stream *stream) {
    end_reading(conn, stream);
}

void dp_conn_set_place(struct dp_conn *conn, struct dp_stream *stream, uint8_t *place,
                       uint64_t from, uint64_t to) {
    if (stream->in.discard || stream->in.place)
        return;
    dp_stream_set_place(stream, conn->pool, place, from, to);
    conn->places++;
}

uint64_t dp_conn_unacked(const struct dp_conn *conn) {
    return conn->stats.unacked;
}

void dp_conn_credit(struct dp_conn *conn, struct dp_stream *stream, uint64_t bytes) {
    conn->in.consumed += bytes;
    struct dp_receiving *in = &stream->in;
    if (conn->in.consumed + conn->in.window - conn->in.limit >= conn->in.window / 2) {
        conn->in.limit = conn->in.consumed + conn->in.window;
        conn->due |= DP_DUE_MAX_DATA;
        dp_conn_touch(conn);
    }
    uint64_t consumed = in->consumed + bytes;
    if (!in->discard && in->final_size == DP_NO_SIZE &&
        consumed + in->window - in->limit >= in->window / 2) {
        in->limit = consumed + in->window;
        stream->pending |= DP_PENDING_LIMIT;
        dp_conn_queue(conn, stream);
    }
}

static void consumed(struct dp_conn *conn, struct dp_stream *stream, size_t length) {
    struct dp_receiving *in = &stream->in;
    if (!in->discard)
        dp_conn_credit(conn, stream, length);
    dp_stream_consume(stream, conn->pool, length);
}

void dp_conn_consume(struct dp_conn *conn, struct dp_stream *stream, size_t length) {
    struct dp_receiving *in = &stream->in;
    consumed(conn, stream, length);
    if (in->consumed == in->final_size) {
        in->fin_offered = in->done = true;
        dp_conn_settle(conn, stream);
    }
}

void dp_conn_deliver(struct dp_conn *conn, struct dp_stream *stream) {
    struct dp_receiving *in = &stream->in;
    while (!in->discard && !in->fin_offered) {
        size_t length;
        const uint8_t *bytes = dp_stream_readable(stream, &length);
        bool fin = in->consumed + length == in->final_size;
        if (!length && !fin)
            break;
        conn->depth++;
        size_t used = conn->owner->data(conn->self, conn, stream, bytes, length, fin);
        conn->depth--;
        if (in->discard) {
            dp_stream_consume(stream, conn->pool, 0);
            break;
        }
        in->fin_offered = fin && used == length;
        in->done = in->done || in->fin_offered;
        if (used)
            consumed(conn, stream, used);
        if (used < length)
            break;
    }
    dp_conn_settle(conn, stream);
}

void dp_conn_offer(struct dp_conn *conn, struct dp_stream *stream) {
    dp_conn_deliver(conn, stream);
    dp_conn_sweep(conn);
}
