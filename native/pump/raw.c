/* What a stream is to the raw front, and how a request ends before its answer does: refused, left
 * to Python, given up by its client. The states of a stream stand in raw_inside.h. */
#include "raw_inside.h"

static struct dp_raw_exchange *exchange_of(const struct dp_stream *stream) {
    return stream->app_state == DP_RAW_EXCHANGE ? stream->app : NULL;
}

/* For the rest of its header, or for the device. */
static bool is_waiting(const struct dp_stream *stream) {
    return stream->app_state == DP_RAW_HEADER || stream->app_state == DP_RAW_CLAIMING;
}

/* Ends before the answer's -------------------------------------------------------------------- */

void dp_raw_let_go(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    if (exchange->writing) {
        exchange->writing = false;
        exchange->entry->writing--;
        dp_raw_record(raw, DP_RAW_QUEUE, exchange->queue_ns);
    }
    /* First this: nothing may be decrypted into a slot that is another request's by then. */
    if (exchange->placed) {
        exchange->placed = false;
        dp_conn_leave_place(exchange->entry->conn, exchange->stream);
    }
    raw->verbs->let_go(raw, exchange->slot, exchange->generation);
    if (exchange->watch != DP_RAW_NOBODY)
        dp_raw_unwatch(raw, exchange);
    dp_raw_ended(raw, exchange);
}

void dp_raw_leave(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    dp_raw_let_go(raw, exchange);
    raw->stats.cancelled++;
}

static void stop_waiting(struct dp_raw_front *front, struct dp_stream *stream) {
    if (stream->app_state == DP_RAW_HEADER)
        dp_raw_forget_header(front, stream);
    else if (stream->app_state == DP_RAW_CLAIMING)
        dp_raw_forget_claim(front->partitions[stream->app_index], stream);
}

void dp_raw_leave_to_python(struct dp_pump *pump, struct dp_entry *entry,
                            struct dp_stream *stream) {
    stop_waiting(pump->raw, stream);
    dp_raw_mark(stream, DP_RAW_NEW, NULL);
    stream->app_number = 0;
    dp_events_hand_over(pump, entry, stream);
}

/* Have Python refuse it: what still comes of it is not read. */
static void tell(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream, bool ended,
                 const struct dp_refused *refused) {
    dp_conn_leave_place(entry->conn, stream);
    dp_events_push(pump, DP_EVENT_REFUSED, ended, entry->handle, stream->id, 0, refused,
                   sizeof *refused);
    dp_raw_leave_to_python(pump, entry, stream);
}

void dp_raw_refuse(struct dp_raw *raw, struct dp_raw_exchange *exchange, enum dp_why why,
                   uint32_t a, uint32_t b) {
    struct dp_refused refused = {.request_id = exchange->request_id,
                                 .why = why,
                                 .a = a,
                                 .b = b,
                                 .n_tokens = exchange->n_tokens,
                                 .queue_us = exchange->queue_us,
                                 .partition = raw->index};
    dp_raw_let_go(raw, exchange);
    raw->stats.failed++;
    tell(raw->pump, exchange->entry, exchange->stream, exchange->complete_ns != 0, &refused);
}

void dp_raw_refuse_claim(struct dp_raw *raw, struct dp_entry *entry, struct dp_stream *stream,
                         const struct dp_prompt1_request *request, enum dp_why why, bool ended) {
    struct dp_refused refused = {
        .request_id = request->request_id,
        .why = why,
        .n_tokens = request->n_tokens,
        .queue_us = dp_raw_record(raw, DP_RAW_QUEUE, dp_realtime_ns() - stream->app_at_ns[0]),
        .partition = raw->index};
    stop_waiting(raw->front, stream);
    tell(raw->pump, entry, stream, ended, &refused);
}

void dp_raw_header_late(struct dp_pump *pump, struct dp_stream *stream) {
    struct dp_entry *entry = stream->app;
    struct dp_refused refused = {.why = DP_WHY_HEADER_LATE,
                                 .a = (uint32_t)(stream->in.frontier - stream->in.consumed)};
    dp_raw_forget_header(pump->raw, stream);
    tell(pump, entry, stream, false, &refused);
}

/* What the peer did --------------------------------------------------------------------------- */

