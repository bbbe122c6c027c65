/* The load generator of the packet pump, over connections that are stand-ins: what it makes of
 * answers however they are split, how many it keeps in flight, and what its times count from.
 *
 * Usage: load STEPS SEED */
#include "load_bed.h"

static void say(struct bed *bed, uint32_t i, struct dp_stream *stream, const uint8_t *bytes,
                size_t length, bool fin) {
    size_t taken = offer(bed, i, stream, bytes, length, fin);
    if (taken != length)
        fail("%zu of %zu bytes were taken", taken, length);
}

static size_t put_verdict(uint8_t *to, uint16_t status) {
    memset(to, 0, 32);
    memcpy(to, "DPV1", 4);
    to[4] = (uint8_t)status;
    to[5] = (uint8_t)(status >> 8);
    put_u32(to + 16, 5);
    put_u32(to + 20, INGRESS);
    return 32;
}

static size_t put_answer(uint8_t *to, uint32_t ids, uint32_t counted) {
    size_t verdict = put_verdict(to, 200);
    return verdict + put_body(to + verdict, ids, counted);
}

/* One request whose answer comes in up to three pieces: its status, and why it was none. */
static void check_pieces(const uint8_t *bytes, size_t length, size_t first, size_t second,
                         bool apart, uint16_t status, uint32_t why) {
    struct bed *bed = make_bed(1, DP_LOAD_RAW);
    clock_ns = 1000;
    begin(bed, 1, 1, 0);
    struct dp_stream *stream = bed->conns[0].streams[0];
    size_t ends[] = {first, second, length};
    size_t at = 0;
    for (int i = 0; i < 3; i++) {
        clock_ns += 100;
        bool fin = i == 2 && !apart;
        if (ends[i] > at || fin)
            say(bed, 0, stream, bytes + at, ends[i] - at, fin);
        at = ends[i];
    }
    clock_ns += 100;
    if (apart)
        say(bed, 0, stream, bytes, 0, true);
    struct dp_load_progress progress = dp_load_progress(&bed->pump);
    expect("finished", 1, progress.finished);
    expect("ended", 1, progress.ended);
    expect("status", status, bed->run.status[0]);
    expect("why", why, progress.why);
    expect("broken", why != 0, progress.broken);
    expect("totals", why == 0, progress.totals);
    expect("ingresses", status == 200 || (why > DP_LOAD_SHORT), progress.ingresses);
    if (progress.ingresses)
        expect("ingress", INGRESS, bed->run.ingress_us[0]);
    if (progress.verdicts) {
        int64_t wanted = first >= 32 ? 100 : second >= 32 ? 200 : 300;
        expect("verdict time", (uint64_t)wanted, (uint64_t)bed->run.verdict_ns[0]);
    }
    if (progress.totals)
        expect("total time", apart ? 400 : 300, (uint64_t)bed->run.total_ns[0]);
    free_bed(bed);
}

static void check_splits(const uint8_t *bytes, size_t length, uint16_t status, uint32_t why) {
    for (size_t first = 0; first <= length; first++)
        for (size_t second = first; second <= length; second += 1 + second / 8)
            for (int apart = 0; apart < 2; apart++)
                check_pieces(bytes, length, first, second, apart, status, why);
}

static void check_answers(void) {
    uint8_t bytes[512];
    size_t length;
    for (uint32_t ids = 0; ids < 9; ids += 4) {
        length = put_answer(bytes, ids, ids);
        check_splits(bytes, length, 200, 0);
        length = put_answer(bytes, ids, ids + 1);
        check_splits(bytes, length, DP_LOAD_NONE, DP_LOAD_COUNT);
    }
    length = put_verdict(bytes, 429);
    check_splits(bytes, length, 429, 0);
    memcpy(bytes + length, "every slot is taken", 19);
    check_splits(bytes, length + 19, 429, 0);
    check_splits(bytes, 31, DP_LOAD_NONE, DP_LOAD_SHORT);
    check_splits(bytes, 0, DP_LOAD_NONE, DP_LOAD_SHORT);
    length = put_answer(bytes, 3, 3);
    check_splits(bytes, length - 4, DP_LOAD_NONE, DP_LOAD_TRAILER);
    check_splits(bytes, 32, DP_LOAD_NONE, DP_LOAD_TRAILER);
    bytes[length] = 0;
    check_splits(bytes, length + 1, DP_LOAD_NONE, DP_LOAD_TRAILER);
    put_verdict(bytes, DP_LOAD_LOST); /* must not pass for what this side says of its own */
    check_splits(bytes, 32, DP_LOAD_NONE, DP_LOAD_MAGIC);
    memset(bytes, 'x', 60);
    check_splits(bytes, 60, DP_LOAD_NONE, DP_LOAD_MAGIC);
}

