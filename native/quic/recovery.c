/* RFC 9002 for the application's packet-number space. Section numbers are its own. Rules:
 *
 * - After every ACK all packets three below the largest acknowledged are done (section 6.1.1), so
 *   at most three of the ring's packets below it are worth a look. That makes an ACK cost what it
 *   newly acknowledges, however many ranges it repeats.
 * - An ACK is taken in two steps: first every packet's fate is marked and the round-trip time and
 *   the window follow from it; then the owner is told, upwards from the lowest number.
 * - `in_flight` and `eliciting` count packets that are not DONE and have the flag, at all times. */
#include "recovery.h"

#include <string.h>

#include "frames.h"
#include "pool.h"

#define MS INT64_C(1000000)

#define GRANULARITY      MS
#define PACKET_THRESHOLD 3
#define INITIAL_RTT      (333 * MS)
/* A round trip beyond this is a clock's mistake; it keeps every product below in 64 bits. */
#define RTT_MAX           (INT64_C(1) << 40)
#define PTO_SHIFT_MAX     16
#define PROBES            2
#define PERSISTENT_PTOS   3
#define INITIAL_DATAGRAMS 10
#define INITIAL_BYTES     14720
#define MINIMUM_DATAGRAMS 2
#define NO_RECOVERY       INT64_MIN

#define ROOM_FIRST 32
#define ROOM_MAX   8192
/* A ring larger than this that has run empty is given back for a first one: most connections send
 * much only now and then, and their memory is counted. */
#define ROOM_KEPT 128

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* The ring ------------------------------------------------------------------------------------- */

static struct dp_sent *packet_at(const struct dp_recovery *recovery, uint64_t pn) {
    return &recovery->sent[pn & (recovery->room - 1)];
}

/* Move what is outstanding to a ring of `room` entries. */
static bool resize(struct dp_recovery *recovery, uint32_t room) {
    struct dp_sent *sent = dp_pool_take(recovery->pool, room * sizeof *sent, NULL);
    if (!sent)
        return false;
    for (uint64_t pn = recovery->oldest; pn < recovery->next; pn++)
        sent[pn & (room - 1)] = *packet_at(recovery, pn);
    dp_pool_give(recovery->pool, recovery->sent, recovery->room * sizeof *sent);
    recovery->sent = sent;
    recovery->room = room;
    return true;
}

/* Let go of what is done at the low end. */
static void settle(struct dp_recovery *recovery) {
    while (recovery->oldest < recovery->next &&
           packet_at(recovery, recovery->oldest)->flags & DP_SENT_DONE)
        recovery->oldest++;
    if (recovery->oldest == recovery->next && recovery->room > ROOM_KEPT)
        resize(recovery, ROOM_FIRST); /* when there is no memory for it, the large one serves on */
}

/* Round-trip time (section 5) ------------------------------------------------------------------ */

static void forget_rtt(struct dp_recovery *recovery) {
    recovery->has_sample = false;
    recovery->latest_rtt = 0;
    recovery->min_rtt = 0;
    recovery->smoothed_rtt = INITIAL_RTT;
    recovery->rtt_variance = INITIAL_RTT / 2;
}

static void sample_rtt(struct dp_recovery *recovery, int64_t rtt, int64_t delay, int64_t now) {
    rtt = least(most(rtt, 0), RTT_MAX);
    recovery->latest_rtt = rtt;
    if (!recovery->has_sample) {
        recovery->has_sample = true;
        recovery->first_sample_at = now;
        recovery->min_rtt = recovery->smoothed_rtt = rtt;
        recovery->rtt_variance = rtt / 2;
        return;
    }
    recovery->min_rtt = least(recovery->min_rtt, rtt);
    /* A delay that would bring the sample below the minimum is not believed. */
    delay = least(most(delay, 0), recovery->peer_max_ack_delay);
    if (rtt - recovery->min_rtt >= delay)
        rtt -= delay;
    int64_t off = recovery->smoothed_rtt - rtt;
    recovery->rtt_variance = (3 * recovery->rtt_variance + (off < 0 ? -off : off)) / 4;
    recovery->smoothed_rtt = (7 * recovery->smoothed_rtt + rtt) / 8;
}

/* How much older than now a packet is that is lost by time (section 6.1.2). */
static int64_t loss_delay(const struct dp_recovery *recovery) {
    return most(most(recovery->latest_rtt, recovery->smoothed_rtt) * 9 / 8, GRANULARITY);
}

int64_t dp_recovery_pto(const struct dp_recovery *recovery) {
    return recovery->smoothed_rtt + most(4 * recovery->rtt_variance, GRANULARITY) +
           recovery->peer_max_ack_delay;
}

/* Congestion control (section 7) --------------------------------------------------------------- */

