/* What the files of this folder share. Not a cdef.
 *
 * events.c: what Python is told. pump.c, timers.c: connections and passes. calls.c: what any thread
 * may ask. routes.c: connection IDs. loop*.c, socket.c: the thread and its sockets. raw*.c: the raw
 * front. load*.c: the load generator. */
#ifndef DP_PUMP_INSIDE_H
#define DP_PUMP_INSIDE_H

#include <pthread.h>
#include <stdbool.h>

#include "../quic/conn.h"
#include "../quic/pool.h"
#include "../quic/recovery.h"
#include "pump.h"

struct dp_entry;
struct dp_events;
struct dp_load;
struct dp_loop;
struct dp_raw_front;
struct dp_routes;

/* A front: how a connection's streams are read (conn.h has the meaning of each). Every call is made
 * under the pump's lock, from inside dp_conn_receive or dp_conn_on_timer. */
struct dp_front_calls {
    size_t (*data)(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                   const uint8_t *bytes, size_t length, bool fin);
    void (*reset)(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                  uint64_t code);
    void (*stopped)(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                    uint64_t code);
    void (*closed)(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream);
    /* The connection closes or is about to be forgotten: give back what it holds. Called once. */
    void (*left)(struct dp_pump *pump, struct dp_entry *entry);
};

extern const struct dp_front_calls dp_front_events; /* events.c */
extern const struct dp_front_calls dp_front_raw;    /* raw.c */
extern const struct dp_front_calls dp_front_load;   /* load.c */

/* What Python is still to be told of a connection, or of none; events.c's. */
struct dp_told {
    struct dp_event_node *first, *last;
    struct dp_told *next, *previous; /* among those with something to tell */
    struct dp_entry *entry;          /* NULL: of no connection */
    uint32_t count, controls;
    size_t bytes;
};

/* A connection of the pump. */
struct dp_entry {
    struct dp_pump *pump;
    uint64_t handle;
    struct dp_conn *conn;
    const struct dp_front_calls *front;
    uint32_t socket;
    uint32_t writing; /* slots that it holds in WRITING; the raw front's */
    uint32_t routes;  /* connection IDs that lead to it */
    uint8_t host_cid_bytes;
    bool quiet; /* DP_FRONT_QUIET */
    bool touched, left;
    bool failed; /* nothing more is read until Python closes it */
    struct dp_entry *next_touched, *previous_touched;
    int64_t timer_at;
    uint32_t timer_slot; /* its place in the heap of timers, + 1; 0: none */
    void *own;           /* the front's */
    struct dp_told told;
};

struct dp_pump {
    pthread_mutex_t lock;
    struct dp_pool *pool;
    struct dp_events *events;
    struct dp_routes *routes;
    struct dp_entry *touched; /* those with something to send, or whose timer moved */
    struct dp_entry *last_touched;
    struct dp_raw_front *raw; /* NULL: raw connections go to Python */
    struct dp_load *load;
    struct dp_loop *loop; /* NULL: sans-IO */
    int64_t now;          /* of this pass, monotonic ns */
    int event_fd;
    bool rung; /* event_fd was written, and Python has not taken everything since */
    /* The two sides of the lock take turns: threads of Python's that wait for it, and whether the
     * loop does. */
    uint32_t python_waits, loop_waits;
    uint64_t last_handle;
    struct dp_entry **by_handle; /* hash table; pump.c's */
    uint32_t handles, handle_room;
    struct dp_entry **timers; /* heap */
    uint32_t timer_count, timer_room;
};

/* For Python's threads: short waits are spun away, since a pass is shorter than a wake-up. */
void dp_pump_lock_slowly(struct dp_pump *pump);

static inline void dp_pump_lock(struct dp_pump *pump) {
    if (__atomic_load_n(&pump->loop_waits, __ATOMIC_RELAXED) ||
        pthread_mutex_trylock(&pump->lock) != 0)
        dp_pump_lock_slowly(pump);
}

/* For the loop between two passes: a mutex is unfair, and the thread that gave it up last would
 * nearly always get it back. */
void dp_pump_lock_politely(struct dp_pump *pump);

static inline void dp_pump_unlock(struct dp_pump *pump) {
    pthread_mutex_unlock(&pump->lock);
}

/* pump.c ------------------------------------------------------------------------------------- */

