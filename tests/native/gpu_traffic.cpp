/* Whole lives on the `device` table, with the kernels as they are on host threads: listeners that
 * claim, write, publish, read and let go by chance; the admission kernel, launched again and again;
 * a kernel that takes, echoes, sees cancellations and finishes; an engine of the host's that does
 * the same by a launch a turn; and whoever rings the listeners.
 * Prompts and outputs are checked id by id, so ThreadSanitizer sees every hand-over of memory. The
 * same once more with a runtime's own admission thread (admission_loop.h), in both its ways.
 *
 * usage: gpu_traffic [REQUESTS [SEED]] */
#include "gpu_world.h"

namespace {

/* A listener's request from claim to end ---------------------------------------------------------
 */

struct Listener {
    World *world;
    uint32_t owner;
    uint64_t seed;
    uint32_t requests;
    dp_commands *commands;
    dp_watch watch;
    uint32_t whole = 0, cancelled = 0, revoked = 0, full = 0, let_go = 0;
};

void check_output(Listener *self, uint64_t request, uint32_t from, uint32_t upto) {
    uint8_t bytes[TOKENS * 4];
    CHECK(dp_copy_output(self->world->region, self->watch.slot, from, upto, bytes) == DP_OK);
    for (uint32_t i = from; i < upto; i++) {
        uint32_t id;
        memcpy(&id, bytes + (i - from) * 4, 4);
        CHECK(id == nth_id(request, i));
    }
}

/* Where an admission thread keeps the clocks together, a slot is taken after it was published; the
 * timer of the device is too fast here, with which it is never told too early. */
void check_taken(Listener *self) {
    const dp_request *request = &self->world->region->requests[self->watch.slot];
    CHECK(request->taken_ns > 0);
    if (self->world->has_clock) {
        CHECK(request->taken_ns >= request->published_ns);
        CHECK(request->taken_ns < dp_realtime_ns() + LIMIT_MS * INT64_C(1000000));
    }
}

/* Sleeps as a listener does, until its slot has something new. */
void wait_for_output(Listener *self, int64_t until) {
    dp_region *region = self->world->region;
    pollfd rung = {region->outputs[self->owner - 1], POLLIN, 0};
    if (!dp_listener_sleep(region, self->owner, &self->watch, 1)) {
        CHECK(now_ms() < until);
        poll(&rung, 1, LIMIT_MS);
    }
    dp_listener_wake(region, self->owner);
    dp_listener_drain(region, self->owner);
}

/* Reads the answer to its end, or loses patience on the way. */
void read_answer(Listener *self, uint64_t request) {
    dp_watch *watch = &self->watch;
    uint32_t changed, patience = random_below(&self->seed, 8);
    int64_t until = now_ms() + LIMIT_MS;
    for (;;) {
        if (!dp_poll(self->world->region, watch, 1, &changed)) {
            wait_for_output(self, until);
            continue;
        }
        CHECK(watch->state == DP_READY || watch->state == DP_RUNNING || watch->state == DP_DONE);
        CHECK(watch->count >= watch->seen && watch->count <= length_of(request));
        check_output(self, request, watch->seen, watch->count);
        watch->seen = watch->count;
        if (watch->state == DP_DONE) {
            CHECK(watch->count == length_of(request));
            CHECK(self->world->region->requests[watch->slot].finish_reason == DP_FINISH_STOP);
            check_taken(self);
            self->world->holders[watch->slot] = 0;
            CHECK(dp_commands_release(self->commands, watch->slot, watch->generation) == DP_FREE);
            self->whole++;
            return;
        }
        if (patience-- == 0) {
            self->world->holders[watch->slot] = 0;
            if (random_below(&self->seed, 2)) {
                CHECK(dp_commands_let_go(self->commands, watch->slot, watch->generation) >= 0);
                self->let_go++;
                return;
            }
            self->world->holders[watch->slot] = self->owner;
            int state = dp_commands_cancel(self->commands, watch->slot, watch->generation);
            CHECK(state == DP_CANCELLING || state == DP_ILLEGAL);
            if (state == DP_CANCELLING) {
                self->cancelled++;
                return;
            }
            patience = 100;
        }
    }
}

void serve_request(Listener *self, uint64_t request) {
    dp_claimed claimed;
    uint32_t n = length_of(request);
    int status = dp_commands_admit(self->commands, 0, SLOTS, random_below(&self->seed, SLOTS),
                                   SLOTS, request, n, 4, TOKENS, 0, 0, 0, 0, &claimed);
    if (status == DP_FULL) {
        self->full++;
        sched_yield();
        return;
    }
    CHECK(status == DP_OK);
    CHECK(claimed.free_left < SLOTS);
    self->world->holders[claimed.slot] = self->owner;
    uint8_t body[TOKENS * 4];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = nth_id(request, i);
        memcpy(body + i * 4, &id, 4);
    }
    if (random_below(&self->seed, 10) == 0) { /* the client went away */
        self->world->holders[claimed.slot] = 0;
        CHECK(dp_commands_let_go(self->commands, claimed.slot, claimed.generation) == DP_FREE);
        self->let_go++;
        return;
    }
    CHECK(dp_commands_submit(self->commands, claimed.slot, claimed.generation, body, 0, n * 4) > 0);
    self->watch = {claimed.generation, claimed.slot, 0, 0, DP_READY, 0};
    if (random_below(&self->seed, 8) == 0) { /* the deadline passed */
        int state = dp_commands_revoke(self->commands, claimed.slot, claimed.generation);
        CHECK(state == DP_FREE || state == DP_ILLEGAL);
        if (state == DP_FREE) {
            self->revoked++;
            return;
        }
    }
    read_answer(self, request);
}

