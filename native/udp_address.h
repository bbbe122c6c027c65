/* Paths as the kernel has them: socket addresses, and the control messages beside a datagram. Not a
 * cdef; to be included behind _GNU_SOURCE. */
#ifndef DP_UDP_ADDRESS_H
#define DP_UDP_ADDRESS_H

#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "udp.h"

#define DP_SOL_UDP     17
#define DP_UDP_SEGMENT 103
#define DP_UDP_GRO     104

/* A timespec, an in6_pktinfo and a segment size, with their headers. */
#define DP_CONTROL_BYTES 128

union dp_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

/* Ask the kernel for receive times and local addresses: 0, or -errno. */
static inline int dp_ask_for_control(int fd) {
    const int on = 1;
    int family;
    socklen_t size = sizeof family;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) < 0 ||
        setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on) < 0)
        return -errno;
    int failed = family == AF_INET6 ? setsockopt(fd, IPPROTO_IPV6, IPV6_RECVPKTINFO, &on, sizeof on)
                                    : setsockopt(fd, IPPROTO_IP, IP_PKTINFO, &on, sizeof on);
    return failed < 0 ? -errno : 0;
}

/* Sets all of the path, the local end to nothing. */
static inline void dp_read_peer(const union dp_address *from, struct dp_path *path) {
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

static inline void dp_read_local6(const struct cmsghdr *c, struct dp_path *path) {
    struct in6_pktinfo info;
    memcpy(&info, CMSG_DATA(c), sizeof info);
    memcpy(path->local, &info.ipi6_addr, 16);
    /* The interface matters to link-local addresses alone. */
    if (IN6_IS_ADDR_LINKLOCAL(&info.ipi6_addr))
        path->local_interface = info.ipi6_ifindex;
}

/* The receive time (CLOCK_REALTIME; 0: none), the local end of the path, and the size of each
 * datagram where the kernel joined several (0: it did not). */
static inline void dp_read_control(struct msghdr *message, struct dp_path *path, int64_t *at_ns,
                                   size_t *segment) {
    *at_ns = 0;
    *segment = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec at;
            memcpy(&at, CMSG_DATA(c), sizeof at);
            *at_ns = (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
        } else if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO) {
            struct in_pktinfo info;
            memcpy(&info, CMSG_DATA(c), sizeof info);
            memcpy(path->local, &info.ipi_addr, 4);
        } else if (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO) {
            dp_read_local6(c, path);
        } else if (c->cmsg_level == DP_SOL_UDP && c->cmsg_type == DP_UDP_GRO) {
            int bytes;
            memcpy(&bytes, CMSG_DATA(c), sizeof bytes);
            *segment = (size_t)bytes;
        }
    }
}

static inline socklen_t dp_write_peer(union dp_address *to, const struct dp_path *path) {
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

static inline void dp_add_control(struct msghdr *message, int level, int type, const void *data,
                                  size_t size) {
    struct cmsghdr *c =
        (struct cmsghdr *)(void *)((uint8_t *)message->msg_control + message->msg_controllen);
    c->cmsg_level = level;
    c->cmsg_type = type;
    c->cmsg_len = CMSG_LEN(size);
    memcpy(CMSG_DATA(c), data, size);
    message->msg_controllen += CMSG_SPACE(size);
}

/* The answer leaves from the address that the question came to, or a client behind a wildcard
 * listener on a host of several addresses would not know it. All zero: the kernel chooses. */
static inline void dp_write_control(struct msghdr *message, const struct dp_path *path) {
    static const uint8_t none[16];
    message->msg_controllen = 0;
    if (memcmp(path->local, none, 16) == 0)
        return;
    if (path->family == AF_INET6) {
        struct in6_pktinfo info = {.ipi6_ifindex = path->local_interface};
        memcpy(&info.ipi6_addr, path->local, 16);
        dp_add_control(message, IPPROTO_IPV6, IPV6_PKTINFO, &info, sizeof info);
    } else {
        struct in_pktinfo info = {0};
        memcpy(&info.ipi_spec_dst, path->local, 4);
        dp_add_control(message, IPPROTO_IP, IP_PKTINFO, &info, sizeof info);
    }
}

#endif
