/* Memory by size classes. Rules:
 *
 * - A class is a power of two from 64 bytes to 1 MiB and has a list of what was given back; memory
 *   carries no header, so the giver says its size. Above that the system's allocator is used as is.
 * - Small classes are carved out of chunks which all of them share, so that a thousand small
 *   objects are a few calls of the allocator. A chunk is freed with the pool.
 * - What nobody holds is poisoned under AddressSanitizer, so that a use after the giving, a second
 *   giving and a write past the end are found as they would be with malloc. The end is the one
 *   that was asked for, unless the taker wanted to hear how much room there is. */
#include "pool.h"

#include <stdbool.h>
#include <stdlib.h>

#ifdef __SANITIZE_ADDRESS__
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif

#ifdef SANITIZED
#include <sanitizer/asan_interface.h>
#define POISON(memory, bytes)   ASAN_POISON_MEMORY_REGION(memory, bytes)
#define UNPOISON(memory, bytes) ASAN_UNPOISON_MEMORY_REGION(memory, bytes)
#define RED_ZONE                64 /* poisoned bytes behind each carved object */
#else
#define POISON(memory, bytes)   ((void)(memory), (void)(bytes))
#define UNPOISON(memory, bytes) ((void)(memory), (void)(bytes))
#define RED_ZONE                0
#endif

#define SMALLEST_SHIFT 6
#define CLASSES        15
#define SMALLEST       ((size_t)1 << SMALLEST_SHIFT)
#define LARGEST        (SMALLEST << (CLASSES - 1))
#define CARVED_MAX     ((size_t)4096) /* the largest class that is carved */
#define CHUNK          ((size_t)65536)
/* The link of a chunk takes a whole unit, so that what is carved keeps its alignment. */
#define CHUNK_HEAD SMALLEST

struct kept {
    struct kept *next;
};

struct chunk {
    struct chunk *next;
};

struct dp_pool {
    struct kept *kept[CLASSES];
    struct chunk *chunks;
    uint8_t *fresh; /* the newest chunk's part that nobody had yet */
    size_t fresh_bytes;
    uint64_t allocations;
    size_t out;
};

static unsigned class_of(size_t bytes) {
    if (bytes <= SMALLEST)
        return 0;
    return (unsigned)(8 * sizeof(long long)) - (unsigned)__builtin_clzll(bytes - 1) -
           SMALLEST_SHIFT;
}

static size_t class_bytes(unsigned class) {
    return SMALLEST << class;
}

static void keep(struct dp_pool *pool, void *memory, unsigned class) {
    struct kept *kept = memory;
    kept->next = pool->kept[class];
    pool->kept[class] = kept;
    POISON(memory, class_bytes(class));
}

static void *take_kept(struct dp_pool *pool, unsigned class) {
    struct kept *kept = pool->kept[class];
    if (kept) {
        UNPOISON(kept, class_bytes(class));
        pool->kept[class] = kept->next;
    }
    return kept;
}

static void *allocate(struct dp_pool *pool, size_t bytes) {
    void *memory = malloc(bytes);
    pool->allocations += memory != NULL;
    return memory;
}

/* Cut a piece off the newest chunk, which has room for it. */
static void *cut(struct dp_pool *pool, unsigned class) {
    uint8_t *memory = pool->fresh;
    pool->fresh += class_bytes(class) + RED_ZONE;
    pool->fresh_bytes -= class_bytes(class) + RED_ZONE;
    UNPOISON(memory, class_bytes(class));
    return memory;
}

/* What is left of a chunk when a larger piece is wanted goes to the lists, so nothing is wasted. */
static void shred(struct dp_pool *pool) {
    for (unsigned class = class_of(CARVED_MAX) + 1; class-- > 0;)
        while (pool->fresh_bytes >= class_bytes(class) + RED_ZONE)
            keep(pool, cut(pool, class), class);
}

static bool add_chunk(struct dp_pool *pool) {
    struct chunk *chunk = aligned_alloc(SMALLEST, CHUNK);
    if (!chunk)
        return false;
    pool->allocations++;
    shred(pool);
    chunk->next = pool->chunks;
    pool->chunks = chunk;
    pool->fresh = (uint8_t *)chunk + CHUNK_HEAD;
    pool->fresh_bytes = CHUNK - CHUNK_HEAD;
    POISON(pool->fresh, pool->fresh_bytes);
    return true;
}

static void *carve(struct dp_pool *pool, unsigned class) {
    if (pool->fresh_bytes < class_bytes(class) + RED_ZONE && !add_chunk(pool))
        return NULL;
    return cut(pool, class);
}

struct dp_pool *dp_pool_new(void) {
    return calloc(1, sizeof(struct dp_pool));
}

void dp_pool_free(struct dp_pool *pool) {
    if (!pool)
        return;
    for (unsigned class = class_of(CARVED_MAX) + 1; class < CLASSES; class++)
        for (void *memory; (memory = take_kept(pool, class));)
            free(memory);
    while (pool->chunks) {
        struct chunk *chunk = pool->chunks;
        pool->chunks = chunk->next;
        UNPOISON(chunk, CHUNK);
        free(chunk);
    }
    free(pool);
}

void *dp_pool_take(struct dp_pool *pool, size_t bytes, size_t *room) {
    void *memory;
    size_t asked = bytes;
    if (bytes > LARGEST) {
        memory = allocate(pool, bytes);
    } else {
        unsigned class = class_of(bytes);
        bytes = class_bytes(class);
        memory = take_kept(pool, class);
        if (!memory)
            memory = bytes <= CARVED_MAX ? carve(pool, class) : allocate(pool, bytes);
    }
    if (!memory)
        return NULL;
    pool->out += bytes;
    if (room)
        *room = bytes;
    else if (asked >= sizeof(struct kept)) /* the list needs that much when it comes back */
        POISON((uint8_t *)memory + asked, bytes - asked);
    return memory;
}

void dp_pool_give(struct dp_pool *pool, void *memory, size_t bytes) {
    if (!memory)
        return;
    if (bytes > LARGEST) {
        pool->out -= bytes;
        free(memory);
        return;
    }
    unsigned class = class_of(bytes);
    pool->out -= class_bytes(class);
    keep(pool, memory, class);
}

uint64_t dp_pool_allocations(const struct dp_pool *pool) {
    return pool->allocations;
}

size_t dp_pool_out(const struct dp_pool *pool) {
    return pool->out;
}
