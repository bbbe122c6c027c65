/* See commands.h. Room (the ring never overflows): a claim is posted only while the ring has room
 * for `reserve` commands more, and what a listener may post without an answer to anything is three
 * commands for each slot: publish, revoke or cancel, and the one that lets go. */
#define _GNU_SOURCE
#include "commands.h"

#include <poll.h>
#include <stdlib.h>
#include <time.h>

#include "../atomics.h"
#include "../tokens.h"

/* A runtime whose bell is late or forgotten costs so much, not the whole time for an answer. */
#define BLOCK_MS 10

/* What this listener knows of a slot without asking: the states that it led it to itself. */
struct held {
    uint64_t generation;
    uint32_t state; /* WRITING, READY (published), CANCELLING; FREE: it does not hold it */
};

struct dp_commands {
    struct dp_region *region;
    struct dp_ring *ring;
    struct dp_command *entries;
    uint64_t n_entries;
    uint64_t reserve;
    uint64_t next;
    uint32_t owner;
    uint32_t spin_us;
    uint32_t answer_ms;
    int dead;
    struct held held[];
};

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static uint64_t lap_of(const struct dp_commands *commands, uint64_t position) {
    return position / commands->n_entries % DP_LAPS + 1;
}

static struct dp_command *entry_at(const struct dp_commands *commands, uint64_t position) {
    return &commands->entries[position % commands->n_entries];
}

/* A command of this position was posted by whoever had the ring before. */
static bool is_posted(const struct dp_commands *commands, uint64_t position) {
    uint64_t word = dp_load_relaxed(&entry_at(commands, position)->command);
    return word >> DP_COMMAND_LAP_SHIFT == lap_of(commands, position);
}

struct dp_commands *dp_commands_new(struct dp_region *region, uint32_t owner, uint32_t spin_us,
                                    uint32_t answer_ms) {
    uint32_t slots = region->geometry.slots;
    struct dp_commands *commands = calloc(1, sizeof *commands + slots * sizeof(struct held));
    if (!commands)
        return NULL;
    uint8_t *ring = region->base + region->layout.rings + (owner - 1) * region->layout.ring_bytes;
    commands->region = region;
    commands->ring = (struct dp_ring *)ring;
    commands->entries = (struct dp_command *)(ring + sizeof(struct dp_ring));
    commands->n_entries = dp_ring_entries(slots);
    commands->reserve = slots * UINT64_C(3);
    commands->owner = owner;
    commands->spin_us = spin_us;
    commands->answer_ms = answer_ms;
    commands->next = dp_load_relaxed(&commands->ring->posted.value);
    /* It may have died between the two stores of a post. */
    if (is_posted(commands, commands->next))
        commands->next++;
    return commands;
}

void dp_commands_free(struct dp_commands *commands) {
    free(commands);
}

int dp_commands_dead(const struct dp_commands *commands) {
    return commands->dead;
}

/* Posting and waiting -------------------------------------------------------------------------- */

/* The verdict of a position: false while there is none. Acquires what the device did before. */
static bool verdict_of(const struct dp_commands *commands, uint64_t position, uint64_t *verdict) {
    *verdict = dp_load_acquire(&entry_at(commands, position)->verdict);
    return *verdict >> DP_COMMAND_LAP_SHIFT == lap_of(commands, position);
}

/* Whether `more` commands fit behind what is posted. Verdicts come in order, so one tells it. */
static bool has_room(const struct dp_commands *commands, uint64_t more) {
    uint64_t last = commands->next + more - 1, verdict;
    return last < commands->n_entries || verdict_of(commands, last - commands->n_entries, &verdict);
}

static bool post(struct dp_commands *commands, uint64_t word) {
    if (!has_room(commands, 1)) {
        commands->dead = 1; /* the reserve is used up: nothing was consumed for a whole lap */
        return false;
    }
    uint64_t position = commands->next++;
    /* Releases what the slot holds to the kernel's acquire. */
    dp_store_release(&entry_at(commands, position)->command, word | lap_of(commands, position)
                                                                        << DP_COMMAND_LAP_SHIFT);
    dp_store_release(&commands->ring->posted.value, commands->next);
    dp_wake_runtime(commands->region);
    return true;
}

