/* The thread that owns the sockets; loop.h says what a pass is.
 *
 * The lock is held during a pass and given up between two, so Python waits for one pass at most.
 * Datagrams are taken from the kernel before the lock is, and an empty round of the busy-polling
 * form takes it only to look at the runtime's output. */
#define _GNU_SOURCE
#include "loop.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../atomics.h"
#include "../quic/aead.h"
#include "inside.h"
#include "load.h"
#include "socket.h"

#define SOCKETS_MAX 4096
/* Up to so many sockets are asked in turns; of more, those that the kernel says have something. */
#define FEW       16
#define EVENTS    64
#define CID_BYTES 8 /* of the connection IDs that this side gives out */
/* Batches that one pass takes in, and datagrams behind which it takes no further one: what is read
 * must be answered, and Python be let in, before long. */
#define BATCHES       4
#define BATCHES_MANY  64 /* of many sockets, each brings little */
#define DATAGRAMS_MAX 512
/* So many datagrams in a pass promise more: the sockets are asked again before the kernel is asked
 * to wait. */
#define PROMISING 8

struct served {
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
    int epoll_fd, wake_fd, raw_fd;
    struct dp_receiver *receiver;
    uint32_t count, room, turn;
    struct served *served;
    struct epoll_event ready[EVENTS];
    int ready_count, ready_at;
    struct dp_loop_stats stats;
};

/* Making ----------------------------------------------------------------------------------------
 */

/* `number` is a socket's; what is none has one that no socket has. */
static bool watch(struct dp_loop *loop, int fd, uint32_t how, uint32_t number) {
    struct epoll_event event = {.events = how, .data.u32 = number};
    return epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static struct dp_loop *loop_new(struct dp_pump *pump) {
    struct dp_loop *loop = calloc(1, sizeof *loop);
    if (!loop)
        return NULL;
    loop->pump = pump;
    loop->raw_fd = -1;
    loop->has_pwait2 = true;
    loop->due = INT64_MAX;
    loop->receiver = dp_receiver_new();
    loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    loop->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pump->loop = loop;
    /* An edge a ring: nobody needs to read it. */
    if (!loop->receiver || !watch(loop, loop->wake_fd, EPOLLIN | EPOLLET, UINT32_MAX))
        dp_loop_free(pump);
    return pump->loop;
}

void dp_loop_free(struct dp_pump *pump) {
    struct dp_loop *loop = pump->loop;
    if (!loop)
        return;
    dp_pump_halt(pump);
    for (uint32_t i = 0; i < loop->count; i++)
        dp_sender_free(loop->served[i].sender);
    dp_receiver_free(loop->receiver);
    if (loop->epoll_fd >= 0)
        close(loop->epoll_fd);
    if (loop->wake_fd >= 0)
        close(loop->wake_fd);
    free(loop->served);
    free(loop);
    pump->loop = NULL;
}

static bool make_room(struct dp_loop *loop) {
    if (loop->count < loop->room)
        return true;
    uint32_t room = loop->room ? 2 * loop->room : 4;
    struct served *served = realloc(loop->served, room * sizeof *served);
    if (!served)
        return false;
    loop->served = served;
    loop->room = room;
    return true;
}

/* Such a socket has one path, whatever the kernel says of its local end. */
static bool is_connected(int fd) {
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    return getpeername(fd, (struct sockaddr *)&address, &size) == 0;
}

static int listen_on(struct dp_pump *pump, int fd) {
    struct dp_loop *loop = pump->loop ? pump->loop : loop_new(pump);
    if (!loop)
        return -ENOMEM;
    if (loop->started || loop->count == SOCKETS_MAX)
        return -EBUSY;
    int failed = dp_socket_prepare(fd);
    if (failed)
        return failed;
    struct dp_sender *sender = make_room(loop) ? dp_sender_new(fd) : NULL;
    if (!sender)
        return -ENOMEM;
    if (!watch(loop, fd, EPOLLIN, loop->count)) {
        failed = -errno;
        dp_sender_free(sender);
        return failed;
    }
    loop->served[loop->count] =
        (struct served){.fd = fd, .sender = sender, .connected = is_connected(fd)};
    return (int)loop->count++;
}

int dp_pump_listen(struct dp_pump *pump, int fd) {
    dp_pump_lock(pump);
    int number = listen_on(pump, fd);
    dp_pump_unlock(pump);
    return number;
}

/* Follow the eventfd that the runtime rings, which comes and goes with it. Whether it changed. */
static bool watch_runtime(struct dp_loop *loop) {
    int fd = dp_raw_fd(loop->pump);
    if (fd == loop->raw_fd)
        return false;
    if (loop->raw_fd >= 0)
        epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, loop->raw_fd, NULL); /* may be closed already */
    if (fd >= 0)
        watch(loop, fd, EPOLLIN | EPOLLET, UINT32_MAX);
    loop->raw_fd = fd;
    dp_store_flag(&loop->polls, fd >= 0);
    return true;
}