void listen(Listener *self) {
    for (uint32_t i = 0; i < self->requests; i++)
        serve_request(self, (uint64_t)i * LISTENERS + self->owner);
}

/* The runtime ------------------------------------------------------------------------------------
 */

/* A model kernel of one thread: takes, checks the prompt where it lies, echoes a few ids a turn. */
struct Job {
    uint64_t generation;
    uint32_t out, length;
    bool running;
};

uint32_t piece_of(const Job *job) {
    uint32_t left = job->length - job->out;
    return left < PIECE ? left : PIECE;
}

void model_turn(const dp_device *device, Job *job, uint32_t slot) {
    if (!job->running) {
        if (dp_slot_take(device, slot, &job->generation) != DP_RUNNING)
            return;
        *job = {job->generation, 0, dp_slot_tokens(device, slot), true};
        uint64_t request = device->requests[slot].request_id;
        CHECK(job->length == length_of(request));
        for (uint32_t i = 0; i < job->length; i++)
            CHECK((uint32_t)dp_slot_prompt(device, slot)[i] == nth_id(request, i));
    }
    uint32_t piece = piece_of(job);
    const int32_t *ids = dp_slot_prompt(device, slot) + job->out;
    CHECK(dp_slot_emit(device, slot, job->generation, ids, piece) == DP_OK);
    job->out += piece;
    if (job->out == job->length || dp_slot_is_cancelled(device, slot, job->generation)) {
        int state = dp_slot_finish(device, slot, job->generation, DP_FINISH_STOP);
        CHECK(state == DP_DONE || state == DP_FREE);
        job->running = false;
    }
}

void model(World *world) {
    Job jobs[SLOTS] = {};
    while (!world->stop.is_set()) {
        for (uint32_t slot = 0; slot < SLOTS; slot++)
            model_turn(world->device, &jobs[slot], slot);
        sched_yield();
    }
}

/* An engine of the host's, which competes with it for what is ready: it checks and echoes here, and
 * one launch a turn carries out what it asks for. */
void ask(World *world, dp_turn *turn, Job *job, uint32_t slot) {
    dp_turn_slot *part = dp_turn_at(turn, slot);
    if (!part->held)
        return;
    part->count = piece_of(job);
    const int32_t *ids = dp_prompt(world->region, slot) + job->out;
    memcpy(dp_turn_ids(world->region, turn, slot), ids, part->count * sizeof *ids);
    job->out += part->count;
    if (job->out == job->length || part->cancelled)
        part->reason = DP_FINISH_STOP;
}

void check_answers(dp_turn *turn) {
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        dp_turn_slot *part = dp_turn_at(turn, slot);
        CHECK(!part->held || part->emitted == DP_OK);
        CHECK(!part->reason || part->finished == DP_DONE || part->finished == DP_FREE);
    }
}

void begin(Job *job, const dp_taken *taken) {
    *job = {taken->generation, 0, taken->n_tokens, true};
    CHECK(job->length == length_of(taken->request_id));
    for (uint32_t i = 0; i < job->length; i++)
        CHECK((uint32_t)taken->tokens[i] == nth_id(taken->request_id, i));
}

