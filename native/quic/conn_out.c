/* A packet's way out: what is due is gathered into one payload, numbered, sealed (RFC 9000 sections
 * 12, 13 and 17.3, RFC 9001 section 5).
 *
 * The order within a packet: ACK, the control plane's frames, limits, each stream's own frames and
 * data. A packet is built only when the congestion window and the pacer allow it, which
 * acknowledgements alone do not need; on a path that is not validated everything counts against
 * three times what came (section 8.1). */
#include <string.h>

#include "conn_inside.h"

#define PN_BYTES_MAX  4
#define SMALLEST_DATA 8  /* a STREAM frame for fewer bytes is left for the next packet */
#define PATH_LEAST    96 /* bytes of a packet with a PATH_CHALLENGE and an acknowledgement */
#define PURE_ACKS     32 /* after so many, one asks for an answer: else the peer's state grows */
#define RIDE_LOOKS    64 /* packets that are looked at for something to ride: peers say how often */
#define LIMIT_FRAME   24 /* the most that a limit, a reset or a stop takes */

struct out {
    uint8_t *start, *at, *end;
    bool elicits;
    uint64_t first_record;
    bool full; /* no room for records */
};

static size_t room(const struct out *out) {
    return (size_t)(out->end - out->at);
}

static bool note(struct dp_conn *conn, struct out *out, const struct dp_record *record) {
    if (conn->record_next - out->first_record >= UINT16_MAX || !dp_conn_record(conn, record)) {
        out->full = true;
        return false;
    }
    return true;
}

/* ACK ----------------------------------------------------------------------------------------- */

static bool put_ack(struct dp_conn *conn, struct out *out, int64_t now) {
    const struct dp_ranges *received = &conn->received;
    if (!received->count || room(out) < 64)
        return false;
    uint32_t top = received->count - 1, low = top;
    /* Room for a header of at most 26 bytes, and 16 for each further range. */
    size_t most = (room(out) - 26) / 16;
    while (low > 0 && top - low < DP_ACK_RANGES - 1 && top - low < most &&
           received->range[low - 1].to > conn->ack_floor)
        low--;
    const struct dp_range *range = &received->range[top];
    int64_t delay = (now - conn->largest_at) / 1000 / 8; /* ack_delay_exponent is 3 */
    uint8_t *at = out->at;
    *at++ = DP_FRAME_ACK;
    at = dp_put_varint(at, range->to - 1);
    at = dp_put_varint(at, delay > 0 ? (uint64_t)delay : 0);
    at = dp_put_varint(at, top - low);
    at = dp_put_varint(at, range->to - 1 - range->from);
    for (uint32_t i = top; i > low; i--) {
        const struct dp_range *above = &received->range[i], *below = &received->range[i - 1];
        at = dp_put_varint(at, above->from - below->to - 1);
        at = dp_put_varint(at, below->to - 1 - below->from);
    }
    out->at = at;
    conn->unacked_eliciting = conn->news = 0;
    conn->ack_now = false;
    conn->ack_at = DP_NEVER;
    return true;
}

/* The control plane's ------------------------------------------------------------------------- */

/* A datagram with a PATH_CHALLENGE or PATH_RESPONSE is expanded, as far as it may be (RFC 9000
 * section 8.2.1): the control plane pads such frames. */
static bool is_padded(const struct dp_control *control) {
    static const uint8_t none[32];
    return control->size > sizeof none &&
           memcmp(control->frames + control->size - sizeof none, none, sizeof none) == 0;
}

