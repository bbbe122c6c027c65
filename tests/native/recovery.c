/* Round-trip times, losses, probes and what is kept of sent packets, on a fake clock: each rule
 * with numbers that are worked out beside it. */
#include "recovery_bed.h"

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

int main(void) {
    round_trip_times();
    what_is_no_sample();
    packet_threshold();
    spurious_loss_in_the_ring();
    time_threshold();
    probe_time_outs();
    ring_of_packets();
    old_ranges_are_not_walked();
    another_path();
    printf("recovery: each rule\n");
    return 0;
}
