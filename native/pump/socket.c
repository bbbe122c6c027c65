/* See socket.h. Everything is allocated at the start; a packet allocates nothing. */
#define _GNU_SOURCE
#include "socket.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "../udp_address.h"

int dp_socket_prepare(int fd) {
    const int on = 1;
    int failed = dp_ask_for_control(fd);
    if (failed)
        return failed;
    /* Without it each datagram comes alone, and everything else is the same. */
    (void)setsockopt(fd, DP_SOL_UDP, DP_UDP_GRO, &on, sizeof on);
    return 0;
}

/* In ------------------------------------------------------------------------------------------ */

#define LONGEST 65536
/* Buffers that lie a power of two apart would share their lines of the cache. */
#define STRIDE (LONGEST + 4096 + 192)

struct dp_receiver {
    uint8_t *buffers; /* mapped, so that only what was written to takes memory */
    struct mmsghdr in[DP_RECEIVE_BATCH];
    struct iovec iov[DP_RECEIVE_BATCH];
    union dp_address from[DP_RECEIVE_BATCH];
    _Alignas(struct cmsghdr) uint8_t control[DP_RECEIVE_BATCH][DP_CONTROL_BYTES];
};

struct dp_receiver *dp_receiver_new(void) {
    struct dp_receiver *receiver = calloc(1, sizeof *receiver);
    if (!receiver)
        return NULL;
    void *mapped = mmap(NULL, (size_t)STRIDE * DP_RECEIVE_BATCH, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
        free(receiver);
        return NULL;
    }
    receiver->buffers = mapped;
    for (int i = 0; i < DP_RECEIVE_BATCH; i++) {
        receiver->iov[i] = (struct iovec){receiver->buffers + (size_t)i * STRIDE, LONGEST};
        receiver->in[i].msg_hdr.msg_name = &receiver->from[i];
        receiver->in[i].msg_hdr.msg_iov = &receiver->iov[i];
        receiver->in[i].msg_hdr.msg_iovlen = 1;
        receiver->in[i].msg_hdr.msg_control = receiver->control[i];
    }
    return receiver;
}

void dp_receiver_free(struct dp_receiver *receiver) {
    if (!receiver)
        return;
    munmap(receiver->buffers, (size_t)STRIDE * DP_RECEIVE_BATCH);
    free(receiver);
}

int dp_receiver_take(struct dp_receiver *receiver, int fd) {
    for (int i = 0; i < DP_RECEIVE_BATCH; i++) {
        receiver->in[i].msg_hdr.msg_namelen = sizeof receiver->from[i];
        receiver->in[i].msg_hdr.msg_controllen = DP_CONTROL_BYTES;
    }
    int n = recvmmsg(fd, receiver->in, DP_RECEIVE_BATCH, MSG_DONTWAIT, NULL);
    if (n >= 0)
        return n;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -errno;
}

struct dp_received dp_receiver_message(struct dp_receiver *receiver, int index) {
    struct dp_received message = {.data = receiver->iov[index].iov_base,
                                  .size = receiver->in[index].msg_len};
    dp_read_peer(&receiver->from[index], &message.path);
    dp_read_control(&receiver->in[index].msg_hdr, &message.path, &message.at_ns, &message.segment);
    if (!message.segment)
        message.segment = message.size;
    if (!message.at_ns) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        message.at_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    return message;
}

/* Out ----------------------------------------------------------------------------------------- */

#define MESSAGES     64
#define SEGMENTS     64    /* what the kernel splits one message into at most */
#define SEGMENTS_MAX 65000 /* bytes of them: with headers they have to fit an IP packet */
#define BYTES        (4 * 65536)

/* A message: datagrams in a row on one path. */
struct message {
    struct dp_path path;
    size_t bytes, plain_control;
    uint16_t segment, count;
    bool whole; /* its last datagram was shorter: no other may follow */
};

struct dp_sender {
    int fd;
    bool splits; /* the kernel splits messages */
    bool can_split;
    bool refused;
    uint32_t queued;
    size_t used;
    struct dp_sender_stats stats;
    struct message message[MESSAGES];
    struct mmsghdr out[MESSAGES];
    struct iovec iov[MESSAGES];
    union dp_address to[MESSAGES];
    _Alignas(struct cmsghdr) uint8_t control[MESSAGES][DP_CONTROL_BYTES];
    uint8_t bytes[BYTES];
};

struct dp_sender *dp_sender_new(int fd) {
    struct dp_sender *sender = calloc(1, sizeof *sender);
    if (!sender)
        return NULL;
    int segment;
    socklen_t size = sizeof segment;
    sender->fd = fd;
    /* A kernel that does not know the option would send such a message as one datagram. */
    sender->can_split = getsockopt(fd, DP_SOL_UDP, DP_UDP_SEGMENT, &segment, &size) == 0;
    sender->splits = sender->can_split;
    for (int i = 0; i < MESSAGES; i++) {
        sender->out[i].msg_hdr.msg_name = &sender->to[i];
        sender->out[i].msg_hdr.msg_iov = &sender->iov[i];
        sender->out[i].msg_hdr.msg_iovlen = 1;
        sender->out[i].msg_hdr.msg_control = sender->control[i];
    }
    return sender;
}

