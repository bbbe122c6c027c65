/* Connection IDs, and where they lead: a hash table with open addressing.
 *
 * Its hash has a key of its own, so that nobody can choose connection IDs that fall together. What
 * is taken out leaves no mark: those behind it move up. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "inside.h"

#define CID_MAX    20
#define FIRST_ROOM 64

struct route {
    uint64_t to; /* 0: the place is free */
    uint32_t hash;
    uint8_t bytes;
    uint8_t cid[CID_MAX];
};

struct dp_routes {
    struct route *route;
    uint32_t room, count; /* room: a power of two */
    uint64_t key[3];
};

struct dp_routes *dp_routes_new(void) {
    struct dp_routes *routes = calloc(1, sizeof *routes);
    if (!routes)
        return NULL;
    routes->route = calloc(FIRST_ROOM, sizeof *routes->route);
    if (!routes->route ||
        getrandom(routes->key, sizeof routes->key, GRND_NONBLOCK) != sizeof routes->key) {
        dp_routes_free(routes);
        return NULL;
    }
    routes->room = FIRST_ROOM;
    return routes;
}

void dp_routes_free(struct dp_routes *routes) {
    if (routes)
        free(routes->route);
    free(routes);
}

uint32_t dp_routes_count(const struct dp_routes *routes) {
    return routes->count;
}

static uint64_t mix(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint32_t hash_of(const struct dp_routes *routes, const uint8_t *cid, uint32_t bytes) {
    uint64_t word[3] = {0};
    memcpy(word, cid, bytes);
    const uint64_t *key = routes->key;
    uint64_t hash = mix(word[0] ^ key[0], word[1] ^ key[1]);
    hash = mix(hash ^ word[2], key[2] ^ bytes);
    return (uint32_t)(hash ^ hash >> 32);
}

/* The place where the connection ID is, or would be. */
static struct route *place_of(const struct dp_routes *routes, uint32_t hash, const uint8_t *cid,
                              uint32_t bytes) {
    for (uint32_t at = hash;; at++) {
        struct route *route = &routes->route[at & (routes->room - 1)];
        if (!route->to ||
            (route->hash == hash && route->bytes == bytes && memcmp(route->cid, cid, bytes) == 0))
            return route;
    }
}

uint64_t dp_routes_find(const struct dp_routes *routes, const uint8_t *cid, uint32_t bytes) {
    if (bytes > CID_MAX)
        return 0;
    return place_of(routes, hash_of(routes, cid, bytes), cid, bytes)->to;
}

static bool grow(struct dp_routes *routes) {
    struct route *old = routes->route;
    uint32_t old_room = routes->room;
    struct route *bigger = calloc((size_t)old_room * 2, sizeof *bigger);
    if (!bigger)
        return false;
    routes->route = bigger;
    routes->room = old_room * 2;
    for (uint32_t i = 0; i < old_room; i++)
        if (old[i].to)
            *place_of(routes, old[i].hash, old[i].cid, old[i].bytes) = old[i];
    free(old);
    return true;
}

/* Free a place; a later one whose search would pass it moves there, and so on. */
static void take_out(struct dp_routes *routes, struct route *route) {
    uint32_t mask = routes->room - 1;
    uint32_t hole = (uint32_t)(route - routes->route), at = hole;
    for (;;) {
        at = (at + 1) & mask;
        const struct route *next = &routes->route[at];
        if (!next->to)
            break;
        if (((at - next->hash) & mask) >= ((at - hole) & mask)) {
            routes->route[hole] = *next;
            hole = at;
        }
    }
    routes->route[hole].to = 0;
    routes->count--;
}

bool dp_routes_set(struct dp_routes *routes, const uint8_t *cid, uint32_t bytes, uint64_t to) {
    if (bytes > CID_MAX)
        return false;
    uint32_t hash = hash_of(routes, cid, bytes);
    struct route *route = place_of(routes, hash, cid, bytes);
    if (!to) {
        if (route->to)
            take_out(routes, route);
        return true;
    }
    if (!route->to) {
        if ((routes->count + 1) * 4 > routes->room * 3) {
            if (!grow(routes))
                return false;
            route = place_of(routes, hash, cid, bytes);
        }
        routes->count++;
        *route = (struct route){.hash = hash, .bytes = (uint8_t)bytes};
        memcpy(route->cid, cid, bytes);
    }
    route->to = to;
    return true;
}

void dp_routes_drop(struct dp_routes *routes, uint64_t to) {
    for (uint32_t at = 0; at < routes->room;) {
        if (routes->route[at].to == to)
            take_out(routes, &routes->route[at]); /* another may have moved here: look again */
        else
            at++;
    }
}