static size_t raw_data(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                       const uint8_t *bytes, size_t length, bool fin) {
    if (dp_events_has(stream))
        return dp_front_events.data(pump, entry, stream, bytes, length, fin);
    switch (stream->app_state) {
    case DP_RAW_NEW:
    case DP_RAW_HEADER:
        return dp_raw_take_header(pump, entry, stream, bytes, length, fin);
    case DP_RAW_CLAIMING:
        if (fin && !stream->app_at_ns[1])
            stream->app_at_ns[1] = dp_conn_at_ns(entry->conn);
        return 0;
    case DP_RAW_EXCHANGE:
        return dp_raw_take_body(stream->app, bytes, length, fin);
    default:
        return length;
    }
}

/* The request on a stream is over, whatever it was at. */
static void forget(struct dp_pump *pump, struct dp_stream *stream, enum dp_raw_kind kind) {
    struct dp_raw_exchange *exchange = exchange_of(stream);
    if (exchange && exchange->live)
        dp_raw_leave(exchange->raw, exchange);
    else
        stop_waiting(pump->raw, stream);
    dp_raw_mark(stream, kind, NULL);
}

/* The stream's own side ends too, also where nothing came before: one that stays open counts
 * against the streams that the peer may have. */
static void raw_reset(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                      uint64_t code) {
    if (dp_events_has(stream)) {
        dp_front_events.reset(pump, entry, stream, code);
        return;
    }
    bool was_answered = stream->app_state == DP_RAW_UNWANTED;
    forget(pump, stream, DP_RAW_ANSWERED);
    if (!was_answered && !(stream->id & DP_STREAM_IS_UNI))
        dp_conn_reset(entry->conn, stream, DP_RAW_NO_ERROR);
}

/* The peer wants no answer: its slot goes back, and what it still sends is not read. */
static void raw_stopped(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                        uint64_t code) {
    if (dp_events_has(stream)) {
        dp_front_events.stopped(pump, entry, stream, code);
        return;
    }
    const struct dp_raw_exchange *exchange = exchange_of(stream);
    bool is_coming = is_waiting(stream) || (exchange && exchange->writing);
    if (exchange && !is_coming) {
        forget(pump, stream, DP_RAW_ANSWERED);
    } else if (is_coming) {
        forget(pump, stream, DP_RAW_UNWANTED);
        dp_conn_stop(entry->conn, stream, DP_RAW_NO_ERROR);
    } else if (stream->app_state == DP_RAW_NEW) {
        /* Packets overtake each other: it was stopped before any of the request has come. */
        dp_raw_mark(stream, DP_RAW_UNWANTED, NULL);
    }
}

static void raw_closed(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream) {
    if (dp_events_has(stream))
        dp_front_events.closed(pump, entry, stream);
    else
        forget(pump, stream, DP_RAW_ANSWERED);
}

static void raw_left(struct dp_pump *pump, struct dp_entry *entry) {
    struct dp_stream *stream;
    for (uint32_t at = 0; (stream = dp_conn_each(entry->conn, &at));)
        if (!dp_events_has(stream))
            forget(pump, stream, DP_RAW_UNWANTED);
    dp_front_events.left(pump, entry);
}

const struct dp_front_calls dp_front_raw = {
    .data = raw_data,
    .reset = raw_reset,
    .stopped = raw_stopped,
    .closed = raw_closed,
    .left = raw_left,
};

int dp_raw_unread(struct dp_pump *pump, uint64_t connection, uint64_t stream_id, uint32_t code) {
    dp_pump_lock(pump);
    struct dp_entry *entry = dp_pump_entry(pump, connection);
    struct dp_stream *stream = NULL;
    if (entry && entry->front == &dp_front_raw && !entry->left)
        stream = dp_conn_stream(entry->conn, stream_id);
    bool ours = stream && !dp_events_has(stream);
    if (ours) {
        const struct dp_raw_exchange *exchange = exchange_of(stream);
        bool is_coming = is_waiting(stream) || (exchange && exchange->writing);
        /* What the client still sends has to be told from a header. */
        bool unwanted = is_coming || stream->app_state == DP_RAW_UNWANTED;
        forget(pump, stream, unwanted ? DP_RAW_UNWANTED : DP_RAW_ANSWERED);
        dp_conn_reset(entry->conn, stream, code);
        if (is_coming)
            dp_conn_stop(entry->conn, stream, DP_RAW_NO_ERROR);
    }
    dp_pump_unlock(pump);
    return ours;
}