/* In --------------------------------------------------------------------------------------------
 */

static void hand_out(struct dp_loop *loop, uint32_t socket, uint8_t *data, size_t size,
                     const struct dp_path *path, int64_t at_ns) {
    struct dp_pump *pump = loop->pump;
    loop->stats.datagrams_in++;
    if (size <= CID_BYTES || size > DP_UDP_DATAGRAM)
        return;
    struct dp_entry *entry = NULL;
    if (!(data[0] & 0x80)) /* a short header (RFC 9000 section 17.3) */
        entry = dp_pump_route_of(pump, data + 1, CID_BYTES);
    if (entry)
        dp_pump_deliver(pump, entry, data, size,
                        loop->served[socket].connected ? dp_conn_path(entry->conn) : path, at_ns);
    else if (!dp_events_datagram(pump, socket, data, size, path, at_ns))
        loop->stats.dropped_in++;
}

static void hand_out_batch(struct dp_loop *loop, uint32_t socket, int n) {
    loop->stats.batches_in++;
    loop->served[socket].refusal_told = false;
    for (int i = 0; i < n; i++) {
        struct dp_received message = dp_receiver_message(loop->receiver, i);
        if (message.size > message.segment)
            loop->stats.coalesced += (message.size + message.segment - 1) / message.segment;
        for (size_t at = 0; at < message.size; at += message.segment) {
            size_t left = message.size - at;
            hand_out(loop, socket, message.data + at,
                     left < message.segment ? left : message.segment, &message.path, message.at_ns);
        }
    }
}

/* Messages of a socket; without the lock, since the buffers are the thread's. Below 0: nobody
 * listens at the other end. */
static int take_batch(struct dp_loop *loop, uint32_t socket) {
    int n = dp_receiver_take(loop->receiver, loop->served[socket].fd);
    return n == -ECONNREFUSED ? n : n > 0 ? n : 0;
}

static void tell_refused(struct dp_loop *loop, uint32_t socket) {
    struct served *served = &loop->served[socket];
    if (served->refusal_told)
        return;
    served->refusal_told = true;
    dp_events_push(loop->pump, DP_EVENT_UNREACHABLE, 0, 0, 0, socket, NULL, 0);
}

/* The next of many sockets that has something. */
static bool next_ready(struct dp_loop *loop, uint32_t *socket) {
    if (loop->ready_at == loop->ready_count) {
        loop->ready_count = epoll_wait(loop->epoll_fd, loop->ready, EVENTS, 0);
        loop->ready_at = 0;
        if (loop->ready_count < 0)
            loop->ready_count = 0;
    }
    while (loop->ready_at < loop->ready_count) {
        *socket = loop->ready[loop->ready_at++].data.u32;
        if (*socket < loop->count)
            return true;
    }
    return false;
}

/* The first batch of a pass: few sockets are asked in turns. */
static int take_first(struct dp_loop *loop, uint32_t *socket) {
    if (loop->count > FEW) {
        int n = 0;
        while (!n && next_ready(loop, socket))
            n = take_batch(loop, *socket);
        return n;
    }
    for (uint32_t i = 0; i < loop->count; i++) {
        *socket = loop->turn;
        loop->turn = (loop->turn + 1) % loop->count;
        int n = take_batch(loop, *socket);
        if (n)
            return n;
    }
    return 0;
}

/* Hand out the first batch, and take further ones where there may be more. */
static void drain(struct dp_loop *loop, uint32_t socket, int n) {
    uint64_t before = loop->stats.datagrams_in;
    uint32_t empty = 0;
    bool many = loop->count > FEW;
    for (int batch = 1;; batch++) {
        if (n > 0)
            hand_out_batch(loop, socket, n);
        else if (n < 0)
            tell_refused(loop, socket);
        if (batch >= (many ? BATCHES_MANY : BATCHES) ||
            loop->stats.datagrams_in - before >= DATAGRAMS_MAX)
            return;
        /* A batch that was not full emptied its socket. */
        if (n < DP_RECEIVE_BATCH) {
            if (many ? !next_ready(loop, &socket) : ++empty == loop->count)
                return;
            if (!many)
                socket = (socket + 1) % loop->count;
        }
        n = take_batch(loop, socket);
    }
}

