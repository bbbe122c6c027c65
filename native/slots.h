/* The slot: its state word, its progress word, what a request states, and the verbs.
 *
 * This header is also the cffi declaration: plain declarations and numeric #defines only.
 * The transition table itself stands in slots.c (dp_next_state reads it); the layout of the region
 * that holds the words stands in region.h. */
#ifndef DP_SLOTS_H
#define DP_SLOTS_H

#include <stddef.h>
#include <stdint.h>

/* State word, u64: bits 0-7 state, 8-23 owner (listener number, from 1), 24-63 generation.
 * Progress word, u64: bits 0-23 output count, 24-63 generation. */
#define DP_OWNER_SHIFT      8
#define DP_GENERATION_SHIFT 24
#define DP_STATE_MASK       0xFF
#define DP_OWNER_MASK       0xFFFF
#define DP_COUNT_MASK       0xFFFFFF

enum dp_state {
    DP_FREE = 0,
    DP_WRITING = 1,
    DP_READY = 2,
    DP_RUNNING = 3,
    DP_CANCELLING = 4,
    DP_DONE = 5,
};

enum dp_event {
    DP_CLAIM = 0,
    DP_PUBLISH = 1,
    DP_ABORT = 2,
    DP_TAKE = 3,
    DP_REVOKE = 4,
    DP_CANCEL = 5,
    DP_FINISH = 6,
    DP_RELEASE = 7,
};

#define DP_STATES 6
#define DP_EVENTS 8

/* What a verb answers besides a count or a state (all of those are 0 or more). */
enum dp_status {
    DP_OK = 0,
    DP_ILLEGAL = -1,    /* the slot is in a state that has no such event; nothing was changed */
    DP_STALE = -2,      /* the handle's generation is over; nothing was changed */
    DP_FULL = -3,       /* every slot of the range was seen taken during the probe */
    DP_OVERFLOW = -4,   /* more ids than were declared, or more output than the request allows */
    DP_BAD_TOKEN = -5,  /* an id outside the vocabulary; dp_writer says which */
    DP_SHORT = -6,      /* the body ended before its declared ids were there */
    DP_UNANSWERED = -7, /* the device left a command unanswered; its table is given up */
    DP_PENDING = -8     /* asked of the device, whose answer comes later (gpu/commands.h) */
};

/* Why an answer ended. ERROR never reaches the wire as a reason: it is a reset (code 2). */
enum dp_finish_reason {
    DP_FINISH_STOP = 1,
    DP_FINISH_LENGTH = 2,
    DP_FINISH_DEADLINE = 3,
    DP_FINISH_ERROR = 4,
};

/* One request, in the region. The first line is the listener's, written before publish; the second
 * is the runtime's, written between take and its first output or finish. */
struct dp_request {
    uint64_t request_id;
    int64_t published_ns; /* CLOCK_REALTIME */
    uint32_t n_tokens;
    uint32_t max_output;
    uint32_t top_k; /* 0: off */
    uint32_t seed;  /* 0: random */
    float temperature;
    float top_p; /* 0 or 1: off */
    uint8_t listener_line[24];

    int64_t taken_ns; /* CLOCK_REALTIME */
    uint32_t finish_reason;
    uint8_t runtime_line[52];
};

/* A claim's answer. */
struct dp_claimed {
    uint64_t generation;
    uint32_t slot;
    uint32_t free_left; /* slots of the range seen free right after the claim */
};

struct dp_region;

/* The next state, or DP_ILLEGAL: the one transition table. */
int dp_next_state(int event, int state);

/* Claim a FREE slot of [first, first + count) for `owner`, probing from `start` (an index in the
 * range) over `probes` slots, wrapping. DP_OK and *out, or DP_FULL. */
int dp_claim(struct dp_region *region, uint32_t owner, uint32_t first, uint32_t count,
             uint32_t start, uint32_t probes, struct dp_claimed *out);

