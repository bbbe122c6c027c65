/* What the raw front does not serve: what it leaves to Python, and what it refuses itself. */
#include "raw_bed.h"

/* What is left to Python ---------------------------------------------------------------------- */

static void expect_handed(struct fake_stream *stream) {
    CHECK(stream->handed && stream->stream.in.consumed == 0 && stream->sends == 0);
    CHECK(stream->stops == 0 && stream->resets == 0 && !stream->stream.in.discard);
    CHECK(taken_slots() == 0 && dp_raw_stats(&pump).claimed == 0 && event_count == 0);
    uint32_t told = stream->told_data;
    bool more = !stream->stream.in.fin_offered;
    offer_all(stream);
    CHECK(stream->told_data == told + more);
    peer_stops(stream);
    peer_resets(stream);
    close_stream(stream);
    CHECK(stream->told_stopped == 1 && stream->told_reset == 1 && stream->told_closed == 1);
}

static void hand_over_changed(size_t at, uint64_t value, int bytes) {
    struct request request = encoded(4, 4, 48);
    put(request.wire + at, value, bytes);
    begin();
    expect_handed(send_whole(0, &request));
    end();
}

static void hand_over_float(size_t at, float value) {
    uint8_t bytes[4];
    put_float(bytes, value);
    hand_over_changed(at, get(bytes, 4), 4);
}

static void test_malformed_headers(void) {
    for (int i = 0; i < 4; i++)
        hand_over_changed((size_t)i, 'X', 1);
    hand_over_changed(4, 47, 2);
    hand_over_changed(4, 4097, 2);
    hand_over_changed(4, 0, 2);
    for (uint32_t width = 0; width < 256; width++)
        if (width != 2 && width != 4)
            hand_over_changed(6, width, 1);
    hand_over_changed(7, 2, 1);
    hand_over_changed(7, 0x81, 1);
    hand_over_changed(8, 0, 4);
    hand_over_changed(8, TOKENS + 1, 4);
    hand_over_changed(8, UINT32_MAX, 4);
    hand_over_changed(12, TOKENS + 1, 4);
    hand_over_changed(12, UINT32_MAX, 4);
    hand_over_changed(28, 0x7FC00000, 4); /* NaN */
    hand_over_changed(28, 0x7F800000, 4); /* infinite */
    hand_over_float(28, -0.001f);
    hand_over_float(28, 100.001f);
    hand_over_changed(32, 0x7FC00000, 4);
    hand_over_float(32, -1);
    hand_over_float(32, 1.001f);
}

/* The bounds themselves are in order. */
static void test_bounds(void) {
    begin_null();
    struct request request = request_of(TOKENS, 4, 48);
    request.max_output = TOKENS;
    encode(&request);
    put_float(request.wire + 28, 100);
    put_float(request.wire + 32, 1);
    expect_verdict(send_whole(0, &request), 200, 0, 77);
    struct request smallest = encoded(1, 2, 48);
    put_float(smallest.wire + 28, -0.0f);
    put_float(smallest.wire + 32, 0);
    expect_verdict(send_whole(0, &smallest), 200, 1, 77);
    end();
}

static struct fake_stream *send_extension(uint32_t header, uint32_t says) {
    struct request request = encoded(1, 4, header);
    if (header >= 52)
        put(request.wire + 50, says, 2);
    return send_whole(0, &request);
}

static void test_extensions(void) {
    for (uint32_t header = 49; header < 52; header++) {
        begin();
        expect_handed(send_extension(header, 0));
        end();
    }
    for (uint32_t says = 0; says < 16; says++) {
        begin_null();
        /* It fills the header; behind a shorter one stands another that says it is longer. */
        CHECK(send_extension(60, says)->handed == (says != 8));
        end();
    }
    begin_null();
    struct request request = encoded(1, 4, 68); /* three, the second one an API key */
    static const uint8_t three[] = {9,   0, 0, 0, 1, 0, 3, 0, 'k', 'e',
                                    'y', 2, 1, 5, 0, 1, 2, 3, 4,   5};
    memcpy(request.wire + 48, three, sizeof three);
    expect_verdict(send_whole(0, &request), 200, 0, 77);
    end();
}

/* What can be told of a beginning is told at once; what cannot is waited for. */
static void test_beginnings(void) {
    struct request request = encoded(4, 4, 60);
    for (size_t have = 1; have < request.header; have++) {
        begin();
        struct fake_stream *stream = send_part(0, &request, have);
        CHECK(!stream->handed && stream->stream.in.consumed == 0 && taken_slots() == 0);
        CHECK(dp_raw_timer(&pump) == pump.now + TIMEOUT / 20);
        arrive(stream, request.wire, have, have, true); /* it ends inside the header */
        expect_handed(stream);
        end();

        begin();
        struct request bad = request; /* in its magic, or in the upper half of its length */
        bad.wire[have <= 4 ? have - 1 : 5] ^= 0x55;
        stream = send_part(0, &bad, have);
        CHECK(stream->handed == (have != 5));
        end();
    }
    begin();
    struct request wide = encoded(4, 4, 60);
    put(wide.wire + 6, 3, 1);
    expect_handed(send_part(0, &wide, 48)); /* though its extensions have not come */
    end();
    begin();
    struct fake_stream *empty = open_stream(0, 0);
    arrive(empty, request.wire, 0, 0, true);
    expect_handed(empty);
    end();
}

