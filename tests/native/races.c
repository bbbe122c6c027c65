/* Two sides at one slot: every race that the verbs can run, with the outcomes that contract 1
 * allows.
 *
 * usage: races [ROUNDS [SEED]] */
#include "harness.h"

static int apply(struct round *round, int event) {
    return dp_apply(round->region, round->held.slot, round->held.generation, event);
}

static int let_go(struct round *round) {
    return dp_let_go(round->region, round->held.slot, round->held.generation);
}

static int finish(struct round *round, uint32_t reason) {
    return dp_finish(round->region, round->held.slot, round->held.generation, reason);
}

static bool ends(struct round *round, int got0, int got1, int state) {
    return round->got[0] == got0 && round->got[1] == got1 && state_at(round->region, 0) == state;
}

static void prepare_free(struct round *round) {
    /* Both sides know the generation that they compete for. */
    round->held.generation = (generation_at(round->region, 0) + 1) & UINT64_C(0xFFFFFFFFFF);
    round->held.slot = 0;
}

static void prepare_ready(struct round *round) {
    round->held = held_slot(round->region, 1, DP_READY);
}

static void prepare_running(struct round *round) {
    round->held = held_slot(round->region, 1, DP_RUNNING);
}

static void prepare_done(struct round *round) {
    round->held = held_slot(round->region, 1, DP_DONE);
}

/* Claim against claim: one wins, the other is told that all is taken. */

static void claim_as(struct round *round, int side) {
    uint32_t slots = round->region->geometry.slots;
    round->got[side] =
        dp_claim(round->region, (uint32_t)side + 1, 0, slots, 0, slots, &round->claimed[side]);
}

static void claim_0(struct round *round) {
    claim_as(round, 0);
}
static void claim_1(struct round *round) {
    claim_as(round, 1);
}

static int judge_claims(struct round *round) {
    int winner = round->got[0] == DP_OK ? 0 : 1;
    bool sound = round->got[winner] == DP_OK && round->got[1 - winner] == DP_FULL &&
                 state_at(round->region, 0) == DP_WRITING &&
                 owner_at(round->region, 0) == (uint32_t)winner + 1 &&
                 generation_at(round->region, 0) == round->held.generation &&
                 round->claimed[winner].generation == round->held.generation &&
                 round->claimed[winner].free_left == 0;
    return sound ? winner : -1;
}

/* Two claims for the last free slot of several. */

static void prepare_last_slot(struct round *round) {
    uint32_t last = random_below(&round->seed, round->region->geometry.slots);
    for (uint32_t slot = 0; slot < round->region->geometry.slots; slot++)
        held_slot(round->region, 2, DP_DONE);
    free_slot(round->region, last);
    round->held.slot = last;
}

static int judge_last_slot(struct round *round) {
    int winner = round->got[0] == DP_OK ? 0 : 1;
    bool sound = round->got[winner] == DP_OK && round->got[1 - winner] == DP_FULL &&
                 round->claimed[winner].slot == round->held.slot &&
                 owner_at(round->region, round->held.slot) == (uint32_t)winner + 1;
    return sound ? winner : -1;
}

/* Two claims for two slots: both are served, never with the same one. */

static int judge_two_slots(struct round *round) {
    if (round->got[0] != DP_OK || round->got[1] != DP_OK ||
        round->claimed[0].slot == round->claimed[1].slot)
        return -1;
    return round->claimed[0].slot == 0 ? 0 : 1;
}

/* Revoke against take. */

static void revoke_0(struct round *round) {
    round->got[0] = apply(round, DP_REVOKE);
}

static void take_1(struct round *round) {
    uint64_t generation = round->held.generation;
    round->got[1] = dp_take(round->region, round->held.slot, &generation);
    if (generation != round->held.generation)
        round->got[1] = 99;
}

static int judge_revoke(struct round *round) {
    if (ends(round, DP_FREE, DP_ILLEGAL, DP_FREE))
        return 0;
    return ends(round, DP_ILLEGAL, DP_RUNNING, DP_RUNNING) ? 1 : -1;
}

