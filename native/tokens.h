/* Token IDs from the wire into a slot's buffer, checked as they are written.
 *
 * This header is also the cffi declaration. */
#ifndef DP_TOKENS_H
#define DP_TOKENS_H

#include "region.h"

/* Start a body of n_tokens ids of `width` bytes (2 or 4) in a slot that is held in WRITING. */
void dp_write_begin(struct dp_region *region, uint32_t slot, uint32_t n_tokens, uint32_t width);
/* Append bytes [offset, offset + len) of the little-endian body: DP_OK, DP_OVERFLOW (more bytes than declared) or
 * DP_BAD_TOKEN (writers[slot].bad_index and .bad_id say which). After an error the slot's buffer is
 * of no use; the caller aborts. */
int dp_write(struct dp_region *region, uint32_t slot, const uint8_t *body, size_t offset,
             size_t len);
/* 1 when every declared byte was written. */
int dp_write_complete(struct dp_region *region, uint32_t slot);

#endif
