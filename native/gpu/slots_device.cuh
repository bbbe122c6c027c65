/* The runtime's side of the slots, for kernels: take a READY slot, read its prompt where it lies,
 * emit, see a cancellation, finish. Any kernel may include this file; one thread at a time acts for
 * a slot, others may read its prompt and write its output between two __syncthreads().
 *
 * Rules. A slot's word is swapped in device memory alone. Before the swap that gives a slot away
 * everything of it is written, its mirror included, so a mirror never goes back. Two states are the
 * device's own, since a finish has to be told to the host before the slot can be another's:
 *
 *   FINISHING  a finish won; the runtime still writes the mirror, and makes it DONE
 *   ABANDONED  the listener let go meanwhile; whoever finishes makes it FREE
 *
 * To the host both are DONE and FREE already. A prompt is read by ordinary loads: the acquire of
 * dp_slot_take makes them see what was published, and the non-coherent path must not be used for
 * it (no __ldg, no const __restrict__). */
#ifndef DP_SLOTS_DEVICE_CUH
#define DP_SLOTS_DEVICE_CUH

#include "words.cuh"

#define DP_FINISHING 6
#define DP_ABANDONED 7

DP_DEVICE int dp_word_state(uint64_t word) {
    return (int)(word & DP_STATE_MASK);
}

DP_DEVICE uint64_t dp_word_generation(uint64_t word) {
    return word >> DP_GENERATION_SHIFT;
}

DP_DEVICE uint64_t dp_word_with(uint64_t word, int state) {
    return (word & ~(uint64_t)DP_STATE_MASK) | (uint64_t)state;
}

DP_DEVICE const int32_t *dp_slot_prompt(const dp_device *device, uint32_t slot) {
    return (const int32_t *)(device->prompts + slot * device->prompt_stride);
}

DP_DEVICE uint32_t *dp_slot_output(const dp_device *device, uint32_t slot) {
    return (uint32_t *)(device->outputs + slot * device->output_stride);
}

/* What the request may have: its own numbers, within what the slot has room for. */
DP_DEVICE uint32_t dp_slot_tokens(const dp_device *device, uint32_t slot) {
    uint32_t tokens = device->requests[slot].n_tokens;
    return tokens < device->context ? tokens : device->context;
}

DP_DEVICE uint32_t dp_slot_room(const dp_device *device, uint32_t slot) {
    uint32_t room = device->requests[slot].max_output;
    return room < device->max_output ? room : device->max_output;
}

DP_DEVICE bool dp_slot_is_ready(const dp_device *device, uint32_t slot) {
    return dp_word_state(dp_gpu_load_relaxed(&device->words[slot])) == DP_READY;
}

/* CLOCK_REALTIME in ns, as the host keeps its distance (clock.h). */
DP_DEVICE int64_t dp_realtime_on_device(const dp_device *device) {
    int64_t timer = dp_timer_ns();
    return timer + (int64_t)dp_sys_load_relaxed(&device->resident->offset.value);
}

/* Take a READY slot: DP_RUNNING and its generation, or DP_ILLEGAL. */
DP_DEVICE int dp_slot_take(const dp_device *device, uint32_t slot, uint64_t *generation) {
    uint64_t word = dp_gpu_load_relaxed(&device->words[slot]);
    if (dp_word_state(word) != DP_READY)
        return DP_ILLEGAL;
    uint64_t running = dp_word_with(word, DP_RUNNING);
    /* Acquires the prompt and the request, which the admission kernel's acquire handed on. */
    if (!dp_gpu_cas(&device->words[slot], &word, running))
        return DP_ILLEGAL;
    *generation = dp_word_generation(running);
    device->requests[slot].taken_ns = dp_realtime_on_device(device);
    dp_sys_store_release(&device->mirrors[slot], running);
    return DP_RUNNING;
}

DP_DEVICE bool dp_slot_is_cancelled(const dp_device *device, uint32_t slot, uint64_t generation) {
    uint64_t word = dp_gpu_load_relaxed(&device->words[slot]);
    return dp_word_generation(word) == generation && dp_word_state(word) == DP_CANCELLING;
}

/* Output ids of this request that are out. Only the runtime writes the progress word. */
DP_DEVICE uint32_t dp_slot_emitted(const dp_device *device, uint32_t slot, uint64_t generation) {
    uint64_t progress = dp_sys_load_relaxed(&device->progress[slot]);
    return dp_word_generation(progress) == generation ? (uint32_t)progress & DP_COUNT_MASK : 0;
}

/* Say that the first `count` output ids are written, where the block wrote them itself; the caller
 * holds the slot and stays within dp_slot_room. */
DP_DEVICE void dp_slot_show(const dp_device *device, uint32_t slot, uint64_t generation,
                            uint32_t count) {
    /* Releases the ids to the listener's acquire. */
    dp_sys_store_release(&device->progress[slot],
                         generation << DP_GENERATION_SHIFT | (uint64_t)count);
}

/* Append ids: DP_OK, DP_STALE or DP_ILLEGAL when the request is over, DP_OVERFLOW (and nothing was
 * written) beyond what it allows. */
DP_DEVICE int dp_slot_emit(const dp_device *device, uint32_t slot, uint64_t generation,
                           const int32_t *ids, uint32_t count) {
    uint64_t word = dp_gpu_load_acquire(&device->words[slot]);
    if (dp_word_generation(word) != generation)
        return DP_STALE;
    if (dp_word_state(word) != DP_RUNNING && dp_word_state(word) != DP_CANCELLING)
        return DP_ILLEGAL;
    uint32_t out = dp_slot_emitted(device, slot, generation);
    uint32_t room = dp_slot_room(device, slot);
    if (out > room || count > room - out)
        return DP_OVERFLOW;
    uint32_t *to = dp_slot_output(device, slot) + out;
    for (uint32_t i = 0; i < count; i++)
        to[i] = (uint32_t)ids[i];
    dp_slot_show(device, slot, generation, out + count);
    return DP_OK;
}

/* A slot that only this thread can move becomes FREE: the mirror first. */
DP_DEVICE int dp_slot_give_back(const dp_device *device, uint32_t slot, uint64_t word) {
    uint64_t free_word = dp_word_with(word, DP_FREE);
    dp_sys_store_release(&device->mirrors[slot], free_word);
    /* Releases what the runtime read of the slot to the next claim's swap. */
    dp_gpu_store_release(&device->words[slot], free_word);
    return DP_FREE;
}

/* End the request: DP_DONE; DP_FREE when nobody waits for it any more; or a negative status. */
DP_DEVICE int dp_slot_finish(const dp_device *device, uint32_t slot, uint64_t generation,
                             uint32_t reason) {
    uint64_t *at = &device->words[slot];
    uint64_t word = dp_gpu_load_acquire(at);
    for (;;) {
        if (dp_word_generation(word) != generation)
            return DP_STALE;
        if (dp_word_state(word) == DP_CANCELLING)
            return dp_slot_give_back(device, slot, word);
        if (dp_word_state(word) != DP_RUNNING)
            return DP_ILLEGAL;
        /* From here a cancel comes too late. */
        if (dp_gpu_cas(at, &word, dp_word_with(word, DP_FINISHING)))
            break;
    }
    device->requests[slot].finish_reason = reason;
    uint64_t done = dp_word_with(word, DP_DONE);
    dp_sys_store_release(&device->mirrors[slot], done);
    word = dp_word_with(word, DP_FINISHING);
    if (dp_gpu_cas(at, &word, done))
        return DP_DONE;
    return dp_slot_give_back(device, slot, word);
}

#endif
