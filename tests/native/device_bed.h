/* What the C test of the raw front on a `device` table stands on: a device that carries out
 * commands as gpu/admission.cu does, on words of its own and only when it is told to, and the
 * runtime in it.
 */
#ifndef DEVICE_BED_H
#define DEVICE_BED_H

#include "raw_bed.h"

#include "gpu/ring.h"
#include "pump/raw_inside.h"

#define ANSWER     (900 * INT64_C(1000000))
#define GENERATION (~UINT64_C(0) >> 24)

static uint64_t words[SLOTS]; /* the device's own */
static uint64_t carried_out;

/* The device ----------------------------------------------------------------------------------- */

static inline struct dp_ring *ring(void) {
    return (struct dp_ring *)(region->base + region->layout.rings +
                              (OWNER - 1) * region->layout.ring_bytes);
}

static inline struct dp_command *entry_of(uint64_t position) {
    return (struct dp_command *)(ring() + 1) + position % dp_ring_entries(SLOTS);
}

static inline uint64_t lap_of(uint64_t position) {
    return position / dp_ring_entries(SLOTS) % DP_LAPS + 1;
}

static inline int word_state(uint32_t slot) {
    return (int)(words[slot] & 0xFF);
}

static inline void become(uint32_t slot, int state) {
    words[slot] = (words[slot] & ~UINT64_C(0xFF)) | (uint64_t)state;
}

static inline int listener_does(uint32_t slot, int event) {
    int to = dp_next_state(event, word_state(slot));
    if (to >= 0) {
        become(slot, to);
        dp_store_release(&region->states[slot], words[slot]);
    }
    return to;
}

static inline int let_go(uint32_t slot) {
    static const int way_out[] = {[DP_WRITING] = DP_ABORT,
                                  [DP_READY] = DP_REVOKE,
                                  [DP_RUNNING] = DP_CANCEL,
                                  [DP_DONE] = DP_RELEASE};
    int state = word_state(slot);
    bool held = state != DP_FREE && state != DP_CANCELLING;
    return held ? listener_does(slot, way_out[state]) : DP_ILLEGAL;
}

static inline int carry_out_claim(uint64_t command, uint64_t *name) {
    uint32_t count = (uint32_t)(command >> 14 & 0x3FF) + 1, at = command >> 24 & 0x3FF;
    for (uint32_t probe = 0; probe < (uint32_t)(command >> 34 & 0x3FF) + 1; probe++) {
        uint32_t slot = (at + probe) % count;
        if (word_state(slot) != DP_FREE)
            continue;
        uint64_t generation = ((words[slot] >> 24) + 1) & GENERATION;
        words[slot] = generation << 24 | OWNER << 8 | DP_WRITING;
        dp_store_release(&region->states[slot], words[slot]);
        *name = (uint64_t)slot << 4 | generation << 14;
        return DP_WRITING;
    }
    return DP_FULL;
}

static inline int carry_out(uint64_t command, uint64_t *name) {
    static const int events[] = {[DP_COMMAND_PUBLISH] = DP_PUBLISH,
                                 [DP_COMMAND_ABORT] = DP_ABORT,
                                 [DP_COMMAND_REVOKE] = DP_REVOKE,
                                 [DP_COMMAND_CANCEL] = DP_CANCEL,
                                 [DP_COMMAND_RELEASE] = DP_RELEASE};
    int kind = (int)(command & 0xF);
    uint32_t slot = command >> 4 & 0x3FF;
    *name = command & ((UINT64_C(1) << 54) - 1) & ~UINT64_C(0xF);
    if (kind == DP_COMMAND_CLAIM)
        return carry_out_claim(command, name);
    if (kind == DP_COMMAND_LET_GO_ALL) {
        for (slot = 0; slot < SLOTS; slot++)
            let_go(slot);
        return DP_FREE;
    }
    CHECK(slot < SLOTS && kind != DP_COMMAND_ABANDON);
    if (words[slot] >> 24 != (command >> 14 & GENERATION))
        return DP_STALE;
    return kind == DP_COMMAND_LET_GO ? let_go(slot) : listener_does(slot, events[kind]);
}

