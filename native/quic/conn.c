/* See conn.h. Set-up, the end, and what the control plane may ask. */
#include <string.h>

#include "conn_inside.h"

#define TABLE_MIN   16
#define RECORDS_MIN 64

/* Set-up -------------------------------------------------------------------------------------- */

static void take_limits(struct dp_conn *conn, const struct dp_hand_over *from) {
    conn->in.limit = conn->in.window = from->local_max_data;
    conn->out_limit = from->remote_max_data;
    conn->local_bidi_local = from->local_max_stream_data_bidi_local;
    conn->local_bidi_remote = from->local_max_stream_data_bidi_remote;
    conn->local_uni = from->local_max_stream_data_uni;
    conn->remote_bidi_local = from->remote_max_stream_data_bidi_local;
    conn->remote_bidi_remote = from->remote_max_stream_data_bidi_remote;
    conn->remote_uni = from->remote_max_stream_data_uni;
    conn->stream_limit[0] = conn->stream_window[0] = from->local_max_streams_bidi;
    conn->stream_limit[1] = conn->stream_window[1] = from->local_max_streams_uni;
    conn->remote_stream_limit[0] = from->remote_max_streams_bidi;
    conn->remote_stream_limit[1] = from->remote_max_streams_uni;
    uint64_t theirs = from->is_client ? DP_STREAM_IS_SERVER : 0;
    conn->next_id[0] = from->next_bidi;
    conn->next_id[1] = from->next_uni;
    conn->next_peer_id[0] = theirs;
    conn->next_peer_id[1] = theirs | DP_STREAM_IS_UNI;
}

static bool take_keys(struct dp_conn *conn, const struct dp_hand_over *from) {
    if (from->secret_bytes > DP_SECRET_MAX)
        return false;
    struct dp_secret secret = {
        .version = from->version, .suite = from->suite, .bytes = from->secret_bytes};
    secret.phase = from->receive_phase;
    memcpy(secret.secret, from->receive_secret, secret.bytes);
    conn->opener = dp_opener_new(&secret);
    secret.phase = from->send_phase;
    memcpy(secret.secret, from->send_secret, secret.bytes);
    conn->sealer = dp_sealer_new(&secret);
    volatile uint8_t *wipe = secret.secret;
    for (size_t i = 0; i < sizeof secret.secret; i++)
        wipe[i] = 0;
    return conn->opener && conn->sealer;
}

static bool take_memory(struct dp_conn *conn, const struct dp_hand_over *from) {
    conn->table_room = TABLE_MIN;
    conn->table = dp_pool_take(conn->pool, TABLE_MIN * sizeof *conn->table, NULL);
    conn->record_room = RECORDS_MIN;
    conn->records = dp_pool_take(conn->pool, RECORDS_MIN * sizeof *conn->records, NULL);
    if (!conn->table || !conn->records)
        return false;
    memset(conn->table, 0, TABLE_MIN * sizeof *conn->table);
    return dp_recovery_init(&conn->recovery, conn->pool, from->next_packet_number, conn->datagram,
                            from->peer_max_ack_delay);
}

struct dp_conn *dp_conn_new(struct dp_pool *pool, const struct dp_hand_over *from,
                            const struct dp_conn_owner *owner, void *self, int64_t now) {
    if (from->max_datagram < 1200 || from->max_datagram > DP_UDP_DATAGRAM ||
        from->peer_cid_bytes > DP_CID_MAX || from->host_cid_bytes > DP_CID_MAX)
        return NULL;
    struct dp_conn *conn = dp_pool_take(pool, sizeof *conn, NULL);
    if (!conn)
        return NULL;
    memset(conn, 0, sizeof *conn);
    conn->pool = pool;
    conn->owner = owner;
    conn->self = self;
    conn->is_client = from->is_client;
    conn->path = from->path;
    conn->validated = true;
    conn->host_cid_bytes = from->host_cid_bytes;
    conn->peer_cid_bytes = from->peer_cid_bytes;
    memcpy(conn->peer_cid, from->peer_cid, sizeof conn->peer_cid);
    conn->datagram = from->max_datagram;
    conn->forget_at = conn->ack_at = conn->pacing_at = DP_NEVER;
    conn->max_ack_delay = from->local_max_ack_delay;
    conn->ack_exponent = from->peer_ack_delay_exponent;
    conn->last_received = now;
    conn->phase_first = from->next_packet_number;
    take_limits(conn, from);
    if (!take_keys(conn, from) || !take_memory(conn, from)) {
        dp_conn_free(conn);
        return NULL;
    }
    dp_recovery_seed_rtt(&conn->recovery, from->smoothed_rtt, from->rtt_variance, from->minimum_rtt,
                         now);
    return conn;
}

static void drop_controls(struct dp_conn *conn) {
    while (conn->first_control) {
        struct dp_control *control = conn->first_control;
        conn->first_control = control->next;
        dp_pool_give(conn->pool, control, sizeof *control + control->size);
    }
    conn->last_control = NULL;
}

