/* What the files of the raw front share. Not a cdef.
 *
 * raw.c: what a stream is to this front, and ends before the answer's. raw_in.c: what clients send,
 * from the header to a published slot. raw_table.c: the verbs of the host's and of the device's
 * table. raw_out.c: what the runtime made, from the slot to the stream. raw_serve.c: attaching and
 * detaching, time, counters.
 *
 * What holds for every partition is in struct dp_raw_front, and what concerns the slots of one in
 * struct dp_raw: a partition whose runtime is lost, broken or slow is nothing to another's.
 *
 * As in dataplane/exchange.py there is one exchange a slot, made with the attachment and used again
 * by each request that claims the slot: a request allocates nothing. */
#ifndef DP_RAW_INSIDE_H
#define DP_RAW_INSIDE_H

#include "../gpu/commands.h"
#include "../keys.h"
#include "../tokens.h"
#include "inside.h"
#include "prompt1.h"
#include "raw.h"

#define DP_RAW_BUFFER_LIMIT                                                                        \
    (UINT64_C(4) << 20) /* bytes that may wait for a connection's reader                           \
                         */
#define DP_RAW_HOLD_NS      (2 * INT64_C(1000000000)) /* for a finished answer's slot */
#define DP_RAW_SWEEPS       20 /* within one body time-out: a late body waits a twentieth longer */
#define DP_RAW_RETRY_MS     1000
#define DP_RAW_RETRY_MS_MAX 10000
#define DP_RAW_REASON_MAX   256
#define DP_RAW_MOST_US      UINT32_MAX /* what a verdict has room for */
#define DP_RAW_NEVER        INT64_MAX
#define DP_RAW_NOBODY       UINT32_MAX /* no slot, no watch */

/* Codes of RESET_STREAM and STOP_SENDING (contract 3). */
#define DP_RAW_NO_ERROR      0
#define DP_RAW_RUNTIME_ERROR 2
#define DP_RAW_SLOW_READER   3

/* dataplane/latency.py's. */
enum dp_raw_series {
    DP_RAW_QUEUE = 0,
    DP_RAW_INGRESS = 1,
    DP_RAW_PICKUP = 2,
    DP_RAW_FIRST_TOKEN = 3,
    DP_RAW_TOTAL = 4,
    DP_RAW_SERIES = 5,
};

/* What a stream of this front is (its app_state). Of a stream that was left to Python the fields
 * are events.c's. */
enum dp_raw_kind {
    DP_RAW_NEW = 0,          /* nothing came, or all is over */
    DP_RAW_HEADER = 0x100,   /* a header that is not whole; `app` is the entry, app_number when it
                                is due, and it stands in the list of those */
    DP_RAW_EXCHANGE = 0x200, /* holds a slot, or is being answered; `app` is the exchange */
    DP_RAW_ANSWERED = 0x300, /* the whole answer was sent after the request's end */
    DP_RAW_UNWANTED = 0x400, /* answered, or given up; the client's own end has not come */
    DP_RAW_CLAIMING = 0x500, /* its claim has no answer yet; `app` is the entry, app_number where it
                                was posted, app_index in which partition, and it stands in the list
                                of those there */
};

struct dp_raw_exchange {
    struct dp_raw *raw; /* whose slot it is */
    struct dp_entry *entry;
    struct dp_stream *stream;
    uint64_t stream_id;
    uint64_t request_id;
    uint64_t generation;
    /* Monotonic. */
    int64_t started;
    int64_t body_due;
    int64_t deadline_at;
    int64_t held_until;
    /* CLOCK_REALTIME; complete_ns is the receive time of the request's last byte, 0 before. */
    int64_t queue_ns;
    int64_t complete_ns;
    int64_t published_ns;
    uint32_t slot;
    uint32_t n_tokens;
    uint32_t header_bytes;
    uint32_t max_output;
    uint32_t free_left;
    uint32_t deadline_ms;
    uint32_t queue_us;
    uint32_t ingress_us;
    uint32_t sent;      /* output ids handed to the connection */
    uint32_t watch;     /* index of its watch from publish on */
    uint32_t next_held; /* slots; the list of those that wait for their reader */
    uint32_t previous_held;
    bool live;      /* a request holds the slot */
    bool writing;   /* in WRITING still */
    bool placed;    /* the connection decrypts into the slot */
    bool answered;  /* the 200 was written */
    bool picked_up; /* the runtime gave a first sign */
    bool held;
    bool unanswered; /* stands in the list of those whose 200 is due */
};