static uint64_t minimum_window(const struct dp_recovery *recovery) {
    return (uint64_t)MINIMUM_DATAGRAMS * recovery->datagram;
}

static void restart_window(struct dp_recovery *recovery) {
    uint64_t floor = minimum_window(recovery);
    uint64_t window = (uint64_t)INITIAL_DATAGRAMS * recovery->datagram;
    uint64_t bound = floor > INITIAL_BYTES ? floor : INITIAL_BYTES;
    recovery->window = window < bound ? window : bound;
    recovery->threshold = UINT64_MAX;
    recovery->recovery_from = NO_RECOVERY;
    recovery->credit = 0;
}

/* An in-flight packet arrived. Avoidance grows by one datagram for each window acknowledged; whole
 * windows are counted, since a share for every packet rounds to nothing once windows are large. */
static void grow_window(struct dp_recovery *recovery, const struct dp_sent *sent) {
    if (!recovery->window_limited || sent->at <= recovery->recovery_from)
        return;
    if (recovery->window < recovery->threshold) {
        recovery->window += sent->bytes;
        return;
    }
    recovery->credit += sent->bytes;
    if (recovery->credit >= recovery->window) {
        recovery->credit -= recovery->window;
        recovery->window += recovery->datagram;
    }
}

/* Packets were lost, the last of which was sent at `last_at`. A recovery period takes one cut. */
static void shrink_window(struct dp_recovery *recovery, int64_t last_at, int64_t now) {
    if (last_at <= recovery->recovery_from)
        return;
    uint64_t floor = minimum_window(recovery);
    recovery->recovery_from = now;
    recovery->threshold = recovery->window / 2;
    recovery->window = recovery->threshold > floor ? recovery->threshold : floor;
    recovery->credit = 0;
}

/* Nothing got through for several time-outs (section 7.6.2). The minimum is taken anew (section
 * 5.2): the path may be another. */
static void collapse_window(struct dp_recovery *recovery) {
    recovery->window = minimum_window(recovery);
    recovery->recovery_from = NO_RECOVERY;
    recovery->credit = 0;
    recovery->min_rtt = recovery->latest_rtt;
}

uint64_t dp_recovery_window(const struct dp_recovery *recovery) {
    return recovery->window > recovery->in_flight ? recovery->window - recovery->in_flight : 0;
}

/* Pacing (section 7.7) ------------------------------------------------------------------------- */

/* The rate is 5/4 of a window in each round trip, in whole numbers: `bytes` take this long. */
static int64_t pace_time(const struct dp_recovery *recovery, uint64_t bytes) {
    uint64_t per = 5 * recovery->window;
    return (int64_t)((bytes * 4 * (uint64_t)recovery->smoothed_rtt + per - 1) / per);
}

/* What may leave at once: an initial window, or what a timer as coarse as the granularity has to
 * make up for. */
static uint64_t burst_bytes(const struct dp_recovery *recovery) {
    uint64_t initial = (uint64_t)INITIAL_DATAGRAMS * recovery->datagram;
    uint64_t tick =
        5 * recovery->window * (uint64_t)GRANULARITY / (4 * (uint64_t)recovery->smoothed_rtt);
    return initial > tick ? initial : tick;
}

/* Add what came in since `paced_at`. A round trip within the granularity is not paced: no timer
 * could divide it. */
static void refill(struct dp_recovery *recovery, int64_t now) {
    if (recovery->smoothed_rtt <= GRANULARITY) {
        recovery->tokens = (uint64_t)INITIAL_DATAGRAMS * recovery->datagram;
        recovery->paced_at = now;
        return;
    }
    int64_t passed = now - recovery->paced_at;
    uint64_t burst = burst_bytes(recovery);
    if (recovery->tokens >= burst || passed >= pace_time(recovery, burst - recovery->tokens)) {
        recovery->tokens = burst;
        recovery->paced_at = now;
    } else if (passed > 0) {
        /* Only the time that whole bytes took is used up, so that no fraction is lost. */
        uint64_t bytes =
            (uint64_t)passed * 5 * recovery->window / (4 * (uint64_t)recovery->smoothed_rtt);
        recovery->tokens += bytes;
        recovery->paced_at += pace_time(recovery, bytes);
    }
}

int64_t dp_recovery_paced_at(struct dp_recovery *recovery, int64_t now) {
    refill(recovery, now);
    if (recovery->tokens >= recovery->datagram)
        return now;
    return recovery->paced_at + pace_time(recovery, recovery->datagram - recovery->tokens);
}

/* Beginning, end and change -------------------------------------------------------------------- */

