/* What the test programs of the packet pump share: two pumps with connections between them, and
 * what each side's Python is told. The raw front and the load generator are stand-ins. */
#ifndef PUMP_BED_H
#define PUMP_BED_H

#include "pair.h"
#include "pump/inside.h"
#include "pump/load.h"

#define WEAK __attribute__((weak))

/* Stand-ins ------------------------------------------------------------------------------------ */

static int runtime_fd = -1;
static uint32_t runtime_partition; /* of the two that there are, the one that has it */
static struct dp_pump *busy_pump;
static uint32_t runtime_passes, runtime_sleeps, runtime_wakes;

WEAK const struct dp_front_calls dp_front_raw;
WEAK const struct dp_front_calls dp_front_load;

WEAK void dp_raw_pass(struct dp_pump *pump) {
    __atomic_fetch_add(&runtime_passes, 1, __ATOMIC_RELAXED);
    if (pump != busy_pump)
        return;
    int64_t until = monotonic_ns() + MS / 10; /* far longer than between two passes */
    while (monotonic_ns() < until)
        dp_cpu_relax();
}
WEAK int64_t dp_raw_timer(const struct dp_pump *pump) {
    (void)pump;
    return INT64_MAX;
}
WEAK void dp_raw_on_timer(struct dp_pump *pump) {
    (void)pump;
}
WEAK uint32_t dp_raw_count(const struct dp_pump *pump) {
    (void)pump;
    return 2;
}
WEAK int dp_raw_fd(const struct dp_pump *pump, uint32_t partition) {
    (void)pump;
    return partition == runtime_partition ? runtime_fd : -1;
}
WEAK bool dp_raw_sleep(struct dp_pump *pump) {
    (void)pump;
    __atomic_fetch_add(&runtime_sleeps, 1, __ATOMIC_RELAXED);
    return true;
}
WEAK void dp_raw_wake(struct dp_pump *pump) {
    (void)pump;
    __atomic_fetch_add(&runtime_wakes, 1, __ATOMIC_RELAXED);
}
WEAK void dp_raw_free(struct dp_pump *pump) {
    (void)pump;
}
WEAK bool dp_load_join(struct dp_pump *pump, struct dp_entry *entry) {
    (void)pump, (void)entry;
    return false;
}
WEAK void dp_load_pass(struct dp_pump *pump) {
    (void)pump;
}
WEAK int64_t dp_load_timer(const struct dp_pump *pump) {
    (void)pump;
    return INT64_MAX;
}
WEAK void dp_load_free(struct dp_pump *pump) {
    (void)pump;
}

/* Two pumps -------------------------------------------------------------------------------------
 */

#define CLIENT  0
#define SERVER  1
#define CONNS   12
#define STREAMS 512 /* ids >> 2, of each kind */
#define FLYING  65536

enum fate { WHOLE, RESET_EARLY, STOPPED_EARLY, FATES };

/* What one side has heard of a stream. */
struct heard {
    uint32_t bytes;
    bool fin, reset, stopped, closed;
};

struct flying {
    int to;
    uint32_t size;
    uint8_t data[DP_UDP_DATAGRAM];
};

struct world {
    struct dp_pump *pump[2];
    uint64_t handle[2][CONNS];
    struct heard heard[2][CONNS][STREAMS * 4];
    uint32_t opened[CONNS], closed[2];
    uint64_t delivered[2], controls[2], failures[2], failed_code;
    int64_t now;
    uint64_t seed;
    uint32_t lost; /* in a thousand */
    struct flying *flying;
    uint32_t first, count;
    uint32_t answers;
};

static struct world world;

static inline uint8_t byte_at(int from, uint32_t conn, uint64_t id, uint64_t offset) {
    uint64_t z = (id * 2 + (uint64_t)from) * 0x9E3779B97F4A7C15ULL +
                 (offset + conn * 77) * 0xBF58476D1CE4E5B9ULL;
    return (uint8_t)(z >> 31);
}

