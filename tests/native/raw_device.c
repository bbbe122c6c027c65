/* The raw front on a `device` table, against a device that answers only when the case says so: what
 * waits for it, what happens meanwhile, and what becomes of claims that nobody waits for any more.
 * The stand-in carries out commands as gpu/admission.cu does, on words of its own. */
#include "raw_bed.h"

#include "gpu/ring.h"
#include "pump/raw_inside.h"

#define ANSWER     (900 * INT64_C(1000000))
#define GENERATION (~UINT64_C(0) >> 24)

static uint64_t words[SLOTS]; /* the device's own */
static uint64_t carried_out;

/* The device ----------------------------------------------------------------------------------- */

static struct dp_ring *ring(void) {
    return (struct dp_ring *)(region->base + region->layout.rings +
                              (OWNER - 1) * region->layout.ring_bytes);
}

static struct dp_command *entry_of(uint64_t position) {
    return (struct dp_command *)(ring() + 1) + position % dp_ring_entries(SLOTS);
}

static uint64_t lap_of(uint64_t position) {
    return position / dp_ring_entries(SLOTS) % DP_LAPS + 1;
}

static int word_state(uint32_t slot) {
    return (int)(words[slot] & 0xFF);
}

static void become(uint32_t slot, int state) {
    words[slot] = (words[slot] & ~UINT64_C(0xFF)) | (uint64_t)state;
}

static int listener_does(uint32_t slot, int event) {
    int to = dp_next_state(event, word_state(slot));
    if (to >= 0) {
        become(slot, to);
        dp_store_release(&region->states[slot], words[slot]);
    }
    return to;
}

static int let_go(uint32_t slot) {
    static const int way_out[] = {[DP_WRITING] = DP_ABORT,
                                  [DP_READY] = DP_REVOKE,
                                  [DP_RUNNING] = DP_CANCEL,
                                  [DP_DONE] = DP_RELEASE};
    int state = word_state(slot);
    bool held = state != DP_FREE && state != DP_CANCELLING;
    return held ? listener_does(slot, way_out[state]) : DP_ILLEGAL;
}

