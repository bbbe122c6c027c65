/* Making, opening and checking the region. The daemon makes it; nothing in it is trusted later. */
#define _GNU_SOURCE
#include "region.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "atomics.h"
#include "gpu/ring.h"

#define REGION_MAGIC UINT64_C(0x314E474552504444) /* "DDPREGN1" */
#define PAGE         4096

_Static_assert(sizeof(struct dp_word) == 64 && sizeof(struct dp_flag) == 64, "one line each");
_Static_assert(sizeof(struct dp_request) == 128, "a line for each side");
_Static_assert(offsetof(struct dp_request, taken_ns) == 64, "the runtime's line");
_Static_assert(sizeof(struct dp_command) == 64 && sizeof(struct dp_ring) == 128, "whole lines");
_Static_assert(offsetof(struct dp_region_header, heartbeat) % 64 == 0, "lines are aligned");

static uint64_t align(uint64_t value, uint64_t to) {
    return (value + to - 1) / to * to;
}

const char *dp_geometry_error(const struct dp_geometry *geometry) {
    if (geometry->table != DP_TABLE_HOST && geometry->table != DP_TABLE_DEVICE)
        return "table must be host or device";
    if (geometry->slots < 1 || geometry->slots > DP_MAX_SLOTS)
        return "slots must be 1 to 1024";
    if (geometry->context < 1 || geometry->context > DP_MAX_CONTEXT)
        return "context must be 1 to 1048576";
    if (geometry->max_output < 1 || geometry->max_output > DP_MAX_OUTPUT)
        return "max_output must be 1 to 262144";
    if (geometry->vocab_size < 1 || geometry->vocab_size > INT32_MAX)
        return "vocab_size must be 1 to 2147483647";
    if (geometry->listeners < 1 || geometry->listeners > DP_MAX_LISTENERS)
        return "listeners must be 1 to 16";
    return NULL;
}

void dp_layout_of(const struct dp_geometry *geometry, struct dp_layout *layout) {
    uint64_t slots = geometry->slots;
    layout->prompt_stride = align((uint64_t)geometry->context * 4, 256);
    layout->output_stride = align((uint64_t)geometry->max_output * 4, 256);
    layout->states = align(sizeof(struct dp_region_header), PAGE);
    layout->progress = align(layout->states + slots * 8, PAGE);
    layout->requests = align(layout->progress + slots * 8, PAGE);
    uint64_t end = layout->requests + slots * sizeof(struct dp_request);
    bool device = geometry->table == DP_TABLE_DEVICE;
    layout->mirrors = align(end, PAGE);
    layout->resident = align(layout->mirrors + (device ? slots * 8 : 0), PAGE);
    layout->rings = align(layout->resident + (device ? sizeof(struct dp_resident) : 0), PAGE);
    layout->ring_bytes = sizeof(struct dp_ring) +
                         dp_ring_entries(geometry->slots) * (uint64_t)sizeof(struct dp_command);
    layout->ring_bytes = device ? align(layout->ring_bytes, PAGE) : 0;
    layout->prompts = align(layout->rings + geometry->listeners * layout->ring_bytes, PAGE);
    layout->outputs = align(layout->prompts + slots * layout->prompt_stride, PAGE);
    layout->bytes = align(layout->outputs + slots * layout->output_stride, PAGE);
}

/* Private bookkeeping for a mapping; takes the mapping over, also when it fails. */
static struct dp_region *adopt(void *base, const struct dp_geometry *geometry, bool writers) {
    struct dp_layout layout;
    dp_layout_of(geometry, &layout);
    struct dp_region *region = calloc(1, sizeof *region);
    if (region && writers && !(region->writers = calloc(geometry->slots, sizeof *region->writers)))
        free(region), region = NULL;
    if (!region) {
        munmap(base, layout.bytes);
        errno = ENOMEM;
        return NULL;
    }
    region->base = base;
    region->header = base;
    region->geometry = *geometry;
    region->layout = layout;
    region->states = (uint64_t *)(region->base + layout.states);
    region->progress = (uint64_t *)(region->base + layout.progress);
    if (geometry->table == DP_TABLE_DEVICE)
        region->mirrors = (uint64_t *)(region->base + layout.mirrors);
    region->requests = (struct dp_request *)(region->base + layout.requests);
    region->doorbell = -1;
    for (int i = 0; i < DP_MAX_LISTENERS; i++)
        region->outputs[i] = -1;
    return region;
}

