/* A UDP socket's datagrams, many a system call and many a message: the kernel joins what comes in a
 * row from one peer (GRO), and splits what goes in a row to one (GSO). Not a cdef. */
#ifndef DP_SOCKET_H
#define DP_SOCKET_H

#include <stdbool.h>

#include "../udp.h"

/* Ask the kernel for receive times, local addresses and, where it has it, GRO: 0, or -errno. */
int dp_socket_prepare(int fd);

/* In ------------------------------------------------------------------------------------------ */

#define DP_RECEIVE_BATCH 16

/* Buffers for one batch. They may serve any number of sockets, one after the other. */
struct dp_receiver;

/* Datagrams that came in a row: each of `segment` bytes, the last perhaps of fewer. */
struct dp_received {
    uint8_t *data;
    size_t size, segment;
    int64_t at_ns; /* CLOCK_REALTIME */
    struct dp_path path;
};

struct dp_receiver *dp_receiver_new(void);
void dp_receiver_free(struct dp_receiver *receiver);
/* How many messages came (0: none waits), or -errno. What the last call gave is gone. */
int dp_receiver_take(struct dp_receiver *receiver, int fd);
struct dp_received dp_receiver_message(struct dp_receiver *receiver, int index);

/* Out ----------------------------------------------------------------------------------------- */

struct dp_sender;

struct dp_sender_stats {
    uint64_t sent, dropped; /* datagrams; dropped: the kernel did not take them */
    uint64_t messages;      /* how many the kernel was given them in */
};

struct dp_sender *dp_sender_new(int fd);
void dp_sender_free(struct dp_sender *sender);
/* Add a datagram to the batch; a full one goes out first. False: it is too long, or empty. */
bool dp_sender_add(struct dp_sender *sender, const uint8_t *data, size_t size,
                   const struct dp_path *path);
void dp_sender_flush(struct dp_sender *sender);
/* Whether the kernel is to split messages, which is asked of it only where it can. */
void dp_sender_split(struct dp_sender *sender, bool on);
struct dp_sender_stats dp_sender_stats(const struct dp_sender *sender);
/* Whether the kernel said since the last call that nobody listens there. */
bool dp_sender_was_refused(struct dp_sender *sender);

#endif
