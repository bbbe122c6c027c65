/* Loss detection and congestion control on a fake clock: each rule with numbers that are worked out
 * beside it, then random traffic over a simulated link, with a model kept beside it.
 *
 * Usage: recovery PACKETS SEED */
#include "harness.h"

#include "quic/frames.h"
#include "quic/pool.h"
#include "quic/ranges.h"
#include "quic/recovery.h"
#include "quic/varint.h"

#define MS        INT64_C(1000000)
#define DATAGRAM  1200
#define PLAIN     (DP_SENT_ELICITS | DP_SENT_IN_FLIGHT)
#define MAX_DELAY (25 * MS)

#define EXPECT(value, wanted)                                                                      \
    do {                                                                                           \
        int64_t value_ = (int64_t)(value), wanted_ = (int64_t)(wanted);                            \
        if (value_ != wanted_)                                                                     \
            fail("%s:%d: %s: expected %ld, got %ld", __FILE__, __LINE__, #value, wanted_, value_); \
    } while (0)

/* ACK frames ------------------------------------------------------------------------------------
 */

#define ACK_BYTES_MAX 4096

/* Write an ACK frame of these ranges, which ascend. */
static size_t put_ack(uint8_t *bytes, const struct dp_range *range, uint32_t count) {
    uint8_t *at = dp_put_varint(bytes, DP_FRAME_ACK);
    const struct dp_range *top = &range[count - 1];
    at = dp_put_varint(at, top->to - 1);
    at = dp_put_varint(at, 0);
    at = dp_put_varint(at, count - 1);
    at = dp_put_varint(at, top->to - 1 - top->from);
    for (uint32_t i = count - 1; i-- > 0;) {
        at = dp_put_varint(at, range[i + 1].from - range[i].to - 1);
        at = dp_put_varint(at, range[i].to - 1 - range[i].from);
    }
    CHECK(at <= bytes + ACK_BYTES_MAX);
    return (size_t)(at - bytes);
}

/* Scripts ---------------------------------------------------------------------------------------
 */

struct script {
    struct dp_pool *pool;
    struct dp_recovery recovery;
    char told[4096]; /* "a3 l4 ": packet 3 was acknowledged and 4 lost */
};

static void say(struct script *script, char what, uint64_t pn) {
    size_t length = strlen(script->told);
    snprintf(script->told + length, sizeof script->told - length, "%c%lu ", what, pn);
}

static void script_acked(void *self, uint64_t pn, const struct dp_sent *sent) {
    CHECK((sent->flags & (DP_SENT_DONE | DP_SENT_ACKED | DP_SENT_LOST)) ==
          (DP_SENT_DONE | DP_SENT_ACKED));
    CHECK(sent->first == pn * 7);
    say(self, 'a', pn);
}

static void script_lost(void *self, uint64_t pn, const struct dp_sent *sent) {
    CHECK((sent->flags & (DP_SENT_DONE | DP_SENT_ACKED | DP_SENT_LOST)) ==
          (DP_SENT_DONE | DP_SENT_LOST));
    CHECK(sent->first == pn * 7);
    say(self, 'l', pn);
}

static const struct dp_sent_owner script_owner = {script_acked, script_lost};

static void begin(struct script *script, uint32_t datagram) {
    memset(script, 0, sizeof *script);
    script->pool = dp_pool_new();
    CHECK(dp_recovery_init(&script->recovery, script->pool, 0, datagram, MAX_DELAY));
    script->recovery.window_limited = true;
}

static void end(struct script *script) {
    dp_recovery_free(&script->recovery);
    EXPECT(dp_pool_out(script->pool), 0);
    dp_pool_free(script->pool);
}

static void send_one(struct script *script, int64_t now, uint8_t flags) {
    CHECK(dp_recovery_sent(&script->recovery, now, script->recovery.datagram, flags,
                           script->recovery.next * 7, 1));
}

static void send_many(struct script *script, int64_t now, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        send_one(script, now, PLAIN);
}

static bool ack_ranges(struct script *script, int64_t now, int64_t delay,
                       const struct dp_range *range, uint32_t count) {
    uint8_t bytes[ACK_BYTES_MAX];
    struct dp_frame frame;
    size_t size = put_ack(bytes, range, count);
    CHECK(dp_frame_parse(bytes, bytes + size, &frame) == 0);
    return dp_recovery_ack(&script->recovery, &frame, delay, now, &script_owner, script);
}

/* Acknowledge [from, to). */
static void ack(struct script *script, int64_t now, int64_t delay, uint64_t from, uint64_t to) {
    CHECK(ack_ranges(script, now, delay, &(struct dp_range){from, to}, 1));
}

static void expect_told(struct script *script, const char *wanted) {
    if (strcmp(script->told, wanted) != 0)
        fail("expected \"%s\", was told \"%s\"", wanted, script->told);
    script->told[0] = 0;
}

/* One packet there and back, so that the smoothed time is `rtt` and the variance half of it. */
static void first_sample(struct script *script, int64_t at, int64_t rtt) {
    uint64_t pn = script->recovery.next;
    script->recovery.window_limited = false;
    send_one(script, at, PLAIN);
    ack(script, at + rtt, 0, pn, pn + 1);
    script->recovery.window_limited = true;
    script->told[0] = 0;
}

static void round_trip_times(void) {
    struct script s;
    begin(&s, DATAGRAM);
    EXPECT(dp_recovery_pto(&s.recovery), 333 * MS + 666 * MS + MAX_DELAY);
    /* The first sample is taken whole, whatever the delay. */
    send_one(&s, 0, PLAIN);
    ack(&s, 100 * MS, 10 * MS, 0, 1);
    EXPECT(s.recovery.smoothed_rtt, 100 * MS);
    EXPECT(s.recovery.rtt_variance, 50 * MS);
    /* 140 less 10: variance (3 * 50 + 30) / 4, smoothed (7 * 100 + 130) / 8. */
    send_one(&s, 100 * MS, PLAIN);
    ack(&s, 240 * MS, 10 * MS, 1, 2);
    EXPECT(s.recovery.rtt_variance, 45 * MS);
    EXPECT(s.recovery.smoothed_rtt, 103750000);
    EXPECT(s.recovery.latest_rtt, 140 * MS);
    /* A delay of 80 counts as the 25 that the peer promised: (3 * 45 + 71.25) / 4 = 51.5625 and
     * (7 * 103.75 + 175) / 8 = 112.65625. */
    send_one(&s, 300 * MS, PLAIN);
    ack(&s, 500 * MS, 80 * MS, 2, 3);
    EXPECT(s.recovery.rtt_variance, 51562500);
    EXPECT(s.recovery.smoothed_rtt, 112656250);
    /* 110 less 20 would be below the minimum of 100, so it stays 110: (3 * 51.5625 + 2.65625) / 4
     * = 39.3359375, (7 * 112.65625 + 110) / 8 = 112.32421875. */
    send_one(&s, 600 * MS, PLAIN);
    ack(&s, 710 * MS, 20 * MS, 3, 4);
    EXPECT(s.recovery.rtt_variance, 39335937);
    EXPECT(s.recovery.smoothed_rtt, 112324218);
    EXPECT(s.recovery.min_rtt, 100 * MS);
    send_one(&s, 800 * MS, PLAIN);
    ack(&s, 860 * MS, 0, 4, 5);
    EXPECT(s.recovery.min_rtt, 60 * MS);
    end(&s);
}

static void what_is_no_sample(void) {
    struct script s;
    begin(&s, DATAGRAM);
    /* Nothing of it elicits. */
    send_one(&s, 0, 0);
    ack(&s, 50 * MS, 0, 0, 1);
    CHECK(!s.recovery.has_sample);
    expect_told(&s, "a0 ");
    /* The largest does not, but another does: that is a sample, of the largest. */
    send_one(&s, 100 * MS, PLAIN);
    send_one(&s, 110 * MS, 0);
    ack(&s, 150 * MS, 0, 1, 3);
    EXPECT(s.recovery.latest_rtt, 40 * MS);
    /* The largest is not new: packet 3 arrives in an ACK of 4, which was acknowledged before. */
    send_many(&s, 200 * MS, 2);
    ack(&s, 260 * MS, 0, 4, 5);
    EXPECT(s.recovery.latest_rtt, 60 * MS);
    ack(&s, 265 * MS, 0, 3, 5);
    EXPECT(s.recovery.latest_rtt, 60 * MS);
    expect_told(&s, "a1 a2 a4 a3 ");
    EXPECT(s.recovery.in_flight, 0);
    /* What the handshake measured stands in for the first sample. */
    dp_recovery_seed_rtt(&s.recovery, 80 * MS, 10 * MS, 70 * MS, 300 * MS);
    EXPECT(dp_recovery_pto(&s.recovery), 80 * MS + 40 * MS + MAX_DELAY);
    dp_recovery_seed_rtt(&s.recovery, 0, 0, 0, 300 * MS);
    EXPECT(s.recovery.smoothed_rtt, 80 * MS);
    end(&s);
}

static void packet_threshold(void) {
    struct script s;
    begin(&s, DATAGRAM);
    send_many(&s, 0, 6);
    /* 0 is two below 2: perhaps reordered. Three below 3, it is lost. */
    ack(&s, 100 * MS, 0, 2, 3);
    expect_told(&s, "a2 ");
    EXPECT(dp_recovery_lowest(&s.recovery), 0);
    ack(&s, 100 * MS, 0, 2, 4);
    expect_told(&s, "l0 a3 ");
    EXPECT(dp_recovery_lowest(&s.recovery), 1);
    CHECK(!dp_recovery_packet(&s.recovery, 0) && dp_recovery_packet(&s.recovery, 1));
    CHECK(!dp_recovery_packet(&s.recovery, 6));
    EXPECT(s.recovery.in_flight, 3 * DATAGRAM);
    /* What is heard again, above one that is still out, is nothing new. */
    s.recovery.pto_count = 1;
    ack(&s, 100 * MS, 0, 2, 4);
    EXPECT(s.recovery.pto_count, 1);
    expect_told(&s, "");
    /* In one call the fates come in order. 1 is lost, since 5 is four above it. */
    CHECK(ack_ranges(&s, 101 * MS, 0, (struct dp_range[]){{0, 1}, {4, 6}}, 2));
    expect_told(&s, "l1 a4 a5 ");
    /* Late, 0 changes nothing: it was given up. */
    ack(&s, 102 * MS, 0, 0, 6);
    expect_told(&s, "");
    EXPECT(s.recovery.in_flight, 0);
    EXPECT(s.recovery.eliciting, 0);
    EXPECT(dp_recovery_lowest(&s.recovery), 6);
    EXPECT(dp_recovery_timer(&s.recovery), DP_NEVER);
    end(&s);
}

static void spurious_loss_in_the_ring(void) {
    struct script s;
    begin(&s, DATAGRAM);
    first_sample(&s, 0, 80 * MS); /* packet 0 */
    send_one(&s, 100 * MS, PLAIN);
    send_one(&s, 150 * MS, PLAIN);
    send_one(&s, 151 * MS, PLAIN);
    /* 1 is 130 ms old and lost by time, 2 is 80 ms old and is not. */
    ack(&s, 230 * MS, 0, 3, 4);
    expect_told(&s, "l1 a3 ");
    EXPECT(dp_recovery_lowest(&s.recovery), 2);
    uint64_t window = s.recovery.window;
    ack(&s, 231 * MS, 0, 1, 4);
    expect_told(&s, "a2 ");
    EXPECT(s.recovery.window, window);
    EXPECT(s.recovery.in_flight, 0);
    end(&s);
}

static void time_threshold(void) {
    struct script s;
    begin(&s, DATAGRAM);
    first_sample(&s, 0, 80 * MS);
    send_one(&s, 100 * MS, PLAIN);
    send_one(&s, 101 * MS, PLAIN);
    /* 9/8 of 80 ms after 100: 190. The sample of 80 leaves the smoothed time as it is. */
    ack(&s, 181 * MS, 0, 2, 3);
    EXPECT(dp_recovery_timer(&s.recovery), 190 * MS);
    EXPECT(dp_recovery_on_timer(&s.recovery, 190 * MS - 1, &script_owner, &s), 0);
    expect_told(&s, "a2 ");
    EXPECT(dp_recovery_on_timer(&s.recovery, 190 * MS, &script_owner, &s), 0);
    expect_told(&s, "l1 ");
    EXPECT(s.recovery.pto_count, 0);
    EXPECT(dp_recovery_timer(&s.recovery), DP_NEVER);
    /* The latest time counts when it is longer than the smoothed: 9/8 of 160 after 200 is 380. */
    send_one(&s, 200 * MS, PLAIN);
    send_one(&s, 201 * MS, PLAIN);
    ack(&s, 361 * MS, 0, 4, 5);
    EXPECT(dp_recovery_timer(&s.recovery), 380 * MS);
    ack(&s, 362 * MS, 0, 3, 5);
    EXPECT(dp_recovery_timer(&s.recovery), DP_NEVER);
    end(&s);
    /* 9/8 of 0.1 ms is less than the granularity, a millisecond. */
    begin(&s, DATAGRAM);
    first_sample(&s, 0, MS / 10);
    send_many(&s, MS, 2);
    ack(&s, MS + MS / 10, 0, 2, 3);
    EXPECT(dp_recovery_timer(&s.recovery), 2 * MS);
    end(&s);
}

static void probe_time_outs(void) {
    struct script s;
    begin(&s, DATAGRAM);
    EXPECT(dp_recovery_timer(&s.recovery), DP_NEVER);
    first_sample(&s, 0, 100 * MS);
    /* An ACK alone is not waited for. */
    send_one(&s, 150 * MS, 0);
    EXPECT(dp_recovery_timer(&s.recovery), DP_NEVER);
    /* 100 + 4 * 50 + 25 after the last packet that elicits. */
    send_one(&s, 200 * MS, PLAIN);
    send_one(&s, 300 * MS, PLAIN);
    send_one(&s, 310 * MS, 0);
    EXPECT(dp_recovery_timer(&s.recovery), 625 * MS);
    EXPECT(dp_recovery_on_timer(&s.recovery, 625 * MS - 1, &script_owner, &s), 0);
    EXPECT(dp_recovery_on_timer(&s.recovery, 625 * MS, &script_owner, &s), 2);
    /* Twice as long from the probe on, then four times. Nothing is lost by it. */
    send_one(&s, 626 * MS, PLAIN | DP_SENT_PROBE);
    EXPECT(dp_recovery_timer(&s.recovery), 626 * MS + 650 * MS);
    EXPECT(dp_recovery_on_timer(&s.recovery, 1276 * MS, &script_owner, &s), 2);
    send_one(&s, 1276 * MS, PLAIN | DP_SENT_PROBE);
    EXPECT(dp_recovery_timer(&s.recovery), 1276 * MS + 1300 * MS);
    expect_told(&s, "");
    EXPECT(s.recovery.in_flight, 4 * DATAGRAM);
    EXPECT(s.recovery.window, 10 * DATAGRAM);
    /* An ACK of nothing new leaves the back-off; one of something ends it. */
    ack(&s, 1300 * MS, 0, 0, 1);
    EXPECT(s.recovery.pto_count, 2);
    ack(&s, 1376 * MS, 0, 1, 7);
    EXPECT(s.recovery.pto_count, 0);
    expect_told(&s, "a1 a2 a3 a4 a5 a6 ");
    EXPECT(dp_recovery_timer(&s.recovery), DP_NEVER);
    /* However often it runs out, the time stays a time. */
    send_one(&s, 2000 * MS, PLAIN);
    for (int64_t at, before = 2000 * MS, i = 0; i < 100; i++, before = at) {
        at = dp_recovery_timer(&s.recovery);
        CHECK(at > 2000 * MS && at < DP_NEVER / 2 && (at > before || i > 16));
        EXPECT(dp_recovery_on_timer(&s.recovery, at, &script_owner, &s), 2);
    }
    end(&s);
}

static void windows(void) {
    struct script s;
    /* min(10 datagrams, max(2 datagrams, 14720)) */
    static const uint32_t initial[][2] = {{1200, 12000}, {1500, 14720}, {9000, 18000}};
    for (int i = 0; i < 3; i++) {
        begin(&s, initial[i][0]);
        EXPECT(s.recovery.window, initial[i][1]);
        end(&s);
    }
    begin(&s, DATAGRAM);
    /* Slow start: what arrives is added. */
    send_many(&s, 0, 10);
    EXPECT(dp_recovery_window(&s.recovery), 0);
    ack(&s, 100 * MS, 0, 0, 10);
    EXPECT(s.recovery.window, 24000);
    /* 10 is lost: half, once. The others were sent before the cut and add nothing. */
    send_many(&s, 100 * MS, 10);
    ack(&s, 200 * MS, 0, 11, 14);
    EXPECT(s.recovery.window, 12000);
    EXPECT(s.recovery.threshold, 12000);
    /* 14 too, but that is the same loss still. */
    ack(&s, 210 * MS, 0, 15, 20);
    EXPECT(s.recovery.window, 12000);
    /* What was sent in the very moment of the cut belongs to the period still. */
    send_one(&s, 200 * MS, PLAIN);
    ack(&s, 300 * MS, 0, 20, 21);
    EXPECT(s.recovery.credit, 0);
    /* Avoidance: a datagram for a window. Nine packets are none, the tenth makes it whole. */
    send_many(&s, 301 * MS, 20);
    ack(&s, 400 * MS, 0, 21, 30);
    EXPECT(s.recovery.window, 12000);
    ack(&s, 400 * MS, 0, 21, 31);
    EXPECT(s.recovery.window, 13200);
    /* Ten more are 12000 of 13200. */
    ack(&s, 400 * MS, 0, 31, 41);
    EXPECT(s.recovery.window, 13200);
    EXPECT(s.recovery.in_flight, 0);
    /* Halved again and again it stays at two datagrams. */
    static const uint64_t after[] = {6600, 3300, 2400, 2400};
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t pn = s.recovery.next;
        int64_t at = (1000 + i * 200) * MS;
        send_many(&s, at, 4);
        ack(&s, at + 100 * MS, 0, pn + 1, pn + 4);
        EXPECT(s.recovery.window, after[i]);
        EXPECT(s.recovery.credit, 0);
    }
    /* What a window is overfilled by counts for the next: five packets of 1000 on 2400. */
    uint64_t pn = s.recovery.next;
    for (int i = 0; i < 5; i++)
        CHECK(dp_recovery_sent(&s.recovery, 3000 * MS, 1000, PLAIN, s.recovery.next * 7, 1));
    ack(&s, 3100 * MS, 0, pn, pn + 3);
    EXPECT(s.recovery.window, 3600);
    EXPECT(s.recovery.credit, 600);
    ack(&s, 3100 * MS, 0, pn + 3, pn + 5);
    EXPECT(s.recovery.window, 3600);
    EXPECT(s.recovery.credit, 2600);
    CHECK(strstr(s.told, "l14 ") && strstr(s.told, "l10 "));
    end(&s);
}