/* The verbs of a table. A slot is named by number and generation; each answers the new state, or a
 * negative status and nothing was changed. */
struct dp_raw_verbs {
    /* DP_OK and *out, DP_FULL or DP_UNANSWERED; DP_PENDING: the stream will be offered again. */
    int (*claim)(struct dp_raw *raw, struct dp_stream *stream, uint32_t start, uint32_t probes,
                 struct dp_claimed *out);
    /* As dp_submit. */
    int64_t (*submit)(struct dp_raw *raw, uint32_t slot, uint64_t generation, const uint8_t *bytes,
                      size_t length);
    /* Or DP_PENDING: dp_raw_answered is called. */
    int (*revoke)(struct dp_raw *raw, uint32_t slot, uint64_t generation);
    int (*cancel)(struct dp_raw *raw, uint32_t slot, uint64_t generation);
    int (*release)(struct dp_raw *raw, uint32_t slot, uint64_t generation);
    int (*let_go)(struct dp_raw *raw, uint32_t slot, uint64_t generation);
};

/* A claim that was answered, while its stream is offered again; stream NULL: there is none. */
struct dp_raw_decided {
    const struct dp_stream *stream;
    struct dp_claimed claimed;
    int status;
};

/* The slots of one partition. */
struct dp_raw {
    struct dp_pump *pump;
    struct dp_raw_front *front;
    uint32_t index;           /* which partition's */
    struct dp_region *region; /* NULL: nothing is attached */
    struct dp_raw_config config;
    const struct dp_raw_verbs *verbs;
    struct dp_commands *commands; /* NULL: the host table */
    bool broken; /* the runtime broke a rule: nothing is served until it was detached */
    bool stuck;  /* broken in that the device does not answer */
    uint32_t next_probe;

    /* One of each a slot of the region. */
    struct dp_raw_exchange *exchanges;
    struct dp_watch *watches; /* dense: [0, watched) */
    uint32_t *changed;        /* indices of watches, then slots */
    uint32_t *unanswered;     /* slots whose 200 goes out at the end of the pass */
    uint32_t watched, unanswered_count;
    uint32_t first_held, last_held, held_count;

    /* Streams whose claims have no answer, as they came; from one on they are not posted yet. */
    struct dp_stream *first_claim, *last_claim, *first_unposted;
    struct dp_raw_decided decided;
    int64_t overdue_at;

    struct dp_raw_stats stats;
    uint8_t *scratch;                     /* a verdict, output ids and an end */
    uint8_t busy[DP_RAW_REASON_MAX + 32]; /* a verdict's place and the reason */
    uint32_t busy_bytes;
};

/* All of them, and what is nobody's yet: a header says whose it is when it is whole. */
struct dp_raw_front {
    struct dp_raw *partitions[DP_RAW_PARTITIONS]; /* NULL: nothing was ever attached there */
    uint32_t count;                               /* up to the last that is not NULL */
    struct dp_keys *keys;                         /* NULL: all are the first one's */
    bool draining;
    uint64_t next_id;
    uint64_t looks; /* so many times output was looked for */

    /* Streams whose headers are not whole, the longest waiting first. */
    struct dp_stream *first_header, *last_header;
    int64_t body_timeout; /* of whoever attached last; one daemon has one */
    int64_t sweep_at;
    struct dp_latency *latency;
};

/* The partitions from a number on, one after the other; NULL behind the last. */
static inline struct dp_raw *dp_raw_next(const struct dp_raw_front *front, uint32_t *at) {
    while (front && *at < front->count)
        if (front->partitions[(*at)++])
            return front->partitions[*at - 1];
    return NULL;
}

/* Whether headers are read for these slots, if only to be refused. */
static inline bool dp_raw_is_serving(const struct dp_raw *raw) {
    return raw->region && (!raw->broken || raw->stuck);
}

/* raw.c -----------------------------------------------------------------------------------------
 */

/* Give back the slot of an exchange, whatever its state; it is over. */
void dp_raw_let_go(struct dp_raw *raw, struct dp_raw_exchange *exchange);
/* Let go, and have Python refuse the request in words. */
void dp_raw_refuse(struct dp_raw *raw, struct dp_raw_exchange *exchange, enum dp_why why,
                   uint32_t a, uint32_t b);
/* The same for a request with this header, which holds none; `ended`: its end came. */
void dp_raw_refuse_claim(struct dp_raw *raw, struct dp_entry *entry, struct dp_stream *stream,
                         const struct dp_prompt1_request *request, enum dp_why why, bool ended);
