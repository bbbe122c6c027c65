/* See device.h. */
#define _GNU_SOURCE
#include "device.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../atomics.h"

#define ATTEND_NAP_NS 20000

static struct dp_ring *ring_of(struct dp_region *region, uint32_t listener) {
    return (struct dp_ring *)(region->base + region->layout.rings +
                              listener * region->layout.ring_bytes);
}

static struct dp_resident *resident_of(struct dp_region *region) {
    return (struct dp_resident *)(region->base + region->layout.resident);
}

/* What the device gets ------------------------------------------------------------------------- */

size_t dp_device_bytes(const struct dp_region *region) {
    return sizeof(struct dp_device) + (size_t)region->geometry.slots * 8;
}

void dp_device_image(struct dp_region *region, uint64_t mapped, uint64_t address, void *image) {
    const struct dp_layout *layout = &region->layout;
    struct dp_device device = {
        .words = (uint64_t *)(address + sizeof(struct dp_device)),
        .states = (uint64_t *)(mapped + layout->states),
        .mirrors = (uint64_t *)(mapped + layout->mirrors),
        .progress = (uint64_t *)(mapped + layout->progress),
        .requests = (struct dp_request *)(mapped + layout->requests),
        .prompts = (uint8_t *)(mapped + layout->prompts),
        .outputs = (uint8_t *)(mapped + layout->outputs),
        .rings = (uint8_t *)(mapped + layout->rings),
        .resident = (struct dp_resident *)(mapped + layout->resident),
        .prompt_stride = layout->prompt_stride,
        .output_stride = layout->output_stride,
        .ring_bytes = layout->ring_bytes,
        .slots = region->geometry.slots,
        .listeners = region->geometry.listeners,
        .entries = dp_ring_entries(region->geometry.slots),
        .context = region->geometry.context,
        .max_output = region->geometry.max_output,
    };
    /* The generations start where the region's do, so no handle of another region fits. */
    uint64_t *words = (uint64_t *)((uint8_t *)image + sizeof device);
    memcpy(image, &device, sizeof device);
    for (uint32_t slot = 0; slot < region->geometry.slots; slot++)
        words[slot] = dp_load_relaxed(&region->states[slot]);
}

/* Sleeping ------------------------------------------------------------------------------------- */

int dp_device_pending(struct dp_region *region) {
    for (uint32_t i = 0; i < region->geometry.listeners; i++) {
        struct dp_ring *ring = ring_of(region, i);
        /* Signed: a listener that died may have posted one more than it counted. */
        if ((int64_t)(dp_load_acquire(&ring->posted.value) -
                      dp_load_acquire(&ring->consumed.value)) > 0)
            return 1;
    }
    return 0;
}

static int spin_for_commands(struct dp_region *region, uint32_t spin_us) {
    int64_t until = dp_realtime_ns() + (int64_t)spin_us * 1000;
    do {
        for (int i = 0; i < 32; i++) {
            if (dp_device_pending(region))
                return 1;
            dp_cpu_relax();
        }
    } while (dp_realtime_ns() < until);
    return 0;
}

int dp_device_wait(struct dp_region *region, int cancel_fd, int timeout_ms, uint32_t spin_us) {
    struct pollfd fds[2] = {{.fd = region->doorbell, .events = POLLIN},
                            {.fd = cancel_fd, .events = POLLIN | POLLRDHUP}};
    if (dp_device_pending(region) || (spin_us && spin_for_commands(region, spin_us)))
        return 1;
    uint32_t *sleeping = &region->header->runtime_sleeping.value;
    dp_store_flag(sleeping, 1);
    dp_fence_full();
    int work = dp_device_pending(region);
    int ready = work ? 0 : poll(fds, 2, timeout_ms);
    dp_store_flag(sleeping, 0);
    if (ready > 0 && fds[0].revents) {
        uint64_t rung;
        ssize_t ignored = read(region->doorbell, &rung, sizeof rung);
        (void)ignored;
    }
    if (ready > 0 && fds[1].revents)
        return -1;
    return work || dp_device_pending(region);
}

/* Ringing -------------------------------------------------------------------------------------- */

struct seen {
    uint64_t state, mirror, progress;
};

struct dp_bell {
    struct dp_region *region;
    uint64_t consumed[DP_MAX_LISTENERS];
    struct seen slots[];
};

struct dp_bell *dp_bell_new(struct dp_region *region) {
    struct dp_bell *bell = calloc(1, sizeof *bell + region->geometry.slots * sizeof(struct seen));
    if (bell)
        bell->region = region;
    return bell;
}

void dp_bell_free(struct dp_bell *bell) {
    free(bell);
}

/* Looks at a slot: the owner that has something new to read (0: nobody), and whether there is
 * something new for the kernels to do. */
static uint32_t look(struct dp_bell *bell, uint32_t slot, bool *work, bool *any) {
    struct dp_region *region = bell->region;
    struct seen *seen = &bell->slots[slot];
    struct seen now = {.state = dp_load_acquire(&region->states[slot]),
                       .mirror = dp_load_acquire(&region->mirrors[slot]),
                       .progress = dp_load_acquire(&region->progress[slot])};
    int state = (int)(now.state & DP_STATE_MASK);
    if (now.state != seen->state && (state == DP_READY || state == DP_CANCELLING))
        *work = true;
    bool moved = now.mirror != seen->mirror || now.progress != seen->progress;
    *any |= moved || now.state != seen->state;
    *seen = now;
    return moved ? (now.mirror >> DP_OWNER_SHIFT) & DP_OWNER_MASK : 0;
}

int dp_bell_ring(struct dp_bell *bell, int work_fd) {
    struct dp_region *region = bell->region;
    uint32_t listeners = region->geometry.listeners, wake = 0;
    bool work = false, any = false;
    for (uint32_t slot = 0; slot < region->geometry.slots; slot++) {
        uint32_t owner = look(bell, slot, &work, &any);
        if (owner && owner <= listeners)
            wake |= UINT32_C(1) << (owner - 1);
    }
    for (uint32_t i = 0; i < listeners; i++) {
        uint64_t consumed = dp_load_acquire(&ring_of(region, i)->consumed.value);
        if (consumed != bell->consumed[i]) {
            bell->consumed[i] = consumed;
            wake |= UINT32_C(1) << i;
        }
    }
    for (uint32_t i = 0; i < listeners; i++)
        if (wake >> i & 1)
            dp_wake_listener(region, i + 1);
    if (work && work_fd >= 0) {
        const uint64_t one = 1;
        ssize_t ignored = write(work_fd, &one, sizeof one);
        (void)ignored;
    }
    return any || wake;
}

int dp_bell_attend(struct dp_bell *bell, int work_fd, uint32_t us) {
    const struct timespec nap = {.tv_nsec = ATTEND_NAP_NS};
    int64_t until = dp_realtime_ns() + (int64_t)us * 1000;
    int any = 0;
    do {
        if (dp_bell_ring(bell, work_fd))
            any = 1;
        else
            nanosleep(&nap, NULL);
    } while (dp_realtime_ns() < until);
    return dp_bell_ring(bell, work_fd) || any;
}

/* The words of struct dp_resident ------------------------------------------------------------- */

void dp_device_stop(struct dp_region *region, int stop) {
    dp_store_release(&resident_of(region)->stop.value, (uint64_t)stop);
}

uint64_t dp_device_beat(struct dp_region *region) {
    return dp_load_relaxed(&resident_of(region)->beat.value);
}

void dp_device_set_offset(struct dp_region *region, int64_t offset_ns) {
    dp_store_relaxed(&resident_of(region)->offset.value, (uint64_t)offset_ns);
}