/* Out -------------------------------------------------------------------------------------------
 */

static void send_out(void *self, struct dp_entry *entry, const uint8_t *datagram, size_t size,
                     const struct dp_path *path) {
    struct dp_loop *loop = self;
    if (entry->socket < loop->count)
        dp_sender_add(loop->served[entry->socket].sender, datagram, size, path);
}

/* Build what is due and send it, and say when to look at timers again. */
static void send_all(struct dp_loop *loop) {
    struct dp_pump *pump = loop->pump;
    dp_load_pass(pump);
    dp_pump_build_all(pump, send_out, loop);
    for (uint32_t i = 0; i < loop->count; i++) {
        dp_sender_flush(loop->served[i].sender);
        if (dp_sender_was_refused(loop->served[i].sender))
            tell_refused(loop, i);
    }
    dp_store_relaxed(&loop->due, (uint64_t)dp_pump_next_timer(pump));
    dp_pump_ring(pump);
}

static int64_t due_of(const struct dp_loop *loop) {
    return (int64_t)dp_load_relaxed(&loop->due);
}

static void wake(struct dp_loop *loop) {
    static const uint64_t one = 1;
    ssize_t written = write(loop->wake_fd, &one, sizeof one);
    (void)written; /* full: it was rung already */
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
        int64_t before = due_of(loop);
        pump->now = dp_monotonic_ns();
        bool changed = watch_runtime(loop);
        send_all(loop);
        /* Who sleeps has to be told to sleep shorter. */
        if (loop->slept && (changed || due_of(loop) < before))
            wake(loop);
    }
    dp_pump_unlock(pump);
}

/* The thread ------------------------------------------------------------------------------------
 */

/* Say to the runtime that this side sleeps, unless there is something to do. */
static void prepare_to_sleep(struct dp_loop *loop, bool promising) {
    loop->slept = false;
    if (loop->busy || promising)
        return;
    loop->slept = dp_raw_sleep(loop->pump);
    if (!loop->slept)
        dp_raw_wake(loop->pump);
}

static void pass(struct dp_loop *loop, uint32_t socket, int n) {
    struct dp_pump *pump = loop->pump;
    dp_pump_lock_politely(pump);
    if (loop->slept) {
        loop->slept = false;
        dp_raw_wake(pump);
        loop->stats.wakes += loop->woken;
    }
    uint64_t before = loop->stats.datagrams_in;
    pump->now = dp_monotonic_ns();
    if (n) {
        drain(loop, socket, n);
        /* What came may have taken longer than an acknowledgement may wait (RFC 9000 section
         * 13.2.1): with the time of now it rides along. */
        pump->now = dp_monotonic_ns();
    }
    dp_pump_run_timers(pump);
    dp_raw_pass(pump);
    send_all(loop);
    watch_runtime(loop);
    loop->stats.passes++;
    prepare_to_sleep(loop, loop->stats.datagrams_in - before >= PROMISING);
    dp_pump_unlock(pump);
}

static int wait_precisely(struct dp_loop *loop, struct epoll_event *events, int64_t left) {
#if defined SYS_epoll_pwait2 && __SIZEOF_LONG__ == 8
    if (loop->has_pwait2) {
        struct timespec timeout = {left / 1000000000, left % 1000000000};
        int n = (int)syscall(SYS_epoll_pwait2, loop->epoll_fd, events, EVENTS, &timeout, NULL,
                             (size_t)0);
        if (n >= 0 || errno == EINTR)
            return n;
        loop->has_pwait2 = false; /* an old kernel, or a sandbox that does not know the call */
    }
#endif
    int64_t ms = (left + 999999) / 1000000;
    return epoll_wait(loop->epoll_fd, events, EVENTS, ms < 60000 ? (int)ms : 60000);
}

/* Sleep until something comes or is due. */
static void sleep_on(struct dp_loop *loop) {
    struct epoll_event events[EVENTS];
    int64_t due = due_of(loop);
    int n;
    loop->woken = false;
    if (due == INT64_MAX) {
        n = epoll_wait(loop->epoll_fd, events, EVENTS, -1);
    } else {
        int64_t left = due - dp_monotonic_ns();
        if (left <= 0)
            return;
        n = wait_precisely(loop, events, left);
    }
    loop->woken = n > 0;
}

/* Whether a round that brought nothing needs no pass. */
static bool is_idle(const struct dp_loop *loop) {
    return loop->busy && !dp_load_flag(&loop->polls) && due_of(loop) > dp_monotonic_ns();
}

