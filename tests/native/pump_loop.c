/* The packet pump's sockets and its thread.
 *
 * Arguments: how much, seed. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "pump/loop.h"
#include "pump/socket.h"
#include "pump_bed.h"

/* The kernel's, or one whose devices cannot split messages. */
static bool kernel_splits = true;

static bool asks_to_split(struct msghdr *message) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c))
        if (c->cmsg_level == 17)
            return true;
    return false;
}

int sendmmsg(int fd, struct mmsghdr *messages, unsigned int count, int flags) {
    unsigned int n = 0;
    while (n < count && (kernel_splits || !asks_to_split(&messages[n].msg_hdr)))
        n++;
    if (n)
        return (int)syscall(SYS_sendmmsg, fd, messages, n, flags);
    errno = EIO;
    return -1;
}

/* Sockets ---------------------------------------------------------------------------------------
 */

static int udp_socket(int family, struct dp_path *at) {
    int fd = socket(family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    int room = 4 << 20;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    memset(at, 0, sizeof *at);
    at->family = (uint16_t)family;
    if (family == AF_INET6) {
        struct sockaddr_in6 to = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
        socklen_t size = sizeof to;
        if (bind(fd, (struct sockaddr *)&to, sizeof to) < 0) {
            close(fd);
            return -1; /* a host without it */
        }
        CHECK(getsockname(fd, (struct sockaddr *)&to, &size) == 0);
        at->peer_port = to.sin6_port;
        memcpy(at->peer, &to.sin6_addr, 16);
        return fd;
    }
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof to;
    CHECK(bind(fd, (struct sockaddr *)&to, sizeof to) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&to, &size) == 0);
    at->peer_port = to.sin_port;
    memcpy(at->peer, &to.sin_addr, 4);
    return fd;
}

/* What is queued arrives, in order, datagram by datagram, whether the kernel splits or not. */
#define SENT 200

static uint8_t sent[SENT][DP_UDP_DATAGRAM];
static uint32_t sizes[SENT];

/* Many of one size, some of others. */
static void send_many(int fd, const struct dp_path *to, bool splits, uint64_t seed) {
    kernel_splits = splits;
    struct dp_sender *sender = dp_sender_new(fd);
    CHECK(sender);
    CHECK(!dp_sender_add(sender, sent[0], 0, to));
    CHECK(!dp_sender_add(sender, sent[0], DP_UDP_DATAGRAM + 1, to));
    for (uint32_t i = 0; i < SENT; i++) {
        sizes[i] = random_below(&seed, 8) ? 1200 : 1 + random_below(&seed, DP_UDP_DATAGRAM);
        for (uint32_t j = 0; j < sizes[i]; j++)
            sent[i][j] = (uint8_t)random_next(&seed);
        CHECK(dp_sender_add(sender, sent[i], sizes[i], to));
    }
    dp_sender_flush(sender);
    struct dp_sender_stats stats = dp_sender_stats(sender);
    CHECK(stats.sent == SENT && stats.dropped == 0);
    if (splits ? stats.messages >= SENT / 2 : stats.messages != SENT)
        fail("%u datagrams went in %lu messages", SENT, stats.messages);
    kernel_splits = true;
    dp_sender_free(sender);
}

/* What was sent, from message `got` on: how many came with this one. */
static uint32_t compare(const struct dp_received *message, uint32_t got) {
    uint32_t count = 0;
    for (size_t at = 0; at < message->size; at += message->segment, count++) {
        size_t left = message->size - at;
        CHECK((left < message->segment ? left : message->segment) == sizes[got + count]);
        CHECK(memcmp(message->data + at, sent[got + count], sizes[got + count]) == 0);
    }
    return count;
}

static void check_socket(int family, bool splits, uint64_t seed) {
    struct dp_path to, from;
    int in = udp_socket(family, &to), out = udp_socket(family, &from);
    if (in < 0 || out < 0)
        return;
    CHECK(dp_socket_prepare(in) == 0);
    struct dp_receiver *receiver = dp_receiver_new();
    CHECK(receiver);
    send_many(out, &to, splits, seed);
    uint32_t got = 0;
    for (int64_t until = monotonic_ns() + 5000 * MS; got < SENT && monotonic_ns() < until;) {
        int n = dp_receiver_take(receiver, in);
        CHECK(n >= 0);
        for (int i = 0; i < n; i++) {
            struct dp_received message = dp_receiver_message(receiver, i);
            CHECK(message.at_ns && message.path.peer_port == from.peer_port);
            CHECK(memcmp(message.path.local, to.peer, 16) == 0);
            got += compare(&message, got);
        }
    }
    CHECK(got == SENT);
    dp_receiver_free(receiver);
    close(in);
    close(out);
}

/* The thread ------------------------------------------------------------------------------------
 */

static struct {
    int fd[2];
    uint32_t streams, done;
} live;