/* Cancel against finish. */

static void cancel_0(struct round *round) {
    round->got[0] = dp_cancel(round->region, round->held.slot, round->held.generation);
}

static void finish_1(struct round *round) {
    round->got[1] = finish(round, DP_FINISH_LENGTH);
}

static int judge_cancel(struct round *round) {
    if (ends(round, DP_CANCELLING, DP_FREE, DP_FREE))
        return 0;
    return ends(round, DP_ILLEGAL, DP_DONE, DP_DONE) &&
                   round->region->requests[0].finish_reason == DP_FINISH_LENGTH
               ? 1
               : -1;
}

/* Cancel against a finish after which the slot goes on to another request: an old cancel must not
 * reach the new one. */

static void finish_and_reuse_1(struct round *round) {
    round->got[1] = finish(round, DP_FINISH_STOP);
    if (round->got[1] == DP_DONE)
        apply(round, DP_RELEASE);
    round->claimed[1] = held_slot(round->region, 2, DP_RUNNING);
}

static int judge_reuse(struct round *round) {
    if (state_at(round->region, 0) != DP_RUNNING || owner_at(round->region, 0) != 2)
        return -1;
    if (round->got[0] == DP_CANCELLING && round->got[1] == DP_FREE)
        return 0;
    if (round->got[0] == DP_ILLEGAL && round->got[1] == DP_DONE)
        return 1;
    return round->got[0] == DP_STALE && round->got[1] == DP_DONE ? 2 : -1;
}

/* Let go against take, against finish, and against both. */

static void let_go_0(struct round *round) {
    round->got[0] = let_go(round);
}

static int judge_let_go_take(struct round *round) {
    if (ends(round, DP_FREE, DP_ILLEGAL, DP_FREE))
        return 0;
    return ends(round, DP_CANCELLING, DP_RUNNING, DP_CANCELLING) ? 1 : -1;
}

static int judge_let_go_finish(struct round *round) {
    if (ends(round, DP_CANCELLING, DP_FREE, DP_FREE))
        return 0;
    return ends(round, DP_FREE, DP_DONE, DP_FREE) ? 1 : -1;
}

static void take_and_finish_1(struct round *round) {
    round->then[1] = 0;
    take_1(round);
    if (round->got[1] == DP_RUNNING)
        round->then[1] = finish(round, DP_FINISH_STOP);
}

static int judge_let_go_both(struct round *round) {
    if (ends(round, DP_FREE, DP_ILLEGAL, DP_FREE))
        return 0;
    if (ends(round, DP_CANCELLING, DP_RUNNING, DP_FREE) && round->then[1] == DP_FREE)
        return 1;
    return ends(round, DP_FREE, DP_RUNNING, DP_FREE) && round->then[1] == DP_DONE ? 2 : -1;
}

/* Release against claim: full, or the next generation. */

static void release_0(struct round *round) {
    round->got[0] = apply(round, DP_RELEASE);
}

static int judge_release(struct round *round) {
    if (ends(round, DP_FREE, DP_FULL, DP_FREE))
        return 0;
    uint64_t next = (round->held.generation + 1) & UINT64_C(0xFFFFFFFFFF);
    return ends(round, DP_FREE, DP_OK, DP_WRITING) && round->claimed[1].generation == next ? 1 : -1;
}

/* Emit against poll: the ids are there whenever the count says so, and DONE comes with all. */

#define EMITTED 60

static int32_t nth_id(const struct round *round, uint32_t n) {
    return (int32_t)(round->held.generation * 31 + n) & 0xFFFF;
}

static void emit_0(struct round *round) {
    int32_t ids[EMITTED];
    uint64_t seed = round->held.generation;
    for (uint32_t out = 0, count; out < EMITTED; out += count) {
        count = 1 + random_below(&seed, EMITTED - out);
        for (uint32_t i = 0; i < count; i++)
            ids[i] = nth_id(round, out + i);
        CHECK(dp_emit(round->region, 0, round->held.generation, ids, count) == DP_OK);
    }
    round->got[0] = finish(round, DP_FINISH_STOP);
}

