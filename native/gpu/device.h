/* What the host thread of a runtime with the `device` table does: it tells the kernels where
 * everything lies, sleeps until there is a command for them, and rings the listeners, since no
 * kernel can write an eventfd.
 *
 * This header is also the cffi declaration; both compilers read it. */
#ifndef DP_DEVICE_H
#define DP_DEVICE_H

#include "ring.h"

/* What a device keeps of a ring, in its own memory: a kernel that ends goes on where it stopped. */
struct dp_cursor {
    uint64_t next; /* position of the next command */
    /* The last claim, as a command's word names a slot; 0: it was refused. */
    uint64_t claimed;
    uint8_t line[48];
};

/* Where everything lies, as the device addresses it; in device memory, behind it the slots' words.
 * Fixed once written, so a captured graph may keep its address. */
struct dp_device {
    uint64_t *words; /* in device memory: the only ones that are swapped */
    uint64_t *states;
    uint64_t *mirrors;
    uint64_t *progress;
    struct dp_request *requests;
    uint8_t *prompts;
    uint8_t *outputs;
    uint8_t *rings;
    struct dp_resident *resident;
    uint64_t prompt_stride;
    uint64_t output_stride;
    uint64_t ring_bytes;
    uint32_t slots;
    uint32_t listeners;
    uint32_t entries;
    uint32_t context;
    uint32_t max_output;
    uint32_t padding[3]; /* the cursors begin on a line */
    struct dp_cursor cursors[DP_MAX_LISTENERS];
};

/* Bytes of device memory for the above and the words. */
size_t dp_device_bytes(const struct dp_region *region);
/* Fill `image` (dp_device_bytes of them) with what goes to device memory at `address`, for a region
 * that the device sees at `mapped`. */
void dp_device_image(struct dp_region *region, uint64_t mapped, uint64_t address, void *image);

/* Commands wait in some ring. */
int dp_device_pending(struct dp_region *region);
/* Block until that is so, `cancel_fd` is readable or the time is over; as dp_runtime_wait. */
int dp_device_wait(struct dp_region *region, int cancel_fd, int timeout_ms, uint32_t spin_us);

/* What one thread has seen of the device's words, to tell what is new. */
struct dp_bell;
struct dp_bell *dp_bell_new(struct dp_region *region);
void dp_bell_free(struct dp_bell *bell);
/* Ring each sleeping listener for which there is something new, and `work_fd` (-1: none) when a
 * slot has become READY or CANCELLING since. Whether anything was new. */
int dp_bell_ring(struct dp_bell *bell, int work_fd);
/* The same again and again for so long, between short sleeps: while a kernel stays resident.
 * Whether anything was new. */
int dp_bell_attend(struct dp_bell *bell, int work_fd, uint32_t us);

/* The words of struct dp_resident: the stop flag, the last stamp (0: none yet), and the offset by
 * which dp_slot_take tells CLOCK_REALTIME (clock.h). */
void dp_device_stop(struct dp_region *region, int stop);
uint64_t dp_device_beat(struct dp_region *region);
void dp_device_set_offset(struct dp_region *region, int64_t offset_ns);

#endif
