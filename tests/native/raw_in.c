/* What clients send to the raw front: every way to a published slot, every split of a request, and
 * bodies that are no good.
 *
 * usage: raw_in [ROUNDS [SEED]], or raw_in ROUNDS SEED cost: what a request costs */
#include "raw_bed.h"

/* Whole requests ------------------------------------------------------------------------------ */

static void test_null(void) {
    begin_null();
    struct request request = encoded(5, 4, 48);
    for (uint32_t i = 0; i < 6; i++) {
        conns[0].at_ns = dp_realtime_ns() - 50000;
        struct fake_stream *stream = send_whole(0, &request);
        CHECK(stream->sends == 1 && stream->stops == 0 && stream->resets == 0);
        expect_verdict(stream, 200, i % SLOTS, 77); /* the probe goes round */
        expect_end(stream, 1, 5, 0);
        CHECK(get(stream->sent + 16, 4) >= 50 && get(stream->sent + 20, 4) >= 50);
        CHECK(get(stream->sent + 24, 4) == 0 && get(stream->sent + 28, 4) == SLOTS - 1);
        CHECK(taken_slots() == 0 && conns[0].entry.writing == 0);
        close_stream(stream);
    }
    expect_stats(6, 6, 0, 0);
    struct dp_raw_stats stats = dp_raw_stats(&pump);
    CHECK(stats.ok == 6 && stats.busy == 0 && stats.negative == 0 && stats.hold_s == 0);
    CHECK(counted(0) == 6 && counted(1) == 6 && counted(2) == 0 && event_count == 0);
    end();
}

static void test_ids_of_the_daemon(void) {
    begin_null();
    struct request request = request_of(1, 4, 48);
    request.id = 0;
    encode(&request);
    uint64_t first = get(send_whole(0, &request)->sent + 8, 8);
    CHECK(first != 0 && first >> 63 == 0);
    CHECK(get(send_whole(0, &request)->sent + 8, 8) == first + 1);
    end();
}

static void test_a_clock_that_went_back(void) {
    begin_null();
    struct request request = encoded(2, 4, 48);
    conns[0].at_ns = dp_realtime_ns() + 3600 * SECOND;
    struct fake_stream *stream = send_whole(0, &request);
    CHECK(get(stream->sent + 16, 4) == 0 && get(stream->sent + 20, 4) == 0);
    CHECK(dp_raw_stats(&pump).negative == 2 && counted(0) == 0 && counted(1) == 0);
    end();
}

/* Every cut of a request in two, its end with the second part or behind it. */
static void test_every_cut(uint32_t width, uint32_t header) {
    struct request request = encoded(6, width, header);
    for (size_t cut = 0; cut <= request.size; cut++) {
        for (int apart = 0; apart < 2; apart++) {
            begin();
            struct fake_stream *stream = open_stream(0, 0);
            arrive(stream, request.wire, 0, cut, false);
            CHECK(conns[0].entry.writing == (cut >= header));
            arrive(stream, request.wire, cut, request.size, !apart);
            if (apart) {
                CHECK(state_at(region, 0) == DP_WRITING);
                CHECK(region->writers[0].written == 6);
                arrive(stream, request.wire, request.size, request.size, true);
            }
            CHECK(conns[0].entry.writing == 0);
            serve_and_check(stream, &request, 0);
            expect_stats(1, 1, 0, 0);
            end();
        }
    }
}

static void test_byte_by_byte(uint32_t width, uint32_t header) {
    struct request request = encoded(9, width, header);
    begin();
    struct fake_stream *stream = open_stream(0, 0);
    for (size_t i = 0; i < request.size; i++)
        arrive(stream, request.wire, i, i + 1, i + 1 == request.size);
    serve_and_check(stream, &request, 0);
    end();
}

