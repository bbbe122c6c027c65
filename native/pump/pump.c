/* Connections by their handles, where their packets go, and when their timers are due. */
#define _GNU_SOURCE
#include "pump.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "../atomics.h"
#include "inside.h"

#define FIRST_ROOM 64
/* Datagrams that a connection builds before the next has its turn. */
#define TURN        16
#define PATIENCE_NS 20000
#define COURTESY_NS 100000

int64_t dp_monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The lock ------------------------------------------------------------------------------------ */

/* A pass is shorter than a wake-up as a rule: so the lock is tried for a while before its thread
 * sleeps. Nobody yields his core, which might go to a stranger for milliseconds. */
static void lock_patiently(pthread_mutex_t *lock) {
    int64_t until = dp_monotonic_ns() + PATIENCE_NS;
    do {
        if (pthread_mutex_trylock(lock) == 0)
            return;
        for (int i = 0; i < 8; i++)
            dp_cpu_relax();
    } while (dp_monotonic_ns() < until);
    pthread_mutex_lock(lock);
}

/* Let the other side go first, for as long as a sleeper needs to wake up. */
static void give_way(const uint32_t *waiting) {
    if (!dp_load_flag(waiting))
        return;
    int64_t until = dp_monotonic_ns() + COURTESY_NS;
    while (dp_load_flag(waiting) && dp_monotonic_ns() < until)
        dp_cpu_relax();
}

void dp_pump_lock_slowly(struct dp_pump *pump) {
    give_way(&pump->loop_waits);
    __atomic_fetch_add(&pump->python_waits, 1, __ATOMIC_RELAXED);
    lock_patiently(&pump->lock);
    __atomic_fetch_sub(&pump->python_waits, 1, __ATOMIC_RELAXED);
}

void dp_pump_lock_politely(struct dp_pump *pump) {
    give_way(&pump->python_waits);
    dp_store_flag(&pump->loop_waits, 1);
    lock_patiently(&pump->lock);
    dp_store_flag(&pump->loop_waits, 0);
}

/* Handles: a hash table with open addressing --------------------------------------------------- */

static uint32_t home_of(const struct dp_pump *pump, uint64_t handle) {
    return (uint32_t)(handle * 0x9e3779b97f4a7c15ULL >> 32) & (pump->handle_room - 1);
}

static uint32_t place_of(const struct dp_pump *pump, uint64_t handle) {
    uint32_t at = home_of(pump, handle);
    while (pump->by_handle[at] && pump->by_handle[at]->handle != handle)
        at = (at + 1) & (pump->handle_room - 1);
    return at;
}

struct dp_entry *dp_pump_entry(struct dp_pump *pump, uint64_t handle) {
    return pump->by_handle[place_of(pump, handle)];
}

static bool make_handle_room(struct dp_pump *pump) {
    if ((pump->handles + 1) * 2 <= pump->handle_room)
        return true;
    struct dp_entry **old = pump->by_handle;
    uint32_t old_room = pump->handle_room;
    struct dp_entry **bigger = calloc((size_t)old_room * 2, sizeof *bigger);
    if (!bigger)
        return false;
    pump->by_handle = bigger;
    pump->handle_room = old_room * 2;
    for (uint32_t i = 0; i < old_room; i++)
        if (old[i])
            bigger[place_of(pump, old[i]->handle)] = old[i];
    free(old);
    return true;
}

static void take_handle_out(struct dp_pump *pump, uint64_t handle) {
    uint32_t mask = pump->handle_room - 1;
    uint32_t hole = place_of(pump, handle), at = hole;
    for (;;) {
        at = (at + 1) & mask;
        struct dp_entry *next = pump->by_handle[at];
        if (!next)
            break;
        if (((at - home_of(pump, next->handle)) & mask) >= ((at - hole) & mask)) {
            pump->by_handle[hole] = next;
            hole = at;
        }
    }
    pump->by_handle[hole] = NULL;
    pump->handles--;
}

/* Timers: a heap whose entries may be earlier than what they stand for ------------------------- */

static void put_timer(struct dp_pump *pump, uint32_t at, struct dp_entry *entry) {
    pump->timers[at] = entry;
    entry->timer_slot = at + 1;
}