bool dp_recovery_init(struct dp_recovery *recovery, struct dp_pool *pool, uint64_t first_pn,
                      uint32_t datagram, int64_t peer_max_ack_delay) {
    *recovery = (struct dp_recovery){.pool = pool,
                                     .oldest = first_pn,
                                     .next = first_pn,
                                     .path_from = first_pn,
                                     .datagram = datagram,
                                     .peer_max_ack_delay = peer_max_ack_delay,
                                     .loss_at = DP_NEVER};
    forget_rtt(recovery);
    restart_window(recovery);
    recovery->tokens = (uint64_t)INITIAL_DATAGRAMS * datagram;
    return resize(recovery, ROOM_FIRST);
}

void dp_recovery_free(struct dp_recovery *recovery) {
    dp_pool_give(recovery->pool, recovery->sent, recovery->room * sizeof *recovery->sent);
    recovery->sent = NULL;
    recovery->room = 0;
    recovery->oldest = recovery->next;
    recovery->in_flight = 0;
    recovery->eliciting = 0;
    recovery->loss_at = DP_NEVER;
}

void dp_recovery_seed_rtt(struct dp_recovery *recovery, int64_t smoothed, int64_t variance,
                          int64_t minimum, int64_t now) {
    if (smoothed <= 0)
        return;
    recovery->has_sample = true;
    recovery->first_sample_at = now;
    recovery->latest_rtt = recovery->smoothed_rtt = least(smoothed, RTT_MAX);
    recovery->rtt_variance = least(most(variance, 0), RTT_MAX);
    recovery->min_rtt = least(most(minimum, 0), RTT_MAX);
}

void dp_recovery_new_path(struct dp_recovery *recovery) {
    for (uint64_t pn = recovery->oldest; pn < recovery->next; pn++)
        packet_at(recovery, pn)->flags &= (uint8_t)~DP_SENT_IN_FLIGHT;
    recovery->in_flight = 0;
    recovery->path_from = recovery->next;
    recovery->pto_count = 0;
    forget_rtt(recovery);
    restart_window(recovery);
    recovery->tokens = (uint64_t)INITIAL_DATAGRAMS * recovery->datagram;
}

/* Sending -------------------------------------------------------------------------------------- */

bool dp_recovery_has_room(struct dp_recovery *recovery) {
    if (recovery->next - recovery->oldest < recovery->room)
        return true;
    return recovery->room < ROOM_MAX && resize(recovery, 2 * recovery->room);
}

bool dp_recovery_sent(struct dp_recovery *recovery, int64_t now, uint32_t bytes, uint8_t flags,
                      uint64_t first, uint16_t count) {
    if (!dp_recovery_has_room(recovery))
        return false;
    *packet_at(recovery, recovery->next++) = (struct dp_sent){
        .at = now, .first = first, .count = count, .bytes = (uint16_t)bytes, .flags = flags};
    if (flags & DP_SENT_ELICITS) {
        recovery->eliciting++;
        recovery->last_eliciting_at = now;
    }
    if (flags & DP_SENT_IN_FLIGHT) {
        refill(recovery, now);
        recovery->in_flight += bytes;
        recovery->tokens -= bytes < recovery->tokens ? bytes : recovery->tokens;
    }
    return true;
}

uint64_t dp_recovery_lowest(const struct dp_recovery *recovery) {
    return recovery->oldest;
}

const struct dp_sent *dp_recovery_packet(const struct dp_recovery *recovery, uint64_t pn) {
    return pn >= recovery->oldest && pn < recovery->next ? packet_at(recovery, pn) : NULL;
}

/* The fate of packets -------------------------------------------------------------------------- */

/* Tell the owner of every packet that is marked, and count it out. */
static void deliver(struct dp_recovery *recovery, const struct dp_sent_owner *owner, void *self) {
    for (uint64_t pn = recovery->oldest; pn <= recovery->largest_acked; pn++) {
        struct dp_sent *sent = packet_at(recovery, pn);
        if (sent->flags & DP_SENT_DONE || !(sent->flags & (DP_SENT_ACKED | DP_SENT_LOST)))
            continue;
        sent->flags |= DP_SENT_DONE;
        recovery->eliciting -= (sent->flags & DP_SENT_ELICITS) != 0;
        if (sent->flags & DP_SENT_IN_FLIGHT) {
            recovery->in_flight -= sent->bytes;
            if (sent->flags & DP_SENT_ACKED)
                grow_window(recovery, sent);
        }
        if (sent->flags & DP_SENT_ACKED)
            owner->acked(self, pn, sent);
        else
            owner->lost(self, pn, sent);
    }
    settle(recovery);
}

struct losses {
    int64_t last_at; /* when the last of them in flight was sent; NO_RECOVERY: none was */
    /* Of those sent with a round-trip time known and nothing acknowledged between them: when the
     * present run began, and the longest span of a run. */
    int64_t run_from, span;
};

