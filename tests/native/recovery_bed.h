/* What the test programs of recovery share: ACK frames, and scripts of what is sent, acknowledged
 * and told, on a fake clock. */
#ifndef RECOVERY_BED_H
#define RECOVERY_BED_H

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
static inline size_t put_ack(uint8_t *bytes, const struct dp_range *range, uint32_t count) {
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
    CHECK(at - bytes <= ACK_BYTES_MAX);
    return (size_t)(at - bytes);
}

/* Scripts ---------------------------------------------------------------------------------------
 */

struct script {
    struct dp_pool *pool;
    struct dp_recovery recovery;
    char told[4096]; /* "a3 l4 ": packet 3 was acknowledged and 4 lost */
};

static inline void say(struct script *script, char what, uint64_t pn) {
    size_t length = strlen(script->told);
    snprintf(script->told + length, sizeof script->told - length, "%c%lu ", what, pn);
}

static inline void script_acked(void *self, uint64_t pn, const struct dp_sent *sent) {
    CHECK((sent->flags & (DP_SENT_DONE | DP_SENT_ACKED | DP_SENT_LOST)) ==
          (DP_SENT_DONE | DP_SENT_ACKED));
    CHECK(sent->first == pn * 7);
    say(self, 'a', pn);
}

static inline void script_lost(void *self, uint64_t pn, const struct dp_sent *sent) {
    CHECK((sent->flags & (DP_SENT_DONE | DP_SENT_ACKED | DP_SENT_LOST)) ==
          (DP_SENT_DONE | DP_SENT_LOST));
    CHECK(sent->first == pn * 7);
    say(self, 'l', pn);
}

static const struct dp_sent_owner script_owner = {script_acked, script_lost};

static inline void begin(struct script *script, uint32_t datagram) {
    memset(script, 0, sizeof *script);
    script->pool = dp_pool_new();
    CHECK(dp_recovery_init(&script->recovery, script->pool, 0, datagram, MAX_DELAY));
    script->recovery.window_limited = true;
}

static inline void end(struct script *script) {
    dp_recovery_free(&script->recovery);
    EXPECT(dp_pool_out(script->pool), 0);
    dp_pool_free(script->pool);
}

static inline void send_one(struct script *script, int64_t now, uint8_t flags) {
    CHECK(dp_recovery_sent(&script->recovery, now, script->recovery.datagram, flags,
                           script->recovery.next * 7, 1));
}

static inline void send_many(struct script *script, int64_t now, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        send_one(script, now, PLAIN);
}

static inline bool ack_ranges(struct script *script, int64_t now, int64_t delay,
                              const struct dp_range *range, uint32_t count) {
    uint8_t bytes[ACK_BYTES_MAX];
    struct dp_frame frame;
    size_t size = put_ack(bytes, range, count);
    CHECK(dp_frame_parse(bytes, bytes + size, &frame) == 0);
    return dp_recovery_ack(&script->recovery, &frame, delay, now, &script_owner, script);
}

/* Acknowledge [from, to). */
static inline void ack(struct script *script, int64_t now, int64_t delay, uint64_t from,
                       uint64_t to) {
    CHECK(ack_ranges(script, now, delay, &(struct dp_range){from, to}, 1));
}

static inline void expect_told(struct script *script, const char *wanted) {
    if (strcmp(script->told, wanted) != 0)
        fail("expected \"%s\", was told \"%s\"", wanted, script->told);
    script->told[0] = 0;
}

/* One packet there and back, so that the smoothed time is `rtt` and the variance half of it. */
static inline void first_sample(struct script *script, int64_t at, int64_t rtt) {
    uint64_t pn = script->recovery.next;
    script->recovery.window_limited = false;
    send_one(script, at, PLAIN);
    ack(script, at + rtt, 0, pn, pn + 1);
    script->recovery.window_limited = true;
    script->told[0] = 0;
}

#endif
