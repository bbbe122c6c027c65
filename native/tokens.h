/* Token IDs from the wire into a slot's buffer, checked as they are written.
 *
 * This header is also the cffi declaration. */
#ifndef DP_TOKENS_H
#define DP_TOKENS_H

#include "region.h"

/* Start a body of n_tokens ids of `width` bytes (2 or 4) in a slot that is held in WRITING. */
void dp_write_begin(struct dp_region *region, uint32_t slot, uint32_t n_tokens, uint32_t width);
/* Append bytes [offset, offset + len) of the little-endian body: DP_OK, DP_OVERFLOW (more bytes
 * than declared) or DP_BAD_TOKEN (writers[slot].bad_index and .bad_id say which). After an error
 * the slot's buffer is of no use; the caller aborts. */
int dp_write(struct dp_region *region, uint32_t slot, const uint8_t *body, size_t offset,
             size_t len);
/* The same for ids of 4 bytes that lie in the slot already, since they were decrypted to where they
 * belong: check the whole ones of the `len` bytes behind what was written, and count them. What is
 * left of `len` is the beginning of an id, and counts as partial until the next call, which begins
 * with it once more. DP_OK, DP_OVERFLOW or DP_BAD_TOKEN. */
int dp_check_placed(struct dp_region *region, uint32_t slot, size_t len);
/* 1 when every declared byte was written. */
int dp_write_complete(struct dp_region *region, uint32_t slot);

/* The way of every request, in as few calls as it has decisions:
 * dp_admit claims a slot (dp_claim), writes into it what the request states (dp_describe) and makes
 * it ready for its body (dp_write_begin): DP_OK and *out, or DP_FULL. */
int dp_admit(struct dp_region *region, uint32_t owner, uint32_t first, uint32_t count,
             uint32_t start, uint32_t probes, uint64_t request_id, uint32_t n_tokens,
             uint32_t width, uint32_t max_output, float temperature, float top_p, uint32_t top_k,
             uint32_t seed, struct dp_claimed *out);
/* dp_submit appends the body's last part (dp_write) and publishes: when (published_ns), or DP_SHORT
 * or another status, and then the slot is still in WRITING. */
int64_t dp_submit(struct dp_region *region, uint32_t slot, uint64_t generation, const uint8_t *body,
                  size_t offset, size_t len);

/* Copy the output ids [start, stop) of a slot to `to` (4 bytes each, little-endian), each loaded
 * once and that value checked: DP_OK, DP_BAD_TOKEN (writers[slot].bad_index and .bad_id say which
 * id is outside the vocabulary) or DP_OVERFLOW (the slot has no such ids). */
int dp_copy_output(struct dp_region *region, uint32_t slot, uint32_t start, uint32_t stop,
                   uint8_t *to);

#endif
