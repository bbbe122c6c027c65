/* How a request of the raw front ends before its answer does: time, its client, the attachment. */
#include "raw_bed.h"

/* Time ---------------------------------------------------------------------------------------- */

static void test_late_headers(void) {
    begin();
    int64_t start = pump.now;
    struct request request = encoded(4, 4, 60);
    struct fake_stream *first = send_part(0, &request, 7);
    pump.now += SECOND;
    struct fake_stream *second = send_part(1, &request, 59), *third = send_part(0, &request, 20);
    struct fake_stream *whole = send_part(0, &request, 20);
    arrive(whole, request.wire, 20, request.size, true);
    CHECK(state_at(region, 0) == DP_READY);
    pass_time(start + TIMEOUT - 1);
    CHECK(event_count == 0);
    pass_time(start + TIMEOUT + TIMEOUT / 20);
    CHECK(event_count == 1);
    const struct dp_refused *refused = expect_refused(first, DP_WHY_HEADER_LATE, 7, 0, false);
    CHECK(refused->request_id == 0 && refused->n_tokens == 0);
    peer_resets(third);
    CHECK(third->resets == 1 && third->reset_code == 0);
    pass_time(start + TIMEOUT * 3);
    CHECK(event_count == 2);
    expect_refused(second, DP_WHY_HEADER_LATE, 59, 0, false);
    CHECK(dp_raw_timer(&pump) == INT64_MAX);
    end();
}

static void test_late_bodies(uint32_t width) {
    for (size_t body = 0; body <= 5 * width; body++) {
        begin();
        int64_t start = pump.now;
        struct request request = encoded(5, width, 48);
        struct fake_stream *stream = send_part(0, &request, 48);
        pump.now += 3 * SECOND;
        arrive(stream, request.wire, 48, 48 + body, false);
        pass_time(start + TIMEOUT - 1);
        CHECK(event_count == 0 && taken_slots() == 1);
        pass_time(start + TIMEOUT + TIMEOUT / 20);
        expect_refused(stream, DP_WHY_LATE, (uint32_t)(body / width), 0, false);
        expect_given_back(1);
        arrive(stream, request.wire, 48 + body, request.size, true);
        check_canaries(0, (uint32_t)(body / width) + 1);
        CHECK(dp_raw_timer(&pump) == INT64_MAX);
        end();
    }
}

/* It counts from the arrival, which was two seconds before the header was looked at. */
static void test_deadline_before_publish(void) {
    begin();
    int64_t start = pump.now;
    struct request request = request_of(5, 4, 48);
    request.deadline_ms = 3000;
    encode(&request);
    conns[0].at_ns = dp_realtime_ns() - 2 * SECOND;
    struct fake_stream *stream = send_part(0, &request, 61);
    int64_t due = dp_raw_timer(&pump);
    CHECK(due == start + TIMEOUT / 20);
    pass_time(start + SECOND - SECOND / 10);
    CHECK(event_count == 0);
    pass_time(start + SECOND);
    expect_refused(stream, DP_WHY_LATE, 3, 0, false);
    expect_given_back(1);
    end();
}

static struct fake_stream *send_with_deadline(uint32_t ms) {
    struct request request = request_of(3, 4, 48);
    request.deadline_ms = ms;
    request.affinity = SLOTS;
    encode(&request);
    struct fake_stream *stream = send_whole(0, &request);
    CHECK(state_at(region, 0) == DP_READY && dp_raw_timer(&pump) <= pump.now + ms * 1000000);
    return stream;
}

static void test_deadline_in_ready(void) {
    for (int answered = 0; answered < 2; answered++) {
        begin();
        struct fake_stream *stream = send_with_deadline(10);
        if (answered)
            dp_raw_pass(&pump);
        pass_time(pump.now + SECOND / 100);
        CHECK(state_at(region, 0) == DP_FREE && stream->sends == (answered ? 2 : 1));
        expect_verdict(stream, 200, 0, 77);
        expect_end(stream, 3, 3, 0);
        expect_stats(1, 1, 0, 0);
        CHECK(counted(2) == 0 && counted(4) == 1);
        end();
    }
}

static void test_deadline_in_running(void) {
    for (uint32_t before = 0; before < 3; before++) {
        begin();
        uint64_t generation;
        struct fake_stream *stream = send_with_deadline(10);
        CHECK(dp_take(region, 0, &generation) == DP_RUNNING);
        emit(0, generation, 0, before);
        if (before != 1)
            dp_raw_pass(&pump);
        uint32_t out = before == 1 ? 1 : before + 2;
        emit(0, generation, before, out);
        pump.now += SECOND;
        dp_raw_on_timer(&pump);
        CHECK(state_at(region, 0) == DP_CANCELLING);
        expect_verdict(stream, 200, 0, 77);
        expect_output(stream, out);
        expect_end(stream, 3, 3, out);
        expect_stats(1, 1, 0, 0);
        CHECK(counted(2) == 1 && counted(3) == 1 && counted(4) == 1);
        dp_raw_pass(&pump);
        CHECK(dp_finish(region, 0, generation, DP_FINISH_STOP) == DP_FREE);
        end();
    }
}

