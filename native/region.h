/* The region: one sealed memfd that the daemon makes at attachment and both sides map.
 *
 * This header is also the cffi declaration. Offsets are computed from the geometry by dp_layout
 * alone; the header in the region repeats them so that the other side can check that both were
 * built alike. */
#ifndef DP_REGION_H
#define DP_REGION_H

#include "slots.h"

#define DP_ABI           1
#define DP_MAX_SLOTS     1024
#define DP_MAX_CONTEXT   1048576
#define DP_MAX_OUTPUT    262144
#define DP_MAX_LISTENERS 16

enum dp_table {
    DP_TABLE_HOST = 1,
    DP_TABLE_DEVICE = 2,
};

struct dp_geometry {
    uint32_t table;
    uint32_t slots;
    uint32_t context;
    uint32_t max_output;
    uint32_t vocab_size;
    uint32_t listeners;
};

/* Byte offsets from the region's start. */
struct dp_layout {
    /* u64[slots], dense so that a probe reads few lines. With the device table the words that are
     * swapped lie in the device, and these mirror what the admission kernel changed. */
    uint64_t states;
    uint64_t progress; /* u64[slots], dense so that a poll reads few lines */
    uint64_t requests; /* struct dp_request[slots] */
    uint64_t prompts;  /* i32[slots][prompt_stride / 4] */
    uint64_t outputs;  /* u32[slots][output_stride / 4] */
    uint64_t prompt_stride;
    uint64_t output_stride;
    uint64_t bytes;
    /* With the device table only, else nothing lies there (gpu/ring.h). */
    uint64_t mirrors;  /* u64[slots]: what the runtime's kernels changed */
    uint64_t resident; /* struct dp_resident */
    uint64_t rings;    /* struct dp_ring[listeners], each of ring_bytes */
    uint64_t ring_bytes;
};

/* A word that one side sets often, alone on its cache line. */
struct dp_word {
    uint64_t value;
    uint8_t line[56];
};

struct dp_flag {
    uint32_t value;
    uint8_t line[60];
};

struct dp_region_header {
    uint64_t magic;
    uint32_t abi;
    uint32_t header_bytes;
    uint64_t attachment;
    struct dp_geometry geometry;
    struct dp_layout layout;
    uint8_t pad[48];

    struct dp_word heartbeat; /* the runtime's pulse: a thread of its own */
    struct dp_word step;      /* the engine's loop */
    struct dp_flag runtime_sleeping;
    struct dp_flag listener_sleeping[DP_MAX_LISTENERS];
};

/* Where a slot's next id goes; listener's own memory. A body arrives split at any byte. */
struct dp_writer {
    uint32_t n_tokens; /* declared */
    uint32_t written;  /* ids stored so far */
    uint32_t bad_index;
    uint32_t bad_id;
    uint8_t width; /* bytes an id on the wire: 2 or 4 */
    uint8_t partial_bytes;
    uint8_t partial[4];
};

/* A mapped region and the eventfds that go with it; private memory of each process. */
struct dp_region {
    uint8_t *base;
    struct dp_region_header *header;
    uint64_t *states;
    uint64_t *mirrors; /* NULL: the host table */
    uint64_t *progress;
    struct dp_request *requests;
    struct dp_geometry geometry; /* a checked copy: the mapped one is never read again */
    struct dp_layout layout;
    struct dp_writer *writers; /* [slots], NULL on the runtime's side */
    uint64_t attachment;
    int doorbell;
    int outputs[DP_MAX_LISTENERS];
};

/* NULL when the geometry is within bounds, else what is not (a static text). */
const char *dp_geometry_error(const struct dp_geometry *geometry);
/* Fill *layout; the geometry must be within bounds. */
void dp_layout_of(const struct dp_geometry *geometry, struct dp_layout *layout);

/* Daemon's side: make the memfd (sized, sealed against shrinking, growing and further seals), map
 * it, and write the header. *fd is the caller's. Eventfds are the caller's to set and close.
 * NULL on failure, with errno. */
struct dp_region *dp_region_create(const struct dp_geometry *geometry, uint64_t attachment,
                                   uint64_t first_generation, int *fd);
/* Runtime's side: map and check. NULL with a static text in *error. The fd stays the caller's. */
struct dp_region *dp_region_open(int fd, const char **error);
/* Unmap and free. Nobody may hold a view or be inside a call. */
void dp_region_close(struct dp_region *region);

int32_t *dp_prompt(struct dp_region *region, uint32_t slot);
uint32_t *dp_output(struct dp_region *region, uint32_t slot);

#endif
