/* Congestion control and pacing on a fake clock: each rule with numbers that are worked out beside
 * it. */
#include "recovery_bed.h"

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

int main(void) {
    windows();
    unused_window_stays();
    persistent_congestion();
    pacing();
    printf("congestion: each rule\n");
    return 0;
}