/* What a side's interpreter does: wait, take, act, flush. */
static void *interpret(void *argument) {
    int side = *(int *)argument;
    struct dp_pump *pump = world.pump[side];
    uint32_t begun = 0;
    int64_t until = monotonic_ns() + 60000 * MS;
    while (!__atomic_load_n(&live.done, __ATOMIC_ACQUIRE)) {
        if (side == CLIENT) {
            for (; begun < live.streams && begun - world.closed[CLIENT] < 64; begun++)
                open_stream(begun % CONNS);
            dp_pump_flush(pump);
            if (world.closed[CLIENT] == live.streams)
                break;
        }
        struct pollfd waiting = {.fd = dp_pump_fd(pump), .events = POLLIN};
        if (poll(&waiting, 1, 200) > 0)
            while (take(side, 65536))
                continue;
        dp_pump_flush(pump);
        if (monotonic_ns() > until)
            fail("%u of %u streams are over", world.closed[CLIENT], live.streams);
    }
    __atomic_store_n(&live.done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void start_live(int client_busy, int server_busy) {
    struct dp_path at[2];
    for (int side = 0; side < 2; side++) {
        live.fd[side] = udp_socket(AF_INET, &at[side]);
        CHECK(dp_pump_listen(world.pump[side], live.fd[side]) == 0);
        memcpy(at[side].local, at[side].peer, 4); /* both ends are on one host */
    }
    for (uint32_t conn = 0; conn < CONNS; conn++)
        connect_pair(conn, &at[SERVER], &at[CLIENT], monotonic_ns());
    for (int side = 0; side < 2; side++) {
        CHECK(dp_pump_start(world.pump[side], side ? server_busy : client_busy) == 0);
        CHECK(dp_pump_thread(world.pump[side]) > 0);
    }
}

static void stop_live(void) {
    for (int side = 0; side < 2; side++) {
        int64_t start = monotonic_ns();
        dp_pump_halt(world.pump[side]);
        CHECK(monotonic_ns() - start < LOST_MS * MS);
    }
    close_world();
    close(live.fd[0]);
    close(live.fd[1]);
}

static void check_live(uint32_t streams, int busy, uint64_t seed) {
    open_world(seed);
    live.streams = streams;
    live.done = 0;
    start_live(busy, busy);
    pthread_t thread[2];
    int sides[2] = {0, 1};
    for (int side = 0; side < 2; side++)
        CHECK(pthread_create(&thread[side], NULL, interpret, &sides[side]) == 0);
    for (int side = 0; side < 2; side++)
        pthread_join(thread[side], NULL);
    struct dp_loop_stats stats = dp_pump_loop_stats(world.pump[SERVER]);
    CHECK(stats.passes && stats.datagrams_in && stats.datagrams_out && stats.cpu_ns > 0);
    CHECK(!stats.dropped_in);
    CHECK(world.closed[CLIENT] == streams && !world.failures[0] && !world.failures[1]);
    printf("thread%s: %u streams, %lu datagrams in %lu batches, %lu joined, %lu passes\n",
           busy ? ", busy" : "", streams, stats.datagrams_in, stats.batches_in, stats.coalesced,
           stats.passes);
    stop_live();
}

/* A datagram of no connection is Python's, with its socket's number; what Python queues goes out;
 * so does what a timer makes due while the thread sleeps. */
static void check_strangers(uint64_t seed) {
    open_world(seed);
    start_live(0, 0);
    struct dp_path at, server = {0};
    int stranger = udp_socket(AF_INET, &at);
    struct sockaddr_in to;
    socklen_t size = sizeof to;
    CHECK(getsockname(live.fd[SERVER], (struct sockaddr *)&to, &size) == 0);
    static const uint8_t hello[] = "\xc3 a long header and what comes behind it";
    CHECK(sendto(stranger, hello, sizeof hello, 0, (struct sockaddr *)&to, sizeof to) > 0);
    struct pollfd waiting = {.fd = dp_pump_fd(world.pump[SERVER]), .events = POLLIN};
    CHECK(poll(&waiting, 1, LOST_MS) == 1);
    uint8_t buffer[4096];
    uint32_t taken = dp_pump_take(world.pump[SERVER], buffer, sizeof buffer);
    struct dp_pump_event event;
    CHECK(taken > sizeof event);
    memcpy(&event, buffer, sizeof event);
    CHECK(event.kind == DP_EVENT_DATAGRAM && event.number == 0 && event.connection == 0);
    memcpy(&server, buffer + sizeof event, sizeof server);
    CHECK(event.size == sizeof server + sizeof hello);
    CHECK(memcmp(buffer + sizeof event + sizeof server, hello, sizeof hello) == 0);
    CHECK(server.peer_port == at.peer_port);
    CHECK(poll(&waiting, 1, 0) == 0); /* all was taken */
    CHECK(dp_pump_queue(world.pump[SERVER], 1, hello, 5, (const uint8_t *)&server) == -1);
    CHECK(dp_pump_queue(world.pump[SERVER], 0, hello, 5, (const uint8_t *)&server) == 0);
    dp_pump_flush(world.pump[SERVER]);
    waiting.fd = stranger;
    CHECK(poll(&waiting, 1, LOST_MS) == 1);
    CHECK(recv(stranger, buffer, sizeof buffer, 0) == 5 && memcmp(buffer, hello, 5) == 0);
    /* Nobody acknowledges: the probe time-out has to fire in a thread that slept for good. */
    dp_pump_halt(world.pump[CLIENT]);
    int64_t id = dp_pump_open(world.pump[SERVER], world.handle[SERVER][0], 1);
    CHECK(dp_pump_send(world.pump[SERVER], world.handle[SERVER][0], (uint64_t)id, hello, 5, 1) ==
          0);
    dp_pump_flush(world.pump[SERVER]);
    uint64_t before = dp_pump_loop_stats(world.pump[SERVER]).datagrams_out;
    for (int64_t until = monotonic_ns() + LOST_MS * MS; monotonic_ns() < until; usleep(1000))
        if (dp_pump_loop_stats(world.pump[SERVER]).datagrams_out > before)
            break;
    CHECK(dp_pump_loop_stats(world.pump[SERVER]).datagrams_out > before);
    close(stranger);
    stop_live();
}

static void set_runtime(int fd, uint32_t partition) {
    for (int side = 0; side < 2; side++)
        dp_pump_lock(world.pump[side]);
    if (runtime_fd >= 0 && runtime_fd != fd)
        close(runtime_fd);
    runtime_fd = fd;
    runtime_partition = partition;
    for (int side = 0; side < 2; side++)
        dp_pump_unlock(world.pump[side]);
    for (int side = 0; side < 2; side++)
        dp_pump_flush(world.pump[side]);
}

static void expect_that_it_wakes(void) {
    usleep(2000); /* both sleep */
    uint32_t before = __atomic_load_n(&runtime_passes, __ATOMIC_RELAXED);
    uint64_t one = 1;
    CHECK(write(runtime_fd, &one, sizeof one) == sizeof one);
    int64_t until = monotonic_ns() + LOST_MS * MS;
    while (__atomic_load_n(&runtime_passes, __ATOMIC_RELAXED) == before)
        CHECK(monotonic_ns() < until);
}

/* The runtime's eventfd comes and goes, even under the same number, and wakes the thread; and so it
 * does where another partition's runtime gets the number that one had. */
static void check_runtime_fd(uint64_t seed) {
    open_world(seed);
    start_live(0, 0);
    for (int i = 0; i < 5; i++) {
        set_runtime(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), 0);
        expect_that_it_wakes();
        set_runtime(-1, 0);
    }
    set_runtime(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), 0);
    for (uint32_t i = 1; i < 5; i++) {
        set_runtime(runtime_fd, i % 2);
        expect_that_it_wakes();
    }
    set_runtime(-1, 0);
    stop_live();
    CHECK(runtime_wakes == runtime_sleeps);
}