/* The runtime was done before the deadline: its own reason counts. */
static void test_deadline_loses(void) {
    begin();
    uint64_t generation;
    struct fake_stream *stream = send_with_deadline(10);
    CHECK(dp_take(region, 0, &generation) == DP_RUNNING);
    emit(0, generation, 0, 4);
    CHECK(dp_finish(region, 0, generation, DP_FINISH_LENGTH) == DP_DONE);
    pump.now += SECOND;
    dp_raw_on_timer(&pump);
    CHECK(stream->sends == 0 && dp_raw_timer(&pump) == INT64_MAX);
    dp_raw_pass(&pump);
    expect_output(stream, 4);
    expect_end(stream, 2, 3, 4);
    end();
}

static void test_deadline_of_a_slow_reader(void) {
    begin();
    uint64_t generation;
    struct fake_stream *stream = send_with_deadline(10);
    CHECK(dp_take(region, 0, &generation) == DP_RUNNING);
    dp_raw_pass(&pump);
    conns[0].unacked = LIMIT + 1;
    emit(0, generation, 0, 4);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1);
    pump.now += SECOND;
    dp_raw_on_timer(&pump);
    CHECK(stream->resets == 1 && stream->reset_code == 3 && stream->sends == 1);
    CHECK(state_at(region, 0) == DP_CANCELLING);
    expect_stats(1, 0, 0, 1);
    CHECK(dp_raw_timer(&pump) == INT64_MAX);
    end();
}

/* The client leaves --------------------------------------------------------------------------- */

enum phase { HEADER, BODY, PLACED, NARROW, READY, ANSWERED_READY, RUNNING, DONE, PHASES };

static struct fake_stream *bring_to(enum phase phase, uint64_t *generation) {
    struct request request = encoded(5, phase == NARROW ? 2 : 4, 48);
    struct fake_stream *stream;
    switch (phase) {
    case HEADER:
        return send_part(0, &request, 30);
    case BODY:
        return send_part(0, &request, request.size);
    case PLACED:
        stream = send_part(0, &request, 48 + 6);
        CHECK(stream->stream.in.place);
        return stream;
    case NARROW:
        return send_part(0, &request, 48 + 3);
    default:
        stream = send_whole(0, &request);
    }
    if (phase >= ANSWERED_READY)
        dp_raw_pass(&pump);
    if (phase >= RUNNING)
        CHECK(dp_take(region, 0, generation) == DP_RUNNING);
    if (phase == DONE) {
        emit(0, *generation, 0, 2);
        CHECK(dp_finish(region, 0, *generation, DP_FINISH_STOP) == DP_DONE);
    }
    return stream;
}

static bool holds_a_slot(enum phase phase) {
    return phase != HEADER;
}

static void expect_cancelled(enum phase phase) {
    CHECK(state_at(region, 0) == (phase == RUNNING ? DP_CANCELLING : DP_FREE));
    CHECK(conns[0].entry.writing == 0 && event_count == 0);
    expect_stats(holds_a_slot(phase), 0, holds_a_slot(phase), 0);
    CHECK(counted(0) == holds_a_slot(phase));
}

/* Nothing comes of it any more, whatever arrives and passes. */
static void expect_silence(struct fake_stream *stream) {
    struct request request = encoded(5, 4, 48);
    uint32_t sends = stream->sends, resets = stream->resets, told = event_count;
    arrive(stream, request.wire, stream->stream.in.highest, request.size, true);
    pass_time(pump.now + 10 * TIMEOUT);
    dp_raw_pass(&pump);
    CHECK(stream->sends == sends && stream->resets == resets && event_count == told);
    CHECK(!stream->handed);
}

static void test_resets(void) {
    for (enum phase phase = HEADER; phase < PHASES; phase++) {
        uint64_t generation;
        begin();
        struct fake_stream *stream = bring_to(phase, &generation);
        peer_resets(stream);
        CHECK(stream->resets == 1 && stream->reset_code == 0 && stream->stops == 0);
        expect_cancelled(phase);
        CHECK(!stream->stream.in.place);
        dp_raw_pass(&pump);
        close_stream(stream);
        end();
    }
    begin(); /* before anything came */
    struct fake_stream *stream = open_stream(0, 0);
    peer_resets(stream);
    CHECK(stream->resets == 1 && stream->reset_code == 0);
    end();
}

