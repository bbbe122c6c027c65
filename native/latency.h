/* Latency histograms over sliding windows, in constant memory.
 *
 * This header is also the cffi declaration. Buckets are those of an HdrHistogram of 1 us to 60 s
 * with three digits (index as in its reference implementation), so counts can be handed to any
 * implementation of it. A window is a sum of slices: 1 s slices serve windows up to 10 s, 10 s
 * slices those up to 300 s. Beside the windows stands what was counted since the start, under the
 * few fixed bounds that a scraper asks for.
 *
 * One thread records; others may read meanwhile, without a lock. A reader may then miss the value
 * that is being counted, or find it in the one of two places and not yet in the other (the slices
 * of 1 s and of 10 s, the totals, their sum). While a slice is used again the reader sees it as
 * empty, or still with a part of what stood in it a turn ago, which is about to leave the longest
 * window that it serves. Nothing of that lasts: once the recording thread is through, reads are
 * exact. */
#ifndef DP_LATENCY_H
#define DP_LATENCY_H

#include <stdint.h>

#define DP_LATENCY_MAX_US       60000000
#define DP_LATENCY_BUCKETS      17408
#define DP_LATENCY_WINDOW_MAX_S 300
#define DP_LATENCY_BOUNDS       21

struct dp_latency;

struct dp_latency *dp_latency_new(uint32_t series);
void dp_latency_free(struct dp_latency *latency);
/* Count one value; now_s is a monotonic clock in seconds. Values beyond the range count at its end.
 * Series count from 0; one that is not there records nothing and reads as empty. */
void dp_latency_record(struct dp_latency *latency, uint32_t series, int64_t value_us,
                       uint64_t now_s);
/* Two values at once, for `series` and the one behind it. */
void dp_latency_record_pair(struct dp_latency *latency, uint32_t series, int64_t first_us,
                            int64_t second_us, uint64_t now_s);
/* Sum the slices of the last window_s seconds into counts[DP_LATENCY_BUCKETS]: one past the highest
 * bucket in use. What lies from there on is not written. */
uint32_t dp_latency_window(struct dp_latency *latency, uint32_t series, uint32_t window_s,
                           uint64_t now_s, uint64_t *counts);
/* Since the start: within[i] gets how many values are at most dp_latency_bounds_us[i], the last one
 * of DP_LATENCY_BOUNDS + 1 how many there are. Their sum in us. */
uint64_t dp_latency_total(struct dp_latency *latency, uint32_t series, uint64_t *within);
extern const uint32_t dp_latency_bounds_us[DP_LATENCY_BOUNDS];
uint32_t dp_latency_bucket(int64_t value_us);
/* The largest value that falls into a bucket, in us. */
int64_t dp_latency_bucket_high(uint32_t bucket);

#endif