/* However busy the thread is, a call of Python's gets in between two passes, and it between two
 * calls. */
static void check_fairness(uint32_t calls, uint64_t seed) {
    open_world(seed);
    runtime_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    busy_pump = world.pump[SERVER];
    start_live(0, 1); /* takes the lock in every round, since there is a runtime */
    dp_pump_flush(world.pump[SERVER]);
    uint64_t before = dp_pump_loop_stats(world.pump[SERVER]).passes;
    int64_t longest = 0, start = monotonic_ns();
    for (uint32_t i = 0; i < calls; i++) {
        int64_t from = monotonic_ns();
        dp_pump_ping(world.pump[SERVER], world.handle[SERVER][i % CONNS]);
        int64_t took = monotonic_ns() - from;
        longest = took > longest ? took : longest;
        CHECK(took < LOST_MS * MS);
        dp_pump_flush(world.pump[SERVER]);
    }
    int64_t each = (monotonic_ns() - start) / calls;
    uint64_t passes = dp_pump_loop_stats(world.pump[SERVER]).passes - before;
    printf(
        "fairness: %u calls, %ld us each with its flush, one at most %ld us; %lu passes beside\n",
        calls, each / 1000, longest / 1000, passes);
    CHECK(each < 20 * MS);
    CHECK(passes > 10);
    stop_live();
    busy_pump = NULL;
    close(runtime_fd);
    runtime_fd = -1;
}

int main(int argc, char **argv) {
    uint32_t amount = argument(argc, argv, 1, 100);
    uint64_t seed = argument(argc, argv, 2, 1);
    for (int i = 0; i < 4; i++)
        check_socket(i / 2 ? AF_INET6 : AF_INET, i % 2, seed);
    check_strangers(seed);
    check_runtime_fd(seed);
    check_live(amount * 4, 0, seed);
    check_live(amount * 4, 1, seed);
    check_fairness(amount * 40, seed);
    free(world.flying);
    printf("pump_loop: all as it should be\n");
    return 0;
}