static inline uint32_t size_of(int from, uint32_t conn, uint64_t id) {
    uint64_t seed = id * 131 + conn * 7 + (uint64_t)from;
    uint32_t kind = random_below(&seed, 10);
    return kind == 0 ? 0 : kind < 8 ? random_below(&seed, 1500) : random_below(&seed, 60000);
}

static inline enum fate fate_of(uint32_t conn, uint64_t id) {
    uint64_t seed = id * 17 + conn;
    uint32_t kind = random_below(&seed, 12);
    return kind == 0 ? RESET_EARLY : kind == 1 ? STOPPED_EARLY : WHOLE;
}

static inline void cid_of(int side, uint32_t conn, uint8_t cid[8]) {
    memset(cid, side ? 0x5e : 0xc1, 8);
    memcpy(cid, &conn, sizeof conn);
}

static inline void connect_pair(uint32_t conn, const struct dp_path *client_path,
                                const struct dp_path *server_path, int64_t now) {
    struct dp_hand_over from[2];
    uint8_t cid[8];
    hand_over_pair(&from[CLIENT], &from[SERVER], 0x1301);
    for (int side = 0; side < 2; side++) {
        cid_of(!side, conn, from[side].peer_cid);
        const struct dp_path *path = side == CLIENT ? client_path : server_path;
        if (path)
            from[side].path = *path;
        world.handle[side][conn] =
            dp_pump_adopt(world.pump[side], &from[side], DP_FRONT_EVENTS, 0, now);
        CHECK(world.handle[side][conn]);
        cid_of(side, conn, cid);
        CHECK(dp_pump_route(world.pump[side], cid, 8, world.handle[side][conn]) == 0);
    }
}

static inline void open_world(uint64_t seed) {
    struct flying *flying = world.flying ? world.flying : malloc(FLYING * sizeof *flying);
    memset(&world, 0, sizeof world);
    world.flying = flying;
    world.seed = seed;
    world.now = 1000 * MS;
    for (int side = 0; side < 2; side++)
        CHECK((world.pump[side] = dp_pump_new()));
}

static inline void close_world(void) {
    for (int side = 0; side < 2; side++)
        dp_pump_free(world.pump[side]);
}

/* What is sent on a stream by one side: all at once, or in pieces. */
static inline void send_all(int side, uint32_t conn, uint64_t id) {
    static _Thread_local uint8_t bytes[65536];
    uint32_t size = size_of(side, conn, id);
    for (uint32_t i = 0; i < size; i++)
        bytes[i] = byte_at(side, conn, id, i);
    uint32_t half = size / 2;
    CHECK(dp_pump_send(world.pump[side], world.handle[side][conn], id, bytes, half, 0) == 0);
    CHECK(dp_pump_send(world.pump[side], world.handle[side][conn], id, bytes + half, size - half,
                       1) == 0);
}

static inline void open_stream(uint32_t conn) {
    int uni = random_below(&world.seed, 3) == 0;
    int64_t id = dp_pump_open(world.pump[CLIENT], world.handle[CLIENT][conn], uni);
    CHECK(id >= 0 && id < STREAMS * 4);
    CHECK((id & 3) == (uni ? 2 : 0));
    world.opened[conn]++;
    send_all(CLIENT, conn, (uint64_t)id);
    if (fate_of(conn, (uint64_t)id) == RESET_EARLY)
        dp_pump_reset(world.pump[CLIENT], world.handle[CLIENT][conn], (uint64_t)id, 77);
}

/* Events ----------------------------------------------------------------------------------------
 */