static void unused_window_stays(void) {
    struct script s;
    begin(&s, DATAGRAM);
    send_many(&s, 0, 5);
    s.recovery.window_limited = false;
    ack(&s, 100 * MS, 0, 0, 3);
    EXPECT(s.recovery.window, 12000);
    s.recovery.window_limited = true;
    ack(&s, 100 * MS, 0, 3, 5);
    EXPECT(s.recovery.window, 12000 + 2 * DATAGRAM);
    end(&s);
}

/* Packets 1, 2 and 3 are lost, of which the first and the last were sent `span` apart. */
static uint64_t window_after_span(int64_t span, bool with_sample, bool acked_between,
                                  uint8_t last_flags) {
    struct script s;
    begin(&s, DATAGRAM);
    if (with_sample)
        first_sample(&s, 0, 100 * MS);
    else
        send_one(&s, 0, PLAIN);
    send_one(&s, 1000 * MS, PLAIN);
    send_one(&s, 1100 * MS, PLAIN);
    send_one(&s, 1000 * MS + span, last_flags);
    send_many(&s, 2000 * MS, 3);
    s.recovery.window_limited = false;
    struct dp_range range[] = {{2, 3}, {6, 7}};
    CHECK(ack_ranges(&s, 2100 * MS, 0, range + !acked_between, 1 + acked_between));
    uint64_t window = s.recovery.window;
    end(&s);
    return window;
}

