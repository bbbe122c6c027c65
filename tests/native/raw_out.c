/* What the raw front makes of a runtime's output: of one that breaks the rules too, and for a
 * reader that is behind.
 *
 * usage: raw_out [ROUNDS [SEED]] */
#include "raw_bed.h"

/* The runtime --------------------------------------------------------------------------------- */

static void test_output(void) {
    begin();
    uint64_t generation;
    struct fake_stream *stream = send_taken(0, 2, &generation);
    emit(2, generation, 0, 3); /* before the 200 went out: they go together */
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1 && stream->sent_bytes == 32 + 12);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1);
    for (uint32_t out = 3; out < TOKENS; out++) {
        emit(2, generation, out, out + 1);
        dp_raw_pass(&pump);
        CHECK(stream->sends == out - 1);
    }
    CHECK(counted(2) == 1 && counted(3) == 1 && counted(4) == 0);
    CHECK(dp_finish(region, 2, generation, DP_FINISH_STOP) == DP_DONE);
    pump.now += SECOND;
    dp_raw_pass(&pump);
    expect_output(stream, TOKENS);
    expect_end(stream, 1, 3, TOKENS);
    CHECK(counted(4) == 1 && dp_raw_stats(&pump).hold_s == 1.0);
    expect_stats(1, 1, 0, 0);
    end();
}

/* All in one: taken, put out and finished between two passes. */
static void test_answer_at_once(void) {
    begin();
    uint64_t generation;
    for (uint32_t count = 0; count < 3; count++) {
        struct fake_stream *stream = send_taken(0, 1, &generation);
        emit(1, generation, 0, count);
        CHECK(dp_finish(region, 1, generation, DP_FINISH_STOP) == DP_DONE);
        dp_raw_pass(&pump);
        CHECK(stream->sends == 1);
        expect_output(stream, count);
        expect_end(stream, 1, 3, count);
        CHECK(counted(2) == count + 1 && counted(3) == count);
    }
    end();
}

/* Several slots, which end in another order than they began: the watch moves. */
static void test_many(uint64_t *seed) {
    begin();
    struct fake_stream *streams[SLOTS] = {NULL};
    uint64_t generations[SLOTS];
    uint32_t out[SLOTS] = {0};
    for (uint32_t turn = 0; turn < 40;) {
        uint32_t slot = random_below(seed, SLOTS);
        if (!streams[slot]) {
            if (conns[turn % 2].count == STREAMS_MAX)
                break;
            streams[slot] = send_taken(turn++ % 2, slot, &generations[slot]);
            out[slot] = 0;
        } else if (random_below(seed, 3)) {
            emit(slot, generations[slot], out[slot], out[slot] + 1);
            out[slot]++;
        } else {
            CHECK(dp_finish(region, slot, generations[slot], DP_FINISH_STOP) == DP_DONE);
        }
        if (random_below(seed, 2) || (streams[slot] && state_at(region, slot) == DP_DONE)) {
            dp_raw_pass(&pump);
            for (uint32_t i = 0; i < SLOTS; i++)
                if (streams[i])
                    expect_output(streams[i], out[i]);
        }
        if (streams[slot] && streams[slot]->fin) {
            expect_end(streams[slot], 1, 3, out[slot]);
            streams[slot] = NULL;
        }
    }
    end();
}

static void test_errors(void) {
    begin();
    uint64_t generation;
    struct fake_stream *stream = send_taken(0, 0, &generation);
    emit(0, generation, 0, 2);
    CHECK(dp_finish(region, 0, generation, DP_FINISH_ERROR) == DP_DONE);
    dp_raw_pass(&pump); /* the 200 first: a reset would take it along */
    CHECK(stream->sends == 1 && stream->resets == 0 && !stream->fin);
    expect_output(stream, 2);
    CHECK(!dp_raw_sleep(&pump));
    dp_raw_wake(&pump);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1 && stream->resets == 1 && stream->reset_code == 2);
    CHECK(state_at(region, 0) == DP_FREE);
    expect_stats(1, 0, 0, 1);
    stream = send_taken(0, 0, &generation); /* after the 200 it is reset at once */
    dp_raw_pass(&pump);
    CHECK(dp_finish(region, 0, generation, DP_FINISH_ERROR) == DP_DONE);
    dp_raw_pass(&pump);
    CHECK(stream->sends == 1 && stream->resets == 1 && stream->reset_code == 2);
    end();
}

/* What a runtime does that breaks a rule, after it put two ids out. */
static void set_progress(uint64_t generation, uint32_t count) {
    dp_store_release(&region->progress[1], generation << 24 | count);
}

static void set_state(uint64_t generation, uint32_t state) {
    dp_store_release(&region->states[1], generation << 24 | OWNER << 8 | state);
}