static void sift_up(struct dp_pump *pump, uint32_t at, struct dp_entry *entry) {
    while (at && pump->timers[(at - 1) / 2]->timer_at > entry->timer_at) {
        put_timer(pump, at, pump->timers[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    put_timer(pump, at, entry);
}

static void sift_down(struct dp_pump *pump, uint32_t at, struct dp_entry *entry) {
    for (uint32_t child; (child = at * 2 + 1) < pump->timer_count; at = child) {
        if (child + 1 < pump->timer_count &&
            pump->timers[child + 1]->timer_at < pump->timers[child]->timer_at)
            child++;
        if (pump->timers[child]->timer_at >= entry->timer_at)
            break;
        put_timer(pump, at, pump->timers[child]);
    }
    put_timer(pump, at, entry);
}

static void unset_timer(struct dp_pump *pump, struct dp_entry *entry) {
    if (!entry->timer_slot)
        return;
    uint32_t at = entry->timer_slot - 1;
    entry->timer_slot = 0;
    struct dp_entry *last = pump->timers[--pump->timer_count];
    if (last == entry)
        return;
    if (at && pump->timers[(at - 1) / 2]->timer_at > last->timer_at)
        sift_up(pump, at, last);
    else
        sift_down(pump, at, last);
}

/* A timer that only moved later is looked at again when it fires. */
static void set_timer(struct dp_pump *pump, struct dp_entry *entry) {
    int64_t due = dp_conn_timer(entry->conn);
    if (due == DP_NEVER || (entry->timer_slot && entry->timer_at <= due))
        return;
    entry->timer_at = due;
    sift_up(pump, entry->timer_slot ? entry->timer_slot - 1 : pump->timer_count++, entry);
}

/* Room for the timer of one connection more: setting it cannot fail. */
static bool make_timer_room(struct dp_pump *pump) {
    if (pump->handles < pump->timer_room)
        return true;
    uint32_t room = pump->timer_room * 2;
    struct dp_entry **bigger = realloc(pump->timers, room * sizeof *bigger);
    if (!bigger)
        return false;
    pump->timers = bigger;
    pump->timer_room = room;
    return true;
}

/* Those with something to send ---------------------------------------------------------------- */

static void touch(struct dp_entry *entry) {
    if (entry->touched)
        return;
    struct dp_pump *pump = entry->pump;
    entry->touched = true;
    entry->next_touched = NULL;
    entry->previous_touched = pump->last_touched;
    *(pump->last_touched ? &pump->last_touched->next_touched : &pump->touched) = entry;
    pump->last_touched = entry;
}

static void untouch(struct dp_entry *entry) {
    if (!entry->touched)
        return;
    struct dp_pump *pump = entry->pump;
    struct dp_entry *next = entry->next_touched, *previous = entry->previous_touched;
    entry->touched = false;
    *(previous ? &previous->next_touched : &pump->touched) = next;
    *(next ? &next->previous_touched : &pump->last_touched) = previous;
}

/* What connections tell -------------------------------------------------------------------------
 */

static void leave(struct dp_entry *entry) {
    if (entry->left)
        return;
    entry->left = true;
    entry->front->left(entry->pump, entry);
}

/* Who is told of a stream: NULL once the front that had it has left. */
static const struct dp_front_calls *front_of(const struct dp_entry *entry,
                                             const struct dp_stream *stream) {
    if (!entry->left)
        return entry->front;
    return entry->front == &dp_front_events || dp_events_has(stream) ? &dp_front_events : NULL;
}

static size_t on_data(void *self, struct dp_conn *conn, struct dp_stream *stream,
                      const uint8_t *bytes, size_t length, bool fin) {
    (void)conn;
    struct dp_entry *entry = self;
    const struct dp_front_calls *front = front_of(entry, stream);
    return front ? front->data(entry->pump, entry, stream, bytes, length, fin) : length;
}

static void on_reset(void *self, struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    (void)conn;
    struct dp_entry *entry = self;
    const struct dp_front_calls *front = front_of(entry, stream);
    if (front)
        front->reset(entry->pump, entry, stream, code);
}

static void on_stopped(void *self, struct dp_conn *conn, struct dp_stream *stream, uint64_t code) {
    (void)conn;
    struct dp_entry *entry = self;
    const struct dp_front_calls *front = front_of(entry, stream);
    if (front)
        front->stopped(entry->pump, entry, stream, code);
}

static void on_closed(void *self, struct dp_conn *conn, struct dp_stream *stream) {
    (void)conn;
    struct dp_entry *entry = self;
    const struct dp_front_calls *front = front_of(entry, stream);
    if (front)
        front->closed(entry->pump, entry, stream);
}

static void on_control(void *self, struct dp_conn *conn, const struct dp_path *path,
                       const uint8_t *cid, uint64_t pn, bool probing, const uint8_t *frames,
                       size_t size) {
    (void)conn;
    struct dp_entry *entry = self;
    if (!entry->failed)
        dp_events_control(entry->pump, entry, path, cid, pn, probing, frames, size);
}

static void on_delivered(void *self, struct dp_conn *conn, uint64_t token, bool acked) {
    (void)conn;
    struct dp_entry *entry = self;
    dp_events_push(entry->pump, DP_EVENT_DELIVERED, acked, entry->handle, 0, token, NULL, 0);
}

static void fail(struct dp_entry *entry, uint64_t code, uint64_t frame_type, const char *reason) {
    if (entry->failed)
        return;
    entry->failed = true;
    dp_events_push(entry->pump, DP_EVENT_FAILED, 0, entry->handle, frame_type, code, reason,
                   strlen(reason));
    leave(entry);
}

static void on_failed(void *self, struct dp_conn *conn, uint64_t code, uint64_t frame_type,
                      const char *reason) {
    (void)conn;
    fail(self, code, frame_type, reason);
}

static void on_touched(void *self, struct dp_conn *conn) {
    (void)conn;
    touch(self);
}

static const struct dp_conn_owner owner = {.data = on_data,
                                           .reset = on_reset,
                                           .stopped = on_stopped,
                                           .closed = on_closed,
                                           .control = on_control,
                                           .delivered = on_delivered,
                                           .failed = on_failed,
                                           .touched = on_touched};

void dp_pump_fail(struct dp_pump *pump, struct dp_entry *entry, const char *reason) {
    (void)pump;
    fail(entry, DP_INTERNAL_ERROR, 0, reason);
}

/* The pump --------------------------------------------------------------------------------------
 */

struct dp_pump *dp_pump_new(void) {
    struct dp_pump *pump = calloc(1, sizeof *pump);
    if (!pump)
        return NULL;
    pthread_mutex_init(&pump->lock, NULL);
    pump->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pump->pool = dp_pool_new();
    pump->events = pump->pool ? dp_events_new(pump->pool) : NULL;
    pump->routes = dp_routes_new();
    pump->by_handle = calloc(FIRST_ROOM, sizeof *pump->by_handle);
    pump->handle_room = FIRST_ROOM;
    pump->timers = calloc(FIRST_ROOM, sizeof *pump->timers);
    pump->timer_room = FIRST_ROOM;
    if (pump->event_fd < 0 || !pump->events || !pump->routes || !pump->by_handle || !pump->timers) {
        dp_pump_free(pump);
        return NULL;
    }
    return pump;
}

static void forget(struct dp_pump *pump, struct dp_entry *entry) {
    leave(entry);
    untouch(entry);
    unset_timer(pump, entry);
    if (entry->routes)
        dp_routes_drop(pump->routes, entry->handle);
    take_handle_out(pump, entry->handle);
    dp_events_forget(pump, entry);
    dp_conn_free(entry->conn);
    dp_pool_give(pump->pool, entry, sizeof *entry);
}

static void forget_all(struct dp_pump *pump) {
    for (uint32_t at = 0; at < pump->handle_room;) {
        if (pump->by_handle[at])
            forget(pump, pump->by_handle[at]); /* another may have moved here: look again */
        else
            at++;
    }
}

void dp_pump_free(struct dp_pump *pump) {
    if (!pump)
        return;
    dp_loop_free(pump);
    if (pump->by_handle)
        forget_all(pump);
    dp_raw_free(pump);
    dp_load_free(pump);
    dp_events_free(pump->events);
    dp_routes_free(pump->routes);
    free(pump->by_handle);
    free(pump->timers);
    if (pump->pool)
        dp_pool_free(pump->pool);
    if (pump->event_fd >= 0)
        close(pump->event_fd);
    pthread_mutex_destroy(&pump->lock);
    free(pump);
}

int dp_pump_fd(struct dp_pump *pump) {
    return pump->event_fd;
}

void dp_pump_ring(struct dp_pump *pump) {
    if (!pump->loop || pump->rung || !dp_events_waiting(pump->events))
        return;
    static const uint64_t one = 1;
    pump->rung = write(pump->event_fd, &one, sizeof one) == sizeof one;
}

uint32_t dp_pump_take(struct dp_pump *pump, uint8_t *to, uint32_t room) {
    dp_pump_lock(pump);
    uint32_t taken = dp_events_take(pump, to, room);
    if (pump->rung && !dp_events_waiting(pump->events)) {
        uint64_t rung;
        pump->rung = read(pump->event_fd, &rung, sizeof rung) < 0;
    }
    dp_pump_unlock(pump);
    return taken;
}

/* Passes ----------------------------------------------------------------------------------------
 */

void dp_pump_deliver(struct dp_pump *pump, struct dp_entry *entry, uint8_t *datagram, size_t size,
                     const struct dp_path *path, int64_t at_ns) {
    if (entry->failed)
        return;
    dp_conn_receive(entry->conn, datagram, size, path, pump->now, at_ns);
    /* An acknowledgement that nothing follows may still have moved it. */
    if (!entry->touched)
        set_timer(pump, entry);
}

void dp_pump_run_timers(struct dp_pump *pump) {
    while (pump->timer_count && pump->timers[0]->timer_at <= pump->now) {
        struct dp_entry *entry = pump->timers[0];
        unset_timer(pump, entry);
        if (dp_conn_timer(entry->conn) > pump->now) {
            set_timer(pump, entry);
            continue;
        }
        dp_conn_on_timer(entry->conn, pump->now);
        touch(entry); /* building sets the timer anew */
    }
    if (dp_raw_timer(pump) <= pump->now)
        dp_raw_on_timer(pump);
}

static int64_t sooner(int64_t a, int64_t b) {
    return a < b ? a : b;
}

int64_t dp_pump_next_timer(struct dp_pump *pump) {
    int64_t due = sooner(dp_raw_timer(pump), dp_load_timer(pump));
    return pump->timer_count ? sooner(due, pump->timers[0]->timer_at) : due;
}

void dp_pump_build_all(struct dp_pump *pump,
                       void (*out)(void *self, struct dp_entry *entry, const uint8_t *datagram,
                                   size_t size, const struct dp_path *path),
                       void *self) {
    uint8_t datagram[DP_UDP_DATAGRAM];
    struct dp_path path;
    struct dp_entry *entry;
    while ((entry = pump->touched)) {
        size_t size = 1;
        for (int i = 0; i < TURN; i++) {
            size = dp_conn_build(entry->conn, pump->now, datagram, &path);
            if (!size)
                break;
            out(self, entry, datagram, size, &path);
        }
        untouch(entry);
        if (size)
            touch(entry); /* behind the others */
        else
            set_timer(pump, entry);
    }
}

/* Calls: connections ----------------------------------------------------------------------------
 */

/* Take the lock, for a connection that is there; without one it is not held. */
static struct dp_entry *enter(struct dp_pump *pump, uint64_t connection) {
    dp_pump_lock(pump);
    struct dp_entry *entry = dp_pump_entry(pump, connection);
    if (!entry)
        dp_pump_unlock(pump);
    return entry;
}

static const struct dp_front_calls *const fronts[] = {[DP_FRONT_EVENTS] = &dp_front_events,
                                                      [DP_FRONT_RAW] = &dp_front_raw,
                                                      [DP_FRONT_LOAD] = &dp_front_load};

static struct dp_entry *adopt(struct dp_pump *pump, struct dp_hand_over *from, uint32_t front,
                              int64_t now) {
    if (front >= sizeof fronts / sizeof *fronts || !make_handle_room(pump) ||
        !make_timer_room(pump))
        return NULL;
    struct dp_entry *entry = dp_pool_take(pump->pool, sizeof *entry, NULL);
    if (!entry)
        return NULL;
    memset(entry, 0, sizeof *entry);
    entry->pump = pump;
    entry->front = fronts[front];
    entry->host_cid_bytes = from->host_cid_bytes;
    entry->told.entry = entry;
    if (from->max_datagram > DP_UDP_DATAGRAM)
        from->max_datagram = DP_UDP_DATAGRAM;
    entry->conn = dp_conn_new(pump->pool, from, &owner, entry, now);
    if (!entry->conn) {
        dp_pool_give(pump->pool, entry, sizeof *entry);
        return NULL;
    }
    *dp_conn_mark(entry->conn) = entry;
    entry->handle = ++pump->last_handle;
    pump->by_handle[place_of(pump, entry->handle)] = entry;
    pump->handles++;
    return entry;
}

uint64_t dp_pump_adopt(struct dp_pump *pump, const struct dp_hand_over *from, uint32_t front,
                       uint32_t socket, int64_t now) {
    struct dp_hand_over copy = *from;
    uint64_t handle = 0;
    dp_pump_lock(pump);
    struct dp_entry *entry = adopt(pump, &copy, front, now);
    if (entry) {
        entry->socket = socket;
        handle = entry->handle;
        if (front == DP_FRONT_LOAD && !dp_load_join(pump, entry)) {
            entry->left = true; /* it never came */
            forget(pump, entry);
            handle = 0;
        }
    }
    dp_pump_unlock(pump);
    return handle;
}

void dp_pump_forget(struct dp_pump *pump, uint64_t connection) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return;
    forget(pump, entry);
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
    int taken =
        entry->failed ? DP_BROKEN : dp_conn_receive(entry->conn, copy, size, &from, now, at_ns);
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
    leave(entry);
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
        untouch(entry);
    dp_pump_unlock(pump);
    return (uint32_t)size;
}

int64_t dp_pump_timer(struct dp_pump *pump, uint64_t connection) {
    struct dp_entry *entry = enter(pump, connection);
    if (!entry)
        return INT64_MAX;
    int64_t due = dp_conn_timer(entry->conn);
    if (entry->front == &dp_front_raw)
        due = sooner(due, dp_raw_timer(pump));
    else if (entry->front == &dp_front_load)
        due = sooner(due, dp_load_timer(pump));
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