static void put_control(struct dp_conn *conn, struct out *out, struct dp_path *path) {
    bool first = true;
    struct dp_control *control;
    while ((control = conn->first_control) != NULL) {
        size_t size = control->size;
        bool padded = is_padded(control);
        while (padded && size > room(out) && !control->frames[size - 1])
            size--;
        /* One that goes elsewhere has a datagram of its own. */
        if (size > room(out) || (control->has_path && !first))
            return;
        struct dp_record record = {.kind = DP_RECORD_CONTROL, .id = control->token};
        if (control->elicits && !note(conn, out, &record))
            return;
        memcpy(out->at, control->frames, size);
        out->at += size;
        out->elicits = out->elicits || control->elicits;
        if (padded) {
            memset(out->at, DP_FRAME_PADDING, room(out));
            out->at = out->end;
        }
        bool elsewhere = control->has_path;
        if (elsewhere)
            *path = control->path;
        conn->first_control = control->next;
        if (!conn->first_control)
            conn->last_control = NULL;
        dp_pool_give(conn->pool, control, sizeof *control + control->size);
        if (elsewhere) {
            out->end = out->at;
            return;
        }
        first = false;
    }
}

/* Limits -------------------------------------------------------------------------------------- */

static void put_due(struct dp_conn *conn, struct out *out, uint8_t due, uint8_t kind, uint64_t type,
                    uint64_t value) {
    struct dp_record record = {.kind = kind};
    if (!(conn->due & due) || room(out) < LIMIT_FRAME || !note(conn, out, &record))
        return;
    out->at = dp_put_limit(out->at, type, value);
    out->elicits = true;
    conn->due &= (uint8_t)~due;
}

static void put_limits(struct dp_conn *conn, struct out *out) {
    if (!conn->due)
        return;
    put_due(conn, out, DP_DUE_MAX_DATA, DP_RECORD_MAX_DATA, DP_FRAME_MAX_DATA, conn->in.limit);
    put_due(conn, out, DP_DUE_STREAMS_BIDI, DP_RECORD_MAX_STREAMS_BIDI, DP_FRAME_MAX_STREAMS_BIDI,
            conn->stream_limit[0]);
    put_due(conn, out, DP_DUE_STREAMS_UNI, DP_RECORD_MAX_STREAMS_UNI, DP_FRAME_MAX_STREAMS_UNI,
            conn->stream_limit[1]);
    if (conn->due & DP_DUE_PING && room(out)) {
        *out->at++ = DP_FRAME_PING;
        out->elicits = true;
        conn->due &= (uint8_t)~DP_DUE_PING;
    }
}

/* Streams ------------------------------------------------------------------------------------- */

static void put_pending(struct dp_conn *conn, struct out *out, struct dp_stream *stream) {
    static const struct {
        uint8_t pending, kind;
    } each[] = {{DP_PENDING_RESET, DP_RECORD_RESET},
                {DP_PENDING_STOP, DP_RECORD_STOP},
                {DP_PENDING_LIMIT, DP_RECORD_STREAM_LIMIT}};
    for (size_t i = 0; i < 3 && stream->pending; i++) {
        struct dp_record record = {.kind = each[i].kind, .id = stream->id};
        if (!(stream->pending & each[i].pending))
            continue;
        if (room(out) < LIMIT_FRAME + 8 || !note(conn, out, &record))
            return;
        if (each[i].pending == DP_PENDING_RESET)
            out->at = dp_put_reset(out->at, stream->id, stream->out.reset_code, stream->out.next);
        else if (each[i].pending == DP_PENDING_STOP)
            out->at = dp_put_stop(out->at, stream->id, stream->in.stop_code);
        else
            out->at = dp_put_stream_limit(out->at, DP_FRAME_MAX_STREAM_DATA, stream->id,
                                          stream->in.limit);
        out->elicits = true;
        stream->pending &= (uint8_t)~each[i].pending;
    }
}

