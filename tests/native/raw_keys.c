/* Several partitions, and the API keys that say whose slots a request gets. */
#include "raw_bed.h"

/* Of nothing. */
static const char no_hash[] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

static struct dp_region *alphas, *betas;

static int64_t number_of(struct dp_keys *keys, const char *key) {
    return dp_keys_find(keys, (const uint8_t *)key, strlen(key));
}

/* Found wherever they stand among others, which are all found to be none of them. */
static void test_looking_up(void) {
    for (uint32_t count = 3; count < 300; count += 7) {
        uint8_t digests[300 * DP_KEY_DIGEST];
        uint32_t numbers[300];
        uint64_t seed = count;
        for (uint32_t i = 0; i < count; i++) {
            numbers[i] = UINT32_MAX - i;
            for (uint32_t j = 0; j < DP_KEY_DIGEST; j++)
                digests[i * DP_KEY_DIGEST + j] = (uint8_t)random_next(&seed);
        }
        uint32_t alpha = random_below(&seed, count), beta = (alpha + 1) % count;
        read_hash(no_hash, digests + (size_t)((alpha + 2) % count) * DP_KEY_DIGEST);
        read_hash(alpha_hash, digests + (size_t)alpha * DP_KEY_DIGEST);
        read_hash(beta_hash, digests + (size_t)beta * DP_KEY_DIGEST);
        struct dp_keys *keys = dp_keys_new(digests, numbers, count);
        CHECK(keys);
        for (int again = 0; again < 2; again++) {
            CHECK(number_of(keys, "alpha") == (int64_t)numbers[alpha]);
            CHECK(number_of(keys, "beta") == (int64_t)numbers[beta]);
            CHECK(number_of(keys, "gamma") == -1 && number_of(keys, "alph") == -1);
            CHECK(dp_keys_find(keys, (const uint8_t *)"alpha", 6) == -1);
            CHECK(dp_keys_find(keys, NULL, 0) == -1);
        }
        dp_keys_free(keys);
    }
}

/* Serving ------------------------------------------------------------------------------------- */

/* What the bed looks at. */
static void look_at(struct dp_region *of) {
    region = of;
}

static void attach(struct dp_region *of, uint32_t partition, uint32_t max_writing) {
    struct dp_raw_config with = config();
    with.partition = partition;
    with.max_writing = max_writing;
    CHECK(dp_raw_attach(&pump, of, &with, BUSY) == 0);
    look_at(of);
    plant_canaries();
}

static void begin_keyed(uint32_t max_writing) {
    make_pump();
    CHECK(set_keys(BETA) == 0);
    if (!alphas)
        alphas = region_new(SLOTS, TOKENS, OWNER);
    if (!betas)
        betas = region_new(SLOTS, TOKENS, OWNER);
    attach(alphas, 0, max_writing);
    attach(betas, BETA, max_writing);
}

static void end_keyed(void) {
    leave_all();
    CHECK(dp_raw_in_flight(&pump) == 0);
    dp_raw_detach(&pump, BETA, 1);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        free_slot(betas, slot);
    look_at(alphas);
    end();
}

static struct fake_stream *ask(uint32_t conn, const char *key) {
    struct request request = with_key(3, key);
    return send_whole(conn, &request);
}

static uint32_t taken_of(struct dp_region *of) {
    return SLOTS - dp_count_free(of, 0, SLOTS);
}

static void expect_counted(uint32_t partition, uint64_t claimed, uint64_t busy, uint64_t failed) {
    struct dp_raw_stats stats = dp_raw_partition_stats(&pump, partition);
    CHECK(stats.claimed == claimed && stats.busy == busy && stats.failed == failed);
}

