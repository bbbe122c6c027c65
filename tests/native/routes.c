/* Connection IDs and where they lead, against a plain array.
 *
 * Arguments: how much, seed. */
#include "harness.h"
#include "pump/inside.h"

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

int main(int argc, char **argv) {
    uint32_t rounds = argument(argc, argv, 1, 5000);
    check_routes(rounds, argument(argc, argv, 2, 1));
    printf("routes: %u rounds\n", rounds);
    return 0;
}
