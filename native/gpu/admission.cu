/* Admission on the device: what listeners post in their rings is carried out on the slots' words in
 * device memory (ring.h has the words, slots_device.cuh the rules).
 *
 * One block, a thread for each listener's ring, and nothing that one waits for of another: a ring
 * that nobody serves any more, or is full of nonsense, holds up no one else. No shared memory, no
 * barrier, no warp intrinsics. A listener can touch only slots that it owns. */
#include "slots_device.cuh"

#define PROBED_AT_ONCE 8  /* loads in flight: one after the other costs a round trip each */
#define BUSY_POLLS     64 /* empty looks before a resident kernel naps between them */
#define LOOKS_A_STOP   16 /* looks at the ring for each look at the stop flag */

DP_DEVICE dp_ring *ring_at(const dp_device *device, uint32_t ring) {
    return (dp_ring *)(device->rings + ring * device->ring_bytes);
}

DP_DEVICE dp_command *entry_at(const dp_device *device, uint32_t ring, uint64_t position) {
    dp_command *entries = (dp_command *)(ring_at(device, ring) + 1);
    return &entries[position & (device->entries - 1)];
}

DP_DEVICE uint64_t lap_of(const dp_device *device, uint64_t position) {
    return position / device->entries % DP_LAPS + 1;
}

DP_DEVICE uint32_t ten_bits(uint64_t word, int shift) {
    return (uint32_t)(word >> shift) & DP_COMMAND_TEN_BITS;
}

DP_DEVICE uint64_t owner_bits(uint32_t ring) {
    return (uint64_t)(ring + 1) << DP_OWNER_SHIFT;
}

/* Which slot under which generation, as commands and verdicts have it. */
DP_DEVICE uint64_t name_of(uint32_t slot, uint64_t word) {
    return (uint64_t)slot << DP_COMMAND_SLOT_SHIFT | dp_word_generation(word)
                                                         << DP_COMMAND_GENERATION;
}

/* What this side changed, told to the host; before the swap where that gives the slot away. */
DP_DEVICE void mirror(const dp_device *device, uint32_t slot, uint64_t word) {
    dp_sys_store_release(&device->states[slot], word);
}

/* Claim ---------------------------------------------------------------------------------------- */

DP_DEVICE bool claim_one(dp_device *device, uint32_t ring, uint32_t slot, uint64_t seen,
                         uint64_t *name) {
    while (dp_word_state(seen) == DP_FREE) {
        uint64_t generation = (dp_word_generation(seen) + 1) & (~0ull >> DP_GENERATION_SHIFT);
        uint64_t claimed = generation << DP_GENERATION_SHIFT | owner_bits(ring) | DP_WRITING;
        /* Acquires what the last holder read and wrote. */
        if (dp_gpu_cas(&device->words[slot], &seen, claimed)) {
            mirror(device, slot, claimed);
            *name = name_of(slot, claimed);
            device->cursors[ring].claimed = *name | DP_COMMAND_CLAIM;
            return true;
        }
    }
    return false;
}

/* Each slot of the range is looked at once, from `start` on; the first that is FREE is taken. */
DP_DEVICE int claim(dp_device *device, uint32_t ring, uint64_t command, uint64_t *name) {
    uint32_t first = ten_bits(command, 4), count = ten_bits(command, 14) + 1;
    uint32_t start = ten_bits(command, 24), probes = ten_bits(command, 34) + 1;
    device->cursors[ring].claimed = 0;
    if (first + count > device->slots || start >= count || probes > count)
        return DP_ILLEGAL;
    for (uint32_t probe = 0; probe < probes; probe += PROBED_AT_ONCE) {
        uint64_t seen[PROBED_AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < PROBED_AT_ONCE; i++) {
            uint32_t at = (start + probe + i) % count;
            seen[i] = probe + i < probes ? dp_gpu_load_relaxed(&device->words[first + at]) : ~0ull;
        }
#pragma unroll
        for (uint32_t i = 0; i < PROBED_AT_ONCE; i++)
            if (claim_one(device, ring, first + (start + probe + i) % count, seen[i], name))
                return DP_WRITING;
    }
    return DP_FULL;
}

/* Verbs on a slot that is held; `word` is the slot's, as the caller checked it -------------------
 */