static void test_setting_keys(void) {
    make_pump();
    CHECK(set_keys(DP_RAW_PARTITIONS) == -1);
    CHECK(set_keys(DP_RAW_PARTITIONS - 1) == 0);
    CHECK(set_keys(1) == -1); /* once */
    struct dp_region *of = region_new(SLOTS, TOKENS, OWNER);
    struct dp_raw_config with = config();
    with.partition = DP_RAW_PARTITIONS;
    CHECK(dp_raw_attach(&pump, of, &with, BUSY) == -1);
    with.partition = DP_RAW_PARTITIONS - 1;
    CHECK(dp_raw_attach(&pump, of, &with, BUSY) == 0);
    dp_raw_detach(&pump, DP_RAW_PARTITIONS - 1, 1);
    free_pump();
    make_pump();
    CHECK(dp_raw_attach(&pump, of, &with, BUSY) == 0);
    CHECK(set_keys(1) == -1); /* while something is served already */
    dp_raw_detach(&pump, DP_RAW_PARTITIONS - 1, 1);
    free_pump();
    region_delete(of);
}

/* Whose key it is, however the header was cut. */
static void test_a_key_cut_at_every_byte(void) {
    struct request request = with_key(4, "beta");
    for (size_t at = 0; at <= request.size; at++) {
        begin_keyed(SLOTS);
        struct fake_stream *stream = send_part(0, &request, at);
        CHECK(taken_of(betas) == (at >= request.header) && taken_of(alphas) == 0);
        arrive(stream, request.wire, at, request.size, true);
        serve_and_check(stream, &request, 0);
        expect_counted(0, 0, 0, 0);
        expect_counted(BETA, 1, 0, 0);
        CHECK(taken_of(alphas) == 0);
        end_keyed();
    }
}