static inline void hear_data(int side, uint32_t conn, const struct dp_pump_event *event,
                             const uint8_t *bytes) {
    struct heard *heard = &world.heard[side][conn][event->stream];
    if (heard->fin || heard->reset || heard->closed)
        fail("side %d hears data of stream %lu behind its end", side, event->stream);
    CHECK(event->size || event->flags);
    CHECK(event->at_ns);
    for (uint32_t i = 0; i < event->size; i++)
        if (bytes[i] != byte_at(!side, conn, event->stream, heard->bytes + i))
            fail("stream %lu differs at byte %u", event->stream, heard->bytes + i);
    heard->bytes += event->size;
    heard->fin = event->flags;
    if (heard->fin && heard->bytes != size_of(!side, conn, event->stream))
        fail("stream %lu ends behind %u bytes and not behind %u", event->stream, heard->bytes,
             size_of(!side, conn, event->stream));
    if (side == CLIENT)
        return;
    bool is_uni = event->stream & DP_STREAM_IS_UNI;
    if (fate_of(conn, event->stream) == STOPPED_EARLY && !heard->fin && !heard->stopped) {
        heard->stopped = true;
        dp_pump_stop(world.pump[SERVER], world.handle[SERVER][conn], event->stream, 5);
        if (!is_uni)
            dp_pump_reset(world.pump[SERVER], world.handle[SERVER][conn], event->stream, 6);
    } else if (heard->fin && !is_uni && !heard->stopped) {
        world.answers++;
        send_all(SERVER, conn, event->stream);
    }
}

static inline void hear(int side, uint32_t conn, const struct dp_pump_event *event,
                        const uint8_t *bytes) {
    struct heard *heard = &world.heard[side][conn][event->stream];
    switch (event->kind) {
    case DP_EVENT_DATA:
        hear_data(side, conn, event, bytes);
        break;
    case DP_EVENT_RESET:
        CHECK(!heard->reset && !heard->closed);
        if (event->number != (side == CLIENT ? 6 : heard->stopped ? 5 : 77))
            fail("side %d hears that stream %lu was broken off with %lu", side, event->stream,
                 event->number);
        heard->reset = true;
        if (side == SERVER && !(event->stream & DP_STREAM_IS_UNI) && !heard->fin && !heard->stopped)
            send_all(SERVER, conn, event->stream);
        break;
    case DP_EVENT_STOPPED:
        CHECK(!heard->closed && side == CLIENT && event->number == 5);
        heard->stopped = true;
        break;
    case DP_EVENT_CLOSED:
        CHECK(!heard->closed);
        heard->closed = true;
        world.closed[side]++;
        break;
    case DP_EVENT_DELIVERED:
        world.delivered[side] += event->flags;
        break;
    case DP_EVENT_CONTROL:
        CHECK(event->size > sizeof(struct dp_path) + 8);
        uint8_t cid[8];
        cid_of(side, conn, cid);
        CHECK(memcmp(bytes + sizeof(struct dp_path), cid, 8) == 0);
        world.controls[side]++;
        break;
    case DP_EVENT_FAILED:
        world.failures[side]++;
        world.failed_code = event->number;
        break;
    default:
        fail("an event of kind %u", event->kind);
    }
}

/* Take what fits `room` and look at it: how many events. */
static inline uint32_t take(int side, uint32_t room) {
    static _Thread_local uint8_t buffer[1 << 17];
    CHECK(room <= sizeof buffer);
    uint8_t *exact = malloc(room); /* so that a sanitizer sees a byte too far */
    uint32_t taken = dp_pump_take(world.pump[side], exact, room), count = 0;
    CHECK(taken <= room);
    memcpy(buffer, exact, taken);
    free(exact);
    for (uint32_t at = 0; at < taken; count++) {
        struct dp_pump_event event;
        memcpy(&event, buffer + at, sizeof event);
        CHECK(at + sizeof event + event.size <= taken);
        uint32_t conn = 0;
        while (conn < CONNS && world.handle[side][conn] != event.connection)
            conn++;
        CHECK(conn < CONNS);
        hear(side, conn, &event, buffer + at + sizeof event);
        at += (uint32_t)sizeof event + ((event.size + 7) & ~7u);
    }
    return count;
}

#endif
