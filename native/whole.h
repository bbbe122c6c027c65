/* A plain HTTP/3 request that came whole: read, claimed, written and published in one call, on the
 * host table. The same verbs as for one that comes in pieces.
 *
 * This header is also the cffi declaration. */
#ifndef DP_WHOLE_H
#define DP_WHOLE_H

#include "http3.h"
#include "keys.h"
#include "latency.h"
#include "tokens.h"

#define DP_NOT_PLAIN 1

/* Which slots serve, and how. */
struct dp_whole {
    struct dp_region *region;
    struct dp_latency *latency;
    uint32_t owner, first, count; /* the listener and its slots */
    uint32_t series; /* of the time to the claim; the next one is that to the publish */
    uint32_t null;   /* revoke at publish: nobody takes */
    uint32_t next;   /* where the next probe begins */
};

struct dp_served {
    int64_t status; /* DP_OK; DP_FULL; DP_NOT_PLAIN, or another status of dp_submit, and then
                       nothing has happened */
    uint64_t generation;
    int64_t queue_ns; /* from `complete_ns` to the claim */
    int64_t published_ns;
    uint32_t slot, free_left; /* as dp_claimed has them */
    uint32_t queue_us, ingress_us;
    uint32_t n_tokens, max_output, id_bytes, padding;
    uint8_t id[DP_H3_ID_MAX];
};

/* dp_h3_plain on bytes [at, at + size): the number that its API key leads to, and *out for
 * dp_serve_whole; -1: not known, or a key that is Python's to refuse. */
int64_t dp_read_whole(struct dp_keys *keys, const uint8_t *bytes, uint32_t at, uint32_t size,
                      struct dp_h3_plain *out);

/* dp_h3_plain on bytes [at, at + size), unless `plain` has what it said of them, then dp_admit of a
 * greedy request that may have any slot, then dp_submit with its whole body. Both times are counted
 * when it was published and neither is negative: a clock that went back is the caller's to count.
 */
void dp_serve_whole(struct dp_whole *whole, uint64_t now_s, uint64_t request_id,
                    const uint8_t *bytes, uint32_t at, uint32_t size,
                    const struct dp_h3_plain *plain, int64_t complete_ns, struct dp_served *out);

#endif
