/* See udp.h. Everything is allocated in dp_udp_new; a packet allocates nothing. */
#define _GNU_SOURCE
#include "udp.h"

#include <stdlib.h>

#include "udp_address.h"

struct dp_udp {
    int fd;
    uint32_t queued;
    uint32_t dropped;
    struct mmsghdr in[DP_UDP_BATCH], out[DP_UDP_BATCH];
    struct iovec in_iov[DP_UDP_BATCH], out_iov[DP_UDP_BATCH];
    union dp_address in_addr[DP_UDP_BATCH], out_addr[DP_UDP_BATCH];
    _Alignas(struct cmsghdr) uint8_t in_control[DP_UDP_BATCH][DP_CONTROL_BYTES];
    _Alignas(struct cmsghdr) uint8_t out_control[DP_UDP_BATCH][DP_CONTROL_BYTES];
    struct dp_datagram received[DP_UDP_BATCH];
    uint8_t sending[DP_UDP_BATCH][DP_UDP_DATAGRAM];
};

struct dp_udp *dp_udp_new(int fd) {
    struct dp_udp *udp = calloc(1, sizeof *udp);
    if (!udp)
        return NULL;
    udp->fd = fd;
    for (int i = 0; i < DP_UDP_BATCH; i++) {
        udp->in_iov[i] = (struct iovec){udp->received[i].data, DP_UDP_DATAGRAM};
        udp->out_iov[i] = (struct iovec){udp->sending[i], 0};
        udp->in[i].msg_hdr.msg_name = &udp->in_addr[i];
        udp->in[i].msg_hdr.msg_iov = &udp->in_iov[i];
        udp->in[i].msg_hdr.msg_iovlen = 1;
        udp->in[i].msg_hdr.msg_control = udp->in_control[i];
        udp->out[i].msg_hdr.msg_name = &udp->out_addr[i];
        udp->out[i].msg_hdr.msg_iov = &udp->out_iov[i];
        udp->out[i].msg_hdr.msg_iovlen = 1;
        udp->out[i].msg_hdr.msg_control = udp->out_control[i];
    }
    return udp;
}

void dp_udp_free(struct dp_udp *udp) {
    free(udp);
}

int dp_udp_prepare(struct dp_udp *udp) {
    return dp_ask_for_control(udp->fd);
}

/* Receive -------------------------------------------------------------------------------------- */

int dp_udp_receive(struct dp_udp *udp) {
    for (int i = 0; i < DP_UDP_BATCH; i++) {
        udp->in[i].msg_hdr.msg_namelen = sizeof udp->in_addr[i];
        udp->in[i].msg_hdr.msg_controllen = DP_CONTROL_BYTES;
    }
    int n = recvmmsg(udp->fd, udp->in, DP_UDP_BATCH, MSG_DONTWAIT, NULL);
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
    for (int i = 0; i < n; i++) {
        struct dp_datagram *datagram = &udp->received[i];
        struct msghdr *message = &udp->in[i].msg_hdr;
        size_t segment;
        dp_read_peer(&udp->in_addr[i], &datagram->path);
        dp_read_control(message, &datagram->path, &datagram->received_ns, &segment);
        datagram->length = udp->in[i].msg_len + ((message->msg_flags & MSG_TRUNC) != 0);
    }
    return n;
}

struct dp_datagram *dp_udp_datagram(struct dp_udp *udp, uint32_t index) {
    return &udp->received[index];
}

/* Send ----------------------------------------------------------------------------------------- */

int dp_udp_queue(struct dp_udp *udp, const uint8_t *data, size_t length, const uint8_t *path) {
    if (length > DP_UDP_DATAGRAM)
        return -EMSGSIZE;
    if (udp->queued == DP_UDP_BATCH)
        udp->dropped += (uint32_t)dp_udp_flush(udp);
    uint32_t i = udp->queued++;
    struct dp_path to;
    memcpy(&to, path, sizeof to);
    memcpy(udp->sending[i], data, length);
    udp->out_iov[i].iov_len = length;
    udp->out[i].msg_hdr.msg_namelen = dp_write_peer(&udp->out_addr[i], &to);
    dp_write_control(&udp->out[i].msg_hdr, &to);
    return 0;
}

int dp_udp_flush(struct dp_udp *udp) {
    uint32_t sent = 0, dropped = udp->dropped;
    while (sent < udp->queued) {
        int n = sendmmsg(udp->fd, udp->out + sent, udp->queued - sent, MSG_DONTWAIT);
        if (n > 0) {
            sent += (uint32_t)n;
            continue;
        }
        if (n < 0 && errno == EINTR)
            continue;
        /* A full socket buffer, an address that the kernel refuses, an ICMP error of an earlier
         * datagram: each costs one datagram and spares the others. */
        dropped++;
        sent++;
    }
    udp->queued = 0;
    udp->dropped = 0;
    return (int)dropped;
}