static bool spin(const struct dp_commands *commands, uint64_t position, int64_t until,
                 uint64_t *verdict) {
    do {
        for (int i = 0; i < 32; i++) {
            if (verdict_of(commands, position, verdict))
                return true;
            dp_cpu_relax();
        }
    } while (now_us() < until);
    return false;
}

/* The sleeper's half of the wake-up pair. The eventfd may have been rung for output: whoever blocks
 * on it next looks at every slot first. */
static bool block(const struct dp_commands *commands, uint64_t position, int64_t until,
                  uint64_t *verdict) {
    struct dp_region *region = commands->region;
    uint32_t *sleeping = &region->header->listener_sleeping[commands->owner - 1].value;
    struct pollfd rung = {.fd = region->outputs[commands->owner - 1], .events = POLLIN};
    bool answered;
    for (;;) {
        dp_store_flag(sleeping, 1);
        dp_fence_full();
        int64_t left = until - now_us();
        answered = verdict_of(commands, position, verdict);
        if (answered || left <= 0)
            break;
        int ms = left < BLOCK_MS * 1000 ? (int)(left / 1000) + 1 : BLOCK_MS;
        if (poll(&rung, 1, ms) > 0)
            dp_listener_drain(region, commands->owner);
    }
    dp_store_flag(sleeping, 0);
    return answered;
}

/* The result of the command that was posted last, or DP_UNANSWERED; then the device is given up. */
static int await(struct dp_commands *commands, uint64_t *verdict) {
    uint64_t position = commands->next - 1;
    int64_t start = now_us();
    if (!spin(commands, position, start + commands->spin_us, verdict) &&
        !block(commands, position, start + commands->answer_ms * INT64_C(1000), verdict)) {
        commands->dead = 1;
        return DP_UNANSWERED;
    }
    int result = (int)(*verdict & DP_COMMAND_KIND_MASK);
    return result < DP_STATES ? result : result - DP_COMMAND_KIND_MASK - 1;
}

static uint64_t about(int kind, uint32_t slot, uint64_t generation) {
    return (uint64_t)kind | (uint64_t)slot << DP_COMMAND_SLOT_SHIFT |
           generation << DP_COMMAND_GENERATION;
}

/* Claim to publish ----------------------------------------------------------------------------- */

static uint64_t claim_word(uint32_t first, uint32_t count, uint32_t start, uint32_t probes) {
    return DP_COMMAND_CLAIM | (uint64_t)first << 4 | (uint64_t)(count - 1) << 14 |
           (uint64_t)start << 24 | (uint64_t)(probes - 1) << 34;
}

static int claim(struct dp_commands *commands, uint64_t word, struct dp_claimed *out) {
    uint64_t verdict;
    if (commands->dead || !has_room(commands, 1 + commands->reserve) || !post(commands, word)) {
        commands->dead = 1;
        return DP_UNANSWERED;
    }
    int result = await(commands, &verdict);
    if (result == DP_UNANSWERED) {
        /* Should the device grant it yet, it takes it back right after: commands keep their order,
         * and this listener need not be there. */
        post(commands, DP_COMMAND_ABANDON);
        return result;
    }
    if (result < 0)
        return result;
    out->slot = (uint32_t)(verdict >> DP_COMMAND_SLOT_SHIFT) & DP_COMMAND_TEN_BITS;
    out->generation = verdict >> DP_COMMAND_GENERATION & (~UINT64_C(0) >> DP_GENERATION_SHIFT);
    /* What the region says is checked before it is used, as everywhere. */
    if (result != DP_WRITING || out->slot >= commands->region->geometry.slots) {
        commands->dead = 1;
        return DP_UNANSWERED;
    }
    return DP_OK;
}

int dp_commands_admit(struct dp_commands *commands, uint32_t first, uint32_t count, uint32_t start,
                      uint32_t probes, uint64_t request_id, uint32_t n_tokens, uint32_t width,
                      uint32_t max_output, float temperature, float top_p, uint32_t top_k,
                      uint32_t seed, struct dp_claimed *out) {
    struct dp_region *region = commands->region;
    int status = claim(commands, claim_word(first, count, start, probes), out);
    if (status != DP_OK)
        return status;
    commands->held[out->slot] = (struct held){out->generation, DP_WRITING};
    out->free_left = dp_count_free(region, first, count);
    dp_describe(region, out->slot, request_id, n_tokens, max_output, temperature, top_p, top_k,
                seed);
    dp_write_begin(region, out->slot, n_tokens, width);
    return DP_OK;
}