/* WRITING and DONE are this side's alone, so nothing can come between mirror and swap. */
DP_DEVICE int give_back(dp_device *device, uint32_t slot, uint64_t word) {
    uint64_t freed = dp_word_with(word, DP_FREE);
    mirror(device, slot, freed);
    if (!dp_gpu_cas(&device->words[slot], &word, freed))
        return DP_ILLEGAL;
    return DP_FREE;
}

DP_DEVICE int publish(dp_device *device, uint32_t slot, uint64_t word) {
    uint64_t ready = dp_word_with(word, DP_READY);
    mirror(device, slot, ready);
    /* Releases the prompt, which this thread's load of the command acquired, to the take. */
    if (!dp_gpu_cas(&device->words[slot], &word, ready))
        return DP_ILLEGAL;
    return DP_READY;
}

/* First out of the runtime's reach, then FREE. */
DP_DEVICE int revoke(dp_device *device, uint32_t slot, uint64_t word) {
    uint64_t withdrawn = dp_word_with(word, DP_WRITING);
    if (!dp_gpu_cas(&device->words[slot], &word, withdrawn))
        return DP_ILLEGAL;
    return give_back(device, slot, withdrawn);
}

/* A runtime that finished first has told so in its own mirror, or will; this side's is as before.
 * Only the listener that waits for this verdict watches the slot. */
DP_DEVICE int cancel(dp_device *device, uint32_t slot, uint64_t word) {
    uint64_t cancelling = dp_word_with(word, DP_CANCELLING);
    mirror(device, slot, cancelling);
    if (dp_gpu_cas(&device->words[slot], &word, cancelling))
        return DP_CANCELLING;
    mirror(device, slot, dp_word_with(word, DP_READY));
    return DP_ILLEGAL;
}

DP_DEVICE int release(dp_device *device, uint32_t slot, uint64_t word) {
    if (dp_word_state(word) == DP_FINISHING) {
        /* The mirror of DONE was seen before the word is DONE: whoever finishes gives it back. */
        if (dp_gpu_cas(&device->words[slot], &word, dp_word_with(word, DP_ABANDONED)))
            return DP_FREE;
    }
    return dp_word_state(word) == DP_DONE ? give_back(device, slot, word) : DP_ILLEGAL;
}

/* Whatever ends the hold. The runtime can be faster twice: it takes, and it finishes. */
DP_DEVICE int let_go(dp_device *device, uint32_t slot, uint64_t word) {
    for (int attempt = 0; attempt < 4; attempt++) {
        int to = DP_ILLEGAL;
        switch (dp_word_state(word)) {
        case DP_WRITING:
            return give_back(device, slot, word);
        case DP_READY:
            to = revoke(device, slot, word);
            break;
        case DP_RUNNING:
            to = cancel(device, slot, word);
            break;
        case DP_FINISHING:
        case DP_DONE:
            return release(device, slot, word);
        default:
            return DP_ILLEGAL;
        }
        if (to >= 0)
            return to;
        word = dp_gpu_load_acquire(&device->words[slot]);
    }
    return DP_ILLEGAL;
}

DP_DEVICE int let_go_all(dp_device *device, uint32_t ring) {
    uint64_t owner = (uint64_t)DP_OWNER_MASK << DP_OWNER_SHIFT;
    for (uint32_t slot = 0; slot < device->slots; slot++) {
        uint64_t word = dp_gpu_load_acquire(&device->words[slot]);
        if ((word & owner) == owner_bits(ring))
            let_go(device, slot, word);
    }
    return DP_FREE;
}

DP_DEVICE int act(dp_device *device, int kind, uint32_t slot, uint64_t word) {
    int state = dp_word_state(word);
    if (kind == DP_COMMAND_LET_GO)
        return let_go(device, slot, word);
    if (kind == DP_COMMAND_RELEASE)
        return release(device, slot, word);
    if (kind == DP_COMMAND_PUBLISH && state == DP_WRITING)
        return publish(device, slot, word);
    if (kind == DP_COMMAND_ABORT && state == DP_WRITING)
        return give_back(device, slot, word);
    if (kind == DP_COMMAND_REVOKE && state == DP_READY)
        return revoke(device, slot, word);
    if (kind == DP_COMMAND_CANCEL && state == DP_RUNNING)
        return cancel(device, slot, word);
    return DP_ILLEGAL;
}

/* Commands ------------------------------------------------------------------------------------- */

