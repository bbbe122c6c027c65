/* See udp.h. Everything is allocated in dp_udp_new; a packet allocates nothing. */
#define _GNU_SOURCE
#include "udp.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define CONTROL 128 /* a timespec and an in6_pktinfo with their headers */

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

struct dp_udp {
    int fd;
    uint32_t queued;
    uint32_t dropped;
    struct mmsghdr in[DP_UDP_BATCH], out[DP_UDP_BATCH];
    struct iovec in_iov[DP_UDP_BATCH], out_iov[DP_UDP_BATCH];
    union address in_addr[DP_UDP_BATCH], out_addr[DP_UDP_BATCH];
    _Alignas(struct cmsghdr) uint8_t in_control[DP_UDP_BATCH][CONTROL];
    _Alignas(struct cmsghdr) uint8_t out_control[DP_UDP_BATCH][CONTROL];
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
    const int on = 1;
    int family;
    socklen_t size = sizeof family;
    if (getsockopt(udp->fd, SOL_SOCKET, SO_DOMAIN, &family, &size) < 0 ||
        setsockopt(udp->fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on) < 0)
        return -errno;
    int failed = family == AF_INET6
                     ? setsockopt(udp->fd, IPPROTO_IPV6, IPV6_RECVPKTINFO, &on, sizeof on)
                     : setsockopt(udp->fd, IPPROTO_IP, IP_PKTINFO, &on, sizeof on);
    return failed < 0 ? -errno : 0;
}

/* Receive -------------------------------------------------------------------------------------- */

static void read_control(struct msghdr *message, struct dp_datagram *datagram) {
    datagram->received_ns = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec at;
            memcpy(&at, CMSG_DATA(c), sizeof at);
            datagram->received_ns = (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
        } else if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO) {
            struct in_pktinfo info;
            memcpy(&info, CMSG_DATA(c), sizeof info);
            memcpy(datagram->path.local, &info.ipi_addr, 4);
        } else if (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO) {
            struct in6_pktinfo info;
            memcpy(&info, CMSG_DATA(c), sizeof info);
            memcpy(datagram->path.local, &info.ipi6_addr, 16);
            /* The interface matters to link-local addresses alone. */
            if (IN6_IS_ADDR_LINKLOCAL(&info.ipi6_addr))
                datagram->path.local_interface = info.ipi6_ifindex;
        }
    }
}

static void read_peer(const union address *from, struct dp_path *path) {
    memset(path, 0, sizeof *path);
    path->family = from->any.sa_family;
    if (from->any.sa_family == AF_INET6) {
        path->peer_port = from->v6.sin6_port;
        path->peer_scope = from->v6.sin6_scope_id;
        memcpy(path->peer, &from->v6.sin6_addr, 16);
    } else {
        path->peer_port = from->v4.sin_port;
        memcpy(path->peer, &from->v4.sin_addr, 4);
    }
}

int dp_udp_receive(struct dp_udp *udp) {
    for (int i = 0; i < DP_UDP_BATCH; i++) {
        udp->in[i].msg_hdr.msg_namelen = sizeof udp->in_addr[i];
        udp->in[i].msg_hdr.msg_controllen = CONTROL;
    }
    int n = recvmmsg(udp->fd, udp->in, DP_UDP_BATCH, MSG_DONTWAIT, NULL);
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
    for (int i = 0; i < n; i++) {
        struct dp_datagram *datagram = &udp->received[i];
        struct msghdr *message = &udp->in[i].msg_hdr;
        read_peer(&udp->in_addr[i], &datagram->path);
        read_control(message, datagram);
        datagram->length = udp->in[i].msg_len + ((message->msg_flags & MSG_TRUNC) != 0);
    }
    return n;
}

struct dp_datagram *dp_udp_datagram(struct dp_udp *udp, uint32_t index) {
    return &udp->received[index];
}

/* Send ----------------------------------------------------------------------------------------- */

static socklen_t write_peer(union address *to, const struct dp_path *path) {
    memset(to, 0, sizeof *to);
    to->any.sa_family = path->family;
    if (path->family == AF_INET6) {
        to->v6.sin6_port = path->peer_port;
        to->v6.sin6_scope_id = path->peer_scope;
        memcpy(&to->v6.sin6_addr, path->peer, 16);
        return sizeof to->v6;
    }
    to->v4.sin_port = path->peer_port;
    memcpy(&to->v4.sin_addr, path->peer, 4);
    return sizeof to->v4;
}

/* The answer leaves from the address that the question came to, or a client behind a wildcard
 * listener on a host of several addresses would not know it. All zero: the kernel chooses. */
static void write_control(struct msghdr *message, const struct dp_path *path) {
    static const uint8_t none[16];
    message->msg_controllen = 0;
    if (memcmp(path->local, none, 16) == 0)
        return;
    struct cmsghdr *c = message->msg_control;
    if (path->family == AF_INET6) {
        struct in6_pktinfo info = {.ipi6_ifindex = path->local_interface};
        memcpy(&info.ipi6_addr, path->local, 16);
        c->cmsg_level = IPPROTO_IPV6;
        c->cmsg_type = IPV6_PKTINFO;
        c->cmsg_len = CMSG_LEN(sizeof info);
        memcpy(CMSG_DATA(c), &info, sizeof info);
        message->msg_controllen = CMSG_SPACE(sizeof info);
    } else {
        struct in_pktinfo info = {0};
        memcpy(&info.ipi_spec_dst, path->local, 4);
        c->cmsg_level = IPPROTO_IP;
        c->cmsg_type = IP_PKTINFO;
        c->cmsg_len = CMSG_LEN(sizeof info);
        memcpy(CMSG_DATA(c), &info, sizeof info);
        message->msg_controllen = CMSG_SPACE(sizeof info);
    }
}

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
    udp->out[i].msg_hdr.msg_namelen = write_peer(&udp->out_addr[i], &to);
    write_control(&udp->out[i].msg_hdr, &to);
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