/* A header took too long. */
void dp_raw_header_late(struct dp_pump *pump, struct dp_stream *stream);
/* The client left: its slot goes back in this pass. */
void dp_raw_leave(struct dp_raw *raw, struct dp_raw_exchange *exchange);
/* From now on the stream is Python's. What it is to the raw front is wiped out first: the fields
 * are whoever's the stream is. */
void dp_raw_leave_to_python(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream);

static inline void dp_raw_mark(struct dp_stream *stream, enum dp_raw_kind kind, void *app) {
    stream->app_state = kind;
    stream->app = app;
}

/* raw_table.c -----------------------------------------------------------------------------------
 */

extern const struct dp_raw_verbs dp_raw_host, dp_raw_device;

/* Claim a slot for a header that is whole: DP_OK and *out, DP_FULL, DP_UNANSWERED; or DP_PENDING,
 * and the stream stands in line. */
int dp_raw_claim(struct dp_raw *raw, struct dp_entry *entry, struct dp_stream *stream,
                 const struct dp_prompt1_request *request, struct dp_claimed *out);
/* Nobody waits for this claim any more. */
void dp_raw_forget_claim(struct dp_raw *raw, struct dp_stream *stream);
/* Have Python refuse all that stand in line. */
void dp_raw_refuse_claims(struct dp_raw *raw, enum dp_why why);
/* Go on with whatever the device has answered. */
void dp_raw_take_answers(struct dp_raw *raw);
/* When the device is given up if it answers nothing. */
int64_t dp_raw_answer_due(const struct dp_raw *raw);
/* The device does not answer: Python is told, and the region is not read any more. */
void dp_raw_give_up(struct dp_raw *raw);

/* raw_in.c --------------------------------------------------------------------------------------
 */

/* Forget a header that is not waited for any more. */
void dp_raw_forget_header(struct dp_raw_front *front, struct dp_stream *stream);
/* Bytes from the stream's beginning; how many were consumed. */
size_t dp_raw_take_header(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                          const uint8_t *bytes, size_t length, bool fin);
/* In-order bytes of the body; how many were consumed. */
size_t dp_raw_take_body(struct dp_raw_exchange *exchange, const uint8_t *bytes, size_t length,
                        bool fin);

/* raw_out.c -------------------------------------------------------------------------------------
 */

/* Follow a published slot from now on. */
void dp_raw_watch(struct dp_raw *raw, struct dp_raw_exchange *exchange);
void dp_raw_unwatch(struct dp_raw *raw, struct dp_raw_exchange *exchange);
/* Send `count` ids, which lie in the scratch behind the verdict's place; after the 200 if that is
 * due, before the end if there is a finish reason. */
void dp_raw_answer(struct dp_raw *raw, struct dp_raw_exchange *exchange, uint32_t count,
                   uint32_t finish);
/* Break an answer off that began with 200. */
void dp_raw_fail(struct dp_raw_exchange *exchange, uint64_t code);
/* The deadline of a published request passed. */
void dp_raw_expire(struct dp_raw *raw, struct dp_raw_exchange *exchange);
/* The device answered what that asked for. */
void dp_raw_answered(struct dp_raw *raw, const struct dp_answer *answer);
/* Send on what the runtime made, without the verdicts that are due. */
void dp_raw_look(struct dp_raw *raw);
/* The runtime broke a rule: Python is told, and the region is not read any more. */
__attribute__((format(printf, 3, 4))) void dp_raw_break(struct dp_raw *raw, uint32_t slot,
                                                        const char *format, ...);
/* The request holds no slot any more. */
void dp_raw_ended(struct dp_raw *raw, struct dp_raw_exchange *exchange);

/* raw_serve.c -----------------------------------------------------------------------------------
 */

/* The front's own memory, made when it is first asked for; NULL: there is none. */
struct dp_raw_front *dp_raw_of(struct dp_pump *pump);
/* Count the difference of two CLOCK_REALTIME stamps; in us, 0 if it is negative. */
uint32_t dp_raw_record(struct dp_raw *raw, enum dp_raw_series series, int64_t difference_ns);
/* A header or body is waited for. */
void dp_raw_expect(struct dp_pump *pump);
/* Slots of this partition that a connection holds in WRITING. */
uint32_t dp_raw_writing_of(const struct dp_raw *raw, const struct dp_entry *entry);
/* Count the deadline of a request from its arrival. */
void dp_raw_set_deadline(struct dp_raw *raw, struct dp_raw_exchange *exchange);

#endif
