/* The packet pump: what is told of connections and in which order, where packets are routed, and
 * the thread with its sockets. The raw front and the load generator are stand-ins.
 *
 * Arguments: how much, seed. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "pair.h"
#include "pump/inside.h"
#include "pump/load.h"
#include "pump/loop.h"
#include "pump/socket.h"

#define WEAK __attribute__((weak))

/* Stand-ins ------------------------------------------------------------------------------------ */

static int runtime_fd = -1;
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
WEAK int dp_raw_fd(const struct dp_pump *pump) {
    (void)pump;
    return runtime_fd;
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

/* The kernel's, or one whose devices cannot split messages. */
static bool kernel_splits = true;

static bool asks_to_split(struct msghdr *message) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c))
        if (c->cmsg_level == 17)
            return true;
    return false;
}

int sendmmsg(int fd, struct mmsghdr *messages, unsigned int count, int flags) {
    unsigned int n = 0;
    while (n < count && (kernel_splits || !asks_to_split(&messages[n].msg_hdr)))
        n++;
    if (n)
        return (int)syscall(SYS_sendmmsg, fd, messages, n, flags);
    errno = EIO;
    return -1;
}

/* Routes against a plain array ------------------------------------------------------------------
 */

#define CIDS 600

static void make_cid(uint32_t number, uint8_t cid[20], uint32_t *bytes) {
    uint64_t seed = number * 31;
    *bytes = number % 21; /* of one byte and of none there are few */
    for (uint32_t i = 0; i < *bytes; i++)
        cid[i] = (uint8_t)random_next(&seed);
}

