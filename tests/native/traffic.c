/* Whole lives under load: listeners that claim, write, publish, sleep, read and let go by chance,
 * and a runtime that echoes. Prompts and outputs are checked id by id, so ThreadSanitizer sees
 * every hand-over of memory, and a slot held twice or a wake-up lost ends the run.
 *
 * usage: traffic [REQUESTS [SEED]] */
#include "harness.h"
#include "tokens.h"

#define LISTENERS 2
#define SLOTS     4
#define TOKENS    48
#define HELD_MAX  3

/* A crowd at a pool: each slot is claimed once, FULL is the truth --------------------------------
 */

#define CROWD      4
#define POOL_SLOTS 24

struct crowd {
    struct dp_region *region;
    struct gate gate;
    uint32_t rounds;
    uint32_t holders[POOL_SLOTS]; /* written by the slot's holder alone */
    uint32_t claimed[CROWD];
};

struct member {
    struct crowd *crowd;
    uint32_t number;
    uint64_t seed;
};

/* Claims until there is no more, then gives all back. */
static void claim_all(struct member *member) {
    struct crowd *crowd = member->crowd;
    struct dp_region *region = crowd->region;
    struct dp_claimed held[POOL_SLOTS];
    uint32_t n = 0;
    uint32_t start = random_below(&member->seed, POOL_SLOTS);
    while (dp_claim(region, member->number, 0, POOL_SLOTS, start, POOL_SLOTS, &held[n]) == DP_OK) {
        CHECK(crowd->holders[held[n].slot] == 0);
        crowd->holders[held[n].slot] = member->number;
        n++;
    }
    /* Nobody gives back before all were refused, so every slot must be taken now. */
    for (uint32_t slot = 0; slot < POOL_SLOTS; slot++)
        CHECK(state_at(region, slot) == DP_WRITING);
    crowd->claimed[member->number - 1] = n;
    gate_pass(&crowd->gate, CROWD);
    while (n-- > 0) {
        CHECK(crowd->holders[held[n].slot] == member->number);
        CHECK(owner_at(region, held[n].slot) == member->number);
        crowd->holders[held[n].slot] = 0;
        CHECK(dp_apply(region, held[n].slot, held[n].generation, DP_ABORT) == DP_FREE);
    }
}

static void *crowd_member(void *argument) {
    struct member *member = argument;
    struct crowd *crowd = member->crowd;
    for (uint32_t i = 0; i < crowd->rounds; i++) {
        gate_pass(&crowd->gate, CROWD);
        claim_all(member);
        uint32_t all = 0;
        for (int j = 0; j < CROWD; j++)
            all += crowd->claimed[j];
        CHECK(all == POOL_SLOTS);
    }
    return NULL;
}

static void run_crowd(uint32_t rounds, uint64_t seed) {
    struct crowd crowd = {.region = region_new(POOL_SLOTS, TOKENS, CROWD), .rounds = rounds};
    struct member members[CROWD];
    pthread_t threads[CROWD];
    for (uint32_t i = 0; i < CROWD; i++) {
        members[i] = (struct member){&crowd, i + 1, seed + i};
        CHECK(pthread_create(&threads[i], NULL, crowd_member, &members[i]) == 0);
    }
    for (uint32_t i = 0; i < CROWD; i++)
        pthread_join(threads[i], NULL);
    printf("crowd: %u times %u slots among %u threads, each claimed once\n", rounds, POOL_SLOTS,
           CROWD);
    region_delete(crowd.region);
}

/* What a request is, from its id alone -----------------------------------------------------------
 */

static uint32_t prompt_length(uint64_t request) {
    return 1 + request * 7 % TOKENS;
}

static uint32_t nth_id(uint64_t request, uint32_t n) {
    return (request * 2654435761u + n * 40503u) % 50000;
}

static uint32_t reason_for(uint64_t request) {
    return request % 2 ? DP_FINISH_STOP : DP_FINISH_LENGTH;
}

/* The runtime ------------------------------------------------------------------------------------
 */

struct job {
    uint64_t generation, request;
    uint32_t out, length;
    bool running;
};

struct engine {
    struct dp_region *region;
    int stop_fd;
    uint64_t seed;
    struct job jobs[SLOTS];
    uint32_t taken, finished, cancelled;
};

static void take_all(struct engine *engine) {
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        struct job *job = &engine->jobs[slot];
        if (dp_take(engine->region, slot, &job->generation) != DP_RUNNING)
            continue;
        CHECK(!job->running);
        const struct dp_request *request = &engine->region->requests[slot];
        *job = (struct job){job->generation, request->request_id, 0, request->n_tokens, true};
        CHECK(job->length == prompt_length(job->request));
        CHECK(request->max_output == job->length && request->temperature == 0.5f);
        const int32_t *prompt = dp_prompt(engine->region, slot);
        for (uint32_t i = 0; i < job->length; i++)
            CHECK((uint32_t)prompt[i] == nth_id(job->request, i));
        engine->taken++;
    }
}

