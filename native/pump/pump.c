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

_Static_assert(sizeof(struct dp_pump_event) == DP_EVENT_BYTES, "pump.h states its size");

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

/* Those with something to send ---------------------------------------------------------------- */

void dp_pump_touch(struct dp_entry *entry) {
    if (entry->touched)
        return;
    struct dp_pump *pump = entry->pump;
    entry->touched = true;
    entry->next_touched = NULL;
    entry->previous_touched = pump->last_touched;
    *(pump->last_touched ? &pump->last_touched->next_touched : &pump->touched) = entry;
    pump->last_touched = entry;
}

void dp_pump_untouch(struct dp_entry *entry) {
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

void dp_pump_leave(struct dp_entry *entry) {
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
    dp_pump_leave(entry);
}

static void on_failed(void *self, struct dp_conn *conn, uint64_t code, uint64_t frame_type,
                      const char *reason) {
    (void)conn;
    fail(self, code, frame_type, reason);
}

static void on_touched(void *self, struct dp_conn *conn) {
    (void)conn;
    dp_pump_touch(self);
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

void dp_pump_drop(struct dp_pump *pump, struct dp_entry *entry) {
    dp_pump_leave(entry);
    dp_pump_untouch(entry);
    dp_pump_unset_timer(pump, entry);
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
            dp_pump_drop(pump, pump->by_handle[at]); /* another may have moved here: look again */
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

int dp_pump_deliver(struct dp_pump *pump, struct dp_entry *entry, uint8_t *datagram, size_t size,
                    const struct dp_path *path, int64_t at_ns) {
    if (entry->failed)
        return DP_BROKEN;
    int taken = dp_conn_receive(entry->conn, datagram, size, path, pump->now, at_ns);
    /* An acknowledgement that nothing follows may still have moved it. */
    if (!entry->touched)
        dp_pump_set_timer(pump, entry);
    return taken;
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
        dp_pump_untouch(entry);
        if (size)
            dp_pump_touch(entry); /* behind the others */
        else
            dp_pump_set_timer(pump, entry);
    }
}

/* Connections ------------------------------------------------------------------------------- */

static const struct dp_front_calls *const fronts[] = {[DP_FRONT_EVENTS] = &dp_front_events,
                                                      [DP_FRONT_RAW] = &dp_front_raw,
                                                      [DP_FRONT_LOAD] = &dp_front_load,
                                                      [DP_FRONT_QUIET] = &dp_front_events};

static struct dp_entry *adopt(struct dp_pump *pump, struct dp_hand_over *from, uint32_t front,
                              int64_t now) {
    if (front >= sizeof fronts / sizeof *fronts || !make_handle_room(pump) ||
        !dp_pump_timer_room(pump))
        return NULL;
    struct dp_entry *entry = dp_pool_take(pump->pool, sizeof *entry, NULL);
    if (!entry)
        return NULL;
    memset(entry, 0, sizeof *entry);
    entry->pump = pump;
    entry->front = fronts[front];
    entry->quiet = front == DP_FRONT_QUIET;
    entry->host_cid_bytes = from->host_cid_bytes;
    entry->told.entry = entry;
    if (from->max_datagram > DP_UDP_DATAGRAM)
        from->max_datagram = DP_UDP_DATAGRAM;
    entry->conn = dp_conn_new(pump->pool, from, &owner, entry, now);
    if (!entry->conn) {
        dp_pool_give(pump->pool, entry, sizeof *entry);
        return NULL;
    }
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
            dp_pump_drop(pump, entry);
            handle = 0;
        }
    }
    dp_pump_unlock(pump);
    volatile uint8_t *secrets = (volatile uint8_t *)&copy;
    for (size_t i = 0; i < sizeof copy; i++)
        secrets[i] = 0;
    return handle;
}
