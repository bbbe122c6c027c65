/* Memory by size classes: what is given back is kept and given out again, so that in the steady
 * state no packet reaches the allocator. One pool a pump; not thread-safe. Not a cdef. */
#ifndef DP_POOL_H
#define DP_POOL_H

#include <stddef.h>
#include <stdint.h>

struct dp_pool;

struct dp_pool *dp_pool_new(void);
/* Give everything back that is kept; what is out must be back. */
void dp_pool_free(struct dp_pool *pool);
/* At least `bytes` bytes, not cleared; NULL: no memory. `*room` gets how many there are, when it is
 * not NULL. */
void *dp_pool_take(struct dp_pool *pool, size_t bytes, size_t *room);
/* Give memory back that was taken with this room (or with any `bytes` of the same class). */
void dp_pool_give(struct dp_pool *pool, void *memory, size_t bytes);
/* Calls of the system's allocator so far, and bytes that are out. */
uint64_t dp_pool_allocations(const struct dp_pool *pool);
size_t dp_pool_out(const struct dp_pool *pool);

#endif
