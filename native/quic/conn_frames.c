/* What a frame does to the connection and its streams (RFC 9000 sections 3, 4 and 19).
 *
 * Its packet's tag has verified and all of its frames have been parsed; what breaks the protocol
 * all the same is answered with a transport error, and the frames behind it do nothing. */
#include "conn_inside.h"

/* Streams ------------------------------------------------------------------------------------- */

/* The stream that a frame names. NULL with 0: it is over, and the frame says nothing any more. */
static struct dp_stream *stream_for(struct dp_conn *conn, uint64_t id, uint64_t *error) {
    *error = DP_NO_ERROR;
    struct dp_stream *stream = dp_conn_stream(conn, id);
    if (stream)
        return stream;
    bool uni = dp_is_uni(id);
    if (dp_is_ours(conn, id)) {
        if (id >= conn->next_id[uni])
            *error = DP_STREAM_STATE_ERROR;
        return NULL;
    }
    if (id < conn->next_peer_id[uni])
        return NULL;
    if (id >> 2 >= conn->stream_limit[uni]) {
        *error = DP_STREAM_LIMIT_ERROR;
        return NULL;
    }
    /* Opening a stream opens all lower ones of its kind (section 3.2). */
    while (conn->next_peer_id[uni] <= id) {
        stream = dp_conn_add_stream(conn, conn->next_peer_id[uni]);
        if (!stream) {
            *error = DP_INTERNAL_ERROR;
            return NULL;
        }
        conn->next_peer_id[uni] += 4;
    }
    return stream;
}

/* Flow control and the final size (sections 4.1 and 4.5): 0 or the error. */
static uint64_t count_bytes(struct dp_conn *conn, struct dp_stream *stream, uint64_t end,
                            bool final) {
    struct dp_receiving *in = &stream->in;
    if (in->final_size != DP_NO_SIZE && (end > in->final_size || (final && end != in->final_size)))
        return DP_FINAL_SIZE_ERROR;
    if (final && end < in->highest)
        return DP_FINAL_SIZE_ERROR;
    if (end > in->highest) {
        uint64_t more = end - in->highest;
        if (end > in->limit || conn->in.used + more > conn->in.limit)
            return DP_FLOW_CONTROL_ERROR;
        conn->in.used += more;
        in->highest = end;
        if (in->discard) {
            dp_conn_credit(conn, stream, more);
            in->consumed = in->frontier = end;
        }
    }
    if (final)
        in->final_size = end;
    return DP_NO_ERROR;
}

/* Bytes that come in order and are all there is: offered where they lie. */
static bool offer_directly(struct dp_conn *conn, struct dp_stream *stream, const uint8_t *bytes,
                           size_t length, bool fin) {
    struct dp_receiving *in = &stream->in;
    uint64_t offset = in->frontier;
    conn->depth++;
    size_t used = conn->owner->data(conn->self, conn, stream, bytes, length, fin);
    conn->depth--;
    if (in->discard)
        return true;
    in->fin_offered = fin && used == length;
    in->done = in->done || in->fin_offered;
    if (used) {
        dp_conn_credit(conn, stream, used);
        in->consumed = in->frontier = offset + used;
    }
    return used == length ||
           dp_stream_keep(stream, conn->pool, offset + used, bytes + used, length - used);
}

static uint64_t take_stream(struct dp_conn *conn, const struct dp_frame *frame) {
    uint64_t id = frame->stream.id, error;
    if (dp_is_ours(conn, id) && dp_is_uni(id))
        return DP_STREAM_STATE_ERROR;
    struct dp_stream *stream = stream_for(conn, id, &error);
    if (!stream)
        return error;
    struct dp_receiving *in = &stream->in;
    if (in->was_reset)
        return DP_NO_ERROR;
    size_t length = frame->stream.length;
    bool fin = frame->stream.fin, had_size = in->final_size != DP_NO_SIZE;
    error = count_bytes(conn, stream, frame->stream.offset + length, fin);
    if (error)
        return error;
    if (in->discard) {
        in->done = in->done || in->final_size != DP_NO_SIZE;
        dp_conn_settle(conn, stream);
        return DP_NO_ERROR;
    }
    const uint8_t *bytes = frame->stream.data;
    if (length && frame->stream.offset == in->frontier && in->consumed == in->frontier &&
        !in->beyond.count && !in->place) {
        if (!offer_directly(conn, stream, bytes, length, in->final_size == in->frontier + length))
            return DP_INTERNAL_ERROR;
        dp_conn_settle(conn, stream);
        return DP_NO_ERROR;
    }
    uint64_t before = in->frontier;
    if (!dp_stream_keep(stream, conn->pool, frame->stream.offset, bytes, length))
        return DP_INTERNAL_ERROR;
    if (in->frontier != before || (fin && !had_size))
        dp_conn_deliver(conn, stream);
    return DP_NO_ERROR;
}