static void check_routes(uint32_t rounds, uint64_t seed) {
    static uint64_t leads[CIDS];
    uint8_t cid[20];
    uint32_t bytes, live = 0;
    memset(leads, 0, sizeof leads);
    struct dp_routes *routes = dp_routes_new();
    CHECK(routes);
    for (uint32_t i = 0; i < rounds; i++) {
        /* It fills and empties by turns, so that it is full of chains that were cut. */
        bool fills = i / 1000 % 2 == 0;
        uint32_t which = random_below(&seed, CIDS);
        if (which % 21 <= 1 && which >= 21)
            continue; /* the same connection ID as another */
        uint64_t to = random_below(&seed, 4) < (fills ? 3 : 1) ? 1 + random_below(&seed, 9) : 0;
        make_cid(which, cid, &bytes);
        CHECK(dp_routes_set(routes, cid, bytes, to));
        live += (to != 0) - (leads[which] != 0);
        leads[which] = to;
        if (random_below(&seed, 500) == 0) {
            uint64_t gone = 1 + random_below(&seed, 9);
            dp_routes_drop(routes, gone);
            for (uint32_t j = 0; j < CIDS; j++)
                if (leads[j] == gone) {
                    leads[j] = 0;
                    live--;
                }
        }
        if (dp_routes_count(routes) != live)
            fail("%u routes, and %u were set", dp_routes_count(routes), live);
        for (uint32_t j = i % 8; j < CIDS; j += 8) {
            if (j % 21 <= 1 && j >= 21)
                continue;
            make_cid(j, cid, &bytes);
            if (dp_routes_find(routes, cid, bytes) != leads[j])
                fail("round %u: connection ID %u leads to %lu and not to %lu", i, j,
                     dp_routes_find(routes, cid, bytes), leads[j]);
        }
    }
    CHECK(!dp_routes_set(routes, cid, 21, 1) && dp_routes_find(routes, cid, 21) == 0);
    dp_routes_free(routes);
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

static uint8_t byte_at(int from, uint32_t conn, uint64_t id, uint64_t offset) {
    uint64_t z = (id * 2 + (uint64_t)from) * 0x9E3779B97F4A7C15ULL +
                 (offset + conn * 77) * 0xBF58476D1CE4E5B9ULL;
    return (uint8_t)(z >> 31);
}

static uint32_t size_of(int from, uint32_t conn, uint64_t id) {
    uint64_t seed = id * 131 + conn * 7 + (uint64_t)from;
    uint32_t kind = random_below(&seed, 10);
    return kind == 0 ? 0 : kind < 8 ? random_below(&seed, 1500) : random_below(&seed, 60000);
}

static enum fate fate_of(uint32_t conn, uint64_t id) {
    uint64_t seed = id * 17 + conn;
    uint32_t kind = random_below(&seed, 12);
    return kind == 0 ? RESET_EARLY : kind == 1 ? STOPPED_EARLY : WHOLE;
}

static void cid_of(int side, uint32_t conn, uint8_t cid[8]) {
    memset(cid, side ? 0x5e : 0xc1, 8);
    memcpy(cid, &conn, sizeof conn);
}

static void connect_pair(uint32_t conn, const struct dp_path *client_path,
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

static void open_world(uint64_t seed) {
    struct flying *flying = world.flying ? world.flying : malloc(FLYING * sizeof *flying);
    memset(&world, 0, sizeof world);
    world.flying = flying;
    world.seed = seed;
    world.now = 1000 * MS;
    for (int side = 0; side < 2; side++)
        CHECK((world.pump[side] = dp_pump_new()));
}

static void close_world(void) {
    for (int side = 0; side < 2; side++)
        dp_pump_free(world.pump[side]);
}

/* What is sent on a stream by one side: all at once, or in pieces. */
static void send_all(int side, uint32_t conn, uint64_t id) {
    static _Thread_local uint8_t bytes[65536];
    uint32_t size = size_of(side, conn, id);
    for (uint32_t i = 0; i < size; i++)
        bytes[i] = byte_at(side, conn, id, i);
    uint32_t half = size / 2;
    CHECK(dp_pump_send(world.pump[side], world.handle[side][conn], id, bytes, half, 0) == 0);
    CHECK(dp_pump_send(world.pump[side], world.handle[side][conn], id, bytes + half, size - half,
                       1) == 0);
}

static void open_stream(uint32_t conn) {
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

static void hear_data(int side, uint32_t conn, const struct dp_pump_event *event,
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

static void hear(int side, uint32_t conn, const struct dp_pump_event *event, const uint8_t *bytes) {
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
static uint32_t take(int side, uint32_t room) {
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

/* Sans-IO ---------------------------------------------------------------------------------------
 */

static void fly(void *self, struct dp_entry *entry, const uint8_t *datagram, size_t size,
                const struct dp_path *path) {
    (void)entry, (void)path;
    int from = self == &world.pump[SERVER];
    if (random_below(&world.seed, 1000) < world.lost)
        return;
    CHECK(world.count < FLYING);
    struct flying *one = &world.flying[(world.first + world.count++) % FLYING];
    one->to = !from;
    one->size = (uint32_t)size;
    memcpy(one->data, datagram, size);
}

static void deliver(struct flying *one) {
    static const struct dp_path path = {.family = 2};
    struct dp_entry *entry = dp_pump_route_of(world.pump[one->to], one->data + 1, 8);
    if (entry)
        dp_pump_deliver(world.pump[one->to], entry, one->data, one->size, &path, world.now + 5);
}

/* No entry is due before the pump says so. */
static void check_timers(int side) {
    struct dp_pump *pump = world.pump[side];
    int64_t due = dp_pump_next_timer(pump);
    for (uint32_t i = 0; i < pump->handle_room; i++) {
        const struct dp_entry *entry = pump->by_handle[i];
        if (!entry || entry->touched)
            continue;
        if (dp_conn_timer(entry->conn) < due)
            fail("connection %lu is due at %ld, but the pump looks at %ld", entry->handle,
                 dp_conn_timer(entry->conn), due);
        if (entry->timer_slot)
            CHECK(pump->timers[entry->timer_slot - 1] == entry);
    }
}

/* A pass of both pumps; the clock moves on when nothing flies. */
static void pass_both(void) {
    for (int side = 0; side < 2; side++) {
        struct dp_pump *pump = world.pump[side];
        pump->now = world.now;
        dp_pump_run_timers(pump);
        dp_pump_build_all(pump, fly, &world.pump[side]);
        CHECK(!pump->touched);
        check_timers(side);
    }
    if (!world.count) {
        int64_t due = INT64_MAX;
        for (int side = 0; side < 2; side++)
            if (dp_pump_next_timer(world.pump[side]) < due)
                due = dp_pump_next_timer(world.pump[side]);
        if (due != INT64_MAX && due > world.now)
            world.now = due;
        return;
    }
    for (uint32_t n = world.count; n; n--) {
        deliver(&world.flying[world.first]);
        world.first = (world.first + 1) % FLYING;
        world.count--;
    }
    world.now += MS / 10;
}

static uint32_t opened_in_all(void) {
    uint32_t all = 0;
    for (uint32_t conn = 0; conn < CONNS; conn++)
        all += world.opened[conn];
    return all;
}

static void check_heard(uint32_t conn) {
    for (uint64_t id = 0; id < STREAMS * 4; id++) {
        const struct heard *server = &world.heard[SERVER][conn][id];
        const struct heard *client = &world.heard[CLIENT][conn][id];
        if (!client->closed || fate_of(conn, id) != WHOLE)
            continue;
        if (!server->fin || !server->closed || server->reset)
            fail("of stream %lu of %u the server heard %u bytes, end %d, reset %d, closed %d", id,
                 conn, server->bytes, server->fin, server->reset, server->closed);
        CHECK((id & DP_STREAM_IS_UNI) || (client->fin && !client->reset));
    }
}

static void exchange(uint32_t streams, uint32_t lost, uint64_t seed) {
    open_world(seed);
    world.lost = lost;
    for (uint32_t conn = 0; conn < CONNS; conn++)
        connect_pair(conn, NULL, NULL, world.now);
    const uint8_t done = 0x1e;
    CHECK(dp_pump_control(world.pump[SERVER], world.handle[SERVER][3], &done, 1, 9, 1, NULL) == 0);
    uint32_t begun = 0;
    for (uint32_t round = 0; begun < streams || world.closed[0] < begun || world.closed[1] < begun;
         round++) {
        if (round > 100000)
            fail("%u streams were opened, %u and %u closed", begun, world.closed[0],
                 world.closed[1]);
        for (uint32_t n = random_below(&world.seed, 30); n && begun < streams; n--, begun++) {
            uint32_t conn = random_below(&world.seed, CONNS);
            if (world.opened[conn] < STREAMS)
                open_stream(conn);
        }
        pass_both();
        for (int side = 0; side < 2; side++)
            while (random_below(&world.seed, 3) && take(side, 64 + random_below(&world.seed, 9000)))
                continue;
        begun = opened_in_all();
    }
    CHECK(world.answers && (lost || world.delivered[SERVER] == 1));
    CHECK(world.controls[CLIENT] >= 1 && !world.failures[0] && !world.failures[1]);
    for (uint32_t conn = 0; conn < CONNS; conn++)
        check_heard(conn);
    close_world();
}

/* What happens to one stream between two takes is told in order, each thing once. */
static void check_order(bool closed, uint64_t seed) {
    open_world(seed);
    connect_pair(0, NULL, NULL, world.now);
    uint64_t client = world.handle[CLIENT][0];
    uint64_t id = 0;
    while (fate_of(0, id) != WHOLE || size_of(CLIENT, 0, id) < 100 || size_of(CLIENT, 0, id) > 1500)
        id += 4;
    for (uint64_t i = 0; i <= id; i += 4)
        CHECK(dp_pump_open(world.pump[CLIENT], client, 0) == (int64_t)i);
    uint8_t bytes[1500];
    uint32_t size = size_of(CLIENT, 0, id);
    for (uint32_t i = 0; i < size; i++)
        bytes[i] = byte_at(CLIENT, 0, id, i);
    CHECK(dp_pump_send(world.pump[CLIENT], client, id, bytes, 60, 0) == 0);
    for (int i = 0; i < 8; i++)
        pass_both();
    struct heard *heard = &world.heard[SERVER][0][id];
    if (closed) {
        while (take(SERVER, 4096))
            continue;
        CHECK(heard->bytes == 60 && !heard->fin);
        CHECK(dp_pump_send(world.pump[CLIENT], client, id, bytes + 60, size - 60, 1) == 0);
        for (int i = 0; i < 8; i++)
            pass_both();
        /* Room for an event and eight bytes: the rest is told in pieces, its end once. */
        while (take(SERVER, 56))
            continue;
        CHECK(heard->bytes == size && heard->fin && !heard->closed);
    } else {
        dp_pump_reset(world.pump[CLIENT], client, id, 77);
    }
    for (int i = 0; i < 8; i++)
        pass_both();
    while (take(SERVER, 4096) || take(CLIENT, 4096))
        for (int i = 0; i < 8; i++)
            pass_both();
    CHECK(heard->closed && heard->reset == !closed);
    CHECK(closed || heard->bytes == 60 || heard->bytes == 0);
    close_world();
}

/* Bounds and forgetting -------------------------------------------------------------------------
 */

/* A peer that floods the control plane is cut off, and what it had said before is told. */
static void check_control_flood(uint64_t seed) {
    static const uint8_t challenge[9] = {0x1a, 1, 2, 3, 4, 5, 6, 7, 8};
    open_world(seed);
    connect_pair(0, NULL, NULL, world.now);
    for (uint32_t i = 0; i < 400; i++) {
        CHECK(dp_pump_control(world.pump[CLIENT], world.handle[CLIENT][0], challenge, 9, i, 1,
                              NULL) == 0);
        pass_both();
        pass_both();
    }
    while (take(SERVER, 4096))
        continue;
    CHECK(world.controls[SERVER] == 256);
    CHECK(world.failures[SERVER] == 1 && world.failed_code == DP_INTERNAL_ERROR);
    static const uint8_t close_frame[] = {0x1c, 1, 0, 0};
    dp_pump_close(world.pump[SERVER], world.handle[SERVER][0], close_frame, sizeof close_frame);
    for (int i = 0; i < 20; i++)
        pass_both();
    while (take(CLIENT, 4096))
        continue;
    CHECK(world.controls[CLIENT] >= 1); /* the close */
    close_world();
}

/* Datagrams are dropped beyond a bound, and do not crowd out what connections tell. */
static void check_datagram_bound(uint64_t seed) {
    static uint8_t datagram[DP_UDP_DATAGRAM];
    static uint8_t buffer[1 << 23];
    const struct dp_path path = {.family = 2};
    open_world(seed);
    struct dp_pump *pump = world.pump[SERVER];
    size_t before = dp_pool_out(pump->pool);
    for (uint32_t size = 9, round = 0; round < 2; size = DP_UDP_DATAGRAM, round++) {
        uint32_t kept = 0;
        for (uint32_t i = 0; i < 3000; i++)
            kept += dp_events_datagram(pump, 3, datagram, size, &path, 17);
        CHECK(kept == (round ? (2u << 20) / (DP_UDP_DATAGRAM + sizeof path) : 1024));
        connect_pair(0, NULL, NULL, world.now);
        dp_events_push(pump, DP_EVENT_DELIVERED, 1, world.handle[SERVER][0], 0, 0, NULL, 0);
        uint32_t taken = dp_pump_take(pump, buffer, 8192), kinds = 0;
        for (uint32_t at = 0; at < taken;) {
            struct dp_pump_event event;
            memcpy(&event, buffer + at, sizeof event);
            kinds |= 1u << event.kind;
            CHECK(event.kind != DP_EVENT_DATAGRAM ||
                  (event.number == 3 && event.at_ns == 17 && event.size == size + sizeof path));
            at += (uint32_t)sizeof event + ((event.size + 7) & ~7u);
        }
        CHECK(kinds == (1u << DP_EVENT_DATAGRAM | 1u << DP_EVENT_DELIVERED));
        dp_pump_forget(pump, world.handle[SERVER][0]);
        while (dp_pump_take(pump, buffer, sizeof buffer))
            continue;
        CHECK(!dp_events_waiting(pump->events));
        if (dp_pool_out(pump->pool) != before)
            fail("%zu bytes are out, and %zu were before", dp_pool_out(pump->pool), before);
    }
    close_world();
}

/* What is left untold of a connection goes with it, however much that is, and nothing else. */
static void check_forget(uint32_t rounds, uint64_t seed) {
    for (uint32_t i = 0; i < rounds; i++) {
        open_world(seed + i);
        size_t before[2];
        for (int side = 0; side < 2; side++)
            before[side] = dp_pool_out(world.pump[side]->pool);
        for (uint32_t conn = 0; conn < CONNS; conn++)
            connect_pair(conn, NULL, NULL, world.now);
        for (uint32_t n = 0; n < 100; n++)
            open_stream(random_below(&world.seed, CONNS));
        for (uint32_t n = random_below(&world.seed, 8); n; n--)
            pass_both();
        take(SERVER, 1000 + random_below(&world.seed, 50000));
        take(CLIENT, 4096);
        uint32_t kept = random_below(&world.seed, CONNS);
        for (uint32_t conn = 0; conn < CONNS; conn++)
            for (int side = 0; side < 2; side++) {
                if (conn == kept)
                    continue;
                if (random_below(&world.seed, 3) == 0)
                    dp_pump_close(world.pump[side], world.handle[side][conn], NULL, 0);
                dp_pump_forget(world.pump[side], world.handle[side][conn]);
                uint8_t cid[8];
                cid_of(side, conn, cid);
                CHECK(!dp_pump_route_of(world.pump[side], cid, 8));
                CHECK(!dp_pump_entry(world.pump[side], world.handle[side][conn]));
            }
        /* The one that stays goes on to its end. */
        for (uint32_t n = 0; n < 500; n++) {
            pass_both();
            for (int side = 0; side < 2; side++)
                while (take(side, 100000))
                    continue;
        }
        check_heard(kept);
        for (uint64_t id = 0; id < STREAMS * 4; id += 4)
            if (id / 4 < world.opened[kept] && world.heard[SERVER][kept][id].bytes)
                CHECK(world.heard[SERVER][kept][id].closed);
        for (int side = 0; side < 2; side++) {
            dp_pump_forget(world.pump[side], world.handle[side][kept]);
            dp_pump_forget(world.pump[side], world.handle[side][kept]);
            CHECK(dp_routes_count(world.pump[side]->routes) == 0);
            if (dp_pool_out(world.pump[side]->pool) != before[side])
                fail("%zu bytes are out, and %zu were before", dp_pool_out(world.pump[side]->pool),
                     before[side]);
        }
        close_world();
    }
}

/* Sockets ---------------------------------------------------------------------------------------
 */

static int udp_socket(int family, struct dp_path *at) {
    int fd = socket(family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    int room = 4 << 20;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    memset(at, 0, sizeof *at);
    at->family = (uint16_t)family;
    if (family == AF_INET6) {
        struct sockaddr_in6 to = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
        socklen_t size = sizeof to;
        if (bind(fd, (struct sockaddr *)&to, sizeof to) < 0) {
            close(fd);
            return -1; /* a host without it */
        }
        CHECK(getsockname(fd, (struct sockaddr *)&to, &size) == 0);
        at->peer_port = to.sin6_port;
        memcpy(at->peer, &to.sin6_addr, 16);
        return fd;
    }
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof to;
    CHECK(bind(fd, (struct sockaddr *)&to, sizeof to) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&to, &size) == 0);
    at->peer_port = to.sin_port;
    memcpy(at->peer, &to.sin_addr, 4);
    return fd;
}

/* What is queued arrives, in order, datagram by datagram, whether the kernel splits or not. */
static void check_socket(int family, bool splits, uint64_t seed) {
    enum { N = 200 };
    static uint8_t data[N][DP_UDP_DATAGRAM];
    static uint32_t sizes[N];
    struct dp_path to, from;
    int in = udp_socket(family, &to), out = udp_socket(family, &from);
    if (in < 0 || out < 0)
        return;
    CHECK(dp_socket_prepare(in) == 0);
    kernel_splits = splits;
    struct dp_sender *sender = dp_sender_new(out);
    struct dp_receiver *receiver = dp_receiver_new();
    CHECK(sender && receiver);
    CHECK(!dp_sender_add(sender, data[0], 0, &to));
    CHECK(!dp_sender_add(sender, data[0], DP_UDP_DATAGRAM + 1, &to));
    for (uint32_t i = 0; i < N; i++) {
        sizes[i] = random_below(&seed, 8) ? 1200 : 1 + random_below(&seed, DP_UDP_DATAGRAM);
        for (uint32_t j = 0; j < sizes[i]; j++)
            data[i][j] = (uint8_t)random_next(&seed);
        CHECK(dp_sender_add(sender, data[i], sizes[i], &to));
    }
    dp_sender_flush(sender);
    struct dp_sender_stats stats = dp_sender_stats(sender);
    CHECK(stats.sent == N && stats.dropped == 0);
    if (splits ? stats.messages >= N / 2 : stats.messages != N)
        fail("%u datagrams went in %lu messages", N, stats.messages);
    kernel_splits = true;
    uint32_t got = 0;
    for (int64_t until = monotonic_ns() + 5000 * MS; got < N && monotonic_ns() < until;) {
        int n = dp_receiver_take(receiver, in);
        CHECK(n >= 0);
        for (int i = 0; i < n; i++) {
            struct dp_received message = dp_receiver_message(receiver, i);
            CHECK(message.at_ns && message.path.peer_port == from.peer_port);
            CHECK(memcmp(message.path.local, to.peer, 16) == 0);
            for (size_t at = 0; at < message.size; at += message.segment, got++) {
                size_t left = message.size - at;
                CHECK((left < message.segment ? left : message.segment) == sizes[got]);
                CHECK(memcmp(message.data + at, data[got], sizes[got]) == 0);
            }
        }
    }
    CHECK(got == N);
    dp_sender_free(sender);
    dp_receiver_free(receiver);
    close(in);
    close(out);
}

/* The thread ------------------------------------------------------------------------------------
 */

static struct {
    int fd[2];
    uint32_t streams, done;
} live;

/* What a side's interpreter does: wait, take, act, flush. */
static void *interpret(void *argument) {
    int side = *(int *)argument;
    struct dp_pump *pump = world.pump[side];
    uint32_t begun = 0;
    int64_t until = monotonic_ns() + 60000 * MS;
    while (!__atomic_load_n(&live.done, __ATOMIC_ACQUIRE)) {
        if (side == CLIENT) {
            for (; begun < live.streams && begun - world.closed[CLIENT] < 64; begun++)
                open_stream(begun % CONNS);
            dp_pump_flush(pump);
            if (world.closed[CLIENT] == live.streams)
                break;
        }
        struct pollfd waiting = {.fd = dp_pump_fd(pump), .events = POLLIN};
        if (poll(&waiting, 1, 200) > 0)
            while (take(side, 65536))
                continue;
        dp_pump_flush(pump);
        if (monotonic_ns() > until)
            fail("%u of %u streams are over", world.closed[CLIENT], live.streams);
    }
    __atomic_store_n(&live.done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void start_live(int client_busy, int server_busy) {
    struct dp_path at[2];
    for (int side = 0; side < 2; side++) {
        live.fd[side] = udp_socket(AF_INET, &at[side]);
        CHECK(dp_pump_listen(world.pump[side], live.fd[side]) == 0);
        memcpy(at[side].local, at[side].peer, 4); /* both ends are on one host */
    }
    for (uint32_t conn = 0; conn < CONNS; conn++)
        connect_pair(conn, &at[SERVER], &at[CLIENT], monotonic_ns());
    for (int side = 0; side < 2; side++) {
        CHECK(dp_pump_start(world.pump[side], side ? server_busy : client_busy) == 0);
        CHECK(dp_pump_thread(world.pump[side]) > 0);
    }
}

static void stop_live(void) {
    for (int side = 0; side < 2; side++) {
        int64_t start = monotonic_ns();
        dp_pump_halt(world.pump[side]);
        CHECK(monotonic_ns() - start < LOST_MS * MS);
    }
    close_world();
    close(live.fd[0]);
    close(live.fd[1]);
}

static void check_live(uint32_t streams, int busy, uint64_t seed) {
    open_world(seed);
    live.streams = streams;
    live.done = 0;
    start_live(busy, busy);
    pthread_t thread[2];
    int sides[2] = {0, 1};
    for (int side = 0; side < 2; side++)
        CHECK(pthread_create(&thread[side], NULL, interpret, &sides[side]) == 0);
    for (int side = 0; side < 2; side++)
        pthread_join(thread[side], NULL);
    struct dp_loop_stats stats = dp_pump_loop_stats(world.pump[SERVER]);
    CHECK(stats.passes && stats.datagrams_in && stats.datagrams_out && stats.cpu_ns > 0);
    CHECK(!stats.dropped_in);
    CHECK(world.closed[CLIENT] == streams && !world.failures[0] && !world.failures[1]);
    printf("thread%s: %u streams, %lu datagrams in %lu batches, %lu joined, %lu passes\n",
           busy ? ", busy" : "", streams, stats.datagrams_in, stats.batches_in, stats.coalesced,
           stats.passes);
    stop_live();
}

/* A datagram of no connection is Python's, with its socket's number; what Python queues goes out;
 * so does what a timer makes due while the thread sleeps. */
static void check_strangers(uint64_t seed) {
    open_world(seed);
    start_live(0, 0);
    struct dp_path at, server = {0};
    int stranger = udp_socket(AF_INET, &at);
    struct sockaddr_in to;
    socklen_t size = sizeof to;
    CHECK(getsockname(live.fd[SERVER], (struct sockaddr *)&to, &size) == 0);
    static const uint8_t hello[] = "\xc3 a long header and what comes behind it";
    CHECK(sendto(stranger, hello, sizeof hello, 0, (struct sockaddr *)&to, sizeof to) > 0);
    struct pollfd waiting = {.fd = dp_pump_fd(world.pump[SERVER]), .events = POLLIN};
    CHECK(poll(&waiting, 1, LOST_MS) == 1);
    uint8_t buffer[4096];
    uint32_t taken = dp_pump_take(world.pump[SERVER], buffer, sizeof buffer);
    struct dp_pump_event event;
    CHECK(taken > sizeof event);
    memcpy(&event, buffer, sizeof event);
    CHECK(event.kind == DP_EVENT_DATAGRAM && event.number == 0 && event.connection == 0);
    memcpy(&server, buffer + sizeof event, sizeof server);
    CHECK(event.size == sizeof server + sizeof hello);
    CHECK(memcmp(buffer + sizeof event + sizeof server, hello, sizeof hello) == 0);
    CHECK(server.peer_port == at.peer_port);
    CHECK(poll(&waiting, 1, 0) == 0); /* all was taken */
    CHECK(dp_pump_queue(world.pump[SERVER], 1, hello, 5, (const uint8_t *)&server) == -1);
    CHECK(dp_pump_queue(world.pump[SERVER], 0, hello, 5, (const uint8_t *)&server) == 0);
    dp_pump_flush(world.pump[SERVER]);
    waiting.fd = stranger;
    CHECK(poll(&waiting, 1, LOST_MS) == 1);
    CHECK(recv(stranger, buffer, sizeof buffer, 0) == 5 && memcmp(buffer, hello, 5) == 0);
    /* Nobody acknowledges: the probe time-out has to fire in a thread that slept for good. */
    dp_pump_halt(world.pump[CLIENT]);
    int64_t id = dp_pump_open(world.pump[SERVER], world.handle[SERVER][0], 1);
    CHECK(dp_pump_send(world.pump[SERVER], world.handle[SERVER][0], (uint64_t)id, hello, 5, 1) ==
          0);
    dp_pump_flush(world.pump[SERVER]);
    uint64_t before = dp_pump_loop_stats(world.pump[SERVER]).datagrams_out;
    for (int64_t until = monotonic_ns() + LOST_MS * MS; monotonic_ns() < until; usleep(1000))
        if (dp_pump_loop_stats(world.pump[SERVER]).datagrams_out > before)
            break;
    CHECK(dp_pump_loop_stats(world.pump[SERVER]).datagrams_out > before);
    close(stranger);
    stop_live();
}

static void set_runtime_fd(int fd) {
    for (int side = 0; side < 2; side++)
        dp_pump_lock(world.pump[side]);
    if (runtime_fd >= 0)
        close(runtime_fd);
    runtime_fd = fd;
    for (int side = 0; side < 2; side++)
        dp_pump_unlock(world.pump[side]);
    for (int side = 0; side < 2; side++)
        dp_pump_flush(world.pump[side]);
}

/* The runtime's eventfd comes and goes, even under the same number, and wakes the thread. */
static void check_runtime_fd(uint64_t seed) {
    open_world(seed);
    start_live(0, 0);
    for (int i = 0; i < 5; i++) {
        set_runtime_fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
        usleep(2000); /* both sleep */
        uint32_t before = __atomic_load_n(&runtime_passes, __ATOMIC_RELAXED);
        uint64_t one = 1;
        CHECK(write(runtime_fd, &one, sizeof one) == sizeof one);
        int64_t until = monotonic_ns() + LOST_MS * MS;
        while (__atomic_load_n(&runtime_passes, __ATOMIC_RELAXED) == before)
            CHECK(monotonic_ns() < until);
        set_runtime_fd(-1);
    }
    stop_live();
    CHECK(runtime_wakes == runtime_sleeps);
}

/* However busy the thread is, a call of Python's gets in between two passes, and it between two
 * calls. */
static void check_fairness(uint32_t calls, uint64_t seed) {
    open_world(seed);
    runtime_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    busy_pump = world.pump[SERVER];
    start_live(0, 1); /* takes the lock in every round, since there is a runtime */
    dp_pump_flush(world.pump[SERVER]);
    uint64_t before = dp_pump_loop_stats(world.pump[SERVER]).passes;
    int64_t longest = 0, start = monotonic_ns();
    for (uint32_t i = 0; i < calls; i++) {
        int64_t from = monotonic_ns();
        dp_pump_ping(world.pump[SERVER], world.handle[SERVER][i % CONNS]);
        int64_t took = monotonic_ns() - from;
        longest = took > longest ? took : longest;
        CHECK(took < LOST_MS * MS);
        dp_pump_flush(world.pump[SERVER]);
    }
    int64_t each = (monotonic_ns() - start) / calls;
    uint64_t passes = dp_pump_loop_stats(world.pump[SERVER]).passes - before;
    printf(
        "fairness: %u calls, %ld us each with its flush, one at most %ld us; %lu passes beside\n",
        calls, each / 1000, longest / 1000, passes);
    CHECK(each < 20 * MS);
    CHECK(passes > 10);
    stop_live();
    busy_pump = NULL;
    close(runtime_fd);
    runtime_fd = -1;
}

int main(int argc, char **argv) {
    uint32_t amount = argument(argc, argv, 1, 100);
    uint64_t seed = argument(argc, argv, 2, 1);
    check_routes(amount * 50, seed);
    for (uint32_t i = 0; i < 1 + amount / 100; i++) {
        exchange(amount < STREAMS ? amount * 4 : 2000, 0, seed + i);
        exchange(amount < STREAMS ? amount * 4 : 2000, 50, seed + i);
    }
    check_order(true, seed);
    check_order(false, seed);
    check_control_flood(seed);
    check_datagram_bound(seed);
    check_forget(1 + amount / 10, seed);
    for (int i = 0; i < 4; i++)
        check_socket(i / 2 ? AF_INET6 : AF_INET, i % 2, seed);
    check_strangers(seed);
    check_runtime_fd(seed);
    check_live(amount * 4, 0, seed);
    check_live(amount * 4, 1, seed);
    check_fairness(amount * 40, seed);
    free(world.flying);
    printf("pump: all as it should be\n");
    return 0;
}
