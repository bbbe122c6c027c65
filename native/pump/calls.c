/* What any thread may ask of a pump: each call takes the lock, finds its connection, and does what
 * conn.h says. */
#include <string.h>

#include "inside.h"

/* Take the lock, for a connection that is there; without one it is not held. */
static struct dp_entry *enter(struct dp_pump *pump, uint64_t connection) {
    dp_pump_lock(pump);
    struct dp_entry *entry = dp_pump_entry(pump, connection);
    if (!entry)
        dp_pump_unlock(pump);
    return entry;
}

void dp_pump_forget(struct dp_pump *pump, uint64_t connection) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return;
    dp_pump_drop(pump, entry);
    dp_pump_unlock(pump);
}

struct dp_entry *dp_pump_route_of(struct dp_pump *pump, const uint8_t *cid, uint32_t bytes) {
    uint64_t handle = dp_routes_find(pump->routes, cid, bytes);
    return handle ? dp_pump_entry(pump, handle) : NULL;
}

static int route(struct dp_pump *pump, const uint8_t *cid, uint32_t bytes, uint64_t connection) {
    struct dp_entry *to = connection ? dp_pump_entry(pump, connection) : NULL;
    if (connection && !to)
        return 0;
    struct dp_entry *from = dp_pump_route_of(pump, cid, bytes);
    if (!dp_routes_set(pump->routes, cid, bytes, connection))
        return -1;
    if (from)
        from->routes--;
    if (to)
        to->routes++;
    return 0;
}

int dp_pump_route(struct dp_pump *pump, const uint8_t *cid, uint32_t bytes, uint64_t connection) {
    dp_pump_lock(pump);
    int failed = route(pump, cid, bytes, connection);
    dp_pump_unlock(pump);
    return failed;
}

int dp_pump_inject(struct dp_pump *pump, uint64_t connection, const uint8_t *datagram,
                   uint32_t size, const uint8_t *path, int64_t now, int64_t at_ns) {
    uint8_t copy[DP_UDP_DATAGRAM];
    if (size > sizeof copy)
        return DP_TOO_SHORT;
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return 0;
    struct dp_path from;
    memcpy(&from, path, sizeof from);
    memcpy(copy, datagram, size);
    pump->now = now;
    int taken = dp_pump_deliver(pump, entry, copy, size, &from, at_ns);
    dp_pump_unlock(pump);
    return taken;
}

/* Calls: the control plane ----------------------------------------------------------------------
 */

int dp_pump_control(struct dp_pump *pump, uint64_t connection, const uint8_t *frames, uint32_t size,
                    uint64_t token, int elicits, const uint8_t *path) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return -1;
    struct dp_path to;
    if (path)
        memcpy(&to, path, sizeof to);
    bool taken = dp_conn_control(entry->conn, frames, size, token, elicits != 0, path ? &to : NULL);
    dp_pump_unlock(pump);
    return taken ? 0 : -1;
}

void dp_pump_set_path(struct dp_pump *pump, uint64_t connection, const uint8_t *path, int validated,
                      int is_new) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return;
    struct dp_path to;
    memcpy(&to, path, sizeof to);
    dp_conn_set_path(entry->conn, &to, validated != 0, is_new != 0);
    dp_pump_unlock(pump);
}

void dp_pump_set_peer_cid(struct dp_pump *pump, uint64_t connection, const uint8_t *cid,
                          uint32_t bytes) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return;
    dp_conn_set_peer_cid(entry->conn, cid, bytes);
    dp_pump_unlock(pump);
}

void dp_pump_close(struct dp_pump *pump, uint64_t connection, const uint8_t *frames,
                   uint32_t size) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return;
    dp_pump_leave(entry);
    dp_events_forget_data(pump, entry);
    entry->failed = false; /* what still comes is answered with the close */
    dp_conn_close(entry->conn, frames, size);
    dp_pump_unlock(pump);
}

void dp_pump_ping(struct dp_pump *pump, uint64_t connection) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return;
    dp_conn_ping(entry->conn);
    dp_pump_unlock(pump);
}

void dp_pump_update_keys_every(struct dp_pump *pump, uint64_t connection, uint64_t packets) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return;
    dp_conn_update_keys_every(entry->conn, packets);
    dp_pump_unlock(pump);
}

int64_t dp_pump_last_received(struct dp_pump *pump, uint64_t connection) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return 0;
    int64_t at = dp_conn_last_received(entry->conn);
    dp_pump_unlock(pump);
    return at;
}

int dp_pump_conn_stats(struct dp_pump *pump, uint64_t connection, struct dp_conn_stats *out) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return 0;
    *out = dp_conn_stats(entry->conn);
    dp_pump_unlock(pump);
    return 1;
}

/* Calls: streams --------------------------------------------------------------------------------
 */

/* As `enter`, for a stream that is there. */
static struct dp_stream *enter_stream(struct dp_pump *pump, uint64_t connection, uint64_t id,
                                      struct dp_entry **entry) {
    *entry = enter(pump, connection);
    if (!*entry)
        return NULL;
    struct dp_stream *stream = dp_conn_stream((*entry)->conn, id);
    if (!stream)
        dp_pump_unlock(pump);
    return stream;
}