static void test_nobody_serves(void) {
    struct request request = encoded(4, 4, 48);
    begin();
    dp_raw_drain(&pump);
    expect_handed(send_whole(0, &request));
    expect_handed(send_part(0, &request, 1));
    end();
    begin();
    struct fake_stream *uni = open_stream(0, 2);
    arrive(uni, request.wire, 0, request.size, true);
    expect_handed(uni);
    uni = open_stream(0, 2);
    peer_resets(uni);
    CHECK(uni->resets == 0 && !uni->handed);
    end();
    /* Before there is anything, and after it is gone. */
    begin();
    struct fake_stream *waiting = send_part(0, &request, 20);
    dp_raw_detach(&pump, 0, 1);
    expect_handed(send_whole(0, &request));
    arrive(waiting, request.wire, 20, 30, false);
    expect_handed(waiting);
    CHECK(dp_raw_fd(&pump, 0) == -1 && dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    dp_raw_pass(&pump);
    end();
    make_pump();
    expect_handed(send_whole(0, &request));
    CHECK(!pump.raw && dp_raw_timer(&pump) == INT64_MAX && dp_raw_fd(&pump, 0) == -1);
    dp_raw_pass(&pump);
    dp_raw_on_timer(&pump);
    dp_raw_detach(&pump, 0, 1);
    dp_raw_end_all(&pump, 1);
    leave_all();
    free_pump();
}

static void test_cap(void) {
    struct dp_raw_config with = config();
    with.max_writing = 0; /* half of them */
    begin_with(with);
    struct request request = encoded(4, 4, 48);
    struct fake_stream *first = send_part(0, &request, 50), *second = send_part(0, &request, 60);
    CHECK(conns[0].entry.writing == 2 && taken_slots() == 2);
    CHECK(dp_raw_writing(&pump, 1) == 2 && dp_raw_writing(&pump, 2) == 0);
    struct fake_stream *third = send_whole(0, &request);
    CHECK(third->handed && third->stream.in.consumed == 0 && taken_slots() == 2);
    CHECK(!send_whole(1, &request)->handed); /* another connection has a cap of its own */
    arrive(first, request.wire, 50, request.size, true);
    CHECK(conns[0].entry.writing == 1 && !second->handed);
    CHECK(!send_part(0, &request, 48)->handed);
    end();
}

/* Refused in C -------------------------------------------------------------------------------- */

static void expect_busy(const struct fake_stream *stream, uint32_t retry_ms, bool stopped) {
    CHECK(stream->sends == 1 && stream->fin && !stream->handed && stream->resets == 0);
    expect_verdict(stream, 429, 0xFFFF, 77);
    CHECK(get(stream->sent + 20, 4) == 0 && get(stream->sent + 28, 4) == 0);
    if (get(stream->sent + 24, 4) != retry_ms)
        fail("retry after %lu ms, not %u", get(stream->sent + 24, 4), retry_ms);
    CHECK(stream->sent_bytes == 32 + strlen(BUSY) &&
          memcmp(stream->sent + 32, BUSY, strlen(BUSY)) == 0);
    CHECK(stream->stops == stopped && stream->stop_code == 0);
}

static void test_busy(void) {
    begin();
    struct request request = encoded(4, 4, 48);
    for (uint32_t i = 0; i < SLOTS; i++)
        CHECK(!send_part(i % 2, &request, 48)->handed);
    conns[0].at_ns = dp_realtime_ns() - 90000;
    struct fake_stream *whole = send_whole(0, &request);
    expect_busy(whole, 1000, false);
    CHECK(get(whole->sent + 16, 4) >= 90);
    expect_busy(send_part(0, &request, 48), 1000, true);
    expect_busy(send_part(0, &request, 55), 1000, true);
    CHECK(dp_raw_stats(&pump).busy == 3 && dp_raw_stats(&pump).ok == 0 && counted(0) == 3);
    expect_stats(SLOTS, 0, 0, 0);
    peer_resets(whole); /* what was answered after its end is broken off, as any other */
    CHECK(whole->resets == 1);
    end();
}

static void test_strict_affinity(void) {
    begin();
    struct request request = request_of(4, 4, 48);
    request.affinity = 2;
    encode(&request);
    send_part(0, &request, 48);
    struct fake_stream *loose = send_part(0, &request, 48);
    CHECK(loose->stops == 0 && state_at(region, 3) == DP_WRITING);
    request.flags = 1;
    encode(&request);
    expect_busy(send_whole(0, &request), 1000, false);
    CHECK(taken_slots() == 2);
    end();
}

/* Held for some ms each, over four slots; halves are rounded to even. */
static void test_retry_after(void) {
    static const struct {
        int64_t held_us;
        uint32_t retry_ms;
    } cases[] = {{0, 1000},         {1, 1},           {3000, 1},         {9000, 2},
                 {10000, 2},        {10001, 3},       {14000, 4},        {400000, 100},
                 {39998001, 10000}, {39900000, 9975}, {400000000, 10000}};
    struct request request = encoded(4, 4, 48);
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin();
        struct fake_stream *stream = send_part(0, &request, 48);
        pump.now += cases[i].held_us * 1000;
        peer_resets(stream);
        for (uint32_t j = 0; j < SLOTS; j++)
            send_part(0, &request, 48);
        expect_busy(send_whole(1, &request), cases[i].retry_ms, false);
        end();
    }
}

int main(void) {
    RUN(test_malformed_headers, test_bounds, test_extensions, test_beginnings, test_nobody_serves,
        test_cap, test_busy, test_strict_affinity, test_retry_after);
    drop_region();
    printf("raw_refused: left to Python, and refused\n");
    return 0;
}
