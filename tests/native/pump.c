/* The packet pump without its thread: what is told of connections and in which order, and what is
 * kept of them.
 *
 * Arguments: how much, seed. */
#include "pump_bed.h"

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

/* A connection that tells much, and datagrams besides, keep another one waiting for a few events of
 * theirs; a take is short, and each connection's events come in their order. */
static void check_turns(uint64_t seed) {
    enum { MUCH = 5000, SHORT = 1000, SOON = 10 };
    static uint8_t datagram[100], buffer[DP_EVENT_TAKE];
    const struct dp_path path = {.family = 2};
    open_world(seed);
    struct dp_pump *pump = world.pump[SERVER];
    for (uint32_t conn = 0; conn < 2; conn++)
        connect_pair(conn, NULL, NULL, world.now);
    while (dp_pump_take(pump, buffer, sizeof buffer))
        continue;
    const uint64_t *handles = world.handle[SERVER];
    for (uint32_t i = 0; i < MUCH; i++)
        dp_events_push(pump, DP_EVENT_DELIVERED, 0, handles[0], 0, i, NULL, 0);
    dp_events_push(pump, DP_EVENT_DELIVERED, 0, handles[1], 0, 0, NULL, 0);
    for (int i = 0; i < 1000; i++)
        CHECK(dp_events_datagram(pump, 0, datagram, sizeof datagram, &path, 17));
    uint32_t taken, told = 0, datagrams = 0, count, before_other = MUCH;
    while ((taken = dp_pump_take(pump, buffer, sizeof buffer))) {
        bool untold = told < MUCH;
        count = 0;
        for (uint32_t at = 0; at < taken; count++) {
            struct dp_pump_event event;
            memcpy(&event, buffer + at, sizeof event);
            if (event.connection == handles[0])
                CHECK(event.number == told++);
            else if (event.connection == handles[1])
                before_other = told;
            else
                datagrams++;
            at += (uint32_t)sizeof event + ((event.size + 7) & ~7u);
        }
        CHECK(count < SHORT || !untold);
    }
    if (told != MUCH || datagrams != 1000 || before_other > SOON)
        fail("%u events and %u datagrams, and %u events before the other's", told, datagrams,
             before_other);
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

int main(int argc, char **argv) {
    uint32_t amount = argument(argc, argv, 1, 100);
    uint64_t seed = argument(argc, argv, 2, 1);
    for (uint32_t i = 0; i < 1 + amount / 100; i++) {
        exchange(amount < STREAMS ? amount * 4 : 2000, 0, seed + i);
        exchange(amount < STREAMS ? amount * 4 : 2000, 50, seed + i);
    }
    check_order(true, seed);
    check_order(false, seed);
    check_control_flood(seed);
    check_datagram_bound(seed);
    check_turns(seed);
    check_forget(1 + amount / 10, seed);
    free(world.flying);
    printf("pump: all as it should be\n");
    return 0;
}