void engine(World *world) {
    dp_turn *turn = (dp_turn *)calloc(1, dp_turn_bytes(world->region, PIECE));
    turn->take = 1;
    turn->room = PIECE;
    dp_taken taken[SLOTS];
    Job jobs[SLOTS] = {};
    while (!world->stop.is_set()) {
        bool asked = false;
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            ask(world, turn, &jobs[slot], slot);
            asked |= dp_turn_at(turn, slot)->count > 0;
        }
        if (!asked && !dp_turn_is_due(world->region, turn)) {
            sched_yield();
            continue;
        }
        dp_host_launch(1, 2, dp_engine_turn, (const dp_device *)world->device, turn);
        check_answers(turn);
        uint32_t n = dp_turn_end(world->region, turn, taken);
        world->engine_took += n;
        for (uint32_t i = 0; i < n; i++)
            begin(&jobs[taken[i].slot], &taken[i]);
        sched_yield();
    }
    free(turn);
}

/* The host's part: admission by residents and ticks in turn, and the bell. */
void host(World *world, uint64_t seed) {
    dp_bell *bell = dp_bell_new(world->region);
    while (!world->stop.is_set()) {
        dp_bell_ring(bell, -1);
        if (dp_device_wait(world->region, -1, 5, 0) <= 0)
            continue;
        if (random_below(&seed, 2))
            dp_host_launch(1, LISTENERS, dp_admission_tick, world->device, 64u);
        else
            dp_host_launch(1, LISTENERS, dp_admission_resident, world->device, 200u, 100u);
    }
    dp_bell_free(bell);
}

enum class By { turns, ticks, resident };

/* A runtime's admission thread, on the tests' driver, which is this program. */
struct Loop {
    dp_driver *driver;
    dp_admission *native;
    CUcontext gpu;
    CUstream stream;
};

Loop make_loop(World *world, By by) {
    char error[256] = "";
    CUcontext gpu = host_gpu();
    Loop loop{dp_driver_open(nullptr, error, sizeof error), nullptr, gpu, host_stream(gpu)};
    if (!loop.driver)
        fprintf(stderr, "%s\n", error);
    CHECK(loop.driver);
    dp_admission_plan plan = {world->region,
                              loop.driver,
                              gpu,
                              loop.stream,
                              host_function("dp_admission_tick"),
                              host_function("dp_admission_resident"),
                              (uint64_t)world->device,
                              -1,
                              -1,
                              by == By::resident};
    loop.native = dp_admission_new(&plan);
    CHECK(loop.native && !dp_admission_try(loop.native));
    return loop;
}

void run_loop(const Loop *loop) {
    CHECK(!dp_admission_run(loop->native));
}

void end_loop(Loop *loop) {
    dp_admission_free(loop->native);
    dp_driver_close(loop->driver);
    delete loop->stream;
    delete loop->gpu;
}

void ring_on(World *world) {
    dp_bell *bell = dp_bell_new(world->region);
    while (!world->stop.is_set())
        dp_bell_attend(bell, -1, 1000);
    dp_bell_free(bell);
}

void traffic(uint32_t requests, uint64_t seed, By by) {
    World world = make_world(SLOTS);
    std::vector<Listener> listeners(LISTENERS);
    Loop loop{};
    world.has_clock = by != By::turns;
    if (world.has_clock)
        loop = make_loop(&world, by);
    std::thread admission =
        by == By::turns ? std::thread(host, &world, seed + 10) : std::thread(run_loop, &loop);
    std::thread bell(ring_on, &world);
    std::thread models[] = {std::thread(model, &world), std::thread(engine, &world)};
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < LISTENERS; i++) {
        listeners[i].world = &world;
        listeners[i].owner = i + 1;
        listeners[i].seed = seed + i;
        listeners[i].requests = requests;
        listeners[i].commands = dp_commands_new(world.region, i + 1, 20, LIMIT_MS);
        threads.emplace_back(listen, &listeners[i]);
    }
    for (auto &thread : threads)
        thread.join();
    all_free(&world);
    world.stop.set();
    if (loop.native)
        dp_admission_end(loop.native);
    admission.join();
    for (auto &one : models)
        one.join();
    bell.join();
    end_loop(&loop);
    uint32_t whole = 0, cut = 0, full = 0;
    for (auto &one : listeners) {
        whole += one.whole;
        cut += one.cancelled + one.revoked + one.let_go;
        full += one.full;
        dp_commands_free(one.commands);
    }
    CHECK(whole && cut);
    const char *names[] = {"by turns", "by ticks", "by a resident kernel"};
    printf("traffic %s: %u answered, %u ended early, %u refused; %u went to the host's engine\n",
           names[(int)by], whole, cut, full, world.engine_took);
    end_world(&world);
}

/* A device that sleeps through a claim -----------------------------------------------------------
 */

void tick(World *world) {
    dp_host_launch(1, LISTENERS, dp_admission_tick, world->device, 1000u);
}