int dp_pump_send(struct dp_pump *pump, uint64_t connection, uint64_t stream, const uint8_t *bytes,
                 uint32_t size, int fin) {
    struct dp_entry *entry;
    struct dp_stream *on = enter_stream(pump, connection, stream, &entry);
    if (!on)
        return -1;
    bool taken = dp_conn_send(entry->conn, on, bytes, size, fin != 0);
    dp_pump_unlock(pump);
    return taken ? 0 : -1;
}

void dp_pump_send_many(struct dp_pump *pump, const uint8_t *sendings, size_t size) {
    struct dp_pump_sending sending;
    dp_pump_lock(pump);
    for (size_t at = 0; size - at >= sizeof sending;) {
        memcpy(&sending, sendings + at, sizeof sending);
        at += sizeof sending;
        if (sending.size > size - at)
            break;
        struct dp_entry *entry = dp_pump_entry(pump, sending.connection);
        struct dp_stream *on = entry ? dp_conn_stream(entry->conn, sending.stream) : NULL;
        if (on)
            dp_conn_send(entry->conn, on, sendings + at, sending.size, sending.fin != 0);
        at += sending.size;
    }
    dp_pump_unlock(pump);
}

int64_t dp_pump_open(struct dp_pump *pump, uint64_t connection, int uni) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return -1;
    const struct dp_stream *stream = dp_conn_open(entry->conn, uni != 0);
    int64_t id = stream ? (int64_t)stream->id : -1;
    dp_pump_unlock(pump);
    return id;
}

void dp_pump_reset(struct dp_pump *pump, uint64_t connection, uint64_t stream, uint64_t code) {
    struct dp_entry *entry;
    struct dp_stream *on = enter_stream(pump, connection, stream, &entry);
    if (!on)
        return;
    dp_conn_reset(entry->conn, on, code);
    dp_pump_unlock(pump);
}

void dp_pump_stop(struct dp_pump *pump, uint64_t connection, uint64_t stream, uint64_t code) {
    struct dp_entry *entry;
    struct dp_stream *on = enter_stream(pump, connection, stream, &entry);
    if (!on)
        return;
    dp_events_forget_stream(pump, on);
    dp_events_stopped(on);
    dp_conn_stop(entry->conn, on, code);
    dp_pump_unlock(pump);
}

int dp_pump_is_waiting(struct dp_pump *pump, uint64_t connection, uint64_t stream) {
    struct dp_entry *entry;
    const struct dp_stream *on = enter_stream(pump, connection, stream, &entry);
    if (!on)
        return -1;
    int waiting = on->waiting;
    dp_pump_unlock(pump);
    return waiting;
}

uint64_t dp_pump_unacked(struct dp_pump *pump, uint64_t connection) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return 0;
    uint64_t unacked = dp_conn_unacked(entry->conn);
    dp_pump_unlock(pump);
    return unacked;
}

uint32_t dp_pump_progress(struct dp_pump *pump, uint64_t connection, uint64_t *streams,
                          uint64_t *acked, uint32_t max) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return 0;
    uint32_t count = 0;
    const struct dp_stream *stream;
    for (uint32_t at = 0; count < max && (stream = dp_conn_each(entry->conn, &at));) {
        if (!dp_stream_unacked(stream))
            continue;
        streams[count] = stream->id;
        acked[count++] = stream->out.start;
    }
    dp_pump_unlock(pump);
    return count;
}

/* Calls: without a loop -------------------------------------------------------------------------
 */

uint32_t dp_pump_build(struct dp_pump *pump, uint64_t connection, int64_t now, uint8_t *datagram,
                       uint8_t *path) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return 0;
    pump->now = now;
    dp_raw_pass(pump);
    dp_load_pass(pump);
    struct dp_path to;
    size_t size = dp_conn_build(entry->conn, now, datagram, &to);
    if (size)
        memcpy(path, &to, sizeof to);
    else
        dp_pump_untouch(entry);
    dp_pump_unlock(pump);
    return (uint32_t)size;
}

int64_t dp_pump_timer(struct dp_pump *pump, uint64_t connection) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return INT64_MAX;
    int64_t due = dp_conn_timer(entry->conn);
    if (entry->front == &dp_front_raw)
        due = dp_sooner(due, dp_raw_timer(pump));
    else if (entry->front == &dp_front_load)
        due = dp_sooner(due, dp_load_timer(pump));
    dp_pump_unlock(pump);
    return due;
}

void dp_pump_on_timer(struct dp_pump *pump, uint64_t connection, int64_t now) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return;
    pump->now = now;
    if (dp_raw_timer(pump) <= now)
        dp_raw_on_timer(pump);
    if (dp_conn_timer(entry->conn) <= now)
        dp_conn_on_timer(entry->conn, now);
    dp_pump_unlock(pump);
}
