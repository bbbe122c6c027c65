/* Loss detection, probe time-outs, congestion control and pacing (RFC 9002), for one packet-number
 * space: the application's. Sans-IO: `now` is nanoseconds of a monotonic clock, passed in. Not a
 * cdef. */
#ifndef DP_RECOVERY_H
#define DP_RECOVERY_H

#include <stdbool.h>
#include <stdint.h>

struct dp_frame;
struct dp_pool;

#define DP_NEVER INT64_MAX

enum dp_sent_flags {
    DP_SENT_ELICITS = 1,   /* has to be acknowledged */
    DP_SENT_IN_FLIGHT = 2, /* counts against the congestion window */
    DP_SENT_DONE = 4,      /* acknowledged or declared lost */
    DP_SENT_LOST = 8,      /* declared lost; a late acknowledgement of it is spurious */
    DP_SENT_PROBE = 16,    /* sent on a time-out: not held back by the window */
    DP_SENT_ACKED = 32,    /* acknowledged */
};

/* A packet that was sent. Its frames are the owner's: `first` and `count` name them. */
struct dp_sent {
    int64_t at;
    uint64_t first;
    uint16_t count;
    uint16_t bytes;
    uint8_t flags;
};

/* What becomes of packets. Called in order of packet numbers within one call; must not send. */
struct dp_sent_owner {
    void (*acked)(void *self, uint64_t pn, const struct dp_sent *sent);
    void (*lost)(void *self, uint64_t pn, const struct dp_sent *sent);
};

struct dp_recovery {
    struct dp_pool *pool;
    struct dp_sent *sent; /* ring of [oldest, next), by pn & (room - 1) */
    uint64_t oldest, next;
    uint32_t room;
    uint32_t datagram; /* bytes of a full one */

    /* Round-trip time (section 5). */
    int64_t latest_rtt, smoothed_rtt, rtt_variance, min_rtt;
    int64_t first_sample_at;
    int64_t peer_max_ack_delay;
    bool has_sample;

    /* Loss (section 6). */
    uint64_t largest_acked; /* valid when has_acked */
    bool has_acked;
    uint32_t pto_count;
    int64_t loss_at;           /* when the time threshold of the oldest candidate passes */
    int64_t last_eliciting_at; /* when an ack-eliciting packet was last sent */
    uint32_t eliciting;        /* of them outstanding */

    /* Congestion (section 7). */
    uint64_t in_flight, window, threshold;
    int64_t recovery_from; /* packets sent until then cannot shrink the window once more */
    uint64_t credit;       /* bytes acknowledged in avoidance since the window last grew */
    uint64_t path_from;    /* packets below it went over an earlier path */
    /* Whether the owner's last round of sending ended for want of window or pace and not of data
     * (section 7.8). The owner sets it, both ways; the window grows only while it stands. */
    bool window_limited;

    /* Pacing (section 7.7). */
    uint64_t tokens; /* bytes that could leave at `paced_at` */
    int64_t paced_at;
};

/* False: no memory. `first_pn` is the first packet number of this space that will be sent. */
bool dp_recovery_init(struct dp_recovery *recovery, struct dp_pool *pool, uint64_t first_pn,
                      uint32_t datagram, int64_t peer_max_ack_delay);
void dp_recovery_free(struct dp_recovery *recovery);
/* The handshake's measurement; 0: none was made. */
void dp_recovery_seed_rtt(struct dp_recovery *recovery, int64_t smoothed, int64_t variance,
                          int64_t minimum, int64_t now);

/* Note that packet `next` was sent (numbers may not be skipped). False, and nothing noted: no room
 * for more outstanding packets. */
bool dp_recovery_sent(struct dp_recovery *recovery, int64_t now, uint32_t bytes, uint8_t flags,
                      uint64_t first, uint16_t count);
/* Whether a packet more can be noted, for which memory is taken here: once it says true, the next
 * dp_recovery_sent does not fail. Ask before sealing, since a number must not be sealed twice. */
bool dp_recovery_has_room(struct dp_recovery *recovery);

/* Take an ACK frame whose delay is `delay` ns. False: it acknowledges a packet that was never sent
 * (PROTOCOL_VIOLATION, RFC 9000 section 13.1). */
bool dp_recovery_ack(struct dp_recovery *recovery, const struct dp_frame *ack, int64_t delay,
                     int64_t now, const struct dp_sent_owner *owner, void *self);

/* When dp_recovery_on_timer is due (loss time or PTO), or DP_NEVER. */
int64_t dp_recovery_timer(const struct dp_recovery *recovery);
/* What is due at `now`: packets past the time threshold are lost; when the PTO has run out, how
 * many probes to send (0, or 2: section 6.2.4), which dp_recovery_sent then gets with
 * DP_SENT_PROBE. */
uint32_t dp_recovery_on_timer(struct dp_recovery *recovery, int64_t now,
                              const struct dp_sent_owner *owner, void *self);
/* The probe time-out now, without its back-off (section 6.2.1). */
int64_t dp_recovery_pto(const struct dp_recovery *recovery);

/* Bytes that the congestion window still allows. */
uint64_t dp_recovery_window(const struct dp_recovery *recovery);
/* When a full datagram may leave by the pacer: at most `now` for at once. Packets that are not in
 * flight (ACKs alone) and probes need not wait for it. */
int64_t dp_recovery_paced_at(struct dp_recovery *recovery, int64_t now);
/* The path changed: the window and the round-trip time begin anew (RFC 9000 section 9.4). What is
 * outstanding stays so, but is in flight no longer: what becomes of it says nothing of this path.
 */
void dp_recovery_new_path(struct dp_recovery *recovery);

/* The lowest packet number that is still outstanding; `next` when none is. Its frames and those of
 * later ones are in use. */
uint64_t dp_recovery_lowest(const struct dp_recovery *recovery);
const struct dp_sent *dp_recovery_packet(const struct dp_recovery *recovery, uint64_t pn);

#endif