static uint64_t take_reset(struct dp_conn *conn, const struct dp_frame *frame) {
    uint64_t id = frame->reset.id, error;
    if (dp_is_ours(conn, id) && dp_is_uni(id))
        return DP_STREAM_STATE_ERROR;
    struct dp_stream *stream = stream_for(conn, id, &error);
    if (!stream)
        return error;
    struct dp_receiving *in = &stream->in;
    /* All of it came, and the application may not have looked yet: then it is no news that the peer
     * gave up repeating it (section 3.2). */
    bool is_whole = in->frontier == in->final_size;
    error = count_bytes(conn, stream, frame->reset.final_size, true);
    if (error || in->done || is_whole)
        return error;
    /* What came before and was not consumed may still be looked at. */
    in->was_reset = true;
    conn->depth++;
    conn->owner->reset(conn->self, conn, stream, frame->reset.code);
    conn->depth--;
    if (!in->discard) {
        if (in->place)
            conn->places--;
        dp_stream_discard(stream, conn->pool);
        dp_conn_credit(conn, stream, in->highest - in->consumed);
        in->consumed = in->frontier = in->highest;
    }
    in->done = true;
    dp_stream_consume(stream, conn->pool, 0);
    dp_conn_settle(conn, stream);
    return DP_NO_ERROR;
}

static uint64_t take_stop(struct dp_conn *conn, const struct dp_frame *frame) {
    uint64_t id = frame->reset.id, error;
    if (!dp_is_ours(conn, id) && dp_is_uni(id))
        return DP_STREAM_STATE_ERROR;
    struct dp_stream *stream = stream_for(conn, id, &error);
    if (!stream || stream->out.is_reset || stream->out.done)
        return error;
    dp_conn_reset(conn, stream, frame->reset.code);
    conn->depth++;
    conn->owner->stopped(conn->self, conn, stream, frame->reset.code);
    conn->depth--;
    return DP_NO_ERROR;
}

/* Limits -------------------------------------------------------------------------------------- */

static uint64_t take_stream_limit(struct dp_conn *conn, const struct dp_frame *frame) {
    uint64_t id = frame->limit.id, error;
    bool ours = dp_is_ours(conn, id);
    if (frame->type == DP_FRAME_STREAM_DATA_BLOCKED) {
        if (ours && dp_is_uni(id))
            return DP_STREAM_STATE_ERROR;
        stream_for(conn, id, &error);
        return error;
    }
    if (!ours && dp_is_uni(id))
        return DP_STREAM_STATE_ERROR;
    struct dp_stream *stream = stream_for(conn, id, &error);
    if (!stream)
        return error;
    if (frame->limit.value > stream->out.limit) {
        stream->out.limit = frame->limit.value;
        if (dp_stream_has_data(stream))
            dp_conn_queue(conn, stream);
    }
    return DP_NO_ERROR;
}

void dp_conn_wake_streams(struct dp_conn *conn) {
    struct dp_stream *stream;
    for (uint32_t at = 0; (stream = dp_conn_each(conn, &at));) {
        if (stream->waiting && dp_is_ours(conn, stream->id) &&
            stream->id >> 2 < conn->remote_stream_limit[dp_is_uni(stream->id)])
            stream->waiting = false;
        if (!stream->waiting && (stream->pending || dp_stream_has_data(stream)))
            dp_conn_queue(conn, stream);
    }
}

static void take_limit(struct dp_conn *conn, const struct dp_frame *frame) {
    uint64_t *limit = frame->type == DP_FRAME_MAX_DATA           ? &conn->out_limit
                      : frame->type == DP_FRAME_MAX_STREAMS_BIDI ? &conn->remote_stream_limit[0]
                                                                 : &conn->remote_stream_limit[1];
    if (frame->limit.value <= *limit)
        return;
    *limit = frame->limit.value;
    conn->credit_came = true; /* looked at once a packet, however many such frames it has */
}

static uint64_t take_ack(struct dp_conn *conn, const struct dp_frame *frame, int64_t now) {
    uint64_t exponent = conn->ack_exponent > 20 ? 20 : conn->ack_exponent;
    uint64_t delay = frame->ack.delay > (1ULL << 30) ? 1ULL << 30 : frame->ack.delay;
    if (!dp_recovery_ack(&conn->recovery, frame, (int64_t)(delay << exponent) * 1000, now,
                         &dp_conn_fates, conn))
        return DP_PROTOCOL_VIOLATION;
    dp_conn_free_records(conn);
    if (!conn->recovery.pto_count)
        conn->probes = 0;
    if (conn->first_queued || conn->first_control)
        dp_conn_touch(conn); /* the window may have opened */
    return DP_NO_ERROR;
}

uint64_t dp_conn_take_frame(struct dp_conn *conn, const struct dp_frame *frame, int64_t now) {
    switch (frame->type) {
    case DP_FRAME_STREAM:
        return take_stream(conn, frame);
    case DP_FRAME_ACK:
    case DP_FRAME_ACK_ECN:
        return take_ack(conn, frame, now);
    case DP_FRAME_RESET_STREAM:
        return take_reset(conn, frame);
    case DP_FRAME_STOP_SENDING:
        return take_stop(conn, frame);
    case DP_FRAME_MAX_STREAM_DATA:
    case DP_FRAME_STREAM_DATA_BLOCKED:
        return take_stream_limit(conn, frame);
    case DP_FRAME_MAX_DATA:
    case DP_FRAME_MAX_STREAMS_BIDI:
    case DP_FRAME_MAX_STREAMS_UNI:
        take_limit(conn, frame);
        return DP_NO_ERROR;
    default:
        return DP_NO_ERROR;
    }
}
