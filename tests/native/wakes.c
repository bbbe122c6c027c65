/* A change against a sleeper that is just going to sleep: it sees the change or it is rung awake,
 * and a wake-up is never lost (contract 1, "Wake-ups").
 *
 * usage: wakes [ROUNDS [SEED [NAME]]] */
#include "harness.h"

static void drain_fd(int fd) {
    uint64_t rung;
    while (read(fd, &rung, sizeof rung) > 0)
        continue;
}

static bool readable(int fd, int timeout_ms) {
    struct pollfd waiting = {.fd = fd, .events = POLLIN};
    return poll(&waiting, 1, timeout_ms) > 0;
}

/* Warms the poster's cache with the sleepers' flags: a flag that is set then takes its time to get
 * about, and a fence that is missing shows. */
static void look_at_flags(struct round *round) {
    (void)dp_load_flag(&round->region->header->runtime_sleeping.value);
    (void)dp_load_flag(&round->region->header->listener_sleeping[0].value);
}

/* The runtime sleeps -----------------------------------------------------------------------------
 */

static void wait_for(struct round *round, uint32_t spin_us) {
    int64_t start = monotonic_ns();
    round->got[1] = dp_runtime_wait(round->region, -1, LOST_MS, spin_us);
    round->then[1] = (int)((monotonic_ns() - start) / 1000000);
}

static void wait_1(struct round *round) {
    wait_for(round, 0);
}
static void spin_1(struct round *round) {
    wait_for(round, 1);
}

static void prepare_writing(struct round *round) {
    round->held = held_slot(round->region, 1, DP_WRITING);
    look_at_flags(round);
}

static void publish_0(struct round *round) {
    round->got[0] =
        dp_publish(round->region, round->held.slot, round->held.generation, NULL) == DP_READY;
}

static void prepare_running(struct round *round) {
    round->held = held_slot(round->region, 1, DP_RUNNING);
    look_at_flags(round);
}

static void cancel_0(struct round *round) {
    round->got[0] =
        dp_cancel(round->region, round->held.slot, round->held.generation) == DP_CANCELLING;
}

static int judge_wait(struct round *round) {
    bool left = readable(round->region->doorbell, 0);
    drain_fd(round->region->doorbell);
    if (dp_load_flag(&round->region->header->runtime_sleeping.value))
        return -1;
    return round->got[0] == 1 && round->got[1] == 1 && round->then[1] < LOST_MS ? left : -1;
}

/* The listener sleeps ----------------------------------------------------------------------------
 */

static void sleep_1(struct round *round) {
    struct dp_watch watch = {.generation = round->held.generation, .slot = round->held.slot};
    uint32_t changed;
    int fd = round->region->outputs[0];
    dp_poll(round->region, &watch, 1, &changed);
    round->got[1] = dp_listener_sleep(round->region, 1, &watch, 1);
    round->then[1] = round->got[1] || readable(fd, LOST_MS);
    dp_listener_wake(round->region, 1);
    drain_fd(fd);
    round->then[1] += dp_poll(round->region, &watch, 1, &changed) == 1;
}

static void emit_0(struct round *round) {
    const int32_t id = 5;
    round->got[0] =
        dp_emit(round->region, round->held.slot, round->held.generation, &id, 1) == DP_OK;
}

static void finish_0(struct round *round) {
    round->got[0] = dp_finish(round->region, round->held.slot, round->held.generation,
                              DP_FINISH_STOP) == DP_DONE;
}

static int judge_sleep(struct round *round) {
    drain_fd(round->region->outputs[0]);
    if (readable(round->region->outputs[1], 0))
        return -1; /* another listener's */
    if (round->got[0] != 1 || round->then[1] != 2)
        return -1;
    return round->got[1] ? 0 : 1;
}

static const struct race races[] = {
    {"publish/wait",
     prepare_writing,
     {publish_0, wait_1},
     judge_wait,
     {"awake", "awake with a ring to spare"},
     1},
    {"publish/spin and wait",
     prepare_writing,
     {publish_0, spin_1},
     judge_wait,
     {"awake", "awake with a ring to spare"},
     1},
    {"cancel/wait",
     prepare_running,
     {cancel_0, wait_1},
     judge_wait,
     {"awake", "awake with a ring to spare"},
     1},
    {"emit/sleep",
     prepare_running,
     {emit_0, sleep_1},
     judge_sleep,
     {"seen before sleeping", "rung awake"},
     1},
    {"finish/sleep",
     prepare_running,
     {finish_0, sleep_1},
     judge_sleep,
     {"seen before sleeping", "rung awake"},
     1},
};

int main(int argc, char **argv) {
    uint32_t rounds = argument(argc, argv, 1, 2000);
    uint64_t seed = argument(argc, argv, 2, 1);
    for (size_t i = 0; i < sizeof races / sizeof *races; i++)
        if (argc <= 3 || strcmp(races[i].name, argv[3]) == 0)
            run_race(&races[i], rounds, seed + i * 1000);
    return 0;
}