static void persistent_congestion(void) {
    /* The ACK's sample of 100 ms makes the variance 37.5 ms: 3 * (100 + 150 + 25) = 825 ms. */
    EXPECT(window_after_span(825 * MS + 1, true, false, PLAIN), 2400);
    EXPECT(window_after_span(825 * MS, true, false, PLAIN), 6000);
    /* Something between them arrived; no round trip was known; the last one elicits nothing. */
    EXPECT(window_after_span(900 * MS, true, true, PLAIN), 6000);
    EXPECT(window_after_span(900 * MS, false, false, PLAIN), 6000);
    EXPECT(window_after_span(900 * MS, true, false, DP_SENT_IN_FLIGHT), 6000);
    /* The window is not judged before there is a sample, and an ACK alone does not make one. */
    struct script s;
    begin(&s, DATAGRAM);
    send_one(&s, 1000 * MS, PLAIN);
    send_one(&s, 5000 * MS, PLAIN);
    for (int i = 0; i < 3; i++)
        send_one(&s, 5100 * MS, 0);
    ack(&s, 5200 * MS, 0, 4, 5);
    expect_told(&s, "l0 l1 a4 ");
    EXPECT(s.recovery.window, 6000);
    end(&s);
    /* It is out of recovery: what is sent then grows the window in slow start. */
    begin(&s, DATAGRAM);
    first_sample(&s, 0, 100 * MS);
    send_one(&s, 1000 * MS, PLAIN);
    /* With a sample of 150 ms: 3 * (106.25 + 4 * 50 + 25) = 993.75 ms. */
    send_one(&s, 1994 * MS, PLAIN);
    send_many(&s, 2000 * MS, 3);
    ack(&s, 2150 * MS, 0, 5, 6);
    /* 3 and 4 are 150 ms old, 9/8 of 150 is 168.75: not lost yet. */
    expect_told(&s, "l1 l2 a5 ");
    EXPECT(s.recovery.window, 2400 + 1200);
    EXPECT(s.recovery.threshold, 6000);
    EXPECT(s.recovery.min_rtt, 150 * MS);
    end(&s);
}