static void check_broken_words(void) {
    struct bed *bed = make_bed(1, DP_LOAD_RAW);
    begin(bed, 2, 2, 0);
    uint8_t bytes[64];
    memset(bytes, 'x', 40);
    events = 0;
    say(bed, 0, bed->conns[0].streams[0], bytes, 40, false);
    say(bed, 0, bed->conns[0].streams[0], bytes, 40, true); /* ignored by now */
    expect("events of the first broken answer", 1, events);
    expect("streams stopped", 1, bed->conns[0].stops);
    size_t length = put_answer(bytes, 1, 7);
    say(bed, 0, bed->conns[0].streams[1], bytes, length, true);
    struct dp_load_progress progress = dp_load_progress(&bed->pump);
    expect("why stays the first's", DP_LOAD_MAGIC, progress.why);
    expect("the bytes", 0x78787878, progress.broken_a);
    expect("broken", 2, progress.broken);
    free_bed(bed);
}

/* Open loop, stall, stop ---------------------------------------------------------------------- */

static void check_open_loop(void) {
    struct bed *bed = make_bed(1, DP_LOAD_RAW);
    clock_ns = 5000;
    begin(bed, 4, 1, 100.5);
    uint8_t bytes[64];
    size_t length = put_answer(bytes, 0, 0);
    struct dp_conn *conn = &bed->conns[0];
    expect("begun at once", 1, conn->count);
    clock_ns = 5350; /* three more are due by now, and there is room for one at a time */
    pass(bed);
    expect("in flight", 1, conn->count);
    for (uint32_t i = 0; i < 4; i++) {
        expect("begun", i + 1, conn->count);
        say(bed, 0, conn->streams[i], bytes, length, true);
        pass(bed);
        expect("counts from its moment", 350 - i * 201 / 2, (uint64_t)bed->run.total_ns[i]);
    }
    expect("finished", 1, dp_load_progress(&bed->pump).finished);
    clock_ns = 6000;
    begin(bed, 2, 5, 100.5);
    say(bed, 0, conn->streams[4], bytes, length, true);
    expect("timer", 6100, (uint64_t)dp_load_timer(&bed->pump));
    clock_ns = 6099;
    pass(bed);
    expect("not before it is due", 5, conn->count);
    clock_ns = 6100;
    pass(bed);
    expect("when it is due", 6, conn->count);
    free_bed(bed);
}

static void check_stall(void) {
    struct bed *bed = make_bed(2, DP_LOAD_RAW);
    clock_ns = 1000;
    begin(bed, 100, 3, 0);
    expect("stall timer", 11001, (uint64_t)dp_load_timer(&bed->pump));
    uint8_t byte = 'D';
    clock_ns = 9000;
    say(bed, 0, bed->conns[0].streams[0], &byte, 1, false);
    clock_ns = 19000;
    pass(bed);
    expect("stalled", 0, dp_load_progress(&bed->pump).stalled);
    events = 0;
    clock_ns = 19001;
    pass(bed);
    pass(bed);
    struct dp_load_progress progress = dp_load_progress(&bed->pump);
    expect("stalled", 1, progress.stalled);
    expect("events", 1, events);
    expect("in flight", 6, progress.begun - progress.ended);
    expect("timer", (uint64_t)INT64_MAX, (uint64_t)dp_load_timer(&bed->pump));
    dp_load_stop(&bed->pump);
    expect("lost", 6, dp_load_progress(&bed->pump).ended);
    /* What comes for a stopped run is nobody's, and another may begin. */
    uint8_t bytes[64];
    size_t length = put_answer(bytes, 0, 0);
    say(bed, 0, bed->conns[0].streams[0], bytes, length, true);
    expect("ended", 6, dp_load_progress(&bed->pump).ended);
    begin(bed, 1, 1, 0);
    CHECK(dp_load_begin(&bed->pump, &bed->run) == -1);
    say(bed, 0, bed->conns[0].streams[bed->conns[0].count - 1], bytes, length, true);
    expect("finished", 1, dp_load_progress(&bed->pump).finished);
    free_bed(bed);
}

static void check_alone(void) {
    struct bed *bed = make_bed(1, DP_LOAD_RAW);
    uint8_t bytes[64];
    size_t length = put_answer(bytes, 0, 0);
    begin(bed, 1000, 1, 0);
    say(bed, 0, bed->conns[0].streams[0], bytes, length, true);
    pass(bed);
    leave(bed, 0);
    struct dp_load_progress progress = dp_load_progress(&bed->pump);
    expect("finished", 1, progress.finished);
    expect("live", 0, progress.live);
    expect("first", 200, bed->run.status[0]);
    for (int i = 1; i < 1000; i++)
        expect("the rest", DP_LOAD_LOST, bed->run.status[i]);
    begin(bed, 3, 1, 0);
    expect("nothing can begin", 3, dp_load_progress(&bed->pump).ended);
    free_bed(bed);
}

