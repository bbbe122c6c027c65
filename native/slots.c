/* The slot's state machine on the `host` table: the words lie in the region and every side does its
 * own compare-and-swap. What only reads words (poll, sleep, count) serves the `device` table too,
 * whose words are swapped in the device and mirrored here. Rules (contract 1):
 *
 * - Every pair that the table does not list is illegal; a verb says so and changes nothing.
 * - Each field of a slot is written before the CAS that gives the slot away, none after.
 * - A word is loaded once into private memory, checked, and that value is used.
 * - The loops end: a CAS that fails means that another side moved the slot, and a slot under one
 *   generation moves at most five times. */
#define _GNU_SOURCE
#include "slots.h"

#include <poll.h>
#include <time.h>
#include <unistd.h>

#include "atomics.h"
#include "region.h"

/* Zero marks the pairs that are not listed. */
#define TO(state) ((state) + 1)

static const uint8_t transitions[DP_EVENTS][DP_STATES] = {
    [DP_CLAIM] = {[DP_FREE] = TO(DP_WRITING)},
    [DP_PUBLISH] = {[DP_WRITING] = TO(DP_READY)},
    [DP_ABORT] = {[DP_WRITING] = TO(DP_FREE)},
    [DP_TAKE] = {[DP_READY] = TO(DP_RUNNING)},
    [DP_REVOKE] = {[DP_READY] = TO(DP_FREE)},
    [DP_CANCEL] = {[DP_RUNNING] = TO(DP_CANCELLING)},
    [DP_FINISH] = {[DP_RUNNING] = TO(DP_DONE), [DP_CANCELLING] = TO(DP_FREE)},
    [DP_RELEASE] = {[DP_DONE] = TO(DP_FREE)},
};

/* How a listener lets go of a slot in each state; DP_EVENTS: it does not hold it there. */
static const uint8_t letting_go[DP_STATES] = {
    [DP_FREE] = DP_EVENTS,    [DP_WRITING] = DP_ABORT,     [DP_READY] = DP_REVOKE,
    [DP_RUNNING] = DP_CANCEL, [DP_CANCELLING] = DP_EVENTS, [DP_DONE] = DP_RELEASE,
};

int dp_next_state(int event, int state) {
    if (event < 0 || event >= DP_EVENTS || state < 0 || state >= DP_STATES)
        return DP_ILLEGAL;
    int to = transitions[event][state];
    return to ? to - 1 : DP_ILLEGAL;
}

int64_t dp_realtime_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int state_of(uint64_t word) {
    return (int)(word & DP_STATE_MASK);
}
static uint32_t owner_of(uint64_t word) {
    return (word >> DP_OWNER_SHIFT) & DP_OWNER_MASK;
}
static uint64_t generation_of(uint64_t word) {
    return word >> DP_GENERATION_SHIFT;
}

static uint64_t word_of(uint64_t generation, uint32_t owner, int state) {
    return generation << DP_GENERATION_SHIFT | (uint64_t)owner << DP_OWNER_SHIFT | (uint64_t)state;
}

static void ring(int fd) {
    const uint64_t one = 1;
    /* EAGAIN means that the counter is full, so the reader is awake already. */
    ssize_t ignored = write(fd, &one, sizeof one);
    (void)ignored;
}

/* Poster's half of the sleep/wake pair: the change is made, now look whether anyone sleeps. */
static void wake_runtime(struct dp_region *region) {
    dp_fence_full();
    if (dp_load_flag(&region->header->runtime_sleeping.value))
        ring(region->doorbell);
}

static void wake_listener(struct dp_region *region, uint32_t owner) {
    if (owner == 0 || owner > region->geometry.listeners)
        return;
    dp_fence_full();
    if (dp_load_flag(&region->header->listener_sleeping[owner - 1].value))
        ring(region->outputs[owner - 1]);
}

void dp_wake_runtime(struct dp_region *region) {
    wake_runtime(region);
}
void dp_wake_listener(struct dp_region *region, uint32_t owner) {
    wake_listener(region, owner);
}

/* Mirrors -------------------------------------------------------------------------------------- */

/* In the order in which a slot goes through them under one generation. */
static int rank_of(uint64_t word) {
    return state_of(word) == DP_FREE ? DP_STATES : state_of(word);
}

/* Of a slot's two mirrors the one that says what happened later. Each is written by one side alone
 * and under one generation only goes forward (gpu/ring.h); generations wrap. */