static void test_stops(void) {
    for (enum phase phase = HEADER; phase < PHASES; phase++) {
        uint64_t generation;
        begin();
        struct fake_stream *stream = bring_to(phase, &generation);
        peer_stops(stream);
        CHECK(stream->resets == 0 && stream->stops == (phase < READY) && stream->stop_code == 0);
        expect_cancelled(phase);
        peer_stops(stream);
        CHECK(stream->stops == (phase < READY));
        if (phase < READY)
            expect_silence(stream);
        close_stream(stream);
        end();
    }
    begin(); /* before anything came: what comes then is not read */
    struct fake_stream *stream = open_stream(0, 0);
    peer_stops(stream);
    CHECK(stream->resets == 0 && stream->stops == 0);
    expect_silence(stream);
    expect_stats(0, 0, 0, 0);
    end();
}

static void test_leaves(void) {
    for (enum phase phase = HEADER; phase < PHASES; phase++) {
        uint64_t generation;
        begin();
        struct fake_stream *stream = bring_to(phase, &generation);
        dp_front_raw.left(&pump, &conns[0].entry);
        CHECK(stream->resets == 0 && stream->stops == 0);
        expect_cancelled(phase);
        if (phase < READY)
            expect_silence(stream);
        end();
    }
}

static void test_unread(void) {
    for (enum phase phase = HEADER; phase < PHASES; phase++) {
        uint64_t generation;
        begin();
        struct fake_stream *stream = bring_to(phase, &generation);
        CHECK(dp_raw_unread(&pump, 1, stream->stream.id, 3) == 1);
        CHECK(stream->resets == 1 && stream->reset_code == 3 && stream->stops == (phase < READY));
        expect_cancelled(phase);
        if (phase < READY)
            expect_silence(stream);
        CHECK(dp_raw_unread(&pump, 1, 4000, 3) == 0 && dp_raw_unread(&pump, 9, 0, 3) == 0);
        end();
    }
    begin(); /* an answer that is complete, but not read */
    uint64_t generation;
    struct fake_stream *stream = bring_to(DONE, &generation);
    dp_raw_pass(&pump);
    CHECK(stream->fin && dp_raw_unread(&pump, 1, stream->stream.id, 3) == 1);
    CHECK(stream->resets == 1 && stream->reset_code == 3);
    expect_stats(1, 1, 0, 0);
    struct request bad = encoded(1, 4, 48);
    bad.wire[0] = 0;
    stream = send_whole(0, &bad);
    CHECK(stream->handed && dp_raw_unread(&pump, 1, stream->stream.id, 3) == 0);
    end();
}

/* The attachment ends ------------------------------------------------------------------------- */

static void test_detach_with_all_in_flight(void) {
    begin();
    struct request request = encoded(5, 4, 48);
    uint64_t generation;
    struct fake_stream *header = send_part(0, &request, 30);
    struct fake_stream *placed = send_part(0, &request, 58);      /* slot 0 */
    struct fake_stream *answered = send_taken(0, 1, &generation); /* slot 1 */
    dp_raw_pass(&pump);
    struct fake_stream *ready = send_whole(1, &request);   /* slot 2, its 200 not written */
    struct fake_stream *body = send_part(1, &request, 68); /* slot 3, all but the end */
    CHECK(state_at(region, 1) == DP_RUNNING && state_at(region, 2) == DP_READY);
    CHECK(placed->stream.in.place && dp_raw_in_flight(&pump) == 4);
    emit(1, generation, 0, 1);
    dp_raw_detach(&pump, 0, 1);
    CHECK(answered->resets == 1 && answered->reset_code == 1 && answered->sends == 2);
    expect_output(answered, 1); /* what was out by then */
    CHECK(event_count == 3 && dp_raw_in_flight(&pump) == 0);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(events[i].kind == DP_EVENT_REFUSED && events[i].with.refused.why == DP_WHY_LOST &&
              events[i].flags == (events[i].connection == 2 && events[i].stream == 0));
    CHECK(placed->handed && ready->handed && body->handed && !header->handed);
    for (uint32_t i = 0; i < CONNS; i++)
        for (uint32_t j = 0; j < conns[i].count; j++)
            CHECK(!conns[i].streams[j].stream.in.place);
    expect_stats(4, 0, 0, 4);
    drop_region(); /* from here on a look at it is one too many */
    arrive(placed, request.wire, 58, request.size, true);
    arrive(body, request.wire, 68, request.size, true);
    arrive(header, request.wire, 30, request.size, true);
    CHECK(header->handed && header->stream.in.consumed == 0);
    peer_stops(answered);
    dp_raw_pass(&pump);
    pass_time(pump.now + 10 * TIMEOUT);
    /* Counters outlive it, and another one is served. */
    region = region_new(SLOTS, TOKENS, OWNER);
    struct dp_raw_config with = config();
    CHECK(dp_raw_attach(&pump, region, &with, BUSY) == 0);
    CHECK(dp_raw_attach(&pump, region, &with, BUSY) == -1); /* one at a time */
    plant_canaries();
    struct fake_stream *next = send_whole(1, &request);
    event_count = 0;
    serve_and_check(next, &request, 0);
    expect_stats(5, 1, 0, 4);
    end();
}