/* One STREAM frame. False: nothing of this stream can go into this packet. */
static bool put_data(struct dp_conn *conn, struct out *out, struct dp_stream *stream) {
    struct dp_sending *sending = &stream->out;
    uint64_t offset = sending->lost.count ? sending->lost.range[0].from : sending->next;
    /* Without a length where the data fills the packet; else with one of at most two bytes. */
    size_t header = dp_stream_header_size(stream->id, offset, false, 0);
    if (room(out) < header + SMALLEST_DATA)
        return false;
    uint64_t allowed = conn->out_limit - conn->out_used;
    const uint8_t *bytes;
    size_t length;
    bool fin, is_new;
    if (!dp_stream_next(stream, room(out) - header, allowed, &offset, &bytes, &length, &fin,
                        &is_new))
        return false;
    bool with_length = length < room(out) - header;
    if (with_length) {
        size_t longer = dp_stream_header_size(stream->id, offset, true, length);
        if (longer + length > room(out)) {
            length = room(out) - longer;
            fin = false;
        }
    }
    struct dp_record record = {.kind = DP_RECORD_STREAM,
                               .id = stream->id,
                               .offset = offset,
                               .length = (uint16_t)length,
                               .fin = fin};
    if (!note(conn, out, &record))
        return false;
    uint64_t before = sending->next;
    out->at = dp_put_stream_header(out->at, stream->id, offset, with_length, length, fin);
    if (length)
        memcpy(out->at, bytes, length);
    out->at += length;
    dp_stream_sent(stream, conn->pool, offset, length, fin);
    conn->out_used += sending->next - before;
    out->elicits = true;
    return true;
}

static bool has_more(const struct dp_conn *conn, const struct dp_stream *stream) {
    const struct dp_sending *out = &stream->out;
    return stream->pending ||
           (dp_stream_has_data(stream) &&
            (out->lost.count || conn->out_limit > conn->out_used || out->next == out->stop));
}

/* Streams take turns: the first in the list fills what it can of this packet; one that has more
 * goes to the end. A stream that waits for credit is queued again when that comes. */
static void put_streams(struct dp_conn *conn, struct out *out) {
    while (conn->first_queued && room(out) > LIMIT_FRAME && !out->full) {
        struct dp_stream *stream = conn->first_queued;
        put_pending(conn, out, stream);
        bool put = put_data(conn, out, stream);
        bool more = has_more(conn, stream);
        if (more && !put)
            return; /* the packet is full for it */
        conn->first_queued = stream->next;
        if (!conn->first_queued)
            conn->last_queued = NULL;
        stream->queued = false;
        if (more)
            dp_conn_queue(conn, stream);
    }
}

/* The packet ---------------------------------------------------------------------------------- */

/* Enough bytes that the peer can tell the number (RFC 9000 section 17.1 and appendix A.2). */
static size_t number_bytes(const struct dp_conn *conn, uint64_t pn) {
    const struct dp_recovery *recovery = &conn->recovery;
    uint64_t span = recovery->has_acked ? pn - recovery->largest_acked : pn + 1;
    return span < 0x40 ? 1 : span < 0x4000 ? 2 : span < 0x400000 ? 3 : 4;
}

static void update_keys(struct dp_conn *conn) {
    uint64_t used = dp_sealer_used(conn->sealer), limit = dp_sealer_limit(conn->sealer);
    bool due = used >= limit || (conn->update_every && used >= conn->update_every);
    /* RFC 9001 section 6.1: once the peer acknowledged a packet of the current phase, and not while
     * its own update is not through. */
    if (!due || !conn->recovery.has_acked || conn->recovery.largest_acked < conn->phase_first ||
        dp_sealer_phase(conn->sealer) != dp_opener_phase(conn->opener) ||
        conn->forget_at != DP_NEVER)
        return;
    dp_sealer_update(conn->sealer);
    conn->phase_first = conn->recovery.next;
    conn->stats.key_updates++;
}

/* The limit is half of what the keys bear (protect.h): a peer that acknowledges nothing until then
 * keeps them from being updated. */
static bool keys_are_worn(const struct dp_conn *conn) {
    return dp_sealer_used(conn->sealer) / 2 >= dp_sealer_limit(conn->sealer) - 1;
}