static int carry_out_claim(uint64_t command, uint64_t *name) {
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

static int carry_out(uint64_t command, uint64_t *name) {
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
static uint32_t device_runs_for(uint32_t most) {
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

static uint32_t device_runs(void) {
    return device_runs_for(UINT32_MAX);
}

/* The runtime, which runs there too. */
static void runtime_does(uint32_t slot, int event) {
    int to = dp_next_state(event, word_state(slot));
    CHECK(to >= 0);
    if (event == DP_TAKE)
        region->requests[slot].taken_ns = dp_realtime_ns();
    become(slot, to);
    dp_store_release(&region->mirrors[slot], words[slot]);
}

static void runtime_emits(uint32_t slot, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        dp_output(region, slot)[i] = (uint32_t)nth_output(i);
    dp_store_release(&region->progress[slot], words[slot] >> 24 << 24 | count);
}

static void runtime_finishes(uint32_t slot, uint32_t reason) {
    region->requests[slot].finish_reason = reason;
    runtime_does(slot, DP_FINISH);
}

static void free_all(void) {
    device_runs();
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        if (word_state(slot) == DP_CANCELLING)
            runtime_does(slot, DP_FINISH);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        CHECK(word_state(slot) == DP_FREE);
}

/* Cases ----------------------------------------------------------------------------------------
 */

static void begin_on_device(uint32_t max_writing) {
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
    struct dp_raw_config with = config();
    with.max_writing = max_writing;
    with.answer_timeout = ANSWER;
    begin_with(with);
}

/* Everybody leaves, the attachment ends, and the device has given back all. */
static void end_on_device(void) {
    leave_all();
    CHECK(dp_raw_in_flight(&pump) == 0);
    dp_raw_detach(&pump, 1);
    CHECK(!pump.raw->commands && !pump.raw->first_claim && !pump.raw->first_unposted);
    free_all();
    free_pump();
    drop_region();
}

static void pass_after_device(void) {
    device_runs();
    dp_raw_pass(&pump);
}

static void expect_waiting(const struct fake_stream *stream) {
    CHECK(stream->stream.app_state == DP_RAW_CLAIMING && stream->stream.in.consumed == 0);
    CHECK(stream->sends == 0 && !stream->handed);
}

static struct fake_stream *send_published(uint32_t slot, uint32_t deadline_ms) {
    struct request request = request_of(3, 4, 48);
    request.affinity = slot + SLOTS;
    request.deadline_ms = deadline_ms;
    encode(&request);
    struct fake_stream *stream = send_whole(0, &request);
    pass_after_device();
    CHECK(device_runs() == 1 && word_state(slot) == DP_READY);
    return stream;
}

static void test_a_whole_request(void) {
    begin_on_device(SLOTS);
    struct request request = encoded(5, 4, 48);
    struct fake_stream *stream = send_whole(0, &request);
    expect_waiting(stream);
    CHECK(dp_raw_timer(&pump) == pump.now + ANSWER);
    dp_raw_pass(&pump);
    expect_waiting(stream);
    CHECK(device_runs() == 1);
    expect_waiting(stream);
    dp_raw_pass(&pump);
    CHECK(dp_raw_timer(&pump) == INT64_MAX);
    expect_verdict(stream, 200, 0, 77);
    CHECK(stream->sends == 1 && get(stream->sent + 28, 4) == SLOTS - 1);
    CHECK(device_runs() == 1);
    check_published(&request, 0);
    runtime_does(0, DP_TAKE);
    runtime_emits(0, 2);
    dp_raw_pass(&pump);
    runtime_emits(0, 3);
    runtime_finishes(0, DP_FINISH_LENGTH);
    dp_raw_pass(&pump);
    expect_output(stream, 3);
    expect_end(stream, 2, 5, 3);
    CHECK(device_runs() == 1 && word_state(0) == DP_FREE);
    expect_stats(1, 1, 0, 0);
    for (uint32_t series = 0; series < DP_RAW_SERIES; series++)
        CHECK(counted(series) == 1);
    end_on_device();
}

/* A body may come before the answer, after it, or both; its end is when it came. */
static void test_bodies(uint32_t width) {
    struct request request = encoded(9, width, 60);
    for (size_t before = 60; before <= request.size; before++) {
        begin_on_device(SLOTS);
        struct fake_stream *stream = send_part(0, &request, 60);
        arrive(stream, request.wire, 60, before, before == request.size);
        expect_waiting(stream);
        conns[0].at_ns += SECOND; /* as seen by whoever takes the time of the answer for it */
        pass_after_device();
        if (before < request.size) {
            CHECK(stream->stream.app_state == DP_RAW_EXCHANGE && conns[0].entry.writing == 1);
            arrive(stream, request.wire, before, request.size, true);
        }
        CHECK(device_runs() == 1);
        check_published(&request, 0);
        CHECK(dp_raw_stats(&pump).negative == (before < request.size));
        end_on_device();
    }
}

static void test_full(void) {
    begin_on_device(SLOTS);
    struct request request = encoded(5, 4, 48);
    struct fake_stream *streams[SLOTS + 2];
    for (uint32_t i = 0; i < SLOTS + 2; i++)
        streams[i] = i < SLOTS + 1 ? send_whole(0, &request) : send_part(0, &request, 50);
    CHECK(device_runs() == SLOTS + 2);
    dp_raw_pass(&pump);
    for (uint32_t i = 0; i < SLOTS; i++)
        expect_verdict(streams[i], 200, i, 77);
    for (uint32_t i = SLOTS; i < SLOTS + 2; i++) {
        expect_verdict(streams[i], 429, 0xFFFF, 77);
        CHECK(streams[i]->fin && streams[i]->stops == i - SLOTS);
    }
    CHECK(dp_raw_stats(&pump).busy == 2 && event_count == 0);
    end_on_device();
}

/* More claims than the ring has room for wait until there is some, and keep their order. */
static void test_no_room(void) {
    for (uint32_t answers = 1; answers < 8; answers++) {
        begin_on_device(SLOTS);
        struct request request = encoded(1, 4, 48);
        struct fake_stream *streams[STREAMS_MAX];
        for (uint32_t i = 0; i < STREAMS_MAX; i++) {
            request.id = i + 1;
            encode(&request);
            streams[i] = send_whole(0, &request);
        }
        const uint32_t posted = 32 - 3 * SLOTS, gone = posted + 2; /* of as many entries */
        CHECK(pump.raw->first_unposted == &streams[posted]->stream);
        peer_resets(streams[posted]);
        peer_resets(streams[posted + 1]);
        CHECK(pump.raw->first_unposted == &streams[gone]->stream);
        for (uint32_t i = 0; i < 2 * STREAMS_MAX; i++) {
            uint64_t before = carried_out;
            device_runs_for(answers);
            CHECK(i || carried_out > before);
            dp_raw_pass(&pump);
        }
        for (uint32_t i = 0; i < STREAMS_MAX; i++)
            if (i < SLOTS)
                expect_verdict(streams[i], 200, i, i + 1);
            else if (i < posted || i >= gone)
                expect_verdict(streams[i], 429, 0xFFFF, i + 1);
        CHECK(!pump.raw->first_claim);
        expect_stats(SLOTS, 0, 0, 0);
        end_on_device();
    }
}

/* A device that answers at once writes no answer over that was not looked at. */
static void test_many_between_two_passes(void) {
    begin_on_device(SLOTS);
    struct request request = encoded(1, 4, 48);
    struct fake_stream *streams[STREAMS_MAX];
    for (uint32_t i = 0; i < STREAMS_MAX; i++) {
        streams[i] = send_whole(0, &request);
        device_runs();
    }
    for (uint32_t i = 0; i < 3; i++)
        pass_after_device();
    for (uint32_t i = 0; i < STREAMS_MAX; i++)
        expect_verdict(streams[i], i < SLOTS ? 200 : 429, i < SLOTS ? i : 0xFFFF, 77);
    end_on_device();
}

static void check_granted_to_nobody(void) {
    CHECK(device_runs() == 1 && word_state(0) == DP_WRITING);
    dp_raw_pass(&pump);
    CHECK(device_runs() == 1 && word_state(0) == DP_FREE);
    CHECK(dp_raw_timer(&pump) == INT64_MAX);
    expect_stats(0, 0, 0, 0);
    end_on_device();
}

/* A client that does not wait for the answer: what it would have got goes back. */
static void test_leavers(void) {
    struct request request = encoded(5, 4, 48);
    begin_on_device(SLOTS);
    struct fake_stream *stream = send_part(0, &request, 50);
    peer_resets(stream);
    CHECK(stream->resets == 1);
    check_granted_to_nobody();
    begin_on_device(SLOTS);
    stream = send_part(0, &request, 50);
    peer_stops(stream);
    CHECK(stream->stops == 1);
    check_granted_to_nobody();
    begin_on_device(SLOTS);
    close_stream(send_whole(0, &request));
    check_granted_to_nobody();
    begin_on_device(SLOTS);
    stream = send_part(0, &request, 50);
    CHECK(dp_raw_unread(&pump, 1, stream->stream.id, 3) == 1);
    CHECK(stream->resets == 1 && stream->stops == 1);
    check_granted_to_nobody();
    begin_on_device(SLOTS);
    send_whole(0, &request);
    leave_all();
    check_granted_to_nobody();
}

/* What is left to Python while its claim is on the way holds nothing. */
static void test_decided_too_late(void) {
    struct request request = encoded(5, 4, 48);
    begin_on_device(SLOTS);
    struct fake_stream *stream = send_whole(0, &request);
    dp_raw_drain(&pump);
    device_runs();
    dp_raw_pass(&pump);
    CHECK(stream->handed && stream->stream.in.consumed == 0);
    CHECK(device_runs() == 1 && word_state(0) == DP_FREE);
    end_on_device();
    begin_on_device(1);
    struct fake_stream *first = send_part(0, &request, 50), *second = send_part(0, &request, 50);
    pass_after_device();
    CHECK(first->stream.app_state == DP_RAW_EXCHANGE && second->handed);
    CHECK(device_runs() == 1 && word_state(1) == DP_FREE && conns[0].entry.writing == 1);
    end_on_device();
}

static void test_detach_and_end_all(void) {
    struct request request = encoded(5, 4, 48);
    for (uint32_t detach = 0; detach < 2; detach++) {
        begin_on_device(SLOTS);
        send_part(0, &request, 50);
        pass_after_device();
        struct fake_stream *ready = send_whole(0, &request);
        pass_after_device();
        struct fake_stream *waiting = send_whole(0, &request);
        if (detach)
            dp_raw_detach(&pump, 1);
        else
            dp_raw_end_all(&pump, 4);
        CHECK(ready->resets == 1 && waiting->handed && event_count == 2);
        CHECK(events[0].with.refused.why == DP_WHY_LOST && events[0].with.refused.request_id == 77);
        CHECK(events[1].with.refused.why == DP_WHY_LOST && events[0].flags == 1);
        expect_stats(2, 0, 0, 2);
        device_runs();
        if (!detach)
            dp_raw_pass(&pump);
        free_all();
        end_on_device();
    }
}

/* A device that does not answer --------------------------------------------------------------- */

static void test_stuck(void) {
    begin_on_device(SLOTS);
    struct request request = encoded(5, 4, 48);
    struct fake_stream *served = send_part(0, &request, 50);
    pass_after_device();
    struct fake_stream *whole = send_whole(0, &request);
    pump.now += ANSWER / 2;
    struct fake_stream *part = send_part(0, &request, 50);
    pass_time(pump.now + ANSWER / 2 - 1);
    expect_waiting(whole);
    pass_time(pump.now + 1);
    CHECK(event_count == 3 && events[0].kind == DP_EVENT_STUCK && whole->handed && part->handed);
    CHECK(events[1].with.refused.why == DP_WHY_STUCK && events[1].flags == 1);
    CHECK(events[2].with.refused.why == DP_WHY_STUCK && events[2].flags == 0);
    CHECK(events[2].with.refused.request_id == 77 && events[2].with.refused.n_tokens == 5);
    CHECK(dp_raw_timer(&pump) >= pump.now);
    /* From now on nobody waits, and whoever would not be admitted anyway is Python's. */
    expect_refused(send_whole(0, &request), DP_WHY_STUCK, 0, 0, true);
    CHECK(event_count == 4);
    struct request bad = encoded(5, 4, 48);
    bad.wire[0] = 'X';
    CHECK(send_whole(0, &bad)->handed && event_count == 4);
    /* It wakes up: what it does is not looked at before the end, which takes all back. */
    device_runs();
    dp_raw_pass(&pump);
    arrive(served, request.wire, 50, request.size, true);
    CHECK(served->sends == 0 && event_count == 4 && dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    dp_raw_detach(&pump, 1);
    expect_refused(served, DP_WHY_LOST, 0, 0, true);
    end_on_device();
}

/* This thread was late itself: the answer is there. */
static void test_late_itself(void) {
    begin_on_device(SLOTS);
    struct request request = encoded(5, 4, 48);
    struct fake_stream *stream = send_whole(0, &request);
    device_runs();
    pass_time(pump.now + 2 * ANSWER);
    expect_verdict(stream, 200, 0, 77);
    CHECK(event_count == 0);
    end_on_device();
}

/* What the region says of a claim is checked. */
static void test_answers_of_nobody(void) {
    begin_on_device(SLOTS);
    struct request request = encoded(5, 4, 48);
    send_whole(0, &request);
    uint64_t verdict = (uint64_t)DP_WRITING | UINT64_C(999) << 4 | UINT64_C(1) << 54;
    dp_store_release(&entry_of(0)->verdict, verdict);
    dp_raw_pass(&pump);
    CHECK(event_count == 2 && events[0].kind == DP_EVENT_STUCK);
    CHECK(events[1].with.refused.why == DP_WHY_STUCK);
    end_on_device();
    begin_on_device(SLOTS);
    send_part(0, &request, 50);
    pass_after_device();
    request.affinity = SLOTS;
    encode(&request);
    become(0, DP_FREE);
    struct fake_stream *twice = send_whole(0, &request);
    pass_after_device();
    expect_broken("slot 0: it was given out twice");
    CHECK(twice->handed);
    end_on_device();
}

/* Deadlines ------------------------------------------------------------------------------------ */

static void test_deadline_in_ready(void) {
    begin_on_device(SLOTS);
    struct fake_stream *stream = send_published(1, 100);
    pass_time(pump.now + SECOND / 10);
    CHECK(stream->sends == 1 && !stream->fin && dp_raw_timer(&pump) > pump.now);
    pass_after_device();
    expect_end(stream, 3, 3, 0);
    CHECK(word_state(1) == DP_FREE && dp_raw_timer(&pump) == INT64_MAX);
    expect_stats(1, 1, 0, 0);
    end_on_device();
}

static struct fake_stream *send_running(uint32_t slot, uint32_t deadline_ms) {
    struct fake_stream *stream = send_published(slot, deadline_ms);
    runtime_does(slot, DP_TAKE);
    runtime_emits(slot, 2);
    return stream;
}

/* First the revoke loses, then the slot is cancelled with what was out until then. */
static void test_deadline_in_running(void) {
    begin_on_device(SLOTS);
    struct fake_stream *stream = send_running(1, 100);
    pass_time(pump.now + SECOND / 10);
    runtime_emits(1, 3);
    CHECK(device_runs() == 1);
    dp_raw_pass(&pump);
    expect_output(stream, 3);
    CHECK(!stream->fin);
    runtime_emits(1, 5); /* too late */
    CHECK(device_runs() == 1 && word_state(1) == DP_CANCELLING);
    dp_raw_pass(&pump);
    expect_output(stream, 3);
    expect_end(stream, 3, 3, 3);
    CHECK(dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    runtime_finishes(1, DP_FINISH_STOP);
    expect_stats(1, 1, 0, 0);
    end_on_device();
}

/* The runtime is done before the cancel: its answer counts. */
static void test_deadline_loses(void) {
    begin_on_device(SLOTS);
    struct fake_stream *stream = send_running(1, 100);
    pass_time(pump.now + SECOND / 10);
    pass_after_device(); /* the revoke; the cancel is posted */
    runtime_emits(1, 4);
    runtime_finishes(1, DP_FINISH_LENGTH);
    pass_after_device();
    expect_output(stream, 4);
    expect_end(stream, 2, 3, 4);
    CHECK(device_runs() == 1 && word_state(1) == DP_FREE);
    end_on_device();
}

/* Its client goes while the device is asked, and another request has the slot when it answers. */
static void test_leaves_while_asked(void) {
    for (uint32_t running = 0; running < 2; running++) {
        begin_on_device(SLOTS);
        struct fake_stream *stream = running ? send_running(1, 100) : send_published(1, 100);
        pass_time(pump.now + SECOND / 10);
        if (running)
            pass_after_device();
        peer_stops(stream);
        expect_stats(1, 0, 1, 0);
        device_runs();
        if (running)
            runtime_finishes(1, DP_FINISH_STOP);
        struct fake_stream *next = send_published(1, 0);
        expect_stats(2, 0, 1, 0);
        CHECK(next->sends == 1 && !next->fin && event_count == 0);
        end_on_device();
    }
}

static void test_stuck_at_a_deadline(void) {
    begin_on_device(SLOTS);
    struct fake_stream *stream = send_running(1, 100);
    dp_raw_pass(&pump);
    pass_time(pump.now + SECOND / 10 + ANSWER);
    CHECK(event_count == 1 && events[0].kind == DP_EVENT_STUCK && !stream->fin);
    dp_raw_detach(&pump, 1);
    CHECK(stream->resets == 1 && stream->reset_code == 1);
    device_runs();
    runtime_finishes(1, DP_FINISH_STOP);
    end_on_device();
}

static void test_slow_reader(void) {
    begin_on_device(SLOTS);
    struct fake_stream *stream = send_running(1, 0);
    dp_raw_pass(&pump);
    conns[0].unacked = LIMIT + 1;
    runtime_emits(1, 3);
    runtime_finishes(1, DP_FINISH_LENGTH);
    dp_raw_pass(&pump);
    pass_time(pump.now + 2 * SECOND);
    dp_raw_pass(&pump);
    CHECK(stream->resets == 1 && stream->reset_code == 3);
    CHECK(device_runs() == 1 && word_state(1) == DP_FREE);
    end_on_device();
}

/* An answer keeps the listener awake as output does. */
static void test_sleep(void) {
    begin_on_device(SLOTS);
    struct request request = encoded(5, 4, 48);
    send_whole(0, &request);
    CHECK(dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    device_runs();
    CHECK(!dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    dp_raw_pass(&pump);
    CHECK(dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    end_on_device();
}

int main(void) {
    RUN(test_a_whole_request, test_full, test_no_room, test_many_between_two_passes, test_leavers,
        test_decided_too_late, test_detach_and_end_all, test_stuck, test_late_itself,
        test_answers_of_nobody, test_deadline_in_ready, test_deadline_in_running,
        test_deadline_loses, test_leaves_while_asked, test_stuck_at_a_deadline, test_slow_reader,
        test_sleep);
    test_bodies(2);
    test_bodies(4);
    printf("raw_device: asked, answered, given up\n");
    return 0;
}