/* Parts in any order, some of them twice. Behind the header's they are decrypted into the slot. */
static void test_any_order(uint64_t *seed) {
    uint32_t width = random_below(seed, 4) ? 4 : 2, header = random_below(seed, 2) ? 48 : 53;
    struct request request = encoded(1 + random_below(seed, TOKENS), width, header);
    size_t cuts[12] = {0}, count = 2 + random_below(seed, 10);
    for (size_t i = 1; i < count; i++)
        cuts[i] = random_below(seed, (uint32_t)request.size + 1);
    cuts[count] = request.size;
    for (size_t i = 1; i < count; i++) /* in ascending order */
        for (size_t j = i; j > 1 && cuts[j] < cuts[j - 1]; j--) {
            size_t swap = cuts[j];
            cuts[j] = cuts[j - 1];
            cuts[j - 1] = swap;
        }
    uint32_t order[12];
    for (uint32_t i = 0; i < count; i++)
        order[i] = i;
    for (uint32_t i = (uint32_t)count; i > 1; i--) {
        uint32_t other = random_below(seed, i), swap = order[other];
        order[other] = order[i - 1];
        order[i - 1] = swap;
    }
    begin();
    struct fake_stream *stream = open_stream(0, 0);
    for (uint32_t i = 0; i < count; i++) {
        if (stream->stream.in.frontier < request.size)
            CHECK(taken_slots() == 0 || state_at(region, 0) == DP_WRITING);
        for (uint32_t times = 1 + !random_below(seed, 3); times--;)
            if (!stream->stream.in.discard)
                arrive(stream, request.wire, cuts[order[i]], cuts[order[i] + 1],
                       cuts[order[i] + 1] == request.size);
    }
    serve_and_check(stream, &request, 0);
    end();
}

/* A packet that is decrypted into the slot before its tag turns out to be forged. */
static void test_forged_bytes_count_for_nothing(void) {
    begin();
    struct request request = encoded(40, 4, 48);
    struct fake_stream *stream = send_part(0, &request, 48 + 10 * 4 + 2);
    const struct dp_writer *writer = &region->writers[0];
    for (uint32_t round = 0; round < 4; round++) {
        size_t from = 48 + 10 * 4 + 2 + round * 3, length = request.size - from;
        uint8_t *target = dp_stream_target(&stream->stream, from, length);
        CHECK(target);
        memset(target, 0xFF, length);
        CHECK(dp_stream_target(&stream->stream, from - 3, length) == NULL);
        CHECK(dp_stream_target(&stream->stream, from, length + 1) == NULL);
        offer_all(stream);
        dp_raw_pass(&pump);
        CHECK(state_at(region, 0) == DP_WRITING && event_count == 0);
        CHECK(writer->written == (48 + 10 * 4 + 2 + round * 3 - 48) / 4);
        arrive(stream, request.wire, from, from + 3, false);
    }
    size_t rest = 48 + 10 * 4 + 2 + 4 * 3;
    arrive(stream, request.wire, rest, request.size, true);
    serve_and_check(stream, &request, 0);
    end();
}

static void test_affinity(void) {
    begin_null();
    struct request request = request_of(1, 4, 48);
    for (uint32_t affinity = 1; affinity < 3 * SLOTS; affinity++) {
        request.affinity = affinity;
        request.flags = affinity % 2;
        encode(&request);
        expect_verdict(send_whole(0, &request), 200, affinity % SLOTS, 77);
    }
    request.affinity = 0; /* these did not move the probe */
    request.flags = 0;
    encode(&request);
    expect_verdict(send_whole(0, &request), 200, 0, 77);
    end();
}

/* A range of slots that does not begin with the first one. */
static void test_range(void) {
    struct dp_raw_config with = config();
    with.first = 1;
    with.count = 2;
    with.null = 1;
    begin_with(with);
    struct request request = encoded(1, 4, 48);
    for (uint32_t i = 0; i < 4; i++)
        expect_verdict(send_whole(0, &request), 200, 1 + i % 2, 77);
    end();
}

/* Bad bodies ---------------------------------------------------------------------------------- */

static void test_bad_tokens(uint32_t width) {
    for (uint32_t position = 0; position < 5; position++) {
        struct request request = request_of(5, width, 48);
        uint32_t bad = width == 2 ? 0xFFFF : position % 2 ? VOCAB : UINT32_MAX;
        request.ids[position] = bad;
        request.ids[4] = bad;
        encode(&request);
        for (size_t cut = 0; cut <= request.size; cut++) {
            begin();
            struct fake_stream *stream = open_stream(0, 0);
            arrive(stream, request.wire, 0, cut, false);
            bool there = cut >= 48 + (size_t)(position + 1) * width;
            CHECK(event_count == there);
            if (!there)
                arrive(stream, request.wire, cut, request.size, true);
            const struct dp_refused *refused =
                expect_refused(stream, DP_WHY_BAD_TOKEN, position, bad, !there);
            CHECK(refused->request_id == 77 && refused->n_tokens == 5);
            arrive(stream, request.wire, 48, request.size, true); /* it is not read */
            CHECK(event_count == 1);
            expect_given_back(1);
            check_canaries(0, 5);
            end();
        }
    }
}

