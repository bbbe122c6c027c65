/* From the connections to the sockets: what is built in a pass, and what Python sends itself. */
#include <string.h>

#include "loop_inside.h"

static void send_out(void *self, struct dp_entry *entry, const uint8_t *datagram, size_t size,
                     const struct dp_path *path) {
    struct dp_loop *loop = self;
    if (entry->socket < loop->count)
        dp_sender_add(loop->served[entry->socket].sender, datagram, size, path);
}

void dp_loop_send_all(struct dp_loop *loop) {
    struct dp_pump *pump = loop->pump;
    dp_load_pass(pump);
    dp_pump_build_all(pump, send_out, loop);
    for (uint32_t i = 0; i < loop->count; i++) {
        dp_sender_flush(loop->served[i].sender);
        if (dp_sender_was_refused(loop->served[i].sender))
            dp_loop_tell_refused(loop, i);
    }
    dp_store_relaxed(&loop->due, (uint64_t)dp_pump_next_timer(pump));
    dp_pump_ring(pump);
}

int dp_pump_queue(struct dp_pump *pump, uint32_t socket, const uint8_t *data, uint32_t size,
                  const uint8_t *path) {
    struct dp_path to;
    memcpy(&to, path, sizeof to);
    dp_pump_lock(pump);
    struct dp_loop *loop = pump->loop;
    bool queued =
        loop && socket < loop->count && dp_sender_add(loop->served[socket].sender, data, size, &to);
    dp_pump_unlock(pump);
    return queued ? 0 : -1;
}

void dp_pump_gso(struct dp_pump *pump, int on) {
    dp_pump_lock(pump);
    struct dp_loop *loop = pump->loop;
    for (uint32_t i = 0; loop && i < loop->count; i++)
        dp_sender_split(loop->served[i].sender, on != 0);
    dp_pump_unlock(pump);
}

void dp_pump_flush(struct dp_pump *pump) {
    dp_pump_lock(pump);
    struct dp_loop *loop = pump->loop;
    if (loop) {
        int64_t before = dp_loop_due(loop);
        pump->now = dp_monotonic_ns();
        bool changed = dp_loop_watch_runtimes(loop);
        dp_loop_send_all(loop);
        /* Who sleeps has to be told to sleep shorter. */
        if (loop->slept && (changed || dp_loop_due(loop) < before))
            dp_loop_wake(loop);
    }
    dp_pump_unlock(pump);
}