static void note_loss(const struct dp_recovery *recovery, const struct dp_sent *sent,
                      struct losses *losses) {
    if (!(sent->flags & DP_SENT_IN_FLIGHT))
        return;
    losses->last_at = most(losses->last_at, sent->at);
    if (!(sent->flags & DP_SENT_ELICITS) || !recovery->has_sample ||
        sent->at <= recovery->first_sample_at)
        return;
    if (losses->run_from == DP_NEVER)
        losses->run_from = sent->at;
    losses->span = most(losses->span, sent->at - losses->run_from);
}

/* Mark what is lost by now (section 6.1), and set `loss_at` for what will be. */
static void mark_lost(struct dp_recovery *recovery, int64_t now, struct losses *losses) {
    int64_t delay = loss_delay(recovery);
    recovery->loss_at = DP_NEVER;
    for (uint64_t pn = recovery->oldest; pn <= recovery->largest_acked; pn++) {
        struct dp_sent *sent = packet_at(recovery, pn);
        if (sent->flags & DP_SENT_ACKED) {
            losses->run_from = DP_NEVER;
        } else if (sent->flags & DP_SENT_LOST) {
            continue;
        } else if (recovery->largest_acked - pn >= PACKET_THRESHOLD || sent->at <= now - delay) {
            sent->flags |= DP_SENT_LOST;
            note_loss(recovery, sent, losses);
        } else if (sent->flags & (DP_SENT_ELICITS | DP_SENT_IN_FLIGHT)) {
            /* An ACK alone needs no timer: nothing is sent again for it. */
            recovery->loss_at = least(recovery->loss_at, sent->at + delay);
        }
    }
}

static void detect_losses(struct dp_recovery *recovery, int64_t now) {
    struct losses losses = {.last_at = NO_RECOVERY, .run_from = DP_NEVER};
    mark_lost(recovery, now, &losses);
    if (losses.last_at == NO_RECOVERY)
        return;
    shrink_window(recovery, losses.last_at, now);
    if (losses.span > PERSISTENT_PTOS * dp_recovery_pto(recovery))
        collapse_window(recovery);
}

/* Mark what an ACK frame newly acknowledges; the flags of all of it together. */
static uint8_t mark_acked(struct dp_recovery *recovery, const struct dp_frame *ack) {
    const uint8_t *at = NULL;
    uint64_t index = 0, low = 0, high = 0;
    uint8_t flags = 0;
    while (dp_ack_next(ack, &at, &index, &low, &high) && high >= recovery->oldest)
        for (uint64_t pn = low > recovery->oldest ? low : recovery->oldest; pn <= high; pn++) {
            struct dp_sent *sent = packet_at(recovery, pn);
            /* A late one for a packet that was given up changes nothing: it was sent again. */
            if (sent->flags & DP_SENT_DONE)
                continue;
            sent->flags |= DP_SENT_ACKED;
            flags |= sent->flags;
        }
    return flags;
}

bool dp_recovery_ack(struct dp_recovery *recovery, const struct dp_frame *ack, int64_t delay,
                     int64_t now, const struct dp_sent_owner *owner, void *self) {
    uint64_t largest = ack->ack.largest;
    if (largest >= recovery->next)
        return false;
    uint8_t flags = mark_acked(recovery, ack);
    if (!flags)
        return true;
    if (!recovery->has_acked || largest > recovery->largest_acked)
        recovery->largest_acked = largest;
    recovery->has_acked = true;
    const struct dp_sent *sent = dp_recovery_packet(recovery, largest);
    bool is_new = sent && sent->flags & DP_SENT_ACKED && !(sent->flags & DP_SENT_DONE);
    if (is_new && flags & DP_SENT_ELICITS && largest >= recovery->path_from)
        sample_rtt(recovery, now - sent->at, delay, now);
    recovery->pto_count = 0;
    detect_losses(recovery, now);
    deliver(recovery, owner, self);
    return true;
}

/* Timers --------------------------------------------------------------------------------------- */

static int64_t pto_at(const struct dp_recovery *recovery) {
    if (!recovery->eliciting)
        return DP_NEVER;
    uint32_t shift = recovery->pto_count < PTO_SHIFT_MAX ? recovery->pto_count : PTO_SHIFT_MAX;
    return recovery->last_eliciting_at + dp_recovery_pto(recovery) * (INT64_C(1) << shift);
}

int64_t dp_recovery_timer(const struct dp_recovery *recovery) {
    return recovery->loss_at != DP_NEVER ? recovery->loss_at : pto_at(recovery);
}

uint32_t dp_recovery_on_timer(struct dp_recovery *recovery, int64_t now,
                              const struct dp_sent_owner *owner, void *self) {
    if (dp_recovery_timer(recovery) > now)
        return 0;
    if (recovery->loss_at != DP_NEVER) {
        detect_losses(recovery, now);
        deliver(recovery, owner, self);
        return 0;
    }
    recovery->pto_count++;
    return PROBES;
}
