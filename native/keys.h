/* API keys: whose request this is, by the SHA-256 of the key that it carries.
 *
 * A table never changes, but each look-up takes its digest context: one thread at a time, and who
 * needs it in two makes two. How long a look-up takes tells of hashes at most, which nobody can
 * choose (dataplane/tenants.py). This header is also the cffi declaration. */
#ifndef DP_KEYS_H
#define DP_KEYS_H

#include <stddef.h>
#include <stdint.h>

#define DP_KEY_DIGEST 32

struct dp_keys;

/* `count` digests, one behind the other, and the number that each leads to. NULL: no memory, or no
 * SHA-256. */
struct dp_keys *dp_keys_new(const uint8_t *digests, const uint32_t *numbers, uint32_t count);
void dp_keys_free(struct dp_keys *keys);
/* The number of a key, -1 for one that is empty or unknown. Allocates nothing. */
int64_t dp_keys_find(struct dp_keys *keys, const uint8_t *key, size_t bytes);

#endif