void dp_conn_free(struct dp_conn *conn) {
    struct dp_pool *pool = conn->pool;
    for (uint32_t i = 0; conn->table && i < conn->table_room; i++)
        if (conn->table[i]) {
            dp_stream_clear(conn->table[i], pool);
            dp_pool_give(pool, conn->table[i], sizeof **conn->table);
        }
    if (conn->table)
        dp_pool_give(pool, conn->table, conn->table_room * sizeof *conn->table);
    if (conn->records)
        dp_pool_give(pool, conn->records, conn->record_room * sizeof *conn->records);
    drop_controls(conn);
    if (conn->close_frames)
        dp_pool_give(pool, conn->close_frames, conn->close_size);
    dp_ranges_free(&conn->received, pool);
    dp_recovery_free(&conn->recovery);
    dp_opener_free(conn->opener);
    dp_sealer_free(conn->sealer);
    dp_pool_give(pool, conn, sizeof *conn);
}

void dp_conn_touch(struct dp_conn *conn) {
    if (conn->touched)
        return;
    conn->touched = true;
    conn->owner->touched(conn->self, conn);
}

void dp_conn_fail(struct dp_conn *conn, uint64_t code, uint64_t frame_type, const char *reason) {
    if (conn->failed || conn->over)
        return;
    conn->failed = true;
    conn->owner->failed(conn->self, conn, code, frame_type, reason);
}

/* The control plane --------------------------------------------------------------------------- */

/* Bytes of frames that a packet has room for, whatever its number. */
static size_t payload_max(const struct dp_conn *conn) {
    return conn->datagram - 1 - conn->peer_cid_bytes - 4 - DP_TAG_BYTES;
}

bool dp_conn_control(struct dp_conn *conn, const uint8_t *frames, size_t size, uint64_t token,
                     bool elicits, const struct dp_path *path) {
    if (conn->over || !size || size > payload_max(conn))
        return false;
    struct dp_control *control = dp_pool_take(conn->pool, sizeof *control + size, NULL);
    if (!control)
        return false;
    *control = (struct dp_control){.token = token, .size = (uint32_t)size, .elicits = elicits};
    if (path && memcmp(path, &conn->path, sizeof *path) != 0) {
        control->has_path = true;
        control->path = *path;
    }
    memcpy(control->frames, frames, size);
    if (conn->last_control)
        conn->last_control->next = control;
    else
        conn->first_control = control;
    conn->last_control = control;
    dp_conn_touch(conn);
    return true;
}

void dp_conn_set_path(struct dp_conn *conn, const struct dp_path *path, bool validated,
                      bool is_new) {
    if (memcmp(path, &conn->path, sizeof *path) != 0) {
        conn->path = *path;
        /* What moved the connection counts for what may be answered on the new path. */
        bool known = conn->has_other_path && memcmp(path, &conn->other_path, sizeof *path) == 0;
        conn->path_in = known ? conn->other_in : 0;
        conn->path_out = 0;
        conn->has_other_path = false;
    }
    conn->validated = validated;
    if (is_new)
        dp_recovery_new_path(&conn->recovery);
    dp_conn_touch(conn);
}

void dp_conn_set_peer_cid(struct dp_conn *conn, const uint8_t *cid, size_t bytes) {
    if (bytes > DP_CID_MAX)
        return;
    memcpy(conn->peer_cid, cid, bytes);
    conn->peer_cid_bytes = (uint8_t)bytes;
}

const struct dp_path *dp_conn_path(const struct dp_conn *conn) {
    return &conn->path;
}

void dp_conn_close(struct dp_conn *conn, const uint8_t *frames, size_t size) {
    if (conn->over)
        return;
    conn->over = true;
    drop_controls(conn);
    if (size && size <= payload_max(conn))
        conn->close_frames = dp_pool_take(conn->pool, size, NULL);
    if (conn->close_frames) {
        memcpy(conn->close_frames, frames, size);
        conn->close_size = size;
        conn->close_due = true;
        conn->resend_close_at = 1;
    }
    dp_conn_touch(conn);
}

bool dp_conn_is_over(const struct dp_conn *conn) {
    return conn->over;
}

void dp_conn_ping(struct dp_conn *conn) {
    conn->due |= DP_DUE_PING;
    dp_conn_touch(conn);
}

void dp_conn_update_keys_every(struct dp_conn *conn, uint64_t packets) {
    conn->update_every = packets;
}

/* For pages and tests ------------------------------------------------------------------------- */

size_t dp_conn_datagram(const struct dp_conn *conn) {
    return conn->datagram;
}

size_t dp_conn_control_datagram(const struct dp_conn *conn) {
    return conn->control_datagram;
}

int64_t dp_conn_at_ns(const struct dp_conn *conn) {
    return conn->at_ns;
}

int64_t dp_conn_last_received(const struct dp_conn *conn) {
    return conn->last_received;
}

struct dp_conn_stats dp_conn_stats(const struct dp_conn *conn) {
    struct dp_conn_stats stats = conn->stats;
    stats.window = conn->recovery.window;
    stats.smoothed_rtt = conn->recovery.smoothed_rtt;
    stats.streams = conn->streams;
    stats.memory = (uint32_t)(sizeof *conn + conn->table_room * sizeof *conn->table +
                              conn->record_room * sizeof *conn->records +
                              conn->recovery.room * sizeof *conn->recovery.sent +
                              conn->received.room * sizeof *conn->received.range +
                              conn->streams * sizeof **conn->table);
    return stats;
}