static void step(struct engine *engine, uint32_t slot) {
    struct job *job = &engine->jobs[slot];
    int32_t ids[TOKENS];
    int cancelled = dp_is_cancelled(engine->region, slot, job->generation);
    CHECK(cancelled >= 0);
    uint32_t left = job->length - job->out;
    if (left && !cancelled) {
        uint32_t count = 1 + random_below(&engine->seed, left);
        for (uint32_t i = 0; i < count; i++)
            ids[i] = (int32_t)nth_id(job->request, job->out + i);
        CHECK(dp_emit(engine->region, slot, job->generation, ids, count) == DP_OK);
        job->out += count;
        return;
    }
    if (!left) /* not one more than was asked for */
        CHECK(dp_emit(engine->region, slot, job->generation, ids, 1) == DP_OVERFLOW);
    int state = dp_finish(engine->region, slot, job->generation, reason_for(job->request));
    CHECK(state == DP_FREE || (state == DP_DONE && !cancelled));
    engine->finished++;
    engine->cancelled += state == DP_FREE;
    job->running = false;
}

static void *engine_run(void *argument) {
    struct engine *engine = argument;
    for (;;) {
        bool busy = false;
        for (uint32_t slot = 0; slot < SLOTS; slot++)
            busy |= engine->jobs[slot].running;
        int64_t start = monotonic_ns();
        int spin_us = (int)random_below(&engine->seed, 3) * 5;
        int work =
            dp_runtime_wait(engine->region, engine->stop_fd, busy ? 0 : LOST_MS, (uint32_t)spin_us);
        if (work < 0 && !busy)
            return NULL;
        CHECK(monotonic_ns() - start < (int64_t)LOST_MS * 1000000); /* else a wake-up was lost */
        take_all(engine);
        for (uint32_t slot = 0; slot < SLOTS; slot++)
            if (engine->jobs[slot].running)
                step(engine, slot);
    }
}

/* A listener -------------------------------------------------------------------------------------
 */

enum fate { ANSWER, ABORT, LET_GO_AT_ONCE, LET_GO_LATER, FATES };

struct listener {
    struct dp_region *region;
    uint32_t owner, requests;
    uint64_t seed, next_request;
    struct dp_watch watches[HELD_MAX];
    struct {
        uint64_t request;
        enum fate fate;
        int64_t published_ns;
    } held[HELD_MAX];
    uint32_t n;
    uint32_t ended[FATES];
};

static void write_prompt(struct listener *listener, uint32_t slot, uint64_t request) {
    uint8_t body[TOKENS * 4];
    uint32_t length = prompt_length(request);
    for (uint32_t i = 0; i < length; i++) {
        uint32_t id = nth_id(request, i);
        memcpy(body + i * 4, &id, 4);
    }
    dp_describe(listener->region, slot, request, length, length, 0.5f, 0, 0, 0);
    dp_write_begin(listener->region, slot, length, 4);
    for (size_t at = 0, count; at < length * 4; at += count) {
        count = 1 + random_below(&listener->seed, (uint32_t)(length * 4 - at));
        CHECK(dp_write(listener->region, slot, body, at, count) == DP_OK);
    }
    CHECK(dp_write_complete(listener->region, slot));
}

/* Starts one request; false when every slot is taken. */
static bool start(struct listener *listener) {
    struct dp_region *region = listener->region;
    struct dp_claimed claimed;
    uint32_t from = random_below(&listener->seed, SLOTS);
    if (dp_claim(region, listener->owner, 0, SLOTS, from, SLOTS, &claimed) != DP_OK)
        return false;
    uint64_t request = listener->next_request++;
    static const enum fate fates[8] = {ANSWER, ANSWER, ANSWER,         ANSWER,
                                       ANSWER, ABORT,  LET_GO_AT_ONCE, LET_GO_LATER};
    enum fate fate = fates[random_below(&listener->seed, 8)];
    int64_t at_ns;
    listener->requests--;
    write_prompt(listener, claimed.slot, request);
    if (fate == ABORT) {
        CHECK(dp_let_go(region, claimed.slot, claimed.generation) == DP_FREE);
        listener->ended[ABORT]++;
        return true;
    }
    CHECK(dp_publish(region, claimed.slot, claimed.generation, &at_ns) == DP_READY);
    if (fate == LET_GO_AT_ONCE) {
        CHECK(dp_let_go(region, claimed.slot, claimed.generation) >= 0);
        listener->ended[LET_GO_AT_ONCE]++;
        return true;
    }
    listener->watches[listener->n] =
        (struct dp_watch){.generation = claimed.generation, .slot = claimed.slot};
    listener->held[listener->n].request = request;
    listener->held[listener->n].published_ns = at_ns;
    listener->held[listener->n++].fate = fate;
    return true;
}