static int64_t cpu_ns(clockid_t clock) {
    struct timespec used;
    if (clock_gettime(clock, &used) < 0)
        return 0;
    return (int64_t)used.tv_sec * 1000000000 + used.tv_nsec;
}

static void *run(void *argument) {
    struct dp_loop *loop = argument;
    uint32_t socket = 0;
    dp_store_flag(&loop->tid, (uint32_t)syscall(SYS_gettid));
    while (!dp_load_flag(&loop->stop)) {
        int n = take_first(loop, &socket);
        if (!n && is_idle(loop)) {
            dp_cpu_relax();
            continue;
        }
        pass(loop, socket, n);
        /* The ring that said to stop may have been taken for another one. */
        if (loop->slept && !dp_load_flag(&loop->stop))
            sleep_on(loop);
    }
    dp_pump_lock(loop->pump);
    if (loop->slept) {
        loop->slept = false;
        dp_raw_wake(loop->pump);
    }
    loop->stats.cpu_ns = cpu_ns(CLOCK_THREAD_CPUTIME_ID);
    dp_pump_unlock(loop->pump);
    return NULL;
}

/* Receive a datagram of our own: the kernel's first stamp after they were asked for is the read's.
 * A connected socket hears its peer alone. */
static void warm_up(struct dp_loop *loop, uint32_t socket) {
    int fd = loop->served[socket].fd;
    struct sockaddr_storage address;
    socklen_t size = sizeof address;
    if (getpeername(fd, (struct sockaddr *)&address, &size) == 0)
        return;
    size = sizeof address;
    if (getsockname(fd, (struct sockaddr *)&address, &size) < 0 ||
        sendto(fd, "", 1, MSG_DONTWAIT, (struct sockaddr *)&address, size) < 0)
        return; /* a wildcard address on a host without that family; the first stamp may be late */
    for (int i = 0; i < 1000; i++) {
        int n = take_batch(loop, socket);
        if (n <= 0)
            continue;
        loop->pump->now = dp_monotonic_ns();
        hand_out_batch(loop, socket, n); /* others may have come too */
        return;
    }
}

/* Signals are the interpreter's main thread's. */
static int create_thread(struct dp_loop *loop) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&loop->thread, NULL, run, loop);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed)
        pthread_setname_np(loop->thread, "dataplane-pump");
    return failed;
}

int dp_pump_start(struct dp_pump *pump, int busy_poll) {
    struct dp_loop *loop = pump->loop;
    if (!loop || !loop->count || loop->started)
        return EINVAL;
    dp_pump_lock(pump);
    for (uint32_t i = 0; i < loop->count; i++)
        warm_up(loop, i);
    dp_pump_unlock(pump);
    loop->busy = busy_poll != 0;
    loop->slept = false;
    dp_store_flag(&loop->stop, 0);
    dp_store_flag(&loop->tid, 0);
    int failed = create_thread(loop);
    if (failed)
        return failed;
    loop->started = true;
    while (!dp_load_flag(&loop->tid))
        sched_yield();
    return 0;
}

void dp_pump_halt(struct dp_pump *pump) {
    struct dp_loop *loop = pump->loop;
    if (!loop || !loop->started)
        return;
    dp_store_flag(&loop->stop, 1);
    wake(loop);
    pthread_join(loop->thread, NULL);
    loop->started = false;
}

struct dp_loop_stats dp_pump_loop_stats(struct dp_pump *pump) {
    struct dp_loop_stats stats = {0};
    dp_pump_lock(pump);
    struct dp_loop *loop = pump->loop;
    if (loop) {
        stats = loop->stats;
        clockid_t clock;
        if (loop->started && pthread_getcpuclockid(loop->thread, &clock) == 0)
            stats.cpu_ns = cpu_ns(clock);
        for (uint32_t i = 0; i < loop->count; i++) {
            struct dp_sender_stats out = dp_sender_stats(loop->served[i].sender);
            stats.datagrams_out += out.sent;
            stats.dropped_out += out.dropped;
        }
    }
    stats.allocations = dp_pool_allocations(pump->pool);
    dp_pump_unlock(pump);
    return stats;
}

int dp_pump_thread(struct dp_pump *pump) {
    return pump->loop ? (int)dp_load_flag(&pump->loop->tid) : 0;
}

const char *dp_pump_aead(void) {
    return dp_aead_backend();
}

const char *dp_pump_libcrypto(void) {
    return OpenSSL_version(OPENSSL_VERSION);
}
