/* From the sockets to the connections, and to Python what is no connection's of the pump's.
 *
 * The buffers are the thread's, so datagrams are taken from the kernel without the pump's lock, and
 * handed out under it. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>

#include "load.h"
#include "loop_inside.h"

/* Up to so many sockets are asked in turns; of more, those that the kernel says have something. */
#define FEW       16
#define CID_BYTES 8 /* of the connection IDs that this side gives out */
/* Batches that one pass takes in, and datagrams behind which it takes no further one: what is read
 * must be answered, and Python be let in, before long. */
#define BATCHES       4
#define BATCHES_MANY  64 /* of many sockets, each brings little */
#define DATAGRAMS_MAX 512

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

/* Messages of a socket. Below 0: nobody listens at the other end. */
static int take_batch(struct dp_loop *loop, uint32_t socket) {
    int n = dp_receiver_take(loop->receiver, loop->served[socket].fd);
    return n == -ECONNREFUSED ? n : n > 0 ? n : 0;
}

void dp_loop_tell_refused(struct dp_loop *loop, uint32_t socket) {
    struct dp_served_socket *served = &loop->served[socket];
    if (served->refusal_told)
        return;
    served->refusal_told = true;
    dp_events_push(loop->pump, DP_EVENT_UNREACHABLE, 0, 0, 0, socket, NULL, 0);
}

/* The next of many sockets that has something. */
static bool next_ready(struct dp_loop *loop, uint32_t *socket) {
    if (loop->ready_at == loop->ready_count) {
        loop->ready_count = epoll_wait(loop->epoll_fd, loop->ready, DP_LOOP_EVENTS, 0);
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

int dp_loop_take_first(struct dp_loop *loop, uint32_t *socket) {
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

void dp_loop_drain(struct dp_loop *loop, uint32_t socket, int n) {
    uint64_t before = loop->stats.datagrams_in;
    uint32_t empty = 0;
    bool many = loop->count > FEW;
    for (int batch = 1;; batch++) {
        if (n > 0)
            hand_out_batch(loop, socket, n);
        else if (n < 0)
            dp_loop_tell_refused(loop, socket);
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

void dp_loop_warm_up(struct dp_loop *loop, uint32_t socket) {
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
