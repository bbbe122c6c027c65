/* The packet loop: a thread that owns the sockets. It never takes the interpreter's lock, so what
 * Python does meanwhile costs the packets nothing.
 *
 * A pass: drain what waits on the sockets, hand each 1-RTT packet to its connection and everything
 * else to Python, poll the runtime's output, build what is due, send it. This header is also a
 * cdef. */
#ifndef DP_LOOP_H
#define DP_LOOP_H

#include "pump.h"

struct dp_loop_stats {
    uint64_t passes, datagrams_in, datagrams_out;
    uint64_t dropped_in;  /* for Python, which was too far behind */
    uint64_t dropped_out; /* which the kernel did not take */
    uint64_t wakes;       /* times that it slept and was woken */
    uint64_t batches_in;  /* recvmmsg calls that brought something */
    uint64_t coalesced;   /* datagrams that came in one with others (GRO) */
    int64_t cpu_ns;       /* of the thread */
    uint64_t allocations; /* calls of the system's allocator for packets, streams and events */
};

/* Serve a UDP socket too, which stays the caller's: its number, or -errno. Before dp_pump_start.
 * Asks the kernel for receive times, local addresses and GRO; falls back where it has no GRO. */
int dp_pump_listen(struct dp_pump *pump, int fd);
/* Start the thread. `busy_poll` spins instead of sleeping. 0, or an errno. */
int dp_pump_start(struct dp_pump *pump, int busy_poll);
/* Stop and join it; sockets are not closed. */
void dp_pump_halt(struct dp_pump *pump);
/* Send one datagram that Python made, at the next dp_pump_flush at the latest. 0, or -1. */
int dp_pump_queue(struct dp_pump *pump, uint32_t socket, const uint8_t *data, uint32_t size,
                  const uint8_t *path);
/* Whether what goes in a row to one peer is given to the kernel as one message, which splits it (it
 * is, where the kernel can), on the sockets that are served by now. */
void dp_pump_gso(struct dp_pump *pump, int on);
struct dp_loop_stats dp_pump_loop_stats(struct dp_pump *pump);
/* The kernel's thread id, to give it a core; 0 before the start. */
int dp_pump_thread(struct dp_pump *pump);
/* What this build seals packets with: "ipsec-mb" or "libcrypto" for AES-GCM, and libcrypto's
 * version, which has every other suite. */
const char *dp_pump_aead(void);
const char *dp_pump_libcrypto(void);

#endif
