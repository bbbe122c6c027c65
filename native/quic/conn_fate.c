/* What becomes of sent packets: each carried records, which are noted when it was acknowledged and
 * queued anew when it was lost (RFC 9000 section 13.3). */
#include <string.h>

#include "conn_inside.h"

#define RECORDS_MAX 65536

static bool grow(struct dp_conn *conn) {
    uint32_t room = conn->record_room * 2;
    if (room > RECORDS_MAX)
        return false;
    struct dp_record *bigger = dp_pool_take(conn->pool, room * sizeof *bigger, NULL);
    if (!bigger)
        return false;
    for (uint64_t i = conn->record_low; i < conn->record_next; i++)
        bigger[i & (room - 1)] = conn->records[i & (conn->record_room - 1)];
    dp_pool_give(conn->pool, conn->records, conn->record_room * sizeof *conn->records);
    conn->records = bigger;
    conn->record_room = room;
    return true;
}

bool dp_conn_record(struct dp_conn *conn, const struct dp_record *record) {
    if (conn->record_next - conn->record_low == conn->record_room && !grow(conn))
        return false;
    conn->records[conn->record_next++ & (conn->record_room - 1)] = *record;
    return true;
}

void dp_conn_free_records(struct dp_conn *conn) {
    uint64_t lowest = dp_recovery_lowest(&conn->recovery);
    conn->record_low = lowest == conn->recovery.next
                           ? conn->record_next
                           : dp_recovery_packet(&conn->recovery, lowest)->first;
}

static struct dp_record *record_at(const struct dp_conn *conn, uint64_t index) {
    return &conn->records[index & (conn->record_room - 1)];
}

/* Acknowledged -------------------------------------------------------------------------------- */

static void stream_acked(struct dp_conn *conn, const struct dp_record *record) {
    struct dp_stream *stream = dp_conn_stream(conn, record->id);
    if (!stream)
        return;
    uint64_t before = dp_stream_unacked(stream);
    dp_stream_acked(stream, conn->pool, record->offset, record->length, record->fin);
    conn->stats.unacked -= before - dp_stream_unacked(stream);
    dp_conn_settle(conn, stream);
}

static void record_acked(struct dp_conn *conn, const struct dp_record *record) {
    struct dp_stream *stream;
    switch (record->kind) {
    case DP_RECORD_STREAM:
        stream_acked(conn, record);
        break;
    case DP_RECORD_RESET:
        stream = dp_conn_stream(conn, record->id);
        if (stream) {
            stream->out.done = true;
            dp_conn_settle(conn, stream);
        }
        break;
    case DP_RECORD_ACK:
        if (record->id >= conn->ack_floor)
            conn->ack_floor = record->id + 1;
        break;
    case DP_RECORD_CONTROL:
        conn->depth++;
        conn->owner->delivered(conn->self, conn, record->id, true);
        conn->depth--;
        break;
    default:
        break;
    }
}

static void acked(void *self, uint64_t pn, const struct dp_sent *sent) {
    struct dp_conn *conn = self;
    (void)pn;
    for (uint16_t i = 0; i < sent->count; i++)
        record_acked(conn, record_at(conn, sent->first + i));
}

/* Lost ---------------------------------------------------------------------------------------- */

static void repeat_stream(struct dp_conn *conn, const struct dp_record *record) {
    struct dp_stream *stream = dp_conn_stream(conn, record->id);
    if (!stream)
        return;
    dp_stream_lost(stream, conn->pool, record->offset, record->length, record->fin);
    if (dp_stream_has_data(stream))
        dp_conn_queue(conn, stream);
}

/* What is repeated is the present state, not what the packet said (section 13.3). */
static void repeat_own(struct dp_conn *conn, const struct dp_record *record, uint8_t pending) {
    struct dp_stream *stream = dp_conn_stream(conn, record->id);
    if (!stream)
        return;
    if (pending == DP_PENDING_RESET ? stream->out.done : stream->in.done)
        return;
    if (pending == DP_PENDING_STOP && stream->in.final_size != DP_NO_SIZE)
        return;
    stream->pending |= pending;
    dp_conn_queue(conn, stream);
}

