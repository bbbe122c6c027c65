/* The load generator's half of the pump: requests of `prompt/1` or HTTP/3 that are all alike, sent
 * and judged in C, timed by CLOCK_MONOTONIC. This header is also a cdef.
 *
 * An answer that is none (no verdict, no trailer, a trailer that counts other ids than came; frames
 * or fields that HTTP/3 does not allow) is counted as broken, so that a server cannot look fast by
 * answering rubbish. */
#ifndef DP_LOAD_H
#define DP_LOAD_H

#include "pump.h"

/* Events of the load's own, behind those of pump.h. */
enum dp_load_event {
    /* A run is over, stalls or met an answer that is none: see dp_load_progress. */
    DP_EVENT_LOAD = 11,
    /* Nobody listens where a connected socket sends to; `number` says which socket. */
    DP_EVENT_UNREACHABLE = 12,
};

/* What the requests and the answers are. */
enum dp_load_protocol {
    DP_LOAD_RAW = 0,
    DP_LOAD_H3 = 1, /* the control stream and QPACK's are Python's to open */
};

/* What dp_load_run.status says of a request that had no whole answer; else it is the verdict's. */
enum dp_load_status {
    DP_LOAD_RESET = 1,
    DP_LOAD_LOST = 2, /* with its connection, or never begun because none was left */
    DP_LOAD_NONE = 3, /* what came is no answer */
};

/* Why the first answer that was none is none. */
enum dp_load_broken {
    DP_LOAD_MAGIC = 1,   /* a: the four bytes in its place, as a little-endian number */
    DP_LOAD_SHORT = 2,   /* it ended inside its verdict */
    DP_LOAD_TRAILER = 3, /* it ended without its trailer */
    DP_LOAD_COUNT = 4,   /* a: ids that the trailer counts; b: bytes of ids that came */
    /* HTTP/3's. */
    DP_LOAD_CUT = 5,    /* it ended inside a frame, or without a status */
    DP_LOAD_FRAME = 6,  /* a: the type of a frame that may not come there */
    DP_LOAD_FIELDS = 7, /* a field section that cannot be read, or has no status; a: its bytes */
    DP_LOAD_STATUS = 8, /* a: a status that HTTP/3 has not */
};

struct dp_load_run {
    uint64_t requests;  /* in all, over all connections */
    uint32_t streams;   /* in flight at most on one connection */
    double interval_ns; /* between two beginnings, whatever the server does; 0: closed loop */
    int64_t stall_ns;   /* how long nothing may come while something is awaited */
    /* Written, `requests` entries each, in the order in which they came. */
    int64_t *verdict_ns;
    int64_t *total_ns;
    uint32_t *ingress_us;
    uint16_t *status;
};

struct dp_load_progress {
    uint64_t begun, ended;
    uint64_t verdicts, totals, ingresses; /* entries written; `status` has `ended` */
    int64_t start_ns, end_ns;             /* of the run; the end once it is over */
    uint64_t broken_a, broken_b;
    uint32_t why;      /* enum dp_load_broken, of the first */
    uint32_t stalled;  /* nothing came for stall_ns */
    uint32_t broken;   /* answers that were none */
    uint32_t live;     /* connections that are still there */
    uint32_t finished; /* every request ended */
    uint32_t padding;
};

/* The request that every connection of this pump with DP_FRONT_LOAD sends (`protocol`: enum
 * dp_load_protocol), to be told before there are any; the bytes stay the caller's and must live
 * until the pump is freed. 0, or -1. */
int dp_load_request(struct dp_pump *pump, const uint8_t *request, uint32_t size, uint32_t protocol);
/* Begin a run on the connections that are there; the arrays stay until it is finished or stopped.
 * 0, or -1: there is no request, or one run is under way. */
int dp_load_begin(struct dp_pump *pump, const struct dp_load_run *run);
/* Where it stands. */
struct dp_load_progress dp_load_progress(struct dp_pump *pump);
/* Give it up: what is in flight counts as lost, and what still comes for it is ignored. */
void dp_load_stop(struct dp_pump *pump);

#endif