static uint64_t later(uint64_t admitted, uint64_t ran) {
    uint64_t mask = ~UINT64_C(0) >> DP_GENERATION_SHIFT;
    uint64_t ahead = (generation_of(ran) - generation_of(admitted)) & mask;
    if (ahead)
        return ahead > mask / 2 ? admitted : ran;
    return rank_of(ran) > rank_of(admitted) ? ran : admitted;
}

uint64_t dp_word_now(struct dp_region *region, uint32_t slot) {
    uint64_t word = dp_load_relaxed(&region->states[slot]);
    return region->mirrors ? later(word, dp_load_relaxed(&region->mirrors[slot])) : word;
}

void dp_copy_words(struct dp_region *region, uint64_t *to) {
    for (uint32_t i = 0; i < region->geometry.slots; i++)
        to[i] = dp_word_now(region, i);
}

int dp_is_working(struct dp_region *region) {
    for (uint32_t i = 0; i < region->geometry.slots; i++) {
        int state = state_of(dp_word_now(region, i));
        if (state == DP_READY || state == DP_RUNNING || state == DP_CANCELLING)
            return 1;
    }
    return 0;
}

/* Claim ---------------------------------------------------------------------------------------- */

/* One slot: true when it is ours now, false when it was seen taken. */
static bool claim_one(uint64_t *word, uint32_t owner, uint64_t *generation) {
    uint64_t seen = dp_load_relaxed(word);
    while (state_of(seen) == DP_FREE) {
        uint64_t next = (generation_of(seen) + 1) & (~UINT64_C(0) >> DP_GENERATION_SHIFT);
        /* Acquires what the last holder read and wrote (its release is its CAS to FREE). */
        if (dp_cas(word, &seen, word_of(next, owner, DP_WRITING))) {
            *generation = next;
            return true;
        }
    }
    return false;
}

static uint32_t count_free(const uint64_t *words, uint32_t count) {
    uint32_t free_slots = 0;
    for (uint32_t i = 0; i < count; i++)
        free_slots += state_of(dp_load_relaxed(&words[i])) == DP_FREE;
    return free_slots;
}

uint32_t dp_count_free(struct dp_region *region, uint32_t first, uint32_t count) {
    if (!region->mirrors)
        return count_free(region->states + first, count);
    uint32_t free_slots = 0;
    for (uint32_t i = 0; i < count; i++)
        free_slots += state_of(dp_word_now(region, first + i)) == DP_FREE;
    return free_slots;
}

int dp_claim(struct dp_region *region, uint32_t owner, uint32_t first, uint32_t count,
             uint32_t start, uint32_t probes, struct dp_claimed *out) {
    uint64_t *words = region->states + first;
    uint32_t i = start;
    for (uint32_t probe = 0; probe < probes; probe++) {
        if (claim_one(&words[i], owner, &out->generation)) {
            out->slot = first + i;
            out->free_left = count_free(words, count);
            return DP_OK;
        }
        if (++i == count)
            i = 0;
    }
    return DP_FULL;
}

/* The other verbs ------------------------------------------------------------------------------ */

/* Applies the event and hands out the word that it replaced: whoever must ring the owner reads it
 * from there, before the CAS gave the slot away. */
static int apply(uint64_t *word, uint64_t generation, int event, uint64_t *replaced) {
    uint64_t seen = dp_load_acquire(word);
    for (;;) {
        if (generation_of(seen) != generation)
            return DP_STALE;
        int to = dp_next_state(event, state_of(seen));
        if (to < 0)
            return DP_ILLEGAL;
        *replaced = seen;
        /* Releases the fields of this holder to the next one's load or CAS. A FREE word keeps its
         * generation; the next claim adds one. */
        if (dp_cas(word, &seen, word_of(generation, owner_of(seen), to)))
            return to;
    }
}

/* What the event would lead to. The answer holds for a verb whose state only its caller leaves, so
 * fields may be written on its strength; on a stale handle they are another holder's by now. */
static int foresee(const uint64_t *word, uint64_t generation, int event) {
    uint64_t seen = dp_load_acquire(word);
    return generation_of(seen) != generation ? DP_STALE : dp_next_state(event, state_of(seen));
}

int dp_apply(struct dp_region *region, uint32_t slot, uint64_t generation, int event) {
    /* A claim is a new generation, so no handle makes one. */
    if (event == DP_CLAIM)
        return DP_ILLEGAL;
    uint64_t replaced;
    return apply(&region->states[slot], generation, event, &replaced);
}

