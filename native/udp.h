/* UDP in batches: many datagrams a system call, each with the kernel's receive time and the local
 * address it came to, IPv4 and IPv6.
 *
 * This header is also the cffi declaration. */
#ifndef DP_UDP_H
#define DP_UDP_H

#include <stddef.h>
#include <stdint.h>

#define DP_UDP_BATCH    64
#define DP_UDP_DATAGRAM 2048

/* Both ends of a path, as bytes that can be compared, hashed and handed back. IPv4 addresses fill
 * the first four bytes; ports are in network order. */
struct dp_path {
    uint16_t family;
    uint16_t peer_port;
    uint32_t local_interface;
    uint8_t peer[16];
    uint8_t local[16];
    uint32_t peer_scope;
};

struct dp_datagram {
    int64_t received_ns; /* CLOCK_REALTIME, the kernel's; 0 when it gave none */
    struct dp_path path;
    uint32_t length; /* DP_UDP_DATAGRAM + 1 and more: it was longer and is cut off */
    uint8_t data[DP_UDP_DATAGRAM];
};

struct dp_udp;

/* A non-blocking socket's batches. The socket stays the caller's. NULL: no memory. */
struct dp_udp *dp_udp_new(int fd);
void dp_udp_free(struct dp_udp *udp);
/* Ask the kernel for receive times and local addresses: 0, or -errno. */
int dp_udp_prepare(struct dp_udp *udp);
/* How many datagrams came (0: none waits), or -errno. They lie in dp_udp_datagram(udp, 0..). */
int dp_udp_receive(struct dp_udp *udp);
struct dp_datagram *dp_udp_datagram(struct dp_udp *udp, uint32_t index);
/* Add one datagram to the batch to send; a full batch goes out first. 0, or -EMSGSIZE. */
int dp_udp_queue(struct dp_udp *udp, const uint8_t *data, size_t length, const uint8_t *path);
/* Send the batch. How many the kernel did not take (they are dropped: the transport repeats them).
 */
int dp_udp_flush(struct dp_udp *udp);

#endif