static void pacing(void) {
    struct script s;
    begin(&s, DATAGRAM);
    first_sample(&s, 0, 100 * MS);
    s.recovery.window_limited = false;
    /* 5/4 of 12000 in 100 ms are 150 bytes a millisecond: a datagram every 8. */
    int64_t at = 1000 * MS;
    for (int i = 0; i < 10; i++) {
        CHECK(dp_recovery_paced_at(&s.recovery, at) <= at);
        send_one(&s, at, PLAIN);
    }
    EXPECT(dp_recovery_paced_at(&s.recovery, at), at + 8 * MS);
    EXPECT(dp_recovery_paced_at(&s.recovery, at + 3 * MS), at + 8 * MS);
    EXPECT(dp_recovery_paced_at(&s.recovery, at + 7 * MS), at + 8 * MS);
    CHECK(dp_recovery_paced_at(&s.recovery, at + 8 * MS) <= at + 8 * MS);
    send_one(&s, at + 8 * MS, PLAIN);
    EXPECT(dp_recovery_paced_at(&s.recovery, at + 8 * MS), at + 16 * MS);
    /* An ACK alone costs nothing. */
    send_one(&s, at + 9 * MS, 0);
    EXPECT(dp_recovery_paced_at(&s.recovery, at + 9 * MS), at + 16 * MS);
    /* Asked every 10 us, the rate is the same: a second lets 125 datagrams through. */
    uint32_t sent = 0;
    for (int64_t now = at + 16 * MS; now < at + 1016 * MS; now += MS / 100)
        if (dp_recovery_paced_at(&s.recovery, now) <= now) {
            send_one(&s, now, PLAIN);
            sent++;
        }
    CHECK(sent >= 124 && sent <= 125);
    /* After a pause it is ten again, and not what the whole pause would have let through. */
    at += 10000 * MS;
    for (int i = 0; i < 10; i++) {
        CHECK(dp_recovery_paced_at(&s.recovery, at) <= at);
        send_one(&s, at, PLAIN);
    }
    EXPECT(dp_recovery_paced_at(&s.recovery, at), at + 8 * MS);
    end(&s);
    /* A millisecond cannot be divided by a timer. */
    begin(&s, DATAGRAM);
    first_sample(&s, 0, MS);
    for (int i = 0; i < 100; i++) {
        EXPECT(dp_recovery_paced_at(&s.recovery, 5 * MS), 5 * MS);
        send_one(&s, 5 * MS, PLAIN);
    }
    end(&s);
}

