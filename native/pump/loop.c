/* The thread that owns the sockets; loop.h says what a pass is.
 *
 * The lock is held during a pass and given up between two, so Python waits for one pass at most.
 * Datagrams are taken from the kernel before the lock is, and an empty round of the busy-polling
 * form takes it only to look at the runtime's output. */
#define _GNU_SOURCE
#include <errno.h>
#include <openssl/crypto.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../quic/aead.h"
#include "loop_inside.h"

#define SOCKETS_MAX 4096
/* So many datagrams in a pass promise more: the sockets are asked again before the kernel is asked
 * to wait. */
#define PROMISING 8

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
    for (uint32_t i = 0; i < DP_RAW_PARTITIONS; i++)
        loop->raw_fds[i] = -1;
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
    struct dp_served_socket *served = realloc(loop->served, room * sizeof *served);
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
        (struct dp_served_socket){.fd = fd, .sender = sender, .connected = is_connected(fd)};
    return (int)loop->count++;
}

int dp_pump_listen(struct dp_pump *pump, int fd) {
    dp_pump_lock(pump);
    int number = listen_on(pump, fd);
    dp_pump_unlock(pump);
    return number;
}

bool dp_loop_watch_runtimes(struct dp_loop *loop) {
    bool changed = false, polls = false;
    uint32_t count = dp_raw_count(loop->pump);
    /* First those that left: one that came may have the number that another's had. */
    for (uint32_t i = 0; i < count; i++) {
        int before = loop->raw_fds[i];
        if (before < 0 || dp_raw_fd(loop->pump, i) == before)
            continue;
        epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, before, NULL); /* may be closed already */
        loop->raw_fds[i] = -1;
        changed = true;
    }
    for (uint32_t i = 0; i < count; i++) {
        int fd = dp_raw_fd(loop->pump, i);
        polls |= fd >= 0;
        if (fd == loop->raw_fds[i])
            continue;
        watch(loop, fd, EPOLLIN | EPOLLET, UINT32_MAX);
        loop->raw_fds[i] = fd;
        changed = true;
    }
    if (changed)
        dp_store_flag(&loop->polls, polls);
    return changed;
}

void dp_loop_wake(struct dp_loop *loop) {
    static const uint64_t one = 1;
    ssize_t written = write(loop->wake_fd, &one, sizeof one);
    (void)written; /* full: it was rung already */
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
        dp_loop_drain(loop, socket, n);
        /* What came may have taken longer than an acknowledgement may wait (RFC 9000 section
         * 13.2.1): with the time of now it rides along. */
        pump->now = dp_monotonic_ns();
    }
    dp_pump_run_timers(pump);
    dp_raw_pass(pump);
    dp_loop_send_all(loop);
    dp_loop_watch_runtimes(loop);
    loop->stats.passes++;
    prepare_to_sleep(loop, loop->stats.datagrams_in - before >= PROMISING);
    dp_pump_unlock(pump);
}

static int wait_precisely(struct dp_loop *loop, struct epoll_event *events, int64_t left) {
#if defined SYS_epoll_pwait2 && __SIZEOF_LONG__ == 8
    if (loop->has_pwait2) {
        struct timespec timeout = {left / 1000000000, left % 1000000000};
        int n = (int)syscall(SYS_epoll_pwait2, loop->epoll_fd, events, DP_LOOP_EVENTS, &timeout,
                             NULL, (size_t)0);
        if (n >= 0 || errno == EINTR)
            return n;
        loop->has_pwait2 = false; /* an old kernel, or a sandbox that does not know the call */
    }
#endif
    int64_t ms = (left + 999999) / 1000000;
    return epoll_wait(loop->epoll_fd, events, DP_LOOP_EVENTS, ms < 60000 ? (int)ms : 60000);
}

/* Sleep until something comes or is due. */
static void sleep_on(struct dp_loop *loop) {
    struct epoll_event events[DP_LOOP_EVENTS];
    int64_t due = dp_loop_due(loop);
    int n;
    loop->woken = false;
    if (due == INT64_MAX) {
        n = epoll_wait(loop->epoll_fd, events, DP_LOOP_EVENTS, -1);
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
    return loop->busy && !dp_load_flag(&loop->polls) && dp_loop_due(loop) > dp_monotonic_ns();
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
        int n = dp_loop_take_first(loop, &socket);
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
        dp_loop_warm_up(loop, i);
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
    dp_loop_wake(loop);
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