/* Answer what was posted, at most `most` commands; how many there were. */
static inline uint32_t device_runs_for(uint32_t most) {
    uint32_t done = 0;
    for (; done < most; done++, carried_out++) {
        struct dp_command *entry = entry_of(carried_out);
        uint64_t command = dp_load_acquire(&entry->command), name;
        if (command >> 54 != lap_of(carried_out))
            break;
        uint64_t result = (uint64_t)carry_out(command, &name) & 0xF;
        dp_store_release(&entry->verdict, name | result | lap_of(carried_out) << 54);
        dp_store_release(&ring()->consumed.value, carried_out + 1);
    }
    return done;
}

static inline uint32_t device_runs(void) {
    return device_runs_for(UINT32_MAX);
}

/* The runtime, which runs there too. */
static inline void runtime_does(uint32_t slot, int event) {
    int to = dp_next_state(event, word_state(slot));
    CHECK(to >= 0);
    if (event == DP_TAKE)
        region->requests[slot].taken_ns = dp_realtime_ns();
    become(slot, to);
    dp_store_release(&region->mirrors[slot], words[slot]);
}

static inline void runtime_emits(uint32_t slot, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        dp_output(region, slot)[i] = (uint32_t)nth_output(i);
    dp_store_release(&region->progress[slot], words[slot] >> 24 << 24 | count);
}

static inline void runtime_finishes(uint32_t slot, uint32_t reason) {
    region->requests[slot].finish_reason = reason;
    runtime_does(slot, DP_FINISH);
}

static inline void free_all(void) {
    device_runs();
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        if (word_state(slot) == DP_CANCELLING)
            runtime_does(slot, DP_FINISH);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        CHECK(word_state(slot) == DP_FREE);
}

/* Cases ----------------------------------------------------------------------------------------
 */

static inline void make_device_region(void) {
    struct dp_geometry geometry = {.table = DP_TABLE_DEVICE,
                                   .slots = SLOTS,
                                   .context = TOKENS,
                                   .max_output = TOKENS,
                                   .vocab_size = VOCAB,
                                   .listeners = OWNER};
    int fd;
    region = dp_region_create(&geometry, 1, UINT64_C(0xFFFFFFFFF0), &fd);
    CHECK(region);
    close(fd);
    region->doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    for (uint32_t i = 0; i < OWNER; i++)
        region->outputs[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    memcpy(words, region->states, sizeof words);
    carried_out = 0;
}

static inline void begin_on_device(uint32_t max_writing) {
    make_device_region();
    struct dp_raw_config with = config();
    with.max_writing = max_writing;
    with.answer_timeout = ANSWER;
    begin_with(with);
}

/* Everybody leaves, the attachment ends, and the device has given back all. */
static inline void end_on_device(void) {
    leave_all();
    CHECK(dp_raw_in_flight(&pump) == 0);
    dp_raw_detach(&pump, 0, 1);
    const struct dp_raw *raw = pump.raw->partitions[0];
    CHECK(!raw->commands && !raw->first_claim && !raw->first_unposted);
    free_all();
    free_pump();
    drop_region();
}

static inline void pass_after_device(void) {
    device_runs();
    dp_raw_pass(&pump);
}

static inline void expect_waiting(const struct fake_stream *stream) {
    CHECK(stream->stream.app_state == DP_RAW_CLAIMING && stream->stream.in.consumed == 0);
    CHECK(stream->sends == 0 && !stream->handed);
}

static inline struct fake_stream *send_published(uint32_t slot, uint32_t deadline_ms) {
    struct request request = request_of(3, 4, 48);
    request.affinity = slot + SLOTS;
    request.deadline_ms = deadline_ms;
    encode(&request);
    struct fake_stream *stream = send_whole(0, &request);
    pass_after_device();
    CHECK(device_runs() == 1 && word_state(slot) == DP_READY);
    return stream;
}

#endif