void dp_sender_split(struct dp_sender *sender, bool on) {
    dp_sender_flush(sender);
    sender->splits = on && sender->can_split;
}

void dp_sender_free(struct dp_sender *sender) {
    free(sender);
}

struct dp_sender_stats dp_sender_stats(const struct dp_sender *sender) {
    return sender->stats;
}

bool dp_sender_was_refused(struct dp_sender *sender) {
    bool refused = sender->refused;
    sender->refused = false;
    return refused;
}

/* Whether a datagram may follow in the last message. */
static bool follows(const struct dp_sender *sender, size_t size, const struct dp_path *path) {
    if (!sender->splits || !sender->queued)
        return false;
    const struct message *last = &sender->message[sender->queued - 1];
    return !last->whole && size <= last->segment && last->count < SEGMENTS &&
           last->bytes + size <= SEGMENTS_MAX && memcmp(&last->path, path, sizeof *path) == 0;
}

static void begin_message(struct dp_sender *sender, size_t size, const struct dp_path *path) {
    uint32_t i = sender->queued++;
    struct msghdr *header = &sender->out[i].msg_hdr;
    sender->message[i] = (struct message){.path = *path, .segment = (uint16_t)size};
    sender->iov[i].iov_base = sender->bytes + sender->used;
    header->msg_namelen = dp_write_peer(&sender->to[i], path);
    dp_write_control(header, path);
    sender->message[i].plain_control = header->msg_controllen;
}

bool dp_sender_add(struct dp_sender *sender, const uint8_t *data, size_t size,
                   const struct dp_path *path) {
    if (!size || size > DP_UDP_DATAGRAM)
        return false;
    if (sender->used + size > BYTES)
        dp_sender_flush(sender);
    if (!follows(sender, size, path)) {
        if (sender->queued == MESSAGES)
            dp_sender_flush(sender);
        begin_message(sender, size, path);
    }
    struct message *message = &sender->message[sender->queued - 1];
    memcpy(sender->bytes + sender->used, data, size);
    sender->used += size;
    message->bytes += size;
    message->count++;
    message->whole = size < message->segment;
    return true;
}

/* Whether the kernel took it. An error that waits from an earlier datagram costs a try. */
static bool send_one(struct dp_sender *sender, const struct msghdr *header) {
    for (int tries = 0; tries < 2; tries++) {
        if (sendmsg(sender->fd, header, MSG_DONTWAIT) >= 0)
            return true;
        if (errno == ECONNREFUSED)
            sender->refused = true;
        else if (errno != EINTR)
            return false;
    }
    return false;
}

/* Send a message that the kernel would not split, datagram by datagram. */
static void send_singly(struct dp_sender *sender, uint32_t index) {
    const struct message *message = &sender->message[index];
    struct msghdr header = sender->out[index].msg_hdr;
    struct iovec iov = {sender->iov[index].iov_base, message->segment};
    header.msg_iov = &iov;
    header.msg_controllen = message->plain_control;
    uint32_t sent = 0;
    for (size_t at = 0; at < message->bytes; at += message->segment) {
        iov.iov_base = (uint8_t *)sender->iov[index].iov_base + at;
        if (message->bytes - at < iov.iov_len)
            iov.iov_len = message->bytes - at;
        sent += send_one(sender, &header);
    }
    /* Only now is it known that the splitting was what the kernel minded. */
    if (sent && message->count > 1)
        sender->splits = false;
    sender->stats.sent += sent;
    sender->stats.dropped += message->count - sent;
    sender->stats.messages += message->count;
}

/* Take note that messages [from, from + n) went. */
static void count_sent(struct dp_sender *sender, uint32_t from, uint32_t n) {
    sender->stats.messages += n;
    for (uint32_t i = from; i < from + n; i++)
        sender->stats.sent += sender->message[i].count;
}

static void finish_messages(struct dp_sender *sender) {
    for (uint32_t i = 0; i < sender->queued; i++) {
        struct message *message = &sender->message[i];
        sender->iov[i].iov_len = message->bytes;
        if (message->count > 1)
            dp_add_control(&sender->out[i].msg_hdr, DP_SOL_UDP, DP_UDP_SEGMENT, &message->segment,
                           sizeof message->segment);
    }
}

void dp_sender_flush(struct dp_sender *sender) {
    finish_messages(sender);
    bool tried = false;
    for (uint32_t at = 0; at < sender->queued;) {
        int n = sendmmsg(sender->fd, sender->out + at, sender->queued - at, MSG_DONTWAIT);
        if (n > 0) {
            count_sent(sender, at, (uint32_t)n);
            at += (uint32_t)n;
            tried = false;
        } else if (errno == ECONNREFUSED && !tried) {
            sender->refused = tried = true; /* an earlier one's; this one was not sent */
        } else if (errno == EIO || errno == EINVAL) {
            send_singly(sender, at++);
        } else if (errno != EINTR) {
            /* A full socket buffer or an address that the kernel refuses costs this message and
             * spares the others: the transport repeats it. */
            sender->stats.dropped += sender->message[at++].count;
        }
    }
    sender->queued = 0;
    sender->used = 0;
}