/* A command that names a slot: it is carried out if this ring's listener holds it so. */
DP_DEVICE int on_slot(dp_device *device, uint32_t ring, int kind, uint64_t name) {
    uint32_t slot = ten_bits(name, DP_COMMAND_SLOT_SHIFT);
    if (slot >= device->slots)
        return DP_ILLEGAL;
    uint64_t word = dp_gpu_load_acquire(&device->words[slot]);
    uint64_t held =
        name << (64 - DP_COMMAND_LAP_SHIFT) >> (64 - DP_COMMAND_LAP_SHIFT) >> DP_COMMAND_GENERATION;
    uint64_t owner = (uint64_t)DP_OWNER_MASK << DP_OWNER_SHIFT;
    if (dp_word_generation(word) != held || (word & owner) != owner_bits(ring))
        return DP_STALE;
    return act(device, kind, slot, word);
}

DP_DEVICE int carry_out(dp_device *device, uint32_t ring, uint64_t command, uint64_t *name) {
    int kind = (int)(command & DP_COMMAND_KIND_MASK);
    *name = command & ~(uint64_t)DP_COMMAND_KIND_MASK;
    if (kind == DP_COMMAND_CLAIM)
        return claim(device, ring, command, name);
    if (kind == DP_COMMAND_LET_GO_ALL)
        return let_go_all(device, ring);
    if (kind != DP_COMMAND_ABANDON)
        return on_slot(device, ring, kind, command);
    uint64_t claimed = device->cursors[ring].claimed;
    return claimed ? on_slot(device, ring, DP_COMMAND_ABORT, claimed) : DP_ILLEGAL;
}

/* Carries out the next command of a ring; false when there is none. */
DP_DEVICE bool serve_one(dp_device *device, uint32_t ring) {
    uint64_t position = device->cursors[ring].next, name = 0;
    dp_command *entry = entry_at(device, ring, position);
    /* Acquires what the listener wrote into the slot before it posted. */
    uint64_t command = dp_sys_load_acquire(&entry->command);
    uint64_t lap = lap_of(device, position);
    if (command >> DP_COMMAND_LAP_SHIFT != lap)
        return false;
    int result = carry_out(device, ring, command, &name);
    device->cursors[ring].next = position + 1;
    uint64_t unmarked = name << (64 - DP_COMMAND_LAP_SHIFT) >> (64 - DP_COMMAND_LAP_SHIFT);
    /* Releases the mirrors, and what the last holder did in the slot. */
    dp_sys_store_release(&entry->verdict, unmarked | (uint64_t)(result & DP_COMMAND_KIND_MASK) |
                                              lap << DP_COMMAND_LAP_SHIFT);
    dp_sys_store_release(&ring_at(device, ring)->consumed.value, position + 1);
    return true;
}

/* Kernels, of one block with a thread for each listener ------------------------------------------
 */

/* For the host to keep the distance of the clocks (clock.h). */
DP_DEVICE void stamp(const dp_device *device) {
    dp_sys_store_relaxed(&device->resident->beat.value, (uint64_t)dp_timer_ns());
}

/* A tick: what has been posted, at most `most` commands a ring. The stamp is its last act, since
 * the host looks at it when the tick is over: the less lies between, the less the bound is off. */
extern "C" __global__ void __launch_bounds__(128)
    dp_admission_tick(dp_device *device, unsigned most) {
    if (threadIdx.x >= device->listeners)
        return;
    for (unsigned i = 0; i < most && serve_one(device, threadIdx.x); i++)
        ;
    if (threadIdx.x == 0)
        stamp(device);
}

/* Stays for `polls` looks at each ring, or until the stop flag is set; the host launches it again,
 * and it goes on where it was. */
extern "C" __global__ void __launch_bounds__(128)
    dp_admission_resident(dp_device *device, unsigned polls, unsigned nap_ns) {
    if (threadIdx.x >= device->listeners)
        return;
    unsigned idle = 0;
    for (unsigned poll = 0; poll < polls; poll++) {
        if (poll % LOOKS_A_STOP == 0) {
            if (dp_sys_load_relaxed(&device->resident->stop.value))
                return;
            if (threadIdx.x == 0)
                stamp(device);
        }
        if (serve_one(device, threadIdx.x))
            idle = 0;
        else if (++idle > BUSY_POLLS)
            __nanosleep(nap_ns);
    }
}