static void ring_of_packets(void) {
    struct script s;
    begin(&s, DATAGRAM);
    size_t small = dp_pool_out(s.pool);
    first_sample(&s, 0, 100 * MS);
    for (uint32_t i = 0; i < 8192; i++) {
        CHECK(dp_recovery_has_room(&s.recovery));
        send_one(&s, 200 * MS, PLAIN);
    }
    CHECK(!dp_recovery_has_room(&s.recovery));
    CHECK(!dp_recovery_sent(&s.recovery, 200 * MS, 1, PLAIN, 0, 0));
    EXPECT(s.recovery.next, 8193);
    EXPECT(s.recovery.in_flight, 8192 * DATAGRAM);
    for (uint64_t pn = 1; pn < s.recovery.next; pn++)
        EXPECT(dp_recovery_packet(&s.recovery, pn)->first, pn * 7);
    /* 1 and 2 are lost with it; the ring is empty, and small again. */
    ack(&s, 300 * MS, 0, 3, 8193);
    EXPECT(dp_recovery_lowest(&s.recovery), 8193);
    EXPECT(s.recovery.in_flight, 0);
    EXPECT(dp_pool_out(s.pool), small);
    s.told[0] = 0;
    /* Packets that were never sent. */
    send_one(&s, 300 * MS, PLAIN);
    CHECK(!ack_ranges(&s, 301 * MS, 0, &(struct dp_range){8193, 8195}, 1));
    expect_told(&s, "");
    EXPECT(s.recovery.in_flight, DATAGRAM);
    ack(&s, 302 * MS, 0, 8193, 8194);
    expect_told(&s, "a8193 ");
    end(&s);
}

static void old_ranges_are_not_walked(void) {
    struct script s;
    begin(&s, DATAGRAM);
    send_many(&s, 0, 1000);
    ack(&s, 100 * MS, 0, 0, 1000);
    s.told[0] = 0;
    send_many(&s, 200 * MS, 4);
    /* Hundreds of ranges of single packets that are done, below one that is new. */
    struct dp_range range[500];
    for (uint32_t i = 0; i < 499; i++)
        range[i] = (struct dp_range){2 * i, 2 * i + 1};
    range[499] = (struct dp_range){1000, 1002};
    CHECK(ack_ranges(&s, 300 * MS, 0, range, 500));
    expect_told(&s, "a1000 a1001 ");
    /* The walk has to end at the first range below the ring. To see that, a frame that no parser
     * would let through: a range below all that is outstanding, and then one that wraps round to
     * 2^64 - 22, whose place in a ring of up to 32 * 2^n entries is that of an outstanding one. */
    CHECK(dp_recovery_lowest(&s.recovery) == 1002 && s.recovery.room == 32);
    uint8_t bytes[64] = {0};
    uint8_t *at = dp_put_varint(bytes, 0); /* gap 0: from 1003 to 1001 */
    at = dp_put_varint(at, 1001);          /* and down to 0 */
    at = dp_put_varint(at, 20);            /* 0 - 20 - 2 wraps: place 10, which is 1002's */
    at = dp_put_varint(at, 0);
    struct dp_frame frame = {.type = DP_FRAME_ACK, .start = bytes, .size = sizeof bytes};
    frame.ack.largest = 1003;
    frame.ack.count = 2;
    frame.ack.ranges = bytes;
    CHECK(dp_recovery_ack(&s.recovery, &frame, 0, 301 * MS, &script_owner, &s));
    expect_told(&s, "a1003 ");
    end(&s);
}