int admit(dp_commands *commands, dp_claimed *claimed, uint32_t slots) {
    return dp_commands_admit(commands, 0, slots, 0, slots, 1, 1, 4, TOKENS, 0, 0, 0, 0, claimed);
}

void abandoned(uint64_t) {
    World world = make_world(SLOTS);
    dp_commands *commands = dp_commands_new(world.region, 1, 1, 20);
    dp_claimed claimed;
    int64_t start = now_ms();
    CHECK(admit(commands, &claimed, SLOTS) == DP_UNANSWERED);
    CHECK(now_ms() - start < 2000);
    CHECK(dp_commands_dead(commands));
    start = now_ms();
    for (int i = 0; i < 1000; i++)
        CHECK(admit(commands, &claimed, SLOTS) == DP_UNANSWERED);
    CHECK(now_ms() - start < 1000);
    uint64_t before = dp_word_generation(world.device->words[0]);
    tick(&world);
    /* It was granted, and taken back. */
    CHECK(dp_word_generation(world.device->words[0]) ==
          ((before + 1) & (~UINT64_C(0) >> DP_GENERATION_SHIFT)));
    all_free(&world);
    CHECK(!dp_device_pending(world.region));
    dp_commands_free(commands);
    printf("abandoned: a claim that came too late was taken back\n");
    end_world(&world);
}

/* A listener that dies with slots in every state, and one that posts rubbish; another goes on. */
void dead_producer(uint64_t seed) {
    World world = make_world(SLOTS);
    dp_ring *ring = (dp_ring *)(world.region->base + world.region->layout.rings);
    dp_command *entries = (dp_command *)(ring + 1);
    std::thread admission(host, &world, seed);
    dp_commands *dead = dp_commands_new(world.region, 1, 20, LIMIT_MS);
    dp_commands *alive = dp_commands_new(world.region, 2, 20, LIMIT_MS);
    dp_claimed claimed;
    for (uint32_t i = 0; i < SLOTS; i++)
        CHECK(admit(dead, &claimed, SLOTS) == DP_OK);
    CHECK(admit(alive, &claimed, SLOTS) == DP_FULL);
    /* It dies between the two stores of a post, the command nonsense. */
    __atomic_store_n(&entries[SLOTS].command,
                     UINT64_C(1) << DP_COMMAND_LAP_SHIFT | UINT64_C(0x3FFFFFFFFFFFFF),
                     __ATOMIC_RELEASE);
    CHECK(admit(alive, &claimed, SLOTS) == DP_FULL);
    dp_commands_free(dead);
    dead = dp_commands_new(world.region, 1, 20, LIMIT_MS);
    CHECK(dp_commands_let_go_all(dead) == DP_OK);
    all_free(&world);
    for (uint32_t i = 0; i < SLOTS; i++)
        CHECK(admit(alive, &claimed, SLOTS) == DP_OK);
    dp_commands_free(dead);
    dp_commands_free(alive);
    world.stop.set();
    admission.join();
    printf("dead producer: its slots came back, another listener was served throughout\n");
    end_world(&world);
}

/* Rings that go round: laps, and as many commands without an answer as there may be. */
void laps(uint64_t) {
    World world = make_world(1);
    dp_commands *commands = dp_commands_new(world.region, 1, 1000000, LIMIT_MS);
    std::thread admission(host, &world, 1);
    dp_claimed claimed;
    uint8_t id[4] = {1};
    for (uint32_t i = 0; i < 6000; i++) { /* claim, publish, let go: over 1,023 laps of 16 */
        CHECK(admit(commands, &claimed, 1) == DP_OK);
        CHECK(dp_commands_submit(commands, 0, claimed.generation, id, 0, 4) > 0);
        CHECK(dp_commands_let_go(commands, 0, claimed.generation) == DP_FREE);
    }
    CHECK(!dp_commands_dead(commands));
    all_free(&world);
    world.stop.set();
    admission.join();
    dp_commands_free(commands);
    printf("laps: the ring went round more often than a lap's number can say\n");
    end_world(&world);
}

} // namespace

int main(int argc, char **argv) {
    uint32_t requests = argc > 1 ? (uint32_t)strtoul(argv[1], nullptr, 10) : 2000;
    uint64_t seed = argc > 2 ? strtoul(argv[2], nullptr, 10) : 1;
    host_set_timer(INT64_C(3600000000000), 200);
    abandoned(seed);
    dead_producer(seed);
    if (requests >= 1000)
        laps(seed);
    traffic(requests, seed, By::turns);
    if (requests >= 1000) {
        traffic(requests / 2, seed, By::ticks);
        traffic(requests / 2, seed, By::resident);
    }
    return 0;
}