static void write_header(struct dp_region *region, uint64_t attachment, uint64_t generation) {
    struct dp_region_header *header = region->header;
    header->abi = DP_ABI;
    header->header_bytes = sizeof *header;
    header->attachment = attachment;
    header->geometry = region->geometry;
    header->layout = region->layout;
    /* A handle of an older region must not fit: generations start anywhere. */
    for (uint32_t i = 0; i < region->geometry.slots; i++) {
        dp_store_relaxed(&region->states[i], generation << DP_GENERATION_SHIFT | DP_FREE);
        if (region->mirrors)
            dp_store_relaxed(&region->mirrors[i], generation << DP_GENERATION_SHIFT | DP_FREE);
    }
    header->magic = REGION_MAGIC;
}

static void *map_new(int fd, uint64_t bytes) {
    /* fallocate before the mapping: memory that is not there is an error here and not a SIGBUS. */
    if (ftruncate(fd, (off_t)bytes) < 0 || fallocate(fd, 0, 0, (off_t)bytes) < 0)
        return MAP_FAILED;
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return MAP_FAILED;
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
}

struct dp_region *dp_region_create(const struct dp_geometry *geometry, uint64_t attachment,
                                   uint64_t first_generation, int *fd) {
    if (dp_geometry_error(geometry)) {
        errno = EINVAL;
        return NULL;
    }
    struct dp_layout layout;
    dp_layout_of(geometry, &layout);
    int memfd = memfd_create("dataplane-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memfd < 0)
        return NULL;
    void *base = map_new(memfd, layout.bytes);
    struct dp_region *region = base == MAP_FAILED ? NULL : adopt(base, geometry, true);
    if (!region) {
        int why = errno;
        close(memfd);
        errno = why;
        return NULL;
    }
    madvise(base, layout.bytes, MADV_DONTFORK);
    region->attachment = attachment;
    write_header(region, attachment, first_generation);
    *fd = memfd;
    return region;
}

uint32_t dp_ring_entries(uint32_t slots) {
    uint32_t entries = DP_RING_SMALLEST;
    while (entries < slots * 6 + DP_RING_SMALLEST / 2)
        entries *= 2;
    return entries;
}

static const char *check_header(const struct dp_region_header *header, uint64_t bytes) {
    struct dp_layout expected;
    if (header->magic != REGION_MAGIC)
        return "the region does not begin with the magic";
    if (header->abi != DP_ABI)
        return "the region has another ABI version";
    if (header->header_bytes != sizeof *header)
        return "the region's header has another size";
    if (dp_geometry_error(&header->geometry))
        return "the region's geometry is out of bounds";
    dp_layout_of(&header->geometry, &expected);
    if (memcmp(&expected, &header->layout, sizeof expected) != 0)
        return "the region's offsets are not what its geometry asks for";
    if (expected.bytes != bytes)
        return "the region's file has another size than its geometry asks for";
    return NULL;
}

struct dp_region *dp_region_open(int fd, const char **error) {
    struct stat file;
    int seals = fcntl(fd, F_GET_SEALS);
    *error = "the region's descriptor is no sealed memory file";
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
        return NULL;
    if (fstat(fd, &file) < 0 || (uint64_t)file.st_size < sizeof(struct dp_region_header))
        return NULL;
    *error = "the region cannot be mapped: too little memory or a limit";
    uint64_t bytes = (uint64_t)file.st_size;
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED)
        return NULL;
    madvise(base, bytes, MADV_DONTFORK);
    struct dp_region_header header = *(struct dp_region_header *)base;
    *error = check_header(&header, bytes);
    if (*error) {
        munmap(base, bytes);
        return NULL;
    }
    struct dp_region *region = adopt(base, &header.geometry, false);
    if (!region)
        *error = "no memory for the region's bookkeeping";
    else
        region->attachment = header.attachment;
    return region;
}

void dp_region_close(struct dp_region *region) {
    if (!region)
        return;
    munmap(region->base, region->layout.bytes);
    free(region->writers);
    free(region);
}

int32_t *dp_prompt(struct dp_region *region, uint32_t slot) {
    return (int32_t *)(region->base + region->layout.prompts + slot * region->layout.prompt_stride);
}

uint32_t *dp_output(struct dp_region *region, uint32_t slot) {
    return (uint32_t *)(region->base + region->layout.outputs +
                        slot * region->layout.output_stride);
}