/* Its runtime finished it and died; no pass was between. */
static void test_detach_after_the_end(void) {
    begin();
    uint64_t generation;
    struct fake_stream *stream = send_taken(0, 1, &generation);
    emit(1, generation, 0, 2);
    CHECK(dp_finish(region, 1, generation, DP_FINISH_STOP) == DP_DONE);
    dp_raw_detach(&pump, 0, 1);
    CHECK(stream->resets == 0 && event_count == 0);
    expect_output(stream, 2);
    expect_end(stream, DP_FINISH_STOP, 3, 2);
    expect_stats(1, 1, 0, 0);
    end();
}

static void test_end_all(void) {
    begin();
    struct request request = encoded(5, 4, 48);
    uint64_t generation;
    struct fake_stream *placed = send_part(0, &request, 58);
    struct fake_stream *answered = send_taken(0, 1, &generation);
    dp_raw_pass(&pump);
    struct fake_stream *ready = send_whole(0, &request);
    dp_raw_end_all(&pump, 4);
    CHECK(answered->resets == 1 && answered->reset_code == 4);
    CHECK(placed->handed && ready->handed && event_count == 2 && taken_slots() == 1);
    CHECK(dp_finish(region, 1, generation, DP_FINISH_STOP) == DP_FREE);
    event_count = 0;
    plant_canaries();
    request.affinity = 2; /* the slot whose 200 was due when it ended */
    encode(&request);
    serve_and_check(send_whole(0, &request), &request, 2);
    end();
}

static void test_attach_checks(void) {
    make_pump();
    CHECK(region); /* that of the cases before */
    char reason[300] = {0};
    for (uint32_t i = 0; i < 8; i++) {
        struct dp_raw_config with = config();
        with.owner = i == 0 ? 0 : i == 1 ? OWNER + 1 : OWNER;
        with.count = i == 2 ? 0 : i == 3 ? SLOTS + 1 : i == 4 ? UINT32_MAX : SLOTS;
        with.first = i == 5 ? 1 : i == 6 ? SLOTS : 0;
        memset(reason, 'x', i == 7 ? 257 : 256);
        CHECK(dp_raw_attach(&pump, region, &with, reason) == -1);
    }
    reason[256] = 0;
    struct dp_raw_config with = config();
    with.null = 1;
    region->geometry.table = DP_TABLE_DEVICE; /* whose slots this listener cannot free itself */
    CHECK(dp_raw_attach(&pump, region, &with, reason) == -1);
    region->geometry.table = DP_TABLE_HOST;
    with.null = 0;
    CHECK(dp_raw_attach(&pump, region, &with, reason) == 0);
    CHECK(dp_raw_fd(&pump, 0) == region->outputs[OWNER - 1]);
    end();
}

/* The runtime rings only while the listener says that it sleeps. */
static void test_sleep_and_wake(void) {
    begin();
    uint64_t generation, rung;
    struct fake_stream *stream = send_taken(0, 0, &generation);
    dp_raw_pass(&pump);
    emit(0, generation, 0, 1);
    CHECK(read(dp_raw_fd(&pump, 0), &rung, sizeof rung) < 0);
    CHECK(!dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    dp_raw_pass(&pump);
    CHECK(dp_raw_sleep(&pump));
    emit(0, generation, 1, 2);
    CHECK(read(dp_raw_fd(&pump, 0), &rung, sizeof rung) == sizeof rung);
    dp_raw_wake(&pump);
    dp_raw_pass(&pump);
    expect_output(stream, 2);
    end();
}

int main(void) {
    RUN(test_late_headers, test_deadline_before_publish, test_deadline_in_ready,
        test_deadline_in_running, test_deadline_loses, test_deadline_of_a_slow_reader, test_resets,
        test_stops, test_leaves, test_unread, test_detach_with_all_in_flight,
        test_detach_after_the_end, test_end_all, test_attach_checks, test_sleep_and_wake);
    test_late_bodies(2);
    test_late_bodies(4);
    drop_region();
    printf("raw_ends: late, left, detached\n");
    return 0;
}