static void poll_1(struct round *round) {
    struct dp_watch watch = {.generation = round->held.generation, .slot = 0};
    const uint32_t *ids = dp_output(round->region, 0);
    uint32_t changed;
    round->got[1] = 0; /* how many times some, but not all, were seen */
    while (watch.state != DP_DONE) {
        if (!dp_poll(round->region, &watch, 1, &changed)) {
            dp_cpu_relax();
            continue;
        }
        CHECK(watch.count >= watch.seen && watch.count <= EMITTED);
        for (; watch.seen < watch.count; watch.seen++)
            CHECK(ids[watch.seen] == (uint32_t)nth_id(round, watch.seen));
        CHECK(watch.state == DP_DONE || watch.state == DP_RUNNING);
        round->got[1] += watch.state == DP_RUNNING;
    }
    CHECK(watch.count == EMITTED);
    CHECK(round->region->requests[0].finish_reason == DP_FINISH_STOP);
}

static int judge_emit(struct round *round) {
    return round->got[0] == DP_DONE ? round->got[1] > 0 : -1;
}

/* A whole life under a new generation against every verb of an old one: all are stale, and nothing
 * of the new one changes. */

static void old_verbs_0(struct round *round) {
    struct dp_region *region = round->region;
    const uint64_t old = round->held.generation;
    const int32_t id = 1;
    round->got[0] = 0;
    for (int i = 0; i < 4; i++) {
        for (int event = DP_PUBLISH; event < DP_EVENTS; event++)
            round->got[0] += dp_apply(region, 0, old, event) != DP_STALE;
        round->got[0] += dp_publish(region, 0, old, NULL) != DP_STALE;
        round->got[0] += dp_cancel(region, 0, old) != DP_STALE;
        round->got[0] += dp_let_go(region, 0, old) != DP_STALE;
        round->got[0] += dp_emit(region, 0, old, &id, 1) != DP_STALE;
        round->got[0] += dp_finish(region, 0, old, DP_FINISH_ERROR) != DP_STALE;
        round->got[0] += dp_is_cancelled(region, 0, old) != DP_STALE;
    }
}

static void new_life_1(struct round *round) {
    struct dp_region *region = round->region;
    const struct dp_request *request = &region->requests[0];
    const uint64_t generation = round->claimed[1].generation;
    const int32_t ids[3] = {11, 12, 13};
    struct dp_watch watch = {.generation = generation, .slot = 0};
    uint64_t taken;
    uint32_t changed;
    int64_t at_ns;
    CHECK(dp_publish(region, 0, generation, &at_ns) == DP_READY);
    CHECK(dp_take(region, 0, &taken) == DP_RUNNING && taken == generation);
    CHECK(dp_emit(region, 0, generation, ids, 3) == DP_OK);
    CHECK(dp_is_cancelled(region, 0, generation) == 0);
    CHECK(dp_finish(region, 0, generation, DP_FINISH_STOP) == DP_DONE);
    CHECK(dp_poll(region, &watch, 1, &changed) == 1 && watch.count == 3);
    CHECK(request->published_ns == at_ns && request->finish_reason == DP_FINISH_STOP);
    CHECK(memcmp(dp_output(region, 0), ids, sizeof ids) == 0);
    round->got[1] = dp_let_go(region, 0, generation);
}

static void prepare_stale(struct round *round) {
    prepare_done(round);
    free_slot(round->region, 0);
    round->claimed[1] = held_slot(round->region, 2, DP_WRITING);
}

static int judge_stale(struct round *round) {
    return ends(round, 0, DP_FREE, DP_FREE) ? 0 : -1;
}

/* The parent lets go for a listener that died, while the runtime takes and finishes; slots of
 * another listener stay as they are. */

#define DEAD_SLOTS 8