static void break_rule(uint32_t number, uint64_t generation) {
    static const uint32_t reasons[] = {0, 3, UINT32_MAX};
    switch (number) {
    case 0:
        set_progress(generation, TOKENS + 1);
        break;
    case 1:
        set_progress(generation, 0xFFFFFF);
        break;
    case 2:
        set_progress(generation, 1);
        break;
    case 3:
        dp_output(region, 1)[2] = VOCAB;
        set_progress(generation, 3);
        break;
    case 4:
    case 5:
    case 6:
        CHECK(dp_finish(region, 1, generation, reasons[number - 4]) == DP_DONE);
        break;
    case 7:
        set_state(generation + 1, DP_RUNNING);
        break;
    case 8:
        set_state(generation - 1, DP_DONE);
        break;
    case 9:
        set_state(generation, DP_FREE);
        break;
    case 10:
        set_state(generation, DP_WRITING);
        break;
    case 11:
        set_state(generation, DP_CANCELLING);
        break;
    default:
        set_state(generation, 6 + number);
    }
}

static const char *const rules[] = {
    "slot 1: 131 output ids, 130 allowed",
    "slot 1: 16777215 output ids, 130 allowed",
    "slot 1: the output count went back from 2 to 1",
    "slot 1: output id 50000 is outside the vocabulary",
    "slot 1: finish reason 0",
    "slot 1: finish reason 3",
    "slot 1: finish reason 4294967295",
};
#define LEFT_HANDS "slot 1: the state word left this listener's hands"

static void test_broken_rules(void) {
    struct request request = encoded(4, 4, 48);
    for (uint32_t number = 0; number < 14; number++) {
        begin();
        uint64_t generation, other;
        struct fake_stream *half = send_part(0, &request, 60); /* in slot 0 */
        struct fake_stream *victim = send_taken(0, 1, &generation);
        struct fake_stream *bystander = send_taken(0, 2, &other);
        emit(1, generation, 0, 2);
        emit(2, other, 0, 2);
        dp_raw_pass(&pump);
        CHECK(victim->sent_bytes == 40 && bystander->sent_bytes == 40);
        break_rule(number, generation);
        dp_raw_pass(&pump);
        expect_broken(number < 7 ? rules[number] : LEFT_HANDS);
        CHECK(events[0].connection == 0 && event_count == 1);
        /* Nothing is served until Python detached it. */
        struct fake_stream *after = send_whole(1, &request);
        CHECK(after->handed && after->stream.in.consumed == 0);
        arrive(half, request.wire, 60, request.size, true);
        emit(2, other, 2, 3);
        dp_raw_pass(&pump);
        pump.now += TIMEOUT;
        CHECK(dp_raw_sleep(&pump));
        dp_raw_wake(&pump);
        CHECK(victim->sends == 1 && bystander->sends == 1 && event_count == 1 && !half->handed);
        dp_raw_detach(&pump, 0, 1);
        CHECK(victim->resets == 1 && victim->reset_code == 1);
        CHECK(bystander->resets == 1 && bystander->reset_code == 1);
        CHECK(half->handed && event_count == 2);
        expect_refused(half, DP_WHY_LOST, 0, 0, true);
        expect_stats(3, 0, 0, 3);
        drop_region();
        end();
    }
}

static void test_slots_that_are_not_ours(void) {
    struct request request = encoded(4, 4, 48);
    begin(); /* freed by somebody while it is written, and given out once more */
    struct fake_stream *stream = send_part(0, &request, 60);
    dp_store_release(&region->states[0], generation_at(region, 0) << 24 | DP_FREE);
    request.affinity = SLOTS;
    encode(&request);
    struct fake_stream *second = send_part(1, &request, 60);
    expect_broken("slot 0: it was given out twice");
    CHECK(second->handed && second->stream.in.consumed == 0 && !stream->handed);
    dp_raw_detach(&pump, 0, 1);
    expect_refused(stream, DP_WHY_LOST, 0, 0, false);
    drop_region();
    end();
    begin(); /* gone before it is published */
    stream = send_part(0, &request, request.size);
    uint64_t word = generation_at(region, 0) << 24 | OWNER << 8;
    dp_store_release(&region->states[0], word | DP_RUNNING);
    arrive(stream, request.wire, request.size, request.size, true);
    expect_broken("slot 0: it left WRITING under its listener");
    CHECK(!stream->handed && stream->sends == 0);
    dp_raw_detach(&pump, 0, 1);
    expect_refused(stream, DP_WHY_LOST, 0, 0, true);
    drop_region();
    end();
}

/* A reader that is behind --------------------------------------------------------------------- */