void dp_describe(struct dp_region *region, uint32_t slot, uint64_t request_id, uint32_t n_tokens,
                 uint32_t max_output, float temperature, float top_p, uint32_t top_k,
                 uint32_t seed) {
    struct dp_request *request = &region->requests[slot];
    request->request_id = request_id;
    request->n_tokens = n_tokens;
    request->max_output = max_output;
    request->top_k = top_k;
    request->seed = seed;
    request->temperature = temperature;
    request->top_p = top_p;
}

int dp_publish(struct dp_region *region, uint32_t slot, uint64_t generation, int64_t *at_ns) {
    int state = foresee(&region->states[slot], generation, DP_PUBLISH);
    if (state < 0)
        return state;
    int64_t now = dp_realtime_ns();
    if (at_ns)
        *at_ns = now;
    region->requests[slot].published_ns = now;
    state = dp_apply(region, slot, generation, DP_PUBLISH);
    if (state >= 0)
        wake_runtime(region);
    return state;
}

int dp_cancel(struct dp_region *region, uint32_t slot, uint64_t generation) {
    int state = dp_apply(region, slot, generation, DP_CANCEL);
    if (state >= 0)
        wake_runtime(region);
    return state;
}

int dp_let_go(struct dp_region *region, uint32_t slot, uint64_t generation) {
    for (;;) {
        uint64_t seen = dp_load_acquire(&region->states[slot]);
        if (generation_of(seen) != generation)
            return DP_STALE;
        int state = state_of(seen);
        if (state >= DP_STATES || letting_go[state] == DP_EVENTS)
            return DP_ILLEGAL;
        int event = letting_go[state];
        /* The runtime may take or finish between the load and the CAS; then the state asks for
         * another verb. */
        int to = event == DP_CANCEL ? dp_cancel(region, slot, generation)
                                    : dp_apply(region, slot, generation, event);
        if (to != DP_ILLEGAL)
            return to;
    }
}

int dp_let_go_all(struct dp_region *region, uint32_t owner) {
    int held = 0;
    for (uint32_t slot = 0; slot < region->geometry.slots; slot++) {
        uint64_t seen = dp_load_acquire(&region->states[slot]);
        if (owner_of(seen) == owner)
            held += dp_let_go(region, slot, generation_of(seen)) >= 0;
    }
    return held;
}

int dp_take(struct dp_region *region, uint32_t slot, uint64_t *generation) {
    uint64_t seen = dp_load_relaxed(&region->states[slot]);
    if (state_of(seen) != DP_READY)
        return DP_ILLEGAL;
    /* Acquires the prompt and the request that publish released. */
    int state = dp_apply(region, slot, generation_of(seen), DP_TAKE);
    if (state >= 0) {
        *generation = generation_of(seen);
        region->requests[slot].taken_ns = dp_realtime_ns();
    }
    return state;
}

int dp_emit(struct dp_region *region, uint32_t slot, uint64_t generation, const int32_t *ids,
            uint32_t count) {
    uint64_t word = dp_load_acquire(&region->states[slot]);
    if (generation_of(word) != generation)
        return DP_STALE;
    if (state_of(word) != DP_RUNNING && state_of(word) != DP_CANCELLING)
        return DP_ILLEGAL;
    /* Only the runtime writes the progress word, so this load needs no order. */
    uint64_t progress = dp_load_relaxed(&region->progress[slot]);
    uint32_t out = generation_of(progress) == generation ? progress & DP_COUNT_MASK : 0;
    uint32_t room = region->requests[slot].max_output;
    if (room > region->geometry.max_output)
        room = region->geometry.max_output;
    if (out > room || count > room - out)
        return DP_OVERFLOW;
    uint32_t *ids_out = dp_output(region, slot) + out;
    for (uint32_t i = 0; i < count; i++)
        ids_out[i] = (uint32_t)ids[i];
    /* Releases the ids to the acquire in dp_poll. */
    dp_store_release(&region->progress[slot],
                     generation << DP_GENERATION_SHIFT | (uint64_t)(out + count));
    wake_listener(region, owner_of(word));
    return DP_OK;
}

