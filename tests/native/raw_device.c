/* The raw front on a `device` table, against a device that answers only when the case says so: what
 * waits for it, what happens meanwhile, and what becomes of claims that nobody waits for any more.
 */
#include "device_bed.h"

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
        CHECK(pump.raw->partitions[0]->first_unposted == &streams[posted]->stream);
        peer_resets(streams[posted]);
        peer_resets(streams[posted + 1]);
        CHECK(pump.raw->partitions[0]->first_unposted == &streams[gone]->stream);
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
        CHECK(!pump.raw->partitions[0]->first_claim);
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
            dp_raw_detach(&pump, 0, 1);
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
    dp_raw_detach(&pump, 0, 1);
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
    dp_raw_detach(&pump, 0, 1);
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

/* A device in a partition of its own: whose claim waits there is found there, and the slots of the
 * host beside it are nothing to it. */
static void test_beside_another_partition(void) {
    struct dp_region *hosts = region_new(SLOTS, TOKENS, OWNER);
    make_device_region();
    make_pump();
    CHECK(set_keys(BETA) == 0);
    struct dp_raw_config with = config();
    CHECK(dp_raw_attach(&pump, hosts, &with, BUSY) == 0);
    with.partition = BETA;
    with.answer_timeout = ANSWER;
    CHECK(dp_raw_attach(&pump, region, &with, BUSY) == 0);
    struct request alpha = with_key(3, "alpha"), beta = with_key(3, "beta");
    struct fake_stream *left = send_whole(0, &beta), *served = send_whole(0, &beta);
    struct fake_stream *other = send_whole(0, &alpha);
    dp_raw_pass(&pump);
    expect_verdict(other, 200, 0, 77);
    CHECK(left->sends == 0 && served->sends == 0);
    peer_resets(left);
    pass_after_device();
    pass_after_device();
    expect_verdict(served, 200, 1, 77);
    CHECK(word_state(0) == DP_FREE && dp_raw_partition_stats(&pump, BETA).claimed == 1);
    /* Nothing more is answered there. */
    struct fake_stream *stuck = send_whole(1, &beta);
    pump.now += ANSWER;
    CHECK(dp_raw_timer(&pump) <= pump.now);
    dp_raw_on_timer(&pump);
    CHECK(event_count == 2 && events[0].kind == DP_EVENT_STUCK && events[0].number == BETA);
    CHECK(events[1].with.refused.why == DP_WHY_STUCK && events[1].with.refused.partition == BETA);
    CHECK(stuck->handed);
    struct fake_stream *last = send_whole(1, &alpha);
    dp_raw_pass(&pump);
    expect_verdict(last, 200, 1, 77);
    leave_all();
    dp_raw_detach(&pump, BETA, 1);
    dp_raw_detach(&pump, 0, 1);
    free_pump();
    region_delete(hosts);
    drop_region();
}

int main(void) {
    RUN(test_a_whole_request, test_full, test_no_room, test_many_between_two_passes, test_leavers,
        test_decided_too_late, test_detach_and_end_all, test_stuck, test_late_itself,
        test_answers_of_nobody, test_deadline_in_ready, test_deadline_in_running,
        test_deadline_loses, test_leaves_while_asked, test_stuck_at_a_deadline, test_slow_reader,
        test_sleep, test_beside_another_partition);
    test_bodies(2);
    test_bodies(4);
    printf("raw_device: asked, answered, given up\n");
    return 0;
}