static void another_path(void) {
    struct script s;
    begin(&s, DATAGRAM);
    send_many(&s, 0, 10);
    ack(&s, 100 * MS, 0, 0, 10);
    send_many(&s, 200 * MS, 4);
    s.told[0] = 0;
    dp_recovery_new_path(&s.recovery);
    EXPECT(s.recovery.window, 12000);
    EXPECT(s.recovery.in_flight, 0);
    EXPECT(dp_recovery_pto(&s.recovery), 999 * MS + MAX_DELAY);
    EXPECT(dp_recovery_timer(&s.recovery), 200 * MS + 999 * MS + MAX_DELAY);
    send_one(&s, 300 * MS, PLAIN);
    EXPECT(s.recovery.in_flight, DATAGRAM);
    /* What went over the old path neither measures nor grows nor shrinks the new one's window. */
    ack(&s, 310 * MS, 0, 13, 14);
    expect_told(&s, "l10 a13 ");
    CHECK(!s.recovery.has_sample);
    EXPECT(s.recovery.window, 12000);
    EXPECT(s.recovery.in_flight, DATAGRAM);
    ack(&s, 340 * MS, 0, 14, 15);
    expect_told(&s, "l11 l12 a14 ");
    EXPECT(s.recovery.smoothed_rtt, 40 * MS);
    EXPECT(s.recovery.window, 12000 + DATAGRAM);
    end(&s);
}

/* A simulated link ------------------------------------------------------------------------------
 */

struct shape {
    int64_t one_way;
    double bytes_ns;      /* the bottleneck's rate; 0: none */
    uint32_t buffer;      /* bytes that wait before it at most */
    uint32_t loss;        /* per thousand, data and ACKs */
    uint32_t reordering;  /* per thousand: up to a round trip late */
    uint32_t duplication; /* per thousand */
    bool mixed;           /* sizes, ACKs alone, and changes of the path */
    bool model;           /* check everything at every step */
};

struct event {
    int64_t at;
    uint64_t order;
    uint64_t pn; /* of data */
    uint8_t elicits;
    size_t ack_bytes; /* 0: data */
    uint8_t ack[256];
};

struct link {
    const struct shape *shape;
    uint64_t seed;
    struct event **heap;
    size_t events, heap_room;
    uint64_t order;
    int64_t busy_until; /* when the bottleneck is through with what it has */
};

static bool earlier(const struct event *a, const struct event *b) {
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void push(struct link *link, struct event *event) {
    if (link->events == link->heap_room) {
        link->heap_room = link->heap_room ? 2 * link->heap_room : 64;
        link->heap = realloc(link->heap, link->heap_room * sizeof *link->heap);
        CHECK(link->heap);
    }
    event->order = link->order++;
    size_t i = link->events++;
    for (; i && earlier(event, link->heap[(i - 1) / 2]); i = (i - 1) / 2)
        link->heap[i] = link->heap[(i - 1) / 2];
    link->heap[i] = event;
}

static struct event *pop(struct link *link) {
    struct event *first = link->heap[0], *last = link->heap[--link->events];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < link->events; i = child) {
        child += child + 1 < link->events && earlier(link->heap[child + 1], link->heap[child]);
        if (!earlier(link->heap[child], last))
            break;
        link->heap[i] = link->heap[child];
    }
    link->heap[i] = last;
    return first;
}

static bool chance(struct link *link, uint32_t per_thousand) {
    return per_thousand && random_below(&link->seed, 1000) < per_thousand;
}

static void carry(struct link *link, int64_t at, const struct event *event) {
    const struct shape *shape = link->shape;
    for (int copies = 1 + chance(link, shape->duplication); copies > 0; copies--) {
        if (chance(link, shape->loss))
            continue;
        struct event *copy = malloc(sizeof *copy);
        CHECK(copy);
        *copy = *event;
        copy->at = at + shape->one_way;
        if (chance(link, shape->reordering))
            copy->at += random_below(&link->seed, (uint32_t)(2 * shape->one_way));
        push(link, copy);
    }
}

/* Data goes through the bottleneck, which drops what its buffer does not hold. */
static void carry_data(struct link *link, int64_t now, uint32_t bytes, const struct event *event) {
    double rate = link->shape->bytes_ns;
    if (rate == 0) {
        carry(link, now, event);
        return;
    }
    int64_t from = link->busy_until > now ? link->busy_until : now;
    if ((double)(from - now) * rate + bytes > link->shape->buffer)
        return;
    link->busy_until = from + (int64_t)(bytes / rate);
    carry(link, link->busy_until, event);
}

/* Sender and receiver over it -------------------------------------------------------------------
 */

enum fate { OUT = 1, ACKED, LOST };

struct run {
    struct link link;
    struct dp_pool *pool;
    struct dp_recovery recovery;
    int64_t now;
    uint64_t wanted; /* packets to send */
    /* The model: what became of every packet. */
    uint8_t *fate;
    uint8_t *flags;
    uint16_t *bytes;
    uint64_t path_from;
    uint64_t acked, lost, told_last;
    bool told;
    /* The receiver. */
    struct dp_ranges received;
    uint8_t *arrived;
    uint64_t arrived_bytes;
    uint32_t unacked;
    int64_t ack_due, largest_at;
};