static size_t seal(struct dp_conn *conn, uint8_t *datagram, size_t header, size_t number,
                   struct out *out) {
    /* The sample for header protection lies four bytes behind the number's start. */
    while ((size_t)(out->at - out->start) + number < 4)
        *out->at++ = DP_FRAME_PADDING;
    size_t bytes = (size_t)(out->at - out->start);
    uint64_t pn = conn->recovery.next;
    datagram[0] = (uint8_t)(0x40 | dp_sealer_phase(conn->sealer) << 2 | (number - 1));
    memcpy(datagram + 1, conn->peer_cid, conn->peer_cid_bytes);
    dp_put_be(datagram + header - number, pn, number);
    dp_sealer_seal(conn->sealer, pn, datagram, header, out->start, bytes);
    uint8_t mask[5];
    dp_sealer_mask(conn->sealer, datagram + header - number + 4, mask);
    datagram[0] ^= mask[0] & 0x1f;
    for (size_t i = 0; i < number; i++)
        datagram[header - number + i] ^= mask[1 + i];
    return header + bytes + DP_TAG_BYTES;
}

static bool ack_due(const struct dp_conn *conn, int64_t now) {
    return conn->ack_now || now >= conn->ack_at;
}

static bool has_frames(const struct dp_conn *conn) {
    return conn->first_control || conn->due || conn->first_queued;
}

/* What may be sent on a path before it is validated (RFC 9000 section 8.1). */
static size_t path_room(const struct dp_conn *conn) {
    uint64_t allowed = conn->path_in * 3;
    if (conn->validated || allowed >= conn->path_out + conn->datagram)
        return conn->datagram;
    return allowed > conn->path_out ? (size_t)(allowed - conn->path_out) : 0;
}

/* Whether a packet of frames may leave. Sets when the pacer lets the next one. */
static bool may_send(struct dp_conn *conn, int64_t now) {
    conn->pacing_at = DP_NEVER;
    if (path_room(conn) < PATH_LEAST)
        return false;
    if (!dp_recovery_has_room(&conn->recovery))
        return false;
    if (conn->probes)
        return true;
    if (dp_recovery_window(&conn->recovery) < conn->datagram) {
        conn->recovery.window_limited = true;
        return false;
    }
    int64_t at = dp_recovery_paced_at(&conn->recovery, now);
    if (at > now) {
        conn->recovery.window_limited = true;
        conn->pacing_at = at;
        return false;
    }
    return true;
}

static void prepare_probe(struct dp_conn *conn) {
    if (has_frames(conn))
        return;
    dp_conn_repeat_next(conn, UINT32_MAX);
    if (!has_frames(conn))
        conn->due |= DP_DUE_PING;
}

static size_t build_close(struct dp_conn *conn, uint8_t *datagram, struct dp_path *path) {
    size_t number = number_bytes(conn, conn->recovery.next);
    size_t header = 1 + (size_t)conn->peer_cid_bytes + number;
    if (!conn->close_due || path_room(conn) < header + conn->close_size + DP_TAG_BYTES)
        return 0;
    conn->close_due = false;
    struct out out = {.start = datagram + header, .at = datagram + header};
    memcpy(out.at, conn->close_frames, conn->close_size);
    out.at += conn->close_size;
    *path = conn->path;
    size_t size = seal(conn, datagram, header, number, &out);
    conn->recovery.next++; /* nothing is waited for any more */
    conn->path_out += size;
    return size;
}

/* Whether an ACK frame stands in it. */
static bool gather(struct dp_conn *conn, struct out *out, int64_t now, bool sending,
                   struct dp_path *path) {
    /* A probe says again what came, since the ACK frame that said it may be what was lost. */
    bool acks = (conn->news || conn->probes || ack_due(conn, now)) && put_ack(conn, out, now);
    if (!sending)
        return acks;
    put_control(conn, out, path);
    put_limits(conn, out);
    put_streams(conn, out);
    if (out->elicits || !conn->probes)
        return acks;
    /* What was queued waits for credit: a probe goes out all the same (RFC 9002 section 6.2.4). */
    prepare_probe(conn);
    put_limits(conn, out);
    put_streams(conn, out);
    return acks;
}