int dp_finish(struct dp_region *region, uint32_t slot, uint64_t generation, uint32_t reason) {
    int state = foresee(&region->states[slot], generation, DP_FINISH);
    if (state < 0)
        return state;
    region->requests[slot].finish_reason = reason;
    uint64_t replaced = 0;
    state = apply(&region->states[slot], generation, DP_FINISH, &replaced);
    if (state == DP_DONE)
        wake_listener(region, owner_of(replaced));
    return state;
}

int dp_is_cancelled(struct dp_region *region, uint32_t slot, uint64_t generation) {
    uint64_t seen = dp_load_relaxed(&region->states[slot]);
    if (generation_of(seen) != generation)
        return DP_STALE;
    return state_of(seen) == DP_CANCELLING;
}

/* Listener: what came out ---------------------------------------------------------------------- */

static bool refresh(struct dp_region *region, struct dp_watch *watch) {
    uint64_t word = dp_load_acquire(&region->states[watch->slot]);
    if (region->mirrors)
        word = later(word, dp_load_acquire(&region->mirrors[watch->slot]));
    /* What is watched was published; the device may not have been told yet. */
    if (region->mirrors && state_of(word) == DP_WRITING)
        word = word_of(generation_of(word), owner_of(word), DP_READY);
    if (generation_of(word) != watch->generation || state_of(word) >= DP_STATES) {
        watch->state = DP_STATES;
        return true;
    }
    watch->state = (uint32_t)state_of(word);
    /* Acquires the ids that emit released. */
    uint64_t progress = dp_load_acquire(&region->progress[watch->slot]);
    if (generation_of(progress) == watch->generation)
        watch->count = progress & DP_COUNT_MASK;
    if (watch->paused && watch->state == watch->paused)
        return false;
    return watch->count != watch->seen || watch->state == DP_DONE || watch->state == DP_FREE ||
           watch->state == DP_CANCELLING || watch->state == DP_WRITING;
}

uint32_t dp_poll(struct dp_region *region, struct dp_watch *watches, uint32_t n,
                 uint32_t *changed) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < n; i++)
        if (refresh(region, &watches[i]))
            changed[found++] = i;
    return found;
}

/* Sleep and wake ------------------------------------------------------------------------------- */

static void drain(int fd) {
    uint64_t rung;
    ssize_t ignored = read(fd, &rung, sizeof rung);
    (void)ignored;
}

int dp_listener_sleep(struct dp_region *region, uint32_t owner, struct dp_watch *watches,
                      uint32_t n) {
    dp_store_flag(&region->header->listener_sleeping[owner - 1].value, 1);
    dp_fence_full();
    for (uint32_t i = 0; i < n; i++)
        if (refresh(region, &watches[i]))
            return 1;
    return 0;
}

void dp_listener_wake(struct dp_region *region, uint32_t owner) {
    dp_store_flag(&region->header->listener_sleeping[owner - 1].value, 0);
}

void dp_listener_drain(struct dp_region *region, uint32_t owner) {
    drain(region->outputs[owner - 1]);
}

static int runtime_has_work(struct dp_region *region) {
    for (uint32_t i = 0; i < region->geometry.slots; i++) {
        int state = state_of(dp_load_relaxed(&region->states[i]));
        if (state == DP_READY || state == DP_CANCELLING)
            return 1;
    }
    return 0;
}

static int spin_for_work(struct dp_region *region, uint32_t spin_us) {
    int64_t until = dp_realtime_ns() + (int64_t)spin_us * 1000;
    do {
        for (int i = 0; i < 32; i++) {
            if (runtime_has_work(region))
                return 1;
            dp_cpu_relax();
        }
    } while (dp_realtime_ns() < until);
    return 0;
}

int dp_runtime_wait(struct dp_region *region, int cancel_fd, int timeout_ms, uint32_t spin_us) {
    if (runtime_has_work(region))
        return 1;
    if (spin_us && spin_for_work(region, spin_us))
        return 1;
    uint32_t *sleeping = &region->header->runtime_sleeping.value;
    dp_store_flag(sleeping, 1);
    dp_fence_full();
    int work = runtime_has_work(region);
    struct pollfd fds[2] = {{.fd = region->doorbell, .events = POLLIN},
                            {.fd = cancel_fd, .events = POLLIN | POLLRDHUP}};
    int ready = work ? 0 : poll(fds, 2, timeout_ms);
    dp_store_flag(sleeping, 0);
    if (ready > 0 && fds[0].revents)
        drain(region->doorbell);
    if (ready > 0 && fds[1].revents)
        return -1;
    return work || runtime_has_work(region);
}