static void tell(struct run *run, uint64_t pn, const struct dp_sent *sent, enum fate fate) {
    if (run->fate[pn] != OUT)
        fail("packet %lu got fate %d after %d", pn, fate, run->fate[pn]);
    if (run->told && pn <= run->told_last)
        fail("packet %lu was told of after %lu", pn, run->told_last);
    EXPECT(sent->bytes, run->bytes[pn]);
    EXPECT(sent->first, pn);
    run->fate[pn] = (uint8_t)fate;
    run->told_last = pn;
    run->told = true;
    if (fate == ACKED)
        run->acked++;
    else
        run->lost++;
    if (fate == ACKED && !run->arrived[pn])
        fail("packet %lu was acknowledged and never arrived", pn);
}

static void run_acked(void *self, uint64_t pn, const struct dp_sent *sent) {
    tell(self, pn, sent, ACKED);
}
static void run_lost(void *self, uint64_t pn, const struct dp_sent *sent) {
    tell(self, pn, sent, LOST);
}

static const struct dp_sent_owner run_owner = {run_acked, run_lost};

static void check_model(struct run *run) {
    const struct dp_recovery *recovery = &run->recovery;
    uint64_t in_flight = 0, eliciting = 0, lowest = dp_recovery_lowest(recovery);
    CHECK(lowest == recovery->next || run->fate[lowest] == OUT);
    CHECK(lowest == 0 || run->fate[lowest - 1] != OUT);
    for (uint64_t pn = lowest; pn < recovery->next; pn++) {
        const struct dp_sent *sent = dp_recovery_packet(recovery, pn);
        EXPECT((sent->flags & DP_SENT_DONE) == 0, run->fate[pn] == OUT);
        if (run->fate[pn] != OUT)
            continue;
        eliciting += (run->flags[pn] & DP_SENT_ELICITS) != 0;
        if (run->flags[pn] & DP_SENT_IN_FLIGHT && pn >= run->path_from)
            in_flight += run->bytes[pn];
    }
    EXPECT(recovery->in_flight, in_flight);
    EXPECT(recovery->eliciting, eliciting);
    CHECK(recovery->window >= 2 * DATAGRAM);
    CHECK((dp_recovery_timer(recovery) == DP_NEVER) == (eliciting == 0));
}

static void transmit(struct run *run, uint8_t flags) {
    uint64_t pn = run->recovery.next;
    uint32_t bytes = DATAGRAM;
    if (run->link.shape->mixed && !random_below(&run->link.seed, 4))
        bytes = 40 + random_below(&run->link.seed, DATAGRAM - 40);
    CHECK(pn < 2 * run->wanted + 1000);
    CHECK(dp_recovery_sent(&run->recovery, run->now, bytes, flags, pn, 1));
    run->fate[pn] = OUT;
    run->flags[pn] = flags;
    run->bytes[pn] = (uint16_t)bytes;
    struct event data = {.pn = pn, .elicits = flags & DP_SENT_ELICITS};
    carry_data(&run->link, run->now, bytes, &data);
}

/* Send what the window and the pacer let through. When the next may leave, DP_NEVER: when an event
 * allows it. */
static int64_t send_all(struct run *run) {
    struct dp_recovery *recovery = &run->recovery;
    recovery->window_limited = false;
    while (recovery->next < run->wanted && dp_recovery_has_room(recovery)) {
        if (run->link.shape->mixed && !random_below(&run->link.seed, 16)) {
            transmit(run, 0);
            continue;
        }
        recovery->window_limited = true;
        if (dp_recovery_window(recovery) < DATAGRAM)
            return DP_NEVER;
        int64_t at = dp_recovery_paced_at(recovery, run->now);
        if (at > run->now)
            return at;
        recovery->window_limited = false;
        transmit(run, PLAIN);
    }
    return DP_NEVER;
}

static void send_ack(struct run *run) {
    struct event ack = {0};
    ack.ack_bytes = put_ack(ack.ack, run->received.range, run->received.count);
    CHECK(ack.ack_bytes <= sizeof ack.ack);
    ack.pn = (uint64_t)(run->now - run->largest_at);
    carry(&run->link, run->now, &ack);
    run->unacked = 0;
    run->ack_due = DP_NEVER;
}

/* As RFC 9000 section 13.2 wants it: every second packet, and at once what is out of order. */
static void arrive(struct run *run, const struct event *data) {
    struct dp_ranges *received = &run->received;
    if (!run->arrived[data->pn])
        run->arrived_bytes += run->bytes[data->pn];
    run->arrived[data->pn] = 1;
    uint64_t top = received->count ? received->range[received->count - 1].to : 0;
    while (!dp_ranges_add(received, run->pool, 24, data->pn, data->pn + 1))
        dp_ranges_drop_lowest(received);
    if (data->pn >= top)
        run->largest_at = run->now;
    if (!data->elicits)
        return;
    if (data->pn != top || ++run->unacked >= 2)
        send_ack(run);
    else
        run->ack_due = run->now + MAX_DELAY;
}

static void handle(struct run *run, struct event *event) {
    if (event->ack_bytes) {
        struct dp_frame frame;
        CHECK(dp_frame_parse(event->ack, event->ack + event->ack_bytes, &frame) == 0);
        run->told = false;
        CHECK(
            dp_recovery_ack(&run->recovery, &frame, (int64_t)event->pn, run->now, &run_owner, run));
    } else {
        arrive(run, event);
    }
    free(event);
}

static void on_timer(struct run *run, bool path_changed) {
    for (int i = 0; dp_recovery_timer(&run->recovery) <= run->now; i++) {
        uint64_t lost = run->lost;
        run->told = false;
        uint32_t probes = dp_recovery_on_timer(&run->recovery, run->now, &run_owner, run);
        /* The round-trip time that a new path forgets may put a time that had come off again. */
        if (!probes && run->lost == lost && !path_changed)
            fail("the timer was due and nothing was");
        CHECK(i < 3);
        for (uint32_t probe = 0; probe < probes; probe++)
            transmit(run, PLAIN | DP_SENT_PROBE);
    }
}