static size_t finish(struct dp_conn *conn, uint8_t *datagram, size_t header, size_t number,
                     struct out *out, bool acks, int64_t now) {
    /* Whoever only acknowledges asks for an answer now and then (RFC 9000 section 13.2.4). */
    if (!out->elicits && ++conn->pure_acks >= PURE_ACKS && room(out)) {
        *out->at++ = DP_FRAME_PING;
        out->elicits = true;
    }
    uint8_t flags = 0;
    if (out->elicits) {
        conn->pure_acks = 0;
        flags = DP_SENT_ELICITS | DP_SENT_IN_FLIGHT;
        struct dp_record record = {.kind = DP_RECORD_ACK, .id = conn->largest};
        if (acks)
            dp_conn_record(conn, &record);
        if (conn->probes)
            conn->probes--;
    }
    size_t size = seal(conn, datagram, header, number, out);
    dp_recovery_sent(&conn->recovery, now, (uint32_t)size, flags, out->first_record,
                     (uint16_t)(conn->record_next - out->first_record));
    conn->stats.packets_out++;
    conn->stats.bytes_out += size;
    return size;
}

/* Nothing may leave, or there is nothing: the owner hears again when that changes. */
static size_t nothing(struct dp_conn *conn) {
    conn->touched = false;
    return 0;
}

size_t dp_conn_build(struct dp_conn *conn, int64_t now, uint8_t *datagram, struct dp_path *path) {
    if (conn->over) {
        size_t size = build_close(conn, datagram, path);
        return size ? size : nothing(conn);
    }
    if (conn->failed)
        return nothing(conn);
    if (conn->probes)
        prepare_probe(conn);
    else if (conn->recovery.pto_count && ack_due(conn, now) && !has_frames(conn))
        /* The peer is there, and its acknowledgements are not: the next time-out may be far. */
        dp_conn_repeat_next(conn, RIDE_LOOKS);
    bool sending = has_frames(conn) && may_send(conn, now);
    if (!has_frames(conn))
        conn->recovery.window_limited = false; /* this round ends for want of data */
    if ((!sending && !ack_due(conn, now)) || path_room(conn) < PATH_LEAST ||
        !dp_recovery_has_room(&conn->recovery))
        return nothing(conn);
    update_keys(conn);
    if (keys_are_worn(conn)) {
        dp_conn_fail(conn, DP_AEAD_LIMIT_REACHED, 0, "the keys were used for too many packets");
        return nothing(conn);
    }
    size_t number = number_bytes(conn, conn->recovery.next);
    size_t header = 1 + (size_t)conn->peer_cid_bytes + number;
    struct out out = {.start = datagram + header,
                      .at = datagram + header,
                      .end = datagram + path_room(conn) - DP_TAG_BYTES,
                      .first_record = conn->record_next};
    *path = conn->path;
    bool acks = gather(conn, &out, now, sending, path);
    if (out.at == out.start)
        return nothing(conn);
    size_t size = finish(conn, datagram, header, number, &out, acks, now);
    if (!conn->validated && memcmp(path, &conn->path, sizeof *path) == 0)
        conn->path_out += size;
    return size;
}

/* Time ---------------------------------------------------------------------------------------- */

int64_t dp_conn_timer(const struct dp_conn *conn) {
    if (conn->over || conn->failed)
        return DP_NEVER;
    int64_t due = dp_recovery_timer(&conn->recovery);
    if (conn->ack_at < due)
        due = conn->ack_at;
    if (conn->pacing_at < due)
        due = conn->pacing_at;
    return due;
}

void dp_conn_on_timer(struct dp_conn *conn, int64_t now) {
    if (conn->over || conn->failed)
        return;
    if (dp_recovery_timer(&conn->recovery) <= now) {
        uint32_t probes = dp_recovery_on_timer(&conn->recovery, now, &dp_conn_fates, conn);
        if (probes) {
            conn->probes = probes;
            dp_conn_begin_repeats(conn);
        }
        dp_conn_free_records(conn);
        dp_conn_sweep(conn);
    }
    if (conn->pacing_at <= now)
        conn->pacing_at = DP_NEVER;
    if (conn->probes || has_frames(conn) || ack_due(conn, now))
        dp_conn_touch(conn);
}
