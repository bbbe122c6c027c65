/* An ordered set of numbers as half-open ranges, bounded: packet numbers received, stream bytes
 * received out of order, stream bytes acknowledged. Not a cdef. */
#ifndef DP_RANGES_H
#define DP_RANGES_H

#include <stdbool.h>
#include <stdint.h>

struct dp_pool;

struct dp_range {
    uint64_t from, to; /* [from, to) */
};

/* Ascending, neither touching nor overlapping. Grows by doubling, out of the pool, up to `limit`.
 * All zero is an empty set. */
struct dp_ranges {
    struct dp_range *range;
    uint32_t count;
    uint32_t room;
};

void dp_ranges_free(struct dp_ranges *ranges, struct dp_pool *pool);
/* Add [from, to). False, and nothing changed: it would take more than `limit` ranges, or there is
 * no memory. */
bool dp_ranges_add(struct dp_ranges *ranges, struct dp_pool *pool, uint32_t limit, uint64_t from,
                   uint64_t to);
/* Whether [from, to) could be added. */
bool dp_ranges_fits(const struct dp_ranges *ranges, uint32_t limit, uint64_t from, uint64_t to);
/* Whether any number of [from, to) is in the set. */
bool dp_ranges_touch(const struct dp_ranges *ranges, uint64_t from, uint64_t to);
bool dp_ranges_have(const struct dp_ranges *ranges, uint64_t number);
/* Take out everything below `from`. */
void dp_ranges_trim(struct dp_ranges *ranges, uint64_t from);
/* Take out the lowest range. */
void dp_ranges_drop_lowest(struct dp_ranges *ranges);
/* Take [from, to) out. False: that would take more than `limit` ranges. */
bool dp_ranges_remove(struct dp_ranges *ranges, struct dp_pool *pool, uint32_t limit, uint64_t from,
                      uint64_t to);

#endif
