/* `prompt/1` without the interpreter: header, claim, write, publish, verdict, output, trailer
 * (contract 3), for the connections whose front is DP_FRONT_RAW, on either slot table.
 *
 * Handles what is as it should be, and 429. Everything that has to be refused in words goes to
 * Python, which has the words: a stream whose header is not in order is handed over whole (DATA
 * events from its first byte), a request that went wrong later as a DP_EVENT_REFUSED. The rules and
 * their order are those of dataplane/ingress.py and dataplane/egress.py, which stay the reference;
 * tests compare the two. This header is also a cdef. */
#ifndef DP_RAW_H
#define DP_RAW_H

#include "../keys.h"
#include "../latency.h"
#include "pump.h"

/* Why a request is refused that held a slot, or would have got one. */
enum dp_why {
    DP_WHY_BAD_TOKEN = 1,   /* a: index, b: id */
    DP_WHY_OVERFLOW = 2,    /* the body is longer than declared */
    DP_WHY_SHORT = 3,       /* a: whole ids that came, b: bytes of the next */
    DP_WHY_LATE = 4,        /* body or deadline; a: whole ids that came in time */
    DP_WHY_LOST = 5,        /* the runtime, before the 200 */
    DP_WHY_HEADER_LATE = 6, /* a: bytes of the header that came in time; no slot was held */
    DP_WHY_STUCK = 7,       /* the device does not answer; no slot was held */
};

struct dp_refused {
    uint64_t request_id;
    uint32_t why;
    uint32_t a, b;
    uint32_t n_tokens;
    uint32_t queue_us;
    uint32_t partition; /* of no meaning with DP_WHY_HEADER_LATE */
};

#define DP_RAW_PARTITIONS 64 /* at most */

struct dp_raw_config {
    uint32_t partition; /* whose slots these are, from 0 */
    uint32_t owner;     /* the listener's number in the region, from 1 */
    uint32_t first, count;
    uint32_t max_writing;   /* slots that a connection may hold in WRITING; 0: half, rounded up */
    uint32_t null;          /* release each slot at publish and answer without output; host table */
    int64_t body_timeout;   /* ns */
    int64_t answer_timeout; /* ns after which a device that does not answer is given up */
};

/* Since the start, for all attachments of a partition. */
struct dp_raw_stats {
    uint64_t claimed, completed, cancelled, failed;
    uint64_t ok, busy; /* answers 200 and 429 written here */
    uint64_t negative; /* differences of clocks that were dropped */
    double hold_s;     /* smoothed time that a request holds its slot */
};

/* Serve whose API key has one of these SHA-256 digests, of DP_KEY_DIGEST bytes each, from the slots
 * of the partition that stands at the same place of `partitions`. Whoever has none of them is
 * Python's to refuse. Without this call all are served from partition 0, whatever their key. To be
 * called before anything is attached. 0, or -1: it was called before, a partition cannot be, or no
 * memory. */
int dp_raw_set_keys(struct dp_pump *pump, const uint8_t *digests, const uint32_t *partitions,
                    uint32_t count);
/* Serve from these slots. The region stays until dp_raw_detach came back. `busy_reason` is what a
 * 429 says when every slot is taken, at most 256 bytes; a connection that is at its cap is
 * Python's. 0, or -1: that partition has something attached already, the configuration does not
 * fit, or no memory.
 *
 * After a DP_EVENT_BROKEN (its number says of which partition) the region is not read any more:
 * what is in flight there stands still and its headers go to Python, until dp_raw_detach. The same
 * after a DP_EVENT_STUCK, except that whoever would be admitted is refused (DP_WHY_STUCK). */
int dp_raw_attach(struct dp_pump *pump, struct dp_region *region,
                  const struct dp_raw_config *config, const char *busy_reason);
/* A partition's runtime is gone: what was in flight ends, refused before its 200, reset with `code`
 * after it. Nothing of the region is touched any more once this is back. */
void dp_raw_detach(struct dp_pump *pump, uint32_t partition, uint32_t code);
/* End everything in flight as above, in every partition, and go on serving. */
void dp_raw_end_all(struct dp_pump *pump, uint32_t code);
/* From now on headers go to Python, which refuses them (503). */
void dp_raw_drain(struct dp_pump *pump);
/* Of all partitions together, hold_s by how many each served. */
struct dp_raw_stats dp_raw_stats(struct dp_pump *pump);
struct dp_raw_stats dp_raw_partition_stats(struct dp_pump *pump, uint32_t partition);
/* The histograms of these requests, series as in dataplane/latency.py: read without the lock, which
 * is the owner's; a value that is being counted may be missed. */
struct dp_latency *dp_raw_latency(struct dp_pump *pump);
/* Break off the answer on a stream that nobody reads (code 3), as the listener's housekeeping asks.
 * 1: it was this front's. */
int dp_raw_unread(struct dp_pump *pump, uint64_t connection, uint64_t stream, uint32_t code);
/* Requests of this front that hold a slot now. */
uint32_t dp_raw_in_flight(struct dp_pump *pump);
/* Slots that a connection holds in WRITING through this front, in all partitions or in one: what
 * Python says of a connection that is at its cap. */
uint32_t dp_raw_writing(struct dp_pump *pump, uint64_t connection);
uint32_t dp_raw_writing_in(struct dp_pump *pump, uint64_t connection, uint32_t partition);

#endif