static void repeat(struct dp_conn *conn, const struct dp_record *record) {
    switch (record->kind) {
    case DP_RECORD_STREAM:
        repeat_stream(conn, record);
        break;
    case DP_RECORD_RESET:
        repeat_own(conn, record, DP_PENDING_RESET);
        break;
    case DP_RECORD_STOP:
        repeat_own(conn, record, DP_PENDING_STOP);
        break;
    case DP_RECORD_STREAM_LIMIT:
        repeat_own(conn, record, DP_PENDING_LIMIT);
        break;
    case DP_RECORD_MAX_DATA:
        conn->due |= DP_DUE_MAX_DATA;
        break;
    case DP_RECORD_MAX_STREAMS_BIDI:
        conn->due |= DP_DUE_STREAMS_BIDI;
        break;
    case DP_RECORD_MAX_STREAMS_UNI:
        conn->due |= DP_DUE_STREAMS_UNI;
        break;
    default:
        break;
    }
}

/* Only the owner has what a control packet said. */
static void give_back(struct dp_conn *conn, struct dp_record *record) {
    record->kind = DP_RECORD_NONE;
    conn->depth++;
    conn->owner->delivered(conn->self, conn, record->id, false);
    conn->depth--;
}

static void lost(void *self, uint64_t pn, const struct dp_sent *sent) {
    struct dp_conn *conn = self;
    (void)pn;
    conn->stats.lost++;
    for (uint16_t i = 0; i < sent->count; i++) {
        struct dp_record *record = record_at(conn, sent->first + i);
        if (record->kind == DP_RECORD_CONTROL)
            give_back(conn, record);
        else
            repeat(conn, record);
    }
    dp_conn_touch(conn);
}

const struct dp_sent_owner dp_conn_fates = {.acked = acked, .lost = lost};

/* Probes -------------------------------------------------------------------------------------- */

static bool is_outstanding(const struct dp_sent *sent) {
    return sent->flags & DP_SENT_ELICITS && !(sent->flags & DP_SENT_DONE);
}

static void give_all_back(struct dp_conn *conn) {
    const struct dp_recovery *recovery = &conn->recovery;
    for (uint64_t pn = dp_recovery_lowest(recovery); pn < recovery->next; pn++) {
        const struct dp_sent *sent = dp_recovery_packet(recovery, pn);
        for (uint16_t i = 0; is_outstanding(sent) && i < sent->count; i++) {
            struct dp_record *record = record_at(conn, sent->first + i);
            if (record->kind == DP_RECORD_CONTROL)
                give_back(conn, record);
        }
    }
}

void dp_conn_begin_repeats(struct dp_conn *conn) {
    if (conn->recovery.pto_count == 1)
        conn->repeat_from = dp_recovery_lowest(&conn->recovery);
    conn->repeat_end = conn->recovery.next;
    give_all_back(conn);
}

void dp_conn_repeat_next(struct dp_conn *conn, uint32_t most) {
    const struct dp_recovery *recovery = &conn->recovery;
    uint64_t lowest = dp_recovery_lowest(recovery);
    uint64_t span = conn->repeat_end > lowest ? conn->repeat_end - lowest : 0;
    for (uint64_t looked = 0; looked < span && looked < most; looked++) {
        if (conn->repeat_from < lowest || conn->repeat_from >= conn->repeat_end)
            conn->repeat_from = lowest;
        const struct dp_sent *sent = dp_recovery_packet(recovery, conn->repeat_from++);
        for (uint16_t i = 0; is_outstanding(sent) && i < sent->count; i++)
            repeat(conn, record_at(conn, sent->first + i));
        if (conn->due || conn->first_queued)
            return;
    }
}