static const int at_death[DEAD_SLOTS] = {DP_WRITING,    DP_READY, DP_RUNNING, DP_READY,
                                         DP_CANCELLING, DP_DONE,  DP_RUNNING, DP_RUNNING};

static void prepare_death(struct round *round) {
    for (int i = 0; i < DEAD_SLOTS; i++)
        held_slot(round->region, 1, at_death[i]);
    for (int i = 0; i < 3; i++)
        held_slot(round->region, 2, at_death[i]);
}

static void bury_0(struct round *round) {
    round->got[0] = dp_let_go_all(round->region, 1);
}

static void run_all_1(struct round *round) {
    struct dp_region *region = round->region;
    uint64_t generation;
    round->then[1] = 0; /* how many were cancelled by the time they finished */
    for (uint32_t slot = 0; slot < DEAD_SLOTS; slot++)
        dp_take(region, slot, &generation);
    for (uint32_t slot = 0; slot < DEAD_SLOTS; slot++)
        round->then[1] +=
            dp_finish(region, slot, generation_at(region, slot), DP_FINISH_STOP) == DP_FREE;
}

static int judge_death(struct round *round) {
    for (uint32_t slot = 0; slot < DEAD_SLOTS; slot++)
        if (state_at(round->region, slot) != DP_FREE)
            return -1;
    for (uint32_t i = 0; i < 3; i++)
        if (state_at(round->region, DEAD_SLOTS + i) != at_death[i] ||
            owner_at(round->region, DEAD_SLOTS + i) != 2)
            return -1;
    /* Each was let go once, but for the one that was cancelled already. */
    if (round->got[0] != DEAD_SLOTS - 1 || round->then[1] < 1)
        return -1;
    return round->then[1] > 1;
}

static const struct race races[] = {
    {"claim/claim, one slot",
     prepare_free,
     {claim_0, claim_1},
     judge_claims,
     {"first wins", "second wins"},
     1},
    {"claim/claim, last of four",
     prepare_last_slot,
     {claim_0, claim_1},
     judge_last_slot,
     {"first wins", "second wins"},
     4},
    {"claim/claim, two slots",
     prepare_free,
     {claim_0, claim_1},
     judge_two_slots,
     {"in order", "crossed"},
     2},
    {"revoke/take", prepare_ready, {revoke_0, take_1}, judge_revoke, {"revoked", "taken"}, 1},
    {"cancel/finish",
     prepare_running,
     {cancel_0, finish_1},
     judge_cancel,
     {"cancelled", "done"},
     1},
    {"cancel/finish and reuse",
     prepare_running,
     {cancel_0, finish_and_reuse_1},
     judge_reuse,
     {"cancelled", "done", "stale"},
     1},
    {"let go/take",
     prepare_ready,
     {let_go_0, take_1},
     judge_let_go_take,
     {"revoked", "cancelled"},
     1},
    {"let go/finish",
     prepare_running,
     {let_go_0, finish_1},
     judge_let_go_finish,
     {"cancelled", "released"},
     1},
    {"let go/take and finish",
     prepare_ready,
     {let_go_0, take_and_finish_1},
     judge_let_go_both,
     {"revoked", "cancelled", "released"},
     1},
    {"release/claim", prepare_done, {release_0, claim_1}, judge_release, {"full", "claimed"}, 1},
    {"emit/poll", prepare_running, {emit_0, poll_1}, judge_emit, {"at once", "in parts"}, 1},
    {"old verbs/new life", prepare_stale, {old_verbs_0, new_life_1}, judge_stale, {"untouched"}, 1},
    {"death/finish",
     prepare_death,
     {bury_0, run_all_1},
     judge_death,
     {"none cancelled", "some cancelled"},
     DEAD_SLOTS + 3},
};

int main(int argc, char **argv) {
    uint32_t rounds = argument(argc, argv, 1, 2000);
    uint64_t seed = argument(argc, argv, 2, 1);
    for (size_t i = 0; i < sizeof races / sizeof *races; i++)
        run_race(&races[i], rounds, seed + i * 1000);
    return 0;
}
