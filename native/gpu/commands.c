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

/* A command whose answer is fetched later; kind 0: nobody waits for one. */
struct ask {
    void *asker; /* of a claim; NULL: it was disowned */
    int64_t at;
    uint64_t generation;
    uint32_t slot;
    int kind;
};

struct dp_commands {
    struct dp_region *region;
    struct dp_ring *ring;
    struct dp_command *entries;
    uint64_t n_entries;
    uint64_t reserve;
    uint64_t next;
    uint64_t read;    /* while there are any, no ask lies before it */
    uint64_t asked;   /* asks that have no answer yet */
    struct ask *asks; /* one an entry */
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
    struct ask *asks = calloc(dp_ring_entries(slots), sizeof *asks);
    if (!commands || !asks) {
        free(commands);
        free(asks);
        return NULL;
    }
    commands->asks = asks;
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
    if (commands)
        free(commands->asks);
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

/* Whether `more` commands fit behind what is posted. Verdicts come in order, so one tells it; one
 * that is still to be fetched is not written over. */
static bool has_room(const struct dp_commands *commands, uint64_t more) {
    uint64_t last = commands->next + more - 1, verdict;
    if (last < commands->n_entries)
        return true;
    last -= commands->n_entries;
    return !(commands->asked && last >= commands->read) && verdict_of(commands, last, &verdict);
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

static int result_of(uint64_t verdict) {
    int result = (int)(verdict & DP_COMMAND_KIND_MASK);
    return result < DP_STATES ? result : result - DP_COMMAND_KIND_MASK - 1;
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
    return result_of(*verdict);
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

/* What a claim's verdict says. What the region says is checked before it is used, as everywhere. */
static int granted(struct dp_commands *commands, uint64_t verdict, struct dp_claimed *out) {
    int result = result_of(verdict);
    if (result < 0)
        return result;
    out->slot = (uint32_t)(verdict >> DP_COMMAND_SLOT_SHIFT) & DP_COMMAND_TEN_BITS;
    out->generation = verdict >> DP_COMMAND_GENERATION & (~UINT64_C(0) >> DP_GENERATION_SHIFT);
    if (result != DP_WRITING || out->slot >= commands->region->geometry.slots) {
        commands->dead = 1;
        return DP_UNANSWERED;
    }
    commands->held[out->slot] = (struct held){out->generation, DP_WRITING};
    return DP_OK;
}

static int claim(struct dp_commands *commands, uint64_t word, struct dp_claimed *out) {
    uint64_t verdict;
    if (commands->dead || !has_room(commands, 1 + commands->reserve) || !post(commands, word)) {
        commands->dead = 1;
        return DP_UNANSWERED;
    }
    if (await(commands, &verdict) == DP_UNANSWERED) {
        /* Should the device grant it yet, it takes it back right after: commands keep their order,
         * and this listener need not be there. */
        post(commands, DP_COMMAND_ABANDON);
        return DP_UNANSWERED;
    }
    return granted(commands, verdict, out);
}

int dp_commands_admit(struct dp_commands *commands, uint32_t first, uint32_t count, uint32_t start,
                      uint32_t probes, uint64_t request_id, uint32_t n_tokens, uint32_t width,
                      uint32_t max_output, float temperature, float top_p, uint32_t top_k,
                      uint32_t seed, struct dp_claimed *out) {
    struct dp_region *region = commands->region;
    int status = claim(commands, claim_word(first, count, start, probes), out);
    if (status != DP_OK)
        return status;
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

/* Asking without waiting ----------------------------------------------------------------------- */

static struct ask *ask_at(const struct dp_commands *commands, uint64_t position) {
    return &commands->asks[position % commands->n_entries];
}

static bool post_ask(struct dp_commands *commands, uint64_t word, struct ask ask) {
    uint64_t position = commands->next;
    if (!post(commands, word))
        return false;
    *ask_at(commands, position) = ask;
    if (!commands->asked++)
        commands->read = position;
    return true;
}

int64_t dp_commands_ask_claim(struct dp_commands *commands, uint32_t first, uint32_t count,
                              uint32_t start, uint32_t probes, void *asker, int64_t now) {
    if (commands->dead)
        return DP_UNANSWERED;
    if (commands->asked && !has_room(commands, 1 + commands->reserve))
        return DP_OVERFLOW;
    struct ask ask = {.asker = asker, .at = now, .kind = DP_COMMAND_CLAIM};
    uint64_t word = claim_word(first, count, start, probes);
    return post_ask(commands, word, ask) ? (int64_t)commands->next - 1 : DP_UNANSWERED;
}

int dp_commands_ask(struct dp_commands *commands, int kind, uint32_t slot, uint64_t generation,
                    int64_t now) {
    int status = check(commands, slot, generation, DP_READY, DP_READY);
    if (status != DP_OK)
        return status;
    struct ask ask = {.at = now, .generation = generation, .slot = slot, .kind = kind};
    bool posted = !commands->dead && post_ask(commands, about(kind, slot, generation), ask);
    return posted ? DP_PENDING : DP_UNANSWERED;
}

void dp_commands_disown(struct dp_commands *commands, int64_t place) {
    ask_at(commands, (uint64_t)place)->asker = NULL;
}

/* Go on to the next ask. False: there is none, or it has no verdict yet. */
static bool find_answer(struct dp_commands *commands, uint64_t *verdict) {
    if (!commands->asked)
        return false;
    while (!ask_at(commands, commands->read)->kind)
        commands->read++;
    return verdict_of(commands, commands->read, verdict);
}

int dp_commands_is_answered(struct dp_commands *commands) {
    uint64_t verdict;
    return find_answer(commands, &verdict);
}

int64_t dp_commands_asked_at(const struct dp_commands *commands) {
    if (!commands->asked)
        return INT64_MAX;
    uint64_t position = commands->read;
    while (!ask_at(commands, position)->kind)
        position++;
    return ask_at(commands, position)->at;
}

static void answer_claim(struct dp_commands *commands, uint64_t verdict, struct dp_answer *out) {
    struct dp_claimed claimed = {0};
    out->status = granted(commands, verdict, &claimed);
    out->slot = claimed.slot;
    out->generation = claimed.generation;
    if (out->status == DP_OK && !out->asker)
        dp_commands_let_go(commands, claimed.slot, claimed.generation);
}

static void answer_verb(struct dp_commands *commands, uint64_t verdict, struct dp_answer *out) {
    out->status = result_of(verdict);
    /* If it was let go of meanwhile, nobody asks for its state before the next claim. */
    if (out->status >= 0)
        commands->held[out->slot].state = (uint32_t)out->status;
}

int dp_commands_answer(struct dp_commands *commands, struct dp_answer *out) {
    uint64_t verdict;
    while (find_answer(commands, &verdict)) {
        struct ask *ask = ask_at(commands, commands->read++);
        *out = (struct dp_answer){.asker = ask->asker,
                                  .kind = ask->kind,
                                  .slot = ask->slot,
                                  .generation = ask->generation};
        ask->kind = 0;
        commands->asked--;
        if (out->kind != DP_COMMAND_CLAIM) {
            answer_verb(commands, verdict, out);
            return 1;
        }
        answer_claim(commands, verdict, out);
        if (out->asker)
            return 1;
    }
    return 0;
}

void dp_commands_give_up(struct dp_commands *commands) {
    commands->dead = 1;
}
