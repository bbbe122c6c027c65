/* Ordered ranges in one array. Nearly every addition is at the top, right behind the last range or
 * a little above it, so the search looks there first and bisects only below. */
#include "ranges.h"

#include <string.h>

#include "pool.h"

/* The index of the lowest range that ends at `number` or later; `count` when none does. */
static uint32_t reaching(const struct dp_ranges *ranges, uint64_t number) {
    uint32_t high = ranges->count;
    if (high == 0 || ranges->range[high - 1].to < number)
        return high;
    high--;
    if (ranges->range[high].from <= number)
        return high;
    uint32_t low = 0;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (ranges->range[middle].to < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The same, but the range has to go beyond `number`: the lowest that has `number` or is above. */
static uint32_t beyond(const struct dp_ranges *ranges, uint64_t number) {
    uint32_t i = reaching(ranges, number);
    return i < ranges->count && ranges->range[i].to == number ? i + 1 : i;
}

static bool grow(struct dp_ranges *ranges, struct dp_pool *pool) {
    size_t bytes = 0;
    size_t wanted = ranges->room ? 2 * (size_t)ranges->room : 1;
    struct dp_range *range = dp_pool_take(pool, wanted * sizeof *range, &bytes);
    if (!range)
        return false;
    if (ranges->count)
        memcpy(range, ranges->range, ranges->count * sizeof *range);
    dp_pool_give(pool, ranges->range, ranges->room * sizeof *range);
    ranges->range = range;
    ranges->room = (uint32_t)(bytes / sizeof *range);
    return true;
}

/* Make place for one range at `i`, and put it there. */
static bool insert(struct dp_ranges *ranges, struct dp_pool *pool, uint32_t limit, uint32_t i,
                   struct dp_range added) {
    if (ranges->count >= limit || (ranges->count == ranges->room && !grow(ranges, pool)))
        return false;
    memmove(ranges->range + i + 1, ranges->range + i, (ranges->count - i) * sizeof added);
    ranges->range[i] = added;
    ranges->count++;
    return true;
}

/* Take the ranges [from, to) out of the array. */
static void cut(struct dp_ranges *ranges, uint32_t from, uint32_t to) {
    if (from == to)
        return;
    memmove(ranges->range + from, ranges->range + to, (ranges->count - to) * sizeof *ranges->range);
    ranges->count -= to - from;
}

void dp_ranges_free(struct dp_ranges *ranges, struct dp_pool *pool) {
    dp_pool_give(pool, ranges->range, ranges->room * sizeof *ranges->range);
    *ranges = (struct dp_ranges){0};
}

bool dp_ranges_add(struct dp_ranges *ranges, struct dp_pool *pool, uint32_t limit, uint64_t from,
                   uint64_t to) {
    if (from >= to)
        return true;
    uint32_t i = reaching(ranges, from);
    if (i == ranges->count || ranges->range[i].from > to)
        return insert(ranges, pool, limit, i, (struct dp_range){from, to});
    struct dp_range *merged = &ranges->range[i];
    if (merged->from > from)
        merged->from = from;
    if (merged->to >= to)
        return true;
    uint32_t end = i + 1;
    while (end < ranges->count && ranges->range[end].from <= to)
        end++;
    uint64_t last = ranges->range[end - 1].to;
    merged->to = last > to ? last : to;
    cut(ranges, i + 1, end);
    return true;
}

bool dp_ranges_fits(const struct dp_ranges *ranges, uint32_t limit, uint64_t from, uint64_t to) {
    if (from >= to || ranges->count < limit)
        return true;
    uint32_t i = reaching(ranges, from);
    return i < ranges->count && ranges->range[i].from <= to;
}

bool dp_ranges_touch(const struct dp_ranges *ranges, uint64_t from, uint64_t to) {
    if (from >= to)
        return false;
    uint32_t i = beyond(ranges, from);
    return i < ranges->count && ranges->range[i].from < to;
}

bool dp_ranges_have(const struct dp_ranges *ranges, uint64_t number) {
    uint32_t i = beyond(ranges, number);
    return i < ranges->count && ranges->range[i].from <= number;
}

void dp_ranges_trim(struct dp_ranges *ranges, uint64_t from) {
    cut(ranges, 0, beyond(ranges, from));
    if (ranges->count && ranges->range[0].from < from)
        ranges->range[0].from = from;
}

void dp_ranges_drop_lowest(struct dp_ranges *ranges) {
    if (ranges->count)
        cut(ranges, 0, 1);
}

bool dp_ranges_remove(struct dp_ranges *ranges, struct dp_pool *pool, uint32_t limit, uint64_t from,
                      uint64_t to) {
    if (from >= to)
        return true;
    uint32_t i = beyond(ranges, from);
    if (i == ranges->count || ranges->range[i].from >= to)
        return true;
    struct dp_range *first = &ranges->range[i];
    if (first->from < from && first->to > to) {
        /* The middle of one range: its upper part becomes a range of its own. */
        struct dp_range upper = {to, first->to};
        if (!insert(ranges, pool, limit, i + 1, upper))
            return false;
        ranges->range[i].to = from;
        return true;
    }
    if (first->from < from) {
        first->to = from;
        i++;
    }
    uint32_t end = i;
    while (end < ranges->count && ranges->range[end].to <= to)
        end++;
    cut(ranges, i, end);
    if (i < ranges->count && ranges->range[i].from < to)
        ranges->range[i].from = to;
    return true;
}