/* A connection that is over, before it is told that it leaves. */
static void check_over(void) {
    struct bed *bed = make_bed(2, DP_LOAD_RAW);
    bed->conns[0].over = true;
    uint8_t bytes[64];
    size_t length = put_answer(bytes, 0, 0);
    begin(bed, 4, 2, 0);
    expect("begun on the other", 2, bed->conns[1].count);
    for (uint32_t i = 0; i < 4; i++) {
        say(bed, 1, bed->conns[1].streams[i], bytes, length, true);
        pass(bed);
    }
    expect("finished", 1, dp_load_progress(&bed->pump).finished);
    free_bed(bed);
}

/* Random use against sums of its own ---------------------------------------------------------- */

struct sums {
    uint64_t ended, whole, lost, reset;
};

static void end_one(struct bed *bed, uint32_t i, struct dp_stream *stream, uint64_t *seed,
                    struct sums *sums) {
    uint8_t bytes[256];
    uint32_t ids = random_below(seed, 40);
    size_t length = put_answer(bytes, ids, ids);
    size_t at = 0;
    if (random_below(seed, 8) == 0) {
        dp_front_load.reset(&bed->pump, &bed->entries[i], stream, 1);
        sums->reset++;
    } else {
        while (at < length) {
            size_t piece = 1 + random_below(seed, (uint32_t)(length - at));
            at += piece;
            say(bed, i, stream, bytes + at - piece, piece, at == length);
        }
        sums->whole++;
    }
    sums->ended++;
    CHECK(stream->app == NULL);
    dp_front_load.closed(&bed->pump, &bed->entries[i], stream);
}

static uint32_t in_flight(const struct dp_conn *conn) {
    uint32_t count = 0;
    for (uint32_t k = 0; k < conn->count; k++)
        count += conn->streams[k]->app != NULL;
    return count;
}

static void check_random(uint64_t *seed) {
    struct bed *bed = make_bed(1 + random_below(seed, LINKS), DP_LOAD_RAW);
    uint32_t streams = 1 + random_below(seed, 5), requests = 1 + random_below(seed, 300);
    struct sums sums = {0};
    clock_ns = 1;
    begin(bed, requests, streams, random_below(seed, 2) ? 37.5 : 0);
    while (!dp_load_progress(&bed->pump).finished) {
        clock_ns += random_below(seed, 100);
        uint32_t i = random_below(seed, bed->links);
        struct dp_conn *conn = &bed->conns[i];
        if (!conn->over && random_below(seed, 200) == 0) {
            uint32_t lost = in_flight(conn);
            sums.ended += lost;
            sums.lost += lost;
            leave(bed, i);
        }
        for (uint32_t k = 0; k < conn->count; k++)
            if (conn->streams[k]->app && random_below(seed, 3) == 0)
                end_one(bed, i, conn->streams[k], seed, &sums);
        pass(bed);
        for (uint32_t k = 0; k < bed->links; k++)
            if (in_flight(&bed->conns[k]) > streams)
                fail("%u in flight, %u are allowed", in_flight(&bed->conns[k]), streams);
    }
    struct dp_load_progress progress = dp_load_progress(&bed->pump);
    uint64_t counted[2] = {0};
    for (uint32_t i = 0; i < requests; i++) {
        counted[0] += bed->run.status[i] == 200;
        counted[1] += bed->run.status[i] == DP_LOAD_RESET;
    }
    expect("whole", sums.whole, counted[0]);
    expect("totals", sums.whole, progress.totals);
    expect("verdicts", sums.whole, progress.verdicts);
    expect("reset", sums.reset, counted[1]);
    expect("ended", requests, progress.ended);
    expect("begun", requests, progress.begun);
    for (uint64_t i = 0; i < progress.totals; i++)
        CHECK(bed->run.total_ns[i] >= 0 && bed->run.total_ns[i] >= bed->run.verdict_ns[i]);
    free_bed(bed);
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    uint64_t seed = strtoull(arguments[2], NULL, 10);
    check_answers();
    check_broken_words();
    check_open_loop();
    check_stall();
    check_alone();
    check_over();
    for (long i = strtol(arguments[1], NULL, 10); i > 0; i--)
        check_random(&seed);
    expect("flushes of a sans-IO pump", 0, flushes);
    printf("load: %s runs at random, judged alike\n", arguments[1]);
    return 0;
}