static void test_slow_reader(void) {
    begin();
    uint64_t generation, other;
    struct fake_stream *slow = send_taken(0, 0, &generation);
    struct fake_stream *quick = send_taken(1, 1, &other);
    dp_raw_pass(&pump);
    conns[0].unacked = LIMIT + 1;
    for (uint32_t out = 0; out < 5; out++) {
        emit(0, generation, out, out + 1);
        emit(1, other, out, out + 1);
        CHECK(!dp_raw_sleep(&pump));
        dp_raw_wake(&pump);
        dp_raw_pass(&pump);
        CHECK(slow->sends == 1 && quick->sends == out + 2);
        CHECK(dp_raw_sleep(&pump)); /* what nobody takes keeps nobody awake */
        dp_raw_wake(&pump);
    }
    CHECK(dp_raw_timer(&pump) == INT64_MAX); /* a running one is not timed */
    pump.now += 10 * SECOND;
    dp_raw_pass(&pump);
    CHECK(slow->sends == 1 && slow->resets == 0);
    conns[0].unacked = LIMIT;
    dp_raw_pass(&pump);
    CHECK(slow->sends == 2);
    expect_output(slow, 5);
    emit(0, generation, 5, 6); /* what was sent on took the room */
    dp_raw_pass(&pump);
    CHECK(slow->sends == 2);
    conns[0].unacked = 0;
    dp_raw_pass(&pump);
    expect_output(slow, 6);
    end();
}

static void test_finished_answer_of_a_slow_reader(void) {
    for (int drains = 0; drains < 2; drains++) {
        begin();
        uint64_t generation;
        struct fake_stream *slow = send_taken(0, 0, &generation);
        dp_raw_pass(&pump);
        conns[0].unacked = LIMIT + 1;
        emit(0, generation, 0, 5);
        dp_raw_pass(&pump); /* held while it is running, then done */
        CHECK(dp_finish(region, 0, generation, DP_FINISH_STOP) == DP_DONE);
        dp_raw_pass(&pump);
        int64_t due = pump.now + 2 * SECOND;
        CHECK(dp_raw_timer(&pump) == due && state_at(region, 0) == DP_DONE);
        pump.now = due - 1;
        dp_raw_pass(&pump);
        CHECK(slow->sends == 1 && slow->resets == 0 && state_at(region, 0) == DP_DONE);
        if (drains) {
            conns[0].unacked = 0;
            dp_raw_pass(&pump);
            expect_output(slow, 5);
            expect_end(slow, 1, 3, 5);
            expect_stats(1, 1, 0, 0);
        } else {
            pass_time(due);
            CHECK(slow->sends == 1 && slow->resets == 1 && slow->reset_code == 3);
            expect_stats(1, 0, 0, 1);
        }
        CHECK(state_at(region, 0) == DP_FREE && dp_raw_timer(&pump) == INT64_MAX);
        end();
    }
}

/* Three finished answers of one connection; the first one's output takes the room from the others,
 * which are held anew rather than given up: their reader reads. */
static void test_held_in_turns(void) {
    begin();
    uint64_t generations[3];
    struct fake_stream *streams[3];
    for (uint32_t i = 0; i < 3; i++)
        streams[i] = send_taken(0, i, &generations[i]);
    dp_raw_pass(&pump);
    conns[0].unacked = LIMIT + 1;
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t slot = 2 - i; /* this one is held first */
        emit(slot, generations[slot], 0, 4);
        CHECK(dp_finish(region, slot, generations[slot], DP_FINISH_STOP) == DP_DONE);
        dp_raw_pass(&pump);
        pump.now += SECOND / 2;
    }
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t slot = 2 - i;
        conns[0].unacked = LIMIT; /* room for one */
        pump.now += 3 * SECOND / 2;
        dp_raw_pass(&pump);
        for (uint32_t j = 0; j < 3; j++)
            CHECK(streams[j]->fin == (j >= slot) && streams[j]->resets == 0);
        if (i < 2)
            CHECK(dp_raw_timer(&pump) == pump.now + 2 * SECOND);
    }
    expect_stats(3, 3, 0, 0);
    end();
}

static void test_held_one_leaves(void) {
    begin();
    uint64_t generations[3];
    struct fake_stream *streams[3];
    for (uint32_t i = 0; i < 3; i++) {
        streams[i] = send_taken(0, i, &generations[i]);
        emit(i, generations[i], 0, 4);
    }
    conns[0].unacked = LIMIT + 1;
    dp_raw_pass(&pump);
    /* A 200 does not wait for the room that output waits for. */
    CHECK(streams[0]->sends == 1 && streams[0]->sent_bytes == 32);
    peer_resets(streams[1]);
    CHECK(state_at(region, 1) == DP_CANCELLING);
    conns[0].unacked = 0;
    dp_raw_pass(&pump);
    expect_output(streams[0], 4);
    expect_output(streams[2], 4);
    CHECK(streams[1]->sent_bytes == 32);
    end();
}

int main(int argc, char **argv) {
    uint32_t rounds = argument(argc, argv, 1, 20);
    uint64_t seed = argument(argc, argv, 2, 1);
    RUN(test_output, test_answer_at_once, test_errors, test_broken_rules,
        test_slots_that_are_not_ours, test_slow_reader, test_finished_answer_of_a_slow_reader,
        test_held_in_turns, test_held_one_leaves);
    for (uint32_t i = 0; i <= rounds; i++)
        test_many(&seed);
    drop_region();
    printf("raw_out: output, broken rules, slow readers, %u rounds of many\n", rounds);
    return 0;
}