static inline int64_t dp_sooner(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Add it to those with something to send, and take it out. */
void dp_pump_touch(struct dp_entry *entry);
void dp_pump_untouch(struct dp_entry *entry);
/* Tell the front that the connection is over, once. */
void dp_pump_leave(struct dp_entry *entry);
/* Forget a connection. */
void dp_pump_drop(struct dp_pump *pump, struct dp_entry *entry);
/* timers.c. Room for one entry more; false: no memory. */
bool dp_pump_timer_room(struct dp_pump *pump);
/* Put it where its connection's timer says, or take it out. */
void dp_pump_set_timer(struct dp_pump *pump, struct dp_entry *entry);
void dp_pump_unset_timer(struct dp_pump *pump, struct dp_entry *entry);

/* All of these hold the lock. */
struct dp_entry *dp_pump_entry(struct dp_pump *pump, uint64_t handle);
struct dp_entry *dp_pump_route_of(struct dp_pump *pump, const uint8_t *cid, uint32_t bytes);
/* Hand a datagram to its connection; it is opened in place. What dp_conn_receive says. */
int dp_pump_deliver(struct dp_pump *pump, struct dp_entry *entry, uint8_t *datagram, size_t size,
                    const struct dp_path *path, int64_t at_ns);
/* Let every timer that is due fire, connections' and fronts'. */
void dp_pump_run_timers(struct dp_pump *pump);
/* When the next one is due, INT64_MAX for none. */
int64_t dp_pump_next_timer(struct dp_pump *pump);
/* Build for every touched connection until nothing may leave, handing each datagram to `out`. */
void dp_pump_build_all(struct dp_pump *pump,
                       void (*out)(void *self, struct dp_entry *entry, const uint8_t *datagram,
                                   size_t size, const struct dp_path *path),
                       void *self);
int64_t dp_monotonic_ns(void);
/* Tell Python that a connection cannot go on for a reason of this side's; nothing more is read. */
void dp_pump_fail(struct dp_pump *pump, struct dp_entry *entry, const char *reason);
/* Ring Python if there is something to take and it does not know (in the threaded form). */
void dp_pump_ring(struct dp_pump *pump);

/* events.c ----------------------------------------------------------------------------------- */

struct dp_events *dp_events_new(struct dp_pool *pool);
void dp_events_free(struct dp_events *events);
bool dp_events_waiting(const struct dp_events *events);
/* From now on a stream is Python's: what lies there and what comes is told as DATA. To be called
 * when a front leaves a stream to Python; `data` of that front must send it on by
 * dp_front_events.data while dp_events_has says so. */
void dp_events_hand_over(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream);
bool dp_events_has(const struct dp_stream *stream);
/* Python stopped it, and waits for its end even on a quiet connection. */
void dp_events_stopped(struct dp_stream *stream);
/* As dp_pump_take, without the lock. */
uint32_t dp_events_take(struct dp_pump *pump, uint8_t *to, uint32_t room);
/* False: full, or no memory (datagrams alone are bounded; they may be lost). */
bool dp_events_datagram(struct dp_pump *pump, uint32_t socket, const uint8_t *datagram, size_t size,
                        const struct dp_path *path, int64_t at_ns);
void dp_events_control(struct dp_pump *pump, struct dp_entry *entry, const struct dp_path *path,
                       const uint8_t *cid, uint64_t pn, bool probing, const uint8_t *frames,
                       size_t size);
/* Any of the others, with its bytes. */
void dp_events_push(struct dp_pump *pump, uint16_t kind, uint16_t flags, uint64_t connection,
                    uint64_t stream, uint64_t number, const void *bytes, size_t size);
/* Forget what is still to be told of a connection, its streams' bytes alone, or those of one. */
void dp_events_forget(struct dp_pump *pump, struct dp_entry *entry);
void dp_events_forget_data(struct dp_pump *pump, struct dp_entry *entry);
void dp_events_forget_stream(struct dp_pump *pump, struct dp_stream *stream);

/* routes.c ----------------------------------------------------------------------------------- */

/* Connection IDs and the numbers that they lead to. */
struct dp_routes *dp_routes_new(void);
void dp_routes_free(struct dp_routes *routes);
/* 0: nowhere. */
uint64_t dp_routes_find(const struct dp_routes *routes, const uint8_t *cid, uint32_t bytes);
/* Lead it to `to`, or, with 0, nowhere. False: no memory, or no such connection ID can be. */
bool dp_routes_set(struct dp_routes *routes, const uint8_t *cid, uint32_t bytes, uint64_t to);
/* Take out all that lead to `to`. */
void dp_routes_drop(struct dp_routes *routes, uint64_t to);
uint32_t dp_routes_count(const struct dp_routes *routes);

/* loop.c ------------------------------------------------------------------------------------- */

/* Stop the thread and free it; nothing happens without one. */
void dp_loop_free(struct dp_pump *pump);

/* raw*.c ------------------------------------------------------------------------------------- */

/* Once a pass, before anything is built: send on what the runtime made, and verdicts that are due.
 * The passes are the loop's, or one dp_pump_build in the sans-IO form. */
void dp_raw_pass(struct dp_pump *pump);
/* The next deadline of a body, header or request; INT64_MAX for none. */
int64_t dp_raw_timer(const struct dp_pump *pump);
void dp_raw_on_timer(struct dp_pump *pump);
/* So many partitions, from 0 on, may have a runtime; it never becomes less. */
uint32_t dp_raw_count(const struct dp_pump *pump);
/* The eventfd that a partition's runtime rings, -1 without one; the sleeper's half of the wake-up
 * pair with all of them: false when there is output already, and then dp_raw_wake is due. */
int dp_raw_fd(const struct dp_pump *pump, uint32_t partition);
bool dp_raw_sleep(struct dp_pump *pump);
void dp_raw_wake(struct dp_pump *pump);
void dp_raw_free(struct dp_pump *pump);

/* load.c ------------------------------------------------------------------------------------- */

/* A connection with DP_FRONT_LOAD was adopted. False: no memory, and it cannot be. */
bool dp_load_join(struct dp_pump *pump, struct dp_entry *entry);
/* Once a pass, behind what came and before anything is built: begin the requests that are due. */
void dp_load_pass(struct dp_pump *pump);
/* When the next pass has something to do if nothing comes; INT64_MAX for never. */
int64_t dp_load_timer(const struct dp_pump *pump);
/* After the last connection is gone. */
void dp_load_free(struct dp_pump *pump);

#endif