/* A slot's word as this side may know it: on the device table the later of its two mirrors. */
uint64_t dp_word_now(struct dp_region *region, uint32_t slot);
/* The same of every slot, each at one moment, not all at the same. */
void dp_copy_words(struct dp_region *region, uint64_t *to);
/* 1 when a slot waits on the runtime: READY, RUNNING or CANCELLING. */
int dp_is_working(struct dp_region *region);

/* Slots of [first, first + count) that are FREE now. */
uint32_t dp_count_free(struct dp_region *region, uint32_t first, uint32_t count);

/* Apply an event to a slot that is held under `generation`: the new state, DP_STALE or DP_ILLEGAL.
 * Rings nobody; the verbs below do. */
int dp_apply(struct dp_region *region, uint32_t slot, uint64_t generation, int event);

/* Write what a request states into a slot that is held in WRITING. */
void dp_describe(struct dp_region *region, uint32_t slot, uint64_t request_id, uint32_t n_tokens,
                 uint32_t max_output, float temperature, float top_p, uint32_t top_k,
                 uint32_t seed);

/* Listener's verbs. Publish stamps published_ns (returned through *at_ns when that is not NULL). */
int dp_publish(struct dp_region *region, uint32_t slot, uint64_t generation, int64_t *at_ns);
int dp_cancel(struct dp_region *region, uint32_t slot, uint64_t generation);
/* Whatever ends this listener's hold on the slot: abort, revoke, cancel or release, as its state
 * asks for. The state it left the slot in. */
int dp_let_go(struct dp_region *region, uint32_t slot, uint64_t generation);
/* Does the same for every slot of a listener that is gone; how many there were. */
int dp_let_go_all(struct dp_region *region, uint32_t owner);

/* Runtime's verbs. Take stamps taken_ns. */
int dp_take(struct dp_region *region, uint32_t slot, uint64_t *generation);
int dp_emit(struct dp_region *region, uint32_t slot, uint64_t generation, const int32_t *ids,
            uint32_t count);
int dp_finish(struct dp_region *region, uint32_t slot, uint64_t generation, uint32_t reason);
int dp_is_cancelled(struct dp_region *region, uint32_t slot, uint64_t generation);

/* What a listener polls: one entry a held slot, kept by the listener in memory of its own. */
struct dp_watch {
    uint64_t generation;
    uint32_t slot;
    uint32_t seen;   /* output ids already read */
    uint32_t count;  /* output ids out now */
    uint32_t state;  /* as last loaded; DP_STATES when the word is not this holder's any more */
    uint32_t paused; /* the state in which its output waits for its reader; 0: it does not */
};

/* Refresh watches[0..n); write the indices of those with new output or DONE or lost to `changed`
 * and return how many. A paused one counts only once its state is another than `paused`, so that
 * neither the poll nor the sleep is kept busy by output that nobody takes yet. The progress is
 * loaded after the state, so a DONE comes with its whole count. */
uint32_t dp_poll(struct dp_region *region, struct dp_watch *watches, uint32_t n, uint32_t *changed);

/* Sleep/wake, listener's side: dp_listener_sleep says "I am about to block" and answers whether
 * something changed meanwhile (then do not block); dp_listener_wake ends it. dp_listener_drain
 * reads the eventfd once it was seen readable. */
int dp_listener_sleep(struct dp_region *region, uint32_t owner, struct dp_watch *watches,
                      uint32_t n);
void dp_listener_wake(struct dp_region *region, uint32_t owner);
void dp_listener_drain(struct dp_region *region, uint32_t owner);

/* Runtime's side: block until a slot is READY or CANCELLING, `cancel_fd` is readable, or the time
 * is over (timeout_ms < 0: none). With spin_us > 0 it looks that long before it blocks. 1 when
 * there is something to do, 0 on time-out, -1 when cancel_fd (the attachment's socket) said the
 * daemon is gone. */
int dp_runtime_wait(struct dp_region *region, int cancel_fd, int timeout_ms, uint32_t spin_us);

/* The poster's half of the pair, for posters elsewhere: ring if the other side sleeps. */
void dp_wake_runtime(struct dp_region *region);
void dp_wake_listener(struct dp_region *region, uint32_t owner);

int64_t dp_realtime_ns(void);

#endif