/* Reads what is new; true when the request is over for this listener. */
static bool serve(struct listener *listener, uint32_t i) {
    struct dp_watch *watch = &listener->watches[i];
    uint64_t request = listener->held[i].request;
    const struct dp_request *stated = &listener->region->requests[watch->slot];
    const uint32_t *ids = dp_output(listener->region, watch->slot);
    CHECK(watch->count >= watch->seen && watch->count <= prompt_length(request));
    for (; watch->seen < watch->count; watch->seen++)
        CHECK(ids[watch->seen] == nth_id(request, watch->seen));
    if (watch->count)
        CHECK(stated->taken_ns >= listener->held[i].published_ns);
    if (watch->state == DP_DONE) {
        CHECK(watch->count == prompt_length(request));
        CHECK(stated->finish_reason == reason_for(request));
    } else {
        /* The state is loaded first, so output may be seen of a slot that was READY then. */
        CHECK(watch->state == DP_RUNNING || (watch->state == DP_READY && watch->count));
        if (listener->held[i].fate != LET_GO_LATER)
            return false;
    }
    CHECK(dp_let_go(listener->region, watch->slot, watch->generation) >= 0);
    listener->ended[watch->state == DP_DONE ? ANSWER : LET_GO_LATER]++;
    return true;
}

static void sleep_until_something(struct listener *listener) {
    int fd = listener->region->outputs[listener->owner - 1];
    struct pollfd output = {.fd = fd, .events = POLLIN};
    int awake =
        dp_listener_sleep(listener->region, listener->owner, listener->watches, listener->n);
    if (!awake)
        CHECK(poll(&output, 1, LOST_MS) > 0); /* else a wake-up was lost */
    dp_listener_wake(listener->region, listener->owner);
    if (!awake)
        dp_listener_drain(listener->region, listener->owner);
}

static void *listener_run(void *argument) {
    struct listener *listener = argument;
    uint32_t changed[HELD_MAX];
    while (listener->requests || listener->n) {
        bool full = false;
        while (!full && listener->requests && listener->n < HELD_MAX)
            full = !start(listener);
        uint32_t n = dp_poll(listener->region, listener->watches, listener->n, changed);
        while (n-- > 0) { /* from the end, so that the last entry can take an ended one's place */
            uint32_t i = changed[n];
            if (!serve(listener, i))
                continue;
            listener->n--;
            listener->watches[i] = listener->watches[listener->n];
            listener->held[i] = listener->held[listener->n];
        }
        if (listener->n == HELD_MAX || (listener->n && !listener->requests))
            sleep_until_something(listener);
        else if (full)
            sched_yield();
    }
    return NULL;
}

static void run_traffic(uint32_t requests, uint64_t seed) {
    struct dp_region *region = region_new(SLOTS, TOKENS, LISTENERS);
    struct engine engine = {.region = region, .stop_fd = eventfd(0, EFD_CLOEXEC), .seed = seed};
    struct listener listeners[LISTENERS] = {0};
    pthread_t engine_thread, threads[LISTENERS];
    CHECK(pthread_create(&engine_thread, NULL, engine_run, &engine) == 0);
    for (uint32_t i = 0; i < LISTENERS; i++) {
        listeners[i].region = region;
        listeners[i].owner = i + 1;
        listeners[i].requests = requests;
        listeners[i].seed = seed + 1 + i;
        listeners[i].next_request = 1 + i * UINT64_C(1000000000);
        CHECK(pthread_create(&threads[i], NULL, listener_run, &listeners[i]) == 0);
    }
    uint32_t ended[FATES] = {0};
    for (uint32_t i = 0; i < LISTENERS; i++) {
        pthread_join(threads[i], NULL);
        for (int fate = 0; fate < FATES; fate++)
            ended[fate] += listeners[i].ended[fate];
    }
    const uint64_t one = 1;
    CHECK(write(engine.stop_fd, &one, sizeof one) == sizeof one);
    pthread_join(engine_thread, NULL);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        CHECK(state_at(region, slot) == DP_FREE);
    CHECK(engine.taken == engine.finished && engine.finished - engine.cancelled >= ended[ANSWER]);
    printf("traffic: answered %u, aborted %u, let go at once %u, let go later %u; engine took %u, "
           "of which cancelled %u\n",
           ended[ANSWER], ended[ABORT], ended[LET_GO_AT_ONCE], ended[LET_GO_LATER], engine.taken,
           engine.cancelled);
    close(engine.stop_fd);
    region_delete(region);
}

int main(int argc, char **argv) {
    uint32_t requests = argument(argc, argv, 1, 5000);
    uint64_t seed = argument(argc, argv, 2, 1);
    run_crowd(1 + requests / 100, seed);
    run_traffic(requests, seed);
    return 0;
}
