/* What the files of the loop share: loop.c (the thread, when it sleeps, the sockets that it
 * serves), loop_in.c (from the sockets to connections and to Python), loop_out.c (from connections
 * to the sockets). Not a cdef. */
#ifndef DP_LOOP_INSIDE_H
#define DP_LOOP_INSIDE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>

#include "../atomics.h"
#include "inside.h"
#include "loop.h"
#include "raw.h"
#include "socket.h"

#define DP_LOOP_EVENTS 64 /* that one call of epoll brings */

struct dp_served_socket {
    int fd;
    struct dp_sender *sender;
    bool refusal_told;
    bool connected;
};

struct dp_loop {
    struct dp_pump *pump;
    pthread_t thread;
    bool started;
    bool busy;
    bool slept; /* since the last pass; the runtime was told so */
    bool woken; /* and not only by a timer */
    bool has_pwait2;
    uint32_t stop;  /* flag */
    uint32_t tid;   /* flag */
    uint32_t polls; /* flag: there is output of a runtime to be polled */
    uint64_t due;   /* relaxed: when timers are to be looked at next, as int64_t */
    int epoll_fd, wake_fd;
    int raw_fds[DP_RAW_PARTITIONS];
    struct dp_receiver *receiver;
    uint32_t count, room, turn;
    struct dp_served_socket *served;
    struct epoll_event ready[DP_LOOP_EVENTS];
    int ready_count, ready_at;
    struct dp_loop_stats stats;
};

/* loop.c -------------------------------------------------------------------------------------- */

/* Follow the eventfds that the runtimes ring, which come and go with them. Whether any changed. */
bool dp_loop_watch_runtimes(struct dp_loop *loop);
/* End its sleep. */
void dp_loop_wake(struct dp_loop *loop);

static inline int64_t dp_loop_due(const struct dp_loop *loop) {
    return (int64_t)dp_load_relaxed(&loop->due);
}

/* loop_in.c ----------------------------------------------------------------------------------- */

/* Take the first batch of a pass from some socket, without the lock: how many messages; below 0:
 * nobody listens at the other end. */
int dp_loop_take_first(struct dp_loop *loop, uint32_t *socket);
/* Under the lock, as all that follows: hand out the first batch, and take further ones where there
 * may be more. */
void dp_loop_drain(struct dp_loop *loop, uint32_t socket, int n);
/* Tell Python that nobody listens at the other end, once until something came. */
void dp_loop_tell_refused(struct dp_loop *loop, uint32_t socket);
/* Receive a datagram of our own: the kernel's first stamp after they were asked for is the read's.
 * A connected socket hears its peer alone. */
void dp_loop_warm_up(struct dp_loop *loop, uint32_t socket);

/* loop_out.c ---------------------------------------------------------------------------------- */

/* Build what is due and send it, and say when to look at timers again. */
void dp_loop_send_all(struct dp_loop *loop);

#endif