/* Of several the last one counts, and what is refused for its key is Python's, whole. */
static void test_which_key_counts(void) {
    static const struct {
        const char *keys[3];
        uint32_t count;
        int partition; /* -1: Python's */
    } cases[] = {
        {{"alpha"}, 1, 0},
        {{"beta"}, 1, BETA},
        {{"gamma"}, 1, -1},
        {{""}, 1, -1},
        {{NULL}, 0, -1},
        {{"alpha", "beta"}, 2, BETA},
        {{"beta", "alpha"}, 2, 0},
        {{"alpha", "gamma"}, 2, -1},
        {{"gamma", "alpha"}, 2, 0},
        {{"beta", ""}, 2, -1},
        {{"", "gamma", "beta"}, 3, BETA},
        {{"Alpha"}, 1, -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin_keyed(SLOTS);
        struct request request = keyed(3, cases[i].keys, cases[i].count);
        struct fake_stream *stream = send_whole(0, &request);
        CHECK(taken_of(alphas) == (cases[i].partition == 0));
        CHECK(taken_of(betas) == (cases[i].partition == BETA));
        CHECK(stream->handed == (cases[i].partition < 0) && event_count == 0);
        CHECK(!stream->handed || (stream->stream.in.consumed == 0 && stream->sends == 0));
        end_keyed();
    }
}

/* Each on its own ------------------------------------------------------------------------------ */

static void test_a_full_one(void) {
    begin_keyed(SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++)
        ask(0, "alpha");
    expect_verdict(ask(0, "alpha"), 429, 0xFFFF, 77);
    struct fake_stream *other = ask(0, "beta");
    dp_raw_pass(&pump);
    expect_verdict(other, 200, 0, 77);
    expect_counted(0, SLOTS, 1, 0);
    expect_counted(BETA, 1, 0, 0);
    CHECK(dp_raw_stats(&pump).claimed == SLOTS + 1 && dp_raw_stats(&pump).busy == 1);
    end_keyed();
}

/* One at its cap is Python's to refuse; what it writes elsewhere does not count. */
static void test_a_cap_each(void) {
    begin_keyed(2);
    struct request alpha = with_key(5, "alpha"), beta = with_key(5, "beta");
    send_part(0, &alpha, alpha.header + 8);
    send_part(0, &alpha, alpha.header + 8);
    CHECK(send_part(0, &alpha, alpha.header + 8)->handed);
    CHECK(!send_part(1, &alpha, alpha.header + 8)->handed);
    CHECK(!send_part(0, &beta, beta.header + 8)->handed);
    CHECK(!send_part(0, &beta, beta.header + 8)->handed);
    CHECK(send_part(0, &beta, beta.header + 8)->handed);
    CHECK(taken_of(alphas) == 3 && taken_of(betas) == 2);
    CHECK(dp_raw_writing(&pump, 1) == 4 && dp_raw_writing_in(&pump, 1, 0) == 2);
    CHECK(dp_raw_writing_in(&pump, 1, BETA) == 2 && dp_raw_writing_in(&pump, 2, 0) == 1);
    CHECK(dp_raw_writing_in(&pump, 2, BETA) == 0 && dp_raw_writing_in(&pump, 1, 1) == 0);
    CHECK(dp_raw_writing_in(&pump, 1, DP_RAW_PARTITIONS) == 0);
    end_keyed();
}

static void test_one_that_is_lost(void) {
    begin_keyed(SLOTS);
    struct request request = with_key(5, "beta");
    struct fake_stream *lost = ask(0, "alpha");
    struct fake_stream *writing = send_part(0, &request, request.header + 8);
    struct fake_stream *header = send_part(0, &request, 50);
    dp_raw_detach(&pump, 0, 1);
    CHECK(lost->handed && event_count == 1 && events[0].kind == DP_EVENT_REFUSED);
    CHECK(events[0].with.refused.why == DP_WHY_LOST && events[0].with.refused.partition == 0);
    CHECK(taken_of(alphas) == 0 && taken_of(betas) == 1);
    CHECK(ask(0, "alpha")->handed);
    CHECK(dp_raw_fd(&pump, 0) == -1 && dp_raw_fd(&pump, BETA) == betas->outputs[OWNER - 1]);
    arrive(writing, request.wire, request.header + 8, request.size, true);
    arrive(header, request.wire, 50, request.size, true);
    event_count = 0;
    dp_raw_pass(&pump);
    expect_verdict(writing, 200, 0, 77);
    expect_verdict(header, 200, 1, 77);
    /* Another one comes. */
    attach(alphas, 0, SLOTS);
    struct fake_stream *again = ask(0, "alpha");
    dp_raw_pass(&pump);
    expect_verdict(again, 200, 0, 77);
    expect_counted(0, 2, 0, 1);
    expect_counted(BETA, 2, 0, 0);
    end_keyed();
}

/* It breaks a rule: Python is told which, and the other's output is still looked at. */
static void test_one_that_is_broken(void) {
    begin_keyed(SLOTS);
    uint64_t generation;
    struct fake_stream *first = ask(0, "beta"), *second = ask(0, "alpha");
    dp_raw_pass(&pump);
    CHECK(dp_take(betas, 0, &generation) == DP_RUNNING);
    CHECK(dp_emit(betas, 0, generation, (int32_t[]){nth_output(0)}, 1) == DP_OK);
    *dp_output(betas, 0) = UINT32_MAX;
    dp_raw_pass(&pump);
    expect_broken("slot 0: output id 4294967295 is outside the vocabulary");
    CHECK(events[event_count - 1].number == BETA && first->sends == 1);
    CHECK(ask(0, "beta")->handed);
    look_at(alphas);
    CHECK(dp_take(alphas, 0, &generation) == DP_RUNNING);
    emit(0, generation, 0, 2);
    dp_raw_pass(&pump);
    expect_output(second, 2);
    CHECK(!ask(0, "alpha")->handed);
    end_keyed();
}

/* Slots are held for two seconds here and for four there; what is in flight has no say. */
static void test_how_long_all_hold_theirs(void) {
    begin_keyed(SLOTS);
    struct dp_region *both[] = {betas, alphas};
    uint64_t generation;
    ask(0, "alpha");
    ask(0, "beta");
    dp_raw_pass(&pump);
    for (int i = 0; i < 2; i++) {
        pump.now += 2 * SECOND;
        CHECK(dp_take(both[i], 0, &generation) == DP_RUNNING);
        CHECK(dp_finish(both[i], 0, generation, DP_FINISH_STOP) == DP_DONE);
        dp_raw_pass(&pump);
        for (int more = 0; more < 2; more++)
            ask(0, i ? "alpha" : "beta");
        CHECK(dp_raw_stats(&pump).hold_s == (i ? 3.0 : 2.0));
    }
    end_keyed();
}

/* Time-outs say whose they are; a header's is nobody's yet. */
static void test_late_ones(void) {
    begin_keyed(SLOTS);
    struct request alpha = with_key(5, "alpha"), beta = with_key(5, "beta");
    send_part(0, &beta, 50);
    send_part(0, &alpha, alpha.header + 8);
    send_part(0, &beta, beta.header + 4);
    pass_time(pump.now + 2 * TIMEOUT);
    CHECK(event_count == 3 && taken_of(alphas) == 0 && taken_of(betas) == 0);
    CHECK(events[0].with.refused.why == DP_WHY_HEADER_LATE && events[0].with.refused.a == 50);
    CHECK(events[1].with.refused.why == DP_WHY_LATE && events[1].with.refused.a == 2);
    CHECK(events[1].with.refused.partition == 0 && events[2].with.refused.partition == BETA);
    CHECK(events[2].with.refused.a == 1 && dp_raw_timer(&pump) == INT64_MAX);
    end_keyed();
}

static void test_the_end_of_all(void) {
    begin_keyed(SLOTS);
    ask(0, "alpha");
    ask(0, "beta");
    dp_raw_drain(&pump);
    CHECK(ask(0, "alpha")->handed && ask(0, "beta")->handed);
    dp_raw_end_all(&pump, 4);
    CHECK(event_count == 2 && taken_of(alphas) == 0 && taken_of(betas) == 0);
    end_keyed();
}

/* It sleeps when there is output of none, and wakes for each. */
static void test_sleep_and_wake_for_each(void) {
    begin_keyed(SLOTS);
    struct dp_region *both[] = {alphas, betas};
    const uint32_t numbers[] = {0, BETA};
    ask(0, "alpha");
    ask(0, "beta");
    dp_raw_pass(&pump);
    CHECK(dp_raw_count(&pump) == BETA + 1);
    for (int i = 0; i < 2; i++) {
        uint64_t generation, rung;
        look_at(both[i]);
        CHECK(dp_take(region, 0, &generation) == DP_RUNNING);
        dp_raw_pass(&pump);
        emit(0, generation, 0, 1);
        CHECK(!dp_raw_sleep(&pump));
        dp_raw_wake(&pump);
        dp_raw_pass(&pump);
        CHECK(dp_raw_sleep(&pump));
        emit(0, generation, 1, 2);
        CHECK(read(dp_raw_fd(&pump, numbers[i]), &rung, sizeof rung) == sizeof rung);
        CHECK(read(dp_raw_fd(&pump, numbers[!i]), &rung, sizeof rung) < 0);
        dp_raw_wake(&pump);
        emit(0, generation, 2, 3);
        CHECK(read(dp_raw_fd(&pump, numbers[i]), &rung, sizeof rung) < 0);
        dp_raw_pass(&pump);
    }
    end_keyed();
}

int main(void) {
    RUN(test_looking_up, test_setting_keys, test_a_key_cut_at_every_byte, test_which_key_counts,
        test_a_full_one, test_a_cap_each, test_one_that_is_lost, test_one_that_is_broken,
        test_how_long_all_hold_theirs, test_late_ones, test_the_end_of_all,
        test_sleep_and_wake_for_each);
    region_delete(betas);
    drop_region();
    printf("raw_keys: whose key it is, and what one partition is to another\n");
    return 0;
}