static void test_too_long(uint32_t width) {
    struct request request = encoded(5, width, 48);
    for (size_t excess = 1; excess <= 5; excess++) {
        for (size_t cut = 0; cut <= request.size + excess; cut++) {
            begin();
            struct fake_stream *stream = open_stream(0, 0);
            arrive(stream, request.wire, 0, cut, false);
            CHECK(event_count == (cut > request.size));
            if (cut <= request.size)
                arrive(stream, request.wire, cut, request.size + excess, excess % 2);
            expect_refused(stream, DP_WHY_OVERFLOW, 0, 0, cut <= request.size && excess % 2);
            expect_given_back(1);
            check_canaries(0, 5);
            end();
        }
    }
    /* That it is too long is said before what is in it, when both came at once. */
    request.ids[4] = VOCAB + 1;
    if (width == 4)
        encode(&request);
    for (size_t cut = 0; cut < request.size - 4; cut++) {
        begin();
        struct fake_stream *stream = open_stream(0, 0);
        arrive(stream, request.wire, 0, cut, false);
        arrive(stream, request.wire, cut, request.size + 1, true);
        expect_refused(stream, DP_WHY_OVERFLOW, 0, 0, true);
        end();
    }
}

static void test_too_short(uint32_t width) {
    struct request request = encoded(5, width, 48);
    for (size_t size = 48; size < request.size; size++) {
        for (size_t cut = 0; cut <= size; cut++) {
            begin();
            struct fake_stream *stream = open_stream(0, 0);
            arrive(stream, request.wire, 0, cut, false);
            arrive(stream, request.wire, cut, size, true);
            uint32_t body = (uint32_t)(size - 48);
            expect_refused(stream, DP_WHY_SHORT, body / width, body % width, true);
            expect_given_back(1);
            check_canaries(0, body / width + 1);
            end();
        }
    }
}

/* What it costs ------------------------------------------------------------------------------- */

static double null_ns(uint32_t n, size_t cut, uint32_t rounds) {
    static struct request request;
    int64_t best = INT64_MAX;
    request = encoded(n, 4, 48);
    struct fake_stream *stream = open_stream(0, 0);
    struct dp_stream *of = &stream->stream;
    for (uint32_t i = 0; i < 5; i++) {
        int64_t start = monotonic_ns();
        for (uint32_t j = 0; j < rounds; j++) {
            of->app_state = 0;
            stream->sent_bytes = 0;
            stream->fin = false;
            if (cut) {
                of->in.consumed = of->in.frontier = 0;
                of->in.place = NULL;
                of->in.discard = false;
                size_t used =
                    dp_front_raw.data(&pump, &conns[0].entry, of, request.wire, cut, false);
                memcpy(of->in.place, request.wire + used, request.size - used);
                of->in.consumed = used;
                dp_front_raw.data(&pump, &conns[0].entry, of, of->in.place, request.size - used,
                                  true);
            } else {
                dp_front_raw.data(&pump, &conns[0].entry, of, request.wire, request.size, true);
            }
        }
        int64_t took = monotonic_ns() - start;
        best = took < best ? took : best;
    }
    CHECK(stream->fin && event_count == 0);
    return (double)best / rounds;
}

static void print_cost(uint32_t rounds) {
    begin_null();
    double whole = null_ns(128, 0, rounds), placed = null_ns(128, 120, rounds);
    int64_t start = monotonic_ns();
    for (uint32_t i = 0; i < rounds; i++)
        dp_realtime_ns();
    double clock_ns = (double)(monotonic_ns() - start) / rounds;
    end();
    printf("128 tokens, null: %.0f ns in one offer, %.0f in two (placed); two of its clock reads "
           "are %.0f\n",
           whole, placed, 2 * clock_ns);
}

static void run_shapes(void) {
    static const uint32_t headers[] = {48, 52, 53, 55};
    for (uint32_t width = 2; width <= 4; width += 2) {
        for (uint32_t i = 0; i < 4; i++) {
            test_every_cut(width, headers[i]);
            test_byte_by_byte(width, headers[i]);
        }
        test_bad_tokens(width);
        test_too_long(width);
        test_too_short(width);
    }
}

int main(int argc, char **argv) {
    uint32_t rounds = argument(argc, argv, 1, 200);
    uint64_t seed = argument(argc, argv, 2, 1);
    if (argc > 3) {
        print_cost(rounds);
        return 0;
    }
    RUN(test_null, test_ids_of_the_daemon, test_a_clock_that_went_back,
        test_forged_bytes_count_for_nothing, test_affinity, test_range);
    run_shapes();
    for (uint32_t i = 0; i < rounds; i++)
        test_any_order(&seed);
    drop_region();
    printf("raw_in: every cut of a request, %u in any order\n", rounds);
    return 0;
}