static int64_t earliest(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* One step of the world: false when there is nothing that could happen. */
static bool advance(struct run *run, int64_t pace_at) {
    int64_t at = earliest(earliest(pace_at, run->ack_due), dp_recovery_timer(&run->recovery));
    if (run->link.events)
        at = earliest(at, run->link.heap[0]->at);
    if (at == DP_NEVER)
        return false;
    bool path_changed = false;
    if (at > run->now)
        run->now = at;
    while (run->link.events && run->link.heap[0]->at <= run->now)
        handle(run, pop(&run->link));
    if (run->ack_due <= run->now)
        send_ack(run);
    if (run->link.shape->mixed && !random_below(&run->link.seed, 4000)) {
        dp_recovery_new_path(&run->recovery);
        run->path_from = run->recovery.next;
    }
    path_changed = run->path_from > 0;
    on_timer(run, path_changed);
    return true;
}

static void run_begin(struct run *run, const struct shape *shape, uint64_t wanted, uint64_t seed) {
    *run = (struct run){.link = {.shape = shape, .seed = seed},
                        .wanted = wanted,
                        .ack_due = DP_NEVER,
                        .pool = dp_pool_new()};
    size_t most = 2 * wanted + 1000;
    run->fate = calloc(most, 1);
    run->flags = calloc(most, 1);
    run->arrived = calloc(most, 1);
    run->bytes = calloc(most, sizeof *run->bytes);
    CHECK(run->fate && run->flags && run->arrived && run->bytes);
    CHECK(dp_recovery_init(&run->recovery, run->pool, 0, DATAGRAM, MAX_DELAY));
}

static void run_end(struct run *run) {
    while (run->link.events)
        free(pop(&run->link));
    free(run->link.heap);
    free(run->fate);
    free(run->flags);
    free(run->arrived);
    free(run->bytes);
    dp_ranges_free(&run->received, run->pool);
    dp_recovery_free(&run->recovery);
    EXPECT(dp_pool_out(run->pool), 0);
    dp_pool_free(run->pool);
}

/* Until all is sent and every packet has its fate. The last may be ACKs alone, which nobody
 * acknowledges for their own sake: a PING then brings that about. */
static void run_whole(struct run *run) {
    int64_t pace_at = 0;
    while (run->recovery.next < run->wanted ||
           dp_recovery_lowest(&run->recovery) < run->recovery.next) {
        pace_at = send_all(run);
        if (run->link.shape->model)
            check_model(run);
        if (!advance(run, pace_at))
            transmit(run, PLAIN);
        if (run->link.shape->model)
            check_model(run);
    }
    EXPECT(run->acked + run->lost, run->recovery.next);
    EXPECT(run->recovery.in_flight, 0);
}

static void random_traffic(uint64_t packets, uint64_t seed) {
    static const struct shape shapes[] = {
        {10 * MS, 0.00125, 50000, 0, 0, 0, false, true},
        {10 * MS, 0.0125, 100000, 20, 10, 10, true, true},
        {MS / 5, 0.125, 50000, 50, 50, 30, true, true},
        {50 * MS, 0, 0, 10, 0, 0, true, true},
        {5 * MS, 0.0125, 30000, 300, 100, 100, true, true},
    };
    enum { COUNT = sizeof shapes / sizeof *shapes };
    for (uint32_t i = 0; i < COUNT; i++) {
        struct run run;
        run_begin(&run, &shapes[i], packets / COUNT, seed + i);
        run_whole(&run);
        CHECK(run.acked > run.lost);
        printf("%lu packets in %.1f s: %lu lost\n", run.recovery.next, (double)run.now / 1e9,
               run.lost);
        run_end(&run);
    }
}

/* The share of the bottleneck that is filled in `duration`. */
static double utilisation(const struct shape *shape, int64_t duration, uint64_t seed) {
    struct run run;
    run_begin(&run, shape, 1000000, seed);
    while (run.now < duration)
        CHECK(advance(&run, send_all(&run)));
    double share = (double)run.arrived_bytes / ((double)run.now * shape->bytes_ns);
    run_end(&run);
    return share;
}

/* 10 Mbit/s and a round trip of 20 ms: 25,000 bytes are on their way, and as many may wait. */
static void throughput(uint64_t seed) {
    static const struct shape clean = {10 * MS, 0.00125, 25000, 0, 0, 0, false, false};
    static const struct shape lossy = {10 * MS, 0.00125, 25000, 10, 0, 0, false, false};
    double share = utilisation(&clean, 20000 * MS, seed);
    printf("10 Mbit/s, 20 ms: %.0f%% filled without loss\n", share * 100);
    if (share < 0.7)
        fail("expected at least 70%% of the link, got %.1f%%", share * 100);
    /* At this loss NewReno's own bound is about 1.22 * 1200 bytes / (20 ms * sqrt(0.01)): 59%. */
    share = utilisation(&lossy, 20000 * MS, seed);
    printf("10 Mbit/s, 20 ms: %.0f%% filled at 1%% loss\n", share * 100);
    if (share < 0.35)
        fail("expected at least 35%% of the link at 1%% loss, got %.1f%%", share * 100);
}

int main(int argc, char **argv) {
    uint64_t packets = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    round_trip_times();
    what_is_no_sample();
    packet_threshold();
    spurious_loss_in_the_ring();
    time_threshold();
    probe_time_outs();
    windows();
    unused_window_stays();
    persistent_congestion();
    pacing();
    ring_of_packets();
    old_ranges_are_not_walked();
    another_path();
    random_traffic(packets, seed);
    throughput(seed);
    return 0;
}