/* DP_OK while this listener holds the slot under that generation in one of the two states. */
static int check(const struct dp_commands *commands, uint32_t slot, uint64_t generation,
                 uint32_t state, uint32_t or_state) {
    if (slot >= commands->region->geometry.slots)
        return DP_ILLEGAL;
    const struct held *held = &commands->held[slot];
    if (held->generation != generation)
        return DP_STALE;
    return held->state == state || held->state == or_state ? DP_OK : DP_ILLEGAL;
}

int64_t dp_commands_submit(struct dp_commands *commands, uint32_t slot, uint64_t generation,
                           const uint8_t *body, size_t offset, size_t len) {
    int status = check(commands, slot, generation, DP_WRITING, DP_WRITING);
    if (status != DP_OK)
        return status;
    struct dp_region *region = commands->region;
    status = dp_write(region, slot, body, offset, len);
    if (status != DP_OK)
        return status;
    if (!dp_write_complete(region, slot))
        return DP_SHORT;
    if (commands->dead)
        return DP_UNANSWERED;
    int64_t now = dp_realtime_ns();
    region->requests[slot].published_ns = now;
    if (!post(commands, about(DP_COMMAND_PUBLISH, slot, generation)))
        return DP_UNANSWERED;
    commands->held[slot].state = DP_READY;
    return now;
}

/* Ends ----------------------------------------------------------------------------------------- */

/* A verb on a published slot that the runtime may be faster than: the device decides. */
static int ask(struct dp_commands *commands, int kind, uint32_t slot, uint64_t generation) {
    uint64_t verdict;
    int status = check(commands, slot, generation, DP_READY, DP_READY);
    if (status != DP_OK)
        return status;
    if (commands->dead || !post(commands, about(kind, slot, generation)))
        return DP_UNANSWERED;
    int state = await(commands, &verdict);
    if (state >= 0)
        commands->held[slot].state = (uint32_t)state;
    return state;
}

int dp_commands_revoke(struct dp_commands *commands, uint32_t slot, uint64_t generation) {
    return ask(commands, DP_COMMAND_REVOKE, slot, generation);
}

int dp_commands_cancel(struct dp_commands *commands, uint32_t slot, uint64_t generation) {
    return ask(commands, DP_COMMAND_CANCEL, slot, generation);
}

/* The state by the mirrors; one that is not out yet is what this listener led to. */
static uint32_t state_now(const struct dp_commands *commands, uint32_t slot) {
    uint64_t word = dp_word_now(commands->region, slot);
    const struct held *held = &commands->held[slot];
    uint32_t state = (uint32_t)(word & DP_STATE_MASK);
    bool current = word >> DP_GENERATION_SHIFT == held->generation && state != DP_WRITING;
    return current ? state : held->state;
}

int dp_commands_release(struct dp_commands *commands, uint32_t slot, uint64_t generation) {
    int status = check(commands, slot, generation, DP_READY, DP_READY);
    if (status != DP_OK)
        return status;
    if (state_now(commands, slot) != DP_DONE)
        return DP_ILLEGAL;
    if (!post(commands, about(DP_COMMAND_RELEASE, slot, generation)))
        return DP_UNANSWERED;
    commands->held[slot].state = DP_FREE;
    return DP_FREE;
}

int dp_commands_let_go(struct dp_commands *commands, uint32_t slot, uint64_t generation) {
    int status = check(commands, slot, generation, DP_WRITING, DP_READY);
    if (status != DP_OK)
        return status;
    int to = commands->held[slot].state == DP_READY && state_now(commands, slot) == DP_RUNNING
                 ? DP_CANCELLING
                 : DP_FREE;
    if (!post(commands, about(DP_COMMAND_LET_GO, slot, generation)))
        return DP_UNANSWERED;
    commands->held[slot].state = (uint32_t)to;
    return to;
}

int dp_commands_let_go_all(struct dp_commands *commands) {
    for (uint32_t slot = 0; slot < commands->region->geometry.slots; slot++)
        commands->held[slot].state = DP_FREE;
    return post(commands, DP_COMMAND_LET_GO_ALL) ? DP_OK : DP_UNANSWERED;
}
